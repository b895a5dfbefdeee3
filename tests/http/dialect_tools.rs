//! Tools through the dialects: called because a grammar says so, answered by the id of the call.

use crate::anthropic::create as message;
use crate::real_engine::serve_tiny;
use crate::responses::{check_declared, create, stream};
use crate::shared::{named_events, with};
use crate::tools::{HERMES, serve};
use serde_json::{Value, json};
use tinyloop::config::{EngineConfig, ExecutorConfig};

const MESSAGES: &str = "/v1/messages";

#[test]
fn a_response_calls_tools_and_is_answered() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok"],
                        "properties": {"ok": {"type": "boolean"}}});
    let tools = json!([{"type": "function", "name": "look", "parameters": schema}]);
    let base = json!({"model": "tiny", "tools": tools, "seed": 3, "max_output_tokens": 120,
                      "parallel_tool_calls": false});
    for choice in [
        json!("required"),
        json!({"type": "function", "name": "look"}),
    ] {
        let asked = with(base.clone(), &json!({"tool_choice": choice}));
        let whole = create(&mut client, &asked).json();
        let item = &whole["output"][0];
        assert_eq!(whole["status"], "completed", "{whole}");
        assert_eq!(
            (&item["type"], &item["name"]),
            (&json!("function_call"), &json!("look"))
        );
        let arguments = item["arguments"].as_str().expect("JSON text");
        let parsed: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(parsed["ok"].is_boolean(), "{arguments}");
        let events = stream(&mut client, &asked);
        check_declared(&mut client, "post", "/v1/responses", &events);
        let deltas = events
            .iter()
            .filter(|event| event["type"] == "response.function_call_arguments.delta");
        let joined: String = deltas
            .map(|event| event["delta"].as_str().expect("text"))
            .collect();
        assert_eq!(joined, arguments);

        // The result goes back by the id of the call, over the kept response.
        let result = json!([{"type": "function_call_output", "call_id": item["call_id"],
                             "output": "sunny"}]);
        let next = json!({"model": "tiny", "previous_response_id": whole["id"], "input": result,
                          "tools": tools, "tool_choice": "none"});
        let answer = create(&mut client, &next);
        assert_eq!(answer.status, 200, "{}", answer.json());
        let unknown = json!([{"type": "function_call_output", "call_id": "no", "output": ""}]);
        let lost = create(&mut client, &with(next, &json!({"input": unknown})));
        assert_eq!(lost.json()["error"]["param"], "input[0].call_id");
    }
    let bad = json!({"tools": [{"type": "function", "name": "look", "parameters": {"type": "thing"}}],
                     "model": "tiny", "tool_choice": "required"});
    let refused = create(&mut client, &bad).json();
    assert_eq!(
        refused["error"]["param"], "tools[0].parameters",
        "{refused}"
    );
}

#[test]
fn a_message_calls_tools_and_is_answered() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok"],
                        "properties": {"ok": {"type": "boolean"}}});
    let tools = json!([{"name": "look", "input_schema": schema}]);
    let base = json!({"model": "tiny", "tools": tools, "seed": 3, "max_tokens": 120});
    let choices = [
        json!({"type": "any"}),
        json!({"type": "tool", "name": "look"}),
    ];
    for mut choice in choices {
        choice["disable_parallel_tool_use"] = true.into();
        let asked = with(base.clone(), &json!({"tool_choice": choice}));
        let whole = message(&mut client, &asked).json();
        assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
        let block = &whole["content"][0];
        assert_eq!(
            (&block["type"], &block["name"]),
            (&json!("tool_use"), &json!("look"))
        );
        assert!(block["input"]["ok"].is_boolean(), "{whole}");
        let streamed = message(&mut client, &with(asked, &json!({"stream": true})));
        let events = named_events(&streamed);
        check_declared(&mut client, "post", MESSAGES, &events);
        let joined: String = events
            .iter()
            .filter_map(|event| event["delta"]["partial_json"].as_str())
            .collect();
        let parsed: Value = serde_json::from_str(&joined).expect("JSON");
        assert_eq!(parsed, block["input"]);
        assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
        let messages = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}]},
        ]);
        let answer = json!({"messages": messages, "tools": tools, "tool_choice": {"type": "none"}});
        let answer = message(&mut client, &with(json!({"model": "tiny"}), &answer));
        assert_eq!(answer.status, 200, "{}", answer.json());
    }
    let bad = json!({"tools": [{"name": "look", "input_schema": {"type": "thing"}}],
                     "model": "tiny", "tool_choice": {"type": "any"}});
    let refused = message(&mut client, &bad).json();
    assert_eq!(
        refused["error"]["param"], "tools[0].input_schema",
        "{refused}"
    );
}

#[test]
fn thoughts_text_and_calls_are_items_and_blocks_of_their_own() {
    let text = "<think>hm</think>I look.<tool_call>{\"name\": \"look\", \"arguments\": {\"a\": 1}}\
                </tool_call>";
    let server = serve(&format!("{HERMES}{{# <think></think> #}}"), text);
    let mut client = server.client();
    let tools = json!([{"type": "function", "name": "look", "parameters": {"type": "object"}}]);
    let asked = json!({"model": "m", "tools": tools, "max_output_tokens": 200});
    let whole = create(&mut client, &asked).json();
    let kinds: Vec<&Value> = (0..3)
        .map(|index| &whole["output"][index]["type"])
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"], "{whole}");
    assert_eq!(whole["output"][0]["content"][0]["text"], "hm");
    assert_eq!(whole["output"][1]["content"][0]["text"], "I look.");
    assert!(
        whole["usage"]["output_tokens_details"]["reasoning_tokens"] != 0,
        "{whole}"
    );
    let events = stream(&mut client, &asked);
    check_declared(&mut client, "post", "/v1/responses", &events);
    let end = &events.last().expect("an end")["response"];
    assert_eq!(end["output"].as_array().expect("a list").len(), 3);

    // All of it goes back as input, by hand or by name.
    let mut input = vec![json!({"role": "user", "content": "hi"})];
    input.extend(whole["output"].as_array().expect("a list").clone());
    let id = &whole["output"][2]["call_id"];
    input.push(json!({"type": "function_call_output", "call_id": id, "output": "sun"}));
    let by_hand = create(&mut client, &with(asked.clone(), &json!({"input": input}))).json();
    let named = json!({"input": input[4..], "previous_response_id": whole["id"]});
    let by_name = create(&mut client, &with(asked, &named)).json();
    let count = |response: &Value| response["usage"]["input_tokens"].clone();
    assert!(
        count(&by_hand).is_u64() && count(&by_hand) == count(&by_name),
        "{by_hand}"
    );

    let tools = json!([{"name": "look", "input_schema": {"type": "object"}}]);
    let base = json!({"model": "m", "tools": tools, "max_tokens": 200});
    let shown = with(
        base.clone(),
        &json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    );
    for (asked, expected) in [
        (shown, &["thinking", "text", "tool_use"][..]),
        (base, &["text", "tool_use"]),
    ] {
        let whole = message(&mut client, &asked).json();
        let blocks = whole["content"].as_array().expect("a list");
        let kinds: Vec<&Value> = blocks.iter().map(|block| &block["type"]).collect();
        assert_eq!(kinds, expected, "{whole}");
        assert_eq!(blocks.last().expect("a call")["input"], json!({"a": 1}));
        assert_eq!(whole["stop_reason"], "tool_use");
        let events = named_events(&message(
            &mut client,
            &with(asked, &json!({"stream": true})),
        ));
        let starts = events
            .iter()
            .filter(|event| event["type"] == "content_block_start");
        let kinds: Vec<&Value> = starts
            .map(|event| &event["content_block"]["type"])
            .collect();
        assert_eq!(kinds, expected);
        let usage = &events[events.len() - 2]["usage"];
        assert_eq!(usage["output_tokens"], whole["usage"]["output_tokens"]);
    }
}
