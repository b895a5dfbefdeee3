//! The shapes of native answers: what is serialized, borrowed from what was made.
//!
//! Pure. The order of fields is the order of keys. A stream is a row of [`Piece`]s and one [`End`],
//! told apart by `type`; their texts, tokens and log-probabilities put together are those of
//! the [`Whole`] answer.

use crate::http::generation::prepare::unix_seconds;
use crate::http::generation::usage::UsageCounts;
use crate::http::openai::logprobs::finite;
use crate::pool::LoadedModel;
use crate::request::{RequestId, TokenId, TokenLogprob};
use crate::scheduler::Stamps;
use crate::tokenizer::Tokenizer;
use serde::Serialize;
use std::borrow::Cow;
use std::time::Duration;

/// What every answer begins with.
#[derive(Clone, Debug, Serialize)]
pub struct Frame<'a> {
    /// 24 hexadecimal characters, those of `x-tinyloop-request-id`.
    pub id: String,
    /// `native.generation` or `native.score`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The model that answers.
    pub model: &'a str,
    /// Changes when the answers of a seed may change: version and model file.
    pub system_fingerprint: &'a str,
}

impl<'a> Frame<'a> {
    /// Of an answer that begins now.
    #[must_use]
    pub fn new(id: RequestId, object: &'static str, model: &'a LoadedModel) -> Self {
        Self {
            id: id.to_string(),
            object,
            created: unix_seconds(),
            model: &model.name,
            system_fingerprint: &model.meta.fingerprint,
        }
    }
}

/// A token where it stands.
#[derive(Debug, Serialize)]
pub struct TokenEntry<'a> {
    token: TokenId,
    /// Its bytes as text; what is not UTF-8 by itself is replaced.
    text: Cow<'a, str>,
    bytes: &'a [u8],
    /// Natural log; null for the first token of a prompt, which nothing predicts.
    logprob: Option<f64>,
    /// The likeliest tokens at its place, best first, when alternatives were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top: Vec<TopEntry<'a>>,
}

/// A token that could stand there.
#[derive(Debug, Serialize)]
struct TopEntry<'a> {
    token: TokenId,
    text: Cow<'a, str>,
    logprob: f64,
}

impl<'a> TokenEntry<'a> {
    /// `scored`: None where nothing predicts the token.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, token: TokenId, scored: Option<&TokenLogprob>) -> Self {
        let text = |token| String::from_utf8_lossy(tokenizer.token_bytes(token));
        let top = scored
            .map(|scored| scored.top.as_slice())
            .unwrap_or_default();
        Self {
            token,
            text: text(token),
            bytes: tokenizer.token_bytes(token),
            logprob: scored.map(|scored| finite(scored.logprob)),
            top: top
                .iter()
                .map(|(token, logprob)| TopEntry {
                    token: *token,
                    text: text(*token),
                    logprob: finite(*logprob),
                })
                .collect(),
        }
    }
}

/// The tokens of a text with their log-probabilities.
#[must_use]
pub fn entries<'a>(tokenizer: &'a Tokenizer, scored: &[TokenLogprob]) -> Vec<TokenEntry<'a>> {
    let entry = |scored: &TokenLogprob| TokenEntry::new(tokenizer, scored.token, Some(scored));
    scored.iter().map(entry).collect()
}

/// What a text is, whole or in part.
#[derive(Debug, Serialize)]
pub struct Said<'a> {
    /// Up to a stop string.
    pub text: &'a str,
    /// Its tokens, when asked for. Those of a stop string are among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<&'a [TokenId]>,
    /// One per token, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenEntry<'a>>>,
}

/// An event of a stream: what came next.
#[derive(Debug, Serialize)]
pub struct Piece<'a> {
    /// Always `piece`.
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(flatten)]
    said: Said<'a>,
}

impl<'a> Piece<'a> {
    /// The event of a piece.
    #[must_use]
    pub fn new(said: Said<'a>) -> Self {
        let kind = "piece";
        Self { kind, said }
    }
}

/// How a generation ended.
#[derive(Debug, Serialize)]
pub struct Finish {
    /// `stop`, `length`, or in streams `cancelled`.
    pub finish_reason: &'static str,
    /// Null when it was cancelled.
    pub usage: Option<UsageCounts>,
    /// Null when it was cancelled.
    pub timings: Option<Timings>,
}

/// The event that ends a stream.
#[derive(Debug, Serialize)]
pub struct End<'a> {
    /// Always `end`.
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(flatten)]
    frame: &'a Frame<'a>,
    #[serde(flatten)]
    finish: Finish,
}

impl<'a> End<'a> {
    /// The event of an end.
    #[must_use]
    pub fn new(frame: &'a Frame<'a>, finish: Finish) -> Self {
        let kind = "end";
        Self {
            kind,
            frame,
            finish,
        }
    }
}

/// A whole generation.
#[derive(Debug, Serialize)]
pub struct Whole<'a> {
    /// See [`Frame`].
    #[serde(flatten)]
    pub frame: Frame<'a>,
    /// See [`Said`].
    #[serde(flatten)]
    pub said: Said<'a>,
    /// See [`Finish`].
    #[serde(flatten)]
    pub finish: Finish,
}

/// How likely a text is.
#[derive(Debug, Serialize)]
pub struct Score<'a> {
    /// See [`Frame`].
    #[serde(flatten)]
    pub frame: Frame<'a>,
    /// `e^-mean_logprob`; null when it is beyond all numbers.
    pub perplexity: Option<f64>,
    /// Over the scored tokens.
    pub mean_logprob: f64,
    /// Tokens that count.
    pub n_scored: usize,
    /// Of every token of the prompt.
    pub logprobs: Vec<TokenEntry<'a>>,
    /// Counts.
    pub usage: UsageCounts,
    /// Durations.
    pub timings: Timings,
}

/// How long it took, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timings {
    /// From submit to dispatch.
    queue_ms: Option<f64>,
    /// From submit to the first token; null when none was generated.
    ttft_ms: Option<f64>,
    /// From submit to the end.
    total_ms: Option<f64>,
}

impl Timings {
    /// Of a request that ended.
    #[must_use]
    pub fn new(stamps: &Stamps) -> Self {
        let milliseconds = |duration: Option<Duration>| {
            duration.map(|duration| (duration.as_secs_f64() * 1e6).round() / 1e3)
        };
        Self {
            queue_ms: milliseconds(stamps.queue_wait()),
            ttft_ms: milliseconds(stamps.time_to_first_token()),
            total_ms: milliseconds(stamps.total()),
        }
    }
}
