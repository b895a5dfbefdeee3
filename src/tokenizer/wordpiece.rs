//! WordPiece: the vocabularies of BERT and its kin. Built on the `tokenizers` crate.
//!
//! Text is cleaned of control characters, lowered and freed of accents (unless the vocabulary has
//! capitals), cut at white space, punctuation and around CJK characters; then each word becomes the
//! longest pieces from the left, or the unknown token where they do not cover it. GGUF files write
//! pieces that begin a word with `▁` before them and others as they are. Immutable, shared by all
//! threads.

use super::vocabulary::TokenKind;
use crate::request::TokenId;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    Model as _, NormalizedString, Normalizer as _, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer as _,
};

/// What stands before pieces that begin a word.
const WORD_START: char = '▁';
/// Longer words are unknown, as everywhere.
const WORD_CHARS_MAX: usize = 100;
/// A word of the vocabulary that no text contains: it stands for the unknown token in the crate.
const UNKNOWN: &str = "\0unknown";

/// The model.
pub(crate) struct WordPieces {
    normalizer: BertNormalizer,
    model: WordPiece,
    unknown: TokenId,
}

impl WordPieces {
    /// `unknown`: the token of words that the pieces do not cover.
    pub(crate) fn new(
        texts: &[String],
        kinds: &[TokenKind],
        unknown: TokenId,
    ) -> Result<Self, String> {
        let mut ids = Vocab::default();
        ids.insert(UNKNOWN.to_owned(), unknown);
        let mut has_capitals = false;
        for ((token, text), kind) in (0..).zip(texts).zip(kinds) {
            let is_text = matches!(kind, TokenKind::Normal | TokenKind::UserDefined);
            if !is_text || token == unknown {
                continue;
            }
            let word = text.strip_prefix(WORD_START);
            // Names like `[MASK]` have capitals in every vocabulary, and a few signs count as such.
            let is_name = word.unwrap_or(text).starts_with('[') && text.ends_with(']');
            has_capitals |= !is_name && text.bytes().any(|byte| byte.is_ascii_uppercase());
            let piece = word.map_or_else(|| format!("##{text}"), str::to_owned);
            // A text that two tokens share goes to the first.
            ids.entry(piece).or_insert(token);
        }
        let model = WordPiece::builder()
            .vocab(ids)
            .unk_token(UNKNOWN.to_owned())
            .max_input_chars_per_word(WORD_CHARS_MAX)
            .build()
            .map_err(|error| format!("tokenizer.ggml.tokens: {error}"))?;
        let is_lowered = !has_capitals;
        Ok(Self {
            // Clean, separate CJK characters, strip accents where letters are lowered.
            normalizer: BertNormalizer::new(true, true, None, is_lowered),
            model,
            unknown,
        })
    }

    /// Appends the tokens of a plain text.
    pub(crate) fn encode(&self, text: &str, tokens: &mut Vec<TokenId>) {
        let mut normalized = NormalizedString::from(text);
        // Neither step of the crate fails on any text; if one did, the text would be unknown.
        if self.normalizer.normalize(&mut normalized).is_err() {
            return tokens.push(self.unknown);
        }
        let mut words = PreTokenizedString::from(normalized);
        if BertPreTokenizer.pre_tokenize(&mut words).is_err() {
            return tokens.push(self.unknown);
        }
        for (word, ..) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            match self.model.tokenize(word) {
                Ok(pieces) => tokens.extend(pieces.iter().map(|piece| piece.id)),
                Err(_) => tokens.push(self.unknown),
            }
        }
    }
}

/// The bytes of a token in running text: a piece that begins a word has a space before it.
pub(crate) fn decode(text: &str, bytes: &mut Vec<u8>) {
    match text.strip_prefix(WORD_START) {
        Some(word) => {
            bytes.push(b' ');
            bytes.extend_from_slice(word.as_bytes());
        }
        None => bytes.extend_from_slice(text.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(texts: &[&str]) -> WordPieces {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        let mut kinds = vec![TokenKind::Normal; texts.len()];
        kinds[0] = TokenKind::Unknown;
        WordPieces::new(&texts, &kinds, 0).expect("a vocabulary")
    }

    fn encoded(model: &WordPieces, text: &str) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        model.encode(text, &mut tokens);
        tokens
    }

    #[test]
    fn words_become_the_longest_pieces_or_unknown() {
        let model = pieces(&["[UNK]", "▁un", "able", "▁the", "s", "▁!", "▁日"]);
        assert_eq!(encoded(&model, "Unable thes!"), [1, 2, 3, 4, 5]);
        assert_eq!(encoded(&model, "unablex"), [0]);
        assert_eq!(encoded(&model, "thé日日!\u{7}"), [3, 6, 6, 5]);
        assert!(encoded(&model, "  \t").is_empty());
        let long = format!("un{}", "s".repeat(99));
        assert_eq!(encoded(&model, &long), [0], "more than 100 characters");
        assert_eq!(encoded(&model, &long[1..]), [0]);
        assert_eq!(encoded(&model, &long[..100]).len(), 99);
        // No text is the crate's word for the unknown token.
        assert_eq!(encoded(&model, UNKNOWN), [0]);
    }

    #[test]
    fn capitals_in_the_vocabulary_keep_capitals_and_accents() {
        let model = pieces(&["[UNK]", "▁The", "▁the", "▁thé"]);
        assert_eq!(encoded(&model, "The the THE thé"), [1, 2, 0, 3]);
        let model = pieces(&["[UNK]", "▁the"]);
        assert_eq!(encoded(&model, "The the THE thé"), [1; 4]);
    }
}
