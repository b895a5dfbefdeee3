//! Messages of content blocks, turned into chat messages.
//!
//! Pure. Results of tools are blocks of a user message here and messages of their own there; what the
//! model thought and the calls it made belong to its message. Messages of one role that follow each
//! other are one turn, as Anthropic reads them. What is not here: the request's other fields
//! (`asked`), how a template writes messages.

use crate::http::dialect::ChatBody;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::openai::fields::wrong_kind;
use crate::runtime::Feature;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Turns messages into those of a chat body, one after the other.
pub struct Turns<'a> {
    chat: &'a mut ChatBody,
    /// For refusals.
    model: &'a str,
    /// Names of the tools that were called, by call.
    calls: HashMap<String, String>,
    /// Role of the message that came last, while more may join it.
    last_role: Option<Role>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    User,
    Assistant,
}

impl<'a> Turns<'a> {
    /// Appends to `chat`. `model`: as the request names it.
    pub fn new(chat: &'a mut ChatBody, model: &'a str) -> Self {
        Self {
            chat,
            model,
            calls: HashMap::new(),
            last_role: None,
        }
    }

    /// `system`: a string, or blocks of text.
    pub fn system(&mut self, value: &Value) -> Result<(), ApiError> {
        let texts = texts("system", value)?;
        let parts: Vec<Value> = texts.into_iter().map(text_part).collect();
        if !parts.is_empty() {
            let message = json!({"role": "system", "content": parts});
            self.chat.message(message, "system");
        }
        Ok(())
    }

    /// The next message; `place` is where it stands in the body.
    pub fn push(&mut self, place: &str, message: &Value) -> Result<(), ApiError> {
        let Some(map) = message.as_object() else {
            return Err(wrong_kind(place, message, "an object"));
        };
        let content = map.get("content");
        match required_text(place, map, "role")? {
            "user" => self.user(place, content),
            "assistant" => self.assistant(place, content),
            "system" => {
                let texts = texts(&format!("{place}.content"), content.unwrap_or(&Value::Null))?;
                let parts: Vec<Value> = texts.into_iter().map(text_part).collect();
                let message = json!({"role": "system", "content": parts});
                self.chat.message(message, place);
                self.last_role = None;
                Ok(())
            }
            other => {
                let place = format!("{place}.role");
                let shown: String = other.chars().take(40).collect();
                let message = format!("'{place}' is '{shown}'; known roles: user, assistant");
                Err(ApiError::invalid(place, message))
            }
        }
    }

    /// Whether the last message is the assistant's, ends in text and calls nothing: the answer goes on
    /// from there.
    pub fn is_begun(&mut self) -> bool {
        let is_assistant = self.last_role == Some(Role::Assistant);
        let last = self.chat.last_message().filter(|_| is_assistant);
        last.is_some_and(|message| !message.contains_key("tool_calls"))
    }

    fn user(&mut self, place: &str, content: Option<&Value>) -> Result<(), ApiError> {
        for (place, block) in blocks(place, content)? {
            match kind_of_block(&place, &block)? {
                "text" => {
                    let text = required_text(&place, &block, "text")?;
                    self.say(Role::User, &place, text);
                }
                "tool_result" => self.result(&place, &block)?,
                kind => return Err(self.refused(&place, kind)),
            }
        }
        Ok(())
    }

    fn assistant(&mut self, place: &str, content: Option<&Value>) -> Result<(), ApiError> {
        for (place, block) in blocks(place, content)? {
            match kind_of_block(&place, &block)? {
                "text" => {
                    let text = required_text(&place, &block, "text")?;
                    self.say(Role::Assistant, &place, text);
                }
                "thinking" => {
                    let thought = required_text(&place, &block, "thinking")?;
                    let message = self.turn(Role::Assistant, &place);
                    let all = message
                        .entry("reasoning_content")
                        .or_insert_with(|| json!(""));
                    *all = Value::from(format!("{}{thought}", all.as_str().unwrap_or_default()));
                }
                // Nobody but its author can read it.
                "redacted_thinking" => {}
                "tool_use" => self.call(&place, &block)?,
                kind => return Err(self.refused(&place, kind)),
            }
        }
        Ok(())
    }

    fn call(&mut self, place: &str, block: &Map<String, Value>) -> Result<(), ApiError> {
        let id = required_text(place, block, "id")?;
        let name = required_text(place, block, "name")?;
        let input = match block.get("input") {
            None | Some(Value::Null) => json!({}),
            Some(input @ Value::Object(_)) => input.clone(),
            Some(other) => {
                return Err(wrong_kind(&format!("{place}.input"), other, "an object"));
            }
        };
        let function = json!({"name": name, "arguments": input.to_string()});
        let call = json!({"id": id, "type": "function", "function": function});
        self.calls.insert(id.to_owned(), name.to_owned());
        let message = self.turn(Role::Assistant, place);
        let calls = message.entry("tool_calls").or_insert_with(|| json!([]));
        calls.as_array_mut().expect("it was made so").push(call);
        Ok(())
    }

    fn result(&mut self, place: &str, block: &Map<String, Value>) -> Result<(), ApiError> {
        let id = required_text(place, block, "tool_use_id")?;
        let Some(name) = self.calls.get(id) else {
            let place = format!("{place}.tool_use_id");
            let message = format!("'{place}' names no tool_use block before it");
            return Err(ApiError::invalid(place, message));
        };
        let place_of_content = format!("{place}.content");
        let texts = match block.get("content") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(parts)) => self.result_texts(&place_of_content, parts)?,
            Some(Value::String(text)) => vec![text.as_str()],
            Some(other) => {
                let kinds = "a string or an array of blocks";
                return Err(wrong_kind(&place_of_content, other, kinds));
            }
        };
        let is_error = block.get("is_error") == Some(&Value::Bool(true));
        let mut text = texts.join("\n");
        if is_error && text.is_empty() {
            "error".clone_into(&mut text);
        }
        let mut message =
            json!({"role": "tool", "tool_call_id": id, "name": name, "content": text});
        if is_error {
            message["is_error"] = Value::Bool(true); // for templates that tell it
        }
        self.chat.message(message, place);
        self.last_role = None;
        Ok(())
    }

    fn result_texts<'v>(&self, place: &str, parts: &'v [Value]) -> Result<Vec<&'v str>, ApiError> {
        let parts = parts.iter().enumerate().map(|(index, part)| {
            let place = format!("{place}[{index}]");
            let Some(map) = part.as_object() else {
                return Err(wrong_kind(&place, part, "an object"));
            };
            match kind_of_block(&place, map)? {
                "text" => required_text(&place, map, "text"),
                kind => Err(self.refused(&place, kind)),
            }
        });
        parts.collect()
    }

    /// Appends text to the turn of a role.
    fn say(&mut self, role: Role, place: &str, text: &str) {
        let message = self.turn(role, place);
        let parts = message.entry("content").or_insert_with(|| json!([]));
        parts
            .as_array_mut()
            .expect("it was made so")
            .push(text_part(text));
    }

    /// The message of this turn, made where the turn begins.
    fn turn(&mut self, role: Role, place: &str) -> &mut Map<String, Value> {
        if self.last_role != Some(role) {
            let name = match role {
                Role::User => "user",
                Role::Assistant => "assistant",
            };
            // Faults inside are told as about the message, whose blocks may have moved.
            let place = place.split(".content").next().unwrap_or(place);
            let message = json!({"role": name, "content": []});
            self.chat.message(message, place);
            self.last_role = Some(role);
        }
        self.chat.last_message().expect("a turn has a message")
    }

    fn refused(&self, place: &str, kind: &str) -> ApiError {
        match kind {
            "image" => ApiError::missing(Feature::Vision, place, self.model),
            _ => {
                let place = format!("{place}.type");
                let shown: String = kind.chars().take(40).collect();
                let message = format!(
                    "'{place}' is '{shown}'; this server knows text, tool_use, tool_result and \
                     thinking"
                );
                ApiError::param(ErrorCode::UnsupportedParameter, place, message)
            }
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A string that must be there.
pub fn required_text<'v>(
    place: &str,
    map: &'v Map<String, Value>,
    field: &str,
) -> Result<&'v str, ApiError> {
    let place = match place {
        "" => field.to_owned(),
        place => format!("{place}.{field}"),
    };
    match map.get(field) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => {
            let message = format!("'{place}' is missing");
            let code = ErrorCode::MissingRequiredParameter;
            Err(ApiError::param(code, place, message))
        }
        Some(other) => Err(wrong_kind(&place, other, "a string")),
    }
}

fn kind_of_block<'v>(place: &str, block: &'v Map<String, Value>) -> Result<&'v str, ApiError> {
    required_text(place, block, "type")
}

/// A block and where it stands.
type PlacedBlock = (String, Map<String, Value>);

/// The blocks of a message and their places; a string is one block of text.
fn blocks(place: &str, content: Option<&Value>) -> Result<Vec<PlacedBlock>, ApiError> {
    let place = format!("{place}.content");
    match content {
        Some(Value::String(text)) => {
            let block = json!({"type": "text", "text": text});
            let block = block.as_object().cloned().unwrap_or_default();
            Ok(vec![(place, block)])
        }
        Some(Value::Array(blocks)) => {
            let blocks = blocks.iter().enumerate().map(|(index, block)| {
                let place = format!("{place}[{index}]");
                match block.as_object() {
                    Some(block) => Ok((place, block.clone())),
                    None => Err(wrong_kind(&place, block, "an object")),
                }
            });
            blocks.collect()
        }
        None | Some(Value::Null) => {
            let message = format!("'{place}' is missing");
            let code = ErrorCode::MissingRequiredParameter;
            Err(ApiError::param(code, place, message))
        }
        Some(other) => Err(wrong_kind(&place, other, "a string or an array of blocks")),
    }
}

/// A string, or blocks of text only.
fn texts<'v>(place: &str, value: &'v Value) -> Result<Vec<&'v str>, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(vec![text]),
        Value::Array(blocks) => blocks,
        other => return Err(wrong_kind(place, other, "a string or an array of blocks")),
    };
    let texts = blocks.iter().enumerate().map(|(index, block)| {
        let place = format!("{place}[{index}]");
        let Some(map) = block.as_object() else {
            return Err(wrong_kind(&place, block, "an object"));
        };
        match kind_of_block(&place, map)? {
            "text" => required_text(&place, map, "text"),
            kind => {
                let place = format!("{place}.type");
                let shown: String = kind.chars().take(40).collect();
                let message = format!("'{place}' is '{shown}'; only text can stand here");
                Err(ApiError::invalid(place, message))
            }
        }
    });
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(given: &Value) -> Result<(Value, bool), ApiError> {
        let mut chat = ChatBody::new(&Map::new(), &[], &[], "messages", &[]).expect("empty");
        let mut turns = Turns::new(&mut chat, "m");
        for (index, message) in given.as_array().expect("a list").iter().enumerate() {
            turns.push(&format!("messages[{index}]"), message)?;
        }
        let is_begun = turns.is_begun();
        let (mut fields, _) = chat.finish();
        Ok((fields.remove("messages").expect("always there"), is_begun))
    }

    #[test]
    fn blocks_become_messages_of_their_own() {
        let (made, is_begun) = messages(&json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "a tool", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "ask", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": true},
                {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "well?"},
        ]))
        .expect("valid");
        let part = |text: &str| json!({"type": "text", "text": text});
        let call = |id: &str, name: &str, arguments: &str| {
            json!({"id": id, "type": "function",
                   "function": {"name": name, "arguments": arguments}})
        };
        assert_eq!(
            made,
            json!([
                {"role": "user", "content": [part("weather?")]},
                {"role": "assistant", "content": [part("I look.")], "reasoning_content": "a tool",
                 "tool_calls": [call("t1", "look", "{\"a\":1}"), call("t2", "ask", "{}")]},
                {"role": "tool", "tool_call_id": "t1", "name": "look", "content": "sun"},
                {"role": "tool", "tool_call_id": "t2", "name": "ask", "content": "error",
                 "is_error": true},
                {"role": "user", "content": [part("so?"), part("well?")]},
            ])
        );
        assert!(!is_begun);
    }

    #[test]
    fn an_answer_may_be_begun_by_the_client() {
        let begun =
            json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]);
        assert!(messages(&begun).expect("valid").1);
        let call = json!([{"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t", "name": "look", "input": {}}]}]);
        assert!(!messages(&call).expect("valid").1);
        assert!(!messages(&json!([])).expect("valid").1);
    }

    #[test]
    fn faults_name_their_place() {
        let block = |block: Value| json!({"role": "user", "content": [block]});
        let said = |block: Value| json!({"role": "assistant", "content": [block]});
        for (message, param) in [
            (json!("x"), "messages[0]"),
            (json!({"content": "x"}), "messages[0].role"),
            (json!({"role": "tool", "content": "x"}), "messages[0].role"),
            (json!({"role": "user"}), "messages[0].content"),
            (json!({"role": "user", "content": 5}), "messages[0].content"),
            (
                json!({"role": "system", "content": 5}),
                "messages[0].content",
            ),
            (
                json!({"role": "user", "content": ["x"]}),
                "messages[0].content[0]",
            ),
            (block(json!({})), "messages[0].content[0].type"),
            (
                block(json!({"type": "text"})),
                "messages[0].content[0].text",
            ),
            (block(json!({"type": "image"})), "messages[0].content[0]"),
            (
                block(json!({"type": "document"})),
                "messages[0].content[0].type",
            ),
            (
                block(json!({"type": "tool_use"})),
                "messages[0].content[0].type",
            ),
            (
                block(json!({"type": "tool_result", "tool_use_id": "t"})),
                "messages[0].content[0].tool_use_id",
            ),
            (
                said(json!({"type": "tool_use", "id": "t"})),
                "messages[0].content[0].name",
            ),
            (
                said(json!({"type": "tool_use", "id": "t", "name": "n", "input": "x"})),
                "messages[0].content[0].input",
            ),
            (
                said(json!({"type": "thinking"})),
                "messages[0].content[0].thinking",
            ),
        ] {
            let error = messages(&json!([message])).expect_err(&message.to_string());
            assert_eq!(error.param.as_deref(), Some(param), "{message}");
            assert_eq!(error.status(), 400);
        }
        let image = messages(&json!([block(json!({"type": "image"}))])).expect_err("no images");
        assert_eq!(image.code, ErrorCode::MissingCapability);
        assert!(image.message.contains("'vision'"), "{}", image.message);
        let inside = json!([
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t", "name": "n", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]},
        ]);
        let error = messages(&inside).expect_err("no images");
        assert_eq!(
            error.param.as_deref(),
            Some("messages[1].content[0].content[0]")
        );
    }
}
