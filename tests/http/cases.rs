//! What people complained about in other servers, one test per case, under its number.
//!
//! There are 25 cases; those that are not here stand beside what they are about (`case_NN_..`), and
//! `tests/tidy.rs` checks that none is missing.

use super::{TestServer, wait_for};
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::real_engine;
use crate::shared::with;
use crate::streams::chat;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use tinyloop::config::{
    Config, EngineConfig, ExecutorConfig, FakeConfig, ModelConfig, ModelSource,
};
use tinyloop::pool::{Pool, RuntimeState};
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

/// A server over these models, once each of them is loaded or has failed.
fn serve(models: Vec<ModelConfig>) -> (Server, Arc<Pool>) {
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    for model in models {
        pool.add(model).expect("the name is free");
    }
    pool.load_enabled();
    assert!(pool.wait_started(Duration::from_secs(60)));
    let mut config = Config::default();
    config.server.port = 0;
    config.management.enabled = false;
    let server = Server::start(&config, Arc::clone(&pool)).expect("the server starts");
    (server, pool)
}

/// A model that repeats its prompt, byte by byte.
fn echo() -> ModelConfig {
    ModelConfig::new("echo", ModelSource::Fake(FakeConfig::default()))
}

fn completion(prompt: &str, extra: &Value) -> Value {
    with(
        json!({"prompt": prompt, "max_tokens": prompt.len() * 2}),
        extra,
    )
}

/// Text of a whole answer and of its stream, each with why it ended.
fn both_ways(client: &mut Client, body: &Value) -> [(String, Value); 2] {
    let whole = client.post("/v1/completions", body);
    assert_eq!(
        whole.status,
        200,
        "{}",
        String::from_utf8_lossy(&whole.body)
    );
    let choice = whole.json()["choices"][0].clone();
    let text = choice["text"].as_str().expect("a text").to_owned();
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let streamed = client.post("/v1/completions", &streamed);
    [(text, choice["finish_reason"].clone()), joined(&streamed)]
}

/// All pieces of a stream, and why it ended.
fn joined(streamed: &Answer) -> (String, Value) {
    let (mut text, mut finish) = (String::new(), Value::Null);
    let events = streamed.events();
    let (done, chunks) = events.split_last().expect("a stream ends");
    assert_eq!(done, "[DONE]");
    for chunk in chunks {
        let chunk: Value = serde_json::from_str(chunk).expect("JSON");
        text.push_str(chunk["choices"][0]["text"].as_str().unwrap_or_default());
        finish = chunk["choices"][0]["finish_reason"].clone();
    }
    (text, finish)
}

#[test]
fn case_03_cancelling_one_request_never_changes_the_bytes_of_another() {
    let server = real_engine::start();
    let body = |seed: u32, max_tokens: u32| {
        json!({"prompt": "once upon", "max_tokens": max_tokens, "seed": seed, "temperature": 1.0,
            "ignore_eos": true})
    };
    let text = |answer: &Answer| answer.json()["choices"][0]["text"].clone();
    let mut client = server.client();
    let alone = text(&client.post("/v1/completions", &body(1, 120)));
    // Neighbours, some in the batch and some still waiting, leave at every moment of its life.
    client.send("POST", "/v1/completions", &[], &body(1, 120).to_string());
    for round in 0..12 {
        let mut neighbours: Vec<Client> = (0..6).map(|_| server.client()).collect();
        for (neighbour, seed) in neighbours.iter_mut().zip(2..) {
            let body = body(seed + round, 900).to_string();
            neighbour.send("POST", "/v1/completions", &[], &body);
        }
        drop(neighbours);
    }
    assert_eq!(text(&client.read_answer()), alone);
    wait_for("the neighbours' slots", || {
        server.executor.snapshot().in_flight == 0
    });
}

#[test]
fn case_05_what_waits_is_bounded_by_number_by_tokens_and_by_time() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.executor.max_queue_depth = 2;
        config.executor.max_queued_prompt_tokens = Some(100);
    });
    let ask = |extra: &Value| {
        let mut client = server.client();
        let body = chat(extra).to_string();
        client.send("POST", "/v1/chat/completions", &[], &body);
        client
    };
    // How long an answer takes is known from the first.
    let mut slow = ask(&json!({"stream": false}));
    wait_for("the job", || runtime.n_active() == 1);
    let started = Instant::now();
    wait_for("30 ms", || started.elapsed() > Duration::from_millis(30));
    runtime.run_out();
    assert_eq!(slow.read_answer().status, 200);

    let _running = ask(&json!({}));
    wait_for("the job", || runtime.n_active() == 1);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(50)}]});
    let _waiting = ask(&long);
    wait_for("its place", || server.executor.snapshot().queue_depth == 1);
    // From here on the engine does not move: who is refused hears it without it.
    let refused = |extra: &Value, code: &str| {
        let answer = ask(extra).read_answer();
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, &error["code"]), (503, &json!(code)));
        assert!(answer.header("retry-after").is_some(), "{error}");
        assert_eq!(
            answer.header("x-tinyloop-rejected"),
            error["reason"].as_str()
        );
        error
    };
    // There is a place, but not for so many tokens.
    let error = refused(&long, "queue_full");
    assert_eq!(error["max_queued_prompt_tokens"], 100, "{error}");
    // There is a place and room, but it would come too late: two answers of 30 ms stand before it.
    let error = refused(&json!({"slo_ms": 50}), "slo_unattainable");
    assert!(error["predicted_wait_ms"].as_u64() >= Some(60), "{error}");
    let _second = ask(&json!({}));
    wait_for("its place", || server.executor.snapshot().queue_depth == 2);
    let error = refused(&json!({}), "queue_full");
    assert_eq!(error["max_queue_depth"], 2);
    let snapshot = server.executor.snapshot();
    assert_eq!(
        (snapshot.queue_depth, runtime.n_active()),
        (2, 1),
        "refusals hold nothing"
    );
}

#[test]
fn case_06_a_burst_takes_exactly_the_places_there_are() {
    const CLIENTS: usize = 48;
    let runtime = Alphabet::stepped(2);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.executor.max_queue_depth = 4;
        config.server.http_workers = 64;
    });
    let barrier = Barrier::new(CLIENTS);
    // Rendering this message is an error: whoever is refused has not been rendered.
    let refused: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = server.client();
                    barrier.wait();
                    let body = chat(&json!({"stream": false}));
                    client.post("/v1/chat/completions", &body).status
                })
            })
            .collect();
        wait_for("all places", || {
            let snapshot = server.executor.snapshot();
            (snapshot.in_flight, snapshot.queue_depth) == (2, 4)
        });
        wait_for("everybody else's refusal", || {
            server
                .executor
                .metrics_text("")
                .contains(&format!(r#"reason="queue_full"}} {}"#, CLIENTS - 6))
        });
        let is_busy = || {
            let snapshot = server.executor.snapshot();
            snapshot.queue_depth + snapshot.in_flight as usize > 0
        };
        while is_busy() {
            runtime.step();
        }
        let statuses = clients
            .into_iter()
            .map(|client| client.join().expect("no panic"));
        statuses.filter(|status| *status == 503).count()
    });
    assert_eq!(refused, CLIENTS - 6);
}

#[test]
fn case_13_characters_of_several_tokens_arrive_whole() {
    let (server, _pool) = serve(vec![echo()]);
    let mut client = Client::connect(server.address());
    // One token is one byte here. The answer ends inside a character, which is told at its end.
    let prompt = "a€é🙂日本";
    let body = completion(prompt, &json!({"max_tokens": prompt.len() + 2}));
    for (text, finish) in both_ways(&mut client, &body) {
        assert_eq!(text, format!("{prompt}a\u{fffd}"));
        assert_eq!(finish, "length");
    }
    let body = completion(prompt, &json!({"logprobs": 1, "max_tokens": prompt.len()}));
    let whole = client.post("/v1/completions", &body).json();
    let tokens = whole["choices"][0]["logprobs"]["tokens"]
        .as_array()
        .cloned();
    assert_eq!(tokens.expect("a list").len(), prompt.len());
    // Bytes that are no text, at the end and before text: answers stay JSON, and say what was said.
    for bytes in [
        &b"a\xff(\xe2\x82b\xf0\x9f"[..],
        b"\xc3",
        b"\x80\x80ok\xed\xa0\x80\xc3\xa9",
    ] {
        let said = String::from_utf8_lossy(bytes);
        let body = json!({"prompt": bytes, "max_tokens": bytes.len()});
        for (text, _) in both_ways(&mut client, &body) {
            assert_eq!(text, said, "{bytes:?}");
        }
    }
    server.shutdown(Duration::ZERO);
}

/// Wherever an answer is cut, the bytes beside the log-probabilities are those that the model said, and the
/// text of the whole and of the streamed answer is made of them.
#[test]
fn case_13_log_probabilities_carry_the_bytes_of_their_tokens() {
    let (server, _pool) = serve(vec![echo()]);
    let mut client = Client::connect(server.address());
    let question = |max_tokens: usize, stream: bool| {
        json!({"messages": [{"role": "user", "content": "€🙂"}], "logprobs": true,
            "max_tokens": max_tokens, "stream": stream})
    };
    let bytes_of = |choice: &Value| -> Vec<u8> {
        let entries = choice["logprobs"]["content"]
            .as_array()
            .into_iter()
            .flatten();
        let bytes = entries.flat_map(|entry| entry["bytes"].as_array().expect("bytes"));
        bytes
            .map(|byte| byte.as_u64().expect("a byte") as u8)
            .collect()
    };
    let mut n_cut = 0;
    for max_tokens in 1..60 {
        let answer = client.post("/v1/chat/completions", &question(max_tokens, false));
        let choice = answer.json()["choices"][0].clone();
        let text = choice["message"]["content"].as_str().expect("a text");
        let bytes = bytes_of(&choice);
        assert_eq!(text, String::from_utf8_lossy(&bytes));
        n_cut += usize::from(text.ends_with('\u{fffd}'));
        let streamed = client.post("/v1/chat/completions", &question(max_tokens, true));
        let (mut joined, mut joined_bytes) = (String::new(), Vec::new());
        for event in streamed.events().iter().filter(|event| *event != "[DONE]") {
            let chunk: Value = serde_json::from_str(event).expect("JSON");
            let choice = &chunk["choices"][0];
            joined.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
            joined_bytes.extend(bytes_of(choice));
        }
        assert_eq!((joined.as_str(), joined_bytes), (text, bytes));
    }
    assert!(
        n_cut >= 5,
        "both characters were cut at each of their bytes: {n_cut}"
    );
    server.shutdown(Duration::ZERO);
}

#[test]
fn case_14_streams_and_whole_answers_stop_at_the_same_byte() {
    let (server, _pool) = serve(vec![echo()]);
    let address = server.address();
    // Few letters, so that stop strings begin often, overlap, and are met late or never.
    let text = prop::collection::vec(prop::sample::select(vec!["a", "b", "é", "🙂", "\n"]), 1..24);
    let stop = prop::collection::vec(prop::sample::select(vec!["a", "b", "é", "🙂"]), 1..6);
    let stops = prop::collection::vec(stop, 0..4);
    let config = ProptestConfig {
        cases: 200,
        ..ProptestConfig::default()
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let checked = runner.run(&(text, stops, any::<bool>()), |(text, stops, include)| {
        let (prompt, stops) = (text.concat(), stops.iter().map(|stop| stop.concat()));
        let stops: Vec<String> = stops.collect();
        let body = completion(
            &prompt,
            &json!({"stop": stops, "include_stop_str_in_output": include}),
        );
        let mut client = Client::connect(address);
        let [whole, streamed] = both_ways(&mut client, &body);
        prop_assert_eq!(&whole, &streamed);
        let said = prompt.repeat(2);
        let first = stops.iter().filter_map(|stop| {
            let start = said.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        let (expected, finish) = match first.min() {
            Some((end, start)) => (&said[..if include { end } else { start }], "stop"),
            None => (said.as_str(), "length"),
        };
        prop_assert_eq!((whole.0.as_str(), &whole.1), (expected, &json!(finish)));
        Ok(())
    });
    server.shutdown(Duration::ZERO);
    checked.expect("every prompt and set of stop strings");
}

#[test]
fn case_15_usage_comes_once_at_the_end_and_only_when_asked() {
    let server = TestServer::start(Alphabet::at_once());
    let events = |extra: Value| {
        let answer = server.client().post("/v1/chat/completions", &chat(&extra));
        let events = answer.events();
        let (_, chunks) = events.split_last().expect("a stream ends");
        let parsed = chunks.iter().map(|chunk| serde_json::from_str(chunk));
        parsed
            .collect::<Result<Vec<Value>, _>>()
            .expect("every chunk is JSON")
    };
    for (options, asked) in [
        (json!({}), false),
        (json!({"stream_options": {}}), false),
        (json!({"stream_options": null}), false),
        (json!({"stream_options": {"include_usage": false}}), false),
        (json!({"stream_options": {"include_usage": true}}), true),
    ] {
        let chunks = events(options.clone());
        let (last, before) = chunks.split_last().expect("there are chunks");
        if asked {
            assert_eq!(last["choices"], json!([]));
            assert_eq!(last["usage"]["completion_tokens"], 3);
            assert!(before.iter().all(|chunk| chunk["usage"] == Value::Null));
            assert!(before.iter().all(|chunk| chunk.get("usage").is_some()));
        } else {
            assert!(
                chunks.iter().all(|chunk| chunk.get("usage").is_none()),
                "{options}"
            );
            assert!(chunks.iter().all(|chunk| chunk["choices"] != json!([])));
        }
    }
}

#[test]
fn case_20_a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let runtime = Alphabet::at_once();
    let server = TestServer::start(Arc::clone(&runtime));
    let mut client = server.client();
    for (path, body) in [
        (
            "/v1/chat/completions",
            chat(&json!({"messages": [{"role": "user", "content": "x".repeat(400)}]})),
        ),
        (
            "/v1/completions",
            json!({"prompt": "x".repeat(400), "max_tokens": 4}),
        ),
    ] {
        let answer = client.post(path, &body);
        assert_eq!(answer.status, 400, "{path}");
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().expect("a sentence");
        assert!(message.contains("256"), "the limit: {message}");
        let has_need = message.split(|c: char| !c.is_ascii_digit());
        let most = has_need
            .filter_map(|number| number.parse::<u32>().ok())
            .max();
        assert!(most.is_some_and(|need| need >= 400), "the need: {message}");
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
}

#[test]
fn case_21_a_broken_file_fails_its_model_and_no_other() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    let sound = std::fs::read(file).expect("the committed model");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let broken = |name: &str, bytes: &[u8]| {
        let path = folder.join(format!("case_21_{name}.gguf"));
        std::fs::write(&path, bytes).expect("the folder is there");
        let mut model = ModelConfig::new(name, ModelSource::File(path));
        model.engine.threads = Some(1);
        model
    };
    let mut foreign = sound.clone();
    foreign[0] = b'X';
    let (server, pool) = serve(vec![
        echo(),
        broken("short", &sound[..sound.len() / 2]),
        broken("header", &sound[..20]),
        broken("foreign", &foreign),
        broken("empty", b""),
    ]);
    let mut client = Client::connect(server.address());
    for name in ["short", "header", "foreign", "empty"] {
        let answer = client.post("/v1/completions", &json!({"model": name, "prompt": "a"}));
        assert_eq!(answer.status, 503, "{name}");
        assert_eq!(answer.json()["error"]["code"], "model_failed", "{name}");
        let reports = pool.reports();
        let report = reports.iter().find(|report| report.name == name);
        let report = report.expect("a row");
        assert_eq!(report.runtime_state, RuntimeState::Failed, "{name}");
        assert!(report.last_error.is_some(), "{name}");
    }
    let answer = client.post("/v1/completions", &json!({"model": "echo", "prompt": "ab"}));
    assert_eq!(answer.status, 200);
    server.shutdown(Duration::ZERO);
}

#[test]
fn case_22_cached_prefixes_stay_within_the_memory_of_the_model() {
    let engine = EngineConfig {
        kv_tokens: Some(256),
        context_length: Some(128),
        ..EngineConfig::default()
    };
    let server = real_engine::serve_tiny(ExecutorConfig::default(), engine, |_| {});
    let mut client = server.client();
    let pages = || server.executor.snapshot().replicas[0].status.clone();
    let total = pages().kv_pages_total;
    let mut was_full = false;
    for number in 0..40 {
        let prompt = format!("{number} is the number of this story, which is long enough to fill");
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        assert_eq!(
            client.post("/v1/completions", &body).status,
            200,
            "{number}"
        );
        let now = pages();
        assert_eq!(now.kv_pages_total, total);
        assert!(now.kv_pages_used + now.kv_pages_cached <= total);
        was_full |= now.kv_pages_cached + 4 > total;
    }
    assert!(was_full, "the cache never had to give anything up");
}

#[test]
fn case_24_health_follows_the_engine_and_not_the_port() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.server.stall = Duration::from_secs(2);
    });
    let mut client = server.client();
    assert_eq!(client.get("/health").status, 200);
    runtime.set_step_age(Some(Duration::from_secs(1)));
    assert_eq!(client.get("/health").status, 200, "a long step is no fault");
    runtime.set_step_age(Some(Duration::from_secs(3)));
    let ill = client.get("/health");
    assert_eq!(
        (ill.status, &ill.json()["status"]),
        (503, &json!("stalled"))
    );
    let metrics = client.get("/metrics");
    assert_eq!(metrics.status, 200, "metrics are always on");
    runtime.set_step_age(None);
    assert_eq!(client.get("/health").status, 200);
}
