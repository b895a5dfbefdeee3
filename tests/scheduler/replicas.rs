//! Replicas that die and come back: what becomes of their jobs, and what is seen of it.

use crate::support::{Bench, request};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::RequestError;
use tinyloop::runtime::Runtime;
use tinyloop::runtime::fake::{FakeRuntime, OnSubmit, Pace};
use tinyloop::scheduler::{
    Executor, ExecutorContext, Metrics, NewPrefix, StreamEvent, SubmitError, SubmitOptions,
    TokenStream,
};

fn healths(bench: &Bench) -> Vec<&'static str> {
    let snapshot = bench.executor.snapshot();
    let replicas = snapshot.replicas.iter();
    replicas.map(|replica| replica.health.name()).collect()
}

fn requeued(bench: &Bench, cause: &str) -> f64 {
    bench.metric(&format!(
        "tinyloop_requeued_total{{cause=\"{cause}\",model=\"m\"}}"
    ))
}

/// Two replicas of one slot each, both busy, the first job with a token.
fn two_busy(bench: &Bench) -> [TokenStream; 2] {
    let streams = [(); 2].map(|()| bench.stream(request(2)));
    bench.executor.drive();
    for runtime in &bench.runtimes {
        assert_eq!(runtime.running().len(), 1);
    }
    streams
}

fn finish(bench: &Bench, runtime: &FakeRuntime) {
    while let Some(id) = runtime.running().first().copied() {
        runtime.finish(id);
        bench.executor.drive();
    }
}

/// Tokens of an answer that has ended.
fn answer(mut stream: TokenStream) -> Result<Vec<u32>, RequestError> {
    let mut tokens = Vec::new();
    loop {
        match stream.recv_timeout(Duration::ZERO) {
            StreamEvent::Chunk(chunk) => tokens.extend(chunk.token_id),
            StreamEvent::Finished(_) => return Ok(tokens),
            StreamEvent::Failed(error) => return Err(error),
            StreamEvent::TimedOut => panic!("{} has not ended", stream.id()),
        }
    }
}

#[test]
fn jobs_without_a_token_move_on_and_those_with_one_end() {
    let (bench, factory) = Bench::rebuilding(&[2, 2], ExecutorConfig::default());
    *factory.refuses.lock() = Some("not yet".to_owned());
    let streams: Vec<_> = (0..4).map(|_| bench.stream(request(2))).collect();
    bench.executor.drive();
    let (dying, living) = (&bench.runtimes[0], &bench.runtimes[1]);
    let (begun, fresh) = (dying.running()[0], dying.running()[1]);
    assert!(dying.step(begun));
    dying.die();
    bench.settle();
    assert_eq!(healths(&bench), ["lost", "live"]);
    assert_eq!(
        (requeued(&bench, "replica_lost"), bench.counts()),
        (1.0, (1, 2))
    );
    assert_eq!(bench.info(fresh).state.stamps().n_requeues, 1);
    finish(&bench, living);
    assert!(living.submitted().contains(&fresh));
    let mut ends = std::collections::HashMap::new();
    for stream in streams {
        ends.insert(stream.id(), answer(stream));
    }
    let lost = ends.remove(&begun).expect("it was there");
    assert!(
        matches!(lost, Err(RequestError::ReplicaLost(_))),
        "{lost:?}"
    );
    assert!(ends.values().all(|end| *end == Ok(vec![7, 8])), "{ends:?}");
}

#[test]
fn a_lost_replica_is_made_anew_and_used() {
    let (bench, factory) = Bench::rebuilding(&[1], ExecutorConfig::default());
    let ticket = bench.submit(0);
    bench.executor.drive();
    bench.runtime().die();
    bench.settle();
    assert_eq!((healths(&bench), factory.n_asked()), (vec!["live"], 1));
    let anew = factory.runtime(0);
    assert_eq!(anew.running(), [ticket.id()]);
    finish(&bench, &anew);
    assert_eq!(ticket.wait().expect("it ran again").tokens, [7, 8]);
    let snapshot = bench.executor.snapshot();
    assert_eq!(snapshot.replicas[0].n_restarts, 1);
    assert!(snapshot.replicas[0].last_error.is_some());
    assert_eq!(bench.count("replica_restarts_total"), 1.0);
    let in_state = |state| {
        bench.metric(&format!(
            "tinyloop_replicas{{model=\"m\",state=\"{state}\"}}"
        ))
    };
    assert_eq!(
        ["live", "lost", "restarting"].map(in_state),
        [1.0, 0.0, 0.0]
    );
    assert_eq!(bench.count("up"), 1.0);
}

#[test]
fn a_job_that_loses_two_replicas_ends() {
    let (bench, factory) = Bench::rebuilding(&[1], ExecutorConfig::default());
    let ticket = bench.submit(0);
    bench.executor.drive();
    bench.runtime().die();
    bench.settle();
    factory.runtime(0).die();
    bench.settle();
    let error = ticket
        .wait()
        .expect_err("it may be the job that kills them");
    assert!(matches!(error, RequestError::ReplicaLost(_)), "{error:?}");
    assert_eq!((factory.n_asked(), bench.counts()), (1, (0, 0)));
    // One that dies so soon is not made anew at once.
    bench.advance(500);
    bench.settle();
    assert_eq!((factory.n_asked(), healths(&bench)), (2, vec!["live"]));
}

#[test]
fn attempts_come_later_and_later() {
    let (bench, factory) = Bench::rebuilding(&[1, 1], ExecutorConfig::default());
    *factory.refuses.lock() = Some("still booting".to_owned());
    bench.runtimes[1].die();
    let mut asked = Vec::new();
    for _ in 0..40 {
        bench.settle();
        asked.push(factory.n_asked());
        bench.advance(250);
    }
    // The look at 500 ms notices it, then attempts 500, 1000, 2000 and 4000 ms after the one before.
    let at = |n| {
        asked
            .iter()
            .position(|&n_asked| n_asked == n)
            .map(|tick| 250 * tick)
    };
    let expected = [500, 1000, 2000, 4000, 8000].map(Some);
    assert_eq!([1, 2, 3, 4, 5].map(at), expected);
    let replica = &bench.executor.snapshot().replicas[1];
    assert_eq!(replica.last_error.as_deref(), Some("still booting"));
    // The other one works all along.
    let ticket = bench.submit(0);
    bench.executor.drive();
    finish(&bench, &bench.runtimes[0]);
    assert!(ticket.wait().is_ok());
}

#[test]
fn while_all_are_lost_requests_wait_for_a_while_then_are_refused_until_one_is_back() {
    let config = ExecutorConfig {
        replica_wait: Duration::from_secs(3),
        max_queue_depth: 2,
        ..ExecutorConfig::default()
    };
    let (bench, factory) = Bench::rebuilding(&[1], config);
    *factory.refuses.lock() = Some("no".to_owned());
    let was_running = bench.submit(0);
    bench.executor.drive();
    bench.runtime().die();
    bench.settle();
    // The lost job waits beside the limit of the queue.
    let waiting = bench.submit(0);
    let refused = bench.try_submit(SubmitOptions::default());
    assert!(
        matches!(refused, Err(SubmitError::QueueFull { .. })),
        "{refused:?}"
    );
    let hurried = SubmitOptions {
        queue_timeout: Some(Duration::from_millis(200)),
        ..SubmitOptions::default()
    };
    assert!(bench.try_submit(hurried).is_err());
    bench.advance(2999);
    bench.settle();
    assert_eq!(bench.counts(), (2, 0));
    bench.advance(1);
    bench.settle();
    for ticket in [was_running, waiting] {
        let error = ticket.wait().expect_err("nobody came");
        assert!(matches!(error, RequestError::NoReplica { .. }), "{error:?}");
    }
    let refused = bench.try_submit(SubmitOptions::default());
    let refused = refused.expect_err("nobody is there");
    assert_eq!(
        (refused.reason(), refused.should_retry()),
        ("no_replica", true)
    );
    assert!(refused.retry_after_s().is_some_and(|seconds| seconds >= 1));
    assert_eq!(bench.executor.preflight(), Err(refused));
    assert_eq!(bench.count("up"), 0.0);
    assert!(!bench.executor.snapshot().has_failed);
    *factory.refuses.lock() = None;
    bench.advance(4000);
    bench.settle();
    let ticket = bench.submit(0);
    bench.executor.drive();
    finish(&bench, &factory.runtime(0));
    assert!(ticket.wait().is_ok());
}

#[test]
fn deadlines_hold_while_replicas_are_restarted() {
    let (bench, factory) = Bench::rebuilding(&[1], ExecutorConfig::default());
    *factory.refuses.lock() = Some("no".to_owned());
    let options = SubmitOptions {
        queue_timeout: Some(Duration::from_millis(300)),
        ..SubmitOptions::default()
    };
    let lost = bench.try_submit(options.clone()).expect("room");
    bench.executor.drive();
    bench.advance(10_000); // it ran for long: its wait in the queue is over and met
    bench.runtime().die();
    bench.settle();
    let waiting = bench.try_submit(options).expect("room");
    bench.advance(299);
    bench.settle();
    assert_eq!(bench.counts(), (2, 0));
    bench.advance(1);
    bench.settle();
    for ticket in [lost, waiting] {
        let error = ticket.wait().expect_err("too late");
        assert!(
            matches!(error, RequestError::QueueTimeout { .. }),
            "{error:?}"
        );
    }
}

#[test]
fn a_requeued_job_keeps_its_place() {
    let (bench, factory) = Bench::rebuilding(&[1], ExecutorConfig::default());
    let old = bench.submit(0);
    bench.executor.drive();
    bench.advance(1);
    let young = bench.submit(0);
    bench.runtime().die();
    bench.settle();
    assert_eq!(factory.runtime(0).running(), [old.id()]);
    finish(&bench, &factory.runtime(0));
    assert_eq!(factory.runtime(0).submitted(), [old.id(), young.id()]);
    assert!(old.wait().is_ok() && young.wait().is_ok());
}

#[test]
fn a_panic_in_a_call_loses_the_replica_and_what_its_old_runs_say_is_ignored() {
    let (bench, factory) = Bench::rebuilding(&[2, 1], ExecutorConfig::default());
    let first = bench.stream(request(2));
    bench.executor.drive();
    let (panicking, other) = match bench.runtimes[0].running().is_empty() {
        false => (
            Arc::clone(&bench.runtimes[0]),
            Arc::clone(&bench.runtimes[1]),
        ),
        true => (
            Arc::clone(&bench.runtimes[1]),
            Arc::clone(&bench.runtimes[0]),
        ),
    };
    assert_eq!(panicking.running(), [first.id()]);
    panicking.on_submit(OnSubmit::Panic);
    other.on_submit(OnSubmit::Panic);
    let second = bench.stream(request(2));
    bench.executor.drive(); // to the emptier one, which panics, then to the other, which does too
    let third = bench.stream(request(2));
    bench.executor.drive();
    // The run of the first job on the runtime that is given up gives a token: nobody may hear it.
    panicking.step(first.id());
    bench.settle();
    let _ = second.finish(); // one or two panics met it
    for replica in [0, 1] {
        finish(&bench, &factory.runtime(replica));
    }
    for stream in [first, third] {
        match answer(stream) {
            Ok(tokens) => assert_eq!(tokens, [7, 8]),
            Err(error) => assert!(matches!(error, RequestError::ReplicaLost(_)), "{error:?}"),
        }
    }
    assert_eq!(bench.counts(), (0, 0));
    assert_eq!(healths(&bench), ["live", "live"]);
}

#[test]
fn the_death_of_an_idle_replica_is_noticed_by_looking() {
    let (bench, factory) = Bench::rebuilding(&[1, 1], ExecutorConfig::default());
    bench.runtimes[1].die();
    bench.settle();
    assert_eq!(healths(&bench), ["live", "live"], "nobody looked");
    bench.advance(500);
    bench.settle();
    assert_eq!(
        (healths(&bench), factory.n_asked()),
        (vec!["live", "live"], 1)
    );
    assert_eq!(bench.executor.snapshot().replicas[1].n_restarts, 1);
}

#[test]
fn without_a_factory_a_dead_replica_stays_dead_and_the_last_one_fails_fast() {
    let replicas = vec![FakeRuntime::stepped(1), FakeRuntime::stepped(1)];
    let bench = Bench::with(replicas, ExecutorConfig::default());
    let [one, two] = two_busy(&bench);
    bench.runtimes[0].die();
    bench.executor.drive();
    assert_eq!(
        (healths(&bench), bench.counts()),
        (vec!["lost", "live"], (1, 1))
    );
    bench.runtimes[1].die();
    bench.executor.drive();
    let late = bench.stream(request(2));
    bench.executor.drive();
    for stream in [one, two, late] {
        let error = stream.finish().expect_err("all are dead");
        assert!(matches!(error, RequestError::ReplicaLost(_)), "{error:?}");
    }
    assert_eq!(bench.counts(), (0, 0));
}

#[test]
fn cancels_reach_a_job_wherever_it_is() {
    let (bench, factory) = Bench::rebuilding(&[1], ExecutorConfig::default());
    *factory.refuses.lock() = Some("no".to_owned());
    let ticket = bench.submit(0);
    bench.executor.drive();
    // Asked while it runs, carried out once it is back in the queue.
    bench.runtime().die();
    ticket.cancel();
    bench.settle();
    assert_eq!(ticket.wait(), Err(RequestError::Cancelled));
    assert_eq!(bench.counts(), (0, 0));
}

#[test]
fn registered_prefixes_are_kept_by_the_new_replica_too() {
    let (bench, factory) = Bench::rebuilding(&[1], ExecutorConfig::default());
    let register = |token: u32| {
        let prefix = NewPrefix {
            tokens: vec![token; 32].into(),
            loops: None,
            cache_window: 0,
            isolation_key: 0,
            owner: None,
        };
        let options = SubmitOptions::default();
        let registration = bench.executor.begin_prefix(prefix, options).expect("room");
        bench.executor.drive();
        finish(&bench, &factory.runtime(0));
        registration.finish().expect("it is kept").id
    };
    let (gone, kept) = (register(1), register(2));
    bench.executor.remove_prefix(gone, None);
    bench.runtime().die();
    bench.advance(500);
    bench.settle();
    assert_eq!(factory.runtime(0).pins(), [kept]);
    bench.executor.remove_prefix(kept, None);
    assert!(factory.runtime(0).pins().is_empty());
}

#[test]
fn a_full_upstream_is_asked_again_after_a_pause_a_bounded_number_of_times() {
    let bench = Bench::stepped(2, ExecutorConfig::default());
    let ticket = bench.submit(0);
    bench.executor.drive();
    let full = |retry_after_ms| RequestError::Overloaded { retry_after_ms };
    bench.runtime().fail_with(ticket.id(), full(Some(700)));
    bench.executor.drive();
    assert_eq!(
        (bench.counts(), requeued(&bench, "overloaded")),
        ((1, 0), 1.0)
    );
    bench.advance(699);
    bench.executor.drive();
    assert_eq!(bench.counts(), (1, 0));
    bench.advance(1);
    bench.executor.drive();
    assert_eq!(bench.counts(), (0, 1));
    assert_eq!(healths(&bench), ["live"], "nothing is wrong with it");
    for _ in 0..20 {
        bench.runtime().fail_with(ticket.id(), full(None));
        bench.executor.drive();
        bench.advance(10_000);
        bench.executor.drive();
    }
    assert_eq!(ticket.wait(), Err(full(None)));
    // With a token sent it ends at once.
    let ticket = bench.submit(0);
    bench.advance(10_000);
    bench.executor.drive();
    bench.step(ticket.id());
    bench.runtime().fail_with(ticket.id(), full(None));
    bench.executor.drive();
    assert_eq!(ticket.wait(), Err(full(None)));
}

/// An executor with its own thread, on the real clock, whose factory does what the test says.
fn threaded(
    make: impl Fn() -> Result<Arc<dyn Runtime>, String> + Send + Sync + 'static,
) -> (Executor, Arc<FakeRuntime>) {
    let runtime = Arc::new(FakeRuntime::stepped(1));
    let context = ExecutorContext {
        factory: Some(Arc::new(move |_| make())),
        ..ExecutorContext::new("m", Arc::new(Metrics::new()))
    };
    let executor = Executor::with_context(
        vec![Arc::clone(&runtime) as _],
        ExecutorConfig::default(),
        context,
    );
    executor.start().expect("a thread");
    (executor, runtime)
}

#[test]
fn with_threads_a_request_survives_the_death_of_its_replica() {
    let (executor, runtime) = threaded(|| {
        let capability = tinyloop::runtime::fake::capability(1);
        let script = Box::new(tinyloop::runtime::fake::echo);
        let pace = Pace::Threaded(Duration::ZERO);
        Ok(Arc::new(FakeRuntime::new(capability, pace, None, script)))
    });
    let ticket = executor.submit(request(3), SubmitOptions::default());
    let ticket = ticket.expect("room");
    while runtime.running().is_empty() {
        std::thread::yield_now();
    }
    runtime.die();
    assert_eq!(ticket.wait().expect("it ran again").tokens, [7, 8, 9]);
}

#[test]
fn a_stop_waits_for_the_restart_under_way_and_leaves_nothing_running() {
    let (begins, began) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let may_go = parking_lot::Mutex::new(may_go);
    let made = Arc::new(FakeRuntime::stepped(1));
    let makes = Arc::clone(&made);
    let (executor, runtime) = threaded(move || {
        begins.send(()).expect("the test listens");
        may_go.lock().recv().expect("the test answers");
        Ok(Arc::clone(&makes) as _)
    });
    let ticket = executor.submit(request(3), SubmitOptions::default());
    let ticket = ticket.expect("room");
    runtime.die();
    began.recv().expect("a restart begins");
    std::thread::scope(|scope| {
        scope.spawn(|| executor.unload(Duration::from_secs(60)));
        assert_eq!(ticket.wait(), Err(RequestError::ModelUnloading));
        go.send(()).expect("it waits");
    });
    assert!(!made.status().alive, "it was ended with the others");
    assert!(!runtime.status().alive);
}

#[test]
fn a_factory_that_panics_is_one_that_failed() {
    let (executor, runtime) = threaded(|| panic!("planned"));
    runtime.die();
    while executor.snapshot().replicas[0].last_error.as_deref() != Some("its factory panicked") {
        std::thread::yield_now();
    }
    let health = executor.snapshot().replicas[0].health;
    assert!(health.can_come_back(), "{health:?}");
}
