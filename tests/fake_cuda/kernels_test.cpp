// The kernels with a launch interface of their own (gemm, attend_prefill, select) against plain
// loops in double precision, on the emulated or on a real driver.
// Usage: kernels_test PATH/libcuda.so PATH/kernels.ptx gemm|attend|select|none
//
// A line per case: `ok NAME: greatest error ..` or `FAILED NAME: ..`; the exit status says whether
// all were right. tests/cuda_kernels.rs runs it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "api.h"

using api::Buffer;
using api::launch;

static void* module;
static bool has_failed;
static std::mt19937 random_bits(7);

static float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(random_bits);
}
static int integer(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random_bits);
}
static uint16_t half_bits(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static float half_value(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

static void verdict(const std::string& name, bool is_right, double error) {
    printf("%s %s: greatest error %.2g\n", is_right ? "ok" : "FAILED", name.c_str(), error);
    has_failed |= !is_right;
}

// kernels/common.cuh
struct PassHeader {
    int n_rows, n_wanted, reserved[2];
};
struct RowInfo {
    int slot, token, position, iteration, enters, table_base, table_len, window_tokens, n_kept,
        n_dropped, first_row, n_seq_rows, reserved[4];
};
struct KvLayout {
    int first_group, groups_per_iteration, layer, layers_per_page, n_kv_heads, head_dim;
};
struct AttendShape {
    KvLayout kv;
    int n_heads, layer_window, is_bidirectional;
    float scale;
};
constexpr int PAGE = 16;

// ---- gemm ----

// The planes of a matrix, and its values.
struct Matrix {
    std::vector<uint8_t> quants, more, scales;
    std::vector<float> values;
};

template <class T>
static void append(std::vector<uint8_t>& bytes, T value) {
    const uint8_t* from = (const uint8_t*)&value;
    bytes.insert(bytes.end(), from, from + sizeof(T));
}

static void append_block(Matrix& matrix, const std::string& kind) {
    int q[32];
    uint8_t nibbles[16] = {};
    uint32_t tops[2] = {};
    int n_bits = kind == "q4" ? 4 : kind == "q6" ? 6 : 8;
    for (int j = 0; j < 32; j++) {
        q[j] = integer(0, (1 << n_bits) - 1);
        nibbles[j % 16] |= (q[j] & 15) << (j / 16 * 4);
        tops[j / 16] |= (uint32_t)(q[j] >> 4 & 3) << (8 * (j % 4) + 2 * (j % 16 / 4));
    }
    uint16_t first = half_bits(uniform(0.001f, 0.01f)), second = half_bits(uniform(-0.02f, 0.01f));
    if (kind == "q8") {
        for (int j = 0; j < 32; j++) matrix.quants.push_back((uint8_t)(q[j] - 128));
        append(matrix.scales, first);
    } else {
        matrix.quants.insert(matrix.quants.end(), nibbles, nibbles + 16);
        append(matrix.scales, first);
        append(matrix.scales, second);
    }
    if (kind == "q6") append(matrix.more, tops[0]), append(matrix.more, tops[1]);
    for (int j = 0; j < 32; j++) {
        float a = half_value(first), b = half_value(second);
        float value = kind == "q4"   ? a * q[j] + b
                      : kind == "q8" ? a * (q[j] - 128)
                                     : (j < 16 ? a : b) * (q[j] - 32);
        matrix.values.push_back(value);
    }
}

static Matrix random_matrix(const std::string& kind, int n_out, int n_in) {
    Matrix matrix;
    if (kind == "f16" || kind == "bf16") {
        for (int i = 0; i < n_out * n_in; i++) {
            float value = uniform(-0.1f, 0.1f);
            uint32_t bits;
            memcpy(&bits, &value, 4);
            uint16_t stored = kind == "f16" ? half_bits(value) : (uint16_t)(bits >> 16);
            append(matrix.quants, stored);
            bits = (uint32_t)stored << 16;
            memcpy(&value, &bits, 4);
            matrix.values.push_back(kind == "f16" ? half_value(stored) : value);
        }
    } else {
        for (int i = 0; i < n_out * n_in / 32; i++) append_block(matrix, kind);
    }
    return matrix;
}

struct GemmCase {
    int n_rows, bucket, n_out, n_in;
    bool has_bias, is_added, is_wanted;
};

// What one kernel gives: [slot or row][n_out].
static std::vector<float> run_gemm(const std::string& kernel, const GemmCase& c,
                                   const std::vector<uint16_t>& x, const Matrix& matrix,
                                   const std::vector<float>& bias, const std::vector<float>& before) {
    bool is_small = kernel.find("small") != std::string::npos;
    unsigned tile_rows = is_small ? 32 : 128, tile_outs = is_small ? 64 : 128;
    PassHeader header{c.is_wanted ? 0 : c.n_rows, c.is_wanted ? c.n_rows : 0, {}};
    std::vector<RowInfo> rows(c.bucket);
    for (int r = 0; r < c.bucket; r++) rows[r].slot = c.bucket - 1 - r;
    Buffer<PassHeader> headers(std::vector<PassHeader>{header});
    Buffer<RowInfo> infos(rows);
    Buffer<uint16_t> xs(x);
    Buffer<uint8_t> quants(matrix.quants), more(matrix.more), scales(matrix.scales);
    Buffer<float> biases(bias), y(before);
    uint64_t none = 0;
    launch(module, kernel,
           {(c.n_out + tile_outs - 1) / tile_outs, (c.bucket + tile_rows - 1) / tile_rows},
           {is_small ? 128u : 256u}, headers.address, infos.address, xs.address, quants.address,
           matrix.more.empty() ? none : more.address, matrix.scales.empty() ? none : scales.address,
           c.has_bias ? biases.address : none, y.address, c.n_in, c.n_out,
           (c.is_added ? 1 : 0) | (c.is_wanted ? 2 : 0));
    return y.read();
}

static void test_gemm_case(const std::string& kind, const GemmCase& c) {
    Matrix matrix = random_matrix(kind, c.n_out, c.n_in);
    std::vector<uint16_t> x((size_t)c.n_rows * c.n_in);
    for (uint16_t& value : x) value = half_bits(uniform(-2.0f, 2.0f));
    std::vector<float> bias(c.n_out), before((size_t)c.bucket * c.n_out);
    for (float& value : bias) value = uniform(-1.0f, 1.0f);
    for (float& value : before) value = uniform(-1.0f, 1.0f);
    std::vector<float> small = run_gemm("gemm_" + kind + "_small", c, x, matrix, bias, before);
    std::vector<float> large = run_gemm("gemm_" + kind, c, x, matrix, bias, before);
    double worst = 0;
    bool is_equal = memcmp(small.data(), large.data(), small.size() * 4) == 0, is_kept = true;
    for (int row = 0; row < c.bucket; row++) {
        int at = c.is_added ? c.bucket - 1 - row : row;
        for (int out = 0; out < c.n_out; out++) {
            float got = small[(size_t)at * c.n_out + out], old = before[(size_t)at * c.n_out + out];
            if (row >= c.n_rows) {
                is_kept &= got == old;
                continue;
            }
            double sum = (c.has_bias ? bias[out] : 0) + (c.is_added ? old : 0), size = 0;
            for (int i = 0; i < c.n_in; i++) {
                double product = (double)half_value(x[(size_t)row * c.n_in + i]) *
                                 matrix.values[(size_t)out * c.n_in + i];
                sum += product;
                size += std::abs(product);
            }
            worst = std::max(worst, std::abs(got - sum) / (size + 1e-3));
        }
    }
    char name[160];
    snprintf(name, sizeof name, "gemm_%s %d of %d rows, %d x %d%s%s%s", kind.c_str(), c.n_rows,
             c.bucket, c.n_out, c.n_in, c.has_bias ? ", bias" : "", c.is_added ? ", added" : "",
             c.is_wanted ? ", wanted" : "");
    if (!is_equal) printf("FAILED %s: the tiles differ\n", name), has_failed = true;
    if (!is_kept) printf("FAILED %s: rows beyond the pass were written\n", name), has_failed = true;
    // A weight is rounded to f16 once: 2^-11 of it; sums are f32.
    verdict(name, worst < 6e-4, worst);
}

// A row alone and in company, bit for bit.
static void test_gemm_company(const std::string& kind) {
    GemmCase many{70, 96, 80, 96, true, false, false}, one{1, 32, 80, 96, true, false, false};
    Matrix matrix = random_matrix(kind, many.n_out, many.n_in);
    std::vector<uint16_t> x((size_t)many.n_rows * many.n_in);
    for (uint16_t& value : x) value = half_bits(uniform(-2.0f, 2.0f));
    std::vector<float> bias(many.n_out, 0.25f);
    auto run = [&](const GemmCase& c, const std::vector<uint16_t>& of) {
        return run_gemm("gemm_" + kind, c, of, matrix, bias,
                        std::vector<float>((size_t)c.bucket * c.n_out));
    };
    std::vector<float> all = run(many, x);
    bool is_equal = true;
    for (int row : {0, 17, 69}) {
        auto first = x.begin() + (size_t)row * many.n_in;
        std::vector<float> alone = run(one, {first, first + many.n_in});
        is_equal &= memcmp(alone.data(), &all[(size_t)row * many.n_out], many.n_out * 4) == 0;
    }
    verdict("gemm_" + kind + " rows alone and in company", is_equal, 0);
}

static void test_gemm() {
    for (const char* kind : {"q4", "q8", "q6", "f16", "bf16"}) {
        test_gemm_case(kind, {1, 16, 8, 32, false, false, false});
        test_gemm_case(kind, {9, 16, 200, 96, true, false, false});
        test_gemm_case(kind, {33, 64, 65, 64, false, true, false});
        test_gemm_case(kind, {130, 256, 130, 160, true, true, false});
        test_gemm_case(kind, {5, 16, 77, 288, false, false, true});
        test_gemm_case(kind, {0, 16, 64, 32, false, false, false});
        test_gemm_company(kind);
    }
    for (const char* kind : {"f16", "bf16"}) {
        test_gemm_case(kind, {20, 32, 40, 40, true, false, false});
        test_gemm_case(kind, {20, 32, 64, 8, false, false, false});
    }
}

// ---- attend ----

struct Sequence {
    int n_rows, first_position, iteration, window_tokens, n_kept;
};

struct AttendCase {
    const char* name;
    int n_heads, n_kv_heads, head_dim, layer_window;
    bool is_bidirectional;
    std::vector<Sequence> sequences;
};

// A pool, tables and rows for a case. Pages that no table names, dropped ones and positions that
// nobody has written hold NaN.
struct AttendPass {
    static constexpr int N_LAYERS = 2, LAYER = 1, FIRST_GROUP = 1;
    std::vector<RowInfo> rows;
    std::vector<int> pages;
    std::vector<uint16_t> pool;
    std::vector<float> q;
    size_t page_halves;

    size_t at(int page, int is_value, int head, int position, const AttendCase& c) const {
        size_t plane = ((size_t)page * N_LAYERS + LAYER) * 2 + is_value;
        return ((plane * c.n_kv_heads + head) * PAGE + position % PAGE) * c.head_dim;
    }

    explicit AttendPass(const AttendCase& c) {
        page_halves = (size_t)N_LAYERS * 2 * c.n_kv_heads * PAGE * c.head_dim;
        int n_pages = 1;
        for (const Sequence& s : c.sequences) add_sequence(s, n_pages);
        pool.assign(page_halves * n_pages, 0x7e00);
        for (const RowInfo& row : rows) {
            for (int p = 0; p <= row.position; p++) {
                int page = page_of(row, p);
                if (page < 0) continue;
                for (int kv = 0; kv < 2; kv++)
                    for (int head = 0; head < c.n_kv_heads; head++)
                        for (int d = 0; d < c.head_dim; d++) {
                            uint16_t& value = pool[at(page, kv, head, p, c) + d];
                            if (value == 0x7e00) value = half_bits(uniform(-1.0f, 1.0f));
                        }
            }
        }
        q.resize(rows.size() * c.n_heads * c.head_dim);
        for (float& value : q) value = uniform(-2.0f, 2.0f);
    }

    void add_sequence(const Sequence& s, int& n_pages) {
        int n_tokens = s.first_position + s.n_rows, n_blocks = (n_tokens + PAGE - 1) / PAGE;
        int kept_blocks = s.n_kept / PAGE, n_dropped = 0;
        if (s.window_tokens) {
            int start = std::max(s.first_position + 1 - s.window_tokens, 0);
            n_dropped = start <= s.n_kept ? 0 : std::max(start / PAGE - kept_blocks, 0);
        }
        int table_len = n_blocks - n_dropped, n_groups = FIRST_GROUP + s.iteration + 1;
        int first_row = (int)rows.size(), table_base = (int)pages.size();
        for (int i = 0; i < n_groups * table_len; i++) pages.push_back(n_pages++);
        for (int i = 0; i < s.n_rows; i++) {
            RowInfo row{};
            row.slot = first_row + i;
            row.position = s.first_position + i;
            row.iteration = s.iteration;
            row.table_base = table_base;
            row.table_len = table_len;
            row.window_tokens = s.window_tokens;
            row.n_kept = s.n_kept;
            row.n_dropped = n_dropped;
            row.first_row = first_row;
            row.n_seq_rows = s.n_rows;
            rows.push_back(row);
        }
    }

    // The page of a position, -1 where it was dropped.
    int page_of(const RowInfo& row, int position) const {
        int block = position / PAGE, kept = row.n_kept / PAGE;
        if (block >= kept && block < kept + row.n_dropped) return -1;
        int entry = block < kept ? block : block - row.n_dropped;
        return pages[row.table_base + (FIRST_GROUP + row.iteration) * row.table_len + entry];
    }

    std::vector<float> run(const AttendCase& c, int bucket) const {
        std::vector<RowInfo> padded = rows;
        padded.resize(bucket);
        Buffer<PassHeader> header(std::vector<PassHeader>{{(int)rows.size(), 0, {}}});
        Buffer<RowInfo> infos(padded);
        Buffer<int> tables(pages);
        Buffer<uint16_t> pools(pool);
        Buffer<float> queries(q), out((size_t)bucket * c.n_heads * c.head_dim);
        AttendShape shape{{FIRST_GROUP, 1, LAYER, N_LAYERS, c.n_kv_heads, c.head_dim},
                          c.n_heads, c.layer_window, c.is_bidirectional,
                          1.0f / std::sqrt((float)c.head_dim)};
        int n_shared = c.n_heads / c.n_kv_heads, n_warps = std::min(n_shared, 4);
        int dim = c.head_dim <= 64 ? 64 : c.head_dim <= 128 ? 128 : 256;
        launch(module, "attend_prefill_" + std::to_string(dim),
               {(bucket + 15u) / 16, (unsigned)(c.n_kv_heads * ((n_shared + n_warps - 1) / n_warps))},
               {32, (unsigned)n_warps}, header.address, infos.address, tables.address,
               pools.address, queries.address, out.address, shape);
        return out.read();
    }

    bool sees(const RowInfo& row, int position, const AttendCase& c) const {
        if (c.is_bidirectional) return position < row.n_seq_rows;
        int distance = row.position - position;
        if (distance < 0 || (c.layer_window && distance >= c.layer_window)) return false;
        return !row.window_tokens || distance < row.window_tokens || position < row.n_kept;
    }

    double expected(const AttendCase& c, int row_idx, int head, int d_wanted) const {
        const RowInfo& row = rows[row_idx];
        int kv_head = head / (c.n_heads / c.n_kv_heads);
        int end = c.is_bidirectional ? row.n_seq_rows : row.position + 1;
        double best = -1e30, total = 0, sum = 0;
        std::vector<double> scores(end, -1e30);
        for (int p = 0; p < end; p++) {
            if (!sees(row, p, c)) continue;
            double score = 0;
            for (int d = 0; d < c.head_dim; d++)
                score += (double)q[((size_t)row_idx * c.n_heads + head) * c.head_dim + d] *
                         half_value(pool[at(page_of(row, p), 0, kv_head, p, c) + d]);
            scores[p] = score / std::sqrt((double)c.head_dim);
            best = std::max(best, scores[p]);
        }
        for (int p = 0; p < end; p++) {
            if (!sees(row, p, c)) continue;
            double weight = std::exp(scores[p] - best);
            total += weight;
            sum += weight * half_value(pool[at(page_of(row, p), 1, kv_head, p, c) + d_wanted]);
        }
        return sum / total;
    }
};

static void test_attend_case(const AttendCase& c) {
    AttendPass pass(c);
    int n_rows = (int)pass.rows.size(), bucket = (n_rows + 31) / 32 * 32;
    std::vector<float> got = pass.run(c, bucket);
    double worst = 0;
    for (int row = 0; row < n_rows; row++)
        for (int head = 0; head < c.n_heads; head++)
            for (int d = 0; d < c.head_dim; d += 7) {
                double wanted = pass.expected(c, row, head, d);
                double error = std::abs(got[((size_t)row * c.n_heads + head) * c.head_dim + d] - wanted);
                worst = std::isnan(error) ? 1e9 : std::max(worst, error);
            }
    verdict(std::string("attend ") + c.name, worst < 3e-3, worst);
}

// Each row of a pass of several sequences alone in its pass, bit for bit.
static void test_attend_company(const AttendCase& c) {
    AttendPass all(c);
    size_t width = (size_t)c.n_heads * c.head_dim;
    std::vector<float> together = all.run(c, 64);
    bool is_equal = true;
    for (size_t i = 0; i < all.rows.size(); i += 3) {
        AttendPass one = all;
        one.rows = {all.rows[i]};
        one.rows[0].first_row = 0;
        one.rows[0].n_seq_rows = 1;
        one.q.assign(all.q.begin() + i * width, all.q.begin() + (i + 1) * width);
        std::vector<float> alone = one.run(c, 16);
        is_equal &= memcmp(alone.data(), &together[i * width], width * 4) == 0;
    }
    verdict(std::string("attend rows alone and in company, ") + c.name, is_equal, 0);
}

static void test_attend() {
    AttendCase mixed{"sequences and iterations mixed", 6, 2, 64, 0, false,
                     {{5, 0, 0, 0, 0}, {3, 30, 1, 0, 0}, {1, 77, 0, 0, 0}, {20, 13, 2, 0, 0}}};
    AttendCase windows{"windows with kept beginnings", 4, 4, 32, 0, false,
                       {{18, 100, 0, 40, 16}, {4, 70, 0, 20, 0}, {17, 0, 1, 24, 16}, {9, 40, 0, 33, 32}}};
    AttendCase layer{"a window of the layer", 3, 1, 80, 21, false,
                     {{33, 40, 0, 0, 0}, {6, 90, 0, 50, 16}}};
    AttendCase bidirectional{"bidirectional", 4, 2, 16, 0, true, {{37, 0, 0, 0, 0}, {3, 0, 0, 0, 0}}};
    AttendCase wide{"wide heads, many of a group", 14, 2, 128, 0, false, {{16, 0, 0, 0, 0}, {2, 50, 0, 0, 0}}};
    AttendCase widest{"heads of 256", 2, 1, 256, 0, false, {{19, 20, 0, 0, 0}}};
    AttendCase odd{"heads of 12", 2, 2, 12, 0, false, {{21, 5, 0, 0, 0}}};
    for (const AttendCase& c : {mixed, windows, layer, bidirectional, wide, widest, odd})
        test_attend_case(c);
    test_attend_company(mixed);
    test_attend_company(windows);
    test_attend_company(layer);
}

// ---- select ----

static void test_select_case(const std::string& name, int n_rows, int n, int k,
                             const std::vector<float>& logits) {
    int bucket = n_rows + 3;
    std::vector<float> padded = logits;
    Buffer<PassHeader> header(std::vector<PassHeader>{{0, n_rows, {}}});
    Buffer<float> values(padded), best_values((size_t)n_rows * k);
    Buffer<int> best(n_rows), indexes((size_t)n_rows * k);
    launch(module, "argmax_rows", {(unsigned)bucket}, {256}, header.address, values.address,
           best.address, n);
    launch(module, "top_k_rows", {(unsigned)bucket}, {256}, header.address, values.address,
           indexes.address, best_values.address, n, k);
    std::vector<int> got_best = best.read(), got = indexes.read();
    std::vector<float> got_values = best_values.read();
    bool is_right = true;
    for (int row = 0; row < n_rows; row++) {
        const float* of_row = &logits[(size_t)row * n];
        std::vector<int> order(n);
        for (int i = 0; i < n; i++) order[i] = i;
        auto rank = [&](int i) { return std::isnan(of_row[i]) ? -INFINITY : of_row[i]; };
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
            bool is_nan_last = !std::isnan(of_row[a]) && std::isnan(of_row[b]);
            return rank(a) > rank(b) || (rank(a) == rank(b) && is_nan_last);
        });
        is_right &= got_best[row] == order[0];
        for (int i = 0; i < k; i++) {
            is_right &= got[(size_t)row * k + i] == order[i];
            is_right &= memcmp(&got_values[(size_t)row * k + i], &of_row[order[i]], 4) == 0;
        }
    }
    verdict(name, is_right, 0);
}

static void test_select() {
    auto random = [](int n, float grain) {
        std::vector<float> values(n);
        for (float& value : values) value = std::round(uniform(-9.0f, 9.0f) / grain) * grain;
        return values;
    };
    test_select_case("select 3 rows of 1000, 40 best", 3, 1000, 40, random(3000, 1e-6f));
    test_select_case("select many equal values", 2, 777, 100, random(1554, 1.0f));
    test_select_case("select all equal", 1, 600, 7, std::vector<float>(600, -0.0f));
    test_select_case("select one of one", 1, 1, 1, {-3.0f});
    test_select_case("select all of few", 2, 5, 5, random(10, 0.5f));
    test_select_case("select the most", 1, 5000, 1024, random(5000, 0.01f));
    std::vector<float> strange = random(300, 0.1f);
    strange[7] = INFINITY, strange[8] = -INFINITY, strange[9] = NAN, strange[20] = 0.0f, strange[3] = -0.0f;
    test_select_case("select infinities and NaN", 1, 300, 300, strange);
    test_select_case("select no row", 0, 10, 2, random(10, 0.1f));
}

int main(int n, char** a) {
    if (n != 4 || !(api::library = dlopen(a[1], RTLD_NOW))) {
        fprintf(stderr, "usage: kernels_test PATH/libcuda.so PATH/kernels.ptx gemm|attend|select: %s\n",
                dlerror());
        return 2;
    }
    std::string ptx = api::text_of(a[2]);
    if (int result = api::ready()) {
        printf("no device: error %d\n", result);
        return 1;
    }
    api::must("cuModuleLoadData", &module, (const void*)ptx.c_str());
    std::string what = a[3];
    if (what == "gemm") test_gemm();
    if (what == "attend") test_attend();
    if (what == "select") test_select();
    return has_failed ? 1 : 0;
}
