//! Special tokens inside text: cuts a text into plain pieces and tokens that stand in it by name.
//!
//! The longest name that begins at the leftmost position wins. Control tokens are recognised only
//! when the caller says that the text is trusted (`parse_special`); user-defined tokens are text
//! that the model's makers want as one token, so they are recognised always. Immutable, no thread.

use super::vocabulary::{TokenKind, Vocabulary};
use crate::request::TokenId;
use std::collections::HashMap;

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    /// Plain text, never empty.
    Text(&'t str),
    /// A token that stood in the text by name.
    Token(TokenId),
}

/// Finds the names of special tokens.
pub(crate) struct SpecialTokens {
    /// Names to tokens.
    tokens: HashMap<Box<[u8]>, Entry>,
    /// Lengths in bytes of the names that begin with a byte, longest first, (256).
    lengths: Vec<Vec<usize>>,
}

#[derive(Clone, Copy)]
struct Entry {
    token: TokenId,
    needs_trust: bool,
}

impl SpecialTokens {
    /// The special tokens of a vocabulary. A name that two tokens share goes to the first.
    pub(crate) fn new(vocabulary: &Vocabulary) -> Self {
        let mut tokens: HashMap<Box<[u8]>, Entry> = HashMap::new();
        let mut lengths = vec![Vec::new(); 256];
        for (token, kind) in vocabulary.kinds() {
            let needs_trust = match kind {
                TokenKind::Control | TokenKind::Unknown => true,
                TokenKind::UserDefined => false,
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => continue,
            };
            let name = vocabulary.bytes(token);
            let Some(&first) = name.first() else { continue };
            lengths[first as usize].push(name.len());
            tokens
                .entry(name.into())
                .or_insert(Entry { token, needs_trust });
        }
        for of_byte in &mut lengths {
            of_byte.sort_unstable_by(|a: &usize, b| b.cmp(a));
            of_byte.dedup();
        }
        Self { tokens, lengths }
    }

    /// Cuts `text`; control tokens are recognised only when `parse_special`.
    pub(crate) fn split<'t>(&self, text: &'t str, parse_special: bool) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let mut plain_start = 0;
        let mut position = 0;
        while position < text.len() {
            let Some((token, length)) = self.match_at(text, position, parse_special) else {
                position += 1;
                continue;
            };
            if plain_start < position {
                fragments.push(Fragment::Text(&text[plain_start..position]));
            }
            fragments.push(Fragment::Token(token));
            position += length;
            plain_start = position;
        }
        if plain_start < text.len() {
            fragments.push(Fragment::Text(&text[plain_start..]));
        }
        fragments
    }

    /// The longest name that stands at `position`. Both its ends are character boundaries, so
    /// that the text can be cut there (the vocabulary of a bad file may hold other byte strings).
    fn match_at(&self, text: &str, position: usize, trusted: bool) -> Option<(TokenId, usize)> {
        let rest = &text.as_bytes()[position..];
        let lengths = &self.lengths[rest[0] as usize];
        lengths.iter().find_map(|&length| {
            let entry = self.tokens.get(rest.get(..length)?)?;
            let allowed = trusted || !entry.needs_trust;
            let cuttable =
                text.is_char_boundary(position) && text.is_char_boundary(position + length);
            (allowed && cuttable).then_some((entry.token, length))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(names: &[(&str, TokenKind)]) -> SpecialTokens {
        let mut vocabulary = Vocabulary::with_capacity(names.len());
        for (name, kind) in names {
            vocabulary.push(*kind, |bytes| bytes.extend_from_slice(name.as_bytes()));
        }
        SpecialTokens::new(&vocabulary)
    }

    #[test]
    fn the_longest_name_at_the_leftmost_position_wins() {
        let special = special(&[
            ("<a>", TokenKind::Control),
            ("<a><b>", TokenKind::Control),
            ("<b>", TokenKind::Control),
        ]);
        assert_eq!(
            special.split("x<a><b><b>é<a", true),
            [
                Fragment::Text("x"),
                Fragment::Token(1),
                Fragment::Token(2),
                Fragment::Text("é<a")
            ]
        );
    }

    #[test]
    fn control_tokens_need_trust_and_user_defined_ones_do_not() {
        let special = special(&[
            ("<end>", TokenKind::Control),
            ("    ", TokenKind::UserDefined),
            ("<", TokenKind::UserDefined),
        ]);
        assert_eq!(
            special.split("a<end>    ", false),
            [
                Fragment::Text("a"),
                Fragment::Token(2),
                Fragment::Text("end>"),
                Fragment::Token(1)
            ]
        );
        assert_eq!(
            special.split("a<end>    ", true)[1..],
            [Fragment::Token(0), Fragment::Token(1)]
        );
    }
}
