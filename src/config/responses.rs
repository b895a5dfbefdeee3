//! How many responses are kept for clients that come back to them: `[responses]`.
//!
//! Plain data. What is not here: the store (`http::responses`).

use super::seconds;
use serde::Deserialize;
use std::time::Duration;

/// Bounds of the store, which is memory only: a restart forgets it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResponsesConfig {
    /// Most responses, of all clients together; 0 = none is kept.
    pub max_kept: usize,
    /// Most bytes that they take together.
    pub max_bytes: usize,
    /// How long one is kept; in the file `ttl_s`.
    #[serde(rename = "ttl_s", deserialize_with = "seconds")]
    pub ttl: Duration,
}

impl Default for ResponsesConfig {
    fn default() -> Self {
        Self {
            max_kept: 4096,
            max_bytes: 64 << 20,
            ttl: Duration::from_secs(24 * 60 * 60),
        }
    }
}
