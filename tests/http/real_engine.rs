//! The same APIs over the real engine with a tiny random model: what only a real one can show.

use super::{TestServer, wait_for};
use crate::client::Client;
use crate::shared::with;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::{
    Config, EngineConfig, ExecutorConfig, LoopsConfig, ModelConfig, ModelSource,
};
use tinyloop::pool::Pool;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

/// The tiny model as it is.
pub(crate) fn start() -> TestServer {
    start_with(LoopsConfig::default())
}

/// The same model; its layers may loop.
pub(crate) fn start_with(loops: LoopsConfig) -> TestServer {
    let engine = EngineConfig {
        loops,
        ..EngineConfig::default()
    };
    serve_tiny(ExecutorConfig::default(), engine, |config| {
        config.server.http_workers = 32;
    })
}

/// A server over the committed tiny model with one kernel thread and four places; `edit` changes its
/// planes.
pub(crate) fn serve_tiny(
    executor: ExecutorConfig,
    engine: EngineConfig,
    edit: impl FnOnce(&mut Config),
) -> TestServer {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    let model = ModelConfig {
        executor,
        engine: EngineConfig {
            threads: Some(1),
            max_sequences: 4,
            ..engine
        },
        ..ModelConfig::new("tiny", ModelSource::File(file))
    };
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    pool.add(model).expect("the pool is empty");
    pool.load_enabled();
    let is_over = pool.wait_started(Duration::from_secs(60));
    let loaded = pool.get("tiny").filter(|_| is_over);
    let executor = Arc::clone(&loaded.expect("the committed model loads").executor);
    let mut config = Config::default();
    config.server.port = 0;
    config.management.enabled = false;
    edit(&mut config);
    let server = Server::start(&config, pool).expect("the server starts");
    TestServer {
        address: server.address(),
        server: Some(server),
        executor,
    }
}

fn chat(extra: &Value) -> Value {
    with(
        json!({
            "model": "tiny", "max_tokens": 12, "ignore_eos": true, "seed": 3, "temperature": 1.2,
            "messages": [{"role": "user", "content": "tell me"}],
        }),
        extra,
    )
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let server = start();
    let mut client = server.client();
    let whole = client
        .post("/v1/chat/completions", &chat(&json!({"n": 2})))
        .json();
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    let streamed = client.post(
        "/v1/chat/completions",
        &chat(&json!({"n": 2, "stream": true})),
    );
    let events = streamed.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let mut texts = [String::new(), String::new()];
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).expect("JSON");
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(&whole["choices"][index]["message"]["content"], text);
    }
    assert_ne!(texts[0], texts[1], "two choices of one seed");
}

#[test]
fn scoring_gives_a_logprob_for_every_token_but_the_first() {
    let server = start();
    let body = json!({"prompt": "the ship", "max_tokens": 0, "echo": true, "logprobs": 2});
    let json = server.client().post("/v1/completions", &body).json();
    let choice = &json["choices"][0];
    assert_eq!(choice["text"], "the ship");
    let logprobs = choice["logprobs"]["token_logprobs"]
        .as_array()
        .expect("a list")
        .clone();
    assert_eq!(json["usage"]["prompt_tokens"], logprobs.len());
    assert_eq!(logprobs[0], Value::Null);
    for logprob in &logprobs[1..] {
        let logprob = logprob.as_f64().expect("a number");
        assert!((-9999.0..=0.0).contains(&logprob), "{logprob}");
    }
}

#[test]
fn answers_in_a_crowd_are_the_answers_given_alone() {
    let server = start();
    let body = |number: usize| {
        json!({"prompt": format!("number {number}"), "max_tokens": 8, "temperature": 0,
            "ignore_eos": true})
    };
    let text = |answer: Value| answer["choices"][0]["text"].clone();
    let mut client = server.client();
    let alone: Vec<Value> = (0..12)
        .map(|number| text(client.post("/v1/completions", &body(number)).json()))
        .collect();
    let mut clients: Vec<Client> = (0..12).map(|_| server.client()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.send("POST", "/v1/completions", &[], &body(number).to_string());
    }
    for (client, alone) in clients.iter_mut().zip(&alone) {
        assert_eq!(&text(client.read_answer().json()), alone);
    }
}

#[test]
fn who_hangs_up_gives_slot_and_memory_back() {
    let server = start();
    let mut client = server.client();
    let body = chat(&json!({"max_tokens": 900, "stream": true}));
    client.send("POST", "/v1/chat/completions", &[], &body.to_string());
    assert_eq!(client.read_head().status, 200);
    assert!(client.read_chunk().is_some());
    drop(client);
    wait_for("the slot and its pages", || {
        let snapshot = server.executor.snapshot();
        snapshot.in_flight == 0 && snapshot.replicas[0].status.kv_pages_used == 0
    });
    let metrics = server.executor.metrics_text("");
    let cancelled = r#"tinyloop_requests_total{model="tiny",outcome="cancelled"} 1"#;
    assert!(metrics.contains(cancelled), "it ran to its end: {metrics}");
}
