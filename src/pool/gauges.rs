//! Metrics of the pool: states, loads, evictions, bytes per device and kind, refusals.
//!
//! Filled in at scrape from the registry, except refusals, which are counted where they happen.
//! Labels are bounded: model names come from the configuration, the rest from enums. What is not
//! here: metrics of requests (`scheduler`).

use super::acquire::Unavailable;
use super::ledger::ModelMemory;
use super::state::RuntimeState;
use super::{DeviceId, Shared};
use crate::scheduler::{Metrics, Snapshot};
use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{GaugeVec, IntCounterVec, Opts, Registry};
use std::collections::{BTreeMap, BTreeSet};

/// The families.
pub(super) struct Gauges {
    state: GaugeVec,
    loads: IntCounterVec,
    evictions: IntCounterVec,
    refusals: IntCounterVec,
    memory: GaugeVec,
    memory_limit: GaugeVec,
    cache: GaugeVec,
    /// Models of the last scrape, so that those which are gone take their series with them; guards
    /// that the gauges are filled in by one scrape at a time.
    shown: Mutex<BTreeSet<String>>,
}

/// Several pools may share a registry in tests; then the first one's families are shown.
fn register<C: Collector + Clone + 'static>(
    registry: &Registry,
    family: prometheus::Result<C>,
) -> C {
    let family = family.expect("the name and labels are valid constants");
    let _ = registry.register(Box::new(family.clone()));
    family
}

impl Gauges {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            register(registry, GaugeVec::new(Opts::new(name, help), labels))
        };
        let counter = |name: &str, help: &str, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        #[rustfmt::skip]
        let gauges = Self {
            state: gauge("tinyloop_model_state", "1 for the state that the model is in.", &["model", "state"]),
            loads: counter("tinyloop_model_loads_total", "Loads by how they ended.", &["model", "outcome"]),
            evictions: counter("tinyloop_evictions_total", "Models unloaded to make room for another.", &["model"]),
            refusals: counter("tinyloop_model_refusals_total", "Requests refused because their model was not there.", &["model", "code"]),
            memory: gauge("tinyloop_memory_bytes", "Bytes that models hold or were promised, by device and kind; kv includes the prefix cache.", &["device", "kind"]),
            memory_limit: gauge("tinyloop_memory_limit_bytes", "Bytes that models may hold in all.", &["device"]),
            cache: gauge("tinyloop_cache_bytes", "Bytes of KV kept for reuse only; part of kv.", &["model"]),
            shown: Mutex::default(),
        };
        gauges
    }

    /// Counts a refusal. Names that nobody configured are one label.
    pub(super) fn refused(&self, why: &Unavailable) {
        let (model, code) = match why {
            Unavailable::Unknown(_) => ("", "model_not_found"),
            Unavailable::NotLoaded { model, .. } => (model.as_str(), "model_not_loaded"),
            Unavailable::Loading { model, .. } => (model.as_str(), "model_loading"),
            Unavailable::Unloading { model, .. } => (model.as_str(), "model_unloading"),
            Unavailable::Failed { model, .. } => (model.as_str(), "model_failed"),
            Unavailable::QueueFull { model, .. } => (model.as_str(), "queue_full"),
            Unavailable::ClientGone => ("", "client_closed_request"),
            Unavailable::ShuttingDown => ("", "shutting_down"),
        };
        self.refusals.with_label_values(&[model, code]).inc();
    }
}

impl Gauges {
    /// Takes out the series of models that are not configured any more, those of their executors too.
    /// Counters stay.
    fn forget<'a>(&self, gone: impl Iterator<Item = &'a String>, metrics: &Metrics) {
        for model in gone {
            for state in RuntimeState::ALL {
                // A series that is not there is gone already.
                let _ = self
                    .state
                    .remove_label_values(&[model.as_str(), state.name()]);
            }
            let _ = self.cache.remove_label_values(&[model.as_str()]);
            metrics.removed(model);
        }
    }
}

/// Bytes of the KV pages that are kept for reuse only.
pub(super) fn cache_bytes(memory: &ModelMemory, now: &Snapshot) -> u64 {
    let replicas = || now.replicas.iter().map(|replica| &replica.status);
    let total: u64 = replicas()
        .map(|status| u64::from(status.kv_pages_total))
        .sum();
    let cached: u64 = replicas()
        .map(|status| u64::from(status.kv_pages_cached))
        .sum();
    match total {
        0 => 0,
        total => (u128::from(memory.kv_bytes) * u128::from(cached) / u128::from(total)) as u64,
    }
}

impl Shared {
    /// Brings the gauges up to date.
    pub(super) fn refresh_gauges(&self) {
        let gauges = &self.gauges;
        let mut shown = gauges.shown.lock();
        let mut states = Vec::new();
        let mut by_kind: BTreeMap<(DeviceId, &'static str), u64> = BTreeMap::new();
        let (limits, counts, models) = {
            let registry = self.lock();
            for entry in registry.entries() {
                states.push((entry.config.name.clone(), entry.state.name()));
            }
            for &device in registry.limits().bytes.keys() {
                for (kind, _) in ModelMemory::default().kinds() {
                    by_kind.insert((device, kind), 0);
                }
            }
            for entry in registry.holders() {
                for (kind, bytes) in entry.memory.kinds() {
                    *by_kind.entry((entry.memory.device, kind)).or_default() += bytes;
                }
            }
            let limits = registry.limits().bytes.clone();
            (limits, registry.counts().clone(), registry.with_work())
        };
        for (model, state) in &states {
            for one in RuntimeState::ALL {
                let is_it = f64::from(u8::from(one == *state));
                let labels = [model.as_str(), one.name()];
                gauges.state.with_label_values(&labels).set(is_it);
            }
            let loaded = models.iter().find(|loaded| loaded.name == *model);
            if loaded.is_none() {
                self.metrics.down(model);
            }
            let bytes = loaded.map_or(0, |loaded| {
                cache_bytes(&loaded.meta.memory, &loaded.executor.snapshot())
            });
            gauges
                .cache
                .with_label_values(&[model.as_str()])
                .set(bytes as f64);
        }
        let now: BTreeSet<String> = states.into_iter().map(|(model, _)| model).collect();
        gauges.forget(shown.difference(&now), &self.metrics);
        *shown = now;
        for ((device, kind), bytes) in by_kind {
            let labels = [device.to_string(), kind.to_owned()];
            gauges.memory.with_label_values(&labels).set(bytes as f64);
        }
        for (device, bytes) in limits {
            let family = &gauges.memory_limit;
            family
                .with_label_values(&[device.to_string()])
                .set(bytes as f64);
        }
        for ((model, outcome), n) in &counts.loads {
            raise(&gauges.loads, &[model.as_str(), outcome], *n);
        }
        for (model, n) in &counts.evictions {
            raise(&gauges.evictions, &[model.as_str()], *n);
        }
    }
}

/// Brings a counter up to what was counted elsewhere.
fn raise(family: &IntCounterVec, labels: &[&str], to: u64) {
    let child = family.with_label_values(labels);
    child.inc_by(to.saturating_sub(child.get()));
}
