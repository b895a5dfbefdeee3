//! Health, readiness and metrics, the same on both planes.
//!
//! Reads snapshots only: nothing here waits for an engine or sends it work. Liveness is judged by
//! progress: an engine whose step has been running for longer than the stall limit is dead, even
//! if its process is not.

use super::errors::ApiError;
use super::errors::LOAD_FAILED;
use super::router::Route;
use super::state::ServerState;
use crate::pool::PoolEntry;
use crate::pool::state::{Leaving, State};
use crate::scheduler::{Health, ReplicaSnapshot, Snapshot};
use serde_json::{Value, json};
use std::time::Duration;

/// A page of either plane.
#[derive(Clone, Debug)]
pub struct OpsAnswer {
    /// HTTP status.
    pub status: u16,
    /// Its content type.
    pub content_type: &'static str,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    /// Body.
    pub body: Vec<u8>,
}

impl OpsAnswer {
    /// A JSON page that nobody keeps.
    #[must_use]
    pub fn json(status: u16, body: &Value) -> Self {
        Self {
            status,
            content_type: "application/json",
            headers: vec![("cache-control", "no-store".to_owned())],
            body: body.to_string().into_bytes(),
        }
    }
}

impl From<&ApiError> for OpsAnswer {
    fn from(error: &ApiError) -> Self {
        Self {
            headers: error.headers(),
            ..Self::json(error.status(), &error.body())
        }
    }
}

/// What may be asked of a route; a browser's preflight finds no permission in it.
#[must_use]
pub fn options(route: &Route) -> OpsAnswer {
    OpsAnswer {
        status: 204,
        content_type: "application/json",
        headers: vec![("allow", route.allow().to_owned())],
        body: Vec::new(),
    }
}

/// How a replica is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wellness {
    Well,
    /// It died and is being restarted; nothing else has to be done.
    Mending,
    /// Only a restart of the server helps: its step takes longer than `stall` while it has work, or it
    /// died and cannot be made anew.
    Stuck,
}

fn wellness(replica: &ReplicaSnapshot, stall: Duration) -> Wellness {
    let hangs = replica.status.step_age.is_some_and(|age| age > stall);
    match (replica.health, replica.status.alive) {
        (Health::Live { .. }, _) if hangs => Wellness::Stuck,
        (Health::Live { .. }, true) => Wellness::Well,
        // Nobody has looked yet; what becomes of it depends on whether it can be replaced.
        (Health::Live { .. }, false) if !replica.can_be_replaced => Wellness::Stuck,
        (Health::Lost { retry_at: None, .. }, _) => Wellness::Stuck,
        (Health::Live { .. } | Health::Lost { .. } | Health::Restarting { .. }, _) => {
            Wellness::Mending
        }
    }
}

/// Replicas that are being restarted, for people.
fn mending(model: &str, snapshot: &Snapshot, stall: Duration) -> Vec<Value> {
    let all = snapshot.replicas.iter().enumerate();
    let ill = all.filter(|(_, replica)| wellness(replica, stall) == Wellness::Mending);
    ill.map(|(index, replica)| {
        json!({"model": model, "replica": index, "state": replica.health.name()})
    })
    .collect()
}

/// Whether a request for it can be served: it takes requests and a replica of it lives, or a request
/// loads it.
fn can_answer(entry: &PoolEntry) -> bool {
    let Some(model) = entry.loaded() else {
        return entry.load_on_demand;
    };
    let now = model.executor.snapshot();
    let lives = |replica: &ReplicaSnapshot| replica.health.is_live() && replica.status.alive;
    now.accepting && now.replicas.iter().any(lives)
}

/// Enabled models whose load failed.
fn missing(entries: &[PoolEntry]) -> Vec<&str> {
    let missing = entries.iter().filter(|entry| entry.is_missing());
    missing.map(|entry| entry.name.as_str()).collect()
}

/// Liveness, for who restarts servers: 503 when an engine has stopped making progress, and when nothing
/// is served because the models that should be there could not be loaded. A server of one model would
/// have ended then; here a restart takes nothing from anybody, and may mend it. While others are served a
/// model that failed makes it `degraded`, with 200, and so do replicas that are restarted anyway.
#[must_use]
pub fn health(state: &ServerState) -> OpsAnswer {
    let (mut stuck, mut ill) = (Vec::new(), Vec::new());
    for model in state.models() {
        let snapshot = model.executor.snapshot();
        let is_stuck = |replica| wellness(replica, state.stall()) == Wellness::Stuck;
        // During a stop, of the server or of the model, the runtimes end on purpose.
        let is_ending = state.is_draining() || (!snapshot.accepting && !snapshot.has_failed);
        if is_ending {
            continue;
        }
        if snapshot.has_failed || snapshot.replicas.iter().any(is_stuck) {
            stuck.push(model.name.clone());
        }
        ill.extend(mending(&model.name, &snapshot, state.stall()));
    }
    if !stuck.is_empty() {
        let body = json!({"status": "stalled", "models": stuck, "replicas": ill});
        return OpsAnswer::json(503, &body);
    }
    let entries = state.pool().entries();
    let missing = missing(&entries);
    // A loaded model counts, also while its replicas are restarted.
    let is_served = |entry: &PoolEntry| {
        let is_on_its_way = matches!(entry.state, State::Loading(_));
        entry.loaded().is_some() || is_on_its_way || entry.load_on_demand
    };
    let is_empty = !state.pool().is_starting() && !entries.iter().any(is_served);
    if is_empty && !missing.is_empty() && !state.is_draining() {
        let body = json!({"status": "failed", "failed_models": missing});
        return OpsAnswer::json(503, &body);
    }
    match (missing.is_empty(), ill.is_empty()) {
        (true, true) => OpsAnswer::json(200, &json!({"status": "ok"})),
        _ => {
            let body = json!({"status": "degraded", "replicas": ill, "failed_models": missing});
            OpsAnswer::json(200, &body)
        }
    }
}

/// Readiness, for who spreads requests: 503 while the models of the start are loading, while draining,
/// and when no model could answer now, for none is there or all its replicas are lost. A model that is
/// loaded or fails later does not take the server out; `failed_models` tells which should be there.
#[must_use]
pub fn ready(state: &ServerState, audience: Audience) -> OpsAnswer {
    if state.is_draining() {
        return OpsAnswer::json(503, &json!({"status": "draining"}));
    }
    let entries = state.pool().entries();
    let is_starting = state.pool().is_starting();
    if !is_starting && entries.iter().any(can_answer) {
        let missing = missing(&entries);
        let mut body = json!({"status": "ready"});
        if !missing.is_empty() {
            body["failed_models"] = json!(missing);
        }
        return OpsAnswer::json(200, &body);
    }
    let is_loading = |entry: &PoolEntry| matches!(entry.state, State::Loading(_));
    let is_there = |entry: &PoolEntry| entry.loaded().is_some();
    let status = if is_starting || entries.iter().any(is_loading) {
        "loading"
    } else if entries.iter().any(is_there) {
        "no_replica"
    } else {
        "no_model"
    };
    let models = entries.iter();
    let models: Vec<Value> = models.map(|entry| load_state(entry, audience)).collect();
    OpsAnswer::json(503, &json!({"status": status, "models": models}))
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Anybody on the data plane: why a load failed may name files, and is not told.
    Clients,
    /// Whoever reaches the management plane.
    Operator,
}

fn load_state(entry: &PoolEntry, audience: Audience) -> Value {
    let mut shown = json!({"id": entry.name, "status": entry.state.name().name()});
    let load = match &entry.state {
        State::Loading(load) | State::Unloading(Leaving::Load(load)) => load,
        State::Failed(why) => {
            shown["error"] = match audience {
                Audience::Clients => Value::from(LOAD_FAILED),
                Audience::Operator => Value::from(&**why),
            };
            return shown;
        }
        State::Unloaded | State::Loaded(_) | State::Unloading(Leaving::Model(_)) => return shown,
    };
    let now = load.progress();
    let progress = now.done_bytes as f64 / now.total_bytes.max(1) as f64;
    shown["phase"] = Value::from(now.phase.name());
    shown["loaded_bytes"] = Value::from(now.done_bytes);
    shown["total_bytes"] = Value::from(now.total_bytes);
    shown["progress"] = Value::from((progress * 1e3).round() / 1e3);
    shown
}

/// Prometheus text.
#[must_use]
pub fn metrics(state: &ServerState) -> OpsAnswer {
    OpsAnswer {
        status: 200,
        content_type: "text/plain; version=0.0.4; charset=utf-8",
        headers: Vec::new(),
        body: state.metrics_text().into_bytes(),
    }
}

/// What `GET /` says to somebody who opens the address in a browser; not which models there are, where
/// that is for holders of keys.
#[must_use]
pub fn root(state: &ServerState) -> Value {
    let models = match state.keys().are_asked() {
        true => Vec::new(),
        false => state.models(),
    };
    let models: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let paths = super::openapi::data_plane()["paths"].as_object();
    let endpoints: Vec<&String> = paths.into_iter().flat_map(|paths| paths.keys()).collect();
    json!({
        "server": "tinyloop",
        "version": env!("CARGO_PKG_VERSION"),
        "models": models,
        "endpoints": endpoints,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::RuntimeStatus;
    use std::time::Instant;

    #[test]
    fn replicas_are_well_mending_or_stuck() {
        let stall = Duration::from_secs(30);
        let now = Instant::now();
        let live = Health::live(now);
        let lost = |retry_at| Health::Lost {
            n_failures: 0,
            retry_at,
        };
        let of = |health, alive, step_s: Option<u64>, can_be_replaced| {
            let replica = ReplicaSnapshot {
                inflight: 0,
                target: 1,
                max_inflight: 1,
                health,
                is_open: true,
                can_be_replaced,
                n_restarts: 0,
                last_error: None,
                status: RuntimeStatus {
                    alive,
                    step_age: step_s.map(Duration::from_secs),
                    ..RuntimeStatus::default()
                },
            };
            wellness(&replica, stall)
        };
        assert!(of(live, true, None, false) == Wellness::Well);
        assert!(of(live, true, Some(30), false) == Wellness::Well);
        assert!(of(live, true, Some(31), true) == Wellness::Stuck);
        assert!(of(live, false, None, false) == Wellness::Stuck);
        assert!(of(live, false, None, true) == Wellness::Mending);
        assert!(of(lost(None), false, None, false) == Wellness::Stuck);
        assert!(of(lost(Some(now)), false, None, true) == Wellness::Mending);
        let restarting = Health::Restarting { n_failures: 1 };
        assert!(of(restarting, false, None, true) == Wellness::Mending);
    }
}
