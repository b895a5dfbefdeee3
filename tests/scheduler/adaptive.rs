//! `target_inflight = "auto"` against a scripted upstream with a known knee, on a manual clock.

use crate::support::{Bench, request};
use std::collections::HashMap;
use tinyloop::config::{ExecutorConfig, TargetInflight};
use tinyloop::request::{RequestError, RequestId};
use tinyloop::scheduler::{StreamEvent, TokenStream};

/// Time of a job that is not slowed down.
const JOB_MS: f64 = 100.0;
const TICK_MS: u64 = 5;

/// An upstream that works on `knee` jobs at full speed, and on more as fast all together; it refuses what
/// comes while it has `most`.
struct Upstream {
    bench: Bench,
    knee: f64,
    most: usize,
    done_ms: HashMap<RequestId, f64>,
    streams: Vec<TokenStream>,
}

impl Upstream {
    fn new(knee: f64, target_max: Option<u32>) -> Self {
        let config = ExecutorConfig {
            target_inflight: Some(TargetInflight::Auto),
            target_inflight_max: target_max,
            ..ExecutorConfig::default()
        };
        Self {
            bench: Bench::stepped(40, config),
            knee,
            most: usize::MAX,
            done_ms: HashMap::new(),
            streams: Vec::new(),
        }
    }

    fn tick(&mut self) {
        while self.bench.executor.snapshot().queue_depth < 50 {
            self.streams.push(self.bench.stream(request(2)));
        }
        self.bench.executor.drive();
        let mut running = self.bench.runtime().running();
        for refused in running.drain(self.most.min(running.len())..) {
            let full = RequestError::Overloaded {
                retry_after_ms: None,
            };
            self.bench.runtime().fail_with(refused, full);
        }
        let speed = (self.knee / running.len().max(1) as f64).min(1.0);
        self.bench.advance(TICK_MS);
        for id in running {
            let done = self.done_ms.entry(id).or_default();
            *done += speed * TICK_MS as f64;
            if *done >= JOB_MS {
                self.bench.runtime().finish(id);
                self.bench.executor.drive();
            }
        }
    }

    /// Mean target over so many seconds.
    fn run(&mut self, seconds: u64) -> f64 {
        let n_ticks = seconds * 1000 / TICK_MS;
        let mut sum = 0.0;
        for _ in 0..n_ticks {
            self.tick();
            let target = self.bench.executor.snapshot().effective_target_inflight;
            assert!(target >= 1, "it never starves");
            sum += f64::from(target);
        }
        // Nobody failed, whatever was tried.
        self.streams.retain_mut(|stream| {
            let mut event = stream.recv_timeout(std::time::Duration::ZERO);
            while matches!(event, StreamEvent::Chunk(_)) {
                event = stream.recv_timeout(std::time::Duration::ZERO);
            }
            assert!(!matches!(event, StreamEvent::Failed(_)), "{event:?}");
            matches!(event, StreamEvent::TimedOut)
        });
        sum / n_ticks as f64
    }
}

#[track_caller]
fn assert_near(found: f64, knee: f64) {
    let error = (found - knee).abs();
    assert!(error <= 1.0 + 0.25 * knee, "{found} for a knee at {knee}");
}

#[test]
fn the_target_finds_the_knee_and_follows_it() {
    let mut upstream = Upstream::new(10.0, None);
    upstream.run(20);
    assert_near(upstream.run(20), 10.0);
    upstream.knee = 3.0;
    upstream.run(30);
    assert_near(upstream.run(30), 3.0);
    upstream.knee = 20.0;
    upstream.run(30);
    assert_near(upstream.run(20), 20.0);
    let replica = &upstream.bench.executor.snapshot().replicas[0];
    assert_eq!(replica.max_inflight, 40);
    let shown = upstream.bench.executor.snapshot();
    assert_eq!(shown.configured_target_inflight, Some(TargetInflight::Auto));
    let metric = "tinyloop_replica_target_inflight{model=\"m\",replica=\"0\"}";
    assert_eq!(upstream.bench.metric(metric), f64::from(replica.target));
}

#[test]
fn refusals_of_the_upstream_are_obeyed_and_no_request_fails_for_them() {
    let mut upstream = Upstream::new(1e9, Some(30));
    upstream.most = 6;
    upstream.run(20);
    let found = upstream.run(20);
    assert!((3.5..=7.5).contains(&found), "{found}");
}

#[test]
fn the_configured_maximum_holds() {
    let mut upstream = Upstream::new(1e9, Some(4));
    upstream.run(10);
    let found = upstream.run(10);
    assert!((3.0..=4.0).contains(&found), "{found}");
}

/// Requests of minutes: the target climbs by what they bring while they run, before a single one has ended.
#[test]
fn long_requests_raise_the_target_before_one_of_them_ends() {
    let config = ExecutorConfig {
        target_inflight: Some(TargetInflight::Auto),
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(40, config);
    let streams: Vec<_> = (0..40).map(|_| bench.stream(request(4000))).collect();
    for _ in 0..160 {
        bench.executor.drive();
        for id in bench.runtime().running() {
            for _ in 0..10 {
                assert!(bench.runtime().step(id), "it goes on");
            }
        }
        bench.advance(500);
    }
    bench.executor.drive();
    let target = bench.executor.snapshot().effective_target_inflight;
    assert!(target >= 30, "{target} after 80 seconds");
    assert!(streams.iter().all(|stream| stream.outcome().is_none()));
}
