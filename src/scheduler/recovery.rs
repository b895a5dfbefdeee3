//! What is done about replicas that die: their jobs go back or end, a thread makes them anew.
//!
//! ```text
//! noticed by: status().alive == false    a panic in a call    a job that failed on a dead replica
//!                        └────────────────────┼──────────────────────────┘
//!                                           lose ─► jobs requeued or ended (`health::fate`)
//!                                             │
//!                 tick: the attempt is due ─► thread `rebuild-MODEL-N` ─► Event::Rebuilt ─► in use
//! ```
//!
//! Everything but the rebuilding happens in the driver's turn. **A dead idle replica is noticed by looking**:
//! the driver's thread, which sleeps on the queue anyway, wakes twice a second and reads one flag per replica.
//! A callback from the runtime would notice sooner, but every runtime would have to call it right, on all its
//! ways to die, from threads that hold who knows what; and nobody is served sooner, because each choice between
//! replicas looks as well, and a dead runtime gives a job back at once.
//!
//! The thread that rebuilds ends the old runtime first, so that its memory and its child process are gone
//! before the new one needs theirs; then it asks the factory, asks the new runtime to keep the registered
//! prefixes, and puts it in place. It does not wait for the prefixes: a request that comes before one is there
//! computes it itself. There is one such thread per replica at most, because a replica is `Restarting` once.

use super::executor::Core;
use super::health::Setback;
use super::queue::{Back, Event, Running};
use super::record::Ending;
use crate::request::RequestError;
use crate::runtime::{Capability, ReplicaFactory, Runtime};
use crossbeam_channel::bounded;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Looks whether replicas are alive, before a choice between several.
pub(crate) fn look_before_choosing(core: &Core) {
    if core.fleet.len() > 1 {
        look(core);
    }
}

/// Looks whether replicas are alive. Not while the executor ends: its runtimes end then on purpose.
fn look(core: &Core) {
    if !core.queue.is_open() {
        return;
    }
    for replica in 0..core.fleet.len() {
        if !core.fleet.is_alive(replica) {
            let why = core.fleet.death(replica);
            let why = why
                .as_deref()
                .unwrap_or("its runtime died and gave no reason");
            lose(core, replica, why);
        }
    }
}

/// A replica is gone. Nothing happens when that is known.
pub(crate) fn lose(core: &Core, replica: usize, why: &str) {
    let Some(loss) = core.queue.lose(replica, core.clock.now()) else {
        return;
    };
    let (n_requeued, n_ended) = (loss.n_requeued, loss.ended.len());
    tracing::error!(model = %core.model, replica, why, n_requeued, n_ended, "a replica was lost");
    core.fleet.note_error(replica, why.to_owned());
    core.metrics.requeued(Setback::Lost, n_requeued);
    let ending = Ending::Failed(RequestError::ReplicaLost(why.to_owned()));
    for record in &loss.ended {
        core.settle(record, &ending);
    }
}

/// A job failed. True when that was dealt with: its replica is dead, or the job goes back to the queue.
pub(crate) fn failed(core: &Core, job: &Running, error: &RequestError) -> bool {
    if !core.fleet.is_alive(job.replica) {
        // The runtime knows best; what this one job heard of it may be less.
        let why = core.fleet.death(job.replica);
        let why = match (&why, error) {
            (Some(why), _) | (None, RequestError::ReplicaLost(why)) => why.as_str(),
            (None, _) => "its runtime died while it worked",
        };
        lose(core, job.replica, why);
    }
    let setback = match error {
        RequestError::ReplicaLost(_) => Setback::Lost,
        RequestError::Overloaded { .. } => Setback::Overloaded,
        _ => return core.queue.running(job.number(), job.attempt).is_none(),
    };
    let retry_after_ms = match error {
        RequestError::Overloaded { retry_after_ms } => *retry_after_ms,
        _ => None,
    };
    match core
        .queue
        .set_back(job, setback, retry_after_ms, core.clock.now())
    {
        Back::Requeued => {
            core.metrics.requeued(setback, 1);
            true
        }
        Back::Ends => false,
        Back::Gone => true,
    }
}

/// What is due by the time: attempts to restart replicas, requests that waited for one too long.
pub(crate) fn tick(core: &Arc<Core>) {
    look(core);
    let now = core.clock.now();
    let due = core.queue.due(now);
    for replica in due.restarts {
        rebuild(core, replica);
    }
    let ending = Ending::Cancelled(RequestError::NoReplica {
        retry_after_ms: u64::try_from(due.next_attempt.as_millis()).unwrap_or(u64::MAX),
    });
    for record in &due.waited_in_vain {
        core.settle(record, &ending);
    }
}

/// The end of an attempt.
pub(crate) fn rebuilt(core: &Core, replica: usize, result: Result<Capability, String>) {
    match &result {
        Ok(capability) => {
            let max_inflight = capability.max_inflight;
            tracing::info!(model = %core.model, replica, max_inflight, "a replica is back");
            core.metrics.restarted();
        }
        Err(why) => {
            tracing::warn!(model = %core.model, replica, why, "a replica could not be restarted");
            core.fleet.note_error(replica, why.clone());
        }
    }
    core.queue.rebuilt(replica, result.ok(), core.clock.now());
}

fn rebuild(core: &Arc<Core>, replica: usize) {
    let Some(factory) = core.fleet.factory().cloned() else {
        return; // nothing is due without one
    };
    let its_core = Arc::clone(core);
    let spawned = std::thread::Builder::new()
        .name(format!("rebuild-{}-{replica}", core.model))
        .spawn(move || {
            let result = replace(&its_core, replica, &factory);
            its_core.queue.post(Event::Rebuilt { replica, result });
        });
    match spawned {
        Ok(thread) => core.fleet.keep_rebuilder(thread),
        Err(error) => rebuilt(core, replica, Err(format!("no thread: {error}"))),
    }
}

/// On its own thread: the old runtime ends, a new one takes its place.
fn replace(core: &Core, replica: usize, factory: &ReplicaFactory) -> Result<Capability, String> {
    if let Some(old) = core.fleet.take(replica) {
        let ended = catch_unwind(AssertUnwindSafe(|| old.shutdown()));
        if ended.is_err() {
            tracing::error!(model = %core.model, replica, "the lost runtime panicked as it ended");
        }
    }
    let made = catch_unwind(AssertUnwindSafe(|| factory(replica)));
    let runtime = made.unwrap_or_else(|_| Err("its factory panicked".to_owned()))?;
    let capability = runtime.capability();
    if !runtime.status().alive {
        runtime.shutdown();
        return Err("the new runtime was dead at once".to_owned());
    }
    // The list and the pins change together: who registers or removes a prefix now waits.
    let _change = core.prefix_pool.change();
    keep_prefixes(core, &*runtime);
    core.fleet.put(replica, runtime);
    Ok(capability)
}

fn keep_prefixes(core: &Core, runtime: &dyn Runtime) {
    for prefix in core.prefix_pool.kept_prefixes() {
        // Nobody waits for the answer: see the module doc.
        let (answer, _unread) = bounded(1);
        runtime.pin_prefix(prefix, answer);
    }
}
