//! What the parts of a quantum cost: a running mean of the time of a pass, for each.
//!
//! Pure values, fed by the engine thread after every pass. A sample's weight falls by `FORGETTING` with
//! every further one, so that a mean follows a machine that gets slower or contexts that grow, and one
//! disturbed pass is forgotten after some hundred. It is the time of a whole pass with as many rows as
//! passes had lately; how much of that is the pass and how much its rows is not told apart.
//!
//! What is not here: atomics (`stats`), what is made of it (`runtime::native`, `scheduler`).

use std::time::Duration;

/// Part of its weight that a sample loses with each later one.
const FORGETTING: f64 = 1.0 / 64.0;
/// Fewest samples that a mean is told from.
pub const SAMPLES_MIN: u32 = 8;

/// What is timed apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A pass of the prelude.
    Prelude,
    /// A pass of the core.
    Core,
    /// A pass of the coda.
    Coda,
    /// Logits.
    Head,
}

/// Number of [`Part`]s.
pub const N_PARTS: usize = 4;

/// See the module doc.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanTime {
    n_samples: u32,
    /// Sums over the samples: of weights, and of weighted times.
    weight: f64,
    nanos: f64,
}

impl MeanTime {
    /// Adds a pass.
    pub fn observe(&mut self, took: Duration) {
        let keep = 1.0 - FORGETTING;
        self.n_samples = self.n_samples.saturating_add(1);
        self.weight = self.weight * keep + 1.0;
        self.nanos = self.nanos * keep + took.as_nanos() as f64;
    }

    /// What it has learnt; None with too few samples.
    #[must_use]
    pub fn mean(&self) -> Option<Duration> {
        let is_enough = self.n_samples >= SAMPLES_MIN;
        is_enough.then(|| Duration::from_nanos((self.nanos / self.weight) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(samples: impl IntoIterator<Item = u64>) -> Option<Duration> {
        let mut mean = MeanTime::default();
        for micros in samples {
            mean.observe(Duration::from_micros(micros));
        }
        mean.mean()
    }

    #[test]
    fn a_mean_follows_and_forgets() {
        assert_eq!(after([5; SAMPLES_MIN as usize - 1]), None);
        let steady = after([5; SAMPLES_MIN as usize]).expect("enough samples");
        assert!(steady.abs_diff(Duration::from_micros(5)) <= Duration::from_nanos(1));
        let slow = std::iter::repeat_n(50_000, 50);
        let fast = std::iter::repeat_n(1000, 700);
        let found = after(slow.chain(fast)).expect("enough samples");
        assert!(
            found.abs_diff(Duration::from_millis(1)) < Duration::from_micros(5),
            "{found:?}"
        );
        // One disturbed pass weighs what it should at first, and next to nothing after some hundred.
        let disturbed = |n_later| {
            let samples = std::iter::repeat_n(1000, 500).chain([100_000]);
            after(samples.chain(std::iter::repeat_n(1000, n_later))).expect("enough samples")
        };
        assert!(disturbed(0) > Duration::from_micros(2400));
        assert!(disturbed(500) < Duration::from_micros(1002));
    }
}
