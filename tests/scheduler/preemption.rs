//! Running requests that lose their slot to higher priorities, and get it back.

use crate::support::Bench;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{RequestError, RequestId};
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::scheduler::{SubmitOptions, Ticket};

fn preempting() -> ExecutorConfig {
    ExecutorConfig {
        preempt_running: true,
        ..ExecutorConfig::default()
    }
}

/// Submits and lets the driver do what it does about it.
fn arrive(bench: &Bench, priority: i32) -> Ticket {
    let ticket = bench.submit(priority);
    bench.executor.drive();
    ticket
}

fn n_preemptions(bench: &Bench, id: RequestId) -> u32 {
    bench.info(id).state.stamps().n_preemptions
}

#[test]
fn a_higher_priority_takes_the_slot_and_gives_it_back() {
    let bench = Bench::stepped(1, preempting());
    let low = arrive(&bench, 0);
    bench.advance(10);
    bench.step(low.id());
    bench.advance(10);
    let high = arrive(&bench, 1);
    assert_eq!(bench.state(low.id()), "preempted");
    assert_eq!(bench.state(high.id()), "dispatched");
    assert_eq!(bench.counts(), (0, 1));
    assert_eq!(bench.executor.snapshot().n_preempted, 1);
    assert_eq!(bench.count("num_requests_waiting"), 1.0);
    assert_eq!(bench.runtime().parked(), [low.id()]);
    bench.advance(100);
    bench.finish(high.id());
    assert_eq!(bench.state(low.id()), "decoding");
    assert_eq!(bench.runtime().running(), [low.id()]);
    bench.advance(5);
    bench.finish(low.id());
    let result = low.wait().expect("it goes on where it was");
    assert_eq!(result.tokens, [7, 8]);
    let stamps = result.outcome.stamps;
    let ms = |ms| Some(Duration::from_millis(ms));
    assert_eq!(stamps.queue_wait(), ms(0), "until the first dispatch");
    assert_eq!(stamps.time_to_first_token(), ms(10));
    assert_eq!(stamps.service_time(), ms(25), "without the break");
    assert_eq!(stamps.total(), ms(125));
    assert_eq!(
        (stamps.n_preemptions, stamps.parked),
        (1, Duration::from_millis(100))
    );
    assert_eq!(bench.count("preemptions_total"), 1.0);
    assert_eq!(
        bench.count("queue_wait_seconds_count"),
        2.0,
        "one wait each"
    );
    // 0.2 of the way from 100 ms to 25 ms.
    assert_eq!(bench.executor.snapshot().ema_dispatch_ms, Some(85.0));
}

#[test]
fn nobody_is_preempted_unless_asked_nor_by_an_equal_nor_where_it_cannot_be_done() {
    let off = Bench::stepped(1, ExecutorConfig::default());
    let mut no_park = fake::capability(1);
    no_park.can_park = false;
    let mut no_cancel = fake::capability(1);
    no_cancel.can_cancel = false; // a parked job that is cancelled would have to run to its end
    let scripted = |capability| {
        let runtime = FakeRuntime::new(capability, Pace::Stepped, None, Box::new(fake::echo));
        Bench::with(vec![runtime], preempting())
    };
    let never = ExecutorConfig {
        max_preemptions: 0,
        ..preempting()
    };
    for (bench, priority) in [
        (off, 100),
        (scripted(no_park), 100),
        (scripted(no_cancel), 100),
        (Bench::stepped(1, never), 100),
        (Bench::stepped(1, preempting()), 0),
        (Bench::stepped(1, preempting()), -1),
    ] {
        let first = arrive(&bench, 0);
        let second = arrive(&bench, priority);
        assert_eq!(bench.state(first.id()), "dispatched");
        assert_eq!(bench.state(second.id()), "queued");
    }
}

#[test]
fn who_has_aged_past_the_newcomer_keeps_its_slot() {
    let bench = Bench::stepped(1, preempting()); // interval 5 s
    let old = arrive(&bench, 0);
    bench.advance(5_000);
    let level = arrive(&bench, 1);
    assert_eq!(
        bench.state(old.id()),
        "dispatched",
        "as far as the newcomer"
    );
    let above = arrive(&bench, 2);
    assert_eq!(bench.state(above.id()), "dispatched");
    assert_eq!(bench.state(old.id()), "preempted");
    assert_eq!(bench.state(level.id()), "queued");
}

#[test]
fn case_09_the_youngest_of_the_lowest_goes_and_keeps_its_place_in_line() {
    let bench = Bench::stepped(3, preempting());
    let lows = [arrive(&bench, 0), arrive(&bench, 0)];
    let middle = arrive(&bench, 1);
    let high = arrive(&bench, 2);
    assert_eq!(bench.state(lows[1].id()), "preempted");
    assert_eq!(bench.state(high.id()), "dispatched");
    let later = arrive(&bench, 0); // the same priority, but it came later
    bench.finish(middle.id());
    assert_eq!(
        bench.state(lows[1].id()),
        "dispatched",
        "it comes before {later:?}"
    );
    assert_eq!(bench.state(later.id()), "queued");
}

#[test]
fn the_cap_on_preemptions_holds_and_everybody_gets_done() {
    let config = ExecutorConfig {
        max_preemptions: 2,
        ..preempting()
    };
    let bench = Bench::stepped(1, config);
    let low = arrive(&bench, 0);
    for round in 1..=2 {
        let high = arrive(&bench, 1);
        assert_eq!(bench.state(low.id()), "preempted");
        assert_eq!(n_preemptions(&bench, low.id()), round);
        bench.finish(high.id());
        assert_eq!(bench.state(low.id()), "dispatched");
    }
    let patient = arrive(&bench, 1);
    assert_eq!(bench.state(low.id()), "dispatched", "often enough");
    assert_eq!(bench.state(patient.id()), "queued");
    bench.finish(low.id());
    bench.finish(patient.id());
    assert!(low.wait().is_ok() && patient.wait().is_ok());
    assert_eq!(bench.count("preemptions_total"), 2.0);
}

#[test]
fn case_08_preempted_requests_count_in_no_limit_of_the_queue() {
    let config = ExecutorConfig {
        max_queue_depth: 1,
        max_queued_prompt_tokens: Some(3),
        ..preempting()
    };
    let bench = Bench::stepped(2, config);
    let _lows = [arrive(&bench, 0), arrive(&bench, 0)];
    let _highs = [arrive(&bench, 1), arrive(&bench, 1)];
    assert_eq!(bench.counts(), (0, 2));
    assert_eq!(bench.executor.snapshot().n_preempted, 2);
    let _waiting = arrive(&bench, 0);
    let full = bench.try_submit(SubmitOptions::default());
    assert_eq!(full.expect_err("one may wait").reason(), "queue_full");
}

#[test]
fn a_preempted_request_goes_on_where_it_was() {
    let replicas = vec![FakeRuntime::stepped(1), FakeRuntime::stepped(1)];
    let bench = Bench::with(replicas, preempting());
    let first = arrive(&bench, 0);
    let second = arrive(&bench, 0);
    let high = arrive(&bench, 1);
    assert_eq!(bench.state(second.id()), "preempted");
    let home = bench.runtimes.iter().position(|r| !r.parked().is_empty());
    let home = home.expect("one replica has it");
    let waiting = arrive(&bench, 0);
    // The other replica comes free: its slot is no use to who was preempted.
    assert!(bench.runtimes[1 - home].step(first.id()));
    bench.runtimes[1 - home].finish(first.id());
    bench.executor.drive();
    assert_eq!(bench.state(second.id()), "preempted");
    assert_eq!(bench.state(waiting.id()), "dispatched");
    bench.runtimes[home].finish(high.id());
    bench.executor.drive();
    assert_eq!(bench.runtimes[home].running(), [second.id()]);
}

#[test]
fn cancelling_a_preempted_request_takes_it_from_its_runtime() {
    let bench = Bench::stepped(1, preempting());
    let low = arrive(&bench, 0);
    let high = arrive(&bench, 1);
    let id = low.id();
    low.cancel();
    bench.executor.drive();
    assert_eq!(low.wait(), Err(RequestError::Cancelled));
    assert_eq!(bench.state(id), "gone");
    assert!(bench.runtime().parked().is_empty());
    assert_eq!(bench.counts(), (0, 1), "the slot of the other is untouched");
    bench.finish(high.id());
    assert_eq!(bench.counts(), (0, 0));
    let running = "tinyloop_cancelled_total{model=\"m\",phase=\"running\"}";
    assert_eq!(bench.metric(running), 1.0);
}

#[test]
fn a_replica_that_dies_takes_its_preempted_requests_along() {
    let replicas = vec![FakeRuntime::stepped(1), FakeRuntime::stepped(1)];
    let bench = Bench::with(replicas, preempting());
    let lows = [arrive(&bench, 0), arrive(&bench, 0)];
    let highs = [arrive(&bench, 1), arrive(&bench, 1)];
    bench.runtimes[0].die();
    bench.executor.drive();
    let snapshot = bench.executor.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.n_preempted), (1, 1));
    assert_eq!(snapshot.queue_depth, 2, "none had given a token");
    while let Some(left) = bench.runtimes[1].running().first().copied() {
        bench.runtimes[1].finish(left);
        bench.executor.drive();
    }
    assert_eq!(bench.counts(), (0, 0));
    let mut ends = lows.into_iter().chain(highs).map(Ticket::wait);
    assert!(ends.all(|end| end.is_ok()));
}

#[test]
fn the_wait_counts_preempted_requests_that_are_ahead() {
    let config = ExecutorConfig {
        aging_interval_ms: 0,
        ..preempting()
    };
    let bench = Bench::stepped(1, config);
    bench.serve_one(10, 100);
    let _low = arrive(&bench, 0);
    let _high = arrive(&bench, 1);
    let slo = |priority, slo_ms| {
        bench.try_submit(SubmitOptions {
            priority,
            slo_ms: Some(slo_ms),
            ..SubmitOptions::default()
        })
    };
    assert!(slo(0, 199).is_err(), "the preempted one goes first");
    assert!(slo(0, 200).is_ok());
    assert!(slo(1, 100).is_ok(), "nobody of this priority is in line");
}

#[test]
fn without_a_queue_only_those_come_in_who_get_a_slot() {
    let config = ExecutorConfig {
        max_queue_depth: 0,
        ..preempting()
    };
    let bench = Bench::stepped(1, config);
    let low = arrive(&bench, 0);
    let options = |priority| SubmitOptions {
        priority,
        ..SubmitOptions::default()
    };
    let refused = bench.try_submit(options(0)).expect_err("an equal");
    assert_eq!(refused.reason(), "queue_full");
    let high = bench.try_submit(options(1)).expect("it takes the slot");
    bench.executor.drive();
    assert_eq!(bench.state(low.id()), "preempted");
    assert_eq!(bench.state(high.id()), "dispatched");
}
