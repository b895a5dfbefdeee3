//! An allocator that counts per thread, to find the most that a reader held.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts what the running thread holds, to find the most it held.
struct Counting;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    let live = LIVE_BYTES.get() + change;
    LIVE_BYTES.set(live);
    PEAK_BYTES.set(PEAK_BYTES.get().max(live));
}

// SAFETY: every call is handed to the system's allocator unchanged; the counters are plain
// thread-local cells that neither allocate nor have a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `run` held above what was held before.
pub(crate) fn peak_bytes(run: impl FnOnce()) -> isize {
    let before = LIVE_BYTES.get();
    PEAK_BYTES.set(before);
    run();
    PEAK_BYTES.get() - before
}
