//! How answers of `POST /api/v1/chat` look: a list of output items, or named events.
//!
//! ```text
//! chat.start ─► [model_load.start, .end] ─► prompt_processing.start, .progress, .end
//!            ─► (reasoning.start, .delta.., .end | message.start, .delta.., .end | tool_call..)*
//!            ─► [error] ─► chat.end { result: the whole answer }
//! ```
//!
//! Pure but for sending the whole answer. A stream begins once the model is there, so a load is told
//! after it happened.

use crate::chat::Part;
use crate::http::error_style::ErrorStyle;
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::events::Events;
use crate::http::generation::growing::{Ending, Step};
use crate::http::generation::shape::{AnswerInfo, Shape};
use crate::http::generation::timings::Timings;
use crate::http::generation::usage::UsageSum;
use crate::http::responses::input::listed;
use crate::http::responses::kept::Responses;
use crate::http::responses::store::{Kept, Turn};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// See the module.
#[derive(Debug)]
pub(super) struct ChatShape {
    info: AnswerInfo,
    /// How long the model was loaded for this request, if it was.
    load_time: Option<Duration>,
    /// None where the chat shall not be kept.
    keeper: Option<Keeper>,
    items: Vec<Item>,
    /// The last item may still grow.
    is_open: bool,
    /// Pieces shown, until the tokens are counted.
    n_tokens: u64,
    n_reasoning: u32,
    ending: Option<Ending>,
}

/// What is needed to keep an answer, so that the client can go on from it.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) responses: Arc<Responses>,
    pub(super) owner: Option<Arc<str>>,
    /// What came before.
    pub(super) history: Vec<Arc<Turn>>,
    /// What the client said, as items without ids.
    pub(super) input: Vec<Value>,
}

/// An item of the output.
#[derive(Debug)]
enum Item {
    Message(String),
    Reasoning(String),
    /// Name and arguments, as text.
    ToolCall(String, String),
}

impl Item {
    /// The first part of its events' names.
    fn name(&self) -> &'static str {
        match self {
            Self::Message(_) => "message",
            Self::Reasoning(_) => "reasoning",
            Self::ToolCall(..) => "tool_call",
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::Message(text) => json!({"type": "message", "content": text}),
            Self::Reasoning(text) => json!({"type": "reasoning", "content": text}),
            // Nobody ran it, so there is no output.
            Self::ToolCall(tool, arguments) => {
                json!({"type": "tool_call", "tool": tool, "arguments": parsed(arguments)})
            }
        }
    }

    fn takes(&self, part: &Part) -> bool {
        matches!(
            (self, part),
            (Self::Message(_), Part::Text(_))
                | (Self::Reasoning(_), Part::Reasoning(_))
                | (Self::ToolCall(..), Part::CallArguments { .. })
        )
    }
}

/// Arguments are JSON where the model kept to it.
fn parsed(arguments: &str) -> Value {
    serde_json::from_str(arguments).unwrap_or_else(|_| Value::from(arguments))
}

/// An event: its name stands in its data too.
fn event(events: &mut Events, name: &str, mut data: Value) {
    data["type"] = name.into();
    events.named(name, &data);
}

impl ChatShape {
    /// Nothing has been said.
    pub(super) fn new(
        info: AnswerInfo,
        load_time: Option<Duration>,
        keeper: Option<Keeper>,
    ) -> Self {
        Self {
            info,
            load_time,
            keeper,
            items: Vec::new(),
            is_open: false,
            n_tokens: 0,
            n_reasoning: 0,
            ending: None,
        }
    }

    /// Notes a step; `None`: nobody is told of it before the end.
    fn take(&mut self, step: Step, events: Option<&mut Events>) {
        let mut unheard = Events::default();
        let events = events.unwrap_or(&mut unheard);
        match step {
            Step::Open => {
                event(
                    events,
                    "prompt_processing.progress",
                    json!({"progress": 1.0}),
                );
                event(events, "prompt_processing.end", json!({}));
            }
            Step::Finish(ending) => {
                self.close(events);
                self.ending = Some(*ending);
            }
            Step::Piece(piece) if piece.part.is_empty() => {}
            Step::Piece(piece) => self.say(piece.part, events),
        }
    }

    fn say(&mut self, part: Part, events: &mut Events) {
        self.n_tokens += 1;
        self.n_reasoning += u32::from(matches!(part, Part::Reasoning(_)));
        let goes_on = self.is_open && self.items.last().is_some_and(|item| item.takes(&part));
        if !goes_on {
            self.close(events);
            self.open(&part, events);
        }
        let Some(item) = self.items.last_mut() else {
            return;
        };
        let name = item.name();
        match (item, part) {
            (
                Item::Message(text) | Item::Reasoning(text),
                Part::Text(new) | Part::Reasoning(new),
            ) => {
                text.push_str(&new);
                event(events, &format!("{name}.delta"), json!({"content": new}));
            }
            (Item::ToolCall(_, arguments), Part::CallArguments { fragment, .. }) => {
                arguments.push_str(&fragment);
            }
            _ => {}
        }
    }

    fn open(&mut self, part: &Part, events: &mut Events) {
        let (item, start) = match part {
            Part::Text(_) => (Item::Message(String::new()), json!({})),
            Part::Reasoning(_) => (Item::Reasoning(String::new()), json!({})),
            Part::CallBegin { name, .. } => (
                Item::ToolCall(name.clone(), String::new()),
                json!({"tool": name}),
            ),
            Part::CallArguments { .. } => return, // of a call that never began
        };
        event(events, &format!("{}.start", item.name()), start);
        self.items.push(item);
        self.is_open = true;
    }

    /// The last item is complete.
    fn close(&mut self, events: &mut Events) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        match self.items.last() {
            Some(Item::ToolCall(tool, arguments)) => {
                let data = json!({"tool": tool, "arguments": parsed(arguments)});
                event(events, "tool_call.arguments", data);
            }
            Some(item) => event(events, &format!("{}.end", item.name()), json!({})),
            None => {}
        }
    }

    /// The whole answer, which is kept where that is wanted.
    fn kept_result(&mut self) -> Value {
        let mut result = self.result();
        if let Some(keeper) = self.keeper.take() {
            let id = format!("resp_{}", self.info.id);
            result["response_id"] = id.as_str().into();
            self.keep_as(id, &result, keeper);
        }
        result
    }

    fn keep_as(&self, id: String, result: &Value, keeper: Keeper) {
        let mut n_items = 0;
        let mut with_id = |item: &Value| {
            listed(item, |prefix| {
                n_items += 1;
                format!("{prefix}_{}s{n_items:02}", self.info.id)
            })
        };
        let input: Vec<Value> = keeper.input.iter().map(&mut with_id).collect();
        let item = |item: &Item| match item {
            Item::Message(text) => Some(json!({"role": "assistant", "content": text})),
            Item::Reasoning(text) => Some(json!({
                "type": "reasoning", "summary": [],
                "content": [{"type": "reasoning_text", "text": text}],
            })),
            // Nobody runs tools here, so there is nothing to go on from.
            Item::ToolCall(..) => None,
        };
        let output: Vec<Value> = self.items.iter().filter_map(item).collect();
        let output: Vec<Value> = output.iter().map(&mut with_id).collect();
        let owner = keeper.owner.as_deref();
        keeper.responses.keep(Kept {
            id,
            owner: keeper.owner.clone(),
            json: result.to_string().into_bytes().into(),
            history: keeper.history,
            input: keeper.responses.turn(&input, owner),
            output: keeper.responses.turn(&output, owner),
        });
    }

    /// The whole answer.
    fn result(&self) -> Value {
        let counted = self.ending.and_then(|ending| ending.counted);
        let output: Vec<Value> = self.items.iter().map(Item::json).collect();
        let mut stats = json!({
            "input_tokens": self.info.prompt_tokens, "total_output_tokens": self.n_tokens,
            "reasoning_output_tokens": self.n_reasoning, "tokens_per_second": 0.0,
            "time_to_first_token_seconds": 0.0,
        });
        if let Some(counted) = counted {
            stats["input_tokens"] = counted.usage.prompt_tokens.into();
            stats["total_output_tokens"] = counted.usage.completion_tokens.into();
            stats["tokens_per_second"] = Timings::of(&counted).tokens_per_second().into();
            let first_token = counted.stamps.time_to_first_token().unwrap_or_default();
            stats["time_to_first_token_seconds"] = first_token.as_secs_f64().into();
        }
        if let Some(load_time) = self.load_time {
            stats["model_load_time_seconds"] = load_time.as_secs_f64().into();
        }
        json!({"model_instance_id": self.info.model.name, "output": output, "stats": stats})
    }
}

impl Shape for ChatShape {
    fn begin(&mut self, events: &mut Events) {
        let id = json!({"model_instance_id": self.info.model.name});
        event(events, "chat.start", id.clone());
        if let Some(load_time) = self.load_time {
            event(events, "model_load.start", id.clone());
            let mut end = id;
            end["load_time_seconds"] = load_time.as_secs_f64().into();
            event(events, "model_load.end", end);
        }
        event(events, "prompt_processing.start", json!({}));
        event(
            events,
            "prompt_processing.progress",
            json!({"progress": 0.0}),
        );
    }

    fn step(&mut self, _choice_idx: usize, step: Step, events: &mut Events) {
        self.take(step, Some(events));
    }

    fn end(&mut self, usage: &UsageSum, events: &mut Events) {
        self.n_tokens = usage.completion();
        let result = self.kept_result();
        event(events, "chat.end", json!({"result": result}));
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        self.close(events);
        event(events, "error", ErrorStyle::LmStudio.body(error));
        event(events, "chat.end", json!({"result": self.result()}));
    }

    fn keep(&mut self, _choice_idx: usize, step: Step) {
        self.take(step, None);
    }

    fn whole(mut self, _usage: &UsageSum, exchange: Exchange) {
        exchange.json(&self.kept_result());
    }
}
