//! Lists of models in LM Studio's words, v0 and v1.
//!
//! Pure reading of the pool: nothing is loaded by being looked at. What a model that is not loaded would be
//! is not known, except how it is called.

use crate::http::access::Access;
use crate::http::errors::ApiError;
use crate::http::state::{ServerState, unknown_model};
use crate::pool::{LoadedModel, PoolEntry};
use serde_json::{Value, json};

/// What is not known.
const UNKNOWN: &str = "unknown";

pub(super) fn v0_list(state: &ServerState, access: &Access) -> Value {
    let models: Vec<Value> = state.entries_for(access).iter().map(v0_object).collect();
    json!({"object": "list", "data": models})
}

pub(super) fn v0_one(state: &ServerState, access: &Access, id: &str) -> Result<Value, ApiError> {
    state.check_access(id, access)?;
    let entry = state.pool().find(id).ok_or_else(|| unknown_model(id))?;
    Ok(v0_object(&entry))
}

fn v0_object(entry: &PoolEntry) -> Value {
    let mut object = json!({
        "id": entry.name, "object": "model", "type": "llm", "publisher": publisher(&entry.name),
        "arch": UNKNOWN, "compatibility_type": "gguf", "quantization": UNKNOWN,
        "state": "not-loaded", "max_context_length": 0,
    });
    if let Some(model) = entry.loaded() {
        let meta = &model.meta;
        object["type"] = meta.kind().into();
        object["arch"] = or_unknown(&meta.architecture).into();
        object["compatibility_type"] = format_of(model).into();
        object["quantization"] = or_unknown(&meta.quantization).into();
        object["state"] = "loaded".into();
        object["max_context_length"] = longest(model).into();
        object["loaded_context_length"] = model.context_length.into();
        if takes_tools(model) {
            object["capabilities"] = json!(["tool_use"]);
        }
    }
    object
}

/// `model_info` of answers.
pub(super) fn v0_info(model: &LoadedModel) -> Value {
    json!({
        "arch": or_unknown(&model.meta.architecture), "quant": or_unknown(&model.meta.quantization),
        "format": format_of(model), "context_length": model.context_length,
    })
}

/// `runtime` of answers.
pub(super) fn v0_runtime(model: &LoadedModel) -> Value {
    let name = match model.meta.backend.as_str() {
        "" => "tinyloop".to_owned(),
        backend => format!("tinyloop {backend}"),
    };
    json!({
        "name": name, "version": env!("CARGO_PKG_VERSION"),
        "supported_formats": ["gguf", "safetensors"],
    })
}

pub(super) fn list(state: &ServerState, access: &Access) -> Value {
    let models: Vec<Value> = state.entries_for(access).iter().map(object).collect();
    json!({"models": models})
}

fn object(entry: &PoolEntry) -> Value {
    let mut object = json!({
        "type": "llm", "publisher": publisher(&entry.name), "key": entry.name,
        "display_name": entry.name, "architecture": null, "quantization": null, "size_bytes": 0,
        "params_string": null, "loaded_instances": [], "max_context_length": 0, "format": null,
        "capabilities": {"vision": false, "trained_for_tool_use": false}, "description": null,
    });
    let Some(model) = entry.loaded() else {
        return object;
    };
    let meta = &model.meta;
    if meta.makes_only_embeddings() {
        object["type"] = "embedding".into();
    }
    if !meta.title.is_empty() {
        object["display_name"] = meta.title.as_str().into();
    }
    if !meta.architecture.is_empty() {
        object["architecture"] = meta.architecture.as_str().into();
    }
    if meta.n_parameters > 0 {
        let bits = meta.file_bytes as f64 * 8.0 / meta.n_parameters as f64;
        object["quantization"] = json!({
            "name": meta.quantization, "bits_per_weight": (bits * 100.0).round() / 100.0,
        });
        object["params_string"] = params_string(meta.n_parameters).into();
    }
    object["size_bytes"] = meta.file_bytes.into();
    object["max_context_length"] = longest(model).into();
    object["format"] = format_of(model).into();
    object["capabilities"]["trained_for_tool_use"] = takes_tools(model).into();
    let snapshot = model.executor.snapshot();
    let slots: u32 = snapshot.replicas.iter().map(|replica| replica.target).sum();
    object["loaded_instances"] = json!([{
        "id": model.name,
        "config": {"context_length": model.context_length, "parallel": slots.max(1)},
    }]);
    object
}

fn longest(model: &LoadedModel) -> u32 {
    model.meta.trained_context_length.max(model.context_length)
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { UNKNOWN } else { text }
}

/// Whose model it is, where its name says so.
fn publisher(name: &str) -> &str {
    name.split_once('/').map_or("tinyloop", |(owner, _)| owner)
}

/// A folder holds safetensors; everything else is GGUF, inside or outside the program.
fn format_of(model: &LoadedModel) -> &'static str {
    match model.meta.file.ends_with(".safetensors") {
        true => "safetensors",
        false => "gguf",
    }
}

fn takes_tools(model: &LoadedModel) -> bool {
    let template = model.chat_template.as_ref();
    template.is_ok_and(|template| template.source().contains("tools"))
}

/// `135M`, `1.7B`
fn params_string(n: u64) -> String {
    let n = n as f64;
    let (number, unit) = match n {
        n if n >= 1e9 => (n / 1e9, "B"),
        n if n >= 1e6 => (n / 1e6, "M"),
        n => (n / 1e3, "K"),
    };
    match number {
        number if number < 10.0 => format!("{}{unit}", (number * 10.0).round() / 10.0),
        number => format!("{}{unit}", number.round()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes() {
        assert_eq!(publisher("qwen/qwen3-8b"), "qwen");
        assert_eq!(publisher("small"), "tinyloop");
        assert_eq!(params_string(134_515_008), "135M");
        assert_eq!(params_string(1_711_376_384), "1.7B");
        assert_eq!(params_string(3_000_000), "3M");
        assert_eq!(params_string(7_200), "7.2K");
    }
}
