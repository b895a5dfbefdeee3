//! `GET /props` and `GET /slots`: what a model is set to and what it does now.
//!
//! Reads the pool; loads nothing. The model is `model` of the query, or the only one that is there. A
//! server with several and none named answers as llama-server's router does, so that its web UI asks
//! for each by name.

use super::query_value;
use super::settings::{SAMPLERS, settings};
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::generation::call::Call;
use crate::http::state::unknown_model;
use crate::pool::{LoadedModel, Unavailable};
use crate::request::{GenerationRequest, SamplingParams};
use crate::scheduler::{Lifecycle, RequestInfo};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The model that a query names; None where it names none and several are there.
fn model(call: &Call<'_>) -> Result<Option<Arc<LoadedModel>>, ApiError> {
    let pool = call.state.pool();
    let look_up = |name: &str| {
        call.state.check_access(name, &call.access)?;
        let found = pool.look_up(name);
        found.map(Some).map_err(|why| match why {
            Unavailable::Unknown(_) => unknown_model(name),
            why => why.into(),
        })
    };
    match query_value(call.request.query(), "model").filter(|name| !name.is_empty()) {
        Some(name) => look_up(&name),
        None => match call.state.entries_for(&call.access).as_slice() {
            [only] => look_up(&only.name),
            _ => Ok(None),
        },
    }
}

pub(super) fn props(call: &Call<'_>) -> Result<Value, ApiError> {
    let build = concat!("tinyloop ", env!("CARGO_PKG_VERSION"));
    let Some(model) = model(call)? else {
        return Ok(json!({
            "role": "router",
            "default_generation_settings": {"params": null, "n_ctx": 0},
            "total_slots": 0,
            "model_alias": "tinyloop",
            "model_path": "none",
            "models_autoload": false,
            "modalities": {"vision": false, "audio": false, "video": false},
            "build_info": build,
            "is_sleeping": false,
        }));
    };
    let template = model.chat_template.as_ref().ok();
    let token = |id: Option<u32>| {
        let tokenizer = model.tokenizer.as_ref()?;
        Some(String::from_utf8_lossy(tokenizer.token_bytes(id?)).into_owned())
    };
    let tokenizer = model.tokenizer.as_ref();
    Ok(json!({
        "default_generation_settings": {
            "params": default_settings(),
            "n_ctx": model.context_length,
        },
        "total_slots": n_slots(&model),
        "model_alias": model.name,
        "model_ftype": model.meta.quantization,
        "model_path": model.meta.file,
        "modalities": {"vision": false, "audio": false, "video": false},
        "media_marker": "<__media__>",
        "endpoint_slots": true,
        "endpoint_props": false,
        "endpoint_metrics": true,
        "ui": false,
        "ui_settings": {},
        "chat_template": template.map_or("", |template| template.source()),
        "chat_template_caps": template_caps(template.map_or("", |template| template.source())),
        "bos_token": token(tokenizer.and_then(|tokenizer| tokenizer.bos())).unwrap_or_default(),
        "eos_token": token(tokenizer.and_then(|tokenizer| tokenizer.eos())).unwrap_or_default(),
        "build_info": build,
        "is_sleeping": false,
        "cors_proxy_enabled": false,
    }))
}

/// What a template can tell a model, by the words that it reads.
fn template_caps(source: &str) -> Value {
    let reads = |word: &str| source.contains(word);
    json!({
        "supports_string_content": true,
        "supports_typed_content": false,
        "supports_system_role": true,
        "supports_tools": reads("tools"),
        "supports_tool_calls": reads("tool_calls"),
        "supports_parallel_tool_calls": reads("tool_calls"),
        "supports_object_arguments": reads("arguments"),
        "supports_preserve_reasoning": reads("reasoning_content"),
        "supports_reasoning_effort": reads("reasoning_effort"),
    })
}

/// What `POST /completion` does unless the body says otherwise.
fn default_settings() -> Value {
    let mut body = Map::new();
    body.insert("samplers".to_owned(), json!(SAMPLERS));
    let mut job = GenerationRequest::new(Vec::new(), u32::MAX);
    job.sampling = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        ..SamplingParams::default()
    };
    settings(&job, &body)
}

/// Tokens that a request may still get; -1 where it has no limit of its own.
fn n_remain(info: &RequestInfo) -> i64 {
    match info.max_tokens {
        u32::MAX => -1,
        max_tokens => i64::from(max_tokens.saturating_sub(info.completion_tokens)),
    }
}

/// Requests that the model's replicas hold at once.
fn n_slots(model: &LoadedModel) -> u32 {
    let snapshot = model.executor.snapshot();
    let targets = snapshot.replicas.iter().map(|replica| replica.target);
    targets.sum::<u32>().max(1)
}

pub(super) fn slots(call: &Call<'_>) -> Result<Value, ApiError> {
    let Some(model) = model(call)? else {
        let message = "several models are served; say which: /slots?model=NAME";
        let code = ErrorCode::MissingRequiredParameter;
        return Err(ApiError::param(code, "model", message));
    };
    let running: Vec<RequestInfo> = model.executor.list();
    let holds_slot = |info: &&RequestInfo| {
        matches!(
            info.state,
            Lifecycle::Dispatched(_) | Lifecycle::Decoding(_)
        )
    };
    let running: Vec<&RequestInfo> = running.iter().filter(holds_slot).collect();
    let n_slots = (n_slots(&model) as usize).max(running.len());
    let wants_free = query_value(call.request.query(), "fail_on_no_slot");
    if wants_free.is_some_and(|value| !value.is_empty()) && running.len() == n_slots {
        return Err(ApiError::new(ErrorCode::QueueFull, "no slot available"));
    }
    let slot = |slot_idx: usize| {
        let mut slot = json!({
            "id": slot_idx, "n_ctx": model.context_length, "speculative": false,
            "is_processing": slot_idx < running.len(),
        });
        if let Some(info) = running.get(slot_idx) {
            slot["id_task"] = info.id.low_bits().into();
            slot["n_prompt_tokens"] = info.prompt_tokens.into();
            slot["next_token"] = json!([{
                "has_next_token": true, "has_new_line": false, "n_remain": n_remain(info),
                "n_decoded": info.completion_tokens,
            }]);
        }
        slot
    };
    Ok((0..n_slots).map(slot).collect())
}
