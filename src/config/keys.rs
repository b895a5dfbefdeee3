//! Clients of the data plane: `[keys.NAME]`.
//!
//! Plain data, no thread. What is not here: what a key looks like and how it is compared
//! (`http::auth`), and what its limits do (`http::quota`, `scheduler`).

use serde::Deserialize;

/// Most that a weight may be: beyond it one key starves the others, which a priority says better.
pub(super) const WEIGHT_MAX: u32 = 1000;

/// A client of the data plane: `[keys.NAME]`.
#[derive(Clone, PartialEq)]
pub struct KeyConfig {
    /// In logs and lists, instead of the key.
    pub name: String,
    /// What it sends, or `sha256:` and the hash of that in 64 hexadecimal digits.
    pub key: String,
    /// Environment variable that holds the key (or its hash) instead.
    pub key_env: Option<String>,
    /// Names, or patterns with `*` and `?`, of the models that it may use; empty = all.
    pub models: Vec<String>,
    /// What it may ask for.
    pub limits: KeyLimits,
}

/// What one key may ask for; the defaults limit nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyLimits {
    /// Highest priority of its requests; a higher one is lowered to it.
    pub max_priority: i32,
    /// Its part of a model's time, next to the weights of the other keys that want it, 1..=1000.
    pub weight: u32,
    /// Requests of it that run in a model while others wait; more only where a slot would be idle.
    pub max_inflight: Option<u32>,
    /// Requests of it that may wait in a model's queue.
    pub max_queued: Option<usize>,
    /// Requests that it may send per minute, over all models.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers that it may use per minute, over all models.
    pub tokens_per_minute: Option<u32>,
}

impl Default for KeyLimits {
    fn default() -> Self {
        Self {
            max_priority: i32::MAX,
            weight: 1,
            max_inflight: None,
            max_queued: None,
            requests_per_minute: None,
            tokens_per_minute: None,
        }
    }
}

impl std::fmt::Debug for KeyConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, limits, .. } = self; // never the key itself
        write!(f, "KeyConfig({name}, {limits:?})")
    }
}

impl KeyConfig {
    /// A key without limits.
    #[must_use]
    pub fn new(name: impl Into<String>, key: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            key: key.into(),
            key_env: None,
            models: Vec::new(),
            limits: KeyLimits::default(),
        }
    }

    /// What is wrong with it, if anything is; without the name of the key.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let limits = &self.limits;
        let zero = [
            ("max_inflight", limits.max_inflight == Some(0)),
            ("requests_per_minute", limits.requests_per_minute == Some(0)),
            ("tokens_per_minute", limits.tokens_per_minute == Some(0)),
        ];
        match (self.key.is_empty(), &self.key_env) {
            (true, None) => return Some("`key` is empty; give `key` or `key_env`".to_owned()),
            (false, Some(_)) => return Some("give `key` or `key_env`, not both".to_owned()),
            (true, Some(_)) | (false, None) => {}
        }
        if !(1..=WEIGHT_MAX).contains(&limits.weight) {
            let weight = limits.weight;
            return Some(format!(
                "weight is {weight}; it must be from 1 to {WEIGHT_MAX}"
            ));
        }
        let (name, _) = zero.into_iter().find(|(_, is_zero)| *is_zero)?;
        Some(format!("{name} is 0; it must be at least 1, or left out"))
    }
}

/// The table as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileKey {
    #[serde(default)]
    key: String,
    key_env: Option<String>,
    #[serde(default)]
    models: Vec<String>,
    max_priority: Option<i32>,
    weight: Option<u32>,
    max_inflight: Option<u32>,
    max_queued: Option<usize>,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u32>,
}

pub(super) fn key_config((name, file): (String, FileKey)) -> KeyConfig {
    let default = KeyLimits::default();
    KeyConfig {
        name,
        key: file.key,
        key_env: file.key_env,
        models: file.models,
        limits: KeyLimits {
            max_priority: file.max_priority.unwrap_or(default.max_priority),
            weight: file.weight.unwrap_or(default.weight),
            max_inflight: file.max_inflight,
            max_queued: file.max_queued,
            requests_per_minute: file.requests_per_minute,
            tokens_per_minute: file.tokens_per_minute,
        },
    }
}
