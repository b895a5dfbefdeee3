//! What a load may change about a model for as long as it stays loaded: which fields, in which
//! ranges, and how they are taken over.
//!
//! Pure. A load through the admin API may carry an object of fields; nothing of it is written
//! anywhere, and the next load begins with the configuration again. Every source says here which
//! fields it takes ([`constraints`]); what it does not list is refused by name. The ranges are those
//! that can be loaded, as far as that is known before ([`Known`]): the model's own context, what the
//! device may hold (`sizes`). A field's range may depend on the others of the same load. A flag in
//! `extra_args` that says the same as a field gives way to its override. What is not here: parsing of bodies (`http`), what is shown of the
//! configuration itself (`definition`).

use super::estimate_foreign::SLOT_TOKENS;
pub use super::sizes::{Estimate, Known, SizeShape};
use super::sizes::{LlamaSizes, NativeSizes, largest};
use crate::config::{
    EngineConfig, LlamaServerConfig, ModelConfig, ModelSource, TargetInflight, VllmServeConfig,
};
use serde_json::{Map, Value, json};

/// Most jobs at once that a field may ask for.
const JOBS_MAX: u64 = 4096;
/// Longest context that a field may ask for.
const TOKENS_MAX: u64 = u32::MAX as u64;
/// Most bytes that a field may ask for where the device's limit is not known.
const BYTES_MAX: u64 = 1 << 50;
/// Most slots that a llama-server starts with.
const LLAMA_SLOTS_MAX: u64 = 256;
/// What vLLM takes for `--dtype`.
const VLLM_DTYPES: &[&str] = &["auto", "half", "float16", "bfloat16", "float", "float32"];

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
    /// One of these words.
    OneOf(&'static [&'static str]),
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
            Self::OneOf(words) => format!("one of \"{}\"", words.join("\", \"")),
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
            Self::OneOf(words) => value.as_str().is_some_and(|word| words.contains(&word)),
        }
    }

    /// Whether it is a word or number such as the field takes, in its range or not.
    fn is_of_kind(&self, value: &Value) -> bool {
        match self {
            Self::Integer { .. } => value.is_u64(),
            Self::IntegerOr { .. } => value.is_u64() || value.is_string(),
            Self::OneOf(_) => value.is_string(),
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
            Self::OneOf(words) => json!({"type": "string", "enum": words}),
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
    /// Each is in its range, and yet the model cannot be loaded so.
    #[error("the model cannot be loaded with '{}': {why}", fields.join("', '"))]
    Together {
        /// The fields, in the order of the body; at least one.
        fields: Vec<String>,
        /// What contradicts what.
        why: String,
    },
}

impl OverrideError {
    /// The field to blame.
    #[must_use]
    pub fn field(&self) -> &str {
        match self {
            Self::Unknown { field, .. } => field,
            Self::OutOfRange { field, .. } => field,
            Self::Both(field, _) => field,
            Self::Together { fields, .. } => fields.first().map_or("", String::as_str),
        }
    }
}

fn integer(field: &'static str, min: u64, max: u64) -> FieldConstraint {
    FieldConstraint {
        field,
        range: FieldRange::Integer { min, max },
    }
}

/// What a load of this model may override. An upper end is never below the lower one: a model that
/// does not fit at all is refused for want of room, with the numbers.
#[must_use]
pub fn constraints(config: &ModelConfig, known: &Known) -> LoadConstraints {
    let config = settled(config);
    ranges(&config, &config, &LoadOverride::default(), known)
}

/// With what `extra_args` say of fields in the fields: there an override finds it.
fn settled(config: &ModelConfig) -> ModelConfig {
    let mut config = config.clone();
    match &mut config.source {
        ModelSource::LlamaServer(child) => *child = child.settled(),
        ModelSource::VllmServe(child) => *child = child.settled(),
        ModelSource::File(_) | ModelSource::OpenaiRemote(_) | ModelSource::Fake(_) => {}
    }
    config
}

/// Each field's range beside the others as they stand in `config`. `estimated`: what `known` speaks of;
/// `asked`: which fields the same load overrides.
fn ranges(
    config: &ModelConfig,
    estimated: &ModelConfig,
    asked: &LoadOverride,
    known: &Known,
) -> LoadConstraints {
    let replica_max = u64::from(config.lifecycle.replica_max.max(1)).min(known.replicas_most());
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
    let n_replicas = config.lifecycle.replicas;
    match (&config.source, &estimated.source) {
        (ModelSource::File(_), _) => {
            let sizes = NativeSizes {
                known,
                estimated: &estimated.engine,
                n_replicas,
            };
            fields.extend(native_fields(&config.engine, &sizes, asked));
        }
        (ModelSource::LlamaServer(child), ModelSource::LlamaServer(estimated)) => {
            let sizes = LlamaSizes {
                known,
                estimated,
                n_replicas,
            };
            fields.extend(llama_fields(child, &sizes, asked));
        }
        (ModelSource::VllmServe(child), _) => {
            let least = vllm_kv_bytes_least(child, known);
            let most = known.kv_bytes_most(n_replicas).max(least);
            fields.extend([
                integer("max_num_seqs", 1, JOBS_MAX),
                integer("context_length", 1, known.context_most()),
                integer("kv_bytes", least, most),
                FieldConstraint {
                    field: "dtype",
                    range: FieldRange::OneOf(VLLM_DTYPES),
                },
            ]);
        }
        (ModelSource::OpenaiRemote(_), _) => fields.push(integer("max_inflight", 1, JOBS_MAX)),
        (ModelSource::LlamaServer(_) | ModelSource::Fake(_), _) => {}
    }
    LoadConstraints(fields)
}

/// Of one request; each slot is rounded up.
fn llama_fields(
    child: &LlamaServerConfig,
    sizes: &LlamaSizes<'_>,
    asked: &LoadOverride,
) -> [FieldConstraint; 2] {
    let slots = u64::from(child.slots_usual()).max(1);
    let fits = |n: u64| sizes.fit(slots, Some(n.saturating_mul(SLOT_TOKENS)));
    let most = sizes.known.context_most().min(TOKENS_MAX / slots) / SLOT_TOKENS;
    let context_most = largest(1, most, fits).saturating_mul(SLOT_TOKENS);
    // Beside another context its smallest: that is checked after it.
    let context = asked
        .0
        .contains_key("context_length")
        .then_some(SLOT_TOKENS);
    let slots_most = largest(1, LLAMA_SLOTS_MAX, |n| sizes.fit(n, context));
    [
        integer("slots", 1, slots_most),
        // It aborts when it is asked for one token.
        integer("context_length", SLOT_TOKENS, context_most),
    ]
}

/// The fields of the built-in engine. What its limits refuse is out of range here (`engine/limits`).
fn native_fields(
    engine: &EngineConfig,
    sizes: &NativeSizes<'_>,
    asked: &LoadOverride,
) -> [FieldConstraint; 5] {
    let known = sizes.known;
    let n_cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let with_context = |n_tokens: u64| {
        let mut engine = engine.clone();
        engine.context_length = u32::try_from(n_tokens).ok();
        if asked.0.contains_key("kv_tokens") || asked.0.contains_key("kv_bytes") {
            // The pool is checked after it, against this context.
            engine.kv_tokens = Some(sizes.kv_tokens_least(&engine));
        }
        // With a window a context may be longer than the pool.
        let is_held = sizes.kv_tokens_least(&engine) <= engine.kv_tokens.unwrap_or(u64::MAX);
        is_held && sizes.fit(&engine)
    };
    let context_least = u64::from(engine.cache_window.max(1));
    let context_most = largest(context_least, known.context_most(), with_context);
    let kv_least = sizes.kv_tokens_least(engine);
    let kv_most = sizes.kv_tokens_most(engine).max(kv_least);
    let (bytes_least, bytes_most) = match known.kv_bytes_per_token {
        0 => (1, BYTES_MAX),
        each => (
            kv_least.saturating_mul(each),
            // A few bytes more make no further token.
            kv_most.saturating_mul(each).saturating_add(each - 1),
        ),
    };
    let with_sequences = |n: u64| {
        sizes.fit(&EngineConfig {
            max_sequences: u32::try_from(n).unwrap_or(u32::MAX),
            ..engine.clone()
        })
    };
    [
        integer("threads", 1, n_cores),
        integer("context_length", context_least, context_most),
        integer("kv_tokens", kv_least, kv_most),
        integer("kv_bytes", bytes_least, bytes_most),
        integer("max_sequences", 1, largest(1, JOBS_MAX, with_sequences)),
    ]
}

/// vLLM refuses to start where one context does not fit. Its bytes are those of one GPU.
fn vllm_kv_bytes_least(child: &VllmServeConfig, known: &Known) -> u64 {
    let context = child.max_model_len.or(known.trained_context).unwrap_or(0);
    let all = known.kv_bytes_per_token.saturating_mul(context.into());
    (all / u64::from(child.gpus().max(1))).max(1)
}

/// The configuration with the overrides in it.
///
/// # Errors
/// The first field that is unknown or out of its range.
pub fn apply(
    config: &ModelConfig,
    overrides: &LoadOverride,
    known: &Known,
) -> Result<ModelConfig, OverrideError> {
    let configured = settled(config);
    let listed = constraints(&configured, known).0;
    let names: Vec<&'static str> = listed.iter().map(|one| one.field).collect();
    let is_listed = |field: &String| names.contains(&field.as_str());
    if let Some(field) = overrides.0.keys().find(|field| !is_listed(field)) {
        return Err(OverrideError::Unknown {
            field: field.clone(),
            known: names,
        });
    }
    if overrides.0.contains_key("kv_tokens") && overrides.0.contains_key("kv_bytes") {
        return Err(OverrideError::Both("kv_tokens", "kv_bytes"));
    }
    const SIZES: [&str; 6] = [
        "kv_tokens",
        "kv_bytes",
        "context_length",
        "max_sequences",
        "slots",
        "max_num_seqs",
    ];
    let known = &match SIZES.iter().any(|field| overrides.0.contains_key(*field)) {
        true => known.with_any_kv(),
        false => *known,
    };
    let mut config = configured.clone();
    for one in &listed {
        // What no number of the kind could be is refused below.
        if let Some(value) = overrides.0.get(one.field)
            && one.range.is_of_kind(value)
        {
            put(&mut config, one.field, value, known.kv_bytes_per_token);
        }
    }
    // Each with all the others in place.
    let listed = ranges(&config, &configured, overrides, known).0;
    for FieldConstraint { field, range } in listed {
        let value = overrides.0.get(field);
        if let Some(value) = value.filter(|value| !range.takes(value)) {
            return Err(OverrideError::OutOfRange {
                field,
                value: shown(value),
                range: range.text(),
            });
        }
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
        (ModelSource::LlamaServer(child), "context_length") => {
            // Of one request; told their number, it gives each slot the same share.
            let slots = child.slots_usual();
            child.slots = Some(slots);
            child.ctx_size = Some(number_u32.saturating_mul(slots));
            child.process.drop_flag(LlamaServerConfig::SLOT_FLAGS);
            child.process.drop_flag(LlamaServerConfig::CONTEXT_FLAGS);
        }
        (ModelSource::LlamaServer(child), "slots") => {
            child.slots = Some(number_u32);
            child.process.drop_flag(LlamaServerConfig::SLOT_FLAGS);
        }
        (ModelSource::VllmServe(child), "context_length") => {
            child.max_model_len = Some(number_u32);
            child.process.drop_flag(VllmServeConfig::CONTEXT_FLAGS);
        }
        (ModelSource::VllmServe(child), "kv_bytes") => {
            child.kv_cache_memory_bytes = Some(number);
            child.process.drop_flag(VllmServeConfig::KV_FLAGS);
        }
        (ModelSource::VllmServe(child), "max_num_seqs") => {
            child.max_num_seqs = number_u32;
            child.process.drop_flag(VllmServeConfig::SEQS_FLAGS);
        }
        (ModelSource::VllmServe(child), "dtype") => {
            child.dtype = value.as_str().map(str::to_owned);
            child.process.drop_flag(VllmServeConfig::DTYPE_FLAGS);
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
