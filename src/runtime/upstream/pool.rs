//! The jobs of one upstream server and the threads that wait for it.
//!
//! A bounded set of threads `upstream-NAME-I`, at most one per job that the server may be given at
//! once; one is made when a job comes and none is free, and stays until the end. `submit` puts a job
//! on a queue and never blocks; what bounds the queue is the executor, which hands a replica no more
//! than its capability, and that is the number of threads.
//!
//! ```text
//!   Open ── calls fail one after another, or the child died ──► Dead(why) ── stop ──► Stopped
//!     └──────────────────────────── stop ─────────────────────────────────────────────┘
//! ```
//!
//! Dead is for good: what waits and what runs ends with `ReplicaLost`, and so does what comes. Any
//! token resets the count of failures, so that a server which still streams to one job is not given
//! up because others fail. What is not here: one call (`call`), the child (`child`).

use super::call::{self, Cut, Server, Witness};
use super::verdict::Failure;
use crate::request::{GenerationEvent, Job, RequestError, RequestId};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Dead(String),
    Stopped,
}

struct State {
    phase: Phase,
    waiting: VecDeque<Job>,
    running: Vec<(RequestId, Arc<Cut>)>,
    /// Threads that wait for a job.
    n_idle: usize,
    /// Calls that failed since the last sign of life.
    n_failures: u32,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    name: String,
    server: Server,
    n_threads_max: usize,
    /// Guards all jobs; released before a sink is called.
    state: Mutex<State>,
    /// A job came, or the end.
    wake: Condvar,
}

/// See the module.
pub struct Upstream {
    shared: Arc<Shared>,
}

/// How many jobs there are, and whether more are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamStatus {
    /// False for good once it died or was stopped.
    pub alive: bool,
    /// Jobs with a thread.
    pub running: u32,
    /// Jobs without.
    pub waiting: u32,
}

/// Declares a server dead, from whoever learns it.
#[derive(Clone)]
pub struct DeathHandle(std::sync::Weak<Shared>);

impl DeathHandle {
    /// Ends all its jobs; it takes none any more.
    pub fn die(&self, why: &str) {
        if let Some(shared) = self.0.upgrade() {
            shared.end(Phase::Dead(why.to_owned()));
        }
    }
}

impl Upstream {
    /// No thread yet. `name` ends up in thread names.
    #[must_use]
    pub fn new(name: &str, server: Server, max_inflight: u32) -> Self {
        let state = State {
            phase: Phase::Open,
            waiting: VecDeque::new(),
            running: Vec::new(),
            n_idle: 0,
            n_failures: 0,
            threads: Vec::new(),
        };
        let shared = Shared {
            name: name.to_owned(),
            server,
            n_threads_max: max_inflight.max(1) as usize,
            state: Mutex::new(state),
            wake: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// For whoever watches the server.
    #[must_use]
    pub fn death_handle(&self) -> DeathHandle {
        DeathHandle(Arc::downgrade(&self.shared))
    }

    /// Takes a job. Never blocks.
    pub fn submit(&self, job: Job) {
        let refused = {
            let mut state = self.shared.state.lock();
            match &state.phase {
                Phase::Open => {
                    state.waiting.push_back(job);
                    self.shared.add_thread(&mut state)
                }
                Phase::Dead(why) => Some((job, RequestError::ReplicaLost(why.clone()))),
                Phase::Stopped => Some((job, RequestError::ShuttingDown)),
            }
        };
        self.shared.wake.notify_one();
        if let Some((mut job, error)) = refused {
            let _ = job.sink.emit(GenerationEvent::Failed(error)); // nobody may listen
        }
    }

    /// Ends a job. Never blocks; unknown ids are ignored.
    pub fn cancel(&self, id: RequestId) {
        let waiting = {
            let mut state = self.shared.state.lock();
            if let Some((_, cut)) = state.running.iter().find(|(running, _)| *running == id) {
                cut.cut(RequestError::Cancelled);
            }
            let index = state.waiting.iter().position(|job| job.request.id == id);
            index.and_then(|index| state.waiting.remove(index))
        };
        if let Some(mut job) = waiting {
            let cancelled = GenerationEvent::Failed(RequestError::Cancelled);
            let _ = job.sink.emit(cancelled); // nobody may listen
        }
    }

    /// What it does now.
    #[must_use]
    pub fn status(&self) -> UpstreamStatus {
        let state = self.shared.state.lock();
        UpstreamStatus {
            alive: state.phase == Phase::Open,
            running: state.running.len() as u32,
            waiting: state.waiting.len() as u32,
        }
    }

    /// Why it counts as gone.
    #[must_use]
    pub fn death(&self) -> Option<String> {
        match &self.shared.state.lock().phase {
            Phase::Dead(why) => Some(why.clone()),
            Phase::Open | Phase::Stopped => None,
        }
    }

    /// Ends all jobs and joins the threads. Idempotent.
    pub fn stop(&self) {
        self.shared.end(Phase::Stopped);
        let threads = std::mem::take(&mut self.shared.state.lock().threads);
        for thread in threads {
            let _ = thread.join(); // panics were caught inside
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// Makes a thread if there is work for one more. Gives the job back where there is none at all.
    fn add_thread(self: &Arc<Self>, state: &mut State) -> Option<(Job, RequestError)> {
        let n_threads = state.threads.len();
        if state.waiting.len() <= state.n_idle || n_threads >= self.n_threads_max {
            return None;
        }
        let shared = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name(format!("upstream-{}-{n_threads}", self.name))
            .spawn(move || shared.work());
        match spawned {
            Ok(thread) => {
                state.threads.push(thread);
                None
            }
            Err(_) if n_threads > 0 => None, // those that are there will take it
            Err(error) => {
                let why = format!("no thread for the call: {error}");
                let job = state.waiting.pop_back()?;
                Some((job, RequestError::Fault(why)))
            }
        }
    }

    /// The body of a thread.
    fn work(self: &Arc<Self>) {
        while let Some((job, cut)) = self.next() {
            let id = job.request.id;
            let run = || call::run(&self.server, &cut, &**self, job);
            // The sink reports a fault when it is dropped without an end.
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                tracing::error!(name = %self.name, %id, "a call to an upstream panicked");
            }
            let mut state = self.state.lock();
            state.running.retain(|(running, _)| *running != id);
        }
    }

    /// The next job; None at the end.
    fn next(&self) -> Option<(Job, Arc<Cut>)> {
        let mut state = self.state.lock();
        loop {
            if state.phase != Phase::Open {
                return None;
            }
            if let Some(job) = state.waiting.pop_front() {
                let cut = Arc::new(Cut::default());
                state.running.push((job.request.id, Arc::clone(&cut)));
                return Some((job, cut));
            }
            state.n_idle += 1;
            self.wake.wait(&mut state);
            state.n_idle -= 1;
        }
    }

    /// Leaves `Open`, or goes from dead to stopped; ends all jobs.
    fn end(&self, phase: Phase) {
        let (error, waiting, running) = {
            let mut state = self.state.lock();
            let error = match (&state.phase, &phase) {
                (_, Phase::Open) | (Phase::Stopped, _) | (Phase::Dead(_), Phase::Dead(_)) => return,
                (_, Phase::Dead(why)) => RequestError::ReplicaLost(why.clone()),
                (_, Phase::Stopped) => RequestError::ShuttingDown,
            };
            state.phase = phase;
            let running: Vec<_> = state
                .running
                .iter()
                .map(|(_, cut)| Arc::clone(cut))
                .collect();
            (error, std::mem::take(&mut state.waiting), running)
        };
        self.wake.notify_all();
        if let RequestError::ReplicaLost(why) = &error {
            // Not louder: the scheduler tells the loss of the replica with this reason.
            tracing::debug!(name = %self.name, %why, "an upstream counts as gone");
        }
        for cut in running {
            cut.cut(error.clone());
        }
        for mut job in waiting {
            let _ = job.sink.emit(GenerationEvent::Failed(error.clone())); // nobody may listen
        }
    }
}

impl Witness for Shared {
    fn alive(&self) {
        self.state.lock().n_failures = 0;
    }

    fn failed(&self, failure: &Failure) {
        let n_failures = {
            let mut state = self.state.lock();
            state.n_failures += 1;
            state.n_failures
        };
        if n_failures >= self.server.limits.failures_max {
            let host = self.server.client.host();
            let why = format!("{host} failed {n_failures} times in a row, the last time {failure}");
            self.end(Phase::Dead(why));
        }
    }
}
