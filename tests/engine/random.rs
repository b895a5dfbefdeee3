//! Random runs: whatever happens around a sequence, its answer stays the same.

use crate::support::*;
use proptest::prelude::*;
use tinyloop::config::EngineConfig;
use tinyloop::request::*;

/// A job of a random run.
#[derive(Clone, Debug)]
struct Plan {
    request: GenerationRequest,
    /// Steps before it is submitted, and before it is cancelled.
    start: usize,
    cancel: Option<usize>,
    /// Steps before it is parked, and before it is resumed.
    park: Option<(usize, usize)>,
}

/// A prefix that is pinned for a while.
#[derive(Clone, Debug)]
struct Pin {
    prefix: Prefix,
    start: usize,
    stop: usize,
}

fn pins() -> impl Strategy<Value = Vec<Pin>> {
    let one = (
        0..3_u32,
        16..80_usize,
        0..30_usize,
        0..60_usize,
        any::<u64>(),
        prop_oneof![2 => Just(0), 1 => Just(7), 2 => Just(40)],
    );
    let pin = one.prop_map(|(family, n, start, length, id, cache_window)| Pin {
        prefix: Prefix {
            id: PrefixId(u128::from(id)),
            tokens: prompt(family, n).into(),
            loops: None,
            cache_window,
            isolation_key: 0,
        },
        start,
        stop: start + length,
    });
    prop::collection::vec(pin, 0..3)
}

/// Window and kept tokens: few different ones, so that sequences and pins share.
fn window() -> impl Strategy<Value = (u32, u32)> {
    prop_oneof![
        4 => Just((0, 0)),
        1 => Just((7, 0)),
        1 => Just((7, 16)),
        1 => Just((40, 0)),
        2 => Just((40, 32)),
    ]
}

fn plans(max_loops: u32) -> impl Strategy<Value = Vec<Plan>> {
    let one = (
        (0..3_u32, 1..80_usize, 0..14_u32),
        prop::option::of(0..u64::MAX),
        1..=max_loops,
        (0..30_usize, prop::option::weighted(0.25, 0..30_usize)),
        prop::option::weighted(0.25, (0..30_usize, 0..20_usize)),
        prop::option::weighted(0.2, Just(1)),
        (prop::option::weighted(0.4, 0.0..1.0_f32), window()),
    );
    let plan = one.prop_map(
        move |((family, n, max_tokens), seed, loops, (start, cancel), park, scores, more)| {
            let (exit, window) = more;
            let mut request = match seed {
                Some(seed) => seeded(prompt(family, n), max_tokens, seed),
                None => greedy(prompt(family, n), max_tokens),
            };
            request.loops = (loops > 1).then_some(loops);
            request.prompt_logprobs = scores;
            // Only looped models have anything to leave.
            let exit = exit.filter(|_| max_loops > 1);
            request.adaptive = exit.map(|threshold| AdaptiveExit {
                rule: ExitRule::Latent,
                threshold,
            });
            request.cache_window = window.0;
            request.kept_tokens = window.1.min(n as u32 / 16 * 16);
            Plan {
                request,
                start,
                cancel: cancel.map(|after| start + after),
                park: park.map(|(after, pause)| (start + after, start + after + pause)),
            }
        },
    );
    prop::collection::vec(plan, 1..7)
}

/// Runs the plans together, checking the books after every quantum, and compares with alone.
fn check_plans(
    shape: Shape,
    config: EngineConfig,
    plans: &[Plan],
    pins: &[Pin],
) -> Result<(), TestCaseError> {
    let mut engine = engine_of(shape, config);
    let mut outcomes = vec![None; plans.len()];
    let mut now = 0;
    while now <= 90 || !engine.is_idle() {
        for (plan, outcome) in plans.iter().zip(&mut outcomes) {
            if plan.start == now {
                *outcome = Some(submit(&mut engine, &plan.request));
            }
            if plan.cancel == Some(now) {
                engine.cancel(plan.request.id);
            }
            if plan.park.is_some_and(|(park, _)| park == now) {
                engine.park(plan.request.id);
            }
            if plan.park.is_some_and(|(_, resume)| resume == now) {
                engine.resume(plan.request.id);
            }
        }
        for pin in pins {
            if pin.start == now {
                let (answer, _) = crossbeam_channel::bounded(1);
                engine.pin(&pin.prefix, answer);
            }
            if pin.stop == now {
                engine.unpin(pin.prefix.id);
            }
        }
        step(&mut engine);
        now += 1;
        prop_assert!(now < 20_000, "the engine makes no progress");
    }
    let figures = engine.stats().snapshot();
    prop_assert_eq!((figures.pages_used, figures.pages_pinned), (0, 0));
    for (plan, outcome) in plans.iter().zip(outcomes) {
        let outcome = outcome.expect("all were submitted").lock().clone();
        let expected = alone(shape, &plan.request);
        if outcome.failure == Some(RequestError::Cancelled) {
            prop_assert!(plan.cancel.is_some());
            prop_assert!(expected.tokens.starts_with(&outcome.tokens));
        } else {
            prop_assert_eq!(outcome.without_cache_count(), expected);
        }
    }
    Ok(())
}

fn sizes() -> impl Strategy<Value = EngineConfig> {
    (1..6_u32, 1..50_u32, 160..700_u64, any::<bool>()).prop_map(
        |(max_sequences, max_rows, kv_tokens, prefix_cache)| EngineConfig {
            max_sequences,
            max_rows,
            kv_tokens: Some(kv_tokens),
            prefix_cache,
            ..config()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn neighbours_chunks_parks_pins_and_cancels_change_nothing(
        config in sizes(),
        plans in plans(1),
        pins in pins(),
    ) {
        check_plans(None, config, &plans, &pins)?;
    }

    #[test]
    fn neighbours_of_other_depths_change_nothing(
        config in sizes(),
        plans in plans(4),
        pins in pins(),
        blocks in prop_oneof![Just((0, 2, 0)), Just((1, 1, 1)), Just((1, 2, 0)), Just((0, 1, 1))],
    ) {
        // Counted at the default depth of 2; 4 loops need up to twice as many pages.
        let config = EngineConfig { kv_tokens: config.kv_tokens.map(|n| n * 2), ..config };
        check_plans(Some(blocks), config, &plans, &pins)?;
    }
}
