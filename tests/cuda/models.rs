//! Tiny models through the real engine: the same greedy tokens as on the CPU, with graphs and without,
//! in a crowd of requests of different depth.

use crate::cuda;
use crate::engine_support::*;
use tinyloop::backend::Backend;
use tinyloop::backend::cpu::CpuBackend;
use tinyloop::engine::{Engine, EngineParts};
use tinyloop::model::testing;
use tinyloop::request::{GenerationRequest, TokenId};

fn engine(mut backend: Box<dyn Backend>, shape: Shape) -> Engine {
    let model = match shape {
        None => testing::tiny(backend.as_mut(), 7),
        Some(blocks) => testing::tiny_looped(backend.as_mut(), 7, blocks, 2, 4),
    };
    Engine::new(EngineParts {
        backend,
        model,
        end_tokens: vec![END],
        config: config(),
    })
    .expect("the sizes are valid")
}

/// All at once: what each of them says.
fn said(mut engine: Engine, requests: &[GenerationRequest]) -> Vec<Vec<TokenId>> {
    let outcomes: Vec<_> = requests
        .iter()
        .map(|request| submit(&mut engine, request))
        .collect();
    drain(&mut engine);
    let tokens = outcomes.iter().map(|outcome| outcome.lock().tokens.clone());
    tokens.collect()
}

fn check(shape: Shape, requests: &[GenerationRequest]) {
    let cpu = CpuBackend::new(Some(1)).expect("one thread");
    let wanted = said(engine(Box::new(cpu), shape), requests);
    assert!(wanted.iter().all(|tokens| !tokens.is_empty()));
    for graphs in [false, true] {
        let found = said(engine(Box::new(cuda(graphs)), shape), requests);
        assert_eq!(found, wanted, "{shape:?}, graphs: {graphs}");
    }
}

#[test]
fn an_ordinary_model_says_what_it_says_on_the_cpu() {
    let requests = [greedy(prompt(1, 37), 6), greedy(prompt(2, 5), 6)];
    check(None, &requests);
}

#[test]
fn a_looped_model_says_what_it_says_on_the_cpu_at_every_depth_at_once() {
    let requests: Vec<GenerationRequest> = (1..=4)
        .map(|loops| {
            let mut request = greedy(prompt(loops, 9 + loops as usize), 5);
            request.loops = Some(loops);
            request
        })
        .collect();
    check(Some((1, 2, 1)), &requests);
}
