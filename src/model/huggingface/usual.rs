//! Checkpoints with the usual names (`model.layers.N.self_attn.q_proj.weight`, ..): one rule set
//! for all rows of the architecture table that list a `model_type`.

use super::config::Config;
use super::rope;
use super::translation::Translation;
use crate::format::{FormatError, MetaValue};
use crate::model::ModelError;
use crate::model::architectures::{Architecture, ResidualNorms};
use serde_json::json;

/// Tensors of a block: name in the checkpoint, ours, with the parts that both may have.
const BLOCK: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Translates keys and tensors.
pub(super) fn translate(
    row: &Architecture,
    config: &Config,
    translation: &mut Translation<'_>,
) -> Result<(), ModelError> {
    refuse_unsupported(row, config)?;
    let name = row.name;
    let text = |text: &str| MetaValue::String(text.to_owned());
    translation.set("general.architecture", text(name));
    let title = translation.directory_name().to_owned();
    translation.set("general.name", text(&title));
    let n_heads = config.u32("num_attention_heads")?;
    let n_kv_heads = config
        .optional_u32("num_key_value_heads")?
        .unwrap_or(n_heads);
    let d_model = config.u32("hidden_size")?;
    let n_layers = config.n_blocks("num_hidden_layers")?;
    let head_dim = match config.optional_u32("head_dim")? {
        Some(head_dim) => head_dim,
        None => d_model / n_heads.max(1),
    };
    translation.set_u32s(
        name,
        &[
            ("context_length", config.u32("max_position_embeddings")?),
            ("embedding_length", d_model),
            ("feed_forward_length", config.u32("intermediate_size")?),
            ("block_count", n_layers),
            ("attention.head_count", n_heads),
            ("attention.head_count_kv", n_kv_heads),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
        ],
    );
    let epsilon = MetaValue::F32(config.f32("rms_norm_eps")?);
    translation.set(&format!("{name}.attention.layer_norm_rms_epsilon"), epsilon);
    if let Some(window) = config.optional_u32("sliding_window")?
        && row.reads_window
    {
        translation.set_u32s(name, &[("attention.sliding_window", window)]);
    }
    rope::translate(config, name, head_dim, 10_000.0, translation)?;
    loops(name, config, translation)?;
    tensors(row, config, n_layers, [n_heads, n_kv_heads], translation)?;
    Ok(())
}

/// Switches that would change the maths.
fn refuse_unsupported(row: &Architecture, config: &Config) -> Result<(), FormatError> {
    config.must_be("hidden_act", &[json!("silu")])?;
    config.must_be("use_sliding_window", &[json!(false)])?;
    if row.nope_interval != 0 {
        config.must_be("no_rope_layer_interval", &[json!(row.nope_interval)])?;
    }
    // Of Nanbeige's class; its published checkpoints have none of them.
    let off = [json!(false), json!([])];
    for switch in [
        "qk_layernorm",
        "enable_double_loop_split",
        "loop_middle_layers",
        "loop_share_kv",
        "enable_hyper_connection",
        "enable_mhc",
        "enable_depth_attention",
        "insert_ngram_layer_idx",
        "ngram_insert_all_layers",
    ] {
        config.must_be(switch, &off)?;
    }
    Ok(())
}

/// `num_loops` (Nanbeige) and `total_ut_steps` (Ouro).
fn loops(
    name: &str,
    config: &Config,
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    let key = |suffix: &str| format!("{name}.{suffix}");
    let loops = match config.optional_u32("total_ut_steps")? {
        Some(loops) => Some(loops),
        None => config.optional_u32("num_loops")?,
    };
    let Some(loops) = loops else { return Ok(()) };
    let skips = config
        .optional_bool("skip_loop_final_norm")?
        .unwrap_or(false);
    translation.set(&key("num_loops"), MetaValue::U32(loops));
    translation.set(&key("skip_loop_final_norm"), MetaValue::Bool(skips));
    Ok(())
}

fn tensors(
    row: &Architecture,
    config: &Config,
    n_layers: u32,
    [n_heads, n_kv_heads]: [u32; 2],
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    translation.take("model.embed_tokens.weight", "token_embd.weight")?;
    translation.take("model.norm.weight", "output_norm.weight")?;
    match config.optional_bool("tie_word_embeddings")? {
        // Some checkpoints store the tied matrix twice.
        Some(true) => translation.ignore("lm_head.weight"),
        _ => translation.take("lm_head.weight", "output.weight")?,
    }
    for part in ["weight", "bias"] {
        let (theirs, ours) = (
            format!("model.early_exit_gate.{part}"),
            format!("exit_gate.{part}"),
        );
        translation.take(&theirs, &ours)?;
    }
    // What `post_attention_layernorm` is depends on whether blocks have second norms.
    let mut norms = vec![("post_attention_layernorm", row.feed_forward_norm)];
    if row.residual_norms == ResidualNorms::Inside {
        norms.push(("input_layernorm_2", "post_attention_norm"));
        norms.push(("post_attention_layernorm_2", "post_ffw_norm"));
    }
    for layer in 0..n_layers {
        for part in ["weight", "bias"] {
            let theirs = |name: &str| format!("model.layers.{layer}.{name}.{part}");
            let ours = |name: &str| format!("blk.{layer}.{name}.{part}");
            for (from, to) in BLOCK.iter().chain(&norms) {
                translation.take(&theirs(from), &ours(to))?;
            }
            for (from, to, n_heads) in [
                ("self_attn.q_proj", "attn_q", n_heads),
                ("self_attn.k_proj", "attn_k", n_kv_heads),
            ] {
                match row.permutes_heads {
                    true => translation.take_permuted(&theirs(from), &ours(to), n_heads)?,
                    false => translation.take(&theirs(from), &ours(to))?,
                }
            }
        }
    }
    Ok(())
}
