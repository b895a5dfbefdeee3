//! Prefix reuse: a hit gives what a miss gives.

use crate::support::*;
use tinyloop::request::*;

#[test]
fn a_prefix_hit_equals_a_miss() {
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
    assert_eq!((figures.prefix_queries, figures.prefix_hits), (80, 32));
}
