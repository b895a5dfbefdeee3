//! `POST /api/v1/models/load` and `/unload`, for whoever has the management key.
//!
//! Runs on an HTTP worker and holds it until the model is there, or gone, as LM Studio's route does. What a load
//! may change is what the management plane's route lets it change; fields that say how another engine
//! shall work are taken and have no effect.

use crate::http::admin::load_error;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::generation::call::Call;
use crate::http::openai::fields::{Fields, parse_object};
use crate::http::state::unknown_model;
use crate::pool::{LoadOverride, RuntimeState};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// Longest wait for a load or an unload.
const WAIT: Duration = Duration::from_secs(600);

pub(super) fn load(call: &Call<'_>) -> Result<Value, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let name = required(&fields, "model")?;
    call.note_model(Some(name));
    if fields.count("num_experts", 0)?.is_some_and(|n| n > 0) {
        let why = "the number of experts is the model's";
        return Err(ApiError::unsupported("num_experts", why));
    }
    fields.count("eval_batch_size", 1)?;
    fields.flag("flash_attention", false)?;
    fields.flag("offload_kv_cache_to_gpu", false)?;
    let mut overrides = Map::new();
    let context_length = fields.count("context_length", 1)?;
    if let Some(context_length) = context_length {
        overrides.insert("context_length".to_owned(), context_length.into());
    }
    let started = Instant::now();
    let pool = call.state.pool();
    let ticket = pool
        .load(name, &LoadOverride(overrides))
        .map_err(|error| load_error(name, error))?;
    let _ = pool.wait_settled(&ticket.model, WAIT); // the report tells more
    let report = pool
        .report(&ticket.model)
        .ok_or_else(|| unknown_model(name))?;
    match (report.runtime_state, report.last_error) {
        (RuntimeState::Loaded, _) => {}
        (RuntimeState::Failed, Some(why)) => {
            let message = format!("the model '{name}' could not be loaded: {why}");
            return Err(ApiError::param(ErrorCode::ModelFailed, "model", message));
        }
        (state, _) => {
            let message = format!("the model '{name}' is {} now", state.name());
            return Err(ApiError::param(ErrorCode::ModelLoading, "model", message));
        }
    }
    let model = pool.get(&ticket.model);
    // A model that was there already keeps the context that it has.
    if let (Some(wanted), Some(model)) = (context_length, &model)
        && !ticket.is_new
        && model.context_length != wanted
    {
        let message = format!(
            "the model '{name}' is loaded with a context of {} tokens; unload it first",
            model.context_length
        );
        return Err(ApiError::param(
            ErrorCode::Conflict,
            "context_length",
            message,
        ));
    }
    let mut answer = json!({
        "type": "llm", "instance_id": ticket.model, "status": "loaded",
        "load_time_seconds": started.elapsed().as_secs_f64(),
    });
    if fields.flag("echo_load_config", false)?
        && let Some(model) = model
    {
        answer["load_config"] = json!({"context_length": model.context_length});
    }
    Ok(answer)
}

pub(super) fn unload(call: &Call<'_>) -> Result<Value, ApiError> {
    let body = parse_object(call.request.body())?;
    let name = required(&Fields::new(&body), "instance_id")?;
    call.note_model(Some(name));
    let pool = call.state.pool();
    pool.unload(name, None)
        .map_err(|error| load_error(name, error))?;
    // A client that was answered may load it again at once.
    let _ = pool.wait_settled(name, WAIT);
    Ok(json!({"instance_id": name}))
}

fn required<'a>(fields: &Fields<'a>, name: &str) -> Result<&'a str, ApiError> {
    fields.string(name)?.ok_or_else(|| {
        let code = ErrorCode::MissingRequiredParameter;
        ApiError::param(code, name, format!("'{name}' is missing"))
    })
}
