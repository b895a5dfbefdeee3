//! The arithmetic of the reference backend, one short function per formula.
//!
//! Pure. Every sum has one stated order, whatever the compiler vectorizes.

use crate::backend::{RopePairs, RopeTable};

/// Partial sums of a dot product. Independent sums let the compiler use vector registers; their
/// number and the order in which they are added are fixed, so the result is too.
const LANES: usize = 16;

/// `Σ a[i] b[i]`: lane `l` sums the products at `i ≡ l (mod LANES)` in ascending order, then the
/// lanes are added pairwise (`l` and `l + half`), then the tail in ascending order.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    let tail = a_tail.iter().zip(b_tail);
    tail.fold(lanes[0], |sum, (a, b)| sum + a * b)
}

/// `out[r][o] = Σ_i weights[o][i] inputs[r][i]`. Weights (n_out, n_in), inputs (n_rows, n_in).
pub(super) fn matmul(weights: &[f32], n_out: usize, n_in: usize, inputs: &[f32]) -> Vec<f32> {
    // A few input rows stay in the cache while the weights stream past them once.
    const ROWS: usize = 16;
    let mut out = vec![0.0; inputs.len() / n_in * n_out];
    let blocks = inputs.chunks(ROWS * n_in);
    for (inputs, out) in blocks.zip(out.chunks_mut(ROWS * n_out)) {
        for (o, weights) in weights.chunks_exact(n_in).enumerate() {
            for (r, input) in inputs.chunks_exact(n_in).enumerate() {
                out[r * n_out + o] = dot(weights, input);
            }
        }
    }
    out
}

/// `x / sqrt(mean(x²) + epsilon) * weight`, in place.
pub(super) fn rms_norm(x: &mut [f32], weight: &[f32], epsilon: f32) {
    assert_eq!(x.len(), weight.len());
    let mean_square = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean_square + epsilon).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x *= scale * weight;
    }
}

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias`, in place.
pub(super) fn layer_norm(x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, epsilon: f32) {
    assert_eq!(x.len(), weight.len());
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    x.iter_mut().for_each(|x| *x -= mean);
    let scale = 1.0 / (dot(x, x) / n + epsilon).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x *= scale * weight;
    }
    if let Some(bias) = bias {
        add(x, bias);
    }
}

/// `x * Φ(x)` with the distribution function Φ of the standard normal. The error function is the
/// rational approximation 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7.
pub(super) fn gelu(x: f32) -> f32 {
    let z = f64::from(x.abs()) * std::f64::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let coefficients = [
        1.061_405_429,
        -1.453_152_027,
        1.421_413_741,
        -0.284_496_736,
        0.254_829_592,
    ];
    let polynomial = coefficients.iter().fold(0.0, |sum, c| sum * t + c) * t;
    let erf = 1.0 - polynomial * (-z * z).exp();
    (0.5 * f64::from(x) * (1.0 + erf.copysign(f64::from(x)))) as f32
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `gate = silu(gate) * up`, where `silu(x) = x / (1 + e^-x)`.
pub(super) fn gated(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

/// `e^x / Σ e^x`, in place; the largest is subtracted first so that nothing overflows.
pub(super) fn softmax(x: &mut [f32]) {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = (*x - largest).exp();
        sum += *x;
    }
    for x in x.iter_mut() {
        *x /= sum;
    }
}

/// Turns each pair of a head by `position * inverse_frequency`. Coordinates beyond the table's
/// pairs pass through. The angle is computed in f64: at position 100,000 an f32 angle is already
/// off by 0.004.
pub(super) fn rotate(head: &mut [f32], position: u32, table: &RopeTable) {
    let n_pairs = table.inverse_frequencies.len();
    assert!(2 * n_pairs <= head.len());
    for (pair, frequency) in table.inverse_frequencies.iter().enumerate() {
        let (sin, cos) = (f64::from(position) * f64::from(*frequency)).sin_cos();
        let sin = sin as f32 * table.magnitude;
        let cos = cos as f32 * table.magnitude;
        let (first, second) = match table.pairs {
            RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
            RopePairs::Halves => (pair, pair + n_pairs),
        };
        let (x, y) = (head[first], head[second]);
        head[first] = x * cos - y * sin;
        head[second] = x * sin + y * cos;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f32], wanted: &[f32]) {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-6, "{found} is not {wanted}");
        }
    }

    #[test]
    fn formulas_by_hand() {
        let long: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!(dot(&long, &long), 16206.0);
        close(
            &matmul(
                &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
                3,
                2,
                &[1.0, -1.0, 2.0, 0.5],
            ),
            &[-1.0, -1.0, -1.0, 3.0, 8.0, 13.0],
        );
        let mut x = [3.0, 4.0];
        rms_norm(&mut x, &[1.0, 2.0], 0.0);
        close(&x, &[3.0 / 12.5_f32.sqrt(), 8.0 / 12.5_f32.sqrt()]);
        let mut x = [1.0, 3.0];
        layer_norm(&mut x, &[2.0, 0.5], Some(&[0.5, 0.0]), 0.0);
        close(&x, &[-1.5, 0.5]);
        let exact = [
            (-2.0, -0.045_500_26),
            (-0.5, -0.154_268_77),
            (0.0, 0.0),
            (1.5, 1.399_789_2),
        ];
        for (x, wanted) in exact {
            close(&[gelu(x)], &[wanted]);
        }
        let mut x = [1000.0, 1000.0 + 3.0_f32.ln()];
        softmax(&mut x);
        assert!((x[0] - 0.25).abs() < 1e-4 && (x[1] - 0.75).abs() < 1e-4);
        let mut gate = [0.0, 1.0];
        gated(&mut gate, &[5.0, 2.0]);
        close(&gate, &[0.0, 2.0 / (1.0 + (-1.0_f32).exp())]);
    }

    #[test]
    fn rotation_turns_the_right_pairs_and_leaves_the_rest() {
        let quarter = std::f32::consts::FRAC_PI_2;
        let mut table = RopeTable {
            inverse_frequencies: vec![quarter, 2.0 * quarter],
            pairs: RopePairs::Interleaved,
            magnitude: 1.0,
        };
        let head = [1.0, 2.0, 3.0, 4.0, 5.0];
        let mut turned = head;
        rotate(&mut turned, 1, &table);
        close(&turned, &[-2.0, 1.0, -3.0, -4.0, 5.0]);
        table.pairs = RopePairs::Halves;
        table.magnitude = 2.0;
        let mut turned = head;
        rotate(&mut turned, 1, &table);
        close(&turned, &[-6.0, -4.0, 2.0, -8.0, 5.0]);
    }
}
