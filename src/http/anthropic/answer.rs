//! Content blocks of a message while they grow, and the events that tell about them.
//!
//! Pure. One block is open at a time, the last one; whatever comes that does not belong to it closes
//! it and opens the next. A whole message runs through the same code with nobody listening, so that
//! it says what the stream would. What is not here: the message around the blocks (`shape`).

use super::asked::Thinking;
use super::object::{Block, Delta, Event};
use crate::chat::Part;
use crate::http::generation::events::Events;

/// Where events go. None = nobody listens.
pub type Listener<'e> = Option<&'e mut Events>;

/// See the module.
#[derive(Debug)]
pub struct Answer {
    thinking: Thinking,
    /// Stands under thoughts; clients hand it back with them, and some drop what has none.
    signature: String,
    blocks: Vec<Block>,
    /// The last block may grow.
    is_open: bool,
    /// Which call the last block is, if it is one.
    call_idx: Option<u32>,
}

impl Answer {
    /// Nothing has been said.
    #[must_use]
    pub fn new(thinking: Thinking, signature: String) -> Self {
        Self {
            thinking,
            signature,
            blocks: Vec::new(),
            is_open: false,
            call_idx: None,
        }
    }

    /// Said so far.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// What a whole message shows: all but calls whose arguments are no object. `is_cut`: more would
    /// have come.
    #[must_use]
    pub fn shown(&self, is_cut: bool) -> Vec<&Block> {
        let n_before = self.blocks.len().saturating_sub(1);
        let blocks = self.blocks.iter().enumerate();
        let sound = blocks.filter(|(index, block)| block.is_sound(is_cut && *index == n_before));
        sound.map(|(_, block)| block).collect()
    }

    /// The next thing said. `call_id` names a call that begins.
    pub fn push(
        &mut self,
        part: Part,
        call_id: impl FnOnce(u32) -> String,
        mut listener: Listener<'_>,
    ) {
        match part {
            Part::Text(text) if text.is_empty() => {}
            Part::Text(text) => {
                if !(self.is_open && matches!(self.blocks.last(), Some(Block::Text { .. }))) {
                    self.close(listener.as_deref_mut());
                    let text = String::new();
                    self.open(Block::Text { text }, listener.as_deref_mut());
                }
                self.grow(&text, listener);
            }
            Part::Reasoning(text) if text.is_empty() || self.thinking == Thinking::Hidden => {}
            Part::Reasoning(text) => {
                if !(self.is_open && matches!(self.blocks.last(), Some(Block::Thinking { .. }))) {
                    self.close(listener.as_deref_mut());
                    let (thinking, signature) = (String::new(), String::new());
                    let block = Block::Thinking {
                        thinking,
                        signature,
                    };
                    self.open(block, listener.as_deref_mut());
                }
                if self.thinking == Thinking::Shown {
                    self.grow(&text, listener);
                }
            }
            Part::CallBegin { index, name } => {
                self.close(listener.as_deref_mut());
                self.call_idx = Some(index);
                let (id, input) = (call_id(index), String::new());
                self.open(Block::ToolUse { id, name, input }, listener);
            }
            // Arguments of a call that is not open have no place: calls come one after the other.
            Part::CallArguments { index, fragment } => {
                if self.is_open && self.call_idx == Some(index) && !fragment.is_empty() {
                    self.grow(&fragment, listener);
                }
            }
        }
    }

    /// Nothing more comes. A message that said nothing has an empty text.
    pub fn finish(&mut self, mut listener: Listener<'_>) {
        if self.blocks.is_empty() {
            let text = String::new();
            self.open(Block::Text { text }, listener.as_deref_mut());
        }
        self.close(listener);
    }

    fn open(&mut self, block: Block, listener: Listener<'_>) {
        let index = self.blocks.len();
        let content_block = &block;
        send(
            listener,
            &Event::ContentBlockStart {
                index,
                content_block,
            },
        );
        self.blocks.push(block);
        self.is_open = true;
    }

    /// More of the open block.
    fn grow(&mut self, more: &str, listener: Listener<'_>) {
        let index = self.blocks.len().saturating_sub(1);
        let delta = match self.blocks.last_mut() {
            None => return, // cannot be: one is open
            Some(Block::Text { text }) => {
                text.push_str(more);
                Delta::TextDelta { text: more }
            }
            Some(Block::Thinking { thinking, .. }) => {
                thinking.push_str(more);
                Delta::ThinkingDelta { thinking: more }
            }
            Some(Block::ToolUse { input, .. }) => {
                input.push_str(more);
                Delta::InputJsonDelta { partial_json: more }
            }
        };
        send(listener, &Event::ContentBlockDelta { index, delta });
    }

    /// Closes the open block, if there is one.
    fn close(&mut self, mut listener: Listener<'_>) {
        self.call_idx = None;
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let index = self.blocks.len().saturating_sub(1);
        if let Some(Block::Thinking { signature, .. }) = self.blocks.last_mut() {
            signature.clone_from(&self.signature);
            let delta = Delta::SignatureDelta { signature };
            let event = Event::ContentBlockDelta { index, delta };
            send(listener.as_deref_mut(), &event);
        }
        send(listener, &Event::ContentBlockStop { index });
    }
}

/// Sends an event, if somebody listens.
pub fn send(listener: Listener<'_>, event: &Event<'_>) {
    if let Some(events) = listener {
        events.named(event.name(), event);
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
