//! The place of a request in the queue: pure.
//!
//! What is not here: the queue.

/// Place in the queue; smaller is sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueKey {
    /// Milliseconds, see the module doc.
    pub(crate) rank: i64,
    /// Submit order; unique within an executor.
    pub(crate) number: u64,
}

/// The key of a request that came `queued_ms` after some fixed moment.
pub(super) fn queue_key(
    queued_ms: u64,
    priority: i32,
    aging_interval_ms: u64,
    number: u64,
) -> QueueKey {
    let clamp = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let rank = if aging_interval_ms == 0 {
        -i64::from(priority)
    } else {
        let gained = i64::from(priority).saturating_mul(clamp(aging_interval_ms));
        clamp(queued_ms).saturating_sub(gained)
    };
    QueueKey { rank, number }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Without aging the order is exactly (priority desc, submit order).
        #[test]
        fn without_aging_the_order_is_priority_then_submit(
            jobs in prop::collection::vec((0_u64..1000, -100_i32..=100), 1..50)
        ) {
            let mut keys: Vec<_> = jobs.iter().zip(0..)
                .map(|(&(queued_ms, priority), number)| queue_key(queued_ms, priority, 0, number))
                .collect();
            keys.sort();
            let mut expected: Vec<u64> = (0..jobs.len() as u64).collect();
            expected.sort_by_key(|&number| -jobs[number as usize].1);
            let order: Vec<u64> = keys.iter().map(|key| key.number).collect();
            prop_assert_eq!(order, expected);
        }

        /// A job is overtaken only by those that come within `levels * interval` after it.
        #[test]
        fn aging_bounds_how_long_one_can_be_overtaken(
            queued_ms in 0_u64..1_000_000, low in -100_i32..=100, levels in 0_i32..=200,
            interval in 1_u64..100_000, later_ms in 0_u64..100_000_000,
        ) {
            let high = (low + levels).min(100);
            let waits = queue_key(queued_ms, low, interval, 0);
            let comes = queue_key(queued_ms + later_ms, high, interval, 1);
            let bound = (high - low) as u64 * interval;
            prop_assert_eq!(comes < waits, later_ms < bound);
        }
    }
}
