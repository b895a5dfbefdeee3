//! What every answer and chunk of one request have in common: id, model, time, usage.
//!
//! Pure. Id, `created` and model are the same in every chunk of a stream. The types that are
//! serialized borrow what they show; the order of their fields is the order of the keys.

use super::choice::ChoiceBody;
use super::depth::Depth;
use crate::pool::LoadedModel;
use crate::request::{FinishReason, RequestId, Usage};
use serde::Serialize;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The frame around choices.
#[derive(Clone, Debug)]
pub struct AnswerMeta {
    /// `chatcmpl-..` or `cmpl-..`.
    pub id: String,
    /// `object` of a whole answer.
    pub object: &'static str,
    /// `object` of a stream chunk.
    pub chunk_object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The model that answers.
    pub model: Arc<LoadedModel>,
    /// Chunks carry `"usage": null`, because a usage chunk ends the stream.
    pub usage_null: bool,
    /// What `usage.loops` is about; None for models that do not loop.
    pub loops: Option<AskedLoops>,
}

/// The depth of a request before admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskedLoops {
    /// As asked, or the model's default.
    pub loops: u32,
    /// Its tokens may leave the loop early.
    pub may_exit_early: bool,
}

/// A whole answer or a chunk as JSON. `C` is a list of choices.
#[derive(Debug, Serialize)]
pub struct Answer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    /// Changes when the answers of a seed may change: version and model file.
    system_fingerprint: &'a str,
    choices: C,
    /// None = no such key, `Some(None)` = null.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageCounts>>,
}

/// A whole answer.
pub type Whole<'a> = Answer<'a, Vec<ChoiceBody<'a>>>;
/// A chunk of a stream, with a piece of one choice.
pub type Chunk<'a> = Answer<'a, [ChoiceBody<'a>; 1]>;
/// The chunk that ends a stream whose client asked for usage.
pub type UsageChunk<'a> = Answer<'a, [ChoiceBody<'a>; 0]>;

impl AnswerMeta {
    /// Frame of a chat answer.
    #[must_use]
    pub fn chat(id: RequestId, model: &Arc<LoadedModel>, depth: Depth, usage_null: bool) -> Self {
        Self {
            id: format!("chatcmpl-{id}"),
            object: "chat.completion",
            chunk_object: "chat.completion.chunk",
            created: unix_seconds(),
            model: Arc::clone(model),
            usage_null,
            loops: (model.meta.loops.max > 1).then(|| AskedLoops {
                loops: depth.loops.unwrap_or(model.meta.loops.default),
                may_exit_early: depth.adaptive.is_some(),
            }),
        }
    }

    /// Frame of a text completion.
    #[must_use]
    pub fn completion(
        id: RequestId,
        model: &Arc<LoadedModel>,
        depth: Depth,
        usage_null: bool,
    ) -> Self {
        Self {
            id: format!("cmpl-{id}"),
            object: "text_completion",
            chunk_object: "text_completion",
            ..Self::chat(id, model, depth, usage_null)
        }
    }

    fn frame<C>(
        &self,
        object: &'static str,
        choices: C,
        usage: Option<Option<UsageCounts>>,
    ) -> Answer<'_, C> {
        Answer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model.name,
            system_fingerprint: &self.model.meta.fingerprint,
            choices,
            usage,
        }
    }

    /// A whole answer.
    #[must_use]
    pub fn whole<'a>(&'a self, choices: Vec<ChoiceBody<'a>>, usage: &UsageSum) -> Whole<'a> {
        self.frame(self.object, choices, Some(Some(usage.counts(self.loops))))
    }

    /// One chunk of a stream.
    #[must_use]
    pub fn chunk<'a>(&'a self, choice: ChoiceBody<'a>) -> Chunk<'a> {
        let usage = self.usage_null.then_some(None);
        self.frame(self.chunk_object, [choice], usage)
    }

    /// The chunk that ends a stream whose client asked for usage.
    #[must_use]
    pub fn usage_chunk(&self, usage: &UsageSum) -> UsageChunk<'_> {
        self.frame(self.chunk_object, [], Some(Some(usage.counts(self.loops))))
    }
}

/// Unix seconds now.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// `finish_reason` of the API.
#[must_use]
pub fn finish_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Token counts of all jobs of one request. The choices of one prompt share it, so that it counts
/// once, as OpenAI counts.
#[derive(Clone, Debug, Default)]
pub struct UsageSum {
    prompt: u64,
    cached: u64,
    completion: u64,
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
struct LoopCounts {
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

    fn loops(&self, asked: AskedLoops) -> LoopCounts {
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
                reasoning_tokens: 0,
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
