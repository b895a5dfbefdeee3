//! The Responses API: whole and streamed answers, kept responses, faults in its own words.

use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::real_engine::serve_tiny;
use crate::schema::faults;
use crate::shared::{named_events, with};
use crate::{TestServer, wait_for};
use serde_json::{Value, json};
use std::sync::Arc;
use tinyloop::config::{EngineConfig, ExecutorConfig};

/// Answers and events against what `/openapi.json` says of them.
#[track_caller]
pub(crate) fn check_declared(client: &mut Client, method: &str, path: &str, values: &[Value]) {
    let description = client.get("/openapi.json").json();
    let content = &description["paths"][path][method]["responses"]["200"]["content"];
    let is_stream = values.len() > 1;
    let schema = match is_stream {
        true => &content["text/event-stream"]["x-event-schema"],
        false => &content["application/json"]["schema"],
    };
    for value in values {
        let found = faults(&description, schema, value);
        assert!(found.is_empty(), "{path}: {found:#?}\n{value}");
    }
}

pub(crate) fn create(client: &mut Client, extra: &Value) -> Answer {
    let body = json!({"model": "test/model", "input": "hi", "max_output_tokens": 3});
    client.post("/v1/responses", &with(body, extra))
}

/// The events of a stream, checked: numbered, one terminal event, which comes last.
#[track_caller]
pub(crate) fn stream(client: &mut Client, extra: &Value) -> Vec<Value> {
    let answer = create(client, &with(extra.clone(), &json!({"stream": true})));
    assert_eq!(answer.status, 200);
    let events = named_events(&answer);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let is_terminal = |event: &&Value| {
        let kind = event["type"].as_str().expect("a type");
        [
            "response.completed",
            "response.incomplete",
            "response.failed",
        ]
        .contains(&kind)
    };
    let terminal: Vec<&Value> = events.iter().filter(is_terminal).collect();
    assert_eq!(terminal, [events.last().expect("an event")]);
    events
}

fn output_text(response: &Value) -> String {
    let parts = response["output"].as_array().expect("a list").iter();
    let parts = parts.flat_map(|item| item["content"].as_array().cloned().unwrap_or_default());
    let parts = parts.filter(|part| part["type"] == "output_text");
    parts
        .map(|part| part["text"].as_str().expect("a text").to_owned())
        .collect()
}

#[test]
fn a_response_has_openais_shape() {
    let server = TestServer::start(Alphabet::at_once());
    let extra = json!({"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5});
    let answer = create(&mut server.client(), &extra);
    let mut json = answer.json();
    assert_eq!(answer.status, 200, "{json}");
    let id = json["id"].as_str().expect("an id").to_owned();
    assert!(id.starts_with("resp_") && id.len() == 5 + 24, "{id}");
    assert!(json["created_at"].as_u64().expect("seconds") > 1_700_000_000);
    let item = json["output"][0]["id"].as_str().expect("an id").to_owned();
    assert!(item.starts_with("msg_"), "{item}");
    json["id"] = Value::Null;
    json["created_at"] = Value::Null;
    json["output"][0]["id"] = Value::Null;
    let n_input = "system:be brief;user:hi;assistant:".len();
    let text = json!({"type": "output_text", "text": "abc", "annotations": [], "logprobs": []});
    assert_eq!(
        json,
        json!({
            "id": null, "object": "response", "created_at": null, "status": "incomplete",
            "background": false, "completed_at": null, "error": null,
            "incomplete_details": {"reason": "max_output_tokens"}, "instructions": "be brief",
            "max_output_tokens": 3, "max_tool_calls": null, "model": "test/model",
            "output": [{"type": "message", "id": null, "status": "incomplete",
                        "role": "assistant", "content": [text]}],
            "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": null,
            "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
            "service_tier": "default", "store": true, "temperature": 0.5,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
            "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled",
            "usage": {
                "input_tokens": n_input,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_input + 3,
            },
            "user": null, "metadata": {"a": "b"},
        })
    );
}

/// Case 16: all events, all fields, and an end that tells a cut from a completion.
#[test]
fn case_16_a_stream_has_the_whole_sequence() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let events = stream(&mut client, &json!({"stop": "c", "max_output_tokens": 9}));
    let kinds: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
    assert_eq!(events[0]["response"]["usage"], Value::Null);
    let done = &events[9]["response"];
    assert_eq!(
        (&done["status"], output_text(done)),
        (&json!("completed"), "ab".to_owned())
    );
    assert_eq!(done["output"][0], events[8]["item"]);
    assert_eq!(done["incomplete_details"], Value::Null);
    assert!(
        done["completed_at"].is_u64() && done["usage"]["output_tokens"] == 3,
        "{done}"
    );
    let cut = stream(&mut client, &json!({}));
    let end = cut.last().expect("an end");
    assert_eq!(end["type"], "response.incomplete");
    assert_eq!(
        end["response"]["incomplete_details"]["reason"],
        "max_output_tokens"
    );
    assert_eq!(end["response"]["output"][0]["status"], "incomplete");
    assert!(
        stream(&mut client, &json!({}))
            .iter()
            .all(|event| event != "[DONE]")
    );
}

#[test]
fn answers_are_what_the_description_says() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let wanted = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let whole = create(&mut client, &wanted).json();
    let id = whole["id"].as_str().expect("an id").to_owned();
    check_declared(&mut client, "post", "/v1/responses", &[whole]);
    let events = stream(&mut client, &wanted);
    check_declared(&mut client, "post", "/v1/responses", &events);
    let path = format!("/v1/responses/{id}");
    let items = client.get(&format!("{path}/input_items")).json();
    check_declared(
        &mut client,
        "get",
        "/v1/responses/{id}/input_items",
        &[items],
    );
    client.send("DELETE", &path, &[], "");
    let deleted = client.read_answer().json();
    check_declared(&mut client, "delete", "/v1/responses/{id}", &[deleted]);
    let counted = client
        .post("/v1/responses/input_tokens", &json!({"input": "x"}))
        .json();
    check_declared(
        &mut client,
        "post",
        "/v1/responses/input_tokens",
        &[counted],
    );
}

#[test]
fn logprobs_ride_on_their_deltas() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let wanted = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let whole = create(&mut client, &wanted).json();
    let all = whole["output"][0]["content"][0]["logprobs"].clone();
    assert_eq!(all.as_array().expect("a list").len(), 3);
    assert_eq!(
        all[0],
        json!({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]}]})
    );
    let events = stream(&mut client, &wanted);
    let deltas = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta");
    let joined: Vec<Value> = deltas
        .flat_map(|event| event["logprobs"].as_array().expect("a list").clone())
        .collect();
    assert_eq!(Value::from(joined), all);
}

#[test]
fn responses_are_kept_and_continued() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let first = create(&mut client, &json!({"instructions": "old"})).json();
    let id = first["id"].as_str().expect("an id");
    assert_eq!(client.get(&format!("/v1/responses/{id}")).json(), first);
    let next = create(
        &mut client,
        &json!({"previous_response_id": id, "input": "more"}),
    )
    .json();
    assert_eq!(next["previous_response_id"], id);
    assert_eq!(next["instructions"], Value::Null);
    let prompt = "user:hi;assistant:abc;user:more;assistant:";
    assert_eq!(next["usage"]["input_tokens"], prompt.len());
    let next_id = next["id"].as_str().expect("an id");
    let path = format!("/v1/responses/{next_id}/input_items");
    let list = client.get(&path).json();
    let data = list["data"].as_array().expect("a list");
    let texts: Vec<&Value> = data
        .iter()
        .map(|item| &item["content"][0]["text"])
        .collect();
    assert_eq!(texts, ["more", "abc", "hi"], "newest first");
    assert_eq!(
        (&list["first_id"], &list["last_id"]),
        (&data[0]["id"], &data[2]["id"])
    );
    let page = client.get(&format!("{path}?order=asc&limit=1")).json();
    assert_eq!(page["data"][0]["content"][0]["text"], "hi");
    assert_eq!(page["has_more"], true);
    assert_eq!(
        client.get(&format!("{path}?limit=x")).json()["error"]["param"],
        "limit"
    );

    // An item of an earlier response stands for itself; a streamed one is kept as well.
    let reference = json!({"type": "item_reference", "id": data[1]["id"]});
    let items =
        json!([{"role": "user", "content": "?"}, reference, {"role": "user", "content": "!"}]);
    let events = stream(&mut client, &json!({"input": items}));
    let streamed = &events.last().expect("an end")["response"];
    let prompt = "user:?;assistant:abc;user:!;assistant:";
    assert_eq!(streamed["usage"]["input_tokens"], prompt.len());
    let path = format!("/v1/responses/{}", streamed["id"].as_str().expect("an id"));
    assert_eq!(&client.get(&path).json(), streamed);

    // Deleting one does not break what continues it.
    client.send("DELETE", &format!("/v1/responses/{id}"), &[], "");
    let deleted = json!({"id": id, "object": "response", "deleted": true});
    assert_eq!(client.read_answer().json(), deleted);
    let gone = client.get(&format!("/v1/responses/{id}"));
    assert_eq!(
        (gone.status, &gone.json()["error"]["code"]),
        (404, &json!("response_not_found"))
    );
    let again = create(&mut client, &json!({"previous_response_id": next_id}));
    assert_eq!(again.status, 200);
    let lost = create(&mut client, &json!({"previous_response_id": id}));
    assert_eq!(lost.status, 400);
    assert_eq!(lost.json()["error"]["code"], "previous_response_not_found");
    assert_eq!(lost.json()["error"]["param"], "previous_response_id");
}

#[test]
fn what_shall_not_be_kept_is_not() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let response = create(&mut client, &json!({"store": false})).json();
    assert_eq!(response["store"], false);
    let path = format!("/v1/responses/{}", response["id"].as_str().expect("an id"));
    assert_eq!(client.get(&path).status, 404);
    for path in [path.clone() + "/input_items", path.clone() + "/nothing"] {
        assert_eq!(client.get(&path).status, 404);
    }
    client.send("POST", &(path + "/cancel"), &[], "");
    assert_eq!(client.read_answer().status, 404);
    let kept = create(&mut client, &json!({})).json();
    let path = format!("/v1/responses/{}", kept["id"].as_str().expect("an id"));
    client.send("POST", &(path.clone() + "/cancel"), &[], "");
    assert_eq!(
        client.read_answer().status,
        400,
        "it is no background response"
    );
    let replay = client.get(&(path + "?stream=true"));
    assert_eq!(replay.json()["error"]["param"], "stream");
    let bounded = TestServer::with(Alphabet::at_once(), |config| config.responses.max_kept = 1);
    let mut client = bounded.client();
    let ids: Vec<String> = (0..2)
        .map(|_| {
            create(&mut client, &json!({})).json()["id"]
                .as_str()
                .expect("an id")
                .to_owned()
        })
        .collect();
    assert_eq!(client.get(&format!("/v1/responses/{}", ids[0])).status, 404);
    assert_eq!(client.get(&format!("/v1/responses/{}", ids[1])).status, 200);
}

#[test]
fn responses_exist_for_the_key_that_made_them() {
    let server = TestServer::with(Alphabet::at_once(), |config| {
        config.server.api_keys = vec!["one".to_owned(), "two".to_owned()];
    });
    let mut client = server.client();
    let mut ask = |method: &str, path: &str, key: &str, body: &str| {
        let bearer = format!("Bearer {key}");
        client.send(method, path, &[("authorization", &bearer)], body);
        client.read_answer()
    };
    let body = json!({"input": "hi", "max_output_tokens": 1}).to_string();
    let response = ask("POST", "/v1/responses", "one", &body).json();
    let id = response["id"].as_str().expect("an id");
    let path = format!("/v1/responses/{id}");
    assert_eq!(ask("GET", &path, "two", "").status, 404);
    assert_eq!(ask("DELETE", &path, "two", "").status, 404);
    let next = json!({"input": "hi", "previous_response_id": id}).to_string();
    assert_eq!(ask("POST", "/v1/responses", "two", &next).status, 400);
    assert_eq!(ask("POST", "/v1/responses", "one", &next).status, 200);
    assert_eq!(ask("GET", &path, "none", "").status, 401);
    assert_eq!(ask("GET", &path, "one", "").json(), response);
}

#[test]
fn faults_name_the_fields_of_this_api() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    for (extra, code, param) in [
        (
            json!({"input": null}),
            "missing_required_parameter",
            json!("input"),
        ),
        (
            json!({"temperature": 9}),
            "invalid_value",
            json!("temperature"),
        ),
        (
            json!({"max_output_tokens": 5000}),
            "context_length_exceeded",
            json!("input"),
        ),
        (
            json!({"background": true}),
            "unsupported_parameter",
            json!("background"),
        ),
        (
            json!({"truncation": "auto"}),
            "unsupported_parameter",
            json!("truncation"),
        ),
        (
            json!({"tools": [{"type": "web_search"}]}),
            "unsupported_parameter",
            json!("tools[0].type"),
        ),
        (
            json!({"messages": []}),
            "unsupported_parameter",
            json!("messages"),
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "n",
                                       "schema": {"type": "thing"}}}}),
            "invalid_json_schema",
            json!("text.format.schema"),
        ),
    ] {
        for extra in [extra.clone(), with(extra.clone(), &json!({"stream": true}))] {
            let answer = create(&mut client, &extra);
            let error = answer.json()["error"].clone();
            assert_eq!(answer.status, 400, "{extra}: {error}");
            assert_eq!(
                (&error["code"], &error["param"]),
                (&json!(code), &param),
                "{error}"
            );
        }
    }
    let unknown = create(&mut client, &json!({"model": "no"}));
    assert_eq!(
        (unknown.status, &unknown.json()["error"]["param"]),
        (404, &json!("model"))
    );
    client.send("PUT", "/v1/responses", &[], "");
    assert_eq!(client.read_answer().status, 405);
}

#[test]
fn input_tokens_are_counted_without_an_answer() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"model": "test/model", "input": "hi", "instructions": "x"});
    let answer = server.client().post("/v1/responses/input_tokens", &body);
    let n_tokens = "system:x;user:hi;assistant:".len();
    let expected = json!({"object": "response.input_tokens", "input_tokens": n_tokens});
    assert_eq!(answer.json(), expected);
    let answer = server
        .client()
        .post("/v1/responses/input_tokens", &json!({"input": 5}));
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("input"))
    );
}

#[test]
fn faults_and_cancels_on_the_way_end_the_stream_once() {
    let runtime = Alphabet::stepped(2);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut client = server.client();
    let body = json!({"input": "hi", "stream": true, "max_output_tokens": 50});
    let begin = |client: &mut Client, name: &str| {
        client.send(
            "POST",
            "/v1/responses",
            &[("x-request-id", name)],
            &body.to_string(),
        );
        wait_for("the job", || runtime.n_active() == 1);
        runtime.step();
        let head = client.read_head();
        assert_eq!(head.status, 200);
        head
    };
    let rest = |client: &mut Client, mut head: Answer| {
        while let Some(chunk) = client.read_chunk() {
            head.body.extend(chunk);
        }
        named_events(&head)
    };
    let head = begin(&mut client, "fails");
    runtime.fail_all();
    let events = rest(&mut client, head);
    let end = events.last().expect("an end");
    assert_eq!(end["type"], "response.failed");
    assert_eq!(end["response"]["status"], "failed");
    assert_eq!(end["response"]["error"]["code"], "server_error");
    assert_eq!(output_text(&end["response"]), "a");
    let kinds: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds[kinds.len() - 2], "response.output_item.done");

    let head = begin(&mut client, "leaves");
    let mut other = server.client();
    other.send("POST", "/v1/requests/leaves/cancel", &[], "");
    assert_eq!(other.read_answer().status, 200);
    let events = rest(&mut client, head);
    let end = events.last().expect("an end");
    assert_eq!(end["type"], "response.incomplete");
    assert_eq!(end["response"]["status"], "cancelled");
    assert_eq!(end["response"]["incomplete_details"], Value::Null);
    assert_eq!(end["response"]["usage"]["output_tokens"], 1);
}

#[test]
fn compacting_is_refused_by_name_and_cut_calls_are_left_out_of_what_follows() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let answer = client.post("/v1/responses/compact", &json!({"input": "x"}));
    let error = answer.json()["error"].clone();
    assert_eq!(
        (answer.status, &error["code"]),
        (501, &json!("not_implemented"))
    );
    // The official clients would try it three times.
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|text| text.contains("previous_response_id"))
    );
    let cut = json!({"type": "function_call", "call_id": "c", "name": "f", "status": "incomplete",
                     "arguments": "{\"a\": "});
    let user = json!({"role": "user", "content": "go on"});
    assert_eq!(
        create(&mut client, &json!({"input": [cut, user]})).status,
        200
    );
    let answered = json!({"type": "function_call_output", "call_id": "c", "output": "x"});
    let refused = create(&mut client, &json!({"input": [cut, answered]}));
    let error = refused.json()["error"].clone();
    assert_eq!(
        (refused.status, &error["param"]),
        (400, &json!("input[1].call_id"))
    );
}

#[test]
fn a_real_model_says_the_same_in_a_stream() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok"],
                        "properties": {"ok": {"type": "boolean"}}});
    let form = json!({"format": {"type": "json_schema", "name": "n", "schema": schema}});
    for extra in [
        json!({}),
        json!({"text": form}),
        json!({"text": {"format": {"type": "json_object"}}}),
    ] {
        let base = json!({"model": "tiny", "temperature": 0.7, "seed": 3, "max_output_tokens": 60});
        let extra = with(base, &extra);
        let whole = create(&mut client, &extra);
        assert_eq!(whole.status, 200, "{}", whole.json());
        let whole = whole.json();
        let events = stream(&mut client, &extra);
        let deltas = events
            .iter()
            .filter(|event| event["type"] == "response.output_text.delta");
        let joined: String = deltas
            .map(|event| event["delta"].as_str().expect("text"))
            .collect();
        assert_eq!(joined, output_text(&whole));
        let end = &events.last().expect("an end")["response"];
        assert_eq!(output_text(end), joined);
        assert_eq!(end["status"], whole["status"]);
        if extra["text"]["format"]["type"] == "json_schema" {
            let parsed: Value = serde_json::from_str(&joined).expect("JSON as asked");
            assert!(parsed["ok"].is_boolean(), "{joined}");
        }
    }
}
