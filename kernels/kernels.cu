// All kernels, one translation unit: kernels/build.py makes kernels.ptx of it, and the emulated
// driver (tests/fake_cuda/) compiles it for the host.
#include "common.cuh"
#include "ops.cuh"
#include "attend_prefill.cu"
#include "embed.cu"
#include "feed_forward.cu"
#include "gemm.cu"
#include "loops.cu"
#include "matvec.cu"
#include "norm.cu"
#include "qkv.cu"
#include "select.cu"
