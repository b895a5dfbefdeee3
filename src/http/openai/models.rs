//! `GET /v1/models` and `GET /v1/models/{id}`.
//!
//! Pure reading of the pool. Beside OpenAI's fields each model tells what clients of other local
//! servers look for: `max_model_len` (vLLM) and `meta` (llama-server).

use crate::http::errors::ApiError;
use crate::http::state::ServerState;
use crate::pool::LoadedModel;
use serde_json::{Value, json};
use std::time::UNIX_EPOCH;

/// All models.
#[must_use]
pub fn list(state: &ServerState) -> Value {
    let models: Vec<Value> = state.models().iter().map(|model| object(model)).collect();
    json!({"object": "list", "data": models})
}

/// One model, or 404.
pub fn one(state: &ServerState, id: &str) -> Result<Value, ApiError> {
    Ok(object(&*state.resolve(Some(id))?))
}

fn object(model: &LoadedModel) -> Value {
    let created = model.created.duration_since(UNIX_EPOCH).unwrap_or_default();
    let meta = &model.meta;
    json!({
        "id": model.name,
        "object": "model",
        "created": created.as_secs(),
        "owned_by": "tinyloop",
        "max_model_len": model.context_length,
        "aliases": model.aliases,
        "meta": {
            "architecture": meta.architecture,
            "name": meta.title,
            "n_vocab": meta.vocab_size,
            "n_ctx": model.context_length,
            "n_ctx_train": meta.trained_context_length,
            "size": meta.file_bytes,
            "loops": {
                "default": meta.loops.default,
                "max": meta.loops.max,
                "exit_rules": meta.exit_rules.names().collect::<Vec<_>>(),
            },
        },
    })
}
