//! The Responses API as a shape of answers.
//!
//! Pure but for sending a whole answer and keeping the response. `response.created` and
//! `response.in_progress` open a stream, exactly one of `response.completed`, `.incomplete` and
//! `.failed` ends it; there is no `[DONE]`. A response is kept before its last event is sent, so that a client
//! that continues it at once finds it. Failed ones are not kept: nobody can continue them.

use super::answer::{Answer, Listener, send};
use super::asked::Asked;
use super::input::listed;
use super::kept::Responses;
use super::object::{
    Echo, EventBody, Name, OutputItem, Progress, ResponseError, ResponseObject, ResponseUsage,
    Status,
};
use super::store::{Kept, Turn};
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::events::Events;
use crate::http::generation::growing::{Finish, Logprobs, Step};
use crate::http::generation::prepare::unix_seconds;
use crate::http::generation::shape::{AnswerInfo, Shape};
use crate::http::generation::usage::UsageSum;
use crate::http::openai::logprobs::ChatLogprobs;
use crate::http::ops::OpsAnswer;
use crate::tokenizer::Tokenizer;
use serde_json::Value;
use std::sync::Arc;

/// See the module.
pub struct ResponseShape {
    info: AnswerInfo,
    /// `resp_..`
    id: String,
    echo: Echo,
    answer: Answer,
    finish: Option<Finish>,
    /// The last call's arguments are not whole.
    call_is_cut: bool,
    /// Unix seconds.
    completed_at: Option<u64>,
    keeper: Keeper,
}

/// What keeping a response needs.
struct Keeper {
    responses: Arc<Responses>,
    owner: Option<Arc<str>>,
    history: Vec<Arc<Turn>>,
    input: Vec<Value>,
}

impl ResponseShape {
    /// Nothing has been said.
    #[must_use]
    pub fn new(
        info: AnswerInfo,
        asked: Asked,
        responses: Arc<Responses>,
        owner: Option<Arc<str>>,
    ) -> Self {
        Self {
            id: format!("resp_{}", info.id),
            echo: asked.echo,
            answer: Answer::new(info.id.to_string()),
            finish: None,
            call_is_cut: false,
            completed_at: None,
            keeper: Keeper {
                responses,
                owner,
                history: asked.history,
                input: asked.input,
            },
            info,
        }
    }

    fn object(&self, status: Status, usage: Option<ResponseUsage>) -> ResponseObject<'_> {
        self.object_of(Progress {
            status,
            completed_at: self.completed_at,
            error: None,
            output: self.answer.items(),
            is_out_of_tokens: self.finish == Some(Finish::Length),
            usage,
        })
    }

    fn object_of<'a>(&'a self, progress: Progress<'a>) -> ResponseObject<'a> {
        let name = Name {
            id: &self.id,
            model: &self.info.model.name,
            created_at: self.info.created,
        };
        ResponseObject::new(name, &self.echo, progress)
    }

    /// An event with the whole response.
    fn tell(&mut self, events: &mut Events, r#type: &'static str, progress: Progress<'_>) {
        let number = self.answer.next_number();
        let response = Box::new(self.object_of(progress));
        send(
            Some(events),
            r#type,
            number,
            EventBody::Response { response },
        );
    }

    fn take(&mut self, step: Step, listener: Listener<'_>) {
        match step {
            Step::Open => {}
            Step::Piece(piece) => {
                let tokenizer = self.info.tokenizer.as_deref();
                let logprobs = logprob_values(tokenizer, &piece.logprobs);
                let info = &self.info;
                let call_id = |index| info.call_id(0, index);
                self.answer.push(piece.part, logprobs, call_id, listener);
            }
            Step::Finish(ending) => {
                self.finish = Some(ending.finish);
                self.call_is_cut = ending.call_is_cut;
                let status = self.status();
                self.completed_at = (status == Status::Completed).then(unix_seconds);
                let item_status = match status {
                    Status::Completed => Status::Completed,
                    _ => Status::Incomplete,
                };
                self.answer.finish(item_status, listener);
            }
        }
    }

    fn status(&self) -> Status {
        let finish = self.finish;
        finish.map_or(Status::InProgress, |finish| {
            status_of(finish, self.call_is_cut)
        })
    }

    /// Keeps the response as `json`, when its client wants that.
    fn keep_as(&mut self, json: Vec<u8>) {
        if !self.echo.store {
            return;
        }
        let keeper = &mut self.keeper;
        let input = std::mem::take(&mut keeper.input);
        let mut n_fresh = 0;
        let input: Vec<Value> = input
            .iter()
            .map(|item| {
                listed(item, |prefix| {
                    n_fresh += 1;
                    format!("{prefix}_{}i{n_fresh:02}", self.info.id)
                })
            })
            .collect();
        let output: Vec<Value> = self.answer.items().iter().map(value_of).collect();
        let owner = keeper.owner.as_deref();
        keeper.responses.keep(Kept {
            id: self.id.clone(),
            owner: keeper.owner.clone(),
            json: json.into(),
            history: std::mem::take(&mut keeper.history),
            input: keeper.responses.turn(&input, owner),
            output: keeper.responses.turn(&output, owner),
        });
    }
}

/// A response that ends within a call is not complete, whatever ended it.
fn status_of(finish: Finish, call_is_cut: bool) -> Status {
    match finish {
        Finish::Stop | Finish::StopString(_) if call_is_cut => Status::Incomplete,
        Finish::Stop | Finish::StopString(_) | Finish::ToolCalls => Status::Completed,
        Finish::Length => Status::Incomplete,
        Finish::Cancelled => Status::Cancelled,
    }
}

/// JSON text as an answer.
#[must_use]
pub fn json_page(json: Vec<u8>) -> OpsAnswer {
    OpsAnswer {
        status: 200,
        content_type: "application/json",
        headers: Vec::new(),
        body: json,
    }
}

fn value_of(item: &OutputItem) -> Value {
    serde_json::to_value(item).expect("items are JSON")
}

fn json_of(object: &ResponseObject<'_>) -> Vec<u8> {
    serde_json::to_vec(object).expect("responses are JSON")
}

/// One value per token, as this API and chat completions both write them.
fn logprob_values(tokenizer: Option<&Tokenizer>, logprobs: &Logprobs) -> Vec<Value> {
    if logprobs.is_empty() {
        return Vec::new();
    }
    let object = match tokenizer {
        Some(tokenizer) => {
            let known = logprobs.entries.iter().filter_map(|entry| entry.1.as_ref());
            ChatLogprobs::new(tokenizer, known)
        }
        None => ChatLogprobs::of_texts(&logprobs.text_entries),
    };
    let mut value = serde_json::to_value(object).expect("log-probabilities are JSON");
    match value["content"].take() {
        Value::Array(entries) => entries,
        _ => Vec::new(), // cannot be: `content` is a list
    }
}

impl Shape for ResponseShape {
    fn begin(&mut self, events: &mut Events) {
        for r#type in ["response.created", "response.in_progress"] {
            let progress = Progress {
                status: Status::InProgress,
                completed_at: None,
                error: None,
                output: &[],
                is_out_of_tokens: false,
                usage: None,
            };
            self.tell(events, r#type, progress);
        }
    }

    fn step(&mut self, _choice_idx: usize, step: Step, events: &mut Events) {
        self.take(step, Some(events));
    }

    fn end(&mut self, usage: &UsageSum, events: &mut Events) {
        let usage = Some(ResponseUsage::new(usage, self.info.loops));
        let status = self.status();
        let json = json_of(&self.object(status, usage));
        self.keep_as(json);
        // There is no event for cancelled ones; what there is of them is incomplete.
        let r#type = match status {
            Status::Completed => "response.completed",
            _ => "response.incomplete",
        };
        let number = self.answer.next_number();
        let response = Box::new(self.object(status, usage));
        send(
            Some(events),
            r#type,
            number,
            EventBody::Response { response },
        );
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        if !self.answer.items().is_empty() {
            self.answer.finish(Status::Incomplete, Some(events));
        }
        let number = self.answer.next_number();
        let response = Box::new(self.object_of(Progress {
            status: Status::Failed,
            completed_at: None,
            error: Some(ResponseError::from(error)),
            output: self.answer.items(),
            is_out_of_tokens: false,
            usage: None,
        }));
        send(
            Some(events),
            "response.failed",
            number,
            EventBody::Response { response },
        );
    }

    fn keep(&mut self, _choice_idx: usize, step: Step) {
        self.take(step, None);
    }

    fn whole(mut self, usage: &UsageSum, exchange: Exchange) {
        let usage = Some(ResponseUsage::new(usage, self.info.loops));
        let object = self.object(self.status(), usage);
        let json = json_of(&object);
        self.keep_as(json.clone());
        exchange.ops(&json_page(json));
    }
}
