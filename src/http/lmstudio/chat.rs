//! `POST /api/v1/chat`: from LM Studio's body to ours.
//!
//! The body becomes a chat of ours, whose checks, sampling fields, depth and scheduling then hold for it
//! too; errors name the fields of LM Studio's body. `integrations` (servers that run tools) are not built.
//! Chats are kept where responses are (`responses/kept`), as the same items, so that both APIs can go on
//! with what the other began.

use super::chat_shape::{ChatShape, Keeper};
use super::check_ttl;
use crate::http::dialect::{ChatBody, Foreign, Origins};
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::prepare::{self, Prepared, Work};
use crate::http::generation::run::run;
use crate::http::openai::fields::{Fields, parse_object, wrong_kind};
use crate::http::openai::sampling::check_context;
use crate::http::responses::input::Messages;
use crate::http::responses::kept::Responses;
use crate::http::responses::store::Turn;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Fields that have another name or no meaning in a chat.
const CONSUMED: &[&str] = &[
    "input",
    "system_prompt",
    "integrations",
    "store",
    "ttl",
    "context_length",
    "reasoning",
    "max_output_tokens",
    "previous_response_id",
];

/// Fields of chat completions that this API has another word for, or none.
const FOREIGN: &[Foreign] = &[
    ("messages", "use 'input' and 'system_prompt'"),
    ("tools", "use /v1/chat/completions for tools of the client"),
];

/// See the module.
pub fn chat(call: &Call<'_>, responses: &Arc<Responses>, exchange: Exchange) {
    run(prepare(call, responses), call, exchange);
}

fn prepare(call: &Call<'_>, responses: &Arc<Responses>) -> Result<Work<ChatShape>, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let context_length = fields.count("context_length", 1)?;
    let history = match fields.string("previous_response_id")? {
        None => Vec::new(),
        Some(id) => responses
            .history(id, call.client.as_deref())
            .ok_or_else(|| unknown_response(id))?,
    };
    let (chat, origins, input) = chat_body(&body, &history)?;
    let name = fields.string("model")?.unwrap_or_default();
    let name = name.split('@').next().unwrap_or_default();
    let is_loaded = |entry: crate::pool::PoolEntry| entry.loaded().is_some();
    let was_loaded = name.is_empty() || call.state.pool().find(name).is_some_and(is_loaded);
    let mut prepared = prepare::chat(call, &chat).map_err(|error| origins.own(error))?;
    if let Some(context_length) = context_length {
        shorten(&mut prepared, context_length)?;
    }
    let load_time = (!was_loaded).then(|| call.waited.get());
    let keeper = fields.flag("store", true)?.then(|| Keeper {
        responses: Arc::clone(responses),
        owner: call.client.clone(),
        history,
        input,
    });
    Ok(prepared.shaped(|info| ChatShape::new(info, load_time, keeper)))
}

fn unknown_response(id: &str) -> ApiError {
    let shown: String = id.chars().take(100).collect();
    let message = format!(
        "'{shown}' is not kept here (any more): it was made with \"store\": false, by somebody else, or \
         too long ago"
    );
    let code = ErrorCode::PreviousResponseNotFound;
    ApiError::param(code, "previous_response_id", message)
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

/// A chat body, where its parts came from, and what the client said as items.
type Translated = (Map<String, Value>, Origins, Vec<Value>);

/// LM Studio's body in OpenAI's words, and its own messages as items that can be kept. Fields that it
/// does not name stay as they are.
fn chat_body(body: &Map<String, Value>, history: &[Arc<Turn>]) -> Result<Translated, ApiError> {
    let fields = Fields::new(body);
    check_ttl(&fields)?;
    if fields
        .array("integrations")?
        .is_some_and(|list| !list.is_empty())
    {
        let why = "servers that run tools are not built";
        return Err(ApiError::unsupported("integrations", why));
    }
    fields.integer("n", 1..=1)?; // one answer is all that this route has
    let mut chat = ChatBody::new(body, CONSUMED, FOREIGN, "input", &[])?;
    let system = fields.string("system_prompt")?;
    let mut input = Vec::new();
    if let Some(system) = system {
        input.push(json!({"role": "system", "content": system}));
    }
    input.push(json!({"role": "user", "content": input_text(&fields)?}));
    let mut messages = Messages::new(&mut chat);
    let (first, rest) = input.split_at(usize::from(system.is_some()));
    for item in first {
        messages.push("system_prompt", item)?;
    }
    for item in history.iter().flat_map(|turn| turn.items()) {
        let item = item.value();
        // What the model was told first holds until it is told something else.
        if system.is_none() || item["role"] != "system" {
            messages.push("previous_response_id", &item)?;
        }
    }
    for item in rest {
        messages.push("input", item)?;
    }
    if let Some(most) = fields.count("max_output_tokens", 1)? {
        chat.set("max_tokens", most, "max_output_tokens");
    }
    if let Some(reasoning) = fields.string("reasoning")? {
        reason(reasoning, &mut chat)?;
    }
    let (chat, origins) = chat.finish();
    Ok((chat, origins, input))
}

/// What templates read: `enable_thinking`, or `reasoning_effort`.
fn reason(reasoning: &str, chat: &mut ChatBody) -> Result<(), ApiError> {
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
        chat.set("reasoning_effort", reasoning, "reasoning");
    }
    let variables = chat.entry("chat_template_kwargs");
    if variables.is_null() {
        *variables = json!({});
    }
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
        chat_body(map, &[]).map(|(chat, ..)| Value::from(chat))
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
            (json!({"input": "x", "reasoning": "much"}), "reasoning"),
            (
                json!({"input": "x", "max_output_tokens": 0}),
                "max_output_tokens",
            ),
            (json!({"input": "x", "n": 2}), "n"),
            (json!({"input": "x", "messages": []}), "messages"),
            (json!({"input": "x", "tools": []}), "tools"),
            (json!({"input": "x", "ttl": -1}), "ttl"),
        ] {
            let error = translated(&body).expect_err(&body.to_string());
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
        let body = json!({"input": "x", "max_output_tokens": 5});
        let (_, origins, _) = chat_body(body.as_object().expect("one"), &[]).expect("valid");
        let own = |param: &str| origins.own(ApiError::invalid(param, "x")).param;
        assert_eq!(own("max_tokens").as_deref(), Some("max_output_tokens"));
        assert_eq!(own("messages").as_deref(), Some("input"));
    }
}
