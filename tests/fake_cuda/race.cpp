// The race checker: in builds with -fsanitize=thread the kernels report every access to memory, and
// this file (instead of a sanitizer library) looks at those to shared memory.
//
// Two accesses of different threads to one byte, one of them a write, must be ordered: by a
// __syncthreads between them, or, within a warp, by a __syncwarp. Shuffles and ballots order
// nothing. Each byte remembers its last write and its last reads by two different threads.
#include "scheduler.h"

namespace emu {

#ifndef EMU_RACE
void begin_race_check(const void*, size_t) {}
void note_access(const void*, size_t, bool) {}
#else
namespace {

struct Access {
    uint32_t block;  // Serial number of the block; accesses of earlier blocks do not count.
    uint32_t epoch, warp_epoch;
    uint16_t thread;
};
struct Shadow {
    Access write, reads[2];
};

thread_local const char* first_byte;
thread_local std::vector<Shadow> shadows;
thread_local uint32_t serial;

bool is_ordered(const Access& before, const Access& now) {
    if (before.block != now.block || before.thread == now.thread) return true;
    if (before.epoch != now.epoch) return true;
    return before.thread / 32 == now.thread / 32 && before.warp_epoch != now.warp_epoch;
}

[[noreturn]] void race(const char* what, const Access& before) {
    fail(std::string("race in shared memory: ") + what + " of thread " +
         std::to_string(before.thread) + " of the block, without a barrier between");
}

}  // namespace

void begin_race_check(const void* shared, size_t n_bytes) {
    first_byte = (const char*)shared;
    shadows.resize(n_bytes);
    serial++;
}

void note_access(const void* address, size_t n_bytes, bool is_write) {
    const char* at = (const char*)address;
    if (at < first_byte || at >= first_byte + shadows.size() || !current) return;
    Access now{serial, current->block->epoch, current->warp_epoch, current->number};
    for (Shadow* shadow = &shadows[at - first_byte]; n_bytes--; shadow++) {
        if (!is_ordered(shadow->write, now))
            race(is_write ? "a write after the write" : "a read after the write", shadow->write);
        if (is_write) {
            for (const Access& read : shadow->reads)
                if (!is_ordered(read, now)) race("a write after the read", read);
            shadow->write = now;
        } else {
            if (shadow->reads[0].thread != now.thread) shadow->reads[1] = shadow->reads[0];
            shadow->reads[0] = now;
        }
    }
}
#endif

}  // namespace emu

#ifdef EMU_RACE
#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define HOOKS(n)                                                                       \
    HOOK __tsan_read##n(void* at) { emu::note_access(at, n, false); }                  \
    HOOK __tsan_write##n(void* at) { emu::note_access(at, n, true); }                  \
    HOOK __tsan_unaligned_read##n(void* at) { emu::note_access(at, n, false); }        \
    HOOK __tsan_unaligned_write##n(void* at) { emu::note_access(at, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
HOOK __tsan_read_range(void* at, size_t n) { emu::note_access(at, n, false); }
HOOK __tsan_write_range(void* at, size_t n) { emu::note_access(at, n, true); }
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit(void*) {}
HOOK __tsan_vptr_update(void*, void*) {}
HOOK __tsan_vptr_read(void*) {}
extern "C" __attribute__((visibility("hidden"))) void* __tsan_memcpy(void* to, const void* from,
                                                                     size_t n) {
    emu::note_access(from, n, false);
    emu::note_access(to, n, true);
    return memcpy(to, from, n);
}
extern "C" __attribute__((visibility("hidden"))) void* __tsan_memset(void* to, int value, size_t n) {
    emu::note_access(to, n, true);
    return memset(to, value, n);
}
#endif
