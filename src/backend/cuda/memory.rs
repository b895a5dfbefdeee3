//! Device memory: buffers that know what they are for, and the errors of a driver in our terms.

use super::launch::Ptr;
use super::probe::error_name;
use crate::backend::BackendError;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DriverError, sys};
use std::sync::Arc;

/// A driver's error as the engine knows it.
pub(super) fn failed(what: &str, error: DriverError) -> BackendError {
    BackendError::Device(format!("{what}: {}", error_name(error)))
}

/// Bytes on the device, at one address for good.
pub(super) struct Buffer {
    slice: Option<CudaSlice<u8>>,
    pub(super) ptr: Ptr,
    pub(super) n_bytes: usize,
}

impl Buffer {
    /// No bytes: the null address.
    pub(super) fn none() -> Self {
        Self {
            slice: None,
            ptr: Ptr::NULL,
            n_bytes: 0,
        }
    }

    /// Undefined bytes; none at all where `n_bytes` is 0.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        what: &str,
        n_bytes: usize,
    ) -> Result<Self, BackendError> {
        if n_bytes == 0 {
            return Ok(Self::none());
        }
        // SAFETY: every byte is written by a copy or a kernel before a kernel reads it.
        let slice = unsafe { stream.alloc::<u8>(n_bytes) }
            .map_err(|error| refused(stream, what, n_bytes, error))?;
        let ptr = Ptr(slice.device_ptr(stream).0);
        Ok(Self {
            slice: Some(slice),
            ptr,
            n_bytes,
        })
    }

    /// A buffer that holds these bytes.
    pub(super) fn of(
        stream: &Arc<CudaStream>,
        what: &str,
        bytes: &[u8],
    ) -> Result<Self, BackendError> {
        let mut buffer = Self::new(stream, what, bytes.len())?;
        buffer.write(stream, bytes)?;
        Ok(buffer)
    }

    /// Replaces the first bytes. The host's copy may be dropped or changed at once: pageable memory
    /// is staged at the call.
    pub(super) fn write(
        &mut self,
        stream: &Arc<CudaStream>,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        assert!(bytes.len() <= self.n_bytes, "a buffer is too small");
        let Some(slice) = self.slice.as_mut().filter(|_| !bytes.is_empty()) else {
            return Ok(());
        };
        stream
            .memcpy_htod(bytes, &mut slice.slice_mut(..bytes.len()))
            .map_err(|error| failed("copy to the device", error))
    }

    /// Reads f32 from the start; waits for all work before.
    pub(super) fn read(
        &self,
        stream: &Arc<CudaStream>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let n_bytes = size_of_val(out);
        assert!(n_bytes <= self.n_bytes, "a buffer is too small");
        let Some(slice) = self.slice.as_ref().filter(|_| n_bytes > 0) else {
            return Ok(());
        };
        // SAFETY: any bytes are valid f32, and the slice has exactly this many.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), n_bytes) };
        stream
            .memcpy_dtoh(&slice.slice(..n_bytes), bytes)
            .and_then(|()| stream.synchronize())
            .map_err(|error| failed("copy from the device", error))
    }
}

/// Why an allocation failed, with what the device has.
fn refused(
    stream: &Arc<CudaStream>,
    what: &str,
    n_bytes: usize,
    error: DriverError,
) -> BackendError {
    if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return failed(&format!("allocation of {what}"), error);
    }
    let context = stream.context();
    let place = match context.mem_get_info() {
        Ok((free, total)) => format!(
            "{what} (cuda:{} has {free} of {total} bytes free)",
            context.ordinal()
        ),
        Err(_) => what.to_owned(),
    };
    BackendError::OutOfMemory {
        what: place,
        bytes: n_bytes as u64,
    }
}

/// The bytes of plain numbers.
pub(super) fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: callers pass i32, f32 and structs of them without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}
