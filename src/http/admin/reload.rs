//! `POST /v1/admin/reload`: the configuration is read again, and its models are taken over.
//!
//! The keys of the data plane are read again too, and count for whatever comes from then on. Models that are
//! loaded or on their way are never touched; listeners and limits of the server itself stay as they were at
//! start, and the answer names the sections that a restart would change. What is not here: where the configuration comes from, which
//! whoever started the server told its state (`ServerState::set_config_source`).

use super::AdminCall;
use crate::http::auth::Keys;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::ops::OpsAnswer;
use serde_json::json;

pub(super) fn answer(call: &AdminCall<'_>) -> Result<OpsAnswer, ApiError> {
    if !matches!(call.body.trim_ascii(), b"" | b"{}") {
        return Err(ApiError::new(
            ErrorCode::BadRequest,
            "a reload takes no body: it reads the server's own configuration again",
        ));
    }
    let config = call.state.read_config().ok_or_else(|| {
        let message = "this server was started without a configuration that could be read again";
        ApiError::new(ErrorCode::Conflict, message)
    })?;
    let faulty = |fault: String| {
        let message = format!("nothing was changed, the configuration is faulty: {fault}");
        ApiError::new(ErrorCode::InvalidValue, message)
    };
    let config = config.map_err(faulty)?;
    let keys = Keys::of_data_plane(&config, &call.state.keys());
    let keys = keys.map_err(|error| faulty(error.to_string()))?;
    let needs_restart = call.state.needs_restart(&config);
    let report = call.state.pool().reload(config.models).map_err(|taken| {
        ApiError::new(ErrorCode::Conflict, format!("nothing was changed: {taken}"))
    })?;
    let n_keys = keys.len();
    call.state.set_keys(keys);
    tracing::info!(
        added = ?report.added, removed = ?report.removed, changed = ?report.changed,
        left_alone = ?report.left_alone, ?needs_restart, "configuration read again"
    );
    let body = json!({
        "added": report.added,
        "removed": report.removed,
        "changed": report.changed,
        "unchanged": report.unchanged,
        "left_alone": report.left_alone,
        "keys": n_keys,
        "needs_restart": needs_restart,
    });
    Ok(OpsAnswer::json(200, &body))
}
