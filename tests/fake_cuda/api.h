// The driver API for the test programs of this folder, by name from a library given at run time:
// the emulated one or a real libcuda.so.1.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace api {

inline void* library;

// Calls a function of the library; its parameters are those given, so their types must be right.
template <class... A>
int call(const char* name, A... arguments) {
    void* found = dlsym(library, name);
    if (!found) {
        printf("missing %s\n", name);
        exit(2);
    }
    return ((int (*)(A...))found)(arguments...);
}

// Ends the program where a call fails.
template <class... A>
void must(const char* name, A... arguments) {
    if (int result = call(name, arguments...)) {
        printf("%s: error %d\n", name, result);
        exit(1);
    }
}

inline int ready() {
    int result = call("cuInit", 0u);
    void* context = nullptr;
    if (!result) result = call("cuDevicePrimaryCtxRetain", &context, 0);
    if (!result) result = call("cuCtxSetCurrent", context);
    return result;
}

// Device memory that ends with its scope.
template <class T>
struct Buffer {
    uint64_t address = 0;
    size_t n;

    explicit Buffer(size_t n) : n(n) { must("cuMemAlloc_v2", &address, std::max(n, (size_t)1) * sizeof(T)); }
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
        must("cuMemcpyHtoD_v2", address, (const void*)values.data(), n * sizeof(T));
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { call("cuMemFree_v2", address); }
    std::vector<T> read() const {
        std::vector<T> values(n);
        must("cuMemcpyDtoH_v2", (void*)values.data(), address, n * sizeof(T));
        return values;
    }
};

inline std::string text_of(const char* path) {
    std::ifstream file(path);
    return std::string((std::istreambuf_iterator<char>(file)), {});
}

struct Shape {
    unsigned x, y = 1, z = 1;
};

// Launches on the null stream and waits.
template <class... A>
void launch(void* module, const std::string& kernel, Shape grid, Shape block, A... arguments) {
    void* function = nullptr;
    must("cuModuleGetFunction", &function, module, kernel.c_str());
    void* parameters[] = {(void*)&arguments...};
    int result = call("cuLaunchKernel", function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                      0u, (void*)nullptr, (void**)parameters, (void**)nullptr);
    if (!result) result = call("cuCtxSynchronize");
    if (result) {
        printf("FAILED %s: error %d\n", kernel.c_str(), result);
        exit(1);
    }
}

}  // namespace api
