//! Looped models of every kind in the engine: requests of different depth in one batch, chunked
//! prompts and prefix hits change nothing, on the reference and on the CPU kernels.

use crate::support::*;
use std::path::PathBuf;
use tinyloop::backend::Backend;
use tinyloop::backend::cpu::CpuBackend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::engine::{Engine, EngineParts};
use tinyloop::model::{self, Model};
use tinyloop::request::*;

pub(crate) const KINDS: [&str; 5] = ["ouro", "nanbeige", "huginn", "retrofit", "looped_llama"];

pub(crate) fn looped_engine(kind: &str, cpu: bool) -> Engine {
    looped_engine_with(kind, cpu, 1600)
}

/// `kv_tokens`: size of the pool at the model's default depth.
pub(crate) fn looped_engine_with(kind: &str, cpu: bool, kv_tokens: u64) -> Engine {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/looped");
    let file = model::open(&folder.join(kind)).expect("a sound directory");
    let mut backend: Box<dyn Backend> = match cpu {
        true => Box::new(CpuBackend::new(Some(2)).expect("threads")),
        false => Box::new(ReferenceBackend::new()),
    };
    let model = Model::load(&file, backend.as_mut(), &mut |_, _| {}).expect("a known model");
    let mut config = config();
    config.context_length = Some(96);
    config.max_rows = 16;
    config.kv_tokens = Some(kv_tokens);
    let parts = EngineParts {
        backend,
        model,
        end_tokens: vec![],
        config,
    };
    Engine::new(parts).expect("a small engine")
}

/// Prompts of which some share a prefix longer than a page, at depths 1 to 7.
fn requests() -> Vec<GenerationRequest> {
    let token = |i: u32| (i * i * 7 + i * 3 + 1) % 61;
    let cases = [
        (1, 40, 0),
        (7, 40, 0),
        (2, 3, 9),
        (7, 37, 0),
        (4, 21, 5),
        (1, 33, 0),
    ];
    cases
        .map(|(loops, n_prompt, from)| {
            let prompt: Vec<u32> = (from..from + n_prompt).map(token).collect();
            let mut request = GenerationRequest::new(prompt, 6);
            request.sampling = SamplingParams::greedy();
            request.loops = Some(loops);
            request.prompt_logprobs = Some(0);
            request
        })
        .into()
}

#[test]
fn depth_neighbours_chunks_and_the_cache_change_nothing() {
    for kind in KINDS {
        for cpu in [false, true] {
            let mut engine = looped_engine(kind, cpu);
            let running: Vec<_> = requests()
                .iter()
                .map(|request| submit(&mut engine, request))
                .collect();
            drain(&mut engine);
            let mut deep = Vec::new();
            for (request, outcome) in requests().iter().zip(running) {
                let together = outcome.lock().clone().without_cache_count();
                assert_eq!(together.tokens.len(), 6, "{kind}: {together:?}");
                let alone = run(&mut looped_engine(kind, cpu), request).without_cache_count();
                assert_eq!(
                    together, alone,
                    "{kind}, cpu {cpu}, loops {:?}",
                    request.loops
                );
                deep.push((request.loops, alone.tokens));
            }
            // The same prompt at two depths: depth matters.
            assert_ne!(deep[0].1, deep[1].1, "{kind}");
        }
    }
}

#[test]
fn a_prefix_hit_gives_what_a_fresh_computation_gives() {
    for kind in KINDS {
        let mut engine = looped_engine(kind, true);
        for request in requests() {
            let mut request = request;
            request.prompt_logprobs = None;
            let first = run(&mut engine, &request);
            let again = run(&mut engine, &request);
            if request.prompt.len() > 16 {
                assert!(again.cached_tokens() >= 16, "{kind}: {again:?}");
            }
            assert_eq!(
                first.without_cache_count(),
                again.without_cache_count(),
                "{kind}"
            );
        }
    }
}

#[test]
fn preemption_changes_nothing() {
    for kind in KINDS {
        let requests: Vec<GenerationRequest> = [(7, 10), (6, 12), (7, 9)]
            .map(|(loops, n_prompt)| {
                let prompt: Vec<u32> = (0..n_prompt).map(|i| (i * 11 + n_prompt) % 61).collect();
                let mut request = GenerationRequest::new(prompt, 50);
                request.sampling = SamplingParams::greedy();
                request.loops = Some(loops);
                request
            })
            .into();
        // Each has room alone, but all three have not.
        let mut engine = looped_engine_with(kind, true, 128);
        let running: Vec<_> = requests
            .iter()
            .map(|request| submit(&mut engine, request))
            .collect();
        drain(&mut engine);
        assert!(engine.stats().snapshot().preemptions > 0, "{kind}");
        for (request, outcome) in requests.iter().zip(running) {
            let together = outcome.lock().clone().without_cache_count();
            assert_eq!(together.tokens.len(), 50, "{kind}: {together:?}");
            let alone = run(&mut looped_engine(kind, true), request).without_cache_count();
            assert_eq!(together, alone, "{kind}");
        }
    }
}
