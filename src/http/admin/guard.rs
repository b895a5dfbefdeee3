//! Who may not call the management plane: web pages of other sites.
//!
//! Pure. The plane binds to loopback and may have no key, so any page that a browser on this
//! machine opens can send requests there. A browser can't be kept from sending them, but it tells
//! on the page: `Origin` stands on every POST, and `Host` is the name the page itself was loaded
//! from when its owner lets that name point here (DNS rebinding). With a key nothing needs to be
//! guarded, since no page knows it, and browsers add none by themselves. What is not here: the key
//! (`auth`).

use crate::http::errors::{ApiError, ErrorCode};
use crate::http::router::Route;
use std::net::IpAddr;

/// Names that the plane may be called by.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// False: a key guards everything.
    is_on: bool,
    allowed_hosts: Vec<String>,
}

impl Guard {
    /// `allowed_hosts` are names beside localhost and IP addresses.
    #[must_use]
    pub fn new(has_key: bool, allowed_hosts: &[String]) -> Self {
        Self {
            is_on: !has_key,
            allowed_hosts: allowed_hosts.to_vec(),
        }
    }

    /// Checks the headers of a request. Probes and scrapes may come by any name and from anywhere:
    /// they change nothing, and a page cannot read them across origins.
    pub fn check(
        &self,
        route: &Route,
        host: Option<&str>,
        origin: Option<&str>,
    ) -> Result<(), ApiError> {
        let is_probe = matches!(route, Route::Health | Route::Ready | Route::Metrics);
        if !self.is_on || is_probe {
            return Ok(());
        }
        // HTTP/1.0 has no Host; browsers always send one.
        if let Some(host) = host.filter(|host| !self.is_known(host)) {
            let shown: String = host.chars().take(100).collect();
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                format!(
                    "the host name '{shown}' is not known here: call this plane by localhost or an \
                     IP address, or put the name into management.allowed_hosts, or set an admin key"
                ),
            ));
        }
        match origin {
            Some(origin) if !is_same_origin(origin, host) => Err(ApiError::new(
                ErrorCode::Forbidden,
                "web pages of other origins may not call the management plane",
            )),
            _ => Ok(()),
        }
    }

    fn is_known(&self, host: &str) -> bool {
        let name = without_port(host);
        let address = name.trim_start_matches('[').trim_end_matches(']');
        let name = name.to_ascii_lowercase();
        let mut allowed = self.allowed_hosts.iter();
        address.parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || allowed.any(|allowed| allowed.eq_ignore_ascii_case(&name))
    }
}

/// `name`, `name:port`, `[::1]:port`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Whether the page was loaded from this very address.
fn is_same_origin(origin: &str, host: Option<&str>) -> bool {
    let authority = origin.strip_prefix("http://");
    matches!((authority, host), (Some(authority), Some(host)) if authority.eq_ignore_ascii_case(host))
}

/// Bodies must say that they are JSON: a form of a web page cannot.
pub fn check_content_type(content_type: Option<&str>) -> Result<(), ApiError> {
    let kind = content_type.unwrap_or_default().split(';').next();
    let kind = kind.unwrap_or_default().trim();
    match kind.eq_ignore_ascii_case("application/json") {
        true => Ok(()),
        false => Err(ApiError::param(
            ErrorCode::UnsupportedMediaType,
            "content-type",
            "a body must come with 'content-type: application/json'",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::router::AdminRoute;

    #[test]
    fn names_that_a_page_could_have_are_refused() {
        let guard = Guard::new(false, &["Box.example".to_owned()]);
        let check = |host| guard.check(&Route::Requests, Some(host), None);
        for host in [
            "127.0.0.1:8081",
            "10.1.2.3",
            "[::1]:8081",
            "[::1]",
            "localhost:1",
            "LOCALHOST",
            "a.localhost:80",
            "box.example:8081",
        ] {
            assert!(check(host).is_ok(), "{host}");
        }
        for host in [
            "evil.example:8081",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "",
        ] {
            assert_eq!(check(host).unwrap_err().status(), 403, "{host}");
        }
        assert!(guard.check(&Route::Requests, None, None).is_ok());
        assert!(
            guard
                .check(&Route::Metrics, Some("evil.example"), None)
                .is_ok()
        );
        let keyed = Guard::new(true, &[]);
        let other = Some("http://evil.example");
        assert!(
            keyed
                .check(&Route::Requests, Some("evil.example"), other)
                .is_ok()
        );
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let guard = Guard::new(false, &[]);
        let host = Some("127.0.0.1:8081");
        let route = Route::Admin(AdminRoute::Reload);
        let check = |origin| guard.check(&route, host, Some(origin));
        assert!(check("http://127.0.0.1:8081").is_ok());
        for origin in [
            "http://127.0.0.1:8080",
            "http://127.0.0.1",
            "https://127.0.0.1:8081",
            "http://evil.example",
            "null",
            "",
        ] {
            assert_eq!(check(origin).unwrap_err().status(), 403, "{origin}");
        }
    }

    #[test]
    fn bodies_say_that_they_are_json() {
        for sound in ["application/json", "Application/JSON; charset=utf-8"] {
            assert!(check_content_type(Some(sound)).is_ok(), "{sound}");
        }
        for other in [
            None,
            Some("text/plain"),
            Some("application/jsonp"),
            Some(""),
        ] {
            assert_eq!(
                check_content_type(other).unwrap_err().status(),
                415,
                "{other:?}"
            );
        }
    }
}
