//! Input items of the Responses API: checked, given ids, and turned into chat messages.
//!
//! Pure. A reasoning item, the message behind it and the calls behind that were one turn of the
//! model, so they become one assistant message. What is not here: the request's other fields
//! (`asked`), how a template writes messages.

use crate::http::dialect::ChatBody;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::openai::fields::{kind_of, wrong_kind};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// `input` as items: a string is one message of the user.
pub fn items(input: &Value) -> Result<Vec<Value>, ApiError> {
    match input {
        Value::String(text) => Ok(vec![json!({"role": "user", "content": text})]),
        Value::Array(items) => Ok(items.clone()),
        other => Err(wrong_kind("input", other, "a string or an array of items")),
    }
}

/// Turns items into messages of a chat body, one after the other.
pub struct Messages<'a> {
    chat: &'a mut ChatBody,
    /// Names of the tools that were called, by call.
    calls: HashMap<String, String>,
    /// What the model thought before what comes next.
    reasoning: Option<String>,
    /// The last message is the assistant's, and calls may join it.
    in_turn: bool,
}

impl<'a> Messages<'a> {
    /// Appends to `chat`.
    pub fn new(chat: &'a mut ChatBody) -> Self {
        Self {
            chat,
            calls: HashMap::new(),
            reasoning: None,
            in_turn: false,
        }
    }

    /// The next item; `place` is where it stands in the body.
    pub fn push(&mut self, place: &str, item: &Value) -> Result<(), ApiError> {
        let Some(map) = item.as_object() else {
            return Err(wrong_kind(place, item, "an object"));
        };
        match map.get("type") {
            None | Some(Value::Null) => self.message(place, map),
            Some(Value::String(kind)) => match kind.as_str() {
                "message" => self.message(place, map),
                "function_call" => self.call(place, map),
                "function_call_output" => self.output(place, map),
                "reasoning" => self.thought(place, map),
                kind => Err(unknown_item(place, kind)),
            },
            Some(other) => Err(wrong_kind(&format!("{place}.type"), other, "a string")),
        }
    }

    fn message(&mut self, place: &str, map: &Map<String, Value>) -> Result<(), ApiError> {
        let role = text(place, map, "role")?;
        if !matches!(role, "user" | "assistant" | "system" | "developer") {
            let place = format!("{place}.role");
            let shown: String = role.chars().take(40).collect();
            let message =
                format!("'{place}' is '{shown}'; known roles: user, assistant, system, developer");
            return Err(ApiError::invalid(place, message));
        }
        let content = content(place, map.get("content"), "content")?;
        let mut message = json!({"role": role, "content": content});
        self.in_turn = role == "assistant";
        let reasoning = self.reasoning.take().filter(|_| self.in_turn);
        if let Some(reasoning) = reasoning {
            message["reasoning_content"] = Value::from(reasoning);
        }
        self.chat.message(message, place);
        Ok(())
    }

    fn call(&mut self, place: &str, map: &Map<String, Value>) -> Result<(), ApiError> {
        let (id, name) = (text(place, map, "call_id")?, text(place, map, "name")?);
        let arguments = text(place, map, "arguments")?;
        if map.get("status").and_then(Value::as_str) == Some("incomplete") {
            // It was cut while the model wrote it: nobody could call that, and nobody answers it.
            return Ok(());
        }
        self.calls.insert(id.to_owned(), name.to_owned());
        let call = json!({
            "id": id, "type": "function", "function": {"name": name, "arguments": arguments},
        });
        if !self.in_turn {
            let mut message = json!({"role": "assistant", "content": null});
            if let Some(reasoning) = self.reasoning.take() {
                message["reasoning_content"] = Value::from(reasoning);
            }
            self.chat.message(message, place);
            self.in_turn = true;
        }
        let turn = self.chat.last_message().expect("a turn has a message");
        let calls = turn.entry("tool_calls").or_insert_with(|| json!([]));
        calls.as_array_mut().expect("it was made so").push(call);
        Ok(())
    }

    fn output(&mut self, place: &str, map: &Map<String, Value>) -> Result<(), ApiError> {
        let id = text(place, map, "call_id")?;
        let Some(name) = self.calls.get(id) else {
            let place = format!("{place}.call_id");
            let message = format!("'{place}' names no function_call before it");
            return Err(ApiError::invalid(place, message));
        };
        let content = content(place, map.get("output"), "output")?;
        let message = json!({"role": "tool", "tool_call_id": id, "name": name, "content": content});
        self.chat.message(message, place);
        (self.in_turn, self.reasoning) = (false, None);
        Ok(())
    }

    /// The whole text where there is one; a summary is better than nothing.
    fn thought(&mut self, place: &str, map: &Map<String, Value>) -> Result<(), ApiError> {
        let mut thought = String::new();
        for field in ["content", "summary"] {
            let parts = match map.get(field) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(parts)) => parts,
                Some(other) => {
                    return Err(wrong_kind(&format!("{place}.{field}"), other, "an array"));
                }
            };
            for (index, part) in parts.iter().enumerate() {
                let place = format!("{place}.{field}[{index}]");
                let Some(part) = part.as_object() else {
                    return Err(wrong_kind(&place, part, "an object"));
                };
                thought.push_str(text(&place, part, "text")?);
            }
            if !thought.is_empty() {
                break;
            }
        }
        self.reasoning = Some(thought).filter(|thought| !thought.is_empty());
        self.in_turn = false;
        Ok(())
    }
}

/// A string that must be there.
fn text<'a>(place: &str, map: &'a Map<String, Value>, field: &str) -> Result<&'a str, ApiError> {
    let place = format!("{place}.{field}");
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

/// Text, or parts as chat completions know them; images stay what they are, for whoever checks what
/// the model can read.
fn content(place: &str, value: Option<&Value>, field: &str) -> Result<Value, ApiError> {
    let place = format!("{place}.{field}");
    let parts = match value {
        Some(Value::String(text)) => return Ok(Value::from(text.as_str())),
        Some(Value::Array(parts)) => parts,
        None | Some(Value::Null) => {
            let message = format!("'{place}' is missing");
            let code = ErrorCode::MissingRequiredParameter;
            return Err(ApiError::param(code, place, message));
        }
        Some(other) => return Err(wrong_kind(&place, other, "a string or an array of parts")),
    };
    let parts = parts.iter().enumerate();
    let parts = parts.map(|(index, part)| chat_part(&format!("{place}[{index}]"), part));
    Ok(Value::from(
        parts.collect::<Result<Vec<Value>, ApiError>>()?,
    ))
}

fn chat_part(place: &str, part: &Value) -> Result<Value, ApiError> {
    let Some(map) = part.as_object() else {
        return Err(wrong_kind(place, part, "an object"));
    };
    match text(place, map, "type")? {
        "input_text" | "output_text" | "text" => {
            Ok(json!({"type": "text", "text": text(place, map, "text")?}))
        }
        "refusal" => Ok(json!({"type": "text", "text": text(place, map, "refusal")?})),
        "input_image" => {
            let url = map.get("image_url").cloned().unwrap_or_default();
            Ok(json!({"type": "image_url", "image_url": {"url": url}}))
        }
        // Which model hears is not decided here.
        "input_audio" => {
            let audio = map.get("input_audio").cloned().unwrap_or_default();
            Ok(json!({"type": "input_audio", "input_audio": audio}))
        }
        kind => {
            let shown: String = kind.chars().take(40).collect();
            let message = format!(
                "'{place}.type' is '{shown}'; input_text, output_text, refusal and input_image are \
                 known"
            );
            Err(ApiError::invalid(format!("{place}.type"), message))
        }
    }
}

fn unknown_item(place: &str, kind: &str) -> ApiError {
    let shown: String = kind.chars().take(40).collect();
    let place = format!("{place}.type");
    let message = format!(
        "'{place}' is '{shown}'; this server knows message, function_call, function_call_output, \
         reasoning and item_reference"
    );
    ApiError::invalid(place, message)
}

/// The item as it is listed: with an id, a type, a status, and its content as parts. It has been
/// checked by [`Messages::push`].
#[must_use]
pub fn listed(item: &Value, fresh_id: impl FnOnce(&str) -> String) -> Value {
    let Some(map) = item.as_object() else {
        return item.clone();
    };
    let kind = map.get("type").and_then(Value::as_str).unwrap_or("message");
    let id = map.get("id").and_then(Value::as_str).map(str::to_owned);
    let id = id.unwrap_or_else(|| fresh_id(prefix_of(kind)));
    let mut listed = Map::new();
    listed.insert("id".to_owned(), id.into());
    listed.insert("type".to_owned(), kind.into());
    listed.insert("status".to_owned(), "completed".into());
    for (name, value) in map {
        if !matches!(name.as_str(), "id" | "type") && !value.is_null() {
            listed.insert(name.clone(), value.clone());
        }
    }
    if let ("message", Some(Value::String(text))) = (kind, map.get("content")) {
        let part = match map.get("role").and_then(Value::as_str) {
            Some("assistant") => json!({"type": "output_text", "text": text, "annotations": []}),
            _ => json!({"type": "input_text", "text": text}),
        };
        listed.insert("content".to_owned(), json!([part]));
    }
    Value::Object(listed)
}

fn prefix_of(kind: &str) -> &'static str {
    match kind {
        "function_call" => "fc",
        "function_call_output" => "fco",
        "reasoning" => "rs",
        _ => "msg",
    }
}

/// The id that an item refers to instead of saying what it is.
pub fn reference<'a>(place: &str, item: &'a Value) -> Result<Option<&'a str>, ApiError> {
    if item.get("type").and_then(Value::as_str) != Some("item_reference") {
        return Ok(None);
    }
    match item.get("id") {
        Some(Value::String(id)) => Ok(Some(id)),
        other => {
            let place = format!("{place}.id");
            let kind = other.map_or("missing", kind_of);
            let message = format!("'{place}' must be a string, not {kind}");
            Err(ApiError::invalid(place, message))
        }
    }
}

#[cfg(test)]
#[path = "input_tests.rs"]
mod tests;
