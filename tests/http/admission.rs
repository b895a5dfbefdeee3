//! Refusals: status, code, reason, numbers, headers, and what the request's own settings do.

use super::{TestServer, wait_for};
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::streams::chat;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn post(client: &mut Client, headers: &[(&str, &str)], body: &Value) -> Answer {
    client.send("POST", "/v1/chat/completions", headers, &body.to_string());
    client.read_answer()
}

fn whole(extra: &Value) -> Value {
    let mut body = chat(extra);
    body["stream"] = json!(false);
    body
}

/// Sends without reading; returns when the scheduler has it.
fn occupy(server: &TestServer, headers: &[(&str, &str)]) -> Client {
    let count = || {
        let snapshot = server.executor.snapshot();
        snapshot.queue_depth + snapshot.in_flight as usize
    };
    let before = count();
    let mut client = server.client();
    let body = whole(&json!({})).to_string();
    client.send("POST", "/v1/chat/completions", headers, &body);
    wait_for("its place", || count() == before + 1);
    client
}

#[test]
fn a_full_queue_says_so_before_any_work() {
    for (configured, kind) in [
        (503, "service_unavailable_error"),
        (429, "rate_limit_error"),
    ] {
        let runtime = Alphabet::stepped(1);
        let server = TestServer::with(Arc::clone(&runtime), |config| {
            config.executor.max_queue_depth = 1;
            config.server.overload_status = configured;
        });
        let _running = occupy(&server, &[]);
        wait_for("the job", || runtime.n_active() == 1);
        let _waiting = occupy(&server, &[]);
        // The template refuses this message: had it been rendered, that would be the error.
        let body = chat(&json!({"messages": [{"role": "user", "content": "boom"}]}));
        let answer = post(&mut server.client(), &[], &body);
        assert_eq!(answer.status, configured);
        assert_eq!(answer.header("x-tinyloop-rejected"), Some("queue_full"));
        let retry_after: u32 = answer
            .header("retry-after")
            .and_then(|text| text.parse().ok())
            .expect("whole seconds");
        assert!((1..=30).contains(&retry_after));
        let error = answer.json()["error"].clone();
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("queue_full"), &json!(kind))
        );
        assert_eq!(error["reason"], "queue_full");
        assert_eq!(
            (&error["queue_depth"], &error["max_queue_depth"]),
            (&json!(1), &json!(1))
        );
        let metrics = server.client().get("/metrics");
        let text = String::from_utf8(metrics.body).expect("text");
        let counted =
            r#"tinyloop_admission_rejected_total{model="test/model",reason="queue_full"} 1"#;
        assert!(text.contains(counted), "{text}");
    }
}

#[test]
fn an_objective_that_cannot_be_met_is_refused_with_the_prediction() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    // One answer that takes 30 ms is all that the server knows about its speed.
    let mut slow = occupy(&server, &[]);
    wait_for("the job", || runtime.n_active() == 1);
    let started = Instant::now();
    wait_for("30 ms", || started.elapsed() > Duration::from_millis(30));
    runtime.run_out();
    assert_eq!(slow.read_answer().status, 200);
    let _running = occupy(&server, &[]);
    wait_for("the job", || runtime.n_active() == 1);
    let by_header = [("x-slo-ms", "5")];
    for (headers, extra) in [
        (by_header.as_slice(), json!({})),
        (&[], json!({"slo_ms": 5})),
        (&by_header, json!({"slo_ms": 5})),
    ] {
        let answer = post(&mut server.client(), headers, &whole(&extra));
        assert_eq!(answer.status, 503);
        assert_eq!(
            answer.header("x-tinyloop-rejected"),
            Some("slo_unattainable")
        );
        assert!(answer.header("retry-after").is_some());
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], "slo_unattainable");
        assert_eq!(
            (&error["slo_ms"], &error["queue_depth"]),
            (&json!(5), &json!(0))
        );
        assert!(
            error["predicted_wait_ms"]
                .as_u64()
                .is_some_and(|ms| ms >= 30)
        );
        assert!(
            error["ema_dispatch_ms"]
                .as_f64()
                .is_some_and(|ms| ms >= 30.0)
        );
    }
    let contradiction = post(
        &mut server.client(),
        &by_header,
        &whole(&json!({"slo_ms": 6})),
    );
    assert_eq!(contradiction.status, 400);
    assert_eq!(contradiction.json()["error"]["param"], "x-slo-ms");
    assert_eq!(
        server.executor.snapshot().queue_depth,
        0,
        "refusals hold nothing"
    );
}

#[test]
fn who_waits_too_long_ends_without_a_retry_time() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.executor.queue_timeout = Some(Duration::from_millis(10));
    });
    let _running = occupy(&server, &[]);
    wait_for("the job", || runtime.n_active() == 1);
    for stream in [false, true] {
        let answer = post(&mut server.client(), &[], &chat(&json!({"stream": stream})));
        assert_eq!(answer.status, 503);
        assert_eq!(answer.header("x-tinyloop-rejected"), Some("queue_timeout"));
        assert_eq!(answer.header("retry-after"), None);
        let error = answer.json()["error"].clone();
        assert_eq!(
            (&error["code"], &error["queue_timeout_ms"]),
            (&json!("queue_timeout"), &json!(10))
        );
        assert!(error["waited_ms"].as_u64() >= Some(10), "{error}");
    }
}

#[test]
fn what_can_never_fit_is_not_to_be_sent_again() {
    let server = TestServer::start(Alphabet::at_once());
    let answer = post(
        &mut server.client(),
        &[],
        &whole(&json!({"max_tokens": 256})),
    );
    assert_eq!(answer.status, 400);
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    assert_eq!(answer.header("retry-after"), None);
    assert_eq!(
        answer.header("x-tinyloop-rejected"),
        Some("context_length_exceeded")
    );
    let error = answer.json()["error"].clone();
    assert_eq!(
        (&error["max_tokens"], &error["context_length"]),
        (&json!(256), &json!(256))
    );
    assert_eq!(error["prompt_tokens"], 18);
}

#[test]
fn a_header_sets_the_priority() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut clients = vec![occupy(&server, &[])];
    wait_for("the job", || runtime.n_active() == 1);
    for priority in ["-3", "7", "0"] {
        clients.push(occupy(&server, &[("x-priority", priority)]));
    }
    let list = server.client().get("/v1/requests").json();
    let priorities: Vec<i64> = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|request| request["priority"].as_i64().expect("a number"))
        .collect();
    assert_eq!(
        priorities,
        [7, 0, -3, 0],
        "the queue in its order, then what runs"
    );
    for (name, value) in [
        ("x-priority", "101"),
        ("x-priority", "high"),
        ("x-slo-ttft-ms", "0"),
    ] {
        let answer = post(&mut server.client(), &[(name, value)], &whole(&json!({})));
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (400, Some(name))
        );
    }
}
