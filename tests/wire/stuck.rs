//! Everything stuck at once: workers, queue, slow heads, idle connections. The ops pages answer.

use super::support::{Client, config, start, wait_for};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tinyloop::http::wire::WireConfig;

/// Both ends of every connection live in this process.
fn idle_connections() -> usize {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("up to the hard limit");
    2000.min(
        usize::try_from(hard)
            .unwrap_or(usize::MAX)
            .saturating_sub(1500)
            / 2,
    )
}

#[test]
fn ops_pages_answer_while_everything_else_is_stuck() {
    let n_idle = idle_connections();
    let minutes = Duration::from_secs(600);
    let harness = start(WireConfig {
        workers: 4,
        queue: 8,
        max_connections: 4096,
        head_timeout: minutes,
        idle_timeout: minutes,
        ..config()
    });
    let mut idle: Vec<Client> = Vec::with_capacity(n_idle);
    for _ in 0..n_idle {
        let mut client = harness.connect();
        assert_eq!(client.get("/hello").status, 200);
        idle.push(client);
    }
    let mut slow: Vec<Client> = (0..200).map(|_| harness.connect()).collect();
    for client in &mut slow {
        client.send("GET /hello HTTP/1.1\r\nHo");
    }
    let mut busy: Vec<Client> = (0..4).map(|_| harness.connect()).collect();
    for client in &mut busy {
        client.ask("/wait");
        harness.expect_event("waiting");
    }
    let mut queued: Vec<Client> = (0..8).map(|_| harness.connect()).collect();
    for client in &mut queued {
        client.ask("/hello");
    }
    wait_for(&harness.stats().queued, 8);
    assert_eq!(harness.stats().open.load(Relaxed), (n_idle + 212) as u64);

    // No worker will move before the gate opens, so each answer here comes past them.
    for _ in 0..20 {
        assert_eq!(harness.connect().get("/health").status, 200);
        let refused = harness.connect().get("/hello");
        assert_eq!(
            (refused.status, refused.header("retry-after")),
            (503, Some("1"))
        );
    }
    let old = idle.last_mut().expect("some");
    assert_eq!(old.get("/health").status, 200, "an old connection too");

    harness.open_gate(4);
    for client in busy.iter_mut().chain(&mut queued) {
        assert_eq!(client.response().status, 200);
    }
    for client in &mut slow {
        client.send("st: t\r\n\r\n");
        assert_eq!(client.response().status, 200, "slow, but in time");
    }
}
