//! What the pool shows of itself at one moment, and how it says no: plain data for the admin routes
//! and the command line.
//!
//! Nothing here decides or changes anything. Secrets never get here: `definition` is redacted.

use super::ledger::{DeviceId, ModelMemory, NoRoom};
use super::model::LoadProgress;
use super::overrides::{LoadConstraints, LoadOverride, OverrideError};
use super::state::RuntimeState;
use crate::config::TargetInflight;
use crate::scheduler::ReplicaSnapshot;
use serde_json::Value;
use std::time::Duration;

/// One configured model, loaded or not.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelReport {
    /// The id that clients send.
    pub name: String,
    /// Further ids for it.
    pub aliases: Vec<String>,
    /// `native (cpu avx2 x2)`, `fake`, ..: the kind of source until it was loaded.
    pub resolved_backend: String,
    /// `llm` or `embeddings`: what it is for; None until it was loaded.
    pub kind: Option<&'static str>,
    /// Loaded when the server starts.
    pub configured_enabled: bool,
    /// Where it is.
    pub runtime_state: RuntimeState,
    /// Takes requests.
    pub is_loaded: bool,
    /// Replicas of the running load, or of the next one.
    pub replicas: u32,
    /// Most that a load may ask for.
    pub replica_max: u32,
    /// Replicas that are alive.
    pub loaded_replicas: u32,
    /// Requests accepted and not ended: those that wait and those that run.
    pub inflight_requests: usize,
    /// Those that wait.
    pub queue_depth: usize,
    /// Those that hold a slot of a replica.
    pub runtime_inflight: u32,
    /// Requests that wait for the model to be loaded, beside those.
    pub waiting_for_load: usize,
    /// Jobs per replica as configured; None = what it can hold.
    pub configured_target_inflight: Option<TargetInflight>,
    /// Jobs that one replica can hold, the smallest of those that live; None when none does.
    pub capability_inflight: Option<u32>,
    /// Jobs per replica after clamping, the smallest of those that live; 0 when none does.
    pub effective_target_inflight: u32,
    /// The same over all replicas that live.
    pub total_target_inflight: u32,
    /// Each replica; empty when not loaded.
    pub replica_states: Vec<ReplicaSnapshot>,
    /// Whether a request would be queued now.
    pub accepting_new_requests: bool,
    /// Why the last load failed, while the model is `failed`.
    pub last_error: Option<String>,
    /// Measured while loaded and after; before that estimated.
    pub memory: ModelMemory,
    /// While it loads.
    pub load_progress: Option<LoadProgress>,
    /// Which fields a load may override, and their ranges.
    pub load_constraints: LoadConstraints,
    /// What the running load overrides; empty when nothing.
    pub load_override: LoadOverride,
    /// As configured; secrets are redacted.
    pub definition: Value,
    /// Unloaded by neither idleness nor need for room.
    pub pinned: bool,
    /// A request loads it.
    pub load_on_demand: bool,
    /// Unloaded after so long without a request.
    pub idle_unload: Option<Duration>,
    /// How long ago it was last used; None when not loaded.
    pub idle_for: Option<Duration>,
    /// Tokens per second are not here: metrics have them. Generated tokens kept for reuse, in bytes
    /// of KV pages; part of `memory.kv_bytes`.
    pub cache_bytes: u64,
}

/// What a load request led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadTicket {
    /// The public name, also when an alias was asked for.
    pub model: String,
    /// `loading`, or `loaded` when there was nothing to do.
    pub state: RuntimeState,
    /// Whether this call began the load.
    pub is_new: bool,
    /// Models that are unloaded to make room.
    pub evicted: Vec<String>,
}

/// Why the pool did not do what it was asked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PoolError {
    /// No configured model answers to this id.
    #[error("the model '{0}' does not exist")]
    NotFound(String),
    /// It has to be gone before it can be loaded again.
    #[error("the model '{0}' is being unloaded; it can be loaded when that is done")]
    Unloading(String),
    /// The load does not fit, and nobody may be evicted for it.
    #[error(
        "no room for the model '{model}': {room}; unload another one, lower its replicas, \
         context_length or kv_tokens, or raise pool.cpu_bytes"
    )]
    NoRoom {
        /// The model.
        model: String,
        /// The numbers.
        room: NoRoom,
    },
    /// An override that the model does not take.
    #[error(transparent)]
    Override(#[from] OverrideError),
    /// The server is on its way down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// One device as the ledger sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceReport {
    /// `cpu`, `cuda:0`.
    pub device: DeviceId,
    /// What models may hold in all; `u64::MAX` = nobody set a limit.
    pub limit_bytes: u64,
    /// What they hold, and what is promised to loads on their way.
    pub used_bytes: u64,
    /// Who holds it.
    pub models: Vec<DeviceShare>,
}

/// A model on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceShare {
    /// The public name.
    pub model: String,
    /// Where it is.
    pub state: RuntimeState,
    /// What it holds.
    pub memory: ModelMemory,
}

/// What a reload changed. Names, in the order of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadReport {
    /// New models, not loaded.
    pub added: Vec<String>,
    /// Models that are gone.
    pub removed: Vec<String>,
    /// Models that were not loaded and have a new definition.
    pub changed: Vec<String>,
    /// Models that stay as they are because nothing changed.
    pub unchanged: Vec<String>,
    /// Models that would have changed or gone, but are loaded or on their way; unload them and
    /// reload again.
    pub left_alone: Vec<String>,
}

/// The configuration cannot be taken over; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id `{0}` is taken by another model")]
pub struct NameTaken(pub String);
