//! `POST /api/v1/chat`: from LM Studio's body to ours.
//!
//! The body becomes a chat of ours, whose checks, sampling fields, depth and scheduling then hold for it
//! too; errors name the fields of LM Studio's body. `integrations` (servers that run tools) are not built.
//! Chats are not kept: `response_id` is never given, and `previous_response_id` is refused rather than
//! answered without the history.

use super::chat_shape::ChatShape;
use super::check_ttl;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::prepare::{self, Prepared, Work};
use crate::http::generation::run::run;
use crate::http::openai::fields::{Fields, parse_object, wrong_kind};
use crate::http::openai::sampling::check_context;
use serde_json::{Map, Value, json};

/// Names of our fields and of LM Studio's, for errors.
const NAMES: [(&str, &str); 3] = [
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning"),
    ("chat_template_kwargs", "reasoning"),
];

/// See the module.
pub fn chat(call: &Call<'_>, exchange: Exchange) {
    run(prepare(call).map_err(named), call, exchange);
}

fn prepare(call: &Call<'_>) -> Result<Work<ChatShape>, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let context_length = fields.count("context_length", 1)?;
    let chat = chat_body(&body)?;
    let name = fields.string("model")?.unwrap_or_default();
    let name = name.split('@').next().unwrap_or_default();
    let is_loaded = |entry: crate::pool::PoolEntry| entry.loaded().is_some();
    let was_loaded = name.is_empty() || call.state.pool().find(name).is_some_and(is_loaded);
    let mut prepared = prepare::chat(call, &chat)?;
    if let Some(context_length) = context_length {
        shorten(&mut prepared, context_length)?;
    }
    let load_time = (!was_loaded).then(|| call.waited.get());
    Ok(prepared.shaped(|info| ChatShape::new(info, load_time)))
}

/// The same error with LM Studio's name of the field.
fn named(error: ApiError) -> ApiError {
    let rename = |param: String| {
        if param.starts_with("messages") {
            return "input".to_owned();
        }
        let found = NAMES.iter().find(|(ours, _)| *ours == param);
        found.map_or(param, |(_, theirs)| (*theirs).to_owned())
    };
    ApiError {
        param: error.param.map(rename),
        ..error
    }
}

/// A context that is shorter than the model's: prompt and answer end within it.
fn shorten(prepared: &mut Prepared, context_length: u32) -> Result<(), ApiError> {
    let longest = prepared.info.model.context_length;
    if context_length > longest {
        let message = format!(
            "'context_length' is {context_length}; the model is loaded with {longest} tokens"
        );
        return Err(ApiError::invalid("context_length", message));
    }
    for job in &mut prepared.jobs {
        check_context(job.prompt.len(), 1, context_length, "input")?;
        let room = context_length - job.prompt.len() as u32;
        job.max_tokens = job.max_tokens.min(room);
    }
    Ok(())
}

/// LM Studio's body in OpenAI's words. Fields that it does not name stay as they are.
fn chat_body(body: &Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let fields = Fields::new(body);
    check_ttl(&fields)?;
    if fields
        .array("integrations")?
        .is_some_and(|list| !list.is_empty())
    {
        let why = "servers that run tools are not built";
        return Err(ApiError::unsupported("integrations", why));
    }
    if fields.string("previous_response_id")?.is_some() {
        let why = "chats are not kept here; send what was said before in 'input' messages of \
                   POST /v1/chat/completions, or use POST /v1/responses";
        return Err(ApiError::unsupported("previous_response_id", why));
    }
    if fields.integer("n", 1..=1)?.is_some() {
        // One answer is all that this route has.
    }
    fields.flag("store", true)?;
    let mut messages = Vec::new();
    if let Some(system) = fields.string("system_prompt")? {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": input_text(&fields)?}));
    let mut chat = body.clone();
    for name in [
        "input",
        "system_prompt",
        "integrations",
        "store",
        "ttl",
        "context_length",
        "reasoning",
        "max_output_tokens",
        "previous_response_id",
    ] {
        chat.remove(name);
    }
    chat.insert("messages".to_owned(), messages.into());
    if let Some(most) = fields.count("max_output_tokens", 1)? {
        chat.insert("max_tokens".to_owned(), most.into());
    }
    if let Some(reasoning) = fields.string("reasoning")? {
        reason(reasoning, &mut chat)?;
    }
    Ok(chat)
}

/// What templates read: `enable_thinking`, or `reasoning_effort`.
fn reason(reasoning: &str, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let thinks = match reasoning {
        "off" => false,
        "on" | "low" | "medium" | "high" => true,
        other => {
            let shown: String = other.chars().take(50).collect();
            let message = format!("'reasoning' is '{shown}'; it is off, on, low, medium or high");
            return Err(ApiError::invalid("reasoning", message));
        }
    };
    if thinks && reasoning != "on" {
        chat.insert("reasoning_effort".to_owned(), reasoning.into());
    }
    let variables = chat
        .entry("chat_template_kwargs")
        .or_insert_with(|| json!({}));
    if let Value::Object(variables) = variables {
        let _ = variables.entry("enable_thinking").or_insert(thinks.into());
    }
    Ok(())
}

/// One text, or the texts of a list one below the other.
fn input_text(fields: &Fields<'_>) -> Result<String, ApiError> {
    let name = "input";
    let items = match fields.get(name) {
        None => {
            let code = ErrorCode::MissingRequiredParameter;
            return Err(ApiError::param(code, name, "'input' is missing"));
        }
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_kind(name, other, "a string or an array of items")),
    };
    let mut texts = Vec::new();
    for item in items {
        match item.get("type").and_then(Value::as_str) {
            Some("message" | "text") => match item.get("content").and_then(Value::as_str) {
                Some(text) => texts.push(text),
                None => {
                    let message = "an item of type \"message\" has its text as 'content'";
                    return Err(ApiError::invalid(name, message));
                }
            },
            Some("image") => {
                return Err(ApiError::unsupported(name, "models here take text only"));
            }
            _ => {
                let message = "each item of 'input' has \"type\": \"message\" and its 'content'";
                return Err(ApiError::invalid(name, message));
            }
        }
    }
    match texts.is_empty() {
        true => Err(ApiError::invalid(name, "'input' is empty")),
        false => Ok(texts.join("\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(body: &Value) -> Result<Value, ApiError> {
        let map = body.as_object().expect("the test gives an object");
        chat_body(map).map(Value::from)
    }

    #[test]
    fn the_body_becomes_a_chat() {
        let body = json!({
            "model": "m", "system_prompt": "Be short.", "input": "Hi", "max_output_tokens": 5,
            "temperature": 0.5, "top_k": 3, "store": true, "ttl": 60, "integrations": [],
            "reasoning": "high", "stream": true, "context_length": 100,
        });
        assert_eq!(
            translated(&body).expect("valid"),
            json!({
                "model": "m", "temperature": 0.5, "top_k": 3, "stream": true, "max_tokens": 5,
                "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": true},
                "messages": [{"role": "system", "content": "Be short."},
                    {"role": "user", "content": "Hi"}],
            })
        );
        let items = json!({"input": [{"type": "text", "content": "a"},
            {"type": "message", "content": "b"}], "reasoning": "off"});
        let chat = translated(&items).expect("valid");
        assert_eq!(
            chat["messages"],
            json!([{"role": "user", "content": "a\nb"}])
        );
        assert_eq!(
            chat["chat_template_kwargs"],
            json!({"enable_thinking": false})
        );
    }

    #[test]
    fn errors_name_lm_studios_fields() {
        for (body, param) in [
            (json!({}), "input"),
            (json!({"input": 5}), "input"),
            (json!({"input": []}), "input"),
            (
                json!({"input": [{"type": "image", "data_url": "x"}]}),
                "input",
            ),
            (json!({"input": [{"type": "text"}]}), "input"),
            (
                json!({"input": "x", "integrations": ["mcp/x"]}),
                "integrations",
            ),
            (
                json!({"input": "x", "previous_response_id": "resp_1"}),
                "previous_response_id",
            ),
            (json!({"input": "x", "reasoning": "much"}), "reasoning"),
            (
                json!({"input": "x", "max_output_tokens": 0}),
                "max_output_tokens",
            ),
            (json!({"input": "x", "n": 2}), "n"),
            (json!({"input": "x", "ttl": -1}), "ttl"),
        ] {
            let error = translated(&body).expect_err(&body.to_string());
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
        let error = named(ApiError::invalid("max_tokens", "x"));
        assert_eq!(error.param.as_deref(), Some("max_output_tokens"));
        let error = named(ApiError::invalid("messages[0].content", "x"));
        assert_eq!(error.param.as_deref(), Some("input"));
    }
}
