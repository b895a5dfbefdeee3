//! `POST /v1/admin/reload`: the configuration is read again, and its models are taken over.
//!
//! Models that are loaded or on their way are never touched; listeners, keys and limits of the server
//! itself stay as they were at start. What is not here: where the configuration comes from, which
//! whoever started the server told its state (`ServerState::set_config_source`).

use super::AdminCall;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::ops::OpsAnswer;
use serde_json::json;

pub(super) fn answer(call: &AdminCall<'_>) -> Result<OpsAnswer, ApiError> {
    if !call.body.trim_ascii().is_empty() {
        return Err(ApiError::new(
            ErrorCode::BadRequest,
            "a reload takes no body: it reads the server's own configuration again",
        ));
    }
    let models = call.state.read_config().ok_or_else(|| {
        let message = "this server was started without a configuration that could be read again";
        ApiError::new(ErrorCode::Conflict, message)
    })?;
    let models = models.map_err(|fault| {
        let message = format!("nothing was changed, the configuration is faulty: {fault}");
        ApiError::new(ErrorCode::InvalidValue, message)
    })?;
    let report = call.state.pool().reload(models).map_err(|taken| {
        ApiError::new(ErrorCode::Conflict, format!("nothing was changed: {taken}"))
    })?;
    tracing::info!(
        added = ?report.added, removed = ?report.removed, changed = ?report.changed,
        left_alone = ?report.left_alone, "configuration read again"
    );
    let body = json!({
        "added": report.added,
        "removed": report.removed,
        "changed": report.changed,
        "unchanged": report.unchanged,
        "left_alone": report.left_alone,
    });
    Ok(OpsAnswer::json(200, &body))
}
