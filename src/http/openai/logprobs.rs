//! Log-probabilities in the two shapes of the API.
//!
//! Pure. JSON has no infinities: whatever is not finite becomes -9999.0, as OpenAI does it.
//! Offsets count characters of the answer's text; control tokens that the text leaves out do not
//! advance them.

use crate::request::{TextLogprob, TextToken, TokenId, TokenLogprob};
use crate::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use std::borrow::Cow;

/// What stands for a log-probability that JSON cannot hold.
pub const LOGPROB_MIN: f64 = -9999.0;

/// A log-probability as JSON can hold it.
#[must_use]
pub fn finite(logprob: f32) -> f64 {
    let value = f64::from(logprob);
    if value.is_finite() {
        value.max(LOGPROB_MIN)
    } else {
        LOGPROB_MIN
    }
}

fn token_text(tokenizer: &Tokenizer, token: TokenId) -> Cow<'_, str> {
    String::from_utf8_lossy(tokenizer.token_bytes(token))
}

/// `choices[].logprobs` of chat answers.
#[derive(Debug, Serialize)]
pub struct ChatLogprobs<'a> {
    content: Vec<ChatEntry<'a>>,
    /// Always null: there is no refusal.
    refusal: (),
}

#[derive(Debug, Serialize)]
struct ChatEntry<'a> {
    #[serde(flatten)]
    chosen: ChatToken<'a>,
    top_logprobs: Vec<ChatToken<'a>>,
}

#[derive(Debug, Serialize)]
struct ChatToken<'a> {
    token: Cow<'a, str>,
    logprob: f64,
    bytes: Cow<'a, [u8]>,
}

impl From<&TextToken> for ChatToken<'static> {
    fn from(token: &TextToken) -> Self {
        let bytes = token.bytes.as_deref().unwrap_or(token.text.as_bytes());
        Self {
            token: Cow::Owned(token.text.clone()),
            logprob: finite(token.logprob),
            bytes: Cow::Owned(bytes.to_vec()),
        }
    }
}

impl ChatLogprobs<'static> {
    /// Of tokens whose ids are not known.
    #[must_use]
    pub fn of_texts(entries: &[TextLogprob]) -> Self {
        let entry = |entry: &TextLogprob| ChatEntry {
            chosen: (&entry.chosen).into(),
            top_logprobs: entry.top.iter().map(ChatToken::from).collect(),
        };
        Self {
            content: entries.iter().map(entry).collect(),
            refusal: (),
        }
    }
}

impl<'a> ChatLogprobs<'a> {
    /// Of tokens of the answer.
    #[must_use]
    pub fn new<'e>(
        tokenizer: &'a Tokenizer,
        entries: impl Iterator<Item = &'e TokenLogprob>,
    ) -> Self {
        let token = |token: TokenId, logprob: f32| ChatToken {
            token: token_text(tokenizer, token),
            logprob: finite(logprob),
            bytes: Cow::Borrowed(tokenizer.token_bytes(token)),
        };
        let entry = |entry: &TokenLogprob| ChatEntry {
            chosen: token(entry.token, entry.logprob),
            top_logprobs: entry.top.iter().map(|top| token(top.0, top.1)).collect(),
        };
        Self {
            content: entries.map(entry).collect(),
            refusal: (),
        }
    }
}

/// `choices[].logprobs` of text completions. None = the first prompt token, which nothing predicts.
#[derive(Debug, Default, Serialize)]
pub struct CompletionLogprobs<'a> {
    tokens: Vec<Cow<'a, str>>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<TopMap<'a>>>,
    text_offset: Vec<usize>,
}

/// Where in the text the next token begins, in characters; runs on from piece to piece.
#[derive(Clone, Copy, Debug)]
pub struct TextOffset {
    skip_special: bool,
    n_chars: usize,
}

impl TextOffset {
    /// Starts at offset 0.
    #[must_use]
    pub fn new(skip_special: bool) -> Self {
        Self {
            skip_special,
            n_chars: 0,
        }
    }

    /// The object for the tokens that come next. None = the first prompt token.
    #[must_use]
    pub fn logprobs<'a>(
        &mut self,
        tokenizer: &'a Tokenizer,
        entries: &[(TokenId, Option<TokenLogprob>)],
    ) -> CompletionLogprobs<'a> {
        let mut object = CompletionLogprobs::default();
        for (token, logprob) in entries {
            let logprob = logprob.as_ref();
            object.tokens.push(token_text(tokenizer, *token));
            object
                .token_logprobs
                .push(logprob.map(|entry| finite(entry.logprob)));
            object
                .top_logprobs
                .push(logprob.map(|entry| TopMap::new(tokenizer, entry)));
            object.text_offset.push(self.n_chars);
            self.n_chars += self.chars_of(tokenizer, *token);
        }
        object
    }

    /// The same for tokens whose ids are not known.
    #[must_use]
    pub fn logprobs_of_texts(&mut self, entries: &[TextLogprob]) -> CompletionLogprobs<'static> {
        let mut object = CompletionLogprobs::default();
        for entry in entries {
            let chosen = &entry.chosen;
            object.tokens.push(Cow::Owned(chosen.text.clone()));
            object.token_logprobs.push(Some(finite(chosen.logprob)));
            object.top_logprobs.push(Some(TopMap::of_texts(entry)));
            object.text_offset.push(self.n_chars);
            self.n_chars += chosen.text.chars().count();
        }
        object
    }

    /// Characters that begin in this token.
    fn chars_of(&self, tokenizer: &Tokenizer, token: TokenId) -> usize {
        if self.skip_special && tokenizer.is_control(token) {
            return 0;
        }
        let starts_character = |byte: &&u8| (**byte & 0xC0) != 0x80;
        tokenizer
            .token_bytes(token)
            .iter()
            .filter(starts_character)
            .count()
    }
}

/// `{text: logprob}` of the likeliest tokens and the chosen one. Two tokens with the same text
/// (broken UTF-8) keep the likelier.
#[derive(Debug)]
struct TopMap<'a>(Vec<(Cow<'a, str>, f64)>);

impl<'a> TopMap<'a> {
    fn new(tokenizer: &'a Tokenizer, entry: &TokenLogprob) -> Self {
        let mut map = Vec::with_capacity(entry.top.len() + 1);
        for (token, value) in entry.top.iter().chain([&(entry.token, entry.logprob)]) {
            let text = token_text(tokenizer, *token);
            if map.iter().all(|(known, _)| *known != text) {
                map.push((text, finite(*value)));
            }
        }
        Self(map)
    }
}

impl TopMap<'static> {
    fn of_texts(entry: &TextLogprob) -> Self {
        let mut map: Vec<(Cow<'static, str>, f64)> = Vec::with_capacity(entry.top.len() + 1);
        for token in entry.top.iter().chain([&entry.chosen]) {
            if map.iter().all(|(known, _)| *known != token.text) {
                map.push((Cow::Owned(token.text.clone()), finite(token.logprob)));
            }
        }
        Self(map)
    }
}

impl Serialize for TopMap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_json_cannot_hold_becomes_minus_9999() {
        for value in [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -1e30] {
            assert_eq!(finite(value), LOGPROB_MIN);
        }
        assert_eq!(finite(-0.5), -0.5);
    }
}
