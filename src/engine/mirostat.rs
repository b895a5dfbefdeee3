//! Mirostat: a cut that moves after every token so that the mean surprise of the text stays at a
//! target.
//!
//! Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
//! Perplexity", arXiv 2007.14966, and version 2 as its authors published it beside the paper. The
//! surprise of a token is that under the model's distribution at the request's temperature, before
//! the cut, as in the paper (llama.cpp takes it after the cut). Pure functions; the one number that
//! goes from token to token belongs to the sequence.

use super::cuts::{Candidate, better, keep_above, keep_top_k, log_total};
use crate::request::{Mirostat, MirostatVersion};
use std::f64::consts::LN_2;

/// Likeliest tokens from which the first version estimates the exponent of Zipf's law.
const N_ESTIMATED: usize = 100;

/// The cut of a sequence without generated tokens: twice the target.
pub(super) fn first_cut(mirostat: &Mirostat) -> f32 {
    2.0 * mirostat.tau
}

/// The cut after a token of that surprise, in bits.
pub(super) fn next_cut(cut: f32, mirostat: &Mirostat, surprise: f32) -> f32 {
    cut - mirostat.eta * (surprise - mirostat.tau)
}

/// Cuts the candidates; `n_vocab` tokens the model knows. Returns `ln Σ e^logit` from before.
pub(super) fn cut(
    candidates: &mut Vec<Candidate>,
    version: MirostatVersion,
    cut: f32,
    n_vocab: usize,
) -> f64 {
    let log_total = log_total(candidates);
    match version {
        MirostatVersion::One => keep_top_k(candidates, zipf_top_k(candidates, cut, n_vocab)),
        MirostatVersion::Two => {
            let least = log_total - f64::from(cut) * LN_2;
            keep_above(candidates, least as f32, 1);
        }
    }
    log_total
}

/// Surprise of a logit in bits.
pub(super) fn surprise(logit: f32, log_total: f64) -> f32 {
    ((log_total - f64::from(logit)) / LN_2) as f32
}

/// The top-k whose surprise is the cut, if probabilities fall like a power of the rank.
fn zipf_top_k(candidates: &[Candidate], cut: f32, n_vocab: usize) -> usize {
    let mut likeliest = candidates.to_vec();
    keep_top_k(&mut likeliest, N_ESTIMATED);
    likeliest.sort_unstable_by(better);
    let (mut products, mut squares) = (0.0, 0.0);
    for (rank, pair) in (1_u32..).zip(likeliest.windows(2)) {
        let ranks = (f64::from(rank + 1) / f64::from(rank)).ln();
        products += ranks * f64::from(pair[0].1 - pair[1].1);
        squares += ranks * ranks;
    }
    let exponent = products / squares;
    let excess = exponent - 1.0;
    let mass = match excess.abs() < 1e-6 {
        true => (n_vocab as f64).ln().recip(), // the limit of the term below
        false => excess / (1.0 - (n_vocab as f64).powf(-excess)),
    };
    let k = (mass * f64::from(cut).exp2())
        .powf(exponent.recip())
        .round();
    // A flat beginning has no exponent, a single candidate neither: nothing is cut.
    match k.is_finite() && exponent > 0.0 {
        true => (k.max(1.0) as usize).min(candidates.len().max(1)),
        false => candidates.len().max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_rank(exponent: f64, n: u32) -> Vec<Candidate> {
        let logit = |rank: u32| -exponent * f64::from(rank + 1).ln();
        (0..n).map(|rank| (rank, logit(rank) as f32)).collect()
    }

    #[test]
    fn the_first_version_finds_the_rank_of_a_surprise() {
        // Under Zipf's law with exponent s over n words, p(k) = k^-s / H(n, s).
        for (exponent, cut) in [(1.2, 6.0), (1.5, 4.0), (1.01, 8.0)] {
            let n = 50_000;
            let candidates = by_rank(exponent, n);
            let k = zipf_top_k(&candidates, cut, n as usize);
            let at_k = surprise(candidates[k - 1].1, log_total(&candidates));
            // The paper replaces the sum by an integral, so it is near, not equal.
            assert!((at_k - cut).abs() < 1.5, "{exponent} {cut}: {k} {at_k}");
        }
        assert_eq!(zipf_top_k(&[(7, 1.0)], 5.0, 100), 1);
        assert_eq!(zipf_top_k(&[(7, 1.0), (8, 1.0)], 5.0, 100), 2);
    }

    #[test]
    fn the_second_version_keeps_what_is_no_more_surprising_than_the_cut() {
        // Probabilities 1/2, 1/4, 1/8, 1/8: surprises of 1, 2, 3 and 3 bits.
        let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
        for (bits, n_kept) in [(0.5, 1), (1.5, 1), (2.5, 2), (3.5, 4)] {
            let mut candidates = (0..).zip(logits).collect();
            cut(&mut candidates, MirostatVersion::Two, bits, 4);
            assert_eq!(candidates.len(), n_kept, "{bits}");
        }
    }

    #[test]
    fn the_mean_surprise_comes_to_the_target() {
        for version in [MirostatVersion::One, MirostatVersion::Two] {
            let mirostat = Mirostat {
                version,
                tau: 3.0,
                eta: 0.1,
            };
            let mut moving = first_cut(&mirostat);
            let mut sum = 0.0;
            for step in 0..2000_u32 {
                let mut candidates = by_rank(1.1, 5000);
                let log_total = cut(&mut candidates, version, moving, 5000);
                candidates.sort_unstable_by(better);
                let weights: Vec<f32> = candidates.iter().map(|c| c.1.exp()).collect();
                // A sequence that fills the unit interval evenly, in place of chance.
                let uniform = (f64::from(step) * 0.618_033_988_75).fract();
                let total = super::super::logits::sum(&weights);
                let place = super::super::logits::pick(&weights, uniform * total);
                let bits = surprise(candidates[place].1, log_total);
                moving = next_cut(moving, &mirostat, bits);
                sum += f64::from(bits);
            }
            let mean = sum / 2000.0;
            assert!((mean - 3.0).abs() < 0.1, "{version:?}: {mean}");
        }
    }
}
