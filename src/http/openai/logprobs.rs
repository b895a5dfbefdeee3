//! Log-probabilities in the two shapes of the API.
//!
//! Pure. JSON has no infinities: whatever is not finite becomes -9999.0, as OpenAI does it.
//! Offsets count characters of the answer's text; control tokens that the text leaves out do not
//! advance them.

use crate::request::{TokenId, TokenLogprob};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

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

fn token_text(tokenizer: &Tokenizer, token: TokenId) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned()
}

/// One entry of `choices[].logprobs.content`.
#[must_use]
pub fn chat_entry(tokenizer: &Tokenizer, logprob: &TokenLogprob) -> Value {
    let entry = |token: TokenId, value: f32| {
        json!({
            "token": token_text(tokenizer, token),
            "logprob": finite(value),
            "bytes": tokenizer.token_bytes(token),
        })
    };
    let mut chosen = entry(logprob.token, logprob.logprob);
    let top: Vec<Value> = logprob
        .top
        .iter()
        .map(|(token, value)| entry(*token, *value))
        .collect();
    chosen["top_logprobs"] = Value::Array(top);
    chosen
}

/// Builds `choices[].logprobs` of text completions piece by piece; the offsets run on.
#[derive(Clone, Debug)]
pub struct CompletionLogprobs {
    skip_special: bool,
    n_chars: usize,
}

impl CompletionLogprobs {
    /// Starts at offset 0.
    #[must_use]
    pub fn new(skip_special: bool) -> Self {
        Self {
            skip_special,
            n_chars: 0,
        }
    }

    /// The object for these tokens. None = the first prompt token, which nothing predicts.
    #[must_use]
    pub fn object(
        &mut self,
        tokenizer: &Tokenizer,
        entries: &[(TokenId, Option<TokenLogprob>)],
    ) -> Value {
        let mut tokens = Vec::with_capacity(entries.len());
        let mut token_logprobs = Vec::with_capacity(entries.len());
        let mut top_logprobs = Vec::with_capacity(entries.len());
        let mut text_offset = Vec::with_capacity(entries.len());
        for (token, logprob) in entries {
            tokens.push(Value::from(token_text(tokenizer, *token)));
            text_offset.push(Value::from(self.n_chars));
            self.n_chars += self.chars_of(tokenizer, *token);
            token_logprobs.push(logprob.as_ref().map(|entry| finite(entry.logprob)));
            top_logprobs.push(logprob.as_ref().map(|entry| top_map(tokenizer, entry)));
        }
        json!({
            "tokens": tokens, "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs, "text_offset": text_offset,
        })
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
fn top_map(tokenizer: &Tokenizer, entry: &TokenLogprob) -> Map<String, Value> {
    let mut map = Map::new();
    for (token, value) in entry.top.iter().chain([&(entry.token, entry.logprob)]) {
        map.entry(token_text(tokenizer, *token))
            .or_insert_with(|| Value::from(finite(*value)));
    }
    map
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
