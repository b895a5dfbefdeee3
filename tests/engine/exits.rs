//! Early exit: thresholds at the ends are fixed depths, rows leave where a plain implementation lets
//! them leave, and whatever else is in the batch, the chunks and the cache change nothing.

use crate::looped::{KINDS, looped_engine, looped_engine_with};
use crate::support::*;
use serde_json::Value;
use tinyloop::request::*;

/// Loops of all requests here.
const LOOPS: u32 = 7;

/// The rules that a kind knows.
fn rules(kind: &str) -> &'static [ExitRule] {
    match kind {
        "ouro" => &ExitRule::ALL,
        "nanbeige" => &[ExitRule::Kl, ExitRule::Latent],
        _ => &[ExitRule::Latent],
    }
}

/// A scored and continued prompt; those of different `n_prompt` share their beginning.
fn request(n_prompt: u32, exit: Option<(ExitRule, f32)>) -> GenerationRequest {
    let prompt: Vec<u32> = (0..n_prompt)
        .map(|i| (i * i * 7 + i * 3 + 1) % 61)
        .collect();
    let mut request = GenerationRequest::new(prompt, 6);
    request.sampling = SamplingParams::greedy();
    request.logprobs = Some(1);
    request.prompt_logprobs = Some(0);
    request.loops = Some(LOOPS);
    request.adaptive = exit.map(|(rule, threshold)| AdaptiveExit { rule, threshold });
    request
}

fn mean_loops(outcome: &Outcome) -> f64 {
    outcome.loops.iterations as f64 / outcome.loops.rows as f64
}

#[test]
fn thresholds_at_the_ends_are_fixed_depths() {
    for kind in KINDS {
        for cpu in [false, true] {
            let at_depth = |loops| {
                let mut fixed = request(40, None);
                fixed.loops = Some(loops);
                let mut outcome = run(&mut looped_engine(kind, cpu), &fixed);
                assert_eq!(mean_loops(&outcome), f64::from(loops));
                // What the request was granted is the most, not what it ran.
                let (_, usage) = outcome.finish.as_mut().expect("it finished");
                usage.loops = LOOPS;
                outcome
            };
            let (all, one, two) = (at_depth(LOOPS), at_depth(1), at_depth(2));
            assert_ne!(one.prompt_logprobs, two.prompt_logprobs);
            for rule in rules(kind) {
                let (never, always, least) = match rule {
                    ExitRule::Gate => (1.0, 0.0, &one),
                    ExitRule::Kl | ExitRule::Latent => (0.0, f32::MAX, &two),
                };
                for (threshold, wanted) in [(never, &all), (always, least)] {
                    let adaptive = request(40, Some((*rule, threshold)));
                    let mut engine = looped_engine(kind, cpu);
                    let found = run(&mut engine, &adaptive);
                    assert_eq!(found, *wanted, "{kind}, cpu {cpu}, {rule:?} {threshold}");
                    assert_eq!(mean_loops(&found), mean_loops(wanted));
                    let stats = engine.stats().snapshot();
                    let all_loops = found.loops.rows * u64::from(LOOPS);
                    assert_eq!(stats.loop_iterations, found.loops.iterations);
                    assert_eq!(
                        stats.loop_iterations + stats.loop_iterations_saved,
                        all_loops
                    );
                }
            }
        }
    }
}

#[test]
fn rows_leave_where_a_plain_implementation_lets_them_leave() {
    let folder = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let folder = folder.join("tests/data/models/looped");
    for (kind, n_cases) in [("ouro", 3), ("huginn", 1)] {
        let recorded = std::fs::read(folder.join(format!("{kind}_exit.json"))).expect("committed");
        let recorded: Value = serde_json::from_slice(&recorded).expect("JSON");
        let cases = recorded.as_array().expect("cases");
        assert_eq!(cases.len(), n_cases);
        for case in cases {
            let numbers = |name: &str| -> Vec<f64> {
                let array = case[name].as_array().expect("an array");
                array.iter().filter_map(Value::as_f64).collect()
            };
            let rule = ExitRule::parse(case["rule"].as_str().expect("a rule")).expect("known");
            let threshold = case["threshold"].as_f64().expect("a number") as f32;
            let tokens: Vec<u32> = numbers("tokens").iter().map(|n| *n as u32).collect();
            let (left, logprobs) = (numbers("left"), numbers("logprobs"));
            // Each position by itself: the loops of a prompt are those of its positions.
            let mut iterations_before = 0;
            for n_prompt in 1..=tokens.len() {
                let mut adaptive = request(1, Some((rule, threshold)));
                adaptive.prompt = tokens[..n_prompt].into();
                adaptive.max_tokens = 0;
                let found = run(&mut looped_engine(kind, false), &adaptive);
                let ran = found.loops.iterations - iterations_before;
                let wanted = left[n_prompt - 1];
                assert_eq!(ran as f64, wanted, "{kind} {rule:?} at {}", n_prompt - 1);
                iterations_before = found.loops.iterations;
                if n_prompt < tokens.len() {
                    continue;
                }
                let scores = found.prompt_logprobs.expect("asked for");
                for (position, (found, wanted)) in scores.iter().zip(&logprobs).enumerate() {
                    let error = (f64::from(found.logprob) - wanted).abs();
                    assert!(error < 1e-4, "{kind} {rule:?} at {position}: {error}");
                }
                assert_eq!(scores.len(), logprobs.len());
            }
        }
    }
}

/// Requests of every rule with thresholds between the ends, beside some of fixed depth.
fn mixed(kind: &str) -> Vec<GenerationRequest> {
    let thresholds: fn(ExitRule) -> &'static [f32] = |rule| match rule {
        ExitRule::Gate => &[0.03, 0.3],
        ExitRule::Kl => &[0.05, 0.2],
        ExitRule::Latent => &[0.2, 0.9, 1.1, 1.5],
    };
    let mut all = vec![request(40, None), request(21, None)];
    for (rule, n_prompt) in rules(kind).iter().zip([40, 37, 33]) {
        for threshold in thresholds(*rule) {
            all.push(request(n_prompt, Some((*rule, *threshold))));
        }
    }
    all
}

#[test]
fn neighbours_and_chunks_change_nothing() {
    for kind in KINDS {
        for cpu in [false, true] {
            // Chunks of at most 16 rows, shared with the others.
            let mut engine = looped_engine(kind, cpu);
            let requests = mixed(kind);
            let running: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
            drain(&mut engine);
            let mut n_between = 0;
            for (request, together) in requests.iter().zip(running) {
                let together = together.lock().clone();
                let alone = run(&mut looped_engine(kind, cpu), request);
                assert_eq!(together, alone, "{kind}, cpu {cpu}, {:?}", request.adaptive);
                assert_eq!(mean_loops(&together), mean_loops(&alone));
                let mean = mean_loops(&alone);
                let is_between = mean > 2.0 && mean < f64::from(LOOPS);
                n_between += u32::from(is_between && request.adaptive.is_some());
            }
            assert!(
                n_between > 0,
                "{kind}, cpu {cpu}: rows leave after different loops"
            );
        }
    }
}

#[test]
fn a_prefix_hit_gives_what_a_fresh_computation_gives() {
    for kind in KINDS {
        let mut engine = looped_engine(kind, true);
        for request in mixed(kind) {
            let mut request = request;
            request.prompt_logprobs = None;
            let first = run(&mut engine, &request);
            let again = run(&mut engine, &request);
            assert!(again.cached_tokens() >= 16, "{kind}: {again:?}");
            // The cache has only what the same rule at the same threshold computed.
            let mut fresh = looped_engine(kind, true);
            let wanted = run(&mut fresh, &request);
            assert_eq!(first.clone().without_cache_count(), wanted, "{kind}");
            assert_eq!(again.without_cache_count(), wanted, "{kind}");
        }
    }
}

#[test]
fn preemption_changes_nothing_and_is_not_counted() {
    for kind in KINDS {
        // Each has room alone, but all three have not.
        let mut engine = looped_engine_with(kind, true, 128);
        // About where most rows leave; all are equally fast, so that their needs meet.
        let threshold = if kind == "ouro" { 0.3 } else { 0.9 };
        let requests: Vec<GenerationRequest> = [10, 12, 9]
            .map(|n_prompt| {
                let mut request = request(n_prompt, Some((ExitRule::Latent, threshold)));
                request.max_tokens = 50;
                // Distinct prompts: what one computes is of no use to another.
                request.isolation_key = u64::from(n_prompt);
                request
            })
            .into();
        let running: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
        drain(&mut engine);
        assert!(engine.stats().snapshot().preemptions > 0, "{kind}");
        for (request, outcome) in requests.iter().zip(running) {
            let together = outcome.lock().clone();
            assert_eq!(together.tokens.len(), 50, "{kind}: {together:?}");
            let alone = run(&mut looped_engine(kind, true), request);
            assert_eq!(together, alone, "{kind}");
            assert_eq!(together.loops.rows, alone.loops.rows);
            assert_eq!(together.loops.iterations, alone.loops.iterations);
        }
    }
}

#[test]
fn rules_that_a_model_does_not_know_are_refused() {
    for (kind, rule, threshold, words) in [
        (
            "huginn",
            ExitRule::Gate,
            0.5,
            "no exit gate); it knows: latent",
        ),
        ("huginn", ExitRule::Kl, 0.5, "layers after the loop"),
        ("nanbeige", ExitRule::Gate, 0.5, "it knows: kl, latent"),
        ("ouro", ExitRule::Gate, 1.5, "within 0..=1"),
        ("ouro", ExitRule::Latent, -0.1, "at least 0"),
    ] {
        let outcome = run(
            &mut looped_engine(kind, false),
            &request(9, Some((rule, threshold))),
        );
        let Some(RequestError::Invalid(reason)) = outcome.failure else {
            panic!("{kind} took {rule:?}");
        };
        assert!(reason.contains(words), "{reason}");
    }
    let plain = greedy(prompt(0, 9), 1);
    let adaptive = GenerationRequest {
        adaptive: Some(AdaptiveExit {
            rule: ExitRule::Latent,
            threshold: 0.1,
        }),
        ..plain
    };
    let outcome = run(&mut engine_of(None, config()), &adaptive);
    let Some(RequestError::Invalid(reason)) = outcome.failure else {
        panic!("an ordinary model took it");
    };
    assert!(reason.contains("does not loop"), "{reason}");
}
