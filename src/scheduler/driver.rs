//! The loop that moves requests: wait for one event, handle it, dispatch what fits.
//!
//! `dispatch` decides, `queue` keeps the books, this file tells the runtimes; `recovery` is what happens when
//! one of them dies. A new policy is a case
//! of `dispatch::Move` and of `queue::Step`, not a branch in the loop.
//!
//! One thread at a time has the *turn*, and with it the loop: the only place that hands jobs to
//! runtimes and the only one that frees slots. A caller that submits takes the turn if it gets it
//! at once or nearly so, which saves two changes of threads per request; all else is done by the
//! `driver-MODEL` thread: what comes while another has the turn, what runtimes report, deadlines.
//! (Tests step the loop on their own thread instead.) There is no `?` in it: every error becomes an
//! ending that reaches a waiter.
//!
//! ```text
//!   free ── submit: try_lock_for ─► a caller's turn ── nothing left, or EVENTS_PER_TURN ─► free
//!    └──── the driver's thread: something was posted ─► its turn ── nothing left ─────────┘
//! ```
//!
//! Nothing is missed: who leaves an event and does not get the turn wakes the driver's thread, and
//! that one waits for the turn.

use super::estimate::Sample;
use super::executor::Core;
use super::lifecycle::{Lifecycle, Stamp};
use super::queue::{Event, Running, Step};
use super::record::Ending;
use super::recovery;
use super::sink::Sink;
use crate::request::{Job, RequestId};
use crate::runtime::Runtime;
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Most events that a submitting caller handles, its own among them; it has a client to serve.
const EVENTS_PER_TURN: usize = 32;

/// How long a submitting caller waits for the turn: others hold it for microseconds, and getting it
/// is cheaper than being served by another thread and woken.
const TURN_WAIT: Duration = Duration::from_micros(200);

/// Who may run the loop.
pub(crate) struct Turn {
    /// Held by the thread that runs the loop.
    lock: Mutex<()>,
    /// Callers may take it; not in tests that say themselves when the loop runs.
    is_shared: AtomicBool,
}

thread_local! {
    /// Address of the executor whose turn this thread has; 0 = none.
    static TURN_OF: Cell<usize> = const { Cell::new(0) };
}

impl Turn {
    /// Free, and not for callers yet.
    pub(crate) fn new() -> Self {
        Self {
            lock: Mutex::new(()),
            is_shared: AtomicBool::new(false),
        }
    }

    /// Callers may take it from now on.
    pub(crate) fn share(&self) {
        self.is_shared.store(true, Ordering::Release);
    }

    /// Whether this thread has the turn and will look at the events again before it gives it back.
    pub(crate) fn is_own(&self) -> bool {
        TURN_OF.get() == self.address()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// Having the turn. A panic while somebody has it must not leave waiters hanging.
struct HasTurn<'a> {
    core: &'a Core,
    _guard: MutexGuard<'a, ()>,
}

impl<'a> HasTurn<'a> {
    fn new(core: &'a Core, guard: MutexGuard<'a, ()>) -> Self {
        TURN_OF.set(core.turn.address());
        Self {
            core,
            _guard: guard,
        }
    }
}

impl Drop for HasTurn<'_> {
    fn drop(&mut self) {
        TURN_OF.set(0);
        if std::thread::panicking() {
            self.core.fail_all("the scheduler's loop failed");
        }
    }
}

/// The body of the driver's thread.
pub(crate) fn run(core: &Arc<Core>) {
    while core.queue.wait_for_event(&*core.clock) {
        run_pending(core);
    }
}

/// Takes the turn when it is free and handles what there is; returns when nothing is left.
pub(crate) fn run_pending(core: &Arc<Core>) {
    let _turn = HasTurn::new(core, core.turn.lock.lock());
    while handle_one(core) {}
}

/// After a submit: gets it under way, here if the turn comes soon, else by waking the driver's thread.
pub(crate) fn submitted(core: &Arc<Core>) {
    let is_shared = core.turn.is_shared.load(Ordering::Acquire);
    if is_shared && let Some(guard) = core.turn.lock.try_lock_for(TURN_WAIT) {
        let _turn = HasTurn::new(core, guard);
        for _ in 0..EVENTS_PER_TURN {
            if !handle_one(core) {
                return;
            }
        }
    }
    core.queue.wake();
}

/// False when there is no event.
fn handle_one(core: &Arc<Core>) -> bool {
    let Some(event) = core.queue.try_event(&*core.clock) else {
        return false;
    };
    handle(core, event);
    while dispatch_one(core) {}
    true
}

fn handle(core: &Arc<Core>, event: Event) {
    match event {
        Event::Submitted => {}
        Event::Ended {
            number,
            attempt,
            ending,
        } => ended(core, number, attempt, &ending),
        Event::Cancel { number, ending } => cancel_running(core, number, &ending),
        Event::Expired(record) => {
            let error = record.waited_too_long(core.stamp().at);
            core.settle(&record, &Ending::Cancelled(error));
        }
        Event::Tick => recovery::tick(core),
        Event::Rebuilt { replica, result } => recovery::rebuilt(core, replica, result),
    }
}

/// The slot first, the waiter then: who learns of the end sees a free slot. A job that failed may run again
/// instead. What an earlier run of a job reports is nobody's business any more.
fn ended(core: &Core, number: u64, attempt: u32, ending: &Ending) {
    let Some(job) = core.queue.running(number, attempt) else {
        return;
    };
    if let Ending::Failed(error) = ending
        && recovery::failed(core, &job, error)
    {
        return;
    }
    let now = core.stamp();
    let sample = sample(&job.record.state(), ending, now);
    if core.queue.release(&job, sample, now.at) {
        core.settle(&job.record, ending);
    }
}

/// What a job that ended now says about the time that requests take. An answer that a stop string
/// completed is as good as any: its record is done, though its job was taken back.
fn sample(state: &Lifecycle, ending: &Ending, now: Stamp) -> Option<Sample> {
    let ended_well = matches!(
        (state, ending),
        (Lifecycle::Done(_), _) | (_, Ending::Done { .. })
    );
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let service = state.service_time_until(now.at).filter(|_| ended_well)?;
    let stamps = state.stamps();
    // A break before the first token says nothing about how long one takes.
    let first_token = stamps.first_token.filter(|_| stamps.n_preemptions == 0);
    let dispatched = stamps.dispatched?.at;
    Some(Sample {
        service_ms: ms(service),
        first_token_ms: first_token.map(|stamp| ms(stamp.at.duration_since(dispatched))),
    })
}

/// The waiter learns it at once; the slot stays taken until the runtime says that it is free. A job that
/// has gone back to the queue since somebody saw it run is taken out of there.
fn cancel_running(core: &Core, number: u64, ending: &Ending) {
    if let Some(job) = core.queue.running_now(number) {
        core.settle(&job.record, ending);
        tell(core, &job, "cancel", |runtime, id| runtime.cancel(id));
    } else if let Some(record) = core.queue.remove_number(number) {
        core.settle(&record, ending);
    }
}

/// Does one thing with the slots. False when there is nothing to do: nothing waits, or nothing is
/// free and nobody gives way.
fn dispatch_one(core: &Arc<Core>) -> bool {
    recovery::look_before_choosing(core);
    match core.queue.next_step(core.stamp()) {
        None => return false,
        Some(Step::Start(job)) => start(core, &job),
        Some(Step::Resume(job)) => tell(core, &job, "resume", |runtime, id| runtime.resume(id)),
        Some(Step::Park(job)) => tell(core, &job, "park", |runtime, id| runtime.park(id)),
    }
    true
}

fn start(core: &Arc<Core>, job: &Running) {
    let record = &job.record;
    core.metrics.dispatched(record.state().stamps());
    let submitted = Job {
        request: Arc::clone(&record.request),
        sink: Box::new(Sink::new(Arc::clone(core), job)),
    };
    // Where there is no runtime, and where it panics, the job is dropped, and its sink reports that.
    tell(core, job, "submit", |runtime, _| runtime.submit(submitted));
}

/// Calls the runtime of a job. One that panics is lost.
fn tell(core: &Core, job: &Running, what: &str, call: impl FnOnce(&dyn Runtime, RequestId)) {
    let Some(runtime) = core.fleet.get(job.replica) else {
        return;
    };
    let id = job.record.request.id;
    if catch_unwind(AssertUnwindSafe(|| call(&*runtime, id))).is_err() {
        recovery::lose(
            core,
            job.replica,
            &format!("its runtime panicked in {what}"),
        );
    }
}
