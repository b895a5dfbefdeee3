//! `POST /completion`: from llama-server's body to ours.
//!
//! The body becomes one of our own completions, whose checks, limits and scheduling then hold for it
//! too; what has another form or range there (prompts of texts and tokens, biases, temperatures) is
//! put into the jobs afterwards. What would change the answer and is not built is refused by name;
//! fields that only say how a llama-server shall work (`id_slot`, `n_keep`, ..) are taken and have no effect.

use super::settings::{SAMPLERS, settings};
use super::shape::{CompletionShape, Look};
use super::texts::mixed_tokens;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::prepare::{self, Prepared, Work};
use crate::http::generation::run::run;
use crate::http::openai::fields::{Fields, parse_object, wrong_kind};
use crate::http::openai::prompt::{ENCODE, tokenizer_of};
use crate::http::openai::refusals::{Refusal, is_empty, is_off, refuse};
use crate::request::TokenId;
use crate::runtime::Feature;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::{Map, Value, json};

/// Most alternatives per token.
const N_PROBS_MAX: i64 = 100;
/// Highest temperature; the other routes keep to OpenAI's range.
const TEMPERATURE_MAX: f64 = 1000.0;

/// How llama-server shows a seed that it draws itself.
const RANDOM_SEED: u64 = u32::MAX as u64;

/// What llama-server does unless told otherwise.
const DEFAULTS: [(&str, f64); 5] = [
    ("temperature", 0.8),
    ("top_k", 40.0),
    ("top_p", 0.95),
    ("min_p", 0.05),
    ("n_predict", -1.0),
];

/// Fields whose effect is not built.
const REFUSALS: &[Refusal] = &[
    ("lora", is_empty, "adapters are not built"),
    ("image_data", is_empty, "models here take text only"),
    (
        "post_sampling_probs",
        is_off,
        "probabilities are those of the model, before sampling",
    ),
    ("t_max_predict_ms", is_off, "use 'n_predict'"),
    ("n_indent", is_off, "there is no rule about indentation"),
    (
        "grammar_lazy",
        is_off,
        "a grammar holds from the first token",
    ),
    (
        "grammar_triggers",
        is_empty,
        "a grammar holds from the first token",
    ),
];

/// See the module.
pub fn completion(call: &Call<'_>, exchange: Exchange) {
    run(prepare(call), call, exchange);
}

/// What our own completions do not take in this form.
struct Special {
    n_probs: u32,
    return_tokens: bool,
    temperature: f32,
    logit_bias: Vec<(TokenId, f32)>,
    /// The prompt is only computed.
    generates_nothing: bool,
}

fn prepare(call: &Call<'_>) -> Result<Work<CompletionShape>, ApiError> {
    let mut body = parse_object(call.request.body())?;
    let (model, _) = call.model(&Fields::new(&body))?;
    let tokenizer = model.tokenizer.clone();
    let look = look(&Fields::new(&body))?;
    let special = translate(&mut body, tokenizer.as_deref())?;
    if special.n_probs > 0 {
        tokenizer_of(&model, Feature::TokenIds, "n_probs")?;
    }
    let mut prepared = prepare::completions(call, &body)?;
    special.put_in(&mut prepared, look.is_stream);
    let prompts = prompts(&prepared, &body, tokenizer.as_deref());
    let look = Look {
        settings: prepared
            .jobs
            .first()
            .map_or(Value::Null, |job| settings(job, &body)),
        stop_strings: prepared
            .jobs
            .first()
            .map_or_else(Vec::new, |job| job.stop.strings.clone()),
        shows_probs: special.n_probs > 0,
        shows_tokens: special.return_tokens || look.is_stream,
        ..look
    };
    Ok(prepared.shaped(|info| CompletionShape::new(info, look, prompts)))
}

/// Text and length of the prompt of each choice.
fn prompts(
    prepared: &Prepared,
    body: &Map<String, Value>,
    tokenizer: Option<&Tokenizer>,
) -> Vec<(String, u32)> {
    let prompt = |job: &crate::request::GenerationRequest| {
        let text = match tokenizer {
            Some(tokenizer) => tokenizer.decode(&job.prompt, false),
            None => body["prompt"].as_str().unwrap_or_default().to_owned(),
        };
        (text, job.prompt_tokens())
    };
    prepared.jobs.iter().map(prompt).collect()
}

fn look(fields: &Fields<'_>) -> Result<Look, ApiError> {
    let name = "response_fields";
    let items = fields.array(name)?.unwrap_or_default();
    let field = |item: &Value| {
        let text = item.as_str().map(str::to_owned);
        text.ok_or_else(|| wrong_kind(name, item, "an array of strings"))
    };
    Ok(Look {
        is_stream: fields.flag("stream", false)?,
        times_pieces: fields.flag("timings_per_token", false)?,
        response_fields: items.iter().map(field).collect::<Result<_, _>>()?,
        ..Look::default()
    })
}

/// Rewrites the body in OpenAI's words.
fn translate(
    body: &mut Map<String, Value>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Special, ApiError> {
    let fields = Fields::new(body);
    refuse(&fields, REFUSALS)?;
    let predicts = fields.integer("n_predict", -2..=i64::from(u32::MAX))?;
    let predicts = match predicts {
        None => fields.integer("max_tokens", -2..=i64::from(u32::MAX))?,
        given => given,
    };
    let n_probs = match fields.integer("n_probs", 0..=N_PROBS_MAX)? {
        None => fields.integer("logprobs", 0..=N_PROBS_MAX)?,
        given => given,
    };
    let temperature = fields.number("temperature", -TEMPERATURE_MAX..=TEMPERATURE_MAX)?;
    let n_choices = match fields.integer("n_cmpl", 1..=128)? {
        None => fields.integer("n", 1..=128)?,
        given => given,
    };
    let mut special = Special {
        n_probs: n_probs.unwrap_or(0) as u32,
        return_tokens: fields.flag("return_tokens", false)?,
        temperature: temperature.unwrap_or(0.8).max(0.0),
        logit_bias: Vec::new(),
        generates_nothing: predicts == Some(0),
    };
    if let Some(tokenizer) = tokenizer {
        if let Some(bias) = body.remove("logit_bias") {
            special.logit_bias = logit_bias(&bias, tokenizer)?;
        }
        let prompt = prompt(body, tokenizer)?;
        body.insert("prompt".to_owned(), prompt);
    }
    let predicts = predicts.map_or(-1, |count| count.max(-1));
    let temperature = temperature.map(|_| special.temperature.min(2.0));
    for (name, value) in [
        ("max_tokens", json!(predicts)),
        ("n", json!(n_choices.unwrap_or(1))),
        ("temperature", json!(temperature)),
        // The prompt alone is asked for by an echo, which is not shown.
        ("echo", json!(special.generates_nothing)),
    ] {
        body.insert(name.to_owned(), value);
    }
    for name in [
        "logprobs",
        "best_of",
        "suffix",
        "n_probs",
        "response_fields",
    ] {
        body.remove(name);
    }
    drop_empty(body);
    if tokenizer.is_some() {
        // Another server has defaults of its own.
        for (name, default) in DEFAULTS {
            body.entry(name).or_insert_with(|| json!(default));
        }
        body.entry("samplers").or_insert_with(|| json!(SAMPLERS));
    }
    Ok(special)
}

/// Fields that say nothing, where ours would take them for something.
fn drop_empty(body: &mut Map<String, Value>) {
    let is_nothing = |value: &Value| matches!(value, Value::String(text) if text.is_empty());
    for name in ["grammar", "stop"] {
        if body.get(name).is_some_and(is_nothing) {
            body.remove(name);
        }
    }
    if let Some(Value::Array(items)) = body.get_mut("stop") {
        items.retain(|item| !is_nothing(item));
    }
    body.retain(|_, value| !value.is_null());
    if body.get("seed").and_then(Value::as_u64) == Some(RANDOM_SEED) {
        body.remove("seed");
    }
    let base = body.get("dry_base").and_then(Value::as_f64);
    if base.is_some_and(|base| base < 1.0) {
        body.remove("dry_base"); // llama-server takes its default then
    }
}

/// The prompt or prompts, with what is mixed turned into tokens.
fn prompt(body: &Map<String, Value>, tokenizer: &Tokenizer) -> Result<Value, ApiError> {
    let name = "prompt";
    let Some(prompt) = body.get(name).filter(|prompt| !prompt.is_null()) else {
        let message =
            "'prompt' is missing; it is a string, tokens, a mixed array, or an array of them";
        let code = ErrorCode::MissingRequiredParameter;
        return Err(ApiError::param(code, name, message));
    };
    let is_number = Value::is_number;
    match prompt {
        Value::Array(items) if items.iter().any(is_number) => one_prompt(prompt, tokenizer),
        Value::Array(items) => {
            let prompts = items.iter().map(|item| one_prompt(item, tokenizer));
            prompts.collect()
        }
        one => one_prompt(one, tokenizer),
    }
}

fn one_prompt(prompt: &Value, tokenizer: &Tokenizer) -> Result<Value, ApiError> {
    match prompt {
        Value::Object(map) => {
            let media = map.get("multimodal_data");
            if media.is_some_and(|data| !data.as_array().is_some_and(Vec::is_empty)) {
                let why = "models here take text only";
                return Err(ApiError::unsupported("prompt.multimodal_data", why));
            }
            match map.get("prompt_string") {
                Some(Value::String(text)) => Ok(json!(text)),
                _ => Err(ApiError::invalid(
                    "prompt",
                    "an object in 'prompt' holds its text as 'prompt_string'",
                )),
            }
        }
        Value::String(text) => Ok(json!(text)),
        mixed => Ok(json!(mixed_tokens(tokenizer, mixed, "prompt", ENCODE)?)),
    }
}

/// `[[token or text, bias or false], ..]` or `{token or text: bias or false, ..}`
fn logit_bias(value: &Value, tokenizer: &Tokenizer) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let name = "logit_bias";
    let pairs: Vec<(Value, &Value)> = match value {
        Value::Null => Vec::new(),
        Value::Object(map) => map
            .iter()
            .map(|(key, bias)| {
                let token = key.parse::<TokenId>().map(Value::from);
                (token.unwrap_or_else(|_| json!(key)), bias)
            })
            .collect(),
        Value::Array(items) => items
            .iter()
            .map(|item| match item.as_array().map(Vec::as_slice) {
                Some([token, bias]) => Ok((token.clone(), bias)),
                _ => Err(wrong_kind(name, item, "an array of [token, bias] pairs")),
            })
            .collect::<Result<_, _>>()?,
        other => return Err(wrong_kind(name, other, "an array of [token, bias] pairs")),
    };
    let plain = EncodeOptions {
        add_special: false,
        parse_special: true,
    };
    let mut biases = Vec::new();
    for (tokens, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            Value::Number(number) => number.as_f64().unwrap_or(0.0) as f32,
            other => return Err(wrong_kind(name, other, "a number or false")),
        };
        let tokens = match &tokens {
            Value::String(_) => mixed_tokens(tokenizer, &tokens, name, plain)?,
            one => mixed_tokens(tokenizer, &json!([one]), name, plain)?,
        };
        biases.extend(tokens.into_iter().map(|token| (token, bias)));
    }
    Ok(biases)
}

impl Special {
    fn put_in(&self, prepared: &mut Prepared, is_stream: bool) {
        // Token ids come with their log-probabilities.
        let wants_ids = self.return_tokens || is_stream;
        let logprobs = match self.n_probs {
            0 => wants_ids.then_some(0),
            n_probs => Some(n_probs),
        };
        let has_ids = prepared.info.tokenizer.is_some();
        for job in &mut prepared.jobs {
            job.sampling.temperature = match job.sampling.extra.as_deref() {
                // Without a step for it there is no temperature.
                Some(extra) if !has_temperature(extra) => job.sampling.temperature,
                _ => self.temperature,
            };
            job.sampling.logit_bias.extend_from_slice(&self.logit_bias);
            if has_ids {
                job.logprobs = logprobs;
                job.prompt_logprobs = None;
            }
        }
        for plan in &mut prepared.plans {
            plan.echo = None;
        }
        prepared.info.wants_logprobs = has_ids && logprobs.is_some();
    }
}

fn has_temperature(extra: &crate::request::ExtraSampling) -> bool {
    let step = crate::request::SamplerStep::Temperature;
    extra.mirostat.is_some() || extra.order.contains(&step)
}

#[cfg(test)]
#[path = "completion_tests.rs"]
mod tests;
