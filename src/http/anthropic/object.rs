//! The Messages API on the wire: the message, its content blocks, its events.
//!
//! Plain types; the order of their fields is the order of the keys. What is not here: when an event
//! is sent (`answer`, `shape`).

use crate::http::generation::usage::{AskedLoops, LoopCounts, UsageSum};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// A message of the model; whole, or as it begins.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the names are the API's own")]
pub struct Message<'a> {
    pub id: &'a str,
    pub r#type: &'static str,
    pub role: &'static str,
    pub model: &'a str,
    pub content: Vec<&'a Block>,
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<&'a str>,
    pub usage: MessageUsage,
}

/// Something that the model said.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the API's own")]
pub enum Block {
    Thinking {
        thinking: String,
        signature: String,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        /// JSON text on its way, an object when it is shown.
        #[serde(serialize_with = "input_object")]
        input: String,
    },
}

impl Block {
    /// Whether it can be shown whole: clients take for granted that the arguments of a call are an
    /// object, and those that are none are not replaced by others. No arguments at all are an empty
    /// one, unless `is_cut`.
    #[must_use]
    pub fn is_sound(&self, is_cut: bool) -> bool {
        match self {
            Self::Thinking { .. } | Self::Text { .. } => true,
            Self::ToolUse { input, .. } if input.is_empty() => !is_cut,
            Self::ToolUse { input, .. } => {
                serde_json::from_str::<Map<String, Value>>(input).is_ok()
            }
        }
    }
}

/// Empty when the call begins; else an object, as [`Block::is_sound`] sees to.
fn input_object<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    let input: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    input.serialize(serializer)
}

/// `usage` in this API's words: what was found in the cache is not among the `input_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MessageUsage {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    loops: Option<LoopCounts>,
}

impl MessageUsage {
    /// Before anything was said; what the cache held is not known yet.
    #[must_use]
    pub fn at_start(prompt_tokens: u64) -> Self {
        Self {
            input_tokens: prompt_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: 0,
            output_tokens: 0,
            loops: None,
        }
    }

    /// Of all jobs together.
    #[must_use]
    pub fn new(sum: &UsageSum, asked: Option<AskedLoops>) -> Self {
        Self {
            input_tokens: sum.prompt().saturating_sub(sum.cached()),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: sum.cached(),
            output_tokens: sum.completion(),
            loops: asked.map(|asked| sum.loops(asked)),
        }
    }
}

/// An event; the variant's name is its type and its name.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the API's own")]
pub enum Event<'a> {
    MessageStart {
        message: Message<'a>,
    },
    ContentBlockStart {
        index: usize,
        content_block: &'a Block,
    },
    ContentBlockDelta {
        index: usize,
        delta: Delta<'a>,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: End<'a>,
        usage: MessageUsage,
    },
    MessageStop,
    Ping,
}

impl Event<'_> {
    /// The name that stands before the data.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Ping => "ping",
        }
    }
}

/// What is added to a block.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the API's own")]
pub enum Delta<'a> {
    TextDelta { text: &'a str },
    ThinkingDelta { thinking: &'a str },
    SignatureDelta { signature: &'a str },
    InputJsonDelta { partial_json: &'a str },
}

/// How a message ended.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the names are the API's own")]
pub struct End<'a> {
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<&'a str>,
}
