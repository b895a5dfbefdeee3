//! `/v1/native/prefixes` and who reuses whose prompts, over the real engine with a tiny model.

use super::{TestServer, wait_for};
use crate::client::{Answer, Client};
use crate::real_engine::serve_tiny;
use serde_json::{Value, json};
use tinyloop::config::{EngineConfig, ExecutorConfig, PrefixIsolation};

const PREFIXES: &str = "/v1/native/prefixes";

/// 40 pages, of which one context of 128 tokens needs 8: 20 may be pinned.
fn start(isolation: PrefixIsolation, keys: &[&str]) -> TestServer {
    let executor = ExecutorConfig {
        prefix_isolation: isolation,
        ..ExecutorConfig::default()
    };
    let engine = EngineConfig {
        context_length: Some(128),
        kv_tokens: Some(640),
        ..EngineConfig::default()
    };
    serve_tiny(executor, engine, |config| {
        config.server.http_workers = 8;
        config.server.api_keys = keys.iter().map(|key| (*key).to_owned()).collect();
    })
}

fn tokens(first: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (first + i * 7) % 200).collect()
}

fn ask(client: &mut Client, key: &str, method: &str, path: &str, body: &Value) -> Answer {
    let authorization = format!("Bearer {key}");
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    client.send(method, path, &[("authorization", &authorization)], &body);
    client.read_answer()
}

fn completion(prompt: &[u32]) -> Value {
    json!({"prompt": prompt, "max_tokens": 8, "seed": 3, "temperature": 1.2, "ignore_eos": true})
}

fn cached(answer: &Value) -> &Value {
    &answer["usage"]["prompt_tokens_details"]["cached_tokens"]
}

#[test]
fn a_registered_prefix_is_skipped_listed_and_removed() {
    let server = start(PrefixIsolation::Key, &[]);
    let mut client = server.client();
    let prompt = tokens(1, 60);
    let mut fresh = completion(&prompt);
    fresh["cache_prompt"] = Value::from(false);
    let miss = client.post("/v1/completions", &fresh).json();
    assert_eq!(cached(&miss), 0);

    let body = json!({"model": "tiny", "tokens": &prompt[..40]});
    let answer = client.post(PREFIXES, &body);
    assert_eq!(answer.status, 200);
    let prefix = answer.json();
    let id = prefix["id"].as_str().expect("an id").to_owned();
    assert_eq!(id.len(), 32);
    assert_eq!(
        prefix,
        json!({"id": id, "object": "prefix", "model": "tiny", "tokens": 40, "cached_tokens": 32,
            "loops": 1, "cache_window": 0, "hits": 0})
    );
    assert_eq!(
        client.post(PREFIXES, &body).json()["id"],
        id,
        "registered once"
    );

    let hit = client.post("/v1/completions", &completion(&prompt)).json();
    assert_eq!(cached(&hit), 32);
    assert_eq!(hit["choices"], miss["choices"]);
    let mut streamed = completion(&prompt);
    streamed["stream"] = Value::from(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = client.post("/v1/completions", &streamed).events();
    let usage: Value = serde_json::from_str(&events[events.len() - 2]).expect("JSON");
    assert_eq!(cached(&usage), 48, "its own first answer is found as well");

    let list = client.get(PREFIXES).json();
    assert_eq!(
        (
            &list["entries"],
            &list["total_cached_tokens"],
            &list["hits"]
        ),
        (&json!(1), &json!(32), &json!(2))
    );
    assert_eq!(
        (&list["data"][0]["id"], &list["data"][0]["hits"]),
        (&json!(id), &json!(2))
    );
    for line in [
        r#"tinyloop_prefix_pool_entries{model="tiny"} 1"#,
        r#"tinyloop_prefix_pool_cached_tokens{model="tiny"} 32"#,
        r#"tinyloop_prefix_tokens_reused_total{model="tiny"} 80"#,
        // The registration's own job is a lookup too; the first request asked for none.
        r#"tinyloop_prefix_queries_total{model="tiny"} 3"#,
        r#"tinyloop_prefix_hits_total{model="tiny"} 2"#,
    ] {
        // A request is counted just after its client has the answer.
        wait_for(line, || server.executor.metrics_text("").contains(line));
    }
    let snapshot = client.get("/v1/native/snapshot").json();
    let pool = json!({"entries": 1, "total_cached_tokens": 32, "hits": 2});
    assert_eq!(snapshot["models"][0]["prefix_pool"], pool);

    client.send("DELETE", &format!("{PREFIXES}/{id}"), &[], "");
    let deleted = client.read_answer().json();
    assert_eq!(
        deleted,
        json!({"id": id, "object": "prefix", "deleted": true})
    );
    client.send("DELETE", &format!("{PREFIXES}/{id}"), &[], "");
    let gone = client.read_answer();
    assert_eq!(
        (gone.status, &gone.json()["error"]["code"]),
        (404, &json!("prefix_not_found"))
    );
    assert_eq!(client.get(PREFIXES).json()["entries"], 0);
}

#[test]
fn texts_and_messages_begin_what_later_requests_ask() {
    let server = start(PrefixIsolation::Key, &[]);
    let mut client = server.client();
    let text = "the quick brown fox jumps over the lazy dog and over the quick brown fox";
    let prefix = client.post(PREFIXES, &json!({"text": text})).json();
    let kept = prefix["cached_tokens"].as_u64().expect("a number");
    assert!(kept >= 16 && kept.is_multiple_of(16), "{prefix}");
    let prompt = json!({"prompt": format!("{text} and more"), "max_tokens": 2, "temperature": 0});
    let answer = client.post("/v1/completions", &prompt).json();
    // The last block may hold a token that the longer text splits otherwise.
    assert!(cached(&answer).as_u64() >= Some(kept - 16), "{answer}");

    let system = json!({"role": "system", "content": text});
    let prefix = client.post(PREFIXES, &json!({"messages": [system]})).json();
    let kept = prefix["cached_tokens"].as_u64().expect("a number");
    let chat = json!({"max_tokens": 2, "temperature": 0,
        "messages": [system, {"role": "user", "content": "hello"}]});
    let answer = client.post("/v1/chat/completions", &chat).json();
    assert!(cached(&answer).as_u64() >= Some(kept - 16), "{answer}");
    client.send("DELETE", PREFIXES, &[], "");
    assert_eq!(client.read_answer().json()["deleted"], 2);
}

#[test]
fn wrong_registrations_are_refused_with_a_reason() {
    let server = start(PrefixIsolation::Key, &[]);
    let mut client = server.client();
    for (body, status, code, words) in [
        (
            json!({}),
            400,
            "missing_required_parameter",
            "exactly one of",
        ),
        (
            json!({"text": "a", "tokens": [1]}),
            400,
            "missing_required_parameter",
            "exactly one",
        ),
        (
            json!({"tokens": tokens(1, 15)}),
            400,
            "invalid_value",
            "15 tokens",
        ),
        (
            json!({"tokens": tokens(1, 129)}),
            400,
            "context_length_exceeded",
            "128 tokens",
        ),
        (
            json!({"tokens": [1, 9_999_999]}),
            400,
            "invalid_value",
            "9999999",
        ),
        (json!({"tokens": "x"}), 400, "invalid_value", "an array"),
        (json!({"text": 5}), 400, "invalid_value", "a string"),
        (
            json!({"messages": []}),
            400,
            "invalid_value",
            "at least one message",
        ),
        (
            json!({"tokens": tokens(1, 32), "loops": 0}),
            400,
            "invalid_value",
            "0 loops were asked",
        ),
        (
            json!({"tokens": tokens(1, 32), "model": "no"}),
            404,
            "model_not_found",
            "'no'",
        ),
    ] {
        let answer = client.post(PREFIXES, &body);
        let error = answer.json()["error"].clone();
        assert_eq!(
            (answer.status, &error["code"]),
            (status, &json!(code)),
            "{body}: {error}"
        );
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| text.contains(words)),
            "{error}"
        );
    }
    for first in [1, 2] {
        let answer = client.post(PREFIXES, &json!({"tokens": tokens(first * 50, 128)}));
        assert_eq!(answer.status, 200);
    }
    let full = client.post(PREFIXES, &json!({"tokens": tokens(77, 96)}));
    let error = full.json()["error"].clone();
    assert_eq!(
        (full.status, &error["code"]),
        (400, &json!("prefix_pool_full"))
    );
    assert_eq!(full.header("x-should-retry"), Some("false"));
    assert_eq!(
        (
            &error["needed_pages"],
            &error["pinned_pages"],
            &error["pages_max"]
        ),
        (&json!(6), &json!(16), &json!(20))
    );
    assert_eq!(client.get(PREFIXES).json()["entries"], 2);
    client.send("PUT", PREFIXES, &[], "");
    assert_eq!(client.read_answer().status, 405);
    assert_eq!(client.get(&format!("{PREFIXES}/00")).status, 405);
    client.send("DELETE", &format!("{PREFIXES}/zz"), &[], "");
    assert_eq!(client.read_answer().status, 404);
}

#[test]
fn clients_neither_find_nor_see_each_others_prompts() {
    let server = start(PrefixIsolation::Key, &["one", "two"]);
    let mut client = server.client();
    let mut ask = |key: &str, method: &str, path: &str, body: &Value| {
        ask(&mut client, key, method, path, body)
    };
    assert_eq!(ask("three", "GET", PREFIXES, &Value::Null).status, 401);
    let prompt = tokens(1, 40);
    let complete = completion(&prompt);
    let first = ask("one", "POST", "/v1/completions", &complete).json();
    let again = ask("one", "POST", "/v1/completions", &complete).json();
    let other = ask("two", "POST", "/v1/completions", &complete).json();
    assert_eq!(
        (cached(&first), cached(&again), cached(&other)),
        (&json!(0), &json!(32), &json!(0))
    );
    assert_eq!(first["choices"], other["choices"]);
    let mut salted = complete.clone();
    salted["cache_salt"] = json!("x");
    assert_eq!(
        cached(&ask("one", "POST", "/v1/completions", &salted).json()),
        0
    );
    assert_eq!(
        cached(&ask("one", "POST", "/v1/completions", &salted).json()),
        32
    );

    let body = json!({"tokens": tokens(9, 32)});
    let mine = ask("one", "POST", PREFIXES, &body).json()["id"].clone();
    let theirs = ask("two", "POST", PREFIXES, &body).json()["id"].clone();
    assert_ne!(mine, theirs);
    let path = format!("{PREFIXES}/{}", mine.as_str().expect("an id"));
    assert_eq!(ask("two", "DELETE", &path, &Value::Null).status, 404);
    let list = ask("two", "GET", PREFIXES, &Value::Null).json();
    assert_eq!(
        (&list["entries"], &list["data"][0]["id"]),
        (&json!(1), &theirs)
    );
    assert_eq!(
        ask("two", "DELETE", PREFIXES, &Value::Null).json()["deleted"],
        1
    );
    let list = ask("one", "GET", PREFIXES, &Value::Null).json();
    assert_eq!(
        (&list["entries"], &list["data"][0]["id"]),
        (&json!(1), &mine)
    );
}

#[test]
fn clients_that_trust_each_other_share() {
    let server = start(PrefixIsolation::Shared, &["one", "two"]);
    let mut client = server.client();
    let prompt = tokens(1, 40);
    let body = json!({"tokens": prompt});
    let prefix = ask(&mut client, "one", "POST", PREFIXES, &body).json();
    let hit = ask(
        &mut client,
        "two",
        "POST",
        "/v1/completions",
        &completion(&prompt),
    )
    .json();
    assert_eq!(cached(&hit), 32);
    let list = ask(&mut client, "two", "GET", PREFIXES, &Value::Null).json();
    assert_eq!(
        (&list["data"][0]["id"], &list["data"][0]["hits"]),
        (&prefix["id"], &json!(1))
    );
    assert_eq!(
        ask(&mut client, "two", "DELETE", PREFIXES, &Value::Null).json()["deleted"],
        1
    );
}
