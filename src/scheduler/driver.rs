//! The loop that moves requests: wait for one event, handle it, dispatch what fits.
//!
//! `dispatch` decides, `queue` keeps the books, this file tells the runtimes. A new policy is a case
//! of `dispatch::Move` and of `queue::Step`, not a branch in the loop.
//!
//! Runs on the executor's `driver-MODEL` thread (tests step it on their own thread instead). It is
//! the only place that hands jobs to runtimes and the only one that frees slots. There is no `?`
//! in it: every error becomes an ending that reaches a waiter.

use super::estimate::Sample;
use super::executor::Core;
use super::lifecycle::{Lifecycle, Stamp};
use super::queue::{Event, Running, Step};
use super::record::{Ending, Record};
use super::sink::Sink;
use crate::request::{Job, RequestError, RequestId};
use crate::runtime::Runtime;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// The body of the driver thread.
pub(crate) fn run(core: &Arc<Core>) {
    let fail_all = FailAllOnPanic(core);
    loop {
        match core.queue.next_event(&*core.clock) {
            Event::Stop => break,
            event => handle(core, event),
        }
        while dispatch_one(core) {}
    }
    drop(fail_all);
}

/// Handles what there is and returns: the loop of `run` for threads that must not wait.
pub(crate) fn run_pending(core: &Arc<Core>) {
    while let Some(event) = core.queue.try_event(&*core.clock) {
        handle(core, event);
        while dispatch_one(core) {}
    }
}

fn handle(core: &Arc<Core>, event: Event) {
    match event {
        Event::Submitted | Event::Stop => {}
        Event::Ended { number, ending } => ended(core, number, &ending),
        Event::Cancel { number, ending } => cancel_running(core, number, &ending),
        Event::Expired(record) => {
            core.settle(&record, &Ending::Cancelled(RequestError::QueueTimeout));
        }
    }
}

/// The slot first, the waiter then: who learns of the end sees a free slot.
fn ended(core: &Core, number: u64, ending: &Ending) {
    let now = core.stamp();
    let sample = |record: &Record| sample(&record.state(), ending, now);
    if let Some(record) = core.queue.release(number, sample, now.at) {
        core.settle(&record, ending);
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

/// The waiter learns it at once; the slot stays taken until the runtime says that it is free.
fn cancel_running(core: &Core, number: u64, ending: &Ending) {
    let Some(job) = core.queue.running(number) else {
        return; // it ended before
    };
    core.settle(&job.record, ending);
    tell(core, &job, "cancel", |runtime, id| runtime.cancel(id));
}

/// Does one thing with the slots. False when there is nothing to do: nothing waits, or nothing is
/// free and nobody gives way.
fn dispatch_one(core: &Arc<Core>) -> bool {
    match core.queue.next_step(&core.alive_replicas(), core.stamp()) {
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
        sink: Box::new(Sink::new(Arc::clone(core), Arc::clone(record))),
    };
    // A panic drops the job, and the sink's drop reports the fault.
    tell(core, job, "submit", |runtime, _| runtime.submit(submitted));
}

/// Calls the runtime of a job; a panic in there is logged and ends nothing here.
fn tell(core: &Core, job: &Running, what: &str, call: impl FnOnce(&dyn Runtime, RequestId)) {
    let runtime = &*core.replicas[job.replica].runtime;
    let id = job.record.request.id;
    if catch_unwind(AssertUnwindSafe(|| call(runtime, id))).is_err() {
        tracing::error!(model = %core.model, %id, "a runtime panicked in {what}");
    }
}

/// A bug in the loop itself must not leave waiters hanging.
struct FailAllOnPanic<'a>(&'a Core);

impl Drop for FailAllOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail_all("the scheduler's driver thread failed");
        }
    }
}
