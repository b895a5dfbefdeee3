//! Output items of a response while they grow, and the events that tell about them.
//!
//! Pure. One item is open at a time, the last one:
//!
//! ```text
//!              text            reasoning           a call begins
//!   nothing ──────────► message ──────► reasoning ──────────────► call ──► ..
//! ```
//!
//! Whatever comes that does not belong to the open item closes it (`..done` events) and opens the
//! next (`..added`). Every event has the next number. A whole answer runs through the same code with
//! nobody listening, so that it says what the stream would. What is not here: the response object
//! around the items (`shape`).

use super::object::{ContentPart, Event, EventBody, OutputItem, Status};
use crate::chat::Part;
use crate::http::generation::events::Events;
use serde_json::Value;

/// Events with their numbers. None = nobody listens.
pub type Listener<'e> = Option<&'e mut Events>;

/// See the module.
#[derive(Debug)]
pub struct Answer {
    /// What ids of items end in.
    id: String,
    items: Vec<OutputItem>,
    /// The last item may grow.
    is_open: bool,
    /// Which call the last item is, if it is one.
    call_idx: Option<u32>,
    /// Of tokens that have made no text yet.
    waiting_logprobs: Vec<Value>,
    next_number: u64,
}

impl Answer {
    /// Nothing has been said. `id` is unique among all answers.
    #[must_use]
    pub fn new(id: String) -> Self {
        Self {
            id,
            items: Vec::new(),
            is_open: false,
            call_idx: None,
            waiting_logprobs: Vec::new(),
            next_number: 0,
        }
    }

    /// Said so far.
    #[must_use]
    pub fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// The number of the next event, which is used up by it.
    pub fn next_number(&mut self) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        number
    }

    /// The next thing said, with the log-probabilities of its tokens as JSON. `call_id` names a call
    /// that begins.
    pub fn push(
        &mut self,
        part: Part,
        logprobs: Vec<Value>,
        call_id: impl FnOnce(u32) -> String,
        mut listener: Listener<'_>,
    ) {
        match part {
            Part::Text(text) => self.text(&text, logprobs, listener),
            Part::Reasoning(text) => self.reasoning(&text, listener),
            Part::CallBegin { index, name } => {
                self.close(Status::Completed, listener.as_deref_mut());
                self.call_idx = Some(index);
                let item = OutputItem::FunctionCall {
                    id: self.item_id("fc"),
                    call_id: call_id(index),
                    name,
                    arguments: String::new(),
                    status: Status::InProgress,
                };
                self.open(item, listener);
            }
            Part::CallArguments { index, fragment } => self.arguments(index, &fragment, listener),
        }
    }

    /// Nothing more comes. An answer that said nothing is an empty message; the open item ends as
    /// `status`.
    pub fn finish(&mut self, status: Status, mut listener: Listener<'_>) {
        if self.items.is_empty() {
            self.open_message(listener.as_deref_mut());
            self.text_delta("", listener.as_deref_mut());
        }
        self.close(status, listener);
    }

    fn text(&mut self, text: &str, mut logprobs: Vec<Value>, mut listener: Listener<'_>) {
        self.waiting_logprobs.append(&mut logprobs);
        let is_message = matches!(self.items.last(), Some(OutputItem::Message { .. }));
        if !(self.is_open && is_message) {
            if text.is_empty() {
                return; // its tokens are told with the next text
            }
            self.close(Status::Completed, listener.as_deref_mut());
            self.open_message(listener.as_deref_mut());
        }
        self.text_delta(text, listener);
    }

    /// The next text of the open message.
    fn text_delta(&mut self, text: &str, listener: Listener<'_>) {
        if text.is_empty() && self.waiting_logprobs.is_empty() {
            return;
        }
        let told = std::mem::take(&mut self.waiting_logprobs);
        let number = self.next_number();
        let output_index = self.items.len() - 1;
        let Some(OutputItem::Message { id, content, .. }) = self.items.last_mut() else {
            return; // cannot be: it was opened above
        };
        let body = EventBody::TextDelta {
            item_id: id,
            output_index,
            content_index: 0,
            delta: text,
            logprobs: &told,
        };
        send(listener, "response.output_text.delta", number, body);
        if let Some(ContentPart::OutputText {
            text: all,
            logprobs,
            ..
        }) = content.last_mut()
        {
            all.push_str(text);
            logprobs.extend(told);
        }
    }

    fn reasoning(&mut self, text: &str, mut listener: Listener<'_>) {
        if text.is_empty() {
            return;
        }
        if !(self.is_open && matches!(self.items.last(), Some(OutputItem::Reasoning { .. }))) {
            self.close(Status::Completed, listener.as_deref_mut());
            let item = OutputItem::Reasoning {
                id: self.item_id("rs"),
                summary: [],
                content: Vec::new(),
                status: Status::InProgress,
            };
            self.open(item, listener.as_deref_mut());
            let text = String::new();
            self.open_part(ContentPart::ReasoningText { text }, listener.as_deref_mut());
        }
        let number = self.next_number();
        let output_index = self.items.len() - 1;
        let Some(OutputItem::Reasoning { id, content, .. }) = self.items.last_mut() else {
            return; // cannot be: it was opened above
        };
        let body = EventBody::ReasoningDelta {
            item_id: id,
            output_index,
            content_index: 0,
            delta: text,
        };
        send(listener, "response.reasoning_text.delta", number, body);
        if let Some(ContentPart::ReasoningText { text: all }) = content.last_mut() {
            all.push_str(text);
        }
    }

    /// Arguments of a call that is not open have no place: calls come one after the other.
    fn arguments(&mut self, index: u32, fragment: &str, listener: Listener<'_>) {
        if !self.is_open || self.call_idx != Some(index) || fragment.is_empty() {
            return;
        }
        let number = self.next_number();
        let output_index = self.items.len() - 1;
        let Some(OutputItem::FunctionCall { id, arguments, .. }) = self.items.last_mut() else {
            return; // cannot be: `call_idx` says that it is one
        };
        let body = EventBody::ArgumentsDelta {
            item_id: id,
            output_index,
            delta: fragment,
        };
        send(
            listener,
            "response.function_call_arguments.delta",
            number,
            body,
        );
        arguments.push_str(fragment);
    }

    fn item_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}{:02}", self.id, self.items.len())
    }

    fn open_message(&mut self, mut listener: Listener<'_>) {
        let item = OutputItem::Message {
            id: self.item_id("msg"),
            status: Status::InProgress,
            role: "assistant",
            content: Vec::new(),
        };
        self.open(item, listener.as_deref_mut());
        let part = ContentPart::OutputText {
            text: String::new(),
            annotations: [],
            logprobs: Vec::new(),
        };
        self.open_part(part, listener);
    }

    fn open(&mut self, item: OutputItem, listener: Listener<'_>) {
        let number = self.next_number();
        let body = EventBody::Item {
            output_index: self.items.len(),
            item: &item,
        };
        send(listener, "response.output_item.added", number, body);
        self.items.push(item);
        self.is_open = true;
    }

    /// The first part of the open item.
    fn open_part(&mut self, part: ContentPart, listener: Listener<'_>) {
        let number = self.next_number();
        let output_index = self.items.len() - 1;
        let Some(
            OutputItem::Message { id, content, .. } | OutputItem::Reasoning { id, content, .. },
        ) = self.items.last_mut()
        else {
            return; // cannot be: calls have no parts
        };
        let body = EventBody::Part {
            item_id: id,
            output_index,
            content_index: 0,
            part: &part,
        };
        send(listener, "response.content_part.added", number, body);
        content.push(part);
    }

    /// Closes the open item, if there is one.
    fn close(&mut self, ends_as: Status, listener: Listener<'_>) {
        self.call_idx = None;
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let output_index = self.items.len() - 1;
        let Some(item) = self.items.last_mut() else {
            return; // cannot be: one is open
        };
        let mut teller = Teller {
            listener,
            next_number: self.next_number,
        };
        match item {
            OutputItem::Message {
                id,
                status,
                content,
                ..
            } => {
                *status = ends_as;
                close_text(id, output_index, content, &mut teller);
            }
            OutputItem::Reasoning {
                id,
                status,
                content,
                ..
            } => {
                *status = ends_as;
                close_text(id, output_index, content, &mut teller);
            }
            OutputItem::FunctionCall {
                id,
                name,
                arguments,
                status,
                ..
            } => {
                *status = ends_as;
                let body = EventBody::ArgumentsDone {
                    item_id: id,
                    output_index,
                    name,
                    arguments,
                };
                teller.tell("response.function_call_arguments.done", body);
            }
        }
        teller.tell(
            "response.output_item.done",
            EventBody::Item { output_index, item },
        );
        self.next_number = teller.next_number;
    }
}

/// Numbers events and sends them.
struct Teller<'e> {
    listener: Listener<'e>,
    next_number: u64,
}

impl Teller<'_> {
    fn tell(&mut self, r#type: &'static str, body: EventBody<'_>) {
        send(self.listener.as_deref_mut(), r#type, self.next_number, body);
        self.next_number += 1;
    }
}

/// The last part of an item is done.
fn close_text(
    item_id: &str,
    output_index: usize,
    content: &mut [ContentPart],
    teller: &mut Teller<'_>,
) {
    let content_index = content.len().saturating_sub(1);
    let Some(part) = content.last_mut() else {
        return; // cannot be: a part is opened with its item
    };
    match part {
        ContentPart::OutputText { text, logprobs, .. } => {
            let body = EventBody::TextDone {
                item_id,
                output_index,
                content_index,
                text,
                logprobs,
            };
            teller.tell("response.output_text.done", body);
        }
        ContentPart::ReasoningText { text } => {
            let body = EventBody::ReasoningDone {
                item_id,
                output_index,
                content_index,
                text,
            };
            teller.tell("response.reasoning_text.done", body);
        }
    }
    let body = EventBody::Part {
        item_id,
        output_index,
        content_index,
        part,
    };
    teller.tell("response.content_part.done", body);
}

/// Sends an event, if somebody listens.
pub fn send(
    listener: Listener<'_>,
    r#type: &'static str,
    sequence_number: u64,
    body: EventBody<'_>,
) {
    if let Some(events) = listener {
        let event = Event {
            r#type,
            sequence_number,
            body,
        };
        events.named(r#type, &event);
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
