//! `GET /v1/requests`, `POST /v1/requests/{id}/cancel`, `GET /v1/native/snapshot`, on both planes.
//!
//! Reads snapshots of the executors; no prompt text anywhere. On the data plane with API keys a
//! client sees and cancels its own requests only (`owner`); the management plane sees all. They run
//! on the ops workers: who wants to cancel must not wait behind the streams that hold the others.

use super::access::Access;
use super::errors::{ApiError, ErrorCode};
use super::ops::OpsAnswer;
use super::state::ServerState;
use crate::pool::LoadedModel;
use crate::pool::definition::target_shown;
use crate::scheduler::{RequestInfo, Snapshot};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Everybody's requests, or one owner's.
pub type Owner<'a> = Option<&'a str>;

/// All live requests: those that wait first, in the order of the queue, model by model.
#[must_use]
pub fn list(state: &ServerState, owner: Owner<'_>) -> OpsAnswer {
    let requests: Vec<Value> = state
        .models_with_work()
        .iter()
        .flat_map(|model| requests_of(state, model, owner))
        .collect();
    OpsAnswer::json(200, &json!({"object": "list", "data": requests}))
}

/// Cancels; the client that waits gets its end.
pub fn cancel(state: &ServerState, name: &str, owner: Owner<'_>) -> Result<OpsAnswer, ApiError> {
    let ids = state.live().cancel(name, owner);
    let Some(first) = ids.first() else {
        let shown: String = name.chars().take(100).collect();
        let message = format!("no live request is called '{shown}'; GET /v1/requests lists them");
        return Err(ApiError::new(ErrorCode::RequestNotFound, message));
    };
    let all: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let body = json!({"id": first.to_string(), "ids": all, "status": "cancelled"});
    Ok(OpsAnswer::json(200, &body))
}

/// What the scheduler knows: each model that the client may use, and the sums over all of them.
#[must_use]
pub fn snapshot(state: &ServerState, owner: Owner<'_>, access: &Access) -> OpsAnswer {
    let mut models = state.models_with_work();
    models.retain(|model| access.allows(&model.name, &model.aliases));
    let snapshot_of = |model: &Arc<LoadedModel>| Snapshot {
        prefix_pool: model.executor.prefix_pool_stats(owner),
        ..model.executor.snapshot()
    };
    let snapshots: Vec<Snapshot> = models.iter().map(snapshot_of).collect();
    let queue_depth: usize = snapshots.iter().map(|one| one.queue_depth).sum();
    let in_flight: u32 = snapshots.iter().map(|one| one.in_flight).sum();
    // A mean over models of different speed says nothing, so it stands here for an only model.
    let ema_dispatch_ms = match snapshots.as_slice() {
        [only] => only.ema_dispatch_ms,
        _ => None,
    };
    let per_model: Vec<Value> = models
        .iter()
        .zip(&snapshots)
        .map(|(model, snapshot)| model_object(state, model, snapshot, owner))
        .collect();
    let requests: Vec<&Value> = per_model
        .iter()
        .filter_map(|model| model["requests"].as_array())
        .flatten()
        .collect();
    let entries: usize = snapshots.iter().map(|one| one.prefix_pool.entries).sum();
    let cached: u64 = snapshots
        .iter()
        .map(|one| one.prefix_pool.total_cached_tokens)
        .sum();
    let body = json!({
        "queue_depth": queue_depth,
        "in_flight": in_flight,
        "ema_dispatch_ms": ema_dispatch_ms.map(rounded),
        "prefix_pool": {"entries": entries, "total_cached_tokens": cached},
        "requests": requests,
        "models": per_model,
    });
    OpsAnswer::json(200, &body)
}

fn model_object(
    state: &ServerState,
    model: &LoadedModel,
    snapshot: &Snapshot,
    owner: Owner<'_>,
) -> Value {
    let replicas = snapshot.replicas.iter().map(|replica| {
        json!({
            "in_flight": replica.inflight,
            "target_inflight": replica.target,
            "max_inflight": replica.max_inflight,
            "alive": replica.status.alive,
            "state": replica.health.name(),
            "open": replica.is_open,
            "restarts": replica.n_restarts,
            "running": replica.status.running,
            "kv_pages_total": replica.status.kv_pages_total,
            "kv_pages_used": replica.status.kv_pages_used,
            "kv_pages_cached": replica.status.kv_pages_cached,
            "kv_pages_pinned": replica.status.kv_pages_pinned,
            "step_age_ms": replica.status.step_age.map(milliseconds),
        })
    });
    json!({
        "model": model.name,
        "accepting": snapshot.accepting,
        "queue_depth": snapshot.queue_depth,
        "in_flight": snapshot.in_flight,
        "ema_dispatch_ms": snapshot.ema_dispatch_ms.map(rounded),
        "preempted": snapshot.n_preempted,
        "configured_target_inflight": snapshot.configured_target_inflight.map(target_shown),
        "capability_inflight": snapshot.capability_per_replica(),
        "effective_target_inflight": snapshot.target_per_replica(),
        "total_target_inflight": snapshot.effective_target_inflight,
        "prefix_pool": {
            "entries": snapshot.prefix_pool.entries,
            "total_cached_tokens": snapshot.prefix_pool.total_cached_tokens,
            "hits": snapshot.prefix_pool.hits,
        },
        "replicas": replicas.collect::<Vec<_>>(),
        "requests": requests_of(state, model, owner),
    })
}

fn requests_of(state: &ServerState, model: &LoadedModel, owner: Owner<'_>) -> Vec<Value> {
    let names = state.live().names();
    let infos = model.executor.list().into_iter();
    let visible = infos.filter(|info| owner.is_none() || info.client.as_deref() == owner);
    visible
        .map(|info| request_object(&info, &model.name, names.get(&info.id)))
        .collect()
}

fn request_object(info: &RequestInfo, model: &str, name: Option<&String>) -> Value {
    let queued_at = info
        .queued_at
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    json!({
        "id": info.id.to_string(),
        "x_request_id": name,
        "model": model,
        "state": info.state.name(),
        "priority": info.priority,
        "stream": info.streaming,
        "client": info.client.as_deref(),
        "queued_at": (queued_at.as_secs_f64() * 1e3).round() / 1e3,
        "age_ms": milliseconds(info.age),
        "prompt_tokens": info.prompt_tokens,
        "completion_tokens": info.completion_tokens,
    })
}

fn milliseconds(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e3)
}

fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}
