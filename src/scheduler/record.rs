//! One accepted request: what was asked, where it is, and the way to its waiter.
//!
//! Shared by the caller's handles, the queue and the sink. Changing state is the lifecycle alone,
//! behind its own small lock; whoever moves it into a final state delivers the outcome under that
//! lock, so a waiter gets exactly one. What is not here: who decides (`driver`, `ticket`).

use super::admission::Loops;
use super::health::Setback;
use super::lifecycle::{IllegalTransition, Lifecycle, Stamp, Stamps, Transition};
use super::mailbox::Sender;
use super::queue::{QueueKey, Share};
use super::ticket::Outcome;
use crate::request::{
    FinishReason, GenerationEvent, GenerationRequest, RequestError, TokenId, Usage,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Highest and lowest (negated) priority; beyond it is clamped.
pub(crate) const PRIORITY_MAX: i32 = 100;

/// How a request is to be scheduled.
#[derive(Clone, Debug, PartialEq)]
pub struct SubmitOptions {
    /// Higher starts sooner; clamped to -100..=100.
    pub priority: i32,
    /// Latency objective in milliseconds; None = the executor's default.
    pub slo_ms: Option<u64>,
    /// Latency objective from submit to the first token in milliseconds; None = there is none.
    pub slo_ttft_ms: Option<u64>,
    /// Longest wait in the queue; None = the executor's default.
    pub queue_timeout: Option<Duration>,
    /// Who asks: for lists and logs, and to share the slots fairly among those who do.
    pub client: Option<Arc<str>>,
    /// That client's part.
    pub share: Share,
    /// Whether the answer is streamed; set by `submit` and `submit_stream`.
    pub streaming: bool,
    /// Leave control tokens out of the text.
    pub skip_special_tokens: bool,
    /// But not these: marks between the parts of an answer.
    pub shown_tokens: Arc<[TokenId]>,
}

impl Default for SubmitOptions {
    fn default() -> Self {
        Self {
            priority: 0,
            slo_ms: None,
            slo_ttft_ms: None,
            queue_timeout: None,
            client: None,
            share: Share::default(),
            streaming: false,
            skip_special_tokens: true,
            shown_tokens: Arc::default(),
        }
    }
}

/// How a job ended, as the driver and the consumer say it.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// Well.
    Done { reason: FinishReason, usage: Usage },
    /// By the caller, a deadline in the queue, or a shutdown; the error says which.
    Cancelled(RequestError),
    /// By a fault.
    Failed(RequestError),
}

/// What travels to the waiter: events, then one end.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// A token, a text, prompt log-probabilities.
    Event(GenerationEvent),
    /// Nothing follows.
    End(Result<Outcome, RequestError>),
}

/// See the module doc.
pub(crate) struct Record {
    pub(crate) request: Arc<GenerationRequest>,
    pub(crate) options: SubmitOptions,
    /// Place in the queue; its sequence number is the identity of the request in the executor.
    pub(crate) key: QueueKey,
    /// When the wait in the queue becomes too long.
    pub(crate) deadline: Option<Instant>,
    /// Loops asked and granted, as admission decided.
    pub(crate) loops: Option<Loops>,
    deliver: Sender,
    /// Guards the state and the delivery of the end; held for no call outside this file.
    lifecycle: Mutex<Lifecycle>,
    /// Tokens delivered, or pieces of text; a statistic, so relaxed.
    n_tokens: AtomicU32,
    /// How often its replica was lost, and how often its upstream was full. Changed and read under the
    /// queue's lock only, so relaxed.
    n_lost: AtomicU32,
    n_overloaded: AtomicU32,
    /// Replica of its latest run; `NOWHERE` before. For lists and logs, so relaxed.
    replica: AtomicU32,
    /// Final counts of a request that is done; guards nothing else.
    usage: Mutex<Option<Usage>>,
}

const NOWHERE: u32 = u32::MAX;

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Record").field(&self.request.id).finish()
    }
}

impl Record {
    pub(crate) fn new(
        request: Arc<GenerationRequest>,
        options: SubmitOptions,
        key: QueueKey,
        deadline: Option<Instant>,
        deliver: Sender,
        now: Stamp,
    ) -> Self {
        Self {
            request,
            options,
            key,
            deadline,
            loops: None,
            deliver,
            lifecycle: Mutex::new(Lifecycle::queued(now)),
            n_tokens: AtomicU32::new(0),
            n_lost: AtomicU32::new(0),
            n_overloaded: AtomicU32::new(0),
            replica: AtomicU32::new(NOWHERE),
            usage: Mutex::new(None),
        }
    }

    /// Notes what admission granted, in a record that nobody else holds yet.
    pub(crate) fn grant(record: &mut Arc<Self>, loops: Option<Loops>) {
        let Some(loops) = loops else { return };
        let record = Arc::get_mut(record).expect("a record is shared only once it is admitted");
        record.loops = Some(loops);
        if loops.granted < loops.asked {
            Arc::make_mut(&mut record.request).loops = Some(loops.granted);
        }
    }

    /// A transition that does not end the request.
    pub(crate) fn advance(
        &self,
        transition: Transition,
        now: Stamp,
    ) -> Result<Stamps, IllegalTransition> {
        let mut state = self.lifecycle.lock();
        *state = state.advance(transition, now)?;
        Ok(*state.stamps())
    }

    /// The first token of a run. Refused when the request has ended, and when this run is not its latest.
    pub(crate) fn first_token(
        &self,
        attempt: u32,
        now: Stamp,
    ) -> Result<Stamps, IllegalTransition> {
        let mut state = self.lifecycle.lock();
        let transition = Transition::FirstToken;
        if state.stamps().n_requeues != attempt {
            let from = state.name();
            return Err(IllegalTransition { from, transition });
        }
        *state = state.advance(transition, now)?;
        Ok(*state.stamps())
    }

    /// Back to the queue: from now on what its run reports is ignored. Refused once it gave a token.
    pub(crate) fn requeue(&self, setback: Setback) -> Result<(), IllegalTransition> {
        let mut state = self.lifecycle.lock();
        let queued = state.stamps().queued; // no stamp is set
        *state = state.advance(Transition::Requeue, queued)?;
        let count = match setback {
            Setback::Lost => &self.n_lost,
            Setback::Overloaded => &self.n_overloaded,
        };
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// How often its replica was lost, and how often its upstream was full.
    pub(crate) fn setbacks(&self) -> (u32, u32) {
        let [n_lost, n_overloaded] = [&self.n_lost, &self.n_overloaded];
        (
            n_lost.load(Ordering::Relaxed),
            n_overloaded.load(Ordering::Relaxed),
        )
    }

    /// Ends the request and delivers the outcome. Err when it had ended already; then nothing
    /// happens.
    pub(crate) fn settle(
        &self,
        ending: &Ending,
        now: Stamp,
    ) -> Result<Lifecycle, IllegalTransition> {
        let transition = match ending {
            Ending::Done { .. } => Transition::Finish,
            Ending::Cancelled(_) => Transition::Cancel,
            Ending::Failed(_) => Transition::Fail,
        };
        let mut state = self.lifecycle.lock();
        *state = state.advance(transition, now)?;
        if let Ending::Done { usage, .. } = ending {
            *self.usage.lock() = Some(*usage);
        }
        let end = match ending {
            Ending::Done { reason, usage } => Ok(Outcome {
                finish_reason: *reason,
                usage: *usage,
                stop_idx: None,
                stamps: *state.stamps(),
            }),
            Ending::Cancelled(error) | Ending::Failed(error) => Err(error.clone()),
        };
        // Nobody may listen any more; then nobody needs the outcome either.
        let _is_read = self.deliver.send(Delivery::End(end));
        Ok(*state)
    }

    /// Passes an event on. False when nobody listens or the request has ended.
    pub(crate) fn deliver(&self, event: GenerationEvent) -> bool {
        if event.is_generated() {
            self.n_tokens.fetch_add(1, Ordering::Relaxed);
        }
        self.deliver.send(Delivery::Event(event))
    }

    /// Why it ends when its deadline in the queue has passed.
    pub(crate) fn waited_too_long(&self, now: Instant) -> RequestError {
        let queued = self.state().stamps().queued.at;
        let milliseconds = |until: Instant| {
            let waited = until.saturating_duration_since(queued).as_millis();
            u64::try_from(waited).unwrap_or(u64::MAX)
        };
        RequestError::QueueTimeout {
            waited_ms: milliseconds(now),
            queue_timeout_ms: milliseconds(self.deadline.unwrap_or(now)),
        }
    }

    pub(crate) fn state(&self) -> Lifecycle {
        *self.lifecycle.lock()
    }

    /// A replica has it.
    pub(crate) fn placed(&self, replica: usize) {
        let replica = u32::try_from(replica).unwrap_or(NOWHERE);
        self.replica.store(replica, Ordering::Relaxed);
    }

    /// Where its latest run was or is.
    pub(crate) fn replica(&self) -> Option<u32> {
        let replica = self.replica.load(Ordering::Relaxed);
        (replica != NOWHERE).then_some(replica)
    }

    /// Final counts; None until it is done.
    pub(crate) fn usage(&self) -> Option<Usage> {
        *self.usage.lock()
    }

    pub(crate) fn n_tokens(&self) -> u32 {
        self.n_tokens.load(Ordering::Relaxed)
    }
}
