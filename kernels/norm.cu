// Norms of rows, and what the products that follow read: x16 (f16) and x8 (int8 with a scale and a
// scaled sum per 32 values). One pass over a row in one block, the norm fused with both.
#include "activations.cuh"
#include "common.cuh"

// `from` is [slot][n]; otherwise [row][n].
#define ROWS_FROM_SLOTS 1
// `to` is [slot][n]; otherwise [row][n].
#define ROWS_TO_SLOTS 2
// The rows are those of the wanted list.
#define ROWS_WANTED 4

// [rmsnorm](from) to `to` and to the activations; without a weight the values as they are.
// slots[row * slot_stride]: 16 for the rows of a pass, 1 for a list. `to` may be null.
KERNEL(256, rms_norm_rows)(const PassHeader* header, const int* slots, const float* from,
                           const float* weight, float* to, Activations x, int slot_stride, int n,
                           float epsilon, int flags) {
    SHARED(float, partial, [32]);
    int row = blockIdx.x;
    if (row >= (flags & ROWS_WANTED ? header->n_wanted : header->n_rows)) return;
    int slot = slots[(size_t)row * slot_stride];
    const float* of_row = from + (size_t)(flags & ROWS_FROM_SLOTS ? slot : row) * n;
    float* to_row = to ? to + (size_t)(flags & ROWS_TO_SLOTS ? slot : row) * n : to;
    float factor = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(of_row[i], of_row[i], sum);
        factor = 1.0f / sqrtf(block_sum(sum, partial) / (float)n + epsilon);
    }
    for (int i = threadIdx.x; i < whole_warps(n); i += blockDim.x) {
        bool is_there = i < n;
        float value = is_there ? of_row[i] : 0.0f;
        if (weight && is_there) value *= factor * weight[i];
        store_activation(x, row, n, i, is_there, value);
        if (to_row && is_there) to_row[i] = value;
    }
}

// hidden[slot] = layernorm(hidden[slot]); `bias` may be null. Of all rows, or of those that enter.
KERNEL(256, layer_norm_rows)(const PassHeader* header, const RowInfo* rows, float* hidden,
                             const float* weight, const float* bias, int n, float epsilon,
                             int only_entering) {
    SHARED(float, partial, [32]);
    int row = blockIdx.x;
    if (row >= header->n_rows || (only_entering && !rows[row].enters)) return;
    float* values = hidden + (size_t)rows[row].slot * n;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += values[i];
    float mean = block_sum(sum, partial) / (float)n;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float centred = values[i] - mean;
        squares = fmaf(centred, centred, squares);
    }
    float factor = 1.0f / sqrtf(block_sum(squares, partial) / (float)n + epsilon);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float value = (values[i] - mean) * (factor * weight[i]);
        values[i] = bias ? value + bias[i] : value;
    }
}

// hidden[slot] += [rmsnorm](branch[row]); `weight` may be null.
KERNEL(256, add_branch_rows)(const PassHeader* header, const RowInfo* rows, const float* branch,
                             const float* weight, float* hidden, int n, float epsilon) {
    SHARED(float, partial, [32]);
    int row = blockIdx.x;
    if (row >= header->n_rows) return;
    const float* values = branch + (size_t)row * n;
    float factor = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(values[i], values[i], sum);
        factor = 1.0f / sqrtf(block_sum(sum, partial) / (float)n + epsilon);
    }
    float* to = hidden + (size_t)rows[row].slot * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        to[i] += weight ? values[i] * (factor * weight[i]) : values[i];
}
