//! `GET /v1/models` and `GET /v1/models/{id}`.
//!
//! Pure reading of the pool: nothing is loaded by being looked at. Beside OpenAI's fields each model tells what clients of other local
//! servers look for: `max_model_len` (vLLM) and `meta` (llama-server).

use crate::http::access::Access;
use crate::http::errors::{ApiError, LOAD_FAILED};
use crate::http::state::{ServerState, unknown_model};
use crate::pool::state::State;
use crate::pool::{LoadedModel, PoolEntry, RuntimeState, Unavailable};
use serde_json::{Value, json};
use std::time::UNIX_EPOCH;

/// The loaded models that the client may use; with `all=true` in the query every configured one, with its
/// status.
#[must_use]
pub fn list(state: &ServerState, access: &Access, query: Option<&str>) -> Value {
    let wants_all = |part: &str| matches!(part, "all=true" | "all=1");
    let is_all = query.is_some_and(|query| query.split('&').any(wants_all));
    let models: Vec<Value> = match is_all {
        true => state.entries_for(access).iter().map(with_status).collect(),
        false => {
            let models = state.models_for(access);
            models.iter().map(|model| object(model)).collect()
        }
    };
    json!({"object": "list", "data": models})
}

/// One loaded model, or why there is none; asking does not load it.
pub fn one(state: &ServerState, access: &Access, id: &str) -> Result<Value, ApiError> {
    state.check_access(id, access)?;
    let model = state.pool().look_up(id).map_err(|why| match why {
        Unavailable::Unknown(_) => unknown_model(id),
        why => why.into(),
    })?;
    Ok(object(&model))
}

/// As llama-server's router writes it: `status.value`.
fn with_status(entry: &PoolEntry) -> Value {
    let mut shown = match entry.loaded() {
        Some(model) => object(model),
        None => json!({
            "id": entry.name, "object": "model", "created": 0, "owned_by": "tinyloop",
            "aliases": entry.aliases,
        }),
    };
    shown["status"] = json!({"value": entry.state.name().name()});
    if matches!(entry.state, State::Failed(_)) {
        shown["status"]["error"] = Value::from(LOAD_FAILED);
    }
    shown["load_on_demand"] = Value::from(entry.load_on_demand);
    shown
}

/// llama.cpp's number for the kind of vocabulary: 0 = none, 1 = SentencePiece, 2 = byte-level BPE.
fn vocab_type(model: &LoadedModel) -> u8 {
    match &model.tokenizer {
        None => 0,
        Some(tokenizer) if tokenizer.adds_space_prefix() => 1,
        Some(_) => 2,
    }
}

fn object(model: &LoadedModel) -> Value {
    let created = model.created.duration_since(UNIX_EPOCH).unwrap_or_default();
    let meta = &model.meta;
    let mut shown = json!({
        "id": model.name,
        "object": "model",
        "created": created.as_secs(),
        "owned_by": "tinyloop",
        "type": meta.kind(),
        "max_model_len": model.context_length,
        "capabilities": model.features().names().collect::<Vec<_>>(),
        "aliases": model.aliases,
        // The web UI of llama-server reads it of every model, where there are several.
        "status": {"value": RuntimeState::Loaded.name()},
        "meta": {
            "architecture": meta.architecture,
            "name": meta.title,
            "vocab_type": vocab_type(model),
            "n_vocab": meta.vocab_size,
            "n_embd": meta.hidden_size,
            "n_params": meta.n_parameters,
            "ftype": meta.quantization,
            "n_ctx": model.context_length,
            "n_ctx_train": meta.trained_context_length,
            "size": meta.file_bytes,
            "embedding": meta.embedding.map(|embedding| json!({
                "pooling": embedding.pooling.name(),
                "dimensions": embedding.n_dimensions,
            })),
            "loops": {
                "default": meta.loops.default,
                "max": meta.loops.max,
                "exit_rules": meta.exit_rules.names().collect::<Vec<_>>(),
            },
        },
    });
    leave_out_unknown(model, &mut shown);
    shown
}

/// Of models that another server runs much is not known; clients count by these numbers, so that no
/// number is better than a made-up one.
fn leave_out_unknown(model: &LoadedModel, shown: &mut Value) {
    if model.context_length == u32::MAX
        && let Some(fields) = shown.as_object_mut()
    {
        fields.remove("max_model_len");
    }
    let Some(meta) = shown["meta"].as_object_mut() else {
        return; // cannot be: it was made as one
    };
    if model.context_length == u32::MAX {
        meta.remove("n_ctx");
    }
    if model.tokenizer.is_none() {
        let is_unknown = |value: &Value| *value == 0 || *value == "" || value.is_null();
        meta.retain(|_, value| !is_unknown(value));
    }
}
