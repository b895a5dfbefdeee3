//! One choice of an answer, for whole answers and streams alike.
//!
//! Pure, owned by the HTTP worker that answers. Each chunk carries the log-probabilities of the text it
//! shows, and all chunks together carry what the whole answer would.

use super::answer::{Family, Frame, finish_reason};
use super::chat::{CallDelta, ChatChoice, FunctionDelta, Said, ToolCall};
use super::completions::CompletionChoice;
use super::logprobs::{ChatLogprobs, CompletionLogprobs, TextOffset};
use crate::chat::Part;
use crate::http::generation::growing::{Finish, Logprobs, Piece, Step};
use crate::http::generation::shape::AnswerInfo;
use serde::Serialize;
use std::borrow::Cow;

/// Who speaks in a chat answer.
const ASSISTANT: &str = "assistant";
/// What kind of tool is called.
const FUNCTION: &str = "function";

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
    index: usize,
    offset: TextOffset,
    logprob_sum: f64,
    n_logprobs: u32,
    kept: Kept,
}

/// What a choice of a whole answer has said.
#[derive(Debug, Default)]
struct Kept {
    text: String,
    reasoning: String,
    /// Name and arguments.
    calls: Vec<(String, String)>,
    logprobs: Logprobs,
    finish: Option<Finish>,
    /// It ends within a call, which may have been cut before it began.
    call_is_cut: bool,
}

impl Choice {
    /// An empty choice.
    #[must_use]
    pub fn new(index: usize, skip_special: bool) -> Self {
        Self {
            index,
            offset: TextOffset::new(skip_special),
            logprob_sum: 0.0,
            n_logprobs: 0,
            kept: Kept::default(),
        }
    }

    /// Mean log-probability of the generated tokens, for `best_of`.
    #[must_use]
    pub fn mean_logprob(&self) -> f64 {
        self.logprob_sum / f64::from(self.n_logprobs.max(1))
    }

    /// For whole answers.
    pub fn keep(&mut self, step: Step) {
        let Piece { part, logprobs } = match step {
            Step::Open => return,
            Step::Finish(ending) => {
                self.kept.finish = Some(ending.finish);
                self.kept.call_is_cut = ending.call_is_cut;
                return;
            }
            Step::Piece(piece) => piece,
        };
        let known = logprobs.entries.iter().filter_map(|entry| entry.1.as_ref());
        for entry in known {
            self.n_logprobs += 1;
            self.logprob_sum += f64::from(entry.logprob);
        }
        self.kept.logprobs.join(logprobs);
        match part {
            Part::Text(text) => self.kept.text.push_str(&text),
            Part::Reasoning(text) => self.kept.reasoning.push_str(&text),
            Part::CallBegin { name, .. } => self.kept.calls.push((name, String::new())),
            Part::CallArguments { index, fragment } => {
                if let Some((_, arguments)) = self.kept.calls.get_mut(index as usize) {
                    arguments.push_str(&fragment);
                }
            }
        }
    }

    /// For streams: what a step adds. None = nothing to show.
    #[must_use]
    pub fn delta<'a>(&mut self, frame: &'a Frame, step: Step) -> Option<ChoiceBody<'a>> {
        match (frame.family(), step) {
            (Family::Chat, Step::Open) => Some(self.chat_delta(ChatDelta {
                role: Some(ASSISTANT),
                content: Some(String::new()),
                ..ChatDelta::default()
            })),
            (Family::Completion, Step::Open) => None,
            (_, Step::Piece(piece)) => self.piece(frame, piece),
            (Family::Chat, Step::Finish(ending)) => Some(self.chat_delta(ChatDelta {
                finish_reason: Some(finish_reason(ending.finish)),
                ..ChatDelta::default()
            })),
            (Family::Completion, Step::Finish(ending)) => {
                Some(ChoiceBody::Completion(CompletionChoice {
                    index: self.index as u32,
                    text: Cow::Borrowed(""),
                    logprobs: None,
                    finish_reason: Some(finish_reason(ending.finish)),
                }))
            }
        }
    }

    fn piece<'a>(&mut self, frame: &'a Frame, piece: Piece) -> Option<ChoiceBody<'a>> {
        let info = frame.info();
        let Piece { part, logprobs } = piece;
        if part.is_empty() && (logprobs.is_empty() || !info.wants_logprobs) {
            return None;
        }
        match frame.family() {
            Family::Completion => Some(ChoiceBody::Completion(CompletionChoice {
                index: self.index as u32,
                logprobs: completion_logprobs(info, &mut self.offset, &logprobs),
                text: match part {
                    Part::Text(text) => Cow::Owned(text),
                    _ => Cow::Borrowed(""), // texts to continue have no other parts
                },
                finish_reason: None,
            })),
            Family::Chat => Some(self.chat_delta(ChatDelta {
                logprobs: chat_logprobs(info, &logprobs),
                ..self.chat_part(info, part)
            })),
        }
    }

    fn chat_part<'a>(&self, info: &AnswerInfo, part: Part) -> ChatDelta<'a> {
        let call = |call| ChatDelta {
            tool_calls: Some([call]),
            ..ChatDelta::default()
        };
        match part {
            Part::Text(text) => ChatDelta {
                content: Some(text),
                ..ChatDelta::default()
            },
            Part::Reasoning(text) => ChatDelta {
                reasoning_content: Some(text),
                ..ChatDelta::default()
            },
            Part::CallBegin { index, name } => call(CallDelta {
                index,
                id: Some(info.call_id(self.index, index)),
                kind: Some(FUNCTION),
                function: FunctionDelta {
                    name: Some(name),
                    arguments: String::new(),
                },
            }),
            Part::CallArguments { index, fragment } => call(CallDelta {
                index,
                id: None,
                kind: None,
                function: FunctionDelta {
                    name: None,
                    arguments: fragment,
                },
            }),
        }
    }

    fn chat_delta<'a>(&self, delta: ChatDelta<'a>) -> ChoiceBody<'a> {
        ChoiceBody::Chat(ChatChoice {
            index: self.index as u32,
            said: Said::Delta {
                role: delta.role,
                content: delta.content,
                reasoning_content: delta.reasoning_content,
                tool_calls: delta.tool_calls,
            },
            logprobs: delta.logprobs,
            finish_reason: delta.finish_reason,
        })
    }

    /// The whole choice, at `index` of the answer.
    #[must_use]
    pub fn whole<'a>(&'a self, frame: &'a Frame, index: u32) -> ChoiceBody<'a> {
        let (info, kept) = (frame.info(), &self.kept);
        let finish_reason = Some(finish_reason(kept.finish.unwrap_or(Finish::Length)));
        match frame.family() {
            Family::Chat => ChoiceBody::Chat(ChatChoice {
                index,
                said: Said::Message {
                    role: ASSISTANT,
                    // A message that only calls tools, or was about to, has no text.
                    content: (!kept.text.is_empty()
                        || (kept.calls.is_empty() && !kept.call_is_cut))
                        .then_some(kept.text.as_str()),
                    refusal: (),
                    reasoning_content: (!kept.reasoning.is_empty())
                        .then_some(kept.reasoning.as_str()),
                    tool_calls: kept
                        .calls
                        .iter()
                        .zip(0..)
                        .map(|((name, arguments), call_idx)| {
                            let id = info.call_id(self.index, call_idx);
                            ToolCall::new(id, name, arguments)
                        })
                        .collect(),
                },
                logprobs: chat_logprobs(info, &kept.logprobs),
                finish_reason,
            }),
            Family::Completion => {
                // Nothing was shown piece by piece, so the offset stands at its start.
                let mut offset = self.offset;
                ChoiceBody::Completion(CompletionChoice {
                    index,
                    text: Cow::Borrowed(&kept.text),
                    logprobs: completion_logprobs(info, &mut offset, &kept.logprobs),
                    finish_reason,
                })
            }
        }
    }
}

/// What a chunk of a chat adds.
#[derive(Default)]
struct ChatDelta<'a> {
    role: Option<&'static str>,
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<[CallDelta; 1]>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

fn chat_logprobs<'a>(info: &'a AnswerInfo, logprobs: &Logprobs) -> Option<ChatLogprobs<'a>> {
    let known = logprobs.entries.iter().filter_map(|entry| entry.1.as_ref());
    info.wants_logprobs.then(|| match &info.tokenizer {
        Some(tokenizer) => ChatLogprobs::new(tokenizer, known),
        None => ChatLogprobs::of_texts(&logprobs.text_entries),
    })
}

fn completion_logprobs<'a>(
    info: &'a AnswerInfo,
    offset: &mut TextOffset,
    logprobs: &Logprobs,
) -> Option<CompletionLogprobs<'a>> {
    info.wants_logprobs.then(|| match &info.tokenizer {
        Some(tokenizer) => offset.logprobs(tokenizer, &logprobs.entries),
        None => offset.logprobs_of_texts(&logprobs.text_entries),
    })
}
