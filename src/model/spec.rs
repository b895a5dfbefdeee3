//! Sizes and switches of a model, read from metadata through the architecture table.
//!
//! Pure data once read. Everything that differs between models is a field here, so that
//! `weights`, `forward` and the backends have no case for an architecture's name.

use super::ModelError;
use super::architectures::{self, Architecture, Encoder, ResidualNorms};
use super::loop_spec::LoopSpec;
use super::plan::Plan;
use super::rope::RopeSpec;
use crate::config::Pooling;
use crate::format::{ModelFile, TensorInfo};

/// Sizes and switches. Everything that differs between architectures is a field here.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`, or the architecture.
    pub name: String,
    /// Trained context length in tokens.
    pub context_length: u32,
    /// Width of the residual stream.
    pub d_model: u32,
    /// Inner width of the feed-forward network.
    pub d_ff: u32,
    /// Blocks in the file.
    pub n_layers: u32,
    /// Query heads.
    pub n_heads: u32,
    /// Key/value heads; divides `n_heads`.
    pub n_kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Epsilon of all norms.
    pub epsilon: f32,
    /// Sliding window in tokens, 0 = full attention.
    pub window: u32,
    /// Factor on q·k before the softmax, usually `1/sqrt(head_dim)`.
    pub attention_scale: f32,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Every n-th layer has no rotary embedding; 0 = all layers have it.
    pub nope_interval: u32,
    /// q, k and v must have biases.
    pub needs_qkv_bias: bool,
    /// Query and key heads have an RMS norm of their own.
    pub has_qk_norm: bool,
    /// The logits are computed with the embedding table: the file has no `output.weight`.
    pub tied_embeddings: bool,
    /// Name of the norm before the feed-forward network within a block.
    pub feed_forward_norm: &'static str,
    /// Second norms of a block.
    pub residual_norms: ResidualNorms,
    /// Factor on embeddings.
    pub embedding_scale: f32,
    /// Segments and depth, and what happens around the core.
    pub loops: LoopSpec,
    /// Of a model that makes embeddings only.
    pub encoder: Option<EncoderSpec>,
    /// How embeddings are made, unless configured otherwise.
    pub pooling: DeclaredPooling,
    /// Bytes of all tensors in the file.
    pub weight_bytes: u64,
}

/// Sizes of an encoder beside those of all models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderSpec {
    /// What it has and has not.
    pub kind: Encoder,
    /// Learned positions; 0 where there are none.
    pub n_positions: u32,
    /// Token types; 0 where there are none.
    pub n_token_types: u32,
}

impl EncoderSpec {
    fn from_gguf(file: &ModelFile, kind: Encoder, context: u32) -> Result<Self, ModelError> {
        let n_rows = |name: &str| -> u32 {
            let rows = file
                .tensor(name)
                .and_then(|tensor| tensor.dims.get(1).copied());
            rows.and_then(|rows| u32::try_from(rows).ok()).unwrap_or(0)
        };
        let n_positions = n_rows("position_embd.weight");
        if kind.learns_positions && n_positions < context {
            let reason = format!(
                "position_embd.weight has {n_positions} positions for a context of {context} tokens"
            );
            return Err(file.invalid(reason).into());
        }
        Ok(Self {
            kind,
            n_positions,
            n_token_types: n_rows("token_types.weight"),
        })
    }
}

/// What a file says about embeddings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeclaredPooling {
    /// Nothing.
    #[default]
    None,
    /// It is an embedding model that pools so.
    Is(Pooling),
    /// Its states are no embeddings: it ranks pairs of texts.
    Ranks,
}

impl DeclaredPooling {
    fn from_gguf(file: &ModelFile, architecture: &str) -> Result<Self, ModelError> {
        let key = format!("{architecture}.pooling_type");
        Ok(match file.optional_u32(&key)? {
            None | Some(0) => Self::None,
            Some(1) => Self::Is(Pooling::Mean),
            Some(2) => Self::Is(Pooling::Cls),
            Some(3) => Self::Is(Pooling::Last),
            Some(4) => Self::Ranks,
            Some(other) => {
                return Err(ModelError::Unsupported(format!(
                    "{key} is {other}; 1 (mean), 2 (cls) and 3 (last) are supported"
                )));
            }
        })
    }
}

/// Bytes a model needs at a context length, for `inspect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeded {
    /// Weights as stored.
    pub weight_bytes: u64,
    /// f16 keys and values of one sequence that fills the context.
    pub kv_bytes: u64,
    /// Their sum; scratch, which grows with rows per quantum, is not in it.
    pub total_bytes: u64,
}

impl ModelSpec {
    /// Reads it; errors name the key.
    pub fn from_gguf(file: &ModelFile) -> Result<Self, ModelError> {
        let row = known_architecture(file)?;
        refuse_unsupported(file, row.name)?;
        check_causal(file, row)?;
        let key = |suffix: &str| format!("{}.{suffix}", row.name);
        let size = |suffix: &str| positive(file, &key(suffix));
        let d_model = size("embedding_length")?;
        let n_heads = size("attention.head_count")?;
        let n_kv_heads = file
            .optional_u32(&key("attention.head_count_kv"))?
            .unwrap_or(n_heads);
        let head_dim = head_dim(file, row.name, d_model, n_heads)?;
        if n_kv_heads == 0 || n_heads % n_kv_heads != 0 {
            return Err(file
                .invalid(format!(
                    "{} is {n_kv_heads}; it must divide the {n_heads} query heads",
                    key("attention.head_count_kv")
                ))
                .into());
        }
        let context_length = size("context_length")?;
        let window = if row.reads_window {
            file.optional_u32(&key("attention.sliding_window"))?
        } else {
            None
        };
        let name = file.optional_str("general.name")?.unwrap_or(row.name);
        let n_layers = size("block_count")?;
        Ok(Self {
            architecture: row.name.to_owned(),
            name: name.to_owned(),
            context_length,
            d_model,
            d_ff: size("feed_forward_length")?,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            vocab_size: vocab_size(file)?,
            epsilon: epsilon(file, &key(epsilon_key(row)))?,
            window: window.unwrap_or(0),
            attention_scale: file
                .optional_f32(&key("attention.scale"))?
                .filter(|scale| *scale != 0.0)
                .unwrap_or(1.0 / (head_dim as f32).sqrt()),
            rope: RopeSpec::from_gguf(file, row.name, row.rope_pairs, head_dim, context_length)?,
            nope_interval: row.nope_interval,
            needs_qkv_bias: row.needs_qkv_bias,
            has_qk_norm: row.has_qk_norm,
            tied_embeddings: file.tensor("output.weight").is_none(),
            feed_forward_norm: row.feed_forward_norm,
            residual_norms: residual_norms(file, row)?,
            embedding_scale: embedding_scale(file, &key("embedding_scale"))?,
            loops: LoopSpec::from_gguf(file, row.name, n_layers)?,
            encoder: row
                .encoder
                .map(|kind| EncoderSpec::from_gguf(file, kind, context_length))
                .transpose()?,
            pooling: DeclaredPooling::from_gguf(file, row.name)?,
            weight_bytes: file.tensors().iter().map(TensorInfo::n_bytes).sum(),
        })
    }

    /// Segments and depth.
    #[must_use]
    pub fn plan(&self) -> Plan {
        Plan {
            is_bidirectional: self.encoder.is_some(),
            ..self.loops.plan(self.n_layers)
        }
    }

    /// Whether the block rotates queries and keys.
    #[must_use]
    pub fn rotates(&self, block: u32) -> bool {
        self.nope_interval == 0 || !(block + 1).is_multiple_of(self.nope_interval)
    }

    /// Bytes of f16 keys and values per token at the default number of loops.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> u64 {
        let (keys_and_values, f16_bytes) = (2, 2);
        let plan = self.plan();
        keys_and_values
            * f16_bytes
            * u64::from(plan.virtual_layers(plan.default_loops))
            * u64::from(self.n_kv_heads)
            * u64::from(self.head_dim)
    }

    /// Bytes needed by one sequence of `context` tokens.
    #[must_use]
    pub fn memory_needed(&self, context: u32) -> MemoryNeeded {
        let kv_bytes = self.kv_bytes_per_token() * u64::from(context);
        MemoryNeeded {
            weight_bytes: self.weight_bytes,
            kv_bytes,
            total_bytes: self.weight_bytes + kv_bytes,
        }
    }
}

/// Attention to both sides is for encoders, and theirs never is one-sided.
fn check_causal(file: &ModelFile, row: &Architecture) -> Result<(), ModelError> {
    let key = format!("{}.attention.causal", row.name);
    let wanted = row.encoder.is_none();
    match file.optional_bool(&key)? {
        Some(is_causal) if is_causal != wanted => Err(ModelError::Unsupported(format!(
            "{key} is {is_causal}; only {wanted} is supported for this architecture"
        ))),
        _ => Ok(()),
    }
}

fn epsilon_key(row: &Architecture) -> &'static str {
    match row.encoder {
        Some(_) => "attention.layer_norm_epsilon",
        None => "attention.layer_norm_rms_epsilon",
    }
}

fn known_architecture(file: &ModelFile) -> Result<&'static Architecture, ModelError> {
    let name = file.str("general.architecture")?;
    architectures::find(name).ok_or_else(|| {
        ModelError::Unknown(format!(
            "architecture \"{name}\" is not supported; the known ones are {}",
            architectures::known_names()
        ))
    })
}

/// Keys whose presence (other than with a neutral value) changes the maths of the shared block.
/// Ignoring one would load a model that talks nonsense.
fn refuse_unsupported(file: &ModelFile, architecture: &str) -> Result<(), ModelError> {
    let neutral_values = [
        ("expert_count", 0.0, "mixtures of experts"),
        ("attention.clamp_kqv", 0.0, "clamped queries and keys"),
        ("attn_logit_softcapping", 0.0, "capped attention logits"),
        ("final_logit_softcapping", 0.0, "capped logits"),
        ("logit_scale", 1.0, "scaled logits"),
        ("residual_scale", 1.0, "scaled residuals"),
    ];
    for (suffix, neutral, what) in neutral_values {
        let key = format!("{architecture}.{suffix}");
        let value = match suffix {
            "expert_count" => file.optional_u32(&key)?.map(|count| count as f32),
            _ => file.optional_f32(&key)?,
        };
        if let Some(value) = value.filter(|value| *value != neutral && *value != 0.0) {
            return Err(ModelError::Unsupported(format!(
                "{key} is {value}: {what} are not supported"
            )));
        }
    }
    Ok(())
}

/// A size that may not be 0 and stays far from any overflow of products.
fn positive(file: &ModelFile, key: &str) -> Result<u32, ModelError> {
    const LARGEST: u32 = 1 << 24;
    match file.u32(key)? {
        value if (1..=LARGEST).contains(&value) => Ok(value),
        value => {
            let reason = format!("{key} is {value}; it must be within 1..={LARGEST}");
            Err(file.invalid(reason).into())
        }
    }
}

fn head_dim(
    file: &ModelFile,
    architecture: &str,
    d_model: u32,
    n_heads: u32,
) -> Result<u32, ModelError> {
    let key_length = format!("{architecture}.attention.key_length");
    let value_length = format!("{architecture}.attention.value_length");
    let head_dim = match file.optional_u32(&key_length)? {
        Some(width) => width,
        None if d_model.is_multiple_of(n_heads) => d_model / n_heads,
        None => {
            let reason = format!(
                "{key_length} is missing and {n_heads} heads do not divide the width {d_model}"
            );
            return Err(file.invalid(reason).into());
        }
    };
    if head_dim == 0 || head_dim > 4096 {
        let reason = format!("{key_length} is {head_dim}; it must be within 1..=4096");
        return Err(file.invalid(reason).into());
    }
    match file.optional_u32(&value_length)? {
        Some(width) if width != head_dim => Err(ModelError::Unsupported(format!(
            "{value_length} is {width}, but keys are {head_dim} wide; they must be equal"
        ))),
        _ => Ok(head_dim),
    }
}

fn residual_norms(file: &ModelFile, row: &Architecture) -> Result<ResidualNorms, ModelError> {
    let key = format!("{}.residual_norms", row.name);
    match file.optional_str(&key)? {
        None => Ok(row.residual_norms),
        Some(name) => ResidualNorms::named(name).ok_or_else(|| {
            ModelError::Unsupported(format!(
                "{key} is \"{name}\"; none, inside and after are supported"
            ))
        }),
    }
}

/// 1 when absent; 0 means "none" in files that carry the key for every model.
fn embedding_scale(file: &ModelFile, key: &str) -> Result<f32, ModelError> {
    match file.optional_f32(key)? {
        None | Some(0.0) => Ok(1.0),
        Some(scale) if scale.is_finite() => Ok(scale),
        Some(scale) => {
            let reason = format!("{key} is {scale}; it must be finite");
            Err(file.invalid(reason).into())
        }
    }
}

fn vocab_size(file: &ModelFile) -> Result<u32, ModelError> {
    let name = "token_embd.weight";
    let rows = file
        .tensor(name)
        .ok_or_else(|| file.invalid(format!("tensor {name} is missing")))?
        .dims
        .get(1)
        .and_then(|rows| u32::try_from(*rows).ok());
    rows.filter(|rows| *rows > 0).ok_or_else(|| {
        let reason = format!("tensor {name} must have two dimensions, the second the vocabulary");
        file.invalid(reason).into()
    })
}

fn epsilon(file: &ModelFile, key: &str) -> Result<f32, ModelError> {
    match file.f32(key)? {
        value if value.is_finite() && (0.0..1.0).contains(&value) => Ok(value),
        value => Err(file
            .invalid(format!("{key} is {value}; it must be within 0..1"))
            .into()),
    }
}
