//! LM Studio's routes over a runtime that says the alphabet: the fields of its documentation, streams
//! that say what whole answers say, and who may load.

use super::{TestServer, wait_for};
use crate::client::Client;
use crate::fake::Alphabet;
use crate::shared::{keys, named_events, named_events_of, post};
use serde_json::{Value, json};

const STATS_V0: &[&str] = &[
    "generation_time",
    "stop_reason",
    "time_to_first_token",
    "tokens_per_second",
];

#[test]
fn v0_answers_are_openais_with_figures() {
    let server = TestServer::start(Alphabet::at_once());
    let user = json!([{"role": "user", "content": "hi"}]);
    let chat = json!({"messages": user, "max_tokens": 3, "seed": 0, "ttl": 300});
    let answer = post(&server, "/api/v0/chat/completions", &chat);
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["message"]["content"], "abc");
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    assert_eq!(keys(&answer["stats"]), STATS_V0);
    assert_eq!(answer["stats"]["stop_reason"], "maxPredictedTokensReached");
    assert_eq!(
        keys(&answer["model_info"]),
        ["arch", "context_length", "format", "quant"]
    );
    assert_eq!(
        keys(&answer["runtime"]),
        ["name", "supported_formats", "version"]
    );
    let plain = post(&server, "/v1/chat/completions", &chat);
    for name in ["choices", "usage", "model", "object"] {
        assert_eq!(answer[name], plain[name], "{name}");
    }

    let completion = |more: Value| {
        let mut body = json!({"prompt": "hi", "seed": 0});
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        post(&server, "/api/v0/completions", &body)
    };
    let stopped = completion(json!({"stop": "c"}));
    assert_eq!(stopped["choices"][0]["text"], "ab");
    assert_eq!(stopped["stats"]["stop_reason"], "stopStringFound");
    let full = completion(json!({}));
    assert_eq!(full["stats"]["stop_reason"], "contextLengthReached");
}

#[test]
fn a_v0_stream_ends_with_the_figures() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 0,
        "stream": true});
    let answer = server.client().post("/api/v0/chat/completions", &body);
    let mut events = answer.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events: Vec<Value> = events
        .iter()
        .map(|event| serde_json::from_str(event).expect("JSON"))
        .collect();
    let (end, chunks) = events.split_last().expect("events");
    let deltas = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"]["content"]);
    let content: String = deltas.filter_map(Value::as_str).collect();
    assert_eq!(content, "abc");
    assert!(chunks.iter().all(|chunk| chunk.get("stats").is_none()));
    assert_eq!(
        (&end["choices"], &end["usage"]["total_tokens"]),
        (&json!([]), &json!(21))
    );
    assert_eq!(keys(&end["stats"]), STATS_V0);
}

#[test]
fn lists_have_the_fields_of_the_documentation() {
    let server = TestServer::start(Alphabet::at_once());
    let get = |path: &str| server.client().get(path).json();
    let list = get("/api/v0/models");
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!(
        keys(model),
        [
            "arch",
            "compatibility_type",
            "id",
            "loaded_context_length",
            "max_context_length",
            "object",
            "publisher",
            "quantization",
            "state",
            "type"
        ]
    );
    assert_eq!(
        (&model["state"], &model["type"]),
        (&json!("loaded"), &json!("llm"))
    );
    assert_eq!(&get("/api/v0/models/test/model"), model);
    assert_eq!(server.client().get("/api/v0/models/none").status, 404);
    let model = get("/api/v1/models")["models"][0].clone();
    assert_eq!(
        keys(&model),
        [
            "architecture",
            "capabilities",
            "description",
            "display_name",
            "format",
            "key",
            "loaded_instances",
            "max_context_length",
            "params_string",
            "publisher",
            "quantization",
            "size_bytes",
            "type"
        ]
    );
    assert_eq!(
        (&model["key"], &model["publisher"]),
        (&json!("test/model"), &json!("test"))
    );
    assert_eq!(
        model["loaded_instances"],
        json!([{"id": "test/model", "config": {"context_length": 256, "parallel": 16}}])
    );
}

const CHAT: &str = "/api/v1/chat";

#[test]
fn a_v1_chat_streams_what_it_answers_whole() {
    let server = TestServer::start(Alphabet::at_once());
    let body = |stream: bool| {
        json!({"model": "test/model", "input": "hi", "system_prompt": "s", "seed": 0,
            "max_output_tokens": 3, "temperature": 0.5, "store": false, "stream": stream})
    };
    let whole = post(&server, CHAT, &body(false));
    assert_eq!(keys(&whole), ["model_instance_id", "output", "stats"]);
    assert_eq!(
        whole["output"],
        json!([{"type": "message", "content": "abc"}])
    );
    assert_eq!(
        keys(&whole["stats"]),
        [
            "input_tokens",
            "reasoning_output_tokens",
            "time_to_first_token_seconds",
            "tokens_per_second",
            "total_output_tokens"
        ]
    );
    assert_eq!(
        whole["stats"]["input_tokens"],
        "system:s;user:hi;assistant:".len()
    );
    assert_eq!(whole["stats"]["total_output_tokens"], 3);

    let answer = server.client().post(CHAT, &body(true));
    let events = named_events(&answer);
    let names: Vec<&Value> = events.iter().map(|event| &event["type"]).collect();
    assert_eq!(
        names,
        [
            "chat.start",
            "prompt_processing.start",
            "prompt_processing.progress",
            "prompt_processing.progress",
            "prompt_processing.end",
            "message.start",
            "message.delta",
            "message.delta",
            "message.delta",
            "message.end",
            "chat.end"
        ]
    );
    let deltas = events
        .iter()
        .filter(|event| event["type"] == "message.delta");
    let content: String = deltas
        .filter_map(|delta| delta["content"].as_str())
        .collect();
    assert_eq!(content, "abc");
    let result = &events.last().expect("an end")["result"];
    assert_eq!(result["output"], whole["output"]);
    assert_eq!(keys(&result["stats"]), keys(&whole["stats"]));
}

#[test]
fn a_v1_chat_goes_on_from_an_earlier_one() {
    let server = TestServer::start(Alphabet::at_once());
    let ask = |body: Value| {
        let mut all = json!({"seed": 0, "max_output_tokens": 2});
        let more = body.as_object().expect("an object").clone();
        all.as_object_mut().expect("an object").extend(more);
        let answer = server.client().post(CHAT, &all);
        assert_eq!(answer.status, 200, "{}", answer.json());
        answer
    };
    let first = ask(json!({"input": "hi", "system_prompt": "s"})).json();
    let id = first["response_id"].as_str().expect("an id").to_owned();
    assert!(id.starts_with("resp_"), "{id}");
    let n_prompt = |answer: &Value| answer["stats"]["input_tokens"].clone();
    let second = ask(json!({"input": "yo", "previous_response_id": id, "stream": true}));
    let events = named_events(&second);
    let second = events.last().expect("an end")["result"].clone();
    let said = "system:s;user:hi;assistant:ab;user:yo;assistant:";
    assert_eq!(n_prompt(&second), said.len());
    // From the same point in another way, told something else first; and once more from the second.
    let branch = ask(json!({"input": "no", "previous_response_id": id, "system_prompt": "other"}));
    let said = "system:other;user:hi;assistant:ab;user:no;assistant:";
    assert_eq!(n_prompt(&branch.json()), said.len());
    let third =
        json!({"input": "x", "previous_response_id": second["response_id"], "store": false});
    let third = ask(third).json();
    let said = "system:s;user:hi;assistant:ab;user:yo;assistant:ab;user:x;assistant:";
    assert_eq!(n_prompt(&third), said.len());
    assert_eq!(third.get("response_id"), None);
    let unknown = json!({"input": "x", "previous_response_id": "resp_none"});
    let refused = server.client().post(CHAT, &unknown);
    assert_eq!(refused.json()["error"]["param"], "previous_response_id");
    assert!((400..500).contains(&refused.status));
}

#[test]
fn v1_errors_have_lm_studios_form() {
    let server = TestServer::start(Alphabet::at_once());
    for (body, status, kind, param) in [
        (json!({}), 400, "invalid_request", json!("input")),
        (
            json!({"input": "x", "max_output_tokens": "y"}),
            400,
            "invalid_request",
            json!("max_output_tokens"),
        ),
        (
            json!({"input": "x", "context_length": 257}),
            400,
            "invalid_request",
            json!("context_length"),
        ),
        (
            json!({"input": "boom"}),
            400,
            "invalid_request",
            json!("input"),
        ),
        (
            json!({"input": "x", "integrations": ["mcp/x"]}),
            400,
            "not_implemented",
            json!("integrations"),
        ),
        (
            json!({"input": "x", "model": "none"}),
            404,
            "model_not_found",
            json!("model"),
        ),
    ] {
        let answer = server.client().post(CHAT, &body);
        let error = answer.json()["error"].clone();
        assert_eq!(
            (answer.status, &error["type"], &error["param"]),
            (status, &json!(kind), &param),
            "{body}"
        );
        assert!(
            error["message"].is_string() && error["code"].is_string(),
            "{error}"
        );
    }
    let short = json!({"input": "x", "context_length": 24, "seed": 0});
    let answer = post(&server, CHAT, &short);
    let n_prompt = "user:x;assistant:".len();
    assert_eq!(answer["stats"]["total_output_tokens"], 24 - n_prompt);
    let none = json!({"input": "x", "context_length": n_prompt});
    assert_eq!(server.client().post(CHAT, &none).status, 400);
}

#[test]
fn a_v1_stream_that_breaks_tells_the_error_and_what_there_is() {
    let alphabet = Alphabet::stepped(1);
    let server = TestServer::start(alphabet.clone());
    let mut client = server.client();
    let body = json!({"input": "x", "stream": true, "seed": 0});
    client.send("POST", CHAT, &[], &body.to_string());
    wait_for("the job", || alphabet.n_active() == 1);
    alphabet.step();
    client.read_head();
    let mut events = Vec::new();
    let mut read = |client: &mut Client| {
        events.extend(client.read_chunk()?);
        Some(events.ends_with(b"\"a\",\"type\":\"message.delta\"}\n\n"))
    };
    while read(&mut client) == Some(false) {}
    alphabet.fail_all();
    while read(&mut client).is_some() {}
    let events = named_events_of(&events);
    let [.., what, result] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(
        (&what["type"], &result["type"]),
        (&json!("error"), &json!("chat.end"))
    );
    assert_eq!(what["error"]["type"], "internal_error");
    assert_eq!(result["result"]["output"][0]["content"], "a");
}

#[test]
fn loads_are_for_whoever_has_the_management_key() {
    let open = TestServer::start(Alphabet::at_once());
    let load = json!({"model": "test/model"});
    let load_path = "/api/v1/models/load";
    let refused = open.client().post(load_path, &load);
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (403, &json!("forbidden"))
    );

    let server = TestServer::with(Alphabet::at_once(), |config| {
        config.management.admin_key = Some("boss".to_owned());
        config.server.api_keys = vec!["user".to_owned()];
    });
    let send = |path: &str, key: &str, body: &Value| {
        let mut client = server.client();
        let bearer = format!("Bearer {key}");
        client.send(
            "POST",
            path,
            &[("authorization", &bearer)],
            &body.to_string(),
        );
        client.read_answer()
    };
    assert_eq!(send(load_path, "user", &load).status, 403);
    assert_eq!(send(load_path, "", &load).status, 403);
    let loaded = send(
        load_path,
        "boss",
        &json!({"model": "test/model", "echo_load_config": true}),
    );
    assert_eq!(loaded.status, 200, "{}", loaded.json());
    let loaded = loaded.json();
    assert_eq!(
        keys(&loaded),
        [
            "instance_id",
            "load_config",
            "load_time_seconds",
            "status",
            "type"
        ]
    );
    assert_eq!(loaded["load_config"], json!({"context_length": 256}));
    assert_eq!(
        send(load_path, "boss", &json!({"model": "none"})).status,
        404
    );
    assert_eq!(send(load_path, "boss", &json!({})).status, 400);
    let download = send("/api/v1/models/download", "boss", &json!({"model": "x"}));
    assert_eq!(
        (download.status, &download.json()["error"]["type"]),
        (501, &json!("not_implemented"))
    );
    let unload = send(
        "/api/v1/models/unload",
        "boss",
        &json!({"instance_id": "test/model"}),
    );
    assert_eq!(unload.json(), json!({"instance_id": "test/model"}));
    // The key of an operator is no key for asking models.
    assert_eq!(send(CHAT, "boss", &json!({"input": "x"})).status, 401);
}
