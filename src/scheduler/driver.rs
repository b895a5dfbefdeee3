//! The loop that moves requests: wait for one event, handle it, dispatch what fits.
//!
//! Runs on the executor's `driver-MODEL` thread (tests step it on their own thread instead). It is
//! the only place that hands jobs to runtimes and the only one that frees slots. There is no `?`
//! in it: every error becomes an ending that reaches a waiter.

use super::estimate::Sample;
use super::executor::Core;
use super::lifecycle::{Lifecycle, Stamp, Transition};
use super::queue::{Event, Running};
use super::record::{Ending, Record};
use super::sink::Sink;
use crate::request::{Job, RequestError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

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
    let stamps = state.stamps();
    let dispatched = stamps.dispatched.filter(|_| ended_well)?.at;
    let since_dispatch_ms = |at: Instant| at.duration_since(dispatched).as_secs_f64() * 1e3;
    Some(Sample {
        service_ms: since_dispatch_ms(now.at),
        first_token_ms: stamps.first_token.map(|stamp| since_dispatch_ms(stamp.at)),
    })
}

/// The waiter learns it at once; the slot stays taken until the runtime says that it is free.
fn cancel_running(core: &Core, number: u64, ending: &Ending) {
    let Some(Running { record, replica }) = core.queue.running(number) else {
        return; // it ended before
    };
    core.settle(&record, ending);
    let runtime = &core.replicas[replica].runtime;
    if catch_unwind(AssertUnwindSafe(|| runtime.cancel(record.request.id))).is_err() {
        tracing::error!(model = %core.model, id = %record.request.id, "a runtime panicked in cancel");
    }
}

/// Hands the next job to a replica. False when nothing waits or nothing is free.
fn dispatch_one(core: &Arc<Core>) -> bool {
    let alive = core.alive_replicas();
    let chosen = core
        .queue
        .take_for_dispatch(|inflight, last| core.choose_replica(&alive, inflight, last));
    let Some(Running { record, replica }) = chosen else {
        return false;
    };
    match record.advance(Transition::Dispatch, core.stamp()) {
        Ok(stamps) => core
            .metrics
            .dispatched(&stamps, core.slo_ms(&record.options)),
        Err(fault) => tracing::error!(model = %core.model, id = %record.request.id, %fault),
    }
    let job = Job {
        request: Arc::clone(&record.request),
        sink: Box::new(Sink::new(Arc::clone(core), Arc::clone(&record))),
    };
    let runtime = &core.replicas[replica].runtime;
    // A panic drops the job, and the sink's drop reports the fault.
    if catch_unwind(AssertUnwindSafe(|| runtime.submit(job))).is_err() {
        tracing::error!(model = %core.model, id = %record.request.id, "a runtime panicked in submit");
    }
    true
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
