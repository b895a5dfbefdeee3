//! "Don't repeat yourself": which tokens would continue a repetition, and how long it is by then.
//!
//! After the description of its author, github.com/oobabooga/text-generation-webui/pull/5677: for
//! every place of the text that ends like the whole text does, the token that came next there is
//! penalized, the more the longer the common ending is. An ending does not reach over a sequence
//! breaker, and a breaker itself is never penalized. Pure; the work is linear in the tokens looked
//! at. What is not here: words that must not come at all ([`ends_in_bad_word`] finds those).

use crate::request::{Dry, TokenId};

/// Penalties grow exponentially; beyond this there is no difference to make, and logits stay finite.
const PENALTY_MAX: f32 = 1e30;

/// The tokens to be penalized, each once, with what their logits lose. `tokens`: prompt first.
pub(super) fn penalties(tokens: &[TokenId], dry: &Dry) -> Vec<(TokenId, f32)> {
    let n_seen = tokens.len().min(dry.last_n as usize);
    let seen = &tokens[tokens.len() - n_seen..];
    let longest = unbroken_end(seen, dry);
    let mut found: Vec<(TokenId, u32)> = Vec::new();
    for (place, length) in common_endings(seen, longest) {
        let next = seen[place];
        if length >= dry.allowed_length && length > 0 && !dry.breakers.contains(next) {
            found.push((next, length));
        }
    }
    found.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    found.dedup_by_key(|(token, _)| *token);
    let penalty = |length: u32| {
        let power = dry.base.powf((length - dry.allowed_length) as f32);
        (dry.multiplier * power).min(PENALTY_MAX)
    };
    let found = found.into_iter();
    found
        .map(|(token, length)| (token, penalty(length)))
        .collect()
}

/// How many tokens stand behind the last breaker.
fn unbroken_end(seen: &[TokenId], dry: &Dry) -> usize {
    let is_broken_before = |end: usize| {
        let ending = &seen[..end];
        ending
            .last()
            .is_some_and(|last| dry.breakers.contains(*last))
            || dry.breaker_sequences.iter().any(|s| ending.ends_with(s))
    };
    let behind = (1..=seen.len()).rev().find(|end| is_broken_before(*end));
    seen.len() - behind.unwrap_or(0)
}

/// For every place `p` in `1..len`: how many tokens before it equal the end of all, at most
/// `longest`. The Z-function of the reversed tokens.
fn common_endings(seen: &[TokenId], longest: usize) -> impl Iterator<Item = (usize, u32)> {
    let n = seen.len();
    let at = |index: usize| seen[n - 1 - index];
    let mut z = vec![0_usize; n];
    let (mut left, mut right) = (0, 0);
    for start in 1..n {
        let mut length = match start < right {
            true => z[start - left].min(right - start),
            false => 0,
        };
        while start + length < n && at(length) == at(start + length) {
            length += 1;
        }
        z[start] = length;
        if start + length > right {
            (left, right) = (start, start + length);
        }
    }
    // What ends `start` tokens before the end is followed by the place `n - start`.
    (1..n).map(move |start| (n - start, z[start].min(longest) as u32))
}

/// The tokens that would complete a word which must not come, by the tokens generated so far.
pub(super) fn ends_in_bad_word<'a>(
    generated: &'a [TokenId],
    bad_words: &'a [Vec<TokenId>],
) -> impl Iterator<Item = TokenId> + 'a {
    bad_words.iter().filter_map(move |word| {
        let (last, before) = word.split_last()?;
        generated.ends_with(before).then_some(*last)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraint::TokenSet;
    use proptest::prelude::*;

    fn dry(allowed_length: u32, last_n: u32, breakers: &[TokenId]) -> Dry {
        Dry {
            multiplier: 0.5,
            base: 2.0,
            allowed_length,
            last_n,
            breakers: TokenSet::of(breakers.iter().copied()),
            breaker_sequences: Vec::new(),
        }
    }

    #[test]
    fn what_would_continue_a_repetition_is_penalized_by_its_length() {
        let text = [1, 2, 3, 4, 9, 1, 2, 3];
        assert_eq!(penalties(&text, &dry(2, u32::MAX, &[])), [(4, 1.0)]);
        assert_eq!(penalties(&text, &dry(3, u32::MAX, &[])), [(4, 0.5)]);
        assert_eq!(penalties(&text, &dry(4, u32::MAX, &[])), []);
        // The window holds 4 9 1 2 3 only; a breaker shortens the ending; it is not penalized itself.
        assert_eq!(penalties(&text, &dry(2, 5, &[])), []);
        assert_eq!(penalties(&text, &dry(2, u32::MAX, &[1])), [(4, 0.5)]);
        assert_eq!(penalties(&text, &dry(2, u32::MAX, &[2])), []);
        assert_eq!(penalties(&text, &dry(2, u32::MAX, &[4])), []);
        let of_two = Dry {
            breaker_sequences: vec![vec![1, 2]],
            ..dry(1, u32::MAX, &[])
        };
        assert_eq!(penalties(&text, &of_two), [(4, 0.5)]);
        for short in [&[][..], &[1]] {
            assert_eq!(penalties(short, &dry(0, u32::MAX, &[])), []);
        }
        let long = vec![1; 4000];
        assert_eq!(penalties(&long, &dry(2, u32::MAX, &[])), [(1, PENALTY_MAX)]);
    }

    #[test]
    fn a_word_is_bad_when_its_last_token_would_come() {
        let words = [vec![5], vec![1, 2, 6], vec![2, 7]];
        let bad: Vec<TokenId> = ends_in_bad_word(&[1, 2], &words).collect();
        assert_eq!(bad, [5, 6, 7]);
        assert_eq!(ends_in_bad_word(&[], &words).collect::<Vec<_>>(), [5]);
    }

    /// The author's way: go back from every place that equals the end, token by token.
    fn by_looking_back(tokens: &[TokenId], dry: &Dry) -> Vec<(TokenId, f32)> {
        let seen = &tokens[tokens.len().saturating_sub(dry.last_n as usize)..];
        let mut found = std::collections::BTreeMap::new();
        for next in 1..seen.len() {
            let mut length = 0;
            while length < next
                && seen[next - 1 - length] == seen[seen.len() - 1 - length]
                && !dry.breakers.contains(seen[next - 1 - length])
            {
                length += 1;
            }
            if length as u32 >= dry.allowed_length
                && length > 0
                && !dry.breakers.contains(seen[next])
            {
                let most = found.entry(seen[next]).or_insert(length);
                *most = length.max(*most);
            }
        }
        let penalty = |length: usize| {
            let excess = length as i32 - dry.allowed_length as i32;
            (dry.multiplier * dry.base.powi(excess)).min(PENALTY_MAX)
        };
        let found = found.into_iter();
        found
            .map(|(token, length)| (token, penalty(length)))
            .collect()
    }

    proptest! {
        #[test]
        fn penalties_equal_those_of_looking_back(
            tokens in prop::collection::vec(0..4_u32, 0..60),
            allowed_length in 0..4_u32,
            last_n in prop_oneof![Just(u32::MAX), 0..60_u32],
            breaker in 0..8_u32,
        ) {
            let dry = dry(allowed_length, last_n, &[breaker]);
            prop_assert_eq!(penalties(&tokens, &dry), by_looking_back(&tokens, &dry));
        }
    }
}
