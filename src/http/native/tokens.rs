//! `POST /v1/native/tokenize` and `/v1/native/detokenize`.
//!
//! Answered by the HTTP worker at once: no queue, no slot, no engine. Their work is bounded by the
//! largest body that the server takes. Ids come back lossless: a text that is not UTF-8 is told with
//! its bytes.

use super::prompt::exactly_one;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::openai::chat::Conversation;
use crate::http::openai::fields::{Fields, parse_object};
use crate::http::openai::prompt::{chat_prompt, tokenizer_of};
use crate::http::openai::sampling::token_ids;
use crate::pool::LoadedModel;
use crate::request::TokenId;
use crate::runtime::Feature;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use serde::Serialize;
use std::borrow::Cow;
use std::sync::Arc;

#[rustfmt::skip]
const TOKENIZE_FIELDS: &[&str] = &[
    "model", "text", "messages", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort", "add_special", "parse_special", "with_pieces",
];
const DETOKENIZE_FIELDS: &[&str] = &["model", "tokens", "skip_special"];

#[derive(Serialize)]
struct Tokenized<'a> {
    model: &'a str,
    count: usize,
    context_length: u32,
    tokens: &'a [TokenId],
    #[serde(skip_serializing_if = "Option::is_none")]
    pieces: Option<Vec<TokenPiece<'a>>>,
}

#[derive(Serialize)]
struct TokenPiece<'a> {
    token: TokenId,
    text: Cow<'a, str>,
    bytes: &'a [u8],
    /// Not shown in answers unless asked for.
    special: bool,
}

#[derive(Serialize)]
struct Detokenized<'a> {
    model: &'a str,
    text: &'a str,
    /// Something of it was not UTF-8 and stands there as U+FFFD.
    lossy: bool,
    /// What the text stands for, where it does not say so itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<&'a [u8]>,
}

/// `POST /v1/native/tokenize`
pub fn tokenize(call: &Call<'_>, exchange: Exchange) {
    let (model, tokenizer, tokens, with_pieces) = match read_tokenize(call) {
        Ok(read) => read,
        Err(error) => return exchange.error(&error),
    };
    let piece = |token: &TokenId| {
        let bytes = tokenizer.token_bytes(*token);
        TokenPiece {
            token: *token,
            text: String::from_utf8_lossy(bytes),
            bytes,
            special: tokenizer.is_control(*token),
        }
    };
    exchange.json(&Tokenized {
        model: &model.name,
        count: tokens.len(),
        context_length: model.context_length,
        tokens: &tokens,
        pieces: with_pieces.then(|| tokens.iter().map(piece).collect()),
    });
}

type Read = (Arc<LoadedModel>, Arc<Tokenizer>, Arc<[TokenId]>, bool);

fn read_tokenize(call: &Call<'_>) -> Result<Read, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    fields.refuse_unknown(TOKENIZE_FIELDS)?;
    let (model, _) = call.model(&fields)?;
    let tokenizer = tokenizer_of(&model, Feature::Tokenize, "model")?;
    let with_pieces = fields.flag("with_pieces", false)?;
    let options = EncodeOptions {
        add_special: fields.flag("add_special", true)?,
        parse_special: fields.flag("parse_special", true)?,
    };
    let tokens = match exactly_one(&fields, &["text", "messages"])? {
        "messages" => {
            for name in ["add_special", "parse_special"] {
                if fields.get(name).is_some() {
                    let why = "the template decides that for messages";
                    return Err(ApiError::unsupported(name, why));
                }
            }
            chat_prompt(&model, &tokenizer, &Conversation::parse(&fields, true)?)?
        }
        _ => {
            let text = fields.string("text")?.unwrap_or_default();
            tokenizer.encode(text, options).into()
        }
    };
    Ok((model, tokenizer, tokens, with_pieces))
}

/// `POST /v1/native/detokenize`
pub fn detokenize(call: &Call<'_>, exchange: Exchange) {
    let (model, bytes) = match read_detokenize(call) {
        Ok(read) => read,
        Err(error) => return exchange.error(&error),
    };
    let text = String::from_utf8_lossy(&bytes);
    let lossy = text.as_bytes() != bytes;
    exchange.json(&Detokenized {
        model: &model.name,
        text: &text,
        lossy,
        bytes: lossy.then_some(&bytes),
    });
}

fn read_detokenize(call: &Call<'_>) -> Result<(Arc<LoadedModel>, Vec<u8>), ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    fields.refuse_unknown(DETOKENIZE_FIELDS)?;
    let (model, _) = call.model(&fields)?;
    let tokenizer = tokenizer_of(&model, Feature::Tokenize, "model")?;
    let skip_special = fields.flag("skip_special", false)?;
    let Some(items) = fields.array("tokens")? else {
        let text = "'tokens' is missing; it is an array of token ids";
        let code = ErrorCode::MissingRequiredParameter;
        return Err(ApiError::param(code, "tokens", text));
    };
    let tokens = token_ids(items, "tokens", tokenizer.vocab_size())?;
    Ok((model, tokenizer.decode_bytes(&tokens, skip_special)))
}
