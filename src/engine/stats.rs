//! What other threads may read of a running engine, without a lock.
//!
//! Written by the engine thread only, except `sent`, which submitters raise so that a job is
//! counted from the moment it was handed over. Each figure is exact by itself; a snapshot of
//! several may straddle a quantum, which is good enough for metrics and health.

use super::cost::{MeanTime, N_PARTS, Part};
use crate::model::Segment;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Buckets of [`RowCounts`]: quanta of at most 1, 2, 4, .. 1024 rows, and of more.
pub const N_ROW_BUCKETS: usize = 12;

/// How many rows quanta had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Quanta by rows; bucket `i` counts those above `2^(i-1)` and up to `2^i`, the last the rest.
    pub buckets: [u64; N_ROW_BUCKETS],
    /// Rows of all quanta.
    pub n_rows: u64,
}

impl RowCounts {
    fn bucket(n_rows: u32) -> usize {
        let n_rows = n_rows.clamp(1, 1 << (N_ROW_BUCKETS - 1));
        n_rows.next_power_of_two().trailing_zeros() as usize
    }
}

/// Counters and gauges of one engine.
#[derive(Debug)]
pub struct EngineStats {
    born: Instant,
    /// Why it died.
    dead: OnceLock<String>,
    /// Nanoseconds after `born` plus 1 at which the running step began; 0 = idle.
    step_began: AtomicU64,
    /// Jobs in the channel.
    sent: AtomicU32,
    /// Jobs that the engine took and that do not run.
    waiting: AtomicU32,
    parked: AtomicU32,
    running: AtomicU32,
    pages_used: AtomicU32,
    pages_cached: AtomicU32,
    pages_pinned: AtomicU32,
    batch_rows: AtomicU32,
    row_buckets: [AtomicU64; N_ROW_BUCKETS],
    n_rows: AtomicU64,
    quanta: AtomicU64,
    step_nanos: AtomicU64,
    pass_nanos: AtomicU64,
    preemptions: AtomicU64,
    prefix_queries: AtomicU64,
    prefix_hits: AtomicU64,
    loop_iterations: AtomicU64,
    loop_iterations_saved: AtomicU64,
    /// Mean time of a pass in nanoseconds, by part; 0 while it is not known.
    mean_pass_ns: [AtomicU64; N_PARTS],
}

/// What passes cost lately, by [`Part`]; kept by the engine thread.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QuantumTimes {
    parts: [MeanTime; N_PARTS],
}

impl QuantumTimes {
    /// A pass of a segment, without logits.
    pub(super) fn blocks(&mut self, segment: Segment, took: Duration) {
        let part = match segment {
            Segment::Prelude => Part::Prelude,
            Segment::Core => Part::Core,
            Segment::Coda => Part::Coda,
        };
        self.parts[part as usize].observe(took);
    }

    /// Logits of some rows.
    pub(super) fn head(&mut self, n_rows: usize, took: Duration) {
        if n_rows > 0 {
            self.parts[Part::Head as usize].observe(took);
        }
    }
}

/// One reading of [`EngineStats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// False after a fault.
    pub alive: bool,
    /// Sequences that hold a place in the batch.
    pub running: u32,
    /// Jobs that wait for one.
    pub waiting: u32,
    /// Jobs that were parked; not part of the above.
    pub parked: u32,
    /// KV pages in use by sequences.
    pub pages_used: u32,
    /// KV pages kept for reuse only.
    pub pages_cached: u32,
    /// KV pages that pinned prefixes keep, in use or not.
    pub pages_pinned: u32,
    /// Rows of the latest quantum.
    pub batch_rows: u32,
    /// Rows of all quanta so far.
    pub row_counts: RowCounts,
    /// Quanta run.
    pub quanta: u64,
    /// Time of all steps that ended, from planning to publishing.
    pub time_in_steps: Duration,
    /// The part of it inside the model's passes; the rest is the engine's own.
    pub time_in_passes: Duration,
    /// Sequences preempted.
    pub preemptions: u64,
    /// Prompts looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompts of which a part was found there.
    pub prefix_hits: u64,
    /// Loops that rows ran: one for every row of a pass of the core.
    pub loop_iterations: u64,
    /// Loops that rows did not run because they left early.
    pub loop_iterations_saved: u64,
    /// Age of the running step; None when idle.
    pub step_age: Option<Duration>,
}

/// What the engine thread publishes after each quantum.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gauges {
    pub(super) running: u32,
    pub(super) waiting: u32,
    pub(super) parked: u32,
    pub(super) pages_used: u32,
    pub(super) pages_cached: u32,
    pub(super) pages_pinned: u32,
}

impl EngineStats {
    pub(super) fn new() -> Self {
        Self {
            born: Instant::now(),
            dead: OnceLock::new(),
            step_began: AtomicU64::new(0),
            sent: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            running: AtomicU32::new(0),
            pages_used: AtomicU32::new(0),
            pages_cached: AtomicU32::new(0),
            pages_pinned: AtomicU32::new(0),
            batch_rows: AtomicU32::new(0),
            row_buckets: [const { AtomicU64::new(0) }; N_ROW_BUCKETS],
            n_rows: AtomicU64::new(0),
            quanta: AtomicU64::new(0),
            step_nanos: AtomicU64::new(0),
            pass_nanos: AtomicU64::new(0),
            preemptions: AtomicU64::new(0),
            prefix_queries: AtomicU64::new(0),
            prefix_hits: AtomicU64::new(0),
            loop_iterations: AtomicU64::new(0),
            loop_iterations_saved: AtomicU64::new(0),
            mean_pass_ns: Default::default(),
        }
    }

    /// What a pass of a part took lately; None before it was measured.
    #[must_use]
    pub fn mean_pass(&self, part: Part) -> Option<Duration> {
        let nanos = self.mean_pass_ns[part as usize].load(Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// One reading.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let now = self.nanos();
        let step_age = match self.step_began.load(Relaxed) {
            0 => None,
            began => Some(Duration::from_nanos(now.saturating_sub(began))),
        };
        Snapshot {
            alive: self.dead.get().is_none(),
            running: self.running.load(Relaxed),
            waiting: self.sent.load(Relaxed) + self.waiting.load(Relaxed),
            parked: self.parked.load(Relaxed),
            pages_used: self.pages_used.load(Relaxed),
            pages_cached: self.pages_cached.load(Relaxed),
            pages_pinned: self.pages_pinned.load(Relaxed),
            batch_rows: self.batch_rows.load(Relaxed),
            row_counts: RowCounts {
                buckets: std::array::from_fn(|index| self.row_buckets[index].load(Relaxed)),
                n_rows: self.n_rows.load(Relaxed),
            },
            quanta: self.quanta.load(Relaxed),
            time_in_steps: Duration::from_nanos(self.step_nanos.load(Relaxed)),
            time_in_passes: Duration::from_nanos(self.pass_nanos.load(Relaxed)),
            preemptions: self.preemptions.load(Relaxed),
            prefix_queries: self.prefix_queries.load(Relaxed),
            prefix_hits: self.prefix_hits.load(Relaxed),
            loop_iterations: self.loop_iterations.load(Relaxed),
            loop_iterations_saved: self.loop_iterations_saved.load(Relaxed),
            step_age,
        }
    }

    fn nanos(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX - 1) + 1
    }

    /// A job enters the channel.
    pub(super) fn job_sent(&self) {
        self.sent.fetch_add(1, Relaxed);
    }

    /// A job left the channel.
    pub(super) fn job_taken(&self) {
        self.sent.fetch_sub(1, Relaxed);
    }

    /// Returns the moment, for [`Self::step_ends`].
    pub(super) fn step_begins(&self) -> u64 {
        let now = self.nanos();
        self.step_began.store(now, Relaxed);
        now
    }

    /// Adds up where the time of a step went.
    pub(super) fn step_ends(&self, began: u64, in_pass: Duration) {
        let n_nanos = self.nanos().saturating_sub(began);
        let in_pass = u64::try_from(in_pass.as_nanos()).unwrap_or(u64::MAX);
        self.step_nanos.fetch_add(n_nanos, Relaxed);
        self.pass_nanos.fetch_add(in_pass, Relaxed);
    }

    /// Why the engine died; None while it lives.
    #[must_use]
    pub fn death(&self) -> Option<String> {
        self.dead.get().cloned()
    }

    pub(super) fn idle(&self) {
        self.step_began.store(0, Relaxed);
        self.batch_rows.store(0, Relaxed);
    }

    pub(super) fn died(&self, why: &str) {
        let _ = self.dead.set(why.to_owned()); // it dies once
        self.idle();
        self.gauges(&Gauges::default());
    }

    pub(super) fn gauges(&self, gauges: &Gauges) {
        self.running.store(gauges.running, Relaxed);
        self.waiting.store(gauges.waiting, Relaxed);
        self.parked.store(gauges.parked, Relaxed);
        self.pages_used.store(gauges.pages_used, Relaxed);
        self.pages_cached.store(gauges.pages_cached, Relaxed);
        self.pages_pinned.store(gauges.pages_pinned, Relaxed);
    }

    pub(super) fn quantum(&self, n_rows: u32) {
        self.batch_rows.store(n_rows, Relaxed);
        self.row_buckets[RowCounts::bucket(n_rows)].fetch_add(1, Relaxed);
        self.n_rows.fetch_add(u64::from(n_rows), Relaxed);
        self.quanta.fetch_add(1, Relaxed);
    }

    /// Loops run in a pass of the core, and loops that its rows will not run.
    pub(super) fn loops(&self, n_run: u64, n_saved: u64) {
        self.loop_iterations.fetch_add(n_run, Relaxed);
        self.loop_iterations_saved.fetch_add(n_saved, Relaxed);
    }

    /// Shows what is known of costs.
    pub(super) fn costs(&self, times: &QuantumTimes) {
        for (shown, part) in self.mean_pass_ns.iter().zip(&times.parts) {
            if let Some(mean) = part.mean() {
                shown.store(mean.as_nanos() as u64, Relaxed);
            }
        }
    }

    pub(super) fn preempted(&self) {
        self.preemptions.fetch_add(1, Relaxed);
    }

    pub(super) fn prefix_lookup(&self, is_hit: bool) {
        self.prefix_queries.fetch_add(1, Relaxed);
        self.prefix_hits.fetch_add(u64::from(is_hit), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quanta_are_counted_by_powers_of_two() {
        for (n_rows, bucket) in [
            (0, 0),
            (1, 0),
            (2, 1),
            (3, 2),
            (4, 2),
            (5, 3),
            (1024, 10),
            (1025, 11),
            (u32::MAX, 11),
        ] {
            assert_eq!(RowCounts::bucket(n_rows), bucket, "{n_rows}");
        }
        let stats = EngineStats::new();
        stats.quantum(3);
        stats.quantum(512);
        let counts = stats.snapshot().row_counts;
        assert_eq!((counts.buckets[2], counts.buckets[9]), (1, 1));
        assert_eq!(counts.n_rows, 515);
    }
}
