//! Quantization: f32 weights into the stored types that files are written in and that
//! `--quantize` makes at load.
//!
//! Pure, except that [`quantize_matrix`] spreads rows over threads of its own for its duration.
//! Layouts are those that `reference/dequant` reads. Scales are chosen by the squared error over a
//! few candidates around the obvious one, which costs a second per 100 million weights and takes
//! 5 to 15 % off the error. What is not here: which tensor gets which type (`model/requantize`).

use super::TensorData;
use super::reference::dequant;
use crate::dtype::DType;
use half::{bf16, f16};

/// Types that can be written.
pub const WRITABLE: [DType; 7] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q4_K,
];

/// The matrix in another type.
///
/// # Panics
/// When `dtype` is not [`WRITABLE`] or its blocks do not divide the rows: the caller's bug. When
/// the system has no thread left.
#[must_use]
pub fn quantize_matrix(tensor: &TensorData<'_>, dtype: DType, n_threads: usize) -> Vec<u8> {
    assert!(
        tensor.n_in.is_multiple_of(dtype.block_len()),
        "whole blocks"
    );
    let row_in = tensor.bytes.len() / tensor.n_out;
    let row_out = tensor.n_in / dtype.block_len() * dtype.block_bytes();
    let mut out = vec![0; tensor.n_out * row_out];
    let rows_each = tensor.n_out.div_ceil(n_threads.max(1));
    let work = |source: &[u8], out: &mut [u8]| {
        let mut values = vec![0.0; tensor.n_in];
        let rows = source
            .chunks_exact(row_in)
            .zip(out.chunks_exact_mut(row_out));
        for (source, out) in rows {
            dequant::dequantize(tensor.dtype, source, &mut values);
            quantize(dtype, &values, out);
        }
    };
    let parts = tensor.bytes.chunks(rows_each * row_in);
    let parts = parts.zip(out.chunks_mut(rows_each * row_out));
    std::thread::scope(|scope| {
        let work = &work;
        for (idx, (source, out)) in parts.enumerate() {
            let builder = std::thread::Builder::new().name(format!("quantize-{idx}"));
            let task = move || work(source, out);
            let spawned = builder.spawn_scoped(scope, task);
            spawned.expect("a machine that loads a model can start a thread");
        }
    });
    out
}

/// Quantizes whole blocks.
///
/// # Panics
/// As [`quantize_matrix`], and when `out` has another length than the blocks need.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) {
    let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
    assert!(values.len().is_multiple_of(block_len), "whole blocks");
    assert_eq!(
        values.len() / block_len * block_bytes,
        out.len(),
        "{dtype}: sizes differ"
    );
    let encode: fn(&[f32], &mut [u8]) = match dtype {
        DType::F32 => |x, out| out.copy_from_slice(&x[0].to_le_bytes()),
        DType::F16 => |x, out| put_half(out, 0, x[0]),
        DType::BF16 => |x, out| out.copy_from_slice(&bf16::from_f32(x[0]).to_le_bytes()),
        DType::Q8_0 => q8_0,
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        DType::Q4_K => q4_k,
        DType::Q5_0
        | DType::Q5_1
        | DType::Q2_K
        | DType::Q3_K
        | DType::Q5_K
        | DType::Q6_K
        | DType::IQ4_NL => panic!("{dtype} is not written"),
    };
    let blocks = values.chunks_exact(block_len);
    for (values, out) in blocks.zip(out.chunks_exact_mut(block_bytes)) {
        encode(values, out);
    }
}

/// Writes a scale; values beyond the range of f16 become its largest.
fn put_half(out: &mut [u8], at: usize, value: f32) {
    let largest = f16::MAX.to_f32();
    let half = f16::from_f32(value.clamp(-largest, largest));
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
}

/// The value that a scale has once stored.
fn stored(value: f32) -> f32 {
    let mut bytes = [0; 2];
    put_half(&mut bytes, 0, value);
    f16::from_le_bytes(bytes).to_f32()
}

/// `round(value / scale)` within `low..=high`; 0 for a zero scale.
fn code(value: f32, scale: f32, low: f32, high: f32) -> f32 {
    if scale == 0.0 {
        return 0.0_f32.clamp(low, high);
    }
    (value / scale).round().clamp(low, high)
}

fn q8_0(values: &[f32], out: &mut [u8]) {
    let largest = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    put_half(out, 0, largest / 127.0);
    let scale = stored(largest / 127.0);
    for (value, out) in values.iter().zip(&mut out[2..]) {
        *out = code(*value, scale, -127.0, 127.0) as i8 as u8;
    }
}

/// Candidates for a scale: fractions of the one that just covers the extremes.
const FRACTIONS: [f32; 7] = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 1.03];

/// Sum of squared errors of `offset + scale * code`.
fn error(values: &[f32], scale: f32, offset: f32, low: f32, high: f32) -> f32 {
    let distance = |x: &f32| x - offset - scale * code(x - offset, scale, low, high);
    values.iter().map(distance).map(|d| d * d).sum()
}

/// Codes are `-8..=7`: the extreme with the larger magnitude takes -8.
fn q4_0(values: &[f32], out: &mut [u8]) {
    let extreme = values.iter().fold(
        0.0_f32,
        |most, x| {
            if x.abs() > most.abs() { *x } else { most }
        },
    );
    let scale = FRACTIONS
        .map(|fraction| stored(fraction * extreme / -8.0))
        .into_iter()
        .map(|scale| (error(values, scale, 0.0, -8.0, 7.0), scale))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map_or(0.0, |(_, scale)| scale);
    put_half(out, 0, scale);
    put_nibbles(&mut out[2..], |i| code(values[i], scale, -8.0, 7.0) + 8.0);
}

fn q4_1(values: &[f32], out: &mut [u8]) {
    let (scale, minimum) = scale_and_minimum(values, f32::INFINITY);
    put_half(out, 0, scale);
    put_half(out, 2, minimum);
    let (scale, minimum) = (stored(scale), stored(minimum));
    put_nibbles(&mut out[4..], |i| {
        code(values[i] - minimum, scale, 0.0, 15.0)
    });
}

/// 32 codes of 0..=15: byte `j` holds code `j` and code `j + 16`.
fn put_nibbles(out: &mut [u8], code_of: impl Fn(usize) -> f32) {
    for (j, out) in out[..16].iter_mut().enumerate() {
        *out = code_of(j) as u8 | (code_of(j + 16) as u8) << 4;
    }
}

/// `(scale, minimum)` of `minimum + scale * (0..=15)` with a small error; the minimum is at most
/// `most`. Starts from the extremes, shrinks the scale by steps, and fits both by least squares to
/// the codes that each step gives.
fn scale_and_minimum(values: &[f32], most: f32) -> (f32, f32) {
    let low = values.iter().copied().fold(most, f32::min);
    let high = values.iter().copied().fold(low, f32::max);
    let n = values.len() as f32;
    let mut best = (f32::INFINITY, 0.0, low);
    for fraction in FRACTIONS {
        let mut candidate = (fraction * (high - low) / 15.0, low);
        for _ in 0..2 {
            let (scale, minimum) = candidate;
            let found = error(values, scale, minimum, 0.0, 15.0);
            if found < best.0 {
                best = (found, scale, minimum);
            }
            let (mut sum_c, mut sum_cc, mut sum_x, mut sum_cx) = (0.0, 0.0, 0.0, 0.0);
            for x in values {
                let c = code(x - minimum, scale, 0.0, 15.0);
                sum_c += c;
                sum_cc += c * c;
                sum_x += x;
                sum_cx += c * x;
            }
            let spread = n * sum_cc - sum_c * sum_c;
            if spread <= 0.0 {
                break;
            }
            let scale = (n * sum_cx - sum_c * sum_x) / spread;
            let minimum = ((sum_x - scale * sum_c) / n).min(most);
            candidate = (scale.max(0.0), minimum);
        }
    }
    (best.1, best.2)
}

/// Eight sub-blocks of 32 with 6-bit scales and minima; the stored minimum is subtracted, so the
/// fitted one may not be positive.
fn q4_k(values: &[f32], out: &mut [u8]) {
    let fits: Vec<(f32, f32)> = values
        .chunks_exact(32)
        .map(|values| scale_and_minimum(values, 0.0))
        .collect();
    let d = fits.iter().fold(0.0_f32, |most, fit| most.max(fit.0)) / 63.0;
    let dmin = fits.iter().fold(0.0_f32, |most, fit| most.max(-fit.1)) / 63.0;
    put_half(out, 0, d);
    put_half(out, 2, dmin);
    let (d, dmin) = (stored(d), stored(dmin));
    for (index, (values, fit)) in values.chunks_exact(32).zip(&fits).enumerate() {
        let scale = code(fit.0, d, 0.0, 63.0);
        let minimum = code(-fit.1, dmin, 0.0, 63.0);
        put_scale_and_min(&mut out[4..16], index, scale as u8, minimum as u8);
        let shift = index % 2 * 4;
        let codes = &mut out[16 + index / 2 * 32..][..32];
        for (value, byte) in values.iter().zip(codes) {
            let code = code(value + dmin * minimum, d * scale, 0.0, 15.0) as u8;
            *byte = if shift == 0 { code } else { *byte | code << 4 };
        }
    }
}

/// The inverse of `dequant::scale_and_min_k4`. Indexes come in ascending order.
fn put_scale_and_min(packed: &mut [u8], index: usize, scale: u8, min: u8) {
    if index < 4 {
        packed[index] = scale;
        packed[index + 4] = min;
    } else {
        packed[index + 4] = (scale & 15) | (min & 15) << 4;
        packed[index - 4] |= (scale >> 4) << 6;
        packed[index] |= (min >> 4) << 6;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of four uniform numbers, with an outlier now and then.
    fn weights(n: usize) -> Vec<f32> {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut unit = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
        };
        (0..n)
            .map(|i| (unit() + unit() + unit() + unit()) * if i % 97 == 0 { 3.0 } else { 1.0 })
            .collect()
    }

    fn round_trip(dtype: DType, values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; dtype.bytes_for(values.len() as u64).expect("whole") as usize];
        quantize(dtype, values, &mut bytes);
        let mut back = vec![0.0; values.len()];
        dequant::dequantize(dtype, &bytes, &mut back);
        back
    }

    fn rms(values: impl Iterator<Item = f32>) -> f32 {
        let (n, squares) = values.fold((0, 0.0), |(n, sum), x| (n + 1, sum + x * x));
        (squares / n as f32).sqrt()
    }

    #[test]
    fn every_written_type_comes_back_within_its_error() {
        let values = weights(256 * 40);
        let size = rms(values.iter().copied());
        // Relative to the weights' own size; a code of n bits over +-3 sigma leaves about
        // 6 / 2^n / sqrt(12) of it.
        for (dtype, most) in [
            (DType::F32, 0.0),
            (DType::F16, 4e-4),
            (DType::BF16, 3e-3),
            (DType::Q8_0, 7e-3),
            (DType::Q4_0, 0.10),
            (DType::Q4_1, 0.085),
            (DType::Q4_K, 0.085),
        ] {
            assert!(WRITABLE.contains(&dtype));
            let back = round_trip(dtype, &values);
            let error = rms(back.iter().zip(&values).map(|(a, b)| a - b)) / size;
            assert!(error <= most, "{dtype}: {error}");
        }
    }

    #[test]
    fn odd_blocks_survive() {
        for dtype in WRITABLE {
            for block in [
                vec![0.0; 256],
                vec![1.5; 256],
                vec![-0.25; 256],
                (0..256).map(|i| i as f32 * 1e-3).collect(),
                (0..256)
                    .map(|i| if i == 77 { -60_000.0 } else { 0.0 })
                    .collect(),
            ] {
                let back = round_trip(dtype, &block);
                let largest = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                for (found, wanted) in back.iter().zip(&block) {
                    let error = (found - wanted).abs();
                    assert!(error <= largest * 0.08, "{dtype}: {found} for {wanted}");
                }
            }
        }
    }

    #[test]
    fn rows_do_not_depend_on_the_number_of_threads() {
        let values = weights(7 * 256);
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let tensor = TensorData {
            name: "t",
            dtype: DType::F32,
            n_out: 7,
            n_in: 256,
            bytes: &bytes,
        };
        for dtype in WRITABLE {
            let one = quantize_matrix(&tensor, dtype, 1);
            assert_eq!(one, quantize_matrix(&tensor, dtype, 3), "{dtype}");
            assert_eq!(one, quantize_matrix(&tensor, dtype, 100), "{dtype}");
            assert!(one.iter().any(|byte| *byte != 0));
        }
    }
}
