//! What `POST /v1/native/generate` asks, read and checked.
//!
//! Pure, on the HTTP worker. Sampling, stop rules, depth and scheduling are read by the same code as
//! on the OpenAI routes, so that a field means the same everywhere. A field that this route does not
//! know is refused by name. What is not here: running it (`generate`).

use crate::http::errors::ApiError;
use crate::http::openai::fields::Fields;
use crate::http::openai::sampling::CommonOptions;
use crate::request::{GenerationRequest, TokenId};
use std::sync::Arc;

/// Every field of the route.
#[rustfmt::skip]
const FIELDS: &[&str] = &[
    "model", "mode",
    "prompt", "tokens", "messages", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort",
    "max_tokens", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repeat_penalty",
    "repeat_last_n", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
    "typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "min_keep", "samplers",
    "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "bad_words", "allowed_token_ids",
    "logprobs", "return_tokens", "score_from", "skip_special_tokens", "stream",
    "loops", "min_loops", "cache_window", "adaptive",
    "response_format", "structured_outputs", "json_schema", "grammar", "regex", "choice",
    "priority", "slo_ms", "slo_ttft_ms", "queue_timeout_ms",
    "cache_prompt", "cache_salt", "allow_remote",
];
/// Fields that a score has no use for.
const CHOOSING: &[&str] = &[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "min_tokens",
];
/// Most alternatives per token, as on the chat route.
const TOP_MAX: i64 = 20;

/// What the request wants done with its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Continue it.
    Generate {
        /// Most tokens; None = up to the end of the context.
        max_tokens: Option<u32>,
    },
    /// Tell how likely it is.
    Score {
        /// The first token that counts in the perplexity; those before it are context only. At
        /// least 1, because nothing predicts the first token.
        from: u32,
    },
}

/// A checked request, without its prompt and what depends on the model.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Sampling, stop rules, streaming; the rest of it is set by whoever knows the model.
    pub common: CommonOptions,
    /// See [`Mode`].
    pub mode: Mode,
    /// Log-probabilities, with so many alternatives. Scoring always tells them.
    pub n_top: Option<u32>,
    /// The answer lists its token ids.
    pub return_tokens: bool,
}

impl Asked {
    /// Reads and checks the fields.
    pub fn parse(fields: &Fields<'_>, vocab_size: Option<usize>) -> Result<Self, ApiError> {
        let common = CommonOptions::parse(fields, vocab_size)?;
        fields.refuse_unknown(FIELDS)?;
        let mode = mode(fields)?;
        if common.stream && matches!(mode, Mode::Score { .. }) {
            let text = "a score comes whole; 'stream' must be false in mode \"score\"";
            return Err(ApiError::invalid("stream", text));
        }
        if matches!(mode, Mode::Score { .. })
            && let Some(name) = CHOOSING.iter().find(|name| fields.get(name).is_some())
        {
            let text = format!("'{name}' says how tokens are chosen; in mode \"score\" none is");
            return Err(ApiError::invalid(*name, text));
        }
        if common.structure.is_some() && matches!(mode, Mode::Score { .. }) {
            let text = "a score has no answer whose form could be given";
            return Err(ApiError::invalid("mode", text));
        }
        let n_top = fields.integer("logprobs", 0..=TOP_MAX)?;
        Ok(Self {
            common,
            mode,
            n_top: n_top.map(|n_top| n_top as u32),
            return_tokens: fields.flag("return_tokens", false)?,
        })
    }

    /// Most tokens to generate behind a prompt of `n_prompt`.
    #[must_use]
    pub fn max_tokens(&self, n_prompt: usize, context_length: u32) -> u32 {
        match self.mode {
            Mode::Score { .. } => 0,
            Mode::Generate { max_tokens } => {
                // With no limit given the answer may fill the context, but it needs room for a token.
                max_tokens.unwrap_or_else(|| context_length.saturating_sub(n_prompt as u32).max(1))
            }
        }
    }

    /// In the scheduler's words.
    #[must_use]
    pub fn job(&self, prompt: Arc<[TokenId]>, max_tokens: u32) -> GenerationRequest {
        let mut job = self.common.request(prompt, max_tokens, 0);
        match self.mode {
            Mode::Generate { .. } => job.logprobs = self.n_top,
            Mode::Score { .. } => job.prompt_logprobs = Some(self.n_top.unwrap_or(0)),
        }
        job
    }
}

fn mode(fields: &Fields<'_>) -> Result<Mode, ApiError> {
    let max_tokens = fields.count("max_tokens", 0)?;
    match fields.string("mode")? {
        None | Some("generate") => {
            if fields.get("score_from").is_some() {
                let text = "'score_from' needs \"mode\": \"score\"";
                return Err(ApiError::invalid("score_from", text));
            }
            if max_tokens == Some(0) {
                let text = "'max_tokens' is 0; it must be at least 1 unless \"mode\" is \"score\"";
                return Err(ApiError::invalid("max_tokens", text));
            }
            Ok(Mode::Generate { max_tokens })
        }
        Some("score") => {
            if max_tokens.is_some_and(|most| most > 0) {
                let text = "mode \"score\" generates nothing; leave 'max_tokens' out";
                return Err(ApiError::invalid("max_tokens", text));
            }
            let from = fields.count("score_from", 1)?.unwrap_or(1);
            Ok(Mode::Score { from })
        }
        Some(other) => {
            let shown: String = other.chars().take(100).collect();
            let text = format!("'mode' is \"{shown}\"; it must be \"generate\" or \"score\"");
            Err(ApiError::invalid("mode", text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parse(body: &Value) -> Result<Asked, ApiError> {
        let map = body.as_object().expect("the test gives an object");
        Asked::parse(&Fields::new(map), Some(100))
    }

    #[test]
    fn the_mode_decides_what_a_job_reports() {
        let job = |body: &Value| {
            let asked = parse(body).expect("valid");
            let job = asked.job(vec![1, 2].into(), asked.max_tokens(2, 10));
            (job.max_tokens, job.logprobs, job.prompt_logprobs)
        };
        assert_eq!(job(&json!({})), (8, None, None));
        let body = json!({"mode": "generate", "max_tokens": 3, "logprobs": 2});
        assert_eq!(job(&body), (3, Some(2), None));
        assert_eq!(job(&json!({"mode": "score"})), (0, None, Some(0)));
        let body = json!({"mode": "score", "max_tokens": 0, "logprobs": 5, "score_from": 2});
        assert_eq!(job(&body), (0, None, Some(5)));
    }

    #[test]
    fn bad_fields_are_named() {
        for (body, param, code) in [
            (json!({"mode": "rank"}), "mode", "invalid_value"),
            (json!({"mode": 1}), "mode", "invalid_value"),
            (json!({"max_tokens": 0}), "max_tokens", "invalid_value"),
            (json!({"max_tokens": -1}), "max_tokens", "invalid_value"),
            (
                json!({"mode": "score", "max_tokens": 1}),
                "max_tokens",
                "invalid_value",
            ),
            (
                json!({"mode": "score", "stream": true}),
                "stream",
                "invalid_value",
            ),
            (
                json!({"mode": "score", "score_from": 0}),
                "score_from",
                "invalid_value",
            ),
            (json!({"score_from": 1}), "score_from", "invalid_value"),
            (json!({"logprobs": 21}), "logprobs", "invalid_value"),
            (json!({"logprobs": true}), "logprobs", "invalid_value"),
            (
                json!({"return_tokens": 1}),
                "return_tokens",
                "invalid_value",
            ),
            (json!({"temperature": 3}), "temperature", "invalid_value"),
            (json!({"n": 2}), "n", "unsupported_parameter"),
            (json!({"loop": 2}), "loop", "unsupported_parameter"),
            (json!({"tools": [1]}), "tools", "unsupported_parameter"),
            (json!({"best_of": 1}), "best_of", "unsupported_parameter"),
        ] {
            let error = parse(&body).expect_err(&body.to_string());
            let found = (error.param.as_deref(), error.code.row().2);
            assert_eq!(found, (Some(param), code), "{body}");
        }
        assert!(parse(&json!({"loop": null, "temperature": 0})).is_ok());
    }
}
