//! A scripted runtime for tests and load tests: it answers what it is told, when it is told.
//!
//! What a job answers is a function from its request to events; *when* is the [`Pace`]: at once
//! inside `submit`, when a test steps it, or on a thread of its own. Script and state are behind
//! one lock, which is never held while a sink is called. What is not here: any model.

use super::{Capability, Runtime, RuntimeStatus};
use crate::request::{
    FinishReason, GenerationEvent, GenerationRequest, Job, JobSink, RequestError, RequestId,
    TokenLogprob, Usage,
};
use crate::tokenizer::Tokenizer;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What a job answers. Events without `Finished` or `Failed` at the end leave the job without an
/// answer: its sink is dropped after the last one, which is a fault.
pub type Script = dyn Fn(&GenerationRequest) -> Vec<GenerationEvent> + Send + Sync;

/// When jobs move on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The whole answer inside `submit`.
    AtOnce,
    /// One event per call of [`FakeRuntime::step`].
    Stepped,
    /// A thread gives every running job one event per tick; zero = as fast as it can.
    Threaded(Duration),
}

/// What `submit` does with the next jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnSubmit {
    /// Takes them.
    #[default]
    Accept,
    /// Fails them at once.
    Refuse,
    /// Panics.
    Panic,
}

struct Running {
    id: RequestId,
    sink: Box<dyn JobSink>,
    events: VecDeque<GenerationEvent>,
}

#[derive(Default)]
struct State {
    running: Vec<Running>,
    /// Jobs whose sinks a step is using right now, and whether they were cancelled meanwhile; that
    /// step ends them.
    stepping: Vec<(RequestId, bool)>,
    on_submit: OnSubmit,
    submitted: Vec<RequestId>,
    stopped: bool,
    dead: bool,
}

struct Shared {
    capability: Capability,
    script: Box<Script>,
    /// Guards all jobs; released before a sink is called.
    state: Mutex<State>,
    /// Work came, or the end.
    wake: Condvar,
}

/// See the module doc.
pub struct FakeRuntime {
    shared: Arc<Shared>,
    pace: Pace,
    tokenizer: Option<Arc<Tokenizer>>,
    /// The ticking thread of `Pace::Threaded`, joined by `shutdown`.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A capability for tests: `max_inflight` jobs, contexts of 4096 tokens, cancel works.
#[must_use]
pub fn capability(max_inflight: u32) -> Capability {
    Capability {
        max_inflight,
        context_length: 4096,
        kv_capacity_tokens: u64::MAX,
        can_cancel: true,
    }
}

/// The answer that repeats the prompt until `max_tokens` are there, then ends with `Length`.
#[must_use]
pub fn echo(request: &GenerationRequest) -> Vec<GenerationEvent> {
    let prompt = request.prompt.iter().cycle().copied();
    let tokens: Vec<_> = prompt.take(request.max_tokens as usize).collect();
    answer(request, &tokens, FinishReason::Length)
}

/// An answer of these tokens, with log-probabilities if they are asked for.
#[must_use]
pub fn answer(
    request: &GenerationRequest,
    tokens: &[u32],
    reason: FinishReason,
) -> Vec<GenerationEvent> {
    let entry = |token: u32| TokenLogprob {
        token,
        logprob: -0.5,
        top: vec![(token, -0.5)],
    };
    let mut events = Vec::with_capacity(tokens.len() + 2);
    if request.prompt_logprobs.is_some() {
        let entries = request.prompt.iter().skip(1).map(|&token| entry(token));
        events.push(GenerationEvent::PromptLogprobs(entries.collect()));
    }
    events.extend(tokens.iter().map(|&token| GenerationEvent::Token {
        token,
        logprob: request.logprobs.map(|_| entry(token)),
    }));
    events.push(GenerationEvent::Finished {
        reason,
        usage: Usage {
            prompt_tokens: request.prompt.len() as u32,
            cached_tokens: 0,
            completion_tokens: tokens.len() as u32,
            loops: request.loops.unwrap_or(1),
        },
    });
    events
}

impl FakeRuntime {
    /// A runtime with any script.
    #[must_use]
    pub fn new(
        capability: Capability,
        pace: Pace,
        tokenizer: Option<Arc<Tokenizer>>,
        script: Box<Script>,
    ) -> Self {
        let shared = Arc::new(Shared {
            capability,
            script,
            state: Mutex::new(State::default()),
            wake: Condvar::new(),
        });
        let thread = match pace {
            Pace::Threaded(tick) => {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name("fake-runtime".to_owned())
                    .spawn(move || shared.run(tick))
                    .map_err(|error| tracing::error!(%error, "no thread for the fake runtime"))
                    .ok()
            }
            Pace::AtOnce | Pace::Stepped => None,
        };
        Self {
            shared,
            pace,
            tokenizer,
            thread: Mutex::new(thread),
        }
    }

    /// Echoes at once: for HTTP load tests.
    #[must_use]
    pub fn echo(max_inflight: u32, tokenizer: Option<Arc<Tokenizer>>) -> Self {
        let capability = capability(max_inflight);
        Self::new(capability, Pace::AtOnce, tokenizer, Box::new(echo))
    }

    /// Echoes step by step.
    #[must_use]
    pub fn stepped(max_inflight: u32) -> Self {
        let capability = capability(max_inflight);
        Self::new(capability, Pace::Stepped, None, Box::new(echo))
    }

    /// What `submit` does from now on.
    pub fn on_submit(&self, on_submit: OnSubmit) {
        self.shared.state.lock().on_submit = on_submit;
    }

    /// Ids of all jobs that were ever submitted, in order.
    #[must_use]
    pub fn submitted(&self) -> Vec<RequestId> {
        self.shared.state.lock().submitted.clone()
    }

    /// Ids of jobs that have not ended, oldest first.
    #[must_use]
    pub fn running(&self) -> Vec<RequestId> {
        let state = self.shared.state.lock();
        state.running.iter().map(|job| job.id).collect()
    }

    /// Gives a job its next event. False when there is no such job.
    pub fn step(&self, id: RequestId) -> bool {
        self.shared.step(id)
    }

    /// Steps a job until it ends.
    pub fn finish(&self, id: RequestId) {
        while self.step(id) {}
    }

    /// Ends a job with a fault.
    pub fn fail(&self, id: RequestId, text: &str) {
        let fault = RequestError::Fault(text.to_owned());
        self.shared.end(id, Some(GenerationEvent::Failed(fault)));
    }

    /// Forgets a job: its sink is dropped without an end.
    pub fn lose(&self, id: RequestId) {
        self.shared.end(id, None);
    }

    /// Reports itself dead; jobs that run are lost, later ones fail.
    pub fn die(&self) {
        let lost = {
            let mut state = self.shared.state.lock();
            state.dead = true;
            std::mem::take(&mut state.running)
        };
        drop(lost); // outside the lock: dropping calls into sinks
    }
}

impl State {
    fn take(&mut self, id: RequestId) -> Option<(usize, Running)> {
        let index = self.running.iter().position(|job| job.id == id)?;
        Some((index, self.running.remove(index)))
    }
}

impl Shared {
    /// Takes the job out while its sink is called, so that the sink is called without the lock.
    fn step(&self, id: RequestId) -> bool {
        let taken = {
            let mut state = self.state.lock();
            let taken = state.take(id);
            state.stepping.extend(taken.as_ref().map(|_| (id, false)));
            taken
        };
        let Some((index, mut job)) = taken else {
            return false;
        };
        let event = job.events.pop_front();
        let is_end = matches!(
            event,
            None | Some(GenerationEvent::Finished { .. } | GenerationEvent::Failed(_))
        );
        let delivered = event.is_some_and(|event| job.sink.emit(event).is_ok());
        let mut state = self.state.lock();
        let was_cancelled = state.stepping.contains(&(id, true));
        state.stepping.retain(|(other, _)| *other != id);
        let goes_on = delivered && !is_end && !was_cancelled && !state.stopped && !state.dead;
        if goes_on {
            let index = index.min(state.running.len());
            state.running.insert(index, job);
        } else {
            drop(state);
            if !is_end {
                // Nobody listens, or somebody cancelled: both end as cancelled.
                let _ = job
                    .sink
                    .emit(GenerationEvent::Failed(RequestError::Cancelled));
            }
        }
        true
    }

    fn end(&self, id: RequestId, event: Option<GenerationEvent>) {
        let taken = self.state.lock().take(id);
        if let Some((_, mut job)) = taken
            && let Some(event) = event
        {
            // Nobody may listen any more.
            let _ = job.sink.emit(event);
        }
    }

    /// The thread of `Pace::Threaded`.
    fn run(&self, tick: Duration) {
        loop {
            let ids: Vec<RequestId> = {
                let mut state = self.state.lock();
                self.wake.wait_while(&mut state, |state| {
                    state.running.is_empty() && !state.stopped
                });
                if state.stopped {
                    return;
                }
                state.running.iter().map(|job| job.id).collect()
            };
            for id in ids {
                self.step(id);
            }
            if !tick.is_zero() {
                std::thread::sleep(tick); // the latency it pretends to have
            }
        }
    }
}

impl Runtime for FakeRuntime {
    fn capability(&self) -> Capability {
        self.shared.capability
    }

    fn submit(&self, mut job: Job) {
        let id = job.request.id;
        let (on_submit, gone) = {
            let mut state = self.shared.state.lock();
            state.submitted.push(id);
            (state.on_submit, state.stopped || state.dead)
        };
        match on_submit {
            OnSubmit::Panic => panic!("the script says so"),
            OnSubmit::Accept if !gone => {}
            OnSubmit::Accept | OnSubmit::Refuse => {
                let fault = RequestError::Fault("the runtime refused the job".to_owned());
                let _ = job.sink.emit(GenerationEvent::Failed(fault));
                return;
            }
        }
        let events = (self.shared.script)(&job.request);
        if self.pace == Pace::AtOnce {
            for event in events {
                if job.sink.emit(event).is_err() {
                    let _ = job
                        .sink
                        .emit(GenerationEvent::Failed(RequestError::Cancelled));
                    return;
                }
            }
            return;
        }
        let running = Running {
            id,
            sink: job.sink,
            events: events.into(),
        };
        self.shared.state.lock().running.push(running);
        self.shared.wake.notify_one();
    }

    fn cancel(&self, id: RequestId) {
        if !self.shared.capability.can_cancel {
            return;
        }
        let taken = {
            let mut state = self.shared.state.lock();
            for (stepping, cancelled) in &mut state.stepping {
                *cancelled |= *stepping == id;
            }
            state.take(id)
        };
        if let Some((_, mut job)) = taken {
            let cancelled = GenerationEvent::Failed(RequestError::Cancelled);
            let _ = job.sink.emit(cancelled); // nobody may listen any more
        }
    }

    fn status(&self) -> RuntimeStatus {
        let state = self.shared.state.lock();
        RuntimeStatus {
            alive: !state.dead && !state.stopped,
            running: state.running.len() as u32,
            ..RuntimeStatus::default()
        }
    }

    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        self.tokenizer.clone()
    }

    fn shutdown(&self) {
        let left = {
            let mut state = self.shared.state.lock();
            state.stopped = true;
            std::mem::take(&mut state.running)
        };
        self.shared.wake.notify_all();
        for mut job in left {
            let ended = GenerationEvent::Failed(RequestError::ShuttingDown);
            let _ = job.sink.emit(ended);
        }
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join(); // a panic was printed by the thread itself
        }
    }
}

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        self.shutdown();
    }
}
