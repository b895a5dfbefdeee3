//! Anthropic's Messages API: whole and streamed messages, counted tokens, faults in its own words.

use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::real_engine::serve_tiny;
use crate::responses::check_declared;
use crate::schema::faults;
use crate::shared::{named_events, with};
use crate::{TestServer, wait_for};
use serde_json::{Value, json};
use std::sync::Arc;
use tinyloop::config::{EngineConfig, ExecutorConfig};

const PATH: &str = "/v1/messages";

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

pub(crate) fn create(client: &mut Client, extra: &Value) -> Answer {
    let body = json!({"model": "test/model", "max_tokens": 3, "messages": user("hi")});
    client.post(PATH, &with(body, extra))
}

#[test]
fn a_message_has_anthropics_shape() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let answer = create(&mut client, &json!({"system": "be brief"}));
    let mut json = answer.json();
    assert_eq!(answer.status, 200, "{json}");
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    let id = json["id"].take();
    assert!(id.as_str().expect("an id").starts_with("msg_"), "{id}");
    let n_input = "system:be brief;user:hi;assistant:".len();
    assert_eq!(
        json,
        json!({
            "id": null, "type": "message", "role": "assistant", "model": "test/model",
            "content": [{"type": "text", "text": "abc"}],
            "stop_reason": "max_tokens", "stop_sequence": null,
            "usage": {"input_tokens": n_input, "cache_creation_input_tokens": 0,
                      "cache_read_input_tokens": 0, "output_tokens": 3},
        })
    );
    let extra = json!({"stop_sequences": ["zz", "c"], "max_tokens": 20});
    let stopped = create(&mut client, &extra).json();
    assert_eq!(stopped["content"][0]["text"], "ab");
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], "c");
}

#[test]
fn a_stream_has_the_whole_sequence() {
    let server = TestServer::start(Alphabet::at_once());
    let extra = json!({"stream": true, "max_tokens": 2});
    let mut events = named_events(&create(&mut server.client(), &extra));
    let id = events[0]["message"]["id"].take();
    assert!(id.as_str().expect("an id").starts_with("msg_"), "{id}");
    let n_input = "user:hi;assistant:".len();
    let usage = |n_output: u32| {
        json!({"input_tokens": n_input, "cache_creation_input_tokens": 0,
               "cache_read_input_tokens": 0, "output_tokens": n_output})
    };
    let delta = |text: &str| {
        json!({"type": "content_block_delta", "index": 0,
               "delta": {"type": "text_delta", "text": text}})
    };
    assert_eq!(
        events,
        [
            json!({"type": "message_start", "message": {
                "id": null, "type": "message", "role": "assistant", "model": "test/model",
                "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage(0)}}),
            json!({"type": "content_block_start", "index": 0,
                   "content_block": {"type": "text", "text": ""}}),
            delta("a"),
            delta("b"),
            json!({"type": "content_block_stop", "index": 0}),
            json!({"type": "message_delta", "usage": usage(2),
                   "delta": {"stop_reason": "max_tokens", "stop_sequence": null}}),
            json!({"type": "message_stop"}),
        ]
    );
}

#[test]
fn answers_are_what_the_description_says() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let whole = create(&mut client, &json!({})).json();
    check_declared(&mut client, "post", PATH, &[whole]);
    let events = named_events(&create(&mut client, &json!({"stream": true})));
    check_declared(&mut client, "post", PATH, &events);
    let body = json!({"messages": user("hi")});
    let path = "/v1/messages/count_tokens";
    let counted = client.post(path, &body).json();
    check_declared(&mut client, "post", path, &[counted]);
    let refused = create(&mut client, &json!({"max_tokens": 0})).json();
    let description = client.get("/openapi.json").json();
    let answers = &description["paths"][PATH]["post"]["responses"];
    let schema = &answers["400"]["content"]["application/json"]["schema"];
    assert_eq!(faults(&description, schema, &refused), [""; 0]);
}

#[test]
fn blocks_of_the_conversation_reach_the_prompt() {
    let server = TestServer::start(Alphabet::at_once());
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"}, {"role": "user", "content": "e"},
    ]);
    let count = |extra: &Value| {
        let body = with(json!({"model": "test/model", "messages": messages}), extra);
        let answer = server.client().post("/v1/messages/count_tokens", &body);
        assert_eq!(answer.status, 200, "{}", answer.json());
        answer.json()
    };
    let prompt = "user:a\nb;assistant:c;user:d\ne;assistant:";
    assert_eq!(count(&json!({})), json!({"input_tokens": prompt.len()}));
    let system = json!({"system": [{"type": "text", "text": "s"}]});
    assert_eq!(
        count(&system)["input_tokens"],
        prompt.len() + "system:s;".len()
    );
    // A begun answer is continued, not answered.
    let begun =
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "begun"}]);
    let begun = json!({"messages": begun});
    assert_eq!(
        count(&begun)["input_tokens"],
        "user:a;assistant:begun".len()
    );
    assert_eq!(create(&mut server.client(), &begun).status, 200);
}

#[test]
fn faults_speak_anthropics_dialect() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    for (extra, param) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"temperature": 9}), "temperature"),
        (json!({"max_tokens": 5000}), "messages"),
        (json!({"messages": image}), "messages[0].content[0]"),
        (
            json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}),
            "tools[0].type",
        ),
        (
            json!({"messages": [{"role": "x", "content": "x"}]}),
            "messages[0].role",
        ),
    ] {
        for extra in [extra.clone(), with(extra.clone(), &json!({"stream": true}))] {
            let answer = create(&mut client, &extra);
            let body = answer.json();
            assert_eq!(answer.status, 400, "{body}");
            assert_eq!(
                (&body["type"], &body["error"]["param"]),
                (&json!("error"), &json!(param))
            );
            assert_eq!(body["error"]["type"], "invalid_request_error");
            assert_eq!(body["request_id"].as_str(), answer.header("request-id"));
        }
    }
    let unknown = create(&mut client, &json!({"model": "no"}));
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["type"], "not_found_error");
    client.send("POST", PATH, &[], "{");
    assert_eq!(client.read_answer().json()["type"], "error");
    assert_eq!(client.get(PATH).json()["type"], "error");
    client.send_raw("POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n");
    let refused = client.read_answer();
    assert_eq!(
        (refused.status, &refused.json()["type"]),
        (413, &json!("error"))
    );
    assert_eq!(refused.json()["error"]["type"], "request_too_large");
}

#[test]
fn keys_come_in_x_api_key_and_are_refused_in_this_dialect() {
    let server = TestServer::with(Alphabet::at_once(), |config| {
        config.server.api_keys = vec!["secret".to_owned()];
    });
    let mut client = server.client();
    let body = json!({"max_tokens": 1, "messages": user("hi")}).to_string();
    let version = ("anthropic-version", "2023-06-01");
    client.send("POST", PATH, &[("x-api-key", "secret"), version], &body);
    assert_eq!(client.read_answer().status, 200);
    client.send("POST", PATH, &[("x-api-key", "wrong"), version], &body);
    let refused = client.read_answer();
    assert_eq!(refused.status, 401);
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
}

#[test]
fn overload_is_529_and_quota_429() {
    for (configured, status, kind) in [
        (503, 529, "overloaded_error"),
        (429, 429, "rate_limit_error"),
    ] {
        let runtime = Alphabet::stepped(1);
        let server = TestServer::with(Arc::clone(&runtime), |config| {
            config.server.overload_status = configured;
            config.executor.max_queue_depth = 1;
        });
        let mut waiting: Vec<Client> = Vec::new();
        for n_waiting in 0..2 {
            let mut client = server.client();
            let body = json!({"max_tokens": 3, "messages": user("hi")});
            client.send("POST", PATH, &[], &body.to_string());
            waiting.push(client);
            let executor = &server.executor;
            wait_for("the job", || runtime.n_active() == 1);
            wait_for("the queue", || executor.snapshot().queue_depth == n_waiting);
        }
        let refused = create(&mut server.client(), &json!({}));
        assert_eq!(refused.status, status, "{}", refused.json());
        assert_eq!(refused.json()["error"]["type"], kind);
        assert!(refused.header("retry-after").is_some());
        for client in &mut waiting {
            wait_for("its turn", || runtime.n_active() == 1);
            runtime.run_out();
            assert_eq!(client.read_answer().status, 200);
        }
    }
}

#[test]
fn a_fault_on_the_way_is_an_error_event() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut client = server.client();
    let body = json!({"max_tokens": 50, "messages": user("hi"), "stream": true});
    client.send("POST", PATH, &[], &body.to_string());
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    let mut answer = client.read_head();
    runtime.fail_all();
    while let Some(chunk) = client.read_chunk() {
        answer.body.extend(chunk);
    }
    let events = named_events(&answer);
    let end = events.last().expect("an end");
    assert_eq!(
        (&end["type"], &end["error"]["type"]),
        (&json!("error"), &json!("api_error"))
    );
    assert!(events.iter().all(|event| event["type"] != "message_stop"));
}

#[test]
fn a_silent_stream_is_pinged() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.server.stream_ping = std::time::Duration::from_millis(20);
    });
    let mut client = server.client();
    let body = json!({"max_tokens": 1, "messages": user("hi"), "stream": true});
    client.send("POST", PATH, &[], &body.to_string());
    wait_for("the job", || runtime.n_active() == 1);
    let mut answer = client.read_head();
    for _ in 0..2 {
        answer
            .body
            .extend(client.read_chunk().expect("a sign of life"));
    }
    runtime.run_out();
    while let Some(chunk) = client.read_chunk() {
        answer.body.extend(chunk);
    }
    let kinds: Vec<Value> = named_events(&answer)
        .iter()
        .map(|event| event["type"].clone())
        .collect();
    assert_eq!(&kinds[..2], ["message_start", "ping"]);
    assert_eq!(kinds.last().expect("an end"), "message_stop");
}

#[test]
fn a_real_model_says_the_same_in_a_stream() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok"],
                        "properties": {"ok": {"type": "boolean"}}});
    let form = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    for extra in [json!({}), form] {
        let base = json!({"model": "tiny", "temperature": 0.7, "seed": 3, "max_tokens": 60});
        let extra = with(base, &extra);
        let whole = create(&mut client, &extra);
        assert_eq!(whole.status, 200, "{}", whole.json());
        let whole = whole.json();
        let events = named_events(&create(
            &mut client,
            &with(extra.clone(), &json!({"stream": true})),
        ));
        let joined: String = events
            .iter()
            .filter_map(|event| event["delta"]["text"].as_str())
            .collect();
        assert_eq!(whole["content"][0]["text"], joined.as_str());
        let end = &events[events.len() - 2];
        assert_eq!(end["delta"]["stop_reason"], whole["stop_reason"]);
        assert_eq!(
            end["usage"]["output_tokens"],
            whole["usage"]["output_tokens"]
        );
        if extra.get("output_config").is_some() {
            let parsed: Value = serde_json::from_str(&joined).expect("JSON as asked");
            assert!(parsed["ok"].is_boolean(), "{joined}");
        }
    }
}
