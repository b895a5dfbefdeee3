//! Counts that others keep, for metrics: what they counted since the last scrape.
//!
//! Plain numbers, no lock. What is not here: the families that they are added to (`metrics`).

use super::snapshot::Snapshot;
use crate::runtime::RowCounts;

/// Monotonic values that runtimes and the queue count themselves, see [`CountedElsewhere`].
#[rustfmt::skip]
pub(super) const COUNTED_ELSEWHERE: [(&str, &str); 5] = [
    ("tinyloop_preemptions_total", "Running requests that lost their place to others: their slot to a higher priority, or their KV blocks."),
    ("tinyloop_prefix_queries_total", "Prompts looked up in the prefix cache."),
    ("tinyloop_prefix_hits_total", "Prompts of which a part was found in the prefix cache."),
    ("tinyloop_loop_iterations_total", "Loops that tokens ran: one for every token in every pass of a model's core."),
    ("tinyloop_loop_iterations_saved_total", "Loops that tokens did not run because they left the loop early."),
];

/// Counts that the runtimes of one executor and its queue keep.
#[derive(Clone, Copy, Default)]
pub(super) struct CountedElsewhere {
    /// In the order of [`COUNTED_ELSEWHERE`].
    pub(super) counts: [u64; COUNTED_ELSEWHERE.len()],
    pub(super) rows: RowCounts,
}

impl CountedElsewhere {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        let by_queue = Self {
            counts: [snapshot.preemptions, 0, 0, 0, 0],
            ..Self::default()
        };
        let replicas = snapshot.replicas.iter().map(|replica| &replica.status);
        let counted = replicas.map(|status| Self {
            counts: [
                status.preemptions,
                status.prefix_queries,
                status.prefix_hits,
                status.loop_iterations,
                status.loop_iterations_saved,
            ],
            rows: status.row_counts,
        });
        counted.fold(by_queue, |sum, more| sum.zip(more, u64::saturating_add))
    }

    /// What was counted since `earlier`.
    pub(super) fn since(self, earlier: Self) -> Self {
        self.zip(earlier, u64::saturating_sub)
    }

    /// Each the greater of both: a scrape with an older snapshot must not set anything back.
    pub(super) fn max(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    fn zip(self, other: Self, combine: fn(u64, u64) -> u64) -> Self {
        let counts = |index| combine(self.counts[index], other.counts[index]);
        Self {
            counts: std::array::from_fn(counts),
            rows: zip_rows(self.rows, other.rows, combine),
        }
    }
}

fn zip_rows(a: RowCounts, b: RowCounts, combine: fn(u64, u64) -> u64) -> RowCounts {
    RowCounts {
        buckets: std::array::from_fn(|index| combine(a.buckets[index], b.buckets[index])),
        n_rows: combine(a.n_rows, b.n_rows),
    }
}
