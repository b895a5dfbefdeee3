//! The adapter between the scheduler and whatever runs jobs: our engine, a child process, a
//! remote server, a script for tests.
//!
//! A runtime is one replica. It never restarts itself: once it died, `status().alive` stays false and its
//! unfinished jobs end with [`crate::request::RequestError::ReplicaLost`]; the executor then has a new one
//! made through a [`ReplicaFactory`]. It is called by whoever has the executor's turn (`scheduler/driver`),
//! one thread at a time, and must never block there. What is not here: queueing, priorities, admission (`scheduler`).

pub mod child;
pub mod device;
pub mod fake;
pub mod features;
pub mod foreign;
pub mod llama_server;
pub mod native;
pub mod openai_remote;
pub mod resident;
pub mod upstream;
pub mod vllm_serve;

pub use crate::engine::stats::RowCounts;
pub use features::{Feature, Features};

use crate::request::{GenerationRequest, Job, PinError, Prefix, PrefixId, RequestId};
use crate::tokenizer::Tokenizer;
use crossbeam_channel::Sender;
use std::sync::Arc;
use std::time::Duration;

/// Tokens of a block of K/V: prefixes are kept in whole ones.
pub const PREFIX_BLOCK_TOKENS: usize = crate::backend::PAGE_TOKENS;

/// Most tokens whose K/V a request with an attention window holds at once; None without a window.
#[must_use]
pub fn held_tokens(request: &GenerationRequest) -> Option<u64> {
    let window = request.window();
    let n_tokens = request.prompt.len() as u64 + u64::from(request.max_tokens);
    let n_blocks = window.blocks_max(n_tokens as usize, 1);
    (window.tokens > 0).then(|| n_tokens.min((n_blocks * PREFIX_BLOCK_TOKENS) as u64))
}

/// Makes one replica anew: loads the model, starts the child, looks whether the remote answers. Gets the
/// index of the replica; may take long, and is called by several threads at once for several replicas.
/// Err = it cannot be made now, in words for the log; it is asked again later.
pub type ReplicaFactory = Arc<dyn Fn(usize) -> Result<Arc<dyn Runtime>, String> + Send + Sync>;

/// What a runtime can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Jobs it can make progress on at once.
    pub max_inflight: u32,
    /// Longest prompt + completion in tokens.
    pub context_length: u32,
    /// Tokens of KV its pool holds over all requests; `u64::MAX` when unknown.
    pub kv_capacity_tokens: u64,
    /// Whether `cancel` frees the slot at once.
    pub can_cancel: bool,
    /// Whether `park` and `resume` do anything.
    pub can_park: bool,
}

/// What a runtime is doing, for metrics, health and the snapshot. Cheap to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// False after a fault, for good: every submit fails.
    pub alive: bool,
    /// Jobs that hold a slot.
    pub running: u32,
    /// Jobs accepted and not started.
    pub waiting: u32,
    /// Jobs that were parked and not resumed; they count as neither of the above.
    pub parked: u32,
    /// KV pages in all, in use by sequences, and kept for reuse only.
    pub kv_pages_total: u32,
    /// See above.
    pub kv_pages_used: u32,
    /// See above.
    pub kv_pages_cached: u32,
    /// KV pages that pinned prefixes keep, whether sequences use them or not.
    pub kv_pages_pinned: u32,
    /// Sequences preempted since start.
    pub preemptions: u64,
    /// Prompts looked up in the prefix cache since start.
    pub prefix_queries: u64,
    /// Prompts of which a part was found there.
    pub prefix_hits: u64,
    /// Loops that rows ran since start, one for every row of a pass of the core; 0 where nobody counts.
    pub loop_iterations: u64,
    /// Loops that rows did not run because they left early.
    pub loop_iterations_saved: u64,
    /// Rows of the latest quantum.
    pub batch_rows: u32,
    /// Rows of all quanta so far.
    pub row_counts: RowCounts,
    /// Quanta run since start.
    pub quanta: u64,
    /// Time of all quanta that ended, and the part of it inside the model's passes.
    pub time_in_steps: Duration,
    /// See above.
    pub time_in_passes: Duration,
    /// Age of the running quantum while work exists; None when idle.
    pub step_age: Option<Duration>,
}

/// Time that a request takes as a linear function of its loops: `fixed_ms + per_loop_ms * loops`.
/// Only the ratio matters, so any unit of work will do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoopCost {
    /// The part that does not loop.
    pub fixed_ms: f64,
    /// The part that is run once per loop; above 0.
    pub per_loop_ms: f64,
    /// Loops of a request that names none.
    pub default_loops: u32,
}

/// A replica. Jobs report through their sinks; see [`crate::request::GenerationEvent`].
pub trait Runtime: Send + Sync {
    /// What it can hold.
    fn capability(&self) -> Capability;
    /// What requests may ask of it; all that the built-in engine can, unless it says otherwise.
    fn capabilities(&self) -> Features {
        Features::native()
    }
    /// Whether its requests leave this machine, so that each must have said that it may.
    fn asks_consent(&self) -> bool {
        false
    }
    /// Takes a job. Never blocks; what fails is reported through the sink.
    fn submit(&self, job: Job);
    /// Asks a job to end; its sink gets `Failed(Cancelled)` unless it ended before. Unknown ids are ignored.
    fn cancel(&self, id: RequestId);
    /// Takes a job's slot, rows and KV pages away at the next quantum boundary. The job keeps its
    /// tokens, its random state and its penalties, so that after [`Self::resume`] it goes on with the
    /// very tokens that it would have given; only time passes. Fire and forget: unknown, ended and
    /// parked ids are ignored, and so is every call where [`Capability::can_park`] is false. Parked
    /// jobs still end through `cancel` and `shutdown`. Calls take effect in the order in which they
    /// were made.
    fn park(&self, id: RequestId);
    /// Lets a parked job run again; it gets its turn by its time of arrival, before younger ones.
    /// Ids that are not parked are ignored.
    fn resume(&self, id: RequestId);
    /// Keeps the K/V of a prefix, computing what is missing, until [`Self::unpin_prefix`]. Never
    /// blocks: the answer, the tokens kept, goes to the channel, whose other end waits as long as it
    /// likes; it is closed without an answer when the runtime ends before. A prefix that is kept
    /// already is answered at once.
    fn pin_prefix(&self, prefix: Prefix, answer: Sender<Result<u32, PinError>>) {
        let _ = (prefix, answer.try_send(Err(PinError::Unsupported)));
    }
    /// Keeps it no longer, and stops computing it. Unknown ids are ignored.
    fn unpin_prefix(&self, id: PrefixId) {
        let _ = id;
    }
    /// What it is doing.
    fn status(&self) -> RuntimeStatus;
    /// Why it is dead, for the operator; None while it lives, and where it does not know.
    fn death(&self) -> Option<String> {
        None
    }
    /// Bytes of main memory that processes of its own hold now; None where it has none.
    fn resident_bytes(&self) -> Option<u64> {
        None
    }
    /// What a loop costs, for looped models; None for others and before anything is known of it.
    fn loop_cost(&self) -> Option<LoopCost> {
        None
    }
    /// Room that a token takes in KV memory at so many loops, and at the model's default.
    fn kv_room(&self, loops: u32) -> (u32, u32) {
        let _ = loops;
        (1, 1)
    }
    /// The vocabulary of its `Token` events; None when it sends text.
    fn tokenizer(&self) -> Option<Arc<Tokenizer>>;
    /// Ends its thread after failing what is left. Idempotent; joins.
    fn shutdown(&self);
}
