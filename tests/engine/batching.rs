//! Sequences that share an engine: who gets rows, and what leaves at once.

use crate::support::*;
use tinyloop::config::EngineConfig;
use tinyloop::engine::Engine;
use tinyloop::engine::batch::BatchPolicy;
use tinyloop::request::*;

#[test]
fn preempted_sequences_go_on_as_if_nothing_had_happened() {
    let tight = EngineConfig {
        kv_tokens: Some(160),
        ..config()
    };
    for prefix_cache in [true, false] {
        let mut engine = engine_of(
            None,
            EngineConfig {
                prefix_cache,
                ..tight.clone()
            },
        );
        let requests: Vec<_> = (0..4)
            .map(|i| {
                let mut request = seeded(prompt(i, 20), 60, u64::from(i));
                request.stop.ignore_eos = true;
                request
            })
            .collect();
        let outcomes: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
        drain(&mut engine);
        assert!(engine.stats().snapshot().preemptions > 0, "too roomy");
        for (request, outcome) in requests.iter().zip(outcomes) {
            let outcome = outcome.lock().clone().without_cache_count();
            assert_eq!(outcome, alone(None, request));
        }
    }
}

#[test]
fn a_cancel_frees_everything_at_once() {
    let mut engine = engine_of(None, config());
    let request = greedy(prompt(1, 40), 100);
    let outcome = submit(&mut engine, &request);
    for _ in 0..6 {
        step(&mut engine);
    }
    engine.cancel(RequestId::generate());
    assert!(!engine.is_idle());
    engine.cancel(request.id);
    assert!(engine.is_idle());
    engine.check_integrity().expect("the books are right");
    assert_eq!(engine.stats().snapshot().pages_used, 0);
    assert_eq!(outcome.lock().failure, Some(RequestError::Cancelled));
    engine.cancel(request.id);
}

/// Between two chunks of a prompt, of a generative model and of a looped one.
#[test]
fn case_01_a_prompt_is_left_between_two_of_its_chunks() {
    for shape in [None, Some((0, 2, 0))] {
        let mut engine = engine_of(shape, config());
        let request = greedy(prompt(1, 150), 5);
        let outcome = submit(&mut engine, &request);
        step(&mut engine);
        let pages = engine.stats().snapshot().pages_used;
        assert!(pages > 0 && outcome.lock().tokens.is_empty(), "{pages}");
        engine.cancel(request.id);
        assert!(engine.is_idle(), "not one more step");
        assert_eq!(engine.stats().snapshot().pages_used, 0);
        engine.check_integrity().expect("the books are right");
        assert_eq!(outcome.lock().failure, Some(RequestError::Cancelled));
    }
}

#[test]
fn a_consumer_that_is_gone_ends_its_sequence_within_the_quantum() {
    let mut engine = engine_of(None, config());
    let request = greedy(prompt(1, 10), 100);
    let (job, outcome) = job(&request, 3);
    engine.submit(job);
    // One quantum computes the prompt and gives the first token; the fourth token finds nobody.
    for _ in 0..4 {
        assert!(!engine.is_idle());
        step(&mut engine);
    }
    assert!(engine.is_idle());
    assert_eq!(engine.stats().snapshot().pages_used, 0);
    assert_eq!(outcome.lock().tokens.len(), 3);
}

#[test]
fn case_10_running_generations_get_a_token_in_every_quantum_beside_a_long_prompt() {
    let mut engine = engine_of(None, config());
    let running = submit(&mut engine, &greedy(prompt(1, 8), 100));
    step(&mut engine);
    let long = submit(&mut engine, &greedy(prompt(2, 150), 2));
    let short = submit(&mut engine, &greedy(prompt(3, 8), 2));
    for n_tokens in 2..8 {
        step(&mut engine);
        assert_eq!(running.lock().tokens.len(), n_tokens);
        assert!(engine.stats().snapshot().batch_rows <= 32);
        if n_tokens == 3 {
            assert!(
                short.lock().has_ended(),
                "the short prompt waits for the long one"
            );
        }
    }
    assert_eq!(long.lock().tokens.len(), 1);
}

#[test]
fn sequences_of_different_depth_share_passes() {
    let shape = Some((0, 2, 0));
    let mut engine = engine_of(shape, config());
    let outcomes: Vec<_> = [1, 4]
        .map(|loops| {
            let mut request = greedy(prompt(1, 8), 40);
            request.loops = Some(loops);
            let outcome = submit(&mut engine, &request);
            (request, outcome)
        })
        .into();
    for _ in 0..20 {
        step(&mut engine);
    }
    // One pass per token for the shallow one, four for the deep one: neither waits for the other.
    let counts = outcomes.iter().map(|(_, o)| o.lock().tokens.len());
    assert_eq!(counts.collect::<Vec<_>>(), [20, 5]);
    drain(&mut engine);
    for (request, outcome) in outcomes {
        assert_eq!(*outcome.lock(), alone(shape, &request));
    }
}

/// Steps until a request has its first token.
fn steps_to_first_token(engine: &mut Engine, request: &GenerationRequest) -> u32 {
    let outcome = submit(engine, request);
    let mut n_steps = 0;
    while outcome.lock().tokens.is_empty() {
        step(engine);
        n_steps += 1;
        assert!(n_steps < 1000, "no token");
    }
    n_steps
}

#[test]
fn a_short_request_beside_a_deep_long_prompt_loses_at_most_two_quanta() {
    let deep = |tokens, loops, max_tokens| {
        let mut request = greedy(tokens, max_tokens);
        request.loops = Some(loops);
        request
    };
    let shapes = [(1, 2, 1), (0, 2, 0), (2, 1, 0)].map(Some);
    // The last rows of 152 would take all that a step has for prompts.
    for (shape, n_long_tokens) in shapes.into_iter().zip([150, 152, 152]) {
        let config = EngineConfig {
            prefill_rows_beside_decode: 16,
            ..config()
        };
        let short = deep(prompt(3, 3), 1, 1);
        let long = deep(prompt(2, n_long_tokens), 4, 1);
        let idle = steps_to_first_token(&mut engine_of(shape, config.clone()), &short);
        let mut engine = engine_of(shape, config.clone());
        let n_long = steps_to_first_token(&mut engine, &long);
        assert!(n_long > 40, "too short to come in between");
        for n_before in 1..n_long {
            let mut engine = engine_of(shape, config.clone());
            submit(&mut engine, &long);
            for _ in 0..n_before {
                step(&mut engine);
            }
            let busy = steps_to_first_token(&mut engine, &short);
            assert!(
                busy <= idle + 2,
                "{shape:?}: {busy} at {n_before}, {idle} alone"
            );
        }
    }
}

#[test]
fn prompt_rows_are_bounded_beside_a_generation() {
    for (shape, n_passes) in [(None, 1), (Some((1, 2, 1)), 4)] {
        let mut engine = engine_of(
            shape,
            EngineConfig {
                prefill_rows_beside_decode: 8,
                ..config()
            },
        );
        let mut endless = greedy(prompt(1, 8), 100);
        endless.stop.ignore_eos = true;
        let running = submit(&mut engine, &endless);
        for _ in 0..n_passes + 1 {
            step(&mut engine);
        }
        let long = submit(&mut engine, &greedy(prompt(2, 150), 2));
        while long.lock().tokens.is_empty() {
            step(&mut engine);
            let n_rows = engine.stats().snapshot().batch_rows;
            assert!(n_rows <= 9, "{n_rows} rows");
            assert!(!running.lock().has_ended());
        }
    }
}

#[test]
fn every_way_of_batching_gives_the_tokens_of_the_request_alone() {
    let shape = Some((1, 2, 1));
    for policy in [BatchPolicy::DepthWise, BatchPolicy::DepthTurns] {
        let mut engine = engine_of(shape, config());
        engine.set_batch_policy(policy);
        let mut running = Vec::new();
        // Arrivals at odd moments, of every depth.
        for index in 0..10_u32 {
            let mut request = seeded(prompt(index, 3 + index as usize * 5), 9, u64::from(index));
            request.loops = Some(1 + index % 4);
            let outcome = submit(&mut engine, &request);
            running.push((request, outcome));
            for _ in 0..index * 3 % 7 {
                step(&mut engine);
            }
        }
        drain(&mut engine);
        for (request, outcome) in running {
            let outcome = outcome.lock().clone().without_cache_count();
            assert_eq!(outcome, alone(shape, &request), "{policy:?}");
        }
    }
}
