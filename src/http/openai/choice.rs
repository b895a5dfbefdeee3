//! One choice of an answer while it grows, for whole answers and streams alike.
//!
//! Pure, owned by the HTTP worker that answers. Text arrives with the log-probabilities of the
//! tokens that made it (`scheduler::TokenStream` holds both back together), so each chunk carries
//! those of the text it shows, and all chunks together carry what the whole answer would.

use super::answer::AnswerMeta;
use super::logprobs::{CompletionLogprobs, chat_entry};
use super::{chat, completions};
use crate::request::{TokenId, TokenLogprob};
use crate::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// Which API family's shapes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Chat completions.
    Chat,
    /// Text completions.
    Completion,
}

/// Tokens of a piece; None where nothing predicts the token (the first of a prompt).
type Entries = Vec<(TokenId, Option<TokenLogprob>)>;

/// Text that is ready to be shown, with the tokens that made it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    text: String,
    entries: Entries,
}

/// One choice.
#[derive(Debug)]
pub struct Choice {
    /// Index in the answer.
    pub index: u32,
    family: Family,
    wants_logprobs: bool,
    offsets: CompletionLogprobs,
    logprob_sum: f64,
    n_logprobs: u32,
}

impl Choice {
    /// An empty choice. `wants_logprobs`: pieces carry log-probabilities.
    #[must_use]
    pub fn new(index: u32, family: Family, wants_logprobs: bool, skip_special: bool) -> Self {
        Self {
            index,
            family,
            wants_logprobs,
            offsets: CompletionLogprobs::new(skip_special),
            logprob_sum: 0.0,
            n_logprobs: 0,
        }
    }

    /// Text that is certain, with the log-probabilities of its tokens. None = nothing to show.
    pub fn push(&mut self, text: String, logprobs: Vec<TokenLogprob>) -> Option<Piece> {
        self.n_logprobs += logprobs.len() as u32;
        self.logprob_sum += logprobs
            .iter()
            .map(|entry| f64::from(entry.logprob))
            .sum::<f64>();
        let entries = logprobs.into_iter().map(|entry| (entry.token, Some(entry)));
        self.piece(text, entries.collect())
    }

    /// The echoed prompt. `logprobs` are those of its tokens 1.., empty when none were asked.
    pub fn echo(
        &mut self,
        text: String,
        prompt: &[TokenId],
        logprobs: Vec<TokenLogprob>,
    ) -> Option<Piece> {
        let entries = std::iter::once(None).chain(logprobs.into_iter().map(Some));
        self.piece(text, prompt.iter().copied().zip(entries).collect())
    }

    fn piece(&self, text: String, entries: Entries) -> Option<Piece> {
        let entries = if self.wants_logprobs {
            entries
        } else {
            Vec::new()
        };
        (!text.is_empty() || !entries.is_empty()).then_some(Piece { text, entries })
    }

    /// Mean log-probability of the generated tokens, for `best_of`.
    #[must_use]
    pub fn mean_logprob(&self) -> f64 {
        self.logprob_sum / f64::from(self.n_logprobs.max(1))
    }

    /// The first chunk of this choice, where the family has one.
    #[must_use]
    pub fn opening_chunk(&self, meta: &AnswerMeta) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.family == Family::Chat).then(|| chat::chunk(meta, self.index, delta, None, None))
    }

    /// A chunk with a piece.
    #[must_use]
    pub fn piece_chunk(&mut self, meta: &AnswerMeta, tokenizer: &Tokenizer, piece: Piece) -> Value {
        let index = self.index;
        match self.family {
            Family::Chat => {
                let logprobs = self.chat_logprobs(tokenizer, &piece.entries);
                chat::chunk(meta, index, json!({"content": piece.text}), logprobs, None)
            }
            Family::Completion => {
                let logprobs = self.completion_logprobs(tokenizer, &piece.entries);
                completions::chunk(meta, index, &piece.text, logprobs, None)
            }
        }
    }

    /// The last chunk.
    #[must_use]
    pub fn finish_chunk(&self, meta: &AnswerMeta, finish: &str) -> Value {
        match self.family {
            Family::Chat => chat::chunk(meta, self.index, json!({}), None, Some(finish)),
            Family::Completion => completions::chunk(meta, self.index, "", None, Some(finish)),
        }
    }

    /// The whole choice from all its pieces.
    #[must_use]
    pub fn whole(&mut self, tokenizer: &Tokenizer, pieces: Vec<Piece>, finish: &str) -> Value {
        let mut text = String::new();
        let mut entries = Vec::new();
        for piece in pieces {
            text.push_str(&piece.text);
            entries.extend(piece.entries);
        }
        match self.family {
            Family::Chat => {
                let logprobs = self.chat_logprobs(tokenizer, &entries);
                chat::choice(self.index, &text, logprobs, finish)
            }
            Family::Completion => {
                let logprobs = self.completion_logprobs(tokenizer, &entries);
                completions::choice(self.index, &text, logprobs, finish)
            }
        }
    }

    fn chat_logprobs(&self, tokenizer: &Tokenizer, entries: &Entries) -> Option<Vec<Value>> {
        self.wants_logprobs.then(|| {
            let known = entries.iter().filter_map(|(_, logprob)| logprob.as_ref());
            known
                .map(|logprob| chat_entry(tokenizer, logprob))
                .collect()
        })
    }

    fn completion_logprobs(&mut self, tokenizer: &Tokenizer, entries: &Entries) -> Option<Value> {
        self.wants_logprobs
            .then(|| self.offsets.object(tokenizer, entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logprob(token: TokenId) -> Option<TokenLogprob> {
        Some(TokenLogprob {
            token,
            logprob: -1.0,
            top: Vec::new(),
        })
    }

    #[test]
    fn pieces_carry_logprobs_only_when_asked() {
        let entries = || [1, 2].into_iter().filter_map(logprob).collect::<Vec<_>>();
        let mut asked = Choice::new(0, Family::Chat, true, true);
        assert_eq!(asked.push(String::new(), Vec::new()), None);
        let piece = asked.push("é".into(), entries()).expect("there is text");
        assert_eq!(
            piece
                .entries
                .iter()
                .map(|entry| entry.0)
                .collect::<Vec<_>>(),
            [1, 2]
        );
        assert!(
            asked.push(String::new(), entries()).is_some(),
            "tokens of a stop string"
        );
        assert_eq!(asked.mean_logprob(), -1.0);
        let mut compared = Choice::new(0, Family::Completion, false, true);
        assert_eq!(compared.push(String::new(), entries()), None);
        assert!(
            compared
                .push("a".into(), entries())
                .expect("text")
                .entries
                .is_empty()
        );
        assert_eq!(compared.mean_logprob(), -1.0);
    }

    #[test]
    fn an_echoed_prompt_has_no_logprob_for_its_first_token() {
        let mut choice = Choice::new(0, Family::Completion, true, true);
        let logprobs = [2, 3].into_iter().filter_map(logprob).collect();
        let piece = choice
            .echo("abc".into(), &[1, 2, 3], logprobs)
            .expect("text");
        assert_eq!(piece.entries[0], (1, None));
        assert_eq!(
            piece.entries[2].1.as_ref().map(|entry| entry.token),
            Some(3)
        );
    }
}
