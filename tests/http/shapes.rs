//! What whole answers and errors look like.

use super::{TestServer, add_model, add_model_with};
use crate::fake::Alphabet;
use serde_json::{Value, json};
use tinyloop::config::ExecutorConfig;

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[test]
fn a_chat_answer_has_openais_shape() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"model": "test/model", "messages": user("hi"), "max_tokens": 3});
    let answer = server.client().post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert!(answer.header("x-request-id").is_some());
    let mut json = answer.json();
    let id = json["id"].as_str().expect("an id").to_owned();
    assert!(id.starts_with("chatcmpl-") && id.len() == 9 + 24, "{id}");
    assert!(json["created"].as_u64().expect("seconds") > 1_700_000_000);
    json["id"] = Value::Null;
    json["created"] = Value::Null;
    let prompt_tokens = "user:hi;assistant:".len();
    assert_eq!(
        json,
        json!({
            "id": null, "object": "chat.completion", "created": null, "model": "test/model",
            "system_fingerprint": "",
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "refusal": null},
                "logprobs": null, "finish_reason": "length",
            }],
            "usage": {
                "prompt_tokens": prompt_tokens, "completion_tokens": 3,
                "total_tokens": prompt_tokens + 3,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        })
    );
}

#[test]
fn stop_strings_choices_and_defaults() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let mut chat = |body: Value| client.post("/v1/chat/completions", &body).json();
    let stopped = chat(json!({"messages": user("hi"), "max_tokens": 20, "stop": ["zz", "def"]}));
    assert_eq!(stopped["choices"][0]["message"]["content"], "abc");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["usage"]["completion_tokens"], 6);
    let three = chat(json!({"messages": user("hi"), "max_tokens": 2, "n": 3, "seed": 0}));
    let texts: Vec<&str> = (0..3)
        .map(|i| three["choices"][i]["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(texts[0], "ab");
    assert_ne!(texts[0], texts[1]);
    assert_eq!(three["choices"][2]["index"], 2);
    assert_eq!(three["usage"]["completion_tokens"], 6);
    assert_eq!(three["usage"]["prompt_tokens"], "user:hi;assistant:".len());
    // Without a limit the answer fills the context (256 tokens).
    let whole = chat(json!({"messages": user("hi")}));
    assert_eq!(whole["usage"]["total_tokens"], 256);
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
}

#[test]
fn chat_logprobs_are_finite() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({
        "messages": user("hi"), "max_tokens": 4, "logprobs": true, "top_logprobs": 2,
    });
    let json = server.client().post("/v1/chat/completions", &body).json();
    let content = json["choices"][0]["logprobs"]["content"]
        .as_array()
        .expect("a list")
        .clone();
    assert_eq!(content.len(), 4);
    assert_eq!(
        content[0],
        json!({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ]})
    );
    assert_eq!(content[3]["logprob"], -9999.0);
}

#[test]
fn a_completion_scores_and_echoes() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let body = json!({
        "model": "alias", "prompt": "xyé", "max_tokens": 0, "echo": true, "logprobs": 1,
    });
    let scored = client.post("/v1/completions", &body).json();
    assert!(scored["id"].as_str().expect("an id").starts_with("cmpl-"));
    assert_eq!(scored["object"], "text_completion");
    let choice = &scored["choices"][0];
    assert_eq!(choice["text"], "xyé");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().expect("a list").len(), 4);
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.5, -0.5]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][1], json!({"y": -0.5}));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    let body = json!({"prompt": [104, 105], "max_tokens": 2, "echo": true, "logprobs": 0});
    let echoed = client.post("/v1/completions", &body).json();
    assert_eq!(echoed["choices"][0]["text"], "hiab");
    assert_eq!(
        echoed["choices"][0]["logprobs"]["tokens"],
        json!(["h", "i", "a", "b"])
    );
    assert_eq!(
        echoed["choices"][0]["logprobs"]["text_offset"],
        json!([0, 1, 2, 3])
    );
}

#[test]
fn prompts_and_choices_are_numbered_in_rows() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"prompt": ["1", "22"], "n": 2, "max_tokens": 1, "echo": true});
    let json = server.client().post("/v1/completions", &body).json();
    let texts: Vec<&str> = (0..4)
        .map(|i| json["choices"][i]["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["1a", "1a", "22a", "22a"]);
    assert_eq!(json["choices"][3]["index"], 3);
    assert_eq!(json["usage"]["prompt_tokens"], 3);
    // 'd' is impossible for this runtime: a candidate that begins with it loses.
    let body = json!({"prompt": "x", "best_of": 3, "n": 1, "max_tokens": 1, "seed": 3});
    let best = server.client().post("/v1/completions", &body).json();
    assert_eq!(best["choices"].as_array().expect("a list").len(), 1);
    assert_ne!(best["choices"][0]["text"], "d");
    assert_eq!(best["choices"][0]["logprobs"], Value::Null);
    assert_eq!(best["usage"]["completion_tokens"], 3);
}

#[test]
fn errors_have_one_shape() {
    let server = TestServer::start(Alphabet::at_once());
    let cases = [
        ("POST", "/v1/chat/completions", "{", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", "", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", "[]", 400, "invalid_json"),
        (
            "POST",
            "/v1/chat/completions",
            "{}",
            400,
            "missing_required_parameter",
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"model":"no"}"#,
            404,
            "model_not_found",
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"model":5}"#,
            400,
            "invalid_value",
        ),
        (
            "POST",
            "/v1/completions",
            r#"{"prompt":"a","temperature":9}"#,
            400,
            "invalid_value",
        ),
        (
            "POST",
            "/v1/completions",
            r#"{"prompt":"a","max_tokens":256}"#,
            400,
            "context_length_exceeded",
        ),
        (
            "POST",
            "/v1/completions",
            r#"{"prompt":[]}"#,
            400,
            "invalid_value",
        ),
        (
            "POST",
            "/v1/completions",
            r#"{"prompt":"a","suffix":"b"}"#,
            400,
            "unsupported_parameter",
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":"boom"}]}"#,
            400,
            "chat_template_error",
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
            400,
            "missing_capability",
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{}}]}]}"#,
            400,
            "missing_capability",
        ),
        (
            "POST",
            "/v1/responses",
            r#"{"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]}"#,
            400,
            "missing_capability",
        ),
        (
            "POST",
            "/v1/native/generate",
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
            400,
            "missing_capability",
        ),
        ("GET", "/v1/models/nope", "", 404, "model_not_found"),
        ("GET", "/v1/nope", "", 404, "unknown_url"),
        ("GET", "/v1/completions", "", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", "", 405, "method_not_allowed"),
    ];
    let mut client = server.client();
    for (method, path, body, status, code) in cases {
        client.send(method, path, &[("x-request-id", "mine")], body);
        let answer = client.read_answer();
        assert_eq!(answer.status, status, "{method} {path} {body}");
        assert_eq!(
            answer.header("x-request-id"),
            Some("mine"),
            "{method} {path} {body}"
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], code, "{method} {path} {body}");
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
        assert!(error["type"].is_string() && error.get("param").is_some());
        assert_eq!(answer.header("allow").is_some(), status == 405);
    }
}

#[test]
fn what_the_wire_refuses_has_the_same_shape() {
    let server = TestServer::with(Alphabet::at_once(), |config| {
        config.server.max_body_bytes = 10
    });
    let mut client = server.client();
    client.send("POST", "/v1/completions", &[], &"x".repeat(11));
    let answer = client.read_answer();
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (413, Some("request_too_large"))
    );
    assert!(answer.header("x-request-id").is_some());
    let mut client = server.client();
    client.send_raw("GET / HTTP/1.1\r\nbad header\r\n\r\n");
    let answer = client.read_answer();
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (400, Some("bad_request"))
    );
}

#[test]
fn models_are_listed_and_found_by_any_spelling() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let list = client.get("/v1/models").json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "test/model");
    assert_eq!(list["data"][0]["max_model_len"], 256);
    for path in [
        "/v1/models/test/model",
        "/v1/models/test%2Fmodel",
        "/v1/models/alias",
    ] {
        let answer = client.get(path);
        assert_eq!(
            (answer.status, answer.json()["id"].as_str()),
            (200, Some("test/model"))
        );
    }
    // With two models the name may not be left out any more.
    let body = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &body).status, 200);
    let pool = server.server().state().pool();
    add_model(
        pool,
        ["second", "other"],
        Alphabet::at_once(),
        &ExecutorConfig::default(),
    );
    let answer = client.post("/v1/completions", &body);
    assert_eq!(
        (answer.status, answer.json()["error"]["param"].as_str()),
        (400, Some("model"))
    );
}

#[test]
fn keys_open_the_inference_routes_only() {
    let server = TestServer::with(Alphabet::at_once(), |config| {
        config.server.api_keys = vec!["secret".to_owned()];
    });
    let mut client = server.client();
    for path in ["/health", "/ready", "/"] {
        assert_eq!(client.get(path).status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/v1/models/alias"] {
        let answer = client.get(path);
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        for (name, value, status) in [
            ("authorization", "Bearer secret", 200),
            ("x-api-key", "secret", 200),
            ("authorization", "Bearer wrong", 401),
        ] {
            client.send("GET", path, &[(name, value)], "");
            assert_eq!(
                client.read_answer().status,
                status,
                "{path} {name}: {value}"
            );
        }
    }
}

#[test]
fn cors_is_off_until_an_origin_is_listed() {
    let closed = TestServer::start(Alphabet::at_once());
    let mut client = closed.client();
    client.send(
        "OPTIONS",
        "/v1/models",
        &[("origin", "https://a.example")],
        "",
    );
    let head = client.read_head();
    assert_eq!(
        (head.status, head.header("access-control-allow-origin")),
        (204, None)
    );
    let open = TestServer::with(Alphabet::at_once(), |config| {
        config.server.cors_origins = vec!["https://a.example".to_owned()];
    });
    let mut client = open.client();
    client.send("GET", "/v1/models", &[("origin", "https://a.example")], "");
    let answer = client.read_answer();
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://a.example")
    );
}

#[test]
fn operations_pages_answer_on_both_planes() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(server.client().post("/v1/completions", &body).status, 200);
    let management = server.server().management_address().expect("it listens");
    for address in [server.address, management] {
        let mut client = crate::client::Client::connect(address);
        assert_eq!(client.get("/health").json()["status"], "ok");
        assert_eq!(client.get("/ready").json()["status"], "ready");
        let metrics = client.get("/metrics");
        assert_eq!(metrics.status, 200);
        let text = String::from_utf8(metrics.body).expect("text");
        assert!(text.contains("tinyloop_http_requests_total"), "{text}");
        assert!(text.contains("test/model"), "{text}");
        assert_eq!(client.get("/nope").status, 404);
    }
}

#[test]
fn a_fault_before_the_first_token_is_a_real_status() {
    let server = TestServer::start(Alphabet::broken());
    for stream in [false, true] {
        let body = json!({"prompt": "a", "max_tokens": 1, "stream": stream});
        let answer = server.client().post("/v1/completions", &body);
        assert_eq!(answer.status, 500, "stream: {stream}");
        assert_eq!(answer.json()["error"]["code"], "internal_error");
    }
}

/// What a model's own template cannot do, it does not list, and refuses by that name.
#[test]
fn a_model_of_one_question_refuses_a_second_turn() {
    let server = TestServer::start(Alphabet::at_once());
    let question = "Q: {{ messages[0].content }} A:";
    let limits = ExecutorConfig::default();
    let pool = server.server().state().pool();
    add_model_with(
        pool,
        ["single", "one"],
        Alphabet::at_once(),
        &limits,
        question,
    );
    let mut client = server.client();
    let mut capabilities = |id: &str| {
        let model = client.get(&format!("/v1/models/{id}")).json();
        let listed = model["capabilities"].as_array().expect("a list").clone();
        move |name: &str| listed.iter().any(|one| one == name)
    };
    let single = capabilities("single");
    assert!(single("chat") && !single("multi_turn"));
    // It does not loop either.
    assert!(!single("loops"));
    let asks = |n_turns: usize| {
        let turn = [
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": "b"}),
        ];
        let messages: Vec<_> = turn.iter().cycle().take(2 * n_turns - 1).cloned().collect();
        json!({"model": "single", "max_tokens": 2, "messages": messages})
    };
    let mut client = server.client();
    assert_eq!(client.post("/v1/chat/completions", &asks(1)).status, 200);
    let refused = client.post("/v1/chat/completions", &asks(2));
    let error = refused.json()["error"].clone();
    assert_eq!(
        (refused.status, &error["code"]),
        (400, &json!("missing_capability"))
    );
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|text| text.contains("'multi_turn'")),
        "{error}"
    );
    let looped = json!({"model": "single", "prompt": "a", "max_tokens": 1, "loops": 2});
    let error = client.post("/v1/completions", &looped).json()["error"].clone();
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|text| text.contains("'loops'")),
        "{error}"
    );
}
