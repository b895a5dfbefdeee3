//! Tests of the translation of a request.

use super::*;
use serde_json::json;

fn parse(body: &Value) -> Result<Asked, ApiError> {
    Asked::parse(body.as_object().expect("an object"), true)
}

fn with(extra: Value) -> Value {
    let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
    let given = extra.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(given);
    body
}

#[test]
fn a_request_becomes_a_chat_body() {
    let asked = parse(&with(json!({
        "model": "m", "system": [{"type": "text", "text": "be brief", "cache_control": {}}],
        "stop_sequences": ["a", "b"], "temperature": 0.5, "top_k": 7, "top_p": 0.9, "stream": true,
        "priority": 3, "slo_ms": 900, "loops": 2, "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
        "service_tier": "auto",
    })))
    .expect("valid");
    assert_eq!(
        Value::Object(asked.chat),
        json!({
            "max_tokens": 5, "model": "m", "temperature": 0.5, "top_k": 7, "top_p": 0.9,
            "stream": true, "priority": 3, "slo_ms": 900, "loops": 2, "stop": ["a", "b"],
            "chat_template_kwargs": {"enable_thinking": true}, "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
            "tools": [{"type": "function", "function": {
                "name": "f", "description": "d", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": false, "user": "u",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        })
    );
    assert_eq!(asked.stop_sequences, ["a", "b"]);
    assert_eq!(asked.thinking, Thinking::Shown);
}

#[test]
fn thinking_is_off_unless_asked_for() {
    let of = |extra: Value| {
        let asked = parse(&with(extra)).expect("valid");
        (asked.thinking, asked.chat[KWARGS].clone())
    };
    let off = json!({"enable_thinking": false});
    assert_eq!(of(json!({})), (Thinking::Hidden, off.clone()));
    assert_eq!(
        of(json!({"thinking": {"type": "disabled"}})),
        (Thinking::Hidden, off)
    );
    let adaptive = of(json!({"thinking": {"type": "adaptive", "display": "omitted"}}));
    assert_eq!(
        adaptive,
        (Thinking::Omitted, json!({"enable_thinking": true}))
    );
    let own = json!({"chat_template_kwargs": {"enable_thinking": true, "x": 1}});
    assert_eq!(of(own.clone()).1, own[KWARGS]);
    let mut remote = parse(&with(json!({}))).expect("valid");
    remote.leave_thinking_to_server();
    assert!(!remote.chat.contains_key(KWARGS));
    let mut asked = parse(&with(json!({"thinking": {"type": "adaptive"}}))).expect("valid");
    asked.leave_thinking_to_server();
    assert!(asked.chat.contains_key(KWARGS));
}

#[test]
fn the_other_choices_of_tools() {
    let of = |kind: &str| {
        let asked = parse(&with(json!({"tool_choice": {"type": kind}}))).expect("valid");
        assert!(!asked.chat.contains_key("parallel_tool_calls"));
        asked.chat["tool_choice"].clone()
    };
    assert_eq!(
        (of("auto"), of("any"), of("none")),
        ("auto".into(), "required".into(), "none".into())
    );
}

#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]);
    let asked = parse(&with(json!({"messages": messages}))).expect("valid");
    assert_eq!(asked.chat["continue_final_message"], true);
}

#[test]
fn faults_are_told_by_the_fields_of_this_api() {
    let tool = json!({"name": "f", "input_schema": {}});
    for (extra, param) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "x", "content": ""}]}),
            "messages[0].role",
        ),
        (json!({"system": 5}), "system"),
        (json!({"system": [{"type": "image"}]}), "system[0].type"),
        (json!({"stop": "x"}), "stop"),
        (json!({"n": 2}), "n"),
        (json!({"stop_sequences": "x"}), "stop_sequences"),
        (json!({"stop_sequences": [1]}), "stop_sequences[0]"),
        (json!({"thinking": {}}), "thinking.type"),
        (json!({"thinking": {"type": "x"}}), "thinking.type"),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 0}}),
            "thinking.budget_tokens",
        ),
        (
            json!({"output_config": {"effort": 1}}),
            "output_config.effort",
        ),
        (
            json!({"output_config": {"format": {"type": "x"}}}),
            "output_config.format.type",
        ),
        (
            json!({"tools": [tool, {"type": "bash_20250124", "name": "bash"}]}),
            "tools[1].type",
        ),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "x"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"metadata": {"user_id": 1}}), "metadata.user_id"),
        (json!({"container": "c"}), "container"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            "context_management.edits[0]",
        ),
    ] {
        let body = with(extra);
        let error = parse(&body).expect_err(&body.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
        assert_eq!(error.status(), 400, "{body}");
    }
    let no_limit = with(json!({"max_tokens": null}));
    assert!(Asked::parse(no_limit.as_object().expect("an object"), false).is_ok());
}

/// The faults that chat completions find.
#[test]
fn faults_of_the_translation_are_told_by_the_fields_of_this_api() {
    use crate::http::openai::chat::ChatRequest;
    let many: Vec<String> = (0..17).map(|number| number.to_string()).collect();
    for (extra, param) in [
        (json!({"temperature": 3}), "temperature"),
        (json!({"stop_sequences": many}), "stop_sequences"),
        (
            json!({"output_config": {"format": {"type": "json_schema"}}}),
            "output_config.format.schema",
        ),
    ] {
        let body = with(extra);
        let asked = parse(&body).expect("sound so far");
        let error = ChatRequest::parse(&asked.chat, Some(100)).expect_err(&body.to_string());
        let error = asked.origins.own(error);
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
        assert!(
            error.message.contains(&format!("'{param}")),
            "{}",
            error.message
        );
    }
}
