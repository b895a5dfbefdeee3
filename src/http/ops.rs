//! Health, readiness and metrics, the same on both planes.
//!
//! Reads snapshots only: nothing here waits for an engine or sends it work. Liveness is judged by
//! progress: an engine whose step has been running for longer than the stall limit is dead, even
//! if its process is not.

use super::errors::ApiError;
use super::router::Route;
use super::state::ServerState;
use crate::pool::PoolEntry;
use crate::pool::state::{Leaving, State};
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

/// Whether a replica hangs: a step longer than `stall` while it has work, or a dead runtime.
fn is_stuck(alive: bool, step_age: Option<Duration>, stall: Duration) -> bool {
    !alive || step_age.is_some_and(|age| age > stall)
}

/// Liveness: 503 when an engine has stopped making progress; restarting helps.
#[must_use]
pub fn health(state: &ServerState) -> OpsAnswer {
    let mut stuck = Vec::new();
    for model in state.models() {
        let snapshot = model.executor.snapshot();
        let is_dead = |status: &crate::runtime::RuntimeStatus| {
            is_stuck(status.alive, status.step_age, state.stall())
        };
        let replicas = snapshot.replicas.iter();
        let is_broken =
            snapshot.has_failed || replicas.into_iter().any(|replica| is_dead(&replica.status));
        // During the stop the runtimes end on purpose.
        if !state.is_draining() && is_broken {
            stuck.push(model.name.clone());
        }
    }
    match stuck.is_empty() {
        true => OpsAnswer::json(200, &json!({"status": "ok"})),
        false => OpsAnswer::json(503, &json!({"status": "stalled", "models": stuck})),
    }
}

/// Readiness: 503 while the models of the start are loading, while draining, and when no model is
/// there that could answer. A model that is loaded or fails later does not take the server out.
#[must_use]
pub fn ready(state: &ServerState) -> OpsAnswer {
    if state.is_draining() {
        return OpsAnswer::json(503, &json!({"status": "draining"}));
    }
    let entries = state.pool().entries();
    let can_answer = |entry: &PoolEntry| match entry.loaded() {
        Some(model) => model.executor.snapshot().accepting,
        None => entry.load_on_demand,
    };
    let is_starting = state.pool().is_starting();
    if !is_starting && entries.iter().any(can_answer) {
        return OpsAnswer::json(200, &json!({"status": "ready"}));
    }
    let is_loading = |entry: &PoolEntry| matches!(entry.state, State::Loading(_));
    let status = match is_starting || entries.iter().any(is_loading) {
        true => "loading",
        false => "no_model",
    };
    let models: Vec<Value> = entries.iter().map(load_state).collect();
    OpsAnswer::json(503, &json!({"status": status, "models": models}))
}

fn load_state(entry: &PoolEntry) -> Value {
    let mut shown = json!({"id": entry.name, "status": entry.state.name().name()});
    let load = match &entry.state {
        State::Loading(load) | State::Unloading(Leaving::Load(load)) => load,
        State::Failed(why) => {
            shown["error"] = Value::from(&**why);
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

/// What `GET /` says to somebody who opens the address in a browser.
#[must_use]
pub fn root(state: &ServerState) -> Value {
    let models: Vec<String> = state
        .models()
        .iter()
        .map(|model| model.name.clone())
        .collect();
    json!({
        "server": "tinyloop",
        "version": env!("CARGO_PKG_VERSION"),
        "models": models,
        "endpoints": ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready",
            "/metrics"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_stuck_when_dead_or_in_a_step_for_too_long() {
        let stall = Duration::from_secs(30);
        assert!(is_stuck(false, None, stall));
        assert!(is_stuck(true, Some(Duration::from_secs(31)), stall));
        assert!(!is_stuck(true, Some(Duration::from_secs(30)), stall));
        assert!(!is_stuck(true, None, stall));
    }
}
