//! The rarer ways to choose tokens, through the whole engine: what a sequence carries from token to token
//! must not depend on its neighbours, nor be lost when it gives way to another.

use crate::support::*;
use std::sync::Arc;
use tinyloop::config::EngineConfig;
use tinyloop::constraint::TokenSet;
use tinyloop::request::*;

fn steered(family: u32) -> GenerationRequest {
    let mut extra = ExtraSampling::default();
    match family {
        0 | 1 => {
            let version = match family {
                0 => MirostatVersion::One,
                _ => MirostatVersion::Two,
            };
            extra.mirostat = Some(Mirostat {
                version,
                tau: 3.0,
                eta: 0.3,
            });
        }
        2 => {
            extra.xtc = Some(Xtc {
                probability: 0.5,
                threshold: 0.02,
            });
            extra.dynamic_temperature = Some(DynamicTemperature {
                range: 0.5,
                exponent: 1.0,
            });
        }
        _ => {
            extra.dry = Some(Dry {
                multiplier: 0.8,
                base: 1.75,
                allowed_length: 1,
                last_n: u32::MAX,
                breakers: TokenSet::of([]),
                breaker_sequences: Vec::new(),
            });
            (extra.typical_p, extra.bad_words) = (0.9, vec![vec![3], vec![4, 5]]);
        }
    }
    let mut request = seeded(prompt(family, 20), 60, u64::from(family));
    request.stop.ignore_eos = true;
    request.sampling.extra = Some(Arc::new(extra));
    request
}

#[test]
fn neither_neighbours_nor_a_preemption_change_what_is_chosen() {
    let tight = EngineConfig {
        kv_tokens: Some(160),
        ..config()
    };
    let mut engine = engine_of(None, tight);
    let requests: Vec<_> = (0..4).map(steered).collect();
    let outcomes: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
    drain(&mut engine);
    assert!(engine.stats().snapshot().preemptions > 0, "too roomy");
    for (request, outcome) in requests.iter().zip(outcomes) {
        let outcome = outcome.lock().clone().without_cache_count();
        assert_eq!(outcome, alone(None, request));
        let mut plain = request.clone();
        plain.sampling.extra = None;
        assert_ne!(
            outcome.tokens,
            alone(None, &plain).tokens,
            "it does something"
        );
    }
}

#[test]
fn rules_that_leave_nothing_are_the_requests_fault() {
    let mut request = greedy(prompt(1, 8), 4);
    let extra = ExtraSampling {
        allowed: Some(TokenSet::of([7])),
        bad_words: vec![vec![7]],
        ..ExtraSampling::default()
    };
    request.sampling.extra = Some(Arc::new(extra));
    let mut engine = engine_of(None, config());
    let outcome = run(&mut engine, &request);
    assert!(matches!(outcome.failure, Some(RequestError::Invalid(_))));
}
