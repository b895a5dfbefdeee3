//! `/v1/embeddings` over the real engine: a tiny encoder and a tiny generative model.

use super::fake::Alphabet;
use super::{TestServer, wait_for};
use crate::client::Answer;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::{Config, EngineConfig, ExecutorConfig, ModelConfig, ModelSource};
use tinyloop::pool::Pool;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/models")
        .join(name)
}

/// `bert` and `tiny`, with queues of `max_queue_depth`.
fn start(max_queue_depth: usize) -> TestServer {
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    for (name, file) in [("bert", "tiny_bert.gguf"), ("tiny", "tiny_llama.gguf")] {
        let mut model = ModelConfig::new(name, ModelSource::File(data(file)));
        model.engine = EngineConfig {
            threads: Some(1),
            max_sequences: 4,
            ..EngineConfig::default()
        };
        model.executor = ExecutorConfig {
            max_queue_depth,
            ..ExecutorConfig::default()
        };
        pool.add(model).expect("the names differ");
    }
    pool.load_enabled();
    let is_over = pool.wait_started(Duration::from_secs(60));
    let loaded = pool.get("bert").filter(|_| is_over);
    let executor = Arc::clone(&loaded.expect("the committed models load").executor);
    let mut config = Config::default();
    config.server.port = 0;
    config.management.enabled = false;
    let server = Server::start(&config, pool).expect("the server starts");
    TestServer {
        address: server.address(),
        server: Some(server),
        executor,
    }
}

fn ask(server: &TestServer, body: &Value) -> Answer {
    server.client().post("/v1/embeddings", body)
}

#[track_caller]
fn vectors(answer: &Answer) -> Vec<Vec<f64>> {
    assert_eq!(answer.status, 200, "{:?}", answer.json());
    let list = answer.json();
    assert_eq!(list["object"], "list");
    let items = list["data"].as_array().expect("an array").iter();
    let read = |(idx, item): (usize, &Value)| -> Vec<f64> {
        assert_eq!(
            (&item["object"], &item["index"]),
            (&json!("embedding"), &json!(idx))
        );
        let values = item["embedding"].as_array().expect("floats").iter();
        values
            .map(|value| value.as_f64().expect("a number"))
            .collect()
    };
    items.enumerate().map(read).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn vectors_are_those_of_the_reference_and_have_length_one() {
    let server = start(128);
    let recorded = std::fs::read_to_string(data("tiny_bert.json")).expect("committed");
    let recorded: Value = serde_json::from_str(&recorded).expect("JSON");
    let sequences = recorded["sequences"].as_array().expect("an array");
    let inputs: Vec<&Value> = sequences.iter().map(|each| &each["tokens"]).collect();
    let n_tokens: usize = inputs
        .iter()
        .filter_map(|each| Some(each.as_array()?.len()))
        .sum();
    let answer = ask(&server, &json!({"model": "bert", "input": inputs}));
    let found = vectors(&answer);
    for (found, sequence) in found.iter().zip(sequences) {
        let wanted = sequence["mean"].as_array().expect("an array").iter();
        let wanted: Vec<f64> = wanted.filter_map(Value::as_f64).collect();
        assert!((dot(found, found) - 1.0).abs() < 1e-5);
        let cosine = dot(found, &wanted) / dot(&wanted, &wanted).sqrt();
        assert!(cosine > 0.9998, "{cosine}");
    }
    let answer = answer.json();
    let usage = json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens});
    assert_eq!(
        (&answer["usage"], &answer["model"]),
        (&usage, &json!("bert"))
    );
    // One list of ids is one input.
    let alone = ask(&server, &json!({"model": "bert", "input": inputs[3]}));
    assert_eq!(vectors(&alone), found[3..4]);
}

#[test]
fn base64_holds_the_same_numbers() {
    let server = start(128);
    let ask = |encoding: &str| {
        let body = json!({"model": "bert", "input": "hello there", "encoding_format": encoding});
        ask(&server, &body)
    };
    let floats = &vectors(&ask("float"))[0];
    let text = ask("base64").json()["data"][0]["embedding"].clone();
    let text = text
        .as_str()
        .expect("a string")
        .trim_end_matches('=')
        .to_owned();
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits = text.chars().flat_map(|c| {
        let code = alphabet.find(c).expect("a base64 character");
        (0..6).rev().map(move |bit| (code >> bit & 1) as u8)
    });
    let bits: Vec<u8> = bits.collect();
    let bytes = bits
        .chunks_exact(8)
        .map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit));
    let bytes: Vec<u8> = bytes.collect();
    let (values, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    let decoded = values
        .iter()
        .map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
    for (decoded, float) in decoded.clone().zip(floats) {
        assert!((decoded - float).abs() < 1e-7);
    }
    assert_eq!(decoded.count(), floats.len());
}

#[test]
fn a_text_has_its_special_tokens_and_many_texts_go_in_waves() {
    // The queue takes few, so that the inputs of one request cannot all be in it.
    let server = start(3);
    let ids = server
        .client()
        .post(
            "/v1/native/tokenize",
            &json!({"model": "bert", "text": "hello there"}),
        )
        .json()["tokens"]
        .clone();
    assert_eq!(ids[0], 2, "{ids}");
    let by_text = vectors(&ask(
        &server,
        &json!({"model": "bert", "input": "hello there"}),
    ));
    let by_ids = vectors(&ask(&server, &json!({"model": "bert", "input": ids})));
    assert_eq!(by_text, by_ids);
    for model in ["bert", "tiny"] {
        let texts: Vec<String> = (0..40)
            .map(|n| format!("text {n} {}", "and so on ".repeat(n % 7)))
            .collect();
        let all = vectors(&ask(&server, &json!({"model": model, "input": texts})));
        assert_eq!(all.len(), 40);
        for idx in [0, 6, 20, 39] {
            let alone = ask(&server, &json!({"model": model, "input": [texts[idx]]}));
            assert_eq!(vectors(&alone)[0], all[idx], "{model} {idx}");
        }
    }
    wait_for("an idle executor", || {
        server.executor.snapshot().in_flight == 0
    });
}

#[test]
fn a_cut_vector_has_length_one_again() {
    let server = start(128);
    let whole = &vectors(&ask(&server, &json!({"model": "bert", "input": "a text"})))[0];
    let body = json!({"model": "bert", "input": "a text", "dimensions": 16});
    let cut = &vectors(&ask(&server, &body))[0];
    assert_eq!((whole.len(), cut.len()), (64, 16));
    let scale = dot(&whole[..16], &whole[..16]).sqrt();
    for (cut, whole) in cut.iter().zip(whole) {
        assert!((cut - whole / scale).abs() < 1e-6);
    }
}

#[test]
fn bad_requests_name_their_field() {
    let server = start(128);
    let long = vec![7; 97];
    for (body, code, param) in [
        (json!({}), "missing_required_parameter", "input"),
        (json!({"input": ""}), "invalid_value", "input"),
        (json!({"input": ["a", ""]}), "invalid_value", "input[1]"),
        (json!({"input": []}), "invalid_value", "input"),
        (json!({"input": [["a"]]}), "invalid_value", "input[0]"),
        (json!({"input": [460]}), "invalid_value", "input"),
        (
            json!({"input": ["a", "b ".repeat(99)]}),
            "context_length_exceeded",
            "input[1]",
        ),
        (json!({"input": long}), "context_length_exceeded", "input"),
        (
            json!({"input": "a", "encoding_format": "hex"}),
            "invalid_value",
            "encoding_format",
        ),
        (
            json!({"input": "a", "dimensions": 0}),
            "invalid_value",
            "dimensions",
        ),
        (
            json!({"input": "a", "dimensions": 65}),
            "invalid_value",
            "dimensions",
        ),
        (
            json!({"input": "a", "truncate": true}),
            "unsupported_parameter",
            "truncate",
        ),
        (
            json!({"input": "a", "stream": true}),
            "unsupported_parameter",
            "stream",
        ),
        (
            json!({"input": "a", "pooling": "cls"}),
            "unsupported_parameter",
            "pooling",
        ),
        (
            json!({"input": "a", "task": "retrieval.query"}),
            "unsupported_parameter",
            "task",
        ),
        (
            json!({"input": "a", "input_type": "query"}),
            "unsupported_parameter",
            "input_type",
        ),
        (json!({"input": "a", "loops": 2}), "invalid_value", "loops"),
        (
            json!({"input": "a", "cache_window": 8}),
            "invalid_value",
            "cache_window",
        ),
        (
            json!({"input": "a", "model": "tiny", "dimensions": 8}),
            "unsupported_parameter",
            "dimensions",
        ),
    ] {
        let mut full = json!({"model": "bert"});
        let map = full.as_object_mut().expect("an object");
        map.extend(body.as_object().expect("an object").clone());
        let answer = ask(&server, &full);
        assert_eq!(answer.status, 400, "{full}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!(code), &json!(param)),
            "{full}"
        );
    }
    assert_eq!(server.client().get("/v1/embeddings").status, 405);
}

#[test]
fn an_encoder_generates_nothing_and_says_so() {
    let server = start(128);
    let chat = json!({"model": "bert", "messages": [{"role": "user", "content": "hello"}]});
    let bodies = [
        ("/v1/chat/completions", chat),
        (
            "/v1/completions",
            json!({"model": "bert", "prompt": "hello"}),
        ),
        (
            "/v1/native/generate",
            json!({"model": "bert", "prompt": "hello"}),
        ),
    ];
    for (path, body) in bodies {
        let answer = server.client().post(path, &body);
        assert_eq!(answer.status, 400, "{path}");
        let error = &answer.json()["error"];
        assert_eq!(error["code"], "missing_capability", "{path}");
        let text = error["message"].as_str().expect("a message");
        assert!(
            text.contains("'bert'") && text.contains("'completions'"),
            "{text}"
        );
    }
    let list = server.client().get("/v1/models").json();
    let of = |name: &str| {
        let models = list["data"].as_array().expect("an array").iter();
        models
            .clone()
            .find(|model| model["id"] == name)
            .expect("loaded")
            .clone()
    };
    let (bert, tiny) = (of("bert"), of("tiny"));
    assert_eq!(
        (&bert["type"], &tiny["type"]),
        (&json!("embeddings"), &json!("llm"))
    );
    assert_eq!(
        bert["capabilities"],
        json!(["token_ids", "tokenize", "embeddings"])
    );
    let embedding = json!({"pooling": "mean", "dimensions": 64});
    assert_eq!(bert["meta"]["embedding"], embedding);
    let can = tiny["capabilities"].as_array().expect("an array");
    assert!(can.contains(&json!("embeddings")) && can.contains(&json!("chat")));
}

#[test]
fn a_listed_embedding_can_be_cancelled() {
    let server = TestServer::start(Alphabet::stepped(4));
    let address = server.address;
    let asking = std::thread::Builder::new()
        .name("asks".to_owned())
        .spawn(move || {
            let body = json!({"model": "test/model", "input": ["a", "b"]});
            crate::client::Client::connect(address).post("/v1/embeddings", &body)
        })
        .expect("a thread");
    wait_for("both jobs", || server.executor.snapshot().in_flight == 2);
    let listed = server.client().get("/v1/requests").json();
    let rows = listed["data"].as_array().expect("an array");
    assert_eq!(rows.len(), 2, "{listed}");
    let id = rows[0]["id"].as_str().expect("an id").to_owned();
    let cancelled = server
        .client()
        .post(&format!("/v1/requests/{id}/cancel"), &json!({}));
    assert_eq!(cancelled.status, 200);
    let answer = asking.join().expect("no panic");
    assert_eq!(answer.json()["error"]["code"], "cancelled");
    wait_for("no job", || server.executor.snapshot().in_flight == 0);
}

#[test]
fn a_runtime_that_gives_no_vector_is_at_fault() {
    let server = TestServer::start(Alphabet::at_once());
    let answer = ask(&server, &json!({"model": "test/model", "input": "a"}));
    assert_eq!(answer.status, 500);
    assert_eq!(answer.json()["error"]["code"], "internal_error");
}
