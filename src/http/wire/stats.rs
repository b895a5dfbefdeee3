//! Counters and gauges of the connection layer, read by `/metrics` and by tests.
//!
//! Each is a relaxed atomic: they are for people, nothing decides by them. Counters only grow; the last
//! group are gauges.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Statuses that the wire answers by itself; the index is shared with [`WireStats::rejects`].
pub const REJECT_STATUSES: [u16; 7] = [400, 408, 413, 417, 431, 503, 505];

/// What has happened on the data plane since its start.
#[derive(Debug, Default)]
pub struct WireStats {
    /// Connections taken from the listeners.
    pub accepted: AtomicU64,
    /// Connections told 503 because nobody could make room.
    pub refused: AtomicU64,
    /// Connections closed to make room for a new one.
    pub evicted: AtomicU64,
    /// Failed accepts (out of descriptors and the like).
    pub accept_errors: AtomicU64,
    /// Complete requests handed to a queue.
    pub requests: AtomicU64,
    /// Peers that left while a handler had asked to be told.
    pub hangups: AtomicU64,
    /// Queued requests dropped because their client had left and room was needed.
    pub purged: AtomicU64,
    /// Panics of handlers and hooks; each cost one request.
    pub panics: AtomicU64,
    /// Answers cut because the peer did not take them in time, or because writing failed.
    pub aborted: AtomicU64,
    /// Requests refused by the wire itself, by the index of [`REJECT_STATUSES`].
    pub rejects: [AtomicU64; REJECT_STATUSES.len()],
    /// Gauge: open connections.
    pub open: AtomicU64,
    /// Gauge: workers that run a handler now, both sets together.
    pub busy_workers: AtomicU64,
    /// Gauge: complete requests waiting for a worker, both queues together.
    pub queued: AtomicU64,
    /// Gauge: bytes of unfinished, queued and running requests.
    pub held_bytes: AtomicU64,
    /// Gauge: the connection cap in force.
    pub max_connections: AtomicU64,
}

impl WireStats {
    /// Requests refused with this status by the wire; 0 for a status that it never uses.
    #[must_use]
    pub fn rejected(&self, status: u16) -> u64 {
        let position = REJECT_STATUSES.iter().position(|s| *s == status);
        position
            .and_then(|i| self.rejects.get(i))
            .map_or(0, |n| n.load(Relaxed))
    }

    pub(super) fn count_reject(&self, status: u16) {
        for (known, counter) in REJECT_STATUSES.iter().zip(&self.rejects) {
            if *known == status {
                counter.fetch_add(1, Relaxed);
            }
        }
    }
}
