//! `/v1/native/prefixes`: register the beginning of prompts to come, list, remove.
//!
//! A registration holds its worker until the prefix is computed and pinned; a client that hangs up
//! cancels it. Where clients are kept apart (`prefix_isolation = "key"`) each sees and removes its
//! own prefixes only, and only its own requests find them. What is not here: which prefix goes when
//! there are too many (`scheduler/prefix_pool`).

use super::prompt;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::isolation::{isolation_key, owner};
use crate::http::openai::depth::Depth;
use crate::http::openai::fields::{Fields, parse_object};
use crate::http::openai::prompt::tokenizer_of;
use crate::http::openai::sampling::check_context;
use crate::http::state::ServerState;
use crate::pool::LoadedModel;
use crate::request::{PinError, PrefixId};
use crate::runtime::Feature;
use crate::scheduler::{NewPrefix, PrefixError, PrefixInfo, SubmitOptions};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/v1/native/prefixes`, whatever the method.
pub fn all(call: &Call<'_>, exchange: Exchange) {
    match call.request.method() {
        "POST" => register(call, exchange),
        "DELETE" => exchange.json(&remove_all(call.state, call.client.as_deref())),
        _ => exchange.json(&list(call.state, call.client.as_deref())),
    }
}

/// `DELETE /v1/native/prefixes/{id}`
pub fn one(call: &Call<'_>, id: &str, exchange: Exchange) {
    match remove(call.state, call.client.as_deref(), id) {
        Ok(body) => exchange.json(&body),
        Err(error) => exchange.error(&error),
    }
}

fn register(call: &Call<'_>, mut exchange: Exchange) {
    let asked = match Asked::parse(call) {
        Ok(asked) => asked,
        Err(error) => return exchange.error(&error),
    };
    exchange.record.model.clone_from(&asked.model.name);
    let n_tokens = asked.prefix.tokens.len() as u64;
    exchange.record.prompt_tokens = n_tokens;
    if let Err(error) = exchange.reserve(n_tokens, &[]) {
        return exchange.error(&error);
    }
    let Asked {
        model,
        prefix,
        options,
    } = asked;
    let n_given = prefix.tokens.len();
    let begun = match model.executor.begin_prefix(prefix, options) {
        Ok(begun) => begun,
        Err(error) => return exchange.error(&error.into()),
    };
    if let Some(handle) = begun.cancel_handle() {
        exchange.on_hangup(move || handle.cancel());
    }
    match begun.finish() {
        Ok(info) => {
            let mut body = object(&model, &info);
            body["tokens"] = Value::from(n_given);
            exchange.json(&body);
        }
        Err(error) => exchange.error(&error.into()),
    }
}

fn list(state: &ServerState, client: Option<&str>) -> Value {
    let (mut data, mut n_tokens, mut n_hits) = (Vec::new(), 0, 0);
    for model in state.models() {
        for info in model.executor.prefixes(owner_in(&model, client)) {
            n_tokens += u64::from(info.cached_tokens);
            n_hits += info.hits;
            data.push(object(&model, &info));
        }
    }
    json!({
        "object": "list",
        "entries": data.len(),
        "total_cached_tokens": n_tokens,
        "hits": n_hits,
        "data": data,
    })
}

fn remove(state: &ServerState, client: Option<&str>, id: &str) -> Result<Value, ApiError> {
    let is_removed = |id: PrefixId| {
        let models = state.models();
        let mut removed = models
            .iter()
            .map(|model| model.executor.remove_prefix(id, owner_in(model, client)));
        removed.any(|removed| removed)
    };
    if PrefixId::parse(id).is_some_and(is_removed) {
        return Ok(json!({"id": id, "object": "prefix", "deleted": true}));
    }
    let shown: String = id.chars().take(100).collect();
    let message = format!("no prefix is called '{shown}'; GET /v1/native/prefixes lists them");
    Err(ApiError::new(ErrorCode::PrefixNotFound, message))
}

fn remove_all(state: &ServerState, client: Option<&str>) -> Value {
    let models = state.models();
    let removed = models
        .iter()
        .map(|model| model.executor.remove_prefixes(owner_in(model, client)));
    json!({"object": "list", "deleted": removed.sum::<usize>()})
}

fn owner_in<'a>(model: &LoadedModel, client: Option<&'a str>) -> Option<&'a str> {
    owner(model.executor.prefix_isolation(), client)
}

fn object(model: &LoadedModel, info: &PrefixInfo) -> Value {
    json!({
        "id": info.id.to_string(),
        "object": "prefix",
        "model": model.name,
        "cached_tokens": info.cached_tokens,
        "loops": info.loops,
        "cache_window": info.cache_window,
        "hits": info.hits,
    })
}

/// Everything that a registration may say. `adaptive` is not there: rows that leave the loop early
/// have K/V of their own, which are found in the automatic cache only.
#[rustfmt::skip]
const FIELDS: &[&str] = &[
    "model", "text", "messages", "tokens", "add_special", "parse_special", "tools",
    "chat_template_kwargs", "reasoning_effort", "loops", "cache_window", "cache_salt",
    "priority", "slo_ms", "slo_ttft_ms", "queue_timeout_ms", "user", "metadata",
];

/// A checked registration.
struct Asked {
    model: Arc<LoadedModel>,
    prefix: NewPrefix,
    options: SubmitOptions,
}

impl Asked {
    fn parse(call: &Call<'_>) -> Result<Self, ApiError> {
        let body = parse_object(call.request.body())?;
        let fields = Fields::new(&body);
        fields.refuse_unknown(FIELDS)?;
        let (model, loops) = call.model(&fields)?;
        let tokenizer = tokenizer_of(&model, Feature::Prefixes, "model")?;
        let depth = Depth::parse(&fields, loops, &model.meta)?;
        let schedule = call.schedule(&fields)?;
        model.executor.preflight()?; // before anything is rendered or tokenized
        // More messages will follow, so the opening of an answer is not part of the prefix.
        let (tokens, param) = prompt::read(&model, &tokenizer, &fields, "text", false)?;
        check_context(tokens.len(), 0, model.context_length, param)?;
        let salt = fields.string("cache_salt")?;
        let mode = model.executor.prefix_isolation();
        let prefix = NewPrefix {
            tokens,
            loops: depth.loops,
            cache_window: depth.cache_window,
            isolation_key: isolation_key(mode, call.client.as_deref(), salt),
            owner: call.client.clone(),
        };
        Ok(Self {
            model,
            prefix,
            options: SubmitOptions {
                priority: schedule.priority,
                slo_ms: schedule.slo_ms,
                slo_ttft_ms: schedule.slo_ttft_ms,
                client: call.client.clone(),
                share: call.access.share(),
                ..SubmitOptions::default()
            },
        })
    }
}

impl From<PrefixError> for ApiError {
    fn from(error: PrefixError) -> Self {
        let message = error.to_string();
        let code = match error {
            PrefixError::Submit(error) => return error.into(),
            PrefixError::Job(error) => return error.into(),
            PrefixError::Pin(PinError::NoRoom {
                needed_pages,
                pinned_pages,
                pages_max,
            }) => {
                return Self {
                    // Only a removal helps, not time.
                    is_hopeless: true,
                    numbers: vec![
                        ("needed_pages", f64::from(needed_pages)),
                        ("pinned_pages", f64::from(pinned_pages)),
                        ("pages_max", f64::from(pages_max)),
                    ],
                    ..Self::new(ErrorCode::PrefixPoolFull, message)
                };
            }
            PrefixError::Off | PrefixError::Pin(PinError::Unsupported) => ErrorCode::NotImplemented,
            PrefixError::Pin(PinError::TooShort { .. } | PinError::Refused(_)) => {
                ErrorCode::InvalidValue
            }
            PrefixError::Removed => ErrorCode::PrefixNotFound,
            PrefixError::NoAnswer => ErrorCode::InternalError,
        };
        Self::new(code, message)
    }
}
