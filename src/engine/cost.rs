//! What the parts of a quantum cost: a running estimate of `time = pass + row * n_rows` for each.
//!
//! Pure values, fed by the engine thread after every pass. Least squares over samples whose weight
//! falls by `FORGETTING` with every further one, so that an estimate follows a machine that gets
//! slower or contexts that grow, and one disturbed pass is forgotten after some hundred. Neither part
//! may be negative: a line that would be is drawn through the origin, or flat. While all samples have
//! the same number of rows the two can't be told apart and everything counts as time per pass.
//!
//! What is not here: atomics (`stats`), what is made of it (`runtime::native`, `scheduler`).

/// Part of its weight that a sample loses with each later one.
const FORGETTING: f64 = 1.0 / 64.0;
/// Fewest samples that an estimate is told from.
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

/// Costs of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartCost {
    /// Time of a pass beside its rows.
    pub pass_ns: u64,
    /// Time of a row.
    pub row_ns: u64,
    /// Time of a whole pass with as many rows as passes had lately.
    pub mean_ns: u64,
}

/// See the module doc.
#[derive(Clone, Copy, Debug, Default)]
pub struct CostEstimate {
    n_samples: u32,
    /// Sums over the samples: of weights, rows, times, squares of rows, products.
    weight: f64,
    rows: f64,
    nanos: f64,
    rows_squared: f64,
    rows_nanos: f64,
}

impl CostEstimate {
    /// Adds a pass.
    pub fn observe(&mut self, n_rows: u32, nanos: u64) {
        let keep = 1.0 - FORGETTING;
        let (rows, nanos) = (f64::from(n_rows), nanos as f64);
        self.n_samples = self.n_samples.saturating_add(1);
        self.weight = self.weight * keep + 1.0;
        self.rows = self.rows * keep + rows;
        self.nanos = self.nanos * keep + nanos;
        self.rows_squared = self.rows_squared * keep + rows * rows;
        self.rows_nanos = self.rows_nanos * keep + rows * nanos;
    }

    /// What it has learnt; None with too few samples.
    #[must_use]
    pub fn cost(&self) -> Option<PartCost> {
        if self.n_samples < SAMPLES_MIN {
            return None;
        }
        let (mean_rows, mean_nanos) = (self.rows / self.weight, self.nanos / self.weight);
        let variance = self.rows_squared / self.weight - mean_rows * mean_rows;
        let covariance = self.rows_nanos / self.weight - mean_rows * mean_nanos;
        // Below a thousandth the difference is rounding, or too little to draw a line from.
        let has_spread = variance > 1e-3 * mean_rows * mean_rows;
        let slope = match has_spread {
            true => (covariance / variance).max(0.0),
            false => 0.0,
        };
        let (pass, row) = match mean_nanos - slope * mean_rows {
            below if below < 0.0 => (0.0, self.rows_nanos / self.rows_squared),
            pass => (pass, slope),
        };
        Some(PartCost {
            pass_ns: pass as u64,
            row_ns: row as u64,
            mean_ns: mean_nanos as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(samples: impl IntoIterator<Item = (u32, u64)>) -> Option<PartCost> {
        let mut estimate = CostEstimate::default();
        for (n_rows, nanos) in samples {
            estimate.observe(n_rows, nanos);
        }
        estimate.cost()
    }

    fn near(found: u64, wanted: u64) {
        assert!(
            found.abs_diff(wanted) <= 1 + wanted / 100,
            "{found} {wanted}"
        );
    }

    #[test]
    fn a_line_is_found_again() {
        let line = |n_rows: u32| (n_rows, 1_450_000 + 280_000 * u64::from(n_rows));
        let cost = after((0..40).map(|i| line(1 + i * 7 % 16))).expect("enough samples");
        near(cost.pass_ns, 1_450_000);
        near(cost.row_ns, 280_000);
        assert_eq!(after((1..SAMPLES_MIN).map(line)), None);
    }

    #[test]
    fn equal_rows_count_as_passes() {
        let cost = after([(4, 900); 20]).expect("enough samples");
        assert_eq!((cost.row_ns, cost.pass_ns, cost.mean_ns), (0, 900, 900));
    }

    #[test]
    fn nothing_is_negative() {
        // Faster with more rows: flat. Dearer than in proportion: through the origin.
        let falling = after((0..20).map(|i| (1 + i % 4, 1000 - 100 * u64::from(i % 4))));
        let falling = falling.expect("enough samples");
        assert_eq!(falling.row_ns, 0);
        near(falling.pass_ns, falling.mean_ns);
        let steep = after((0..20).map(|i| (1 + i % 4, 1000 * u64::from(1 + i % 4).pow(2))));
        let steep = steep.expect("enough samples");
        assert_eq!(steep.pass_ns, 0);
        assert!(steep.row_ns > 1000);
    }

    #[test]
    fn it_follows_and_forgets() {
        let slow = (0..50).map(|i| (1 + i % 3, 50_000 * u64::from(1 + i % 3)));
        let fast = (0..600).map(|i| (1 + i % 3, 1000 + 10 * u64::from(1 + i % 3)));
        let cost = after(slow.chain(fast)).expect("enough samples");
        near(cost.pass_ns, 1000);
        near(cost.mean_ns, 1020);
    }
}
