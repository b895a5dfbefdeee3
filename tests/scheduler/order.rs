//! Who starts next, where, and how long anybody can be overtaken.

use crate::support::{Bench, run_order};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::time::Duration;
use tinyloop::config::{ExecutorConfig, TargetInflight};
use tinyloop::runtime::fake::FakeRuntime;
use tinyloop::scheduler::Ticket;

#[test]
fn order_is_priority_then_fifo_without_aging() {
    let config = ExecutorConfig {
        aging_interval_ms: 0,
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(1, config);
    let tickets: Vec<_> = [0, 5, -3, 5, 0, 999]
        .map(|priority| bench.submit(priority))
        .into();
    let order = run_order(&bench);
    let expected: Vec<_> = [5, 1, 3, 0, 4, 2]
        .iter()
        .map(|&i: &usize| tickets[i].id())
        .collect();
    assert_eq!(order, expected);
}

#[test]
fn aging_lets_old_requests_pass_younger_ones_of_higher_priority() {
    let bench = Bench::stepped(1, ExecutorConfig::default()); // interval 5 s
    let old = bench.submit(0);
    bench.advance(9_999);
    let young = bench.submit(2); // worth 10 s: still sooner
    bench.advance(2);
    let younger = bench.submit(2); // 1 ms too late
    let order = run_order(&bench);
    assert_eq!(order, [young.id(), old.id(), younger.id()]);
}

#[test]
fn in_flight_never_exceeds_the_effective_target_and_both_targets_are_shown() {
    for (configured, expected) in [(None, 3), (Some(2), 2), (Some(9), 3)] {
        let config = ExecutorConfig {
            target_inflight: configured.map(TargetInflight::Jobs),
            ..ExecutorConfig::default()
        };
        let bench = Bench::stepped(3, config);
        let _tickets: Vec<_> = (0..5).map(|_| bench.submit(0)).collect();
        bench.executor.drive();
        assert_eq!(bench.counts(), (5 - expected as usize, expected));
        let snapshot = bench.executor.snapshot();
        let shown = configured.map(TargetInflight::Jobs);
        assert_eq!(snapshot.configured_target_inflight, shown);
        assert_eq!(snapshot.effective_target_inflight, expected);
    }
}

#[test]
fn jobs_spread_over_replicas_by_occupancy() {
    let replicas = vec![FakeRuntime::stepped(4), FakeRuntime::stepped(2)];
    let bench = Bench::with(replicas, ExecutorConfig::default());
    let _tickets: Vec<_> = (0..6).map(|_| bench.submit(0)).collect();
    bench.executor.drive();
    let loads: Vec<_> = bench.runtimes.iter().map(|r| r.running().len()).collect();
    assert_eq!(loads, [4, 2]);
    // A dead replica gets nothing; its jobs wait for the other one, before those that come later.
    bench.runtimes[1].die();
    bench.executor.drive();
    let last = bench.submit(0);
    bench.executor.drive();
    assert_eq!(bench.counts(), (3, 4));
    for _ in 0..3 {
        assert_eq!(bench.state(last.id()), "queued");
        let first = bench.runtimes[0].running()[0];
        bench.finish(first);
    }
    assert!(bench.runtimes[0].running().contains(&last.id()));
}

fn with_aging(aging_interval_ms: u64) -> ExecutorConfig {
    ExecutorConfig {
        aging_interval_ms,
        ..ExecutorConfig::default()
    }
}

/// How long one request of priority 0 waits, each time unit of 10 ms, under a stream of priority
/// `levels` that keeps one slot busy and `backlog` waiting. None = it never starts in `n_ticks`.
fn wait_under_a_stream(
    config: ExecutorConfig,
    levels: i32,
    backlog: usize,
    n_ticks: u64,
) -> Option<Duration> {
    let bench = Bench::stepped(1, config);
    let mut stream: VecDeque<Ticket> = (0..backlog).map(|_| bench.submit(levels)).collect();
    bench.executor.drive();
    let low = bench.submit(0);
    for _ in 0..n_ticks {
        stream.push_back(bench.submit(levels)); // one comes, one ends: steady
        bench.advance(10);
        let running = bench.runtime().running()[0];
        if running == low.id() {
            let stamps = *bench.info(running).state.stamps();
            return stamps.queue_wait();
        }
        bench.finish(running);
        stream.retain(|ticket| ticket.id() != running);
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Through the real executor: priority descending, then submit order, whenever they come.
    #[test]
    fn without_aging_the_order_is_exact(
        jobs in prop::collection::vec((-100_i32..=100, 0_u64..10_000), 1..60)
    ) {
        let bench = Bench::stepped(1, with_aging(0));
        let tickets: Vec<_> = jobs.iter().map(|&(priority, gap_ms)| {
            bench.advance(gap_ms);
            bench.submit(priority)
        }).collect();
        let mut expected: Vec<usize> = (0..jobs.len()).collect();
        expected.sort_by_key(|&index| -jobs[index].0); // stable: submit order within a priority
        let expected: Vec<_> = expected.into_iter().map(|index| tickets[index].id()).collect();
        prop_assert_eq!(run_order(&bench), expected);
    }

    /// `levels * interval`, and what was in line at that moment: the backlog and who runs.
    #[test]
    fn under_a_steady_stream_everyone_starts_within_levels_times_interval(
        levels in 1_i32..=10, interval_ms in 10_u64..=200, backlog in 1_usize..=4,
    ) {
        let bound_ms = levels as u64 * interval_ms;
        let in_line_ms = 10 * (backlog as u64 + 2);
        let n_ticks = (bound_ms + in_line_ms) / 10 + 10;
        let wait = wait_under_a_stream(with_aging(interval_ms), levels, backlog, n_ticks);
        let wait = wait.expect("it starts");
        prop_assert!(wait <= Duration::from_millis(bound_ms + in_line_ms), "{wait:?}");
        let starved = wait_under_a_stream(with_aging(0), levels, backlog, n_ticks);
        prop_assert_eq!(starved, None, "without aging it would wait for ever");
    }
}
