//! Zeroed, aligned memory of fixed size, and the pointer through which threads share it.
//!
//! Owned by the engine thread (inside `CpuBackend`); worker threads see it through [`SharedMut`]
//! during a region only. Invariants: 64-byte aligned; never grows; large buffers are mapped, so
//! pages that nobody wrote cost no memory. Not a container: no push, no element types that need
//! dropping.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::backend::BackendError;

const ALIGN: usize = 64;
/// From this size on memory comes from `mmap`: lazily zeroed, given back at once when dropped.
const MAPPED_BYTES_MIN: usize = 1 << 20;

/// Types whose all-zero bytes are a valid value and that need no drop.
///
/// # Safety
/// Implementors must be plain data without padding-dependent meaning.
pub(super) unsafe trait Plain: Copy + 'static {}
// SAFETY: plain integers and floats.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// `len` values of `T`, zeroed at first.
pub(super) struct Buffer<T: Plain> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns plain data; nothing in it is tied to a thread.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: shared access gives `&[T]` only.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// A buffer of `len` zeros; `what` names it in the error.
    pub(super) fn zeroed(len: usize, what: &str) -> Result<Self, BackendError> {
        let refused = || BackendError::OutOfMemory {
            what: what.to_string(),
            bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
        };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(refused)?;
        let start = if bytes == 0 {
            NonNull::dangling()
        } else if bytes >= MAPPED_BYTES_MIN {
            map(bytes).ok_or_else(refused)?.cast()
        } else {
            let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| refused())?;
            // SAFETY: the layout has a non-zero size.
            NonNull::new(unsafe { alloc_zeroed(layout) })
                .ok_or_else(refused)?
                .cast()
        };
        Ok(Self { start, len })
    }

    /// Bytes held.
    pub(super) fn n_bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// Asks for huge pages: fewer address translations while streaming weights. Best effort.
    pub(super) fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.len * size_of::<T>() >= MAPPED_BYTES_MIN {
            // SAFETY: the range is a mapping that we own; the advice changes no content.
            unsafe {
                libc::madvise(
                    self.start.as_ptr().cast(),
                    self.len * size_of::<T>(),
                    libc::MADV_HUGEPAGE,
                );
            }
        }
    }

    /// The view through which threads write disjoint parts.
    pub(super) fn shared(&mut self) -> SharedMut<'_, T> {
        SharedMut {
            start: self.start.as_ptr(),
            len: self.len,
            owner: PhantomData,
        }
    }
}

fn map(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: an anonymous private mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        None
    } else {
        NonNull::new(address.cast())
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        if bytes == 0 {
            return;
        }
        if bytes >= MAPPED_BYTES_MIN {
            // SAFETY: mapped in `zeroed` with exactly this size.
            unsafe { libc::munmap(self.start.as_ptr().cast(), bytes) };
        } else {
            let layout = Layout::from_size_align(bytes, ALIGN).expect("was valid in `zeroed`");
            // SAFETY: allocated in `zeroed` with exactly this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialized values at `start`, owned by self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// A mutable slice that several threads hold at once and write in disjoint parts.
pub(super) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<'_, T> {}

// SAFETY: every access goes through the unsafe methods below, whose callers promise disjointness.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// A shared view of a slice.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        SharedMut {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            owner: PhantomData,
        }
    }

    /// The part `range` for writing.
    ///
    /// # Safety
    /// No other thread reads or writes any of `range` while the result lives.
    pub(super) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range outside the buffer"
        );
        // SAFETY: inside the buffer (asserted); disjoint (promised).
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start)
        }
    }

    /// The part `range` for reading.
    ///
    /// # Safety
    /// No thread writes any of `range` while the result lives.
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &'a [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range outside the buffer"
        );
        // SAFETY: inside the buffer (asserted); not written (promised).
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.end - range.start) }
    }

    /// Writes one element, for parts too scattered for a slice.
    ///
    /// # Safety
    /// No other thread reads or writes this element in the meantime.
    pub(super) unsafe fn write(&self, idx: usize, value: T) {
        assert!(idx < self.len, "index outside the buffer");
        // SAFETY: inside the buffer (asserted); exclusive (promised).
        unsafe { self.start.add(idx).write(value) };
    }

    /// One element for writing.
    ///
    /// # Safety
    /// As for [`SharedMut::slice`].
    pub(super) unsafe fn one(&self, idx: usize) -> &'a mut T {
        // SAFETY: passed on to the caller.
        unsafe { &mut self.slice(idx..idx + 1)[0] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_mapped_buffers_are_zero_and_aligned() {
        for len in [0, 1, 17, 300_000] {
            let mut buffer = Buffer::<f32>::zeroed(len, "test").expect("small enough");
            assert!(buffer.iter().all(|&value| value == 0.0));
            if len > 0 {
                assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
                buffer[len - 1] = 1.0;
            }
            assert_eq!(buffer.n_bytes(), len as u64 * 4);
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(matches!(
            Buffer::<f32>::zeroed(usize::MAX / 2, "pages"),
            Err(BackendError::OutOfMemory { what, .. }) if what == "pages"
        ));
    }
}
