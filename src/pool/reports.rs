//! What the pool tells of its models and devices: the bodies behind [`Pool::reports`] and
//! [`Pool::devices`].
//!
//! Reads the registry under its lock, then asks executors without it. What is not here: the shapes
//! (`report`).

use super::entry::Entry;
use super::ledger::ModelMemory;
use super::model::LoadedModel;
use super::overrides::{self, Known};
use super::report::{DeviceReport, DeviceShare, ModelReport};
use super::state::{Leaving, RuntimeState, State};
use super::{LoadOverride, Pool, definition::definition};
use crate::config::ModelConfig;
use crate::scheduler::Snapshot;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// What the registry has of a model.
struct Row {
    config: ModelConfig,
    state: State,
    model: Option<Arc<LoadedModel>>,
    overrides: LoadOverride,
    memory: ModelMemory,
    last_used: Instant,
    n_waiting: usize,
}

impl Row {
    fn of(entry: &Entry) -> Self {
        let model = match &entry.state {
            State::Loaded(model) => Some(Arc::clone(model)),
            State::Unloading(Leaving::Model(model)) => model.upgrade(),
            State::Unloading(Leaving::Load(_))
            | State::Unloaded
            | State::Loading(_)
            | State::Failed(_) => None,
        };
        Self {
            config: entry.config.clone(),
            state: entry.state.clone(),
            model,
            overrides: entry.overrides.clone(),
            memory: entry.memory,
            last_used: entry.last_used,
            n_waiting: entry.n_waiting,
        }
    }
}

impl Pool {
    /// One row per configured model, in their order.
    #[must_use]
    pub fn reports(&self) -> Vec<ModelReport> {
        let rows: Vec<Row> = {
            let registry = self.shared.lock();
            registry.entries().iter().map(Row::of).collect()
        };
        rows.into_iter().map(|row| self.report_of(row)).collect()
    }

    /// The row of the model that answers to an id.
    #[must_use]
    pub fn report(&self, id: &str) -> Option<ModelReport> {
        let row = self.shared.lock().find(id).map(Row::of)?;
        Some(self.report_of(row))
    }

    fn report_of(&self, row: Row) -> ModelReport {
        let state = row.state.name();
        let snapshot = row.model.as_ref().map(|model| model.executor.snapshot());
        let snapshot = snapshot.as_ref();
        let lifecycle = &row.config.lifecycle;
        // With the overrides of the running load; they were checked when it was taken.
        let effective = overrides::apply(&row.config, &row.overrides, &Known::default());
        let effective = effective.unwrap_or_else(|_| row.config.clone());
        let memory = match (state, row.memory.total_bytes()) {
            (RuntimeState::Unloaded | RuntimeState::Failed, _) => {
                self.shared.estimate(&row.config).memory
            }
            (RuntimeState::Loading | RuntimeState::Loaded | RuntimeState::Unloading, _) => {
                row.memory
            }
        };
        let backend = row.model.as_ref().map(|model| model.meta.backend.clone());
        let kind = row.config.source.backend().to_owned();
        let is_loaded = state == RuntimeState::Loaded;
        let n_alive = |snapshot: &Snapshot| {
            let alive = snapshot.replicas.iter().filter(|one| one.status.alive);
            alive.count() as u32
        };
        let queue_depth = snapshot.map_or(0, |now| now.queue_depth);
        let runtime_inflight = snapshot.map_or(0, |now| now.in_flight);
        let preempted = snapshot.map_or(0, |now| now.n_preempted);
        ModelReport {
            resolved_backend: backend.filter(|text| !text.is_empty()).unwrap_or(kind),
            kind: row.model.as_ref().map(|model| model.meta.kind()),
            configured_enabled: lifecycle.enabled,
            runtime_state: state,
            is_loaded,
            replicas: effective.lifecycle.replicas,
            replica_max: lifecycle.replica_max,
            loaded_replicas: snapshot.filter(|_| is_loaded).map_or(0, n_alive),
            inflight_requests: queue_depth + preempted + runtime_inflight as usize,
            queue_depth,
            runtime_inflight,
            waiting_for_load: row.n_waiting,
            configured_target_inflight: effective.executor.target_inflight,
            capability_inflight: snapshot.and_then(Snapshot::capability_per_replica),
            effective_target_inflight: snapshot.map_or(0, Snapshot::target_per_replica),
            total_target_inflight: snapshot.map_or(0, |now| now.effective_target_inflight),
            replica_states: snapshot.map_or_else(Vec::new, |now| now.replicas.clone()),
            accepting_new_requests: is_loaded && snapshot.is_some_and(|now| now.accepting),
            last_error: match &row.state {
                State::Failed(why) => Some(why.to_string()),
                State::Loaded(_) => snapshot.and_then(replica_error),
                State::Unloaded | State::Loading(_) | State::Unloading(_) => None,
            },
            load_progress: match &row.state {
                State::Loading(load) => Some(load.progress()),
                State::Unloaded | State::Failed(_) | State::Loaded(_) | State::Unloading(_) => None,
            },
            load_constraints: overrides::constraints(&row.config, &self.shared.known(&row.config)),
            definition: definition(&row.config),
            pinned: lifecycle.pinned,
            load_on_demand: lifecycle.load_on_demand,
            idle_unload: lifecycle.idle_unload,
            idle_for: is_loaded.then(|| {
                let now = self.shared.clock.now();
                now.saturating_duration_since(row.last_used)
            }),
            cache_bytes: snapshot.map_or(0, |now| super::gauges::cache_bytes(&memory, now)),
            memory,
            load_override: row.overrides,
            name: row.config.name,
            aliases: row.config.aliases,
        }
    }

    /// The ledger, device by device.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceReport> {
        let registry = self.shared.lock();
        let with_limit = registry.limits().bytes.keys().copied();
        let held = registry.holders().map(|entry| entry.memory.device);
        let devices: BTreeSet<_> = with_limit.chain(held).collect();
        devices
            .into_iter()
            .map(|device| DeviceReport {
                device,
                limit_bytes: registry.limits().of(device),
                used_bytes: registry.used_bytes(device),
                models: registry
                    .holders()
                    .filter(|entry| entry.memory.device == device)
                    .map(|entry| DeviceShare {
                        model: entry.config.name.clone(),
                        state: entry.state.name(),
                        memory: entry.memory,
                    })
                    .collect(),
            })
            .collect()
    }
}

/// Why a replica that does not work was lost, or could not be made anew.
fn replica_error(snapshot: &Snapshot) -> Option<String> {
    let mut replicas = snapshot.replicas.iter();
    replicas
        .find(|one| !one.health.is_live())?
        .last_error
        .clone()
}
