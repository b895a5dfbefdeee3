// What the driver calls of the scheduler.
#pragma once
#include "emu_core.h"

namespace emu {

enum Outcome { RAN, BAD_ADDRESS, BAD_LAUNCH };

// Runs one block on the calling OS thread. After an outcome other than RAN, `fault()` says what
// was wrong and where.
Outcome run_block(const Kernel& kernel, void** arguments, dim3 grid, dim3 shape, uint3 idx,
                  size_t n_dynamic_bytes, bool is_reversed);

// The last fault of the calling OS thread.
const std::string& fault();

// Routes faulting addresses inside kernels to the scheduler; others keep their handler.
void install_fault_handlers();

// Whether `address` lies in the shared memory of the running block.
bool is_shared(const void* address, size_t n_bytes);

// The race checker (race.cpp; empty in builds without it): a block begins; an access that the
// emulator makes for the running thread.
void begin_race_check(const void* shared, size_t n_bytes);
void note_access(const void* address, size_t n_bytes, bool is_write);

}  // namespace emu
