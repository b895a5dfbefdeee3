//! The vector operations that the kernels need, as a trait; one implementation per instruction set.
//!
//! `kernels/` holds every algorithm once, written over [`Lanes`]. An implementation is a list of
//! one-line intrinsics and no algorithm, so what the portable lanes (8 and 16 wide, plain arrays)
//! test is what the special ones run. Methods are `inline(always)` and get their instruction set
//! from the `#[target_feature]` entry points of `kernels/mod.rs`.
//!
//! Two products of codes and activations exist, because the machines differ most here:
//!
//! * `dot_u4`: unsigned codes 0..=15 times i8. With AVX2 `vpmaddubsw` gives i16 sums of two
//!   products, at most `2 * 15 * 128 = 3840`; eight of them (32 inputs) reach 30,720 < 32,767, so
//!   they are added as i16 and widened once per block. With VNNI `vpdpbusd` sums i32 at once.
//! * `dot_s8`: signed codes times i8. AVX2 moves the code's sign to the activation: one
//!   `vpmaddubsw` reaches `2 * 128 * 127 = 32,512 < 32,767`, which is exact for activations in
//!   -127..=127 (the quantizer's range) but leaves no room to add, so each is widened. VNNI wants an unsigned operand:
//!   codes are biased by 128 (flip the top bit) and `128 * sum of activations` is subtracted.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512, Avx512Vnni};
pub(super) use portable::Portable;

/// Operations on `LANES` values at a time.
///
/// # Safety
/// Every method requires that the CPU has the instruction set of the implementation and that
/// pointers are valid for the stated number of elements. No alignment is required.
pub(super) trait Lanes: Copy + 'static {
    /// f32 values per vector, and output rows per weight panel.
    const LANES: usize;
    /// Enough registers for eight activation columns at once instead of four.
    const MANY_REGISTERS: bool;
    /// `dot_s8` returns the dot product plus `(sum of activations) << S8_BIAS_SHIFT`; 0 = exact.
    const S8_BIAS_SHIFT: u32;

    /// `LANES` f32.
    type F: Copy;
    /// `LANES` i32.
    type I: Copy;
    /// Codes: `LANES` outputs, 4 inputs each.
    type Codes: Copy;
    /// Running sum of `dot_u4`.
    type U4Sum: Copy;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(value: f32) -> Self::F;
    /// `LANES` f32.
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, values: Self::F);
    /// `LANES` f16.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// `LANES` bf16.
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// Rounds to nearest even; overflow gives infinity.
    unsafe fn store_f16(to: *mut u16, values: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Larger of both; `b` when either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// Smaller of both; `b` when either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// Sum of the lanes in a fixed order.
    unsafe fn reduce_add(a: Self::F) -> f32;
    unsafe fn reduce_max(a: Self::F) -> f32;

    unsafe fn zero_i32() -> Self::I;
    unsafe fn to_f32(a: Self::I) -> Self::F;
    /// Rounds to nearest even.
    unsafe fn to_i32(a: Self::F) -> Self::I;
    /// `a - (value << shift)`.
    unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, value: *const i32) -> Self::I;
    /// `2^a` for `-127 <= a <= 127`; `2^-127` comes out as 0.
    unsafe fn exp2(a: Self::I) -> Self::F;
    /// Stores the low bytes: `LANES` i8.
    unsafe fn store_i8(to: *mut i8, values: Self::I);
    unsafe fn reduce_add_i32(a: Self::I) -> i32;

    /// `4 * LANES` bytes: low nibbles are inputs 0..4 of each output, high nibbles inputs 4..8.
    unsafe fn load_u4(from: *const u8) -> (Self::Codes, Self::Codes);
    /// `4 * LANES` bytes: inputs 0..4 of each output.
    unsafe fn load_s8(from: *const u8) -> Self::Codes;
    unsafe fn zero_u4() -> Self::U4Sum;
    /// Adds the products with 4 activations; at most 8 additions before `finish_u4`.
    unsafe fn dot_u4(sum: Self::U4Sum, codes: Self::Codes, activations: *const i8) -> Self::U4Sum;
    unsafe fn finish_u4(sum: Self::U4Sum) -> Self::I;
    /// Adds the products with 4 activations (see `S8_BIAS_SHIFT`).
    unsafe fn dot_s8(sum: Self::I, codes: Self::Codes, activations: *const i8) -> Self::I;
}

/// Defines trait methods whose body is one unsafe expression.
macro_rules! lane_methods {
    ($(fn $name:ident $(<const $parameter:ident: $kind:ty>)? ($($argument:ident: $type:ty),* $(,)?)
        $(-> $result:ty)? { $($body:tt)* })*) => {
        $(
            #[inline(always)]
            #[allow(unused_unsafe, reason = "a few bodies are safe")]
            unsafe fn $name $(<const $parameter: $kind>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: the caller promises the instruction set and valid pointers (trait doc).
                unsafe { $($body)* }
            }
        )*
    };
}
use lane_methods;
