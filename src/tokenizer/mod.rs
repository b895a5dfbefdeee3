//! Text to tokens and back: vocabulary, special tokens, pre-tokenizers, merges, chat template.
//!
//! Built once at load from a file's metadata, then immutable and shared by all threads (HTTP
//! workers encode and decode; the engine sees ids only). Reading order: this file, `vocabulary`,
//! `special` (special tokens in text), `bpe` with `pretokenizers` (byte-level vocabularies), `spm`
//! (SentencePiece vocabularies), `wordpiece` (BERT's), `from_gguf` (reading the metadata), `text_stream` (incremental
//! detokenizer with stop strings), `chat_template`, `template_traits` (what a template can do
//! with tools), `chat_prompt` (messages to tokens).
//!
//! Invariants: `encode` and `decode` never fail and never panic, whatever the text or the ids; a
//! text encoded without `parse_special` never contains a control token beside BOS and EOS.

mod bpe;
mod chat_prompt;
pub mod chat_template;
mod from_gguf;
mod gbnf;
pub mod grammar;
mod grammar_bounds;
mod pretokenizers;
mod special;
mod spm;
mod template_functions;
mod template_traits;
pub mod text_stream;
mod vocabulary;
mod wordpiece;

use crate::format::{FormatError, ModelFile};
use crate::request::TokenId;
use special::{Fragment, SpecialTokens};
use std::ops::Range;
use vocabulary::{TokenKind, Vocabulary};

pub use chat_prompt::ChatPrompt;
pub use chat_template::{ChatTemplate, TemplateError};
pub use grammar::{GrammarError, GrammarSpec, Grammars, schema_in_lark};
pub use template_traits::{CallStyle, TemplateTraits};
pub use text_stream::{TextStep, TextStream};

/// The value of `tokenizer.ggml.pre` that stands for these expressions, if there is one.
#[must_use]
pub fn pre_tokenizer_name(patterns: &[String], ignore_merges: bool) -> Option<&'static str> {
    pretokenizers::name_of(patterns, ignore_merges)
}

/// A vocabulary with its rules. Shared by all threads, immutable.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    special: SpecialTokens,
    model: Model,
    ends: SequenceRules,
    /// Ascending.
    end_tokens: Vec<TokenId>,
}

/// How plain text becomes tokens.
enum Model {
    ByteLevel(Box<bpe::ByteLevelBpe>),
    SentencePiece(Box<spm::ScoreBpe>),
    WordPiece(Box<wordpiece::WordPieces>),
    /// Token `b` is byte `b` (tests).
    Bytes,
}

/// What stands at the ends of a sequence.
#[derive(Clone, Copy, Debug, Default)]
struct SequenceRules {
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    add_bos: bool,
    add_eos: bool,
}

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
    pub fn from_gguf(file: &ModelFile) -> Result<Self, FormatError> {
        from_gguf::tokenizer(file)
    }

    /// A vocabulary that needs no file, for stand-ins and tests: token `b` is byte `b` for 0..=255, then the
    /// control tokens 256 `<|bos|>`, 257 `<|eos|>`, 258 `<|im_start|>`, 259 `<|im_end|>`; 257 and
    /// 259 end a generation. BOS is not added by itself. Every text encodes to its bytes.
    #[must_use]
    pub fn bytes() -> Self {
        let mut vocabulary = Vocabulary::with_capacity(260);
        for byte in 0..=255_u8 {
            vocabulary.push(TokenKind::Normal, |bytes| bytes.push(byte));
        }
        for name in ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"] {
            vocabulary.push(TokenKind::Control, |bytes| {
                bytes.extend_from_slice(name.as_bytes());
            });
        }
        let ends = SequenceRules {
            bos: Some(256),
            eos: Some(257),
            ..SequenceRules::default()
        };
        Self::from_parts(vocabulary, Model::Bytes, ends, vec![257, 259])
    }

    fn from_parts(
        vocabulary: Vocabulary,
        model: Model,
        ends: SequenceRules,
        end_tokens: Vec<TokenId>,
    ) -> Self {
        // SentencePiece finds user-defined tokens itself: they are part of the text around them.
        let finds_its_own = matches!(model, Model::SentencePiece(_));
        let wanted = |kind| !(finds_its_own && kind == TokenKind::UserDefined);
        Self {
            special: SpecialTokens::new(&vocabulary, wanted),
            vocabulary,
            model,
            ends,
            end_tokens,
        }
    }

    /// Text to tokens.
    #[must_use]
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<TokenId> {
        self.encode_around(text, options, &[])
    }

    /// The same, but no control token is recognised where it would touch one of the `plain` byte
    /// ranges (ascending, not overlapping).
    fn encode_around(
        &self,
        text: &str,
        options: EncodeOptions,
        plain: &[Range<usize>],
    ) -> Vec<TokenId> {
        let mut tokens = Vec::with_capacity(text.len() / 3 + 2);
        if let Some(bos) = self.ends.bos
            && self.ends.add_bos
            && options.add_special
        {
            tokens.push(bos);
        }
        let n_bos = tokens.len();
        for fragment in self.special.split(text, options.parse_special, plain) {
            match fragment {
                Fragment::Token(token) => tokens.push(token),
                Fragment::Text(text) => self.encode_plain(text, &mut tokens),
            }
        }
        if n_bos == 1 && tokens.get(1) == self.ends.bos.as_ref() {
            tokens.remove(0); // The text brought its own BOS.
        }
        if let Some(eos) = self.ends.eos
            && self.ends.add_eos
            && options.add_special
            && tokens.last() != Some(&eos)
        {
            tokens.push(eos);
        }
        tokens
    }

    /// Text without special tokens in it.
    fn encode_plain(&self, text: &str, tokens: &mut Vec<TokenId>) {
        match &self.model {
            Model::ByteLevel(bpe) => bpe.encode(text, tokens),
            Model::SentencePiece(bpe) => bpe.encode(text, tokens),
            Model::WordPiece(pieces) => pieces.encode(text, tokens),
            Model::Bytes => tokens.extend(text.bytes().map(TokenId::from)),
        }
    }

    /// Tokens to text; incomplete UTF-8 becomes U+FFFD; control tokens are left out when `skip_special`.
    /// The space that a SentencePiece encoder puts before a text is taken away again, so this is for
    /// whole texts; for a piece of one join `token_bytes` or use a `TextStream`.
    #[must_use]
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let text = self.decode_bytes(tokens, skip_special);
        String::from_utf8(text)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// The same as bytes, with nothing replaced.
    #[must_use]
    pub fn decode_bytes(&self, tokens: &[TokenId], skip_special: bool) -> Vec<u8> {
        let mut added_space = match &self.model {
            Model::SentencePiece(bpe) if bpe.adds_space_prefix() => &b" "[..],
            Model::WordPiece(_) => b" ",
            _ => &[],
        };
        let mut text = Vec::with_capacity(tokens.len() * 4);
        for &token in tokens {
            let bytes = self.token_bytes(token);
            if !self.is_control(token) {
                text.extend_from_slice(bytes.strip_prefix(added_space).unwrap_or(bytes));
                added_space = &[];
            } else if !skip_special {
                text.extend_from_slice(bytes);
            }
        }
        text
    }

    /// The bytes a token stands for in running text (special tokens: their name).
    #[must_use]
    pub fn token_bytes(&self, token: TokenId) -> &[u8] {
        self.vocabulary.bytes(token)
    }

    /// Whether the token is a control token (not shown in answers).
    #[must_use]
    pub fn is_control(&self, token: TokenId) -> bool {
        let kind = self.vocabulary.kind(token);
        matches!(kind, TokenKind::Control | TokenKind::Unknown)
    }

    /// The control token of this name.
    #[must_use]
    pub fn control_token(&self, name: &str) -> Option<TokenId> {
        self.special.control(name)
    }

    /// Tokens that end a generation (EOS, end of turn, ..), ascending.
    #[must_use]
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// Beginning of sequence.
    #[must_use]
    pub fn bos(&self) -> Option<TokenId> {
        self.ends.bos
    }

    /// End of sequence.
    #[must_use]
    pub fn eos(&self) -> Option<TokenId> {
        self.ends.eos
    }

    /// Whether encoding puts a space before a text.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        matches!(&self.model, Model::SentencePiece(bpe) if bpe.adds_space_prefix())
    }

    /// Size of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }
}
