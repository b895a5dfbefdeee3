//! Bodies on the management plane: small ones are read, others are refused without harm.

use super::client::Client;
use super::{JSON, TestServer, assert_error, echo};
use serde_json::{Value, json};

/// What nobody should make room for, or wait for, is answered at once.
#[test]
fn bodies_that_are_not_taken_are_answered() {
    let server = TestServer::start(vec![echo("a")]);
    let mut held = Vec::new();
    for (announced, status) in [
        ("Content-Length: 99999999999", 413),
        ("Content-Length: 9223372036854775807", 413),
        ("Content-Length: 65537", 413),
        ("Expect: 100-continue\r\nContent-Length: 65537", 413),
        ("Content-Length: x", 400),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
    ] {
        let mut client = server.served();
        let line = "POST /v1/admin/models/a/load HTTP/1.1\r\nHost: localhost";
        client.send_raw(&format!("{line}\r\n{announced}\r\n\r\n"));
        let answer = client.read_answer();
        assert_eq!(answer.status, status, "{announced}");
        assert!(answer.json()["error"]["message"].is_string());
        held.push(client);
    }
    drop(server.served());
    assert_eq!(server.state("a"), "unloaded");
}

/// Many connections at once are all served, also while they stay open, and while others say nothing.
#[test]
fn a_burst_of_connections_holds_nobody_up() {
    let server = TestServer::start(vec![echo("a")]);
    let silent: Vec<Client> = (0..100).map(|_| server.admin()).collect();
    let mut burst: Vec<Client> = (0..64).map(|_| server.admin()).collect();
    for round in 0..2 {
        for client in &mut burst {
            client.send("GET", "/v1/admin/models", &[], "");
        }
        for (index, client) in burst.iter_mut().enumerate() {
            assert_eq!(client.read_answer().status, 200, "{index} in round {round}");
        }
    }
    assert_eq!(server.admin().get("/health").status, 200);
    drop(silent);
}

/// Requests that wait for a load hold workers, and health has others.
#[test]
fn waiting_for_loads_hides_no_page() {
    let server = TestServer::start(vec![echo("slow-a")]);
    let mut waiting: Vec<Client> = (0..8).map(|_| server.admin()).collect();
    for client in &mut waiting {
        client.send(
            "POST",
            "/v1/admin/models/slow-a/load?wait_s=30",
            &[JSON],
            "{}",
        );
    }
    server.wait_for_state("slow-a", "loading");
    assert_eq!(server.admin().get("/health").status, 200);
    assert_eq!(server.admin().get("/v1/admin/devices").status, 200);
    server.permits.send(()).expect("the loader waits for it");
    for client in &mut waiting {
        assert!(matches!(client.read_answer().status, 200 | 202));
    }
}

/// Clients that announce a body and never send it do not hold up those that do.
#[test]
fn unfinished_bodies_hold_nobody_up() {
    let server = TestServer::start(vec![echo("a")]);
    let mut other = server.served();
    let held: Vec<Client> = (0..40)
        .map(|_| {
            let mut client = server.served();
            let head = "POST /v1/admin/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000";
            client.send_raw(&format!("{head}\r\n\r\n"));
            client
        })
        .collect();
    for _ in 0..3 {
        assert_eq!(other.get("/health").status, 200);
        assert_eq!(
            other.post("/v1/admin/models/a/unload", &Value::Null).status,
            415
        );
        other.send("POST", "/v1/admin/models/a/load?wait_s=30", &[JSON], "{}");
        assert_eq!(other.read_answer().status, 200);
    }
    drop(held);
}

/// Pages that nobody reads cost a worker some seconds, and there are more workers.
#[test]
fn one_silent_reader_does_not_hide_the_pages() {
    let server = TestServer::start(vec![echo("a")]);
    let (mut other, mut silent) = (server.served(), server.served());
    let asks = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(200);
    silent.try_send_raw(&asks);
    for path in ["/health", "/v1/admin/models"] {
        assert_eq!(other.get(path).status, 200, "{path}");
    }
}

#[test]
fn bodies_are_checked_field_by_field() {
    let server = TestServer::start(vec![echo("a")]);
    let raw = |body: &str| server.request("POST", "/v1/admin/models/a/load", &[JSON], body);
    for body in ["{", "[1]", "\u{1}", r#"{"replicas": 1, "replicas": 2}"#] {
        assert_error(&raw(body), 400, "invalid_json");
    }
    for (body, field, range) in [
        (json!({"replicas": 0}), "replicas", "from 1 to 8"),
        (json!({"replicas": 9}), "replicas", "from 1 to 8"),
        (json!({"replicas": "2"}), "replicas", "from 1 to 8"),
        (json!({"replicas": 1.5}), "replicas", "from 1 to 8"),
        (json!({"replica": 1}), "replica", "replicas"),
        (json!({"file": "other.gguf"}), "file", "replicas"),
    ] {
        let error = assert_error(&raw(&body.to_string()), 400, "invalid_value");
        assert_eq!(error["param"], field, "{error}");
        let message = error["message"].as_str().expect("text");
        assert!(
            message.contains(field) && message.contains(range),
            "{message}"
        );
    }
    for (query, param) in [("wait_s=-1", "wait_s"), ("waits=1", "waits")] {
        let answer = server.post(&format!("/v1/admin/models/a/load?{query}"), &Value::Null);
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(param))
        );
    }
    let unload = server.post("/v1/admin/models/a/unload", &json!({"drain_timeout_s": -1}));
    assert_error(&unload, 400, "invalid_value");
    assert_eq!(server.state("a"), "unloaded");
}
