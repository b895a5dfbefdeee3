//! The models this server has, by the names that clients send: which of them are in memory, and how
//! they come and go.
//!
//! Read in this order: `state` (the machine of one model, with its diagram, and what a request gets
//! in each state), `ledger` (pure: bytes per device, who makes room), `registry` (all models; no lock
//! of its own), this file (the lock, the handle that others hold), `acquire` (a request looks for its
//! model and may wait for it), `workers` (the threads that load, unload and watch for idleness),
//! `loader` (from a configuration to an executor), `estimate` and `estimate_foreign` (bytes before a
//! load), `overrides` (what a load may change) with `sizes` (how much of it fits), `definition` (the configuration as shown), `model` and `report` (what others see), `gauges` (metrics).
//!
//! # Synchronization
//!
//! One mutex around the `registry::Registry`, held for look-ups and decisions only: never across a
//! call into an executor, a loader or a send. What a decision asks for is carried out after the lock
//! was let go, on threads named `load-MODEL` (at most `pool.load_threads` at once) and
//! `unload-MODEL` (at most one per loaded model). Every change of a state wakes everyone who waits
//! for one; who waits also looks again every `LOOK_AGAIN`, because a model that becomes idle, and
//! time itself, wake nobody.
//!
//! # Unloading
//!
//! New work is refused from the moment the state changes, queued work is cancelled with
//! `model_unloading`, running work may finish within the drain timeout. The model is `unloaded`, and
//! its bytes are free for others, only when its engine threads were joined and nobody holds the model
//! or a runtime of it any more. What is not here: HTTP, the scheduler.

mod acquire;
pub mod definition;
pub mod devices;
mod entry;
pub mod estimate;
pub mod estimate_foreign;
mod facts;
mod gauges;
pub mod ledger;
pub mod loader;
mod model;
pub mod overrides;
mod places;
mod registry;
mod reload;
mod report;
mod reports;
mod sizes;
pub mod state;
mod workers;

pub use acquire::{Patience, Unavailable};
pub use entry::PoolEntry;
pub use loader::{ModelLoader, SourceLoader};
pub use model::{
    EmbeddingMeta, LoadPhase, LoadProgress, LoadedModel, LoadingModel, LoopRange, ModelMeta,
    RuntimeWatch, WindowRange,
};
pub use overrides::{Estimate, LoadConstraints, LoadOverride};
pub use report::{
    DeviceReport, DeviceShare, LoadTicket, ModelReport, NameTaken, PoolError, ReloadReport,
};
pub use state::RuntimeState;

use crate::clock::{Clock, SystemClock};
use crate::config::{FakeConfig, ModelConfig, ModelSource, PoolConfig};
use crate::runtime::native::BackendKind;
use crate::scheduler::Metrics;
use entry::{Action, Activity, Entry, Limits};
use gauges::Gauges;
use ledger::{DeviceId, MemorySource, ModelMemory};
use overrides::{Known, OverrideError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use registry::Registry;
use state::{Leaving, State};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often somebody who waits looks again without having been woken.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long a shutdown waits for loads that it cancelled.
const CANCEL_GRACE: Duration = Duration::from_secs(2);
/// A refused load is tried so often before the refusal is told: a probe that holds a model for the
/// moment makes it look busy.
const LOAD_TRIES: u32 = 5;
/// Part of the available memory that is left to others when no limit is configured: 1/8, at least
/// 256 MiB.
const RESERVE_BYTES_MIN: u64 = 256 << 20;

/// What a pool is made of.
pub struct PoolParts {
    /// Where counts go.
    pub metrics: Arc<Metrics>,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Who makes models.
    pub loader: Arc<dyn ModelLoader>,
    /// Limits.
    pub config: PoolConfig,
}

/// What the pool's handle and its threads share.
struct Shared {
    metrics: Arc<Metrics>,
    gauges: Gauges,
    clock: Arc<dyn Clock>,
    loader: Arc<dyn ModelLoader>,
    config: PoolConfig,
    /// Guards all states; see the module.
    registry: Mutex<Registry>,
    /// A state changed, or the pool closed.
    changed: Condvar,
}

/// The registry, shared by everybody. Dropping it cancels loads and ends the watch for idleness.
pub struct Pool {
    shared: Arc<Shared>,
    /// The thread that unloads idle models, once there is one that asks for it; guards its start.
    reaper: Mutex<Option<workers::Reaper>>,
}

impl Pool {
    /// An empty pool with the usual loader and limits, whose executors report to `metrics`.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self::with_config(metrics, PoolConfig::default())
    }

    /// The same with limits.
    #[must_use]
    pub fn with_config(metrics: Arc<Metrics>, config: PoolConfig) -> Self {
        let loader = SourceLoader::new(BackendKind::Cpu, Arc::clone(&metrics));
        Self::with_parts(PoolParts {
            metrics,
            clock: Arc::new(SystemClock),
            loader: Arc::new(loader),
            config,
        })
    }

    /// An empty pool of these parts.
    #[must_use]
    pub fn with_parts(parts: PoolParts) -> Self {
        let PoolParts {
            metrics,
            clock,
            loader,
            config,
        } = parts;
        let cpu_bytes = config.cpu_bytes.unwrap_or_else(usable_bytes);
        let limits = Limits {
            bytes: BTreeMap::from([(DeviceId::Cpu, cpu_bytes)]),
            load_threads: config.load_threads.max(1),
            min_residency: config.min_residency,
            drain: config.drain_timeout,
        };
        let shared = Shared {
            gauges: Gauges::new(metrics.registry()),
            metrics,
            clock,
            loader,
            config,
            registry: Mutex::new(Registry::new(limits)),
            changed: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
            reaper: Mutex::new(None),
        }
    }

    /// The metrics of the process.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    /// Makes a model known; it is not loaded.
    ///
    /// # Errors
    /// Its name or an alias belongs to another one.
    pub fn add(&self, config: ModelConfig) -> Result<(), NameTaken> {
        let is_reaped = config.lifecycle.idle_unload.is_some();
        let now = self.shared.clock.now();
        self.learn_gpus(std::slice::from_ref(&config));
        self.shared.registry.lock().add(config, now)?;
        if is_reaped {
            self.watch_idleness();
        }
        Ok(())
    }

    /// Sets the limits of GPUs that models may run on, as far as they have none.
    fn learn_gpus(&self, configs: &[ModelConfig]) {
        let loader = &self.shared.loader;
        let found = configs.iter().flat_map(|config| loader.gpu_room(config));
        let found: Vec<(DeviceId, u64)> = found.collect();
        let mut registry = self.shared.registry.lock();
        for (device, free_bytes) in found {
            let limit_bytes = self.shared.config.cuda_bytes.unwrap_or(free_bytes);
            registry.limit_once(device, limit_bytes);
        }
    }

    /// Adds a model that was loaded elsewhere: in the place of its entry when that is not loaded,
    /// else as a new one. Unloaded, a new one becomes a stand-in.
    ///
    /// # Errors
    /// Its name or an alias belongs to another one.
    pub fn insert(&self, model: LoadedModel) -> Result<Arc<LoadedModel>, NameTaken> {
        let source = ModelSource::Fake(FakeConfig::default());
        let config = ModelConfig {
            aliases: model.aliases.clone(),
            ..ModelConfig::new(model.name.clone(), source)
        };
        let model = Arc::new(model);
        let now = self.shared.clock.now();
        let inserted = Arc::clone(&model);
        self.shared.registry.lock().insert(inserted, config, now)?;
        self.shared.changed.notify_all();
        Ok(model)
    }

    /// Begins to load a model and returns; loaded and loading ones stay as they are. Idle models may
    /// be unloaded to make room.
    ///
    /// # Errors
    /// See [`PoolError`]; nothing was changed. A load that fails later is the model's `last_error`.
    pub fn load(&self, id: &str, overrides: &LoadOverride) -> Result<LoadTicket, PoolError> {
        let mut tries = 1;
        loop {
            match self.shared.try_load(id, overrides) {
                Err(PoolError::NoRoom { room, .. }) if !room.is_hopeless && tries < LOAD_TRIES => {
                    tries += 1;
                    let mut registry = self.shared.registry.lock();
                    self.shared.changed.wait_for(&mut registry, LOOK_AGAIN);
                }
                answer => return answer,
            }
        }
    }

    /// Begins to unload a model and returns its state; an unloaded or unloading one stays as it is,
    /// a loading one is cancelled. None = the configured drain timeout.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn unload(&self, id: &str, drain: Option<Duration>) -> Result<RuntimeState, PoolError> {
        let drain = drain.unwrap_or(self.shared.config.drain_timeout);
        self.shared.unload(id, drain)
    }

    /// Waits until a model is neither loading nor unloading. None when there is no such model. The
    /// state may be any when the time is up.
    #[must_use]
    pub fn wait_settled(&self, id: &str, timeout: Duration) -> Option<RuntimeState> {
        let deadline = Instant::now() + timeout;
        let mut registry = self.shared.registry.lock();
        loop {
            let state = registry.find(id)?.state.name();
            if state.is_settled() || Instant::now() >= deadline {
                return Some(state);
            }
            self.shared.changed.wait_until(&mut registry, deadline);
        }
    }

    /// Lets every model that is enabled count as on its way, before [`Self::load_enabled`] gets to it:
    /// who asks meanwhile hears "loading". Returns their names.
    pub fn announce_enabled(&self) -> Vec<String> {
        let mut registry = self.shared.registry.lock();
        let enabled = registry.entries().iter();
        let enabled = enabled.filter(|entry| entry.config.lifecycle.enabled);
        let names: Vec<String> = enabled.map(|entry| entry.config.name.clone()).collect();
        for name in &names {
            if let Some(entry) = registry.find_mut(name) {
                entry.is_starting = matches!(entry.state, State::Unloaded | State::Loading(_));
            }
        }
        names
    }

    /// Begins to load every model that is enabled, in their order; those that do not fit have failed.
    pub fn load_enabled(&self) {
        let names = self.announce_enabled();
        for name in names {
            match self.load(&name, &LoadOverride::default()) {
                Ok(_) => {}
                Err(error) => {
                    let now = self.shared.clock.now();
                    let mut registry = self.shared.registry.lock();
                    registry.fail(&name, error.to_string(), now);
                    drop(registry);
                    self.shared.changed.notify_all();
                }
            }
        }
    }

    /// Whether models of the server's start are still on their way.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        let registry = self.shared.registry.lock();
        registry.entries().iter().any(|entry| entry.is_starting)
    }

    /// Waits until no model of the start is on its way any more; false when the time is up before.
    #[must_use]
    pub fn wait_started(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let is_over = |registry: &Registry| !registry.entries().iter().any(|one| one.is_starting);
        let mut registry = self.shared.registry.lock();
        while !is_over(&registry) {
            if self
                .shared
                .changed
                .wait_until(&mut registry, deadline)
                .timed_out()
            {
                return is_over(&registry);
            }
        }
        true
    }

    /// The loaded model that answers to a name or alias.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<Arc<LoadedModel>> {
        let registry = self.shared.registry.lock();
        registry.find(id).and_then(Entry::loaded).cloned()
    }

    /// What answers to a name or alias.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<PoolEntry> {
        self.shared.registry.lock().find(id).map(PoolEntry::from)
    }

    /// All configured models in their order.
    #[must_use]
    pub fn entries(&self) -> Vec<PoolEntry> {
        let registry = self.shared.registry.lock();
        registry.entries().iter().map(PoolEntry::from).collect()
    }

    /// All loaded models in that order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<LoadedModel>> {
        self.shared.registry.lock().loaded()
    }

    /// All loaded models, and those that finish their work before they go.
    #[must_use]
    pub fn with_work(&self) -> Vec<Arc<LoadedModel>> {
        self.shared.registry.lock().with_work()
    }

    /// Takes over a new list of models: adds, removes and changes those that are not loaded, and
    /// leaves the others alone.
    ///
    /// # Errors
    /// A new id belongs to a model that stays; nothing was changed.
    pub fn reload(&self, configs: Vec<ModelConfig>) -> Result<ReloadReport, NameTaken> {
        let is_reaped = |config: &ModelConfig| config.lifecycle.idle_unload.is_some();
        let needs_reaper = configs.iter().any(is_reaped);
        let now = self.shared.clock.now();
        self.learn_gpus(&configs);
        let report = self.shared.registry.lock().reload(configs, now)?;
        self.shared.changed.notify_all();
        if needs_reaper {
            self.watch_idleness();
        }
        Ok(report)
    }

    /// Prometheus exposition for all models, `extra_lines` first.
    #[must_use]
    pub fn metrics_text(&self, extra_lines: &str) -> String {
        for model in self.with_work() {
            model.executor.refresh_metrics();
        }
        self.shared.refresh_gauges();
        self.shared.metrics.render(extra_lines)
    }

    /// Takes no load any more, cancels those on their way, and shuts all executors down, at the same
    /// time, each with the whole `drain_timeout`. They stay listed and refuse with `shutting_down`.
    /// Idempotent. Cancelled loads get a moment to take down what they have started; models that are
    /// being unloaded are left to their own threads.
    pub fn shutdown(&self, drain_timeout: Duration) {
        let models = {
            let mut registry = self.shared.registry.lock();
            registry.close();
            registry.loaded()
        };
        self.shared.changed.notify_all();
        std::thread::scope(|scope| {
            for model in &models {
                model.runtimes.stop();
                let spawned = std::thread::Builder::new()
                    .name(format!("drain-{}", model.name))
                    .spawn_scoped(scope, || model.executor.shutdown(drain_timeout));
                if spawned.is_err() {
                    model.executor.shutdown(drain_timeout); // no thread: one after the other
                }
            }
        });
        let is_cancelled =
            |entry: &Entry| matches!(entry.state, State::Unloading(Leaving::Load(_)));
        let deadline = Instant::now() + CANCEL_GRACE;
        let mut registry = self.shared.registry.lock();
        while registry.entries().iter().any(is_cancelled) {
            if self
                .shared
                .changed
                .wait_until(&mut registry, deadline)
                .timed_out()
            {
                tracing::warn!("a load does not end; leaving it behind");
                break;
            }
        }
    }

    /// Unloads what has been idle for too long, as the thread that watches does now and then.
    pub fn reap(&self) {
        self.shared.reap();
    }

    fn watch_idleness(&self) {
        let mut reaper = self.reaper.lock();
        if reaper.is_none() {
            *reaper = workers::Reaper::start(&self.shared);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.registry.lock().close();
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// One try of [`Pool::load`].
    fn try_load(
        self: &Arc<Self>,
        id: &str,
        overrides: &LoadOverride,
    ) -> Result<LoadTicket, PoolError> {
        let config = {
            let registry = self.registry.lock();
            let entry = registry.find(id);
            let entry = entry.ok_or_else(|| PoolError::NotFound(id.to_owned()))?;
            entry.config.clone()
        };
        // The file is looked at without the lock.
        let config = match overrides.0.is_empty() {
            true => config,
            false => self.overridden(&config, overrides)?,
        };
        let estimate = self.estimate(&config);
        let activity = self.activity();
        let now = self.clock.now();
        let (ticket, actions) = {
            let mut registry = self.registry.lock();
            registry.ask_load(config, overrides.clone(), estimate, &activity, now)?
        };
        self.changed.notify_all();
        for model in &ticket.evicted {
            tracing::info!(%model, for_model = %ticket.model, "unloading to make room");
        }
        self.carry_out(actions);
        Ok(ticket)
    }

    /// The configuration with the overrides in it, which can be loaded as far as that shows before.
    fn overridden(
        &self,
        config: &ModelConfig,
        overrides: &LoadOverride,
    ) -> Result<ModelConfig, OverrideError> {
        let changed = overrides::apply(config, overrides, &self.known(config))?;
        match self.loader.fault(&changed) {
            // Nor could it be without them: then the load says why.
            Some(why) if self.loader.fault(config).is_none() => Err(OverrideError::Together {
                fields: overrides.0.keys().cloned().collect(),
                why,
            }),
            _ => Ok(changed),
        }
    }

    /// What the ranges of overrides depend on.
    fn known(&self, config: &ModelConfig) -> Known {
        let (estimate, measured) = self.estimates(config);
        let limit_bytes = self.registry.lock().limits().of(estimate.memory.device);
        Known::of(&estimate, measured, config.lifecycle.replicas, limit_bytes)
    }

    /// As measured when it was last loaded so, else as its file says.
    fn estimate(&self, config: &ModelConfig) -> Estimate {
        let (estimate, measured) = self.estimates(config);
        Estimate {
            memory: measured.unwrap_or(estimate.memory),
            ..estimate
        }
    }

    /// What its file says, which is looked at once, and what was measured when it was last loaded so.
    fn estimates(&self, config: &ModelConfig) -> (Estimate, Option<ModelMemory>) {
        let (measured, estimated) = {
            let registry = self.registry.lock();
            let entry = registry.find(&config.name);
            let measured = entry.and_then(|entry| entry.measured_for(config));
            (
                measured,
                entry.and_then(|entry| entry.estimated_for(config)),
            )
        };
        let estimate = estimated.unwrap_or_else(|| {
            let estimate = self.loader.estimate(config);
            if estimate.memory.source != MemorySource::Unavailable
                && let Some(entry) = self.registry.lock().find_mut(&config.name)
            {
                entry.keep_estimate(config, estimate);
            }
            estimate
        });
        (estimate, measured)
    }

    fn unload(self: &Arc<Self>, id: &str, drain: Duration) -> Result<RuntimeState, PoolError> {
        let (state, actions) = self.registry.lock().ask_unload(id, drain)?;
        self.changed.notify_all();
        self.carry_out(actions);
        Ok(state)
    }

    /// Which loaded models have work; asks their executors without the lock.
    fn activity(&self) -> Activity {
        let taken_at = self.clock.now();
        let models = self.registry.lock().loaded();
        let busy: HashMap<String, bool> = models
            .iter()
            .map(|model| (model.name.clone(), model.has_work()))
            .collect();
        Activity { taken_at, busy }
    }

    /// Unloads models that were idle for longer than they may.
    fn reap(self: &Arc<Self>) {
        let activity = self.activity();
        let now = self.clock.now();
        let due: Vec<String> = {
            let mut registry = self.registry.lock();
            registry.idle_models(&activity, now)
        };
        for name in due {
            tracing::info!(model = %name, "unloading: idle for longer than idle_unload_s");
            // It may be gone or busy again; then the unload drains it like any other.
            let _ = self.unload(&name, self.config.drain_timeout);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock()
    }

    fn carry_out(self: &Arc<Self>, actions: Vec<Action>) {
        for action in actions {
            workers::start(self, action);
        }
    }
}

/// Available memory now, less a reserve; without a way to know it, no limit.
fn usable_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    match kilobytes {
        Some(kilobytes) => {
            let available = kilobytes << 10;
            available.saturating_sub((available / 8).max(RESERVE_BYTES_MIN))
        }
        None => u64::MAX,
    }
}
