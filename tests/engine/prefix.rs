//! Prefix reuse: a hit gives what a miss gives.

use crate::support::*;
use crossbeam_channel::{Receiver, bounded};
use tinyloop::config::EngineConfig;
use tinyloop::engine::Engine;
use tinyloop::request::*;

#[test]
fn case_23_a_prefix_hit_equals_a_miss() {
    for n_prompt in [15, 16, 17, 48, 49, 64] {
        let mut engine = engine_of(None, config());
        let request = seeded(prompt(1, n_prompt), 8, 3);
        let miss = run(&mut engine, &request);
        let hit = run(&mut engine, &request);
        assert_eq!(miss.cached_tokens(), 0);
        // A prompt of whole blocks reuses all but its last row, on a copy of the last block.
        let reused = if n_prompt % 16 == 0 {
            n_prompt - 1
        } else {
            n_prompt / 16 * 16
        };
        assert_eq!(hit.cached_tokens() as usize, reused, "{n_prompt}");
        assert_eq!(miss.clone(), hit.without_cache_count());
        assert_eq!(miss, alone(None, &request));

        // Another key sees nothing of it, and who asks for no reuse gets none.
        let mut other = request.clone();
        other.isolation_key = 1;
        assert_eq!(run(&mut engine, &other), miss);
        let mut fresh = request.clone();
        fresh.reuse_prefix = false;
        assert_eq!(run(&mut engine, &fresh), miss);
    }
}

#[test]
fn generated_tokens_are_reused_as_the_next_prompt() {
    let mut engine = engine_of(None, config());
    let first = run(&mut engine, &greedy(prompt(1, 20), 30));
    let mut turns = prompt(1, 20);
    turns.extend(&first.tokens);
    turns.push(5);
    let second = greedy(turns, 4);
    let outcome = run(&mut engine, &second);
    assert_eq!(outcome.cached_tokens(), 48);
    assert_eq!(outcome.without_cache_count(), alone(None, &second));
}

#[test]
fn a_prompt_alone_warms_the_cache() {
    let mut engine = engine_of(None, config());
    let warmed = run(&mut engine, &greedy(prompt(1, 40), 0));
    assert_eq!(warmed.finish.expect("it finished").0, FinishReason::Length);
    assert_eq!(
        run(&mut engine, &greedy(prompt(1, 40), 2)).cached_tokens(),
        32
    );
    let figures = engine.stats().snapshot();
    assert_eq!((figures.prefix_queries, figures.prefix_hits), (2, 1));
}

fn prefix(id: u128, tokens: Vec<TokenId>) -> Prefix {
    Prefix {
        id: PrefixId(id),
        tokens: tokens.into(),
        loops: None,
        cache_window: 0,
        isolation_key: 0,
    }
}

fn pin(engine: &mut Engine, prefix: &Prefix) -> Receiver<Result<u32, PinError>> {
    let (answer, receiver) = bounded(1);
    engine.pin(prefix, answer);
    receiver
}

/// Ten pages, of which one context of 64 tokens takes four: half of them may be pinned.
fn tight() -> EngineConfig {
    EngineConfig {
        context_length: Some(64),
        kv_tokens: Some(160),
        ..config()
    }
}

#[test]
fn another_depth_or_key_never_hits() {
    let shape = Some((0, 2, 0));
    let mut engine = engine_of(shape, config());
    let request = seeded(prompt(1, 48), 6, 3);
    let ask = |loops, isolation_key| {
        let mut request = request.clone();
        request.loops = loops;
        request.isolation_key = isolation_key;
        request
    };
    let pinned = pin(&mut engine, &prefix(1, prompt(1, 48)));
    drain(&mut engine);
    assert_eq!(pinned.recv(), Ok(Ok(48)));
    // The model's default is 2 loops: named or not, they are the same.
    for (loops, key, cached) in [
        (None, 0, 47),
        (Some(2), 0, 47),
        (Some(3), 0, 0),
        (None, 9, 0),
    ] {
        let asked = ask(loops, key);
        let outcome = run(&mut engine, &asked);
        assert_eq!(outcome.cached_tokens(), cached, "{loops:?} {key}");
        assert_eq!(outcome.without_cache_count(), alone(shape, &asked));
    }
}

#[test]
fn a_pinned_prefix_stays_while_others_come_and_go() {
    for is_cached in [false, true] {
        let mut engine = engine_of(None, tight());
        if is_cached {
            run(&mut engine, &greedy(prompt(1, 40), 1));
        }
        let answer = pin(&mut engine, &prefix(1, prompt(1, 40)));
        assert_eq!(
            engine.is_idle(),
            is_cached,
            "what is missing is computed first"
        );
        drain(&mut engine);
        // Only whole blocks.
        assert_eq!(answer.try_recv(), Ok(Ok(32)));
        let figures = engine.stats().snapshot();
        assert_eq!((figures.pages_used, figures.pages_pinned), (0, 2));
        let n_asked = u64::from(is_cached);
        assert_eq!(
            figures.prefix_queries, n_asked,
            "a pin is no client's lookup"
        );

        for family in 10..16 {
            let mut other = seeded(prompt(family, 60), 4, 1);
            other.isolation_key = u64::from(family);
            assert_eq!(run(&mut engine, &other), alone(None, &other));
        }
        let request = seeded(prompt(1, 45), 8, 3);
        let hit = run(&mut engine, &request);
        assert_eq!(hit.cached_tokens(), 32);
        assert_eq!(hit.without_cache_count(), alone(None, &request));

        engine.unpin(PrefixId(1));
        engine.check_integrity().expect("the books are right");
        assert_eq!(engine.stats().snapshot().pages_pinned, 0);
        assert_eq!(
            run(&mut engine, &request).cached_tokens(),
            32,
            "still in the cache"
        );
        for family in 10..16 {
            let mut other = greedy(prompt(family, 60), 4);
            other.isolation_key = u64::from(family);
            run(&mut engine, &other);
        }
        assert_eq!(
            run(&mut engine, &request).cached_tokens(),
            0,
            "evicted like any other"
        );
    }
}

#[test]
fn pins_are_refused_with_a_reason() {
    let mut engine = engine_of(None, tight());
    let refused = |engine: &mut Engine, prefix: &Prefix| {
        let answer = pin(engine, prefix).try_recv().expect("answered at once");
        answer.expect_err("refused").to_string()
    };
    let short = refused(&mut engine, &prefix(1, prompt(1, 15)));
    assert!(
        short.contains("15 tokens") && short.contains("16"),
        "{short}"
    );
    let long = refused(&mut engine, &prefix(1, prompt(1, 80)));
    assert!(long.contains("context length of 64"), "{long}");

    let first = pin(&mut engine, &prefix(1, prompt(1, 48)));
    drain(&mut engine);
    assert_eq!(first.try_recv(), Ok(Ok(48)));
    let mut second = prefix(2, prompt(2, 64));
    second.isolation_key = 1;
    let full = refused(&mut engine, &second);
    assert!(
        full.contains("needs 4 KV pages") && full.contains("3 of the 5"),
        "{full}"
    );
    // What the first one keeps needs no further pages.
    second.isolation_key = 0;
    let shared = pin(&mut engine, &second);
    drain(&mut engine);
    assert_eq!(shared.try_recv(), Ok(Ok(64)));
    assert_eq!(engine.stats().snapshot().pages_pinned, 5);
    // The longest context still runs.
    let mut longest = greedy(prompt(3, 40), 24);
    longest.isolation_key = 7;
    assert_eq!(run(&mut engine, &longest), alone(None, &longest));

    let mut off = engine_of(
        None,
        EngineConfig {
            prefix_cache: false,
            ..tight()
        },
    );
    assert!(refused(&mut off, &prefix(1, prompt(1, 32))).contains("keeps no prefixes"));
}

#[test]
fn ending_a_pin_ends_its_computation_and_so_does_the_end() {
    let mut engine = engine_of(
        None,
        EngineConfig {
            max_rows: 10,
            max_sequences: 1,
            ..config()
        },
    );
    let running = pin(&mut engine, &prefix(1, prompt(1, 80)));
    let waiting = pin(&mut engine, &prefix(2, prompt(2, 80)));
    let last = pin(&mut engine, &prefix(3, prompt(3, 80)));
    step(&mut engine);
    for (id, answer) in [(1, running), (2, waiting)] {
        engine.unpin(PrefixId(id));
        engine.check_integrity().expect("the books are right");
        assert!(answer.recv().is_err(), "closed without an answer");
    }
    assert!(!engine.is_idle());
    engine.fail_all(&RequestError::ShuttingDown);
    assert!(last.recv().is_err());
    assert_eq!(engine.stats().snapshot().pages_used, 0);
}
