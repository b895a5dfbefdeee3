//! API keys of the data plane and the admin key of the management plane.
//!
//! Immutable after start, shared by all workers. A key comes as `Authorization: Bearer KEY` or
//! `x-api-key: KEY`. The comparison takes the same time wherever two keys of one length differ,
//! and looks at every key. What is not here: who may do what (one level of trust per plane).

use super::errors::{ApiError, ErrorCode};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Keys that open a plane; none = everything is open.
#[derive(Clone, Default)]
pub struct Keys {
    keys: Vec<String>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({} keys)", self.keys.len()) // never the keys themselves
    }
}

impl Keys {
    /// Keys given one by one; empty ones are left out.
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = String>) -> Self {
        let keys = keys.into_iter().filter(|key| !key.is_empty()).collect();
        Self { keys }
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

    /// Checks the headers of a request. Who it is, by the place of the key in the list (`key-1`),
    /// which may be logged and listed; None when no key is asked.
    pub fn check(
        &self,
        authorization: Option<&[u8]>,
        x_api_key: Option<&[u8]>,
    ) -> Result<Option<Arc<str>>, ApiError> {
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
        for (index, key) in self.keys.iter().enumerate() {
            let is_same = same(key.as_bytes(), given); // every key is looked at
            known = if is_same { Some(index) } else { known };
        }
        match known {
            Some(index) => Ok(Some(format!("key-{}", index + 1).into())),
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
        assert_eq!(first.expect("known").as_deref(), Some("key-1"));
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
