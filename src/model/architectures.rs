//! The architecture table: one row per `general.architecture`, nothing else knows their names.
//!
//! All rows share one block: RMS norm, attention with rotary embedding and grouped key/value
//! heads, RMS norm, SiLU-gated feed-forward. What differs is a column here; how a model loops is
//! not, since it stands in the file (`loop_spec`). Encoders differ in more, which their own column says. Facts are from the GGUF files that the usual
//! converters write and from the models' papers and configurations.

use crate::backend::RopePairs;

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    /// `general.architecture` in the file.
    pub name: &'static str,
    /// Which models use it, for `inspect` and errors.
    pub models: &'static str,
    /// Pairs of the rotary embedding. The converters permute q and k rows for `Interleaved`.
    pub rope_pairs: RopePairs,
    /// q, k and v must have biases. Elsewhere a bias is used when the file has it.
    pub needs_qkv_bias: bool,
    /// Query and key heads have an RMS norm of their own.
    pub has_qk_norm: bool,
    /// Every n-th layer has no rotary embedding; 0 = all layers have it.
    pub nope_interval: u32,
    /// `attention.sliding_window` holds for every layer. Other converters write the key for
    /// models that do not use it, so only these rows read it.
    pub reads_window: bool,
    /// Name of the norm before the feed-forward network within a block.
    pub feed_forward_norm: &'static str,
    /// Second norms of a block, unless the file says otherwise.
    pub residual_norms: ResidualNorms,
    /// Key `model_type` of Hugging Face checkpoints that are of this architecture and follow the
    /// usual names.
    pub model_types: &'static [&'static str],
    /// Hugging Face checkpoints have q and k rows in another order than the GGUF file.
    pub permutes_heads: bool,
    /// It makes states of a whole text and no next tokens: see [`Encoder`].
    pub encoder: Option<Encoder>,
}

/// What encoders have in common: attention to both sides, layer norms with biases after each half of a
/// block and behind the embeddings, no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    /// Positions are learned (`position_embd`), not rotated.
    pub learns_positions: bool,
    /// The feed-forward network has a SiLU gate instead of a GELU.
    pub is_gated: bool,
    /// q, k and v are one tensor, `attn_qkv`.
    pub fuses_qkv: bool,
}

/// Second norms of a block: `post_attention_norm` and `post_ffw_norm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidualNorms {
    /// `x + f(norm(x))`: there are none.
    None,
    /// `x + norm2(f(norm(x)))`.
    Inside,
    /// `norm2(x + f(norm(x)))`.
    After,
}

impl ResidualNorms {
    /// The value of `{architecture}.residual_norms`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "none" => Some(Self::None),
            "inside" => Some(Self::Inside),
            "after" => Some(Self::After),
            _ => None,
        }
    }
}

/// What most rows have.
const PLAIN: Architecture = Architecture {
    name: "llama",
    models: "Llama 1-3, Mistral, SmolLM 1-2, TinyLlama, Yi",
    rope_pairs: RopePairs::Interleaved,
    needs_qkv_bias: false,
    has_qk_norm: false,
    nope_interval: 0,
    reads_window: true,
    feed_forward_norm: "ffn_norm",
    residual_norms: ResidualNorms::None,
    model_types: &["llama", "mistral"],
    permutes_heads: true,
    encoder: None,
};

/// Every architecture we know.
pub const ARCHITECTURES: &[Architecture] = &[
    PLAIN,
    Architecture {
        name: "qwen2",
        models: "Qwen 1.5, 2, 2.5",
        model_types: &["qwen2"],
        permutes_heads: false,
        rope_pairs: RopePairs::Halves,
        needs_qkv_bias: true,
        reads_window: false,
        ..PLAIN
    },
    Architecture {
        name: "qwen3",
        models: "Qwen 3 (dense)",
        model_types: &["qwen3"],
        permutes_heads: false,
        rope_pairs: RopePairs::Halves,
        has_qk_norm: true,
        reads_window: false,
        ..PLAIN
    },
    Architecture {
        name: "smollm3",
        models: "SmolLM 3",
        model_types: &["smollm3"],
        nope_interval: 4,
        reads_window: false,
        ..PLAIN
    },
    Architecture {
        name: "seed_oss",
        models: "Seed-OSS",
        model_types: &["seed_oss"],
        permutes_heads: false,
        rope_pairs: RopePairs::Halves,
        needs_qkv_bias: true,
        reads_window: false,
        feed_forward_norm: "post_attention_norm",
        ..PLAIN
    },
    Architecture {
        name: "ernie4_5",
        models: "ERNIE 4.5 (dense)",
        model_types: &["ernie4_5"],
        permutes_heads: false,
        reads_window: false,
        ..PLAIN
    },
    Architecture {
        name: "nanbeige",
        models: "Nanbeige 4.2 (looped)",
        model_types: &["nanbeige"],
        reads_window: false,
        ..PLAIN
    },
    Architecture {
        name: "ouro",
        models: "Ouro (looped)",
        model_types: &["ouro"],
        reads_window: false,
        residual_norms: ResidualNorms::Inside,
        ..PLAIN
    },
    Architecture {
        name: "raven",
        models: "Huginn and retrofitted recurrence (looped)",
        model_types: &[],
        permutes_heads: false,
        reads_window: false,
        residual_norms: ResidualNorms::After,
        ..PLAIN
    },
    Architecture {
        name: "looped-llama",
        models: "small looped models of our own",
        rope_pairs: RopePairs::Halves,
        model_types: &[],
        permutes_heads: false,
        reads_window: false,
        ..PLAIN
    },
    Architecture {
        name: "bert",
        models: "BERT, MiniLM, BGE, E5 (English), GTE: embeddings",
        model_types: &[],
        permutes_heads: false,
        reads_window: false,
        // No layer rotates.
        nope_interval: 1,
        encoder: Some(Encoder {
            learns_positions: true,
            is_gated: false,
            fuses_qkv: false,
        }),
        ..PLAIN
    },
    Architecture {
        name: "nomic-bert",
        models: "Nomic Embed 1 and 1.5: embeddings",
        model_types: &[],
        rope_pairs: RopePairs::Halves,
        permutes_heads: false,
        reads_window: false,
        encoder: Some(Encoder {
            learns_positions: false,
            is_gated: true,
            fuses_qkv: true,
        }),
        ..PLAIN
    },
];

/// The row with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|row| row.name == name)
}

/// All names, for errors: `llama, qwen2, ..`.
#[must_use]
pub fn known_names() -> String {
    let names: Vec<&str> = ARCHITECTURES.iter().map(|row| row.name).collect();
    names.join(", ")
}
