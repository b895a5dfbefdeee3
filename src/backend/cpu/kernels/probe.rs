//! Loops that do nothing but what a kernel cannot do without: reading, and multiplying.
//!
//! They measure the machine (`roofline`); their results mean nothing. Written over `Lanes` like the
//! kernels, so that each instruction set is held against its own limit.

use super::super::lanes::Lanes;

/// Bytes of the activations that the products read, again and again: well inside the first-level
/// cache.
pub(in super::super) const ACTIVATION_BYTES: usize = 4096;
/// Products that run beside each other, so that none waits for the one before.
const N_CHAINS: usize = 8;

/// The probes of one instruction set.
///
/// # Safety
/// As for `Kernels`.
#[derive(Clone, Copy)]
pub(in super::super) struct Probes {
    /// `(from, n)`: reads `n` values, a multiple of `8 * LANES`.
    pub(in super::super) read: unsafe fn(*const f32, usize) -> f32,
    /// `(activations, n_rounds)`: products of 4-bit codes in a register with `ACTIVATION_BYTES`
    /// activations, each of which meets `LANES` outputs.
    pub(in super::super) dot_u4: unsafe fn(*const i8, usize) -> i32,
    /// The same with 8-bit codes.
    pub(in super::super) dot_s8: unsafe fn(*const i8, usize) -> i32,
    /// `(n_rounds)`: `MULTIPLY_ADDS * LANES` f32 multiply-adds in registers per round.
    pub(in super::super) multiply_add: unsafe fn(usize) -> f32,
}

/// Vectors per round of `multiply_add`.
pub(in super::super) const MULTIPLY_ADDS: usize = 10;

#[inline(always)]
pub(super) unsafe fn read<L: Lanes>(from: *const f32, n: usize) -> f32 {
    // SAFETY: `n` values at `from` (callers' promise).
    unsafe {
        let mut sums = [L::zero(); N_CHAINS];
        let step = N_CHAINS * L::LANES;
        for at in (0..n / step * step).step_by(step) {
            for (chain, sum) in sums.iter_mut().enumerate() {
                *sum = L::add(*sum, L::load(from.add(at + chain * L::LANES)));
            }
        }
        sums.into_iter().map(|sum| L::reduce_add(sum)).sum()
    }
}

#[inline(always)]
pub(super) unsafe fn dot_u4<L: Lanes>(activations: *const i8, n_rounds: usize) -> i32 {
    // SAFETY: `ACTIVATION_BYTES` at `activations` (callers' promise); the codes are on the stack.
    unsafe {
        let codes = std::hint::black_box([0_u8; 64]);
        let (low, _) = L::load_u4(codes.as_ptr());
        let mut sums = [L::zero_u4(); N_CHAINS];
        for _ in 0..n_rounds {
            let activations = std::hint::black_box(activations);
            for at in (0..ACTIVATION_BYTES).step_by(4 * N_CHAINS) {
                for (chain, sum) in sums.iter_mut().enumerate() {
                    *sum = L::dot_u4(*sum, low, activations.add(at + 4 * chain));
                }
            }
        }
        let ends = sums.into_iter();
        ends.map(|sum| L::reduce_add_i32(L::finish_u4(sum))).sum()
    }
}

#[inline(always)]
pub(super) unsafe fn dot_s8<L: Lanes>(activations: *const i8, n_rounds: usize) -> i32 {
    // SAFETY: as in `dot_u4`.
    unsafe {
        let codes = std::hint::black_box([0_u8; 64]);
        let codes = L::load_s8(codes.as_ptr());
        let mut sums = [L::zero_i32(); N_CHAINS];
        for _ in 0..n_rounds {
            let activations = std::hint::black_box(activations);
            for at in (0..ACTIVATION_BYTES).step_by(4 * N_CHAINS) {
                for (chain, sum) in sums.iter_mut().enumerate() {
                    *sum = L::dot_s8(*sum, codes, activations.add(at + 4 * chain));
                }
            }
        }
        sums.into_iter().map(|sum| L::reduce_add_i32(sum)).sum()
    }
}

#[inline(always)]
pub(super) unsafe fn multiply_add<L: Lanes>(n_rounds: usize) -> f32 {
    // SAFETY: registers only; the instruction set is there (callers' promise).
    unsafe {
        let factor = L::splat(std::hint::black_box(0.999));
        let mut sums = [L::splat(std::hint::black_box(0.1)); MULTIPLY_ADDS];
        for _ in 0..n_rounds {
            for sum in &mut sums {
                *sum = L::mul_add(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|sum| L::reduce_add(sum)).sum()
    }
}
