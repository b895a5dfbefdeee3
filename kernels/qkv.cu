// What follows the projections of attention: the norm of each head where the model has one, the
// rotation, and the places of keys and values in the pages. A block per row and head; q stays where
// it is, f32.
#include "common.cuh"

struct Rope {
    const float* inverse_frequencies;  // [n_pairs]; null: no rotation.
    int n_pairs;
    int is_halves;  // Pairs (i, i + n_pairs) instead of (2i, 2i + 1).
    float magnitude;
    int reserved;
};

// Turns one pair. The angle is taken to -pi..pi in f64: far positions need its digits.
DEVICE void rotate_pair(float* head, const Rope& rope, int pair, int position) {
    const double turn = 6.283185307179586476925;
    double angle = (double)position * (double)rope.inverse_frequencies[pair];
    float reduced = (float)(angle - turn * rint(angle / turn));
    float sine = sinf(reduced) * rope.magnitude, cosine = cosf(reduced) * rope.magnitude;
    int first = rope.is_halves ? pair : 2 * pair;
    int second = rope.is_halves ? pair + rope.n_pairs : 2 * pair + 1;
    float a = head[first], b = head[second];
    head[first] = a * cosine - b * sine;
    head[second] = a * sine + b * cosine;
}

// q f32 [row][n_heads * head_dim], k and v f32 [row][n_kv_heads * head_dim]; grid (rows of the
// bucket, n_heads + 2 * n_kv_heads). q_norm and k_norm (head_dim) may be null.
KERNEL(128, qkv_finish)(const PassHeader* header, const RowInfo* rows, const int* pages, float* q,
                        const float* k, const float* v, __half* pool, const float* q_norm,
                        const float* k_norm, KvLayout kv, Rope rope, int n_heads, float epsilon) {
    SHARED(float, partial, [32]);
    SHARED(float, head, [512]);
    int row_idx = blockIdx.x, n = kv.head_dim;
    if (row_idx >= header->n_rows) return;
    const RowInfo& row = rows[row_idx];
    int which = blockIdx.y;
    bool is_query = which < n_heads, is_value = which >= n_heads + kv.n_kv_heads;
    int head_idx = is_query ? which : (which - n_heads) % kv.n_kv_heads;
    int width = (is_query ? n_heads : kv.n_kv_heads) * n;
    const float* from = (is_query ? q : is_value ? v : k) + (size_t)row_idx * width + head_idx * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) head[i] = from[i];
    __syncthreads();
    const float* weight = is_query ? q_norm : is_value ? nullptr : k_norm;
    if (weight) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(head[i], head[i], sum);
        float factor = 1.0f / sqrtf(block_sum(sum, partial) / (float)n + epsilon);
        for (int i = threadIdx.x; i < n; i += blockDim.x) head[i] *= factor * weight[i];
        __syncthreads();
    }
    if (!is_value && rope.inverse_frequencies) {
        for (int i = threadIdx.x; i < rope.n_pairs; i += blockDim.x)
            rotate_pair(head, rope, i, row.position);
        __syncthreads();
    }
    if (is_query) {
        float* to = q + (size_t)row_idx * width + head_idx * n;
        for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = head[i];
        return;
    }
    int page = page_of(row, pages, kv, row.position / PAGE_TOKENS);
    __half* to = pool + kv_offset(kv, page, is_value, head_idx) + row.position % PAGE_TOKENS * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = half_clamped(head[i]);
}
