//! Incremental detokenizer with stop strings. (stub: being written)
use super::Tokenizer;
use crate::request::TokenId;
use std::sync::Arc;

/// Tokens in, text out; never a broken UTF-8 sequence, never a part of a stop string.
pub struct TextStream {}

/// What a token brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextStep {
    /// Text that is now certain; may be empty.
    pub text: String,
    /// A stop string was met; nothing may be pushed any more.
    pub stopped: bool,
}

impl TextStream {
    /// `stops`: stop strings; `include_stop`: keep the matched one in the text; control tokens are left out when `skip_special`.
    #[must_use]
    pub fn new(
        _tokenizer: Arc<Tokenizer>,
        _stops: &[String],
        _include_stop: bool,
        _skip_special: bool,
    ) -> Self {
        unimplemented!()
    }
    /// One more token.
    pub fn push(&mut self, _token: TokenId) -> TextStep {
        unimplemented!()
    }
    /// One more piece of text (remote runtimes).
    pub fn push_text(&mut self, _text: &str) -> TextStep {
        unimplemented!()
    }
    /// The generation ended: everything that was held back, broken UTF-8 as U+FFFD.
    pub fn finish(&mut self) -> String {
        unimplemented!()
    }
}
