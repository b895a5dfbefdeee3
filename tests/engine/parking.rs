//! Parked sequences: nothing is held meanwhile, and afterwards they go on as if nothing had happened.

use crate::support::*;
use tinyloop::config::EngineConfig;
use tinyloop::engine::Engine;
use tinyloop::request::*;

/// Greedy, and sampling with every penalty.
fn requests() -> [GenerationRequest; 2] {
    let mut sampled = seeded(prompt(2, 37), 20, 5);
    sampled.sampling.presence_penalty = 0.3;
    [greedy(prompt(1, 37), 20), sampled]
}

/// Parks, looks at what is left, lets the engine run on, resumes.
#[track_caller]
fn park_a_while(engine: &mut Engine, id: RequestId) {
    engine.park(id);
    engine.check_integrity().expect("the books are right");
    assert!(engine.is_idle(), "nothing but the parked one was there");
    let figures = engine.stats().snapshot();
    let counts = (figures.running, figures.waiting, figures.parked);
    assert_eq!((counts, figures.pages_used), ((0, 0, 1), 0));
    engine.park(id);
    step(engine);
    assert!(engine.is_idle());
    engine.resume(id);
    engine.resume(id);
    let figures = engine.stats().snapshot();
    assert_eq!((figures.waiting, figures.parked), (1, 0));
}

#[test]
fn parked_and_resumed_at_any_quantum_gives_the_same_answer() {
    let shapes = [None, Some((1, 2, 1))];
    for (shape, prefix_cache) in shapes.into_iter().zip([true, false]) {
        for request in requests() {
            let expected = alone(shape, &request);
            // A prompt of 37 in chunks of 10: the first quanta stand in the middle of it.
            for n_steps in [0, 1, 2, 3, 4, 5, 9, 17] {
                let mut engine = engine_of(
                    shape,
                    EngineConfig {
                        max_rows: 10,
                        prefix_cache,
                        ..config()
                    },
                );
                let outcome = submit(&mut engine, &request);
                for _ in 0..n_steps {
                    step(&mut engine);
                }
                park_a_while(&mut engine, request.id);
                step(&mut engine);
                park_a_while(&mut engine, request.id);
                drain(&mut engine);
                let outcome = outcome.lock().clone().without_cache_count();
                assert_eq!(outcome, expected, "{shape:?} after {n_steps}");
            }
        }
    }
}

#[test]
fn a_scored_prompt_may_be_parked() {
    let mut request = greedy(prompt(1, 80), 4);
    request.prompt_logprobs = Some(1);
    let mut engine = engine_of(None, config());
    let outcome = submit(&mut engine, &request);
    step(&mut engine);
    park_a_while(&mut engine, request.id);
    drain(&mut engine);
    assert_eq!(*outcome.lock(), alone(None, &request));
}

#[test]
fn the_place_of_a_parked_sequence_goes_to_others() {
    let mut engine = engine_of(
        None,
        EngineConfig {
            max_sequences: 1,
            kv_tokens: Some(160),
            ..config()
        },
    );
    let old = greedy(prompt(1, 60), 30);
    let young = greedy(prompt(2, 100), 60);
    let old_outcome = submit(&mut engine, &old);
    step(&mut engine);
    step(&mut engine);
    let young_outcome = submit(&mut engine, &young);
    step(&mut engine);
    assert!(young_outcome.lock().tokens.is_empty());
    engine.park(old.id);
    drain(&mut engine);
    assert!(young_outcome.lock().has_ended());
    assert!(!old_outcome.lock().has_ended());
    engine.resume(old.id);
    drain(&mut engine);
    for (request, outcome) in [(old, old_outcome), (young, young_outcome)] {
        let outcome = outcome.lock().clone().without_cache_count();
        assert_eq!(outcome, alone(None, &request));
    }
}

#[test]
fn a_resumed_sequence_goes_before_younger_ones() {
    let mut engine = engine_of(
        None,
        EngineConfig {
            max_sequences: 1,
            ..config()
        },
    );
    let requests: Vec<_> = (0..3).map(|i| greedy(prompt(i, 20), 3)).collect();
    let outcomes: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
    // The second waits when it is parked.
    engine.park(requests[1].id);
    step(&mut engine);
    engine.resume(requests[1].id);
    while !outcomes[2].lock().has_ended() {
        step(&mut engine);
        let has_ended = outcomes.iter().map(|o| o.lock().has_ended());
        let has_ended: Vec<_> = has_ended.collect();
        assert!(has_ended.is_sorted_by(|a, b| a >= b), "{has_ended:?}");
    }
}

#[test]
fn cancels_and_the_end_reach_parked_sequences() {
    let mut engine = engine_of(None, config());
    let requests = requests();
    let outcomes = requests.each_ref().map(|r| submit(&mut engine, r));
    step(&mut engine);
    for request in &requests {
        engine.park(request.id);
    }
    engine.cancel(requests[0].id);
    assert_eq!(outcomes[0].lock().failure, Some(RequestError::Cancelled));
    engine.resume(requests[0].id);
    assert!(engine.is_idle(), "a cancelled one does not come back");
    assert_eq!(engine.stats().snapshot().parked, 1);
    engine.fail_all(&RequestError::ShuttingDown);
    assert_eq!(outcomes[1].lock().failure, Some(RequestError::ShuttingDown));
    assert_eq!(engine.stats().snapshot().parked, 0);
    // Ids that nobody has.
    engine.park(RequestId::generate());
    engine.resume(RequestId::generate());
    engine.check_integrity().expect("the books are right");
}
