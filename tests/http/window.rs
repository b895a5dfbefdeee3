//! `cache_window` through the APIs: its range, its default, registered prefixes beside it, and an
//! answer longer than the KV pool.

use super::TestServer;
use super::real_engine::serve_tiny;
use crate::client::Answer;
use serde_json::{Value, json};
use tinyloop::config::{EngineConfig, ExecutorConfig};

/// 8 pages for contexts of 16 in a window of 24 tokens.
fn small() -> TestServer {
    let engine = EngineConfig {
        context_length: Some(256),
        kv_tokens: Some(128),
        cache_window: 24,
        max_rows: 16,
        ..EngineConfig::default()
    };
    serve_tiny(ExecutorConfig::default(), engine, |_| {})
}

fn ask(server: &TestServer, path: &str, extra: &Value) -> Answer {
    let mut body = json!({
        "model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": true,
    });
    if path == "/v1/native/prefixes" {
        body = json!({}); // it generates nothing, and refuses what it does not know
    }
    let map = body.as_object_mut().expect("an object");
    map.extend(extra.as_object().expect("an object").clone());
    server.client().post(path, &body)
}

#[track_caller]
fn text(server: &TestServer, extra: &Value) -> Value {
    let answer = ask(server, "/v1/completions", extra);
    assert_eq!(answer.status, 200, "{extra}: {}", answer.json());
    answer.json()["choices"][0]["text"].clone()
}

fn tokens(first: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (first + i * 7) % 200).collect()
}

#[test]
fn the_range_is_told_and_the_default_is_the_models() {
    let server = small();
    let messages = json!([{"role": "user", "content": "tell me"}]);
    for (path, prompt) in [
        ("/v1/completions", json!({"prompt": "tell me"})),
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/native/prefixes", json!({"tokens": tokens(1, 32)})),
    ] {
        let with = |window: Value| {
            let mut body = prompt.clone();
            body["cache_window"] = window;
            ask(&server, path, &body)
        };
        assert_eq!(with(json!(16)).status, 200, "{path}");
        for wrong in [json!(257), json!(-1), json!(1.5), json!("16")] {
            let answer = with(wrong.clone());
            assert_eq!(answer.status, 400, "{path} {wrong}");
            let error = answer.json()["error"].clone();
            assert_eq!(error["param"], "cache_window", "{path} {wrong}: {error}");
        }
        let error = with(json!(257)).json()["error"]["message"].clone();
        let error = error.as_str().expect("a text");
        assert!(
            error.contains("257") && error.contains("1 to 256"),
            "{error}"
        );
    }
    let prompt = tokens(5, 70);
    let default = text(&server, &json!({"prompt": prompt}));
    let named = text(&server, &json!({"prompt": prompt, "cache_window": 24}));
    let full = text(&server, &json!({"prompt": prompt, "cache_window": 0}));
    assert_eq!(default, named);
    assert_ne!(default, full);
}

#[test]
fn an_answer_may_be_longer_than_the_pool_but_not_without_a_window() {
    let server = small();
    let long = json!({"prompt": tokens(1, 16), "max_tokens": 240});
    let answer = ask(&server, "/v1/completions", &long);
    assert_eq!(answer.status, 200, "{}", answer.json());
    assert_eq!(answer.json()["usage"]["completion_tokens"], 240);
    let mut full = long.clone();
    full["cache_window"] = json!(0);
    let answer = ask(&server, "/v1/completions", &full);
    assert_eq!(answer.status, 400, "{}", answer.json());
    // The context is the context, whatever is held of it.
    let mut too_long = long;
    too_long["max_tokens"] = json!(241);
    let answer = ask(&server, "/v1/completions", &too_long);
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn a_prefix_registered_for_a_window_is_found_by_it_alone() {
    let server = small();
    let prefix = json!({"tokens": tokens(1, 32), "cache_window": 16});
    let answer = ask(&server, "/v1/native/prefixes", &prefix).json();
    assert_eq!(
        (&answer["cached_tokens"], &answer["cache_window"]),
        (&json!(32), &json!(16))
    );
    // What a registration does not know is refused, not dropped.
    for (name, value) in [
        ("cache_windw", json!(16)),
        ("adaptive", json!({"rule": "latent", "threshold": 0.1})),
    ] {
        let mut wrong = prefix.clone();
        wrong[name] = value;
        let answer = ask(&server, "/v1/native/prefixes", &wrong);
        assert_eq!(answer.status, 400, "{name}");
        assert_eq!(answer.json()["error"]["param"], name);
    }
    for (window, cached) in [(16, 32), (24, 0), (0, 0)] {
        let body = json!({"prompt": tokens(1, 50), "cache_window": window});
        let usage = ask(&server, "/v1/completions", &body).json()["usage"].clone();
        let details = &usage["prompt_tokens_details"];
        assert_eq!(details["cached_tokens"], cached, "{window}");
    }
}
