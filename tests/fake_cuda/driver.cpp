// The emulated libcuda: initialisation, devices, contexts, memory and copies.
//
// Only what cudarc calls. Stricter than a real driver where that finds mistakes: memory starts as
// NaN bits and ends at a guard page, freed memory is unmapped, queued work runs only where the
// host waits (FAKE_CUDA_MODE=lazy), pageable copies are refused while a stream is captured.
#include "driver.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace fake {

namespace {

const char* setting(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

std::mutex registry_lock;
std::vector<std::unique_ptr<Device>> devices;
bool is_initialized;
thread_local Device* bound_device;
std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned;

void apply(Knobs& k, const std::string& name, const char* value) {
    if (name == "DEVICES") k.n_devices = atoi(value);
    if (name == "MEM_MB") k.memory_bytes = (size_t)atol(value) << 20;
    if (name == "CC") sscanf(value, "%d.%d", &k.capability.major, &k.capability.minor);
    if (name == "PTX") sscanf(value, "%d.%d", &k.ptx.major, &k.ptx.minor);
    if (name == "MODE") k.is_lazy = strcmp(value, "eager") != 0;
    if (name == "ORDER") k.is_reversed = strcmp(value, "reverse") == 0;
    if (name == "TRACE") k.is_traced = atoi(value) != 0;
}

Result allocate(Device* device, uint64_t* address, size_t n_bytes) {
    if (n_bytes == 0) return INVALID_VALUE;
    if (n_bytes > device->total_bytes - device->used_bytes) return OUT_OF_MEMORY;
    constexpr size_t PAGE = 4096;
    size_t n_rounded = (n_bytes + 15) / 16 * 16, n_pages = (n_rounded + PAGE - 1) / PAGE * PAGE;
    size_t n_mapped = n_pages + 2 * PAGE;
    void* mapping = mmap(nullptr, n_mapped, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return OUT_OF_MEMORY;
    char* usable = (char*)mapping + PAGE;
    mprotect(usable, n_pages, PROT_READ | PROT_WRITE);
    char* start = usable + n_pages - n_rounded;
    memset(start, 0xff, n_rounded);
    *address = (uint64_t)start;
    device->memory[*address] = {(char*)mapping, n_mapped, n_bytes};
    device->used_bytes += n_bytes;
    return SUCCESS;
}

Result release(Device* device, uint64_t address) {
    auto found = device->memory.find(address);
    if (found == device->memory.end()) return INVALID_VALUE;
    device->used_bytes -= found->second.n_bytes;
    munmap(found->second.mapping, found->second.n_mapped);
    device->memory.erase(found);
    return SUCCESS;
}

}  // namespace

Knobs& knobs() {
    static Knobs k = [] {
        Knobs read;
        for (const char* name : {"DEVICES", "MEM_MB", "CC", "PTX", "MODE", "ORDER", "TRACE"}) {
            const char* value = setting((std::string("FAKE_CUDA_") + name).c_str(), nullptr);
            if (value) apply(read, name, value);
        }
        return read;
    }();
    return k;
}

void report(const std::string& text) { fprintf(stderr, "fake cuda: %s\n", text.c_str()); }

Device* device_of(int ordinal) {
    std::lock_guard<std::mutex> guard(registry_lock);
    bool is_there = is_initialized && ordinal >= 0 && ordinal < (int)devices.size();
    return is_there ? devices[ordinal].get() : nullptr;
}

Device* current_device() { return bound_device; }

Stream* stream_of(void* handle, Device* device) {
    bool is_special = handle == nullptr || handle == (void*)1 || handle == (void*)2;
    return is_special ? &device->null_stream : (Stream*)handle;
}

Result drain(Stream* stream, size_t n_left) {
    Device* device = stream->device;
    while (stream->queue.size() > n_left) {
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (device->sticky) continue;
        if (Result result = work()) device->sticky = result;
    }
    return device->sticky;
}

void drain_all(Device* device) {
    drain(&device->null_stream);
    for (Stream* stream : device->streams) drain(stream);
}

Result push(Stream* stream, Work work) {
    if (stream->capture) {
        stream->capture->push_back(std::move(work));
        return SUCCESS;
    }
    stream->queue.push_back(std::move(work));
    return knobs().is_lazy ? SUCCESS : drain(stream);
}

bool is_device_memory(const Device* device, uint64_t address, size_t n_bytes) {
    auto after = device->memory.upper_bound(address);
    if (after == device->memory.begin()) return false;
    auto found = std::prev(after);
    size_t offset = address - found->first;
    return offset <= found->second.n_bytes && n_bytes <= found->second.n_bytes - offset;
}

bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto after = pinned.upper_bound((uintptr_t)address);
    if (after == pinned.begin()) return false;
    auto found = std::prev(after);
    return (uintptr_t)address < found->first + found->second;
}

}  // namespace fake

using namespace fake;

// ---- for tests: what no real driver has ----

// Sets a knob before cuInit, by its name without FAKE_CUDA_.
API fakeCudaConfigure(const char* name, const char* value) {
    apply(knobs(), name, value);
    return SUCCESS;
}
// After so many more kernels the device fails as a lost one does; negative: never.
API fakeCudaLoseDevice(int ordinal, int64_t n_launches) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    std::lock_guard<std::recursive_mutex> guard(device->lock);
    device->n_launches_left = n_launches;
    return SUCCESS;
}
// The memory that a device has from now on.
API fakeCudaSetMemory(int ordinal, uint64_t n_bytes) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    std::lock_guard<std::recursive_mutex> guard(device->lock);
    device->total_bytes = std::max((size_t)n_bytes, device->used_bytes);
    return SUCCESS;
}
// Kernels that the device has run, replays of graphs included.
API fakeCudaLaunches(int ordinal, uint64_t* n_launches) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    std::lock_guard<std::recursive_mutex> guard(device->lock);
    *n_launches = device->n_launches;
    return SUCCESS;
}

// ---- initialisation, devices, contexts ----

API cuInit(unsigned) {
    if (knobs().n_devices == 0) return NO_DEVICE;
    std::lock_guard<std::mutex> guard(registry_lock);
    if (is_initialized) return SUCCESS;
    emu::install_fault_handlers();
    for (int i = 0; i < knobs().n_devices; i++) {
        devices.push_back(std::make_unique<Device>());
        devices.back()->ordinal = i;
        devices.back()->total_bytes = knobs().memory_bytes;
    }
    is_initialized = true;
    return SUCCESS;
}
API cuDriverGetVersion(int* version) {
    *version = (knobs().ptx.major + 4) * 1000 + knobs().ptx.minor * 10;  // PTX 8.4 is CUDA 12.4.
    return SUCCESS;
}
API cuDeviceGetCount(int* n) {
    if (!is_initialized) return NOT_INITIALIZED;
    *n = (int)devices.size();
    return SUCCESS;
}
API cuDeviceGet(int* handle, int ordinal) {
    if (!device_of(ordinal)) return is_initialized ? INVALID_DEVICE : NOT_INITIALIZED;
    *handle = ordinal;
    return SUCCESS;
}
API cuDeviceGetName(char* name, int n_max, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    snprintf(name, n_max, "Emulated CUDA device %d", ordinal);
    return SUCCESS;
}
API cuDeviceGetUuid_v2(char* uuid, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    memset(uuid, ordinal + 1, 16);
    return SUCCESS;
}
API cuDeviceGetUuid(char* uuid, int ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }
API cuDeviceGetPCIBusId(char* id, int n_max, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    snprintf(id, n_max, "0000:%02x:00.0", ordinal + 1);
    return SUCCESS;
}
API cuDeviceTotalMem_v2(size_t* n_bytes, int ordinal) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    *n_bytes = device->total_bytes;
    return SUCCESS;
}
API cuDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return SUCCESS;
}
API cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    // The numbers of the driver API's CUdevice_attribute; the values of an A100.
    static const std::map<int, int> VALUES = {
        {1, 1024},     {2, 1024},     {3, 1024},    {4, 64},        {5, 2147483647},
        {6, 65535},    {7, 65535},    {8, 48 << 10}, {10, 32},      {12, 65536},
        {13, 1410000}, {16, 108},     {36, 1215000}, {37, 5120},    {38, 40 << 20},
        {39, 2048},    {40, 3},       {41, 1},      {81, 164 << 10}, {82, 65536},
        {95, 1},       {97, 163 << 10}, {106, 32},  {115, 1}};
    auto found = VALUES.find(attribute);
    *value = found == VALUES.end() ? 0 : found->second;
    if (attribute == 33) *value = ordinal + 1;  // PCI bus.
    if (attribute == 75) *value = knobs().capability.major;
    if (attribute == 76) *value = knobs().capability.minor;
    return SUCCESS;
}
API cuDeviceComputeCapability(int* major, int* minor, int) {
    *major = knobs().capability.major;
    *minor = knobs().capability.minor;
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** context, int ordinal) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    std::lock_guard<std::recursive_mutex> guard(device->lock);
    device->n_retained++;
    *context = device;
    return SUCCESS;
}
// The end of the last use frees all that the context held, and forgets its fault.
API cuDevicePrimaryCtxRelease_v2(int ordinal) {
    Device* device = device_of(ordinal);
    if (!device || device->n_retained == 0) return INVALID_CONTEXT;
    std::lock_guard<std::recursive_mutex> guard(device->lock);
    if (--device->n_retained > 0) return SUCCESS;
    drain_all(device);
    while (!device->memory.empty()) release(device, device->memory.begin()->first);
    device->sticky = SUCCESS;
    return SUCCESS;
}
API cuDevicePrimaryCtxReset_v2(int ordinal) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    device->sticky = SUCCESS;
    return SUCCESS;
}
API cuCtxGetCurrent(void** context) {
    *context = bound_device;
    return SUCCESS;
}
API cuCtxSetCurrent(void* context) {
    bound_device = (Device*)context;
    return SUCCESS;
}
API cuCtxGetDevice(int* ordinal) {
    if (!bound_device) return INVALID_CONTEXT;
    *ordinal = bound_device->ordinal;
    return SUCCESS;
}
API cuCtxSynchronize() {
    ENTER;
    drain_all(device);
    return device->sticky;
}
API cuCtxSetLimit(int, size_t) { return SUCCESS; }

// ---- errors ----

struct ErrorText {
    int code;
    const char *name, *text;
};
static const ErrorText ERRORS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};
static const ErrorText* error_text(int code) {
    for (const ErrorText& error : ERRORS)
        if (error.code == code) return &error;
    return nullptr;
}
API cuGetErrorName(int code, const char** name) {
    const ErrorText* error = error_text(code);
    *name = error ? error->name : nullptr;
    return error ? SUCCESS : INVALID_VALUE;
}
API cuGetErrorString(int code, const char** text) {
    const ErrorText* error = error_text(code);
    *text = error ? error->text : nullptr;
    return error ? SUCCESS : INVALID_VALUE;
}

// ---- memory ----

API cuMemGetInfo_v2(size_t* n_free, size_t* n_total) {
    ENTER;
    *n_free = device->total_bytes - device->used_bytes;
    *n_total = device->total_bytes;
    return device->sticky;
}
API cuMemAlloc_v2(uint64_t* address, size_t n_bytes) {
    ENTER;
    CHECK_STICKY;
    return allocate(device, address, n_bytes);
}
API cuMemFree_v2(uint64_t address) {
    ENTER;
    drain_all(device);
    return release(device, address);
}
API cuMemAllocAsync(uint64_t* address, size_t n_bytes, void* stream) {
    ENTER;
    CHECK_STICKY;
    if (stream_of(stream, device)->capture) return CAPTURE_UNSUPPORTED;
    return allocate(device, address, n_bytes);
}
API cuMemFreeAsync(uint64_t address, void* stream) {
    ENTER;
    if (stream_of(stream, device)->capture) return CAPTURE_UNSUPPORTED;
    return push(stream_of(stream, device), [=] { return release(device, address); });
}
API cuMemHostAlloc(void** address, size_t n_bytes, unsigned) {
    size_t n_rounded = (std::max(n_bytes, (size_t)1) + 4095) / 4096 * 4096;
    *address = aligned_alloc(4096, n_rounded);
    memset(*address, 0xff, n_rounded);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[(uintptr_t)*address] = n_bytes;
    return SUCCESS;
}
API cuMemFreeHost(void* address) {
    // Queued copies may still name it; a real driver waits for them too.
    if (Device* device = current_device()) {
        std::lock_guard<std::recursive_mutex> guard(device->lock);
        drain_all(device);
    }
    std::lock_guard<std::mutex> guard(pinned_lock);
    if (!pinned.erase((uintptr_t)address)) return INVALID_VALUE;
    free(address);
    return SUCCESS;
}
API cuMemHostRegister_v2(void* address, size_t n_bytes, unsigned) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[(uintptr_t)address] = n_bytes;
    return SUCCESS;
}
API cuMemHostUnregister(void* address) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.erase((uintptr_t)address) ? SUCCESS : INVALID_VALUE;
}
API cuMemHostGetFlags(unsigned* flags, void*) {
    *flags = 0;
    return SUCCESS;
}

// ---- copies: pinned memory is read and written when the work runs, pageable memory at the call ----

API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n_bytes, void* handle) {
    ENTER;
    CHECK_STICKY;
    Stream* stream = stream_of(handle, device);
    if (!is_device_memory(device, to, n_bytes)) return INVALID_VALUE;
    if (is_pinned(from)) return push(stream, [=] {
            memcpy((void*)to, from, n_bytes);
            return SUCCESS;
        });
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    const char* bytes = (const char*)from;
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + n_bytes);
    return push(stream, [=] {
        memcpy((void*)to, staged->data(), n_bytes);
        return SUCCESS;
    });
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n_bytes, void* handle) {
    ENTER;
    CHECK_STICKY;
    Stream* stream = stream_of(handle, device);
    if (!is_device_memory(device, from, n_bytes)) return INVALID_VALUE;
    if (!is_pinned(to) && stream->capture) return CAPTURE_UNSUPPORTED;
    Result result = push(stream, [=] {
        memcpy(to, (void*)from, n_bytes);
        return SUCCESS;
    });
    return result || is_pinned(to) ? result : drain(stream);
}
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n_bytes, void* handle) {
    ENTER;
    CHECK_STICKY;
    if (!is_device_memory(device, to, n_bytes)) return INVALID_VALUE;
    if (!is_device_memory(device, from, n_bytes)) return INVALID_VALUE;
    return push(stream_of(handle, device), [=] {
        memmove((void*)to, (const void*)from, n_bytes);
        return SUCCESS;
    });
}
API cuMemsetD8Async(uint64_t at, unsigned char value, size_t n_bytes, void* handle) {
    ENTER;
    CHECK_STICKY;
    if (!is_device_memory(device, at, n_bytes)) return INVALID_VALUE;
    return push(stream_of(handle, device), [=] {
        memset((void*)at, value, n_bytes);
        return SUCCESS;
    });
}
API cuMemsetD32Async(uint64_t at, unsigned value, size_t n_words, void* handle) {
    ENTER;
    CHECK_STICKY;
    if (at % 4 || !is_device_memory(device, at, n_words * 4)) return INVALID_VALUE;
    return push(stream_of(handle, device), [=] {
        std::fill_n((unsigned*)at, n_words, value);
        return SUCCESS;
    });
}
API cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t n_bytes) {
    ENTER;
    CHECK_STICKY;
    if (!is_device_memory(device, to, n_bytes)) return INVALID_VALUE;
    drain(&device->null_stream);
    memcpy((void*)to, from, n_bytes);
    return device->sticky;
}
API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t n_bytes) {
    ENTER;
    CHECK_STICKY;
    if (!is_device_memory(device, from, n_bytes)) return INVALID_VALUE;
    drain(&device->null_stream);
    memcpy(to, (const void*)from, n_bytes);
    return device->sticky;
}
