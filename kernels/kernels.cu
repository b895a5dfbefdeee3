// All kernels, one translation unit: kernels/build.py makes kernels.ptx of it, and the emulated
// driver (tests/fake_cuda/) compiles it for the host.
#include "common.cuh"
#include "ops.cuh"
#include "attend_prefill.cu"
#include "gemm.cu"
#include "select.cu"
