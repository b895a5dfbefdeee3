//! The invariants of `random` under real threads: callers, the driver, runtimes that tick.
//!
//! An operation is a submit (alone or in a group), a cancel, a drop or a wait for an end. A million
//! of them in a release build, fewer in a debug build.

use crate::support::request;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::RequestError;
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::scheduler::{Executor, StreamEvent, SubmitError, SubmitOptions, TokenStream};

const N_OPERATIONS: u64 = if cfg!(debug_assertions) {
    60_000
} else {
    1_000_000
};
const N_CALLERS: u64 = 4;

/// What all callers saw together.
#[derive(Default)]
struct Tally {
    operations: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
    done: AtomicU64,
    /// Ended badly or unread.
    other: AtomicU64,
}

impl Tally {
    fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}

fn executor() -> Executor {
    let ticking = |slots| {
        let pace = Pace::Threaded(Duration::ZERO);
        FakeRuntime::new(fake::capability(slots), pace, None, Box::new(fake::echo))
    };
    let config = ExecutorConfig {
        max_queue_depth: 16,
        max_queued_prompt_tokens: Some(45),
        aging_interval_ms: 1,
        preempt_running: true,
        ..ExecutorConfig::default()
    };
    let executor = Executor::new(
        vec![Arc::new(ticking(3)) as _, Arc::new(ticking(2)) as _],
        config,
    );
    executor.start().expect("a thread");
    executor
}

#[test]
fn a_million_operations_under_real_threads_keep_the_books() {
    let executor = executor();
    let tally = Tally::default();
    std::thread::scope(|scope| {
        for caller in 0..N_CALLERS {
            let (executor, tally) = (&executor, &tally);
            scope.spawn(move || {
                let mut number = caller * 1_000_003; // each caller meets every kind of end
                while tally.operations.load(Ordering::Relaxed) < N_OPERATIONS {
                    one_turn(executor, tally, number);
                    number += 1;
                }
            });
        }
        // A reader beside them: what it sees is of one moment.
        scope.spawn(|| {
            while tally.operations.load(Ordering::Relaxed) < N_OPERATIONS {
                check_listing(&executor);
            }
        });
    });
    executor.shutdown(Duration::from_secs(60));
    let snapshot = executor.snapshot();
    let left = (
        snapshot.queue_depth,
        snapshot.in_flight,
        snapshot.n_preempted,
    );
    assert_eq!(left, (0, 0, 0));
    let counted = |family: &str| -> BTreeMap<String, u64> {
        let text = executor.metrics_text("");
        let lines = text.lines().filter(|line| line.starts_with(family));
        let split = lines.filter_map(|line| line.rsplit_once(' '));
        split
            .map(|(series, value)| (series.to_owned(), value.parse().expect("a count")))
            .collect()
    };
    let ended: u64 = counted("tinyloop_requests_total{").values().sum();
    // Those that waited too long were accepted first; they are among the ended.
    let refused: u64 = counted("tinyloop_admission_rejected_total{")
        .iter()
        .filter(|(series, _)| !series.contains("queue_timeout"))
        .map(|(_, count)| count)
        .sum();
    let Tally {
        accepted,
        refused: seen_refused,
        done,
        other,
        ..
    } = tally;
    let (accepted, done) = (accepted.into_inner(), done.into_inner());
    assert_eq!(ended, accepted);
    assert_eq!(
        done + other.into_inner(),
        accepted,
        "every stream was ended"
    );
    assert_eq!(refused, seen_refused.into_inner());
    // Four of 16 are not read to the end, and at most one of 11 comes too late.
    assert!(done > accepted / 2, "{done} of {accepted}");
    let preempted: u64 = counted("tinyloop_preemptions_total{").values().sum();
    assert!(preempted > 0, "the run should meet preemptions");
}

/// Submits one request or a group, and ends each somehow.
fn one_turn(executor: &Executor, tally: &Tally, number: u64) {
    let n = if number.is_multiple_of(7) { 3 } else { 1 };
    let options = SubmitOptions {
        priority: (number % 3) as i32,
        queue_timeout: number
            .is_multiple_of(11)
            .then_some(Duration::from_micros(50)),
        ..SubmitOptions::default()
    };
    let requests = (0..n).map(|_| request(3)).collect();
    Tally::add(&tally.operations, 1);
    let streams = match executor.submit_many(requests, options) {
        Ok(streams) => streams,
        Err(SubmitError::QueueFull { .. }) => return Tally::add(&tally.refused, n),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(streams.len() as u64, n);
    Tally::add(&tally.accepted, n);
    for stream in streams {
        end(executor, tally, stream, number);
    }
}

/// Some are dropped, cancelled by their holder or by id, or read in part; most are read whole.
fn end(executor: &Executor, tally: &Tally, mut stream: TokenStream, number: u64) {
    Tally::add(&tally.operations, 1);
    match number % 16 {
        0 => return Tally::add(&tally.other, 1), // dropped
        4 => stream.cancel(),
        8 => {
            let _ = executor.cancel(stream.id()); // it may have ended
        }
        12 => {
            let _ = stream.recv();
            return Tally::add(&tally.other, 1);
        }
        _ => {}
    }
    let mut tokens = Vec::new();
    Tally::add(&tally.operations, 1);
    loop {
        match stream.recv_timeout(Duration::from_secs(60)) {
            StreamEvent::Chunk(chunk) => tokens.extend(chunk.token_id),
            StreamEvent::TimedOut => panic!("{} is left hanging", stream.id()),
            StreamEvent::Finished(_) => {
                assert_eq!(tokens, [7, 8, 9]);
                return Tally::add(&tally.done, 1);
            }
            StreamEvent::Failed(RequestError::Fault(text)) => panic!("{text}"),
            StreamEvent::Failed(_) => return Tally::add(&tally.other, 1),
        }
    }
}

fn check_listing(executor: &Executor) {
    let (snapshot, listed) = executor.inspect();
    let count = |name| listed.iter().filter(|i| i.state.name() == name).count();
    assert_eq!(count("queued"), snapshot.queue_depth);
    let n_running = snapshot.in_flight as usize + snapshot.n_preempted;
    assert_eq!(listed.len(), snapshot.queue_depth + n_running);
    assert!(count("preempted") <= snapshot.n_preempted);
    assert!(
        snapshot.in_flight <= 5 && snapshot.queue_depth <= 16 + 5,
        "{snapshot:?}"
    );
}
