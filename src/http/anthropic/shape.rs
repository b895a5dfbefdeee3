//! The Messages API as a shape of answers.
//!
//! Pure but for sending a whole message. `message_start` opens a stream, `message_delta` tells how it
//! ended and what it cost, `message_stop` is the last event; a fault is an `error` event instead.
//! A call that was cut ends a stream's last block as far as it came, and is left out of a whole message:
//! there its arguments would have to be an object, which the model has not written.

use super::answer::{Answer, Listener, send};
use super::asked::Asked;
use super::object::{Block, End, Event, Message, MessageUsage};
use crate::http::error_style::ErrorStyle;
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::events::Events;
use crate::http::generation::growing::{Finish, Step};
use crate::http::generation::shape::{AnswerInfo, Shape};
use crate::http::generation::usage::UsageSum;

/// See the module.
pub struct MessageShape {
    info: AnswerInfo,
    /// `msg_..`
    id: String,
    stop_sequences: Vec<String>,
    answer: Answer,
    finish: Option<Finish>,
    /// The last call's arguments are not whole.
    call_is_cut: bool,
}

impl MessageShape {
    /// Nothing has been said.
    #[must_use]
    pub fn new(info: AnswerInfo, asked: &Asked) -> Self {
        Self {
            id: format!("msg_{}", info.id),
            stop_sequences: asked.stop_sequences.clone(),
            answer: Answer::new(asked.thinking, format!("sig_{}", info.id)),
            finish: None,
            call_is_cut: false,
            info,
        }
    }

    fn take(&mut self, step: Step, listener: Listener<'_>) {
        match step {
            Step::Open => {}
            Step::Piece(piece) => {
                let info = &self.info;
                let call_id = |index| info.call_id(0, index).replacen("call_", "toolu_", 1);
                self.answer.push(piece.part, call_id, listener);
            }
            Step::Finish(ending) => {
                self.finish = Some(ending.finish);
                self.call_is_cut = ending.call_is_cut;
                self.answer.finish(listener);
            }
        }
    }

    fn is_cut(&self) -> bool {
        self.call_is_cut || matches!(self.finish, Some(Finish::Length | Finish::Cancelled))
    }

    fn end_words(&self) -> Option<End<'_>> {
        // A tool that had to be called ends a chat like a text does; here it is waited for all the same.
        let is_call = |block: &&Block| matches!(block, Block::ToolUse { .. });
        let shown = self.answer.shown(false);
        let ends_in_call = !self.call_is_cut && shown.last().is_some_and(is_call);
        let has_calls = shown.iter().any(is_call);
        let (stop_reason, stop_sequence) = match self.finish? {
            Finish::Stop if ends_in_call => (Some("tool_use"), None),
            Finish::ToolCalls if has_calls => (Some("tool_use"), None),
            Finish::Stop | Finish::ToolCalls => (Some("end_turn"), None),
            Finish::StopString(idx) => {
                let sequence = self.stop_sequences.get(idx).map(String::as_str);
                (Some("stop_sequence"), sequence)
            }
            Finish::Length => (Some("max_tokens"), None),
            // The API has no word for it, and clients know no others: whoever cancels does so beside it.
            Finish::Cancelled => (None, None),
        };
        Some(End {
            stop_reason,
            stop_sequence,
        })
    }

    fn message(&self, usage: MessageUsage) -> Message<'_> {
        let end = self.end_words();
        Message {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.info.model.name,
            content: self.answer.shown(self.is_cut()),
            stop_reason: end.as_ref().and_then(|end| end.stop_reason),
            stop_sequence: end.and_then(|end| end.stop_sequence),
            usage,
        }
    }
}

impl Shape for MessageShape {
    fn begin(&mut self, events: &mut Events) {
        let message = self.message(MessageUsage::at_start(self.info.prompt_tokens));
        send(Some(events), &Event::MessageStart { message });
    }

    fn step(&mut self, _choice_idx: usize, step: Step, events: &mut Events) {
        self.take(step, Some(events));
    }

    fn end(&mut self, usage: &UsageSum, events: &mut Events) {
        let usage = MessageUsage::new(usage, self.info.loops);
        if let Some(delta) = self.end_words() {
            send(Some(events), &Event::MessageDelta { delta, usage });
        }
        send(Some(events), &Event::MessageStop);
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &ErrorStyle::Anthropic.body(error));
    }

    fn ping(&mut self, events: &mut Events) {
        send(Some(events), &Event::Ping);
    }

    fn keep(&mut self, _choice_idx: usize, step: Step) {
        self.take(step, None);
    }

    fn whole(self, usage: &UsageSum, exchange: Exchange) {
        exchange.json(&self.message(MessageUsage::new(usage, self.info.loops)));
    }
}
