//! Flags about a model's depth and weights that several subcommands share.
//!
//! Plain data. What the values mean stands in `config` (`[engine] loops`, `quantize`).

use crate::config::{DeviceChoice, EngineConfig, QuantizeType};

/// Shared flags.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct ModelArgs {
    /// Loops of a looped model's core [default: the model's own].
    #[arg(long, value_name = "COUNT")]
    pub loops: Option<u32>,
    /// Let layers FIRST up to END (exclusive) of an ordinary model loop: an experiment.
    #[arg(long, value_name = "FIRST..END", value_parser = layers)]
    pub loop_layers: Option<[u32; 2]>,
    /// Most loops that a request may ask for [default: the model's own, or --loops].
    #[arg(long, value_name = "COUNT")]
    pub max_loops: Option<u32>,
    /// Convert float weights while loading.
    #[arg(long, value_enum, value_name = "TYPE")]
    pub quantize: Option<QuantizeType>,
    /// cpu, cuda, cuda:N, or auto: GPUs where they can be used [default: cpu].
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl ModelArgs {
    /// Puts the flags that were given over the configuration.
    pub fn apply(&self, engine: &mut EngineConfig) {
        let loops = &mut engine.loops;
        loops.layers = self.loop_layers.or(loops.layers);
        loops.default = self.loops.or(loops.default);
        loops.max = self.max_loops.or(loops.max);
        if self.loop_layers.is_some() {
            // Looping layers has no depth of its own to fall back to.
            loops.max = loops.max.or(self.loops).or(Some(1));
        }
        engine.quantize = self.quantize.or(engine.quantize);
        engine.device = self.device.unwrap_or(engine.device);
    }
}

/// `FIRST..END`.
fn layers(text: &str) -> Result<[u32; 2], String> {
    let wrong = || format!("\"{text}\" is not of the form FIRST..END, like 10..20");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    let number = |part: &str| part.trim().parse::<u32>().map_err(|_| wrong());
    Ok([number(first)?, number(end)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_a_half_open_range() {
        assert_eq!(layers("10..20"), Ok([10, 20]));
        for wrong in ["", "10", "10-20", "a..b", "-1..3", "1...3"] {
            assert!(layers(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn flags_win_over_the_configuration() {
        let mut engine = EngineConfig::default();
        engine.loops.max = Some(9);
        let args = ModelArgs {
            loops: Some(3),
            ..ModelArgs::default()
        };
        args.apply(&mut engine);
        assert_eq!((engine.loops.default, engine.loops.max), (Some(3), Some(9)));
        let mut engine = EngineConfig::default();
        let args = ModelArgs {
            loop_layers: Some([1, 2]),
            loops: Some(3),
            ..args
        };
        args.apply(&mut engine);
        assert_eq!(engine.loops.max, Some(3));
    }
}
