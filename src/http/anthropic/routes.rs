//! The routes of the Messages API.
//!
//! On HTTP workers. What is not here: running the jobs (`generation::run`), the dialect of errors
//! (`http::error_style`).

use super::asked::Asked;
use super::shape::MessageShape;
use crate::http::dialect::count_prompt;
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::prepare::{self, Work};
use crate::http::generation::run::run;
use crate::http::openai::fields::{Fields, parse_object};
use serde_json::json;

/// `POST /v1/messages`
pub fn messages(call: &Call<'_>, exchange: Exchange) {
    run(prepared(call), call, exchange);
}

fn prepared(call: &Call<'_>) -> Result<Work<MessageShape>, ApiError> {
    let body = parse_object(call.request.body())?;
    let mut asked = Asked::parse(&body, true)?;
    let name = Fields::new(&body).string("model")?.unwrap_or_default();
    let found = call.state.pool().look_up(name);
    if found.is_ok_and(|model| model.tokenizer.is_none()) {
        asked.leave_thinking_to_server();
    }
    let prepared = prepare::chat(call, &asked.chat).map_err(|error| asked.origins.own(error))?;
    Ok(prepared.shaped(|info| MessageShape::new(info, &asked)))
}

/// `POST /v1/messages/count_tokens`: without a place in the queue.
pub fn count_tokens(call: &Call<'_>, exchange: Exchange) {
    let counted = parse_object(call.request.body()).and_then(|body| {
        let asked = Asked::parse(&body, false)?;
        count_prompt(call, &asked.chat).map_err(|error| asked.origins.own(error))
    });
    match counted {
        Ok(n_tokens) => exchange.json(&json!({"input_tokens": n_tokens})),
        Err(error) => exchange.error(&error),
    }
}
