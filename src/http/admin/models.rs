//! `GET /v1/admin/models` and `GET /v1/admin/models/{name}`: one row per configured model.
//!
//! Pure reading of the pool; field names are part of the contract. What is not here: redaction of
//! secrets, which the pool's reports have behind them.

use crate::http::errors::ApiError;
use crate::http::ops::OpsAnswer;
use crate::http::state::{ServerState, unknown_model};
use crate::pool::definition::target_shown;
use crate::pool::ledger::{MemorySource, ModelMemory};
use crate::pool::{ModelReport, RuntimeState};
use crate::scheduler::ReplicaSnapshot;
use serde_json::{Value, json};

pub(super) fn list(state: &ServerState) -> OpsAnswer {
    let reports = state.pool().reports();
    let rows: Vec<Value> = reports.iter().map(row).collect();
    OpsAnswer::json(200, &json!({"object": "list", "data": rows}))
}

pub(super) fn one(state: &ServerState, name: &str) -> Result<OpsAnswer, ApiError> {
    let report = state.pool().report(name);
    let report = report.ok_or_else(|| unknown_model(name))?;
    Ok(OpsAnswer::json(200, &row(&report)))
}

fn row(report: &ModelReport) -> Value {
    json!({
        "name": report.name,
        "aliases": report.aliases,
        "resolved_backend": report.resolved_backend,
        "type": report.kind,
        "configured_enabled": report.configured_enabled,
        "runtime_state": report.runtime_state.name(),
        "is_loaded": report.is_loaded,
        "replicas": report.replicas,
        "replica_max": report.replica_max,
        "loaded_replicas": report.loaded_replicas,
        "inflight_requests": report.inflight_requests,
        "queue_depth": report.queue_depth,
        "runtime_inflight": report.runtime_inflight,
        "waiting_for_load": report.waiting_for_load,
        // All three count jobs of one replica, the smallest that lives.
        "configured_target_inflight": report.configured_target_inflight.map(target_shown),
        "capability_inflight": report.capability_inflight,
        "effective_target_inflight": report.effective_target_inflight,
        "total_target_inflight": report.total_target_inflight,
        "replica_states": report.replica_states.iter().map(replica).collect::<Vec<_>>(),
        "accepting_new_requests": report.accepting_new_requests,
        "last_error": report.last_error,
        "memory": memory_of(report),
        "cache_bytes": report.cache_bytes,
        "load_progress": load_progress(report),
        "load_constraints": report.load_constraints.to_json(),
        "load_override": report.load_override.0,
        "pinned": report.pinned,
        "load_on_demand": report.load_on_demand,
        "idle_unload_s": report.idle_unload.map(|idle| idle.as_secs_f64()),
        "idle_s": report.idle_for.map(|idle| rounded(idle.as_secs_f64())),
        "definition": report.definition,
    })
}

fn replica(replica: &ReplicaSnapshot) -> Value {
    json!({
        "health": replica.health.name(),
        "inflight": replica.inflight,
        "capability": replica.max_inflight,
        "target": replica.target,
        "restarts": replica.n_restarts,
        "last_error": replica.last_error,
    })
}

/// The same as [`memory`], and whether it is what the model holds now or what it would.
fn memory_of(report: &ModelReport) -> Value {
    let mut shown = memory(&report.memory);
    let is_there = matches!(
        report.runtime_state,
        RuntimeState::Loaded | RuntimeState::Unloading
    );
    let is_measured = report.memory.source == MemorySource::MeasuredLoadDelta;
    shown["is_estimate"] = json!(!(is_there && is_measured));
    shown
}

/// What a model holds or will hold, and how that is known.
pub(super) fn memory(memory: &ModelMemory) -> Value {
    json!({
        "device": memory.device.to_string(),
        "estimate_bytes": memory.total_bytes(),
        "source": memory.source.name(),
        "weight_bytes": memory.weight_bytes,
        "kv_bytes": memory.kv_bytes,
        "scratch_bytes": memory.scratch_bytes,
    })
}

pub(super) fn load_progress(report: &ModelReport) -> Value {
    let Some(load) = report.load_progress else {
        return Value::Null;
    };
    let progress = load.done_bytes as f64 / load.total_bytes.max(1) as f64;
    json!({
        "phase": load.phase.name(),
        "loaded_bytes": load.done_bytes,
        "total_bytes": load.total_bytes,
        "progress": rounded(progress),
    })
}

fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}
