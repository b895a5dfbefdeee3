//! What an executor shows of itself at one moment: plain data for lists, the snapshot route and
//! gauges.
//!
//! Made by the executor from counts taken under the queue's lock; no prompt text in it. What is not
//! here: counters over time (`metrics`).

use super::admission::Loops;
use super::health::Health;
use super::lifecycle::{Lifecycle, Stamp};
use super::prefix_pool::PrefixPoolStats;
use super::record::Record;
use crate::config::TargetInflight;
use crate::request::RequestId;
use crate::runtime::RuntimeStatus;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub(crate) fn info(record: &Record, state: Lifecycle, now: Stamp) -> RequestInfo {
    RequestInfo {
        id: record.request.id,
        state,
        priority: record.options.priority,
        streaming: record.options.streaming,
        client: record.options.client.clone(),
        queued_at: state.stamps().queued.wall,
        // Saturates: a request may come between the reading of the clock and the listing.
        age: now.at.duration_since(state.stamps().queued.at),
        prompt_tokens: record.request.prompt_tokens(),
        max_tokens: record.request.max_tokens,
        completion_tokens: record.n_tokens(),
        loops: record.loops,
    }
}

/// A live request, for lists.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestInfo {
    /// Its id.
    pub id: RequestId,
    /// Where it is; a cancelled request stays listed until its runtime lets go of the slot.
    pub state: Lifecycle,
    /// As clamped.
    pub priority: i32,
    /// Whether its answer is streamed.
    pub streaming: bool,
    /// Who asked.
    pub client: Option<Arc<str>>,
    /// Wall clock.
    pub queued_at: SystemTime,
    /// Time since then.
    pub age: Duration,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Most tokens of its answer; `u32::MAX` where nobody set a limit.
    pub max_tokens: u32,
    /// Tokens generated so far.
    pub completion_tokens: u32,
    /// Loops asked and granted; None when neither it nor the model speaks of loops.
    pub loops: Option<Loops>,
}

/// One replica at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaSnapshot {
    /// Jobs handed to it and not ended.
    pub inflight: u32,
    /// Jobs it should hold: `min(configured, capability)`, or what was found by trying.
    pub target: u32,
    /// Its capability: jobs it can hold.
    pub max_inflight: u32,
    /// Whether it works, and when it is tried to restart it.
    pub health: Health,
    /// Whether it takes jobs now: it works, and its upstream has not just said that it is full.
    pub is_open: bool,
    /// Whether a new one takes its place when it dies.
    pub can_be_replaced: bool,
    /// How often it was made anew.
    pub n_restarts: u64,
    /// Why it was lost the latest time, or could not be made anew; for the operator.
    pub last_error: Option<String>,
    /// What it says of itself.
    pub status: RuntimeStatus,
}

/// An executor at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Public name.
    pub model: String,
    /// Requests waiting.
    pub queue_depth: usize,
    /// Requests that hold a slot: the sum of the replicas' `inflight`.
    pub in_flight: u32,
    /// Requests that lost their slot and wait for it again.
    pub n_preempted: usize,
    /// How often a slot was taken from a running request, since the start.
    pub preemptions: u64,
    /// Moving average of the time from dispatch to completion; None before the first.
    pub ema_dispatch_ms: Option<f64>,
    /// Per replica, as configured; None = what it can hold.
    pub configured_target_inflight: Option<TargetInflight>,
    /// Over all replicas that work, after clamping.
    pub effective_target_inflight: u32,
    /// Started and not closed.
    pub accepting: bool,
    /// The scheduler itself broke: nothing runs any more, only a restart helps.
    pub has_failed: bool,
    /// Registered prefixes.
    pub prefix_pool: PrefixPoolStats,
    /// Its replicas.
    pub replicas: Vec<ReplicaSnapshot>,
}

impl Snapshot {
    fn live(&self) -> impl Iterator<Item = &ReplicaSnapshot> {
        self.replicas.iter().filter(|one| one.health.is_live())
    }

    /// Jobs that one replica should hold, the smallest of those that live; 0 when none does. With a
    /// configured number it is `min(configured, capability_per_replica)`.
    #[must_use]
    pub fn target_per_replica(&self) -> u32 {
        self.live().map(|one| one.target).min().unwrap_or(0)
    }

    /// Jobs that one replica can hold, the smallest of those that live; None when none does.
    #[must_use]
    pub fn capability_per_replica(&self) -> Option<u32> {
        self.live().map(|one| one.max_inflight).min()
    }
}
