// Matrix products of many rows: y[row][o] = sum over i of x[row][i] * w[o][i], on tensor cores.
//
//   grid  (outputs / tile, rows of the bucket / tile)      K runs in steps of one block of 32
//
//   x  f16 tile ──cp.async──► shared ──ldmatrix──► A fragments ─┐
//   w  raw blocks ─cp.async─► shared ──dequantize─► B fragments ┴─► mma ─► f32 sums ─► y
//
// While a step is computed the next one is on its way into the other half of shared memory; one
// barrier per step. Weights stay quantized until they are in registers; there they become f16, one
// rounding each. Their scales travel through registers, one step ahead.
//
// A row's sum runs over K in one order, whatever the tile and the other rows: results of the small
// and the large tile are bit equal. There is no split of K.
//
// Planes of the weights, `block` = 32 values of one output:
//   q4   quants uint4 [n_out][n_in / 32] (byte j: value j low, value j + 16 high),
//        scales half2 (scale, min): value = scale * q + min
//   q8   quants int8 [n_out][n_in], scales half [n_out][n_in / 32]: value = scale * q
//   q6   quants as q4, `more` uint2 [n_out][n_in / 32]: x for values 0..15, y for 16..31, where
//        value j has bits 8 * (j % 4) + 2 * (j / 4 % 4) and the next; scales half2, one per 16:
//        value = scale * (q - 32)
//   f16, bf16   quants [n_out][n_in]; n_in a multiple of 8. The others: of 32.
#include "common.cuh"
#include "ops.cuh"

// y is [slot][n_out] and the product is added to it; otherwise y is [row][n_out] and set.
#define GEMM_ADD_TO_SLOTS 1
// The rows are those of the wanted list: PassHeader::n_wanted of them.
#define GEMM_WANTED 2

// Halves between rows of the x tile: a block and 16 bytes, so that ldmatrix meets no bank twice.
#define GEMM_X_STRIDE (BLOCK_VALUES + 8)

struct GemmWeights {
    const uint8_t *quants, *more, *scales;
    int n_in, n_out, n_blocks;
};

// 1024 + q for two small q, as halves: the bits of 1024 with q in the last places.
DEVICE __half2 halves_of_bytes(unsigned low, unsigned high) {
    return half2_of_bits(0x64006400u | low | high << 16);
}

DEVICE unsigned load_pair(const uint8_t* shared) { return *(const uint16_t*)shared; }

struct GemmQ4 {
    static constexpr int ROW_BYTES = 16, N_CHUNKS = 1;

    DEVICE void copy(uint8_t* row, int, const GemmWeights& w, int out, int block,
                                   bool is_there) {
        cp_async<16>(row, w.quants + ((size_t)out * w.n_blocks + block) * 16, is_there);
    }
    DEVICE unsigned scale(const GemmWeights& w, int out, int block) {
        return ((const unsigned*)w.scales)[(size_t)out * w.n_blocks + block];
    }
    // The B fragment of values 16 * step .. of a block: pairs 2c, 2c + 1 and 2c + 8, 2c + 9.
    DEVICE void fragment(unsigned b[2], const uint8_t* row, int c, int step,
                                       unsigned scale) {
        __half2 both = half2_of_bits(scale), offset = __float2half2_rn(1024.0f);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned pair = load_pair(row + 8 * half + 2 * c) >> 4 * step;
            __half2 q = __hsub2(halves_of_bytes(pair & 15, pair >> 8 & 15), offset);
            b[half] = half2_bits(__hfma2(q, __low2half2(both), __high2half2(both)));
        }
    }
};

struct GemmQ8 {
    // 16 bytes beyond the values, so that eight rows lie in different banks.
    static constexpr int ROW_BYTES = 48, N_CHUNKS = 2;

    DEVICE void copy(uint8_t* row, int chunk, const GemmWeights& w, int out,
                                   int block, bool is_there) {
        const uint8_t* from = w.quants + ((size_t)out * w.n_blocks + block) * 32 + 16 * chunk;
        cp_async<16>(row + 16 * chunk, from, is_there);
    }
    DEVICE unsigned scale(const GemmWeights& w, int out, int block) {
        return ((const uint16_t*)w.scales)[(size_t)out * w.n_blocks + block];
    }
    DEVICE void fragment(unsigned b[2], const uint8_t* row, int c, int step,
                                       unsigned scale) {
        __half2 factor = half2_of_bits(scale | scale << 16), offset = __float2half2_rn(1152.0f);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned pair = load_pair(row + 16 * step + 8 * half + 2 * c) ^ 0x8080u;  // q + 128
            __half2 q = __hsub2(halves_of_bytes(pair & 255, pair >> 8), offset);
            b[half] = half2_bits(__hmul2(q, factor));
        }
    }
};

struct GemmQ6 {
    static constexpr int ROW_BYTES = 32, N_CHUNKS = 2;

    DEVICE void copy(uint8_t* row, int chunk, const GemmWeights& w, int out,
                                   int block, bool is_there) {
        size_t at = (size_t)out * w.n_blocks + block;
        if (chunk == 0)
            cp_async<16>(row, w.quants + at * 16, is_there);
        else
            cp_async<8>(row + 16, w.more + at * 8, is_there);
    }
    DEVICE unsigned scale(const GemmWeights& w, int out, int block) {
        return ((const unsigned*)w.scales)[(size_t)out * w.n_blocks + block];
    }
    DEVICE void fragment(unsigned b[2], const uint8_t* row, int c, int step,
                                       unsigned scale) {
        __half2 both = half2_of_bits(scale), offset = __float2half2_rn(1056.0f);
        __half2 factor = step == 0 ? __low2half2(both) : __high2half2(both);
        unsigned tops = ((const unsigned*)(row + 16))[step] >> 16 * (c & 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned pair = load_pair(row + 8 * half + 2 * c) >> 4 * step;
            unsigned top = tops >> 2 * (c / 2 + 2 * half);
            unsigned low = (pair & 15) | (top & 3) << 4;
            unsigned high = (pair >> 8 & 15) | (top >> 8 & 3) << 4;
            b[half] = half2_bits(__hmul2(__hsub2(halves_of_bytes(low, high), offset), factor));
        }
    }
};

// 16-bit floats; a block's tail beyond n_in is zero.
template <bool IS_BRAIN>
struct GemmFloat {
    static constexpr int ROW_BYTES = 2 * GEMM_X_STRIDE, N_CHUNKS = 4;

    DEVICE void copy(uint8_t* row, int chunk, const GemmWeights& w, int out,
                                   int block, bool is_there) {
        int first = block * BLOCK_VALUES + chunk * 8;
        bool is_inside = is_there && first < w.n_in;
        const uint8_t* from = w.quants + ((size_t)out * w.n_in + first) * 2;
        cp_async<16>(row + 16 * chunk, is_inside ? from : w.quants, is_inside);
    }
    DEVICE unsigned scale(const GemmWeights&, int, int) { return 0; }
    DEVICE void fragment(unsigned b[2], const uint8_t* row, int c, int step,
                                       unsigned) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned pair = ((const unsigned*)row)[8 * step + 4 * half + c];
            // f16 has more digits than bf16, so that only values below 6e-5 lose some.
            if (IS_BRAIN)
                pair = pack_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
            b[half] = pair;
        }
    }
};

// One tile of ROWS x OUTS, by WARPS_M x WARPS_N warps.
template <class W, int ROWS, int OUTS, int WARPS_M, int WARPS_N>
struct GemmTile {
    static constexpr int N_THREADS = WARPS_M * WARPS_N * WARP_SIZE;
    static constexpr int M_TILES = ROWS / WARPS_M / 16, N_TILES = OUTS / WARPS_N / 8;

    // Starts the copies of step `block` into one half of shared memory.
    DEVICE void prefetch(__half (*x_tile)[GEMM_X_STRIDE], uint8_t* w_tile,
                                       const __half* x, const GemmWeights& w, int first_row,
                                       int n_rows, int first_out, int block) {
        for (int i = threadIdx.x; i < ROWS * 4; i += N_THREADS) {
            int row = i / 4, at = block * BLOCK_VALUES + i % 4 * 8;
            bool is_there = first_row + row < n_rows && at < w.n_in;
            const __half* from = x + (size_t)(first_row + row) * w.n_in + at;
            cp_async<16>(&x_tile[row][i % 4 * 8], is_there ? from : x, is_there);
        }
        for (int i = threadIdx.x; i < OUTS * W::N_CHUNKS; i += N_THREADS) {
            int out = i / W::N_CHUNKS;
            bool is_there = first_out + out < w.n_out;
            W::copy(w_tile + out * W::ROW_BYTES, i % W::N_CHUNKS, w,
                    is_there ? first_out + out : 0, block, is_there);
        }
        cp_async_commit();
    }

    // The scales of this lane's outputs, one per tile of 8.
    DEVICE void load_scales(unsigned scales[N_TILES], const GemmWeights& w,
                                          int first_out, int block) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            int out = first_out + n * 8;
            scales[n] = out < w.n_out ? W::scale(w, out, block) : 0;
        }
    }

    // Adds the products of one step; only the first `n_m_tiles` have rows.
    DEVICE void multiply(float sums[M_TILES][N_TILES][4],
                                       const __half (*x_tile)[GEMM_X_STRIDE],
                                       const uint8_t* w_tile, const unsigned scales[N_TILES],
                                       int n_m_tiles, int lane) {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            unsigned b[N_TILES][2];
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
                W::fragment(b[n], w_tile + (n * 8 + lane / 4) * W::ROW_BYTES, lane % 4, step,
                            scales[n]);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                if (m >= n_m_tiles) break;
                unsigned a[4];
                ldmatrix_x4(a, &x_tile[m * 16 + lane % 16][step * 16 + lane / 16 * 8]);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) mma_m16n8k16(sums[m][n], a, b[n]);
            }
        }
    }

    // Writes the sums of a row's outputs, two of each tile of 8 from `first_out` on.
    DEVICE void store(const float sums[N_TILES][4], int element, float* to, const float* bias,
                      int first_out, int n_out, bool is_added) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int out = first_out + n * 8 + e;
                if (out >= n_out) continue;
                float value = sums[n][element + e];
                if (bias) value += bias[out];
                if (is_added) value += to[out];
                to[out] = value;
            }
        }
    }

    DEVICE void run(const PassHeader* header, const RowInfo* rows, const __half* x,
                                  const GemmWeights& w, const float* bias, float* y, int flags) {
        SHARED(__half, x_tiles, [2][ROWS][GEMM_X_STRIDE]);
        SHARED(uint8_t, w_tiles, [2][OUTS * W::ROW_BYTES]);
        int n_rows = flags & GEMM_WANTED ? header->n_wanted : header->n_rows;
        int first_row = blockIdx.y * ROWS, first_out = blockIdx.x * OUTS;
        if (first_row >= n_rows) return;
        int lane = lane_idx(), warp = warp_idx();
        int warp_row = warp / WARPS_N * (M_TILES * 16), warp_out = warp % WARPS_N * (N_TILES * 8);
        int rows_left = n_rows - first_row - warp_row;
        int n_m_tiles = min(max((rows_left + 15) / 16, 0), M_TILES);
        int scale_out = first_out + warp_out + lane / 4;

        float sums[M_TILES][N_TILES][4] = {};
        unsigned scales[N_TILES], next_scales[N_TILES];
        prefetch(x_tiles[0], w_tiles[0], x, w, first_row, n_rows, first_out, 0);
        load_scales(next_scales, w, scale_out, 0);
        for (int block = 0; block < w.n_blocks; block++) {
            int half = block & 1;
#pragma unroll
            for (int n = 0; n < N_TILES; n++) scales[n] = next_scales[n];
            cp_async_wait<0>();
            __syncthreads();  // The step is there, and nobody computes on the other half.
            if (block + 1 < w.n_blocks) {
                prefetch(x_tiles[half ^ 1], w_tiles[half ^ 1], x, w, first_row, n_rows, first_out,
                         block + 1);
                load_scales(next_scales, w, scale_out, block + 1);
            }
            multiply(sums, &x_tiles[half][warp_row], w_tiles[half] + warp_out * W::ROW_BYTES,
                     scales, n_m_tiles, lane);
        }
        bool is_added = flags & GEMM_ADD_TO_SLOTS;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = first_row + warp_row + m * 16 + lane / 4 + i * 8;
                if (row >= n_rows) continue;
                float* to = y + (size_t)(is_added ? rows[row].slot : row) * w.n_out;
                store(sums[m], i * 2, to, bias, first_out + warp_out + lane % 4 * 2, w.n_out,
                      is_added);
            }
        }
    }
};

// x f16 [rows][n_in]; bias f32 [n_out] or null; see the head for the planes and the flags.
#define GEMM_PARAMETERS                                                                   \
    const PassHeader *header, const RowInfo *rows, const __half *x, const uint8_t *quants, \
        const uint8_t *more, const uint8_t *scales, const float *bias, float *y, int n_in,  \
        int n_out, int flags
#define GEMM_WEIGHTS \
    GemmWeights { quants, more, scales, n_in, n_out, (n_in + BLOCK_VALUES - 1) / BLOCK_VALUES }
// Tiles: 32 rows x 64 outputs by 4 warps, and 128 x 128 by 8.
#define GEMM_SMALL(W) \
    GemmTile<W, 32, 64, 1, 4>::run(header, rows, x, GEMM_WEIGHTS, bias, y, flags)
#define GEMM_LARGE(W) \
    GemmTile<W, 128, 128, 2, 4>::run(header, rows, x, GEMM_WEIGHTS, bias, y, flags)

KERNEL(128, gemm_q4_small)(GEMM_PARAMETERS) { GEMM_SMALL(GemmQ4); }
KERNEL(256, gemm_q4)(GEMM_PARAMETERS) { GEMM_LARGE(GemmQ4); }
KERNEL(128, gemm_q8_small)(GEMM_PARAMETERS) { GEMM_SMALL(GemmQ8); }
KERNEL(256, gemm_q8)(GEMM_PARAMETERS) { GEMM_LARGE(GemmQ8); }
KERNEL(128, gemm_q6_small)(GEMM_PARAMETERS) { GEMM_SMALL(GemmQ6); }
KERNEL(256, gemm_q6)(GEMM_PARAMETERS) { GEMM_LARGE(GemmQ6); }
KERNEL(128, gemm_f16_small)(GEMM_PARAMETERS) { GEMM_SMALL(GemmFloat<false>); }
KERNEL(256, gemm_f16)(GEMM_PARAMETERS) { GEMM_LARGE(GemmFloat<false>); }
KERNEL(128, gemm_bf16_small)(GEMM_PARAMETERS) { GEMM_SMALL(GemmFloat<true>); }
KERNEL(256, gemm_bf16)(GEMM_PARAMETERS) { GEMM_LARGE(GemmFloat<true>); }
