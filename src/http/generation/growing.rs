//! A growing answer: the updates of all jobs of one request become steps of its choices.
//!
//! Pure, owned by the HTTP worker that answers. A choice opens, says pieces, ends; its text is told
//! apart by its [`AnswerParser`]. Log-probabilities ride on the piece whose text they belong to, or on
//! the next one where the parser holds text back. What is not here: where updates come from (`jobs`),
//! how steps look to a client (`shape`).

use super::usage::UsageSum;
use crate::chat::{AnswerParser, Part};
use crate::request::{FinishReason, TextLogprob, TokenId, TokenLogprob, Usage};
use crate::scheduler::Stamps;
use std::sync::Arc;

/// What a job reports.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// Text that is certain, with the log-probabilities of its tokens; either may be empty.
    Text {
        /// Text.
        text: String,
        /// When asked.
        logprobs: Vec<TokenLogprob>,
        /// The same from a server that tells no token ids.
        text_logprobs: Vec<TextLogprob>,
    },
    /// What another server has told apart already.
    Part(Part),
    /// The job ended well.
    Finished(Box<Finished>),
}

/// How a job ended well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Which stop string of the request ended it, if one did.
    pub stop_idx: Option<usize>,
    /// Counts.
    pub usage: Usage,
    /// When it reached its states.
    pub stamps: Stamps,
}

/// One choice to be made: where it stands and what its text begins with.
#[derive(Clone, Debug, Default)]
pub struct ChoicePlan {
    /// Which prompt of the request.
    pub prompt_idx: usize,
    /// The prompt's text and tokens, when the answer begins with them.
    pub echo: Option<(String, Arc<[TokenId]>)>,
    /// Tells its text apart.
    pub parser: AnswerParser,
    /// Calls were asked for by name, so that they end the answer like any other text.
    pub calls_are_stop: bool,
}

/// What an update means for the client.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The choice has begun.
    Open,
    /// It says something more.
    Piece(Piece),
    /// It has ended.
    Finish(Box<Ending>),
}

/// Something said, with the tokens that made it.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// May be empty where tokens made no text.
    pub part: Part,
    /// Log-probabilities of its tokens.
    pub logprobs: Logprobs,
}

/// Tokens of a piece with their log-probabilities; empty where nobody asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// None where nothing predicts the token (the first of a prompt).
    pub entries: Vec<(TokenId, Option<TokenLogprob>)>,
    /// The same of text whose token ids are not known.
    pub text_entries: Vec<TextLogprob>,
}

impl Logprobs {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.text_entries.is_empty()
    }

    /// Appends those that come next.
    pub fn join(&mut self, next: Self) {
        self.entries.extend(next.entries);
        self.text_entries.extend(next.text_entries);
    }
}

/// How a choice ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ending {
    /// Why.
    pub finish: Finish,
    /// Its text ends within a call of a tool, whose arguments are not whole.
    pub call_is_cut: bool,
    /// Its own counts and times; None when it was cancelled on the way.
    pub counted: Option<Finished>,
}

/// Why a choice ended, as clients tell the cases apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model was done, or a stop token came.
    Stop,
    /// A stop string of the request came: which one, from 0.
    StopString(usize),
    /// `max_tokens` or the end of the context.
    Length,
    /// The model calls tools and waits for their results; every call is whole.
    ToolCalls,
    /// Cancelled over the API: what there is of it is not an error.
    Cancelled,
}

/// One choice on its way.
struct Choice {
    plan: ChoicePlan,
    is_open: bool,
    calls_tools: bool,
    /// Tokens that came while the parser was within thoughts.
    n_reasoning: u32,
    prompt_logprobs: Vec<TokenLogprob>,
    /// Of text that the parser holds back.
    waiting: Logprobs,
    is_finished: bool,
}

/// All choices of one answer.
pub struct Growing {
    choices: Vec<Choice>,
    usage: UsageSum,
    prompt_counted: Vec<bool>,
}

impl Growing {
    /// Job `i` makes the choice with index `i`.
    #[must_use]
    pub fn new(plans: Vec<ChoicePlan>) -> Self {
        let prompts = plans.iter().map(|plan| plan.prompt_idx + 1);
        let n_prompts = prompts.max().unwrap_or(0);
        let choice = |plan| Choice {
            plan,
            is_open: false,
            calls_tools: false,
            n_reasoning: 0,
            prompt_logprobs: Vec::new(),
            waiting: Logprobs::default(),
            is_finished: false,
        };
        Self {
            choices: plans.into_iter().map(choice).collect(),
            usage: UsageSum::default(),
            prompt_counted: vec![false; n_prompts],
        }
    }

    /// Whether every choice has ended.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.choices.iter().all(|choice| choice.is_finished)
    }

    /// Counts of the choices that have ended.
    #[must_use]
    pub fn usage(&self) -> &UsageSum {
        &self.usage
    }

    /// Tokens of all prompts, as whoever ran them counted; None until each prompt was counted, and where
    /// nobody counts.
    #[must_use]
    pub fn counted_prompt_tokens(&self) -> Option<u64> {
        let is_counted = self.prompt_counted.iter().all(|counted| *counted);
        Some(self.usage.prompt()).filter(|n_tokens| is_counted && *n_tokens > 0)
    }

    /// Whether the choice has an echo to show that waits for its prompt's log-probabilities.
    #[must_use]
    pub fn awaits_prompt(&self, choice_idx: usize) -> bool {
        self.choices[choice_idx].plan.echo.is_some()
    }

    /// Hands in the log-probabilities of prompt tokens 1.., known from the first update on.
    pub fn set_prompt_logprobs(&mut self, choice_idx: usize, logprobs: Vec<TokenLogprob>) {
        self.choices[choice_idx].prompt_logprobs = logprobs;
    }

    /// What an update of job `choice_idx` means; `take` gets the steps in their order.
    pub fn update(&mut self, choice_idx: usize, update: Update, mut take: impl FnMut(Step)) {
        let choice = &mut self.choices[choice_idx];
        if !std::mem::replace(&mut choice.is_open, true) {
            take(Step::Open);
        }
        if let Some(echo) = choice.echo() {
            take(Step::Piece(echo));
        }
        let mut parts = Vec::new();
        let finished = match update {
            Update::Text {
                text,
                logprobs,
                text_logprobs,
            } => {
                let entries = logprobs.into_iter().map(|entry| (entry.token, Some(entry)));
                choice.waiting.entries.extend(entries);
                choice.waiting.text_entries.extend(text_logprobs);
                choice.n_reasoning += u32::from(choice.plan.parser.is_thinking());
                let held = text.is_empty() && !choice.waiting.is_empty();
                choice.plan.parser.push(text, &mut parts);
                if held && parts.is_empty() {
                    parts.push(Part::Text(String::new())); // tokens without text are told at once
                }
                None
            }
            Update::Part(part) => {
                // What was said before it comes before it.
                choice.plan.parser.finish(&mut parts);
                parts.push(part);
                None
            }
            Update::Finished(finished) => {
                choice.plan.parser.finish(&mut parts);
                if parts.is_empty() && !choice.waiting.is_empty() {
                    parts.push(Part::Text(String::new()));
                }
                Some(*finished)
            }
        };
        for part in parts {
            choice.calls_tools |= matches!(part, Part::CallBegin { .. });
            let logprobs = std::mem::take(&mut choice.waiting);
            take(Step::Piece(Piece { part, logprobs }));
        }
        if let Some(finished) = finished {
            choice.is_finished = true;
            let finish = choice.finish(&finished);
            let counted = &mut self.prompt_counted[choice.plan.prompt_idx];
            self.usage.add(finished.usage, !*counted);
            let n_told = finished.usage.reasoning_tokens;
            self.usage.add_reasoning(choice.n_reasoning.max(n_told));
            *counted = true;
            take(Step::Finish(Box::new(Ending {
                finish,
                call_is_cut: choice.plan.parser.ends_in_call(),
                counted: Some(finished),
            })));
        }
    }

    /// Ends every choice that has not ended; `usage_of` tells what its job has used so far, `take` gets its
    /// number and its step.
    pub fn cancel(&mut self, usage_of: impl Fn(usize) -> Usage, mut take: impl FnMut(usize, Step)) {
        for (choice_idx, choice) in self.choices.iter_mut().enumerate() {
            if !std::mem::replace(&mut choice.is_finished, true) {
                let counted = &mut self.prompt_counted[choice.plan.prompt_idx];
                self.usage.add(usage_of(choice_idx), !*counted);
                self.usage.add_reasoning(choice.n_reasoning);
                *counted = true;
                let ending = Ending {
                    finish: Finish::Cancelled,
                    call_is_cut: choice.plan.parser.ends_in_call(),
                    counted: None,
                };
                take(choice_idx, Step::Finish(Box::new(ending)));
            }
        }
    }
}

impl Choice {
    /// The echoed prompt, once.
    fn echo(&mut self) -> Option<Piece> {
        let (text, prompt) = self.plan.echo.take()?;
        let logprobs = std::mem::take(&mut self.prompt_logprobs);
        let entries = std::iter::once(None).chain(logprobs.into_iter().map(Some));
        let entries = prompt.iter().copied().zip(entries).collect();
        Some(Piece {
            part: Part::Text(text),
            logprobs: Logprobs {
                entries,
                text_entries: Vec::new(),
            },
        })
    }

    /// A call that was cut, by a stop string or by the model itself, waits for no result.
    fn finish(&self, finished: &Finished) -> Finish {
        let calls_tools = self.calls_tools && !self.plan.parser.ends_in_call();
        match (finished.reason, finished.stop_idx) {
            (FinishReason::Stop, _) if calls_tools && !self.plan.calls_are_stop => {
                Finish::ToolCalls
            }
            (FinishReason::Stop, Some(stop_idx)) => Finish::StopString(stop_idx),
            (FinishReason::Stop, None) => Finish::Stop,
            (FinishReason::Length, _) => Finish::Length,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{CallOptions, Family, ParserOptions, ToolShape};
    use crate::scheduler::Stamp;
    use std::time::{Instant, SystemTime};

    fn logprob(token: TokenId) -> TokenLogprob {
        TokenLogprob {
            token,
            logprob: -1.0,
            top: Vec::new(),
        }
    }

    fn text(text: &str, tokens: &[TokenId]) -> Update {
        Update::Text {
            text: text.to_owned(),
            logprobs: tokens.iter().copied().map(logprob).collect(),
            text_logprobs: Vec::new(),
        }
    }

    fn finished(reason: FinishReason, stop_idx: Option<usize>) -> Update {
        let queued = Stamp {
            at: Instant::now(),
            wall: SystemTime::now(),
        };
        Update::Finished(Box::new(Finished {
            reason,
            stop_idx,
            usage: Usage {
                prompt_tokens: 5,
                completion_tokens: 2,
                ..Usage::default()
            },
            stamps: Stamps::queued(queued),
        }))
    }

    fn steps(growing: &mut Growing, choice_idx: usize, update: Update) -> Vec<Step> {
        let mut steps = Vec::new();
        growing.update(choice_idx, update, |step| steps.push(step));
        steps
    }

    /// Token ids of a piece.
    fn tokens(step: &Step) -> Vec<TokenId> {
        let Step::Piece(piece) = step else {
            panic!("{step:?} is no piece");
        };
        piece.logprobs.entries.iter().map(|entry| entry.0).collect()
    }

    #[test]
    fn tokens_ride_on_the_text_they_made() {
        let mut growing = Growing::new(vec![ChoicePlan::default()]);
        assert_eq!(steps(&mut growing, 0, text("", &[])), [Step::Open]);
        let shown = steps(&mut growing, 0, text("é", &[1, 2]));
        assert_eq!((shown.len(), tokens(&shown[0])), (1, vec![1, 2]));
        // Tokens of a stop string have no text, but were generated.
        let shown = steps(&mut growing, 0, text("", &[3]));
        assert_eq!(tokens(&shown[0]), [3]);
        let end = steps(&mut growing, 0, finished(FinishReason::Stop, Some(1)));
        let [Step::Finish(ending)] = &end[..] else {
            panic!("{end:?}");
        };
        assert_eq!(ending.finish, Finish::StopString(1));
        assert!(growing.is_complete());
    }

    #[test]
    fn an_echoed_prompt_has_no_logprob_for_its_first_token() {
        let echo = Some(("abc".to_owned(), Arc::from([1, 2, 3])));
        let mut growing = Growing::new(vec![ChoicePlan {
            echo,
            ..ChoicePlan::default()
        }]);
        assert!(growing.awaits_prompt(0));
        growing.set_prompt_logprobs(0, vec![logprob(2), logprob(3)]);
        let shown = steps(&mut growing, 0, finished(FinishReason::Length, None));
        let Step::Piece(piece) = &shown[1] else {
            panic!("{shown:?}");
        };
        assert_eq!(piece.part, Part::Text("abc".to_owned()));
        assert_eq!(piece.logprobs.entries[0], (1, None));
        assert_eq!(piece.logprobs.entries[2], (3, Some(logprob(3))));
    }

    #[test]
    fn a_stop_string_within_a_call_is_no_call_of_tools() {
        let options = Arc::new(ParserOptions {
            calls: Some(CallOptions {
                family: Family::Hermes,
                tools: vec![ToolShape {
                    name: "add".to_owned(),
                    ..ToolShape::default()
                }],
                must_call: false,
            }),
            reasoning: None,
        });
        let start = "<tool_call>{\"name\": \"add\", \"arguments\": {\"b\": \"";
        let whole = format!("{start}x\"}}");
        for (said, reason, stop_idx, finish, call_is_cut) in [
            (
                start,
                FinishReason::Stop,
                Some(0),
                Finish::StopString(0),
                true,
            ),
            (start, FinishReason::Stop, None, Finish::Stop, true),
            (start, FinishReason::Length, None, Finish::Length, true),
            (
                &whole,
                FinishReason::Stop,
                Some(0),
                Finish::ToolCalls,
                false,
            ),
        ] {
            let mut growing = Growing::new(vec![ChoicePlan {
                parser: AnswerParser::new(Arc::clone(&options)),
                ..ChoicePlan::default()
            }]);
            steps(&mut growing, 0, text(said, &[]));
            let end = steps(&mut growing, 0, finished(reason, stop_idx));
            let Some(Step::Finish(ending)) = end.last() else {
                panic!("{end:?}");
            };
            let found = (ending.finish, ending.call_is_cut);
            assert_eq!(found, (finish, call_is_cut), "{said}");
        }
    }

    #[test]
    fn what_has_not_ended_is_cancelled_once() {
        let mut growing = Growing::new(vec![ChoicePlan::default(); 2]);
        steps(&mut growing, 1, finished(FinishReason::Stop, None));
        let so_far = |_| Usage {
            prompt_tokens: 5,
            completion_tokens: 7,
            ..Usage::default()
        };
        let mut cancelled = Vec::new();
        growing.cancel(so_far, |choice_idx, _| cancelled.push(choice_idx));
        growing.cancel(so_far, |choice_idx, _| cancelled.push(choice_idx));
        assert_eq!(cancelled, [0]);
        // They share their prompt, which was counted already.
        let usage = growing.usage();
        assert_eq!((usage.prompt(), usage.completion()), (5, 2 + 7));
    }
}
