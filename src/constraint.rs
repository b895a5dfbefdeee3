//! Rules about which tokens an answer may hold, as the engine sees them: sets of tokens, nothing of
//! the grammar behind them.
//!
//! Plain words that cross threads. A source belongs to a request and may begin as often as it likes;
//! what it begins belongs to one sequence and goes along with its tokens. What is not here: grammars
//! (`tokenizer/grammar`), who computes the sets and when (`engine/masks`).

use std::fmt;

/// A vocabulary index, as in `request`, which stands above this file.
type TokenId = u32;

/// Tokens of a vocabulary, one bit each.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSet {
    /// Token `t` is bit `t % 32` of word `t / 32`. Those beyond the last word are not in it.
    words: Vec<u32>,
}

impl TokenSet {
    /// From its words; see the field.
    #[must_use]
    pub fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// The set of these tokens.
    #[must_use]
    pub fn of(tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut words = Vec::new();
        for token in tokens {
            let word = token as usize / 32;
            if word >= words.len() {
                words.resize(word + 1, 0);
            }
            words[word] |= 1_u32 << (token % 32);
        }
        Self { words }
    }

    /// Whether a token is in it.
    #[must_use]
    pub fn contains(&self, token: TokenId) -> bool {
        let word = self.words.get(token as usize / 32);
        word.is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// How many are in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Whether none is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Makes the logits `(vocab_size)` of all other tokens minus infinity.
    pub fn keep_only(&self, logits: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(32).zip(words) {
            match word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                _ => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

impl fmt::Debug for TokenSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenSet({} tokens)", self.len())
    }
}

/// What may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    /// Tokens that come in any case, in order; the constraint has gone past them already. Empty
    /// unless they were asked for.
    pub forced: Vec<TokenId>,
    /// Tokens of which one comes after them; None = the answer is complete.
    pub allowed: Option<TokenSet>,
}

/// A constraint on the way through one answer. Calls may take milliseconds.
pub trait Constraint: Send {
    /// Goes past the tokens that the answer got since the last call and says what comes then.
    ///
    /// # Errors
    /// In words for the client: the tokens don't fit, or the rules are too complex to go on.
    fn advance(&mut self, tokens: &[TokenId], wants_forced: bool) -> Result<Next, String>;
}

/// The rules of a request, ready to begin. Shared by all its parts.
pub trait ConstraintSource: fmt::Debug + Send + Sync {
    /// At the beginning of an answer.
    fn begin(&self) -> Box<dyn Constraint>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_keep_what_is_in_them_and_nothing_beyond() {
        let set = TokenSet::from_words(vec![0b101, u32::MAX, 0]);
        assert!(set.contains(0) && !set.contains(1) && set.contains(2));
        assert!(set.contains(32) && set.contains(63) && !set.contains(64));
        assert!(!set.contains(96) && !set.contains(TokenId::MAX));
        assert_eq!((set.len(), set.is_empty()), (34, false));
        let mut logits = vec![1.0; 100];
        set.keep_only(&mut logits);
        for (token, logit) in (0..).zip(&logits) {
            assert_eq!(logit.is_finite(), set.contains(token), "{token}");
        }
        assert!(TokenSet::from_words(vec![0, 0]).is_empty());
        assert_eq!(TokenSet::of([2, 0, 33, 2]).len(), 3);
        assert!(TokenSet::of([2, 0, 33]).contains(33) && TokenSet::of([]).is_empty());
    }
}
