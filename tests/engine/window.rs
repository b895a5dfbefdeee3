//! Attention windows: what a row sees, that the KV held stays bounded, and that nothing else than
//! the request decides the answer.

use crate::dense::Dense;
use crate::support::*;
use tinyloop::backend::CacheWindow;
use tinyloop::config::EngineConfig;
use tinyloop::engine::Engine;
use tinyloop::model::Plan;
use tinyloop::model::testing::TinyShape;
use tinyloop::request::*;

fn windowed(mut request: GenerationRequest, tokens: u32, n_kept: u32) -> GenerationRequest {
    request.cache_window = tokens;
    request.kept_tokens = n_kept;
    request
}

#[test]
fn scores_are_those_of_a_dense_model_with_a_mask() {
    let tokens = prompt(1, 90);
    for (shape, loops) in [(None, 1), (Some((1, 1, 1)), 3)] {
        let plan = match shape {
            None => TinyShape::default().plan,
            Some((prelude, core, coda)) => Plan::looped(prelude, core, coda, 2, 4),
        };
        let dense = Dense::new(
            &TinyShape {
                plan,
                ..TinyShape::default()
            },
            loops,
        );
        let full = dense.logprobs(&tokens, CacheWindow::default());
        for (tokens_seen, n_kept) in [(0, 0), (1, 0), (7, 0), (20, 32), (16, 16), (33, 48)] {
            let mut request = windowed(greedy(tokens.clone(), 0), tokens_seen, n_kept);
            request.loops = Some(loops);
            request.prompt_logprobs = Some(0);
            let mut engine = engine_of(
                shape,
                EngineConfig {
                    max_rows: 11,
                    ..config()
                },
            );
            let scores = run(&mut engine, &request).prompt_logprobs.expect("asked");
            let window = request_window(&request);
            let wanted = dense.logprobs(&tokens, window);
            assert_eq!(scores.len(), wanted.len());
            for (position, (score, wanted)) in scores.iter().zip(&wanted).enumerate() {
                let error = (f64::from(score.logprob) - wanted).abs();
                assert!(error < 2e-3, "{shape:?} {window:?} at {position}: {error}");
            }
            // The window matters, or this would show nothing.
            let largest = full.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
            let largest = largest.fold(0.0, f64::max);
            assert_eq!(largest > 0.1, tokens_seen > 0, "{window:?}: {largest}");
        }
    }
}

fn request_window(request: &GenerationRequest) -> CacheWindow {
    CacheWindow {
        tokens: request.cache_window,
        n_kept: request.kept_tokens,
    }
}

/// Steps to the end; the pages in use never exceed `pages_max`.
#[track_caller]
fn drain_within(engine: &mut Engine, pages_max: usize) {
    while !engine.is_idle() {
        step(engine);
        let used = engine.stats().snapshot().pages_used as usize;
        assert!(
            used <= pages_max,
            "{used} pages are in use, at most {pages_max}"
        );
    }
}

#[test]
fn memory_stays_bounded_over_a_ten_times_longer_generation() {
    for (shape, loops, n_groups) in [(None, 1, 1), (Some((1, 1, 1)), 3, 4)] {
        for (n_kept, prefix_cache) in [(0, true), (32, true), (16, false)] {
            let mut request = windowed(greedy(prompt(1, 40), 400), 32, n_kept);
            request.loops = Some(loops);
            request.stop.ignore_eos = true;
            // The default depth is 2 where it loops, so the pool is too small for a context.
            let small = EngineConfig {
                context_length: Some(480),
                kv_tokens: Some(160),
                cache_window: 32,
                max_rows: 16,
                prefix_cache,
                ..config()
            };
            let mut engine = engine_of(shape, small);
            let outcome = submit(&mut engine, &request);
            let blocks_max = request_window(&request).blocks_max(440, 16);
            assert!(blocks_max <= n_kept as usize / 16 + 4);
            drain_within(&mut engine, blocks_max * n_groups);
            let outcome = outcome.lock().clone();
            assert_eq!(outcome.tokens.len(), 400, "{:?}", outcome.failure);

            // The same with room for everything: nothing is evicted or waited for.
            let roomy = EngineConfig {
                context_length: Some(480),
                kv_tokens: Some(4800),
                max_rows: 480,
                max_sequences: 1,
                prefix_cache: false,
                ..config()
            };
            assert_eq!(outcome, run(&mut engine_of(shape, roomy), &request));
            // Without a window it could not run there.
            let full = windowed(request, 0, 0);
            let failure = run(&mut engine, &full).failure.expect("refused");
            assert!(failure.to_string().contains("KV pages"), "{failure}");
        }
    }
}

#[test]
fn a_long_prompt_is_computed_within_the_bound_and_found_again() {
    let request = windowed(seeded(prompt(1, 400), 12, 3), 40, 16);
    let sizes = |max_rows, kv_tokens| EngineConfig {
        context_length: Some(480),
        kv_tokens: Some(kv_tokens),
        cache_window: 40,
        max_rows,
        ..config()
    };
    let whole = run(&mut engine_of(None, sizes(480, 480)), &request);
    for max_rows in [1, 7, 16, 50] {
        let mut engine = engine_of(None, sizes(max_rows, 480));
        let miss = submit(&mut engine, &request);
        drain_within(
            &mut engine,
            request_window(&request).blocks_max(412, max_rows as usize),
        );
        assert_eq!(*miss.lock(), whole, "chunks of {max_rows}");
        // All of the prompt is cached, the window and the kept beginning are held.
        let hit = submit(&mut engine, &request);
        drain_within(&mut engine, request_window(&request).blocks_max(412, 12));
        let hit = hit.lock().clone();
        assert_eq!(hit.cached_tokens(), 399);
        assert_eq!(hit.without_cache_count(), whole);
    }
    // In the smallest pool rows enter as pages allow.
    let smallest = sizes(50, 16 * request_window(&request).blocks_max(412, 1) as u64);
    let tight = run(&mut engine_of(None, smallest), &request);
    assert_eq!(tight.without_cache_count(), whole);
}

#[test]
fn windows_share_a_small_pool_through_preemption() {
    let requests = [(1, 30, 0), (2, 17, 16), (3, 30, 32), (4, 0, 0)]
        .map(|(family, tokens, kept)| windowed(seeded(prompt(family, 60), 80, 5), tokens, kept));
    let small = EngineConfig {
        kv_tokens: Some(160),
        max_rows: 16,
        ..config()
    };
    let mut engine = engine_of(None, small);
    let outcomes = requests.each_ref().map(|r| submit(&mut engine, r));
    drain(&mut engine);
    assert!(engine.stats().snapshot().preemptions > 0);
    for (request, outcome) in requests.iter().zip(outcomes) {
        let outcome = outcome.lock().clone().without_cache_count();
        assert_eq!(outcome, alone(None, request));
    }
}

#[test]
fn a_windowed_prefix_serves_requests_of_its_window_that_keep_it() {
    let mut engine = engine_of(None, config());
    let (answer, pinned) = crossbeam_channel::bounded(1);
    let prefix = Prefix {
        id: PrefixId(1),
        tokens: prompt(1, 50).into(),
        loops: None,
        cache_window: 20,
        isolation_key: 0,
    };
    engine.pin(&prefix, answer);
    drain(&mut engine);
    assert_eq!(pinned.try_recv(), Ok(Ok(48)));
    assert_eq!(engine.stats().snapshot().pages_pinned, 3);
    for (tokens, kept, cached) in [(20, 48, 48), (20, 0, 0), (0, 0, 0), (21, 48, 0)] {
        let request = windowed(seeded(prompt(1, 70), 9, 3), tokens, kept);
        let outcome = run(&mut engine, &request);
        assert_eq!(outcome.cached_tokens(), cached, "{tokens} {kept}");
        assert_eq!(outcome.without_cache_count(), alone(None, &request));
    }
}
