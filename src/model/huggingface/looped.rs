//! Checkpoints of looped models with names of their own: Raven's class (Huginn and retrofitted
//! recurrence) and the small looped Llama of our own experiments.
//!
//! Raven is one class with switches: the published models differ in block, heads, biases, scale and
//! norms. So everything is read from config.json and from the tensors there are, nothing from the
//! model's name. Facts: the models' papers (arXiv 2502.05171, 2511.07384) and configuration files.

use super::config::Config;
use super::rope;
use super::translation::Translation;
use crate::format::{FormatError, MetaValue};
use crate::model::ModelError;
use serde_json::json;

fn text(text: &str) -> MetaValue {
    MetaValue::String(text.to_owned())
}

/// Sizes that both layouts have.
struct Sizes {
    d_model: u32,
    d_ff: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    context: u32,
    epsilon: f32,
    /// Blocks of prelude, core, coda.
    segments: [u32; 3],
    default_loops: u32,
    max_loops: u32,
}

impl Sizes {
    fn n_layers(&self) -> u32 {
        self.segments
            .iter()
            .fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Sets the keys of `architecture`.
    fn set(&self, architecture: &str, translation: &mut Translation<'_>) {
        translation.set("general.architecture", text(architecture));
        let title = translation.directory_name().to_owned();
        translation.set("general.name", text(&title));
        translation.set_u32s(
            architecture,
            &[
                ("context_length", self.context),
                ("embedding_length", self.d_model),
                ("feed_forward_length", self.d_ff),
                ("block_count", self.n_layers()),
                ("attention.head_count", self.n_heads),
                ("attention.head_count_kv", self.n_kv_heads),
                ("attention.key_length", self.head_dim),
                ("attention.value_length", self.head_dim),
                ("num_loops", self.default_loops),
                ("loop.max", self.max_loops),
                ("loop.prelude", self.segments[0]),
                ("loop.coda", self.segments[2]),
            ],
        );
        let key = |suffix: &str| format!("{architecture}.{suffix}");
        let epsilon = MetaValue::F32(self.epsilon);
        translation.set(&key("attention.layer_norm_rms_epsilon"), epsilon);
        translation.set(&key("skip_loop_final_norm"), MetaValue::Bool(true));
    }

    /// The two halves of an adapter `(d_model, [state, input])`.
    fn adapter(&self, name: &str, translation: &mut Translation<'_>) -> Result<(), FormatError> {
        let width = self.d_model;
        let weight = format!("{name}.weight");
        translation.take_columns(&weight, "loop_state.weight", 0, width)?;
        translation.take_columns(&weight, "loop_input.weight", width, width)?;
        translation.take(&format!("{name}.bias"), "loop_input.bias")
    }
}

/// Names of a segment's blocks, numbered through all three segments: `(theirs, ours)` each.
fn blocks<'n>(
    names: [&'n str; 3],
    segments: [u32; 3],
) -> impl Iterator<Item = (String, String)> + 'n {
    let numbered = names.into_iter().zip(segments);
    let theirs = numbered.flat_map(|(name, n)| (0..n).map(move |i| format!("{name}.{i}")));
    theirs
        .enumerate()
        .map(|(layer, theirs)| (theirs, format!("blk.{layer}")))
}

/// Raven's class.
pub(super) fn raven(config: &Config, translation: &mut Translation<'_>) -> Result<(), ModelError> {
    refuse_unsupported(config)?;
    // A block with four norms has norm_2 and norm_4 after the residual sums; one with two has its
    // second norm before the network. No switch says which, but the tensors do, and with them go
    // the rotary embedding and the norm of the state before the coda.
    let is_sandwich = translation.has("transformer.core_block.0.norm_4.weight");
    let sizes = raven_sizes(config, is_sandwich)?;
    let name = "raven";
    sizes.set(name, translation);
    let key = |suffix: &str| format!("{name}.{suffix}");
    let base = config.optional_f32("rope_base")?.unwrap_or(50_000.0);
    if is_sandwich {
        let value = MetaValue::F32(base);
        translation.set(&key("rope.freq_base"), value);
        translation.set(&key("loop.output_norm"), text("output_norm"));
    } else {
        rope::translate(config, name, sizes.head_dim, base, translation)?;
    }
    let norms = if is_sandwich { "after" } else { "none" };
    translation.set(&key("residual_norms"), text(norms));
    raven_state(config, translation)?;
    translation.take("transformer.wte.weight", "token_embd.weight")?;
    translation.take("transformer.ln_f.weight", "output_norm.weight")?;
    match config
        .optional_bool("tie_embeddings")?
        .or(config.optional_bool("tie_word_embeddings")?)
    {
        Some(true) => translation.ignore("lm_head.weight"),
        _ => translation.take("lm_head.weight", "output.weight")?,
    }
    sizes.adapter("transformer.adapter", translation)?;
    let names = [
        "transformer.prelude",
        "transformer.core_block",
        "transformer.coda",
    ];
    for (theirs, ours) in blocks(names, sizes.segments) {
        raven_block(&sizes, is_sandwich, &theirs, &ours, translation)?;
    }
    Ok(())
}

fn raven_sizes(config: &Config, is_sandwich: bool) -> Result<Sizes, FormatError> {
    let n_heads = match config.optional_u32("num_attention_heads")? {
        Some(n_heads) => n_heads,
        None => config.u32("n_heads")?,
    };
    let d_model = config.u32("n_embd")?;
    let mean = config.u32("mean_recurrence")?;
    let context = match config.optional_u32("max_position_embeddings")? {
        Some(context) if !is_sandwich => context,
        _ => config.u32("block_size")?,
    };
    Ok(Sizes {
        d_model,
        d_ff: config.u32("intermediate_size")?,
        n_heads,
        n_kv_heads: config
            .optional_u32("num_key_value_heads")?
            .unwrap_or(n_heads),
        head_dim: d_model / n_heads.max(1),
        context,
        epsilon: config.f32("norm_eps")?,
        segments: [
            config.n_blocks("n_layers_in_prelude")?,
            config.n_blocks("n_layers_in_recurrent_block")?,
            config.n_blocks("n_layers_in_coda")?,
        ],
        default_loops: mean,
        // Trained with a random depth around the mean; twice the mean still helps a little.
        max_loops: mean.saturating_mul(2),
    })
}

fn refuse_unsupported(config: &Config) -> Result<(), FormatError> {
    config.must_be("injection_type", &[json!("linear")])?;
    config.must_be("test_time_noise", &[json!(0), json!(0.0)])?;
    config.must_be("nonlin_name", &[json!("SiLU"), json!("silu")])?;
    config.must_be("mlp_class_name", &[json!("GatedMLP")])?;
    config.must_be(
        "norm_class_name",
        &[json!("RMSNorm_llama"), json!("RMSNorm")],
    )?;
    config.must_be("state_init", &[json!("like-init"), json!("zero")])
}

/// Scale of embeddings and of the random initial state.
fn raven_state(config: &Config, translation: &mut Translation<'_>) -> Result<(), FormatError> {
    let key = |suffix: &str| format!("raven.{suffix}");
    let init = config.optional_object("init_values")?;
    let in_init = |name: &str| match &init {
        Some(init) => init.optional_f32(name),
        None => Ok(None),
    };
    let scale = in_init("embed_scale")?.unwrap_or(1.0);
    if scale != 1.0 {
        translation.set(&key("embedding_scale"), MetaValue::F32(scale));
    }
    let std = in_init("std")?.unwrap_or(0.0);
    translation.set(&key("loop.injection"), text("linear"));
    let is_zero = std == 0.0 || config.optional_str("state_init")? == Some("zero");
    if is_zero {
        translation.set(&key("loop.state"), text("zero"));
    } else {
        translation.set(&key("loop.state"), text("normal"));
        translation.set(&key("loop.state_std"), MetaValue::F32(std * scale));
    }
    Ok(())
}

fn raven_block(
    sizes: &Sizes,
    is_sandwich: bool,
    theirs: &str,
    ours: &str,
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    let (n, n_kv) = (u64::from(sizes.n_heads), u64::from(sizes.n_kv_heads));
    let head_dim = u64::from(sizes.head_dim);
    let (d_q, d_kv, d_ff) = (n * head_dim, n_kv * head_dim, u64::from(sizes.d_ff));
    let fused = format!("{theirs}.attn.Wqkv.weight");
    let our = |name: &str| format!("{ours}.{name}");
    // Sandwich blocks rotate neighbours, the others halves, like the Llama they were made of.
    let heads = |n_heads: u32| (!is_sandwich).then_some(n_heads);
    let (n_q_heads, n_k_heads) = (heads(sizes.n_heads), heads(sizes.n_kv_heads));
    translation.take_heads(&fused, &our("attn_q.weight"), 0..d_q, n_q_heads)?;
    translation.take_heads(&fused, &our("attn_k.weight"), d_q..d_q + d_kv, n_k_heads)?;
    translation.take_rows(&fused, &our("attn_v.weight"), d_q + d_kv..d_q + 2 * d_kv)?;
    let bias = format!("{theirs}.attn.qk_bias");
    if is_sandwich && translation.has(&bias) {
        raven_bias(sizes, &bias, &our, translation)?;
    }
    let gated = format!("{theirs}.mlp.fc.weight");
    translation.take_rows(&gated, &our("ffn_gate.weight"), 0..d_ff)?;
    translation.take_rows(&gated, &our("ffn_up.weight"), d_ff..2 * d_ff)?;
    let norms: &[(&str, &str)] = if is_sandwich {
        &[
            ("norm_1", "attn_norm"),
            ("norm_2", "post_attention_norm"),
            ("norm_3", "ffn_norm"),
            ("norm_4", "post_ffw_norm"),
        ]
    } else {
        &[("norm_1", "attn_norm"), ("norm_2", "ffn_norm")]
    };
    let projections = [("attn.proj", "attn_output"), ("mlp.proj", "ffn_down")];
    for (from, to) in norms.iter().chain(&projections) {
        let theirs = format!("{theirs}.{from}.weight");
        translation.take(&theirs, &our(&format!("{to}.weight")))?;
    }
    Ok(())
}

/// `qk_bias` is `(2, 1, n_heads, head_dim)`: the biases of q, then those of k.
fn raven_bias(
    sizes: &Sizes,
    bias: &str,
    our: &dyn Fn(&str) -> String,
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    if sizes.n_heads != sizes.n_kv_heads {
        let reason =
            format!("tensor {bias} with fewer key heads than query heads is not supported");
        return Err(translation.invalid(reason));
    }
    translation.take_flat(bias, &our("attn_q.bias"), 0, 2)?;
    translation.take_flat(bias, &our("attn_k.bias"), 1, 2)
}

/// Tensors of a block of our own: name in the checkpoint, ours.
const LOOPED_LLAMA_BLOCK: &[(&str, &str)] = &[
    ("attn_norm", "attn_norm"),
    ("q_proj", "attn_q"),
    ("k_proj", "attn_k"),
    ("v_proj", "attn_v"),
    ("o_proj", "attn_output"),
    ("ffn_norm", "ffn_norm"),
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
];

/// The layout of our own small looped models.
pub(super) fn looped_llama(
    config: &Config,
    translation: &mut Translation<'_>,
) -> Result<(), ModelError> {
    let name = "looped-llama";
    let n_heads = config.u32("n_heads")?;
    let d_model = config.u32("hidden_size")?;
    let default_loops = config.optional_u32("default_loops")?.unwrap_or(1);
    let trained_most = config
        .token_ids("trained_loops")?
        .into_iter()
        .max()
        .unwrap_or(default_loops);
    let head_dim = config
        .optional_u32("head_dim")?
        .unwrap_or(d_model / n_heads.max(1));
    let sizes = Sizes {
        d_model,
        d_ff: config.u32("ffn_size")?,
        n_heads,
        n_kv_heads: config.u32("n_kv_heads")?,
        head_dim,
        context: config.u32("context")?,
        epsilon: config.f32("norm_eps")?,
        segments: [
            config.n_blocks("n_layers_in_prelude")?,
            config.n_blocks("n_layers_in_recurrent_block")?,
            config.n_blocks("n_layers_in_coda")?,
        ],
        default_loops,
        // Twice the trained depth when the checkpoint does not say how deep it was evaluated.
        max_loops: config
            .optional_u32("max_loops")?
            .unwrap_or_else(|| trained_most.max(default_loops).saturating_mul(2)),
    };
    sizes.set(name, translation);
    let key = |suffix: &str| format!("{name}.{suffix}");
    rope::translate(config, name, head_dim, 10_000.0, translation)?;
    translation.set(&key("loop.injection"), text("linear"));
    translation.set(&key("loop.state"), text("input"));
    if config.optional_bool("prelude_out_norm")?.unwrap_or(false) {
        translation.set(&key("loop.input_norm"), text("loop_input_norm"));
        translation.take("prelude_norm.weight", "loop_input_norm.weight")?;
    }
    let (which, ours) = match config.optional_bool("state_norm_each_loop")? {
        Some(true) => ("loop.norm", "loop_norm"),
        _ => ("loop.output_norm", "loop_output_norm"),
    };
    translation.set(&key(which), text(ours));
    translation.take("state_norm.weight", &format!("{ours}.weight"))?;
    translation.take("embed.weight", "token_embd.weight")?;
    translation.take("final_norm.weight", "output_norm.weight")?;
    translation.take("head.weight", "output.weight")?;
    sizes.adapter("adapter", translation)?;
    for (theirs, ours) in blocks(["prelude", "recurrent", "coda"], sizes.segments) {
        for (from, to) in LOOPED_LLAMA_BLOCK {
            let theirs = format!("{theirs}.{from}.weight");
            translation.take(&theirs, &format!("{ours}.{to}.weight"))?;
        }
    }
    Ok(())
}
