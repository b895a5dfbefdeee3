//! `POST /tokenize`, `/detokenize`, `/apply-template`: texts and tokens, without a place in the queue.
//!
//! Runs on HTTP workers. What is not here: our own routes of that kind (`native/tokens`).

use crate::http::errors::{ApiError, ErrorCode};
use crate::http::generation::call::Call;
use crate::http::openai::chat::Conversation;
use crate::http::openai::fields::{Fields, as_integer, parse_object, wrong_kind};
use crate::http::openai::prompt::{rendered_chat, tokenizer_of};
use crate::http::openai::sampling::token_ids;
use crate::request::TokenId;
use crate::runtime::Feature;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::{Value, json};

pub(super) fn tokenize(call: &Call<'_>) -> Result<Value, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let (model, _) = call.model(&fields)?;
    let tokenizer = tokenizer_of(&model, Feature::Tokenize, "model")?;
    let options = EncodeOptions {
        add_special: fields.flag("add_special", false)?,
        parse_special: fields.flag("parse_special", true)?,
    };
    let with_pieces = fields.flag("with_pieces", false)?;
    let tokens = match fields.get("content") {
        None => Vec::new(),
        Some(content) => mixed_tokens(&tokenizer, content, "content", options)?,
    };
    let piece = |token: &TokenId| {
        let bytes = tokenizer.token_bytes(*token);
        let piece = std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), Value::from);
        json!({"id": token, "piece": piece})
    };
    Ok(match with_pieces {
        true => json!({"tokens": tokens.iter().map(piece).collect::<Vec<_>>()}),
        false => json!({"tokens": tokens}),
    })
}

/// Tokens of a text, or of an array of texts and token ids. Special tokens are added before the
/// first element only, and only if it is a text.
pub(super) fn mixed_tokens(
    tokenizer: &Tokenizer,
    content: &Value,
    name: &str,
    options: EncodeOptions,
) -> Result<Vec<TokenId>, ApiError> {
    let expected = "a string, or an array of strings and token ids";
    let items = match content {
        Value::String(text) => return Ok(tokenizer.encode(text, options)),
        Value::Array(items) => items,
        other => return Err(wrong_kind(name, other, expected)),
    };
    let mut tokens = Vec::new();
    for (index, item) in items.iter().enumerate() {
        match item {
            Value::String(text) => {
                let add_special = options.add_special && index == 0;
                let options = EncodeOptions {
                    add_special,
                    ..options
                };
                tokens.extend(tokenizer.encode(text, options));
            }
            _ if as_integer(item).is_some() => {
                let one = std::slice::from_ref(item);
                tokens.extend(token_ids(one, name, tokenizer.vocab_size())?);
            }
            other => return Err(wrong_kind(name, other, expected)),
        }
    }
    Ok(tokens)
}

pub(super) fn detokenize(call: &Call<'_>) -> Result<Value, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let (model, _) = call.model(&fields)?;
    let tokenizer = tokenizer_of(&model, Feature::Tokenize, "model")?;
    let items = fields.array("tokens")?.unwrap_or_default();
    let tokens = token_ids(items, "tokens", tokenizer.vocab_size())?;
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| tokenizer.token_bytes(*token))
        .copied()
        .collect();
    Ok(json!({"content": String::from_utf8_lossy(&bytes)}))
}

pub(super) fn apply_template(call: &Call<'_>) -> Result<Value, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let (model, _) = call.model(&fields)?;
    let tokenizer = tokenizer_of(&model, Feature::Tokenize, "model")?;
    if fields.get("messages").is_none() {
        let code = ErrorCode::MissingRequiredParameter;
        return Err(ApiError::param(code, "messages", "'messages' is missing"));
    }
    let conversation = Conversation::parse(&fields, true)?;
    let prompt = rendered_chat(&model, &tokenizer, &conversation)?;
    Ok(json!({"prompt": prompt.text()}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_ids_may_be_mixed() {
        let tokenizer = Tokenizer::bytes();
        let options = EncodeOptions {
            add_special: false,
            parse_special: true,
        };
        let tokens = |content: Value| mixed_tokens(&tokenizer, &content, "content", options);
        assert_eq!(tokens(json!("ab")), Ok(vec![97, 98]));
        assert_eq!(tokens(json!([1, "a", 2])), Ok(vec![1, 97, 2]));
        assert_eq!(tokens(json!([])), Ok(Vec::new()));
        for bad in [json!(5), json!([[1]]), json!([260]), json!([1.5])] {
            let error = tokens(bad.clone()).expect_err(&bad.to_string());
            assert_eq!(error.param.as_deref(), Some("content"));
        }
    }
}
