//! Hostile and broken bytes against the whole data plane: a table of what is sent and what comes back.
//!
//! Each row ends with the right status in the API's error shape, or a close; afterwards no worker is
//! lost and no bytes are held. What needs time or many connections is in `tests/wire/abuse.rs`.

use super::{TestServer, wait_for};
use crate::client::Client;
use crate::fake::Alphabet;
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

/// What the only answer is.
enum End {
    /// Status and error code, then a close.
    Refused(u16, &'static str),
    /// Status of an answer after which the connection lives on.
    Answered(u16),
}
use End::{Answered, Refused};

fn post(fields: &str, body: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\nHost: t\r\n{fields}\r\n\r\n{body}")
}

/// A request that must not be seen: it would be answered with 200.
const SMUGGLED: &str = "0\r\n\r\nGET /health HTTP/1.1\r\nHost: t\r\n\r\n";

fn framing() -> Vec<(String, End)> {
    let bad = || Refused(400, "bad_request");
    let large = || Refused(413, "request_too_large");
    let mut rows: Vec<(String, End)> = Vec::new();
    for length in [
        "16777217",
        "10000000000",
        "40000000000",
        "4611686018427387904",
        "9223372036854775808",
        "999999999999999999999999999999",
    ] {
        rows.push((post(&format!("Content-Length: {length}"), "x"), large()));
    }
    for length in ["-1", "+5", "5,5", "5 5", "0x5", ""] {
        rows.push((post(&format!("Content-Length: {length}"), "hello"), bad()));
    }
    for fields in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding:\r\n chunked",
        "X: a\r\n b\r\nTransfer-Encoding: chunked",
    ] {
        rows.push((post(fields, SMUGGLED), bad()));
    }
    rows.push((
        post("Content-Length: 3\r\nContent-Length: 5", "hello"),
        bad(),
    ));
    rows.push((
        post("Transfer-Encoding: chunked", "3\r\nabcd\r\n0\r\n\r\n"),
        bad(),
    ));
    rows.push((
        post("Transfer-Encoding: chunked", "3\nabc\r\n0\r\n\r\n"),
        bad(),
    ));
    rows.push((
        post("Transfer-Encoding: chunked", "ffffffffffffffffff\r\n"),
        bad(),
    ));
    rows.push((
        post("Expect: tea\r\nContent-Length: 1", "x"),
        Refused(417, "expectation_failed"),
    ));
    rows
}

fn heads() -> Vec<(String, End)> {
    let bad = || Refused(400, "bad_request");
    let head = || Refused(431, "request_header_too_large");
    vec![
        ("GET / HTTP/1.1\nHost: t\n\n".to_owned(), bad()),
        ("GET /health HTTP/1.1\r\n\r\n".to_owned(), bad()),
        (
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_owned(),
            bad(),
        ),
        ("GET /\u{e4} HTTP/1.1\r\nHost: t\r\n\r\n".to_owned(), bad()),
        (
            "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
            bad(),
        ),
        (
            "\x16\x03\x01\x02\x00\x01\x00\x01\x7c\x03\x03".to_owned(),
            bad(),
        ),
        (
            "no http at all\r\n\r\n".to_owned(),
            Refused(505, "http_version_not_supported"),
        ),
        (
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
            Refused(505, "http_version_not_supported"),
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: t\r\nX: {}", "x".repeat(64 << 10)),
            head(),
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: t\r\n{}", "a: b\r\n".repeat(12_000)),
            head(),
        ),
        (
            format!("GET /{} HTTP/1.1\r\nHost: t\r\n\r\n", "x".repeat(64 << 10)),
            head(),
        ),
    ]
}

fn requests() -> Vec<(String, End)> {
    let sized = |body: &str| post(&format!("Content-Length: {}", body.len()), body);
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    vec![
        (sized("{"), Answered(400)),
        (sized(&deep), Answered(400)),
        (sized("{\"prompt\": \"a\\ud800\"}"), Answered(400)),
        (sized("{\"prompt\": 1e999}"), Answered(400)),
        (
            sized("{\"prompt\": \"a\", \"max_tokens\": 1e30}"),
            Answered(400),
        ),
        (
            post("Transfer-Encoding: chunked", "1\r\n{\r\n0\r\n\r\n"),
            Answered(400),
        ),
        (
            "GET /v1/models/%ff HTTP/1.1\r\nHost: t\r\n\r\n".to_owned(),
            Answered(404),
        ),
        (
            "GET /../../etc/passwd HTTP/1.1\r\nHost: t\r\n\r\n".to_owned(),
            Answered(404),
        ),
        (
            "TRACE /v1/models HTTP/1.1\r\nHost: t\r\n\r\n".to_owned(),
            Answered(405),
        ),
        (
            "GET /health HTTP/1.1\r\nHost: t\r\nX-Request-Id: a\tb\r\n\r\n".to_owned(),
            Answered(200),
        ),
    ]
}

#[test]
fn every_row_ends_with_a_right_status_and_costs_nothing() {
    let server = TestServer::with(Alphabet::at_once(), |config| config.server.http_workers = 2);
    let rows = framing().into_iter().chain(heads()).chain(requests());
    for (raw, end) in rows {
        let shown: String = raw.chars().take(120).collect();
        let mut client = server.client();
        client.try_send_raw(&raw); // the server may close before the end
        let answer = client.read_answer();
        match end {
            Refused(status, code) => {
                assert_eq!(answer.status, status, "{shown:?}");
                assert_eq!(answer.json()["error"]["code"], code, "{shown:?}");
                assert_eq!(answer.header("connection"), Some("close"), "{shown:?}");
                assert!(client.is_closed(), "{shown:?}");
            }
            Answered(status) => {
                assert_eq!(answer.status, status, "{shown:?}");
                assert_eq!(client.get("/health").status, 200, "{shown:?}");
            }
        }
        // Both workers are there: each answers one of two at the same time, or one both.
        let mut workers: Vec<Client> = (0..2).map(|_| server.client()).collect();
        for client in &mut workers {
            let body = json!({"prompt": "a", "max_tokens": 1});
            assert_eq!(
                client.post("/v1/completions", &body).status,
                200,
                "{shown:?}"
            );
        }
    }
    wait_for("no bytes", || {
        let metrics = server.client().get("/metrics");
        let text = String::from_utf8(metrics.body).expect("text");
        assert!(text.contains("\ntinyloop_http_handler_panics_total 0\n"));
        // The scrape's own request is held while it is answered.
        let held = text
            .lines()
            .find_map(|line| line.strip_prefix("tinyloop_http_request_bytes_held "));
        held.and_then(|held| held.parse::<u64>().ok())
            .is_some_and(|held| held < 16 << 10)
    });
}

#[test]
fn pages_answer_while_workers_and_queue_are_full() {
    let runtime = Alphabet::stepped(2);
    let server = TestServer::with(std::sync::Arc::clone(&runtime), |config| {
        config.server.http_workers = 2;
        config.server.http_queue_depth = 1;
    });
    let management = server.server().management_address().expect("it listens");
    let body = json!({"prompt": "a", "max_tokens": 3, "stream": true}).to_string();
    let mut clients: Vec<Client> = Vec::new();
    for n_active in 1..=2 {
        let mut client = server.client();
        client.send("POST", "/v1/completions", &[], &body);
        clients.push(client);
        wait_for("the job", || runtime.n_active() == n_active);
    }
    let mut queued = server.client();
    queued.send("POST", "/v1/completions", &[], &body);
    clients.push(queued);
    wait_for("the full queue", || {
        let metrics = server.client().get("/metrics");
        String::from_utf8_lossy(&metrics.body).contains("\ntinyloop_http_requests_queued 1\n")
    });
    let refused = server
        .client()
        .post("/v1/completions", &json!({"prompt": "a"}));
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (503, Some("overloaded"))
    );
    assert_eq!(refused.header("x-tinyloop-rejected"), Some("overloaded"));
    assert_eq!(refused.header("retry-after"), Some("1"));
    // Counted although nobody read which model it meant.
    let counted = r#"tinyloop_admission_rejected_total{model="",reason="overloaded"} 1"#;
    let metrics = server.executor.metrics_text("");
    assert!(metrics.contains(counted), "{metrics}");
    for plane in [server.address, management] {
        for path in ["/health", "/ready", "/metrics", "/v1/requests"] {
            assert_eq!(Client::connect(plane).get(path).status, 200, "{path}");
        }
    }
    // The third one's job comes when a worker is free.
    let done = r#"tinyloop_requests_total{model="test/model",outcome="done"} 3"#;
    wait_for("all three", || {
        runtime.step();
        server.executor.metrics_text("").contains(done)
    });
    for client in &mut clients {
        assert_eq!(client.read_answer().status, 200);
    }
}

/// What a client may announce and never send: tiny_http would wait for it, or make room for it, and a
/// failed allocation would end the process. That plane may be held up by it; nothing else may.
#[test]
fn announced_bodies_do_not_end_the_server_or_its_stop() {
    let mut server = TestServer::start(Alphabet::at_once());
    let management = server.server().management_address().expect("it listens");
    let announced = [
        "Content-Length: 99999999999",
        "Content-Length: 2000",
        "Transfer-Encoding: chunked",
        "Expect: 100-continue\r\nContent-Length: 10",
    ];
    let held = announced.map(|announced| {
        let mut stream = TcpStream::connect(management).expect("it listens");
        let line = "POST /v1/requests/x/cancel HTTP/1.1\r\nHost: h";
        let head = format!("{line}\r\n{announced}\r\n\r\n");
        stream
            .write_all(head.as_bytes())
            .expect("a fresh connection");
        stream
    });
    assert_eq!(server.client().get("/health").status, 200);
    server.stop(Duration::ZERO);
    drop(held);
}

/// The few threads of these pages are not held by clients that ask and never read.
#[test]
fn readers_that_stop_do_not_hide_the_pages() {
    let server = TestServer::start(Alphabet::at_once());
    let asks = "GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n".repeat(300);
    let silent: Vec<TcpStream> = (0..6)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address).expect("it listens");
            // The server may close while this is written: then it has noticed already.
            let _ = stream.write_all(asks.as_bytes());
            stream
        })
        .collect();
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(server.client().get(path).status, 200, "{path}");
    }
    drop(silent);
}
