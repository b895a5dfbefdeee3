//! The request fields that chat and completions share: sampling, stop rules, streaming.
//!
//! Pure functions from JSON to the words of `request`; no model is needed beyond its vocabulary
//! size. What is not here: messages and prompts (`chat`, `completions`), what is refused (`refusals`).

use super::depth::Depth;
use super::extra_sampling::{self, SamplingTexts};
use super::fields::{Fields, as_integer, wrong_kind};
use super::refusals::refuse_unsupported;
use super::structure::Structure;
use crate::http::errors::{ApiError, ErrorCode};
use crate::request::{GenerationRequest, SamplingParams, StopRules, TokenId};
use crate::tokenizer::Tokenizer;
use serde_json::Value;

/// Most choices of one prompt.
pub const CHOICES_MAX: u32 = 128;
/// Most stop strings. OpenAI allows 4; local servers take more.
const STOP_STRINGS_MAX: usize = 16;
/// Longest stop string in bytes, so that the text held back stays small.
const STOP_BYTES_MAX: usize = 1024;

/// What chat and completions have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct CommonOptions {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Texts among the sampling fields, until the vocabulary is known.
    pub texts: SamplingTexts,
    /// When to stop.
    pub stop: StopRules,
    /// Choices per prompt.
    pub n: u32,
    /// Answer as an event stream.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// Leave control tokens out of the text.
    pub skip_special: bool,
    /// Blocks of earlier requests may be reused.
    pub reuse_prefix: bool,
    /// Keeps cached prefixes apart beyond what the client's key does.
    pub cache_salt: Option<String>,
    /// Requests share cached prefixes only within one key. Not in the body: whoever knows client and
    /// model sets it (`http::isolation`).
    pub isolation_key: u64,
    /// What the answer must look like; compiled by whoever knows the model (`structure`).
    pub structure: Option<Structure>,
    /// How deep a looped model runs. Depends on the model, so whoever knows it sets it (`depth`).
    pub depth: Depth,
}

impl CommonOptions {
    /// Reads and checks the shared fields. `vocab_size` None: another server runs the model, which
    /// knows its tokens and may understand more than we do.
    pub fn parse(fields: &Fields<'_>, vocab_size: Option<usize>) -> Result<Self, ApiError> {
        let is_forwarded = vocab_size.is_none();
        refuse_unsupported(fields, is_forwarded)?;
        let vocab_size = vocab_size.unwrap_or(TokenId::MAX as usize);
        let n = fields
            .integer("n", 1..=i64::from(CHOICES_MAX))?
            .unwrap_or(1) as u32;
        let stream = fields.flag("stream", false)?;
        let mut sampling = sampling(fields, vocab_size)?;
        let texts = match is_forwarded {
            // The other server reads them.
            true => SamplingTexts::default(),
            false => extra_sampling::parse(fields, vocab_size, &mut sampling)?,
        };
        Ok(Self {
            sampling,
            texts,
            stop: stop_rules(fields, vocab_size)?,
            n,
            stream,
            include_usage: include_usage(fields, stream)?,
            skip_special: fields.flag("skip_special_tokens", true)?,
            reuse_prefix: fields.flag("cache_prompt", true)?,
            cache_salt: fields.string("cache_salt")?.map(str::to_owned),
            isolation_key: 0,
            structure: Structure::parse(fields)?,
            depth: Depth::default(),
        })
    }

    /// Turns the texts among the sampling fields into tokens of the model.
    pub fn resolve_texts(&mut self, tokenizer: &Tokenizer) {
        self.texts.resolve(&mut self.sampling, tokenizer);
    }

    /// The request of choice `sample` over one prompt. With a given seed each choice gets its own,
    /// derived from it, so that n choices differ and the whole answer repeats.
    #[must_use]
    pub fn request(
        &self,
        prompt: impl Into<std::sync::Arc<[TokenId]>>,
        max_tokens: u32,
        sample: u32,
    ) -> GenerationRequest {
        let mut request = GenerationRequest::new(prompt, max_tokens);
        request.sampling = self.sampling.clone();
        request.sampling.seed = self
            .sampling
            .seed
            .map(|seed| seed.wrapping_add(u64::from(sample).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        request.stop = self.stop.clone();
        request.reuse_prefix = self.reuse_prefix;
        request.isolation_key = self.isolation_key;
        self.depth.apply(&mut request);
        request
    }
}

fn sampling(fields: &Fields<'_>, vocab_size: usize) -> Result<SamplingParams, ApiError> {
    let default = SamplingParams::default();
    let repetition = repetition_penalty(fields)?;
    // -1 means "all" in llama-server (last_n) and in vLLM (top_k).
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    let last_n = fields.integer("repeat_last_n", -1..=i64::from(u32::MAX))?;
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .unwrap_or(default.temperature),
        top_k: top_k.map_or(default.top_k, |k| k.max(0) as u32),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(default.top_p),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(default.min_p),
        repetition_penalty: repetition.unwrap_or(default.repetition_penalty),
        repeat_last_n: last_n.map_or(default.repeat_last_n, |n| {
            u32::try_from(n).unwrap_or(u32::MAX)
        }),
        presence_penalty: fields
            .number("presence_penalty", -2.0..=2.0)?
            .unwrap_or(0.0),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(0.0),
        logit_bias: logit_bias(fields, vocab_size)?,
        seed: seed(fields)?,
        extra: None,
    })
}

/// vLLM's name and llama-server's.
fn repetition_penalty(fields: &Fields<'_>) -> Result<Option<f32>, ApiError> {
    let number = |name| fields.number(name, 0.01..=10.0);
    match (number("repetition_penalty")?, number("repeat_penalty")?) {
        (Some(one), Some(other)) if one != other => Err(ApiError::invalid(
            "repeat_penalty",
            "'repeat_penalty' and 'repetition_penalty' are two names of one thing, and differ",
        )),
        (one, other) => Ok(one.or(other)),
    }
}

/// Any 64-bit integer; negative ones keep their bits. -1 means "random" in llama-server.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.get("seed") else {
        return Ok(None);
    };
    if let Some(seed) = value.as_u64() {
        return Ok(Some(seed));
    }
    match as_integer(value) {
        Some(-1) => Ok(None),
        Some(seed) => Ok(Some(seed as u64)),
        None => Err(wrong_kind("seed", value, "an integer")),
    }
}

fn logit_bias(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    map.iter()
        .map(|(key, value)| {
            let param = format!("logit_bias.{key}");
            let token = key
                .parse::<TokenId>()
                .ok()
                .filter(|id| (*id as usize) < vocab_size);
            let token = token.ok_or_else(|| {
                let message = format!("'{key}' is not a token id of this model (0..{vocab_size})");
                ApiError::invalid(&param, message)
            })?;
            let bias = value
                .as_f64()
                .ok_or_else(|| wrong_kind(&param, value, "a number"))?;
            if !(-100.0..=100.0).contains(&bias) {
                let message = format!("the bias {bias} must be between -100 and 100");
                return Err(ApiError::invalid(param, message));
            }
            Ok((token, bias as f32))
        })
        .collect()
}

fn stop_rules(fields: &Fields<'_>, vocab_size: usize) -> Result<StopRules, ApiError> {
    let token_ids = match fields.array("stop_token_ids")? {
        None => Vec::new(),
        Some(items) => token_ids(items, "stop_token_ids", vocab_size)?,
    };
    Ok(StopRules {
        strings: stop_strings(fields)?,
        token_ids,
        ignore_eos: fields.flag("ignore_eos", false)?,
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        include_stop_string: fields.flag("include_stop_str_in_output", false)?,
    })
}

fn stop_strings(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let values = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    if values.len() > STOP_STRINGS_MAX {
        let message = format!(
            "'stop' holds {} strings, at most {STOP_STRINGS_MAX}",
            values.len()
        );
        return Err(ApiError::invalid("stop", message));
    }
    values
        .iter()
        .map(|value| match value.as_str() {
            None => Err(wrong_kind("stop", value, "a string or an array of strings")),
            Some("") => Err(ApiError::invalid("stop", "a stop string must not be empty")),
            Some(text) if text.len() > STOP_BYTES_MAX => {
                let message = format!("a stop string has at most {STOP_BYTES_MAX} bytes");
                Err(ApiError::invalid("stop", message))
            }
            Some(text) => Ok(text.to_owned()),
        })
        .collect()
}

/// Token ids of this model from a JSON array.
pub fn token_ids(items: &[Value], name: &str, vocab_size: usize) -> Result<Vec<TokenId>, ApiError> {
    items
        .iter()
        .map(|item| {
            as_integer(item)
                .and_then(|id| TokenId::try_from(id).ok())
                .filter(|id| (*id as usize) < vocab_size)
                .ok_or_else(|| {
                    let message = format!(
                        "'{name}' holds {item}, which is not a token id of this model (0..{vocab_size})"
                    );
                    ApiError::invalid(name, message)
                })
        })
        .collect()
}

fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(ApiError::invalid(
            "stream_options",
            "'stream_options' is only allowed with \"stream\": true",
        ));
    }
    let include = Fields::new(options).flag("include_usage", false);
    include.map_err(|error| ApiError {
        param: Some("stream_options.include_usage".to_owned()),
        ..error
    })
}

/// Prompt and answer must fit the context. The one place that words this refusal.
pub fn check_context(
    prompt_tokens: usize,
    max_tokens: u32,
    context_length: u32,
    param: &str,
) -> Result<(), ApiError> {
    let wanted = prompt_tokens as u64 + u64::from(max_tokens);
    if wanted <= u64::from(context_length) {
        return Ok(());
    }
    let message = format!(
        "this model's maximum context length is {context_length} tokens; the request asks for \
         {wanted} ({prompt_tokens} in the prompt, {max_tokens} for the completion)"
    );
    Err(ApiError {
        numbers: vec![
            ("prompt_tokens", prompt_tokens as f64),
            ("max_tokens", f64::from(max_tokens)),
            ("context_length", f64::from(context_length)),
        ],
        ..ApiError::param(ErrorCode::ContextLengthExceeded, param, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<CommonOptions, ApiError> {
        let map = value.as_object().expect("the test gives an object").clone();
        CommonOptions::parse(&Fields::new(&map), Some(100))
    }

    #[test]
    fn defaults_are_openais() {
        let options = parse(json!({})).expect("an empty request is fine");
        assert_eq!(options.sampling, SamplingParams::default());
        assert_eq!(options.n, 1);
        assert!(!options.stream && !options.include_usage && options.skip_special);
    }

    #[test]
    fn values_and_aliases_arrive() {
        let options = parse(json!({
            "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.1,
            "repeat_last_n": -1, "seed": -7, "logit_bias": {"5": -100}, "stop": "x",
            "stop_token_ids": [3], "ignore_eos": true, "min_tokens": 2, "n": 3, "stream": true,
            "stream_options": {"include_usage": true}, "user": "u", "store": true,
        }))
        .expect("all of this is valid");
        assert_eq!(options.sampling.top_k, 0);
        assert_eq!(options.sampling.repetition_penalty, 1.1);
        assert_eq!(options.sampling.repeat_last_n, u32::MAX);
        assert_eq!(options.sampling.seed, Some((-7_i64) as u64));
        assert_eq!(options.sampling.logit_bias, [(5, -100.0)]);
        assert_eq!(options.stop.strings, ["x"]);
        assert_eq!(options.stop.token_ids, [3]);
        assert_eq!(options.n, 3);
        assert!(options.include_usage);
    }

    #[test]
    fn bad_values_name_their_field() {
        let cases = [
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"n": 0}), "n"),
            (json!({"n": 129}), "n"),
            (json!({"seed": "x"}), "seed"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop": ""}), "stop"),
            (json!({"stop_token_ids": [100]}), "stop_token_ids"),
            (json!({"logit_bias": {"100": 1}}), "logit_bias.100"),
            (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
            (json!({"logit_bias": []}), "logit_bias"),
            (json!({"stream": "yes"}), "stream"),
            (
                json!({"stream_options": {"include_usage": true}}),
                "stream_options",
            ),
            (
                json!({"stream": true, "stream_options": {"include_usage": 1}}),
                "stream_options.include_usage",
            ),
            (json!({"presence_penalty": 3}), "presence_penalty"),
            (json!({"min_tokens": -1}), "min_tokens"),
            (
                json!({"repeat_penalty": 1.1, "repetition_penalty": 1.2}),
                "repeat_penalty",
            ),
        ];
        for (body, param) in cases {
            let error = parse(body.clone()).expect_err(&body.to_string());
            assert_eq!(error.code, ErrorCode::InvalidValue, "{body}");
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn what_would_change_the_answer_is_refused_and_harmless_values_pass() {
        for body in [
            json!({"functions": [{"name": "f"}]}),
            json!({"function_call": {"name": "f"}}),
            json!({"adaptive_target": 0.5}),
            json!({"return_token_ids": true}),
            json!({"documents": [{"text": "x"}]}),
            json!({"lora_path": "x"}),
            json!({"lora_request": {"lora_name": "x"}}),
            json!({"no_repeat_ngram_size": 3}),
            json!({"logits_processors": ["x"]}),
            json!({"custom_logit_processor": "x"}),
            json!({"sampling_seed": 1}),
            json!({"tfs_z": 0.9}),
            json!({"top_a": 0.1}),
            json!({"guidance_scale": 2}),
            json!({"negative_prompt": "x"}),
            json!({"parse_tool_calls": false}),
        ] {
            let error = parse(body.clone()).expect_err(&body.to_string());
            assert_eq!(error.code, ErrorCode::UnsupportedParameter, "{body}");
        }
        for body in [
            json!({"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}),
            json!({"tools": null, "adaptive_target": -1, "use_beam_search": false}),
            json!({"documents": [], "lora_path": null, "no_repeat_ngram_size": 0, "tfs_z": 1.0,
                   "top_a": 0, "guidance_scale": 1, "negative_prompt": "",
                   "parse_tool_calls": true, "logits_processors": []}),
            json!({"repeat_penalty": 1.1, "repetition_penalty": 1.1}),
        ] {
            parse(body.clone()).unwrap_or_else(|error| panic!("{body}: {error}"));
        }
    }

    #[test]
    fn choices_have_different_seeds_that_repeat() {
        let options = parse(json!({"seed": 1})).expect("valid");
        let seed = |sample| options.request(vec![1_u32], 1, sample).sampling.seed;
        assert_eq!(seed(0), Some(1));
        assert_ne!(seed(0), seed(1));
        assert_eq!(seed(1), seed(1));
    }

    #[test]
    fn context_overflow_names_both_numbers() {
        assert!(check_context(90, 10, 100, "messages").is_ok());
        let error = check_context(90, 11, 100, "messages").unwrap_err();
        assert_eq!(error.code, ErrorCode::ContextLengthExceeded);
        assert!(error.message.contains("100 tokens") && error.message.contains("101"));
    }
}
