// What every kernel shares: the two builds, the tables of a pass, KV addressing, reductions.
//
// One source, two builds: NVRTC makes kernels.ptx (kernels/build.py), and g++ makes the host
// build inside the emulated driver (CUDA_HOST_EMU, tests/fake_cuda/). Rules that both need:
//
//   * A kernel is defined as `KERNEL(threads, name)(parameters) { .. }` at the start of a line;
//     `threads` is the most that a block may have. src/backend/cuda/launch.rs lists the same name
//     and parameters.
//   * Shared memory is declared as `SHARED(type, name, [n][m])` or `DYNAMIC_SHARED(type, name)`,
//     never as a bare `__shared__`: the emulator fills it with NaN per block and guards its ends.
//   * What is PTX and not C++ stands in ops.cuh, with a host branch of the same meaning.
//   * Sums that must not depend on a row's company use fmaf explicitly, so that no compiler
//     contracts two instances of a template differently.
//   * A kernel leaves (or skips) rows beyond PassHeader::n_rows: grids are those of the bucket.
#pragma once

#ifdef CUDA_HOST_EMU
#include "cuda_emu.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
#define INFINITY __int_as_float(0x7f800000)
#define KERNEL(threads, name) extern "C" __global__ void __launch_bounds__(threads) name
#define SHARED(type, name, dims) __shared__ __align__(16) type name dims
// All dynamic shared memory is one array; each use may see it as its own type.
extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(dynamic_shared_bytes)
#endif

#define DEVICE static __device__ __forceinline__

#define WARP_SIZE 32
#define FULL_WARP 0xffffffffu
// Positions per KV page: backend::PAGE_TOKENS.
#define PAGE_TOKENS 16
// Values per quantization block of every weight plane and of x8.
#define BLOCK_VALUES 32

// The part of a pass that every kernel reads first.
struct PassHeader {
    int n_rows;    // Rows of this pass; the bucket may be larger.
    int n_wanted;  // Rows of the wanted list (logits, states, exit signals).
    int reserved[2];
};

// One row of a pass, 64 bytes: `backend::Row` and what its sequence says.
struct RowInfo {
    int slot;           // Of the hidden state.
    int token;          // Read where `enters`.
    int position;       // In the sequence, from 0.
    int iteration;      // Of the segment, from 0.
    int enters;         // 1: the state is the token's embedding.
    int table_base;     // First entry of the sequence's tables in `pages`.
    int table_len;      // Entries of one group's table.
    int window_tokens;  // CacheWindow::tokens; 0 = all.
    int n_kept;         // CacheWindow::n_kept, a multiple of PAGE_TOKENS.
    int n_dropped;      // SequencePages::n_dropped.
    int first_row;      // First row of its sequence in this pass.
    int n_seq_rows;     // Rows of its sequence in this pass; adjacent, positions ascending.
    int reserved[4];
};

// Where the K/V of a block lie, and the shape of the pool: f16
// [page][layer_in_page][key 0, value 1][kv_head][PAGE_TOKENS][head_dim].
struct KvLayout {
    int first_group;           // KV group of iteration 0.
    int groups_per_iteration;  // 1 in a core that loops, else 0.
    int layer;                 // Within the page.
    int layers_per_page;
    int n_kv_heads;
    int head_dim;
};

// What a row sees, see backend/window.rs: [kept_start, kept_end) and [start, end).
struct Visible {
    int kept_start, kept_end, start, end;
};

DEVICE Visible visible_positions(const RowInfo& row, int layer_window) {
    int end = row.position + 1;
    int layer_start = layer_window == 0 ? 0 : max(end - layer_window, 0);
    int start = row.window_tokens == 0 ? 0 : max(end - row.window_tokens, 0);
    if (start <= row.n_kept) return Visible{0, 0, layer_start, end};
    return Visible{min(layer_start, row.n_kept), row.n_kept, max(start, layer_start), end};
}

DEVICE bool sees(const Visible& v, int position) {
    return (position >= v.kept_start && position < v.kept_end) ||
           (position >= v.start && position < v.end);
}

// The page that holds block `block` (16 positions) of a row's sequence at the row's iteration.
DEVICE int page_of(const RowInfo& row, const int* __restrict__ pages, const KvLayout& kv,
                   int block) {
    int group = kv.first_group + row.iteration * kv.groups_per_iteration;
    int entry = block < row.n_kept / PAGE_TOKENS ? block : block - row.n_dropped;
    return pages[row.table_base + group * row.table_len + entry];
}

// First element of (page, key or value, head): [PAGE_TOKENS][head_dim] follow.
DEVICE size_t kv_offset(const KvLayout& kv, int page, int is_value, int kv_head) {
    size_t plane = ((size_t)page * kv.layers_per_page + kv.layer) * 2 + is_value;
    return (plane * kv.n_kv_heads + kv_head) * PAGE_TOKENS * kv.head_dim;
}

DEVICE int lane_idx() { return (threadIdx.x + threadIdx.y * blockDim.x) & (WARP_SIZE - 1); }
DEVICE int warp_idx() { return (threadIdx.x + threadIdx.y * blockDim.x) / WARP_SIZE; }
DEVICE int block_threads() { return blockDim.x * blockDim.y; }

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

DEVICE float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}

// The sum over a block, in every thread. `partial` is shared memory of 32 floats; all threads of
// the block call it, a whole number of warps. It may be called again at once.
DEVICE float block_sum(float value, float* partial) {
    value = warp_sum(value);
    __syncthreads();
    if (lane_idx() == 0) partial[warp_idx()] = value;
    __syncthreads();
    int n_warps = (block_threads() + WARP_SIZE - 1) / WARP_SIZE;
    return warp_sum(lane_idx() < n_warps ? partial[lane_idx()] : 0.0f);
}

// The greatest of a block, in every thread; as `block_sum`.
DEVICE float block_max(float value, float* partial) {
    value = warp_max(value);
    __syncthreads();
    if (lane_idx() == 0) partial[warp_idx()] = value;
    __syncthreads();
    int n_warps = (block_threads() + WARP_SIZE - 1) / WARP_SIZE;
    return warp_max(lane_idx() < n_warps ? partial[lane_idx()] : -INFINITY);
}

// f32 to f16 for activations: values beyond the range of f16 are clamped, not infinite.
DEVICE __half half_clamped(float value) {
    return __float2half_rn(fminf(fmaxf(value, -65504.0f), 65504.0f));
}
