// The best of every row of logits, so that a few values cross the bus instead of a vocabulary.
//
// A block per row of the wanted list. A value and its index form one key whose order is: greater
// values first, and of equal values the lower index. Keys are unique, so every result is the same
// whatever order the threads come in. NaN is below all numbers.
#include "common.cuh"

// Most values that top_k_rows gives.
#define TOP_K_MAX 1024

typedef unsigned long long SelectKey;

// Greater floats have greater bits.
DEVICE SelectKey select_key(float value, int index) {
    unsigned bits = __float_as_uint(value);
    unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (value != value) ordered = 0;
    if (value == 0.0f) ordered = 0x80000000u;  // Both zeros are equal.
    return (SelectKey)ordered << 32 | (0xffffffffu - (unsigned)index);
}

DEVICE int key_index(SelectKey key) { return (int)(0xffffffffu - (unsigned)key); }

// The index of the greatest of each row, the first of equals. logits [n_wanted][n].
KERNEL(256, argmax_rows)(const PassHeader* header, const float* logits, int* best, int n) {
    SHARED(SelectKey, of_warps, [8]);
    int row = blockIdx.x;
    if (row >= header->n_wanted) return;
    SelectKey key = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        SelectKey other = select_key(logits[(size_t)row * n + i], i);
        key = other > key ? other : key;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        SelectKey other = __shfl_xor_sync(FULL_WARP, key, offset);
        key = other > key ? other : key;
    }
    if (lane_idx() == 0) of_warps[warp_idx()] = key;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < (int)blockDim.x / WARP_SIZE; warp++)
        key = of_warps[warp] > key ? of_warps[warp] : key;
    best[row] = key_index(key);
}

// The least key of the k greatest of a row: eight bits at a time, from the top, the bin in which
// the k-th lies is found by a histogram of the keys that share the bits so far.
DEVICE SelectKey kth_key(const float* values, int n, int k, int* counts, int* chosen) {
    SelectKey prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            SelectKey key = select_key(values[i], i);
            bool has_prefix = shift == 56 || key >> (shift + 8) == prefix >> (shift + 8);
            if (has_prefix) atomicAdd(&counts[(int)(key >> shift & 255)], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 255, left = k;
            while (bin > 0 && counts[bin] < left) left -= counts[bin--];
            chosen[0] = bin;
            chosen[1] = left;
        }
        __syncthreads();
        prefix |= (SelectKey)chosen[0] << shift;
        k = chosen[1];
        __syncthreads();
    }
    return prefix;
}

// Sorts `n` keys (a power of two) in shared memory, the greatest first.
DEVICE void sort_keys(SelectKey* keys, int n) {
    for (int size = 2; size <= n; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
                int low = i / stride * stride * 2 + i % stride, high = low + stride;
                bool is_descending = (low & size) == 0;
                SelectKey a = keys[low], b = keys[high];
                if (is_descending == (a < b)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// The k greatest of each row, the greatest first: indexes and values [n_wanted][k].
// 1 <= k <= min(n, TOP_K_MAX).
KERNEL(256, top_k_rows)(const PassHeader* header, const float* logits, int* indexes,
                        float* best_values, int n, int k) {
    SHARED(SelectKey, keys, [TOP_K_MAX]);
    SHARED(int, counts, [256]);
    SHARED(int, chosen, [2]);
    int row = blockIdx.x;
    if (row >= header->n_wanted) return;
    const float* values = logits + (size_t)row * n;
    SelectKey least = kth_key(values, n, k, counts, chosen);
    int n_sorted = 1;
    while (n_sorted < k) n_sorted *= 2;
    for (int i = threadIdx.x; i < n_sorted; i += blockDim.x) keys[i] = 0;
    if (threadIdx.x == 0) counts[0] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        SelectKey key = select_key(values[i], i);
        if (key >= least) keys[atomicAdd(&counts[0], 1)] = key;
    }
    __syncthreads();
    sort_keys(keys, n_sorted);
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        int index = key_index(keys[i]);
        indexes[(size_t)row * k + i] = index;
        best_values[(size_t)row * k + i] = values[index];
    }
}
