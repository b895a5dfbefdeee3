// The operations that are PTX on the GPU: one wrapper each, with a host branch of the same meaning.
//
// Fragment layouts are those of the PTX manual for mma.m16n8k16; g = lane / 4, c = lane % 4:
//
//   A (16 x 16, row): a[0] = A[g][2c, 2c+1]      a[1] = A[g+8][2c, 2c+1]
//                     a[2] = A[g][2c+8, 2c+9]    a[3] = A[g+8][2c+8, 2c+9]
//   B (16 x 8, col):  b[0] = B[2c, 2c+1][g]      b[1] = B[2c+8, 2c+9][g]
//   D (16 x 8):       d[0], d[1] = D[g][2c, 2c+1]   d[2], d[3] = D[g+8][2c, 2c+1]
//
// cp.async copies are complete only after cp_async_wait; the emulator does them no earlier.
#pragma once
#include "common.cuh"

// d += A * B, f16 in, f32 sums.
DEVICE void mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2]) {
#ifdef CUDA_HOST_EMU
    emu::mma_m16n8k16(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8 x 8 matrices of 16-bit values from shared memory. Lane l names the 16 bytes of row l % 8
// of matrix l / 8; it gets, of each matrix m, the two values [l / 4][2 * (l % 4), +1] in r[m].
DEVICE void ldmatrix_x4(unsigned r[4], const void* row) {
#ifdef CUDA_HOST_EMU
    emu::ldmatrix_x4(r, row, false);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same, each matrix transposed: values [2 * (l % 4), +1][l / 4].
DEVICE void ldmatrix_x4_transposed(unsigned r[4], const void* row) {
#ifdef CUDA_HOST_EMU
    emu::ldmatrix_x4(r, row, true);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// Starts a copy of BYTES (4, 8 or 16; both ends aligned to it) to shared memory. Where `is_there`
// is false, zeros are written and nothing is read.
template <int BYTES>
DEVICE void cp_async(void* to_shared, const void* from_global, bool is_there = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef CUDA_HOST_EMU
    emu::cp_async(to_shared, from_global, BYTES, is_there);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(to_shared);
    int n_read = is_there ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address),
                     "l"(from_global), "r"(n_read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(address),
                     "l"(from_global), "r"(n_read), "n"(BYTES)
                     : "memory");
#endif
}

// Ends a group of copies of this thread.
DEVICE void cp_async_commit() {
#ifdef CUDA_HOST_EMU
    emu::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the N newest. Other threads see the copies after a
// barrier that follows.
template <int N>
DEVICE void cp_async_wait() {
#ifdef CUDA_HOST_EMU
    emu::cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// 16 bytes that are read once: weights stream past the caches (PTX 7.0 has no L1::no_allocate).
DEVICE uint4 load_streamed(const uint4* from) { return __ldcs(from); }

// The bits of two halves.
DEVICE unsigned half2_bits(__half2 value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

DEVICE __half2 half2_of_bits(unsigned bits) {
    __half2 value;
    memcpy(&value, &bits, 4);
    return value;
}

DEVICE unsigned pack_half2(float low, float high) {
    return half2_bits(__floats2half2_rn(low, high));
}
