//! Many loads, unloads and requests at once: nothing thrashes, nothing hangs, nothing is left.

use crate::support::{Bench, PATIENCE, limits, model, on_demand, pool};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tinyloop::clock::SystemClock;
use tinyloop::config::PoolConfig;
use tinyloop::pool::{LoadedModel, Patience, RuntimeState};
use tinyloop::request::{GenerationRequest, RequestError};
use tinyloop::runtime::fake::Pace;
use tinyloop::scheduler::{StreamEvent, SubmitOptions, TokenStream};

/// Submits, if the model still takes requests.
fn stream(model: &LoadedModel) -> Option<TokenStream> {
    let request = GenerationRequest::new(vec![1_u32, 2], 3);
    model
        .executor
        .submit_stream(request, SubmitOptions::default())
        .ok()
}

/// Number of tokens, or the named error; fails when the stream does not end.
fn end(mut stream: TokenStream) -> Result<usize, RequestError> {
    let mut n_tokens = 0;
    loop {
        match stream.recv_timeout(PATIENCE) {
            StreamEvent::Chunk(_) => n_tokens += 1,
            StreamEvent::Finished(_) => return Ok(n_tokens),
            StreamEvent::Failed(error) => return Err(error),
            StreamEvent::TimedOut => panic!("a waiter hangs"),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Load(usize),
    Unload(usize, bool),
    Submit(usize),
    Cancel,
    Pass,
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0_usize..3).prop_map(Op::Load),
        2 => (0_usize..3, any::<bool>()).prop_map(|(index, patient)| Op::Unload(index, patient)),
        6 => (0_usize..3).prop_map(Op::Submit),
        1 => Just(Op::Cancel),
        1 => Just(Op::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever is asked in whatever order: each accepted request ends once, and memory is never
    /// more than the limit and nothing in the end.
    #[test]
    fn no_job_survives_an_unload(ops in prop::collection::vec(any_op(), 1..40)) {
        let names = ["a", "b", "c"];
        let sizes = [("a", 60), ("b", 60), ("c", 30)];
        let bench = Bench::with(&sizes, limits(), Pace::Threaded(Duration::ZERO));
        for name in names {
            bench.add(model(name));
        }
        let mut streams = Vec::new();
        for op in ops {
            match op {
                Op::Load(index) => drop(bench.load(names[index])),
                Op::Unload(index, patient) => {
                    let drain = Duration::from_secs(if patient { 30 } else { 0 });
                    drop(bench.pool.unload(names[index], Some(drain)));
                }
                Op::Submit(index) => {
                    let found = bench.pool.get(names[index]);
                    streams.extend(found.and_then(|model| stream(&model)));
                }
                Op::Cancel => drop(streams.pop()),
                Op::Pass => bench.pass_residency(),
            }
        }
        for name in names {
            drop(bench.pool.unload(name, Some(Duration::from_secs(30))));
        }
        for stream in streams {
            match end(stream) {
                Ok(n_tokens) => prop_assert_eq!(n_tokens, 3),
                Err(RequestError::ModelUnloading | RequestError::ShuttingDown) => {}
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
        for name in names {
            prop_assert_eq!(bench.settled(name), RuntimeState::Unloaded);
        }
        prop_assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (0, 0));
        prop_assert!(bench.loader.peak.load(Ordering::SeqCst) <= 100);
    }
}

/// Two models that do not fit together, and clients that want both all the time: each request ends,
/// both models are served, and a model is not thrown out before it has been of use.
#[test]
fn case_11_two_models_in_turn_neither_thrash_nor_deadlock() {
    let residency = Duration::from_millis(50);
    let config = PoolConfig {
        min_residency: residency,
        load_wait: PATIENCE,
        ..limits()
    };
    let sizes = [("a", 60), ("b", 60)];
    let (pool, loader) = pool(&sizes, config, Pace::AtOnce, Arc::new(SystemClock));
    for name in ["a", "b"] {
        pool.add(on_demand(name)).expect("the name is new");
    }
    let served = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let started = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (pool, served) = (&pool, &served);
            scope.spawn(move || {
                for round in 0..5 {
                    let which = (client + round) % 2;
                    // Once in a while the model goes between the look and the submit.
                    let answer = loop {
                        let name = ["a", "b"][which];
                        let found = pool.acquire(name, &Patience::USUAL);
                        let found = found.expect("it comes before the deadline");
                        if let Some(stream) = stream(&found) {
                            break end(stream);
                        }
                    };
                    assert_eq!(answer, Ok(3));
                    served[which].fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    let elapsed = started.elapsed();
    assert_eq!(served.map(AtomicUsize::into_inner), [10, 10]);
    let n_loads = loader.started().len();
    let most = elapsed.as_millis() / residency.as_millis() + 2;
    assert!(n_loads as u128 <= most, "{n_loads} loads in {elapsed:?}");
    assert!(n_loads <= 20, "never more loads than requests");
    assert!(loader.peak.load(Ordering::SeqCst) <= 100);
}
