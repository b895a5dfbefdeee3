//! The threads that load, unload, and watch for idleness.
//!
//! A load or unload has a thread of its own for as long as it takes; the registry bounds how many
//! there are. Each ends by reporting to the registry, whatever happened: a panic of a loader is an
//! error of its load. What is not here: what loading is (`loader`), any decision (`registry`).

use super::entry::{Action, LoadJob};
use super::model::{LoadPhase, LoadedModel};
use super::{LOAD_TRIES, LOOK_AGAIN, Shared};
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often idleness is looked for.
const REAP_INTERVAL: Duration = Duration::from_millis(500);
/// An unload that waits for its memory for so long says so in the log, and goes on waiting.
const RELEASE_WARN: Duration = Duration::from_secs(10);

/// Begins what the registry asked for.
pub(super) fn start(shared: &Arc<Shared>, action: Action) {
    let name = match &action {
        Action::Load(job) => format!("load-{}", job.config.name),
        Action::Unload { model, .. } => format!("unload-{}", model.name),
    };
    let (for_thread, action) = (
        Arc::clone(shared),
        Arc::new(parking_lot::Mutex::new(Some(action))),
    );
    let in_thread = Arc::clone(&action);
    let spawned = std::thread::Builder::new().name(name).spawn(move || {
        let action = in_thread.lock().take();
        if let Some(action) = action {
            run(&for_thread, action);
        }
    });
    if let Err(error) = spawned {
        // Out of threads: late is better than never, and the state must settle.
        tracing::error!(%error, "no thread for a load or unload; doing it here");
        let action = action.lock().take();
        if let Some(action) = action {
            run(shared, action);
        }
    }
}

fn run(shared: &Arc<Shared>, action: Action) {
    match action {
        Action::Load(job) => load(shared, &job),
        Action::Unload { model, drain } => unload(shared, model, drain),
    }
}

fn load(shared: &Arc<Shared>, job: &LoadJob) {
    let started = Instant::now();
    let name = job.config.name.as_str();
    job.progress.enter(LoadPhase::Reading);
    let made = catch_unwind(AssertUnwindSafe(|| {
        shared.loader.load(&job.config, &job.progress)
    }));
    let made =
        made.unwrap_or_else(|panic| Err(format!("the loader panicked: {}", text_of(&*panic))));
    let made = made.and_then(|model| admitted(shared, job, model));
    match &made {
        Ok(model) => tracing::info!(
            model = name,
            file = %model.meta.file,
            replicas = job.config.lifecycle.replicas,
            context_length = model.context_length,
            seconds = (started.elapsed().as_secs_f64() * 1e3).round() / 1e3,
            "loaded"
        ),
        Err(_) if job.progress.is_cancelled() => tracing::info!(model = name, "load cancelled"),
        Err(why) => tracing::error!(model = name, %why, "the load failed"),
    }
    let actions = {
        let now = shared.clock.now();
        shared.lock().load_ended(job, made.map(Arc::new), now)
    };
    shared.changed.notify_all();
    shared.carry_out(actions);
}

/// The model where its measured bytes may stay; otherwise it is taken down here, and its bytes are back
/// when this returns.
fn admitted(
    shared: &Arc<Shared>,
    job: &LoadJob,
    model: LoadedModel,
) -> Result<LoadedModel, String> {
    let (memory, name) = (model.meta.memory, job.config.name.as_str());
    let mut tries = 1;
    let room = loop {
        let activity = shared.activity();
        let now = shared.clock.now();
        let admission = shared.lock().admit_measured(job, memory, &activity, now);
        match admission {
            Ok((evicted, actions)) => {
                for victim in &evicted {
                    tracing::warn!(
                        model = %victim, for_model = name, held_bytes = memory.total_bytes(),
                        promised_bytes = job.memory.total_bytes(),
                        "unloading: the new model holds more than it was estimated to need"
                    );
                }
                shared.changed.notify_all();
                shared.carry_out(actions);
                return Ok(model);
            }
            // As for a load: somebody may have held an idle model for a moment.
            Err(room) if !room.is_hopeless && tries < LOAD_TRIES => {
                tries += 1;
                shared.changed.wait_for(&mut shared.lock(), LOOK_AGAIN);
            }
            Err(room) => break room,
        }
    };
    take_down(shared, name, Arc::new(model), Duration::ZERO);
    Err(format!(
        "it was estimated to need {} bytes and holds more: {room}",
        job.memory.total_bytes()
    ))
}

fn unload(shared: &Arc<Shared>, model: Arc<LoadedModel>, drain: Duration) {
    let started = Instant::now();
    let name = model.name.clone();
    take_down(shared, &name, model, drain);
    let actions = {
        let now = shared.clock.now();
        shared.lock().released(&name, now)
    };
    shared.changed.notify_all();
    tracing::info!(
        model = %name,
        seconds = (started.elapsed().as_secs_f64() * 1e3).round() / 1e3,
        "unloaded"
    );
    shared.carry_out(actions);
}

/// Ends a model's work and its runtimes; its bytes are back when this returns, and no gauge shows any
/// more what they did last.
fn take_down(shared: &Shared, name: &str, model: Arc<LoadedModel>, drain: Duration) {
    model.runtimes.stop();
    if catch_unwind(AssertUnwindSafe(|| model.executor.unload(drain))).is_err() {
        tracing::error!(model = %name, "a panic while unloading; going on");
    }
    model.executor.refresh_metrics(); // for its counters
    wait_until_gone(name, model);
    // A scrape that was under way held the model, so that none brings its gauges back.
    shared.metrics.unloaded(name);
}

/// Waits until nobody holds the model or one of its runtimes: only then are its bytes back. Who may
/// still hold it are answers that are being written, whose time is limited by the wire layer.
fn wait_until_gone(name: &str, model: Arc<LoadedModel>) {
    let runtimes = model.runtimes.clone();
    let gone = Arc::downgrade(&model);
    drop(model);
    let started = Instant::now();
    let mut has_warned = false;
    let mut pause = Duration::from_micros(200);
    while gone.strong_count() > 0 || runtimes.n_left() > 0 {
        if !has_warned && started.elapsed() > RELEASE_WARN {
            has_warned = true;
            tracing::warn!(
                model = name,
                holders = gone.strong_count(),
                runtimes = runtimes.n_left(),
                "unloaded, but somebody still holds it; its memory counts until they let go"
            );
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_AGAIN);
    }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given")
}

/// The thread `pool-reaper`; dropping it ends and joins it.
pub(super) struct Reaper {
    /// Dropped first: that ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    /// None when there is no thread to be had; then nothing is unloaded for being idle.
    pub(super) fn start(shared: &Arc<Shared>) -> Option<Self> {
        let (stop, stopped) = bounded::<()>(0);
        let shared: Weak<Shared> = Arc::downgrade(shared);
        let spawned = std::thread::Builder::new()
            .name("pool-reaper".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(REAP_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    let Some(shared) = shared.upgrade() else {
                        return;
                    };
                    shared.reap();
                }
            });
        match spawned {
            Ok(thread) => Some(Self {
                stop: Some(stop),
                thread: Some(thread),
            }),
            Err(error) => {
                tracing::error!(%error, "no thread to watch for idle models");
                None
            }
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was already reported by the thread itself.
            let _ = thread.join();
        }
    }
}
