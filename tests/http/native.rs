//! The native API over a runtime that says the alphabet: shapes, streams, refusals.

use super::{TestServer, wait_for};
use crate::client::Answer;
use crate::fake::Alphabet;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const GENERATE: &str = "/v1/native/generate";

/// `data:` payloads as JSON; each came as one chunk of its own.
#[track_caller]
pub(crate) fn events(answer: &Answer) -> Vec<Value> {
    let parse = |event: String| serde_json::from_str(&event).expect("JSON");
    answer.events().into_iter().map(parse).collect()
}

/// Takes out what differs from run to run, after a look at it.
#[track_caller]
fn without_varying(mut answer: Value) -> Value {
    let id = answer["id"].as_str().expect("an id");
    assert_eq!(id.len(), 24, "{id}");
    assert!(answer["created"].as_u64() > Some(1_700_000_000));
    for name in ["queue_ms", "total_ms"] {
        assert!(answer["timings"][name].as_f64() >= Some(0.0), "{answer}");
    }
    let map = answer.as_object_mut().expect("an object");
    map.remove("id");
    map.remove("created");
    map.remove("timings");
    answer
}

fn usage(n_prompt: u32, n_completion: u32) -> Value {
    json!({
        "prompt_tokens": n_prompt, "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "loops": {"asked": 1, "granted": 1, "used_mean": 1.0},
    })
}

#[test]
fn a_whole_answer_is_exact() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let answer = client.post(GENERATE, &json!({"prompt": "hi", "max_tokens": 3}));
    assert_eq!(answer.status, 200);
    let id = answer.header("x-tinyloop-request-id").map(str::to_owned);
    assert_eq!(answer.json()["id"].as_str().map(str::to_owned), id);
    assert!(answer.json()["timings"]["ttft_ms"].is_number());
    let plain = json!({
        "object": "native.generation", "model": "test/model", "system_fingerprint": "",
        "text": "abc", "finish_reason": "length", "usage": usage(2, 3),
    });
    assert_eq!(without_varying(answer.json()), plain);

    // The same prompt in its three spellings.
    let user = json!([{"role": "user", "content": "hi"}]);
    for (prompt, n_prompt) in [
        (json!({"tokens": [104, 105]}), 2),
        (json!({"messages": user}), "user:hi;assistant:".len() as u32),
        (
            json!({"messages": user, "add_generation_prompt": false}),
            "user:hi;".len() as u32,
        ),
    ] {
        let mut body = prompt;
        body["max_tokens"] = json!(3);
        let answer = without_varying(client.post(GENERATE, &body).json());
        assert_eq!(
            (&answer["text"], &answer["usage"]),
            (&json!("abc"), &usage(n_prompt, 3))
        );
    }

    let body = json!({"prompt": "hi", "max_tokens": 9, "stop": "cd", "logprobs": 1,
        "return_tokens": true, "model": "alias"});
    let stopped = without_varying(client.post(GENERATE, &body).json());
    let entry = |letter: &str, logprob: f64| {
        let byte = letter.as_bytes()[0];
        json!({"token": byte, "text": letter, "bytes": [byte], "logprob": logprob,
            "top": [{"token": byte, "text": letter, "logprob": -0.5}]})
    };
    assert_eq!(
        (&stopped["text"], &stopped["tokens"]),
        (&json!("ab"), &json!([97, 98, 99, 100]))
    );
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(
        stopped["logprobs"],
        json!([
            entry("a", -0.5),
            entry("b", -0.5),
            entry("c", -0.5),
            entry("d", -9999.0)
        ])
    );
    // Without a limit the answer fills the context (256 tokens).
    let filled = client.post(GENERATE, &json!({"prompt": "hi"})).json();
    assert_eq!(filled["usage"]["total_tokens"], 256);
}

#[test]
fn a_stream_is_exact_and_each_event_is_a_chunk() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let body = json!({"prompt": "hi", "max_tokens": 2, "stream": true, "return_tokens": true,
        "logprobs": 0});
    client.send("POST", GENERATE, &[], &body.to_string());
    let head = client.read_head();
    assert_eq!(head.status, 200);
    assert_eq!(
        head.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    let mut chunks = Vec::new();
    while let Some(chunk) = client.read_chunk() {
        let text = String::from_utf8(chunk).expect("text");
        let data = text
            .strip_prefix("data: ")
            .and_then(|text| text.strip_suffix("\n\n"));
        let data = data.expect("one event is one chunk");
        chunks.push(serde_json::from_str::<Value>(data).expect("JSON"));
    }
    let piece = |letter: &str| {
        let byte = letter.as_bytes()[0];
        let entry = json!({"token": byte, "text": letter, "bytes": [byte], "logprob": -0.5});
        json!({"type": "piece", "text": letter, "tokens": [byte], "logprobs": [entry]})
    };
    let end = without_varying(chunks.pop().expect("an end"));
    assert_eq!(chunks, [piece("a"), piece("b")]);
    assert_eq!(
        end,
        json!({"type": "end", "object": "native.generation", "model": "test/model",
            "system_fingerprint": "", "finish_reason": "length", "usage": usage(2, 2)})
    );
}

#[test]
fn tokens_wait_for_their_text_and_all_arrive() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    // "b" might begin a stop string, and "bc" is one at the end: held tokens come with their text.
    for (stop, pieces) in [
        (
            json!("bx"),
            json!([["a", [97]], ["bc", [98, 99]], ["d", [100]]]),
        ),
        (json!("cd"), json!([["a", [97]], ["b", [98]]])),
    ] {
        let body = json!({"prompt": "hi", "max_tokens": 4, "stream": true, "return_tokens": true,
            "stop": stop});
        let events = events(&client.post(GENERATE, &body));
        let shown: Vec<Value> = events[..events.len() - 1]
            .iter()
            .map(|event| json!([event["text"], event["tokens"]]))
            .collect();
        let n = pieces.as_array().expect("a list").len();
        assert_eq!(json!(shown[..n]), pieces);
        // Tokens of a stop string have no text, and are told nevertheless.
        let rest: Vec<Value> = shown[n..].to_vec();
        let expected = if n == 2 {
            vec![json!(["", [99, 100]])]
        } else {
            Vec::new()
        };
        assert_eq!(rest, expected);
    }
}

#[test]
fn a_score_is_exact() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let body = json!({"mode": "score", "prompt": "hi!", "logprobs": 2});
    let score = client.post(GENERATE, &body).json();
    assert_eq!(score["timings"]["ttft_ms"], Value::Null);
    let mut score = without_varying(score);
    let perplexity = score["perplexity"].take().as_f64().expect("a number");
    assert!((perplexity - 0.5_f64.exp()).abs() < 1e-9);
    let entry = |token: u32, text: &str| {
        let next = char::from_u32(token + 1).expect("a letter").to_string();
        json!({"token": token, "text": text, "bytes": [token], "logprob": -0.5, "top": [
            {"token": token, "text": text, "logprob": -0.5},
            {"token": token + 1, "text": next, "logprob": -1.5},
        ]})
    };
    let first = json!({"token": 104, "text": "h", "bytes": [104], "logprob": null});
    assert_eq!(
        score,
        json!({
            "object": "native.score", "model": "test/model", "system_fingerprint": "",
            "perplexity": null, "mean_logprob": -0.5, "n_scored": 2,
            "logprobs": [first, entry(105, "i"), entry(33, "!")],
            "usage": usage(3, 0),
        })
    );
    // "d" is impossible, so that the perplexity is beyond all numbers, unless it is context only.
    let body = json!({"mode": "score", "prompt": "ede"});
    let score = client.post(GENERATE, &body).json();
    assert_eq!(
        (&score["perplexity"], &score["mean_logprob"]),
        (&Value::Null, &json!(-9999.0))
    );
    assert_eq!(score["logprobs"][1]["logprob"], -9999.0);
    let body = json!({"mode": "score", "prompt": "ede", "score_from": 2});
    let score = client.post(GENERATE, &body).json();
    assert_eq!(
        (&score["n_scored"], &score["mean_logprob"]),
        (&json!(1), &json!(-0.5))
    );
    // A prompt may fill the context.
    let full = json!({"mode": "score", "tokens": vec![65; 256]});
    assert_eq!(client.post(GENERATE, &full).json()["n_scored"], 255);
}

#[test]
fn bad_requests_are_refused_with_the_field() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    for (body, param, code, words) in [
        (
            json!({}),
            "prompt",
            "missing_required_parameter",
            "exactly one of",
        ),
        (
            json!({"prompt": "a", "tokens": [1]}),
            "prompt",
            "missing_required_parameter",
            "several",
        ),
        (
            json!({"prompt": ["a"]}),
            "prompt",
            "invalid_value",
            "a string",
        ),
        (
            json!({"tokens": []}),
            "tokens",
            "invalid_value",
            "empty prompt",
        ),
        (
            json!({"tokens": [260]}),
            "tokens",
            "invalid_value",
            "0..260",
        ),
        (
            json!({"messages": []}),
            "messages",
            "invalid_value",
            "at least one",
        ),
        (
            json!({"messages": [{"role": "user", "content": "boom"}]}),
            "messages",
            "chat_template_error",
            "no boom",
        ),
        (
            json!({"prompt": "a", "mode": "x"}),
            "mode",
            "invalid_value",
            "score",
        ),
        (
            json!({"prompt": "a", "temperature": 9}),
            "temperature",
            "invalid_value",
            "2",
        ),
        (
            json!({"prompt": "a", "n": 1}),
            "n",
            "unsupported_parameter",
            "no such field",
        ),
        (
            json!({"prompt": "a", "loop": 1}),
            "loop",
            "unsupported_parameter",
            "no such field",
        ),
        (
            json!({"prompt": "a", "echo": true}),
            "echo",
            "unsupported_parameter",
            "no such",
        ),
        (
            json!({"prompt": "a", "loops": 2}),
            "loops",
            "missing_capability",
            "'loops'",
        ),
        (
            json!({"prompt": "a", "priority": 101}),
            "priority",
            "invalid_value",
            "100",
        ),
        (
            json!({"prompt": "a", "slo_ms": 0}),
            "slo_ms",
            "invalid_value",
            "1",
        ),
        (
            json!({"prompt": "a", "max_tokens": 256}),
            "prompt",
            "context_length_exceeded",
            "257",
        ),
        (
            json!({"tokens": vec![65; 257], "mode": "score"}),
            "tokens",
            "context_length_exceeded",
            "257",
        ),
        (
            json!({"prompt": "a", "mode": "score"}),
            "prompt",
            "invalid_value",
            "at least 2",
        ),
        (
            json!({"prompt": "abc", "mode": "score", "score_from": 3}),
            "prompt",
            "invalid_value",
            "at least 4",
        ),
        (
            json!({"prompt": "ab", "mode": "score", "stream": true}),
            "stream",
            "invalid_value",
            "whole",
        ),
    ] {
        let answer = client.post(GENERATE, &body);
        let error = answer.json()["error"].clone();
        assert_eq!(
            (
                answer.status,
                error["param"].as_str(),
                error["code"].as_str()
            ),
            (400, Some(param), Some(code)),
            "{body}: {error}"
        );
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(words), "{body}: {message}");
    }
    client.send(
        "POST",
        GENERATE,
        &[],
        r#"{"prompt": "a", "seed": 1, "seed": 2}"#,
    );
    let error = client.read_answer().json()["error"].clone();
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("invalid_json"), &json!("seed"))
    );
    let unknown = client.post(GENERATE, &json!({"prompt": "a", "model": "no"}));
    assert_eq!((unknown.status, client.get(GENERATE).status), (404, 405));
    assert_eq!(server.executor.snapshot().queue_depth, 0);
}

#[test]
fn a_silent_stream_pings_and_a_cancelled_one_ends() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.server.stream_ping = Duration::from_millis(20);
    });
    let mut client = server.client();
    let body = json!({"prompt": "a", "max_tokens": 9, "stream": true});
    client.send(
        "POST",
        GENERATE,
        &[("x-request-id", "mine")],
        &body.to_string(),
    );
    assert_eq!(client.read_head().status, 200);
    assert_eq!(client.read_chunk().as_deref(), Some(&b": ping\n\n"[..]));
    runtime.step();
    let piece = br#"data: {"type":"piece","text":"a"}"#;
    loop {
        let chunk = client.read_chunk().expect("a chunk");
        if !chunk.starts_with(b": ping") {
            assert!(chunk.starts_with(piece), "{chunk:?}");
            break;
        }
    }
    let cancelled = server.client().post("/v1/requests/mine/cancel", &json!({}));
    assert_eq!(cancelled.status, 200);
    let mut last = Vec::new();
    while let Some(chunk) = client.read_chunk() {
        last = chunk;
    }
    let last = String::from_utf8(last).expect("text");
    let end: Value =
        serde_json::from_str(last.strip_prefix("data: ").expect("an event")).expect("JSON");
    assert_eq!(
        (&end["type"], &end["finish_reason"], &end["usage"]),
        (&json!("end"), &json!("cancelled"), &Value::Null)
    );
}

#[test]
fn faults_and_hang_ups_are_those_of_the_other_routes() {
    let server = TestServer::start(Alphabet::broken());
    for stream in [false, true] {
        let body = json!({"prompt": "a", "stream": stream});
        let answer = server.client().post(GENERATE, &body);
        assert_eq!(answer.status, 500, "stream: {stream}");
        assert_eq!(answer.json()["error"]["code"], "internal_error");
    }
    let runtime = Alphabet::stepped(2);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut broken = server.client();
    let body = json!({"prompt": "a", "stream": true}).to_string();
    broken.send("POST", GENERATE, &[], &body);
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    assert_eq!(broken.read_head().status, 200);
    runtime.fail_all();
    let mut last = Vec::new();
    while let Some(chunk) = broken.read_chunk() {
        last = chunk;
    }
    assert!(String::from_utf8_lossy(&last).starts_with(r#"data: {"error":{"#));
    for stream in [false, true] {
        let before = runtime.n_cancelled();
        let mut client = server.client();
        let body = json!({"prompt": "a", "stream": stream}).to_string();
        client.send("POST", GENERATE, &[], &body);
        wait_for("the job", || runtime.n_active() == 1);
        drop(client);
        wait_for("the cancel", || runtime.n_cancelled() == before + 1);
    }
}
