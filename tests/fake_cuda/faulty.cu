// Kernels with one mistake each, for the emulator's own tests (tests/fake_cuda.rs). They are in no
// PTX that ships. All take the same parameters: a device array and its length.
#include "../../kernels/common.cuh"
#include "../../kernels/ops.cuh"

// Not faulty: a block sum, by shuffles and shared memory.
KERNEL(256, sound_sum)(float* data, int n) {
    SHARED(float, partial, [32]);
    float sum = block_sum((int)threadIdx.x < n ? data[threadIdx.x] : 0.0f, partial);
    __syncthreads();
    if (threadIdx.x == 0) data[0] = sum;
}

// Not faulty: lanes that have ended are not waited for.
KERNEL(256, sound_early_exit)(float* data, int n) {
    if ((int)threadIdx.x >= n) return;
    __syncthreads();
    unsigned there = __ballot_sync(FULL_WARP, 1);
    data[threadIdx.x] = (float)__popc(there);
}

// Not faulty: masks of a part of the warp.
KERNEL(32, sound_half_warps)(float* data, int n) {
    unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
    float value = (float)threadIdx.x;
    for (int offset = 8; offset > 0; offset >>= 1) value += __shfl_xor_sync(mask, value, offset, 16);
    if ((int)threadIdx.x < n) data[threadIdx.x] = value;
}

// Not faulty: D = A * B for A[r][k] = r + k / 16, B[k][q] = k == q (so D[r][q] = A[r][q]).
KERNEL(32, sound_mma)(float* data, int n) {
    SHARED(__half, a, [16][16]);
    SHARED(__half, b, [16][8]);
    for (int i = threadIdx.x; i < 256; i += 32)
        a[i / 16][i % 16] = __float2half_rn(i / 16 + (i % 16) / 16.0f);
    for (int i = threadIdx.x; i < 128; i += 32)
        b[i / 8][i % 8] = __float2half_rn(i / 8 == i % 8 ? 1.0f : 0.0f);
    __syncwarp();
    unsigned fa[4], fb[4];
    int lane = lane_idx();
    ldmatrix_x4(fa, &a[lane % 8 + lane / 8 % 2 * 8][lane / 16 * 8]);
    ldmatrix_x4_transposed(fb, &b[lane % 16][0]);
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_m16n8k16(d, fa, fb);
    for (int e = 0; e < 4; e++) {
        int at = (lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2;
        if (at < n) data[at] = d[e];
    }
}

// Not faulty: a copy that is waited for, double buffered.
KERNEL(32, sound_copy)(float* data, int n) {
    SHARED(float, buffers, [2][128]);
    float sum = 0.0f;
    int n_tiles = n / 128;
    cp_async<16>(&buffers[0][threadIdx.x * 4], data + threadIdx.x * 4);
    cp_async_commit();
    for (int tile = 0; tile < n_tiles; tile++) {
        bool has_next = tile + 1 < n_tiles;
        const float* next = data + (has_next ? tile + 1 : 0) * 128 + threadIdx.x * 4;
        cp_async<16>(&buffers[(tile + 1) % 2][threadIdx.x * 4], next, has_next);
        cp_async_commit();
        cp_async_wait<1>();
        __syncwarp();
        for (int i = 0; i < 4; i++) sum += buffers[tile % 2][(threadIdx.x * 4 + i + 7) % 128];
        __syncwarp();
    }
    cp_async_wait<0>();
    sum = warp_sum(sum);
    if (threadIdx.x == 0) data[0] = sum;
}

KERNEL(256, faulty_beyond_end)(float* data, int n) { data[n + threadIdx.x] = 1.0f; }

KERNEL(256, faulty_host_pointer)(float* data, int n) { data[0] = (float)n; }

KERNEL(256, faulty_divergent_barrier)(float* data, int n) {
    if (threadIdx.x < 16) __syncthreads();
    __syncwarp();
    if ((int)threadIdx.x < n) data[threadIdx.x] = 1.0f;
}

KERNEL(256, faulty_two_barriers)(float* data, int n) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    if ((int)threadIdx.x < n) data[threadIdx.x] = 1.0f;
}

KERNEL(256, faulty_mask)(float* data, int n) {
    float value = (float)n;
    if (threadIdx.x < 16) value = __shfl_xor_sync(0xffff0000u, value, 1);
    data[0] = value;
}

// The reversed array, without the barrier between write and read.
KERNEL(256, faulty_no_barrier)(float* data, int n) {
    SHARED(float, values, [64]);
    if (threadIdx.x < 64) values[threadIdx.x] = (float)threadIdx.x;
    if ((int)threadIdx.x < n) data[threadIdx.x] = values[63 - threadIdx.x];
}

KERNEL(256, faulty_no_wait)(float* data, int n) {
    SHARED(float, values, [4]);
    if (threadIdx.x == 0) {
        cp_async<16>(values, data);
        cp_async_commit();
        float first = values[0];
        cp_async_wait<0>();
        data[n - 1] = first;
    }
}

KERNEL(256, faulty_copy_left)(float* data, int n) {
    SHARED(float, values, [4]);
    if (threadIdx.x == 0) cp_async<16>(values, data);
    (void)n;
}

KERNEL(256, faulty_static_shared)(float* data, int n) {
    SHARED(float, sums, [32]);
    if ((int)threadIdx.x < n) data[threadIdx.x] = sums[threadIdx.x % 32];
    __syncthreads();
    if (threadIdx.x < 32) sums[threadIdx.x] = 3.0f;
}

KERNEL(256, faulty_dynamic_shared)(float* data, int n) {
    DYNAMIC_SHARED(float, sums);
    if ((int)threadIdx.x < n) data[threadIdx.x] = sums[threadIdx.x];
    __syncthreads();
    sums[threadIdx.x] = 3.0f;
}

KERNEL(256, faulty_shared_end)(float* data, int n) {
    SHARED(float, sums, [32]);
    float* end = sums + n;
    end[threadIdx.x] = data[0];
}

KERNEL(256, faulty_dynamic_end)(float* data, int n) {
    DYNAMIC_SHARED(float, sums);
    sums[n + threadIdx.x] = data[0];
}

KERNEL(256, faulty_alignment)(float* data, int n) {
    float4* vectors = (float4*)(data + 1);
    if ((int)threadIdx.x < n / 4 - 1) vectors[threadIdx.x] = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
}

KERNEL(256, faulty_ended_lanes)(float* data, int n) {
    if (threadIdx.x >= 20) return;
    unsigned a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_m16n8k16(d, a, b);
    data[threadIdx.x % n] = d[0];
}
