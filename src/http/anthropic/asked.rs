//! The body of `POST /v1/messages`: checked, and translated into a chat body.
//!
//! Pure. Sampling fields, scheduling and depth go through as they stand; what only one of the two
//! APIs has is translated or refused. What is not here: content blocks (`blocks`), what chat
//! completions check.

use super::blocks::{Turns, required_text};
use crate::http::dialect::{ChatBody, Foreign, Origins};
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::openai::fields::{Fields, wrong_kind};
use serde_json::{Map, Value, json};

/// A checked request.
#[derive(Debug)]
pub struct Asked {
    /// For `generation::prepare::chat`.
    pub chat: Map<String, Value>,
    /// For the faults that it finds.
    pub origins: Origins,
    /// By their numbers.
    pub stop_sequences: Vec<String>,
    /// What the client wants to see of what the model thinks.
    pub thinking: Thinking,
}

/// What is shown of what a model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// Nothing, not even that it did: nobody asked for it, and such clients take the first block for
    /// the answer.
    Hidden,
    /// That it did.
    Omitted,
    /// All of it.
    Shown,
}

/// Fields of this API, and those of its hosts that say nothing about the answer.
#[rustfmt::skip]
const CONSUMED: &[&str] = &[
    "messages", "system", "stop_sequences", "tools", "tool_choice", "metadata", "thinking",
    "output_config", "container", "mcp_servers", "context_management", "service_tier",
    "inference_geo", "speed", "cache_control", "diagnostics", "user_profile_id", "workspace_id",
    "anthropic_version", "anthropic_beta", "betas", "user",
];

/// Fields of chat completions that this API has another word for, or none.
const FOREIGN: &[Foreign] = &[
    ("max_completion_tokens", "use 'max_tokens'"),
    ("stop", "use 'stop_sequences'"),
    ("response_format", "use 'output_config.format'"),
    ("reasoning_effort", "use 'output_config.effort'"),
    ("logprobs", "a message tells no log-probabilities"),
    ("top_logprobs", "a message tells no log-probabilities"),
    ("n", "a request makes one message"),
    ("functions", "use 'tools'"),
    ("function_call", "use 'tool_choice'"),
    (
        "parallel_tool_calls",
        "use 'tool_choice.disable_parallel_tool_use'",
    ),
    ("stream_options", "usage is always told"),
    ("echo", "a message does not repeat its prompt"),
    (
        "continue_final_message",
        "a last message of the assistant is always continued",
    ),
    ("add_generation_prompt", "use /v1/chat/completions"),
];

/// How a path inside `tools` differs from chat completions.
const TOOL_WORDS: &[(&str, &str)] = &[(".function.parameters", ".input_schema"), (".function", "")];

impl Asked {
    /// Reads a body. `for_answer`: it must say how long the answer may be; counting its tokens does not
    /// need that.
    pub fn parse(body: &Map<String, Value>, for_answer: bool) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        refuse_absent(&fields)?;
        let mut chat = ChatBody::new(body, CONSUMED, FOREIGN, "messages", TOOL_WORDS)?;
        if fields.count("max_tokens", 1)?.is_none() && for_answer {
            return Err(missing("max_tokens", "it is the most tokens of the answer"));
        }
        let stop_sequences = stop_sequences(&fields, &mut chat)?;
        let thinking = thinking(&fields, &mut chat)?;
        output_config(&fields, &mut chat)?;
        tools(&fields, &mut chat)?;
        tool_choice(&fields, &mut chat)?;
        if let Some(metadata) = fields.object("metadata")? {
            let user = Fields::new(metadata).string("user_id");
            if let Some(user) = user.map_err(|error| inside("metadata", error))? {
                chat.set("user", user, "metadata.user_id");
            }
        }
        let is_begun = messages(&fields, &mut chat)?;
        if is_begun {
            chat.set("continue_final_message", true, "messages");
        }
        let (chat, origins) = chat.finish();
        Ok(Self {
            chat,
            origins,
            stop_sequences,
            thinking,
        })
    }

    /// Takes back what was set because nobody asked for thinking: the model runs on another server,
    /// which may not know that word.
    pub fn leave_thinking_to_server(&mut self) {
        if self.thinking == Thinking::Hidden
            && let Some(Value::Object(extra)) = self.chat.get_mut(KWARGS)
            && extra.len() == 1
        {
            self.chat.shift_remove(KWARGS);
        }
    }
}

const KWARGS: &str = "chat_template_kwargs";
const ENABLE_THINKING: &str = "enable_thinking";

fn missing(field: &str, what: &str) -> ApiError {
    let message = format!("'{field}' is missing; {what}");
    ApiError::param(ErrorCode::MissingRequiredParameter, field, message)
}

fn inside(field: &str, error: ApiError) -> ApiError {
    ApiError {
        param: error.param.map(|param| format!("{field}.{param}")),
        ..error
    }
}

fn shown(text: &str) -> String {
    text.chars().take(100).collect()
}

fn refuse_absent(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.get("container").is_some() {
        return Err(ApiError::unsupported(
            "container",
            "there are no containers",
        ));
    }
    let servers = fields.array("mcp_servers")?.unwrap_or_default();
    if !servers.is_empty() {
        let why = "tools are called by the client, not by this server";
        return Err(ApiError::unsupported("mcp_servers", why));
    }
    let Some(management) = fields.object("context_management")? else {
        return Ok(());
    };
    let edits = Fields::new(management).array("edits");
    let edits = edits.map_err(|error| inside("context_management", error))?;
    for (index, edit) in edits.unwrap_or_default().iter().enumerate() {
        let kind = edit["type"].as_str().unwrap_or_default();
        // Templates leave old thinking out by themselves, where the model wants that.
        if !kind.starts_with("clear_thinking") {
            let place = format!("context_management.edits[{index}]");
            return Err(ApiError::unsupported(place, "prompts are never cut"));
        }
    }
    Ok(())
}

fn messages(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<bool, ApiError> {
    let Some(messages) = fields.array("messages")? else {
        return Err(missing(
            "messages",
            "it is an array of {\"role\", \"content\"} objects",
        ));
    };
    let model = fields.string("model")?.unwrap_or("default");
    let mut turns = Turns::new(chat, model);
    if let Some(system) = fields.get("system") {
        turns.system(system)?;
    }
    if messages.is_empty() {
        let text = "'messages' must hold at least one message";
        return Err(ApiError::invalid("messages", text));
    }
    for (index, message) in messages.iter().enumerate() {
        turns.push(&format!("messages[{index}]"), message)?;
    }
    Ok(turns.is_begun())
}

fn stop_sequences(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<Vec<String>, ApiError> {
    let mut sequences = Vec::new();
    let given = fields.array("stop_sequences")?.unwrap_or_default();
    for (index, item) in given.iter().enumerate() {
        match item.as_str() {
            Some(text) => sequences.push(text.to_owned()),
            None => {
                return Err(wrong_kind(
                    &format!("stop_sequences[{index}]"),
                    item,
                    "a string",
                ));
            }
        }
    }
    if !sequences.is_empty() {
        chat.set("stop", sequences.clone(), "stop_sequences");
    }
    Ok(sequences)
}

/// Models that may think or not are told by their template's `enable_thinking`; without the field a
/// request wants none, as this API has it.
fn thinking(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<Thinking, ApiError> {
    let (wanted, thinking) = match fields.object("thinking")? {
        None => (false, Thinking::Hidden),
        Some(config) => {
            let kind = required_text("thinking", config, "type")?;
            let config = Fields::new(config);
            // How much a model thinks is not bounded apart from its answer; the number is only checked.
            let budget = config.count("budget_tokens", 1);
            budget.map_err(|error| inside("thinking", error))?;
            let display = config.string("display");
            let is_omitted = display.map_err(|error| inside("thinking", error))? == Some("omitted");
            match (kind, is_omitted) {
                ("disabled", _) => (false, Thinking::Hidden),
                ("enabled" | "adaptive" | "between_tools", true) => (true, Thinking::Omitted),
                ("enabled" | "adaptive" | "between_tools", false) => (true, Thinking::Shown),
                (other, _) => {
                    let text = format!(
                        "'thinking.type' is '{}'; it must be enabled, adaptive or disabled",
                        shown(other)
                    );
                    return Err(ApiError::invalid("thinking.type", text));
                }
            }
        }
    };
    let extra = chat.entry(KWARGS);
    if extra.is_null() {
        *extra = json!({});
    }
    if let Some(extra) = extra.as_object_mut() {
        let own = extra.entry(ENABLE_THINKING); // the client's own word for the template wins
        own.or_insert(Value::Bool(wanted));
    }
    Ok(thinking)
}

fn output_config(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(config) = fields.object("output_config")? else {
        return Ok(());
    };
    let config = Fields::new(config);
    let effort = config.string("effort");
    if let Some(effort) = effort.map_err(|error| inside("output_config", error))? {
        chat.set("reasoning_effort", effort, "output_config.effort");
    }
    let format = config.object("format");
    let Some(format) = format.map_err(|error| inside("output_config", error))? else {
        return Ok(());
    };
    match required_text("output_config.format", format, "type")? {
        "json_schema" => {
            let mut schema = format.clone();
            schema.shift_remove("type");
            let form = json!({"type": "json_schema", "json_schema": schema});
            chat.set("response_format", form, "output_config.format");
            chat.rename("response_format.json_schema", "output_config.format");
            Ok(())
        }
        other => {
            let place = "output_config.format.type";
            let text = format!("'{place}' is '{}'; it must be json_schema", shown(other));
            Err(ApiError::invalid(place, text))
        }
    }
}

fn tools(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let mut nested = Vec::new();
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
        if let Some(kind) = map.get("type").filter(|kind| !kind.is_null())
            && kind != "custom"
        {
            let place = format!("{place}.type");
            let message = format!(
                "'{place}' is {}: this server runs no tools of that type; describe yours with \
                 \"name\" and \"input_schema\"",
                shown(&kind.to_string())
            );
            return Err(ApiError::param(
                ErrorCode::UnsupportedParameter,
                place,
                message,
            ));
        }
        let mut function = Map::new();
        for (own, name) in [
            ("name", "name"),
            ("description", "description"),
            ("input_schema", "parameters"),
            ("strict", "strict"),
        ] {
            if let Some(value) = map.get(own).filter(|value| !value.is_null()) {
                function.insert(name.to_owned(), value.clone());
            }
        }
        if !function.contains_key("parameters") {
            let place = format!("{place}.input_schema");
            let message = format!("'{place}' is missing");
            let code = ErrorCode::MissingRequiredParameter;
            return Err(ApiError::param(code, place, message));
        }
        nested.push(json!({"type": "function", "function": function}));
    }
    if !nested.is_empty() {
        chat.set("tools", nested, "tools");
    }
    Ok(())
}

fn tool_choice(fields: &Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(choice) = fields.object("tool_choice")? else {
        return Ok(());
    };
    let nested = match required_text("tool_choice", choice, "type")? {
        "auto" => Value::from("auto"),
        "any" => Value::from("required"),
        "none" => Value::from("none"),
        "tool" => {
            let name = required_text("tool_choice", choice, "name")?;
            json!({"type": "function", "function": {"name": name}})
        }
        other => {
            let text = format!(
                "'tool_choice.type' is '{}'; it must be auto, any, tool or none",
                shown(other)
            );
            return Err(ApiError::invalid("tool_choice.type", text));
        }
    };
    chat.set("tool_choice", nested, "tool_choice");
    chat.rename("tool_choice.function", "tool_choice");
    let one = Fields::new(choice).flag("disable_parallel_tool_use", false);
    if one.map_err(|error| inside("tool_choice", error))? {
        let origin = "tool_choice.disable_parallel_tool_use";
        chat.set("parallel_tool_calls", false, origin);
    }
    Ok(())
}

#[cfg(test)]
#[path = "asked_tests.rs"]
mod tests;
