//! The tokens of a vocabulary: the bytes each stands for and its kind. Immutable after
//! construction, shared by all threads. What is not here: how text becomes tokens.

use crate::request::TokenId;

/// What a token is for; the discriminants are GGUF's `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for text that the vocabulary cannot express.
    Unknown,
    /// Structure: begin of text, end of turn, .. Never made from a client's plain text.
    Control,
    /// Added by the model's makers, but text all the same: always recognised as one token.
    UserDefined,
    /// A hole in the vocabulary.
    Unused,
    /// One byte, written `<0x0A>` (SentencePiece vocabularies).
    Byte,
}

impl TokenKind {
    /// Reads GGUF's number; None for numbers that the format does not define.
    pub(crate) fn from_gguf(number: i64) -> Option<Self> {
        match number {
            1 => Some(Self::Normal),
            2 => Some(Self::Unknown),
            3 => Some(Self::Control),
            4 => Some(Self::UserDefined),
            5 => Some(Self::Unused),
            6 => Some(Self::Byte),
            _ => None,
        }
    }
}

/// Bytes and kind of every token, flat in memory.
pub(crate) struct Vocabulary {
    /// The bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// Where each token's bytes end, (vocab_size); they begin where the previous token's end.
    ends: Vec<u32>,
    /// (vocab_size)
    kinds: Vec<TokenKind>,
}

impl Vocabulary {
    /// An empty vocabulary with room for `n_tokens`.
    pub(crate) fn with_capacity(n_tokens: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(n_tokens * 8),
            ends: Vec::with_capacity(n_tokens),
            kinds: Vec::with_capacity(n_tokens),
        }
    }

    /// Appends the next token. Its bytes are written by `write`, so that no copy is needed.
    pub(crate) fn push(&mut self, kind: TokenKind, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        // A GGUF file's strings together are far below 4 GiB: `format` bounds them by the file.
        self.ends.push(self.bytes.len() as u32);
        self.kinds.push(kind);
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; empty for ids outside the vocabulary.
    pub(crate) fn bytes(&self, token: TokenId) -> &[u8] {
        let index = token as usize;
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1],
        };
        &self.bytes[start as usize..end as usize]
    }

    /// The kind of a token; ids outside the vocabulary are holes.
    pub(crate) fn kind(&self, token: TokenId) -> TokenKind {
        match self.kinds.get(token as usize) {
            Some(&kind) => kind,
            None => TokenKind::Unused,
        }
    }

    /// All ids with their kinds.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (TokenId, TokenKind)> + '_ {
        (0..).zip(self.kinds.iter().copied())
    }
}
