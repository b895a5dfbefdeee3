//! Who asks, and what it may: the client behind a key.
//!
//! Immutable, shared by all requests of the key; only its [`Quota`] changes. [`Access`] is what a
//! request carries: a client, or nobody in particular where no key is asked, who may do everything.
//! What is not here: how keys are compared (`auth`).

use super::quota::Quota;
use crate::config::KeyConfig;
use crate::scheduler::Share;
use std::sync::Arc;
use std::time::Instant;

/// The client behind a key.
#[derive(Debug)]
pub struct Client {
    name: Arc<str>,
    /// As configured, without the secret.
    config: KeyConfig,
    quota: Option<Arc<Quota>>,
}

impl Client {
    /// With full buckets, or with those of the same client before a reload that left its limits alone.
    #[must_use]
    pub fn new(config: &KeyConfig, before: Option<&Client>, now: Instant) -> Self {
        let config = KeyConfig {
            key: String::new(),
            ..config.clone()
        };
        let same = before.filter(|before| before.config.limits == config.limits);
        let quota = match same {
            Some(before) => before.quota.clone(),
            None => Quota::new(&config.limits, now).map(Arc::new),
        };
        Self {
            name: config.name.as_str().into(),
            config,
            quota,
        }
    }

    /// May be logged and listed.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }
}

/// What the client of one request may do; the default is everything.
#[derive(Clone, Debug, Default)]
pub struct Access {
    client: Option<Arc<Client>>,
}

impl Access {
    /// That of a client.
    #[must_use]
    pub fn of(client: Arc<Client>) -> Self {
        let client = Some(client);
        Self { client }
    }

    /// Who asks; None when no key is asked.
    #[must_use]
    pub fn name(&self) -> Option<&Arc<str>> {
        self.client.as_ref().map(|client| &client.name)
    }

    /// Highest priority of its requests.
    #[must_use]
    pub fn max_priority(&self) -> i32 {
        let client = self.client.as_ref();
        client.map_or(i32::MAX, |client| client.config.limits.max_priority)
    }

    /// Its part of a model's time.
    #[must_use]
    pub fn share(&self) -> Share {
        let Some(client) = &self.client else {
            return Share::default();
        };
        let limits = &client.config.limits;
        Share {
            weight: limits.weight,
            max_inflight: limits.max_inflight,
            max_queued: limits.max_queued,
        }
    }

    /// Its requests and tokens per minute; None where they are not limited.
    #[must_use]
    pub fn quota(&self) -> Option<&Arc<Quota>> {
        self.client.as_ref()?.quota.as_ref()
    }

    /// Whether there may be models that it does not know of.
    #[must_use]
    pub fn is_restricted(&self) -> bool {
        let client = self.client.as_ref();
        client.is_some_and(|client| !client.config.models.is_empty())
    }

    /// Whether it may use the model that has this name and these aliases, and may know of it.
    #[must_use]
    pub fn allows(&self, name: &str, aliases: &[String]) -> bool {
        let patterns = self.client.as_ref().map(|client| &client.config.models);
        let Some(patterns) = patterns.filter(|patterns| !patterns.is_empty()) else {
            return true;
        };
        let mut ids = std::iter::once(name).chain(aliases.iter().map(String::as_str));
        ids.any(|id| patterns.iter().any(|pattern| matches(pattern, id)))
    }
}

/// Whether `text` is of the form of `pattern`, where `*` is any text and `?` any one character. Linear in
/// both but for one way back per `*`, so that no pattern takes long.
fn matches(pattern: &str, text: &str) -> bool {
    let (mut pattern, mut text) = (pattern.chars(), text.chars());
    let mut back: Option<(std::str::Chars<'_>, std::str::Chars<'_>)> = None;
    loop {
        let here = text.clone();
        match (pattern.next(), text.next()) {
            (Some('*'), _) => {
                back = Some((pattern.clone(), here.clone()));
                text = here;
                continue;
            }
            (None, None) => return true,
            (Some('?'), Some(_)) => continue,
            (Some(wanted), Some(found)) if wanted == found => continue,
            _ => {}
        }
        // The last star takes one character more.
        let Some((after_star, mut from)) = back.take() else {
            return false;
        };
        if from.next().is_none() {
            return false;
        }
        (pattern, text) = (after_star.clone(), from.clone());
        back = Some((after_star, from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_choose_models() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("*", "", true),
            ("*", "a/b", true),
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "ab", true),
            ("*b", "aab", true),
            ("*b", "aba", false),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abced", false),
            ("?", "é", true),
            ("a?c", "ac", false),
            ("*?", "", false),
            ("a**b", "ab", true),
            ("small-*", "small-2@x", true),
            ("[a]", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_client_is_allowed_what_its_patterns_name() {
        let config = KeyConfig {
            models: vec!["small-*".to_owned(), "big".to_owned()],
            ..KeyConfig::new("a", "secret")
        };
        let access = Access::of(Arc::new(Client::new(&config, None, Instant::now())));
        assert!(access.allows("small-1", &[]) && access.allows("x", &["big".to_owned()]));
        assert!(!access.allows("bigger", &[]));
        assert!(!format!("{access:?}").contains("secret"));
        assert!(Access::default().allows("anything", &[]));
        let all = Client::new(&KeyConfig::new("b", "k"), None, Instant::now());
        assert!(Access::of(Arc::new(all)).allows("anything", &[]));
    }

    /// The plain definition.
    fn by_definition(pattern: &[char], text: &[char]) -> bool {
        match (pattern.split_first(), text.split_first()) {
            (None, None) => true,
            (Some((&'*', rest)), _) => {
                by_definition(rest, text)
                    || text
                        .split_first()
                        .is_some_and(|(_, text)| by_definition(pattern, text))
            }
            (Some((&wanted, pattern)), Some((&found, text))) => {
                (wanted == '?' || wanted == found) && by_definition(pattern, text)
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn patterns_match_by_definition(pattern in "[ab*?]{0,6}", text in "[ab]{0,8}") {
            let pattern_chars: Vec<char> = pattern.chars().collect();
            let text_chars: Vec<char> = text.chars().collect();
            prop_assert_eq!(matches(&pattern, &text), by_definition(&pattern_chars, &text_chars));
        }
    }
}
