//! Cross-origin rules: which web pages may call the APIs from a browser. Off by default.
//!
//! Immutable, pure. An origin on the list is echoed; "*" admits every origin, without
//! credentials. Everything else gets no CORS header, and the browser refuses.

/// The allow-list.
#[derive(Clone, Debug, Default)]
pub struct Cors {
    origins: Vec<String>,
}

impl Cors {
    /// Empty = off.
    #[must_use]
    pub fn new(origins: Vec<String>) -> Self {
        Self { origins }
    }

    /// The headers for a request from `origin`. `preflight`: it is an OPTIONS request.
    #[must_use]
    pub fn headers(&self, origin: Option<&str>, preflight: bool) -> Vec<(&'static str, String)> {
        let Some(origin) = origin else {
            return Vec::new();
        };
        let any = self.origins.iter().any(|allowed| allowed == "*");
        if !any && !self.origins.iter().any(|allowed| allowed == origin) {
            return Vec::new();
        }
        let allowed = if any { "*" } else { origin };
        let mut headers = vec![
            ("access-control-allow-origin", allowed.to_owned()),
            (
                "access-control-expose-headers",
                "x-request-id, x-tinyloop-request-id, x-tinyloop-rejected, x-tinyloop-loops, x-should-retry, \
                 retry-after"
                    .to_owned(),
            ),
            ("vary", "origin".to_owned()),
        ];
        if preflight {
            headers.push((
                "access-control-allow-methods",
                "GET, POST, DELETE, OPTIONS".to_owned(),
            ));
            // "*" alone does not cover authorization, by the standard.
            headers.push((
                "access-control-allow-headers",
                "authorization, content-type, x-api-key, x-request-id, *".to_owned(),
            ));
            headers.push(("access-control-max-age", "600".to_owned()));
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_origins_get_headers() {
        let cors = Cors::new(vec!["https://a.example".into()]);
        assert!(cors.headers(None, false).is_empty());
        assert!(cors.headers(Some("https://b.example"), true).is_empty());
        let headers = cors.headers(Some("https://a.example"), false);
        assert_eq!(
            headers[0],
            ("access-control-allow-origin", "https://a.example".into())
        );
        assert!(
            Cors::default()
                .headers(Some("https://a.example"), true)
                .is_empty()
        );
        let any = Cors::new(vec!["*".into()]);
        assert_eq!(any.headers(Some("x"), true)[0].1, "*");
    }
}
