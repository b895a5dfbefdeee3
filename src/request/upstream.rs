//! Words of a generation that another server runs: what is forwarded to it, what comes back beside
//! text, and how it fails.
//!
//! Plain data, no thread. Such a server has its own tokenizer, so a request carries what the client
//! wrote instead of tokens, and log-probabilities carry texts instead of ids. What is not here: the
//! connection (`runtime/upstream`), and which fields of a body are forwarded (`http`).

use serde_json::{Map, Value};

/// Bytes of text that are counted as a token where nobody has counted.
const BYTES_PER_TOKEN: usize = 4;

/// A prompt as it was written.
#[derive(Clone, Debug, PartialEq)]
pub enum UpstreamPrompt {
    /// Checked messages of a chat; the server's own template makes a prompt of them.
    Messages(Vec<Value>),
    /// A text to continue.
    Text(String),
    /// Texts whose embeddings are asked for, at least one; each comes as one event, in their order.
    Inputs(Vec<String>),
}

/// What a runtime without a tokenizer of ours is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct UpstreamCall {
    /// Messages or text.
    pub prompt: UpstreamPrompt,
    /// Further fields of the body under their names at the OpenAI routes, as the client wrote them,
    /// checked: sampling, stop rules, limits. The runtime itself says which model, how it streams,
    /// the seed and the priority.
    pub fields: Map<String, Value>,
    /// Higher runs sooner, 0 is ordinary; as in the scheduler.
    pub priority: i32,
    /// The client has allowed that the request leaves this machine.
    pub may_leave: bool,
}

impl UpstreamCall {
    /// About how many tokens the prompt has, at least 1: for queue limits and lists, never to refuse
    /// a prompt as too long.
    #[must_use]
    pub fn guessed_prompt_tokens(&self) -> u32 {
        let n_bytes = match &self.prompt {
            UpstreamPrompt::Messages(messages) => messages.iter().map(text_bytes).sum(),
            UpstreamPrompt::Text(text) => text.len(),
            UpstreamPrompt::Inputs(texts) => texts.iter().map(String::len).sum(),
        };
        u32::try_from(n_bytes / BYTES_PER_TOKEN)
            .unwrap_or(u32::MAX)
            .max(1)
    }
}

/// Bytes of all texts in a message.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(map) => map.values().map(text_bytes).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// A token as text, with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TextToken {
    /// As the server wrote it.
    pub text: String,
    /// Its bytes, where the server tells them.
    pub bytes: Option<Vec<u8>>,
    /// Natural log.
    pub logprob: f32,
}

/// The same as [`super::TokenLogprob`] from a server whose token ids are not told.
#[derive(Clone, Debug, PartialEq)]
pub struct TextLogprob {
    /// The token that was chosen.
    pub chosen: TextToken,
    /// The likeliest at its place, as the server ordered them.
    pub top: Vec<TextToken>,
}

/// What another server tells apart from the text of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamPart {
    /// What the model thinks.
    Reasoning(String),
    /// A call of a tool begins; `index` counts the calls of the answer from 0.
    CallBegin {
        /// Which call.
        index: u32,
        /// Of the tool.
        name: String,
    },
    /// The next piece of a call's arguments, JSON text.
    CallArguments {
        /// Which call.
        index: u32,
        /// May be cut anywhere between characters.
        fragment: String,
    },
}

/// How another server let a request down. That it has no room is another word:
/// [`super::RequestError::Overloaded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamFault {
    /// It answered with an error, or with what is no answer.
    Error,
    /// It was silent for longer than it may be.
    Timeout,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn prompts_are_guessed_by_their_texts() {
        let call = |prompt| UpstreamCall {
            prompt,
            fields: Map::new(),
            priority: 0,
            may_leave: false,
        };
        let text = |text: &str| call(UpstreamPrompt::Text(text.to_owned()));
        assert_eq!(text("").guessed_prompt_tokens(), 1);
        assert_eq!(text("12345678").guessed_prompt_tokens(), 2);
        let messages = vec![json!({"role": "user", "content": [{"type": "text", "text": "1234"}]})];
        let messages = call(UpstreamPrompt::Messages(messages));
        assert_eq!(messages.guessed_prompt_tokens(), (4 + 4 + 4) / 4);
    }
}
