//! Cancels, deadlines in the queue, and consumers that go away.

use crate::support::Bench;
use crate::support::request;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{RequestError, RequestId};
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::scheduler::{StreamEvent, SubmitOptions};

#[test]
fn a_deadline_in_the_queue_ends_the_wait() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let running = bench.submit(0);
    bench.executor.drive();
    let hurried = bench
        .try_submit(SubmitOptions {
            queue_timeout: Some(Duration::from_millis(50)),
            ..SubmitOptions::default()
        })
        .expect("room");
    let patient = bench.submit(0);
    bench.advance(49);
    bench.executor.drive();
    assert_eq!(bench.state(hurried.id()), "queued");
    bench.advance(1);
    bench.executor.drive();
    assert_eq!(bench.state(hurried.id()), "gone");
    let hurried_id = hurried.id();
    let timeout = RequestError::QueueTimeout {
        waited_ms: 50,
        queue_timeout_ms: 50,
    };
    assert_eq!(hurried.wait(), Err(timeout));
    bench.finish(running.id());
    assert_eq!(bench.state(patient.id()), "dispatched");
    assert!(!bench.runtime().submitted().contains(&hurried_id));
}

#[test]
fn cancelling_a_waiting_request_takes_it_out_at_once() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let _running = bench.submit(0);
    bench.executor.drive();
    let by_ticket = bench.submit(0);
    let by_handle = bench.submit(0);
    let by_id = bench.submit(0);
    let by_drop = bench.submit(0);
    by_ticket.cancel();
    by_handle.cancel_handle().cancel();
    assert!(bench.executor.cancel(by_id.id()));
    assert!(!bench.executor.cancel(RequestId::generate()));
    drop(by_drop);
    assert_eq!(bench.counts(), (0, 1)); // no drive: it did not need the driver
    for ticket in [by_ticket, by_handle, by_id] {
        assert_eq!(ticket.wait(), Err(RequestError::Cancelled));
    }
    let queued = "tinyloop_cancelled_total{model=\"m\",phase=\"queued\"}";
    assert_eq!(bench.metric(queued), 4.0);
    assert_eq!(bench.runtime().submitted().len(), 1);
}

#[test]
fn cancelling_a_running_request_frees_its_slot_for_the_next() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let running = bench.submit(0);
    let next = bench.submit(0);
    bench.executor.drive();
    bench.step(running.id());
    running.cancel();
    running.cancel();
    bench.executor.drive();
    assert_eq!(bench.state(next.id()), "dispatched");
    assert_eq!(running.wait(), Err(RequestError::Cancelled));
    assert_eq!(
        bench.metric("tinyloop_cancelled_total{model=\"m\",phase=\"running\"}"),
        1.0
    );
}

#[test]
fn a_runtime_that_cannot_cancel_keeps_its_slot_but_not_its_waiter() {
    let mut capability = fake::capability(1);
    capability.can_cancel = false;
    let runtime = FakeRuntime::new(capability, Pace::Stepped, None, Box::new(fake::echo));
    let bench = Bench::with(vec![runtime], ExecutorConfig::default());
    let stubborn = bench.submit(0);
    let next = bench.submit(0);
    bench.executor.drive();
    let id = stubborn.id();
    stubborn.cancel();
    bench.executor.drive();
    assert_eq!(stubborn.wait(), Err(RequestError::Cancelled));
    assert_eq!(bench.counts(), (1, 1)); // honest: the runtime still works on it
    assert_eq!(bench.state(id), "cancelled");
    bench.runtime().finish(id); // its result is discarded
    bench.executor.drive();
    assert_eq!(
        (bench.state(id), bench.state(next.id())),
        ("gone", "dispatched")
    );
    assert_eq!(
        bench.metric("tinyloop_requests_total{model=\"m\",outcome=\"done\"}"),
        0.0
    );
}

#[test]
fn dropping_a_stream_cancels_its_job() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let stream = bench.stream(request(5));
    bench.executor.drive();
    bench.step(stream.id());
    drop(stream);
    bench.executor.drive();
    assert_eq!(bench.counts(), (0, 0));
    assert!(bench.runtime().running().is_empty());
}

#[test]
fn a_cancelled_stream_ends_without_an_error_and_says_so_when_asked() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let mut stream = bench.stream(request(5));
    bench.executor.drive();
    bench.step(stream.id());
    stream.cancel();
    bench.executor.drive();
    assert!(stream.next().expect("the chunk before").is_ok());
    assert_eq!(stream.next(), None);
    assert_eq!(stream.outcome(), Some(&Err(RequestError::Cancelled)));
    assert_eq!(stream.recv(), StreamEvent::Failed(RequestError::Cancelled));
}
