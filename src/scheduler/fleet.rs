//! The runtimes of an executor, each in a place where another may be put.
//!
//! Read by whoever has the driver's turn, by callers and by scrapes; a runtime is taken out and put in by
//! the thread that makes it anew (`recovery`), of which there is at most one per replica. Short locks, never
//! held across a call into a runtime. What is not here: whether a replica counts as live (`roster`).

use crate::runtime::{ReplicaFactory, RowCounts, Runtime, RuntimeStatus};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

struct Place {
    /// None while there is none.
    runtime: RwLock<Option<Arc<dyn Runtime>>>,
    /// What earlier runtimes of this place counted, so that sums never fall.
    counted: Mutex<RuntimeStatus>,
    n_restarts: AtomicU64,
    /// Why it was lost, or could not be made anew.
    last_error: Mutex<Option<String>>,
}

/// See the module doc.
pub(crate) struct Fleet {
    places: Vec<Place>,
    factory: Option<ReplicaFactory>,
    /// Threads that make runtimes anew, at most one per replica beside those that have ended.
    rebuilders: Mutex<Vec<JoinHandle<()>>>,
}

impl Fleet {
    pub(crate) fn new(runtimes: Vec<Arc<dyn Runtime>>, factory: Option<ReplicaFactory>) -> Self {
        let place = |runtime| Place {
            runtime: RwLock::new(Some(runtime)),
            counted: Mutex::default(),
            n_restarts: AtomicU64::new(0),
            last_error: Mutex::default(),
        };
        Self {
            places: runtimes.into_iter().map(place).collect(),
            factory,
            rebuilders: Mutex::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn factory(&self) -> Option<&ReplicaFactory> {
        self.factory.as_ref()
    }

    pub(crate) fn get(&self, replica: usize) -> Option<Arc<dyn Runtime>> {
        self.places[replica].runtime.read().clone()
    }

    /// All that are there.
    pub(crate) fn runtimes(&self) -> impl Iterator<Item = Arc<dyn Runtime>> + '_ {
        (0..self.len()).filter_map(|replica| self.get(replica))
    }

    /// Whether a runtime is there and works.
    pub(crate) fn is_alive(&self, replica: usize) -> bool {
        self.get(replica)
            .is_some_and(|runtime| runtime.status().alive)
    }

    /// Why a replica is dead, if its runtime says.
    pub(crate) fn death(&self, replica: usize) -> Option<String> {
        self.get(replica)?.death()
    }

    /// Takes a runtime out; what it counted is kept.
    pub(crate) fn take(&self, replica: usize) -> Option<Arc<dyn Runtime>> {
        let place = &self.places[replica];
        let runtime = place.runtime.write().take()?;
        let last = runtime.status();
        let mut counted = place.counted.lock();
        *counted = with_counts(last, &counted);
        Some(runtime)
    }

    pub(crate) fn put(&self, replica: usize, runtime: Arc<dyn Runtime>) {
        let place = &self.places[replica];
        *place.runtime.write() = Some(runtime);
        place.n_restarts.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn n_restarts(&self, replica: usize) -> u64 {
        self.places[replica].n_restarts.load(Ordering::Relaxed)
    }

    pub(crate) fn note_error(&self, replica: usize, error: String) {
        *self.places[replica].last_error.lock() = Some(error);
    }

    pub(crate) fn last_error(&self, replica: usize) -> Option<String> {
        self.places[replica].last_error.lock().clone()
    }

    /// What a replica does, with all that its earlier runtimes counted.
    pub(crate) fn status(&self, replica: usize) -> RuntimeStatus {
        let runtime = self.get(replica);
        let status = runtime.map(|runtime| runtime.status()).unwrap_or_default();
        with_counts(status, &self.places[replica].counted.lock())
    }

    /// Keeps the handle of a thread that makes a runtime anew.
    pub(crate) fn keep_rebuilder(&self, thread: JoinHandle<()>) {
        let mut rebuilders = self.rebuilders.lock();
        rebuilders.retain(|thread| !thread.is_finished());
        rebuilders.push(thread);
    }

    /// Waits until no thread makes a runtime any more.
    pub(crate) fn join_rebuilders(&self) {
        let threads = std::mem::take(&mut *self.rebuilders.lock());
        for thread in threads {
            let _ = thread.join(); // it catches panics of what it calls
        }
    }
}

/// A status with the counts of an earlier one added: whatever only rises.
fn with_counts(mut status: RuntimeStatus, earlier: &RuntimeStatus) -> RuntimeStatus {
    let (now, then) = (&status.row_counts, &earlier.row_counts);
    status.row_counts = RowCounts {
        buckets: std::array::from_fn(|index| now.buckets[index] + then.buckets[index]),
        n_rows: now.n_rows + then.n_rows,
    };
    status.preemptions += earlier.preemptions;
    status.prefix_queries += earlier.prefix_queries;
    status.prefix_hits += earlier.prefix_hits;
    status.loop_iterations += earlier.loop_iterations;
    status.loop_iterations_saved += earlier.loop_iterations_saved;
    status.quanta += earlier.quanta;
    status.time_in_steps += earlier.time_in_steps;
    status.time_in_passes += earlier.time_in_passes;
    status
}
