//! Persistent worker threads and the barrier between two regions of a step.
//!
//! A *region* is one call of [`Threads::run`]: units `0..n_units` are handed out in chunks through
//! one atomic counter to the calling thread and to whichever workers are awake. Which thread
//! computes a unit never changes its result (each unit has a fixed order of arithmetic), so work
//! flows to the cores that have time, and a worker that the kernel has descheduled holds up
//! nobody unless it holds a chunk.
//!
//! ```text
//! caller: publish job, open ─► take chunks ─► close ─► wait until joined == 0
//! worker: spin / yield / park ─► join (only while open) ─► take chunks ─► leave
//!
//! state (u64) = epoch:32 | open:1 | joined:31
//! ```
//!
//! A worker joins by compare-and-swap on the whole word, so it can only join the region whose
//! epoch it saw, and only while that region is open; the job cell is written only when no region
//! is open and nobody is joined. Workers spin a few microseconds, then yield the core a few times,
//! then park on a condition variable: an idle backend uses no CPU, and with more runnable threads
//! than cores the spinning ends early.
//!
//! Lost wake-ups: a worker counts itself in `sleepers` and then looks at the epoch; the caller
//! changes the epoch and then looks at `sleepers`; both with sequential consistency, so one of the
//! two sees the other. The same pair (`joined`, `caller_waits`) protects the caller's wait.
//!
//! What is not here: nesting (a task must not call `run`), priorities, pinning.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::backend::BackendError;

/// What a region runs: `(thread index, units)`.
pub(super) type Task<'a> = &'a (dyn Fn(usize, Range<usize>) + Sync);

const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
/// Spins before yielding: about 5 us at some 40 cycles a pause.
const N_SPINS: u32 = 300;
/// Yields before parking: some 20 us when the core has nothing else to run.
const N_YIELDS: u32 = 40;
/// Chunks per thread that a region is cut into when it has units enough.
const CHUNKS_PER_THREAD: usize = 8;

/// The worker threads. The caller of [`Threads::run`] works too, as thread 0.
pub(super) struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// `run` takes `&self` but must not be entered by two threads: not `Sync`.
    one_caller: PhantomData<Cell<()>>,
}

struct Job {
    /// Null before the first region. The lifetime is erased: see `run`.
    task: *const (dyn Fn(usize, Range<usize>) + Sync),
    n_units: usize,
    n_chunk_units: usize,
}

#[repr(align(128))]
struct OwnLine<T>(T);

struct Shared {
    state: OwnLine<AtomicU64>,
    next_unit: OwnLine<AtomicUsize>,
    job: UnsafeCell<Job>,
    sleepers: AtomicU32,
    caller_waits: AtomicBool,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// Protects nothing but the sleep itself: notifiers take it so that no wake-up falls between
    /// a sleeper's check and its wait.
    sleep: Mutex<()>,
    work: Condvar,
    done: Condvar,
}

// SAFETY: `job` is the only part that is not `Sync`; see the module doc for who touches it when.
unsafe impl Sync for Shared {}
// SAFETY: the raw task pointer is used only while its region lasts.
unsafe impl Send for Shared {}

fn epoch(state: u64) -> u32 {
    (state >> 32) as u32
}

fn nothing(_: usize, _: Range<usize>) {}

impl Threads {
    /// Starts `n_threads - 1` workers.
    pub(super) fn start(n_threads: usize) -> Result<Self, BackendError> {
        let idle: Task<'static> = &nothing;
        let shared = Arc::new(Shared {
            state: OwnLine(AtomicU64::new(0)),
            next_unit: OwnLine(AtomicUsize::new(0)),
            job: UnsafeCell::new(Job {
                task: idle,
                n_units: 0,
                n_chunk_units: 1,
            }),
            sleepers: AtomicU32::new(0),
            caller_waits: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            sleep: Mutex::new(()),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut threads = Threads {
            shared: Arc::clone(&shared),
            workers: Vec::new(),
            one_caller: PhantomData,
        };
        for thread_idx in 1..n_threads.max(1) {
            let shared = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("cpu-{thread_idx}"))
                .spawn(move || shared.work_until_stopped(thread_idx))
                .map_err(|error| {
                    BackendError::Device(format!(
                        "cannot start worker thread {thread_idx}: {error}"
                    ))
                })?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }

    /// Threads that work, the caller included.
    pub(super) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task` over all units and returns when every unit is done. Allocates nothing.
    ///
    /// # Panics
    /// When the task panicked on any thread (after all threads have left the region).
    pub(super) fn run(&self, n_units: usize, task: Task<'_>) {
        if n_units == 0 {
            return;
        }
        if self.workers.is_empty() || n_units == 1 {
            task(0, 0..n_units);
            return;
        }
        let n_chunk_units = (n_units / (self.n_threads() * CHUNKS_PER_THREAD)).max(1);
        self.shared.open(task, n_units, n_chunk_units);
        let region = Region(&self.shared);
        self.shared.take_chunks(0);
        drop(region);
        assert!(
            !self.shared.panicked.swap(false, Ordering::Relaxed),
            "a worker thread of the CPU backend panicked"
        );
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.sleep.lock();
            self.shared.work.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches panics of tasks, so this cannot be an error worth reporting.
            drop(worker.join());
        }
    }
}

/// Closes the region when dropped, also when the caller's own share panics: the task's captures
/// live on the caller's stack and must outlive every worker that joined.
struct Region<'a>(&'a Shared);

impl Drop for Region<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Shared {
    fn open(&self, task: Task<'_>, n_units: usize, n_chunk_units: usize) {
        // SAFETY: only the lifetime changes. `close` waits for every joined worker before `run`
        // returns or unwinds, and nobody can join afterwards.
        let task: Task<'static> = unsafe { std::mem::transmute(task) };
        // SAFETY: no region is open and nobody is joined, so no other thread looks at the cell.
        unsafe {
            *self.job.get() = Job {
                task,
                n_units,
                n_chunk_units,
            }
        };
        self.next_unit.0.store(0, Ordering::Relaxed);
        self.panicked.store(false, Ordering::Relaxed);
        let next_epoch = epoch(self.state.0.load(Ordering::Relaxed)).wrapping_add(1);
        self.state
            .0
            .store((u64::from(next_epoch) << 32) | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.sleep.lock();
            self.work.notify_all();
        }
    }

    fn take_chunks(&self, thread_idx: usize) {
        // SAFETY: called between `open` and `close` by the caller or by a joined worker; the cell
        // is not written in that time.
        let job = unsafe { &*self.job.get() };
        // SAFETY: the task outlives the region.
        let task = unsafe { &*job.task };
        loop {
            let start = self
                .next_unit
                .0
                .fetch_add(job.n_chunk_units, Ordering::Relaxed);
            if start >= job.n_units {
                return;
            }
            task(
                thread_idx,
                start..(start + job.n_chunk_units).min(job.n_units),
            );
        }
    }

    /// No more joining; waits for those who did.
    fn close(&self) {
        let before = self.state.0.fetch_and(!OPEN, Ordering::SeqCst);
        if before & JOINED == 0 {
            return;
        }
        let idle = || self.state.0.load(Ordering::SeqCst) & JOINED == 0;
        if spin_until(idle) {
            return;
        }
        self.caller_waits.store(true, Ordering::SeqCst);
        let mut guard = self.sleep.lock();
        while !idle() {
            self.done.wait(&mut guard);
        }
        drop(guard);
        self.caller_waits.store(false, Ordering::SeqCst);
    }

    fn work_until_stopped(&self, thread_idx: usize) {
        let mut seen = 0_u32;
        while !self.stop.load(Ordering::Relaxed) {
            let state = self.wait_for_change(seen);
            if epoch(state) == seen {
                continue;
            }
            seen = epoch(state);
            if self.join(seen) {
                if catch_unwind(AssertUnwindSafe(|| self.take_chunks(thread_idx))).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
                self.leave();
            }
        }
    }

    /// Returns a state whose epoch is not `seen`, or any state when the threads are to stop.
    fn wait_for_change(&self, seen: u32) -> u64 {
        let changed = || {
            epoch(self.state.0.load(Ordering::SeqCst)) != seen || self.stop.load(Ordering::SeqCst)
        };
        if !spin_until(changed) {
            let mut guard = self.sleep.lock();
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            while !changed() {
                self.work.wait(&mut guard);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        self.state.0.load(Ordering::SeqCst)
    }

    fn join(&self, seen: u32) -> bool {
        let mut state = self.state.0.load(Ordering::Acquire);
        while epoch(state) == seen && state & OPEN != 0 {
            match self.state.0.compare_exchange_weak(
                state,
                state + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    fn leave(&self) {
        let before = self.state.0.fetch_sub(1, Ordering::SeqCst);
        if before & JOINED == 1 && self.caller_waits.load(Ordering::SeqCst) {
            let _guard = self.sleep.lock();
            self.done.notify_all();
        }
    }
}

/// Spins, then yields; false when `condition` stayed false for the whole (bounded) time.
fn spin_until(condition: impl Fn() -> bool) -> bool {
    for _ in 0..N_SPINS {
        if condition() {
            return true;
        }
        std::hint::spin_loop();
    }
    for _ in 0..N_YIELDS {
        if condition() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_unit_runs_once_in_many_regions() {
        for n_threads in [1, 2, 5] {
            let threads = Threads::start(n_threads).expect("threads start");
            assert_eq!(threads.n_threads(), n_threads);
            for n_units in (0..200).chain([1000, 4097]) {
                let counts: Vec<AtomicU32> = (0..n_units).map(|_| AtomicU32::new(0)).collect();
                threads.run(n_units, &|thread_idx, units| {
                    assert!(thread_idx < n_threads);
                    for unit in units {
                        counts[unit].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn workers_come_back_after_parking() {
        let threads = Threads::start(3).expect("threads start");
        for _ in 0..20 {
            // Waits until both workers sleep, so that the next region has to wake them.
            while threads.shared.sleepers.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            let sum = AtomicU64::new(0);
            threads.run(64, &|_, units| {
                for unit in units {
                    sum.fetch_add(unit as u64, Ordering::Relaxed);
                }
            });
            assert_eq!(sum.into_inner(), 63 * 64 / 2);
        }
    }

    #[test]
    fn a_panicking_task_reaches_the_caller_and_the_pool_survives() {
        let threads = Threads::start(3).expect("threads start");
        for _ in 0..10 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                threads.run(100, &|_, units| assert!(!units.contains(&57), "planned"));
            }));
            assert!(outcome.is_err());
        }
        let sum = AtomicU64::new(0);
        threads.run(10, &|_, units| {
            sum.fetch_add(units.len() as u64, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 10);
    }
}
