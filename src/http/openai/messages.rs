//! `messages` of a chat: checked, with roles mapped and contents flattened, ready for a template.
//!
//! Calls and results are held to OpenAI's rules: a result names a call before it, ids differ within a
//! turn, and only the assistant calls. A call without an id, as some local servers make them, may be
//! answered under any.
//!
//! Pure. `developer` becomes `system`, `function` becomes `tool`, text parts are joined to one text,
//! images and audio are refused. Calls of tools stay as OpenAI writes them; what a template wants in
//! their place is up to `tokenizer::template_traits`.

use super::fields::{Fields, kind_of, wrong_kind};
use super::tools::function_name;
use crate::http::errors::{ApiError, ErrorCode};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Reads the messages; at least one.
///
/// # Errors
/// Each fault names its place.
pub fn messages(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let Some(items) = fields.array("messages")? else {
        return Err(ApiError::param(
            ErrorCode::MissingRequiredParameter,
            "messages",
            "'messages' is missing; it is an array of {\"role\", \"content\"} objects",
        ));
    };
    if items.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "'messages' must hold at least one message",
        ));
    }
    let messages = items.iter().enumerate();
    let messages: Result<Vec<Value>, ApiError> =
        messages.map(|(index, item)| message(index, item)).collect();
    let messages = messages?;
    check_results(items, &messages)?;
    Ok(messages)
}

/// Results name calls before them, and the calls of one message have different ids. `given` are the
/// messages as the client wrote them: the older role `function` has no ids.
fn check_results(given: &[Value], messages: &[Value]) -> Result<(), ApiError> {
    let mut known = HashSet::new();
    let mut has_nameless = false;
    for (index, (given, message)) in given.iter().zip(messages).enumerate() {
        let calls = message.get("tool_calls").and_then(Value::as_array);
        let mut of_message = HashSet::new();
        for (call_idx, call) in calls.into_iter().flatten().enumerate() {
            let Some(id) = call.get("id").and_then(Value::as_str) else {
                has_nameless = true;
                continue;
            };
            if !of_message.insert(id) {
                let place = format!("messages[{index}].tool_calls[{call_idx}].id");
                let message = format!("'{place}' is the id of an earlier call of this message");
                return Err(ApiError::invalid(place, message));
            }
        }
        known.extend(of_message);
        let answered = message.get("tool_call_id").and_then(Value::as_str);
        let Some(id) = answered.filter(|_| given["role"] == "tool") else {
            continue;
        };
        if !known.contains(id) && !has_nameless {
            let place = format!("messages[{index}].tool_call_id");
            let message = format!(
                "'{place}' names no call before it: a tool message follows an assistant message \
                 whose 'tool_calls' hold its id"
            );
            return Err(ApiError::invalid(place, message));
        }
    }
    Ok(())
}

/// One message; fields that are not looked at stay as they are.
fn message(index: usize, item: &Value) -> Result<Value, ApiError> {
    let name = format!("messages[{index}]");
    let Some(map) = item.as_object() else {
        return Err(wrong_kind(&name, item, "an object"));
    };
    let role_name = format!("{name}.role");
    let role = match map.get("role") {
        Some(Value::String(role)) => role.as_str(),
        Some(other) => return Err(wrong_kind(&role_name, other, "a string")),
        None => return Err(missing(role_name)),
    };
    let role = match role {
        "developer" | "system" => "system",
        "tool" | "function" => "tool",
        "user" | "assistant" => role,
        other => {
            let message = format!(
                "'{role_name}' is '{other}'; known roles: developer, system, user, assistant, tool"
            );
            return Err(ApiError::invalid(role_name, message));
        }
    };
    let mut flat = map.clone();
    flat.insert("role".to_owned(), Value::from(role));
    let text = content(&name, map, role)?;
    flat.insert("content".to_owned(), Value::from(text));
    match role {
        "assistant" => assistant(&name, &mut flat)?,
        "tool" if map.get("role") != Some(&Value::from("function")) => {
            let place = format!("{name}.tool_call_id");
            match map.get("tool_call_id").filter(|id| !id.is_null()) {
                Some(Value::String(_)) => {}
                Some(other) => return Err(wrong_kind(&place, other, "a string")),
                None => return Err(missing(place)),
            }
        }
        _ => {}
    }
    let place = format!("{name}.tool_calls");
    match map.get("tool_calls").filter(|_| role != "assistant") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if calls.is_empty() => {
            flat.shift_remove("tool_calls");
        }
        Some(_) => {
            let message = format!("'{place}' belongs to messages of the assistant only");
            return Err(ApiError::invalid(place, message));
        }
    }
    Ok(Value::Object(flat))
}

fn missing(place: String) -> ApiError {
    let message = format!("'{place}' is missing");
    ApiError::param(ErrorCode::MissingRequiredParameter, place, message)
}

/// Calls and thoughts of an earlier answer.
fn assistant(name: &str, flat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let place = format!("{name}.tool_calls");
    match flat.shift_remove("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if calls.is_empty() => {}
        Some(Value::Array(calls)) => {
            let calls = calls.into_iter().enumerate();
            let calls: Result<Vec<Value>, ApiError> = calls
                .map(|(index, call)| past_call(&format!("{place}[{index}]"), call))
                .collect();
            flat.insert("tool_calls".to_owned(), Value::from(calls?));
        }
        Some(other) => return Err(wrong_kind(&place, &other, "an array")),
    }
    if flat
        .get("function_call")
        .is_some_and(|call| !call.is_null())
    {
        let place = format!("{name}.function_call");
        return Err(ApiError::unsupported(place, "use 'tool_calls'"));
    }
    // Some clients send thoughts back under the name that newer servers give them.
    if let Some(thoughts) = flat.shift_remove("reasoning") {
        flat.entry("reasoning_content").or_insert(thoughts);
    }
    let place = format!("{name}.reasoning_content");
    match flat.get("reasoning_content") {
        None | Some(Value::String(_)) => {}
        Some(Value::Null) => {
            flat.shift_remove("reasoning_content");
        }
        Some(other) => return Err(wrong_kind(&place, other, "a string")),
    }
    Ok(())
}

/// A call as OpenAI writes it, its arguments as JSON text.
fn past_call(place: &str, call: Value) -> Result<Value, ApiError> {
    let Value::Object(mut call) = call else {
        return Err(wrong_kind(place, &call, "an object"));
    };
    match call.get("type") {
        None | Some(Value::Null) => {}
        Some(Value::String(kind)) if kind == "function" => {}
        Some(_) => {
            let place = format!("{place}.type");
            let message = format!("'{place}' must be \"function\"");
            return Err(ApiError::invalid(place, message));
        }
    }
    call.insert("type".to_owned(), Value::from("function"));
    if let Some(other) = call.get("id").filter(|id| !id.is_string() && !id.is_null()) {
        return Err(wrong_kind(&format!("{place}.id"), other, "a string"));
    }
    let place = format!("{place}.function");
    let Some(function) = call.get_mut("function") else {
        return Err(missing(place));
    };
    let Some(function) = function.as_object_mut() else {
        return Err(wrong_kind(&place, function, "an object"));
    };
    function_name(function.get("name"), &format!("{place}.name"))?;
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".to_owned(),
        // What is no JSON the model wrote so, and answers pass it on: whoever sends it back, as agents
        // do with all that was said, is not locked out, and the model sees what it wrote.
        Some(Value::String(text)) => text.clone(),
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(other) => {
            let place = format!("{place}.arguments");
            return Err(wrong_kind(&place, other, "a string with JSON in it"));
        }
    };
    function.insert("arguments".to_owned(), json!(arguments));
    Ok(Value::Object(call))
}

/// Text of a message: a string, text parts joined by line breaks, or nothing.
fn content(message: &str, map: &Map<String, Value>, role: &str) -> Result<String, ApiError> {
    let name = format!("{message}.content");
    match map.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: Result<Vec<&str>, ApiError> = parts
                .iter()
                .enumerate()
                .map(|(index, part)| text_part(&format!("{name}[{index}]"), part))
                .collect();
            Ok(texts?.join("\n"))
        }
        Some(Value::Null) => Ok(String::new()),
        None if role == "assistant" => Ok(String::new()),
        None => {
            let message = format!("'{name}' is missing");
            Err(ApiError::param(
                ErrorCode::MissingRequiredParameter,
                name,
                message,
            ))
        }
        Some(other) => Err(wrong_kind(&name, other, "a string or an array of parts")),
    }
}

fn text_part<'a>(name: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    match part.get("type").and_then(Value::as_str) {
        Some("text") => match part.get("text") {
            Some(Value::String(text)) => Ok(text),
            other => Err(ApiError::invalid(
                format!("{name}.text"),
                format!(
                    "'{name}.text' must be a string, not {}",
                    other.map_or("missing", kind_of)
                ),
            )),
        },
        Some(kind) => Err(ApiError::invalid(
            name,
            format!("'{name}' has type '{kind}'; this model reads text parts only"),
        )),
        None => Err(ApiError::invalid(
            name,
            format!("'{name}' must be an object with a \"type\""),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(messages: Value) -> Result<Vec<Value>, ApiError> {
        let body = json!({"messages": messages});
        super::messages(&Fields::new(body.as_object().expect("an object")))
    }

    #[test]
    fn calls_results_and_thoughts_are_kept() {
        let call = json!({"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}});
        let found = parse(json!([
            {"role": "assistant", "content": null, "tool_calls": [call], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
            {"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": null},
            {"role": "function", "name": "f", "content": "ok"},
        ]))
        .expect("sound");
        let written = &found[0]["tool_calls"][0];
        assert_eq!(written["type"], "function");
        assert_eq!(written["function"]["arguments"], "{\"a\":1}");
        assert_eq!(
            (&found[0]["content"], &found[0]["reasoning_content"]),
            (&json!(""), &json!("hm"))
        );
        assert_eq!(found[1]["content"], "ok");
        assert_eq!(found[2], json!({"role": "assistant", "content": "x"}));
        assert_eq!(found[3]["role"], "tool");
    }

    #[test]
    fn ids_may_come_again_in_a_later_turn_and_calls_may_have_none() {
        let call = |id: Value| json!({"role": "assistant", "tool_calls": [{"id": id, "function": {"name": "f"}}]});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
        parse(json!([
            call(json!("c")),
            result("c"),
            call(json!("c")),
            result("c")
        ]))
        .expect("turns");
        parse(json!([call(Value::Null), result("any")])).expect("no id");
        let mut unsound = call(json!("c"));
        unsound["tool_calls"][0]["function"]["arguments"] = json!("{bad}");
        let found = parse(json!([unsound, result("c")])).expect("the model wrote it");
        assert_eq!(found[0]["tool_calls"][0]["function"]["arguments"], "{bad}");
        parse(json!([{"role": "user", "content": "x", "tool_calls": []}])).expect("none");
    }

    #[test]
    fn faults_of_calls_name_their_place() {
        let call =
            |call: Value| json!([{"role": "assistant", "content": null, "tool_calls": [call]}]);
        #[rustfmt::skip]
        let table = [
            (json!([{"role": "assistant", "tool_calls": 1}]), "messages[0].tool_calls"),
            (call(json!("f")), "messages[0].tool_calls[0]"),
            (call(json!({"type": "custom"})), "messages[0].tool_calls[0].type"),
            (call(json!({"id": 1, "function": {"name": "f"}})), "messages[0].tool_calls[0].id"),
            (call(json!({"id": "1"})), "messages[0].tool_calls[0].function"),
            (call(json!({"function": {"arguments": "{}"}})), "messages[0].tool_calls[0].function.name"),
            (call(json!({"function": {"name": "f", "arguments": 3}})), "messages[0].tool_calls[0].function.arguments"),
            (json!([{"role": "assistant", "content": "", "function_call": {"name": "f"}}]), "messages[0].function_call"),
            (json!([{"role": "assistant", "content": "", "reasoning_content": 3}]), "messages[0].reasoning_content"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
            (json!([{"role": "tool", "content": "x", "tool_call_id": 3}]), "messages[0].tool_call_id"),
            (json!([{"role": "tool", "content": "x", "tool_call_id": "c"}]), "messages[0].tool_call_id"),
            (json!([{"role": "user", "content": "x", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]), "messages[0].tool_calls"),
            (json!([{"role": "system", "content": "x", "tool_calls": 5}]), "messages[0].tool_calls"),
            (json!([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}, {"id": "c", "function": {"name": "g"}}]}]),
             "messages[0].tool_calls[1].id"),
            (json!([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}, {"role": "tool", "content": "x", "tool_call_id": "d"}]),
             "messages[1].tool_call_id"),
        ];
        for (messages, param) in table {
            let error = parse(messages.clone()).expect_err(&messages.to_string());
            assert_eq!(error.param.as_deref(), Some(param), "{messages}");
        }
    }
}
