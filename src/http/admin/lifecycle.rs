//! `POST /v1/admin/models/{name}/load` and `/unload`.
//!
//! A load's body holds overrides for as long as the model stays loaded, nothing else; the pool checks
//! them. Both routes start something and answer with the state: 202 while it is on its way, 200 when
//! nothing is left to do. `?wait_s=30` waits so long for the end of it; at most [`WAITING_MAX`]
//! requests do, so that the plane's other threads stay free, and further ones are answered at once, with
//! `"waited": false` and the reason.

use super::{Admin, AdminCall, models};
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::openai::fields::{kind_of, parse_object};
use crate::http::ops::OpsAnswer;
use crate::http::state::unknown_model;
use crate::pool::{LoadOverride, ModelReport, Pool, PoolError, RuntimeState};
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Most requests that may wait at once; the plane has a few more threads (`management`).
const WAITING_MAX: usize = 12;

/// Longest wait that can be asked for, in seconds.
const WAIT_S_MAX: f64 = 600.0;

/// Longest drain that can be asked for, in seconds.
const DRAIN_S_MAX: f64 = 86_400.0;

pub(super) fn load(admin: &Admin, call: &AdminCall<'_>, name: &str) -> Result<OpsAnswer, ApiError> {
    let wait = wait_time(call.query)?;
    let overrides = LoadOverride(optional_object(call.body)?);
    let pool = call.state.pool();
    let ticket = pool
        .load(name, &overrides)
        .map_err(|error| load_error(name, error))?;
    let (report, has_waited) = admin.report_after(pool, &ticket.model, wait)?;
    if !ticket.is_new && !overrides.0.is_empty() && overrides != report.load_override {
        return Err(ApiError::new(
            ErrorCode::Conflict,
            format!(
                "the model '{}' is {} with other overrides; unload it first",
                report.name,
                report.runtime_state.name()
            ),
        ));
    }
    if let (RuntimeState::Failed, Some(why)) = (report.runtime_state, &report.last_error) {
        let message = format!("the model '{}' could not be loaded: {why}", report.name);
        return Err(ApiError {
            retry_after_s: None,
            ..ApiError::param(ErrorCode::ModelFailed, "model", message)
        });
    }
    let mut body = state_object(&report, has_waited);
    body["is_new"] = Value::from(ticket.is_new);
    body["evicted"] = Value::from(ticket.evicted);
    let status = status_of(report.runtime_state, RuntimeState::Loaded);
    Ok(OpsAnswer::json(status, &body))
}

pub(super) fn unload(
    admin: &Admin,
    call: &AdminCall<'_>,
    name: &str,
) -> Result<OpsAnswer, ApiError> {
    let wait = wait_time(call.query)?;
    let drain = drain_timeout(&optional_object(call.body)?)?;
    let pool = call.state.pool();
    pool.unload(name, drain)
        .map_err(|error| load_error(name, error))?;
    let (report, has_waited) = admin.report_after(pool, name, wait)?;
    let status = status_of(report.runtime_state, RuntimeState::Unloaded);
    Ok(OpsAnswer::json(status, &state_object(&report, has_waited)))
}

impl Admin {
    /// What the pool says of the model when its state has settled, or when the wait is over; and false
    /// where too many waited already.
    fn report_after(
        &self,
        pool: &Pool,
        name: &str,
        wait: Duration,
    ) -> Result<(ModelReport, bool), ApiError> {
        let mut has_waited = true;
        if !wait.is_zero() {
            has_waited = self.n_waiting.fetch_add(1, Ordering::Relaxed) < WAITING_MAX;
            if has_waited {
                let _ = pool.wait_settled(name, wait); // the report tells more
            }
            self.n_waiting.fetch_sub(1, Ordering::Relaxed);
        }
        let report = pool.report(name).ok_or_else(|| unknown_model(name))?;
        Ok((report, has_waited))
    }
}

/// 200 when it is where it was to go, 202 on the way.
fn status_of(state: RuntimeState, aim: RuntimeState) -> u16 {
    if state == aim { 200 } else { 202 }
}

fn state_object(report: &ModelReport, has_waited: bool) -> Value {
    let mut body = json!({
        "model": report.name,
        "state": report.runtime_state.name(),
        "inflight_requests": report.inflight_requests,
        "load_progress": models::load_progress(report),
        "load_override": report.load_override.0,
    });
    if !has_waited {
        body["waited"] = Value::from(false);
        let why = format!("{WAITING_MAX} requests wait already; ask again for the state");
        body["waited_reason"] = Value::from(why);
    }
    body
}

/// No body is an empty object.
fn optional_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match body.trim_ascii().is_empty() {
        true => Ok(Map::new()),
        false => parse_object(body),
    }
}

fn drain_timeout(fields: &Map<String, Value>) -> Result<Option<Duration>, ApiError> {
    const FIELD: &str = "drain_timeout_s";
    if let Some(unknown) = fields.keys().find(|key| *key != FIELD) {
        return Err(ApiError::unsupported(
            unknown.as_str(),
            "an unload takes 'drain_timeout_s' only",
        ));
    }
    let Some(value) = fields.get(FIELD).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let seconds = value.as_f64().ok_or_else(|| {
        let kind = kind_of(value);
        ApiError::invalid(FIELD, format!("'{FIELD}' must be a number, not {kind}"))
    })?;
    seconds_within(FIELD, seconds, DRAIN_S_MAX).map(Some)
}

/// `wait_s` of the query; zero when there is none.
fn wait_time(query: &str) -> Result<Duration, ApiError> {
    const NAME: &str = "wait_s";
    let mut wait = Duration::ZERO;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name != NAME {
            let name: String = name.chars().take(100).collect();
            return Err(ApiError::unsupported(
                name,
                "the query of this route may hold 'wait_s' only",
            ));
        }
        let seconds: f64 = value.parse().unwrap_or(f64::NAN);
        wait = seconds_within(NAME, seconds, WAIT_S_MAX)?;
    }
    Ok(wait)
}

fn seconds_within(field: &str, seconds: f64, most: f64) -> Result<Duration, ApiError> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if seconds <= most => Ok(duration),
        _ => Err(ApiError::invalid(
            field,
            format!("'{field}' must be a number of seconds from 0 to {most}"),
        )),
    }
}

/// In our words: what the pool says about a load or an unload.
pub(in crate::http) fn load_error(name: &str, error: PoolError) -> ApiError {
    let message = error.to_string();
    match error {
        PoolError::NotFound(_) => unknown_model(name),
        PoolError::Unloading(_) => ApiError {
            status_override: Some(409),
            ..ApiError::param(ErrorCode::ModelUnloading, "model", message)
        },
        PoolError::NoRoom { room, .. } => ApiError {
            numbers: vec![
                ("needed_bytes", room.needed_bytes as f64),
                ("free_bytes", room.free_bytes as f64),
                ("limit_bytes", room.limit_bytes as f64),
            ],
            is_hopeless: room.is_hopeless,
            ..ApiError::new(ErrorCode::NoRoom, message)
        },
        PoolError::Override(error) => ApiError::invalid(error.field(), message),
        PoolError::ShuttingDown => ApiError::new(ErrorCode::ShuttingDown, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_and_drains_have_ranges() {
        assert_eq!(wait_time("").ok(), Some(Duration::ZERO));
        assert_eq!(
            wait_time("wait_s=1.5").ok(),
            Some(Duration::from_millis(1500))
        );
        for (query, param) in [
            ("wait_s=", "wait_s"),
            ("wait_s=-1", "wait_s"),
            ("wait_s=601", "wait_s"),
            ("wait_s=nan", "wait_s"),
            ("wait=true", "wait"),
        ] {
            let error = wait_time(query).expect_err("refused");
            assert_eq!(
                (error.status(), error.param.as_deref()),
                (400, Some(param)),
                "{query}"
            );
        }
        let drain = |body: &[u8]| drain_timeout(&optional_object(body)?);
        assert_eq!(drain(b"").ok(), Some(None));
        assert_eq!(drain(b"{}").ok(), Some(None));
        assert_eq!(
            drain(br#"{"drain_timeout_s": 0}"#).ok(),
            Some(Some(Duration::ZERO))
        );
        for body in [
            r#"{"drain_timeout_s": -1}"#,
            r#"{"drain_timeout_s": "5"}"#,
            r#"{"drain_timeout_s": 1e300}"#,
            r#"{"drain_timeout": 1}"#,
            "[]",
            "{",
        ] {
            let error = drain(body.as_bytes()).expect_err("refused");
            assert_eq!(error.status(), 400, "{body}");
        }
    }
}
