//! One choice of an answer while it grows, for whole answers and streams alike.
//!
//! Pure, owned by the HTTP worker that answers. Text arrives with the log-probabilities of the
//! tokens that made it (`scheduler::TokenStream` holds both back together), so each chunk carries
//! those of the text it shows, and all chunks together carry what the whole answer would.

use super::chat::{ChatChoice, Said};
use super::completions::CompletionChoice;
use super::logprobs::{ChatLogprobs, CompletionLogprobs, TextOffset};
use crate::request::{TextLogprob, TokenId, TokenLogprob};
use crate::tokenizer::Tokenizer;
use serde::Serialize;
use std::borrow::Cow;

/// Who speaks in a chat answer.
const ASSISTANT: &str = "assistant";

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
    /// The same of text whose token ids are not known.
    text_entries: Vec<TextLogprob>,
}

impl Piece {
    /// Appends the piece that comes next.
    pub fn join(&mut self, next: Self) {
        self.text.push_str(&next.text);
        self.entries.extend(next.entries);
        self.text_entries.extend(next.text_entries);
    }
}

/// One choice, or what a chunk adds to it, as JSON.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum ChoiceBody<'a> {
    /// Of a chat answer.
    Chat(ChatChoice<'a>),
    /// Of a text completion.
    Completion(CompletionChoice<'a>),
}

/// One choice.
#[derive(Debug)]
pub struct Choice {
    /// Index among the jobs, and in a stream.
    index: u32,
    family: Family,
    wants_logprobs: bool,
    offset: TextOffset,
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
            offset: TextOffset::new(skip_special),
            logprob_sum: 0.0,
            n_logprobs: 0,
        }
    }

    /// Text that is certain, with the log-probabilities of its tokens. None = nothing to show.
    pub fn push(
        &mut self,
        text: String,
        logprobs: Vec<TokenLogprob>,
        text_logprobs: Vec<TextLogprob>,
    ) -> Option<Piece> {
        self.n_logprobs += logprobs.len() as u32;
        self.logprob_sum += logprobs
            .iter()
            .map(|entry| f64::from(entry.logprob))
            .sum::<f64>();
        let entries = logprobs.into_iter().map(|entry| (entry.token, Some(entry)));
        self.piece(text, entries.collect(), text_logprobs)
    }

    /// The echoed prompt. `logprobs` are those of its tokens 1.., empty when none were asked.
    pub fn echo(
        &mut self,
        text: String,
        prompt: &[TokenId],
        logprobs: Vec<TokenLogprob>,
    ) -> Option<Piece> {
        let entries = std::iter::once(None).chain(logprobs.into_iter().map(Some));
        let entries = prompt.iter().copied().zip(entries).collect();
        self.piece(text, entries, Vec::new())
    }

    fn piece(
        &self,
        text: String,
        entries: Entries,
        text_entries: Vec<TextLogprob>,
    ) -> Option<Piece> {
        let (entries, text_entries) = match self.wants_logprobs {
            true => (entries, text_entries),
            false => Default::default(),
        };
        let is_empty = text.is_empty() && entries.is_empty() && text_entries.is_empty();
        (!is_empty).then_some(Piece {
            text,
            entries,
            text_entries,
        })
    }

    /// Mean log-probability of the generated tokens, for `best_of`.
    #[must_use]
    pub fn mean_logprob(&self) -> f64 {
        self.logprob_sum / f64::from(self.n_logprobs.max(1))
    }

    /// What opens this choice in a stream, where the family has it.
    #[must_use]
    pub fn opening(&self) -> Option<ChoiceBody<'static>> {
        (self.family == Family::Chat).then(|| {
            ChoiceBody::Chat(ChatChoice {
                index: self.index,
                said: Said::Delta {
                    role: Some(ASSISTANT),
                    content: Some(String::new()),
                },
                logprobs: None,
                finish_reason: None,
            })
        })
    }

    /// A piece in a stream.
    #[must_use]
    pub fn piece_body<'a>(
        &mut self,
        tokenizer: Option<&'a Tokenizer>,
        piece: Piece,
    ) -> ChoiceBody<'a> {
        match self.family {
            Family::Chat => ChoiceBody::Chat(ChatChoice {
                index: self.index,
                logprobs: self.chat_logprobs(tokenizer, &piece),
                said: Said::Delta {
                    role: None,
                    content: Some(piece.text),
                },
                finish_reason: None,
            }),
            Family::Completion => ChoiceBody::Completion(CompletionChoice {
                index: self.index,
                logprobs: self
                    .wants_logprobs
                    .then(|| text_logprobs(&mut self.offset, tokenizer, &piece)),
                text: Cow::Owned(piece.text),
                finish_reason: None,
            }),
        }
    }

    /// What ends this choice in a stream.
    #[must_use]
    pub fn ending(&self, finish: &'static str) -> ChoiceBody<'static> {
        match self.family {
            Family::Chat => ChoiceBody::Chat(ChatChoice {
                index: self.index,
                said: Said::Delta {
                    role: None,
                    content: None,
                },
                logprobs: None,
                finish_reason: Some(finish),
            }),
            Family::Completion => ChoiceBody::Completion(CompletionChoice {
                index: self.index,
                text: Cow::Borrowed(""),
                logprobs: None,
                finish_reason: Some(finish),
            }),
        }
    }

    /// The whole choice from all its pieces joined, at `index` of the answer.
    #[must_use]
    pub fn whole<'a>(
        &self,
        index: u32,
        tokenizer: Option<&'a Tokenizer>,
        joined: &'a Piece,
        finish: &'static str,
    ) -> ChoiceBody<'a> {
        match self.family {
            Family::Chat => ChoiceBody::Chat(ChatChoice {
                index,
                said: Said::Message {
                    role: ASSISTANT,
                    content: &joined.text,
                    refusal: (),
                },
                logprobs: self.chat_logprobs(tokenizer, joined),
                finish_reason: Some(finish),
            }),
            Family::Completion => {
                // Nothing was shown piece by piece, so the offset stands at its start.
                let mut offset = self.offset;
                ChoiceBody::Completion(CompletionChoice {
                    index,
                    text: Cow::Borrowed(&joined.text),
                    logprobs: self
                        .wants_logprobs
                        .then(|| text_logprobs(&mut offset, tokenizer, joined)),
                    finish_reason: Some(finish),
                })
            }
        }
    }

    fn chat_logprobs<'a>(
        &self,
        tokenizer: Option<&'a Tokenizer>,
        piece: &Piece,
    ) -> Option<ChatLogprobs<'a>> {
        let known = piece
            .entries
            .iter()
            .filter_map(|(_, logprob)| logprob.as_ref());
        self.wants_logprobs.then(|| match tokenizer {
            Some(tokenizer) => ChatLogprobs::new(tokenizer, known),
            None => ChatLogprobs::of_texts(&piece.text_entries),
        })
    }
}

fn text_logprobs<'a>(
    offset: &mut TextOffset,
    tokenizer: Option<&'a Tokenizer>,
    piece: &Piece,
) -> CompletionLogprobs<'a> {
    match tokenizer {
        Some(tokenizer) => offset.logprobs(tokenizer, &piece.entries),
        None => offset.logprobs_of_texts(&piece.text_entries),
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
        assert_eq!(asked.push(String::new(), Vec::new(), Vec::new()), None);
        let piece = asked
            .push("é".into(), entries(), Vec::new())
            .expect("there is text");
        assert_eq!(
            piece
                .entries
                .iter()
                .map(|entry| entry.0)
                .collect::<Vec<_>>(),
            [1, 2]
        );
        assert!(
            asked.push(String::new(), entries(), Vec::new()).is_some(),
            "tokens of a stop string"
        );
        assert_eq!(asked.mean_logprob(), -1.0);
        let mut compared = Choice::new(0, Family::Completion, false, true);
        assert_eq!(compared.push(String::new(), entries(), Vec::new()), None);
        assert!(
            compared
                .push("a".into(), entries(), Vec::new())
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
