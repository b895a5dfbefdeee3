//! What the registry keeps of one model, and the words it exchanges with the rest of the pool.
//!
//! Plain data. What is not here: anything that changes it (`registry`).

use super::ledger::{DeviceId, ModelMemory};
use super::model::{LoadedModel, LoadingModel};
use super::overrides::{Estimate, LoadOverride};
use super::state::State;
use crate::config::ModelConfig;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Estimates kept per model.
const N_ESTIMATES: usize = 4;

/// What has to be done outside of the lock.
#[derive(Debug)]
pub(super) enum Action {
    /// Run this load on a thread of its own.
    Load(Arc<LoadJob>),
    /// Drain this model, take it down, report `released`.
    Unload {
        model: Arc<LoadedModel>,
        drain: Duration,
    },
}

/// A load that was taken.
#[derive(Debug)]
pub(super) struct LoadJob {
    /// With the overrides in it.
    pub(super) config: ModelConfig,
    pub(super) progress: Arc<LoadingModel>,
    /// What it was promised.
    pub(super) memory: ModelMemory,
}

/// One configured model.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) config: ModelConfig,
    pub(super) state: State,
    /// Of the running load; empty otherwise.
    pub(super) overrides: LoadOverride,
    /// Promised, then measured; of the last load once it is over. Counts while `holds`.
    pub(super) memory: ModelMemory,
    /// What was measured the last time, and for which configuration.
    pub(super) measured: Option<(ModelConfig, ModelMemory)>,
    /// What its file was estimated to need, and for which configurations: its own and the latest with
    /// overrides, at most [`N_ESTIMATES`].
    estimated: VecDeque<(ModelConfig, Estimate)>,
    /// When it was loaded; of no meaning before.
    pub(super) loaded_at: Instant,
    /// The last request that asked for it, or the last time it was seen with work.
    pub(super) last_used: Instant,
    /// When the last load failed.
    pub(super) failed_at: Option<Instant>,
    /// Requests that wait for its load.
    pub(super) n_waiting: usize,
    /// Part of the server's start, and not settled yet.
    pub(super) is_starting: bool,
}

impl Entry {
    pub(super) fn new(config: ModelConfig, now: Instant) -> Self {
        Self {
            config,
            state: State::Unloaded,
            overrides: LoadOverride::default(),
            memory: ModelMemory::default(),
            measured: None,
            estimated: VecDeque::new(),
            loaded_at: now,
            last_used: now,
            failed_at: None,
            n_waiting: 0,
            is_starting: false,
        }
    }

    pub(super) fn answers_to(&self, id: &str) -> bool {
        let config = &self.config;
        config.name == id || config.aliases.iter().any(|alias| alias == id)
    }

    /// Whether its bytes count.
    pub(super) fn holds(&self) -> bool {
        !matches!(self.state, State::Unloaded | State::Failed(_))
    }

    pub(super) fn loaded(&self) -> Option<&Arc<LoadedModel>> {
        match &self.state {
            State::Loaded(model) => Some(model),
            State::Unloaded | State::Loading(_) | State::Unloading(_) | State::Failed(_) => None,
        }
    }

    /// What this very configuration was estimated to need.
    pub(super) fn estimated_for(&self, config: &ModelConfig) -> Option<Estimate> {
        let known = self.estimated.iter().find(|known| known.0 == *config);
        known.map(|(_, estimate)| *estimate)
    }

    /// Remembers it.
    pub(super) fn keep_estimate(&mut self, config: &ModelConfig, estimate: Estimate) {
        if self.estimated_for(config).is_some() {
            return;
        }
        if self.estimated.len() == N_ESTIMATES {
            self.estimated.pop_front();
        }
        self.estimated.push_back((config.clone(), estimate));
    }

    /// What was measured for this very configuration.
    pub(super) fn measured_for(&self, config: &ModelConfig) -> Option<ModelMemory> {
        let (of, memory) = self.measured.as_ref()?;
        (of == config).then_some(*memory)
    }
}

/// A configured model at one moment, as everybody may see it.
#[derive(Clone, Debug)]
pub struct PoolEntry {
    /// The id that clients send.
    pub name: String,
    /// Further ids for it.
    pub aliases: Vec<String>,
    /// It shall be there from the server's start on.
    pub is_enabled: bool,
    /// A request loads it.
    pub load_on_demand: bool,
    /// Where it is.
    pub state: State,
}

impl PoolEntry {
    /// The model, if it takes requests.
    #[must_use]
    pub fn loaded(&self) -> Option<&Arc<LoadedModel>> {
        match &self.state {
            State::Loaded(model) => Some(model),
            State::Unloaded | State::Loading(_) | State::Unloading(_) | State::Failed(_) => None,
        }
    }

    /// It should be there, and its last load failed.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.is_enabled && matches!(self.state, State::Failed(_))
    }
}

impl From<&Entry> for PoolEntry {
    fn from(entry: &Entry) -> Self {
        Self {
            name: entry.config.name.clone(),
            aliases: entry.config.aliases.clone(),
            is_enabled: entry.config.lifecycle.enabled,
            load_on_demand: entry.config.lifecycle.load_on_demand,
            state: entry.state.clone(),
        }
    }
}

/// Which models were busy a moment ago; asked of their executors without the registry's lock.
#[derive(Debug)]
pub(super) struct Activity {
    pub(super) taken_at: Instant,
    /// By name.
    pub(super) busy: HashMap<String, bool>,
}

/// Limits that decisions need.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) bytes: BTreeMap<DeviceId, u64>,
    pub(super) load_threads: usize,
    pub(super) min_residency: Duration,
    pub(super) drain: Duration,
}

impl Limits {
    /// `u64::MAX` for devices that nobody set a limit for.
    pub(super) fn of(&self, device: DeviceId) -> u64 {
        self.bytes.get(&device).copied().unwrap_or(u64::MAX)
    }
}

/// Counts for metrics, by model.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// (model, outcome).
    pub(super) loads: BTreeMap<(String, &'static str), u64>,
    pub(super) evictions: BTreeMap<String, u64>,
}
