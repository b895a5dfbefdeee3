// The state of the emulated driver: devices, streams of queued work, modules.
//
// One lock per device: a thread that synchronises runs the queued work of that device itself, with
// the lock held. So two devices run at the same time and one device never does.
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "scheduler.h"

namespace fake {

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
};

struct Version {
    int major, minor;
};
inline bool operator<(Version a, Version b) {
    return a.major != b.major ? a.major < b.major : a.minor < b.minor;
}

// The knobs, FAKE_CUDA_<NAME> in the environment; see the table in README.md of this folder.
struct Knobs {
    int n_devices = 1;
    Version capability{8, 0}, ptx{8, 4};
    size_t memory_bytes = (size_t)2048 << 20;
    bool is_lazy = true, is_reversed = false, is_traced = false;
};
Knobs& knobs();

using Work = std::function<Result()>;
struct Device;

struct Stream {
    Device* device;
    std::deque<Work> queue;
    std::unique_ptr<std::vector<Work>> capture;  // Set between begin and end of a capture.
};

struct Allocation {
    char* mapping;
    size_t n_mapped, n_bytes;
};

struct Device {
    int ordinal;
    std::recursive_mutex lock;
    size_t total_bytes, used_bytes = 0;
    Result sticky = SUCCESS;  // After a fault, what every call answers until the context ends.
    std::map<uintptr_t, Allocation> memory;
    Stream null_stream{this, {}, nullptr};
    std::set<Stream*> streams;
    int n_retained = 0;
    uint64_t n_launches = 0;
    int64_t n_launches_left = -1;  // At 0 the device is lost; negative: never.
};

struct Event {
    Device* device;
    uint64_t n_recorded = 0, n_done = 0;
    Stream* stream = nullptr;
    std::chrono::steady_clock::time_point when;
};

struct Entry {
    std::string name;
    int threads_max;  // Of .maxntid; 0: none given.
};
struct Module {
    Device* device;
    std::vector<Entry> entries;
};
struct Function {
    Device* device;
    const emu::Kernel* kernel;
    int threads_max;
    int dynamic_shared_max = 48 << 10;
};

// Reads a PTX text as the JIT would and compares its entries with the host build. On failure
// `log` says why.
Result read_ptx(const char* text, Module& module, std::string& log);

Device* device_of(int ordinal);
Device* current_device();
Stream* stream_of(void* handle, Device* device);
Result push(Stream* stream, Work work);
Result drain(Stream* stream, size_t n_left = 0);
void drain_all(Device* device);
bool is_device_memory(const Device* device, uint64_t address, size_t n_bytes);
bool is_pinned(const void* address);
void report(const std::string& text);

}  // namespace fake

#define API extern "C" __attribute__((visibility("default"))) int

// Opens an API function of the current context.
#define ENTER                                                          \
    Device* device = current_device();                                 \
    if (!device) return INVALID_CONTEXT;                               \
    std::lock_guard<std::recursive_mutex> guard(device->lock);         \
    if (knobs().is_traced) report(__func__)
// Opens an API function of a handle's device.
#define ENTER_OF(handle)                                               \
    if (!(handle)) return INVALID_HANDLE;                              \
    Device* device = (handle)->device;                                 \
    std::lock_guard<std::recursive_mutex> guard(device->lock);         \
    if (knobs().is_traced) report(__func__)
#define CHECK_STICKY \
    if (device->sticky) return device->sticky
