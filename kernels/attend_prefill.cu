// Attention of many rows: flash-style, on tensor cores, over the pages of the KV pool.
//
//   grid   (rows of the bucket / 16, n_kv_heads * ceil(queries per kv head / blockDim.y))
//   block  (32, query heads that share the loaded keys, at most 4): a warp per query head
//
// A block goes over the pages that its 16 rows see, in ascending order; a page (16 positions) of
// keys and values is one step, and the next one is on its way meanwhile. Rows of a tile may be of
// different sequences, or at different iterations: the tile is then gone through once per such
// group, the other rows masked. A page that a row does not see leaves its state bit for bit as it
// was, so a row's result depends neither on its company nor on the chunk it came in.
//
// q is f32 and becomes f16 here; probabilities are rounded to f16 for the second product; sums are
// f32. Positions that no row sees are read as zeros: their memory may never have been written.
#include "common.cuh"
#include "ops.cuh"

struct AttendShape {
    KvLayout kv;
    int n_heads;
    int layer_window;
    int is_bidirectional;
    float scale;
};

// The rows of one sequence and iteration in a tile, and the positions that they see together.
struct RowGroup {
    unsigned rows;  // Bit per row of the tile.
    RowInfo leader;
    int first, kept_end, recent_start, end;
};

DEVICE Visible seen_by(const RowInfo& row, const AttendShape& shape) {
    if (shape.is_bidirectional) return Visible{0, 0, 0, row.n_seq_rows};
    return visible_positions(row, shape.layer_window);
}

DEVICE int warp_min_int(int value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value = min(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}

// The group of the first of the `waiting` rows. All warps of a block find the same.
DEVICE RowGroup next_group(const RowInfo* rows, const AttendShape& shape, int first_row,
                           unsigned waiting) {
    RowGroup group;
    group.leader = rows[first_row + __ffs((int)waiting) - 1];
    int at = lane_idx() % 16;
    bool is_in = waiting >> at & 1;
    const RowInfo& mine = rows[first_row + (is_in ? at : 0)];
    is_in = is_in && mine.first_row == group.leader.first_row &&
            mine.iteration == group.leader.iteration;
    group.rows = __ballot_sync(FULL_WARP, is_in) & 0xffffu;
    Visible seen = seen_by(is_in ? mine : group.leader, shape);
    bool has_kept = seen.kept_start < seen.kept_end;
    group.recent_start = warp_min_int(seen.start);
    group.first = warp_min_int(has_kept ? seen.kept_start : seen.start);
    group.kept_end = -warp_min_int(has_kept ? -seen.kept_end : 0);
    group.end = -warp_min_int(-seen.end);
    return group;
}

// The first page from `page` on that some row of the group sees.
DEVICE int next_page(const RowGroup& group, int page) {
    int recent = group.recent_start / PAGE_TOKENS;
    return page * PAGE_TOKENS >= group.kept_end && page < recent ? recent : page;
}

// Shared tiles of one page: [PAGE_TOKENS][STRIDE] of keys, then of values.
template <int DIM>
struct PageTile {
    static constexpr int STRIDE = DIM + 8;  // 16 bytes more: no two rows of 8 in one bank.
    static constexpr int N_HALVES = 2 * PAGE_TOKENS * STRIDE;

    // Starts the copies of one page; positions from `end` on become zeros.
    static __device__ __forceinline__ void prefetch(__half* tile, const __half* pool,
                                                    const KvLayout& kv, int page, int kv_head,
                                                    int n_positions) {
        int n_chunks = kv.head_dim / 8, n_all = 2 * PAGE_TOKENS * n_chunks;
        int thread = threadIdx.x + threadIdx.y * blockDim.x;
        if (kv.head_dim % 8 == 0) {
            for (int i = thread; i < n_all; i += block_threads()) {
                int row = i / n_chunks, chunk = i % n_chunks;
                int position = row % PAGE_TOKENS, is_value = row / PAGE_TOKENS;
                const __half* from = pool + kv_offset(kv, page, is_value, kv_head) +
                                     position * kv.head_dim + chunk * 8;
                cp_async<16>(tile + row * STRIDE + chunk * 8, from, position < n_positions);
            }
        } else {
            for (int i = thread; i < 2 * PAGE_TOKENS * kv.head_dim; i += block_threads()) {
                int row = i / kv.head_dim, d = i % kv.head_dim;
                int position = row % PAGE_TOKENS, is_value = row / PAGE_TOKENS;
                const __half* from = pool + kv_offset(kv, page, is_value, kv_head);
                tile[row * STRIDE + d] = position < n_positions
                                             ? from[position * kv.head_dim + d]
                                             : __float2half_rn(0.0f);
            }
        }
        cp_async_commit();
    }
};

// The running softmax of one query head for the 16 rows of a tile; a lane holds rows g and g + 8.
template <int DIM>
struct HeadState {
    unsigned q[DIM / 16][4];
    float sums[DIM / 8][4];
    float max[2], total[2];

    __device__ __forceinline__ void begin(const float* queries, int first_row, int n_rows,
                                          int row_stride, int head_dim) {
        int g = lane_idx() / 4, c = lane_idx() % 4;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = first_row + g + i % 2 * 8, d = k * 16 + i / 2 * 8 + c * 2;
                const float* from = queries + (size_t)row * row_stride;
                bool is_row = row < n_rows;
                float low = is_row && d < head_dim ? from[d] : 0.0f;
                float high = is_row && d + 1 < head_dim ? from[d + 1] : 0.0f;
                q[k][i] = pack_half2(low, high);
            }
        }
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[n][e] = 0.0f;
        max[0] = max[1] = -INFINITY;
        total[0] = total[1] = 0.0f;
    }

    // One page of keys and values; `seen[i]` is what row g + 8 * i sees, nothing where it is not
    // of the group.
    __device__ __forceinline__ void step(const __half* tile, int first_position,
                                         const Visible seen[2], float scale) {
        constexpr int STRIDE = PageTile<DIM>::STRIDE;
        int lane = lane_idx(), c = lane % 4, matrix = lane / 8;
        float scores[2][4] = {};
        const __half* keys = tile + (lane % 8 + matrix / 2 * 8) * STRIDE + matrix % 2 * 8;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            unsigned b[4];
            ldmatrix_x4(b, keys + k * 16);
            mma_m16n8k16(scores[0], q[k], b);
            mma_m16n8k16(scores[1], q[k], b + 2);
        }
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float best = -INFINITY;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int position = first_position + e / 2 * 8 + c * 2 + e % 2;
                float& score = scores[e / 2][i * 2 + e % 2];
                score = sees(seen[i], position) ? score * scale : -INFINITY;
                best = fmaxf(best, score);
            }
            best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 1));
            best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 2));
            best = fmaxf(best, max[i]);
            // A row that has seen nothing yet keeps its zeros.
            factor[i] = best == -INFINITY ? 1.0f : __expf(max[i] - best);
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& score = scores[e / 2][i * 2 + e % 2];
                score = score == -INFINITY ? 0.0f : __expf(score - best);
                sum += score;
            }
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            total[i] = fmaf(total[i], factor[i], sum);
            max[i] = best;
        }
        unsigned a[4] = {pack_half2(scores[0][0], scores[0][1]), pack_half2(scores[0][2], scores[0][3]),
                         pack_half2(scores[1][0], scores[1][1]), pack_half2(scores[1][2], scores[1][3])};
        const __half* values = tile + (PAGE_TOKENS + lane % 8 + matrix % 2 * 8) * STRIDE + matrix / 2 * 8;
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
            unsigned b[4];
            ldmatrix_x4_transposed(b, values + n * 16);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float* sum = sums[n * 2 + half];
                sum[0] *= factor[0];
                sum[1] *= factor[0];
                sum[2] *= factor[1];
                sum[3] *= factor[1];
                mma_m16n8k16(sum, a, b + 2 * half);
            }
        }
    }

    __device__ __forceinline__ void finish(float* out, int first_row, int n_rows, int row_stride,
                                           int head_dim) const {
        int g = lane_idx() / 4, c = lane_idx() % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = first_row + g + i * 8;
            if (row >= n_rows) continue;
            float* to = out + (size_t)row * row_stride;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int d = n * 8 + c * 2 + e;
                    if (d < head_dim) to[d] = sums[n][i * 2 + e] / total[i];
                }
        }
    }
};

template <int DIM>
DEVICE void attend_prefill(const PassHeader* header, const RowInfo* rows, const int* pages,
                           const __half* pool, const float* q, float* out,
                           const AttendShape& shape) {
    using Tile = PageTile<DIM>;
    SHARED(__half, tiles, [2][Tile::N_HALVES]);
    const KvLayout& kv = shape.kv;
    int n_rows = header->n_rows, first_row = blockIdx.x * 16;
    if (first_row >= n_rows) return;
    int n_shared = shape.n_heads / kv.n_kv_heads;
    int n_parts = (n_shared + blockDim.y - 1) / blockDim.y;
    int kv_head = blockIdx.y / n_parts, in_group = blockIdx.y % n_parts * blockDim.y + threadIdx.y;
    bool has_head = in_group < n_shared;  // Other warps only help to copy.
    int row_stride = shape.n_heads * kv.head_dim;
    int head_start = (kv_head * n_shared + (has_head ? in_group : 0)) * kv.head_dim;

    int thread = threadIdx.x + threadIdx.y * blockDim.x;
    // Columns beyond head_dim stay zero.
    for (int i = thread; i < Tile::N_HALVES; i += block_threads())
        tiles[0][i] = tiles[1][i] = __float2half_rn(0.0f);
    __syncthreads();
    HeadState<DIM> state;
    state.begin(q + head_start, first_row, n_rows, row_stride, kv.head_dim);

    unsigned waiting = (1u << min(n_rows - first_row, 16)) - 1;
    int half = 0;
    while (waiting) {
        RowGroup group = next_group(rows, shape, first_row, waiting);
        waiting &= ~group.rows;
        Visible seen[2];
        for (int i = 0; i < 2; i++) {
            int row = lane_idx() / 4 + i * 8;
            bool is_in = group.rows >> row & 1;
            seen[i] = is_in ? seen_by(rows[first_row + row], shape) : Visible{0, 0, 0, 0};
        }
        int n_pages = (group.end + PAGE_TOKENS - 1) / PAGE_TOKENS;
        int page = group.first / PAGE_TOKENS;
        Tile::prefetch(tiles[half], pool, kv, page_of(group.leader, pages, kv, page), kv_head,
                       group.end - page * PAGE_TOKENS);
        while (page < n_pages) {
            int next = next_page(group, page + 1);
            cp_async_wait<0>();
            __syncthreads();  // The page is there, and nobody computes on the other half.
            if (next < n_pages)
                Tile::prefetch(tiles[half ^ 1], pool, kv,
                               page_of(group.leader, pages, kv, next), kv_head,
                               group.end - next * PAGE_TOKENS);
            if (has_head) state.step(tiles[half], page * PAGE_TOKENS, seen, shape.scale);
            page = next;
            half ^= 1;
        }
    }
    if (has_head) state.finish(out + head_start, first_row, n_rows, row_stride, kv.head_dim);
}

// q, out f32 [row][n_heads * head_dim]; the number is the most that head_dim may be.
#define ATTEND_PREFILL_PARAMETERS                                                            \
    const PassHeader *header, const RowInfo *rows, const int *pages, const __half *pool,     \
        const float *q, float *out, AttendShape shape

KERNEL(128, attend_prefill_64)(ATTEND_PREFILL_PARAMETERS) {
    attend_prefill<64>(header, rows, pages, pool, q, out, shape);
}
KERNEL(128, attend_prefill_128)(ATTEND_PREFILL_PARAMETERS) {
    attend_prefill<128>(header, rows, pages, pool, q, out, shape);
}
KERNEL(128, attend_prefill_256)(ATTEND_PREFILL_PARAMETERS) {
    attend_prefill<256>(header, rows, pages, pool, q, out, shape);
}
