//! The kernels: each written once over `Lanes`, and one table of entry points per instruction set.
//!
//! Stateless. An entry point is an unsafe function over raw pointers; `step.rs` and `attention.rs`
//! call them and check sizes before. The `#[target_feature]` attribute stands on the entry
//! points here, everything below is inlined into them.
//!
//! Invariant that all kernels keep: the arithmetic of an output depends on its own inputs in one
//! fixed order, whatever the number of rows, panels or columns handled at once.

pub(super) mod attention;
pub(super) mod matmul;
pub(super) mod probe;
pub(super) mod vector;

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512, Avx512Vnni};
use super::lanes::{Lanes, Portable};
use super::layout::N_LAYOUTS;
use attention::{ScoresArgs, ValuesArgs};
use matmul::{BF16, Codes, F16, F32, FloatWeights, MatmulArgs, S8, U4};
use probe::Probes;
use vector::ActivationBlock;

/// Entry point of a product with panels of one layout.
pub(super) type MatmulKernel = unsafe fn(&MatmulArgs);

/// The entry points of one instruction set.
///
/// # Safety
/// All of them require that instruction set and pointers valid for the stated lengths.
pub(super) struct Kernels {
    /// Lanes of a vector, rows of a panel.
    pub(super) lanes: usize,
    /// By `Layout as usize`.
    pub(super) matmul: [MatmulKernel; N_LAYOUTS],
    /// `(x, weight, n, epsilon, out)`: RMS norm of one row.
    pub(super) normalize: unsafe fn(*const f32, *const f32, usize, f32, *mut f32),
    /// `(x, weight, n, epsilon, out)`: layer norm of one row, without bias.
    pub(super) layer_normalize: unsafe fn(*const f32, *const f32, usize, f32, *mut f32),
    /// `(x, n)`: `x = gelu(x)`, `n` a multiple of 16.
    pub(super) gelu: unsafe fn(*mut f32, usize),
    /// `(x, n_blocks, out)`: int8 blocks of 32.
    pub(super) quantize: unsafe fn(*const f32, usize, *mut ActivationBlock),
    /// `(x, n_blocks, out, remainders)`: the same, and what it left over.
    pub(super) quantize_twice:
        unsafe fn(*const f32, usize, *mut ActivationBlock, *mut ActivationBlock),
    /// `(gate, up, n, out)`: `silu(gate) * up`.
    pub(super) gated: unsafe fn(*const f32, *const f32, usize, *mut f32),
    /// `(from, n, to)`: f16, clamped to the finite range.
    pub(super) to_f16: unsafe fn(*const f32, usize, *mut u16),
    /// Dot products of queries with the keys of one page.
    pub(super) scores: unsafe fn(&ScoresArgs),
    /// `(scores, n) -> (max, sum)`: `scores = exp(scores - max)`, `n` a multiple of 16.
    pub(super) exponentials: unsafe fn(*mut f32, usize) -> (f32, f32),
    /// Weighted sums of the values of one page.
    pub(super) values: unsafe fn(&ValuesArgs),
    /// Loops that measure the machine.
    pub(super) probes: Probes,
}

macro_rules! kernel_table {
    ($module:ident, $table:ident, $lanes:ty $(, #[$feature:meta])?) => {
        mod $module {
            use super::*;

            $(#[$feature])?
            unsafe fn quantized<
                C: Codes,
                const GROUP: usize,
                const WIDE: bool,
                const MIN: bool,
                const OFFSET_SHIFT: u32,
            >(
                args: &MatmulArgs,
            ) {
                // SAFETY: passed on to the caller.
                unsafe { matmul::quantized::<$lanes, C, GROUP, WIDE, MIN, OFFSET_SHIFT>(args) }
            }
            $(#[$feature])?
            unsafe fn floats<W: FloatWeights>(args: &MatmulArgs) {
                // SAFETY: passed on to the caller.
                unsafe { matmul::floats::<$lanes, W>(args) }
            }
            $(#[$feature])?
            unsafe fn normalize(x: *const f32, w: *const f32, n: usize, epsilon: f32, out: *mut f32) {
                // SAFETY: passed on to the caller.
                unsafe { vector::normalize::<$lanes>(x, w, n, epsilon, out) }
            }
            $(#[$feature])?
            unsafe fn layer_normalize(
                x: *const f32,
                w: *const f32,
                n: usize,
                epsilon: f32,
                out: *mut f32,
            ) {
                // SAFETY: passed on to the caller.
                unsafe { vector::layer_normalize::<$lanes>(x, w, n, epsilon, out) }
            }
            $(#[$feature])?
            unsafe fn gelu(x: *mut f32, n: usize) {
                // SAFETY: passed on to the caller.
                unsafe { vector::gelu::<$lanes>(x, n) }
            }
            $(#[$feature])?
            unsafe fn quantize(x: *const f32, n_blocks: usize, out: *mut ActivationBlock) {
                // SAFETY: passed on to the caller.
                unsafe { vector::quantize::<$lanes>(x, n_blocks, out) }
            }
            $(#[$feature])?
            unsafe fn quantize_twice(
                x: *const f32,
                n_blocks: usize,
                out: *mut ActivationBlock,
                remainders: *mut ActivationBlock,
            ) {
                // SAFETY: passed on to the caller.
                unsafe { vector::quantize_twice::<$lanes>(x, n_blocks, out, remainders) }
            }
            $(#[$feature])?
            unsafe fn gated(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
                // SAFETY: passed on to the caller.
                unsafe { vector::gated::<$lanes>(gate, up, n, out) }
            }
            $(#[$feature])?
            unsafe fn to_f16(from: *const f32, n: usize, to: *mut u16) {
                // SAFETY: passed on to the caller.
                unsafe { vector::to_f16::<$lanes>(from, n, to) }
            }
            $(#[$feature])?
            unsafe fn scores(args: &ScoresArgs) {
                // SAFETY: passed on to the caller.
                unsafe { attention::scores::<$lanes>(args) }
            }
            $(#[$feature])?
            unsafe fn exponentials(scores: *mut f32, n: usize) -> (f32, f32) {
                // SAFETY: passed on to the caller.
                unsafe { vector::exponentials::<$lanes>(scores, n) }
            }
            $(#[$feature])?
            unsafe fn values(args: &ValuesArgs) {
                // SAFETY: passed on to the caller.
                unsafe { attention::values::<$lanes>(args) }
            }

            $(#[$feature])?
            unsafe fn read(from: *const f32, n: usize) -> f32 {
                // SAFETY: passed on to the caller.
                unsafe { probe::read::<$lanes>(from, n) }
            }
            $(#[$feature])?
            unsafe fn dot_u4(activations: *const i8, n_rounds: usize) -> i32 {
                // SAFETY: passed on to the caller.
                unsafe { probe::dot_u4::<$lanes>(activations, n_rounds) }
            }
            $(#[$feature])?
            unsafe fn dot_s8(activations: *const i8, n_rounds: usize) -> i32 {
                // SAFETY: passed on to the caller.
                unsafe { probe::dot_s8::<$lanes>(activations, n_rounds) }
            }
            $(#[$feature])?
            unsafe fn multiply_add(n_rounds: usize) -> f32 {
                // SAFETY: passed on to the caller.
                unsafe { probe::multiply_add::<$lanes>(n_rounds) }
            }

            // In the order of `Layout`.
            pub(in super::super) static TABLE: Kernels = Kernels {
                lanes: <$lanes>::LANES,
                matmul: [
                    quantized::<U4, 32, false, false, 3>,
                    quantized::<U4, 32, false, true, 0>,
                    quantized::<U4, 32, true, true, 0>,
                    quantized::<U4, 16, true, true, 0>,
                    quantized::<U4, 16, true, false, 2>,
                    quantized::<S8, 32, false, false, 0>,
                    quantized::<S8, 32, false, true, 0>,
                    quantized::<S8, 32, true, true, 0>,
                    quantized::<S8, 16, true, false, 0>,
                    floats::<F32>,
                    floats::<F16>,
                    floats::<BF16>,
                ],
                normalize,
                layer_normalize,
                gelu,
                quantize,
                quantize_twice,
                gated,
                to_f16,
                scores,
                exponentials,
                values,
                probes: Probes {
                    read,
                    dot_u4,
                    dot_s8,
                    multiply_add,
                },
            };
        }
        pub(super) use $module::TABLE as $table;
    };
}

kernel_table!(scalar, SCALAR, Portable<8>);
kernel_table!(scalar_wide, SCALAR_WIDE, Portable<16>);
#[cfg(target_arch = "x86_64")]
kernel_table!(avx2, AVX2, Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernel_table!(
    avx512,
    AVX512,
    Avx512,
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
);
#[cfg(target_arch = "x86_64")]
kernel_table!(
    avx512vnni,
    AVX512_VNNI,
    Avx512Vnni,
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
);

#[cfg(test)]
mod tests {
    use super::super::path::Path;
    use super::*;

    const ZERO: ActivationBlock = ActivationBlock {
        codes: [0; 32],
        scale: 0.0,
        sums: [0; 3],
        scaled_sums: [0.0; 3],
    };

    fn value(block: &ActivationBlock, i: usize) -> f32 {
        block.scale * f32::from(block.codes[i])
    }

    #[test]
    fn quantizing_twice_leaves_less_than_a_thirty_thousandth() {
        let x: Vec<f32> = (0..96_i32)
            .map(|i| ((i * 37 % 101) - 50) as f32 * if i < 32 { 1e-3 } else { 0.7 })
            .collect();
        for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
            let (mut once, mut rest, mut same) = ([ZERO; 3], [ZERO; 3], [ZERO; 3]);
            let kernels = path.kernels();
            // SAFETY: three blocks at each pointer; the path is available.
            unsafe {
                (kernels.quantize_twice)(x.as_ptr(), 3, once.as_mut_ptr(), rest.as_mut_ptr());
                (kernels.quantize)(x.as_ptr(), 3, same.as_mut_ptr());
            }
            for (i, x) in x.iter().enumerate() {
                let (block, at) = (i / 32, i % 32);
                let largest = once[block].scale * 127.0;
                let error = (x - value(&once[block], at)).abs();
                assert!(error <= largest / 253.0, "{path} {i}: {error}");
                let error = (x - value(&once[block], at) - value(&rest[block], at)).abs();
                assert!(error <= largest / 30_000.0, "{path} {i}: {error}");
                assert_eq!(once[block].codes, same[block].codes);
            }
            for block in once.iter().chain(&rest) {
                let sum = |codes: &[i8]| codes.iter().map(|&code| i32::from(code)).sum::<i32>();
                let sums = [
                    sum(&block.codes[..16]),
                    sum(&block.codes[16..]),
                    sum(&block.codes),
                ];
                assert_eq!(block.sums, sums);
            }
        }
    }

    #[test]
    fn blocks_of_zeros_and_of_tiny_values_stay_finite() {
        for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
            for scale in [0.0, 1e-45, 1e-38] {
                let x = [scale; 32];
                let (mut once, mut rest) = ([ZERO; 1], [ZERO; 1]);
                // SAFETY: one block at each pointer; the path is available.
                unsafe {
                    let kernels = path.kernels();
                    (kernels.quantize_twice)(x.as_ptr(), 1, once.as_mut_ptr(), rest.as_mut_ptr());
                }
                assert!(value(&once[0], 0).is_finite() && value(&rest[0], 0).is_finite());
            }
        }
    }
}
