// Drives the emulated driver as a program would, one scenario per run: tests/fake_cuda.rs reads
// what is printed. Usage: self_test PATH/libcuda.so SCENARIO [arguments]
#include "api.h"

using api::call;
using api::ready;

static std::string ptx_of(const char* version, const char* target, const char* kernel,
                          const char* second_type) {
    return std::string("// by hand\n.version ") + version + "\n.target " + target +
           "\n.address_size 64\n.visible .entry " + kernel + "(\n\t.param .u64 a_0,\n\t.param ." +
           second_type + " a_1\n)\n{\n\tret;\n}\n";
}

static void* function_of(const char* kernel) {
    void *module = nullptr, *function = nullptr;
    std::string ptx = ptx_of("7.0", "sm_80", kernel, "u32");
    int result = call("cuModuleLoadData", &module, (const void*)ptx.c_str());
    if (!result) result = call("cuModuleGetFunction", &function, module, kernel);
    if (result) {
        printf("load %d\n", result);
        exit(1);
    }
    return function;
}

static int launch(void* function, unsigned n_blocks, unsigned n_threads, unsigned n_shared,
                  uint64_t data, int n, void* stream) {
    void* parameters[] = {&data, &n};
    return call("cuLaunchKernel", function, n_blocks, 1u, 1u, n_threads, 1u, 1u, n_shared, stream,
                (void**)parameters, (void**)nullptr);
}

// launch KERNEL blocks threads shared_bytes n [host]: data[i] = i, then its values afterwards.
static int run_launch(char** a) {
    int n = atoi(a[4]);
    std::vector<float> values(n), got(n);
    for (int i = 0; i < n; i++) values[i] = (float)i;
    uint64_t data = 0;
    call("cuMemAlloc_v2", &data, (size_t)n * 4);
    call("cuMemcpyHtoD_v2", data, (const void*)values.data(), (size_t)n * 4);
    uint64_t given = a[5] ? (uint64_t)values.data() : data;
    int result = launch(function_of(a[0]), atoi(a[1]), atoi(a[2]), atoi(a[3]), given, n, nullptr);
    printf("launch %d\n", result);
    printf("synchronize %d\n", call("cuCtxSynchronize"));
    printf("again %d\n", call("cuMemcpyDtoH_v2", (void*)got.data(), data, (size_t)n * 4));
    printf("values");
    for (float value : got) printf(" %g", value);
    printf("\n");
    return 0;
}

// ptx VERSION TARGET KERNEL TYPE: what the JIT says.
static int run_ptx(char** a) {
    char log[512] = "";
    int options[] = {5, 6};
    void* values[] = {log, (void*)sizeof log};
    void* module = nullptr;
    std::string ptx = ptx_of(a[0], a[1], a[2], a[3]);
    int result = call("cuModuleLoadDataEx", &module, (const void*)ptx.c_str(), 2u, (int*)options,
                      (void**)values);
    printf("load %d\nlog %s\n", result, log);
    return 0;
}

// memory MB: one allocation of that size, and what is free afterwards.
static int run_memory(char** a) {
    uint64_t data = 0;
    size_t n_free = 0, n_total = 0;
    printf("allocate %d\n", call("cuMemAlloc_v2", &data, (size_t)atol(a[0]) << 20));
    call("cuMemGetInfo_v2", &n_free, &n_total);
    printf("free %zu of %zu\n", n_free >> 20, n_total >> 20);
    return 0;
}

// pinned: a value that comes back by an asynchronous copy, read before and after the wait.
static int run_pinned(char**) {
    void *stream = nullptr, *host = nullptr;
    uint64_t data = 0;
    call("cuStreamCreate", &stream, 1u);
    call("cuMemAlloc_v2", &data, (size_t)4);
    call("cuMemHostAlloc", &host, (size_t)4, 0u);
    call("cuMemsetD32Async", data, 7u, (size_t)1, stream);
    call("cuMemcpyDtoHAsync_v2", host, data, (size_t)4, stream);
    printf("before %d\n", *(volatile int*)host);
    call("cuStreamSynchronize", stream);
    printf("after %d\n", *(volatile int*)host);
    return 0;
}

// graph: two captured sums, replayed with other data; a wait during the capture is refused.
static int run_graph(char**) {
    void *stream = nullptr, *graph = nullptr, *replay = nullptr;
    uint64_t data = 0, n_launches = 0;
    std::vector<float> values(64, 1.0f);
    call("cuStreamCreate", &stream, 1u);
    call("cuMemAlloc_v2", &data, (size_t)256);
    void* sum = function_of("sound_sum");
    call("cuStreamBeginCapture_v2", stream, 1);
    launch(sum, 1, 64, 0, data, 64, stream);
    launch(sum, 1, 64, 0, data, 64, stream);
    printf("wait in capture %d\n", call("cuStreamSynchronize", stream));
    call("cuStreamEndCapture", stream, &graph);
    call("cuGraphInstantiateWithFlags", &replay, graph, 0ull);
    for (int round = 1; round <= 2; round++) {
        for (float& value : values) value = (float)round;
        call("cuMemcpyHtoDAsync_v2", data, (const void*)values.data(), (size_t)256, stream);
        call("cuGraphLaunch", replay, stream);
        float first = 0;
        call("cuMemcpyDtoHAsync_v2", (void*)&first, data, (size_t)4, stream);
        printf("replay %g\n", first);
    }
    call("fakeCudaLaunches", 0, &n_launches);
    printf("launches %d\n", (int)n_launches);
    return 0;
}

// lost: a device that fails at its second kernel; a new context works again.
static int run_lost(char**) {
    uint64_t data = 0;
    call("cuMemAlloc_v2", &data, (size_t)256);
    call("cuMemsetD8Async", data, (unsigned char)0, (size_t)256, (void*)nullptr);
    call("fakeCudaLoseDevice", 0, (int64_t)1);
    void* sum = function_of("sound_sum");
    for (int i = 0; i < 2; i++) {
        launch(sum, 1, 64, 0, data, 64, nullptr);
        printf("synchronize %d\n", call("cuCtxSynchronize"));
    }
    printf("allocate %d\n", call("cuMemAlloc_v2", &data, (size_t)256));
    call("fakeCudaLoseDevice", 0, (int64_t)-1);
    call("cuDevicePrimaryCtxRelease_v2", 0);
    printf("ready %d\n", ready());
    printf("allocate %d\n", call("cuMemAlloc_v2", &data, (size_t)256));
    return 0;
}

int main(int n, char** a) {
    if (n < 3 || !(api::library = dlopen(a[1], RTLD_NOW))) {
        fprintf(stderr, "usage: self_test PATH/libcuda.so SCENARIO [arguments]: %s\n", dlerror());
        return 2;
    }
    if (int result = ready()) {
        printf("ready %d\n", result);
        return 0;
    }
    std::string scenario = a[2];
    if (scenario == "launch" && n >= 8) return run_launch(a + 3);
    if (scenario == "ptx" && n == 7) return run_ptx(a + 3);
    if (scenario == "memory" && n == 4) return run_memory(a + 3);
    if (scenario == "pinned") return run_pinned(a + 3);
    if (scenario == "graph") return run_graph(a + 3);
    if (scenario == "lost") return run_lost(a + 3);
    fprintf(stderr, "no such scenario: %s\n", scenario.c_str());
    return 2;
}
