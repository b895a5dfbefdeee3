//! `POST /v1/completions`: the request and the shapes of its answers.
//!
//! Pure functions between JSON and our words; running the jobs is `generate`. Prompts are texts
//! or token ids, one or many; choice `p * n + s` is sample s of prompt p.

use super::fields::{Fields, wrong_kind};
use super::logprobs::CompletionLogprobs;
use super::sampling::{CHOICES_MAX, CommonOptions, token_ids};
use crate::http::errors::{ApiError, ErrorCode};
use crate::request::TokenId;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Most prompts of one request.
const PROMPTS_MAX: usize = 256;
/// OpenAI's default, which its clients rely on.
const MAX_TOKENS_DEFAULT: u32 = 16;
/// Most alternatives per token, as in OpenAI's contract.
const LOGPROBS_MAX: i64 = 5;

/// One prompt as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenized.
    Text(String),
    /// Used as they are.
    Tokens(Vec<TokenId>),
}

/// A checked completions request.
#[derive(Clone, Debug)]
pub struct CompletionRequest {
    /// Sampling, stop rules, streaming.
    pub common: CommonOptions,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Most tokens to generate; 0 scores the prompt (with `echo`).
    pub max_tokens: u32,
    /// Samples made per prompt, of which the likeliest `n` are returned; at least `n`.
    pub best_of: u32,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// Log-probabilities, with so many alternatives.
    pub logprobs: Option<u32>,
}

impl CompletionRequest {
    /// Reads and checks a request.
    pub fn parse(body: &Map<String, Value>, vocab_size: Option<usize>) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        let common = CommonOptions::parse(&fields, vocab_size)?;
        let vocab_size = vocab_size.unwrap_or(TokenId::MAX as usize);
        if fields
            .array("tools")?
            .is_some_and(|tools| !tools.is_empty())
        {
            let why = "texts are continued as they are; /v1/chat/completions calls tools";
            return Err(ApiError::unsupported("tools", why));
        }
        if fields
            .string("suffix")?
            .is_some_and(|suffix| !suffix.is_empty())
        {
            return Err(ApiError::unsupported(
                "suffix",
                "there is no fill-in-the-middle",
            ));
        }
        let echo = fields.flag("echo", false)?;
        let limit = |name| fields.integer(name, -1..=i64::from(u32::MAX));
        let max_tokens = match limit("max_tokens")? {
            None => limit("n_predict")?, // llama-server's name
            given => given,
        };
        let max_tokens = match max_tokens {
            None => MAX_TOKENS_DEFAULT,
            Some(0) if !echo => {
                return Err(ApiError::invalid(
                    "max_tokens",
                    "'max_tokens' is 0; it must be at least 1 unless 'echo' is true",
                ));
            }
            Some(-1) => u32::MAX,
            Some(count) => count as u32,
        };
        Ok(Self {
            prompts: prompts(&fields, vocab_size)?,
            max_tokens,
            best_of: best_of(&fields, &common)?,
            echo,
            logprobs: logprobs(&fields)?,
            common,
        })
    }
}

fn best_of(fields: &Fields<'_>, common: &CommonOptions) -> Result<u32, ApiError> {
    let best_of = fields.integer("best_of", 1..=i64::from(CHOICES_MAX))?;
    let best_of = best_of.map_or(common.n, |count| count as u32);
    if best_of < common.n {
        let message = format!(
            "'best_of' is {best_of}; it must be at least 'n' ({})",
            common.n
        );
        return Err(ApiError::invalid("best_of", message));
    }
    if best_of > common.n && common.stream {
        return Err(ApiError::invalid(
            "best_of",
            "'best_of' above 'n' cannot be streamed",
        ));
    }
    Ok(best_of)
}

/// A count; `true` is read as 1, as some tools send it.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    match fields.get("logprobs") {
        Some(Value::Bool(flag)) => Ok(flag.then_some(1)),
        _ => Ok(fields
            .integer("logprobs", 0..=LOGPROBS_MAX)?
            .map(|count| count as u32)),
    }
}

fn prompts(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<Prompt>, ApiError> {
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::param(
            ErrorCode::MissingRequiredParameter,
            "prompt",
            "'prompt' is missing; it is a string, token ids, or an array of either",
        ));
    };
    let prompts = match value {
        Value::Array(items) if items.iter().any(Value::is_number) => {
            vec![Prompt::Tokens(token_ids(items, "prompt", vocab_size)?)]
        }
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(index, item)| one_prompt(&format!("prompt[{index}]"), item, vocab_size))
            .collect::<Result<_, _>>()?,
        one => vec![one_prompt("prompt", one, vocab_size)?],
    };
    if prompts.is_empty() {
        return Err(ApiError::invalid(
            "prompt",
            "'prompt' must hold at least one prompt",
        ));
    }
    if prompts.len() > PROMPTS_MAX {
        let message = format!(
            "'prompt' holds {} prompts, at most {PROMPTS_MAX}",
            prompts.len()
        );
        return Err(ApiError::invalid("prompt", message));
    }
    Ok(prompts)
}

fn one_prompt(name: &str, value: &Value, vocab_size: usize) -> Result<Prompt, ApiError> {
    match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(items) => Ok(Prompt::Tokens(token_ids(items, name, vocab_size)?)),
        other => Err(wrong_kind(name, other, "a string or an array of token ids")),
    }
}

/// One choice of a whole answer, or what a chunk adds to it.
#[derive(Debug, Serialize)]
pub struct CompletionChoice<'a> {
    pub(super) index: u32,
    pub(super) text: Cow<'a, str>,
    pub(super) logprobs: Option<CompletionLogprobs<'a>>,
    pub(super) finish_reason: Option<&'static str>,
}

/// Which `n` of the candidates have the highest mean log-probability per token, best first.
#[must_use]
pub fn likeliest(mean_logprobs: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..mean_logprobs.len()).collect();
    order.sort_by(|a, b| mean_logprobs[*b].total_cmp(&mean_logprobs[*a]));
    order.truncate(n);
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(
            value.as_object().expect("the test gives an object"),
            Some(100),
        )
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let prompts = |value: Value| parse(json!({"prompt": value})).expect("valid").prompts;
        assert_eq!(prompts(json!("a")), [Prompt::Text("a".into())]);
        assert_eq!(prompts(json!(["a", "b"])).len(), 2);
        assert_eq!(prompts(json!([1, 2])), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(
            prompts(json!([[1], [2, 3]])),
            [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]
        );
    }

    #[test]
    fn bad_requests_name_their_field() {
        let cases = [
            (json!({}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": 5}), "prompt"),
            (json!({"prompt": ["a", 5]}), "prompt"),
            (json!({"prompt": [[1], {}]}), "prompt[1]"),
            (json!({"prompt": [100]}), "prompt"),
            (json!({"prompt": "a", "suffix": "b"}), "suffix"),
            (json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
            (json!({"prompt": "a", "n": 3, "best_of": 2}), "best_of"),
            (
                json!({"prompt": "a", "stream": true, "best_of": 2}),
                "best_of",
            ),
            (json!({"prompt": "a", "logprobs": 6}), "logprobs"),
            (json!({"prompt": "a", "echo": "x"}), "echo"),
        ];
        for (body, param) in cases {
            let error = parse(body.clone()).expect_err(&body.to_string());
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
            assert_eq!(error.status(), 400, "{body}");
        }
    }

    #[test]
    fn defaults_and_scoring() {
        let request = parse(json!({"prompt": "a"})).expect("valid");
        assert_eq!(
            (request.max_tokens, request.best_of, request.echo),
            (16, 1, false)
        );
        let scoring = parse(json!({"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 0}));
        assert_eq!(scoring.expect("valid").max_tokens, 0);
    }

    #[test]
    fn the_likeliest_candidates_win() {
        assert_eq!(likeliest(&[-2.0, -0.5, f64::NEG_INFINITY, -1.0], 2), [1, 3]);
    }
}
