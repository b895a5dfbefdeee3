//! Listing live requests, cancelling them over HTTP, and the snapshot.

use super::{TestServer, wait_for};
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::streams::chat;
use serde_json::{Value, json};
use std::sync::Arc;

fn ask(server: &TestServer, headers: &[(&str, &str)], extra: &Value) -> Client {
    let mut client = server.client();
    client.send(
        "POST",
        "/v1/chat/completions",
        headers,
        &chat(extra).to_string(),
    );
    client
}

fn cancel(client: &mut Client, name: &str) -> Answer {
    client.send("POST", &format!("/v1/requests/{name}/cancel"), &[], "");
    client.read_answer()
}

/// What is left of a stream that has begun.
fn all_of(client: &mut Client) -> String {
    let mut text = Vec::new();
    while let Some(chunk) = client.read_chunk() {
        text.extend(chunk);
    }
    String::from_utf8(text).expect("text")
}

/// Reads a stream that has begun to its end.
fn events(client: &mut Client) -> Vec<String> {
    let text = all_of(client);
    let events = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    events.map(str::to_owned).collect()
}

#[test]
fn a_stream_is_cancelled_by_the_id_of_its_answer_and_ends_without_an_error() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut stream = ask(&server, &[], &json!({"max_tokens": 50}));
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    let head = stream.read_head();
    let id = head
        .header("x-tinyloop-request-id")
        .expect("an id")
        .to_owned();
    assert_eq!(id.len(), 24);
    let answer = cancel(&mut server.client(), &format!("chatcmpl-{id}"));
    assert_eq!(
        (answer.status, answer.json()["id"].as_str()),
        (200, Some(id.as_str()))
    );
    let events = events(&mut stream);
    let [.., last, done] = events.as_slice() else {
        panic!("{events:?}");
    };
    let last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(last["id"], format!("chatcmpl-{id}"));
    assert_eq!(last["choices"][0]["finish_reason"], "cancelled");
    assert_eq!(done, "[DONE]");
    wait_for("the slot", || server.executor.snapshot().in_flight == 0);
    assert_eq!(runtime.n_cancelled(), 1);
    // It is over: there is nothing to cancel any more.
    wait_for("the list", || {
        server.client().get("/v1/requests").json()["data"] == json!([])
    });
    // The worker forgets the id after it has written the last byte.
    wait_for("the end of the id", || {
        let again = cancel(&mut server.client(), &id);
        again.json()["error"]["code"] == "request_not_found" && again.status == 404
    });
}

/// A cancelled stream said that it had used nothing, and Anthropic's clients heard a reason for the end that
/// their API does not have.
#[test]
fn a_cancelled_stream_counts_what_there_was_in_every_dialect() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let messages = json!([{"role": "user", "content": "hi"}]);
    let base = json!({"model": "test/model", "stream": true});
    for (idx, (path, extra, count, reason)) in [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "stream_options": {"include_usage": true}}),
            "/usage/completion_tokens",
            None,
        ),
        (
            "/v1/completions",
            json!({"prompt": "hi", "stream_options": {"include_usage": true}}),
            "/usage/completion_tokens",
            None,
        ),
        (
            "/v1/responses",
            json!({"input": "hi"}),
            "/response/usage/output_tokens",
            Some(("/response/status", json!("cancelled"))),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 50}),
            "/usage/output_tokens",
            Some(("/delta/stop_reason", Value::Null)),
        ),
        (
            "/api/v0/chat/completions",
            json!({"messages": messages}),
            "/usage/completion_tokens",
            Some(("/stats/stop_reason", json!("userStopped"))),
        ),
        (
            "/api/v1/chat",
            json!({"input": "hi"}),
            "/result/stats/total_output_tokens",
            None,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("leaves-{idx}");
        let mut body = base.clone();
        let fields = body.as_object_mut().expect("an object");
        fields.extend(extra.as_object().expect("an object").clone());
        let mut stream = server.client();
        stream.send("POST", path, &[("x-request-id", &name)], &body.to_string());
        wait_for("the job", || runtime.n_active() == 1);
        runtime.step();
        assert_eq!(stream.read_head().status, 200, "{path}");
        assert_eq!(cancel(&mut server.client(), &name).status, 200, "{path}");
        let said = all_of(&mut stream);
        let events = said.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = events
            .filter_map(|event| serde_json::from_str(event).ok())
            .collect();
        let counted = events.iter().rev().find_map(|event| event.pointer(count));
        assert_eq!(counted, Some(&json!(1)), "{path}: {said}");
        if let Some((place, expected)) = reason {
            let found = events.iter().rev().find_map(|event| event.pointer(place));
            assert_eq!(found, Some(&expected), "{path}: {said}");
        }
        wait_for("the slot", || server.executor.snapshot().in_flight == 0);
    }
}

#[test]
fn case_04_whole_answers_are_cancelled_by_id_and_end_with_a_typed_error() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let management = server.server().management_address().expect("it listens");
    let extra = json!({"stream": false});
    let running = ask(&server, &[("x-request-id", "first")], &extra);
    wait_for("the job", || runtime.n_active() == 1);
    let waiting = ask(&server, &[("x-request-id", "second")], &json!({}));
    wait_for("the queue", || server.executor.snapshot().queue_depth == 1);
    // By the name that the client chose; on either plane; a stream without events is a wait.
    let planes = [server.address, management];
    for ((name, plane), mut client) in ["second", "first"]
        .iter()
        .zip(planes)
        .zip([waiting, running])
    {
        assert_eq!(
            cancel(&mut Client::connect(plane), name).status,
            200,
            "{name}"
        );
        let answer = client.read_answer();
        assert_eq!(answer.status, 499);
        assert_eq!(answer.json()["error"]["code"], "cancelled");
        assert_eq!(client.get("/health").status, 200, "the connection lives on");
    }
    wait_for("the slot", || server.executor.snapshot().in_flight == 0);
    assert_eq!(runtime.n_cancelled(), 1, "the second one never ran");
    for plane in planes {
        assert_eq!(cancel(&mut Client::connect(plane), "third").status, 404);
    }
}

#[test]
fn all_choices_of_an_answer_end_together() {
    let runtime = Alphabet::stepped(4);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut stream = ask(&server, &[], &json!({"n": 3, "max_tokens": 50}));
    wait_for("the jobs", || runtime.n_active() == 3);
    runtime.step();
    stream.read_head();
    let list = server.client().get("/v1/requests").json();
    let ids: Vec<String> = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|request| request["id"].as_str().expect("text").to_owned())
        .collect();
    assert_eq!(ids.len(), 3);
    assert_eq!(cancel(&mut server.client(), &ids[2]).status, 200);
    let events = events(&mut stream);
    let cancelled = events
        .iter()
        .filter(|event| event.contains(r#""finish_reason":"cancelled""#));
    assert_eq!(cancelled.count(), 3);
    wait_for("the slots", || server.executor.snapshot().in_flight == 0);
}

#[test]
fn lists_and_the_snapshot_show_states_and_no_text() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let management = server.server().management_address().expect("it listens");
    let secret = json!({"messages": [{"role": "user", "content": "the secret"}], "priority": 4});
    let mut running = ask(&server, &[("x-request-id", "mine")], &secret);
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    running.read_head();
    let _waiting = ask(&server, &[], &json!({}));
    wait_for("the queue", || server.executor.snapshot().queue_depth == 1);
    for plane in [server.address, management] {
        let answer = Client::connect(plane).get("/v1/requests");
        assert!(!String::from_utf8_lossy(&answer.body).contains("secret"));
        let list = answer.json();
        let [waiting, running] = list["data"].as_array().expect("a list").as_slice() else {
            panic!("{list}");
        };
        assert_eq!(waiting["state"], "queued");
        assert_eq!(
            (&running["x_request_id"], &running["priority"]),
            (&json!("mine"), &json!(4))
        );
        assert_eq!(
            (&running["model"], &running["completion_tokens"]),
            (&json!("test/model"), &json!(1))
        );
        assert!(running["age_ms"].as_f64().is_some_and(|age| age >= 0.0));
        let snapshot = Client::connect(plane).get("/v1/native/snapshot").json();
        assert_eq!(
            (&snapshot["queue_depth"], &snapshot["in_flight"]),
            (&json!(1), &json!(1))
        );
        assert_eq!(snapshot["ema_dispatch_ms"], Value::Null);
        assert_eq!(snapshot["requests"].as_array().map(Vec::len), Some(2));
        let pool = json!({"entries": 0, "total_cached_tokens": 0});
        assert_eq!(snapshot["prefix_pool"], pool);
        assert_eq!(snapshot["models"][0]["model"], "test/model");
        assert_eq!(snapshot["models"][0]["replicas"][0]["in_flight"], 1);
    }
}

#[test]
fn a_key_sees_and_cancels_its_own_requests_only() {
    let runtime = Alphabet::stepped(2);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.server.api_keys = vec!["one".to_owned(), "two".to_owned()];
    });
    let mut one = ask(
        &server,
        &[("x-api-key", "one"), ("x-request-id", "of-one")],
        &json!({"stream": false}),
    );
    wait_for("the job", || runtime.n_active() == 1);
    let request = |method: &str, path: &str, key: &str| {
        let mut client = server.client();
        client.send(method, path, &[("x-api-key", key)], "");
        client.read_answer()
    };
    let listed = |key: &str| request("GET", "/v1/requests", key).json()["data"].clone();
    assert_eq!(listed("two"), json!([]));
    let own = listed("one");
    assert_eq!(own[0]["client"], "key-1");
    let snapshot = request("GET", "/v1/native/snapshot", "two").json();
    assert_eq!(
        (&snapshot["in_flight"], &snapshot["requests"]),
        (&json!(1), &json!([]))
    );
    let id = own[0]["id"].as_str().expect("text");
    for name in ["of-one", id] {
        let path = format!("/v1/requests/{name}/cancel");
        assert_eq!(request("POST", &path, "two").status, 404);
        assert_eq!(request("POST", &path, "none").status, 401);
    }
    assert_eq!(runtime.n_active(), 1);
    assert_eq!(
        request("POST", "/v1/requests/of-one/cancel", "one").status,
        200
    );
    assert_eq!(one.read_answer().status, 499);
}

#[test]
fn cancelling_needs_no_worker() {
    let runtime = Alphabet::stepped(4);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.server.http_workers = 1
    });
    let mut stream = ask(
        &server,
        &[("x-request-id", "only")],
        &json!({"max_tokens": 50}),
    );
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    stream.read_head();
    assert_eq!(cancel(&mut server.client(), "only").status, 200);
    assert_eq!(
        events(&mut stream).last().map(String::as_str),
        Some("[DONE]")
    );
}
