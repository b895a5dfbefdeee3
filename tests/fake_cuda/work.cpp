// The emulated libcuda: modules and their PTX, launches, streams, events, captured graphs.
//
// A launch copies its parameters at the call, as a real one does, and runs where the stream is
// drained. A graph is the list of what was captured; its launch queues that list again.
#include <cctype>
#include <cstdio>
#include <cstdlib>

#include "driver.h"

namespace fake {

namespace {

// The sizes of an entry's parameters, from `.param .u64 name` and `.param .align 4 .b8 name[16]`.
std::vector<uint32_t> parameter_sizes(const std::string& list) {
    std::vector<uint32_t> sizes;
    for (size_t at = list.find(".param"); at != std::string::npos;) {
        size_t next = list.find(".param", at + 1);
        std::string one = list.substr(at + 6, next == std::string::npos ? next : next - at - 6);
        size_t bracket = one.find('['), type = one.rfind('.');
        if (bracket != std::string::npos)
            sizes.push_back(atoi(one.c_str() + bracket + 1));
        else if (type != std::string::npos && type + 2 < one.size())
            sizes.push_back(atoi(one.c_str() + type + 2) / 8);
        at = next;
    }
    return sizes;
}

std::string trimmed(std::string text) {
    while (!text.empty() && isspace((unsigned char)text.back())) text.pop_back();
    return text;
}

Result compare_entry(const std::string& name, const std::string& parameters, std::string& log) {
    const emu::Kernel* kernel = emu::find_kernel(name);
    if (!kernel) {
        log = "kernel " + name + " is in the PTX and not in the sources of the host build (stale PTX?)";
        return INVALID_PTX;
    }
    std::vector<uint32_t> in_ptx = parameter_sizes(parameters), in_host;
    for (const emu::Parameter& parameter : kernel->parameters) in_host.push_back(parameter.n_bytes);
    if (in_ptx == in_host) return SUCCESS;
    log = "kernel " + name + ": the PTX and the sources disagree on the parameters (stale PTX?)";
    return INVALID_PTX;
}

Result check_version(const std::string& text, std::string& log) {
    Version version{0, 0};
    int target = 0;
    size_t at = text.find("\n.version ");
    if (at == std::string::npos ||
        sscanf(text.c_str() + at, "\n.version %d.%d", &version.major, &version.minor) != 2) {
        log = "no .version";
        return INVALID_PTX;
    }
    if (knobs().ptx < version) {
        log = "Unsupported .version " + std::to_string(version.major) + "." +
              std::to_string(version.minor) + "; current version is '" +
              std::to_string(knobs().ptx.major) + "." + std::to_string(knobs().ptx.minor) + "'";
        return UNSUPPORTED_PTX_VERSION;
    }
    at = text.find("\n.target sm_");
    if (at == std::string::npos || sscanf(text.c_str() + at, "\n.target sm_%d", &target) != 1) {
        log = "no .target";
        return INVALID_PTX;
    }
    Version capability = knobs().capability;
    if (target <= capability.major * 10 + capability.minor) return SUCCESS;
    log = "SM version specified by .target is higher than that of the device";
    return NO_BINARY_FOR_GPU;
}

struct Launch {
    const emu::Kernel* kernel;
    dim3 grid, shape;
    unsigned n_dynamic_bytes;
    std::vector<std::array<uint64_t, 16>> bytes;  // One parameter each, at most 128 bytes.

    Result run(Device* device) {
        device->n_launches++;
        if (device->n_launches_left == 0) {
            report("the device is lost, as the test asked");
            return LAUNCH_FAILED;
        }
        if (device->n_launches_left > 0) device->n_launches_left--;
        std::vector<void*> arguments;
        for (size_t i = 0; i < bytes.size(); i++) {
            arguments.push_back(bytes[i].data());
            uint64_t address = bytes[i][0];
            if (kernel->parameters[i].is_pointer && address && !is_device_memory(device, address, 1)) {
                report(std::string("kernel ") + kernel->name + ": parameter " + std::to_string(i) +
                       " does not point into device memory");
                return ILLEGAL_ADDRESS;
            }
        }
        uint64_t n_blocks = (uint64_t)grid.x * grid.y * grid.z;
        bool is_reversed = knobs().is_reversed;
        for (uint64_t i = 0; i < n_blocks; i++) {
            uint64_t b = is_reversed ? n_blocks - 1 - i : i;
            uint3 idx{(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y),
                      (unsigned)(b / ((uint64_t)grid.x * grid.y))};
            emu::Outcome outcome = emu::run_block(*kernel, arguments.data(), grid, shape, idx,
                                                  n_dynamic_bytes, is_reversed);
            if (outcome == emu::RAN) continue;
            report(emu::fault());
            return outcome == emu::BAD_ADDRESS ? ILLEGAL_ADDRESS : LAUNCH_FAILED;
        }
        return SUCCESS;
    }
};

Result wait_for(Event* event, uint64_t n) {
    while (event->n_done < n && event->stream && !event->stream->queue.empty())
        drain(event->stream, event->stream->queue.size() - 1);
    return event->device->sticky;
}

}  // namespace

Result read_ptx(const char* image, Module& module, std::string& log) {
    std::string text(image);
    if (Result result = check_version(text, log)) return result;
    for (size_t at = text.find(".entry "); at != std::string::npos;) {
        size_t next = text.find(".entry ", at + 1);
        size_t open = text.find('(', at), close = text.find(')', open);
        size_t body = text.find('{', close);
        if (close == std::string::npos || body == std::string::npos) {
            log = "an .entry without parameters or body";
            return INVALID_PTX;
        }
        Entry entry{trimmed(text.substr(at + 7, open - at - 7)), 0};
        size_t most = text.find(".maxntid ", close);
        if (most < body) entry.threads_max = atoi(text.c_str() + most + 9);
        if (Result result = compare_entry(entry.name, text.substr(open, close - open), log))
            return result;
        module.entries.push_back(std::move(entry));
        at = next;
    }
    return SUCCESS;
}

}  // namespace fake

using namespace fake;

// ---- modules ----

static int load_module(void** out, const void* image, std::string& log) {
    ENTER;
    CHECK_STICKY;
    auto module = std::make_unique<Module>();
    module->device = device;
    if (Result result = read_ptx((const char*)image, *module, log)) {
        report(log);
        return result;
    }
    *out = module.release();
    return SUCCESS;
}
API cuModuleLoadData(void** out, const void* image) {
    std::string log;
    return load_module(out, image, log);
}
API cuModuleLoadDataEx(void** out, const void* image, unsigned n, int* options, void** values) {
    constexpr int ERROR_LOG = 5, ERROR_LOG_BYTES = 6;
    std::string log;
    int result = load_module(out, image, log);
    char* buffer = nullptr;
    size_t n_max = 0;
    for (unsigned i = 0; i < n; i++) {
        if (options[i] == ERROR_LOG) buffer = (char*)values[i];
        if (options[i] == ERROR_LOG_BYTES) n_max = (size_t)(uintptr_t)values[i];
    }
    if (buffer && n_max) snprintf(buffer, n_max, "%s", log.c_str());
    return result;
}
API cuModuleUnload(void* handle) {
    Module* module = (Module*)handle;
    ENTER_OF(module);
    drain_all(device);
    delete module;
    return SUCCESS;
}
API cuModuleGetFunction(void** function, void* handle, const char* name) {
    Module* module = (Module*)handle;
    ENTER_OF(module);
    for (const Entry& entry : module->entries) {
        if (entry.name != name) continue;
        // Freed with the process: a function lives as long as its module, which tests load once.
        *function = new Function{device, emu::find_kernel(name), entry.threads_max};
        return SUCCESS;
    }
    return NOT_FOUND;
}
API cuFuncGetAttribute(int* value, int attribute, void* handle) {
    Function* function = (Function*)handle;
    static const std::map<int, int> VALUES = {{0, 1024}, {4, 32}, {5, 80}, {6, 80}};
    auto found = VALUES.find(attribute);
    *value = found == VALUES.end() ? 0 : found->second;
    if (attribute == 0 && function->threads_max) *value = function->threads_max;
    if (attribute == 8) *value = function->dynamic_shared_max;
    return SUCCESS;
}
API cuFuncSetAttribute(void* handle, int attribute, int value) {
    if (attribute != 8) return SUCCESS;
    if (value > 163 << 10) return INVALID_VALUE;
    ((Function*)handle)->dynamic_shared_max = value;
    return SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int n_threads, size_t) {
    *n = 2048 / std::max(n_threads, 1);
    return SUCCESS;
}

// ---- launches ----

API cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned n_dynamic_bytes, void* stream, void** parameters,
                   void** extra) {
    Function* function = (Function*)handle;
    ENTER_OF(function);
    CHECK_STICKY;
    uint64_t n_threads = (uint64_t)bx * by * bz;
    if (extra || !gx || !gy || !gz || !n_threads || gx > 2147483647u || gy > 65535 || gz > 65535)
        return INVALID_VALUE;
    if (bx > 1024 || by > 1024 || bz > 64 || n_threads > 1024) return INVALID_VALUE;
    if ((int64_t)n_dynamic_bytes > function->dynamic_shared_max) return INVALID_VALUE;
    unsigned threads_max = function->kernel->threads_max;
    if (function->threads_max) threads_max = std::min(threads_max, (unsigned)function->threads_max);
    if (n_threads > threads_max) {
        report(std::string("kernel ") + function->kernel->name + ": a block of " +
               std::to_string(n_threads) + " threads, and its bound is " +
               std::to_string(threads_max));
        return LAUNCH_OUT_OF_RESOURCES;
    }
    auto launch = std::make_shared<Launch>();
    launch->kernel = function->kernel;
    launch->grid = {gx, gy, gz};
    launch->shape = {bx, by, bz};
    launch->n_dynamic_bytes = n_dynamic_bytes;
    launch->bytes.resize(function->kernel->parameters.size());
    for (size_t i = 0; i < launch->bytes.size(); i++) {
        uint32_t n_bytes = function->kernel->parameters[i].n_bytes;
        if (n_bytes > sizeof launch->bytes[i]) return INVALID_VALUE;
        memcpy(launch->bytes[i].data(), parameters[i], n_bytes);
    }
    return push(stream_of(stream, device), [=] { return launch->run(device); });
}

// ---- streams and events ----

API cuStreamCreate(void** out, unsigned) {
    ENTER;
    CHECK_STICKY;
    Stream* stream = new Stream{device, {}, nullptr};
    device->streams.insert(stream);
    *out = stream;
    return SUCCESS;
}
API cuStreamCreateWithPriority(void** out, unsigned flags, int) { return cuStreamCreate(out, flags); }
API cuStreamDestroy_v2(void* handle) {
    Stream* stream = (Stream*)handle;
    ENTER_OF(stream);
    drain(stream);
    device->streams.erase(stream);
    delete stream;
    return SUCCESS;
}
API cuStreamSynchronize(void* handle) {
    ENTER;
    Stream* stream = stream_of(handle, device);
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    return drain(stream);
}
// One piece of work is done per query, so that a loop that polls ends.
API cuStreamQuery(void* handle) {
    ENTER;
    Stream* stream = stream_of(handle, device);
    if (!stream->queue.empty()) drain(stream, stream->queue.size() - 1);
    return stream->queue.empty() ? device->sticky : NOT_READY;
}
API cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
    Event* event = (Event*)event_handle;
    ENTER_OF(event);
    Stream* stream = stream_of(handle, device);
    if (stream->capture || event->stream == stream) return SUCCESS;
    uint64_t n = event->n_recorded;
    return push(stream, [=] { return wait_for(event, n); });
}
API cuEventCreate(void** out, unsigned) {
    ENTER;
    CHECK_STICKY;
    *out = new Event{device, 0, 0, nullptr, {}};
    return SUCCESS;
}
API cuEventDestroy_v2(void* handle) {
    Event* event = (Event*)handle;
    ENTER_OF(event);
    drain_all(device);  // Queued work may name the event.
    delete event;
    return SUCCESS;
}
API cuEventRecord(void* handle, void* stream_handle) {
    Event* event = (Event*)handle;
    ENTER_OF(event);
    Stream* stream = stream_of(stream_handle, device);
    if (stream->capture) return SUCCESS;
    uint64_t n = ++event->n_recorded;
    event->stream = stream;
    return push(stream, [=] {
        event->n_done = n;
        event->when = std::chrono::steady_clock::now();
        return SUCCESS;
    });
}
API cuEventSynchronize(void* handle) {
    Event* event = (Event*)handle;
    ENTER_OF(event);
    return wait_for(event, event->n_recorded);
}
API cuEventQuery(void* handle) {
    Event* event = (Event*)handle;
    ENTER_OF(event);
    if (event->n_done < event->n_recorded) drain(event->stream, event->stream->queue.size() - 1);
    return event->n_done >= event->n_recorded ? device->sticky : NOT_READY;
}
API cuEventElapsedTime(float* milliseconds, void* first, void* second) {
    auto elapsed = ((Event*)second)->when - ((Event*)first)->when;
    *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
    return SUCCESS;
}
API cuEventElapsedTime_v2(float* milliseconds, void* first, void* second) {
    return cuEventElapsedTime(milliseconds, first, second);
}
API cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    ENTER;
    return push(stream_of(handle, device), [=] {
        function(data);
        return SUCCESS;
    });
}

// ---- graphs ----

API cuStreamBeginCapture_v2(void* handle, int) {
    ENTER;
    CHECK_STICKY;
    Stream* stream = stream_of(handle, device);
    if (stream->capture || stream == &device->null_stream) return CAPTURE_UNSUPPORTED;
    stream->capture = std::make_unique<std::vector<Work>>();
    return SUCCESS;
}
API cuStreamEndCapture(void* handle, void** graph) {
    ENTER;
    Stream* stream = stream_of(handle, device);
    if (!stream->capture) return INVALID_VALUE;
    *graph = stream->capture.release();
    return device->sticky;
}
API cuStreamIsCapturing(void* handle, int* status) {
    ENTER;
    *status = stream_of(handle, device)->capture ? 1 : 0;
    return SUCCESS;
}
struct Replay {
    Device* device;
    std::vector<Work> works;
};
API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) {
    ENTER;
    CHECK_STICKY;
    *out = new Replay{device, *(std::vector<Work>*)graph};
    return SUCCESS;
}
API cuGraphLaunch(void* handle, void* stream) {
    Replay* replay = (Replay*)handle;
    ENTER_OF(replay);
    CHECK_STICKY;
    for (const Work& work : replay->works)
        if (Result result = push(stream_of(stream, device), work)) return result;
    return SUCCESS;
}
API cuGraphUpload(void*, void*) { return SUCCESS; }
API cuGraphGetNodes(void* graph, void** nodes, size_t* n) {
    if (!nodes) *n = ((std::vector<Work>*)graph)->size();
    return nodes ? NOT_SUPPORTED : SUCCESS;
}
API cuGraphExecDestroy(void* handle) {
    delete (Replay*)handle;
    return SUCCESS;
}
API cuGraphDestroy(void* handle) {
    delete (std::vector<Work>*)handle;
    return SUCCESS;
}
