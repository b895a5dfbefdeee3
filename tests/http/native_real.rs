//! The native API over the real engine: scores that agree with `tinyloop score`, streams that say what
//! whole answers say, and depth that is real and told.

use super::TestServer;
use crate::client::Client;
use crate::depth::looped;
use crate::native::{GENERATE, events};
use crate::real_engine::start;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const TEXT: &str = "The quick brown fox jumps over the lazy dog; the ship sails at dawn.";

fn with(body: &Value, extra: &Value) -> Value {
    crate::shared::with(body.clone(), extra)
}

#[track_caller]
fn post(client: &mut Client, body: &Value) -> Value {
    let answer = client.post(GENERATE, body);
    assert_eq!(answer.status, 200, "{body}: {}", answer.json());
    answer.json()
}

fn tokens_of(client: &mut Client, text: &str) -> Vec<u64> {
    let body = json!({"text": text, "add_special": false, "parse_special": false});
    let answer = client.post("/v1/native/tokenize", &body).json();
    let tokens = answer["tokens"].as_array().expect("a list");
    tokens.iter().filter_map(Value::as_u64).collect()
}

/// What the command line says about the same tokens: one window, its second half scored.
fn command_line_score(extra: &[&str]) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("native_score.txt");
    std::fs::write(&file, TEXT).expect("the test's folder can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_tinyloop"))
        .args(["score", "--json", "--window", "512", "-t", "1", "-m"])
        .arg(root.join("tests/data/models/tiny_llama.gguf"))
        .arg(&file)
        .args(extra)
        .output()
        .expect("the binary runs");
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_score_agrees_with_the_command_line_at_every_depth() {
    let plain = start();
    let looped = looped();
    let mut seen = Vec::new();
    for (server, loops) in [(&plain, None), (&looped, Some(1)), (&looped, Some(3))] {
        let mut client = server.client();
        let tokens = tokens_of(&mut client, TEXT);
        let body = json!({"mode": "score", "tokens": tokens, "loops": loops,
            "score_from": tokens.len() / 2 + 1});
        let score = post(&mut client, &body);
        let loops_text = loops.unwrap_or(1).to_string();
        let flags = [
            "--loop-layers",
            "0..1",
            "--max-loops",
            "4",
            "--loops",
            &loops_text,
        ];
        let expected = command_line_score(if loops.is_some() { &flags } else { &[] });
        assert_eq!(score["n_scored"], expected["n_scored"]);
        let number = |value: &Value| value.as_f64().expect("a number");
        let (found, wanted) = (
            number(&score["perplexity"]),
            number(&expected["perplexity"]),
        );
        assert!(
            (found / wanted - 1.0).abs() < 1e-6,
            "{found} {wanted} {loops:?}"
        );
        for told in expected["tokens"].as_array().expect("a list") {
            let position = told["position"].as_u64().expect("a number") as usize;
            let entry = &score["logprobs"][position];
            assert_eq!(entry["token"], told["token"]);
            assert!((number(&entry["logprob"]) - number(&told["logprob"])).abs() < 1e-5);
        }
        seen.push(score["perplexity"].to_string());
    }
    assert_eq!(seen[0], seen[1], "one loop is the ordinary model");
    assert_ne!(seen[1], seen[2], "depth is real");
}

#[test]
fn a_text_as_long_as_the_context_is_scored() {
    let server = start();
    let mut client = server.client();
    let models = client.get("/v1/models").json();
    let n_context = models["data"][0]["max_model_len"]
        .as_u64()
        .expect("a number");
    let mut tokens: Vec<u64> = (0..n_context).map(|i| 3 + i * 7 % 200).collect();
    let score = post(&mut client, &json!({"mode": "score", "tokens": tokens}));
    assert_eq!(score["n_scored"].as_u64(), Some(n_context - 1));
    assert_eq!(score["logprobs"][0]["logprob"], Value::Null);
    tokens.push(5);
    let answer = client.post(GENERATE, &json!({"mode": "score", "tokens": tokens}));
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let server = start();
    let mut client = server.client();
    for seed in 0..4 {
        let body = json!({"prompt": "once upon", "max_tokens": 24, "ignore_eos": true,
            "seed": seed, "temperature": 1.5, "return_tokens": true, "logprobs": 2});
        let whole = post(&mut client, &body);
        let streamed = client.post(GENERATE, &with(&body, &json!({"stream": true})));
        let mut pieces = events(&streamed);
        let end = pieces.pop().expect("an end");
        let joined = |name: &str| -> Vec<Value> {
            let parts = pieces.iter().filter_map(|piece| piece[name].as_array());
            parts.flatten().cloned().collect()
        };
        let text: String = pieces
            .iter()
            .filter_map(|piece| piece["text"].as_str())
            .collect();
        assert_eq!(Value::from(text), whole["text"]);
        assert_eq!(Value::from(joined("tokens")), whole["tokens"]);
        assert_eq!(Value::from(joined("logprobs")), whole["logprobs"]);
        for name in ["finish_reason", "model", "system_fingerprint"] {
            assert_eq!(end[name], whole[name]);
        }
        assert_eq!(end["usage"]["completion_tokens"], 24);
    }
}

#[test]
fn the_openai_routes_say_the_same_text() {
    let server = start();
    let mut client = server.client();
    let sampling = json!({"max_tokens": 12, "ignore_eos": true, "seed": 3, "temperature": 1.2});
    let native = post(
        &mut client,
        &with(&json!({"prompt": "the ship"}), &sampling),
    );
    let body = with(&json!({"prompt": "the ship"}), &sampling);
    let openai = client.post("/v1/completions", &body).json();
    assert_eq!(native["text"], openai["choices"][0]["text"]);
    let messages = json!({"messages": [{"role": "user", "content": "tell me"}]});
    let native = post(&mut client, &with(&messages, &sampling));
    let body = with(&messages, &sampling);
    let openai = client.post("/v1/chat/completions", &body).json();
    assert_eq!(native["text"], openai["choices"][0]["message"]["content"]);
}

/// The usage object of a completion, whole or streamed.
fn completion_usage(client: &mut Client, extra: &Value) -> Value {
    let body = json!({"prompt": "the ship", "max_tokens": 4, "ignore_eos": true, "temperature": 0});
    let body = with(&body, extra);
    let whole = client.post("/v1/completions", &body).json()["usage"].clone();
    let streaming = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = client
        .post("/v1/completions", &with(&body, &streaming))
        .events();
    let last: Value = serde_json::from_str(&events[events.len() - 2]).expect("JSON");
    assert_eq!(last["usage"]["loops"], whole["loops"]);
    whole
}

#[test]
fn usage_tells_the_depth_of_models_that_loop() {
    let server = looped();
    let mut client = server.client();
    for (loops, told) in [(json!(null), 2), (json!(1), 1), (json!(4), 4)] {
        let expected = json!({"asked": told, "granted": told, "used_mean": f64::from(told)});
        let extra = json!({"loops": loops, "cache_prompt": false});
        assert_eq!(completion_usage(&mut client, &extra)["loops"], expected);
        let body = with(
            &json!({"prompt": "the ship", "max_tokens": 4, "ignore_eos": true}),
            &extra,
        );
        let answer = client.post(GENERATE, &body);
        assert_eq!(
            answer.header("x-tinyloop-loops"),
            Some(told.to_string().as_str())
        );
        assert_eq!(answer.json()["usage"]["loops"], expected);
        let streamed = client.post(GENERATE, &with(&body, &json!({"stream": true})));
        let end = events(&streamed).pop().expect("an end");
        assert_eq!(end["usage"]["loops"], expected);
    }
    let named = post(
        &mut client,
        &json!({"model": "tiny@3", "prompt": "a", "max_tokens": 1}),
    );
    assert_eq!(named["usage"]["loops"]["granted"], 3);
    for (loops, words) in [(5, "1 to 4"), (0, "1 to 4")] {
        let answer = client.post(GENERATE, &json!({"prompt": "a", "loops": loops}));
        let message = answer.json()["error"]["message"].to_string();
        assert!(answer.status == 400 && message.contains(words), "{message}");
    }
    // An ordinary model's usage on the OpenAI routes is OpenAI's, without more.
    let plain = start();
    let usage = completion_usage(&mut plain.client(), &json!({}));
    assert_eq!(usage.get("loops"), None);
    let native = post(
        &mut plain.client(),
        &json!({"prompt": "a", "max_tokens": 1}),
    );
    assert_eq!(
        native["usage"]["loops"],
        json!({"asked": 1, "granted": 1, "used_mean": 1.0})
    );
}

/// A score of some server.
fn perplexity(server: &TestServer, extra: &Value) -> f64 {
    let body = with(&json!({"mode": "score", "prompt": TEXT}), extra);
    let score = post(&mut server.client(), &body);
    score["perplexity"].as_f64().expect("a number")
}

#[test]
fn a_score_is_the_same_whatever_was_cached() {
    let server = looped();
    let alone = perplexity(&server, &json!({"loops": 3}));
    post(
        &mut server.client(),
        &json!({"prompt": TEXT, "max_tokens": 1, "loops": 3}),
    );
    assert_eq!(perplexity(&server, &json!({"loops": 3})), alone);
    assert_ne!(perplexity(&server, &json!({"loops": 2})), alone);
}

#[test]
fn tokens_leave_the_loop_early_by_a_rule_that_the_model_knows() {
    let server = looped();
    let mut client = server.client();
    let models = client.get("/v1/models").json();
    let loops = &models["data"][0]["meta"]["loops"];
    assert_eq!(
        loops["exit_rules"],
        json!(["latent"]),
        "it has a coda, and no gate"
    );
    let body = json!({"prompt": TEXT, "max_tokens": 6, "ignore_eos": true, "temperature": 0,
        "cache_prompt": false, "logprobs": 0});
    let early = json!({"loops": 4, "adaptive": {"rule": "latent", "threshold": 1e9}});
    // The second loop is the first that can be compared with one before it.
    let two = post(&mut client, &with(&body, &json!({"loops": 2})));
    let left = post(&mut client, &with(&body, &early));
    assert_eq!(
        (&left["text"], &left["logprobs"]),
        (&two["text"], &two["logprobs"])
    );
    assert_eq!(
        left["usage"]["loops"],
        json!({"asked": 4, "granted": 4, "used_mean": 2.0})
    );
    let openai = completion_usage(&mut client, &with(&early, &json!({"cache_prompt": false})));
    assert_eq!(openai["loops"]["used_mean"], 2.0);
    // A score goes the same way, and a threshold of 0 lets nobody leave.
    assert_eq!(
        perplexity(&server, &early),
        perplexity(&server, &json!({"loops": 2}))
    );
    let never = json!({"loops": 4, "adaptive": {"rule": "latent", "threshold": 0}});
    assert_eq!(
        perplexity(&server, &never),
        perplexity(&server, &json!({"loops": 4}))
    );

    let plain = start();
    let gate = json!({"prompt": "a", "adaptive": {"rule": "gate", "threshold": 0.5}});
    for (server, words) in [
        (&server, "it knows: latent"),
        (&plain, "lacks the capability 'loops'"),
    ] {
        for path in [GENERATE, "/v1/completions"] {
            let answer = server.client().post(path, &gate);
            let error = answer.json()["error"].clone();
            assert_eq!((answer.status, &error["param"]), (400, &json!("adaptive")));
            let message = error["message"].as_str().expect("a message");
            assert!(message.contains(words), "{message}");
        }
    }
}

#[test]
fn a_score_looks_back_as_far_as_its_window() {
    let server = start();
    let full = perplexity(&server, &json!({}));
    let narrow = perplexity(&server, &json!({"cache_window": 4}));
    assert_ne!(narrow, full);
    assert_eq!(perplexity(&server, &json!({"cache_window": 512})), full);
    let body = json!({"prompt": TEXT, "cache_window": 100_000});
    let answer = server.client().post(GENERATE, &body);
    let error = answer.json()["error"].clone();
    assert_eq!(
        (answer.status, &error["param"]),
        (400, &json!("cache_window"))
    );
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains("1 to 1024"), "{message}");
}
