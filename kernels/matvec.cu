// Products of a weight matrix with 1 to 8 rows: memory-bound, a warp per output.
//
// Every lane takes one block of 32 weights (16-byte loads) per step, multiplies it with the same
// block of every row, and goes on 32 blocks; the lanes' sums are added at the end. Quantized weights
// meet int8 activations by dp4a; 16-bit floats meet f16 ones in f32. The order of a row's sums does
// not depend on the number of rows. Flags and the planes of the weights: see gemm.cu.
#include "common.cuh"
#include "ops.cuh"

struct MatvecInput {
    const __half* x16;
    const int8_t* x8;
    const float2* x8_sums;
};

struct MatvecWeights {
    const uint8_t *quants, *more, *scales;
    int n_in;
};

DEVICE int dot16(const unsigned w[4], const int4& x, int sum) {
    sum = __dp4a((int)w[0], x.x, sum);
    sum = __dp4a((int)w[1], x.y, sum);
    sum = __dp4a((int)w[2], x.z, sum);
    return __dp4a((int)w[3], x.w, sum);
}

DEVICE void words_of(unsigned words[4], const uint4& v) {
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

// Low and high nibbles of a block, as bytes.
DEVICE void nibbles_of(unsigned low[4], unsigned high[4], const uint4& v) {
    words_of(low, v);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        high[i] = low[i] >> 4 & 0x0f0f0f0fu;
        low[i] &= 0x0f0f0f0fu;
    }
}

// A block of quantized weights in registers, as two times 16 bytes.
struct MatvecQ4 {
    unsigned low[4], high[4];
    float scale, offset;

    __device__ __forceinline__ void load(const MatvecWeights& w, size_t block) {
        nibbles_of(low, high, load_streamed((const uint4*)w.quants + block));
        float2 both = __half22float2(((const __half2*)w.scales)[block]);
        scale = both.x, offset = both.y;
    }
    __device__ __forceinline__ float times(const int4& a, const int4& b, float2 x, float sum) const {
        int dot = dot16(high, b, dot16(low, a, 0));
        return fmaf(offset, x.y, fmaf(scale * x.x, (float)dot, sum));
    }
};

struct MatvecQ8 {
    unsigned low[4], high[4];
    float scale;

    __device__ __forceinline__ void load(const MatvecWeights& w, size_t block) {
        words_of(low, load_streamed((const uint4*)w.quants + 2 * block));
        words_of(high, load_streamed((const uint4*)w.quants + 2 * block + 1));
        scale = __half2float(((const __half*)w.scales)[block]);
    }
    __device__ __forceinline__ float times(const int4& a, const int4& b, float2 x, float sum) const {
        return fmaf(scale * x.x, (float)dot16(high, b, dot16(low, a, 0)), sum);
    }
};

struct MatvecQ6 {
    unsigned low[4], high[4];
    float first, second;

    __device__ __forceinline__ void load(const MatvecWeights& w, size_t block) {
        nibbles_of(low, high, load_streamed((const uint4*)w.quants + block));
        uint2 tops = ((const uint2*)w.more)[block];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low[i] = centred(low[i] | (tops.x >> 2 * i & 0x03030303u) << 4);
            high[i] = centred(high[i] | (tops.y >> 2 * i & 0x03030303u) << 4);
        }
        float2 both = __half22float2(((const __half2*)w.scales)[block]);
        first = both.x, second = both.y;
    }
    // q - 32 in each byte, for q of 0..63: no borrow crosses a byte.
    static __device__ __forceinline__ unsigned centred(unsigned q) {
        return ((q | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
    }
    __device__ __forceinline__ float times(const int4& a, const int4& b, float2 x, float sum) const {
        sum = fmaf(first * x.x, (float)dot16(low, a, 0), sum);
        return fmaf(second * x.x, (float)dot16(high, b, 0), sum);
    }
};

// The sums of one lane for COLS rows from `first_row` on; `n_rows` of them are there.
template <class W, int COLS>
struct MatvecLane {
    static __device__ __forceinline__ void run(float sums[COLS], const MatvecInput& x,
                                               const MatvecWeights& w, int out, int first_row,
                                               int n_rows) {
        int n_blocks = w.n_in / BLOCK_VALUES;
        for (int block = lane_idx(); block < n_blocks; block += WARP_SIZE) {
            W weights;
            weights.load(w, (size_t)out * n_blocks + block);
#pragma unroll
            for (int col = 0; col < COLS; col++) {
                // Of rows beyond the last, which are not stored, the first one's block is taken.
                size_t at = (size_t)(first_row + (col < n_rows ? col : 0)) * n_blocks + block;
                int4 a = ((const int4*)x.x8)[2 * at], b = ((const int4*)x.x8)[2 * at + 1];
                sums[col] = weights.times(a, b, x.x8_sums[at], sums[col]);
            }
        }
    }
};

template <bool IS_BRAIN>
struct MatvecFloat {
    static __device__ __forceinline__ float value(uint16_t bits) {
        return IS_BRAIN ? __uint_as_float((unsigned)bits << 16)
                        : __half2float(__ushort_as_half(bits));
    }
};

template <bool IS_BRAIN, int COLS>
struct MatvecLane<MatvecFloat<IS_BRAIN>, COLS> {
    using W = MatvecFloat<IS_BRAIN>;

    static __device__ __forceinline__ void run(float sums[COLS], const MatvecInput& x,
                                               const MatvecWeights& w, int out, int first_row,
                                               int n_rows) {
        const uint16_t* of_out = (const uint16_t*)w.quants + (size_t)out * w.n_in;
        const __half* of_x = x.x16 + (size_t)first_row * w.n_in;
        if (w.n_in % 8 == 0) {
            for (int i = lane_idx() * 8; i < w.n_in; i += WARP_SIZE * 8) {
                uint4 loaded = load_streamed((const uint4*)(of_out + i));
                unsigned words[4];
                words_of(words, loaded);
#pragma unroll
                for (int col = 0; col < COLS; col++) {
                    if (col >= n_rows) break;
                    unsigned xs[4];
                    words_of(xs, *(const uint4*)(of_x + (size_t)col * w.n_in + i));
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        float2 pair = __half22float2(half2_of_bits(xs[k]));
                        sums[col] = fmaf(W::value((uint16_t)words[k]), pair.x, sums[col]);
                        sums[col] = fmaf(W::value((uint16_t)(words[k] >> 16)), pair.y, sums[col]);
                    }
                }
            }
            return;
        }
        for (int i = lane_idx(); i < w.n_in; i += WARP_SIZE) {
            float weight = W::value(of_out[i]);
#pragma unroll
            for (int col = 0; col < COLS; col++) {
                if (col >= n_rows) break;
                sums[col] = fmaf(weight, __half2float(of_x[(size_t)col * w.n_in + i]), sums[col]);
            }
        }
    }
};

#define MATVEC_ADD_TO_SLOTS 1
#define MATVEC_WANTED 2

template <class W, int COLS>
DEVICE void matvec(const PassHeader* header, const RowInfo* rows, const MatvecInput& x,
                   const MatvecWeights& w, const float* bias, float* y, int n_out, int flags) {
    int out = blockIdx.x * (blockDim.x / WARP_SIZE) + warp_idx(), first_row = blockIdx.y * COLS;
    int n_rows = (flags & MATVEC_WANTED ? header->n_wanted : header->n_rows) - first_row;
    if (out >= n_out || n_rows <= 0) return;
    float sums[COLS] = {};
    MatvecLane<W, COLS>::run(sums, x, w, out, first_row, n_rows);
#pragma unroll
    for (int col = 0; col < COLS; col++) {
        if (col >= n_rows) break;
        float sum = warp_sum(sums[col]);
        if (lane_idx() != 0) continue;
        int row = first_row + col;
        if (bias) sum += bias[out];
        bool is_added = flags & MATVEC_ADD_TO_SLOTS;
        float* to = y + (size_t)(is_added ? rows[row].slot : row) * n_out + out;
        *to = is_added ? *to + sum : sum;
    }
}

// grid (n_out / 4, rows of the bucket / COLS), 4 warps. Quantized kinds read x8, floats x16; n_in of
// the quantized is a multiple of 32, of the floats any number.
#define MATVEC_PARAMETERS                                                                    \
    const PassHeader *header, const RowInfo *rows, const __half *x16, const int8_t *x8,      \
        const float2 *x8_sums, const uint8_t *quants, const uint8_t *more,                   \
        const uint8_t *scales, const float *bias, float *y, int n_in, int n_out, int flags
#define MATVEC(W, COLS)                                                                \
    matvec<W, COLS>(header, rows, MatvecInput{x16, x8, x8_sums},                       \
                    MatvecWeights{quants, more, scales, n_in}, bias, y, n_out, flags)

KERNEL(128, matvec_q4_1)(MATVEC_PARAMETERS) { MATVEC(MatvecQ4, 1); }
KERNEL(128, matvec_q4_8)(MATVEC_PARAMETERS) { MATVEC(MatvecQ4, 8); }
KERNEL(128, matvec_q8_1)(MATVEC_PARAMETERS) { MATVEC(MatvecQ8, 1); }
KERNEL(128, matvec_q8_8)(MATVEC_PARAMETERS) { MATVEC(MatvecQ8, 8); }
KERNEL(128, matvec_q6_1)(MATVEC_PARAMETERS) { MATVEC(MatvecQ6, 1); }
KERNEL(128, matvec_q6_8)(MATVEC_PARAMETERS) { MATVEC(MatvecQ6, 8); }
KERNEL(128, matvec_f16_1)(MATVEC_PARAMETERS) { MATVEC(MatvecFloat<false>, 1); }
KERNEL(128, matvec_f16_8)(MATVEC_PARAMETERS) { MATVEC(MatvecFloat<false>, 8); }
KERNEL(128, matvec_bf16_1)(MATVEC_PARAMETERS) { MATVEC(MatvecFloat<true>, 1); }
KERNEL(128, matvec_bf16_8)(MATVEC_PARAMETERS) { MATVEC(MatvecFloat<true>, 8); }
