//! What a load may change about a model for as long as it stays loaded: which fields, in which
//! ranges, and how they are taken over.
//!
//! Pure. A load through the admin API may carry an object of fields; nothing of it is written
//! anywhere, and the next load begins with the configuration again. Every source says here which
//! fields it takes ([`constraints`]); what it does not list is refused by name. The ranges are those
//! that can be loaded, as far as that is known before ([`Known`]): the model's own context, what the
//! device may hold. A field's range may depend on the fields before it in the list, which is the order
//! in which they are taken over. What is not here: parsing of bodies (`http`), what is shown of the
//! configuration itself (`definition`).

use super::estimate_foreign::SLOT_TOKENS;
use super::ledger::ModelMemory;
use crate::backend::{CacheWindow, PAGE_TOKENS};
use crate::config::{EngineConfig, ModelConfig, ModelSource, TargetInflight, VllmServeConfig};
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

/// What is known of a model before it is loaded; the default is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Weights and scratch buffers of one replica.
    pub fixed_bytes: u64,
    /// All that one replica holds as it is configured, KV too; 0 = unknown.
    pub replica_bytes: u64,
    /// Of one token at the default depth; 0 = unknown.
    pub kv_bytes_per_token: u64,
    /// Longest context that the model was made for.
    pub trained_context: Option<u32>,
    /// Most tokens that its KV pool could count.
    pub kv_tokens_max: Option<u64>,
    /// What models may hold on its device; `u64::MAX` = no limit.
    pub limit_bytes: u64,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            fixed_bytes: 0,
            replica_bytes: 0,
            kv_bytes_per_token: 0,
            trained_context: None,
            kv_tokens_max: None,
            limit_bytes: u64::MAX,
        }
    }
}

impl Known {
    /// From an estimate over so many replicas and the limit of its device.
    #[must_use]
    pub fn of(estimate: &Estimate, n_replicas: u32, limit_bytes: u64) -> Self {
        let memory = &estimate.memory;
        let fixed = memory.weight_bytes.saturating_add(memory.scratch_bytes);
        Self {
            fixed_bytes: fixed / u64::from(n_replicas.max(1)),
            replica_bytes: memory.total_bytes() / u64::from(n_replicas.max(1)),
            kv_bytes_per_token: estimate.kv_bytes_per_token,
            trained_context: estimate.trained_context,
            kv_tokens_max: estimate.kv_tokens_max,
            limit_bytes,
        }
    }

    /// Replicas that an empty device could hold; at least one.
    fn replicas_most(&self) -> u64 {
        match self.limit_bytes {
            u64::MAX => u64::MAX,
            limit => (limit / self.replica_bytes.max(self.fixed_bytes).max(1)).max(1),
        }
    }

    /// The same where the size of a replica's KV is overridden too: that is checked against the rest.
    fn with_any_kv(&self) -> Self {
        Self {
            replica_bytes: self.fixed_bytes,
            ..*self
        }
    }

    /// Bytes of KV that each of so many replicas could have on an empty device.
    fn kv_bytes_most(&self, n_replicas: u32) -> u64 {
        match self.limit_bytes {
            u64::MAX => BYTES_MAX,
            limit => (limit / u64::from(n_replicas.max(1))).saturating_sub(self.fixed_bytes),
        }
    }

    /// The same in tokens.
    fn kv_tokens_most(&self, n_replicas: u32) -> u64 {
        let by_bytes = match self.kv_bytes_per_token {
            0 => u64::MAX,
            each => self.kv_bytes_most(n_replicas) / each,
        };
        let most = by_bytes.min(self.kv_tokens_max.unwrap_or(u64::MAX));
        most.min(1 << 40)
    }

    fn context_most(&self) -> u64 {
        self.trained_context.map_or(TOKENS_MAX, u64::from)
    }
}

/// What a load of this model may override. An upper end is never below the lower one: a model that
/// does not fit at all is refused for want of room, with the numbers.
#[must_use]
pub fn constraints(config: &ModelConfig, known: &Known) -> LoadConstraints {
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
    match &config.source {
        ModelSource::File(_) => fields.extend(native_fields(config, known)),
        ModelSource::LlamaServer(child) => {
            let held_most = known.kv_tokens_most(n_replicas);
            let slots = u64::from(child.slots_usual()).max(1);
            // Of one request; each slot is rounded up.
            let fits = (held_most / slots).min(TOKENS_MAX / slots);
            let most = known
                .context_most()
                .min(fits / SLOT_TOKENS * SLOT_TOKENS)
                .max(SLOT_TOKENS);
            let slots_most = (held_most / SLOT_TOKENS).clamp(1, LLAMA_SLOTS_MAX);
            fields.extend([
                integer("slots", 1, slots_most),
                // It aborts when it is asked for one token.
                integer("context_length", SLOT_TOKENS, most),
            ]);
        }
        ModelSource::VllmServe(child) => {
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
        ModelSource::OpenaiRemote(_) => fields.push(integer("max_inflight", 1, JOBS_MAX)),
        ModelSource::Fake(_) => {}
    }
    LoadConstraints(fields)
}

/// The fields of the built-in engine. What its limits refuse is out of range here (`engine/limits`).
fn native_fields(config: &ModelConfig, known: &Known) -> [FieldConstraint; 5] {
    let engine = &config.engine;
    let most = known.kv_tokens_most(config.lifecycle.replicas);
    let n_cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    // With a window a context may be longer than the pool.
    let held_most = match (engine.cache_window, engine.kv_tokens) {
        (0, Some(kv_tokens)) => kv_tokens.min(most),
        (0, None) => most,
        (_, _) => u64::MAX,
    };
    let context_least = u64::from(engine.cache_window.max(1));
    let context_most = known.context_most().min(held_most).max(context_least);
    let kv_least = kv_tokens_least(engine, known);
    let kv_most = most.max(kv_least);
    let each = known.kv_bytes_per_token;
    let (bytes_least, bytes_most) = match each {
        0 => (1, BYTES_MAX),
        each => (
            kv_least.saturating_mul(each),
            // A few bytes more make no further token.
            kv_most.saturating_mul(each).saturating_add(each - 1),
        ),
    };
    [
        integer("threads", 1, n_cores),
        integer("context_length", context_least, context_most),
        integer("kv_tokens", kv_least, kv_most),
        integer("kv_bytes", bytes_least, bytes_most),
        integer("max_sequences", 1, sequences_most(engine, known, most)),
    ]
}

/// Where nobody sets the size of the KV pool it is a quarter of a context for each sequence, as
/// `engine/limits` has it; the pool may have `kv_tokens_most`.
fn sequences_most(engine: &EngineConfig, known: &Known, kv_tokens_most: u64) -> u64 {
    let usual = u64::from(EngineConfig::CONTEXT_DEFAULT).min(known.context_most());
    let context = engine.context_length.map_or(usual, u64::from).max(1);
    match engine.kv_tokens {
        Some(_) => JOBS_MAX,
        None => (kv_tokens_most.saturating_mul(4) / context).clamp(1, JOBS_MAX),
    }
}

/// The smallest KV pool: one context in its window. A context that nobody set shrinks with the pool.
fn kv_tokens_least(engine: &EngineConfig, known: &Known) -> u64 {
    let page = PAGE_TOKENS as u64;
    let context = match (engine.context_length, engine.cache_window) {
        (Some(context), _) => context,
        (None, 0) => return page,
        (None, _) => EngineConfig::CONTEXT_DEFAULT.min(known.context_most() as u32),
    };
    let window = CacheWindow {
        tokens: engine.cache_window,
        n_kept: 0,
    };
    let n_blocks = window.blocks_max(context as usize, 1) as u64;
    u64::from(context).min(n_blocks.saturating_mul(page)).max(1)
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
    let listed: Vec<&'static str> = {
        let all = constraints(config, known).0;
        all.iter().map(|one| one.field).collect()
    };
    let is_listed = |field: &String| listed.contains(&field.as_str());
    if let Some(field) = overrides.0.keys().find(|field| !is_listed(field)) {
        return Err(OverrideError::Unknown {
            field: field.clone(),
            known: listed,
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
    let mut config = config.clone();
    if overrides.0.contains_key("kv_tokens") || overrides.0.contains_key("kv_bytes") {
        config.engine.kv_tokens = None; // what it was does not limit the context any more
    }
    for field in listed {
        let Some(value) = overrides.0.get(field) else {
            continue;
        };
        // With what was taken over before it.
        let now = constraints(&config, known).0;
        let range = now.into_iter().find(|one| one.field == field);
        if let Some(FieldConstraint { range, .. }) = range
            && !range.takes(value)
        {
            return Err(OverrideError::OutOfRange {
                field,
                value: shown(value),
                range: range.text(),
            });
        }
        put(&mut config, field, value, known.kv_bytes_per_token);
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
        }
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

/// What a model is thought to hold before it was ever loaded, and what its files say of it: see
/// `estimate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Over all replicas.
    pub memory: ModelMemory,
    /// Of one token at the default depth; 0 when unknown.
    pub kv_bytes_per_token: u64,
    /// Longest context that the model was made for.
    pub trained_context: Option<u32>,
    /// Most tokens that its KV pool could count.
    pub kv_tokens_max: Option<u64>,
}
