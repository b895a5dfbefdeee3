//! The body of `POST /v1/responses`: checked, and translated into a chat body.
//!
//! Pure but for what it recalls from the store. Fields that this API and chat completions share, and
//! our own, go through as they stand; what only one of them has is translated or refused. `Echo` is
//! what the response object repeats of its request. What is not here: input items (`input`), what
//! chat completions check.

use super::input::{Messages, items, reference};
use super::kept::Responses;
use super::object::Echo;
use super::store::{Owner, Turn};
use crate::http::dialect::{ChatBody, Foreign, Origins, refuse_given};
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::openai::fields::{Fields, kind_of, wrong_kind};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A checked request.
#[derive(Debug)]
pub struct Asked {
    /// For `generation::prepare::chat`.
    pub chat: Map<String, Value>,
    /// For the faults that it finds.
    pub origins: Origins,
    /// For the response object.
    pub echo: Echo,
    /// What came before.
    pub history: Vec<Arc<Turn>>,
    /// The request's own items.
    pub input: Vec<Value>,
}

/// Fields of ours, or that are translated.
#[rustfmt::skip]
const CONSUMED: &[&str] = &[
    "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "text", "tools",
    "tool_choice", "reasoning", "truncation", "store", "previous_response_id", "conversation",
    "background", "include", "top_logprobs", "prompt", "service_tier", "stream_options",
    "context_management", "moderation", "prompt_cache_options", "prompt_cache_retention",
];

/// Fields of chat completions that this API has another word for, or none.
const FOREIGN: &[Foreign] = &[
    ("messages", "use 'input'"),
    ("max_tokens", "use 'max_output_tokens'"),
    ("max_completion_tokens", "use 'max_output_tokens'"),
    ("response_format", "use 'text.format'"),
    ("reasoning_effort", "use 'reasoning.effort'"),
    ("verbosity", "use 'text.verbosity'"),
    (
        "logprobs",
        "use 'include' with \"message.output_text.logprobs\", and 'top_logprobs'",
    ),
    ("n", "a response has one answer"),
    ("functions", "use 'tools'"),
    ("function_call", "use 'tool_choice'"),
    ("echo", "a response does not repeat its input"),
    ("continue_final_message", "use /v1/chat/completions"),
    ("add_generation_prompt", "use /v1/chat/completions"),
];

/// Parameters that are refused when given: nothing here does what they ask.
const ABSENT: &[Foreign] = &[
    (
        "conversation",
        "there are no conversation objects; use 'previous_response_id'",
    ),
    ("prompt", "there are no stored prompts; send 'input'"),
    ("context_management", "prompts are never cut or compacted"),
    ("moderation", "nothing is moderated"),
];

/// How a path inside `tools` differs from chat completions.
const TOOL_WORDS: &[(&str, &str)] = &[(".function", "")];

/// Log-probabilities of the answer's text.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Known values of `include`; all but the first are about items that are never made here.
#[rustfmt::skip]
const INCLUDABLE: &[&str] = &[
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
];
/// Known values of `service_tier`; all are served alike.
const TIERS: &[&str] = &["auto", "default", "flex", "scale", "priority"];
/// Of `text.verbosity`.
const VERBOSITIES: &[&str] = &["low", "medium", "high"];
/// Of `reasoning.effort`.
const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh"];
/// Most pairs of `metadata`, and their sizes in characters.
const METADATA: (usize, usize, usize) = (16, 64, 512);

impl Asked {
    /// Reads a body. `responses` is where `previous_response_id` and references are looked up.
    pub fn parse(
        body: &Map<String, Value>,
        responses: &Responses,
        owner: Owner<'_>,
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        refuse_given(body, ABSENT)?;
        refuse_background(&fields)?;
        let mut chat = ChatBody::new(body, CONSUMED, FOREIGN, "input", TOOL_WORDS)?;
        let mut echo = plain_echo(&fields)?;
        limit(&fields, &mut chat, &mut echo)?;
        logprobs(&fields, &mut chat, &mut echo)?;
        text_form(&fields, &mut chat, &mut echo)?;
        reasoning(&fields, &mut chat, &mut echo)?;
        echo.tools = tools(&fields, &mut chat)?;
        echo.tool_choice = tool_choice(&fields, &mut chat)?;
        let history = match &echo.previous_response_id {
            None => Vec::new(),
            Some(id) => responses
                .history(id, owner)
                .ok_or_else(|| unknown_previous(id))?,
        };
        if let Some(text) = &echo.instructions {
            chat.message(json!({"role": "system", "content": text}), "instructions");
        }
        let recall = |id: &str| responses.item(id, owner);
        let input = conversation(&fields, &mut chat, &history, recall)?;
        let (chat, origins) = chat.finish();
        Ok(Self {
            chat,
            origins,
            echo,
            history,
            input,
        })
    }
}

/// Puts what was said before and the input into the chat body; returns the request's own items,
/// references resolved.
fn conversation(
    fields: &Fields<'_>,
    chat: &mut ChatBody,
    history: &[Arc<Turn>],
    recall: impl Fn(&str) -> Option<Value>,
) -> Result<Vec<Value>, ApiError> {
    let mut input = match fields.get("input") {
        Some(input) => items(input)?,
        None if !history.is_empty() => Vec::new(),
        None => {
            let text = "'input' is missing; it is a string or an array of items";
            let code = ErrorCode::MissingRequiredParameter;
            return Err(ApiError::param(code, "input", text));
        }
    };
    let mut messages = Messages::new(chat);
    for item in history.iter().flat_map(|turn| turn.items()) {
        messages.push("previous_response_id", &item.value())?;
    }
    for (index, item) in input.iter_mut().enumerate() {
        let place = format!("input[{index}]");
        if let Some(id) = reference(&place, item)? {
            *item = recall(id).ok_or_else(|| unknown_item(&place, id))?;
        }
        messages.push(&place, item)?;
    }
    Ok(input)
}

fn shown(text: &str) -> String {
    text.chars().take(100).collect()
}

fn unknown_previous(id: &str) -> ApiError {
    let message = format!(
        "no response '{}' is kept: it never was, is too old, was pushed out by newer ones, or was \
         made with \"store\": false",
        shown(id)
    );
    let code = ErrorCode::PreviousResponseNotFound;
    ApiError::param(code, "previous_response_id", message)
}

fn unknown_item(place: &str, id: &str) -> ApiError {
    let place = format!("{place}.id");
    let message = format!("'{place}': no item '{}' is kept", shown(id));
    ApiError::invalid(place, message)
}

/// A response holds its connection until it is complete; nothing here runs without one.
fn refuse_background(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.flag("background", false)? {
        false => Ok(()),
        true => Err(ApiError::unsupported(
            "background",
            "responses are made while the client waits; use \"stream\": true",
        )),
    }
}

/// What needs no translation.
fn plain_echo(fields: &Fields<'_>) -> Result<Echo, ApiError> {
    if let Some(options) = fields.object("stream_options")? {
        if !fields.flag("stream", false)? {
            return Err(ApiError::invalid(
                "stream_options",
                "'stream_options' is only allowed with \"stream\": true",
            ));
        }
        // Nothing pads the events, asked or not; the flag is only checked.
        let flag = Fields::new(options).flag("include_obfuscation", false);
        flag.map_err(|error| inside("stream_options", error))?;
    }
    match fields.string("truncation")? {
        None | Some("disabled") => {}
        Some("auto") => {
            return Err(ApiError::unsupported(
                "truncation",
                "input is never cut; leave it out, or send \"disabled\"",
            ));
        }
        Some(_) => {
            let text = "'truncation' must be \"disabled\"";
            return Err(ApiError::invalid("truncation", text));
        }
    }
    let text = |name: &str| fields.string(name).map(|text| text.map(str::to_owned));
    one_of("service_tier", fields.string("service_tier")?, TIERS)?;
    let previous = text("previous_response_id")?;
    if previous.as_deref() == Some("") {
        let text = "'previous_response_id' is empty; leave it out to begin anew";
        return Err(ApiError::invalid("previous_response_id", text));
    }
    Ok(Echo {
        instructions: text("instructions")?,
        max_output_tokens: None,
        max_tool_calls: fields.count("max_tool_calls", 1)?,
        parallel_tool_calls: fields.flag("parallel_tool_calls", true)?,
        previous_response_id: previous,
        prompt_cache_key: text("prompt_cache_key")?,
        reasoning: json!({"effort": null, "summary": null}),
        safety_identifier: text("safety_identifier")?,
        store: fields.flag("store", true)?,
        temperature: number(fields, "temperature"),
        text: json!({"format": {"type": "text"}}),
        tool_choice: Value::from("auto"),
        tools: Vec::new(),
        top_logprobs: 0,
        top_p: number(fields, "top_p"),
        user: text("user")?,
        metadata: metadata(fields)?,
    })
}

/// A word that is given must be a known one.
fn one_of(place: &str, given: Option<&str>, known: &[&str]) -> Result<(), ApiError> {
    match given {
        Some(word) if !known.contains(&word) => {
            let text = format!(
                "'{place}' is '{}'; known: {}",
                shown(word),
                known.join(", ")
            );
            Err(ApiError::invalid(place, text))
        }
        _ => Ok(()),
    }
}

/// As it was given; chat completions check it. Both default to 1 there.
fn number(fields: &Fields<'_>, name: &str) -> Value {
    fields.get(name).cloned().unwrap_or_else(|| json!(1.0))
}

fn inside(field: &str, error: ApiError) -> ApiError {
    ApiError {
        param: error.param.map(|param| format!("{field}.{param}")),
        ..error
    }
}

fn metadata(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let Some(map) = fields.object("metadata")? else {
        return Ok(Map::new());
    };
    let (pairs_max, key_max, value_max) = METADATA;
    if map.len() > pairs_max {
        let text = format!("'metadata' holds {} pairs, at most {pairs_max}", map.len());
        return Err(ApiError::invalid("metadata", text));
    }
    for (key, value) in map {
        let place = format!("metadata.{}", shown(key));
        let Some(text) = value.as_str() else {
            return Err(wrong_kind(&place, value, "a string"));
        };
        if key.chars().count() > key_max || text.chars().count() > value_max {
            let text =
                format!("'{place}': a key has at most {key_max} characters, a value {value_max}");
            return Err(ApiError::invalid(place, text));
        }
    }
    Ok(map.clone())
}

fn limit(fields: &Fields<'_>, chat: &mut ChatBody, echo: &mut Echo) -> Result<(), ApiError> {
    echo.max_output_tokens = fields.count("max_output_tokens", 1)?;
    if let Some(most) = echo.max_output_tokens {
        chat.set("max_tokens", most, "max_output_tokens");
    }
    Ok(())
}

fn logprobs(fields: &Fields<'_>, chat: &mut ChatBody, echo: &mut Echo) -> Result<(), ApiError> {
    let mut wanted = false;
    for (index, item) in fields
        .array("include")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        let place = format!("include[{index}]");
        let Some(name) = item.as_str() else {
            return Err(wrong_kind(&place, item, "a string"));
        };
        if !INCLUDABLE.contains(&name) {
            let text = format!(
                "'{place}' is '{}'; known: {}",
                shown(name),
                INCLUDABLE.join(", ")
            );
            return Err(ApiError::invalid(place, text));
        }
        wanted |= name == LOGPROBS;
    }
    let top = fields.integer("top_logprobs", 0..=20)?.unwrap_or(0);
    echo.top_logprobs = top as u32;
    if wanted || top > 0 {
        chat.set("logprobs", true, "include");
        chat.set("top_logprobs", top, "top_logprobs");
    }
    Ok(())
}

/// `text`: the form of the answer.
fn text_form(fields: &Fields<'_>, chat: &mut ChatBody, echo: &mut Echo) -> Result<(), ApiError> {
    let Some(text) = fields.object("text")? else {
        return Ok(());
    };
    let text = Fields::new(text);
    if let Some(verbosity) = text
        .string("verbosity")
        .map_err(|error| inside("text", error))?
    {
        one_of("text.verbosity", Some(verbosity), VERBOSITIES)?;
        chat.set("verbosity", verbosity, "text.verbosity");
        echo.text["verbosity"] = Value::from(verbosity);
    }
    let Some(format) = text
        .object("format")
        .map_err(|error| inside("text", error))?
    else {
        return Ok(());
    };
    echo.text["format"] = Value::Object(format.clone());
    let kind = Fields::new(format).string("type");
    let kind = kind.map_err(|error| inside("text.format", error))?;
    let form = match kind {
        Some("json_schema") => {
            let mut schema = format.clone();
            schema.shift_remove("type");
            json!({"type": "json_schema", "json_schema": schema})
        }
        _ => Value::Object(format.clone()),
    };
    chat.set("response_format", form, "text.format");
    chat.rename("response_format.json_schema", "text.format");
    Ok(())
}

fn reasoning(fields: &Fields<'_>, chat: &mut ChatBody, echo: &mut Echo) -> Result<(), ApiError> {
    let Some(reasoning) = fields.object("reasoning")? else {
        return Ok(());
    };
    let reasoning = Fields::new(reasoning);
    let text = |name: &str| {
        reasoning
            .string(name)
            .map_err(|error| inside("reasoning", error))
    };
    if let Some(effort) = text("effort")? {
        one_of("reasoning.effort", Some(effort), EFFORTS)?;
        chat.set("reasoning_effort", effort, "reasoning.effort");
        echo.reasoning["effort"] = Value::from(effort);
    }
    // Reasoning is told whole, so there is nothing to summarize.
    let summary = text("summary")?.or(text("generate_summary")?);
    echo.reasoning["summary"] = summary.map_or(Value::Null, Value::from);
    Ok(())
}

/// Tools are flat here. Returns them as the response repeats them, with what was applied.
fn tools(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<Vec<Value>, ApiError> {
    let (mut nested, mut applied) = (Vec::new(), Vec::new());
    for (index, tool) in fields
        .array("tools")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        let place = format!("tools[{index}]");
        let Some(map) = tool.as_object() else {
            return Err(wrong_kind(&place, tool, "an object"));
        };
        match map.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(kind) => return Err(hosted(&place, kind)),
            None => {
                let place = format!("{place}.type");
                let kind = map.get("type").map_or("missing", kind_of);
                let text = format!("'{place}' must be \"function\", not {kind}");
                return Err(ApiError::invalid(place, text));
            }
        }
        let mut function = map.clone();
        function.shift_remove("type");
        nested.push(json!({"type": "function", "function": function}));
        let mut shown = json!({"type": "function", "name": null, "description": null,
                               "parameters": null, "strict": false});
        for (name, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            shown[name] = value.clone();
        }
        applied.push(shown);
    }
    if !nested.is_empty() {
        chat.set("tools", nested, "tools");
    }
    Ok(applied)
}

fn hosted(place: &str, kind: &str) -> ApiError {
    let place = format!("{place}.type");
    let message = format!(
        "'{place}' is '{}': this server runs no tools of that type; only \"function\" is supported",
        shown(kind)
    );
    ApiError::param(ErrorCode::UnsupportedParameter, place, message)
}

/// Named functions are flat here.
fn tool_choice(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<Value, ApiError> {
    let choice = match fields.get("tool_choice") {
        None => return Ok(Value::from("auto")),
        Some(choice) => choice,
    };
    let nested = match choice.get("type").and_then(Value::as_str) {
        None => choice.clone(),
        Some("function") => json!({"type": "function", "function": {"name": choice["name"]}}),
        Some("allowed_tools") => {
            let names = choice["tools"].as_array().map(Vec::as_slice);
            let nested: Vec<Value> = names
                .unwrap_or_default()
                .iter()
                .map(|tool| json!({"type": tool["type"], "function": {"name": tool["name"]}}))
                .collect();
            let allowed = json!({"mode": choice["mode"], "tools": nested});
            json!({"type": "allowed_tools", "allowed_tools": allowed})
        }
        Some(kind) => return Err(hosted("tool_choice", kind)),
    };
    chat.set("tool_choice", nested, "tool_choice");
    chat.rename("tool_choice.function", "tool_choice");
    chat.rename("tool_choice.allowed_tools", "tool_choice");
    Ok(choice.clone())
}

#[cfg(test)]
#[path = "asked_tests.rs"]
mod tests;
