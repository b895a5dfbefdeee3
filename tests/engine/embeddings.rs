//! Embeddings: whatever happens around them, they are those of the text alone, bit for bit.

use crate::looped::looped_engine;
use crate::support::*;
use tinyloop::backend::Backend;
use tinyloop::backend::cpu::CpuBackend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::config::{EngineConfig, Pooling};
use tinyloop::engine::{Engine, EngineParts};
use tinyloop::model::{Model, Plan, Segment, testing};
use tinyloop::request::*;

fn with_pooling(pooling: Pooling) -> EngineConfig {
    EngineConfig {
        pooling: Some(pooling),
        ..config()
    }
}

fn embedded(engine: &mut Engine, prompt: &[TokenId]) -> Vec<f32> {
    let outcome = run(engine, &GenerationRequest::embedding(prompt));
    assert_eq!(outcome.failure, None);
    let (reason, usage) = outcome.finish.expect("it finished");
    assert_eq!(reason, FinishReason::Stop);
    assert_eq!(usage.prompt_tokens, prompt.len() as u32);
    assert_eq!((usage.cached_tokens, usage.completion_tokens), (0, 0));
    outcome.embedding.expect("an embedding before the end")
}

/// Prompts that share a beginning, longer and shorter than a chunk.
fn prompts() -> Vec<Vec<TokenId>> {
    [(1, 90), (2, 41), (3, 1), (1, 16), (4, 60)]
        .map(|(family, n)| prompt(family, n))
        .to_vec()
}

#[test]
fn pooling_takes_the_states_of_the_right_tokens() {
    let text = prompt(1, 37);
    let mut by_last = engine_of(None, with_pooling(Pooling::Last));
    // The state of a token depends on those before it, so that it is the last one's of a shorter text.
    let states: Vec<Vec<f32>> = (1..=text.len())
        .map(|n| embedded(&mut by_last, &text[..n]))
        .collect();
    let mut by_first = engine_of(None, with_pooling(Pooling::Cls));
    assert_eq!(embedded(&mut by_first, &text), states[0]);
    let mut by_mean = engine_of(None, with_pooling(Pooling::Mean));
    let mean: Vec<f32> = (0..states[0].len())
        .map(|i| {
            let sum: f64 = states.iter().map(|state| f64::from(state[i])).sum();
            (sum / states.len() as f64) as f32
        })
        .collect();
    assert_eq!(embedded(&mut by_mean, &text), mean);
    let mut by_default = engine_of(None, config());
    assert_eq!(embedded(&mut by_default, &text), mean);
}

#[test]
fn neighbours_chunks_and_caches_change_nothing() {
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
        for shape in [None, Some((1, 2, 1))] {
            let wanted: Vec<Vec<f32>> = prompts()
                .iter()
                .map(|prompt| embedded(&mut engine_of(shape, with_pooling(pooling)), prompt))
                .collect();
            let mut engine = engine_of(shape, with_pooling(pooling));
            // Blocks of the same prompts are in the cache, and generations run beside.
            drop(run(&mut engine, &greedy(prompt(1, 90), 2)));
            let generation = submit(&mut engine, &greedy(prompt(2, 50), 12));
            let outcomes: Vec<_> = prompts()
                .iter()
                .map(|prompt| submit(&mut engine, &GenerationRequest::embedding(&prompt[..])))
                .collect();
            drain(&mut engine);
            for (outcome, wanted) in outcomes.iter().zip(&wanted) {
                let outcome = outcome.lock();
                assert_eq!(outcome.embedding.as_ref(), Some(wanted), "{pooling:?}");
                assert_eq!(outcome.cached_tokens(), 0);
            }
            let alone = alone(shape, &greedy(prompt(2, 50), 12));
            let beside = generation.lock().clone();
            assert_eq!(beside.without_cache_count(), alone);
        }
    }
}

#[test]
fn a_preempted_embedding_is_the_same() {
    let text = prompt(1, 100);
    let wanted = embedded(&mut engine_of(None, config()), &text);
    let mut engine = engine_of(None, config());
    let request = GenerationRequest::embedding(&text[..]);
    let outcome = submit(&mut engine, &request);
    step(&mut engine);
    step(&mut engine);
    engine.park(request.id);
    drop(run(&mut engine, &greedy(prompt(5, 30), 4)));
    engine.resume(request.id);
    drain(&mut engine);
    assert_eq!(outcome.lock().embedding, Some(wanted));
}

#[test]
fn nothing_is_left_behind() {
    let mut engine = engine_of(None, config());
    embedded(&mut engine, &prompt(1, 90));
    assert_eq!(engine.stats().snapshot().pages_cached, 0);
    let request = GenerationRequest::embedding(prompt(1, 90));
    let outcome = submit(&mut engine, &request);
    step(&mut engine);
    engine.cancel(request.id);
    assert!(engine.is_idle());
    assert_eq!(outcome.lock().failure, Some(RequestError::Cancelled));
    assert_eq!(outcome.lock().embedding, None);
    engine.check_integrity().expect("the books are right");
}

#[test]
fn loops_count_for_embeddings_too() {
    for kind in ["ouro", "huginn"] {
        let text: Vec<TokenId> = (0..40).map(|i| (i * i * 7 + 3) % 61).collect();
        let vectors: Vec<Vec<f32>> = [1, 2, 4]
            .iter()
            .map(|loops| {
                let mut request = GenerationRequest::embedding(&text[..]);
                request.loops = Some(*loops);
                let outcome = run(&mut looped_engine(kind, true), &request);
                assert_eq!(outcome.finish.map(|(_, usage)| usage.loops), Some(*loops));
                outcome.embedding.expect("an embedding")
            })
            .collect();
        assert_ne!(vectors[0], vectors[1], "{kind}");
        assert_ne!(vectors[1], vectors[2], "{kind}");
        // All rows leave after their first loop.
        let mut request = GenerationRequest::embedding(&text[..]);
        request.loops = Some(4);
        request.adaptive = Some(AdaptiveExit {
            rule: ExitRule::Latent,
            threshold: 1e6,
        });
        let outcome = run(&mut looped_engine(kind, true), &request);
        // `latent` compares with the loop before, so the second loop is the first one to leave after.
        assert_eq!(outcome.embedding.as_ref(), Some(&vectors[1]), "{kind}");
    }
}

fn encoder(cpu: bool, config: EngineConfig) -> Engine {
    let mut backend: Box<dyn Backend> = match cpu {
        true => Box::new(CpuBackend::new(Some(2)).expect("threads")),
        false => Box::new(ReferenceBackend::new()),
    };
    let model = testing::tiny_encoder(backend.as_mut(), 7);
    let parts = EngineParts {
        backend,
        model,
        end_tokens: vec![],
        config,
    };
    Engine::new(parts).expect("a small engine")
}

#[test]
fn an_encoder_reads_both_sides() {
    let text = prompt(1, 50);
    let mut changed = text.clone();
    changed[49] += 1;
    for cpu in [false, true] {
        // The last token matters to the first one's state.
        let mut engine = encoder(cpu, with_pooling(Pooling::Cls));
        let first = embedded(&mut engine, &text);
        assert!(first.iter().all(|value| value.is_finite()));
        assert_ne!(first, embedded(&mut engine, &changed));
    }
}

#[test]
fn an_encoders_batch_gives_what_each_text_gives_alone() {
    for cpu in [false, true] {
        let wanted: Vec<Vec<f32>> = prompts()
            .iter()
            .map(|prompt| embedded(&mut encoder(cpu, config()), prompt))
            .collect();
        // A pass has room for a context of 160 tokens, although 32 rows are configured.
        let mut engine = encoder(cpu, config());
        let mut texts = prompts();
        texts.extend(prompts());
        let outcomes: Vec<_> = texts
            .iter()
            .map(|prompt| submit(&mut engine, &GenerationRequest::embedding(&prompt[..])))
            .collect();
        drain(&mut engine);
        for (outcome, wanted) in outcomes.iter().zip(wanted.iter().cycle()) {
            assert_eq!(outcome.lock().embedding.as_ref(), Some(wanted));
        }
    }
}

#[test]
fn the_kernels_agree_with_the_oracle() {
    let config = || EngineConfig {
        context_length: Some(512),
        ..config()
    };
    let mut texts = prompts();
    texts.push(prompt(6, 400));
    for text in texts {
        let wanted = embedded(&mut encoder(false, config()), &text);
        let found = embedded(&mut encoder(true, config()), &text);
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            products.sum()
        };
        let cosine = dot(&found, &wanted) / (dot(&found, &found) * dot(&wanted, &wanted)).sqrt();
        assert!(cosine > 0.99999, "{cosine}");
    }
}

/// Nobody trained such a model, but the experiment is allowed: rows of texts at different loops share
/// a pass, and nothing of one may reach the other.
#[test]
fn a_looped_encoder_is_the_same_in_any_company() {
    let looped = || {
        let mut backend = CpuBackend::new(Some(2)).expect("threads");
        let model = testing::tiny_encoder(&mut backend, 7);
        let plan = Plan {
            is_bidirectional: true,
            ..Plan::looped(0, 2, 0, 2, 3)
        };
        let mut model = Model { plan, ..model };
        for (layer, block) in (0..).zip(&mut model.weights.blocks) {
            let place = model.plan.kv_place(Segment::Core, layer);
            (block.qkv.kv, block.attend.kv) = (place, place);
        }
        Engine::new(EngineParts {
            backend: Box::new(backend),
            model,
            end_tokens: vec![],
            config: config(),
        })
        .expect("a small engine")
    };
    let requests: Vec<GenerationRequest> = (0..)
        .zip(prompts())
        .map(|(i, prompt)| GenerationRequest {
            loops: Some(1 + i % 3),
            ..GenerationRequest::embedding(prompt)
        })
        .collect();
    let wanted: Vec<Outcome> = requests.iter().map(|one| run(&mut looped(), one)).collect();
    let mut engine = looped();
    let mut outcomes = Vec::new();
    for request in &requests {
        outcomes.push(submit(&mut engine, request));
        step(&mut engine);
    }
    drain(&mut engine);
    for (outcome, wanted) in outcomes.iter().zip(&wanted) {
        assert_eq!(outcome.lock().embedding, wanted.embedding);
        assert!(wanted.embedding.is_some());
    }
}

#[test]
fn what_a_model_cannot_is_refused() {
    let refused = |engine: &mut Engine, request: &GenerationRequest| match run(engine, request) {
        Outcome {
            failure: Some(RequestError::Invalid(why)),
            ..
        } => why,
        other => panic!("{other:?}"),
    };
    let mut engine = encoder(true, config());
    let why = refused(&mut engine, &greedy(prompt(1, 5), 3));
    assert!(why.contains("cannot generate"), "{why}");
    let mut request = GenerationRequest::embedding(prompt(1, 161));
    let why = refused(&mut engine, &request);
    assert!(why.contains("161") && why.contains("160"), "{why}");
    request = GenerationRequest::embedding(prompt(1, 20));
    request.cache_window = 8;
    assert!(refused(&mut engine, &request).contains("windows"));
    let mut request = GenerationRequest::embedding(prompt(1, 20));
    request.max_tokens = 1;
    let why = refused(&mut engine_of(None, config()), &request);
    assert!(why.contains("no tokens to generate"), "{why}");
}
