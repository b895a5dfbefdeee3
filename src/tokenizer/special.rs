//! Special tokens inside text: cuts a text into plain pieces and tokens that stand in it by name.
//!
//! The longest name that begins at the leftmost position wins. Control tokens are recognised only
//! when the caller says that the text is trusted (`parse_special`); user-defined tokens are text
//! that the model's makers want as one token, so they are recognised always. Immutable, no thread.

use super::vocabulary::{TokenKind, Vocabulary};
use crate::request::TokenId;
use std::collections::HashMap;
use std::ops::Range;

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
    /// The special tokens of a vocabulary whose kind is `wanted`. A name that two tokens share
    /// goes to the first.
    pub(crate) fn new(vocabulary: &Vocabulary, wanted: impl Fn(TokenKind) -> bool) -> Self {
        let mut tokens: HashMap<Box<[u8]>, Entry> = HashMap::new();
        let mut lengths = vec![Vec::new(); 256];
        for (token, kind) in vocabulary.kinds().filter(|(_, kind)| wanted(*kind)) {
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

    /// Cuts `text`; control tokens are recognised only when `parse_special`, and never where they
    /// would touch one of the `plain` byte ranges (ascending, not overlapping).
    pub(crate) fn split<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        plain: &[Range<usize>],
    ) -> Vec<Fragment<'t>> {
        let is_trusted = |name: &Range<usize>| {
            let next = plain.partition_point(|range| range.end <= name.start);
            parse_special && plain.get(next).is_none_or(|range| range.start >= name.end)
        };
        let names = self.find(text, |entry, name| !entry.needs_trust || is_trusted(name));
        let mut fragments = Vec::with_capacity(2 * names.len() + 1);
        let mut done = 0;
        for (token, name) in names {
            if done < name.start {
                fragments.push(Fragment::Text(&text[done..name.start]));
            }
            fragments.push(Fragment::Token(token));
            done = name.end;
        }
        if done < text.len() {
            fragments.push(Fragment::Text(&text[done..]));
        }
        fragments
    }

    /// Byte ranges of the names of control tokens in `text`: ascending, not overlapping.
    pub(crate) fn control_names(&self, text: &str) -> Vec<Range<usize>> {
        let found = self.find(text, |entry, _| entry.needs_trust).into_iter();
        found.map(|(_, name)| name).collect()
    }

    /// The control token of this name.
    pub(crate) fn control(&self, name: &str) -> Option<TokenId> {
        let entry = self.tokens.get(name.as_bytes())?;
        entry.needs_trust.then_some(entry.token)
    }

    /// User-defined tokens in `text` and their byte ranges: ascending, not overlapping.
    pub(crate) fn user_defined(&self, text: &str) -> Vec<(TokenId, Range<usize>)> {
        self.find(text, |entry, _| !entry.needs_trust)
    }

    /// Allowed names from left to right, the longest at each place.
    fn find(
        &self,
        text: &str,
        allowed: impl Fn(Entry, &Range<usize>) -> bool,
    ) -> Vec<(TokenId, Range<usize>)> {
        let mut found = Vec::new();
        let mut position = 0;
        while position < text.len() {
            match self.match_at(text, position, &allowed) {
                Some((token, name)) => {
                    position = name.end;
                    found.push((token, name));
                }
                None => position += 1,
            }
        }
        found
    }

    /// The longest allowed name that begins at `position`. Both its ends are character boundaries,
    /// so that the text can be cut there (the vocabulary of a bad file may hold other byte strings).
    fn match_at(
        &self,
        text: &str,
        position: usize,
        allowed: impl Fn(Entry, &Range<usize>) -> bool,
    ) -> Option<(TokenId, Range<usize>)> {
        let rest = &text.as_bytes()[position..];
        let lengths = &self.lengths[rest[0] as usize];
        lengths.iter().find_map(|&length| {
            let entry = *self.tokens.get(rest.get(..length)?)?;
            let name = position..position + length;
            let cuttable = text.is_char_boundary(name.start) && text.is_char_boundary(name.end);
            (cuttable && allowed(entry, &name)).then_some((entry.token, name))
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
        SpecialTokens::new(&vocabulary, |_| true)
    }

    #[test]
    fn the_longest_name_at_the_leftmost_position_wins() {
        let special = special(&[
            ("<a>", TokenKind::Control),
            ("<a><b>", TokenKind::Control),
            ("<b>", TokenKind::Control),
        ]);
        assert_eq!(
            special.split("x<a><b><b>é<a", true, &[]),
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
            special.split("a<end>    ", false, &[]),
            [
                Fragment::Text("a"),
                Fragment::Token(2),
                Fragment::Text("end>"),
                Fragment::Token(1)
            ]
        );
        assert_eq!(
            special.split("a<end>    ", true, &[])[1..],
            [Fragment::Token(0), Fragment::Token(1)]
        );
    }

    #[test]
    fn names_that_touch_a_plain_range_are_text() {
        let special = special(&[
            ("<a>", TokenKind::Control),
            ("<a><b>", TokenKind::Control),
            ("::", TokenKind::UserDefined),
        ]);
        let text = "<a>::<a><b>";
        assert_eq!(special.control_names(text), [0..3, 5..11]);
        let all_plain = special.split(text, true, &[0..4, 4..11]);
        assert_eq!(all_plain[1], Fragment::Token(2));
        assert_eq!(
            (all_plain[0], all_plain[2]),
            (Fragment::Text("<a>"), Fragment::Text("<a><b>"))
        );
        // The longer name would reach into the range, the shorter one ends before it.
        let cut = special.split(text, true, &[1..2, 9..10]);
        assert_eq!(cut[2..], [Fragment::Token(0), Fragment::Text("<b>")]);
    }
}
