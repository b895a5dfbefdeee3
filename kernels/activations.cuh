// What the products of a layer read: f16 and int8 activations, written by whoever makes them.
#pragma once
#include "common.cuh"

// Where the products of a layer read their input; each may be null. x8 needs n a multiple of 32.
struct Activations {
    __half* x16;      // [row][n]
    int8_t* x8;       // [row][n]
    float2* x8_sums;  // [row][n / 32]: scale, scale * sum of the 32 int8
};

// Writes value i of a row; the 32 lanes of a warp have the 32 values of one block.
DEVICE void store_activation(const Activations& x, int row, int n, int i, bool is_there,
                             float value) {
    if (x.x16 && is_there) x.x16[(size_t)row * n + i] = half_clamped(value);
    if (!x.x8) return;
    float greatest = warp_max(is_there ? fabsf(value) : 0.0f);
    float scale = greatest / 127.0f;
    int q = greatest > 0.0f && is_there ? __float2int_rn(value / scale) : 0;
    float sum = warp_sum((float)q);  // Of integers: exact in any order.
    if (!is_there) return;
    x.x8[(size_t)row * n + i] = (int8_t)q;
    if (lane_idx() == 0)
        x.x8_sums[((size_t)row * n + i) / BLOCK_VALUES] = make_float2(scale, scale * sum);
}

// One past the last index that the warps of a block go through together.
DEVICE int whole_warps(int n) { return (n + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE; }
