//! What an executor has measured of itself lately: pure values, fed at completions, read at
//! admission.
//!
//! Two moving averages (time from dispatch to the end, time from dispatch to the first token), the
//! smallest recent sample of each, and the rate at which slots come free. Nothing here can stay
//! wrong for ever:
//!
//! * a single sample of size S weighs `alpha * (1 - alpha)^n * S` in a mean after n further ones:
//!   at 0.2 less than 1 % of it is left after [`n_to_forget`] `(0.2, 0.05) = 14` of them;
//! * a floor is the smallest of the last [`WINDOW`] samples that are younger than
//!   [`FORGET_AFTER`], and is known only while there are [`FLOOR_SAMPLES_MIN`] of them: when every
//!   request is refused because of it, its samples grow old and it is gone;
//! * the means are not used any more by an executor that has been idle for [`FORGET_AFTER`].
//!
//! Owned by the queue, behind its lock. What is not here: what is made of it (`admission`).

use crate::rate::{DrainRate, FORGET_AFTER, WINDOW, push_bounded};
use std::collections::VecDeque;
use std::time::Instant;

/// Fewest fresh samples from which a floor is told.
pub const FLOOR_SAMPLES_MIN: usize = 8;

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// How long it held a slot, in milliseconds.
    pub service_ms: f64,
    /// From dispatch to its first token, in milliseconds; None = it generated nothing.
    pub first_token_ms: Option<f64>,
}

/// What admission reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Moving average of the time from dispatch to completion; None before the first completion.
    pub ema_dispatch_ms: Option<f64>,
    /// Moving average of the time from dispatch to the first token.
    pub ema_first_token_ms: Option<f64>,
    /// Smallest recent time from dispatch to completion; None with too little evidence.
    pub floor_service_ms: Option<f64>,
    /// Smallest recent time from dispatch to the first token.
    pub floor_first_token_ms: Option<f64>,
    /// Completions per second lately; None when unknown.
    pub drain_rate_per_s: Option<f64>,
}

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Estimates {
    alpha: f64,
    ema_dispatch_ms: Option<f64>,
    ema_first_token_ms: Option<f64>,
    /// Oldest first; at most `WINDOW`.
    samples: VecDeque<(Instant, Sample)>,
    /// Slots that came free, however that was.
    releases: DrainRate,
}

impl Estimates {
    /// Nothing is known. `alpha`: weight of the newest sample in the means, 0..=1.
    #[must_use]
    pub fn new(alpha: f64) -> Self {
        Self {
            alpha,
            ema_dispatch_ms: None,
            ema_first_token_ms: None,
            samples: VecDeque::with_capacity(WINDOW),
            releases: DrainRate::default(),
        }
    }

    /// A slot came free; `sample` if its request ended well.
    pub fn released(&mut self, sample: Option<Sample>, now: Instant) {
        self.releases.ended(now);
        let Some(sample) = sample else { return };
        let ema = next_ema(self.ema_dispatch_ms, sample.service_ms, self.alpha);
        self.ema_dispatch_ms = Some(ema);
        if let Some(first_token_ms) = sample.first_token_ms {
            let ema = next_ema(self.ema_first_token_ms, first_token_ms, self.alpha);
            self.ema_first_token_ms = Some(ema);
        }
        push_bounded(&mut self.samples, (now, sample));
    }

    /// Moving average of the time from dispatch to completion, however old.
    #[must_use]
    pub fn ema_dispatch_ms(&self) -> Option<f64> {
        self.ema_dispatch_ms
    }

    /// Completions per second in the last [`FORGET_AFTER`]; None when unknown.
    #[must_use]
    pub fn drain_rate_per_s(&self, now: Instant) -> Option<f64> {
        self.releases.per_s(now)
    }

    /// Everything, as far as it is still evidence. `is_idle`: nothing waits and nothing runs, so
    /// that no fresh sample is under way.
    #[must_use]
    pub fn measured(&self, now: Instant, is_idle: bool) -> Measured {
        let is_fresh = |at: Instant| now.duration_since(at) < FORGET_AFTER;
        let fresh = || {
            let fresh = self.samples.iter().filter(|(at, _)| is_fresh(*at));
            fresh.map(|(_, sample)| sample)
        };
        let stale = is_idle && self.samples.back().is_some_and(|(at, _)| !is_fresh(*at));
        Measured {
            ema_dispatch_ms: self.ema_dispatch_ms.filter(|_| !stale),
            ema_first_token_ms: self.ema_first_token_ms.filter(|_| !stale),
            floor_service_ms: floor(fresh().map(|sample| sample.service_ms)),
            floor_first_token_ms: floor(fresh().filter_map(|sample| sample.first_token_ms)),
            drain_rate_per_s: self.drain_rate_per_s(now),
        }
    }
}

/// The smallest, if there are enough.
fn floor(samples: impl Iterator<Item = f64>) -> Option<f64> {
    let (n, smallest) = samples.fold((0, f64::INFINITY), |(n, smallest), sample| {
        (n + 1, f64::min(smallest, sample))
    });
    (n >= FLOOR_SAMPLES_MIN).then_some(smallest)
}

/// The moving average after one more sample.
#[must_use]
pub fn next_ema(previous: Option<f64>, sample: f64, alpha: f64) -> f64 {
    previous.map_or(sample, |ema| ema + alpha.clamp(0.0, 1.0) * (sample - ema))
}

/// Further samples until one sample's weight in the mean is at most `rest` (0..1) of what it was
/// at first.
#[must_use]
pub fn n_to_forget(alpha: f64, rest: f64) -> u32 {
    (rest.ln() / (1.0 - alpha.clamp(0.0, 1.0)).ln()).ceil() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn sample(service_ms: f64) -> Option<Sample> {
        Some(Sample {
            service_ms,
            first_token_ms: Some(service_ms / 10.0),
        })
    }

    #[test]
    fn one_slow_request_is_forgotten_after_n_dispatches() {
        let now = Instant::now();
        for (alpha, slow_ms) in [(0.2, 60_000.0), (0.2, 1e9), (0.5, 1e9), (0.05, 60_000.0)] {
            let mut estimates = Estimates::new(alpha);
            estimates.released(sample(100.0), now);
            estimates.released(sample(slow_ms), now);
            let poisoned = estimates.ema_dispatch_ms().expect("two samples");
            // Within 1 % of the fresh samples after so many.
            let n = n_to_forget(alpha, 1.0 / (poisoned - 100.0));
            for _ in 0..n {
                estimates.released(sample(100.0), now);
            }
            let healed = estimates.ema_dispatch_ms().expect("samples");
            assert!(healed <= 101.0, "{alpha} {slow_ms}: {healed} after {n}");
        }
        assert_eq!(n_to_forget(0.2, 0.05), 14);
        assert_eq!(n_to_forget(0.2, 0.01), 21);
    }

    #[test]
    fn a_floor_needs_evidence_and_forgets_by_number_and_by_time() {
        let start = Instant::now();
        let mut estimates = Estimates::new(0.2);
        let floor = |estimates: &Estimates, now| estimates.measured(now, false).floor_service_ms;
        for n in 1..=FLOOR_SAMPLES_MIN {
            assert_eq!(floor(&estimates, start), None, "{n}");
            estimates.released(sample(1000.0 + n as f64), start);
        }
        assert_eq!(floor(&estimates, start), Some(1001.0));
        let first_token = estimates.measured(start, false).floor_first_token_ms;
        assert_eq!(first_token, Some(100.1));
        estimates.released(sample(5.0), start);
        assert_eq!(floor(&estimates, start), Some(5.0));
        for _ in 0..WINDOW {
            estimates.released(sample(2000.0), start); // the fast one leaves the window
        }
        assert_eq!(floor(&estimates, start), Some(2000.0));
        let later = start + FORGET_AFTER;
        assert!(floor(&estimates, later - Duration::from_millis(1)).is_some());
        assert_eq!(floor(&estimates, later), None, "nothing fresh is left");
    }

    #[test]
    fn means_grow_stale_only_when_idle() {
        let start = Instant::now();
        let mut estimates = Estimates::new(0.2);
        estimates.released(sample(7.0), start);
        let later = start + FORGET_AFTER;
        assert_eq!(estimates.measured(later, false).ema_dispatch_ms, Some(7.0));
        assert_eq!(estimates.measured(later, true).ema_dispatch_ms, None);
        assert_eq!(estimates.measured(start, true).ema_dispatch_ms, Some(7.0));
    }

    #[test]
    fn ends_without_a_sample_count_for_the_drain_rate_only() {
        let start = Instant::now();
        let mut estimates = Estimates::new(0.2);
        assert_eq!(estimates.drain_rate_per_s(start), None);
        for _ in 0..10 {
            estimates.released(None, start);
        }
        assert_eq!(
            estimates.drain_rate_per_s(start),
            None,
            "no time has passed"
        );
        let later = start + Duration::from_secs(5);
        assert_eq!(estimates.drain_rate_per_s(later), Some(2.0));
        // An idle time is no slow drain.
        estimates.released(None, start + FORGET_AFTER);
        let busy_again = start + FORGET_AFTER + Duration::from_secs(1);
        assert_eq!(estimates.drain_rate_per_s(busy_again), Some(1.0));
        assert_eq!(estimates.ema_dispatch_ms(), None);
    }
}
