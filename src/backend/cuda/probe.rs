//! Which GPUs there are and whether they can run the kernels, without a panic where there is none.
//!
//! cudarc panics where the driver's library or one of its functions is missing, so the library is
//! looked for first, and every question is asked behind that. What is not here: contexts that stay.

use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::panic::catch_unwind;

/// The least compute capability that the kernels run on: cp.async and mma.m16n8k16.
const CAPABILITY_MIN: (i32, i32) = (8, 0);
/// The least driver, as `cuDriverGetVersion` says it: CUDA 11.0, whose PTX is 7.0.
const DRIVER_MIN: i32 = 11_000;

/// A GPU that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Number for the driver, as in `cuda:0`.
    pub ordinal: usize,
    /// Its name; empty where even that cannot be asked.
    pub name: String,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Bytes that nobody holds now.
    pub free_bytes: u64,
    /// Like (8, 0).
    pub capability: (i32, i32),
    /// Why it cannot be used; None when it can.
    pub problem: Option<String>,
}

/// The name of an error code. Never asks the library for a text.
pub(super) fn error_name(error: DriverError) -> String {
    format!("{:?}", error.0)
}

/// The GPUs of this machine, or why there are none.
///
/// # Errors
/// A sentence: no driver, a driver that is too old, no device.
pub fn devices() -> Result<Vec<CudaDevice>, String> {
    // SAFETY: opens the library by name, as every later call would.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver library (libcuda.so) on this machine".to_owned());
    }
    // A driver without one of the functions makes cudarc panic; that is an unusable driver.
    catch_unwind(listed).unwrap_or_else(|_| Err("the CUDA driver lacks functions".to_owned()))
}

fn listed() -> Result<Vec<CudaDevice>, String> {
    let failed = |what: &str, error| format!("CUDA {what}: {}", error_name(error));
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => "the CUDA driver finds no GPU".to_owned(),
        _ => failed("does not start", error),
    })?;
    let mut version = 0;
    // SAFETY: the pointer is that of a live int.
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if answer != sys::CUresult::CUDA_SUCCESS || version < DRIVER_MIN {
        return Err(format!(
            "the CUDA driver is of version {}.{}, and 11.0 or later is needed",
            version / 1000,
            version % 1000 / 10
        ));
    }
    let n_devices =
        result::device::get_count().map_err(|error| failed("lists no device", error))?;
    Ok((0..n_devices.max(0) as usize).map(described).collect())
}

fn described(ordinal: usize) -> CudaDevice {
    let mut device = CudaDevice {
        ordinal,
        name: String::new(),
        total_bytes: 0,
        free_bytes: 0,
        capability: (0, 0),
        problem: None,
    };
    if let Err(error) = describe(&mut device) {
        device.problem = Some(format!("it cannot be opened: {}", error_name(error)));
    } else if device.capability < CAPABILITY_MIN {
        let (major, minor) = device.capability;
        device.problem = Some(format!(
            "compute capability {major}.{minor}, and 8.0 or later is needed (Ampere)"
        ));
    }
    device
}

fn describe(device: &mut CudaDevice) -> Result<(), DriverError> {
    let context = CudaContext::new(device.ordinal)?;
    device.name = context.name()?;
    device.capability = context.compute_capability()?;
    let (free, total) = context.mem_get_info()?;
    (device.free_bytes, device.total_bytes) = (free as u64, total as u64);
    Ok(())
}
