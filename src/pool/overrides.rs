//! What a load may change about a model for as long as it stays loaded: which fields, in which
//! ranges, and how they are taken over.
//!
//! Pure. A load through the admin API may carry an object of fields; nothing of it is written
//! anywhere, and the next load begins with the configuration again. Every source says here which
//! fields it takes ([`constraints`]); what it does not list is refused by name. What is not here:
//! parsing of bodies (`http`).

use super::ledger::ModelMemory;
use crate::config::{EngineConfig, ModelConfig, ModelSource, Pooling, TargetInflight};
use serde_json::{Map, Value, json};

/// Most jobs at once that a field may ask for.
const JOBS_MAX: u64 = 4096;
/// Longest context that a field may ask for.
const TOKENS_MAX: u64 = u32::MAX as u64;

/// What a field takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldRange {
    /// Whole numbers, both ends included.
    Integer {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// The same, or this word.
    IntegerOr {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
        /// Instead of a number.
        word: &'static str,
    },
    /// Any text of at most so many bytes.
    Text {
        /// Longest.
        bytes_max: usize,
    },
}

impl FieldRange {
    /// In words, for errors.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Integer { min, max } if *max == u64::MAX => {
                format!("a whole number of at least {min}")
            }
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::IntegerOr { min, max, word } => {
                format!("a whole number from {min} to {max}, or \"{word}\"")
            }
            Self::Text { bytes_max } => format!("text of at most {bytes_max} bytes"),
        }
    }

    fn takes(&self, value: &Value) -> bool {
        let is_in = |min: u64, max: u64| {
            let number = value.as_u64();
            number.is_some_and(|number| min <= number && number <= max)
        };
        match self {
            Self::Integer { min, max } => is_in(*min, *max),
            Self::IntegerOr { min, max, word } => {
                is_in(*min, *max) || value.as_str() == Some(*word)
            }
            Self::Text { bytes_max } => {
                let text = value.as_str();
                text.is_some_and(|text| text.len() <= *bytes_max)
            }
        }
    }

    /// For the admin page.
    #[must_use]
    pub fn to_json(&self) -> Value {
        match self {
            Self::Integer { min, max } if *max == u64::MAX => {
                json!({"type": "integer", "min": min})
            }
            Self::Integer { min, max } => json!({"type": "integer", "min": min, "max": max}),
            Self::IntegerOr { min, max, word } => {
                json!({"type": "integer", "min": min, "max": max, "or": word})
            }
            Self::Text { bytes_max } => json!({"type": "string", "max_bytes": bytes_max}),
        }
    }
}

/// A field that a load may override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldConstraint {
    /// Its name in the body.
    pub field: &'static str,
    /// What it takes.
    pub range: FieldRange,
}

/// All fields that a load of one model may override.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadConstraints(pub Vec<FieldConstraint>);

impl LoadConstraints {
    /// `{"replicas": {"type": "integer", "min": 1, "max": 8}, ..}`
    #[must_use]
    pub fn to_json(&self) -> Value {
        let fields = self.0.iter();
        let fields = fields.map(|one| (one.field.to_owned(), one.range.to_json()));
        Value::Object(fields.collect())
    }
}

/// Fields of a load with their values, as they came; [`apply`] checks them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadOverride(pub Map<String, Value>);

/// An override that a model does not take.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OverrideError {
    /// A field that the source does not list.
    #[error("'{field}' cannot be overridden at load; this model takes {}", known.join(", "))]
    Unknown {
        /// The field.
        field: String,
        /// Those that can.
        known: Vec<&'static str>,
    },
    /// A value that the field does not take.
    #[error("'{field}' is {value}; it must be {range}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// What came.
        value: String,
        /// What would be right.
        range: String,
    },
    /// Two fields that exclude each other.
    #[error("'{0}' and '{1}' say the same; give one of them")]
    Both(&'static str, &'static str),
}

impl OverrideError {
    /// The field to blame.
    #[must_use]
    pub fn field(&self) -> &str {
        match self {
            Self::Unknown { field, .. } => field,
            Self::OutOfRange { field, .. } => field,
            Self::Both(field, _) => field,
        }
    }
}

fn integer(field: &'static str, min: u64, max: u64) -> FieldConstraint {
    FieldConstraint {
        field,
        range: FieldRange::Integer { min, max },
    }
}

/// What a load of this model may override.
#[must_use]
pub fn constraints(config: &ModelConfig) -> LoadConstraints {
    let replica_max = u64::from(config.lifecycle.replica_max.max(1));
    let target = FieldConstraint {
        field: "target_inflight",
        range: FieldRange::IntegerOr {
            min: 1,
            max: JOBS_MAX,
            word: "auto",
        },
    };
    let mut fields = vec![
        integer("replicas", 1, replica_max),
        target,
        integer("max_queue_depth", 0, 1 << 20),
    ];
    match &config.source {
        ModelSource::File(_) => fields.extend([
            integer("context_length", 1, TOKENS_MAX),
            integer("kv_tokens", 1, 1 << 40),
            integer("kv_bytes", 1, 1 << 50),
            integer("max_sequences", 1, JOBS_MAX),
            integer("threads", 1, 1024),
        ]),
        ModelSource::LlamaServer(_) => fields.extend([
            integer("context_length", 1, TOKENS_MAX),
            integer("slots", 1, JOBS_MAX),
        ]),
        ModelSource::VllmServe(_) => fields.extend([
            integer("context_length", 1, TOKENS_MAX),
            integer("kv_bytes", 1, 1 << 50),
            integer("max_num_seqs", 1, JOBS_MAX),
            FieldConstraint {
                field: "dtype",
                range: FieldRange::Text { bytes_max: 32 },
            },
        ]),
        ModelSource::OpenaiRemote(_) => fields.push(integer("max_inflight", 1, JOBS_MAX)),
        ModelSource::Fake(_) => {}
    }
    LoadConstraints(fields)
}

/// The configuration with the overrides in it. `estimate` tells what a token of KV costs.
///
/// # Errors
/// The first field that is unknown or out of its range.
pub fn apply(
    config: &ModelConfig,
    overrides: &LoadOverride,
    kv_bytes_per_token: u64,
) -> Result<ModelConfig, OverrideError> {
    let constraints = constraints(config);
    let mut config = config.clone();
    for (field, value) in &overrides.0 {
        let known = constraints.0.iter().find(|one| one.field == field);
        let Some(constraint) = known else {
            return Err(OverrideError::Unknown {
                field: field.clone(),
                known: constraints.0.iter().map(|one| one.field).collect(),
            });
        };
        if !constraint.range.takes(value) {
            return Err(OverrideError::OutOfRange {
                field: constraint.field,
                value: shown(value),
                range: constraint.range.text(),
            });
        }
        put(&mut config, constraint.field, value, kv_bytes_per_token);
    }
    if overrides.0.contains_key("kv_tokens") && overrides.0.contains_key("kv_bytes") {
        return Err(OverrideError::Both("kv_tokens", "kv_bytes"));
    }
    Ok(config)
}

/// Puts a checked value in its place: the fields that all sources have, then the source's own.
fn put(config: &mut ModelConfig, field: &str, value: &Value, kv_bytes_per_token: u64) {
    let number = value.as_u64().unwrap_or_default();
    let number_u32 = u32::try_from(number).unwrap_or(u32::MAX);
    match field {
        "replicas" => config.lifecycle.replicas = number_u32,
        "target_inflight" => {
            config.executor.target_inflight = Some(match value.is_u64() {
                true => TargetInflight::Jobs(number_u32),
                false => TargetInflight::Auto,
            });
        }
        "max_queue_depth" => config.executor.max_queue_depth = number as usize,
        _ => {}
    }
    match (&mut config.source, field) {
        (ModelSource::File(_), "context_length") => {
            config.engine.context_length = Some(number_u32);
        }
        (ModelSource::File(_), "kv_tokens") => config.engine.kv_tokens = Some(number),
        (ModelSource::File(_), "kv_bytes") => {
            config.engine.kv_tokens = Some(number / kv_bytes_per_token.max(1));
        }
        (ModelSource::File(_), "max_sequences") => config.engine.max_sequences = number_u32,
        (ModelSource::File(_), "threads") => config.engine.threads = Some(number as usize),
        (ModelSource::LlamaServer(child), "context_length") => child.ctx_size = Some(number_u32),
        (ModelSource::LlamaServer(child), "slots") => child.slots = Some(number_u32),
        (ModelSource::VllmServe(child), "context_length") => {
            child.max_model_len = Some(number_u32);
        }
        (ModelSource::VllmServe(child), "kv_bytes") => child.kv_cache_memory_bytes = Some(number),
        (ModelSource::VllmServe(child), "max_num_seqs") => child.max_num_seqs = number_u32,
        (ModelSource::VllmServe(child), "dtype") => {
            child.dtype = value.as_str().map(str::to_owned);
        }
        (ModelSource::OpenaiRemote(remote), "max_inflight") => remote.max_inflight = number_u32,
        (_, _) => {}
    }
}

/// At most so much of a wrong value stands in an error.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// What the configuration says of a model, without secrets: for the admin page.
#[must_use]
pub fn definition(config: &ModelConfig) -> Value {
    let (lifecycle, executor) = (&config.lifecycle, &config.executor);
    let mut shown = json!({
        "replicas": lifecycle.replicas,
        "replica_max": lifecycle.replica_max,
        "enabled": lifecycle.enabled,
        "load_on_demand": lifecycle.load_on_demand,
        "idle_unload_s": lifecycle.idle_unload.map(|idle| idle.as_secs_f64()),
        "pinned": lifecycle.pinned,
        "device_weight": lifecycle.device_weight,
        "executor": {
            "max_queue_depth": executor.max_queue_depth,
            "target_inflight": executor.target_inflight.map(|target| target.to_string()),
            "default_slo_ms": executor.default_slo_ms,
            "queue_timeout_ms": executor.queue_timeout.map(|most| most.as_millis() as u64),
        },
    });
    let source = match &config.source {
        ModelSource::File(path) => {
            shown["engine"] = engine_shown(&config.engine);
            json!(path.display().to_string())
        }
        ModelSource::Fake(fake) => json!({
            "max_inflight": fake.max_inflight, "tick_s": fake.tick.as_secs_f64(),
        }),
        ModelSource::OpenaiRemote(remote) => json!({
            // A URL may carry a key in its query or a password before its host.
            "base_urls": remote.urls().into_iter().map(redacted_url).collect::<Vec<_>>(),
            "model": remote.model,
            // The name of the variable; what it holds is never read here.
            "api_key_env": remote.api_key_env,
            "max_inflight": remote.max_inflight,
        }),
        ModelSource::LlamaServer(child) => json!({
            "binary": child.binary.display().to_string(),
            "file": child.file.display().to_string(),
            "slots": child.slots,
            "ctx_size": child.ctx_size,
            "extra_args": redacted_args(&child.process.extra_args),
        }),
        ModelSource::VllmServe(child) => json!({
            "binary": child.binary.display().to_string(),
            "model": child.model,
            "dtype": child.dtype,
            "max_model_len": child.max_model_len,
            "kv_cache_memory_bytes": child.kv_cache_memory_bytes,
            "tensor_parallel_size": child.tensor_parallel_size,
            "pipeline_parallel_size": child.pipeline_parallel_size,
            "max_num_seqs": child.max_num_seqs,
            "extra_args": redacted_args(&child.process.extra_args),
        }),
    };
    let key = match &config.source {
        ModelSource::File(_) => "file",
        other => other.backend(),
    };
    shown[key] = source;
    shown
}

fn engine_shown(engine: &EngineConfig) -> Value {
    json!({
        "context_length": engine.context_length,
        "max_sequences": engine.max_sequences,
        "max_rows": engine.max_rows,
        "kv_tokens": engine.kv_tokens,
        "threads": engine.threads,
        "pooling": engine.pooling.map(Pooling::name),
        "prefix_cache": engine.prefix_cache,
        "cache_window": engine.cache_window,
    })
}

/// Without what stands before the host and without the query.
fn redacted_url(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

/// Values of flags that speak of keys, tokens, passwords or secrets are not shown, whether they come
/// in the same argument or in the next.
fn redacted_args(args: &[String]) -> Vec<String> {
    const HIDDEN: &str = "***";
    let is_secret = |flag: &str| {
        let flag = flag.to_ascii_lowercase();
        let words = ["key", "token", "password", "secret"];
        flag.starts_with('-') && words.iter().any(|word| flag.contains(word))
    };
    let mut shown = Vec::with_capacity(args.len());
    let mut hide_next = false;
    for arg in args {
        let (flag, value) = arg.split_once('=').unwrap_or((arg, ""));
        shown.push(match (hide_next, is_secret(flag), value) {
            (true, false, _) => HIDDEN.to_owned(),
            (_, true, "") => arg.clone(),
            (_, true, _) => format!("{flag}={HIDDEN}"),
            (false, false, _) => arg.clone(),
        });
        hide_next = is_secret(flag) && value.is_empty();
    }
    shown
}

/// What a model is thought to hold before it was ever loaded: see `estimate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Over all replicas.
    pub memory: ModelMemory,
    /// Of one token at the default depth; 0 when unknown.
    pub kv_bytes_per_token: u64,
}
