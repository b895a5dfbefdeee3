//! The drain: who may finish, who is refused, and what each of them hears.

use super::{TestServer, wait_for};
use crate::client::Client;
use crate::fake::Alphabet;
use crate::streams::chat;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

fn ask(client: &mut Client, extra: &Value) {
    client.send(
        "POST",
        "/v1/chat/completions",
        &[],
        &chat(extra).to_string(),
    );
}

/// The error code of a refusal; it must close the connection and say when to come again.
#[track_caller]
fn refusal(client: &mut Client) -> String {
    let answer = client.read_answer();
    assert_eq!(
        (answer.status, answer.header("connection")),
        (503, Some("close"))
    );
    assert!(answer.header("retry-after").is_some() && answer.header("x-request-id").is_some());
    assert!(client.is_closed());
    let error = answer.json()["error"].clone();
    assert_eq!(error["drain_timeout_ms"], 20_000, "{error}");
    assert!(error["drain_elapsed_ms"].is_u64(), "{error}");
    answer.json()["error"]["code"]
        .as_str()
        .expect("a code")
        .to_owned()
}

#[test]
fn case_25_what_runs_finishes_and_everybody_else_is_told() {
    let runtime = Alphabet::stepped(1);
    let mut server = TestServer::start(Arc::clone(&runtime));
    let (address, executor) = (server.address, Arc::clone(&server.executor));
    let management = server.server().management_address().expect("it listens");
    let mut kept_alive = server.client();
    assert_eq!(kept_alive.get("/health").status, 200);
    let mut running = server.client();
    ask(&mut running, &json!({}));
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    assert_eq!(running.read_head().status, 200);
    let mut waiting = server.client();
    ask(&mut waiting, &json!({"stream": false}));
    wait_for("the queue", || executor.snapshot().queue_depth == 1);

    std::thread::scope(|scope| {
        scope.spawn(|| server.stop(Duration::from_secs(20)));
        // Its end is the sign that the drain has begun.
        assert_eq!(refusal(&mut waiting), "shutting_down");
        ask(&mut kept_alive, &json!({}));
        assert_eq!(refusal(&mut kept_alive), "shutting_down");
        let mut new = Client::connect(address);
        ask(&mut new, &json!({"stream": false}));
        assert_eq!(refusal(&mut new), "shutting_down");
        // The two that nobody read; the one that waited was accepted before.
        let counted = r#"tinyloop_admission_rejected_total{model="",reason="shutting_down"} 2"#;
        let metrics = executor.metrics_text("");
        assert!(metrics.contains(counted), "{metrics}");
        for plane in [address, management] {
            let ready = Client::connect(plane).get("/ready");
            assert_eq!(
                (ready.status, ready.json()["status"].as_str()),
                (503, Some("draining"))
            );
            assert_eq!(Client::connect(plane).get("/health").status, 200);
        }
        runtime.run_out();
        let mut text = Vec::new();
        while let Some(chunk) = running.read_chunk() {
            text.extend(chunk);
        }
        assert!(String::from_utf8_lossy(&text).ends_with("data: [DONE]\n\n"));
    });
    assert!(running.is_closed());
}

#[test]
fn case_25_what_outlives_the_drain_is_told_so() {
    let runtime = Alphabet::stepped(2);
    let mut server = TestServer::start(Arc::clone(&runtime));
    let mut stream = server.client();
    ask(&mut stream, &json!({}));
    let mut whole = server.client();
    ask(&mut whole, &json!({"stream": false}));
    wait_for("the jobs", || runtime.n_active() == 2);
    runtime.step();
    assert_eq!(stream.read_head().status, 200);
    server.stop(Duration::ZERO);
    let mut last = Vec::new();
    while let Some(chunk) = stream.read_chunk() {
        last = chunk;
    }
    // The body ended with its last chunk, after an error event of OpenAI's shape.
    let last = String::from_utf8(last).expect("text");
    let event = last.strip_prefix("data: ").expect("an event");
    let event: Value = serde_json::from_str(event).expect("JSON");
    assert_eq!(event["error"]["code"], "shutting_down");
    assert_eq!(event["error"]["type"], "service_unavailable_error");
    assert_eq!(event["error"]["drain_timeout_ms"], 0);
    let answer = whole.read_answer();
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (503, Some("shutting_down"))
    );
    assert_eq!(runtime.n_active(), 0, "nothing goes on behind the end");
}
