//! Rotary settings of a config.json in GGUF's words. Pure.
//!
//! Older files have `rope_theta` and `rope_scaling`, newer ones one object `rope_parameters`.

use super::config::Config;
use super::translation::Translation;
use crate::format::{FormatError, MetaValue};
use crate::model::ModelError;

/// Sets `{architecture}.rope.*`; adds `rope_freqs.weight` for the `llama3` type.
pub(super) fn translate(
    config: &Config,
    architecture: &str,
    head_dim: u32,
    default_base: f32,
    translation: &mut Translation<'_>,
) -> Result<(), ModelError> {
    let parameters = config.optional_object("rope_parameters")?;
    let scaling = match parameters {
        Some(parameters) => Some(parameters),
        None => config.optional_object("rope_scaling")?,
    };
    let in_parameters = scaling.as_ref().map(|s| s.optional_f32("rope_theta"));
    let base = match in_parameters.transpose()?.flatten() {
        Some(base) => base,
        None => config.optional_f32("rope_theta")?.unwrap_or(default_base),
    };
    let key = |suffix: &str| format!("{architecture}.rope.{suffix}");
    translation.set(&key("freq_base"), MetaValue::F32(base));
    let rotated = config.optional_f32("partial_rotary_factor")?.unwrap_or(1.0);
    let n_rotated = (head_dim as f32 * rotated) as u32;
    translation.set(&key("dimension_count"), MetaValue::U32(n_rotated));
    let Some(scaling) = scaling else {
        return Ok(());
    };
    let kind = match scaling.optional_str("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.optional_str("type")?,
    };
    match kind {
        None | Some("default") => {}
        Some("linear") => {
            let factor = scaling.f32("factor")?;
            translation.set(&key("scaling.type"), MetaValue::String("linear".into()));
            translation.set(&key("scaling.factor"), MetaValue::F32(factor));
        }
        Some("yarn") => yarn(&scaling, architecture, translation)?,
        Some("llama3") => {
            let factors = llama3_factors(&scaling, base, n_rotated)?;
            translation.synthesize("rope_freqs.weight", &factors);
        }
        Some(other) => {
            return Err(ModelError::Unsupported(format!(
                "{}: rope type \"{other}\" is not supported; default, linear, yarn and llama3 are",
                config.path()
            )));
        }
    }
    Ok(())
}

fn yarn(
    scaling: &Config,
    architecture: &str,
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    let key = |suffix: &str| format!("{architecture}.rope.scaling.{suffix}");
    let null = serde_json::Value::Null;
    for changes_the_maths in ["mscale", "mscale_all_dim"] {
        scaling.must_be(changes_the_maths, std::slice::from_ref(&null))?;
    }
    let factor = scaling.f32("factor")?;
    translation.set(&key("type"), MetaValue::String("yarn".into()));
    translation.set(&key("factor"), MetaValue::F32(factor));
    if let Some(context) = scaling.optional_u32("original_max_position_embeddings")? {
        translation.set(&key("original_context_length"), MetaValue::U32(context));
    }
    for beta in ["beta_fast", "beta_slow"] {
        if let Some(value) = scaling.optional_f32(beta)? {
            translation.set(&key(&format!("yarn_{beta}")), MetaValue::F32(value));
        }
    }
    if let Some(attention) = scaling.optional_f32("attention_factor")? {
        // GGUF's factor comes on top of the usual one.
        let usual = 1.0 + 0.1 * factor.max(1.0).ln();
        let value = MetaValue::F32(attention / usual);
        translation.set(&key("yarn_attn_factor"), value);
    }
    Ok(())
}

/// One divisor per pair: pairs with long wavelengths are slowed by `factor`, short ones are left
/// alone, in between the frequency goes over linearly in turns per original context.
fn llama3_factors(scaling: &Config, base: f32, n_rotated: u32) -> Result<Vec<f32>, FormatError> {
    let number = |key: &str| scaling.f32(key).map(f64::from);
    let (factor, low, high) = (
        number("factor")?,
        number("low_freq_factor")?,
        number("high_freq_factor")?,
    );
    let original = f64::from(scaling.u32("original_max_position_embeddings")?);
    if !(factor > 0.0 && low > 0.0 && high > low) {
        return Err(scaling.invalid(
            "factor",
            &format!("is {factor} with low_freq_factor {low} and high_freq_factor {high}; factor > 0 and 0 < low < high are needed"),
        ));
    }
    let factors = (0..n_rotated / 2).map(|pair| {
        let exponent = f64::from(2 * pair) / f64::from(n_rotated);
        let wavelength = std::f64::consts::TAU * f64::from(base).powf(exponent);
        let turns = original / wavelength;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - kept) / factor + kept)) as f32
    });
    Ok(factors.collect())
}
