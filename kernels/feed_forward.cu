// The inner activation of a feed-forward network: silu(gate) * up, or gelu(up) without a gate, as
// the input of the product that follows.
#include "common.cuh"
#include "activations.cuh"

// gate (null: none) and up are f32 [row][n]. A block per row and 1024 values.
KERNEL(256, activate_rows)(const PassHeader* header, const float* gate, const float* up,
                           Activations x, int n) {
    int row = blockIdx.y;
    if (row >= header->n_rows) return;
    int first = blockIdx.x * 1024;
    for (int i = first + threadIdx.x; i < first + 1024; i += blockDim.x) {
        bool is_there = i < n;
        float value = 0.0f;
        if (is_there) {
            float u = up[(size_t)row * n + i];
            if (gate) {
                float g = gate[(size_t)row * n + i];
                value = g / (1.0f + expf(-g)) * u;
            } else {
                value = 0.5f * u * (1.0f + erff(u * 0.70710678f));
            }
        }
        store_activation(x, row, n, i, is_there, value);
    }
}
