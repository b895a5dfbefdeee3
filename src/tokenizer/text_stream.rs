//! Incremental detokenizer with stop strings: tokens in, text that is certain out.
//!
//! Owned by the one thread that writes a response. Invariants, whatever the splitting of the
//! input: the texts given out, joined, are the whole input decoded at once (invalid UTF-8 as
//! U+FFFD, one per maximal invalid part) and cut where the first stop string is met; no text ends
//! inside a UTF-8 sequence; nothing that may still become part of a stop string is given out.
//!
//! ```text
//! bytes -> [partial: <= 3 bytes of an unfinished character] -> [held: may begin a stop] -> text
//! ```
//!
//! Which stop string is *first*: the one that ends first, because a generation stops as soon as
//! one is complete; of two that end together the longer. This does not depend on the splitting.
//! What is not here: tokens that end a generation (the engine knows those).

use super::Tokenizer;
use crate::request::TokenId;
use std::sync::Arc;

/// Tokens in, text out; never a broken UTF-8 sequence, never a part of a stop string.
pub struct TextStream {
    /// None where only text is pushed (remote runtimes).
    tokenizer: Option<Arc<Tokenizer>>,
    /// Stop strings; empty ones never match.
    stops: Vec<String>,
    include_stop: bool,
    skip_special: bool,
    /// Shown all the same.
    shown: Arc<[TokenId]>,
    /// The beginning of a UTF-8 sequence, at most 3 bytes between calls.
    partial: Vec<u8>,
    /// Text that is not given out yet: between calls a proper prefix of a stop string.
    held: String,
    /// The stop string that was met.
    stop_idx: Option<usize>,
    /// Tokens so far.
    n_tokens: u32,
    /// A stop string that is complete before so many is text.
    min_tokens: u32,
}

/// What a token brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextStep {
    /// Text that is now certain; may be empty.
    pub text: String,
    /// Which stop string was met, in the order given; nothing more may be pushed then.
    pub stop_idx: Option<usize>,
}

impl TextStream {
    /// `stops`: stop strings; `include_stop`: keep the matched one in the text; control tokens are left out when `skip_special`.
    #[must_use]
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        stops: &[String],
        include_stop: bool,
        skip_special: bool,
    ) -> Self {
        Self {
            tokenizer: Some(tokenizer),
            skip_special,
            ..Self::for_text(stops, include_stop)
        }
    }

    /// A stream for runtimes that send text only; tokens pushed into it bring nothing.
    #[must_use]
    pub fn for_text(stops: &[String], include_stop: bool) -> Self {
        Self {
            tokenizer: None,
            stops: stops.to_vec(),
            include_stop,
            skip_special: false,
            shown: Arc::default(),
            partial: Vec::new(),
            held: String::new(),
            stop_idx: None,
            n_tokens: 0,
            min_tokens: 0,
        }
    }

    /// Stop strings count from this many tokens on.
    #[must_use]
    pub fn not_before(mut self, min_tokens: u32) -> Self {
        self.min_tokens = min_tokens;
        self
    }

    /// These control tokens are text whatever `skip_special` says: marks that tell the parts of an
    /// answer apart.
    #[must_use]
    pub fn showing(mut self, tokens: Arc<[TokenId]>) -> Self {
        self.shown = tokens;
        self
    }

    /// One more token.
    pub fn push(&mut self, token: TokenId) -> TextStep {
        self.n_tokens = self.n_tokens.saturating_add(1);
        if let Some(tokenizer) = &self.tokenizer
            && self.stop_idx.is_none()
            && !(self.skip_special && tokenizer.is_control(token) && !self.shown.contains(&token))
        {
            self.partial.extend_from_slice(tokenizer.token_bytes(token));
            move_certain_characters(&mut self.partial, &mut self.held);
        }
        self.step()
    }

    /// One more piece of text (remote runtimes).
    pub fn push_text(&mut self, text: &str) -> TextStep {
        if self.stop_idx.is_none() {
            self.partial.extend_from_slice(text.as_bytes());
            move_certain_characters(&mut self.partial, &mut self.held);
        }
        self.step()
    }

    /// The generation ended: everything that was held back, broken UTF-8 as U+FFFD.
    pub fn finish(&mut self) -> String {
        if self.stop_idx.is_some() {
            return String::new();
        }
        if !self.partial.is_empty() {
            // What is left is the unfinished beginning of one sequence.
            self.partial.clear();
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        let mut text = self.step().text;
        text.push_str(&std::mem::take(&mut self.held));
        text
    }

    /// Takes out of `held` what is certain.
    fn step(&mut self) -> TextStep {
        if self.stop_idx.is_some() {
            return TextStep {
                text: String::new(),
                stop_idx: self.stop_idx,
            };
        }
        let is_early = self.n_tokens < self.min_tokens;
        let found = first_stop(&self.stops, &self.held).filter(|_| !is_early);
        if let Some((stop_idx, start, end)) = found {
            self.stop_idx = Some(stop_idx);
            self.partial.clear();
            self.held
                .truncate(if self.include_stop { end } else { start });
        }
        let certain = match self.stop_idx {
            Some(_) => self.held.len(),
            None => self.held.len() - possible_stop_bytes(&self.stops, &self.held),
        };
        let rest = self.held.split_off(certain);
        TextStep {
            text: std::mem::replace(&mut self.held, rest),
            stop_idx: self.stop_idx,
        }
    }
}

/// Moves whole characters from `partial` to `text`; each maximal invalid part becomes one U+FFFD
/// as soon as no following byte could make it valid. Leaves an unfinished sequence (<= 3 bytes).
fn move_certain_characters(partial: &mut Vec<u8>, text: &mut String) {
    let mut rest = partial.as_slice();
    while !rest.is_empty() {
        let error = match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                continue;
            }
            Err(error) => error,
        };
        let (valid, broken) = rest.split_at(error.valid_up_to());
        text.push_str(std::str::from_utf8(valid).expect("checked up to this byte"));
        rest = broken;
        let Some(n_invalid) = error.error_len() else {
            break; // The sequence may be completed by the bytes to come.
        };
        text.push(char::REPLACEMENT_CHARACTER);
        rest = &rest[n_invalid..];
    }
    let n_done = partial.len() - rest.len();
    partial.drain(..n_done);
}

/// Index and byte range of the stop string that ends first in `text`; of those that end together the longest.
fn first_stop(stops: &[String], text: &str) -> Option<(usize, usize, usize)> {
    let given = stops
        .iter()
        .enumerate()
        .filter(|(_, stop)| !stop.is_empty());
    let found = given.filter_map(|(stop_idx, stop)| {
        let start = text.find(stop.as_str())?;
        Some((stop_idx, start, start + stop.len()))
    });
    found.min_by_key(|&(_, start, end)| (end, start))
}

/// Length of the longest suffix of `text` that is a proper prefix of a stop string.
fn possible_stop_bytes(stops: &[String], text: &str) -> usize {
    let longest_stop = stops.iter().map(String::len).max().unwrap_or(0);
    let first = (text.len() + 1).saturating_sub(longest_stop);
    let is_open = |start: &usize| {
        let suffix = &text.as_bytes()[*start..];
        let opens =
            |stop: &String| stop.len() > suffix.len() && stop.as_bytes().starts_with(suffix);
        stops.iter().any(opens)
    };
    let start = (first..text.len()).find(is_open);
    start.map_or(0, |start| text.len() - start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stops(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    /// Bytes pushed as tokens; the steps' texts and whether it stopped.
    fn steps(bytes: &[u8], stop: &[&str], include_stop: bool) -> (Vec<String>, bool) {
        let tokenizer = Arc::new(Tokenizer::bytes());
        let mut stream = TextStream::new(tokenizer, &stops(stop), include_stop, true);
        let mut texts = Vec::new();
        let mut stopped = false;
        for &byte in bytes {
            let step = stream.push(TokenId::from(byte));
            stopped |= step.stop_idx.is_some();
            texts.push(step.text);
        }
        texts.push(stream.finish());
        (texts, stopped)
    }

    #[test]
    fn characters_come_whole_and_broken_ones_as_soon_as_they_are_certain() {
        let (texts, _) = steps("é€🙂".as_bytes(), &[], false);
        assert_eq!(texts, ["", "é", "", "", "€", "", "", "", "🙂", ""]);
        let (texts, _) = steps(b"\xff\xe2\x82a\xf0\x9f", &[], false);
        assert_eq!(texts, ["\u{fffd}", "", "", "\u{fffd}a", "", "", "\u{fffd}"]);
    }

    #[test]
    fn stop_strings_are_held_back_and_released() {
        let (texts, stopped) = steps(b"aaab!", &["aab"], false);
        assert_eq!(texts, ["", "", "a", "", "", ""]);
        assert!(stopped);
        let (texts, stopped) = steps(b"aaac", &["aab"], false);
        assert_eq!(texts.concat(), "aaac");
        assert!(!stopped);
        let (texts, _) = steps(b"x</s", &["</s>"], false);
        assert_eq!(texts, ["x", "", "", "", "</s"]);
    }

    #[test]
    fn stop_strings_before_min_tokens_are_text() {
        for (min_tokens, expected) in [
            (0, "x"),
            (3, "x"),
            (4, "xaby"),
            (6, "xaby"),
            (7, "xabya"),
            (8, "xabyab!"),
        ] {
            let tokenizer = Arc::new(Tokenizer::bytes());
            let stream = TextStream::new(tokenizer, &stops(&["ab", "b!"]), false, true);
            let mut stream = stream.not_before(min_tokens);
            let mut text = String::new();
            for byte in b"xabyab!" {
                text.push_str(&stream.push(TokenId::from(*byte)).text);
            }
            text.push_str(&stream.finish());
            assert_eq!(text, expected, "{min_tokens}");
        }
    }

    #[test]
    fn the_stop_that_is_complete_first_wins() {
        let (texts, _) = steps(b"abcd", &["abcd", "bc"], false);
        assert_eq!(texts.concat(), "a");
        let (texts, _) = steps(b"xabc", &["bc", "abc"], false);
        assert_eq!(texts.concat(), "x");
        let (texts, _) = steps(b"xabcd", &["bc", "abc"], true);
        assert_eq!(texts.concat(), "xabc");
    }

    #[test]
    fn stop_strings_inside_multi_byte_text() {
        let (texts, stopped) = steps("日本語é終ü".as_bytes(), &["é終"], false);
        assert_eq!(texts.concat(), "日本語");
        assert!(stopped);
        // U+00E9 and U+00EA share their first byte.
        let (texts, stopped) = steps("aê".as_bytes(), &["aé"], false);
        assert_eq!(texts.concat(), "aê");
        assert!(!stopped);
    }

    #[test]
    fn control_tokens_are_shown_only_on_demand() {
        for (skip_special, shown) in [(true, "ab"), (false, "a<|im_end|>b")] {
            let tokenizer = Arc::new(Tokenizer::bytes());
            let mut stream = TextStream::new(tokenizer, &[], false, skip_special);
            let tokens = [u32::from(b'a'), 259, u32::from(b'b'), 1_000_000];
            let text: String = tokens.map(|token| stream.push(token).text).concat();
            assert_eq!(text, shown);
        }
    }

    #[test]
    fn marks_are_shown_although_other_control_tokens_are_not() {
        let tokenizer = Arc::new(Tokenizer::bytes());
        let mut stream = TextStream::new(tokenizer, &[], false, true).showing([258].into());
        let text: String = [258, 97, 259].map(|token| stream.push(token).text).concat();
        assert_eq!(text, "<|im_start|>a");
    }

    #[test]
    fn an_empty_stop_string_never_matches() {
        let (texts, stopped) = steps(b"ab", &[""], false);
        assert_eq!(texts, ["a", "b", ""]);
        assert!(!stopped);
    }

    /// The definition: decode everything, cut where a stop string is complete first.
    fn whole(bytes: &[u8], stops: &[String], include_stop: bool) -> String {
        let text = String::from_utf8_lossy(bytes).into_owned();
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let met = stops.iter().filter(|stop| text[..end].ends_with(*stop));
            if let Some(longest) = met.map(String::len).max() {
                let kept = if include_stop { end } else { end - longest };
                return text[..kept].to_owned();
            }
        }
        text
    }

    fn some_bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            5 => prop::sample::select(vec!["a", "b", "ab", "é", "ê", "終", "👩‍👩‍👧", "\u{301}"])
                .prop_map(|text| text.as_bytes().to_vec()),
            1 => prop::collection::vec(any::<u8>(), 1..4),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_splitting_gives_the_whole_text(
            bytes in some_bytes(),
            stops in prop::collection::vec("[ab]{1,4}|é終|b👩|\u{fffd}a?", 0..4),
            include_stop: bool,
        ) {
            let expected = whole(&bytes, &stops, include_stop);
            let tokenizer = Arc::new(Tokenizer::bytes());
            let mut stream = TextStream::new(tokenizer, &stops, include_stop, true);
            let mut text = String::new();
            for &byte in &bytes {
                let step = stream.push(TokenId::from(byte));
                prop_assert!(stream.partial.len() <= 3);
                text.push_str(&step.text);
                prop_assert!(expected.starts_with(&text));
                if step.stop_idx.is_some() {
                    break;
                }
            }
            text.push_str(&stream.finish());
            prop_assert_eq!(text, expected);
        }

        #[test]
        fn pieces_of_text_give_the_same_as_one_piece(
            pieces in prop::collection::vec("[ab]{0,3}|é|終", 0..12),
            stops in prop::collection::vec("[ab]{1,3}|é終", 0..3),
        ) {
            let expected = whole(pieces.concat().as_bytes(), &stops, false);
            let mut stream = TextStream::for_text(&stops, false);
            let mut text = String::new();
            for piece in &pieces {
                text.push_str(&stream.push_text(piece).text);
            }
            text.push_str(&stream.finish());
            prop_assert_eq!(text, expected);
        }
    }
}
