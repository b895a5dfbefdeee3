//! How answers of `POST /completion` look, whole and streamed.
//!
//! Pure but for sending the whole answer and for a stopwatch where the client wants to see times
//! grow. A stream's events are `{index, content, tokens, stop: false, ..}`; the last one of each choice
//! is the whole object with empty `content`, and nothing follows the last choice.

use crate::chat::Part;
use crate::http::error_style::ErrorStyle;
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::events::Events;
use crate::http::generation::growing::{Ending, Finish, Logprobs, Step};
use crate::http::generation::shape::{AnswerInfo, Shape};
use crate::http::generation::timings::{Stopwatch, Timings};
use crate::http::generation::usage::UsageSum;
use crate::http::openai::logprobs::finite;
use crate::request::{TokenId, TokenLogprob};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// No slot in particular: which replica answers, and where, is nobody's business.
const ID_SLOT: i32 = -1;

/// What a request wants to see.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) is_stream: bool,
    /// Pieces of a stream tell the times so far.
    pub(super) times_pieces: bool,
    pub(super) shows_tokens: bool,
    pub(super) shows_probs: bool,
    /// Paths of the only fields to show at the end; empty = all.
    pub(super) response_fields: Vec<String>,
    pub(super) settings: Value,
    pub(super) stop_strings: Vec<String>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct CompletionShape {
    info: AnswerInfo,
    look: Look,
    choices: Vec<Choice>,
}

#[derive(Debug)]
struct Choice {
    prompt: String,
    prompt_tokens: u32,
    /// Of a whole answer.
    content: String,
    tokens: Vec<TokenId>,
    probs: Vec<Value>,
    n_predicted: u32,
    has_new_line: bool,
    stopwatch: Stopwatch,
    ending: Option<Ending>,
}

/// What a piece adds.
struct Said {
    content: String,
    tokens: Vec<TokenId>,
    probs: Vec<Value>,
}

impl CompletionShape {
    /// `prompts`: text and length of the prompt of each choice.
    pub(super) fn new(info: AnswerInfo, look: Look, prompts: Vec<(String, u32)>) -> Self {
        let choice = |(prompt, prompt_tokens)| Choice {
            prompt,
            prompt_tokens,
            content: String::new(),
            tokens: Vec::new(),
            probs: Vec::new(),
            n_predicted: 0,
            has_new_line: false,
            stopwatch: Stopwatch::start(),
            ending: None,
        };
        Self {
            info,
            look,
            choices: prompts.into_iter().map(choice).collect(),
        }
    }

    /// Notes a step; what it says, if anything.
    fn take(&mut self, choice_idx: usize, step: Step) -> Option<Said> {
        let choice = &mut self.choices[choice_idx];
        let piece = match step {
            Step::Open => return None,
            Step::Finish(ending) => {
                choice.ending = Some(*ending);
                return None;
            }
            Step::Piece(piece) => piece,
        };
        let content = match piece.part {
            Part::Text(text) | Part::Reasoning(text) => text,
            // A text to continue calls no tools.
            Part::CallBegin { .. } | Part::CallArguments { .. } => String::new(),
        };
        choice.has_new_line |= content.contains('\n');
        let n_tokens = piece.logprobs.entries.len() as u32;
        choice.n_predicted += n_tokens.max(u32::from(n_tokens == 0 && !content.is_empty()));
        let tokens = piece.logprobs.entries.iter().map(|entry| entry.0);
        Some(Said {
            content,
            tokens: match self.look.shows_tokens {
                true => tokens.collect(),
                false => Vec::new(),
            },
            probs: match (&self.info.tokenizer, self.look.shows_probs) {
                (Some(tokenizer), true) => probs(tokenizer, &piece.logprobs),
                _ => Vec::new(),
            },
        })
    }

    /// The object that tells how a choice ended.
    fn end_of(&self, choice_idx: usize, content: &str, tokens: &[TokenId]) -> Value {
        let choice = &self.choices[choice_idx];
        let finish = choice
            .ending
            .map_or(Finish::Cancelled, |ending| ending.finish);
        let counted = choice.ending.and_then(|ending| ending.counted);
        let usage = counted.map(|counted| counted.usage);
        let n_predicted = usage.map_or(choice.n_predicted, |usage| usage.completion_tokens);
        let n_prompt = usage.map_or(choice.prompt_tokens, |usage| usage.prompt_tokens);
        let (stop_type, stopping_word) = match finish {
            Finish::Stop | Finish::ToolCalls => ("eos", ""),
            Finish::Length => ("limit", ""),
            Finish::Cancelled => ("none", ""),
            Finish::StopString(idx) => {
                let word = self.look.stop_strings.get(idx);
                ("word", word.map_or("", String::as_str))
            }
        };
        let n_held = n_prompt + n_predicted;
        let mut end = json!({
            "index": choice_idx, "content": content, "tokens": tokens, "id_slot": ID_SLOT,
            "stop": true, "model": self.info.model.name,
            "tokens_predicted": n_predicted, "tokens_evaluated": n_prompt,
            "generation_settings": self.look.settings, "prompt": choice.prompt,
            "has_new_line": choice.has_new_line,
            "truncated": finish == Finish::Length && n_held >= self.info.model.context_length,
            "stop_type": stop_type, "stopping_word": stopping_word,
            "tokens_cached": n_held.saturating_sub(1),
        });
        if let Some(counted) = counted {
            end["timings"] = json!(Timings::of(&counted));
        }
        if !choice.probs.is_empty() {
            end["completion_probabilities"] = json!(choice.probs);
        }
        chosen_fields(end, &self.look.response_fields)
    }
}

/// Only the fields of these paths, each under its path; those that do not exist are left out.
fn chosen_fields(whole: Value, paths: &[String]) -> Value {
    if paths.is_empty() {
        return whole;
    }
    let at = |path: &String| {
        let mut names = path.split('/');
        let found = names.try_fold(&whole, |value, name| value.get(name))?;
        Some((path.clone(), found.clone()))
    };
    let chosen: Map<String, Value> = paths.iter().filter_map(at).collect();
    chosen.into()
}

/// Entries of `completion_probabilities`.
fn probs(tokenizer: &Tokenizer, logprobs: &Logprobs) -> Vec<Value> {
    let token = |id: TokenId, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(error) => String::from_utf8_lossy(&bytes[..error.valid_up_to()]).into_owned(),
        };
        json!({"id": id, "token": text, "bytes": bytes, "logprob": finite(logprob)})
    };
    let entry = |known: &TokenLogprob| {
        let top = known.top.iter().map(|(id, logprob)| token(*id, *logprob));
        let mut entry = token(known.token, known.logprob);
        entry["top_logprobs"] = top.collect();
        entry
    };
    let known = logprobs.entries.iter().filter_map(|entry| entry.1.as_ref());
    known.map(entry).collect()
}

impl Shape for CompletionShape {
    fn step(&mut self, choice_idx: usize, step: Step, events: &mut Events) {
        let Some(said) = self.take(choice_idx, step) else {
            if self.choices[choice_idx].ending.is_some() {
                events.data(&self.end_of(choice_idx, "", &[]));
            }
            return;
        };
        let choice = &mut self.choices[choice_idx];
        let mut event = json!({
            "index": choice_idx, "content": said.content, "tokens": said.tokens, "stop": false,
            "id_slot": ID_SLOT, "tokens_predicted": choice.n_predicted,
            "tokens_evaluated": choice.prompt_tokens,
        });
        if self.look.times_pieces {
            let n_new = (said.tokens.len() as u32).max(1);
            event["timings"] = json!(choice.stopwatch.lap(n_new, choice.prompt_tokens));
        }
        if self.look.shows_probs {
            event["completion_probabilities"] = json!(said.probs);
        }
        events.data(&event);
    }

    fn end(&mut self, _usage: &UsageSum, _events: &mut Events) {}

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&ErrorStyle::LlamaServer.body(error));
    }

    fn keep(&mut self, choice_idx: usize, step: Step) {
        if let Some(said) = self.take(choice_idx, step) {
            let choice = &mut self.choices[choice_idx];
            choice.content.push_str(&said.content);
            choice.tokens.extend(said.tokens);
            choice.probs.extend(said.probs);
        }
    }

    fn whole(self, _usage: &UsageSum, exchange: Exchange) {
        let whole = |idx: usize| {
            let choice = &self.choices[idx];
            self.end_of(idx, &choice.content, &choice.tokens)
        };
        match self.choices.len() {
            1 => exchange.json(&whole(0)),
            n => exchange.json(&(0..n).map(whole).collect::<Vec<_>>()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_chosen_by_their_paths() {
        let whole = json!({"content": "x", "generation_settings": {"n_predict": 5}, "stop": true});
        let paths = [
            "content",
            "generation_settings/n_predict",
            "none/such",
            "stop/x",
        ];
        let chosen = chosen_fields(whole.clone(), &paths.map(str::to_owned));
        assert_eq!(
            chosen,
            json!({"content": "x", "generation_settings/n_predict": 5})
        );
        assert_eq!(chosen_fields(whole.clone(), &[]), whole);
    }
}
