// What the segment that loops needs beside blocks: the input kept in the slots, the state before the
// first loop, the kept state of rows that may leave, and the signals that say whether they do.
#include "common.cuh"

// backend::StateInit
#define INIT_INPUT 0
#define INIT_ZERO 1
#define INIT_NORMAL 2

// SplitMix64's finalizer after its increment, as backend/state_init.rs.
DEVICE unsigned long long mixed(unsigned long long value) {
    unsigned long long z = value + 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// backend/state_init.rs `value`: the same bits on every device.
DEVICE float initial_value(unsigned long long seed, int position, int coordinate) {
    unsigned long long counter = (unsigned long long)(unsigned)position << 32 | (unsigned)coordinate;
    long long sum = 0;
    for (unsigned long long draw = 0; draw < 3; draw++) {
        unsigned long long bits = mixed(mixed(seed ^ mixed(counter)) + draw);
        for (int part = 0; part < 4; part++) sum += (long long)(bits >> 16 * part & 0xffff);
    }
    float centred = (float)(sum - 6 * 65535) / 65536.0f;
    return fminf(fmaxf(centred, -3.0f), 3.0f);
}

// Of rows at iteration 0: input[slot] = projected[row], hidden[slot] = the initial state.
KERNEL(256, start_loops_rows)(const PassHeader* header, const RowInfo* rows, const float* projected,
                              float* input, float* hidden, int n, int init, float deviation,
                              unsigned long long seed) {
    if ((int)blockIdx.x >= header->n_rows) return;
    const RowInfo& row = rows[blockIdx.x];
    if (row.iteration != 0) return;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        size_t at = (size_t)row.slot * n + i;
        input[at] = projected[(size_t)blockIdx.x * n + i];
        if (init == INIT_ZERO) hidden[at] = 0.0f;
        if (init == INIT_NORMAL) hidden[at] = deviation * initial_value(seed, row.position, i);
    }
}

// hidden[slot] = projected[row] + input[slot].
KERNEL(256, inject_rows)(const PassHeader* header, const RowInfo* rows, const float* projected,
                         const float* input, float* hidden, int n) {
    if ((int)blockIdx.x >= header->n_rows) return;
    size_t base = (size_t)rows[blockIdx.x].slot * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        hidden[base + i] = projected[(size_t)blockIdx.x * n + i] + input[base + i];
}

// kept[slot] = hidden[slot] for the slots of the wanted list.
KERNEL(256, keep_rows)(const PassHeader* header, const int* slots, const float* hidden, float* kept,
                       int n) {
    if ((int)blockIdx.x >= header->n_wanted) return;
    size_t base = (size_t)slots[blockIdx.x] * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) kept[base + i] = hidden[base + i];
}

DEVICE double warp_sum_double(double value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

// The sum over a block in every thread, in f64; `partial` holds 32.
DEVICE double block_sum_double(double value, double* partial) {
    value = warp_sum_double(value);
    __syncthreads();
    if (lane_idx() == 0) partial[warp_idx()] = value;
    __syncthreads();
    int n_warps = block_threads() / WARP_SIZE;
    return warp_sum_double(lane_idx() < n_warps ? partial[lane_idx()] : 0.0);
}

// backend::exit_signal::gate of the wanted slots: out[row].
KERNEL(256, gate_rows)(const PassHeader* header, const int* slots, const float* hidden,
                       const float* weight, float* out, int n, float bias) {
    SHARED(double, partial, [32]);
    if ((int)blockIdx.x >= header->n_wanted) return;
    const float* state = hidden + (size_t)slots[blockIdx.x] * n;
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += (double)weight[i] * (double)state[i];
    sum = block_sum_double(sum, partial);
    if (threadIdx.x == 0) out[blockIdx.x] = (float)(1.0 / (1.0 + exp(-(sum + (double)bias))));
}

// backend::exit_signal::change.
KERNEL(256, change_rows)(const PassHeader* header, const int* slots, const float* hidden,
                         const float* kept, float* out, int n) {
    SHARED(double, partial, [32]);
    if ((int)blockIdx.x >= header->n_wanted) return;
    size_t base = (size_t)slots[blockIdx.x] * n;
    double difference = 0.0, norm = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        double now = hidden[base + i], before = kept[base + i];
        difference += (now - before) * (now - before);
        norm += now * now;
    }
    difference = block_sum_double(difference, partial);
    norm = block_sum_double(norm, partial);
    if (threadIdx.x == 0) out[blockIdx.x] = (float)sqrt(difference / norm);
}

// backend::exit_signal::divergence of two rows of logits [wanted][n] each.
KERNEL(256, divergence_rows)(const PassHeader* header, const float* now, const float* before,
                             float* out, int n) {
    SHARED(double, partial, [32]);
    SHARED(float, greatest, [32]);
    if ((int)blockIdx.x >= header->n_wanted) return;
    now += (size_t)blockIdx.x * n, before += (size_t)blockIdx.x * n;
    float now_max = -INFINITY, before_max = -INFINITY;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        now_max = fmaxf(now_max, now[i]);
        before_max = fmaxf(before_max, before[i]);
    }
    now_max = block_max(now_max, greatest);
    before_max = block_max(before_max, greatest);
    double now_sum = 0.0, before_sum = 0.0, weighted = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        double weight = (double)expf(now[i] - now_max);
        now_sum += weight;
        weighted += weight * ((double)now[i] - (double)before[i]);
        before_sum += (double)expf(before[i] - before_max);
    }
    now_sum = block_sum_double(now_sum, partial);
    weighted = block_sum_double(weighted, partial);
    before_sum = block_sum_double(before_sum, partial);
    if (threadIdx.x != 0) return;
    double logs = (double)now_max + log(now_sum) - ((double)before_max + log(before_sum));
    double divergence = weighted / now_sum - logs;
    out[blockIdx.x] = divergence < 0.0 ? 0.0f : (float)divergence;
}

// The keys and values of rows that leave stand for the loops that they skip. `skipped` holds pairs
// (row, loops) for the wanted list; grid (pairs, layers).
KERNEL(128, fill_skipped_rows)(const PassHeader* header, const RowInfo* rows, const int* pages,
                               const int* skipped, __half* pool, KvLayout kv) {
    if ((int)blockIdx.x >= header->n_wanted) return;
    RowInfo row = rows[skipped[2 * blockIdx.x]];
    int n_loops = skipped[2 * blockIdx.x + 1], block = row.position / PAGE_TOKENS;
    kv.layer += blockIdx.y;
    int n = kv.head_dim, n_all = 2 * kv.n_kv_heads * n;
    int from_page = page_of(row, pages, kv, block);
    for (row.iteration++; row.iteration < n_loops; row.iteration++) {
        int to_page = page_of(row, pages, kv, block);
        for (int i = threadIdx.x; i < n_all; i += blockDim.x) {
            int head = i / n % kv.n_kv_heads, is_value = i / n / kv.n_kv_heads;
            int at = row.position % PAGE_TOKENS * n + i % n;
            pool[kv_offset(kv, to_page, is_value, head) + at] =
                pool[kv_offset(kv, from_page, is_value, head) + at];
        }
    }
}
