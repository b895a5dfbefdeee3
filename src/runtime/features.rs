//! What a runtime can be asked for, by name: a request that needs what its model lacks is refused
//! with that name.
//!
//! Plain data. What is not here: which field of which route needs what (`http`), and how much a
//! runtime holds (`Capability`).

use crate::config::Embeddings;
use std::fmt;

/// Something that some runtimes can do and others can't.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Feature {
    /// Chat messages.
    Chat,
    /// Texts to continue.
    Completions,
    /// Prompts given as token ids, and token ids in answers.
    TokenIds,
    /// Tokenize and detokenize without generating.
    Tokenize,
    /// Log-probabilities of generated tokens.
    Logprobs,
    /// Log-probabilities of prompt tokens, and with them scores.
    PromptLogprobs,
    /// The prompt in the answer.
    Echo,
    /// Candidates compared by their log-probabilities.
    BestOf,
    /// Loops, early exit.
    Loops,
    /// Sliding attention windows.
    CacheWindow,
    /// Registered prefixes.
    Prefixes,
    /// Tool calls.
    Tools,
    /// Images in messages.
    Vision,
    /// Speech in messages.
    Audio,
    /// More than one turn of a conversation.
    MultiTurn,
    /// Answers constrained by a schema or a grammar.
    StructuredOutput,
    /// Vectors of texts.
    Embeddings,
}

impl Feature {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Chat,
        Self::Completions,
        Self::TokenIds,
        Self::Tokenize,
        Self::Logprobs,
        Self::PromptLogprobs,
        Self::Echo,
        Self::BestOf,
        Self::Loops,
        Self::CacheWindow,
        Self::Prefixes,
        Self::Tools,
        Self::Vision,
        Self::Audio,
        Self::MultiTurn,
        Self::StructuredOutput,
        Self::Embeddings,
    ];

    /// Its name in errors and lists.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::TokenIds => "token_ids",
            Self::Tokenize => "tokenize",
            Self::Logprobs => "logprobs",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::Echo => "echo",
            Self::BestOf => "best_of",
            Self::Loops => "loops",
            Self::CacheWindow => "cache_window",
            Self::Prefixes => "prefixes",
            Self::Tools => "tools",
            Self::Vision => "vision",
            Self::Audio => "audio",
            Self::MultiTurn => "multi_turn",
            Self::StructuredOutput => "structured_output",
            Self::Embeddings => "embeddings",
        }
    }
}

/// A set of features.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Features(u32);

impl Features {
    /// These.
    #[must_use]
    pub fn of(features: &[Feature]) -> Self {
        let bits = features.iter().map(|feature| 1 << *feature as u8);
        Self(bits.fold(0, |all: u32, bit: u32| all | bit))
    }

    /// What the built-in engine can.
    #[must_use]
    pub fn native() -> Self {
        use Feature as F;
        Self::of(&[
            F::Chat,
            F::Completions,
            F::TokenIds,
            F::Tokenize,
            F::Logprobs,
            F::PromptLogprobs,
            F::Echo,
            F::BestOf,
            F::Loops,
            F::CacheWindow,
            F::Prefixes,
            F::Tools,
            F::MultiTurn,
            F::StructuredOutput,
            F::Embeddings,
        ])
    }

    /// What the built-in engine can with a model that makes nothing but embeddings.
    #[must_use]
    pub fn native_encoder() -> Self {
        use Feature as F;
        Self::of(&[F::TokenIds, F::Tokenize, F::Embeddings])
    }

    /// What is forwarded to other servers through their OpenAI routes.
    #[must_use]
    pub fn upstream() -> Self {
        use Feature as F;
        Self::of(&[
            F::Chat,
            F::Completions,
            F::Logprobs,
            F::Tools,
            F::MultiTurn,
            F::StructuredOutput,
        ])
    }

    /// The same where the configuration says what the model makes.
    #[must_use]
    pub fn upstream_with(embeddings: Embeddings) -> Self {
        let embeds = Self::of(&[Feature::Embeddings]);
        match embeddings {
            Embeddings::No => Self::upstream(),
            Embeddings::Also => Self(Self::upstream().0 | embeds.0),
            Embeddings::Only => embeds,
        }
    }

    /// Without one.
    #[must_use]
    pub fn without(self, feature: Feature) -> Self {
        Self(self.0 & !(1 << feature as u8))
    }

    /// Whether it is there.
    #[must_use]
    pub fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u8) != 0
    }

    /// What both have.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Names, in a fixed order.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let there = Feature::ALL.into_iter().filter(move |f| self.has(*f));
        there.map(Feature::name)
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_was_put_in() {
        for feature in Feature::ALL {
            let alone = Features::of(&[feature]);
            assert_eq!(alone.names().collect::<Vec<_>>(), [feature.name()]);
            assert!(alone.has(feature));
        }
        let both = Features::native().and(Features::upstream());
        assert!(both.has(Feature::Logprobs) && !both.has(Feature::Loops));
        assert!(both.has(Feature::StructuredOutput) && !both.has(Feature::Prefixes));
        let less = both.without(Feature::Logprobs);
        assert!(!less.has(Feature::Logprobs) && less.has(Feature::Chat));
    }
}
