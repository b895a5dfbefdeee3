//! The sampling fields that few requests send: llama-server's samplers and vLLM's word lists.
//!
//! Pure. Names and defaults are those of llama-server's README and of vLLM's sampling parameters; what
//! the fields do stands in `engine/cuts`, `engine/mirostat` and `engine/dry`. Breakers and bad words
//! are texts until the model's vocabulary is known ([`SamplingTexts::resolve`]).

use super::fields::{Fields, wrong_kind};
use super::sampling::token_ids;
use crate::constraint::TokenSet;
use crate::http::errors::ApiError;
use crate::request::{
    Dry, DynamicTemperature, ExtraSampling, Mirostat, MirostatVersion, SamplerStep, SamplingParams,
    TokenId, Xtc,
};
use crate::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::Value;
use std::sync::Arc;

/// Most bad words and breakers of a request, and their length.
const TEXTS_MAX: usize = 256;
const TEXT_BYTES_MAX: usize = 256;
/// Most steps of an order.
const STEPS_MAX: usize = 32;
/// Where a repetition ends unless the request says otherwise.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// Texts of the request that become tokens once the vocabulary is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingTexts {
    breakers: Vec<String>,
    bad_words: Vec<String>,
}

/// Reads the fields into `params`, whose other fields are read already.
pub fn parse(
    fields: &Fields<'_>,
    vocab_size: usize,
    params: &mut SamplingParams,
) -> Result<SamplingTexts, ApiError> {
    let number = |name, most| fields.number(name, 0.0..=most);
    let above_zero = |value: Option<f32>| value.filter(|value| *value > 0.0);
    let dry = dry(fields)?;
    let mut texts = SamplingTexts {
        breakers: strings(fields, "dry_sequence_breakers")?
            .unwrap_or_else(|| BREAKERS.map(str::to_owned).to_vec()),
        bad_words: strings(fields, "bad_words")?.unwrap_or_default(),
    };
    let xtc_threshold = number("xtc_threshold", 1.0)?.unwrap_or(0.1);
    let exponent = number("dynatemp_exponent", 100.0)?.unwrap_or(1.0);
    let mut extra = ExtraSampling {
        min_keep: fields.count("min_keep", 0)?.unwrap_or(0),
        // The web UI of llama-server says it shorter.
        typical_p: number("typical_p", 1.0)?
            .or(number("typ_p", 1.0)?)
            .unwrap_or(1.0),
        top_n_sigma: fields
            .number("top_n_sigma", -1.0..=100.0)?
            .map_or(0.0, |sigma| sigma.max(0.0)),
        xtc: above_zero(number("xtc_probability", 1.0)?).map(|probability| Xtc {
            probability,
            threshold: xtc_threshold,
        }),
        dynamic_temperature: above_zero(number("dynatemp_range", 10.0)?)
            .map(|range| DynamicTemperature { range, exponent }),
        mirostat: mirostat(fields)?,
        dry,
        allowed: allowed(fields, vocab_size)?,
        ..ExtraSampling::default()
    };
    let has_order = match order(fields)? {
        None => false,
        Some(order) => {
            order.apply(params, &mut extra);
            true
        }
    };
    if extra.dry.is_none() {
        texts.breakers.clear();
    }
    let is_wanted = has_order || extra != ExtraSampling::default() || !texts.bad_words.is_empty();
    params.extra = is_wanted.then(|| Arc::new(extra));
    Ok(texts)
}

impl SamplingTexts {
    /// Turns the texts into tokens of this vocabulary.
    pub fn resolve(&self, params: &mut SamplingParams, tokenizer: &Tokenizer) {
        let Some(extra) = &mut params.extra else {
            return;
        };
        let extra = Arc::make_mut(extra);
        if let Some(dry) = &mut extra.dry {
            dry.breakers = containing(tokenizer, &self.breakers);
            let in_tokens = self.breakers.iter().map(|text| plain(tokenizer, text));
            dry.breaker_sequences = in_tokens.filter(|tokens| tokens.len() > 1).collect();
        }
        // A word begins a text, or stands behind a space.
        let words = self.bad_words.iter();
        let both = words.flat_map(|word| [word.clone(), format!(" {word}")]);
        extra.bad_words = both.map(|word| plain(tokenizer, &word)).collect();
        extra.bad_words.retain(|word| !word.is_empty());
        extra.bad_words.sort_unstable();
        extra.bad_words.dedup();
    }
}

fn plain(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    let options = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
    tokenizer.encode(text, options)
}

/// The tokens in whose text one of these stands.
fn containing(tokenizer: &Tokenizer, texts: &[String]) -> TokenSet {
    let is_in = |bytes: &[u8], text: &[u8]| bytes.windows(text.len()).any(|part| part == text);
    let all = 0..tokenizer.vocab_size() as TokenId;
    TokenSet::of(all.filter(|token| {
        let bytes = tokenizer.token_bytes(*token);
        texts.iter().any(|text| is_in(bytes, text.as_bytes()))
    }))
}

fn dry(fields: &Fields<'_>) -> Result<Option<Dry>, ApiError> {
    let multiplier = fields.number("dry_multiplier", 0.0..=100.0)?;
    let base = fields.number("dry_base", 1.0..=100.0)?.unwrap_or(1.75);
    let allowed_length = fields.count("dry_allowed_length", 0)?.unwrap_or(2);
    let last_n = fields.integer("dry_penalty_last_n", -1..=i64::from(u32::MAX))?;
    let last_n = last_n.map_or(64, |n| u32::try_from(n).unwrap_or(u32::MAX));
    let multiplier = multiplier.filter(|multiplier| *multiplier > 0.0 && last_n > 0);
    Ok(multiplier.map(|multiplier| Dry {
        multiplier,
        base,
        allowed_length,
        last_n,
        breakers: TokenSet::of([]),
        breaker_sequences: Vec::new(),
    }))
}

fn mirostat(fields: &Fields<'_>) -> Result<Option<Mirostat>, ApiError> {
    let tau = fields.number("mirostat_tau", 0.0..=100.0)?.unwrap_or(5.0);
    let eta = fields.number("mirostat_eta", 0.0..=1.0)?.unwrap_or(0.1);
    let version = match fields.integer("mirostat", 0..=2)? {
        Some(1) => MirostatVersion::One,
        Some(2) => MirostatVersion::Two,
        _ => return Ok(None),
    };
    Ok(Some(Mirostat { version, tau, eta }))
}

fn allowed(fields: &Fields<'_>, vocab_size: usize) -> Result<Option<TokenSet>, ApiError> {
    let name = "allowed_token_ids";
    match fields.array(name)? {
        None => Ok(None),
        Some([]) => Err(ApiError::invalid(
            name,
            "'allowed_token_ids' is empty, so that no token could come; leave it out to allow all",
        )),
        Some(items) => Ok(Some(TokenSet::of(token_ids(items, name, vocab_size)?))),
    }
}

fn strings(fields: &Fields<'_>, name: &str) -> Result<Option<Vec<String>>, ApiError> {
    let Some(items) = fields.array(name)? else {
        return Ok(None);
    };
    if items.len() > TEXTS_MAX {
        let message = format!(
            "'{name}' holds {} strings, at most {TEXTS_MAX}",
            items.len()
        );
        return Err(ApiError::invalid(name, message));
    }
    let text = |item: &Value| match item.as_str() {
        None => Err(wrong_kind(name, item, "an array of strings")),
        Some(text) if text.is_empty() || text.len() > TEXT_BYTES_MAX => {
            let message = format!("each string of '{name}' has 1 to {TEXT_BYTES_MAX} bytes");
            Err(ApiError::invalid(name, message))
        }
        Some(text) => Ok(text.to_owned()),
    };
    items.iter().map(text).collect::<Result<_, _>>().map(Some)
}

/// The steps that a request names.
struct Order {
    steps: Vec<SamplerStep>,
    has_penalties: bool,
    has_dry: bool,
}

impl Order {
    /// What is not named is not done.
    fn apply(self, params: &mut SamplingParams, extra: &mut ExtraSampling) {
        if !self.has_penalties {
            params.repetition_penalty = 1.0;
            (params.presence_penalty, params.frequency_penalty) = (0.0, 0.0);
        }
        if !self.has_dry {
            extra.dry = None;
        }
        if !self.steps.contains(&SamplerStep::Temperature) && extra.mirostat.is_none() {
            params.temperature = 1.0;
        }
        extra.order = self.steps;
    }
}

/// `samplers`: names, or one string of llama.cpp's letters.
fn order(fields: &Fields<'_>) -> Result<Option<Order>, ApiError> {
    let names: Vec<String> = match fields.get("samplers") {
        None => return Ok(None),
        Some(Value::String(letters)) => letters.chars().map(String::from).collect(),
        Some(Value::Array(items)) => {
            let name = |item: &Value| item.as_str().map(str::to_owned);
            let names: Option<_> = items.iter().map(name).collect();
            names.ok_or_else(|| {
                ApiError::invalid(
                    "samplers",
                    "'samplers' must be an array of names or a string",
                )
            })?
        }
        Some(other) => {
            return Err(wrong_kind(
                "samplers",
                other,
                "an array of names or a string",
            ));
        }
    };
    if names.len() > STEPS_MAX {
        let message = format!(
            "'samplers' has {} entries, at most {STEPS_MAX}",
            names.len()
        );
        return Err(ApiError::invalid("samplers", message));
    }
    let mut order = Order {
        steps: Vec::new(),
        has_penalties: false,
        has_dry: false,
    };
    for name in &names {
        let step = match name.as_str() {
            "top_k" | "top-k" | "k" => SamplerStep::TopK,
            "top_p" | "top-p" | "nucleus" | "p" => SamplerStep::TopP,
            "min_p" | "min-p" | "m" => SamplerStep::MinP,
            "typ_p" | "typ-p" | "typical_p" | "typical-p" | "typical" | "typ" | "y" => {
                SamplerStep::TypicalP
            }
            "top_n_sigma" | "top-n-sigma" | "s" => SamplerStep::TopNSigma,
            "xtc" | "x" => SamplerStep::Xtc,
            "temperature" | "temp" | "t" => SamplerStep::Temperature,
            "penalties" | "e" | "dry" | "d" => {
                if !order.steps.is_empty() {
                    let why = "'penalties' and 'dry' come before all other samplers";
                    return Err(ApiError::unsupported("samplers", why));
                }
                match name.starts_with('d') {
                    true => order.has_dry = true,
                    false => order.has_penalties = true,
                }
                continue;
            }
            other => {
                let shown: String = other.chars().take(50).collect();
                let why = format!("there is no sampler '{shown}'");
                return Err(ApiError::unsupported("samplers", &why));
            }
        };
        order.steps.push(step);
    }
    Ok(Some(order))
}

#[cfg(test)]
#[path = "extra_sampling_tests.rs"]
mod tests;
