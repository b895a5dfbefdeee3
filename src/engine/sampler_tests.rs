//! Tests of the sampler: tables of adjusted choices, and drawn frequencies against the distribution
//! they must have. Seeds are fixed, so nothing here is left to chance.

use super::*;
use crate::request::{Dry, Mirostat, MirostatVersion, Xtc};
use proptest::prelude::*;

fn ask(params: &SamplingParams) -> Ask<'_> {
    Ask {
        params,
        tokens: &[0],
        n_prompt: 1,
        forbidden: [&[], &[]],
        allowed: None,
        seed: 1,
        mirostat_cut: 0.0,
        logprobs: None,
    }
}

type Change = fn(&mut SamplingParams);

fn changed(mut params: SamplingParams, change: Change) -> SamplingParams {
    change(&mut params);
    params
}

fn choose(logits: &[f32], ask: &Ask<'_>) -> TokenId {
    let choice = Sampler::default().choose(logits, ask);
    choice.expect("finite logits").token
}

#[test]
fn greedy_follows_bias_penalties_and_bans() {
    let logits = [1.0, 3.0, 2.5, -1.0, 3.0];
    let tokens = [2, 1, 1, 4];
    let cases: &[(Change, TokenId)] = &[
        (|_| {}, 1),
        (|p| p.logit_bias = vec![(3, 5.0)], 3),
        (|p| p.logit_bias = vec![(1, -100.0)], 4),
        (|p| p.logit_bias = vec![(99, 100.0)], 1),
        // Token 2 is prompt, 1 1 4 are generated: 3 - 2 * 0.3 against 3 - 0.3.
        (|p| p.frequency_penalty = 0.3, 4),
        (|p| p.presence_penalty = 0.6, 2),
        (|p| p.presence_penalty = -1.0, 1),
        // All of 1, 2, 4 are halved; a window of three tokens leaves 2 alone.
        (|p| p.repetition_penalty = 2.0, 1),
        (|p| p.repetition_penalty = 4.0, 0),
        (|p| (p.repetition_penalty, p.repeat_last_n) = (2.0, 3), 2),
        (|p| (p.repetition_penalty, p.repeat_last_n) = (2.0, 0), 1),
    ];
    for (change, token) in cases {
        let params = changed(SamplingParams::greedy(), *change);
        let ask = Ask {
            tokens: &tokens,
            ..ask(&params)
        };
        assert_eq!(choose(&logits, &ask), *token, "{params:?}");
    }
    let params = SamplingParams::greedy();
    let banned = Ask {
        forbidden: [&[1, 4], &[2, 1000]],
        ..ask(&params)
    };
    assert_eq!(choose(&logits, &banned), 0);
    // A negative logit gets more negative.
    let repeated = changed(SamplingParams::greedy(), |p| p.repetition_penalty = 2.0);
    let ask = Ask {
        tokens: &[1],
        ..ask(&repeated)
    };
    assert_eq!(choose(&[-1.5, -1.0], &ask), 0);
}

#[test]
fn bad_logits_and_empty_choices_are_errors() {
    let params = SamplingParams::default();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let choice = Sampler::default().choose(&[0.0, bad], &ask(&params));
        assert_eq!(choice, Err(SampleError::NotFinite));
        let score = Sampler::default().score(&[0.0, bad], 0, 1);
        assert_eq!(score, Err(SampleError::NotFinite));
    }
    let all = Ask {
        forbidden: [&[0, 1], &[]],
        ..ask(&params)
    };
    let choice = Sampler::default().choose(&[0.0, 1.0], &all);
    assert_eq!(choice, Err(SampleError::NothingLeft));
}

#[test]
fn logprobs_are_of_the_raw_distribution() {
    let params = SamplingParams {
        logit_bias: vec![(2, 100.0)],
        ..SamplingParams::greedy()
    };
    let with_logprobs = Ask {
        logprobs: Some(2),
        ..ask(&params)
    };
    let logits = [2.0_f32.ln(), 5.0_f32.ln(), 1.0_f32.ln(), 2.0_f32.ln()];
    let choice = Sampler::default()
        .choose(&logits, &with_logprobs)
        .expect("finite");
    let logprob = choice.logprob.expect("asked for");
    assert_eq!((choice.token, logprob.token), (2, 2));
    assert!((logprob.logprob - 0.1_f32.ln()).abs() < 1e-6);
    assert_eq!(
        logprob.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        [1, 0]
    );
    assert!((logprob.top[0].1 - 0.5_f32.ln()).abs() < 1e-6);
}

#[test]
fn a_grammar_leaves_only_its_tokens_whatever_the_bias() {
    let logits = [5.0, 4.0, 3.0, 2.0];
    let set = TokenSet::from_words(vec![0b1100]);
    let none = TokenSet::from_words(Vec::new());
    let cases: &[(Change, &TokenSet, Option<TokenId>)] = &[
        (|_| {}, &set, Some(2)),
        (|p| p.logit_bias = vec![(0, 100.0)], &set, Some(2)),
        (|p| p.logit_bias = vec![(3, 2.0)], &set, Some(3)),
        (|_| {}, &none, None),
    ];
    for (change, allowed, expected) in cases {
        let params = changed(SamplingParams::greedy(), *change);
        let ask = Ask {
            allowed: Some(allowed),
            ..ask(&params)
        };
        let choice = Sampler::default().choose(&logits, &ask);
        assert_eq!(choice.ok().map(|choice| choice.token), *expected);
    }
    let params = SamplingParams::default();
    for seed in 0..100 {
        let ask = Ask {
            allowed: Some(&set),
            seed,
            ..ask(&params)
        };
        assert!(set.contains(choose(&logits, &ask)));
    }
}

/// Chi-square over `n` draws against probabilities by token; tokens of probability 0 must not come.
fn chi_square(logits: &[f32], params: &SamplingParams, expected: &[f64]) -> f64 {
    let n = 20_000_u32;
    let mut counts = vec![0_u32; logits.len()];
    let mut sampler = Sampler::default();
    for seed in 0..n {
        let ask = Ask {
            seed: u64::from(seed),
            ..ask(params)
        };
        counts[sampler.choose(logits, &ask).expect("finite").token as usize] += 1;
    }
    let terms = counts.iter().zip(expected).map(|(count, p)| {
        let mean = p * f64::from(n);
        if mean == 0.0 {
            assert_eq!(*count, 0, "a token that was cut: {counts:?}");
            return 0.0;
        }
        (f64::from(*count) - mean).powi(2) / mean
    });
    terms.sum()
}

#[test]
fn draws_have_the_distribution_they_should() {
    let logits: Vec<f32> = [8.0_f32, 1.0, 4.0, 2.0, 1.0]
        .iter()
        .map(|p| p.ln())
        .collect();
    // Probabilities in proportion to these; zeros are cut.
    let cases: &[(Change, [f64; 5])] = &[
        (|_| {}, [8.0, 1.0, 4.0, 2.0, 1.0]),
        (|p| p.temperature = 0.5, [64.0, 1.0, 16.0, 4.0, 1.0]),
        (|p| p.top_k = 2, [8.0, 0.0, 4.0, 0.0, 0.0]),
        // 8/16 + 4/16 = 0.75: slightly less keeps two tokens, slightly more takes the third.
        (|p| p.top_p = 0.74, [8.0, 0.0, 4.0, 0.0, 0.0]),
        (|p| p.top_p = 0.76, [8.0, 0.0, 4.0, 2.0, 0.0]),
        // After top-k 3 the first holds 8/14 = 0.571.
        (
            |p| (p.top_k, p.top_p) = (3, 0.57),
            [8.0, 0.0, 0.0, 0.0, 0.0],
        ),
        (|p| p.min_p = 0.2, [8.0, 0.0, 4.0, 2.0, 0.0]),
        (
            |p| (p.logit_bias, p.top_k) = (vec![(0, -1e9)], 2),
            [0.0, 0.0, 4.0, 2.0, 0.0],
        ),
    ];
    for (change, shares) in cases {
        let params = changed(SamplingParams::default(), *change);
        let total: f64 = shares.iter().sum();
        let chi_square = chi_square(&logits, &params, &shares.map(|share| share / total));
        // 99.9 % of a chi-square with 4 degrees of freedom.
        assert!(chi_square < 18.5, "{chi_square} {params:?}");
    }
}

#[test]
fn the_rarer_steps_draw_what_they_leave() {
    let logits: Vec<f32> = [8.0_f32, 4.0, 2.0, 1.0, 1.0]
        .iter()
        .map(|p| p.ln())
        .collect();
    let with = |extra: ExtraSampling, change: Change| {
        let extra = Some(std::sync::Arc::new(extra));
        let params = SamplingParams {
            extra,
            ..SamplingParams::default()
        };
        changed(params, change)
    };
    let plain = ExtraSampling::default;
    let xtc = Xtc {
        probability: 0.25,
        threshold: 0.2,
    };
    let cases: &[(SamplingParams, [f64; 5])] = &[
        (with(plain(), |_| {}), [8.0, 4.0, 2.0, 1.0, 1.0]),
        (
            with(plain(), |p| p.temperature = 0.5),
            [64.0, 16.0, 4.0, 1.0, 1.0],
        ),
        (with(plain(), |p| p.top_k = 2), [8.0, 4.0, 0.0, 0.0, 0.0]),
        (
            with(
                ExtraSampling {
                    allowed: Some(TokenSet::of([1, 3])),
                    ..plain()
                },
                |_| {},
            ),
            [0.0, 4.0, 0.0, 1.0, 0.0],
        ),
        (
            with(
                ExtraSampling {
                    bad_words: vec![vec![0], vec![2, 1]],
                    ..plain()
                },
                |_| {},
            ),
            [0.0, 4.0, 2.0, 1.0, 1.0],
        ),
        // In a quarter of the draws the best is left out: 3/4 of the first row, 1/4 of 4 2 1 1.
        (
            with(
                ExtraSampling {
                    xtc: Some(xtc),
                    ..plain()
                },
                |_| {},
            ),
            [0.375, 0.3125, 0.15625, 0.078125, 0.078125],
        ),
    ];
    for (params, shares) in cases {
        let total: f64 = shares.iter().sum();
        let chi_square = chi_square(&logits, params, &shares.map(|share| share / total));
        assert!(chi_square < 18.5, "{chi_square} {params:?}");
    }
}

#[test]
fn mirostat_tells_the_surprise_before_its_cut() {
    let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
    for version in [MirostatVersion::One, MirostatVersion::Two] {
        let mirostat = Some(Mirostat {
            version,
            tau: 1.0,
            eta: 0.1,
        });
        let extra = Some(std::sync::Arc::new(ExtraSampling {
            mirostat,
            ..ExtraSampling::default()
        }));
        let params = SamplingParams {
            extra,
            ..SamplingParams::default()
        };
        let ask = Ask {
            mirostat_cut: 0.0,
            ..ask(&params)
        };
        let choice = Sampler::default().choose(&logits, &ask).expect("finite");
        assert_eq!(choice.token, 0, "{version:?}");
        assert!((choice.surprise.expect("mirostat chose") - 1.0).abs() < 1e-5);
    }
}

#[test]
fn a_repetition_is_avoided_by_greedy_choice_too() {
    let dry = Dry {
        multiplier: 2.0,
        base: 1.75,
        allowed_length: 2,
        last_n: u32::MAX,
        breakers: TokenSet::of([]),
        breaker_sequences: Vec::new(),
    };
    let extra = Some(std::sync::Arc::new(ExtraSampling {
        dry: Some(dry),
        ..ExtraSampling::default()
    }));
    let params = SamplingParams {
        extra,
        ..SamplingParams::greedy()
    };
    let logits = [0.0, 0.0, 0.0, 1.0, 0.0];
    let after = |tokens: &[TokenId]| {
        choose(
            &logits,
            &Ask {
                tokens,
                ..ask(&params)
            },
        )
    };
    assert_eq!(after(&[4, 1, 2, 3, 0, 1, 2]), 0);
    assert_eq!(after(&[4, 1, 2, 3, 0, 0, 2]), 3);
}

#[test]
fn the_seed_and_the_place_decide_the_draw() {
    let logits = vec![0.0; 1000];
    let params = SamplingParams::default();
    let mut other_work = Sampler::default();
    let draw = |sampler: &mut Sampler, seed, n_generated: usize| {
        let tokens = vec![0; n_generated + 1];
        let ask = Ask {
            seed,
            tokens: &tokens,
            ..ask(&params)
        };
        sampler.choose(&logits, &ask).expect("finite").token
    };
    let first: Vec<TokenId> = (0..20)
        .map(|n| draw(&mut Sampler::default(), 5, n))
        .collect();
    let again: Vec<TokenId> = (0..20)
        .map(|n| {
            draw(&mut other_work, 99, n + 3);
            draw(&mut other_work, 5, n)
        })
        .collect();
    assert_eq!(first, again);
    let other: Vec<TokenId> = (0..20)
        .map(|n| draw(&mut Sampler::default(), 6, n))
        .collect();
    assert_ne!(first, other);
    let mut distinct = first;
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 15, "draws of one seed hang together");
}

/// The cuts by a full sort: which tokens may come.
fn allowed_by_sorting(logits: &[f32], params: &SamplingParams) -> Vec<TokenId> {
    let mut sorted: Vec<(TokenId, f32)> = (0..).zip(logits.iter().copied()).collect();
    sorted.sort_by(better);
    if params.top_k > 0 {
        sorted.truncate(params.top_k as usize);
    }
    let max = sorted[0].1;
    let weight = |logit: f32| f64::from((logit - max) / params.temperature).exp();
    let total: f64 = sorted.iter().map(|(_, logit)| weight(*logit)).sum();
    let mut reached = 0.0;
    let mut allowed = Vec::new();
    for (token, logit) in &sorted {
        if weight(*logit) < f64::from(params.min_p) {
            break;
        }
        allowed.push(*token);
        reached += weight(*logit);
        if params.top_p < 1.0 && reached >= f64::from(params.top_p) * total {
            break;
        }
    }
    allowed.sort_unstable();
    allowed
}

proptest! {
    #[test]
    fn cuts_equal_those_of_a_full_sort(
        // Steps of 1/8 with an odd scale keep sums off the exact limits.
        logits in prop::collection::vec((0..200_i32).prop_map(|x| x as f32 * 0.037), 1..600),
        top_k in prop_oneof![Just(0_u32), 1..300_u32],
        top_p in prop_oneof![Just(1.0_f32), 0.0..1.0_f32],
        min_p in prop_oneof![Just(0.0_f32), 0.0..0.5_f32],
        temperature in 0.3..2.0_f32,
        seed in any::<u64>(),
    ) {
        let params = SamplingParams { top_k, top_p, min_p, temperature, ..SamplingParams::default() };
        let mut sampler = Sampler::default();
        let token = sampler.choose(&logits, &Ask { seed, ..ask(&params) }).expect("finite").token;
        let allowed = allowed_by_sorting(&logits, &params);
        prop_assert!(allowed.binary_search(&token).is_ok());
        let is_cut = top_k > 1 && (top_k as usize) < logits.len() || top_k == 0 && (top_p < 1.0 || min_p > 0.0);
        if is_cut {
            let mut kept: Vec<TokenId> = sampler.survivors.iter().map(|(token, _)| *token).collect();
            kept.sort_unstable();
            // At most the last token of the nucleus may differ, where f32 meets f64 at the limit.
            prop_assert!(kept.len().abs_diff(allowed.len()) <= 1, "{:?} {:?}", kept, allowed);
            let shorter = kept.len().min(allowed.len());
            let common = kept.iter().filter(|token| allowed.contains(token)).count();
            prop_assert!(common >= shorter.saturating_sub(1));
        }
    }
}
