//! Tests of the translation of a request.

use super::*;
use crate::http::responses::store::{Kept, Limits};
use serde_json::json;
use std::time::Duration;

fn empty() -> Responses {
    Responses::new(Limits {
        responses_max: 10,
        bytes_max: 1 << 20,
        ttl: Duration::from_secs(60),
    })
}

fn parse(body: &Value) -> Result<Asked, ApiError> {
    Asked::parse(body.as_object().expect("an object"), &empty(), None)
}

#[test]
fn a_request_becomes_a_chat_body() {
    let asked = parse(&json!({
        "model": "m", "input": "hi", "instructions": "be brief", "max_output_tokens": 20,
        "temperature": 0.5, "top_k": 7, "priority": 3, "slo_ms": 900, "loops": 2,
        "cache_salt": "s", "allow_remote": true, "stream": true, "metadata": {"a": "b"},
        "reasoning": {"effort": "low", "summary": "auto"}, "store": false, "user": "u",
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "truncation": "disabled",
        "text": {"verbosity": "low", "format": {
            "type": "json_schema", "name": "n", "strict": true, "schema": {"type": "object"}}},
        "stream_options": {"include_obfuscation": false}, "background": false,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false,
    }))
    .expect("valid");
    assert_eq!(
        Value::Object(asked.chat),
        json!({
            "model": "m", "temperature": 0.5, "top_k": 7, "priority": 3, "slo_ms": 900, "loops": 2,
            "cache_salt": "s", "allow_remote": true, "stream": true, "user": "u",
            "parallel_tool_calls": false, "max_tokens": 20, "logprobs": true, "top_logprobs": 2,
            "verbosity": "low", "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {
                "name": "n", "strict": true, "schema": {"type": "object"}}},
            "tools": [{"type": "function", "function": {
                "name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "messages": [{"role": "system", "content": "be brief"},
                         {"role": "user", "content": "hi"}],
        })
    );
    let echo = asked.echo;
    assert_eq!(echo.text["format"]["name"], "n");
    assert_eq!(echo.tools[0]["strict"], false, "what is applied is told");
    assert_eq!(echo.tool_choice, json!({"type": "function", "name": "f"}));
    assert!(!echo.store && !echo.parallel_tool_calls);
    assert_eq!(echo.metadata["a"], "b");
    assert_eq!(asked.input, [json!({"role": "user", "content": "hi"})]);
}

#[test]
fn a_response_goes_on_where_another_ended_without_its_instructions() {
    let responses = empty();
    let item = |role: &str, text: &str| json!({"id": text, "role": role, "content": text});
    responses.keep(Kept {
        id: "resp_1".to_owned(),
        owner: Some("alice".into()),
        json: Arc::from(*b"{}"),
        history: Vec::new(),
        input: responses.turn(&[item("user", "one")], Some("alice")),
        output: responses.turn(&[item("assistant", "two")], Some("alice")),
    });
    let body = json!({"input": [{"type": "item_reference", "id": "one"}, item("user", "three")],
                      "previous_response_id": "resp_1", "instructions": "new"});
    let body = body.as_object().expect("an object");
    let asked = Asked::parse(body, &responses, Some("alice")).expect("hers");
    let texts: Vec<&Value> = asked.chat["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|message| &message["content"])
        .collect();
    assert_eq!(texts, ["new", "one", "two", "one", "three"]);
    assert_eq!((asked.history.len(), asked.input.len()), (2, 2));
    let error = Asked::parse(body, &responses, None).expect_err("not theirs");
    assert_eq!(error.code, ErrorCode::PreviousResponseNotFound);
    assert_eq!(error.param.as_deref(), Some("previous_response_id"));
}

#[test]
fn faults_are_told_by_the_fields_of_this_api() {
    let tool = json!({"type": "function", "name": "f"});
    for (extra, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            "input[0].id",
        ),
        (json!({"messages": []}), "messages"),
        (json!({"max_tokens": 5}), "max_tokens"),
        (json!({"n": 2}), "n"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (
            json!({"previous_response_id": "resp_x"}),
            "previous_response_id",
        ),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"truncation": "x"}), "truncation"),
        (json!({"include": ["x"]}), "include[0]"),
        (json!({"include": [1]}), "include[0]"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"metadata": {"a": 1}}), "metadata.a"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata.a"),
        (json!({"text": {"format": "x"}}), "text.format"),
        (json!({"text": {"format": {"type": 1}}}), "text.format.type"),
        (json!({"reasoning": {"effort": 1}}), "reasoning.effort"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning.effort"),
        (json!({"text": {"verbosity": "loud"}}), "text.verbosity"),
        (json!({"service_tier": "gold"}), "service_tier"),
        (json!({"previous_response_id": ""}), "previous_response_id"),
        (json!({"stream_options": {}}), "stream_options"),
        (
            json!({"tools": [tool, {"type": "web_search"}]}),
            "tools[1].type",
        ),
        (json!({"tools": [{"name": "f"}]}), "tools[0].type"),
        (json!({"tools": ["f"]}), "tools[0]"),
        (
            json!({"tool_choice": {"type": "file_search"}}),
            "tool_choice.type",
        ),
    ] {
        let mut body = json!({"model": "m", "input": "hi"});
        let given = extra.as_object().expect("an object").clone();
        body.as_object_mut().expect("an object").extend(given);
        let error = parse(&body).expect_err(&body.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
        assert_eq!(error.status(), 400, "{body}");
    }
    let hosted = json!({"input": "x", "tools": [{"type": "web_search_preview"}]});
    let error = parse(&hosted).expect_err("nobody searches");
    assert!(
        error.message.contains("'web_search_preview'"),
        "{}",
        error.message
    );
}

/// The faults that chat completions find.
#[test]
fn faults_of_the_translation_are_told_by_the_fields_of_this_api() {
    use crate::http::openai::chat::ChatRequest;
    let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]);
    for (body, param) in [
        (json!({"input": []}), "input"),
        (json!({"input": "x", "temperature": 3}), "temperature"),
        (
            json!({"input": "x", "text": {"format": {"type": "x"}}}),
            "text.format.type",
        ),
        (
            json!({"input": "x", "text": {"format": {"type": "json_schema"}}}),
            "text.format.schema",
        ),
        (
            json!({"input": image, "instructions": "i"}),
            "input[0].content[0]",
        ),
    ] {
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

#[test]
fn forms_without_a_schema_pass_through() {
    let form = |format: Value| {
        let asked = parse(&json!({"input": "x", "text": {"format": format}})).expect("valid");
        asked.chat["response_format"].clone()
    };
    assert_eq!(form(json!({"type": "text"})), json!({"type": "text"}));
    assert_eq!(
        form(json!({"type": "json_object"})),
        json!({"type": "json_object"})
    );
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "f"}]});
    let asked = parse(&json!({"input": "x", "tool_choice": allowed})).expect("valid");
    assert_eq!(
        asked.chat["tool_choice"],
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}]}})
    );
    let required = parse(&json!({"input": "x", "tool_choice": "required"})).expect("valid");
    assert_eq!(required.chat["tool_choice"], "required");
}
