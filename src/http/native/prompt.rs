//! Which field a native request's prompt stands in, and its tokens.
//!
//! Pure, on the HTTP worker. A text, token ids or messages: exactly one of them, because guessing
//! which was meant would hide a mistake. What is not here: how texts and messages become tokens
//! (`openai/prompt`).

use crate::http::errors::{ApiError, ErrorCode};
use crate::http::openai::chat::Conversation;
use crate::http::openai::fields::Fields;
use crate::http::openai::prompt::{chat_prompt, non_empty, text_prompt};
use crate::http::openai::sampling::token_ids;
use crate::pool::LoadedModel;
use crate::request::TokenId;
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// The one field of `names` that is there.
pub fn exactly_one(fields: &Fields<'_>, names: &[&'static str]) -> Result<&'static str, ApiError> {
    let is_given = |name: &&'static str| fields.get(name).is_some();
    let mut given = names.iter().copied().filter(is_given);
    match (given.next(), given.next()) {
        (Some(only), None) => Ok(only),
        (found, _) => {
            let found = if found.is_some() { "several" } else { "none" };
            let message = format!(
                "exactly one of '{}' says what the prompt is; {found} of them came",
                names.join("', '")
            );
            let param = names.first().copied().unwrap_or_default();
            let code = ErrorCode::MissingRequiredParameter;
            Err(ApiError::param(code, param, message))
        }
    }
}

/// The tokens of a prompt, at least one, and the field that they came from. `text` is the name of
/// the field that holds a text; `for_answer`: messages end with the opening of the answer's turn.
pub fn read(
    model: &LoadedModel,
    tokenizer: &Tokenizer,
    fields: &Fields<'_>,
    text: &'static str,
    for_answer: bool,
) -> Result<(Arc<[TokenId]>, &'static str), ApiError> {
    let source = exactly_one(fields, &[text, "messages", "tokens"])?;
    let tokens = match source {
        "messages" => {
            let conversation = Conversation::parse(fields, for_answer)?;
            chat_prompt(model, tokenizer, &conversation)?
        }
        "tokens" => {
            let items = fields.array("tokens")?.unwrap_or_default();
            non_empty(
                token_ids(items, "tokens", tokenizer.vocab_size())?,
                "tokens",
            )?
        }
        _ => {
            let words = fields.string(text)?.unwrap_or_default();
            text_prompt(tokenizer, words, text)?
        }
    };
    Ok((tokens, source))
}
