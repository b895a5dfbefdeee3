//! Rotary embeddings: from metadata to a table of inverse frequencies.
//!
//! Pure. Pair `i` of `n_rotated / 2` turns by `position * base^(-2i / n_rotated)`; the scalings
//! change these frequencies once, at load, so that no backend knows them. YaRN follows its paper
//! (Peng et al., 2023): fast pairs stay, slow pairs are stretched by `factor`, a ramp in between.

use super::ModelError;
use crate::backend::{RopePairs, RopeTable};
use crate::format::ModelFile;

/// A rotary embedding as the file describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies ("theta").
    pub base: f32,
    /// Coordinates of a head that are rotated; even, at most `head_dim`. The rest passes through.
    pub n_rotated: u32,
    /// Which coordinates form a pair.
    pub pairs: RopePairs,
    /// Stretching to longer contexts.
    pub scaling: RopeScaling,
}

/// How frequencies are stretched to contexts beyond the trained one.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// How much longer the context becomes.
        factor: f32,
    },
    /// YaRN.
    Yarn {
        /// How much longer the context becomes.
        factor: f32,
        /// Context of the first training in tokens.
        original_context: u32,
        /// Pairs that turn more often than this over the original context stay as they are.
        beta_fast: f32,
        /// Pairs that turn less often than this are stretched in full.
        beta_slow: f32,
        /// Factor on sin and cos.
        magnitude: f32,
    },
}

impl RopeSpec {
    /// Reads `{architecture}.rope.*`; errors name the key.
    pub fn from_gguf(
        file: &ModelFile,
        architecture: &str,
        pairs: RopePairs,
        head_dim: u32,
        context_length: u32,
    ) -> Result<Self, ModelError> {
        let key = |suffix: &str| format!("{architecture}.rope.{suffix}");
        let base = file.optional_f32(&key("freq_base"))?.unwrap_or(10_000.0);
        if !(base.is_finite() && base > 1.0) {
            let reason = format!("{} is {base}; it must be above 1", key("freq_base"));
            return Err(file.invalid(reason).into());
        }
        let n_rotated = file
            .optional_u32(&key("dimension_count"))?
            .unwrap_or(head_dim);
        if n_rotated == 0 || n_rotated > head_dim || n_rotated % 2 != 0 {
            return Err(file
                .invalid(format!(
                    "{} is {n_rotated}; it must be even and at most the head width {head_dim}",
                    key("dimension_count")
                ))
                .into());
        }
        Ok(Self {
            base,
            n_rotated,
            pairs,
            scaling: RopeScaling::from_gguf(file, architecture, context_length)?,
        })
    }

    /// The table a backend takes. `factors`: `rope_freqs.weight` (Llama 3), one divisor per pair.
    ///
    /// # Panics
    /// When `factors` has another length than `n_rotated / 2`; `weights` checks it.
    #[must_use]
    pub fn table(&self, factors: Option<&[f32]>) -> RopeTable {
        let n_pairs = self.n_rotated as usize / 2;
        assert!(factors.is_none_or(|factors| factors.len() == n_pairs));
        let inverse_frequencies = (0..n_pairs)
            .map(|pair| {
                let plain = f64::from(self.base)
                    .powf(-2.0 * pair as f64 / f64::from(self.n_rotated))
                    / factors.map_or(1.0, |factors| f64::from(factors[pair]));
                (plain * self.scaling.stretch(self, pair)) as f32
            })
            .collect();
        RopeTable {
            inverse_frequencies,
            pairs: self.pairs,
            magnitude: match self.scaling {
                RopeScaling::Yarn { magnitude, .. } => magnitude,
                RopeScaling::None | RopeScaling::Linear { .. } => 1.0,
            },
        }
    }
}

impl RopeScaling {
    fn from_gguf(
        file: &ModelFile,
        architecture: &str,
        context_length: u32,
    ) -> Result<Self, ModelError> {
        let key = |suffix: &str| format!("{architecture}.rope.scaling.{suffix}");
        let factor = match file.optional_f32(&key("factor"))? {
            Some(factor) => Some(factor),
            None => file.optional_f32(&format!("{architecture}.rope.scale_linear"))?,
        };
        // A factor of 0 or 1 means "none" in files that carry the key for every model.
        let factor = factor.unwrap_or(1.0);
        let factor = if factor == 0.0 { 1.0 } else { factor };
        if !(factor.is_finite() && factor > 0.0) {
            let reason = format!("{} is {factor}; it must be positive", key("factor"));
            return Err(file.invalid(reason).into());
        }
        match file.optional_str(&key("type"))? {
            None | Some("linear") if factor != 1.0 => Ok(Self::Linear { factor }),
            None | Some("none" | "linear") => Ok(Self::None),
            Some("yarn") => {
                let number = |suffix: &str, default: f32| {
                    Ok::<f32, ModelError>(file.optional_f32(&key(suffix))?.unwrap_or(default))
                };
                let extrapolation = number("yarn_ext_factor", 1.0)?;
                if extrapolation != 1.0 {
                    return Err(ModelError::Unsupported(format!(
                        "{} is {extrapolation}; only 1 is supported",
                        key("yarn_ext_factor")
                    )));
                }
                Ok(Self::Yarn {
                    factor,
                    original_context: file
                        .optional_u32(&key("original_context_length"))?
                        .unwrap_or(context_length),
                    beta_fast: number("yarn_beta_fast", 32.0)?,
                    beta_slow: number("yarn_beta_slow", 1.0)?,
                    magnitude: number("attn_factor", 1.0)?
                        * number("yarn_attn_factor", 1.0)?
                        * (1.0 + 0.1 * factor.max(1.0).ln()),
                })
            }
            Some(other) => Err(ModelError::Unsupported(format!(
                "{} is \"{other}\"; none, linear and yarn are supported",
                key("type")
            ))),
        }
    }

    /// What the inverse frequency of a pair is multiplied with.
    fn stretch(&self, rope: &RopeSpec, pair: usize) -> f64 {
        match *self {
            Self::None => 1.0,
            Self::Linear { factor } => 1.0 / f64::from(factor),
            Self::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                ..
            } => {
                let last = f64::from(rope.n_rotated) - 1.0;
                let at = |beta| pair_with_turns(rope, original_context, f64::from(beta));
                let low = at(beta_fast).floor().max(0.0);
                let high = at(beta_slow).ceil().min(last);
                // The width is kept off zero for tiny heads, where both ends meet.
                let ramp = (pair as f64 - low) / (high - low).max(0.001);
                let slow = ramp.clamp(0.0, 1.0);
                slow / f64::from(factor) + (1.0 - slow)
            }
        }
    }
}

/// The (fractional) pair that makes `turns` full turns over `context` tokens.
fn pair_with_turns(rope: &RopeSpec, context: u32, turns: f64) -> f64 {
    let wavelengths = f64::from(context) / (turns * std::f64::consts::TAU);
    f64::from(rope.n_rotated) * wavelengths.ln() / (2.0 * f64::from(rope.base).ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(scaling: RopeScaling) -> RopeSpec {
        RopeSpec {
            base: 10_000.0,
            n_rotated: 64,
            pairs: RopePairs::Halves,
            scaling,
        }
    }

    #[test]
    fn frequencies_fall_from_one_to_nearly_one_over_base() {
        let table = spec(RopeScaling::None).table(None);
        assert_eq!(table.inverse_frequencies.len(), 32);
        assert_eq!(table.inverse_frequencies[0], 1.0);
        assert!((table.inverse_frequencies[16] - 0.01).abs() < 1e-8);
        assert_eq!(table.magnitude, 1.0);
    }

    #[test]
    fn linear_scaling_and_factors_divide() {
        let plain = spec(RopeScaling::None).table(None);
        let linear = spec(RopeScaling::Linear { factor: 4.0 }).table(None);
        let factors = spec(RopeScaling::None).table(Some(&[4.0; 32]));
        for pair in 0..32 {
            assert_eq!(
                linear.inverse_frequencies[pair] * 4.0,
                plain.inverse_frequencies[pair]
            );
            assert_eq!(
                factors.inverse_frequencies[pair],
                linear.inverse_frequencies[pair]
            );
        }
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
        let plain = spec(RopeScaling::None).table(None);
        let yarn = spec(RopeScaling::Yarn {
            factor: 8.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            magnitude: 1.2,
        })
        .table(None);
        assert_eq!(yarn.inverse_frequencies[0], plain.inverse_frequencies[0]);
        let (slow, plain_slow) = (yarn.inverse_frequencies[31], plain.inverse_frequencies[31]);
        assert!((slow * 8.0 - plain_slow).abs() < 1e-9);
        assert_eq!(yarn.magnitude, 1.2);
    }
}
