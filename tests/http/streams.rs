//! Streams, hang-ups, queues.

use super::{TestServer, wait_for};
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::shared::with;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::request::RequestError;

pub(crate) fn chat(extra: &Value) -> Value {
    with(
        json!({
            "model": "test/model", "stream": true, "max_tokens": 3,
            "messages": [{"role": "user", "content": "hi"}],
        }),
        extra,
    )
}

fn parsed(answer: &Answer) -> Vec<Value> {
    let events = answer.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks = &events[..events.len() - 1];
    chunks
        .iter()
        .map(|event| serde_json::from_str(event).expect("JSON"))
        .collect()
}

#[test]
fn a_chat_stream_is_exact() {
    let server = TestServer::start(Alphabet::at_once());
    let body = chat(&json!({"stream_options": {"include_usage": true}}));
    let answer = server.client().post("/v1/chat/completions", &body);
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    let mut chunks = parsed(&answer);
    let (id, created) = (chunks[0]["id"].clone(), chunks[0]["created"].clone());
    for chunk in &mut chunks {
        assert_eq!((&chunk["id"], &chunk["created"]), (&id, &created));
        chunk["id"] = Value::Null;
        chunk["created"] = Value::Null;
    }
    let frame = |choices: Value, usage: Value| {
        json!({"id": null, "object": "chat.completion.chunk", "created": null,
            "model": "test/model", "system_fingerprint": "", "choices": choices, "usage": usage})
    };
    let delta = |delta: Value, finish: Value| {
        let choice =
            json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]);
        frame(choice, Value::Null)
    };
    let usage = json!({
        "prompt_tokens": 18, "completion_tokens": 3, "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    });
    let expected = [
        delta(json!({"role": "assistant", "content": ""}), Value::Null),
        delta(json!({"content": "a"}), Value::Null),
        delta(json!({"content": "b"}), Value::Null),
        delta(json!({"content": "c"}), Value::Null),
        delta(json!({}), json!("length")),
        frame(json!([]), usage),
    ];
    assert_eq!(chunks, expected);
    let plain = parsed(
        &server
            .client()
            .post("/v1/chat/completions", &chat(&json!({}))),
    );
    assert_eq!(plain.len(), 5);
    assert!(plain.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[test]
fn streams_say_what_whole_answers_say() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    for extra in [
        json!({"max_tokens": 20, "stop": ["def"]}),
        json!({"n": 3, "seed": 5, "max_tokens": 4}),
        json!({"logprobs": true, "top_logprobs": 1, "max_tokens": 9, "stop": "ij"}),
    ] {
        let chunks = parsed(&client.post("/v1/chat/completions", &chat(&extra)));
        let mut body = chat(&extra);
        body["stream"] = json!(false);
        let whole = client.post("/v1/chat/completions", &body).json();
        for choice in whole["choices"].as_array().expect("a list") {
            let (mut text, mut logprobs, mut finish) = (String::new(), Vec::new(), Value::Null);
            let of_choice = chunks.iter().map(|chunk| &chunk["choices"][0]);
            for piece in of_choice.filter(|piece| piece["index"] == choice["index"]) {
                text.push_str(piece["delta"]["content"].as_str().unwrap_or_default());
                let content = piece["logprobs"]["content"].as_array();
                logprobs.extend(content.into_iter().flatten().cloned());
                finish = piece["finish_reason"].clone();
            }
            assert_eq!(choice["message"]["content"], text, "{extra}");
            assert_eq!(choice["finish_reason"], finish, "{extra}");
            let whole_logprobs = choice["logprobs"]["content"].as_array().cloned();
            assert_eq!(whole_logprobs.unwrap_or_default(), logprobs, "{extra}");
        }
    }
}

#[test]
fn a_completion_stream_echoes_first() {
    let server = TestServer::start(Alphabet::at_once());
    let body =
        json!({"prompt": "hi", "max_tokens": 2, "echo": true, "stream": true, "logprobs": 0});
    let chunks = parsed(&server.client().post("/v1/completions", &body));
    let texts: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["text"])
        .collect();
    assert_eq!(texts, ["hi", "a", "b", ""]);
    assert_eq!(
        chunks[0]["choices"][0]["logprobs"]["token_logprobs"],
        json!([null, -0.5])
    );
    assert_eq!(
        chunks[2]["choices"][0]["logprobs"]["text_offset"],
        json!([3])
    );
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "length");
}

#[test]
fn events_arrive_while_the_generation_runs() {
    let runtime = Alphabet::stepped(4);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut client = server.client();
    client.send(
        "POST",
        "/v1/chat/completions",
        &[],
        &chat(&json!({})).to_string(),
    );
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    assert_eq!(client.read_head().status, 200);
    let mut next = || String::from_utf8(client.read_chunk().expect("an event")).expect("text");
    assert!(next().contains(r#""role":"assistant""#));
    assert!(next().contains(r#""content":"a""#));
    runtime.step();
    // One event is one chunk: nothing of the next token is here before its step.
    let event = next();
    assert!(
        event.contains(r#""content":"b""#) && event.matches("data: ").count() == 1,
        "{event}"
    );
    assert_eq!(runtime.n_active(), 1, "the generation still runs");
    runtime.run_out();
    assert!(next().contains(r#""content":"c""#));
    assert!(next().contains(r#""finish_reason":"length""#));
    assert_eq!(next(), "data: [DONE]\n\n");
    assert_eq!(client.read_chunk(), None);
    // The connection lives on.
    assert_eq!(client.get("/health").status, 200);
}

#[test]
fn a_silent_stream_pings() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.server.stream_ping = Duration::from_millis(20);
    });
    let mut client = server.client();
    client.send(
        "POST",
        "/v1/chat/completions",
        &[],
        &chat(&json!({})).to_string(),
    );
    assert_eq!(client.read_head().status, 200);
    for _ in 0..2 {
        assert_eq!(
            client.read_chunk().as_deref(),
            Some(b": ping\n\n".as_slice())
        );
    }
    wait_for("the job", || runtime.n_active() == 1);
    runtime.run_out();
    let mut rest = Vec::new();
    while let Some(chunk) = client.read_chunk() {
        rest.extend(chunk);
    }
    assert!(String::from_utf8_lossy(&rest).ends_with("data: [DONE]\n\n"));
}

#[test]
fn a_fault_in_the_middle_ends_the_stream_with_an_error() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut client = server.client();
    client.send(
        "POST",
        "/v1/chat/completions",
        &[],
        &chat(&json!({})).to_string(),
    );
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    assert_eq!(client.read_head().status, 200);
    assert!(client.read_chunk().is_some());
    runtime.fail_all();
    let mut last = Vec::new();
    while let Some(chunk) = client.read_chunk() {
        last = chunk;
    }
    let text = String::from_utf8(last).expect("text");
    let error: Value = serde_json::from_str(text.trim_start_matches("data: ")).expect("JSON");
    assert_eq!(error["error"]["code"], "internal_error");
}

/// Why a replica was lost is for the operator: it may name addresses and hold a child's last words.
#[test]
fn of_a_lost_replica_clients_hear_no_particulars() {
    let lost = RequestError::ReplicaLost("http://10.1.2.3:8000 said: the secret".to_owned());
    for stream in [true, false] {
        let runtime = Alphabet::stepped(1);
        let server = TestServer::start(Arc::clone(&runtime));
        let mut client = server.client();
        let body = chat(&json!({"stream": stream}));
        client.send("POST", "/v1/chat/completions", &[], &body.to_string());
        wait_for("the job", || runtime.n_active() == 1);
        runtime.step(); // so that it cannot be given to another one
        runtime.fail_all_with(&lost);
        let answer = client.read_answer();
        let text = String::from_utf8(answer.body).expect("text");
        assert!(
            !text.contains("10.1.2.3") && !text.contains("secret"),
            "{text}"
        );
        assert!(text.contains(r#""code":"replica_lost""#), "{text}");
        assert!(
            text.contains("the replica that ran the request was lost"),
            "{text}"
        );
        assert_eq!(answer.status, if stream { 200 } else { 503 });
    }
}

/// Streamed or not, before the first token (while the prompt is computed) and behind it.
#[test]
fn case_01_who_hangs_up_frees_the_slot_streamed_or_not() {
    for (stream, n_tokens) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let runtime = Alphabet::stepped(1);
        let server = TestServer::start(Arc::clone(&runtime));
        let ask = |extra: Value| {
            let mut client = server.client();
            let body = chat(&extra).to_string();
            client.send("POST", "/v1/chat/completions", &[], &body);
            client
        };
        let mut client = ask(json!({"stream": stream, "max_tokens": 100}));
        wait_for("the job", || runtime.n_active() == 1);
        let _waiting = ask(json!({"stream": false}));
        wait_for("the queue", || server.executor.snapshot().queue_depth == 1);
        for _ in 0..n_tokens {
            runtime.step();
        }
        if stream && n_tokens > 0 {
            client.read_head();
        }
        drop(client);
        // The freed slot serves the one who waits, without a step of what was left.
        wait_for("the next job", || {
            runtime.n_cancelled() == 1 && runtime.n_active() == 1
        });
        assert_eq!(server.executor.snapshot().queue_depth, 0);
        runtime.run_out();
        let metrics = server.executor.metrics_text("");
        let counted = r#"tinyloop_cancelled_total{model="test/model",phase="running"} 1"#;
        assert!(metrics.contains(counted), "{stream} {n_tokens}: {metrics}");
    }
}

#[test]
fn case_02_who_hangs_up_in_the_queue_never_runs() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut first = server.client();
    first.send(
        "POST",
        "/v1/chat/completions",
        &[],
        &chat(&json!({"stream": false})).to_string(),
    );
    wait_for("the first job", || runtime.n_active() == 1);
    let mut second = server.client();
    second.send(
        "POST",
        "/v1/chat/completions",
        &[],
        &chat(&json!({})).to_string(),
    );
    wait_for("the queue", || server.executor.snapshot().queue_depth == 1);
    drop(second);
    wait_for("the empty queue", || {
        server.executor.snapshot().queue_depth == 0
    });
    runtime.run_out();
    assert_eq!(first.read_answer().status, 200);
    assert_eq!((runtime.n_active(), runtime.n_cancelled()), (0, 0));
    let metrics = server.executor.metrics_text("");
    let counted = r#"tinyloop_cancelled_total{model="test/model",phase="queued"} 1"#;
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn more_choices_than_an_idle_server_takes_are_the_requests_fault() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.executor.max_queue_depth = 2
    });
    let body = json!({"prompt": ["a", "b", "c"], "max_tokens": 1});
    let refused = server.client().post("/v1/completions", &body);
    assert_eq!(refused.status, 400);
    assert!(refused.header("retry-after").is_none());
    assert_eq!(runtime.n_active(), 0);
}

#[test]
fn case_07_the_limit_counts_all_that_wait_for_a_loaded_model() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.executor.max_queue_depth = 1
    });
    let body = chat(&json!({"stream": false})).to_string();
    let mut clients: Vec<Client> = (0..2).map(|_| server.client()).collect();
    for (index, client) in clients.iter_mut().enumerate() {
        client.send("POST", "/v1/chat/completions", &[], &body);
        wait_for("its place", || {
            let snapshot = server.executor.snapshot();
            snapshot.queue_depth + snapshot.in_flight as usize == index + 1
                && snapshot.in_flight == 1
        });
    }
    let refused = server
        .client()
        .post("/v1/chat/completions", &chat(&json!({})));
    assert_eq!(refused.status, 503);
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    assert!(refused.header("retry-after").is_some());
    let is_busy = || {
        let snapshot = server.executor.snapshot();
        snapshot.queue_depth + snapshot.in_flight as usize > 0
    };
    while is_busy() {
        runtime.step();
    }
    for client in &mut clients {
        assert_eq!(client.read_answer().status, 200);
    }
}

#[test]
fn sixty_four_at_once_are_all_answered() {
    let server = TestServer::start(Alphabet::at_once());
    let mut clients: Vec<Client> = (0..64).map(|_| server.client()).collect();
    for (index, client) in clients.iter_mut().enumerate() {
        let body = chat(&json!({"stream": index % 2 == 0}));
        client.send("POST", "/v1/chat/completions", &[], &body.to_string());
    }
    for client in &mut clients {
        assert_eq!(client.read_answer().status, 200);
    }
}
