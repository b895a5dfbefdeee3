//! Scans over one row of logits: extremes, sums of exponentials, the best few.
//!
//! Pure functions on slices. They are written in lanes and blocks so that the compiler vectorizes
//! them: at a vocabulary of 50k they run once per generated token and must not show in a step. The
//! order of every sum is fixed by the length alone, so equal logits give equal results.

use crate::request::TokenId;

/// Values that are looked at together; a block that cannot matter is skipped whole.
pub(super) const BLOCK: usize = 64;
/// Independent accumulators.
const LANES: usize = 8;

/// Whether no value is NaN or infinite.
pub(super) fn all_finite(values: &[f32]) -> bool {
    // `x * 0` is 0 for finite x and NaN otherwise, and one NaN makes the sum NaN.
    let mut sums = [0.0_f32; LANES];
    let (chunks, tail) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += value * 0.0;
        }
    }
    sums.iter().chain(tail).all(|value| value.is_finite())
}

/// The largest value of a block; NaN is never the largest.
pub(super) fn max_of(block: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut most = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (most, value) in most.iter_mut().zip(chunk) {
            *most = larger(*most, *value);
        }
    }
    most.iter()
        .chain(tail)
        .copied()
        .fold(f32::NEG_INFINITY, larger)
}

/// The largest value and where it stands; the lowest index among equals. `(0, -inf)` when empty.
pub(super) fn argmax(values: &[f32]) -> (usize, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, block) in values.chunks(BLOCK).enumerate() {
        let most = max_of(block);
        if most > best.1 {
            best = (index, most);
        }
    }
    let start = best.0 * BLOCK;
    let within = values[start.min(values.len())..]
        .iter()
        .position(|value| *value == best.1);
    (start + within.unwrap_or(0), best.1)
}

/// The `n` largest values, largest first, lower index first among equals.
pub(super) fn best(values: &[f32], n: usize) -> Vec<(TokenId, f32)> {
    let mut found: Vec<(TokenId, f32)> = Vec::with_capacity(n.min(values.len()) + 1);
    if n == 0 {
        return found;
    }
    for (block_index, block) in values.chunks(BLOCK).enumerate() {
        if found.len() == n && max_of(block) <= found[n - 1].1 {
            continue;
        }
        for (offset, value) in block.iter().enumerate() {
            if found.len() == n && *value <= found[n - 1].1 {
                continue;
            }
            let place = found.partition_point(|(_, kept)| *kept >= *value);
            found.insert(place, ((block_index * BLOCK + offset) as TokenId, *value));
            found.truncate(n);
        }
    }
    found
}

/// `e^x` for `x <= 0` with a relative error below 3e-7; exactly 0 below -87, where f32 ends.
pub(super) fn exp_nonpositive(x: f32) -> f32 {
    // e^x = 2^k * e^r with k = round(x / ln 2) and |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an
    // integer and leaves it in the low bits, which saves a conversion that would not vectorize.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = x - k * LN2_HIGH - k * LN2_LOW;
    // The Taylor series to the sixth power; its remainder is below 2e-7 at the ends.
    let mut sum = 1.0 / 720.0;
    for coefficient in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + coefficient;
    }
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()) << 23;
    let value = f32::from_bits(sum.to_bits().wrapping_add(exponent));
    if x < -87.0 { 0.0 } else { value }
}

/// Sum in f64 in a fixed order.
pub(super) fn sum(values: &[f32]) -> f64 {
    let mut sums = [0.0_f64; LANES];
    let (chunks, tail) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(*value);
        }
    }
    sums.iter().sum::<f64>() + tail.iter().map(|value| f64::from(*value)).sum::<f64>()
}

/// `ln Σ e^value`, accumulated in f64. `max` is the largest value.
pub(super) fn log_sum_exp(values: &[f32], max: f32) -> f64 {
    let mut block_weights = [0.0_f32; BLOCK];
    let mut total = 0.0;
    for block in values.chunks(BLOCK) {
        let weights = &mut block_weights[..block.len()];
        for (weight, value) in weights.iter_mut().zip(block) {
            *weight = exp_nonpositive(value - max);
        }
        total += sum(weights);
    }
    f64::from(max) + total.ln()
}

/// `weights[i] = e^((values[i] - max) * scale)`, the largest is 1. Returns their sum.
pub(super) fn weigh(values: &[f32], max: f32, scale: f32, weights: &mut Vec<f32>) -> f64 {
    weights.clear();
    weights.extend(
        values
            .iter()
            .map(|value| exp_nonpositive((value - max) * scale)),
    );
    sum(weights)
}

/// The index at which the running sum of `weights` first exceeds `target`; the last one with a
/// weight when rounding keeps the sum below it.
pub(super) fn pick(weights: &[f32], target: f64) -> usize {
    const STRIDE: usize = 256;
    let mut below = 0.0;
    let mut last = 0;
    for (index, block) in weights.chunks(STRIDE).enumerate() {
        let through = below + sum(block);
        if through > target {
            let mut running = below;
            for (offset, weight) in block.iter().enumerate() {
                running += f64::from(*weight);
                if *weight > 0.0 {
                    last = index * STRIDE + offset;
                    if running > target {
                        return last;
                    }
                }
            }
        } else if let Some(offset) = block.iter().rposition(|weight| *weight > 0.0) {
            last = index * STRIDE + offset;
        }
        below = through;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_exponential_is_close_and_ends_in_zero() {
        for step in 0..87_000 {
            let x = -(step as f32) / 1000.0;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_nonpositive(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "e^{x} is off by {error}");
        }
        assert_eq!(exp_nonpositive(0.0), 1.0);
        for x in [-87.5, -1e9, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp_nonpositive(x), 0.0, "{x}");
        }
    }

    #[test]
    fn one_bad_value_is_found_anywhere() {
        for len in [1, 7, 8, 9, 64, 100] {
            assert!(all_finite(&vec![-3.0e38; len]));
            for at in 0..len {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut values = vec![1.0; len];
                    values[at] = bad;
                    assert!(!all_finite(&values), "{bad} at {at} of {len}");
                }
            }
        }
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        let mut values = vec![0.0; 300];
        assert_eq!(argmax(&values), (0, 0.0));
        values[70] = 2.0;
        values[200] = 2.0;
        assert_eq!(argmax(&values), (70, 2.0));
        assert_eq!(best(&values, 3), [(70, 2.0), (200, 2.0), (0, 0.0)]);
    }

    #[test]
    fn nothing_without_weight_is_picked() {
        let weights = [0.0, 0.5, 0.0, 0.5, 0.0];
        for (target, index) in [(0.0, 1), (0.49, 1), (0.5, 3), (0.99, 3), (1.0, 3), (9.0, 3)] {
            assert_eq!(pick(&weights, target), index, "{target}");
        }
        let mut long = vec![0.0; 1000];
        long[700] = 1.0;
        assert_eq!((pick(&long, 0.0), pick(&long, 2.0)), (700, 700));
    }

    proptest! {
        #[test]
        fn scans_agree_with_plain_sorting(
            values in prop::collection::vec((-20..20_i32).prop_map(|x| x as f32 / 2.0), 1..400),
            n in 0..30_usize,
        ) {
            let mut sorted: Vec<(u32, f32)> = (0..).zip(values.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            prop_assert_eq!(argmax(&values), (sorted[0].0 as usize, sorted[0].1));
            let exact: f64 = values.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
            prop_assert!((log_sum_exp(&values, sorted[0].1) - exact).abs() < 1e-6);
            sorted.truncate(n);
            prop_assert_eq!(best(&values, n), sorted);
        }
    }
}
