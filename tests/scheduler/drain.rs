//! Shutdown and unload.

use crate::support::{Bench, request};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{Job, RequestError, RequestId};
use tinyloop::runtime::fake::FakeRuntime;
use tinyloop::runtime::{Capability, Runtime, RuntimeStatus};
use tinyloop::scheduler::{Executor, StreamEvent, SubmitError, SubmitOptions};
use tinyloop::tokenizer::Tokenizer;

#[test]
fn shutdown_cancels_the_queue_and_lets_running_work_finish() {
    let runtime = Arc::new(FakeRuntime::stepped(1));
    let executor = Executor::new(vec![Arc::clone(&runtime) as _], ExecutorConfig::default());
    executor.start().expect("a thread");
    let mut running = executor
        .submit_stream(request(2), SubmitOptions::default())
        .expect("room");
    let id = running.id();
    while !runtime.step(id) {
        std::thread::yield_now(); // until the driver has dispatched it
    }
    assert!(matches!(running.recv(), StreamEvent::Chunk(_)));
    let waiting = executor
        .submit(request(2), SubmitOptions::default())
        .expect("room");
    std::thread::scope(|scope| {
        scope.spawn(|| executor.shutdown(Duration::from_secs(60)));
        // The queued one ends first; that tells us that the drain has begun.
        assert_eq!(waiting.wait(), Err(RequestError::ShuttingDown));
        let refused = executor.submit(request(2), SubmitOptions::default());
        let expected = SubmitError::Shutdown {
            in_flight: 1,
            retry_after_s: 5,
        };
        assert_eq!(refused.expect_err("draining"), expected);
        runtime.finish(id);
        assert!(running.finish().is_ok());
    });
    assert_eq!(executor.snapshot().in_flight, 0);
}

#[test]
fn shutdown_ends_what_does_not_finish_in_time() {
    let runtime = Arc::new(FakeRuntime::stepped(1));
    let executor = Executor::new(vec![Arc::clone(&runtime) as _], ExecutorConfig::default());
    executor.start().expect("a thread");
    let running = executor
        .submit(request(2), SubmitOptions::default())
        .expect("room");
    let waiting = executor
        .submit(request(2), SubmitOptions::default())
        .expect("room");
    executor.unload(Duration::ZERO);
    assert_eq!(running.wait(), Err(RequestError::ModelUnloading));
    assert_eq!(waiting.wait(), Err(RequestError::ModelUnloading));
    let refused = executor.submit(request(2), SubmitOptions::default());
    let reason = refused.expect_err("unloaded").reason();
    assert_eq!(reason, "model_unloading");
}

/// A runtime whose state cannot be asked for: nothing catches that inside the driver's turn.
struct Broken(FakeRuntime, AtomicBool);

impl Runtime for Broken {
    fn capability(&self) -> Capability {
        self.0.capability()
    }
    fn submit(&self, job: Job) {
        self.0.submit(job);
    }
    fn cancel(&self, id: RequestId) {
        self.0.cancel(id);
    }
    fn park(&self, id: RequestId) {
        self.0.park(id);
    }
    fn resume(&self, id: RequestId) {
        self.0.resume(id);
    }
    fn status(&self) -> RuntimeStatus {
        assert!(!self.1.load(Ordering::Relaxed), "planned");
        self.0.status()
    }
    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        None
    }
    fn shutdown(&self) {
        self.0.shutdown();
    }
}

#[test]
fn a_fault_of_the_scheduler_itself_ends_all_waits_and_shows() {
    let breaks = Arc::new(Broken(FakeRuntime::stepped(1), AtomicBool::new(false)));
    let runtimes = vec![
        Arc::clone(&breaks) as Arc<dyn Runtime>,
        Arc::new(FakeRuntime::stepped(1)),
    ];
    let executor = Executor::new(runtimes, ExecutorConfig::default());
    executor.start_without_thread();
    let options = SubmitOptions::default;
    let running = executor.submit(request(2), options()).expect("room");
    executor.drive();
    let waiting = executor.submit(request(2), options()).expect("room");
    breaks.1.store(true, Ordering::Relaxed);
    let driven = catch_unwind(AssertUnwindSafe(|| executor.drive()));
    assert!(driven.is_err(), "the driver panicked");
    breaks.1.store(false, Ordering::Relaxed);
    for ticket in [running, waiting] {
        let error = ticket.wait().expect_err("the scheduler is gone");
        assert!(matches!(error, RequestError::Fault(_)), "{error:?}");
    }
    let snapshot = executor.snapshot();
    assert!(snapshot.has_failed && !snapshot.accepting);
    let refused = executor.submit(request(2), options());
    assert_eq!(refused.expect_err("it is gone"), SubmitError::Failed);
}

#[test]
fn preempted_requests_are_running_work_that_a_drain_waits_for() {
    let runtime = Arc::new(FakeRuntime::stepped(1));
    let config = ExecutorConfig {
        preempt_running: true,
        ..ExecutorConfig::default()
    };
    let executor = Executor::new(vec![Arc::clone(&runtime) as _], config);
    executor.start().expect("a thread");
    let submit = |priority| {
        let options = SubmitOptions {
            priority,
            ..SubmitOptions::default()
        };
        executor.submit(request(2), options).expect("room")
    };
    let until_running = |id| {
        while runtime.running() != [id] {
            std::thread::yield_now();
        }
    };
    let low = submit(0);
    until_running(low.id());
    let high = submit(1);
    until_running(high.id());
    let waiting = submit(-1);
    std::thread::scope(|scope| {
        scope.spawn(|| executor.shutdown(Duration::from_secs(60)));
        assert_eq!(waiting.wait(), Err(RequestError::ShuttingDown));
        runtime.finish(high.id());
        until_running(low.id());
        runtime.finish(low.id());
        assert!(high.wait().is_ok() && low.wait().is_ok());
    });
}

#[test]
fn an_unload_ends_preempted_requests_too() {
    let config = ExecutorConfig {
        preempt_running: true,
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(1, config);
    let low = bench.submit(0);
    bench.executor.drive();
    let high = bench.submit(1);
    bench.executor.drive();
    assert_eq!(bench.state(low.id()), "preempted");
    bench.executor.unload(Duration::ZERO);
    for ticket in [low, high] {
        assert_eq!(ticket.wait(), Err(RequestError::ShuttingDown)); // what the fake says
    }
    assert_eq!(bench.counts(), (0, 0));
}
