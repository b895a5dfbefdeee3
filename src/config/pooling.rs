//! How the states of a text's tokens become one vector.
//!
//! Pure data. What is not here: the arithmetic (`engine/pooled`).

use serde::Deserialize;

/// Which states an embedding is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Pooling {
    /// The mean of all tokens' states.
    Mean,
    /// The state of the first token, which encoders are trained to put there.
    Cls,
    /// The state of the last token.
    Last,
}

impl Pooling {
    /// Its name in configurations and lists.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
        }
    }
}
