//! From texts and messages to the tokens of a prompt, for every route that takes one.
//!
//! Pure, on the HTTP worker that took the request. What is not here: which fields a route reads
//! (`chat`, `completions`, `native/prompt`), and whether the prompt fits (`sampling::check_context`).

use super::chat::{Conversation, cut_behind};
use crate::http::errors::{ApiError, ErrorCode};
use crate::pool::LoadedModel;
use crate::request::TokenId;
use crate::runtime::Feature;
use crate::tokenizer::{ChatPrompt, EncodeOptions, Tokenizer};
use std::sync::Arc;

/// Prompts are tokenized the same way everywhere: the model's own BOS rule, special tokens that
/// are written out count as such.
pub const ENCODE: EncodeOptions = EncodeOptions {
    add_special: true,
    parse_special: true,
};

/// The vocabulary of a model; one that another server runs has none here, and lacks `feature`, for
/// which it is wanted by `param`.
pub fn tokenizer_of(
    model: &LoadedModel,
    feature: Feature,
    param: &str,
) -> Result<Arc<Tokenizer>, ApiError> {
    let missing = || ApiError::missing(feature, param, &model.name);
    model.tokenizer.clone().ok_or_else(missing)
}

/// Rendered and tokenized messages, cut where an answer shall continue the last one.
pub fn chat_prompt(
    model: &LoadedModel,
    tokenizer: &Tokenizer,
    conversation: &Conversation,
) -> Result<Arc<[TokenId]>, ApiError> {
    let prompt = rendered_chat(model, tokenizer, conversation)?;
    non_empty(tokenizer.encode_prompt(&prompt), "messages")
}

/// The same before it is tokenized.
pub fn rendered_chat(
    model: &LoadedModel,
    tokenizer: &Tokenizer,
    conversation: &Conversation,
) -> Result<ChatPrompt, ApiError> {
    let template = model.chat_template.as_ref().map_err(|why| {
        let missing = ApiError::missing(Feature::Chat, "messages", &model.name);
        ApiError {
            message: format!("{}: {why}", missing.message),
            ..missing
        }
    })?;
    let rendered = tokenizer.render_chat(template, &conversation.template);
    let mut prompt = rendered.map_err(|error| {
        ApiError::param(
            ErrorCode::TemplateError,
            "messages",
            format!("the chat template refuses these messages: {error}"),
        )
    })?;
    if let Some(continued) = &conversation.continued {
        let kept = cut_behind(prompt.text(), continued)?;
        prompt.truncate(kept.len());
    }
    Ok(prompt)
}

/// Refuses a prompt of no tokens.
pub fn non_empty(tokens: Vec<TokenId>, param: &str) -> Result<Arc<[TokenId]>, ApiError> {
    if tokens.is_empty() {
        let message = format!("'{param}' makes an empty prompt; a model needs at least one token");
        return Err(ApiError::invalid(param, message));
    }
    Ok(tokens.into())
}

/// A text as a prompt. `param`: the field it came from.
pub fn text_prompt(
    tokenizer: &Tokenizer,
    text: &str,
    param: &str,
) -> Result<Arc<[TokenId]>, ApiError> {
    let mut tokens = tokenizer.encode(text, ENCODE);
    if tokens.is_empty() {
        // OpenAI reads an empty prompt as "begin a document".
        let start = tokenizer.bos().or(tokenizer.eos());
        tokens.extend(start);
    }
    non_empty(tokens, param)
}
