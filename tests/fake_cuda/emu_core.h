// The execution model under the emulated kernels: fibers, warps, blocks, shared memory.
//
// Every CUDA thread is a fiber. The fibers of a block run on the one OS thread that executes the
// work of their device, so nothing here is locked. A fiber leaves the processor only where CUDA
// lets threads meet (warp operations, __syncthreads) or when it ends:
//
//   RUNNABLE ──warp operation──► WAITS_WARP ──all named live lanes are there──► RUNNABLE
//   RUNNABLE ──__syncthreads───► WAITS_BLOCK ──all live threads are there─────► RUNNABLE
//   RUNNABLE ──return──────────► DONE
//
// What goes wrong ends the launch through `fail` with a sentence that names kernel, block and
// thread; the driver then answers as a real one does after such a fault, until the context ends.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

namespace emu {

enum State : uint8_t { RUNNABLE, WAITS_WARP, WAITS_BLOCK, DONE };
enum Operation : uint8_t { SYNC, SHUFFLE, BALLOT, MATCH, MMA, LOAD_MATRIX };

struct Warp;
struct Block;

// A cp.async that was begun and is done when its thread waits for it.
struct PendingCopy {
    void* to;
    const void* from;
    unsigned n_bytes;
    bool is_there;
    unsigned group;
};

struct Thread {
    void* stack_pointer;
    uint3 idx;
    State state;
    unsigned lane;
    uint16_t number;  // Within the block.
    Warp* warp;
    Block* block;
    std::vector<PendingCopy> copies;
    unsigned n_committed;
    unsigned warp_epoch;  // Number of __syncwarp passed; for the race checker.
};

// Lanes of one mask on their way to one operation. Two sets of values take turns: a lane that was
// released may publish for the next operation while others still read this one's.
struct Meeting {
    unsigned mask;
    unsigned arrived;
    Operation operation;
    unsigned phase;
    unsigned completed[2];
    uint64_t values[2][32];
};

struct Warp {
    Thread* threads;
    unsigned live, runnable;
    unsigned n_meetings;
    Meeting meetings[33];  // The first is that of the full mask.
};

// What a kernel is to the driver.
struct Parameter {
    uint32_t n_bytes;
    bool is_pointer;
};
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    std::vector<Parameter> parameters;
    unsigned threads_max;
};
void add_kernel(Kernel kernel);
const Kernel* find_kernel(const std::string& name);

// A shared array of a kernel, by the place of its declaration.
struct SharedSite {
    const char* name;
};

struct Block {
    uint3 idx;
    dim3 shape, grid;
    unsigned n_threads, n_live, n_at_barrier;
    const char* barrier_file;
    int barrier_line;
    unsigned epoch;  // Number of __syncthreads passed; for the race checker.
    const Kernel* kernel;
    void** arguments;
    void* scheduler_stack_pointer;
    char* dynamic_shared;
    size_t n_dynamic_bytes;
};

// The running fiber of this OS thread. A fiber never changes OS threads.
extern thread_local Thread* current __attribute__((tls_model("initial-exec")));

[[noreturn]] void fail(const std::string& reason);
void give_way();
void barrier(const char* file, int line);
void* static_shared(const SharedSite* site, size_t n_bytes);
Meeting* other_meeting(Warp* warp, unsigned mask);

void cp_async(void* to, const void* from, unsigned n_bytes, bool is_there);
void cp_async_commit();
void cp_async_wait(unsigned n_newest);
void mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2]);
void ldmatrix_x4(unsigned r[4], const void* row, bool is_transposed);

inline void* dynamic_shared() { return current->block->dynamic_shared; }

inline Meeting* meeting_of(Warp* warp, unsigned mask) {
    return mask == ~0u ? &warp->meetings[0] : other_meeting(warp, mask);
}

inline void release(Warp* warp, Meeting* meeting) {
    meeting->completed[meeting->phase & 1] = meeting->arrived;
    for (unsigned lanes = meeting->arrived; lanes; lanes &= lanes - 1)
        warp->threads[__builtin_ctz(lanes)].state = RUNNABLE;
    warp->runnable |= meeting->arrived;
    meeting->arrived = 0;
    meeting->phase++;
}

// The current lane meets the others of `mask` at `operation` with `value`; the last one runs
// `complete(meeting, values)` for all. Returns the values of all, valid until the lane's next
// meeting, and in `lanes` those that were there.
template <class F>
inline const uint64_t* meet(Operation operation, unsigned mask, uint64_t value, unsigned& lanes,
                            F&& complete) {
    Thread* self = current;
    Warp* warp = self->warp;
    if (!(mask >> self->lane & 1)) fail("warp operation: the calling lane is not in its own mask");
    Meeting* meeting = meeting_of(warp, mask);
    unsigned phase = meeting->phase & 1;
    if (meeting->arrived == 0)
        meeting->operation = operation;
    else if (meeting->operation != operation)
        fail("warp operation: lanes of one mask are at different operations");
    meeting->values[phase][self->lane] = value;
    meeting->arrived |= 1u << self->lane;
    if (meeting->arrived == (mask & warp->live)) {
        complete(meeting->arrived, meeting->values[phase]);
        release(warp, meeting);
    } else {
        self->state = WAITS_WARP;
        warp->runnable &= ~(1u << self->lane);
        give_way();
    }
    lanes = meeting->completed[phase];
    return meeting->values[phase];
}

inline const uint64_t* meet(Operation operation, unsigned mask, uint64_t value, unsigned& lanes) {
    return meet(operation, mask, value, lanes, [](unsigned, const uint64_t*) {});
}

// The value of lane `source`; NaN bits where that lane has ended or is not in the mask.
template <class T, class Source>
inline T shuffle(unsigned mask, T value, int width, Source&& source_of) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    unsigned lanes;
    const uint64_t* values = meet(SHUFFLE, mask, bits, lanes);
    int lane = (int)current->lane, first = lane & ~(width - 1);
    int source = source_of(lane, first);
    uint64_t found = lanes >> source & 1 ? values[source] : ~0ull;
    T result;
    memcpy(&result, &found, sizeof(T));
    return result;
}

// From a function's type to a call with untyped parameters, as cuLaunchKernel has them.
template <class F>
struct Trampoline;
template <class... A>
struct Trampoline<void (*)(A...)> {
    template <class T>
    using Bare = std::remove_cv_t<std::remove_reference_t<T>>;
    template <void (*F)(A...), size_t... I>
    static void expand(void** arguments, std::index_sequence<I...>) {
        F(*(Bare<A>*)arguments[I]...);
    }
    template <void (*F)(A...)>
    static void call(void** arguments) {
        expand<F>(arguments, std::index_sequence_for<A...>{});
    }
    static std::vector<Parameter> parameters() {
        return {Parameter{(uint32_t)sizeof(A), std::is_pointer<Bare<A>>::value}...};
    }
};

}  // namespace emu

// One line per kernel in the generated list of the host build.
#define EMU_REGISTER(threads, name)                                                    \
    namespace {                                                                        \
    struct Register_##name {                                                           \
        Register_##name() {                                                            \
            using T = emu::Trampoline<decltype(&name)>;                                \
            emu::add_kernel({#name, &T::call<&name>, T::parameters(), threads});       \
        }                                                                              \
    } register_##name;                                                                 \
    }
