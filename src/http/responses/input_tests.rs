//! Tests of input items.

use super::*;
use serde_json::json;

fn messages(items: &Value) -> Result<Value, ApiError> {
    let mut chat = ChatBody::new(&Map::new(), &[], &[], "input", &[]).expect("nothing foreign");
    let mut messages = Messages::new(&mut chat);
    for (index, item) in items.as_array().expect("a list").iter().enumerate() {
        messages.push(&format!("input[{index}]"), item)?;
    }
    let (mut fields, _) = chat.finish();
    Ok(fields.remove("messages").expect("it is always there"))
}

#[test]
fn a_turn_of_the_model_is_one_message() {
    let items = json!([
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "I need "}, {"type": "reasoning_text", "text": "a tool"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "Let me look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "ask", "arguments": "{\"a\":1}"},
        {"type": "function_call_output", "call_id": "c2", "output": "42"},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "sun"}]},
        {"type": "function_call", "call_id": "c3", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"role": "developer", "content": "be brief"},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let text = |text: &str| json!([{"type": "text", "text": text}]);
    assert_eq!(
        messages(&items).expect("valid"),
        json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": text("Let me look."),
             "reasoning_content": "I need a tool",
             "tool_calls": [call("c1", "look", "{}"), call("c2", "ask", "{\"a\":1}")]},
            {"role": "tool", "tool_call_id": "c2", "name": "ask", "content": "42"},
            {"role": "tool", "tool_call_id": "c1", "name": "look", "content": text("sun")},
            {"role": "assistant", "content": null, "tool_calls": [call("c3", "look", "{}")]},
            {"role": "tool", "tool_call_id": "c3", "name": "look", "content": ""},
            {"role": "developer", "content": "be brief"},
        ])
    );
}

#[test]
fn a_thought_belongs_to_what_the_model_says_next() {
    let thought = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]});
    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    let made = messages(&json!([thought, call])).expect("valid");
    assert_eq!(made[0]["reasoning_content"], "hm");
    let made = messages(&json!([thought, {"role": "user", "content": "x"}, call])).expect("valid");
    assert_eq!(made[0]["reasoning_content"], Value::Null);
    assert_eq!(made[1]["reasoning_content"], Value::Null);
}

#[test]
fn calls_that_were_cut_are_left_out() {
    let cut = json!({"type": "function_call", "call_id": "c1", "name": "f", "status": "incomplete",
        "arguments": "{\"a\": "});
    let whole = json!({"type": "function_call", "call_id": "c0", "name": "f", "arguments": "{}"});
    let result = json!({"type": "function_call_output", "call_id": "c0", "output": "x"});
    let user = json!({"role": "user", "content": "go on"});
    let made = messages(&json!([whole, cut, result, user])).expect("valid");
    assert_eq!(made[0]["tool_calls"].as_array().map(Vec::len), Some(1));
    assert_eq!(made.as_array().map(Vec::len), Some(3));
    let made = messages(&json!([cut, user])).expect("valid");
    assert_eq!(made, json!([user]));
    let answered = json!({"type": "function_call_output", "call_id": "c1", "output": "x"});
    let error = messages(&json!([cut, answered])).expect_err("it was never made");
    assert_eq!(error.param.as_deref(), Some("input[1].call_id"));
}

#[test]
fn faults_name_their_place() {
    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    for (item, param) in [
        (json!("x"), "input[0]"),
        (json!({"type": 5}), "input[0].type"),
        (json!({"type": "web_search_call"}), "input[0].type"),
        (json!({"content": "x"}), "input[0].role"),
        (json!({"role": "tool", "content": "x"}), "input[0].role"),
        (json!({"role": "user"}), "input[0].content"),
        (json!({"role": "user", "content": 3}), "input[0].content"),
        (
            json!({"role": "user", "content": ["x"]}),
            "input[0].content[0]",
        ),
        (
            json!({"role": "user", "content": [{"text": "x"}]}),
            "input[0].content[0].type",
        ),
        (
            json!({"role": "user", "content": [{"type": "input_file"}]}),
            "input[0].content[0].type",
        ),
        (
            json!({"role": "user", "content": [{"type": "input_text"}]}),
            "input[0].content[0].text",
        ),
        (
            json!({"type": "function_call", "name": "f"}),
            "input[0].call_id",
        ),
        (
            json!({"type": "function_call_output", "call_id": "c"}),
            "input[0].call_id",
        ),
        (
            json!({"type": "reasoning", "summary": "x"}),
            "input[0].summary",
        ),
        (
            json!({"type": "reasoning", "content": [{}]}),
            "input[0].content[0].text",
        ),
    ] {
        let error = messages(&json!([item])).expect_err(&item.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{item}");
        assert!(error.message.contains(param), "{}", error.message);
        assert_eq!(error.status(), 400);
    }
    let error = messages(&json!([call, {"type": "function_call_output", "call_id": "c"}]));
    let error = error.expect_err("no output");
    assert_eq!(error.param.as_deref(), Some("input[1].output"));
    assert!(items(&json!(5)).is_err());
}

#[test]
fn images_are_passed_on_to_whoever_knows_the_model() {
    let image = json!({"type": "input_image", "image_url": "data:,"});
    let made = messages(&json!([{"role": "user", "content": [image]}])).expect("translated");
    assert_eq!(made[0]["content"][0]["type"], "image_url");
    assert_eq!(made[0]["content"][0]["image_url"]["url"], "data:,");
    let audio = json!({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}});
    let made = messages(&json!([{"role": "user", "content": [audio]}])).expect("translated");
    assert_eq!(made[0]["content"][0], audio);
}

#[test]
fn listed_items_have_ids_and_parts() {
    let fresh = |prefix: &str| format!("{prefix}_1");
    let user = listed(&json!({"role": "user", "content": "x"}), fresh);
    assert_eq!(
        user,
        json!({"id": "msg_1", "type": "message", "status": "completed", "role": "user",
               "content": [{"type": "input_text", "text": "x"}]})
    );
    let said = listed(
        &json!({"id": "m", "role": "assistant", "content": "x"}),
        fresh,
    );
    assert_eq!(
        (&said["id"], &said["content"][0]["type"]),
        (&json!("m"), &json!("output_text"))
    );
    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    assert_eq!(listed(&call, fresh)["id"], "fc_1");
}

#[test]
fn references_name_an_item() {
    let item = json!({"type": "item_reference", "id": "msg_1"});
    assert_eq!(reference("input[0]", &item), Ok(Some("msg_1")));
    assert_eq!(reference("input[0]", &json!({"role": "user"})), Ok(None));
    let error = reference("input[0]", &json!({"type": "item_reference"})).expect_err("no id");
    assert_eq!(error.param.as_deref(), Some("input[0].id"));
}
