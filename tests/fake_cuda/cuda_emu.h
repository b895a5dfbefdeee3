// CUDA C++ as the kernels see it, for g++: qualifiers, vector types, half, intrinsics.
//
// Only what kernels/ uses is here; add an intrinsic when a kernel needs it. `__shared__` is left
// undefined on purpose: kernels declare with SHARED and DYNAMIC_SHARED (kernels/common.cuh).
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "emu_core.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define KERNEL(threads, name) extern "C" void name
#define SHARED(type, name, dims)                      \
    using name##_type = type dims;                    \
    static const emu::SharedSite name##_site{#name};  \
    name##_type& name = *static_cast<name##_type*>(emu::static_shared(&name##_site, sizeof(name##_type)))
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emu::dynamic_shared())

// ---- vector types ----
#define EMU_VECTOR2(name, type, alignment)                                \
    struct alignas(alignment) name {                                      \
        type x, y;                                                        \
    };                                                                    \
    static inline name make_##name(type x, type y) { return name{x, y}; }
#define EMU_VECTOR4(name, type, alignment)                                                        \
    struct alignas(alignment) name {                                                              \
        type x, y, z, w;                                                                          \
    };                                                                                            \
    static inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }
EMU_VECTOR2(float2, float, 8)
EMU_VECTOR2(int2, int, 8)
EMU_VECTOR2(uint2, unsigned, 8)
EMU_VECTOR2(char2, signed char, 2)
EMU_VECTOR2(short2, short, 4)
EMU_VECTOR4(float4, float, 16)
EMU_VECTOR4(int4, int, 16)
EMU_VECTOR4(uint4, unsigned, 16)
EMU_VECTOR4(char4, signed char, 4)
EMU_VECTOR4(uchar4, unsigned char, 4)

// ---- where the thread is ----
#define threadIdx (emu::current->idx)
#define blockIdx (emu::current->block->idx)
#define blockDim (emu::current->block->shape)
#define gridDim (emu::current->block->grid)

// ---- half and bfloat16 ----
struct __half {
    _Float16 v;
};
struct alignas(4) __half2 {
    __half x, y;
};
typedef __half half;
typedef __half2 half2;
struct __nv_bfloat16 {
    uint16_t v;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
static inline float __half2float(__half h) { return (float)h.v; }
static inline __half __float2half(float f) { return __half{(_Float16)f}; }
static inline __half __float2half_rn(float f) { return __half{(_Float16)f}; }
static inline __half __ushort_as_half(unsigned short bits) {
    __half h;
    memcpy(&h, &bits, 2);
    return h;
}
static inline unsigned short __half_as_ushort(__half h) {
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline __half2 __half2half2(__half a) { return {a, a}; }
static inline __half __low2half(__half2 a) { return a.x; }
static inline __half __high2half(__half2 a) { return a.y; }
static inline __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
static inline __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
static inline float __low2float(__half2 a) { return (float)a.x.v; }
static inline float __high2float(__half2 a) { return (float)a.y.v; }
static inline float2 __half22float2(__half2 h) { return {(float)h.x.v, (float)h.y.v}; }
static inline __half2 __floats2half2_rn(float a, float b) {
    return {__float2half(a), __float2half(b)};
}
static inline __half2 __float2half2_rn(float a) { return {__float2half(a), __float2half(a)}; }
static inline __half2 __float22half2_rn(float2 a) { return __floats2half2_rn(a.x, a.y); }
// The sum or product of two halves is exact enough in f32 that one rounding to f16 follows.
static inline __half __hadd(__half a, __half b) { return __float2half((float)a.v + (float)b.v); }
static inline __half __hsub(__half a, __half b) { return __float2half((float)a.v - (float)b.v); }
static inline __half __hmul(__half a, __half b) { return __float2half((float)a.v * (float)b.v); }
static inline __half __hfma(__half a, __half b, __half c) {
    return __half{(_Float16)((double)a.v * (double)b.v + (double)c.v)};
}
static inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
static inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
static inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
static inline float __bfloat162float(__nv_bfloat16 b) {
    uint32_t bits = (uint32_t)b.v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline __nv_bfloat16 __float2bfloat16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return {0x7fff};
    return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 b) {
    return {__bfloat162float(b.x), __bfloat162float(b.y)};
}

// ---- synchronisation and warp operations ----
#define __syncthreads() emu::barrier(__FILE__, __LINE__)
static inline void __syncwarp(unsigned mask = ~0u) {
    unsigned lanes;
    emu::meet(emu::SYNC, mask, 0, lanes);
    emu::current->warp_epoch++;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emu::shuffle(mask, value, width,
                        [=](int, int first) { return first + (source & (width - 1)); });
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    return emu::shuffle(mask, value, width, [=](int lane, int first) {
        int source = lane ^ bits;
        return source >= first + width ? lane : source;
    });
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emu::shuffle(mask, value, width, [=](int lane, int first) {
        int source = lane + (int)delta;
        return source >= first + width ? lane : source;
    });
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emu::shuffle(mask, value, width, [=](int lane, int first) {
        int source = lane - (int)delta;
        return source < first ? lane : source;
    });
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned lanes, found = 0;
    const uint64_t* values = emu::meet(emu::BALLOT, mask, predicate != 0, lanes);
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        if (values[lane]) found |= 1u << lane;
    }
    return found;
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
static inline unsigned __match_any_sync(unsigned mask, unsigned value) {
    unsigned lanes, found = 0;
    const uint64_t* values = emu::meet(emu::MATCH, mask, value, lanes);
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        if (values[lane] == value) found |= 1u << lane;
    }
    return found;
}
static inline unsigned __activemask() { return emu::current->warp->live; }

// ---- arithmetic ----
static inline int __dp4a(int a, int b, int c) {
    __m128i wide_a = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(a));
    __m128i wide_b = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(b));
    __m128i pairs = _mm_madd_epi16(wide_a, wide_b);
    return (int)((unsigned)c + (unsigned)_mm_cvtsi128_si32(pairs) +
                 (unsigned)_mm_extract_epi32(pairs, 1));
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += ((a >> 8 * i) & 255) * ((b >> 8 * i) & 255);
    return c;
}
// glibc declares functions of these names, so they are macros.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline int __float2int_rn(float x) { return (int)lrintf(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b >> 64);
}
static inline float __int_as_float(int bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline int __float_as_int(float f) {
    int bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
static inline unsigned __float_as_uint(float f) { return (unsigned)__float_as_int(f); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned take = selector >> 4 * i & 15, byte = both >> 8 * (take & 7) & 255;
        if (take & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

// ---- loads with a hint, atomics (one OS thread per device: plain) ----
// Atomics race with nothing: the race checker does not see them.
#define EMU_ATOMIC static __attribute__((noinline, no_sanitize("thread")))
template <class T>
static inline T __ldg(const T* from) {
    return *from;
}
template <class T>
static inline T __ldcs(const T* from) {
    return *from;
}
template <class T>
static inline void __stcs(T* to, T value) {
    *to = value;
}
template <class T>
EMU_ATOMIC T atomicAdd(T* at, T value) {
    T before = *at;
    *at = before + value;
    return before;
}
template <class T>
EMU_ATOMIC T atomicMax(T* at, T value) {
    T before = *at;
    *at = std::max(before, value);
    return before;
}
template <class T>
EMU_ATOMIC T atomicMin(T* at, T value) {
    T before = *at;
    *at = std::min(before, value);
    return before;
}
template <class T>
EMU_ATOMIC T atomicExch(T* at, T value) {
    T before = *at;
    *at = value;
    return before;
}
template <class T>
EMU_ATOMIC T atomicCAS(T* at, T expected, T value) {
    T before = *at;
    if (before == expected) *at = value;
    return before;
}
