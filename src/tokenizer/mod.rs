//! Text to tokens and back. (stub: being written)
pub mod chat_template;
pub mod text_stream;

use crate::format::{FormatError, Gguf};
use crate::request::TokenId;

pub use chat_template::{ChatTemplate, TemplateError};
pub use text_stream::{TextStep, TextStream};

/// A vocabulary with its rules. Shared by all threads, immutable.
pub struct Tokenizer {}

/// How text becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Put BOS (and EOS) where the model's rules ask for it; never a second BOS.
    pub add_special: bool,
    /// Recognise special tokens written out in the text, like `<|im_end|>`.
    pub parse_special: bool,
}

impl Tokenizer {
    /// Built from `tokenizer.ggml.*`.
    pub fn from_gguf(_file: &Gguf) -> Result<Self, FormatError> {
        unimplemented!()
    }
    /// Text to tokens.
    #[must_use]
    pub fn encode(&self, _text: &str, _options: EncodeOptions) -> Vec<TokenId> {
        unimplemented!()
    }
    /// Tokens to text; incomplete UTF-8 becomes U+FFFD; control tokens are left out when `skip_special`.
    #[must_use]
    pub fn decode(&self, _tokens: &[TokenId], _skip_special: bool) -> String {
        unimplemented!()
    }
    /// The bytes a token stands for in running text (special tokens: their name).
    #[must_use]
    pub fn token_bytes(&self, _token: TokenId) -> &[u8] {
        unimplemented!()
    }
    /// Whether the token is a control token (not shown in answers).
    #[must_use]
    pub fn is_control(&self, _token: TokenId) -> bool {
        unimplemented!()
    }
    /// Tokens that end a generation (EOS, end of turn, ..), ascending.
    #[must_use]
    pub fn end_tokens(&self) -> &[TokenId] {
        unimplemented!()
    }
    /// Beginning of sequence.
    #[must_use]
    pub fn bos(&self) -> Option<TokenId> {
        unimplemented!()
    }
    /// End of sequence.
    #[must_use]
    pub fn eos(&self) -> Option<TokenId> {
        unimplemented!()
    }
    /// Size of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        unimplemented!()
    }
}
