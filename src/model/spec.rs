//! Sizes and switches of a model, read from metadata through the architecture table. (stub)
use super::ModelError;
use crate::format::Gguf;

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
    /// Key/value heads.
    pub n_kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Epsilon of RMS norms.
    pub epsilon: f32,
    /// Sliding window in tokens, 0 = full attention.
    pub window: u32,
}

impl ModelSpec {
    /// Reads it; errors name the key.
    pub fn from_gguf(_file: &Gguf) -> Result<Self, ModelError> {
        unimplemented!()
    }
}
