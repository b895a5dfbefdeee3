//! A scripted runtime for tests and load tests: it answers what it is told, when it is told.
//!
//! What a job answers is a function from its request to events; *when* is the [`Pace`]: at once
//! inside `submit`, when a test steps it, or on a thread of its own. Script and state are behind
//! one lock, which is never held while a sink is called. What is not here: any model.

use super::features::{Feature, Features};
use super::{Capability, LoopCost, PREFIX_BLOCK_TOKENS, Runtime, RuntimeStatus};
use crate::request::{
    FinishReason, GenerationEvent, GenerationRequest, Job, JobSink, PinError, Prefix, PrefixId,
    RequestError, RequestId, TokenLogprob, Usage,
};
use crate::tokenizer::Tokenizer;
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What a job answers. Events without `Finished` or `Failed` at the end leave the job without an
/// answer: its sink is dropped after the last one, which is a fault.
pub type Script = dyn Fn(&GenerationRequest) -> Vec<GenerationEvent> + Send + Sync;

/// Submitted ids that are remembered for tests: a server under load must not grow.
const SUBMITTED_KEPT: usize = 1 << 16;

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
    /// Rises with every submit.
    arrival: u64,
    sink: Box<dyn JobSink>,
    events: VecDeque<GenerationEvent>,
}

/// A job whose sink a step is using, and what others asked of it meanwhile; that step carries it out.
struct Stepping {
    id: RequestId,
    cancelled: bool,
    parked: bool,
}

#[derive(Default)]
struct State {
    running: Vec<Running>,
    /// Out of `running` until they are resumed.
    parked: Vec<Running>,
    /// Jobs whose sinks a step is using right now.
    stepping: Vec<Stepping>,
    n_submitted: u64,
    on_submit: OnSubmit,
    /// The latest [`SUBMITTED_KEPT`], oldest first.
    submitted: VecDeque<RequestId>,
    stopped: bool,
    dead: bool,
    /// Prefixes it was asked to keep, by id, with their tokens; the oldest first.
    pins: Vec<(PrefixId, usize)>,
    /// Most tokens of all pins; beyond it there is no room.
    pinned_tokens_max: Option<usize>,
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
    loop_cost: Option<LoopCost>,
    /// The ticking thread of `Pace::Threaded`, joined by `shutdown`.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A capability for tests: `max_inflight` jobs, contexts of 4096 tokens, cancel and park work.
#[must_use]
pub fn capability(max_inflight: u32) -> Capability {
    Capability {
        max_inflight,
        context_length: 4096,
        kv_capacity_tokens: u64::MAX,
        can_cancel: true,
        can_park: true,
    }
}

/// The answer that repeats the prompt (the embedding: its length and 1) until `max_tokens` are there, then ends with `Length`.
#[must_use]
pub fn echo(request: &GenerationRequest) -> Vec<GenerationEvent> {
    if request.embed {
        let vector = vec![request.prompt.len() as f32, 1.0];
        let mut events = answer(request, &[], FinishReason::Stop);
        events.insert(0, GenerationEvent::Embedding(vector));
        return events;
    }
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
    let usage = |n_tokens: u32| Usage {
        prompt_tokens: request.prompt.len() as u32,
        cached_tokens: 0,
        completion_tokens: n_tokens,
        loops: request.loops.unwrap_or(1),
        ..Usage::default()
    };
    events.extend((1..).zip(tokens).map(|(n, &token)| GenerationEvent::Token {
        token,
        logprob: request.logprobs.map(|_| entry(token)),
        usage: usage(n),
    }));
    events.push(GenerationEvent::Finished {
        reason,
        usage: usage(tokens.len() as u32),
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
            loop_cost: None,
            thread: Mutex::new(thread),
        }
    }

    /// Claims to run a looped model.
    #[must_use]
    pub fn with_loop_cost(mut self, cost: LoopCost) -> Self {
        self.loop_cost = Some(cost);
        self
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

    /// Ids of the jobs that were submitted, in order; the latest 65,536 of them.
    #[must_use]
    pub fn submitted(&self) -> Vec<RequestId> {
        self.shared.state.lock().submitted.iter().copied().collect()
    }

    /// Ids of jobs that have not ended, oldest first.
    #[must_use]
    pub fn running(&self) -> Vec<RequestId> {
        let state = self.shared.state.lock();
        state.running.iter().map(|job| job.id).collect()
    }

    /// Ids of jobs that are parked, oldest first.
    #[must_use]
    pub fn parked(&self) -> Vec<RequestId> {
        let state = self.shared.state.lock();
        let mut parked: Vec<_> = state.parked.iter().map(|j| (j.arrival, j.id)).collect();
        parked.sort_unstable();
        parked.into_iter().map(|(_, id)| id).collect()
    }

    /// Prefixes that are pinned, oldest first.
    #[must_use]
    pub fn pins(&self) -> Vec<PrefixId> {
        let state = self.shared.state.lock();
        state.pins.iter().map(|(id, _)| *id).collect()
    }

    /// From now on pins may keep so many tokens.
    pub fn limit_pins(&self, tokens_max: usize) {
        self.shared.state.lock().pinned_tokens_max = Some(tokens_max);
    }

    /// Gives a job its next event. False when there is no such job, or it is parked.
    pub fn step(&self, id: RequestId) -> bool {
        self.shared.step(id)
    }

    /// Steps a job until it ends.
    pub fn finish(&self, id: RequestId) {
        while self.step(id) {}
    }

    /// Ends a job with a fault.
    pub fn fail(&self, id: RequestId, text: &str) {
        self.fail_with(id, RequestError::Fault(text.to_owned()));
    }

    /// Ends a job with any error.
    pub fn fail_with(&self, id: RequestId, error: RequestError) {
        self.shared.end(id, Some(GenerationEvent::Failed(error)));
    }

    /// Forgets a job: its sink is dropped without an end.
    pub fn lose(&self, id: RequestId) {
        self.shared.end(id, None);
    }

    /// Reports itself dead; the sinks of jobs that run are dropped, as by a thread that ends, and later
    /// jobs fail.
    pub fn die(&self) {
        let lost = {
            let mut state = self.shared.state.lock();
            state.dead = true;
            state.take_all()
        };
        drop(lost); // outside the lock: dropping calls into sinks
    }
}

impl State {
    /// Takes a job out of `running`.
    fn take(&mut self, id: RequestId) -> Option<Running> {
        let index = self.running.iter().position(|job| job.id == id)?;
        Some(self.running.remove(index))
    }

    /// Takes a job out of `parked`.
    fn take_parked(&mut self, id: RequestId) -> Option<Running> {
        let index = self.parked.iter().position(|job| job.id == id)?;
        Some(self.parked.remove(index))
    }

    fn take_all(&mut self) -> Vec<Running> {
        let mut all = std::mem::take(&mut self.running);
        all.append(&mut self.parked);
        all
    }

    /// Puts a job among those that run, by its arrival.
    fn run(&mut self, job: Running) {
        let index = self.running.partition_point(|j| j.arrival < job.arrival);
        self.running.insert(index, job);
    }

    /// Notes a wish for a job whose sink is in use.
    fn wish(&mut self, id: RequestId, wish: impl Fn(&mut Stepping)) {
        let found = self.stepping.iter_mut().find(|stepping| stepping.id == id);
        found.into_iter().for_each(wish);
    }
}

impl Shared {
    /// Takes the job out while its sink is called, so that the sink is called without the lock.
    fn step(&self, id: RequestId) -> bool {
        let taken = {
            let mut state = self.state.lock();
            let taken = state.take(id);
            state.stepping.extend(taken.as_ref().map(|_| Stepping {
                id,
                cancelled: false,
                parked: false,
            }));
            taken
        };
        let Some(mut job) = taken else {
            return false;
        };
        let event = job.events.pop_front();
        let is_end = matches!(
            event,
            None | Some(GenerationEvent::Finished { .. } | GenerationEvent::Failed(_))
        );
        let delivered = event.is_some_and(|event| job.sink.emit(event).is_ok());
        let mut state = self.state.lock();
        let wishes = state.stepping.iter().position(|stepping| stepping.id == id);
        let wishes = wishes.map(|index| state.stepping.swap_remove(index));
        let (cancelled, parked) = wishes.map_or((false, false), |w| (w.cancelled, w.parked));
        let goes_on = delivered && !is_end && !cancelled && !state.stopped && !state.dead;
        if goes_on && parked {
            state.parked.push(job);
        } else if goes_on {
            state.run(job);
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
        let taken = {
            let mut state = self.state.lock();
            state.take(id).or_else(|| state.take_parked(id))
        };
        if let Some(mut job) = taken
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

    fn capabilities(&self) -> Features {
        // The script decides what comes.
        Features::native().without(Feature::StructuredOutput)
    }

    fn submit(&self, mut job: Job) {
        let id = job.request.id;
        let (on_submit, gone) = {
            let mut state = self.shared.state.lock();
            if state.submitted.len() == SUBMITTED_KEPT {
                state.submitted.pop_front();
            }
            state.submitted.push_back(id);
            (state.on_submit, state.stopped || state.dead)
        };
        match on_submit {
            OnSubmit::Panic => panic!("the script says so"),
            OnSubmit::Accept if !gone => {}
            OnSubmit::Accept => {
                let lost = RequestError::ReplicaLost("the script says so".to_owned());
                let _ = job.sink.emit(GenerationEvent::Failed(lost));
                return;
            }
            OnSubmit::Refuse => {
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
        {
            let mut state = self.shared.state.lock();
            state.n_submitted += 1;
            let running = Running {
                id,
                arrival: state.n_submitted,
                sink: job.sink,
                events: events.into(),
            };
            state.running.push(running);
        }
        self.shared.wake.notify_one();
    }

    fn cancel(&self, id: RequestId) {
        if !self.shared.capability.can_cancel {
            return;
        }
        let taken = {
            let mut state = self.shared.state.lock();
            state.wish(id, |stepping| stepping.cancelled = true);
            state.take(id).or_else(|| state.take_parked(id))
        };
        if let Some(mut job) = taken {
            let cancelled = GenerationEvent::Failed(RequestError::Cancelled);
            let _ = job.sink.emit(cancelled); // nobody may listen any more
        }
    }

    fn park(&self, id: RequestId) {
        if self.shared.capability.can_park {
            let mut state = self.shared.state.lock();
            state.wish(id, |stepping| stepping.parked = true);
            let taken = state.take(id);
            state.parked.extend(taken);
        }
    }

    fn resume(&self, id: RequestId) {
        let mut state = self.shared.state.lock();
        state.wish(id, |stepping| stepping.parked = false);
        if let Some(job) = state.take_parked(id) {
            state.run(job);
        }
        drop(state);
        self.shared.wake.notify_one();
    }

    fn pin_prefix(&self, prefix: Prefix, answer: Sender<Result<u32, PinError>>) {
        let mut state = self.shared.state.lock();
        let n_tokens = prefix.tokens.len() / PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS;
        let n_pinned: usize = state.pins.iter().map(|(_, n_tokens)| n_tokens).sum();
        let is_pinned = state.pins.iter().any(|(id, _)| *id == prefix.id);
        let most = state.pinned_tokens_max.unwrap_or(usize::MAX);
        let answered = if is_pinned {
            Ok(n_tokens as u32)
        } else if n_pinned + n_tokens > most {
            Err(PinError::NoRoom {
                needed_pages: (n_tokens / PREFIX_BLOCK_TOKENS) as u32,
                pinned_pages: (n_pinned / PREFIX_BLOCK_TOKENS) as u32,
                pages_max: (most / PREFIX_BLOCK_TOKENS) as u32,
            })
        } else {
            state.pins.push((prefix.id, n_tokens));
            Ok(n_tokens as u32)
        };
        drop(state);
        let _ = answer.try_send(answered); // nobody may wait any more
    }

    fn unpin_prefix(&self, id: PrefixId) {
        let mut state = self.shared.state.lock();
        state.pins.retain(|(other, _)| *other != id);
    }

    fn status(&self) -> RuntimeStatus {
        let state = self.shared.state.lock();
        RuntimeStatus {
            alive: !state.dead && !state.stopped,
            running: state.running.len() as u32,
            parked: state.parked.len() as u32,
            ..RuntimeStatus::default()
        }
    }

    fn loop_cost(&self) -> Option<LoopCost> {
        self.loop_cost
    }

    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        self.tokenizer.clone()
    }

    fn shutdown(&self) {
        let left = {
            let mut state = self.shared.state.lock();
            state.stopped = true;
            state.take_all()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ConsumerGone;

    /// Notes whose event came; the second job's events are `(1, ..)`.
    struct Log(usize, Arc<Mutex<Vec<usize>>>);

    impl JobSink for Log {
        fn emit(&mut self, _: GenerationEvent) -> Result<(), ConsumerGone> {
            self.1.lock().push(self.0);
            Ok(())
        }
    }

    #[test]
    fn parked_jobs_stand_still_until_they_are_resumed() {
        let runtime = FakeRuntime::stepped(2);
        let log = Arc::new(Mutex::new(Vec::new()));
        let ids = [0, 1].map(|number| {
            let request = Arc::new(GenerationRequest::new(vec![7], 2));
            let id = request.id;
            let sink = Box::new(Log(number, Arc::clone(&log)));
            runtime.submit(Job { request, sink });
            id
        });
        runtime.park(ids[0]);
        assert_eq!(
            (runtime.running(), runtime.parked()),
            (vec![ids[1]], vec![ids[0]])
        );
        assert_eq!((runtime.status().running, runtime.status().parked), (1, 1));
        assert!(!runtime.step(ids[0]));
        assert!(runtime.step(ids[1]));
        runtime.resume(ids[0]);
        assert_eq!(runtime.running(), ids, "by arrival");
        runtime.finish(ids[0]);
        assert_eq!(*log.lock(), [1, 0, 0, 0]);
        runtime.park(ids[1]);
        runtime.cancel(ids[1]);
        assert_eq!(log.lock().len(), 5, "a cancel reaches a parked job");
        runtime.resume(ids[1]);
        assert!(runtime.running().is_empty() && runtime.parked().is_empty());
    }
}
