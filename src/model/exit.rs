//! Early exit: which rules a model knows, and when a row has looped enough. Pure.
//!
//! ```text
//! loop t of a row ─► signal (backend) ─► RowExit::is_done ─┬─ no ──► loop t + 1
//!                                                         └─ yes ─► coda, or its logits
//! ```
//!
//! A signal depends on the row's own state only, hence so does the decision. A row that leaves after
//! loop t has no K/V of its own for the loops it skips; those of loop t stand for them, so that rows
//! behind it that run deeper find the latest state it reached. A request whose rows all leave after
//! loop t therefore answers bit for bit like one with t loops.
//!
//! `kl` needs next-token distributions after a loop. A model with a coda has none there: the coda
//! would have to run after every loop, with K/V of its own for each, which costs what an exit saves.
//! So such models refuse it.

use super::Model;
use crate::request::{AdaptiveExit, ExitRule};

/// Which rules a model knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitRules {
    /// It has a gate.
    pub gate: bool,
    /// Its logits come straight from the state.
    pub kl: bool,
    /// It loops.
    pub latent: bool,
}

impl ExitRules {
    fn knows(self, rule: ExitRule) -> bool {
        match rule {
            ExitRule::Gate => self.gate,
            ExitRule::Kl => self.kl,
            ExitRule::Latent => self.latent,
        }
    }

    /// Names of the rules it knows.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let known = ExitRule::ALL
            .into_iter()
            .filter(move |rule| self.knows(*rule));
        known.map(ExitRule::name)
    }

    /// Why a request cannot leave the loop this way; None when it can.
    #[must_use]
    pub fn refusal(self, exit: AdaptiveExit) -> Option<String> {
        let (rule, threshold) = (exit.rule.name(), exit.threshold);
        if self == Self::default() {
            return Some("adaptive was asked for; this model does not loop".to_owned());
        }
        if !self.knows(exit.rule) {
            let why = match exit.rule {
                ExitRule::Gate => "it has no exit gate",
                ExitRule::Kl => "it has layers after the loop",
                ExitRule::Latent => "it does not loop",
            };
            let known = self.names().collect::<Vec<_>>().join(", ");
            return Some(format!(
                "adaptive rule {rule} does not work with this model ({why}); it knows: {known}"
            ));
        }
        let most = match exit.rule {
            ExitRule::Gate => 1.0,
            ExitRule::Kl | ExitRule::Latent => f32::MAX,
        };
        let range = match exit.rule {
            ExitRule::Gate => "within 0..=1",
            ExitRule::Kl | ExitRule::Latent => "a number of at least 0",
        };
        (!(0.0..=most).contains(&threshold))
            .then(|| format!("adaptive threshold is {threshold}; for {rule} it must be {range}"))
    }
}

impl Model {
    /// The rules it knows.
    #[must_use]
    pub fn exit_rules(&self) -> ExitRules {
        // Rows of an encoder go on together, so none can leave before the others.
        let loops = self.plan.max_loops > 1 && !self.plan.is_bidirectional;
        ExitRules {
            gate: loops && self.weights.exit_gate.is_some(),
            kl: loops && self.plan.coda.is_empty(),
            latent: loops,
        }
    }
}

/// Whether a rule compares a loop with the one before it, so that the first shows nothing.
#[must_use]
pub fn compares(rule: ExitRule) -> bool {
    match rule {
        ExitRule::Gate => false,
        ExitRule::Kl | ExitRule::Latent => true,
    }
}

/// Whether a row shows something after the loop numbered `iteration`, from 0.
#[must_use]
pub fn shows(rule: ExitRule, iteration: u32) -> bool {
    iteration > 0 || !compares(rule)
}

/// What a row has shown in the loops so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowExit {
    /// By the gate: probability that it was not done after any of them.
    remaining: f64,
}

impl RowExit {
    /// Before the first loop.
    #[must_use]
    pub fn new() -> Self {
        Self { remaining: 1.0 }
    }

    /// Whether it is done after a loop that showed `signal`. What is no number never ends a loop.
    pub fn is_done(&mut self, exit: AdaptiveExit, signal: f32) -> bool {
        match exit.rule {
            ExitRule::Gate => {
                self.remaining *= 1.0 - f64::from(signal);
                // Certainty is never reached, only rounded to.
                exit.threshold < 1.0 && 1.0 - self.remaining >= f64::from(exit.threshold)
            }
            ExitRule::Kl | ExitRule::Latent => signal < exit.threshold,
        }
    }
}

impl Default for RowExit {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(rule: ExitRule, threshold: f32) -> AdaptiveExit {
        AdaptiveExit { rule, threshold }
    }

    /// Loops that a row runs which shows these signals.
    fn loops(exit: AdaptiveExit, signals: &[f32]) -> usize {
        let mut row = RowExit::new();
        let done = signals.iter().position(|signal| row.is_done(exit, *signal));
        done.map_or(signals.len(), |index| index + 1)
    }

    #[test]
    fn the_gate_sums_probabilities() {
        // p = 0.5, 0.5 * 0.6 = 0.3, 0.2 * 0.25 = 0.05: sums 0.5, 0.8, 0.85.
        let signals = [0.5, 0.6, 0.25, 0.0];
        for (threshold, wanted) in [
            (0.0, 1),
            (0.5, 1),
            (0.51, 2),
            (0.79, 2),
            (0.82, 3),
            (1.0, 4),
        ] {
            let found = loops(exit(ExitRule::Gate, threshold), &signals);
            assert_eq!(found, wanted, "{threshold}");
        }
        assert_eq!(loops(exit(ExitRule::Gate, 1.0), &[1.0, 1.0]), 2);
        assert_eq!(loops(exit(ExitRule::Gate, 0.5), &[f32::NAN, 1.0]), 2);
    }

    #[test]
    fn convergence_is_below_the_threshold() {
        for rule in [ExitRule::Kl, ExitRule::Latent] {
            let signals = [0.5, 0.1, 0.2, 0.0];
            for (threshold, wanted) in [(0.6, 1), (0.5, 2), (0.2, 2), (0.1, 4), (0.0, 4)] {
                assert_eq!(
                    loops(exit(rule, threshold), &signals),
                    wanted,
                    "{threshold}"
                );
            }
            assert!(shows(rule, 1) && !shows(rule, 0));
        }
        assert!(shows(ExitRule::Gate, 0));
    }

    #[test]
    fn refusals_say_what_would_be_right() {
        let plain = ExitRules::default();
        let coda = ExitRules {
            latent: true,
            ..plain
        };
        let ouro = ExitRules {
            gate: true,
            kl: true,
            latent: true,
        };
        for (rules, exit, words) in [
            (plain, exit(ExitRule::Latent, 0.1), "does not loop"),
            (
                coda,
                exit(ExitRule::Gate, 0.1),
                "no exit gate); it knows: latent",
            ),
            (coda, exit(ExitRule::Kl, 0.1), "layers after the loop"),
            (
                ouro,
                exit(ExitRule::Gate, 1.5),
                "1.5; for gate it must be within 0..=1",
            ),
            (ouro, exit(ExitRule::Kl, -1.0), "at least 0"),
            (ouro, exit(ExitRule::Latent, f32::NAN), "NaN"),
            (ouro, exit(ExitRule::Latent, f32::INFINITY), "inf"),
        ] {
            let refusal = rules.refusal(exit).expect(words);
            assert!(refusal.contains(words), "{refusal}");
        }
        for rule in ExitRule::ALL {
            assert_eq!(ouro.refusal(exit(rule, 1.0)), None);
            assert_eq!(ouro.refusal(exit(rule, 0.0)), None);
        }
    }
}
