//! What every answer and chunk of one request have in common: id, model, time, usage.
//!
//! Pure. Id, `created` and model are the same in every chunk of a stream. The types that are
//! serialized borrow what they show; the order of their fields is the order of the keys.

use super::choice::ChoiceBody;
use crate::http::generation::growing::Finish;
use crate::http::generation::shape::AnswerInfo;
use crate::http::generation::timings::Timings;
use crate::http::generation::usage::{UsageCounts, UsageSum};
use crate::request::FinishReason;
use serde::Serialize;

/// Which API family's shapes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Chat completions.
    Chat,
    /// Text completions.
    Completion,
}

/// The frame around choices.
#[derive(Clone, Debug)]
pub struct Frame {
    /// `chatcmpl-..` or `cmpl-..`.
    id: String,
    family: Family,
    info: AnswerInfo,
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
    /// llama-server's, where the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
}

impl<C> Answer<'_, C> {
    /// The same with times.
    #[must_use]
    pub fn timed(self, timings: Option<Timings>) -> Self {
        Self { timings, ..self }
    }
}

/// A whole answer.
pub type Whole<'a> = Answer<'a, Vec<ChoiceBody<'a>>>;
/// A chunk of a stream, with a piece of one choice.
pub type Chunk<'a> = Answer<'a, [ChoiceBody<'a>; 1]>;
/// The chunk that ends a stream whose client asked for usage.
pub type UsageChunk<'a> = Answer<'a, [ChoiceBody<'a>; 0]>;

impl Frame {
    /// Of an answer.
    #[must_use]
    pub fn new(family: Family, info: AnswerInfo) -> Self {
        let prefix = match family {
            Family::Chat => "chatcmpl",
            Family::Completion => "cmpl",
        };
        let id = format!("{prefix}-{}", info.id);
        Self { id, family, info }
    }

    /// What is known about the request.
    #[must_use]
    pub fn info(&self) -> &AnswerInfo {
        &self.info
    }

    /// Whose shapes.
    #[must_use]
    pub fn family(&self) -> Family {
        self.family
    }

    fn answer<C>(
        &self,
        object: &'static str,
        choices: C,
        usage: Option<Option<UsageCounts>>,
    ) -> Answer<'_, C> {
        Answer {
            id: &self.id,
            object,
            created: self.info.created,
            model: &self.info.model.name,
            system_fingerprint: &self.info.model.meta.fingerprint,
            choices,
            usage,
            timings: None,
        }
    }

    /// A whole answer.
    #[must_use]
    pub fn whole<'a>(&'a self, choices: Vec<ChoiceBody<'a>>, usage: &UsageSum) -> Whole<'a> {
        let object = match self.family {
            Family::Chat => "chat.completion",
            Family::Completion => "text_completion",
        };
        let usage = usage.counts(self.info.loops);
        self.answer(object, choices, Some(Some(usage)))
    }

    fn chunk_object(&self) -> &'static str {
        match self.family {
            Family::Chat => "chat.completion.chunk",
            Family::Completion => "text_completion",
        }
    }

    /// One chunk of a stream; it carries `"usage": null` where a usage chunk ends the stream.
    #[must_use]
    pub fn chunk<'a>(&'a self, choice: ChoiceBody<'a>) -> Chunk<'a> {
        let usage = self.info.include_usage.then_some(None);
        self.answer(self.chunk_object(), [choice], usage)
    }

    /// The chunk that ends a stream whose client asked for usage.
    #[must_use]
    pub fn usage_chunk(&self, usage: &UsageSum) -> UsageChunk<'_> {
        let usage = usage.counts(self.info.loops);
        self.answer(self.chunk_object(), [], Some(Some(usage)))
    }
}

/// `finish_reason` of the API.
#[must_use]
pub fn finish_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// The same of a choice.
#[must_use]
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopString(_) => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
        Finish::Cancelled => "cancelled",
    }
}
