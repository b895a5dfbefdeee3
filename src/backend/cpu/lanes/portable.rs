//! Lanes as plain arrays: the scalar path, and the proof of the 16-wide layouts on any machine.
//!
//! Stateless. `a * b + c` rounds twice here (a fused one would be a slow library call without
//! the instruction), so results differ from the vector paths in the last bits.

use half::{bf16, f16};

use super::{Lanes, lane_methods};

/// `N` lanes in arrays.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable<const N: usize>;

#[inline(always)]
fn each<const N: usize, A: Copy, R>(a: [A; N], f: impl Fn(A) -> R) -> [R; N] {
    std::array::from_fn(|lane| f(a[lane]))
}

#[inline(always)]
fn both<const N: usize, A: Copy, R>(a: [A; N], b: [A; N], f: impl Fn(A, A) -> R) -> [R; N] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

#[inline(always)]
fn dot_four(codes: [i8; 4], activations: [i8; 4]) -> i32 {
    (0..4)
        .map(|i| i32::from(codes[i]) * i32::from(activations[i]))
        .sum()
}

impl<const N: usize> Lanes for Portable<N> {
    const LANES: usize = N;
    const MANY_REGISTERS: bool = false;
    const S8_BIAS_SHIFT: u32 = 0;

    type F = [f32; N];
    type I = [i32; N];
    type Codes = [[i8; 4]; N];
    type U4Sum = [i32; N];

    lane_methods! {
        fn zero() -> Self::F { [0.0; N] }
        fn splat(value: f32) -> Self::F { [value; N] }
        fn load(from: *const f32) -> Self::F { from.cast::<Self::F>().read_unaligned() }
        fn store(to: *mut f32, values: Self::F) { to.cast::<Self::F>().write_unaligned(values) }
        fn load_f16(from: *const u16) -> Self::F {
            each(from.cast::<[u16; N]>().read_unaligned(), |bits| f16::from_bits(bits).to_f32_const())
        }
        fn load_bf16(from: *const u16) -> Self::F {
            each(from.cast::<[u16; N]>().read_unaligned(), |bits| bf16::from_bits(bits).to_f32_const())
        }
        fn store_f16(to: *mut u16, values: Self::F) {
            to.cast::<[u16; N]>()
                .write_unaligned(each(values, |value| f16::from_f32_const(value).to_bits()))
        }
        fn add(a: Self::F, b: Self::F) -> Self::F { both(a, b, |a, b| a + b) }
        fn sub(a: Self::F, b: Self::F) -> Self::F { both(a, b, |a, b| a - b) }
        fn mul(a: Self::F, b: Self::F) -> Self::F { both(a, b, |a, b| a * b) }
        fn div(a: Self::F, b: Self::F) -> Self::F { both(a, b, |a, b| a / b) }
        fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
            std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
        }
        fn max(a: Self::F, b: Self::F) -> Self::F { both(a, b, |a, b| if a > b { a } else { b }) }
        fn min(a: Self::F, b: Self::F) -> Self::F { both(a, b, |a, b| if a < b { a } else { b }) }
        fn abs(a: Self::F) -> Self::F { each(a, f32::abs) }
        fn reduce_add(a: Self::F) -> f32 {
            let mut values = a;
            let mut n_left = N;
            while n_left > 1 {
                n_left /= 2;
                for lane in 0..n_left {
                    values[lane] += values[lane + n_left];
                }
            }
            values[0]
        }
        fn reduce_max(a: Self::F) -> f32 { a.into_iter().fold(f32::NEG_INFINITY, f32::max) }

        fn zero_i32() -> Self::I { [0; N] }
        fn to_f32(a: Self::I) -> Self::F { each(a, |value| value as f32) }
        fn to_i32(a: Self::F) -> Self::I { each(a, |value| value.round_ties_even() as i32) }
        fn sub_shifted<const SHIFT: u32>(a: Self::I, value: *const i32) -> Self::I {
            let value = value.read() << SHIFT;
            each(a, |a| a.wrapping_sub(value))
        }
        fn exp2(a: Self::I) -> Self::F {
            each(a, |power| f32::from_bits((power.wrapping_add(127) as u32) << 23))
        }
        fn store_i8(to: *mut i8, values: Self::I) {
            to.cast::<[i8; N]>().write_unaligned(each(values, |value| value as i8))
        }
        fn reduce_add_i32(a: Self::I) -> i32 { a.into_iter().fold(0, i32::wrapping_add) }

        fn load_u4(from: *const u8) -> (Self::Codes, Self::Codes) {
            let packed = from.cast::<[[u8; 4]; N]>().read_unaligned();
            (
                each(packed, |four| four.map(|byte| (byte & 15) as i8)),
                each(packed, |four| four.map(|byte| (byte >> 4) as i8)),
            )
        }
        fn load_s8(from: *const u8) -> Self::Codes { from.cast::<Self::Codes>().read_unaligned() }
        fn zero_u4() -> Self::U4Sum { [0; N] }
        fn dot_u4(sum: Self::U4Sum, codes: Self::Codes, activations: *const i8) -> Self::U4Sum {
            let activations = activations.cast::<[i8; 4]>().read_unaligned();
            std::array::from_fn(|lane| sum[lane] + dot_four(codes[lane], activations))
        }
        fn finish_u4(sum: Self::U4Sum) -> Self::I { sum }
        fn dot_s8(sum: Self::I, codes: Self::Codes, activations: *const i8) -> Self::I {
            let activations = activations.cast::<[i8; 4]>().read_unaligned();
            std::array::from_fn(|lane| sum[lane] + dot_four(codes[lane], activations))
        }
    }
}
