//! The sampler: from one row of logits to one token.
//!
//! Pure over its arguments; the struct holds scratch only, so the choice depends on nothing but the
//! logits, the request and the tokens so far, never on the batch. Randomness is a counter: a number
//! is a function of the request's seed and of how many tokens were generated before.
//!
//! Order of the steps (log-probabilities are of the raw logits, before all of them):
//!
//! ```text
//! logit bias ─► repetition, presence, frequency ─► forbidden tokens, grammar ─► temperature
//!            ─► top-k ─► top-p (of what top-k left) ─► min-p (relative to the best) ─► draw
//! ```
//!
//! A request with [`ExtraSampling`] goes another way from the adjusted logits on: through its own order
//! of steps (`cuts`), or through `mirostat`. Of it all others see one test of a pointer per token.
//!
//! No full sort of the vocabulary anywhere: cuts first drop what provably cannot pass, and only the
//! survivors are ordered, as far as needed. Greedy choice is a scan; ties go to the lowest id.

use super::cuts::{better, heat, max_of as max_logit, smallest_with, take_steps};
use super::logits::{
    BLOCK, all_finite, argmax, best, exp_nonpositive, log_sum_exp, max_of, pick, sum, weigh,
};
use super::{dry, mirostat};
use crate::constraint::TokenSet;
use crate::request::{ExtraSampling, SamplingParams, TokenId, TokenLogprob};

/// Below this a temperature is greedy: dividing by it would overflow.
const GREEDY_TEMPERATURE: f32 = 1e-5;
/// Sets the draws of a request's XTC apart from those of its tokens.
const XTC_SALT: u64 = 0x5854_4320_636f_696e;
/// Up to this many, the top-k are kept in order while scanning.
const SMALL_K: usize = 128;

/// What to choose from a row of logits.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// How.
    pub params: &'a SamplingParams,
    /// The sequence so far, prompt first.
    pub tokens: &'a [TokenId],
    /// How many of `tokens` are prompt.
    pub n_prompt: usize,
    /// Tokens that may not be chosen now.
    pub forbidden: [&'a [TokenId]; 2],
    /// The only tokens that may be chosen now; None = all.
    pub allowed: Option<&'a TokenSet>,
    /// The request's seed.
    pub seed: u64,
    /// Where mirostat cuts, in bits; of no meaning without it.
    pub mirostat_cut: f32,
    /// Some(n): report the log-probability and the n likeliest.
    pub logprobs: Option<u32>,
}

/// The chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// It.
    pub token: TokenId,
    /// Present when asked.
    pub logprob: Option<TokenLogprob>,
    /// How surprising it is, in bits, where mirostat chose it.
    pub surprise: Option<f32>,
}

/// Why nothing could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The model computed NaN or infinity.
    #[error("the model computed logits that are not finite numbers")]
    NotFinite,
    /// Bias, forbidden and allowed tokens and grammar left nothing to choose from.
    #[error(
        "logit_bias, bad_words, allowed_token_ids and the answer's form leave no token to choose"
    )]
    NothingLeft,
}

/// Scratch of the sampler; one per engine.
#[derive(Debug, Default)]
pub struct Sampler {
    /// (vocab_size) logits after bias and penalties.
    adjusted: Vec<f32>,
    /// (vocab_size) unnormalized probabilities.
    weights: Vec<f32>,
    /// Tokens that passed the cuts, with their logit or weight.
    survivors: Vec<(TokenId, f32)>,
    /// (vocab_size) the round in which a token was last met by a penalty.
    met: Vec<u32>,
    round: u32,
}

impl Sampler {
    /// Chooses the next token from logits `(vocab_size)`.
    ///
    /// # Errors
    /// See [`SampleError`]; only this request is concerned.
    pub fn choose(&mut self, logits: &[f32], ask: &Ask<'_>) -> Result<Choice, SampleError> {
        if !all_finite(logits) {
            return Err(SampleError::NotFinite);
        }
        let (token, surprise) = if is_plain(ask) {
            (self.draw(logits, ask)?, None)
        } else {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(&mut adjusted, ask);
            let drawn = match &ask.params.extra {
                None => self.draw(&adjusted, ask).map(|token| (token, None)),
                Some(extra) => self.draw_by_steps(&adjusted, ask, extra),
            };
            self.adjusted = adjusted;
            drawn?
        };
        let logprob = ask.logprobs.map(|n_top| logprob(logits, token, n_top));
        Ok(Choice {
            token,
            logprob,
            surprise,
        })
    }

    /// The log-probability of a token that stands there already (prompt scoring).
    ///
    /// # Errors
    /// `NotFinite`.
    pub fn score(
        &self,
        logits: &[f32],
        token: TokenId,
        n_top: u32,
    ) -> Result<TokenLogprob, SampleError> {
        match all_finite(logits) {
            true => Ok(logprob(logits, token, n_top)),
            false => Err(SampleError::NotFinite),
        }
    }

    /// Bias, penalties and forbidden tokens.
    fn adjust(&mut self, logits: &mut [f32], ask: &Ask<'_>) {
        let params = ask.params;
        for (token, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if params.repetition_penalty != 1.0 {
            let window = (params.repeat_last_n as usize).min(ask.tokens.len());
            self.next_round(logits.len());
            for token in &ask.tokens[ask.tokens.len() - window..] {
                if self.meets_first(*token) {
                    let logit = &mut logits[*token as usize];
                    let penalty = params.repetition_penalty;
                    // Both ways make the token less likely.
                    *logit = if *logit > 0.0 {
                        *logit / penalty
                    } else {
                        *logit * penalty
                    };
                }
            }
        }
        if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
            self.next_round(logits.len());
            for token in &ask.tokens[ask.n_prompt..] {
                let logit = &mut logits[*token as usize];
                *logit -= params.frequency_penalty;
                if self.meets_first(*token) {
                    *logit -= params.presence_penalty;
                }
            }
        }
        if let Some(extra) = &params.extra {
            adjust_by_extra(logits, ask, extra);
        }
        for token in ask.forbidden.iter().copied().flatten() {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        if let Some(allowed) = ask.allowed {
            allowed.keep_only(logits);
        }
    }

    fn next_round(&mut self, vocab_size: usize) {
        self.met.resize(vocab_size, 0);
        if self.round == u32::MAX {
            self.met.fill(0);
            self.round = 0;
        }
        self.round += 1;
    }

    fn meets_first(&mut self, token: TokenId) -> bool {
        std::mem::replace(&mut self.met[token as usize], self.round) != self.round
    }

    /// Chooses from adjusted logits, of which some may be -inf.
    fn draw(&mut self, logits: &[f32], ask: &Ask<'_>) -> Result<TokenId, SampleError> {
        let params = ask.params;
        let (likeliest, max) = argmax(logits);
        if !max.is_finite() {
            return Err(SampleError::NothingLeft);
        }
        let is_greedy = params.temperature.is_nan() || params.temperature < GREEDY_TEMPERATURE;
        if is_greedy || params.top_k == 1 {
            return Ok(likeliest as TokenId);
        }
        let uniform = uniform(ask.seed, (ask.tokens.len() - ask.n_prompt) as u64);
        // Bounded, so that a forbidden token (-inf) keeps its weight of 0.
        let scale = 1.0 / params.temperature.min(1e6);
        let k = match params.top_k as usize {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        if k == logits.len() && params.top_p >= 1.0 && params.min_p <= 0.0 {
            let total = weigh(logits, max, scale, &mut self.weights);
            return Ok(pick(&self.weights, uniform * total) as TokenId);
        }
        let is_cut_to_k = k < logits.len();
        let total = if is_cut_to_k {
            self.keep_top_k(logits, k);
            self.weigh_survivors(max, scale)
        } else {
            let total = weigh(logits, max, scale, &mut self.weights);
            self.keep_likely(params, total);
            total
        };
        self.keep_nucleus(params, total, is_cut_to_k);
        self.weights.clear();
        let kept = self.survivors.iter().map(|(_, weight)| *weight);
        self.weights.extend(kept);
        let place = pick(&self.weights, uniform * sum(&self.weights));
        Ok(self.survivors[place].0)
    }

    /// Chooses from adjusted logits by the request's own order of steps; also its surprise.
    fn draw_by_steps(
        &mut self,
        logits: &[f32],
        ask: &Ask<'_>,
        extra: &ExtraSampling,
    ) -> Result<(TokenId, Option<f32>), SampleError> {
        let params = ask.params;
        let (likeliest, max) = argmax(logits);
        if !max.is_finite() {
            return Err(SampleError::NothingLeft);
        }
        let is_cold = params.temperature.is_nan() || params.temperature < GREEDY_TEMPERATURE;
        if is_cold && extra.dynamic_temperature.is_none() {
            return Ok((likeliest as TokenId, None));
        }
        let counter = (ask.tokens.len() - ask.n_prompt) as u64;
        let uniform_of = |salt| uniform(ask.seed ^ salt, counter);
        let mut candidates = std::mem::take(&mut self.survivors);
        candidates.clear();
        let allowed = (0..).zip(logits.iter().copied());
        candidates.extend(allowed.filter(|(_, logit)| logit.is_finite()));
        let log_total = match &extra.mirostat {
            None => {
                let coin = extra.xtc.map_or(1.0, |_| uniform_of(XTC_SALT));
                take_steps(&mut candidates, params, extra, coin);
                None
            }
            Some(steered) => {
                heat(&mut candidates, params, extra.dynamic_temperature);
                let (version, at) = (steered.version, ask.mirostat_cut);
                Some(mirostat::cut(&mut candidates, version, at, logits.len()))
            }
        };
        let max = max_logit(&candidates);
        self.weights.clear();
        let weights = candidates
            .iter()
            .map(|(_, logit)| exp_nonpositive(logit - max));
        self.weights.extend(weights);
        let place = pick(&self.weights, uniform_of(0) * sum(&self.weights));
        let (token, logit) = candidates[place];
        self.survivors = candidates;
        Ok((
            token,
            log_total.map(|total| mirostat::surprise(logit, total)),
        ))
    }

    /// Turns the survivors' logits into weights; returns their sum.
    fn weigh_survivors(&mut self, max: f32, scale: f32) -> f64 {
        let mut total = 0.0;
        for (_, value) in &mut self.survivors {
            *value = exp_nonpositive((*value - max) * scale);
            total += f64::from(*value);
        }
        total
    }

    /// Survivors := the k largest logits, largest first.
    fn keep_top_k(&mut self, logits: &[f32], k: usize) {
        self.survivors.clear();
        if k <= SMALL_K {
            self.survivors.extend(best(logits, k));
            return;
        }
        self.survivors.extend((0..).zip(logits.iter().copied()));
        self.survivors.select_nth_unstable_by(k - 1, better);
        self.survivors.truncate(k);
        self.survivors.sort_unstable_by(better);
    }

    /// Survivors := all tokens that top-p and min-p may keep, in the order of ids. All weights below
    /// `(1 - top_p) * total / n` together are less than what the nucleus leaves out.
    fn keep_likely(&mut self, params: &SamplingParams, total: f64) {
        let spare = f64::from(1.0 - params.top_p.clamp(0.0, 1.0));
        // Somewhat less than the bound, for the rounding of the sum.
        let least_p = (0.999 * spare * total / self.weights.len() as f64) as f32;
        let least = least_p.max(params.min_p).min(1.0);
        self.survivors.clear();
        for (block_index, block) in self.weights.chunks(BLOCK).enumerate() {
            if max_of(block) < least {
                continue;
            }
            for (offset, weight) in block.iter().enumerate() {
                if *weight >= least && *weight > 0.0 {
                    let token = (block_index * BLOCK + offset) as TokenId;
                    self.survivors.push((token, *weight));
                }
            }
        }
    }

    /// Cuts the survivors to the nucleus and to min-p. `total` is the weight of all that top-k left.
    fn keep_nucleus(&mut self, params: &SamplingParams, total: f64, is_sorted: bool) {
        if params.top_p < 1.0 {
            let target = f64::from(params.top_p.max(0.0)) * total;
            let survivors = &mut self.survivors;
            let n_kept = smallest_with(survivors, target, is_sorted, better, f64::from);
            self.survivors.truncate(n_kept);
        }
        // The best token has weight 1, so min-p is a weight.
        let min_p = params.min_p.min(1.0);
        self.survivors.retain(|(_, weight)| *weight >= min_p);
    }
}

/// What [`ExtraSampling`] does to logits before anything is cut.
fn adjust_by_extra(logits: &mut [f32], ask: &Ask<'_>, extra: &ExtraSampling) {
    if let Some(dry) = &extra.dry {
        for (token, penalty) in dry::penalties(ask.tokens, dry) {
            logits[token as usize] -= penalty;
        }
    }
    let generated = &ask.tokens[ask.n_prompt..];
    for token in dry::ends_in_bad_word(generated, &extra.bad_words) {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    if let Some(allowed) = &extra.allowed {
        allowed.keep_only(logits);
    }
}

/// Whether the logits are used as they are.
fn is_plain(ask: &Ask<'_>) -> bool {
    let params = ask.params;
    params.extra.is_none()
        && params.logit_bias.is_empty()
        && params.repetition_penalty == 1.0
        && params.presence_penalty == 0.0
        && params.frequency_penalty == 0.0
        && ask.forbidden.iter().all(|tokens| tokens.is_empty())
        && ask.allowed.is_none()
}

/// Log-probability under the raw distribution, with the `n_top` likeliest.
fn logprob(logits: &[f32], token: TokenId, n_top: u32) -> TokenLogprob {
    let (_, max) = argmax(logits);
    let log_total = log_sum_exp(logits, max);
    let of = |logit: f32| (f64::from(logit) - log_total) as f32;
    let top = best(logits, n_top as usize);
    TokenLogprob {
        token,
        logprob: of(logits[token as usize]),
        top: top.into_iter().map(|(id, logit)| (id, of(logit))).collect(),
    }
}

/// A number in `0..1` that depends on seed and counter only (two rounds of the SplitMix64 finalizer).
fn uniform(seed: u64, counter: u64) -> f64 {
    let mixed = mix(mix(seed) ^ counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
