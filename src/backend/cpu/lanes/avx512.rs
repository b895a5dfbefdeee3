//! Lanes as AVX-512 registers: 16 wide, with and without VNNI. Stateless; see `lanes/mod.rs`.
//!
//! Honest note: no machine of this project has AVX-512. These intrinsics run in the tests on an
//! emulated processor (`tests/scripts/avx512_emulated.sh`); their speed was never measured. The
//! start-up self-check compares this file with the scalar path and falls back when they disagree.

use std::arch::x86_64::*;

use super::{Lanes, lane_methods};

/// Needs AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512;

/// Needs AVX-512 VNNI besides.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512Vnni;

/// The four activations as one i32, for a broadcast.
#[inline(always)]
unsafe fn four(activations: *const i8) -> __m512i {
    // SAFETY: four readable bytes; AVX-512 is present (callers' promise).
    unsafe { _mm512_set1_epi32(activations.cast::<i32>().read_unaligned()) }
}

/// Everything that does not depend on VNNI.
macro_rules! common_methods {
    () => {
        const LANES: usize = 16;
        const MANY_REGISTERS: bool = true;

        type F = __m512;
        type I = __m512i;
        type Codes = __m512i;
        type U4Sum = __m512i;

        lane_methods! {
            fn zero() -> __m512 { _mm512_setzero_ps() }
            fn splat(value: f32) -> __m512 { _mm512_set1_ps(value) }
            fn load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
            fn store(to: *mut f32, values: __m512) { _mm512_storeu_ps(to, values) }
            fn load_f16(from: *const u16) -> __m512 {
                _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
            }
            fn load_bf16(from: *const u16) -> __m512 {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
            fn store_f16(to: *mut u16, values: __m512) {
                let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                _mm256_storeu_si256(to.cast(), halves)
            }
            fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
            fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
            fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
            fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
            fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
            fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
            fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
            fn abs(a: __m512) -> __m512 { _mm512_abs_ps(a) }
            fn reduce_add(a: __m512) -> f32 { _mm512_reduce_add_ps(a) }
            fn reduce_max(a: __m512) -> f32 { _mm512_reduce_max_ps(a) }

            fn zero_i32() -> __m512i { _mm512_setzero_si512() }
            fn to_f32(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
            fn to_i32(a: __m512) -> __m512i { _mm512_cvtps_epi32(a) }
            fn sub_shifted<const SHIFT: u32>(a: __m512i, value: *const i32) -> __m512i {
                let wide = _mm512_set1_epi32(value.read());
                _mm512_sub_epi32(a, _mm512_slli_epi32::<SHIFT>(wide))
            }
            fn exp2(a: __m512i) -> __m512 {
                let biased = _mm512_add_epi32(a, _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            }
            fn store_i8(to: *mut i8, values: __m512i) {
                _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(values))
            }
            fn reduce_add_i32(a: __m512i) -> i32 { _mm512_reduce_add_epi32(a) }

            fn load_u4(from: *const u8) -> (__m512i, __m512i) {
                let packed = _mm512_loadu_si512(from.cast());
                let mask = _mm512_set1_epi8(15);
                (
                    _mm512_and_si512(packed, mask),
                    _mm512_and_si512(_mm512_srli_epi16::<4>(packed), mask),
                )
            }
            fn load_s8(from: *const u8) -> __m512i { _mm512_loadu_si512(from.cast()) }
            fn zero_u4() -> __m512i { _mm512_setzero_si512() }
        }
    };
}

impl Lanes for Avx512 {
    const S8_BIAS_SHIFT: u32 = 0;
    common_methods!();
    lane_methods! {
        fn dot_u4(sum: __m512i, codes: __m512i, activations: *const i8) -> __m512i {
            _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, four(activations)))
        }
        fn finish_u4(sum: __m512i) -> __m512i { _mm512_madd_epi16(sum, _mm512_set1_epi16(1)) }
        fn dot_s8(sum: __m512i, codes: __m512i, activations: *const i8) -> __m512i {
            let plain = four(activations);
            let zero = _mm512_setzero_si512();
            let signed = _mm512_mask_sub_epi8(plain, _mm512_movepi8_mask(codes), zero, plain);
            let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(codes), signed);
            _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}

impl Lanes for Avx512Vnni {
    const S8_BIAS_SHIFT: u32 = 7;
    common_methods!();
    lane_methods! {
        fn dot_u4(sum: __m512i, codes: __m512i, activations: *const i8) -> __m512i {
            _mm512_dpbusd_epi32(sum, codes, four(activations))
        }
        fn finish_u4(sum: __m512i) -> __m512i { sum }
        fn dot_s8(sum: __m512i, codes: __m512i, activations: *const i8) -> __m512i {
            let biased = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
            _mm512_dpbusd_epi32(sum, biased, four(activations))
        }
    }
}
