//! What a model writes, told apart: text for the reader, reasoning, calls of tools.
//!
//! Pure. One [`AnswerParser`] per choice gets the text as it becomes certain and returns its parts;
//! whatever the cuts between pushes, the joined parts are the same. What is not here: how a client
//! is told (`http`'s shapes), what a prompt looks like (`tokenizer::chat_template`).
//!
//! Reading order: this file, `family` (the forms there are), `parser` (the state machine), `item` (one
//! call) with `json` and `pythonic` (reading what is still being written), `surface` (grammars of calls).

mod family;
mod item;
mod json;
mod parser;
#[cfg(test)]
mod parser_tests;
mod pythonic;
mod surface;

pub use family::{Family, THINK_MARKS, ThinkMarks};
pub use item::ToolShape;
pub use parser::{AnswerParser, CallOptions, ParserOptions, ReasoningOptions};
pub use surface::{AnswerBody, AnswerGrammar, CallGrammar, CallSchema, Instead, Thoughts};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// For the reader.
    Text(String),
    /// What the model thinks before it answers.
    Reasoning(String),
    /// A call of a tool begins. `index` counts the calls of this choice from 0.
    CallBegin {
        /// Which call.
        index: u32,
        /// Of the tool.
        name: String,
    },
    /// The next piece of a call's arguments; all pieces together are JSON text.
    CallArguments {
        /// Which call.
        index: u32,
        /// May be cut anywhere between characters.
        fragment: String,
    },
}

impl Part {
    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) | Self::Reasoning(text) => text.is_empty(),
            Self::CallBegin { .. } => false,
            Self::CallArguments { fragment, .. } => fragment.is_empty(),
        }
    }
}
