// Speed of the kernels of kernels_test.cpp on the shapes of an 8B model, next to a device copy.
// Usage: kernels_bench PATH/libcuda.so.1 PATH/kernels.ptx full|tiny
//
// Prints rows of a table, `| kernel | shape | microseconds | GB/s | of copy | TFLOP/s |`. Bytes are
// those of the weights (or keys and values), which take turns among copies that no cache holds.
// `tiny` is for the emulated driver, where it only shows that the program works.
#include <cmath>

#include "api.h"

using api::Buffer;
using api::must;
using api::Shape;

static void* module;
static bool is_tiny;
static double copy_rate;  // Bytes per second, read and written.

struct PassHeader {
    int n_rows, n_wanted, reserved[2];
};
struct RowInfo {
    int slot, token, position, iteration, enters, table_base, table_len, window_tokens, n_kept,
        n_dropped, first_row, n_seq_rows, reserved[4];
};
struct AttendShape {
    int first_group, groups_per_iteration, layer, layers_per_page, n_kv_heads, head_dim, n_heads,
        layer_window, is_bidirectional;
    float scale;
};

// Seconds per call of `enqueue(i)`, over as many as take a tenth of a second.
template <class F>
static double seconds(F&& enqueue) {
    void *begin = nullptr, *end = nullptr;
    must("cuEventCreate", &begin, 0u);
    must("cuEventCreate", &end, 0u);
    float milliseconds = 0;
    int n = 1, i = 0;
    enqueue(i++);
    for (;;) {
        must("cuEventRecord", begin, (void*)nullptr);
        for (int k = 0; k < n; k++) enqueue(i++);
        must("cuEventRecord", end, (void*)nullptr);
        must("cuEventSynchronize", end);
        must("cuEventElapsedTime", &milliseconds, begin, end);
        if (milliseconds > 100 || n >= 4096 || is_tiny) break;
        n = std::min(4096, (int)(n * std::min(10.0, 120.0 / std::max(milliseconds, 1.0f))) + 1);
    }
    must("cuEventDestroy_v2", begin);
    must("cuEventDestroy_v2", end);
    return milliseconds / 1e3 / n;
}

static void row(const std::string& kernel, const std::string& shape, double time, double n_bytes,
                double n_flops) {
    printf("| %-20s | %-22s | %10.1f | %8.1f | %5.1f %% | %8.1f |\n", kernel.c_str(), shape.c_str(),
           time * 1e6, n_bytes / time / 1e9, 100 * n_bytes / time / copy_rate, n_flops / time / 1e12);
    fflush(stdout);
}

template <class... A>
static void enqueue(void* function, Shape grid, Shape block, A... arguments) {
    void* parameters[] = {(void*)&arguments...};
    must("cuLaunchKernel", function, grid.x, grid.y, grid.z, block.x, block.y, block.z, 0u,
         (void*)nullptr, (void**)parameters, (void**)nullptr);
}

static void* function_of(const std::string& kernel) {
    void* function = nullptr;
    must("cuModuleGetFunction", &function, module, kernel.c_str());
    return function;
}

// Bytes that are numbers of moderate size as f16, f32 and int8.
static uint64_t filled(Buffer<uint8_t>& buffer) {
    must("cuMemsetD8Async", buffer.address, (unsigned char)0x2a, buffer.n, (void*)nullptr);
    return buffer.address;
}

static void bench_copy() {
    size_t n = is_tiny ? 1 << 16 : 1 << 30;
    Buffer<uint8_t> from(n), to(n);
    filled(from);
    double time = seconds([&](int) {
        must("cuMemcpyDtoDAsync_v2", to.address, from.address, n, (void*)nullptr);
    });
    copy_rate = 2.0 * n / time;
    row("device copy", std::to_string(n >> 20) + " MiB", time, 2.0 * n, 0);
}

// The parts of a weight matrix in bytes.
struct Planes {
    size_t quants, more, scales;
};
static Planes planes_of(const std::string& kind, size_t n) {
    if (kind == "q4") return {n / 2, 0, n / 8};
    if (kind == "q6") return {n / 2, n / 4, n / 8};
    if (kind == "q8") return {n, 0, n / 16};
    return {2 * n, 0, 0};
}

static void bench_gemm(const std::string& kind, int n_rows, int n_out, int n_in) {
    bool is_small = n_rows <= 64;
    void* function = function_of("gemm_" + kind + (is_small ? "_small" : ""));
    Planes planes = planes_of(kind, (size_t)n_out * n_in);
    size_t n_bytes = planes.quants + planes.more + planes.scales;
    size_t stride = (n_bytes + 255) / 256 * 256;
    size_t n_copies = is_tiny ? 2 : std::max((size_t)2, ((size_t)512 << 20) / stride);
    Buffer<uint8_t> weights(stride * n_copies), x((size_t)n_rows * n_in * 2);
    Buffer<float> y((size_t)n_rows * n_out);
    Buffer<RowInfo> rows(n_rows);
    Buffer<PassHeader> header(std::vector<PassHeader>{{n_rows, n_rows, {}}});
    filled(weights), filled(x);
    unsigned outs = is_small ? 64 : 128, tile_rows = is_small ? 32 : 128;
    Shape grid{(n_out + outs - 1) / outs, (n_rows + tile_rows - 1) / tile_rows};
    double time = seconds([&](int i) {
        uint64_t quants = weights.address + i % n_copies * stride, more = quants + planes.quants;
        uint64_t scales = more + planes.more, none = 0;
        enqueue(function, grid, {is_small ? 128u : 256u}, header.address, rows.address, x.address,
                quants, planes.more ? more : none, planes.scales ? scales : none, none, y.address,
                n_in, n_out, 0);
    });
    char shape[64];
    snprintf(shape, sizeof shape, "%d x %d x %d", n_rows, n_out, n_in);
    row("gemm_" + kind + (is_small ? "_small" : ""), shape, time, n_bytes, 2.0 * n_rows * n_out * n_in);
}

// A prompt of `n_rows` from its beginning, 32 query and 8 key heads of 128.
static void bench_attend(int n_rows) {
    constexpr int HEADS = 32, KV_HEADS = 8, DIM = 128;
    int n_pages = (n_rows + 15) / 16;
    std::vector<RowInfo> infos(n_rows);
    std::vector<int> tables(n_pages);
    for (int i = 0; i < n_pages; i++) tables[i] = i;
    for (int i = 0; i < n_rows; i++) {
        infos[i].position = i;
        infos[i].table_len = n_pages;
        infos[i].n_seq_rows = n_rows;
    }
    Buffer<RowInfo> rows(infos);
    Buffer<int> pages(tables);
    Buffer<PassHeader> header(std::vector<PassHeader>{{n_rows, 0, {}}});
    size_t n_pool = (size_t)n_pages * 2 * KV_HEADS * 16 * DIM * 2;
    Buffer<uint8_t> pool(n_pool), q((size_t)n_rows * HEADS * DIM * 4);
    Buffer<float> out((size_t)n_rows * HEADS * DIM);
    filled(pool), filled(q);
    AttendShape shape{0, 0, 0, 1, KV_HEADS, DIM, HEADS, 0, 0, 0.088f};
    void* function = function_of("attend_prefill_128");
    double time = seconds([&](int) {
        enqueue(function, {(unsigned)(n_rows + 15) / 16, KV_HEADS}, {32, 4}, header.address,
                rows.address, pages.address, pool.address, q.address, out.address, shape);
    });
    row("attend_prefill_128", std::to_string(n_rows) + " positions", time, n_pool,
        2.0 * n_rows * n_rows * HEADS * DIM);
}

static void bench_select(int n_rows, int n) {
    Buffer<uint8_t> logits((size_t)n_rows * n * 4);
    Buffer<int> best(n_rows), indexes(n_rows * 40);
    Buffer<float> values(n_rows * 40);
    Buffer<PassHeader> header(std::vector<PassHeader>{{0, n_rows, {}}});
    filled(logits);
    std::string shape = std::to_string(n_rows) + " x " + std::to_string(n);
    double n_bytes = 4.0 * n_rows * n;
    void *argmax = function_of("argmax_rows"), *top_k = function_of("top_k_rows");
    row("argmax_rows", shape, seconds([&](int) {
            enqueue(argmax, {(unsigned)n_rows}, {256}, header.address, logits.address, best.address, n);
        }), n_bytes, 0);
    row("top_k_rows, 40", shape, seconds([&](int) {
            enqueue(top_k, {(unsigned)n_rows}, {256}, header.address, logits.address, indexes.address,
                    values.address, n, 40);
        }), n_bytes, 0);
}

int main(int n, char** a) {
    if (n != 4 || !(api::library = dlopen(a[1], RTLD_NOW))) {
        fprintf(stderr, "usage: kernels_bench PATH/libcuda.so.1 PATH/kernels.ptx full|tiny: %s\n", dlerror());
        return 2;
    }
    is_tiny = std::string(a[3]) == "tiny";
    std::string ptx = api::text_of(a[2]);
    if (int result = api::ready()) {
        printf("no device: error %d\n", result);
        return 1;
    }
    must("cuModuleLoadData", &module, (const void*)ptx.c_str());
    bench_copy();
    int scale = is_tiny ? 64 : 1;
    for (const char* kind : {"q4", "q6", "q8", "f16", "bf16"}) {
        for (int n_rows : {16, 32, 64, 128}) bench_gemm(kind, n_rows, 14336 / scale, 4096 / scale);
        for (int n_rows : {512, 2048}) {
            bench_gemm(kind, n_rows / scale, 4096 / scale, 4096 / scale);
            bench_gemm(kind, n_rows / scale, 14336 / scale, 4096 / scale);
        }
    }
    for (int n_rows : {512, 2048}) bench_attend(n_rows / scale);
    for (int n_rows : {1, 32}) bench_select(n_rows, 128256 / scale);
    return 0;
}
