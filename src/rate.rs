//! How fast something drains, and what a client that is refused makes of it.
//!
//! Plain values, fed with the times at which requests ended; whoever owns one guards it (the queue of
//! an executor, the connection layer). What is not here: any decision to refuse.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Ends that a rate looks back at.
pub const WINDOW: usize = 32;
/// Age at which an end is no evidence any more.
pub const FORGET_AFTER: Duration = Duration::from_secs(60);
/// Longest wait that a client is told: the SDKs give up on a `Retry-After` above two minutes, and a
/// rate that was measured now says little about later.
const RETRY_AFTER_MAX_S: f64 = 30.0;

/// Ends per second, over the last [`WINDOW`] of them.
#[derive(Clone, Debug, Default)]
pub struct DrainRate {
    /// Oldest first; at most `WINDOW`.
    ends: VecDeque<Instant>,
}

impl DrainRate {
    /// Something ended.
    pub fn ended(&mut self, now: Instant) {
        push_bounded(&mut self.ends, now);
    }

    /// Ends per second in the last [`FORGET_AFTER`]; None when unknown.
    #[must_use]
    pub fn per_s(&self, now: Instant) -> Option<f64> {
        let is_old = |at: &Instant| now.duration_since(*at) >= FORGET_AFTER;
        let n_old = self.ends.partition_point(is_old);
        let oldest = self.ends.get(n_old)?;
        let span = now.duration_since(*oldest).as_secs_f64();
        (span > 0.0).then(|| (self.ends.len() - n_old) as f64 / span)
    }
}

/// Appends to a window of at most [`WINDOW`] items; the oldest goes.
pub fn push_bounded<T>(window: &mut VecDeque<T>, item: T) {
    if window.len() == WINDOW {
        window.pop_front();
    }
    window.push_back(item);
}

/// Whole seconds, 1..=30, until half of the queue should have drained; 1 when nothing is known.
#[must_use]
pub fn retry_after_s(n_waiting: usize, drain_rate_per_s: Option<f64>) -> u32 {
    let Some(rate) = drain_rate_per_s.filter(|rate| *rate > 0.0) else {
        return 1;
    };
    let seconds = n_waiting as f64 / 2.0 / rate;
    seconds.ceil().clamp(1.0, RETRY_AFTER_MAX_S) as u32
}

/// Whole seconds, 1..=30, until what runs should have ended; 5 when nothing is known.
#[must_use]
pub fn drained_after_s(n_running: usize, drain_rate_per_s: Option<f64>) -> u32 {
    match drain_rate_per_s.filter(|rate| *rate > 0.0) {
        Some(rate) => (n_running as f64 / rate)
            .ceil()
            .clamp(1.0, RETRY_AFTER_MAX_S) as u32,
        None => 5,
    }
}

/// Whole seconds, 1..=30, until work is done of which `done` of `total` took so long; 2 when nothing
/// is known.
#[must_use]
pub fn finished_after_s(done: u64, total: u64, elapsed: Duration) -> u32 {
    if done == 0 || total == 0 {
        return 2;
    }
    let left = total.saturating_sub(done) as f64 / done as f64;
    (elapsed.as_secs_f64() * left)
        .ceil()
        .clamp(1.0, RETRY_AFTER_MAX_S) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_fresh_ends_up_to_now() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut rate = DrainRate::default();
        assert_eq!(rate.per_s(start), None);
        rate.ended(at(0));
        assert_eq!(rate.per_s(at(0)), None); // no time has passed
        assert_eq!(rate.per_s(at(500)), Some(2.0));
        rate.ended(at(1000));
        assert_eq!(rate.per_s(at(1000)), Some(2.0));
        // Nothing ends any more: the rate falls, and is unknown at last.
        assert_eq!(rate.per_s(at(4000)), Some(0.5));
        assert_eq!(rate.per_s(at(61_000)), None);
        for i in 0..100 {
            rate.ended(at(62_000 + i * 10));
        }
        let lately = rate.per_s(at(62_990)).expect("known");
        assert!((lately - 32.0 / 0.31).abs() < 1e-9, "{lately}");
    }

    #[test]
    fn waits_are_whole_seconds_within_bounds() {
        assert_eq!(drained_after_s(3, None), 5);
        assert_eq!(drained_after_s(0, Some(2.0)), 1);
        assert_eq!(drained_after_s(5, Some(2.0)), 3);
        assert_eq!(drained_after_s(500, Some(2.0)), 30);
        assert_eq!(drained_after_s(5, Some(0.0)), 5);
        let second = Duration::from_secs(1);
        assert_eq!(finished_after_s(0, 0, second), 2);
        assert_eq!(finished_after_s(0, 100, second), 2);
        assert_eq!(finished_after_s(10, 100, second), 9);
        assert_eq!(finished_after_s(1, 100, second), 30);
        assert_eq!(finished_after_s(100, 100, second), 1);
        for (n_waiting, rate, expected_s) in [
            (100, None, 1),
            (100, Some(0.0), 1),
            (100, Some(10.0), 5),
            (100, Some(1.0), 30),
            (0, Some(1.0), 1),
            (3, Some(1e9), 1),
            (usize::MAX, Some(1e-300), 30),
        ] {
            assert_eq!(
                retry_after_s(n_waiting, rate),
                expected_s,
                "{n_waiting} {rate:?}"
            );
        }
    }
}
