//! Kernels over single rows: norm, quantization, gated activation, f16, exponentials.
//!
//! Sums run in `LANES` partial sums and are folded in a fixed order; the tail of a row that is not
//! a multiple of `LANES` is added one by one.

use super::super::buffer::Plain;
use super::super::lanes::Lanes;

/// Inputs per quantized block.
pub(in super::super) const BLOCK: usize = 32;

/// 32 activations as int8 with what the products need of them: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(in super::super) struct ActivationBlock {
    /// `round(x / scale)`, -127..=127.
    pub(in super::super) codes: [i8; BLOCK],
    /// Largest magnitude / 127.
    pub(in super::super) scale: f32,
    /// Sums of the codes: first half, second half, all.
    pub(in super::super) sums: [i32; 3],
    /// `scale * sums`.
    pub(in super::super) scaled_sums: [f32; 3],
}

const _: () = assert!(size_of::<ActivationBlock>() == 64);

// SAFETY: integers and floats only; all-zero bytes are a block of zeros.
unsafe impl Plain for ActivationBlock {}

/// `out = x / sqrt(mean(x^2) + epsilon) * weight`.
#[inline(always)]
pub(super) unsafe fn normalize<L: Lanes>(
    x: *const f32,
    weight: *const f32,
    n: usize,
    epsilon: f32,
    out: *mut f32,
) {
    let n_whole = n - n % L::LANES;
    // SAFETY: `n` values at each pointer (callers' promise).
    unsafe {
        let mut squares = L::zero();
        for i in (0..n_whole).step_by(L::LANES) {
            let values = L::load(x.add(i));
            squares = L::mul_add(values, values, squares);
        }
        let mut sum = L::reduce_add(squares);
        for i in n_whole..n {
            sum += *x.add(i) * *x.add(i);
        }
        let factor = 1.0 / (sum / n as f32 + epsilon).sqrt();
        for i in (0..n_whole).step_by(L::LANES) {
            let values = L::mul(L::load(x.add(i)), L::splat(factor));
            L::store(out.add(i), L::mul(values, L::load(weight.add(i))));
        }
        for i in n_whole..n {
            *out.add(i) = *x.add(i) * factor * *weight.add(i);
        }
    }
}

/// `out = (x - mean) / sqrt(variance + epsilon) * weight`.
#[inline(always)]
pub(super) unsafe fn layer_normalize<L: Lanes>(
    x: *const f32,
    weight: *const f32,
    n: usize,
    epsilon: f32,
    out: *mut f32,
) {
    let n_whole = n - n % L::LANES;
    // SAFETY: `n` values at each pointer (callers' promise).
    unsafe {
        let mut sums = L::zero();
        for i in (0..n_whole).step_by(L::LANES) {
            sums = L::add(sums, L::load(x.add(i)));
        }
        let mut sum = L::reduce_add(sums);
        for i in n_whole..n {
            sum += *x.add(i);
        }
        let mean = sum / n as f32;
        for i in (0..n_whole).step_by(L::LANES) {
            L::store(out.add(i), L::sub(L::load(x.add(i)), L::splat(mean)));
        }
        for i in n_whole..n {
            *out.add(i) = *x.add(i) - mean;
        }
        // What has no mean has its variance for a mean square. In place: each value is read before it
        // is written.
        normalize::<L>(out, weight, n, epsilon, out);
    }
}

/// `x = x * Φ(x)`, see `reference/math.rs`; `n` is a multiple of 16. The error function is odd, so half
/// of `x` and half of `|x| erf(|x| / √2)` are added.
#[inline(always)]
pub(super) unsafe fn gelu<L: Lanes>(x: *mut f32, n: usize) {
    for i in (0..n).step_by(L::LANES) {
        // SAFETY: `n` values at the pointer (callers' promise).
        unsafe {
            let value = L::load(x.add(i));
            let size = L::abs(value);
            let z = L::mul(size, L::splat(std::f32::consts::FRAC_1_SQRT_2));
            let one = L::splat(1.0);
            let t = L::div(one, L::mul_add(z, L::splat(0.327_591_1), one));
            let mut sum = L::splat(1.061_405_4);
            for coefficient in [-1.453_152, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
                sum = L::mul_add(sum, t, L::splat(coefficient));
            }
            let tail = exponential::<L>(L::sub(L::zero(), L::mul(z, z)));
            let erf = L::sub(one, L::mul(L::mul(sum, t), tail));
            let both = L::mul_add(size, erf, value);
            L::store(x.add(i), L::mul(both, L::splat(0.5)));
        }
    }
}

/// Quantizes `n_blocks * 32` values, rounding to nearest even.
///
/// An infinite value makes the scale infinite, so it reaches the output as infinity or NaN.
#[inline(always)]
pub(super) unsafe fn quantize<L: Lanes>(x: *const f32, n_blocks: usize, out: *mut ActivationBlock) {
    let mut rest = [0.0; BLOCK];
    for block_idx in 0..n_blocks {
        // SAFETY: `n_blocks` blocks at each pointer (callers' promise).
        unsafe {
            quantize_block::<L>(
                x.add(block_idx * BLOCK),
                &mut *out.add(block_idx),
                &mut rest,
            );
        }
    }
}

/// Quantizes, and quantizes what rounding left over: some 15 bits in two int8 blocks.
#[inline(always)]
pub(super) unsafe fn quantize_twice<L: Lanes>(
    x: *const f32,
    n_blocks: usize,
    out: *mut ActivationBlock,
    remainders: *mut ActivationBlock,
) {
    let (mut rest, mut lost) = ([0.0; BLOCK], [0.0; BLOCK]);
    for block_idx in 0..n_blocks {
        // SAFETY: `n_blocks` blocks at each pointer (callers' promise).
        unsafe {
            quantize_block::<L>(
                x.add(block_idx * BLOCK),
                &mut *out.add(block_idx),
                &mut rest,
            );
            quantize_block::<L>(rest.as_ptr(), &mut *remainders.add(block_idx), &mut lost);
        }
    }
}

/// One block; `rest = x - scale * codes`.
#[inline(always)]
unsafe fn quantize_block<L: Lanes>(
    x: *const f32,
    out: &mut ActivationBlock,
    rest: &mut [f32; BLOCK],
) {
    // SAFETY: 32 values at `x` (callers' promise).
    unsafe {
        let mut largest = L::zero();
        for i in (0..BLOCK).step_by(L::LANES) {
            largest = L::max(largest, L::abs(L::load(x.add(i))));
        }
        let largest = L::reduce_max(largest);
        let factor = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        // A tiny block would need a factor above the largest f32.
        let factor = if factor.is_finite() { factor } else { 0.0 };
        out.scale = largest / 127.0;
        let codes = (&raw mut out.codes).cast::<i8>();
        for half in 0..2 {
            let mut total = 0_i32;
            for i in (half * 16..half * 16 + 16).step_by(L::LANES) {
                let values = L::load(x.add(i));
                let rounded = L::to_i32(L::mul(values, L::splat(factor)));
                L::store_i8(codes.add(i), rounded);
                total = total.wrapping_add(L::reduce_add_i32(rounded));
                let left = L::mul_add(L::to_f32(rounded), L::splat(-out.scale), values);
                L::store(rest.as_mut_ptr().add(i), left);
            }
            out.sums[half] = total;
        }
        out.sums[2] = out.sums[0].wrapping_add(out.sums[1]);
        out.scaled_sums = out.sums.map(|sum| sum as f32 * out.scale);
    }
}

/// `e^x`, relative error about 2e-7; exactly 0 below -88, NaN stays NaN.
///
/// `x = n ln 2 + r`, `|r| <= ln 2 / 2`, `e^x = 2^n e^r` with a polynomial for `e^r`.
#[inline(always)]
unsafe fn exponential<L: Lanes>(x: L::F) -> L::F {
    // SAFETY: arithmetic only; the instruction set is the callers' promise.
    unsafe {
        // The operand order of both keeps NaN. At -88 `n` is -127, whose power comes out as 0.
        let x = L::max(L::splat(-88.0), L::min(L::splat(88.0), x));
        let n = L::to_i32(L::mul(x, L::splat(std::f32::consts::LOG2_E)));
        let n_float = L::to_f32(n);
        let r = L::mul_add(n_float, L::splat(-0.693_359_4), x);
        let r = L::mul_add(n_float, L::splat(2.121_944_4e-4), r);
        let mut sum = L::splat(1.0 / 720.0);
        for coefficient in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            sum = L::mul_add(sum, r, L::splat(coefficient));
        }
        L::mul(sum, L::exp2(n))
    }
}

/// `out = gate / (1 + e^-gate) * up`; `n` is a multiple of 16.
#[inline(always)]
pub(super) unsafe fn gated<L: Lanes>(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
    for i in (0..n).step_by(L::LANES) {
        // SAFETY: `n` values at each pointer (callers' promise).
        unsafe {
            let g = L::load(gate.add(i));
            let one = L::splat(1.0);
            let denominator = L::add(one, exponential::<L>(L::sub(L::zero(), g)));
            let activated = L::div(g, denominator);
            L::store(out.add(i), L::mul(activated, L::load(up.add(i))));
        }
    }
}

/// `scores = e^(scores - largest)`; returns the largest and the sum. `n` is a multiple of 16.
#[inline(always)]
pub(super) unsafe fn exponentials<L: Lanes>(scores: *mut f32, n: usize) -> (f32, f32) {
    // SAFETY: `n` values at the pointer (callers' promise).
    unsafe {
        let mut largest = L::splat(f32::NEG_INFINITY);
        for i in (0..n).step_by(L::LANES) {
            largest = L::max(L::load(scores.add(i)), largest);
        }
        let max = L::reduce_max(largest);
        let mut sum = L::zero();
        for i in (0..n).step_by(L::LANES) {
            let e = exponential::<L>(L::sub(L::load(scores.add(i)), L::splat(max)));
            L::store(scores.add(i), e);
            sum = L::add(sum, e);
        }
        (max, L::reduce_add(sum))
    }
}

/// Converts to f16, clamped to ±65504 so that a page never holds an infinity (0 * inf is NaN).
#[inline(always)]
pub(super) unsafe fn to_f16<L: Lanes>(from: *const f32, n: usize, to: *mut u16) {
    let n_whole = n - n % L::LANES;
    // SAFETY: `n` values at each pointer (callers' promise).
    unsafe {
        for i in (0..n_whole).step_by(L::LANES) {
            let low = L::max(L::splat(-65504.0), L::load(from.add(i)));
            L::store_f16(to.add(i), L::min(L::splat(65504.0), low));
        }
        for i in n_whole..n {
            let value = (*from.add(i)).clamp(-65504.0, 65504.0);
            *to.add(i) = half::f16::from_f32_const(value).to_bits();
        }
    }
}
