//! How the next token is chosen: what nearly every request says, and what few do.
//!
//! Plain data. What is not here: the choosing (`engine/sampler` and the files beside it), the names
//! under which clients ask for it (`http/openai/sampling`, `http/openai/extra_sampling`).

use super::TokenId;
use crate::constraint::TokenSet;
use std::sync::Arc;

/// How the next token is chosen. Defaults are greedy-free OpenAI defaults (temperature 1, no cuts).
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 = greedy; otherwise logits are divided by it. Range 0..=2 by API check.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 = all.
    pub top_k: u32,
    /// Nucleus: keep the smallest set with at least this probability; 1 = all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the top probability; 0 = all.
    pub min_p: f32,
    /// Multiplicative penalty on tokens seen in the last `repeat_last_n`; 1 = off.
    pub repetition_penalty: f32,
    /// Window of the repetition penalty in tokens, prompt included; `u32::MAX` = whole context.
    pub repeat_last_n: u32,
    /// Subtracted once from every token already generated (OpenAI).
    pub presence_penalty: f32,
    /// Subtracted per earlier occurrence among the generated tokens (OpenAI).
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens before anything else.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Same seed, same text, whatever else is in the batch. None = drawn per request.
    pub seed: Option<u64>,
    /// What few requests ask for; None = the plain way.
    pub extra: Option<Arc<ExtraSampling>>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            extra: None,
        }
    }
}

impl SamplingParams {
    /// Whether some tokens must not come, whatever else asks for them.
    #[must_use]
    pub fn bans_tokens(&self) -> bool {
        let extra = self.extra.as_deref();
        let by_bias = self.logit_bias.iter();
        extra.is_some_and(|extra| !extra.bad_words.is_empty() || extra.allowed.is_some())
            || by_bias
                .into_iter()
                .any(|(_, bias)| *bias == f32::NEG_INFINITY)
    }

    /// Always the most likely token.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }
}

/// What few requests ask of the sampler. It stands behind a pointer, so that the many others carry
/// one word for it and test it once per token.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraSampling {
    /// What is done with the logits, one after the other, before a token is drawn. A step whose
    /// parameter is off does nothing; one that is not listed is not taken.
    pub order: Vec<SamplerStep>,
    /// Every cut leaves at least so many tokens.
    pub min_keep: u32,
    /// Mass of the locally typical set; 1 = off.
    pub typical_p: f32,
    /// Keep logits within so many standard deviations of the largest; 0 = off.
    pub top_n_sigma: f32,
    /// Leave the likeliest tokens out, now and then.
    pub xtc: Option<Xtc>,
    /// A temperature that follows the entropy.
    pub dynamic_temperature: Option<DynamicTemperature>,
    /// A cut that steers the surprise of the text. In place of all other cuts.
    pub mirostat: Option<Mirostat>,
    /// A penalty on tokens that continue a repetition.
    pub dry: Option<Dry>,
    /// Token sequences that the answer must not contain, none of them empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// The only tokens that the answer may contain; None = all.
    pub allowed: Option<TokenSet>,
}

impl ExtraSampling {
    /// The order of requests that name none: the temperature comes first, as everywhere but in
    /// llama.cpp, so that the cuts see the distribution that is drawn from.
    pub const ORDER: [SamplerStep; 7] = [
        SamplerStep::Temperature,
        SamplerStep::TopNSigma,
        SamplerStep::TopK,
        SamplerStep::TypicalP,
        SamplerStep::TopP,
        SamplerStep::MinP,
        SamplerStep::Xtc,
    ];
}

impl Default for ExtraSampling {
    fn default() -> Self {
        Self {
            order: Self::ORDER.to_vec(),
            min_keep: 0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc: None,
            dynamic_temperature: None,
            mirostat: None,
            dry: None,
            bad_words: Vec::new(),
            allowed: None,
        }
    }
}

/// A step on the way from logits to a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplerStep {
    /// [`ExtraSampling::top_n_sigma`]
    TopNSigma,
    /// [`SamplingParams::top_k`]
    TopK,
    /// [`ExtraSampling::typical_p`]
    TypicalP,
    /// [`SamplingParams::top_p`]
    TopP,
    /// [`SamplingParams::min_p`]
    MinP,
    /// [`ExtraSampling::xtc`]
    Xtc,
    /// [`SamplingParams::temperature`], or [`ExtraSampling::dynamic_temperature`]
    Temperature,
}

/// "Exclude top choices": with a probability, all tokens above a threshold go but the least likely
/// of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xtc {
    /// How often, 0..=1.
    pub probability: f32,
    /// Tokens of at least this probability are "top". Above 0.5 there can be only one: off.
    pub threshold: f32,
}

/// The temperature is between `temperature - range` and `temperature + range`, by the entropy of what
/// there is to choose from in parts of the largest possible one, to the power of `exponent`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicTemperature {
    /// Above 0.
    pub range: f32,
    /// 0 or more; 1 = in proportion.
    pub exponent: f32,
}

/// Which way of steering the surprise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirostatVersion {
    /// Estimates the exponent of Zipf's law from the 100 likeliest tokens, and cuts to a top-k.
    One,
    /// Cuts what is more surprising than allowed.
    Two,
}

/// Mirostat: the mean surprise of the tokens, in bits, is kept at a target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    /// Which algorithm.
    pub version: MirostatVersion,
    /// The target, in bits.
    pub tau: f32,
    /// How fast it corrects itself.
    pub eta: f32,
}

/// "Don't repeat yourself": a token that would continue a repetition of `n` tokens, where `n` is at
/// least `allowed_length`, loses `multiplier * base^(n - allowed_length)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Above 0.
    pub multiplier: f32,
    /// At least 1.
    pub base: f32,
    /// See above.
    pub allowed_length: u32,
    /// Tokens that are looked at, prompt included; `u32::MAX` = all.
    pub last_n: u32,
    /// Tokens over which no repetition reaches.
    pub breakers: TokenSet,
    /// The same for breakers of several tokens.
    pub breaker_sequences: Vec<Vec<TokenId>>,
}
