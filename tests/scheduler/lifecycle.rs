//! The way of a request from submit to its end, and what is seen of it meanwhile.

use crate::support::{Bench, request};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{FinishReason, RequestError};
use tinyloop::runtime::fake::OnSubmit;
use tinyloop::scheduler::SubmitOptions;

#[test]
fn a_request_lives_from_queue_to_result() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let ticket = bench.submit(0);
    let id = ticket.id();
    assert_eq!((bench.state(id), bench.counts()), ("queued", (1, 0)));
    bench.advance(5);
    bench.executor.drive();
    assert_eq!((bench.state(id), bench.counts()), ("dispatched", (0, 1)));
    bench.advance(10);
    bench.step(id);
    assert_eq!(bench.state(id), "decoding");
    bench.advance(20);
    bench.finish(id);
    assert_eq!((bench.state(id), bench.counts()), ("gone", (0, 0)));
    let result = ticket.wait().expect("it finished");
    assert_eq!((result.id, result.tokens), (id, vec![7, 8]));
    assert_eq!(result.outcome.finish_reason, FinishReason::Length);
    assert_eq!(result.outcome.usage.completion_tokens, 2);
    let stamps = result.outcome.stamps;
    let ms = |ms| Some(Duration::from_millis(ms));
    assert_eq!(stamps.queue_wait(), ms(5));
    assert_eq!(stamps.time_to_first_token(), ms(15));
    assert_eq!(stamps.total(), ms(35));
    assert_eq!(bench.executor.snapshot().ema_dispatch_ms, Some(30.0));
}

#[test]
fn faults_reach_the_waiter_and_free_the_slot() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    for fault in ["fail", "lose", "panic", "refuse"] {
        let on_submit = match fault {
            "panic" => OnSubmit::Panic,
            "refuse" => OnSubmit::Refuse,
            _ => OnSubmit::Accept,
        };
        bench.runtime().on_submit(on_submit);
        let ticket = bench.submit(0);
        bench.executor.drive();
        match fault {
            "fail" => bench.runtime().fail(ticket.id(), "boom"),
            "lose" => bench.runtime().lose(ticket.id()),
            _ => {}
        }
        bench.executor.drive();
        let error = ticket.wait().expect_err(fault);
        let is_right = match fault {
            "panic" => matches!(error, RequestError::ReplicaLost(_)),
            _ => matches!(error, RequestError::Fault(_)),
        };
        assert!(is_right, "{fault}: {error:?}");
        assert_eq!(bench.counts(), (0, 0), "{fault}");
    }
    assert_eq!(
        bench.metric("tinyloop_requests_total{model=\"m\",outcome=\"error\"}"),
        4.0
    );
}

#[test]
fn a_live_request_shows_who_asked_and_how_but_no_prompt() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let options = SubmitOptions {
        priority: 999,
        client: Some(Arc::from("key-1")),
        ..SubmitOptions::default()
    };
    let stream = bench.executor.submit_stream(request(2), options);
    let stream = stream.expect("room");
    bench.advance(40);
    let queued = bench.info(stream.id());
    assert_eq!((queued.priority, queued.streaming), (100, true), "clamped");
    assert_eq!(queued.client.as_deref(), Some("key-1"));
    assert_eq!(queued.age, Duration::from_millis(40));
    assert_eq!((queued.prompt_tokens, queued.completion_tokens), (3, 0));
    bench.executor.drive();
    bench.step(stream.id());
    let (snapshot, requests) = bench.executor.inspect();
    assert_eq!((snapshot.queue_depth, snapshot.in_flight), (0, 1));
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].completion_tokens, 1);
    let stamps = requests[0].state.stamps();
    assert!(stamps.dispatched.is_some() && stamps.first_token.is_some());
}
