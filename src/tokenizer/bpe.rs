//! Byte-level BPE (`tokenizer.ggml.model = gpt2`): words by the pre-tokenizer, then merges by the
//! `tokenizers` crate. Immutable, shared by all threads.
//!
//! The crate's BPE model is used directly; its pre-tokenizer pipeline is not, because that keeps
//! an alignment for every byte, which costs several times the merging itself and which nobody
//! here reads. Control tokens are not in the model's vocabulary, so plain text cannot become one.

use super::pretokenizers::PreTokenizer;
use super::vocabulary::{TokenKind, Vocabulary};
use crate::request::TokenId;
use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

/// Words that each thread remembers with their tokens; bounds the memory a thread holds per model.
const CACHED_WORDS_MAX: usize = 4096;

/// A byte-level BPE model.
pub(crate) struct ByteLevelBpe {
    merger: BPE,
    words: PreTokenizer,
    /// The character that stands for each byte in token texts, (256).
    byte_chars: [char; 256],
}

impl ByteLevelBpe {
    /// `texts`: the tokens as the file writes them, (vocab_size); `merges`: `left right` by
    /// falling priority. Merges of tokens that the vocabulary lacks can never apply and are left out.
    pub(crate) fn new(
        texts: &[String],
        vocabulary: &Vocabulary,
        merges: &[String],
        words: PreTokenizer,
    ) -> Result<Self, String> {
        let mut ids = Vocab::with_capacity(texts.len());
        for (text, (token, kind)) in texts.iter().zip(vocabulary.kinds()) {
            let mergeable = match kind {
                TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte => true,
                TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => false,
            };
            if mergeable {
                ids.entry(text.clone()).or_insert(token);
            }
        }
        let mut pairs = Merges::with_capacity(merges.len());
        let mut joined = String::new();
        for (index, merge) in merges.iter().enumerate() {
            let Some((left, right)) = split_merge(merge) else {
                return Err(format!(
                    "tokenizer.ggml.merges[{index}]: `{merge}` is not two tokens with a space between"
                ));
            };
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            if [left, right, &joined]
                .iter()
                .all(|part| ids.contains_key(*part))
            {
                pairs.push((left.to_owned(), right.to_owned()));
            }
        }
        let merger = BPE::builder()
            .vocab_and_merges(ids, pairs)
            .cache_capacity(CACHED_WORDS_MAX)
            .ignore_merges(words.ignore_merges())
            .build()
            .map_err(|error| format!("tokenizer.ggml.merges: {error}"))?;
        Ok(Self {
            merger,
            words,
            byte_chars: byte_chars(),
        })
    }

    /// Appends the tokens of a plain text.
    pub(crate) fn encode(&self, text: &str, tokens: &mut Vec<TokenId>) {
        let mut word = String::new();
        for (start, end) in self.words.words(text) {
            word.clear();
            let bytes = text[start..end].bytes();
            word.extend(bytes.map(|byte| self.byte_chars[byte as usize]));
            // The crate's only failure is a missing unknown token, and none is configured.
            if let Ok(merged) = self.merger.tokenize(&word) {
                tokens.extend(merged.iter().map(|token| token.id));
            }
        }
    }
}

/// `left right`; a token may itself begin with a space in odd files.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let space = first + merge[first..].find(' ')?;
    let (left, right) = (&merge[..space], &merge[space + 1..]);
    (!right.is_empty()).then_some((left, right))
}

/// The character that stands for each byte: printable Latin-1 for itself, the others from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut next = 0x100_u32;
    std::array::from_fn(|byte| match byte as u8 {
        printable @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) => char::from(printable),
        _ => {
            next += 1;
            char::from_u32(next - 1).expect("U+0100..U+0144 are characters")
        }
    })
}

/// Turns token texts back into the bytes they stand for.
pub(crate) struct ByteDecoder {
    /// The byte of each character U+0000..U+0144, where it stands for one.
    bytes: [Option<u8>; 0x144],
}

impl ByteDecoder {
    /// The inverse of the encoder's table.
    pub(crate) fn new() -> Self {
        let mut bytes = [None; 0x144];
        for (byte, character) in (0..=255_u8).zip(byte_chars()) {
            bytes[character as usize] = Some(byte);
        }
        Self { bytes }
    }

    /// Appends the bytes of a token; a text that is not written in the byte alphabet stands for itself.
    pub(crate) fn decode(&self, text: &str, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        for character in text.chars() {
            let Some(&Some(byte)) = self.bytes.get(character as usize) else {
                bytes.truncate(start);
                bytes.extend_from_slice(text.as_bytes());
                return;
            };
            bytes.push(byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_complete_and_inverted_by_the_decoder() {
        let chars = byte_chars();
        assert_eq!(chars[b' ' as usize], 'Ġ');
        assert_eq!(chars[b'\n' as usize], 'Ċ');
        assert_eq!(chars[0xAD], '\u{143}');
        let mut bytes = Vec::new();
        ByteDecoder::new().decode(&chars.iter().collect::<String>(), &mut bytes);
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        bytes.clear();
        ByteDecoder::new().decode("日a", &mut bytes);
        assert_eq!(bytes, "日a".as_bytes());
    }

    #[test]
    fn merges_are_two_tokens() {
        assert_eq!(split_merge("Ġ a"), Some(("Ġ", "a")));
        assert_eq!(split_merge("  b"), Some((" ", "b")));
        assert_eq!(split_merge("ab"), None);
        assert_eq!(split_merge("a "), None);
        assert_eq!(split_merge(""), None);
    }
}
