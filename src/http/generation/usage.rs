//! Token counts of an answer, summed over its jobs, and OpenAI's words for them.
//!
//! Pure. What is not here: who counts (`runtime`), other dialects' words.

use crate::request::Usage;
use serde::Serialize;

/// The depth of a request before admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskedLoops {
    /// As asked, or the model's default.
    pub loops: u32,
    /// Its tokens may leave the loop early.
    pub may_exit_early: bool,
}

/// Token counts of all jobs of one request. The choices of one prompt share it, so that it counts
/// once, as OpenAI counts.
#[derive(Clone, Debug, Default)]
pub struct UsageSum {
    prompt: u64,
    cached: u64,
    completion: u64,
    reasoning: u64,
    /// Fewest loops that any job was granted; 0 before the first.
    granted: u32,
    /// Tokens that looped, and their loops together.
    loop_rows: u64,
    loop_iterations: u64,
}

/// `usage` of the API.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UsageCounts {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    loops: Option<LoopCounts>,
}

/// Loops of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoopCounts {
    asked: u32,
    /// At most what was asked, to meet a latency objective.
    granted: u32,
    /// Of the tokens that were computed; null where early exit was allowed and nobody counted.
    used_mean: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
}

impl UsageSum {
    /// Adds one job. `first_of_prompt`: its prompt has not been counted yet.
    pub fn add(&mut self, usage: Usage, first_of_prompt: bool) {
        if first_of_prompt {
            self.prompt += u64::from(usage.prompt_tokens);
            self.cached += u64::from(usage.cached_tokens);
        }
        self.completion += u64::from(usage.completion_tokens);
        self.granted = match self.granted {
            0 => usage.loops,
            granted => granted.min(usage.loops),
        };
        self.loop_rows += usage.loop_rows;
        self.loop_iterations += usage.loop_iterations;
    }

    /// Adds tokens of one job that were thoughts; they are among its completion tokens.
    pub fn add_reasoning(&mut self, n_tokens: u32) {
        self.reasoning = (self.reasoning + u64::from(n_tokens)).min(self.completion);
    }

    /// Tokens of all prompts.
    #[must_use]
    pub fn prompt(&self) -> u64 {
        self.prompt
    }

    /// Those of them whose K/V was there already.
    #[must_use]
    pub fn cached(&self) -> u64 {
        self.cached
    }

    /// Tokens generated.
    #[must_use]
    pub fn completion(&self) -> u64 {
        self.completion
    }

    /// Those of them that were thoughts.
    #[must_use]
    pub fn reasoning(&self) -> u64 {
        self.reasoning
    }

    /// Depth, of a request that asked for `asked`.
    #[must_use]
    pub fn loops(&self, asked: AskedLoops) -> LoopCounts {
        let counted = (self.loop_rows > 0).then(|| {
            let mean = self.loop_iterations as f64 / self.loop_rows as f64;
            (mean * 1e3).round() / 1e3
        });
        let sure = (!asked.may_exit_early).then_some(f64::from(self.granted));
        LoopCounts {
            asked: asked.loops,
            granted: self.granted,
            used_mean: counted.or(sure),
        }
    }

    /// The API's object. `loops`: what was asked, where depth is to be told.
    #[must_use]
    pub fn counts(&self, loops: Option<AskedLoops>) -> UsageCounts {
        UsageCounts {
            prompt_tokens: self.prompt,
            completion_tokens: self.completion,
            total_tokens: self.prompt + self.completion,
            prompt_tokens_details: PromptDetails {
                cached_tokens: self.cached,
            },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: self.reasoning,
            },
            loops: loops.map(|asked| self.loops(asked)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_prompt_counts_once() {
        let mut sum = UsageSum::default();
        let usage = Usage {
            prompt_tokens: 5,
            cached_tokens: 2,
            completion_tokens: 3,
            loops: 1,
            ..Usage::default()
        };
        sum.add(usage, true);
        sum.add(usage, false);
        let counts = sum.counts(None);
        assert_eq!(counts.total_tokens, 11);
        assert_eq!(counts.prompt_tokens_details.cached_tokens, 2);
        assert_eq!(counts.loops, None);
    }

    #[test]
    fn loops_are_the_fewest_granted_and_the_mean_over_tokens() {
        let mut sum = UsageSum::default();
        let usage = |loops, loop_rows, loop_iterations| Usage {
            loops,
            loop_rows,
            loop_iterations,
            ..Usage::default()
        };
        let asked = |may_exit_early| AskedLoops {
            loops: 4,
            may_exit_early,
        };
        let told = |sum: &UsageSum, early| {
            let loops = sum.loops(asked(early));
            (loops.asked, loops.granted, loops.used_mean)
        };
        sum.add(usage(4, 0, 0), true);
        assert_eq!(told(&sum, false), (4, 4, Some(4.0)));
        assert_eq!(told(&sum, true), (4, 4, None));
        sum.add(usage(4, 1, 4), false);
        sum.add(usage(3, 2, 3), false);
        assert_eq!(told(&sum, true), (4, 3, Some(2.333)));
    }
}
