//! Where constraints are computed: threads beside the engine's, so that the set of tokens that may
//! come next is found while the model computes their logits.
//!
//! ```text
//! engine    choose t ─► send (constraint, t) ─► .. pass over t .. ─► receive ─► choose among the set
//! mask-N                └► advance, find the set ─────────────────────►┘
//! ```
//!
//! A constraint is either with its sequence or under way, never both; a sequence that ends drops its
//! end of the channel, and what comes back is dropped with it. The engine waits where a set is not
//! ready in time: the rules bound what one step may cost (`tokenizer/grammar`). What is not here:
//! what a constraint is (`constraint`), what is done with a set (`sampler`).

use crate::constraint::{Constraint, ConstraintSource, Next};
use crate::request::TokenId;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Threads that find sets: a second one, so that one hard grammar does not hold up the others.
const N_THREADS: usize = 2;
/// Steps that may wait for a thread; a sequence has one under way at most.
const N_WAITING: usize = 64;

/// A constraint with what the threads found.
type Answer = (Box<dyn Constraint>, Result<Next, String>);

enum Position {
    Beginning(Arc<dyn ConstraintSource>),
    Within(Box<dyn Constraint>),
}

struct Step {
    position: Position,
    tokens: Vec<TokenId>,
    wants_forced: bool,
    answer: Sender<Answer>,
}

/// The threads; none before the first constraint.
#[derive(Default)]
pub(super) struct MaskThreads {
    steps: Option<Sender<Step>>,
    threads: Vec<JoinHandle<()>>,
}

/// The constraint of one sequence.
pub(super) struct Constrained {
    under_way: Receiver<Answer>,
    /// Forced tokens leave no log-probabilities, so who wants those gets none.
    wants_forced: bool,
    /// Taken already, since forced tokens came before it.
    ready: Option<Answer>,
}

impl MaskThreads {
    /// Starts a constraint.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn begin(
        &mut self,
        source: &Arc<dyn ConstraintSource>,
        wants_forced: bool,
    ) -> io::Result<Constrained> {
        self.start()?;
        let position = Position::Beginning(Arc::clone(source));
        Ok(Constrained {
            under_way: self.send(position, Vec::new(), wants_forced),
            wants_forced,
            ready: None,
        })
    }

    fn start(&mut self) -> io::Result<()> {
        if self.steps.is_some() {
            return Ok(());
        }
        let (sender, steps) = bounded(N_WAITING);
        for index in 0..N_THREADS {
            let steps = steps.clone();
            let builder = std::thread::Builder::new().name(format!("mask-{index}"));
            self.threads.push(builder.spawn(move || work(&steps))?);
        }
        self.steps = Some(sender);
        Ok(())
    }

    fn send(
        &self,
        position: Position,
        tokens: Vec<TokenId>,
        wants_forced: bool,
    ) -> Receiver<Answer> {
        let (answer, under_way) = bounded(1);
        let step = Step {
            position,
            tokens,
            wants_forced,
            answer,
        };
        if let Some(steps) = &self.steps {
            // Without a thread the answer's sender is dropped, which `next` reports.
            let _ = steps.send(step);
        }
        under_way
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.steps = None;
        for thread in self.threads.drain(..) {
            // A panic was caught inside; there is nothing more to learn from it.
            let _ = thread.join();
        }
    }
}

impl Constrained {
    /// What may come after all tokens that it knows of; waits for it.
    pub(super) fn next(&mut self) -> Result<&mut Next, String> {
        if self.ready.is_none() {
            self.ready = self.under_way.recv().ok();
        }
        match &mut self.ready {
            Some((_, Ok(next))) => Ok(next),
            Some((_, Err(error))) => Err(error.clone()),
            None => Err("the grammar's thread failed".to_owned()),
        }
    }

    /// The answer got this token from the set that `next` gave.
    pub(super) fn accept(&mut self, token: TokenId, threads: &MaskThreads) {
        if let Some((constraint, _)) = self.ready.take() {
            let position = Position::Within(constraint);
            self.under_way = threads.send(position, vec![token], self.wants_forced);
        }
    }
}

fn work(steps: &Receiver<Step>) {
    while let Ok(step) = steps.recv() {
        let found = catch_unwind(AssertUnwindSafe(|| {
            let mut constraint = match step.position {
                Position::Beginning(source) => source.begin(),
                Position::Within(constraint) => constraint,
            };
            let next = constraint.advance(&step.tokens, step.wants_forced);
            (constraint, next)
        }));
        match found {
            // The sequence may have ended meanwhile.
            Ok(answer) => drop(step.answer.try_send(answer)),
            Err(_) => tracing::error!("a constraint panicked; its request fails"),
        }
    }
}
