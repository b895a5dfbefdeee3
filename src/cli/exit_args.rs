//! The flag for early exit that `bench` and `score` share.
//!
//! Plain data. What rules and thresholds mean stands in `request`; which ones a model knows, the
//! engine says.

use crate::request::{AdaptiveExit, ExitRule};

/// Shared flags.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct ExitArgs {
    /// Let tokens leave the loop early: gate, kl or latent, and the threshold, like latent:0.05.
    #[arg(long, value_name = "RULE:THRESHOLD", value_parser = adaptive)]
    pub adaptive: Option<AdaptiveExit>,
}

fn adaptive(text: &str) -> Result<AdaptiveExit, String> {
    let wrong = || format!("\"{text}\" is not of the form RULE:THRESHOLD, like latent:0.05");
    let (rule, threshold) = text.split_once(':').ok_or_else(wrong)?;
    let Some(rule) = ExitRule::parse(rule) else {
        let known = ExitRule::ALL.map(ExitRule::name).join(", ");
        return Err(format!("\"{rule}\" is no rule; there are {known}"));
    };
    let threshold = threshold.trim().parse().map_err(|_| wrong())?;
    Ok(AdaptiveExit { rule, threshold })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_and_its_threshold() {
        let (rule, threshold) = (ExitRule::Kl, 0.001);
        assert_eq!(adaptive("kl:1e-3"), Ok(AdaptiveExit { rule, threshold }));
        for wrong in ["", "kl", "kl:", "kl:x", "soon:0.5", "0.5:kl"] {
            assert!(adaptive(wrong).is_err(), "{wrong}");
        }
    }
}
