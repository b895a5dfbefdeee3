//! What every answer and chunk of one request have in common: id, model, time, usage.
//!
//! Pure. Id, `created` and model are the same in every chunk of a stream. The types that are
//! serialized borrow what they show; the order of their fields is the order of the keys.

use super::choice::ChoiceBody;
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
    pub fn chat(id: RequestId, model: &Arc<LoadedModel>, usage_null: bool) -> Self {
        Self {
            id: format!("chatcmpl-{id}"),
            object: "chat.completion",
            chunk_object: "chat.completion.chunk",
            created: unix_seconds(),
            model: Arc::clone(model),
            usage_null,
        }
    }

    /// Frame of a text completion.
    #[must_use]
    pub fn completion(id: RequestId, model: &Arc<LoadedModel>, usage_null: bool) -> Self {
        Self {
            id: format!("cmpl-{id}"),
            object: "text_completion",
            chunk_object: "text_completion",
            ..Self::chat(id, model, usage_null)
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
        self.frame(self.object, choices, Some(Some(usage.counts())))
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
        self.frame(self.chunk_object, [], Some(Some(usage.counts())))
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
}

/// `usage` of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UsageCounts {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
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
    }

    /// The API's object.
    #[must_use]
    pub fn counts(&self) -> UsageCounts {
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
        assert_eq!(sum.counts().total_tokens, 11);
        assert_eq!(sum.counts().prompt_tokens_details.cached_tokens, 2);
    }
}
