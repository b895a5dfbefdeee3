//! Refusals through the executor: reasons, numbers, what is measured, and that it heals.

use crate::support::{Bench, request};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::GenerationRequest;
use tinyloop::runtime::LoopCost;
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::scheduler::{Executor, Loops, Objective, SubmitError, SubmitOptions};

#[test]
fn refusals_carry_reasons_and_hold_nothing() {
    let config = ExecutorConfig {
        max_queue_depth: 2,
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(1, config);
    let _running = bench.submit(0);
    bench.executor.drive();
    let _waiting = [bench.submit(0), bench.submit(0)];
    let full = bench.try_submit(SubmitOptions::default());
    let full = full.expect_err("the queue is full");
    assert!(
        matches!(
            full,
            SubmitError::QueueFull {
                queue_depth: 2,
                max_queue_depth: 2,
                ..
            }
        ),
        "{full:?}"
    );
    let submit = |request| bench.executor.submit(request, SubmitOptions::default());
    let empty = submit(GenerationRequest::new([], 1)).expect_err("nothing to start from");
    assert_eq!(empty, SubmitError::EmptyPrompt);
    let too_long = submit(request(4094)).expect_err("3 + 4094 > 4096");
    assert_eq!(
        too_long,
        SubmitError::TooLong {
            prompt_tokens: 3,
            max_tokens: 4094,
            context_length: 4096
        }
    );
    let no_room = submit(GenerationRequest::new(vec![1; 4096], 1)).expect_err("no room");
    assert_eq!(
        no_room,
        SubmitError::PromptTooLong {
            prompt_tokens: 4096,
            context_length: 4096
        }
    );
    assert_eq!(bench.counts(), (2, 1));
    let rejected = |reason| {
        bench.metric(&format!(
            "tinyloop_admission_rejected_total{{model=\"m\",reason=\"{reason}\"}}"
        ))
    };
    assert_eq!(rejected("queue_full"), 1.0);
    assert_eq!(rejected("context_length_exceeded"), 2.0);
}

#[test]
fn submit_needs_start_and_start_is_idempotent() {
    let executor = Executor::new(
        vec![Arc::new(FakeRuntime::echo(1, None))],
        ExecutorConfig::default(),
    );
    let refused = executor.submit(request(1), SubmitOptions::default());
    assert_eq!(refused.expect_err("not started"), SubmitError::NotStarted);
    executor.start().expect("a thread");
    executor.start().expect("nothing to do");
    let ticket = executor
        .submit(request(1), SubmitOptions::default())
        .expect("started");
    assert_eq!(ticket.wait().expect("echo").tokens, [7]);
    executor.shutdown(Duration::ZERO);
    executor.shutdown(Duration::ZERO);
    executor.start().expect("a closed executor stays closed");
    let refused = executor.submit(request(1), SubmitOptions::default());
    assert_eq!(refused.expect_err("closed").reason(), "shutting_down");
}

#[test]
fn an_slo_refuses_only_with_a_mean_and_recovers() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let slo = |slo_ms| SubmitOptions {
        slo_ms: Some(slo_ms),
        ..SubmitOptions::default()
    };
    let first = bench.try_submit(slo(1)).expect("no mean yet");
    bench.executor.drive();
    bench.advance(60_000); // one slow request poisons the mean
    bench.finish(first.id());
    let running = bench
        .try_submit(slo(100))
        .expect("idle: nothing to wait for");
    bench.executor.drive();
    let refused = bench.try_submit(slo(100)).expect_err("the mean says 60 s");
    let SubmitError::AdmissionRejected {
        predicted_wait_ms,
        slo_ms,
        ..
    } = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!((predicted_wait_ms, slo_ms), (60_000, 100));
    assert!(
        bench.try_submit(SubmitOptions::default()).is_ok(),
        "no objective, no refusal"
    );
    bench.finish(running.id());
    let mut n_dispatches = 0;
    while bench.executor.snapshot().ema_dispatch_ms.expect("a mean") > 100.0 {
        let ticket = bench.try_submit(slo(100)).expect("idle");
        bench.executor.drive();
        bench.advance(10);
        bench.finish(ticket.id());
        n_dispatches += 1;
    }
    assert!(n_dispatches <= 30, "{n_dispatches}");
}

fn slo(slo_ms: u64) -> SubmitOptions {
    SubmitOptions {
        slo_ms: Some(slo_ms),
        ..SubmitOptions::default()
    }
}

fn slo_ttft(slo_ttft_ms: u64) -> SubmitOptions {
    SubmitOptions {
        slo_ttft_ms: Some(slo_ttft_ms),
        ..SubmitOptions::default()
    }
}

#[test]
fn prompt_tokens_fill_the_queue_as_well() {
    let config = ExecutorConfig {
        max_queued_prompt_tokens: Some(6),
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(1, config);
    let _running = bench.submit(0); // a free slot: it does not count
    bench.executor.drive();
    let waiting = [bench.submit(0), bench.submit(0)];
    let full = bench.try_submit(SubmitOptions::default());
    let expected = SubmitError::QueueFull {
        queue_depth: 2,
        max_queue_depth: 128,
        queued_prompt_tokens: 6,
        max_queued_prompt_tokens: Some(6),
        retry_after_s: 1,
    };
    assert_eq!(full.expect_err("6 + 3 > 6"), expected);
    drop(waiting);
    bench.submit(0).cancel(); // the tokens of those who left are free again
}

#[test]
fn a_group_is_taken_whole_or_not_at_all() {
    let config = ExecutorConfig {
        max_queue_depth: 3,
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(1, config);
    let _running = bench.submit(0);
    bench.executor.drive();
    let many = |n| {
        let requests: Vec<_> = (0..n).map(|_| request(2)).collect();
        let ids: Vec<_> = requests.iter().map(|request| request.id).collect();
        let submitted = bench
            .executor
            .submit_many(requests, SubmitOptions::default());
        (ids, submitted)
    };
    let (_, refused) = many(4);
    let refused = refused.expect_err("three may wait");
    assert!(
        matches!(refused, SubmitError::QueueFull { queue_depth: 0, .. }),
        "{refused:?}"
    );
    assert_eq!(bench.counts(), (0, 1), "nothing is left of it");
    assert_eq!(many(0).1.expect("nothing to refuse").len(), 0);
    let (ids, taken) = many(3);
    let taken = taken.expect("room for three");
    assert!(
        taken
            .iter()
            .map(|stream| stream.id())
            .eq(ids.iter().copied())
    );
    assert_eq!(bench.counts(), (3, 1));
    while let Some(id) = bench.runtime().running().first().copied() {
        bench.finish(id);
    }
    assert_eq!(bench.runtime().submitted()[1..], ids, "in their order");
    for stream in taken {
        stream.finish().expect("each ends well");
    }
    let rejected = "tinyloop_admission_rejected_total{model=\"m\",reason=\"queue_full\"}";
    assert_eq!(bench.metric(rejected), 4.0);
}

#[test]
fn the_largest_group_is_what_an_idle_executor_takes() {
    for (slots, max_queue_depth, max_queued_prompt_tokens, expected) in [
        (1, 4, None, 4),
        (1, 0, None, 1),
        (3, 0, None, 3),
        (1, 4, Some(8), 2), // three tokens each
        (3, 4, Some(8), 3), // a slot each
        (1, 4, Some(0), 1),
        (1, 4, Some(u64::MAX), 4),
    ] {
        let config = ExecutorConfig {
            max_queue_depth,
            max_queued_prompt_tokens,
            ..ExecutorConfig::default()
        };
        let bench = Bench::stepped(slots, config);
        let most = bench.executor.burst_max(3);
        assert_eq!(most, expected);
        let many = |n| {
            let requests = (0..n).map(|_| request(2)).collect();
            bench
                .executor
                .submit_many(requests, SubmitOptions::default())
        };
        assert!(many(most + 1).is_err(), "{slots} {max_queue_depth}");
        assert!(many(most).is_ok(), "{slots} {max_queue_depth}");
    }
}

#[test]
fn a_group_counts_its_own_members_as_waiting() {
    let bench = Bench::stepped(2, ExecutorConfig::default());
    bench.serve_one(10, 100);
    let many = |n, slo_ms| {
        let requests = (0..n).map(|_| request(2)).collect();
        bench.executor.submit_many(requests, slo(slo_ms))
    };
    assert!(many(2, 1).is_ok(), "a slot each: nobody waits");
    // The third waits for (2 + 1) * 100 / 2 = 150 ms.
    let refused = many(3, 149).expect_err("the third comes too late");
    assert!(
        matches!(
            refused,
            SubmitError::AdmissionRejected {
                predicted_wait_ms: 150,
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(many(3, 150).is_ok());
}

#[test]
fn an_objective_below_an_idle_server_is_refused_for_good_until_the_evidence_is_old() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    for _ in 0..8 {
        bench.serve_one(30, 100);
    }
    let wait = bench.try_submit(slo(99)).expect_err("never under 100 ms");
    let expected = |objective, slo_ms, idle_ms| SubmitError::SloBelowIdle {
        objective,
        slo_ms,
        idle_ms,
    };
    assert_eq!(wait, expected(Objective::Wait, 99, 100));
    assert_eq!(
        (wait.reason(), wait.should_retry()),
        ("slo_below_idle", false)
    );
    let first_token = bench.try_submit(slo_ttft(29)).expect_err("never under 30");
    assert_eq!(first_token, expected(Objective::FirstToken, 29, 30));
    assert!(bench.try_submit(slo(100)).is_ok() && bench.try_submit(slo_ttft(30)).is_ok());
    bench.executor.drive();
    bench.advance(60_000); // nobody came: the evidence is old
    assert!(bench.try_submit(slo(1)).is_ok());
}

#[test]
fn the_time_to_the_first_token_is_predicted_from_wait_and_mean() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    bench.serve_one(30, 100);
    let _running = bench.submit(0);
    bench.executor.drive();
    let refused = bench.try_submit(slo_ttft(129)).expect_err("100 + 30 > 129");
    let SubmitError::AdmissionRejected {
        objective,
        predicted_wait_ms,
        predicted_ttft_ms,
        slo_ms,
        ..
    } = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!(objective, Objective::FirstToken);
    assert_eq!(
        (predicted_wait_ms, predicted_ttft_ms, slo_ms),
        (100, Some(130), 129)
    );
    assert!(bench.try_submit(slo_ttft(130)).is_ok());
}

#[test]
fn a_stop_string_is_a_sample_like_any_other_end() {
    let script = |_: &GenerationRequest| {
        ["a", "STOP", "b"]
            .map(|text| tinyloop::request::GenerationEvent::Text {
                text: text.to_owned(),
                logprobs: Vec::new(),
            })
            .into()
    };
    let runtime = FakeRuntime::new(fake::capability(1), Pace::Stepped, None, Box::new(script));
    let bench = Bench::with(vec![runtime], ExecutorConfig::default());
    let mut asked = request(9);
    asked.stop.strings = vec!["STOP".to_owned()];
    let ticket = bench.executor.submit(asked, SubmitOptions::default());
    let ticket = ticket.expect("room");
    bench.executor.drive();
    bench.advance(50);
    bench.step(ticket.id());
    bench.step(ticket.id());
    ticket.wait().expect("the stop string completes it");
    bench.executor.drive();
    assert_eq!(bench.executor.snapshot().ema_dispatch_ms, Some(50.0));
}

/// A looped model whose requests take a quarter of their time outside the loop, at 4 loops.
fn looped() -> Bench {
    let cost = LoopCost {
        fixed_ms: 1.0,
        per_loop_ms: 0.75,
        default_loops: 4,
    };
    let runtime = FakeRuntime::stepped(1).with_loop_cost(cost);
    Bench::with(vec![runtime], ExecutorConfig::default())
}

#[test]
fn fewer_loops_are_granted_instead_of_a_refusal() {
    let bench = looped();
    bench.serve_one(30, 100);
    let _running = bench.submit(0);
    bench.executor.drive();
    let submit = |loops, min_loops, slo_ms| {
        let asked = GenerationRequest {
            loops,
            min_loops,
            ..request(2)
        };
        bench.executor.submit(asked, slo(slo_ms))
    };
    let refused = submit(None, None, 70).expect_err("it insists on its loops");
    assert_eq!(refused.reason(), "slo_unattainable");
    assert_eq!(bench.count("loops_downgraded_total"), 0.0);
    let ticket = submit(None, Some(1), 70).expect("43.75 ms with one loop");
    let loops = bench.info(ticket.id()).loops;
    let expected = Loops {
        asked: 4,
        granted: 1,
    };
    assert_eq!(loops, Some(expected));
    assert_eq!(bench.count("loops_downgraded_total"), 1.0);
    while let Some(id) = bench.runtime().running().first().copied() {
        bench.finish(id);
    }
    let result = ticket.wait().expect("done");
    assert_eq!(result.outcome.usage.loops, 1, "the runtime was told");
    let as_asked = submit(Some(3), Some(1), 70).expect("idle");
    let loops = bench.info(as_asked.id()).loops.expect("a looped model");
    assert_eq!((loops.asked, loops.granted), (3, 3));
}

#[test]
fn objectives_are_counted_as_met_or_missed_once_a_request() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let counts = || {
        (
            bench.count("slo_met_total"),
            bench.count("slo_missed_total"),
        )
    };
    let both = SubmitOptions {
        slo_ttft_ms: Some(50),
        ..slo(20)
    };
    // (wait, first token after it, expected); ended well each time.
    for (wait_ms, first_ms, expected) in [
        (20, 30, (1.0, 0.0)),
        (21, 1, (1.0, 1.0)),
        (20, 31, (1.0, 2.0)),
    ] {
        let ticket = bench.try_submit(both.clone()).expect("idle");
        bench.advance(wait_ms);
        bench.executor.drive();
        bench.advance(first_ms);
        bench.finish(ticket.id());
        assert_eq!(counts(), expected, "{wait_ms} {first_ms}");
    }
    bench.serve_one(1, 2); // no objective
    let cancelled = bench.try_submit(both.clone()).expect("idle");
    cancelled.cancel();
    assert_eq!(counts(), (1.0, 2.0), "neither");
    let _running = bench.submit(0);
    bench.executor.drive();
    let late = SubmitOptions {
        queue_timeout: Some(Duration::from_millis(5)),
        ..slo(1000)
    };
    let _late = bench.try_submit(late).expect("room");
    bench.advance(5);
    bench.executor.drive();
    assert_eq!(counts(), (1.0, 3.0));
}
