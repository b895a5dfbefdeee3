//! Tests of the steps: each against what its description says, computed plainly over a full sort.

use super::*;
use crate::request::Xtc;
use proptest::prelude::*;

fn candidates(probabilities: &[f32]) -> Vec<Candidate> {
    (0..).zip(probabilities.iter().map(|p| p.ln())).collect()
}

fn ids(candidates: &[Candidate]) -> Vec<TokenId> {
    let mut ids: Vec<TokenId> = candidates.iter().map(|c| c.0).collect();
    ids.sort_unstable();
    ids
}

/// Probabilities of the candidates, by id.
fn probabilities(candidates: &[Candidate]) -> Vec<(TokenId, f64)> {
    let total: f64 = candidates.iter().map(|c| f64::from(c.1).exp()).sum();
    let of = |c: &Candidate| (c.0, f64::from(c.1).exp() / total);
    candidates.iter().map(of).collect()
}

fn after(change: impl FnOnce(&mut SamplingParams, &mut ExtraSampling)) -> Vec<TokenId> {
    let (mut params, mut extra) = (SamplingParams::default(), ExtraSampling::default());
    change(&mut params, &mut extra);
    let mut list = candidates(&[0.4, 0.3, 0.15, 0.1, 0.05]);
    take_steps(&mut list, &params, &extra, 0.5);
    ids(&list)
}

#[test]
fn every_step_keeps_what_it_should() {
    let all = [0, 1, 2, 3, 4];
    assert_eq!(after(|_, _| {}), all);
    assert_eq!(after(|p, _| p.top_k = 2), [0, 1]);
    assert_eq!(after(|p, _| p.top_p = 0.69), [0, 1]);
    assert_eq!(after(|p, _| p.top_p = 0.71), [0, 1, 2]);
    assert_eq!(after(|p, _| p.min_p = 0.3), [0, 1, 2]);
    // The entropy is 1.39 nats; surprises are 0.92, 1.20, 1.90, 2.30 and 3.00.
    assert_eq!(after(|_, e| e.typical_p = 0.2), [1]);
    assert_eq!(after(|_, e| e.typical_p = 0.5), [0, 1]);
    assert_eq!(after(|_, e| e.typical_p = 0.8), [0, 1, 2]);
    // Logits from the largest: 0, -0.29, -0.98, -1.39, -2.08; their deviation is 0.75.
    assert_eq!(after(|_, e| e.top_n_sigma = 1.0), [0, 1]);
    assert_eq!(after(|_, e| e.top_n_sigma = 2.0), [0, 1, 2, 3]);
    let xtc = |probability, threshold| {
        Some(Xtc {
            probability,
            threshold,
        })
    };
    assert_eq!(after(|_, e| e.xtc = xtc(0.6, 0.09)), [3, 4]);
    assert_eq!(after(|_, e| e.xtc = xtc(0.6, 0.2)), [1, 2, 3, 4]);
    assert_eq!(after(|_, e| e.xtc = xtc(0.6, 0.35)), all);
    assert_eq!(after(|_, e| e.xtc = xtc(0.6, 0.6)), all);
    assert_eq!(after(|_, e| e.xtc = xtc(0.5, 0.09)), all, "the coin is 0.5");
}

#[test]
fn at_least_so_many_are_kept() {
    let kept = |change: fn(&mut SamplingParams, &mut ExtraSampling)| {
        after(|params, extra| {
            extra.min_keep = 3;
            change(params, extra);
        })
    };
    assert_eq!(kept(|p, _| p.top_k = 1), [0, 1, 2]);
    assert_eq!(kept(|p, _| p.top_p = 0.1), [0, 1, 2]);
    assert_eq!(kept(|p, _| p.min_p = 1.0), [0, 1, 2]);
    assert_eq!(kept(|_, e| e.typical_p = 0.1), [0, 1, 2]);
    assert_eq!(kept(|_, e| e.top_n_sigma = 0.1), [0, 1, 2]);
    let all = [0, 1, 2, 3, 4];
    let xtc = Some(Xtc {
        probability: 1.0,
        threshold: 0.09,
    });
    let with_xtc = after(|_, e| (e.xtc, e.min_keep) = (xtc, 3));
    assert_eq!(with_xtc, all);
}

#[test]
fn the_order_counts_and_what_is_not_listed_is_not_taken() {
    // At temperature 0.5 the weights are 16, 9, 2.25, 1 and 0.25 of 28.5: 0.56 and 0.32.
    let both = |order: &[SamplerStep]| {
        after(|params, extra| {
            (params.temperature, params.top_p) = (0.5, 0.8);
            extra.order = order.to_vec();
        })
    };
    assert_eq!(both(&[SamplerStep::Temperature, SamplerStep::TopP]), [0, 1]);
    assert_eq!(
        both(&[SamplerStep::TopP, SamplerStep::Temperature]),
        [0, 1, 2]
    );
    assert_eq!(both(&[SamplerStep::Temperature]), [0, 1, 2, 3, 4]);
}

#[test]
fn a_dynamic_temperature_follows_the_entropy() {
    let params = SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    };
    let dynamic = |exponent| DynamicTemperature {
        range: 0.5,
        exponent,
    };
    let of = |probabilities: &[f32], exponent| {
        dynamic_temperature(&candidates(probabilities), 1.0, dynamic(exponent))
    };
    assert!((of(&[0.25; 4], 1.0) - 1.5).abs() < 1e-5);
    assert!((of(&[1.0, 1e-30], 1.0) - 0.5).abs() < 1e-3);
    assert_eq!(of(&[1.0], 1.0), 1.0);
    // Entropy 0.5623 of at most 0.6931 nats.
    assert!((of(&[0.75, 0.25], 1.0) - (0.5 + 0.81128)).abs() < 1e-4);
    assert!((of(&[0.75, 0.25], 2.0) - (0.5 + 0.81128 * 0.81128)).abs() < 1e-4);
    let mut list = candidates(&[0.75, 0.25]);
    heat(&mut list, &params, Some(dynamic(1.0)));
    assert!((list[0].1 - list[1].1 - 3.0_f32.ln() / 1.31128).abs() < 1e-4);
    let cold = SamplingParams::greedy();
    heat(&mut list, &cold, None);
    assert!(list.iter().all(|(_, logit)| logit.is_finite()));
}

/// Cuts in the words of the papers: `f64`, everything sorted, nothing skipped.
fn kept_plainly(list: &[Candidate], step: SamplerStep, amount: f32) -> Vec<TokenId> {
    let mut sorted = probabilities(list);
    let amount = f64::from(amount);
    let logit = |id: TokenId| f64::from(list.iter().find(|c| c.0 == id).expect("listed").1);
    let entropy: f64 = sorted.iter().map(|(_, p)| -p * p.ln()).sum();
    let by = |key: &dyn Fn(&(TokenId, f64)) -> f64, list: &mut Vec<(TokenId, f64)>| {
        list.sort_by(|a, b| key(a).total_cmp(&key(b)).then(a.0.cmp(&b.0)));
    };
    match step {
        SamplerStep::TypicalP => by(&|(_, p)| (-p.ln() - entropy).abs(), &mut sorted),
        _ => by(&|(_, p)| -p, &mut sorted),
    }
    let mut kept = Vec::new();
    let mut mass = 0.0;
    let n = sorted.len() as f64;
    let mean = sorted.iter().map(|(id, _)| logit(*id)).sum::<f64>() / n;
    let variance = sorted.iter().map(|(id, _)| (logit(*id) - mean).powi(2));
    let sigma = (variance.sum::<f64>() / n).sqrt();
    let best = sorted.iter().map(|(_, p)| *p).fold(0.0, f64::max);
    let top = list.iter().map(|c| f64::from(c.1)).fold(f64::MIN, f64::max);
    for (id, p) in &sorted {
        let stays = match step {
            SamplerStep::TypicalP | SamplerStep::TopP => mass < amount,
            SamplerStep::MinP => *p >= amount * best,
            SamplerStep::TopNSigma => logit(*id) >= top - amount * sigma,
            _ => true,
        };
        if stays || kept.is_empty() {
            kept.push(*id);
        }
        mass += p;
    }
    kept.sort_unstable();
    kept
}

proptest! {
    #[test]
    fn cuts_equal_those_of_a_full_sort(
        // Steps with an odd scale keep sums off the exact limits.
        logits in prop::collection::vec((0..200_i32).prop_map(|x| x as f32 * 0.037), 1..500),
        amount in 0.05..0.95_f32,
        step in prop::sample::select(vec![
            SamplerStep::TypicalP, SamplerStep::TopP, SamplerStep::MinP, SamplerStep::TopNSigma,
        ]),
    ) {
        let list: Vec<Candidate> = (0..).zip(logits).collect();
        let expected = kept_plainly(&list, step, amount);
        let (mut params, mut extra) = (SamplingParams::default(), ExtraSampling::default());
        match step {
            SamplerStep::TypicalP => extra.typical_p = amount,
            SamplerStep::TopP => params.top_p = amount,
            SamplerStep::MinP => params.min_p = amount,
            _ => extra.top_n_sigma = amount,
        }
        extra.order = vec![step];
        let mut kept = list.clone();
        take_steps(&mut kept, &params, &extra, 0.0);
        let kept = ids(&kept);
        // At most the last token of a set may differ, where f32 meets f64 at the limit.
        prop_assert!(kept.len().abs_diff(expected.len()) <= 1, "{:?} {:?}", kept, expected);
        let common = kept.iter().filter(|token| expected.contains(token)).count();
        prop_assert!(common + 1 >= kept.len().max(expected.len()));
    }
}
