//! The CUDA backend on the emulated driver: every operation against the scalar oracle, tiny models
//! against the CPU through engine and HTTP, and devices that fail. Each test has a device of its own.
//!
//! What the emulation cannot show stands in `tests/fake_cuda/README.md`.

#[path = "../common/cpu_paths.rs"]
#[allow(dead_code, reason = "the rig below knows the CPU's paths")]
mod cpu_paths;
#[path = "../engine/support.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine")]
mod engine_support;
#[path = "../common/fake_cuda.rs"]
mod fake_cuda;
#[path = "../kernels/support.rs"]
#[allow(dead_code, reason = "shared with the tests of the CPU's kernels")]
mod support;

mod blocks;
mod faults;
mod loops;
mod models;
mod server;

use fake_cuda::FakeCuda;
use tinyloop::backend::cuda::CudaBackend;

/// A backend on an emulated device that nobody else uses.
fn cuda(graphs: bool) -> CudaBackend {
    let device = FakeCuda::open().take_device();
    CudaBackend::open(device, graphs).expect("the emulated driver takes the kernels")
}
