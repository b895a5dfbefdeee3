//! The data plane's connection layer over real sockets: what a client may rely on, and what an attacker
//! can't do. Tests wait for events (responses, hooks, counters), never for time to pass; limits are
//! seconds, so that two busy cores do not matter.

#[path = "wire/abuse.rs"]
mod abuse;
#[path = "wire/stuck.rs"]
mod stuck;
#[path = "wire/support.rs"]
mod support;

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use support::{Client, config, start, wait_down_to, wait_for};
use tinyloop::http::wire::WireConfig;

#[test]
fn requests_and_responses() {
    let harness = start(config());
    let mut client = harness.connect();
    let response = client.get("/hello");
    assert_eq!((response.status, response.text()), (200, "hi"));
    assert_eq!(response.header("content-type"), Some("text/plain"));
    assert_eq!(response.header("connection"), None);

    client.send("PUT /about?a=1&b=%20 HTTP/1.1\r\nHost: t\r\nX-Tag: ä\r\n\r\n");
    assert_eq!(client.response().text(), "PUT a=1&b=%20 ä true tcp");
    client.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!(client.response().text(), "hello");
    client.send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nT: v\r\n\r\n");
    assert_eq!(client.response().text(), "hello world");
    client.send("HEAD /hello HTTP/1.1\r\nHost: t\r\n\r\n");
    assert!(client.head().contains("Content-Length: 2\r\n"));
    assert_eq!(client.get("/nothing").header("content-length"), None);
    assert_eq!(client.get("/close").header("connection"), Some("close"));
    client.assert_closed();
}

#[test]
fn http10_closes_unless_asked_to_stay() {
    let harness = start(config());
    let mut client = harness.connect();
    client.send("GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert_eq!(client.response().header("connection"), Some("keep-alive"));
    client.send("GET /hello HTTP/1.0\r\n\r\n");
    assert_eq!(client.response().header("connection"), Some("close"));
    client.assert_closed();

    harness.open_gate(2);
    let mut client = harness.connect();
    client.send("GET /stream?2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert!(!client.head().contains("chunked"));
    while client.read_some() > 0 {}
    assert_eq!(client.take_buffer(), b"data: 0\n\ndata: 1\n\n");
}

#[test]
fn continue_comes_before_the_body_and_not_before_a_refusal() {
    let harness = start(config());
    let mut client = harness.connect();
    client.send(
        "POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n",
    );
    assert_eq!(client.response().status, 100);
    client.send("abc");
    assert_eq!(client.response().text(), "abc");
    client.send(
        "POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 9999999\r\n\r\n",
    );
    let refused = client.response();
    assert_eq!(
        (refused.status, refused.text()),
        (413, r#"{"status":413,"path":"/echo"}"#)
    );
    client.assert_closed();
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let harness = start(config());
    let mut client = harness.connect();
    client.send("GET /wait HTTP/1.1\r\nHost: t\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\nGET /x HTTP/1.1\r\nHost: t\r\n\r\n");
    harness.expect_event("waiting");
    harness.assert_healthy();
    let n_requests = harness.stats().requests.load(Relaxed);
    assert_eq!(n_requests, 2, "one in flight, and the health check");
    harness.open_gate(1);
    assert_eq!(client.response().text(), "waited");
    assert_eq!(client.response().text(), "hi");
    assert_eq!(client.response().status, 404);
}

#[test]
fn events_arrive_one_by_one_and_the_connection_lives_on() {
    let harness = start(config());
    let mut client = harness.connect();
    for round in 0..2 {
        client.ask("/stream?20");
        assert!(
            client.head().contains("Transfer-Encoding: chunked\r\n"),
            "round {round}"
        );
        harness.expect_event("streaming");
        for i in 0..20 {
            // The next event is not even produced before this one was read.
            harness.open_gate(1);
            let event = format!("data: {i}\n\n");
            let chunk = format!("{:x}\r\n{event}\r\n", event.len());
            client.read_some();
            let got = client.take_buffer();
            let end: &[u8] = if i == 19 { b"0\r\n\r\n" } else { b"" };
            if got == chunk.as_bytes() && i == 19 {
                client.read_some();
                assert_eq!(client.take_buffer(), end);
            } else {
                assert_eq!(got, [chunk.as_bytes(), end].concat());
            }
        }
    }
    assert_eq!(client.get("/hello").text(), "hi");
    client.send("HEAD /stream?1 HTTP/1.1\r\nHost: t\r\n\r\n");
    harness.open_gate(1);
    assert!(client.head().contains("200 OK"));
    assert_eq!(client.get("/hello").text(), "hi");
}

#[test]
fn a_large_response_is_whole() {
    let harness = start(config());
    let mut client = harness.connect();
    let response = client.get("/big");
    assert_eq!(response.body.len(), 8 << 20);
    assert!(response.body.iter().all(|b| *b == 7));
    harness.expect_event("big true");
}

#[test]
fn hang_up_is_noticed_while_waiting_by_fin_and_by_reset() {
    let harness = start(config());
    for reset in [false, true] {
        let mut client = harness.connect();
        client.ask("/wait");
        harness.expect_event("waiting");
        if reset {
            client.reset()
        } else {
            drop(client)
        }
        harness.expect_event("hang-up");
        harness.open_gate(1);
        assert!(harness.event().starts_with("gone true"));
    }
    // Pipelined bytes in front of the FIN do not hide it.
    let mut client = harness.connect();
    client.ask("/wait");
    harness.expect_event("waiting");
    client.ask("/hello");
    drop(client);
    harness.expect_event("hang-up");
    harness.open_gate(1);
    harness.event();
    assert_eq!(harness.stats().hangups.load(Relaxed), 3);
}

#[test]
fn hang_up_is_noticed_between_two_events() {
    let harness = start(config());
    let mut client = harness.connect();
    client.ask("/stream?1000");
    client.head();
    harness.expect_event("streaming");
    drop(client);
    harness.expect_event("hang-up"); // no event was sent that could have failed
    harness.open_gate(1000);
    wait_down_to(&harness.stats().busy_workers, 0);
}

#[test]
fn a_half_closed_client_still_hears_its_answer() {
    let harness = start(config());
    let mut client = harness.connect();
    client.ask("/wait");
    harness.expect_event("waiting");
    client.half_close();
    harness.expect_event("hang-up");
    harness.open_gate(1);
    assert_eq!(client.response().text(), "waited");
}

#[test]
fn closing_after_the_answer_is_no_hang_up() {
    let harness = start(config());
    let mut client = harness.connect();
    client.ask("/wait");
    harness.open_gate(1);
    assert_eq!(client.response().text(), "waited");
    drop(client);
    wait_down_to(&harness.stats().open, 0);
    assert_eq!(harness.stats().hangups.load(Relaxed), 0);
}

#[test]
fn panics_cost_one_request() {
    let harness = start(WireConfig {
        workers: 1,
        ..config()
    });
    for _ in 0..3 {
        let mut client = harness.connect();
        let response = client.get("/panic");
        assert_eq!(
            (response.status, response.header("connection")),
            (500, Some("close"))
        );
        client.assert_closed();
    }
    let mut client = harness.connect();
    client.ask("/stream-panics");
    client.head();
    while client.read_some() > 0 {}
    assert_eq!(
        client.take_buffer(),
        b"5\r\nfirst\r\n",
        "cut without the last chunk"
    );
    wait_for(&harness.stats().panics, 4);

    // A hook runs on the poll thread, which must survive it too.
    let mut client = harness.connect();
    client.ask("/hook-panics");
    harness.expect_event("waiting");
    drop(client);
    wait_for(&harness.stats().panics, 5);
    harness.open_gate(1);
    assert_eq!(harness.connect().get("/hello").status, 200);
}

#[test]
fn forgotten_answers_and_bad_headers_are_a_500() {
    let harness = start(config());
    assert_eq!(harness.connect().get("/forget").status, 500);
    let response = harness.connect().get("/inject");
    assert_eq!(response.status, 500);
    assert!(!response.head.contains("x-evil"));
    harness.expect_event("inject false");
}

#[test]
fn ipv6_and_unix_sockets() {
    let folder = std::env::temp_dir().join(format!("tinyloop-wire-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let path = format!("unix:{}", folder.join("socket").display());
    let listen = vec!["[::1]:0".into(), path.clone()];
    let harness = start(WireConfig {
        listen: listen.clone(),
        ..config()
    });
    for address in harness.server.local_addrs() {
        let mut client = Client::connect(address).expect("the server listens");
        client.send("GET /about HTTP/1.1\r\nHost: [::1]\r\n\r\n");
        assert!(
            client
                .response()
                .text()
                .ends_with(if address == &path { "unix" } else { "tcp" })
        );
        client.ask("/stream?2");
        harness.open_gate(2);
        assert_eq!(client.response().text(), "data: 0\n\ndata: 1\n\n");
        harness.expect_event("streaming");
        client.ask("/wait");
        harness.expect_event("waiting");
        drop(client);
        harness.expect_event("hang-up");
        harness.open_gate(1);
        harness.event();
    }
    harness.server.shutdown(Duration::ZERO);
    assert!(!folder.join("socket").exists());
    // A file left over from a crash is replaced; one that is in use is not.
    drop(std::os::unix::net::UnixListener::bind(folder.join("socket")).expect("a leftover"));
    let harness = start(WireConfig {
        listen: vec![path.clone()],
        ..config()
    });
    assert_eq!(
        Client::connect(&path)
            .expect("listens")
            .get("/hello")
            .status,
        200
    );
    drop(harness);
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn an_address_that_cannot_be_bound_is_named() {
    use std::sync::Arc;
    use tinyloop::http::wire::{Handler, Refusal, Request, Responder, WireServer};
    struct Nobody;
    impl Handler for Nobody {
        fn handle(&self, _: Request, _: Responder) {}
        fn is_ops(&self, _: &str) -> bool {
            false
        }
        fn refuse(&self, _: &Refusal<'_>) -> (Vec<(String, String)>, Vec<u8>) {
            Default::default()
        }
    }
    let taken = start(config());
    for spec in [taken.address(), "localhost".to_string()] {
        let config = WireConfig {
            listen: vec![spec.clone()],
            ..config()
        };
        let Err(error) = WireServer::start(config, Arc::new(Nobody)) else {
            panic!("{spec} was bound")
        };
        assert!(error.to_string().contains(&spec), "{error}");
    }
}

#[test]
fn a_drain_finishes_what_runs_and_tells_everybody_else() {
    let harness = start(WireConfig {
        workers: 1,
        ..config()
    });
    let mut idle = harness.connect();
    assert_eq!(idle.get("/hello").status, 200);
    let mut streaming = harness.connect();
    streaming.ask("/stream?3");
    streaming.head();
    harness.expect_event("streaming");
    let mut queued = harness.connect();
    queued.ask("/hello");
    wait_for(&harness.stats().queued, 1);
    let mut half_sent = harness.connect();
    half_sent.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nab");
    wait_for(&harness.stats().held_bytes, 1);

    let server = harness.server.clone();
    let shutdown = std::thread::spawn(move || server.shutdown(Duration::from_secs(20)));
    // What waits for a worker hears it first: from here on the drain has begun.
    let refused = queued.response();
    assert_eq!(
        (refused.status, refused.header("connection")),
        (503, Some("close"))
    );
    queued.assert_closed();
    // The port stays open: a new client, one on an old connection and one that was still sending are
    // told the same; pages of the ops set are answered.
    half_sent.send("cd");
    idle.ask("/hello");
    let mut new = harness.connect();
    new.ask("/hello");
    for client in [&mut half_sent, &mut idle, &mut new] {
        let refused = client.response();
        assert_eq!(
            (refused.status, refused.header("connection")),
            (503, Some("close"))
        );
        client.assert_closed();
    }
    let health = harness.connect().get("/health");
    assert_eq!(
        (health.status, health.header("connection")),
        (200, Some("close"))
    );

    harness.open_gate(3);
    while streaming.read_some() > 0 {}
    assert!(
        streaming
            .take_buffer()
            .ends_with(b"data: 2\n\n\r\n0\r\n\r\n")
    );
    shutdown.join().expect("shutdown returns");
    assert!(
        Client::connect(&harness.address()).is_err(),
        "the port is closed"
    );
    harness.server.shutdown(Duration::ZERO); // again is fine
}

#[test]
fn shutdown_cuts_what_does_not_end_and_a_second_call_hastens_it() {
    let harness = start(config());
    let mut waiting = harness.connect();
    waiting.ask("/wait");
    harness.expect_event("waiting");
    let mut flooded = harness.connect();
    flooded.ask("/flood");
    harness.expect_event("flooding");
    let server = harness.server.clone();
    let patient = std::thread::spawn(move || server.shutdown(Duration::from_secs(600)));
    harness.open_gate(0);
    let hasty = harness.server.clone();
    let hasty = std::thread::spawn(move || hasty.shutdown(Duration::from_millis(50)));
    let mut seen = vec![harness.event(), harness.event()];
    seen.sort();
    assert_eq!(seen, ["flood cut", "hang-up"]);
    harness.open_gate(1);
    assert_eq!(harness.event(), "gone true sent false");
    patient.join().expect("shutdown returns");
    hasty.join().expect("shutdown returns");
    waiting.assert_closed();
}
