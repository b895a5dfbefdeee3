// The embedding of rows that enter a segment: hidden[slot] = scale * table[token] (+ positions
// [position]) (+ constant). A block per row of the bucket; rows that do not enter are left alone.
#include "common.cuh"

// How a matrix is stored; backend/cuda/matrix.rs has the same numbers. Planes: see gemm.cu.
#define KIND_Q4 0
#define KIND_Q8 1
#define KIND_Q6 2
#define KIND_F16 3
#define KIND_BF16 4

struct Table {
    const uint8_t *quants, *more, *scales;
    int kind, n_in;
};

DEVICE float half_at(const uint8_t* halves, size_t index) {
    return __half2float(((const __half*)halves)[index]);
}

// One value of a matrix, for look-ups; products have their own loops.
DEVICE float table_value(const Table& table, int row, int i) {
    size_t at = (size_t)row * table.n_in + i, block = at / BLOCK_VALUES;
    int j = i % BLOCK_VALUES;
    if (table.kind == KIND_F16) return half_at(table.quants, at);
    if (table.kind == KIND_BF16)
        return __uint_as_float((unsigned)((const uint16_t*)table.quants)[at] << 16);
    if (table.kind == KIND_Q8)
        return half_at(table.scales, block) * (float)((const int8_t*)table.quants)[at];
    int q = table.quants[block * 16 + j % 16] >> j / 16 * 4 & 15;
    if (table.kind == KIND_Q4)
        return fmaf(half_at(table.scales, 2 * block), (float)q, half_at(table.scales, 2 * block + 1));
    unsigned tops = ((const unsigned*)table.more)[2 * block + j / 16];
    int top = tops >> (8 * (j % 4) + 2 * (j % 16 / 4)) & 3;
    return half_at(table.scales, 2 * block + j / 16) * (float)((q | top << 4) - 32);
}

// hidden f32 [slot][d_model]; positions.quants and constant may be null.
KERNEL(256, embed_rows)(const PassHeader* header, const RowInfo* rows, Table table, Table positions,
                        const float* constant, float* hidden, int d_model, float scale) {
    if ((int)blockIdx.x >= header->n_rows) return;
    const RowInfo& row = rows[blockIdx.x];
    if (!row.enters) return;
    float* to = hidden + (size_t)row.slot * d_model;
    for (int i = threadIdx.x; i < d_model; i += blockDim.x) {
        float value = table_value(table, row.token, i) * scale;
        if (positions.quants) value += table_value(positions, row.position, i);
        if (constant) value += constant[i];
        to[i] = value;
    }
}
