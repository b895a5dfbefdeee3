//! What a file says about loops: segments, depth, and what happens around the core's blocks.
//!
//! Pure data once read. GGUF keys, all under `{architecture}.`; a file without any of them is an
//! ordinary model. The first two are the convention of public looped GGUF files (Nanbeige, Ouro),
//! the others are ours, written by `quantize`:
//!
//! | key | meaning |
//! |---|---|
//! | `num_loops` u32 | loops a request gets when it asks for none |
//! | `skip_loop_final_norm` bool | no final norm between loops (only read with `num_loops`) |
//! | `loop.max` u32 | most loops a request may ask for; `num_loops` when absent |
//! | `loop.prelude`, `loop.coda` u32 | blocks before and after the core |
//! | `loop.injection` str | `none`, or `linear`: tensors `loop_state`, `loop_input` before every loop |
//! | `loop.state` str | the state before the first loop: `input`, `zero` or `normal` |
//! | `loop.state_std` f32, `loop.seed` u32 | of the `normal` state |
//! | `loop.input_norm`, `loop.norm`, `loop.output_norm` str | tensor of the norm after the prelude, after every loop, before the coda |

use super::{ModelError, Plan};
use crate::backend::StateInit;
use crate::config::LoopsConfig;
use crate::format::ModelFile;

/// Most loops that any file or configuration may allow: every loop costs pages per token.
pub const LOOPS_MAX: u32 = 1024;

/// How a model loops. The default is an ordinary model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoopSpec {
    /// Blocks before the core.
    pub prelude: u32,
    /// Blocks after the core.
    pub coda: u32,
    /// Loops a request gets when it asks for none.
    pub default_loops: u32,
    /// Most loops a request may ask for.
    pub max_loops: u32,
    /// The input is added at every loop through the adapter; the state before the first loop.
    pub injection: Option<StateInit>,
    /// Stem of the tensor that norms what the prelude gave.
    pub input_norm: Option<String>,
    /// Stem of the tensor that norms the state after every loop.
    pub norm: Option<String>,
    /// Stem of the tensor that norms the state before the coda.
    pub output_norm: Option<String>,
}

impl Default for LoopSpec {
    fn default() -> Self {
        Self {
            prelude: 0,
            coda: 0,
            default_loops: 1,
            max_loops: 1,
            injection: None,
            input_norm: None,
            norm: None,
            output_norm: None,
        }
    }
}

/// Stem of the final norm's tensor.
pub(super) const FINAL_NORM: &str = "output_norm";

impl LoopSpec {
    /// Reads it; errors name the key.
    pub fn from_gguf(
        file: &ModelFile,
        architecture: &str,
        n_layers: u32,
    ) -> Result<Self, ModelError> {
        let key = |suffix: &str| format!("{architecture}.{suffix}");
        let invalid = |reason: String| Err(file.invalid(reason).into());
        let count = |suffix: &str| file.optional_u32(&key(suffix));
        let (prelude, coda) = (
            count("loop.prelude")?.unwrap_or(0),
            count("loop.coda")?.unwrap_or(0),
        );
        if prelude.saturating_add(coda) >= n_layers {
            return invalid(format!(
                "{} is {prelude} and {} is {coda}: of {n_layers} blocks none is left to loop",
                key("loop.prelude"),
                key("loop.coda")
            ));
        }
        let num_loops = count("num_loops")?;
        let default_loops = num_loops.unwrap_or(1);
        let max_loops = count("loop.max")?.unwrap_or(default_loops);
        if default_loops == 0 || default_loops > max_loops || max_loops > LOOPS_MAX {
            return invalid(format!(
                "{} is {default_loops} and {} is {max_loops}; 1 <= num_loops <= loop.max <= {LOOPS_MAX} must hold",
                key("num_loops"),
                key("loop.max")
            ));
        }
        let stem = |suffix: &str| {
            let found = file.optional_str(&key(suffix))?;
            Ok::<_, ModelError>(found.map(str::to_owned))
        };
        let skips_norm = file
            .optional_bool(&key("skip_loop_final_norm"))?
            .unwrap_or(num_loops.is_none());
        let norm = match stem("loop.norm")? {
            None if !skips_norm => Some(FINAL_NORM.to_owned()),
            other => other,
        };
        Ok(Self {
            prelude,
            coda,
            default_loops,
            max_loops,
            injection: injection(file, architecture)?,
            input_norm: stem("loop.input_norm")?,
            norm,
            output_norm: stem("loop.output_norm")?,
        })
    }

    /// Changes what a configuration changes; errors say what would be right.
    pub fn configure(&mut self, config: &LoopsConfig, n_layers: u32) -> Result<(), ModelError> {
        let refuse = |reason: String| Err(ModelError::Unsupported(reason));
        if let Some([first, end]) = config.layers {
            if self.max_loops > 1 || self.injection.is_some() {
                return refuse(
                    "loops.layers is for ordinary models; this one loops by itself".to_owned(),
                );
            }
            if first >= end || end > n_layers {
                return refuse(format!(
                    "loops.layers is [{first}, {end}]; 0 <= first < end <= {n_layers} must hold"
                ));
            }
            let Some(max) = config.max else {
                return refuse("loops.layers needs loops.max, the most loops of a request".into());
            };
            (self.prelude, self.coda) = (first, n_layers - end);
            self.max_loops = max;
        }
        self.max_loops = config.max.unwrap_or(self.max_loops);
        if self.max_loops == 0 || self.max_loops > LOOPS_MAX {
            let max = self.max_loops;
            return refuse(format!(
                "loops.max is {max}; it must be within 1..={LOOPS_MAX}"
            ));
        }
        match config.default {
            Some(loops) if loops == 0 || loops > self.max_loops => {
                let max = self.max_loops;
                return refuse(format!(
                    "loops is {loops}; this model runs 1 to {max} loops"
                ));
            }
            Some(loops) => self.default_loops = loops,
            None => self.default_loops = self.default_loops.min(self.max_loops),
        }
        Ok(())
    }

    /// Segments and depth of a model of `n_layers` blocks, more than prelude and coda together.
    #[must_use]
    pub fn plan(&self, n_layers: u32) -> Plan {
        Plan::looped(
            self.prelude,
            n_layers - self.prelude - self.coda,
            self.coda,
            self.default_loops,
            self.max_loops,
        )
    }

    /// The last loop's norm is the final norm, and no block follows: the logits need none.
    #[must_use]
    pub fn norm_is_final(&self) -> bool {
        self.coda == 0 && self.norm.as_deref() == Some(FINAL_NORM)
    }

    /// Stems of the norms that have tensors of their own.
    pub(super) fn own_norms(&self) -> impl Iterator<Item = &str> {
        [&self.input_norm, &self.norm, &self.output_norm]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .filter(|stem| *stem != FINAL_NORM)
    }
}

fn injection(file: &ModelFile, architecture: &str) -> Result<Option<StateInit>, ModelError> {
    let key = |suffix: &str| format!("{architecture}.loop.{suffix}");
    match file.optional_str(&key("injection"))? {
        None | Some("none") => return Ok(None),
        Some("linear") => {}
        Some(other) => {
            return Err(ModelError::Unsupported(format!(
                "{} is \"{other}\"; none and linear are supported",
                key("injection")
            )));
        }
    }
    Ok(Some(match file.str(&key("state"))? {
        "input" => StateInit::Input,
        "zero" => StateInit::Zero,
        "normal" => {
            let std = file.f32(&key("state_std"))?;
            if !(std.is_finite() && std >= 0.0) {
                let reason = format!("{} is {std}; it must not be negative", key("state_std"));
                return Err(file.invalid(reason).into());
            }
            let seed = file.optional_u32(&key("seed"))?.unwrap_or(0);
            StateInit::Normal {
                std,
                seed: u64::from(seed),
            }
        }
        other => {
            return Err(ModelError::Unsupported(format!(
                "{} is \"{other}\"; input, zero and normal are supported",
                key("state")
            )));
        }
    }))
}
