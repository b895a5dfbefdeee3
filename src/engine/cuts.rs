//! The rarer steps between logits and a draw, each on a list of candidates.
//!
//! Pure functions. A candidate is a token with its logit; a step drops some or changes logits. No
//! list is ever sorted whole: what a cut keeps is selected first. Equal lists give equal results in
//! equal order, so that a draw depends on nothing but logits, request and tokens.
//!
//! Where the steps come from:
//!
//! * top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024): as in `sampler`;
//! * locally typical: Meister et al. 2022, "Locally Typical Sampling", arXiv 2202.00666;
//! * top-n-sigma: Tang et al. 2024, "Top-nσ: Not All Logits Are You Need", arXiv 2411.07641;
//! * XTC: the description of its author, github.com/oobabooga/text-generation-webui/pull/6335;
//! * dynamic temperature: the README of llama-server and of KoboldCpp.
//!
//! What is not here: mirostat (`mirostat`), repetition (`dry`), the plain way (`sampler`).

use super::logits::exp_nonpositive;
use crate::request::{DynamicTemperature, ExtraSampling, SamplerStep, SamplingParams, TokenId};
use std::cmp::Ordering;

/// A token and its logit, which is finite.
pub(super) type Candidate = (TokenId, f32);

/// Largest factor that a temperature may put on logits, so that they stay finite.
const SCALE_MAX: f32 = 1e5;

/// Takes the steps of a request, mirostat aside. `coin`: a random number in `0..1` for XTC.
/// At least one candidate stays.
pub(super) fn take_steps(
    candidates: &mut Vec<Candidate>,
    params: &SamplingParams,
    extra: &ExtraSampling,
    coin: f64,
) {
    let min_keep = (extra.min_keep as usize).max(1);
    for step in &extra.order {
        match step {
            SamplerStep::TopK if params.top_k > 0 => {
                keep_top_k(candidates, (params.top_k as usize).max(min_keep));
            }
            SamplerStep::TopP if params.top_p < 1.0 => {
                keep_nucleus(candidates, params.top_p, min_keep);
            }
            SamplerStep::MinP if params.min_p > 0.0 => {
                let least = max_of(candidates) + params.min_p.min(1.0).ln();
                keep_above(candidates, least, min_keep);
            }
            SamplerStep::TypicalP if extra.typical_p < 1.0 => {
                keep_typical(candidates, extra.typical_p, min_keep);
            }
            SamplerStep::TopNSigma if extra.top_n_sigma > 0.0 => {
                let least = max_of(candidates) - extra.top_n_sigma * deviation(candidates);
                keep_above(candidates, least, min_keep);
            }
            SamplerStep::Xtc => {
                let xtc = extra.xtc.filter(|xtc| coin < f64::from(xtc.probability));
                if let Some(xtc) = xtc {
                    drop_top(candidates, xtc.threshold, min_keep);
                }
            }
            SamplerStep::Temperature => heat(candidates, params, extra.dynamic_temperature),
            SamplerStep::TopK
            | SamplerStep::TopP
            | SamplerStep::MinP
            | SamplerStep::TypicalP
            | SamplerStep::TopNSigma => {}
        }
    }
}

/// Divides by the temperature of the request, or by one that follows the entropy.
pub(super) fn heat(
    candidates: &mut [Candidate],
    params: &SamplingParams,
    dynamic: Option<DynamicTemperature>,
) {
    let temperature = match dynamic {
        None => params.temperature,
        Some(dynamic) => dynamic_temperature(candidates, params.temperature, dynamic),
    };
    let scale = (1.0 / temperature).clamp(1.0 / SCALE_MAX, SCALE_MAX);
    let max = max_of(candidates);
    for (_, logit) in candidates {
        *logit = (*logit - max) * scale; // the largest is 0, so that none overflows
    }
}

fn dynamic_temperature(
    candidates: &[Candidate],
    temperature: f32,
    dynamic: DynamicTemperature,
) -> f32 {
    if candidates.len() < 2 {
        return temperature;
    }
    let (low, high) = (
        (temperature - dynamic.range).max(0.0),
        temperature + dynamic.range,
    );
    let share = entropy(candidates, log_total(candidates)) / (candidates.len() as f64).ln();
    let share = share.clamp(0.0, 1.0).powf(f64::from(dynamic.exponent));
    low + (high - low) * share as f32
}

/// Keeps the `k` largest.
pub(super) fn keep_top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, better);
        candidates.truncate(k);
    }
}

/// Keeps what is at least `least`, or the `min_keep` largest where that is less.
pub(super) fn keep_above(candidates: &mut Vec<Candidate>, least: f32, min_keep: usize) {
    let passes = |candidate: &Candidate| candidate.1 >= least;
    let n_passing = candidates.iter().filter(|c| passes(c)).count();
    if n_passing < min_keep {
        return keep_top_k(candidates, min_keep);
    }
    candidates.retain(passes);
}

fn keep_nucleus(candidates: &mut Vec<Candidate>, top_p: f32, min_keep: usize) {
    let max = max_of(candidates);
    let target = f64::from(top_p.max(0.0)) * total(candidates, max);
    let weight = |logit: f32| f64::from(exp_nonpositive(logit - max));
    let n_kept = smallest_with(candidates, target, false, better, weight);
    keep_first(candidates, n_kept, min_keep, better);
}

/// The smallest set of tokens whose surprise is nearest to the entropy and that has the mass.
fn keep_typical(candidates: &mut Vec<Candidate>, typical_p: f32, min_keep: usize) {
    let max = max_of(candidates);
    let log_total = log_total(candidates);
    // The surprise of a logit is `log_total - logit`; it equals the entropy at this logit.
    let typical = (log_total - entropy(candidates, log_total)) as f32;
    let distance = |candidate: &Candidate| (candidate.1 - typical).abs();
    let nearer = |a: &Candidate, b: &Candidate| {
        let by_distance = distance(a).total_cmp(&distance(b));
        by_distance.then(a.0.cmp(&b.0))
    };
    let target = f64::from(typical_p.max(0.0)) * total(candidates, max);
    let weight = |logit: f32| f64::from(exp_nonpositive(logit - max));
    let n_kept = smallest_with(candidates, target, false, nearer, weight);
    keep_first(candidates, n_kept, min_keep, nearer);
}

/// Of the tokens with at least `threshold` only the least likely stays, where there are several.
fn drop_top(candidates: &mut Vec<Candidate>, threshold: f32, min_keep: usize) {
    if threshold > 0.5 {
        return;
    }
    let max = max_of(candidates);
    let least = f64::from(threshold) * total(candidates, max);
    let is_top = |candidate: &Candidate| f64::from(exp_nonpositive(candidate.1 - max)) >= least;
    let top = candidates.iter().filter(|c| is_top(c));
    let n_top = top.clone().count();
    let Some(last) = top.copied().max_by(better) else {
        return;
    };
    if candidates.len() - (n_top - 1) >= min_keep {
        candidates.retain(|candidate| !is_top(candidate) || candidate.0 == last.0);
    }
}

/// Cuts behind the first `n_kept`, which are in front, or behind the first `min_keep` by `order`.
fn keep_first(
    candidates: &mut Vec<Candidate>,
    n_kept: usize,
    min_keep: usize,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) {
    if n_kept < min_keep && min_keep < candidates.len() {
        candidates.select_nth_unstable_by(min_keep - 1, order);
    }
    candidates.truncate(n_kept.max(min_keep));
}

/// Puts the smallest set of items with at least `target` weight, taken in `order`, in front and
/// returns its size, at least 1. Sorts only as many as it needs, in growing pieces.
pub(super) fn smallest_with(
    items: &mut [(TokenId, f32)],
    target: f64,
    is_sorted: bool,
    order: impl Fn(&(TokenId, f32), &(TokenId, f32)) -> Ordering,
    weight: impl Fn(f32) -> f64,
) -> usize {
    let mut reached = 0.0;
    let mut n_sorted = 0;
    let mut piece = 64;
    while n_sorted < items.len() {
        let rest = &mut items[n_sorted..];
        let n_piece = piece.min(rest.len());
        if !is_sorted {
            if n_piece < rest.len() {
                rest.select_nth_unstable_by(n_piece - 1, &order);
            }
            rest[..n_piece].sort_unstable_by(&order);
        }
        for (index, (_, value)) in rest[..n_piece].iter().enumerate() {
            reached += weight(*value);
            if reached >= target {
                return n_sorted + index + 1;
            }
        }
        n_sorted += n_piece;
        piece *= 4;
    }
    items.len()
}

/// Larger value first, lower id first among equals.
pub(super) fn better(a: &(TokenId, f32), b: &(TokenId, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The largest logit; minus infinity of none.
pub(super) fn max_of(candidates: &[Candidate]) -> f32 {
    let logits = candidates.iter().map(|(_, logit)| *logit);
    logits.fold(f32::NEG_INFINITY, f32::max)
}

/// `Σ e^(logit - max)`
fn total(candidates: &[Candidate], max: f32) -> f64 {
    let weights = candidates
        .iter()
        .map(|(_, logit)| f64::from(exp_nonpositive(logit - max)));
    weights.sum()
}

/// `ln Σ e^logit`
pub(super) fn log_total(candidates: &[Candidate]) -> f64 {
    let max = max_of(candidates);
    f64::from(max) + total(candidates, max).ln()
}

/// Entropy in nats.
fn entropy(candidates: &[Candidate], log_total: f64) -> f64 {
    let max = max_of(candidates);
    let mean_weighted: f64 = candidates
        .iter()
        .map(|(_, logit)| f64::from(exp_nonpositive(logit - max)) * (log_total - f64::from(*logit)))
        .sum();
    mean_weighted / total(candidates, max)
}

/// Standard deviation of the logits.
fn deviation(candidates: &[Candidate]) -> f32 {
    let n = candidates.len().max(1) as f64;
    let logits = candidates.iter().map(|(_, logit)| f64::from(*logit));
    let mean = logits.clone().sum::<f64>() / n;
    let variance = logits.map(|logit| (logit - mean).powi(2)).sum::<f64>() / n;
    variance.sqrt() as f32
}

#[cfg(test)]
#[path = "cuts_tests.rs"]
mod tests;
