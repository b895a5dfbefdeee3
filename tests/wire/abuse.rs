//! What hostile and broken clients do, in bounded sizes. Each test ends by asking the server how it is.

use super::support::{Client, Harness, PATIENCE, config, start, wait_down_to, wait_for};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tinyloop::http::wire::{REJECT_STATUSES, WireConfig};

/// Sends raw bytes on a fresh connection and returns the status of the only answer.
#[track_caller]
fn status_of(harness: &Harness, raw: &[u8]) -> u16 {
    let mut client = harness.connect();
    let _ = client.socket.write_all(raw); // the server may have closed before the end
    let response = client.response();
    assert_eq!(
        response.header("connection"),
        Some("close"),
        "{:?}",
        String::from_utf8_lossy(raw)
    );
    client.assert_closed();
    response.status
}

fn post(fields: &str, body: &str) -> Vec<u8> {
    format!("POST /echo HTTP/1.1\r\nHost: t\r\n{fields}\r\n\r\n{body}").into_bytes()
}

#[test]
fn a_burst_of_connections_is_answered() {
    let harness = start(WireConfig {
        queue: 256,
        ..config()
    });
    for n_clients in [8, 64, 256] {
        let mut clients: Vec<Client> = (0..n_clients).map(|_| harness.connect()).collect();
        for client in &mut clients {
            client.ask("/hello");
        }
        for client in &mut clients {
            assert_eq!(client.response().status, 200);
        }
    }
}

#[test]
fn a_head_in_single_bytes_ends_at_the_limit() {
    let harness = start(config());
    let mut client = harness.connect();
    client.send("GET /hello HTTP/1.1\r\nHost: t\r\nX: ");
    for _ in 0..33 << 10 {
        // The server closes when it has seen enough.
        if client.socket.write_all(b"x").is_err() {
            break;
        }
    }
    assert_eq!(client.response().status, 431);
    harness.assert_healthy();
}

#[test]
fn a_pipelining_flood_that_reads_nothing_is_cut() {
    let harness = start(WireConfig {
        write_timeout: Duration::from_secs(1),
        min_bytes_per_second: 0,
        ..config()
    });
    let mut client = harness.connect();
    let requests = "GET /hello HTTP/1.1\r\nHost: t\r\n\r\n".repeat(1000);
    let mut sent = 0;
    // Kernel buffers take some of it; then the answers have no room and the write deadline passes.
    while client.socket.write_all(requests.as_bytes()).is_ok() {
        sent += requests.len();
        assert!(sent < 256 << 20, "the server swallows everything");
    }
    wait_for(&harness.stats().aborted, 1);
    wait_down_to(&harness.stats().open, 0);
    assert!(harness.stats().held_bytes.load(Relaxed) < 1 << 20);
    harness.assert_healthy();
}

#[test]
fn slow_heads_cost_no_worker_and_end_in_408() {
    let harness = start(WireConfig {
        head_timeout: Duration::from_secs(2),
        ..config()
    });
    let mut clients: Vec<Client> = (0..200).map(|_| harness.connect()).collect();
    for client in &mut clients {
        client.send("GET /hello HTTP/1.1\r\nHo");
    }
    harness.assert_healthy();
    for client in &mut clients {
        let _ = client.socket.write_all(b"s"); // a drip does not move the deadline
    }
    for client in &mut clients {
        assert_eq!(client.response().status, 408);
    }
    assert_eq!(harness.stats().rejected(408), 200);
    assert_eq!(harness.stats().requests.load(Relaxed), 1);
    harness.assert_healthy();
}

#[test]
fn silent_and_idle_connections_are_closed() {
    let second = Duration::from_secs(1);
    let harness = start(WireConfig {
        head_timeout: second,
        idle_timeout: second,
        ..config()
    });
    let mut silent = harness.connect();
    let mut idle: Vec<Client> = (0..300).map(|_| harness.connect()).collect();
    for client in &mut idle {
        assert_eq!(client.get("/hello").status, 200);
    }
    silent.assert_closed();
    for client in &mut idle {
        client.assert_closed();
    }
    wait_down_to(&harness.stats().open, 0);
}

#[test]
fn absurd_lengths_are_refused_at_once() {
    let harness = start(config());
    for length in [
        "1048577",
        "10000000000",
        "40000000000",
        "4611686018427387904",
        "9223372036854775808",
        "999999999999999999999999999999",
    ] {
        assert_eq!(
            status_of(&harness, &post(&format!("Content-Length: {length}"), "x")),
            413,
            "{length}"
        );
    }
    for length in ["-1", "+5", "5,5", "5 5", "0x5", "", "five"] {
        assert_eq!(
            status_of(
                &harness,
                &post(&format!("Content-Length: {length}"), "hello")
            ),
            400,
            "{length}"
        );
    }
    assert!(harness.stats().held_bytes.load(Relaxed) < 1 << 20);
    harness.assert_healthy();
}

#[test]
fn the_413_is_heard_by_a_client_that_goes_on_sending() {
    let harness = start(config());
    let mut client = harness.connect();
    client.send(post("Content-Length: 4000000", ""));
    // Past the linger limit the server resets, so the rest may fail; the answer must be there.
    let _ = client.socket.write_all(&vec![b'x'; 900_000]);
    assert_eq!(client.response().status, 413);

    // Chunked: refused when the decoded size passes the limit.
    let mut client = harness.connect();
    client.send(post("Transfer-Encoding: chunked", "100000\r\n"));
    let _ = client.socket.write_all(&vec![b'x'; 1 << 20]);
    let _ = client.socket.write_all(b"\r\n1\r\ny\r\n");
    assert_eq!(client.response().status, 413);
}

#[test]
fn endless_heads_and_bodies_hold_nothing() {
    let harness = start(config());
    for filler in ["x".repeat(64 << 10), "a: b\r\n".repeat(12_000)] {
        assert_eq!(
            status_of(
                &harness,
                format!("GET / HTTP/1.1\r\nHost: t\r\nX: {filler}").as_bytes()
            ),
            431
        );
    }
    // A lingering client that pushes for ever is cut by bytes, long before the time limit.
    let harness = start(WireConfig {
        linger: Duration::from_secs(600),
        ..config()
    });
    let mut client = harness.connect();
    client.send(post("Content-Length: 99999999999", ""));
    let chunk = vec![b'x'; 64 << 10];
    let mut pushed = 0;
    while client.socket.write_all(&chunk).is_ok() {
        pushed += chunk.len();
        assert!(pushed < 256 << 20, "the server swallows everything");
    }
    wait_down_to(&harness.stats().open, 0);
    harness.assert_healthy();
}

#[test]
fn smuggling_attempts_are_refused_and_what_follows_is_not_a_request() {
    let harness = start(config());
    let chunked = "0\r\n\r\nGET /hello HTTP/1.1\r\nHost: t\r\n\r\n";
    let cases: Vec<Vec<u8>> = vec![
        post("Content-Length: 4\r\nTransfer-Encoding: chunked", chunked),
        post("Transfer-Encoding: identity", chunked),
        post("Transfer-Encoding: xchunked", chunked),
        post("Transfer-Encoding: gzip, chunked", chunked),
        post(
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            chunked,
        ),
        post("Transfer-Encoding : chunked", chunked),
        post("Transfer-Encoding:\r\n chunked", chunked),
        post("X: a\r\n b\r\nTransfer-Encoding: chunked", chunked),
        post("Content-Length: 3\r\nContent-Length: 5", "hello"),
        post("Transfer-Encoding: chunked", "3\r\nabcd\r\n0\r\n\r\n"),
        post("Transfer-Encoding: chunked", "3\nabc\r\n0\r\n\r\n"),
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\nHost: t\n\n".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_vec(),
        b"GET /\xc3\xa4 HTTP/1.1\r\nHost: t\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
    ];
    for raw in &cases {
        assert_eq!(
            status_of(&harness, raw),
            400,
            "{:?}",
            String::from_utf8_lossy(raw)
        );
    }
    assert_eq!(
        status_of(&harness, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        505
    );
    assert_eq!(status_of(&harness, &post("Expect: tea", "")), 417);
    assert_eq!(
        harness.stats().requests.load(Relaxed),
        0,
        "nothing reached the handler"
    );
    assert_eq!(harness.stats().rejected(400), cases.len() as u64);
}

#[test]
fn a_pipelining_flood_waits_in_the_kernel() {
    let harness = start(config());
    let address = harness.address();
    let n_requests = 20_000;
    let request = "GET /hello HTTP/1.1\r\nHost: t\r\n\r\n";
    let mut client = Client::connect(&address).expect("the server listens");
    std::thread::scope(|scope| {
        let tcp = client.clone_tcp();
        scope.spawn(move || {
            let mut tcp = tcp;
            for _ in 0..n_requests / 100 {
                tcp.write_all(request.repeat(100).as_bytes())
                    .expect("all are read in the end");
            }
        });
        for i in 0..n_requests {
            assert_eq!(client.response().status, 200);
            if i == n_requests / 2 {
                harness.assert_healthy();
            }
        }
    });
    assert!(harness.stats().held_bytes.load(Relaxed) < 1 << 20);
}

#[test]
fn stalled_bodies_hold_no_worker_and_end_in_408() {
    let limits = WireConfig {
        body_timeout: Duration::from_secs(2),
        workers: 2,
        ..config()
    };
    let harness = start(limits);
    let mut stalled: Vec<Client> = (0..8).map(|_| harness.connect()).collect();
    for client in &mut stalled {
        client.send(post("Content-Length: 5000", "some"));
    }
    assert_eq!(harness.connect().get("/hello").status, 200);
    for client in &mut stalled {
        assert_eq!(client.response().status, 408);
    }
    assert_eq!(harness.stats().rejected(408), 8);
}

#[test]
fn a_slow_body_that_keeps_moving_is_not_cut() {
    // 300 bytes at 100 per second earn 3 s on top of the allowance of 1 s.
    let limits = WireConfig {
        body_timeout: Duration::from_secs(1),
        min_bytes_per_second: 100,
        ..config()
    };
    let harness = start(limits);
    let mut stalled = harness.connect();
    stalled.send(post("Content-Length: 5000", "some"));
    let mut moving = harness.connect();
    moving.send(post("Content-Length: 301", &"x".repeat(300)));
    assert_eq!(stalled.response().status, 408); // the clock of both: it began earlier and earned nothing
    moving.send("x");
    let response = moving.response();
    assert_eq!((response.status, response.body.len()), (200, 301));
}

#[test]
fn a_reader_that_stops_is_cut_at_the_write_deadline() {
    let limits = WireConfig {
        write_timeout: Duration::from_secs(1),
        min_bytes_per_second: 1 << 20,
        ..config()
    };
    let harness = start(limits);
    let mut reader = harness.connect();
    reader.ask("/flood");
    harness.expect_event("flooding");
    let mut big = harness.connect();
    big.ask("/big");
    let mut seen = vec![harness.event(), harness.event()];
    seen.sort();
    assert_eq!(seen, ["big false", "flood cut"]);
    wait_for(&harness.stats().aborted, 2);
    wait_down_to(&harness.stats().open, 0);
    harness.assert_healthy();
}

#[test]
fn at_the_cap_the_idle_make_room_and_the_busy_do_not() {
    let harness = start(WireConfig {
        max_connections: 16,
        queue: 64,
        workers: 1,
        ..config()
    });
    let mut served = Vec::new();
    for _ in 0..60 {
        let mut client = harness.connect();
        assert_eq!(client.get("/hello").status, 200);
        served.push(client);
    }
    assert!(harness.stats().evicted.load(Relaxed) >= 44);
    served.clear();
    wait_down_to(&harness.stats().open, 0);

    let mut busy: Vec<Client> = (0..16).map(|_| harness.connect()).collect();
    for client in &mut busy {
        client.ask("/wait");
    }
    harness.expect_event("waiting");
    wait_for(&harness.stats().queued, 15);
    let refused_before = harness.stats().refused.load(Relaxed);
    let mut late = harness.connect();
    let response = late.response();
    assert_eq!(
        (response.status, response.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!(harness.stats().refused.load(Relaxed), refused_before + 1);
    harness.open_gate(16);
    for client in &mut busy {
        assert_eq!(client.response().text(), "waited");
    }
    harness.assert_healthy();
}

#[test]
fn one_address_may_be_limited() {
    let harness = start(WireConfig {
        max_connections_per_peer: Some(3),
        ..config()
    });
    let mut clients: Vec<Client> = (0..3).map(|_| harness.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.get("/hello").status, 200);
    }
    assert_eq!(harness.connect().response().status, 503);
    clients.pop();
    wait_down_to(&harness.stats().open, 2);
    assert_eq!(harness.connect().get("/hello").status, 200);
}

#[test]
fn request_bytes_in_flight_are_bounded() {
    let harness = start(WireConfig {
        memory_budget_bytes: 4 << 20,
        ..config()
    });
    let mut clients: Vec<Client> = (0..12).map(|_| harness.connect()).collect();
    for client in &mut clients {
        let _ = client
            .socket
            .write_all(&post("Content-Length: 1000000", &"x".repeat(999_000)));
    }
    let position = REJECT_STATUSES
        .iter()
        .position(|status| *status == 503)
        .expect("a known status");
    wait_for(&harness.stats().rejects[position], 1);
    assert!(harness.stats().held_bytes.load(Relaxed) <= 5 << 20);
    drop(clients);
    wait_down_to(&harness.stats().held_bytes, 0);
    harness.assert_healthy();
}

#[test]
fn a_full_queue_is_a_503_and_the_dead_make_room() {
    let harness = start(WireConfig {
        workers: 1,
        queue: 4,
        ..config()
    });
    let mut busy = harness.connect();
    busy.ask("/wait");
    harness.expect_event("waiting");
    let mut queued: Vec<Client> = (0..4).map(|_| harness.connect()).collect();
    for client in &mut queued {
        client.ask("/hello");
    }
    wait_for(&harness.stats().queued, 4);
    let mut refused = harness.connect();
    let response = refused.get("/hello");
    assert_eq!(
        (response.status, response.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!(response.text(), r#"{"status":503,"path":"/hello"}"#);
    harness.assert_healthy();

    drop(queued); // they leave while they wait
    let stats = harness.stats();
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Refused until the poll thread has seen one of them leave; a 503 keeps the connection.
        let (n_requests, n_refused) = (stats.requests.load(Relaxed), stats.rejected(503));
        refused.ask("/hello");
        while stats.requests.load(Relaxed) == n_requests && stats.rejected(503) == n_refused {
            assert!(Instant::now() < deadline, "neither queued nor refused");
            std::thread::yield_now();
        }
        if stats.requests.load(Relaxed) > n_requests {
            break;
        }
        assert_eq!(refused.response().status, 503);
        assert!(Instant::now() < deadline, "the dead keep their places");
    }
    assert!(stats.purged.load(Relaxed) >= 1);
    harness.open_gate(1);
    assert_eq!(refused.response().status, 200);
    assert_eq!(busy.response().text(), "waited");
}

#[test]
fn resets_and_drops_leave_nothing_behind() {
    let harness = start(config());
    for i in 0..500 {
        let mut client = harness.connect();
        let _ = client
            .socket
            .write_all(b"GET /hello HTTP/1.1\r\nHost: t\r\n\r\n");
        if i % 2 == 0 {
            client.reset();
        }
    }
    wait_for(&harness.stats().accepted, 400); // some are reset before they are accepted
    harness.assert_healthy();
    wait_down_to(&harness.stats().open, 0);
    assert_eq!(harness.stats().panics.load(Relaxed), 0);
}

/// The child of the next test: a server in a process that has run out of descriptors.
#[test]
#[ignore = "run by `without_descriptors_clients_are_told_and_later_served` in a process of its own"]
fn child_without_descriptors() {
    let harness = start(config());
    assert!(
        harness.stats().max_connections.load(Relaxed) < 200,
        "the cap follows the descriptor limit"
    );
    let mut taken = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        taken.push(file);
    }
    let mut out = std::io::stderr();
    writeln!(out, "address {}", harness.address()).expect("the parent reads");
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .expect("the parent speaks");
    taken.clear();
    writeln!(
        out,
        "errors {}",
        harness.stats().accept_errors.load(Relaxed)
    )
    .expect("the parent reads");
    let _ = std::io::stdin().read_to_string(&mut line);
}

#[test]
fn without_descriptors_clients_are_told_and_later_served() {
    let me = std::env::current_exe().expect("a test has a path");
    let script =
        "ulimit -n 200; exec \"$0\" --exact abuse::child_without_descriptors --ignored --nocapture";
    let mut child = Command::new("sh")
        .args(["-c", script])
        .arg(me)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let mut find = |wanted: &str| loop {
        let line = lines.next().expect("the child lives").expect("text");
        if let Some(rest) = line.strip_prefix(wanted) {
            return rest.to_string();
        }
    };
    let address = find("address ");
    for _ in 0..10 {
        let mut client = Client::connect(&address).expect("the kernel completes connections");
        assert_eq!(client.get("/hello").status, 503);
    }
    let stdin = child.stdin.as_mut().expect("piped");
    stdin.write_all(b"free\n").expect("the child reads");
    let errors: u64 = find("errors ").parse().expect("a number");
    assert!(errors >= 10, "{errors}");
    assert_eq!(
        Client::connect(&address)
            .expect("listening")
            .get("/hello")
            .status,
        200
    );
    drop(child.stdin.take());
    assert!(child.wait().expect("the child ends").success());
}
