//! Lanes as AVX2 registers (with FMA and F16C): 8 wide. Stateless; see `lanes/mod.rs`.

use std::arch::x86_64::*;

use super::{Lanes, lane_methods};

/// Needs AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2;

/// The four activations as one i32, for a broadcast.
#[inline(always)]
unsafe fn four(activations: *const i8) -> __m256i {
    // SAFETY: four readable bytes; AVX is present (callers' promise).
    unsafe { _mm256_set1_epi32(activations.cast::<i32>().read_unaligned()) }
}

#[inline(always)]
unsafe fn halves_add(a: __m256) -> __m128 {
    // SAFETY: AVX is present (callers' promise).
    unsafe { _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a)) }
}

impl Lanes for Avx2 {
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = false;
    const S8_BIAS_SHIFT: u32 = 0;

    type F = __m256;
    type I = __m256i;
    type Codes = __m256i;
    type U4Sum = __m256i;

    lane_methods! {
        fn zero() -> __m256 { _mm256_setzero_ps() }
        fn splat(value: f32) -> __m256 { _mm256_set1_ps(value) }
        fn load(from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        fn store(to: *mut f32, values: __m256) { _mm256_storeu_ps(to, values) }
        fn load_f16(from: *const u16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        fn load_bf16(from: *const u16) -> __m256 {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
        fn store_f16(to: *mut u16, values: __m256) {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values))
        }
        fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn abs(a: __m256) -> __m256 { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
        fn reduce_add(a: __m256) -> f32 {
            let four = halves_add(a);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
        fn reduce_max(a: __m256) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }

        fn zero_i32() -> __m256i { _mm256_setzero_si256() }
        fn to_f32(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn to_i32(a: __m256) -> __m256i { _mm256_cvtps_epi32(a) }
        fn sub_shifted<const SHIFT: u32>(a: __m256i, value: *const i32) -> __m256i {
            let wide = _mm256_set1_epi32(value.read());
            _mm256_sub_epi32(a, _mm256_sll_epi32(wide, _mm_cvtsi32_si128(SHIFT as i32)))
        }
        fn exp2(a: __m256i) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(a, _mm256_set1_epi32(127))))
        }
        fn store_i8(to: *mut i8, values: __m256i) {
            let low = _mm256_castsi256_si128(values);
            let words = _mm_packs_epi32(low, _mm256_extracti128_si256::<1>(values));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(words, words))
        }
        fn reduce_add_i32(a: __m256i) -> i32 {
            let four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        }

        fn load_u4(from: *const u8) -> (__m256i, __m256i) {
            let packed = _mm256_loadu_si256(from.cast());
            let mask = _mm256_set1_epi8(15);
            (
                _mm256_and_si256(packed, mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask),
            )
        }
        fn load_s8(from: *const u8) -> __m256i { _mm256_loadu_si256(from.cast()) }
        fn zero_u4() -> __m256i { _mm256_setzero_si256() }
        fn dot_u4(sum: __m256i, codes: __m256i, activations: *const i8) -> __m256i {
            _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, four(activations)))
        }
        fn finish_u4(sum: __m256i) -> __m256i { _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) }
        fn dot_s8(sum: __m256i, codes: __m256i, activations: *const i8) -> __m256i {
            let signed = _mm256_sign_epi8(four(activations), codes);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), signed);
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}
