// Fibers, warps and blocks: the one scheduler of the emulated driver, see emu_core.h.
//
// A lane that waits hands the processor to the next runnable lane of its warp without a detour;
// when a warp has none left, the block's loop goes on with the next warp. In reverse order the
// last lane, warp and block come first: a result that differs between the orders is a race.
#include "scheduler.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdio>

namespace emu {

thread_local Thread* current __attribute__((tls_model("initial-exec")));

namespace {

constexpr size_t STACK_BYTES = 128 << 10, PAGE_BYTES = 4096;
constexpr size_t STATIC_SHARED_MAX = 48 << 10, ARENA_BYTES = 256 << 10, RED_ZONE_BYTES = 64;

struct StaticShared {
    const SharedSite* site;
    size_t offset, n_bytes;
};

// Stacks, records and shared memory of the blocks that one OS thread runs.
struct Worker {
    char* stacks = nullptr;
    char* arena = nullptr;
    unsigned n_stacks = 0;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<StaticShared> statics;
    size_t n_static_bytes = 0;

    void reserve(unsigned n_threads) {
        if (!arena) {
            arena = (char*)mmap(nullptr, ARENA_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            mprotect(arena + ARENA_BYTES, PAGE_BYTES, PROT_NONE);
        }
        if (n_threads <= n_stacks) return;
        if (stacks) munmap(stacks, n_stacks * STACK_BYTES);
        n_stacks = n_threads;
        stacks = (char*)mmap(nullptr, n_stacks * STACK_BYTES, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (unsigned i = 0; i < n_stacks; i++)
            mprotect(stacks + i * STACK_BYTES, PAGE_BYTES, PROT_NONE);
        threads.resize(n_threads);
        warps.resize((n_threads + 31) / 32);
    }
    ~Worker() {
        if (stacks) munmap(stacks, n_stacks * STACK_BYTES);
        if (arena) munmap(arena, ARENA_BYTES + PAGE_BYTES);
    }
};

thread_local Worker worker;
thread_local sigjmp_buf fault_exit;
thread_local bool is_in_kernel;
thread_local bool is_reverse_order;
thread_local std::string fault_text;

#if !defined(__x86_64__)
#error "write the fiber switch for this architecture"
#endif
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline unsigned first_lane(unsigned lanes) {
    return is_reverse_order ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
}

// Meetings that waited only for the lane that just ended.
void release_after_exit(Warp* warp) {
    for (unsigned i = 0; i < warp->n_meetings; i++) {
        Meeting* meeting = &warp->meetings[i];
        if (!meeting->arrived || meeting->arrived != (meeting->mask & warp->live)) continue;
        if (meeting->operation == MMA || meeting->operation == LOAD_MATRIX)
            fail("a matrix operation of a warp of which lanes have ended");
        release(warp, meeting);
    }
}

void fiber_main() {
    Thread* self = current;
    self->block->kernel->call(self->block->arguments);
    if (!self->copies.empty()) fail("the thread ends with cp.async copies that it never waited for");
    self->state = DONE;
    self->block->n_live--;
    self->warp->live &= ~(1u << self->lane);
    self->warp->runnable &= ~(1u << self->lane);
    release_after_exit(self->warp);
    give_way();
    __builtin_unreachable();
}

void prepare_thread(unsigned i, uint3 idx, Block* block) {
    // The tops of the stacks are spread over the cache's sets: all lanes touch theirs in turn.
    char* top = worker.stacks + (size_t)(i + 1) * STACK_BYTES - (i % 32) * 128;
    void** stack = (void**)(top - 72);  // On entry rsp is 8 below a multiple of 16.
    *stack = nullptr;
    *--stack = (void*)fiber_main;
    for (int r = 0; r < 6; r++) *--stack = nullptr;
    Thread& thread = worker.threads[i];
    thread.stack_pointer = stack;
    thread.idx = idx;
    thread.state = RUNNABLE;
    thread.lane = i % 32;
    thread.number = (uint16_t)i;
    thread.warp = &worker.warps[i / 32];
    thread.block = block;
    thread.copies.clear();
    thread.n_committed = 0;
    thread.warp_epoch = 0;
}

void prepare_warps(unsigned n_threads) {
    for (unsigned w = 0; w * 32 < n_threads; w++) {
        unsigned n_lanes = std::min(32u, n_threads - w * 32);
        unsigned lanes = n_lanes == 32 ? ~0u : (1u << n_lanes) - 1;
        Warp& warp = worker.warps[w];
        warp.threads = &worker.threads[w * 32];
        warp.live = warp.runnable = lanes;
        warp.n_meetings = 1;
        warp.meetings[0].mask = ~0u;
        warp.meetings[0].arrived = warp.meetings[0].phase = 0;
    }
}

void prepare_shared(Block* block) {
    worker.statics.clear();
    worker.n_static_bytes = 0;
    block->dynamic_shared = worker.arena + ARENA_BYTES - (block->n_dynamic_bytes + 15) / 16 * 16;
    memset(block->dynamic_shared, 0xff, worker.arena + ARENA_BYTES - block->dynamic_shared);
    begin_race_check(worker.arena, ARENA_BYTES);
}

// Lets every runnable lane run until it waits or ends; false when none was runnable.
bool run_warps(Block* block) {
    bool has_run = false;
    unsigned n_warps = (block->n_threads + 31) / 32;
    for (unsigned w = 0; w < n_warps; w++) {
        Warp& warp = worker.warps[is_reverse_order ? n_warps - 1 - w : w];
        while (warp.runnable) {
            has_run = true;
            current = &warp.threads[first_lane(warp.runnable)];
            emu_switch(&block->scheduler_stack_pointer, current->stack_pointer);
        }
    }
    return has_run;
}

void open_barrier(Block* block) {
    block->n_at_barrier = 0;
    block->epoch++;
    for (unsigned i = 0; i < block->n_threads; i++) {
        Thread& thread = worker.threads[i];
        if (thread.state != WAITS_BLOCK) continue;
        thread.state = RUNNABLE;
        thread.warp->runnable |= 1u << thread.lane;
    }
}

void check_red_zones() {
    for (const StaticShared& shared : worker.statics) {
        const char* end = worker.arena + shared.offset + shared.n_bytes;
        for (size_t i = 0; i < RED_ZONE_BYTES; i++)
            if (end[i] != (char)0xff)
                fail("a write beyond the end of shared array " + std::string(shared.site->name));
    }
}

std::string place(const Thread* thread, const Block& block) {
    char text[256];
    int n = snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u)", block.kernel->name,
                     block.idx.x, block.idx.y, block.idx.z);
    if (thread)
        snprintf(text + n, sizeof text - n, ", thread (%u,%u,%u)", thread->idx.x, thread->idx.y,
                 thread->idx.z);
    return text + std::string(": ");
}

struct sigaction previous_handlers[65];

void on_signal(int signal, siginfo_t* info, void* context) {
    if (is_in_kernel) {
        char text[96];
        const char* what = signal == SIGFPE ? "integer division by zero" : "illegal address";
        snprintf(text, sizeof text, "%s %p", what, info->si_addr);
        fault_text = text;
        siglongjmp(fault_exit, signal == SIGFPE ? 2 : 1);
    }
    struct sigaction& before = previous_handlers[signal];
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(signal);
    else
        sigaction(signal, &before, nullptr);  // The instruction faults again, and ends the process.
}

}  // namespace

void give_way() {
    Thread* self = current;
    if (unsigned lanes = self->warp->runnable) {
        Thread* next = &self->warp->threads[first_lane(lanes)];
        current = next;
        emu_switch(&self->stack_pointer, next->stack_pointer);
    } else {
        emu_switch(&self->stack_pointer, self->block->scheduler_stack_pointer);
    }
}

void fail(const std::string& reason) {
    fault_text = reason;
    siglongjmp(fault_exit, 2);
}

void barrier(const char* file, int line) {
    Thread* self = current;
    Block* block = self->block;
    if (block->n_at_barrier == 0) {
        block->barrier_file = file;
        block->barrier_line = line;
    } else if (block->barrier_line != line || block->barrier_file != file) {
        fail("divergent barrier: others of the block wait at another __syncthreads, line " +
             std::to_string(block->barrier_line) + ", this one at line " + std::to_string(line));
    }
    block->n_at_barrier++;
    self->state = WAITS_BLOCK;
    self->warp->runnable &= ~(1u << self->lane);
    give_way();
}

Meeting* other_meeting(Warp* warp, unsigned mask) {
    for (unsigned i = 1; i < warp->n_meetings; i++)
        if (warp->meetings[i].mask == mask) return &warp->meetings[i];
    unsigned i = warp->n_meetings;
    if (i < 33) {
        warp->n_meetings++;
        warp->meetings[i].phase = 0;
    } else {  // Taken over from a mask that nobody is on the way to.
        for (i = 1; i < 33 && warp->meetings[i].arrived;) i++;
        if (i == 33) fail("warp operation: more masks at once than lanes");
    }
    Meeting* meeting = &warp->meetings[i];
    meeting->mask = mask;
    meeting->arrived = 0;
    return meeting;
}

void* static_shared(const SharedSite* site, size_t n_bytes) {
    for (const StaticShared& shared : worker.statics)
        if (shared.site == site) return worker.arena + shared.offset;
    size_t offset = 0;
    if (!worker.statics.empty()) {
        const StaticShared& last = worker.statics.back();
        offset = (last.offset + last.n_bytes + RED_ZONE_BYTES + 127) / 128 * 128;
    }
    worker.n_static_bytes += n_bytes;
    if (worker.n_static_bytes > STATIC_SHARED_MAX)
        fail("static shared memory of more than 48 KiB");
    memset(worker.arena + offset, 0xff, n_bytes + RED_ZONE_BYTES);
    worker.statics.push_back({site, offset, n_bytes});
    return worker.arena + offset;
}

bool is_shared(const void* address, size_t n_bytes) {
    const char* at = (const char*)address;
    return at >= worker.arena && at + n_bytes <= worker.arena + ARENA_BYTES;
}

void cp_async(void* to, const void* from, unsigned n_bytes, bool is_there) {
    if ((uintptr_t)to % n_bytes || (is_there && (uintptr_t)from % n_bytes))
        fail("cp.async: an address is not aligned to the " + std::to_string(n_bytes) + " bytes");
    if (!is_shared(to, n_bytes)) fail("cp.async: the destination is not shared memory");
    if (is_there) {  // An address out of bounds faults here, where it is given.
        (void)*(const volatile char*)from;
        (void)*((const volatile char*)from + n_bytes - 1);
    }
    memset(to, 0xff, n_bytes);  // Undefined until the wait.
    note_access(to, n_bytes, true);
    Thread* self = current;
    self->copies.push_back({to, from, n_bytes, is_there, self->n_committed});
}

void cp_async_commit() { current->n_committed++; }

void cp_async_wait(unsigned n_newest) {
    Thread* self = current;
    unsigned kept = 0;
    for (const PendingCopy& copy : self->copies) {
        if (copy.group + n_newest >= self->n_committed) {
            self->copies[kept++] = copy;
            continue;
        }
        if (copy.is_there)
            memcpy(copy.to, copy.from, copy.n_bytes);
        else
            memset(copy.to, 0, copy.n_bytes);
        note_access(copy.to, copy.n_bytes, true);
    }
    self->copies.resize(kept);
}

void mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2]) {
    struct Fragments {
        float* d;
        const unsigned *a, *b;
    } mine{d, a, b};
    unsigned present;
    meet(MMA, ~0u, (uint64_t)&mine, present, [](unsigned lanes, const uint64_t* values) {
        if (lanes != ~0u) fail("a matrix operation of a warp of which lanes have ended");
        alignas(32) uint16_t raw_a[16][16], raw_b[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const Fragments& f = *(const Fragments*)values[lane];
            int g = lane >> 2, c = (lane & 3) * 2;
            memcpy(&raw_a[g][c], &f.a[0], 4);
            memcpy(&raw_a[g + 8][c], &f.a[1], 4);
            memcpy(&raw_a[g][c + 8], &f.a[2], 4);
            memcpy(&raw_a[g + 8][c + 8], &f.a[3], 4);
            for (int k = 0; k < 2; k++) {
                raw_b[c + 8 * k][g] = (uint16_t)f.b[k];
                raw_b[c + 8 * k + 1][g] = (uint16_t)(f.b[k] >> 16);
            }
        }
        __m256 columns[16];
        for (int k = 0; k < 16; k++)
            columns[k] = _mm256_cvtph_ps(_mm_load_si128((const __m128i*)raw_b[k]));
        for (int row = 0; row < 16; row++) {
            alignas(32) float of_a[16], sums[8];
            for (int half = 0; half < 2; half++)
                _mm256_store_ps(of_a + 8 * half, _mm256_cvtph_ps(_mm_load_si128(
                                                     (const __m128i*)&raw_a[row][8 * half])));
            int first = (row & 7) * 4, element = (row >> 3) * 2;
            for (int q = 0; q < 8; q++)
                sums[q] = ((const Fragments*)values[first + q / 2])->d[element + (q & 1)];
            __m256 sum = _mm256_load_ps(sums);
            for (int k = 0; k < 16; k++)
                sum = _mm256_fmadd_ps(_mm256_set1_ps(of_a[k]), columns[k], sum);
            _mm256_store_ps(sums, sum);
            for (int q = 0; q < 8; q++)
                ((const Fragments*)values[first + q / 2])->d[element + (q & 1)] = sums[q];
        }
    });
}

void ldmatrix_x4(unsigned r[4], const void* row, bool is_transposed) {
    if ((uintptr_t)row % 16) fail("ldmatrix: a row's address is not aligned to 16 bytes");
    if (!is_shared(row, 16)) fail("ldmatrix: a row is not in shared memory");
    note_access(row, 16, false);
    struct Access {
        unsigned* r;
        const void* row;
    } mine{r, row};
    unsigned present;
    auto complete = [is_transposed](unsigned lanes, const uint64_t* values) {
        if (lanes != ~0u) fail("a matrix operation of a warp of which lanes have ended");
        for (int m = 0; m < 4; m++) {
            uint16_t matrix[8][8];
            for (int i = 0; i < 8; i++)
                memcpy(matrix[i], ((const Access*)values[m * 8 + i])->row, 16);
            for (int lane = 0; lane < 32; lane++) {
                int g = lane >> 2, c = (lane & 3) * 2;
                unsigned low = is_transposed ? matrix[c][g] : matrix[g][c];
                unsigned high = is_transposed ? matrix[c + 1][g] : matrix[g][c + 1];
                ((const Access*)values[lane])->r[m] = low | high << 16;
            }
        }
    };
    meet(LOAD_MATRIX, ~0u, (uint64_t)&mine, present, complete);
}

Outcome run_block(const Kernel& kernel, void** arguments, dim3 grid, dim3 shape, uint3 idx,
                  size_t n_dynamic_bytes, bool is_reversed) {
    unsigned n_threads = shape.x * shape.y * shape.z;
    is_reverse_order = is_reversed;
    worker.reserve(n_threads);
    Block block{};
    block.idx = idx;
    block.shape = shape;
    block.grid = grid;
    block.n_threads = block.n_live = n_threads;
    block.kernel = &kernel;
    block.arguments = arguments;
    block.n_dynamic_bytes = n_dynamic_bytes;
    prepare_shared(&block);
    prepare_warps(n_threads);
    for (unsigned i = 0; i < n_threads; i++) {
        uint3 thread{i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
        prepare_thread(i, thread, &block);
    }
    current = nullptr;
    if (int kind = sigsetjmp(fault_exit, 0)) {
        is_in_kernel = false;
        fault_text = place(current, block) + fault_text;
        current = nullptr;
        return kind == 1 ? BAD_ADDRESS : BAD_LAUNCH;
    }
    is_in_kernel = true;
    while (block.n_live) {
        if (run_warps(&block)) continue;
        if (block.n_at_barrier == block.n_live) {
            open_barrier(&block);
            continue;
        }
        current = nullptr;
        fail("divergent barrier or mask: of " + std::to_string(block.n_live) + " live threads " +
             std::to_string(block.n_at_barrier) +
             " wait at __syncthreads and the others inside a warp operation");
    }
    current = nullptr;
    check_red_zones();
    is_in_kernel = false;
    return RAN;
}

const std::string& fault() { return fault_text; }

void install_fault_handlers() {
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE})
        sigaction(signal, &action, &previous_handlers[signal]);
}

static std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}

void add_kernel(Kernel kernel) { kernels().push_back(std::move(kernel)); }

const Kernel* find_kernel(const std::string& name) {
    for (const Kernel& kernel : kernels())
        if (name == kernel.name) return &kernel;
    return nullptr;
}

}  // namespace emu
