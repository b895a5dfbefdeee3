//! API keys of the data plane and the admin key of the management plane.
//!
//! Immutable after start, shared by all workers. A key comes as `Authorization: Bearer KEY` or
//! `x-api-key: KEY`. The comparison takes the same time wherever two keys of one length differ,
//! and looks at every key. What is not here: which routes ask for one (`router`).

use super::errors::{ApiError, ErrorCode};
use crate::config::KeyConfig;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Who a key belongs to, and what it may ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// May be logged and listed.
    pub name: Arc<str>,
    /// Highest priority of its requests; a higher one is lowered to it.
    pub max_priority: i32,
}

/// Keys that open a plane; none = everything is open.
#[derive(Clone, Default)]
pub struct Keys {
    keys: Vec<(String, Client)>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({} keys)", self.keys.len()) // never the keys themselves
    }
}

impl Keys {
    /// Keys given one by one, named by their place (`key-1`); empty ones are left out.
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = String>) -> Self {
        let keys = keys.into_iter().filter(|key| !key.is_empty()).zip(1..);
        let keys = keys.map(|(key, place)| {
            let name = format!("key-{place}").into();
            let max_priority = i32::MAX;
            (key, Client { name, max_priority })
        });
        Self {
            keys: keys.collect(),
        }
    }

    /// And those with names and limits of their own.
    #[must_use]
    pub fn with_clients(mut self, clients: &[KeyConfig]) -> Self {
        let clients = clients.iter().map(|config| {
            let client = Client {
                name: config.name.as_str().into(),
                max_priority: config.max_priority,
            };
            (config.key.clone(), client)
        });
        self.keys.extend(clients);
        self
    }

    /// Reads one key per line; blank lines and `#` comments are skipped.
    pub fn read_file(path: &Path) -> io::Result<Vec<String>> {
        let text = std::fs::read_to_string(path)?;
        let lines = text.lines().map(str::trim);
        let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Ok(keys.map(str::to_owned).collect())
    }

    /// Whether a key is asked for at all.
    #[must_use]
    pub fn are_asked(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Checks the headers of a request. Who it is; None when no key is asked.
    pub fn check(
        &self,
        authorization: Option<&[u8]>,
        x_api_key: Option<&[u8]>,
    ) -> Result<Option<Client>, ApiError> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        let Some(given) = authorization.and_then(bearer).or(x_api_key) else {
            return Err(ApiError::new(
                ErrorCode::InvalidApiKey,
                "an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            ));
        };
        let mut known = None;
        for (key, client) in &self.keys {
            let is_same = same(key.as_bytes(), given); // every key is looked at
            known = if is_same { Some(client) } else { known };
        }
        match known {
            Some(client) => Ok(Some(client.clone())),
            None => Err(ApiError::new(
                ErrorCode::InvalidApiKey,
                "the API key is not known",
            )),
        }
    }
}

/// The token of `Bearer TOKEN`, whose scheme may be in any case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

/// Equality without an early exit inside the bytes.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differing = a.iter().zip(b).fold(0_u8, |bits, (x, y)| bits | (x ^ y));
    a.len() == b.len() && std::hint::black_box(differing) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_checked_in_both_headers() {
        let keys = Keys::new(["secret".to_owned(), String::new(), "other".to_owned()]);
        let first = keys.check(Some(b"Bearer secret"), None);
        let first = first.expect("known").expect("keys are asked");
        assert_eq!((&*first.name, first.max_priority), ("key-1", i32::MAX));
        let named = keys.clone().with_clients(&[KeyConfig {
            name: "alice".to_owned(),
            key: "hers".to_owned(),
            max_priority: 5,
        }]);
        let alice = named.check(Some(b"Bearer hers"), None).expect("known");
        let alice = alice.expect("keys are asked");
        assert_eq!((&*alice.name, alice.max_priority), ("alice", 5));
        assert!(keys.check(Some(b"bearer  other "), None).is_ok());
        assert!(keys.check(None, Some(b"other")).is_ok());
        for (authorization, x_api_key) in [
            (None, None),
            (Some(b"Bearer secre".as_slice()), None),
            (Some(b"Bearer secret2".as_slice()), None),
            (Some(b"Basic secret".as_slice()), None),
            (Some(b"Bearer ".as_slice()), None),
            (None, Some(b"".as_slice())),
        ] {
            let error = keys.check(authorization, x_api_key).unwrap_err();
            assert_eq!(error.status(), 401);
        }
        assert!(Keys::default().check(None, None).is_ok());
        assert!(!format!("{keys:?}").contains("secret"));
    }
}
