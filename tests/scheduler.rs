//! The executor against a scripted runtime: every line of the policy, without a sleep.
//!
//! Most tests step the driver on their own thread (`start_without_thread`, `drive`) under a manual
//! clock, so that each step is where the test says. The last one runs real threads.

use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tinyloop::clock::ManualClock;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{
    FinishReason, GenerationEvent, GenerationRequest, RequestError, RequestId, StopRules,
};
use tinyloop::runtime::Runtime;
use tinyloop::runtime::fake::{self, FakeRuntime, OnSubmit, Pace};
use tinyloop::scheduler::{
    Executor, ExecutorContext, Metrics, StreamEvent, SubmitError, SubmitOptions, Ticket,
    TokenStream,
};
use tinyloop::tokenizer::Tokenizer;

/// An executor that moves when the test says so.
struct Bench {
    executor: Executor,
    runtimes: Vec<Arc<FakeRuntime>>,
    clock: ManualClock,
    metrics: Arc<Metrics>,
}

impl Bench {
    fn with(runtimes: Vec<FakeRuntime>, config: ExecutorConfig) -> Self {
        let runtimes: Vec<_> = runtimes.into_iter().map(Arc::new).collect();
        let clock = ManualClock::new();
        let metrics = Arc::new(Metrics::new());
        let context = ExecutorContext {
            model: "m".to_owned(),
            clock: Arc::new(clock.clone()),
            metrics: Arc::clone(&metrics),
        };
        let dynamic = runtimes.iter().map(|r| Arc::clone(r) as Arc<dyn Runtime>);
        let executor = Executor::with_context(dynamic.collect(), config, context);
        executor.start_without_thread();
        Self {
            executor,
            runtimes,
            clock,
            metrics,
        }
    }

    /// One stepped replica with this many slots.
    fn stepped(slots: u32, config: ExecutorConfig) -> Self {
        Self::with(vec![FakeRuntime::stepped(slots)], config)
    }

    fn runtime(&self) -> &FakeRuntime {
        &self.runtimes[0]
    }

    fn submit(&self, priority: i32) -> Ticket {
        self.try_submit(SubmitOptions {
            priority,
            ..SubmitOptions::default()
        })
        .expect("there is room")
    }

    fn try_submit(&self, options: SubmitOptions) -> Result<Ticket, SubmitError> {
        self.executor.submit(request(2), options)
    }

    fn stream(&self, request: GenerationRequest) -> TokenStream {
        self.executor
            .submit_stream(request, SubmitOptions::default())
            .expect("there is room")
    }

    fn advance(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    fn step(&self, id: RequestId) {
        assert!(self.runtime().step(id), "the job runs");
        self.executor.drive();
    }

    fn finish(&self, id: RequestId) {
        self.runtime().finish(id);
        self.executor.drive();
    }

    /// (queue depth, in flight).
    fn counts(&self) -> (usize, u32) {
        let snapshot = self.executor.snapshot();
        (snapshot.queue_depth, snapshot.in_flight)
    }

    fn state(&self, id: RequestId) -> &'static str {
        let live = self.executor.list();
        let found = live.iter().find(|info| info.id == id);
        found.map_or("gone", |info| info.state.name())
    }

    /// Value of a metric line, by its text before the value.
    #[track_caller]
    fn metric(&self, series: &str) -> f64 {
        let text = self.executor.metrics_text("");
        let line = text.lines().find(|line| {
            line.strip_prefix(series)
                .is_some_and(|rest| rest.starts_with(' '))
        });
        let line = line.unwrap_or_else(|| panic!("no series {series} in\n{text}"));
        let value = line.rsplit(' ').next().expect("a line has a value");
        value.parse().expect("a value is a number")
    }
}

/// A request of three prompt tokens.
fn request(max_tokens: u32) -> GenerationRequest {
    GenerationRequest::new([7, 8, 9], max_tokens)
}

/// Jobs in the order in which a single slot runs them.
fn run_order(bench: &Bench) -> Vec<RequestId> {
    bench.executor.drive();
    while let Some(id) = bench.runtime().running().first().copied() {
        bench.finish(id);
    }
    bench.runtime().submitted()
}

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
            target_inflight: configured,
            ..ExecutorConfig::default()
        };
        let bench = Bench::stepped(3, config);
        let _tickets: Vec<_> = (0..5).map(|_| bench.submit(0)).collect();
        bench.executor.drive();
        assert_eq!(bench.counts(), (5 - expected as usize, expected));
        let snapshot = bench.executor.snapshot();
        assert_eq!(snapshot.configured_target_inflight, configured);
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
    // A dead replica gets nothing; its jobs end as faults; the others go on.
    bench.runtimes[1].die();
    bench.executor.drive();
    let last = bench.submit(0);
    bench.executor.drive();
    assert_eq!(bench.state(last.id()), "queued");
    let first = bench.runtimes[0].running()[0];
    bench.finish(first);
    assert!(bench.runtimes[0].running().contains(&last.id()));
}

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
    assert_eq!(refused.expect_err("closed"), SubmitError::Shutdown);
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
    assert_eq!(hurried.wait(), Err(RequestError::QueueTimeout));
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
        assert!(
            matches!(error, RequestError::Fault(_)),
            "{fault}: {error:?}"
        );
        assert_eq!(bench.counts(), (0, 0), "{fault}");
    }
    assert_eq!(
        bench.metric("tinyloop_requests_total{model=\"m\",outcome=\"error\"}"),
        4.0
    );
}

#[test]
fn a_stream_gives_chunks_then_its_end() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let mut stream = bench.stream(request(2));
    bench.executor.drive();
    assert_eq!(stream.recv_timeout(Duration::ZERO), StreamEvent::TimedOut);
    let id = stream.id();
    bench.step(id);
    let StreamEvent::Chunk(chunk) = stream.recv_timeout(Duration::ZERO) else {
        panic!("a token is there");
    };
    assert_eq!(chunk.token_id, Some(7));
    assert!(stream.outcome().is_none());
    bench.finish(id);
    let rest: Vec<_> = stream.by_ref().collect();
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0].as_ref().expect("a chunk").token_id, Some(8));
    let outcome = stream.outcome().cloned().expect("it ended").expect("well");
    assert_eq!(outcome.usage.completion_tokens, 2);
    assert_eq!(stream.recv(), StreamEvent::Finished(outcome)); // again and again
    assert!(stream.next().is_none());
}

#[test]
fn an_error_comes_after_the_last_chunk_and_once() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let mut stream = bench.stream(request(5));
    bench.executor.drive();
    bench.step(stream.id());
    bench.runtime().fail(stream.id(), "boom");
    bench.executor.drive();
    let fault = RequestError::Fault("boom".to_owned());
    assert!(stream.next().expect("the chunk").is_ok());
    assert_eq!(stream.next(), Some(Err(fault.clone())));
    assert_eq!(stream.next(), None);
    assert_eq!(stream.recv(), StreamEvent::Failed(fault));
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

/// A stepped runtime whose answers are these bytes, one token each.
fn speaking(text: &'static str) -> FakeRuntime {
    let tokenizer = Some(Arc::new(Tokenizer::bytes()));
    let script = move |request: &GenerationRequest| {
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        fake::answer(request, &tokens, FinishReason::Length)
    };
    FakeRuntime::new(
        fake::capability(1),
        Pace::Stepped,
        tokenizer,
        Box::new(script),
    )
}

#[test]
fn text_is_held_until_it_is_certain_and_logprobs_ride_with_it() {
    let bench = Bench::with(vec![speaking("aé")], ExecutorConfig::default());
    let mut asked = request(9);
    asked.logprobs = Some(1);
    asked.prompt_logprobs = Some(1);
    let mut stream = bench.stream(asked);
    bench.executor.drive();
    bench.finish(stream.id());
    let chunks: Vec<_> = stream
        .by_ref()
        .map(|chunk| chunk.expect("no error"))
        .collect();
    let seen: Vec<_> = chunks
        .iter()
        .map(|c| (c.text.as_str(), c.logprobs.len()))
        .collect();
    assert_eq!(seen, [("a", 1), ("", 0), ("é", 2)]);
    assert_eq!(stream.prompt_logprobs().map(<[_]>::len), Some(2));
}

#[test]
fn a_stop_string_ends_the_answer_as_done_and_takes_the_job_back() {
    for (include_stop_string, expected) in [(false, "so "), (true, "so END")] {
        let bench = Bench::with(vec![speaking("so END of it")], ExecutorConfig::default());
        let mut asked = request(99);
        asked.stop = StopRules {
            strings: vec!["END".to_owned()],
            include_stop_string,
            ..StopRules::default()
        };
        let ticket = bench
            .executor
            .submit(asked, SubmitOptions::default())
            .expect("room");
        bench.executor.drive();
        for _ in 0.."so END o".len() {
            bench.step(ticket.id()); // two tokens beyond the stop are on their way already
        }
        let result = ticket.wait().expect("done");
        assert_eq!(result.text, expected);
        assert_eq!(result.outcome.finish_reason, FinishReason::Stop);
        assert!(result.outcome.stopped_by_text);
        assert_eq!(result.outcome.usage.completion_tokens, 6);
        assert_eq!(bench.counts(), (0, 1)); // until the driver has taken it back
        bench.executor.drive();
        assert_eq!(bench.counts(), (0, 0));
        let outcome = |outcome| {
            bench.metric(&format!(
                "tinyloop_requests_total{{model=\"m\",outcome=\"{outcome}\"}}"
            ))
        };
        assert_eq!((outcome("done"), outcome("cancelled")), (1.0, 0.0));
    }
}

#[test]
fn text_without_tokens_streams_and_stops_too() {
    let script = |_: &GenerationRequest| {
        ["one ST", "OP two", "three"]
            .map(|text| GenerationEvent::Text(text.to_owned()))
            .into()
    };
    let runtime = FakeRuntime::new(fake::capability(1), Pace::Stepped, None, Box::new(script));
    let bench = Bench::with(vec![runtime], ExecutorConfig::default());
    let mut asked = request(9);
    asked.stop.strings = vec!["STOP".to_owned()];
    let mut stream = bench.stream(asked);
    bench.executor.drive();
    bench.finish(stream.id());
    let text: String = stream
        .by_ref()
        .map(|chunk| chunk.expect("no error").text)
        .collect();
    assert_eq!(text, "one ");
}

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
        assert_eq!(refused.expect_err("draining"), SubmitError::Shutdown);
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
    assert_eq!(refused.expect_err("unloaded"), SubmitError::ModelUnloading);
}

#[test]
fn metrics_are_exposition_text_with_the_extra_lines_first() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let ticket = bench.submit(0);
    bench.executor.drive();
    bench.finish(ticket.id());
    let text = bench
        .executor
        .metrics_text("# HELP own A line of the caller.");
    assert!(
        text.starts_with("# HELP own A line of the caller.\n# HELP "),
        "{text}"
    );
    for family in [
        "queue_wait_seconds",
        "dispatch_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_seconds",
        "prompt_tokens_total",
        "completion_tokens_total",
        "requests_total",
        "cancelled_total",
        "queue_depth",
        "in_flight",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "kv_pages",
        "preemptions_total",
        "prefix_queries_total",
        "prefix_hits_total",
        "configured_target_inflight",
        "effective_target_inflight",
        "ema_dispatch_seconds",
        "up",
        "build_info",
    ] {
        assert!(
            text.contains(&format!("# TYPE tinyloop_{family} ")),
            "{family} is missing"
        );
    }
    let mut n_samples = 0;
    for line in text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
    {
        let (series, value) = line.rsplit_once(' ').expect("a series and a value");
        let name = series.split('{').next().expect("a name");
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        assert!(
            name.chars().all(is_name) && value.parse::<f64>().is_ok(),
            "{line}"
        );
        n_samples += 1;
    }
    assert!(n_samples > 50, "{n_samples}");
    assert_eq!(
        bench.metric("tinyloop_completion_tokens_total{model=\"m\"}"),
        2.0
    );
    assert_eq!(bench.metric("tinyloop_up{model=\"m\"}"), 1.0);
    assert!(bench.metrics.render("").contains("tinyloop_build_info"));
}

/// What may happen to an executor. Numbers choose among what there is.
#[derive(Clone, Debug)]
enum Op {
    Submit {
        priority: i32,
        deadline_ms: Option<u64>,
    },
    Step(usize),
    Fail(usize),
    Lose(usize),
    Cancel(usize),
    Drop(usize),
    Advance(u64),
    Drive,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (-2..=2, prop::option::of(1_u64..50)).prop_map(|(priority, deadline_ms)| Op::Submit { priority, deadline_ms }),
        6 => (0_usize..100).prop_map(Op::Step),
        1 => (0_usize..100).prop_map(Op::Fail),
        1 => (0_usize..100).prop_map(Op::Lose),
        1 => (0_usize..100).prop_map(Op::Cancel),
        1 => (0_usize..100).prop_map(Op::Drop),
        1 => (1_u64..30).prop_map(Op::Advance),
        4 => Just(Op::Drive),
    ]
}

/// The model: what has been accepted and not dropped, and what was refused.
#[derive(Default)]
struct Model {
    tickets: BTreeMap<usize, Ticket>,
    n_accepted: u64,
    n_refused: u64,
}

impl Model {
    fn pick<T: Copy>(items: &[T], choice: usize) -> Option<T> {
        (!items.is_empty()).then(|| items[choice % items.len()])
    }

    fn apply(&mut self, bench: &Bench, op: Op) {
        let running = |choice| {
            let jobs: Vec<_> = bench
                .runtimes
                .iter()
                .flat_map(|runtime| runtime.running().into_iter().map(move |id| (runtime, id)))
                .collect();
            Self::pick(&jobs, choice)
        };
        let live: Vec<usize> = self.tickets.keys().copied().collect();
        match op {
            Op::Submit {
                priority,
                deadline_ms,
            } => {
                let options = SubmitOptions {
                    priority,
                    queue_timeout: deadline_ms.map(Duration::from_millis),
                    ..SubmitOptions::default()
                };
                match bench.try_submit(options) {
                    Ok(ticket) => {
                        self.tickets.insert(self.n_accepted as usize, ticket);
                        self.n_accepted += 1;
                    }
                    Err(error) => {
                        assert!(matches!(error, SubmitError::QueueFull { .. }), "{error:?}");
                        self.n_refused += 1;
                    }
                }
            }
            Op::Step(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    assert!(runtime.step(id));
                }
            }
            Op::Fail(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    runtime.fail(id, "boom");
                }
            }
            Op::Lose(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    runtime.lose(id);
                }
            }
            Op::Cancel(choice) => {
                if let Some(key) = Self::pick(&live, choice) {
                    self.tickets[&key].cancel();
                }
            }
            Op::Drop(choice) => {
                if let Some(key) = Self::pick(&live, choice) {
                    self.tickets.remove(&key);
                }
            }
            Op::Advance(ms) => bench.advance(ms),
            Op::Drive => bench.executor.drive(),
        }
    }

    /// What must hold between any two steps.
    fn check(&self, bench: &Bench) {
        let snapshot = bench.executor.snapshot();
        let listed = bench.executor.list();
        assert_eq!(
            listed.len(),
            snapshot.queue_depth + snapshot.in_flight as usize
        );
        assert!(snapshot.queue_depth <= 4, "{snapshot:?}");
        for replica in &snapshot.replicas {
            assert!(replica.inflight <= replica.target, "{snapshot:?}");
            assert!(replica.status.running <= replica.inflight, "{snapshot:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Nothing lost, nothing run twice, counters add up, no waiter left hanging.
    #[test]
    fn any_sequence_of_operations_keeps_the_books(ops in prop::collection::vec(op(), 1..120)) {
        let config = ExecutorConfig { max_queue_depth: 4, ..ExecutorConfig::default() };
        let replicas = vec![FakeRuntime::stepped(2), FakeRuntime::stepped(1)];
        let bench = Bench::with(replicas, config);
        let mut model = Model::default();
        for op in ops {
            model.apply(&bench, op);
            model.check(&bench);
        }
        bench.executor.shutdown(Duration::ZERO);
        prop_assert_eq!(bench.counts(), (0, 0));
        let mut by_end: HashMap<&'static str, u64> = HashMap::new();
        for (_, ticket) in model.tickets {
            let end = match ticket.wait() { // returns: everyone has an end
                Ok(result) => { prop_assert_eq!(result.tokens, vec![7, 8]); "done" }
                Err(RequestError::Fault(_)) => "error",
                Err(_) => "cancelled",
            };
            *by_end.entry(end).or_default() += 1;
        }
        let mut submitted: Vec<_> = bench.runtimes.iter().flat_map(|r| r.submitted()).collect();
        let n_submitted = submitted.len();
        submitted.sort();
        submitted.dedup();
        prop_assert_eq!(submitted.len(), n_submitted, "a job ran twice");
        let outcome = |name| bench.metric(&format!("tinyloop_requests_total{{model=\"m\",outcome=\"{name}\"}}")) as u64;
        let (done, cancelled, error) = (outcome("done"), outcome("cancelled"), outcome("error"));
        prop_assert_eq!(done + cancelled + error, model.n_accepted);
        // Dropped tickets ended somehow too; those we waited for are at most what was counted.
        let waited = |name| by_end.get(name).copied().unwrap_or(0);
        prop_assert!(waited("done") <= done && waited("error") <= error && waited("cancelled") <= cancelled);
        let dispatched = bench.metric("tinyloop_queue_wait_seconds_count{model=\"m\"}") as usize;
        prop_assert_eq!(dispatched, n_submitted);
        if model.n_refused > 0 {
            let refused = bench.metric("tinyloop_admission_rejected_total{model=\"m\",reason=\"queue_full\"}");
            prop_assert_eq!(refused as u64, model.n_refused);
        }
    }
}

/// The same under real threads: callers, the driver, two ticking runtimes.
#[test]
fn twenty_thousand_requests_under_real_threads() {
    const N_THREADS: u64 = 4;
    const N_EACH: u64 = 5_000;
    let ticking = |slots| {
        let pace = Pace::Threaded(Duration::ZERO);
        FakeRuntime::new(fake::capability(slots), pace, None, Box::new(fake::echo))
    };
    let runtimes = [Arc::new(ticking(3)), Arc::new(ticking(2))];
    let config = ExecutorConfig {
        max_queue_depth: 16,
        ..ExecutorConfig::default()
    };
    let executor = Executor::new(
        runtimes.iter().map(|r| Arc::clone(r) as _).collect(),
        config,
    );
    executor.start().expect("a thread");
    let counts: [AtomicU64; 3] = Default::default(); // accepted, refused, done
    std::thread::scope(|scope| {
        for worker in 0..N_THREADS {
            let (executor, counts) = (&executor, &counts);
            scope.spawn(move || {
                for index in 0..N_EACH {
                    one_request(executor, counts, worker * N_EACH + index);
                }
            });
        }
    });
    let [accepted, refused, done] = counts.map(AtomicU64::into_inner);
    assert_eq!(accepted + refused, N_THREADS * N_EACH);
    assert!(done > accepted / 2, "{done} of {accepted}");
    executor.shutdown(Duration::from_secs(60));
    let snapshot = executor.snapshot();
    assert_eq!((snapshot.queue_depth, snapshot.in_flight), (0, 0));
    let text = executor.metrics_text("");
    let ended: u64 = text
        .lines()
        .filter(|line| line.starts_with("tinyloop_requests_total{"))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum();
    assert_eq!(ended, accepted);
}

/// Every fifth request is dropped, cancelled, or streamed; the others are waited for.
fn one_request(executor: &Executor, counts: &[AtomicU64; 3], number: u64) {
    let options = SubmitOptions {
        priority: (number % 3) as i32,
        ..SubmitOptions::default()
    };
    let count = |index: usize| counts[index].fetch_add(1, Ordering::Relaxed);
    let submitted = executor.submit_stream(request(3), options);
    let mut stream = match submitted {
        Ok(stream) => stream,
        Err(SubmitError::QueueFull { .. }) => {
            count(1);
            return;
        }
        Err(error) => panic!("{error}"),
    };
    count(0);
    match number % 15 {
        0 => drop(stream),
        5 => stream.cancel(), // then dropped
        10 => {
            let _ = stream.next();
        }
        _ => {
            let tokens: Vec<_> = stream
                .by_ref()
                .filter_map(|c| c.expect("no error").token_id)
                .collect();
            assert_eq!(tokens, [7, 8, 9]);
            count(2);
        }
    }
}
