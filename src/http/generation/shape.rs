//! How an answer looks to its client.
//!
//! A shape turns the steps of a growing answer into events, or keeps them and writes a whole answer at
//! the end; both must say the same. Pure but for `whole`, which sends. What is not here: when a step is
//! taken (`growing`), when bytes leave (`run`).

use super::events::Events;
use super::growing::Step;
use super::usage::{AskedLoops, UsageSum};
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::pool::LoadedModel;
use crate::request::RequestId;
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// One API's answers. Choices are numbered from 0, in the order of the jobs.
pub trait Shape {
    /// The stream opens; nothing has been said.
    fn begin(&mut self, _events: &mut Events) {}

    /// Shows the next step of a choice.
    fn step(&mut self, choice_idx: usize, step: Step, events: &mut Events);

    /// All choices have ended. Of those that were cancelled on the way, `usage` has what there was by then.
    fn end(&mut self, usage: &UsageSum, events: &mut Events);

    /// The answer ends with a fault, after it has begun.
    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.body());
    }

    /// Nothing was said for a while: a sign of life.
    fn ping(&mut self, events: &mut Events) {
        events.raw(crate::http::sse::PING);
    }

    /// For whole answers: keeps the next step of a choice.
    fn keep(&mut self, choice_idx: usize, step: Step);

    /// Sends the whole answer.
    fn whole(self, usage: &UsageSum, exchange: Exchange);
}

/// What answers can tell about their request.
#[derive(Clone)]
pub struct AnswerInfo {
    /// Of the request; answers derive theirs from it.
    pub id: RequestId,
    /// The model that answers.
    pub model: Arc<LoadedModel>,
    /// None where another server makes the text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Unix seconds.
    pub created: u64,
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: u64,
    /// What `usage.loops` is about; None for models that do not loop.
    pub loops: Option<AskedLoops>,
    /// The client asked for a usage event at the end of its stream.
    pub include_usage: bool,
    /// The client asked for log-probabilities.
    pub wants_logprobs: bool,
    /// Control tokens are left out of the text.
    pub skip_special: bool,
    /// Which prompt each choice belongs to; its length is the number of choices.
    pub prompt_of_choice: Vec<usize>,
    /// Choices returned per prompt in a whole answer; others were candidates.
    pub n_per_prompt: usize,
}

impl std::fmt::Debug for AnswerInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("AnswerInfo");
        fields.field("id", &self.id).finish_non_exhaustive()
    }
}

impl AnswerInfo {
    /// Identity of a call of a tool, unique among all answers.
    #[must_use]
    pub fn call_id(&self, choice_idx: usize, call_idx: u32) -> String {
        format!("call_{}{choice_idx:02}{call_idx:02}", self.id)
    }
}
