//! A complete request as a handler sees it, and the reading of its head. No socket, no clock.
//!
//! The head stays the one buffer it arrived in; method, target and fields are ranges into it. What the
//! head says about the body (`Content-Length`, `Transfer-Encoding`) is read here, in the strict reading
//! of RFC 9112 section 6; `framing` acts on it.

use super::framing::Reject;
use std::net::SocketAddr;
use std::ops::Range;

/// Header fields per request; `httparse` wants a fixed array.
const MAX_FIELDS: usize = 100;

/// One complete, well-framed request.
#[derive(Debug, PartialEq)]
pub struct Request {
    head: Vec<u8>,
    method: Range<usize>,
    target: Range<usize>,
    fields: Vec<(Range<usize>, Range<usize>)>,
    http11: bool,
    pub(super) keep_alive: bool,
    pub(super) body: Vec<u8>,
    pub(super) peer: Option<SocketAddr>,
}

/// How the body of a request is delimited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum BodyKind {
    /// So many bytes; 0 when the head names none.
    Length(u64),
    Chunked,
}

impl Request {
    /// The method as sent, usually upper case.
    #[must_use]
    pub fn method(&self) -> &str {
        self.text(&self.method)
    }

    /// Path and query as sent: ASCII, percent-encoding untouched.
    #[must_use]
    pub fn target(&self) -> &str {
        self.text(&self.target)
    }

    /// The target before any `?`; percent-encoding untouched.
    #[must_use]
    pub fn path(&self) -> &str {
        self.target()
            .split_once('?')
            .map_or(self.target(), |(path, _)| path)
    }

    /// The target after the first `?`, if there is one.
    #[must_use]
    pub fn query(&self) -> Option<&str> {
        self.target().split_once('?').map(|(_, query)| query)
    }

    /// Value of the first field of that name, any case; it may hold bytes above 0x7f.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.all(name).next()
    }

    /// The same as text; `None` also when the value is not UTF-8.
    #[must_use]
    pub fn header_str(&self, name: &str) -> Option<&str> {
        self.header(name)
            .and_then(|value| std::str::from_utf8(value).ok())
    }

    /// All fields in the order of arrival, names as sent.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields
            .iter()
            .map(|(name, value)| (self.text(name), self.bytes(value)))
    }

    /// The decoded body.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Takes the body out without copying it.
    #[must_use]
    pub fn take_body(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.body)
    }

    /// HTTP/1.1 rather than 1.0.
    #[must_use]
    pub fn http11(&self) -> bool {
        self.http11
    }

    /// Who is at the other end; `None` on a Unix socket.
    #[must_use]
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Heap bytes of the whole request.
    pub(super) fn held_bytes(&self) -> usize {
        let field = size_of::<(Range<usize>, Range<usize>)>();
        self.head.capacity() + self.body.capacity() + self.fields.capacity() * field
    }

    /// The values of all fields of this name (in any case), in the order of arrival.
    pub fn all<'a, 'n>(&'a self, name: &'n str) -> impl Iterator<Item = &'a [u8]> + use<'a, 'n> {
        let is_named =
            |field: &Range<usize>| self.bytes(field).eq_ignore_ascii_case(name.as_bytes());
        self.fields
            .iter()
            .filter(move |(n, _)| is_named(n))
            .map(|(_, value)| self.bytes(value))
    }

    /// Looks into comma-separated fields such as `Connection`.
    fn has_token(&self, name: &str, token: &str) -> bool {
        let mut tokens = self.all(name).flat_map(|value| value.split(|&b| b == b','));
        tokens.any(|t| t.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
    }

    fn bytes(&self, range: &Range<usize>) -> &[u8] {
        self.head.get(range.clone()).unwrap_or_default()
    }

    /// Method, target and names were checked to be ASCII when the head was parsed.
    fn text(&self, range: &Range<usize>) -> &str {
        std::str::from_utf8(self.bytes(range)).unwrap_or_default()
    }

    /// Parses a head that ends in its empty line.
    pub(super) fn parse(head: Vec<u8>) -> Result<Request, Reject> {
        let mut slots = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut parsed = httparse::Request::new(&mut slots);
        match parsed.parse(&head) {
            Ok(httparse::Status::Complete(n)) if n == head.len() => {}
            Err(httparse::Error::TooManyHeaders) => {
                return Err(Reject::new(431, "too many header fields"));
            }
            Err(httparse::Error::Version) => {
                return Err(Reject::new(
                    505,
                    "only HTTP/1.0 and HTTP/1.1 are spoken here",
                ));
            }
            Ok(_) | Err(_) => return Err(Reject::new(400, "malformed request head")),
        }
        let base = head.as_ptr() as usize;
        let range = |part: &[u8]| {
            let start = part.as_ptr() as usize - base;
            start..start + part.len()
        };
        let (method, path) = (
            parsed.method.unwrap_or_default(),
            parsed.path.unwrap_or_default(),
        );
        let mut target = range(path.as_bytes());
        target.start += path_offset(method, path)?;
        let fields = parsed
            .headers
            .iter()
            .map(|h| (range(h.name.as_bytes()), range(h.value)))
            .collect();
        let (method, http11) = (range(method.as_bytes()), parsed.version == Some(1));
        let (body, peer) = (Vec::new(), None);
        let mut request = Request {
            head,
            method,
            target,
            fields,
            http11,
            keep_alive: http11,
            body,
            peer,
        };
        request.keep_alive = if http11 {
            !request.has_token("connection", "close")
        } else {
            request.has_token("connection", "keep-alive")
        };
        request.check_host()?;
        Ok(request)
    }

    fn check_host(&self) -> Result<(), Reject> {
        let mut hosts = self.all("host");
        let allowed = |b: &u8| b.is_ascii_alphanumeric() || b"-._~:[]%".contains(b);
        match (hosts.next(), hosts.next()) {
            (Some(host), None) if host.iter().all(allowed) => Ok(()),
            (None, _) if !self.http11 => Ok(()),
            (None, _) => Err(Reject::new(400, "HTTP/1.1 needs a Host header")),
            (Some(_), None) => Err(Reject::new(400, "malformed Host header")),
            (Some(_), Some(_)) => Err(Reject::new(400, "more than one Host header")),
        }
    }

    pub(super) fn body_kind(&self) -> Result<BodyKind, Reject> {
        let length = self.content_length()?;
        let mut codings = self.all("transfer-encoding");
        let chunked = match (codings.next(), codings.next()) {
            (None, _) => false,
            (Some(one), None) if self.http11 && one.eq_ignore_ascii_case(b"chunked") => true,
            _ => {
                return Err(Reject::new(
                    400,
                    "Transfer-Encoding must be chunked, once, on HTTP/1.1",
                ));
            }
        };
        match (chunked, length) {
            (true, Some(_)) => Err(Reject::new(
                400,
                "both Content-Length and Transfer-Encoding",
            )),
            (true, None) => Ok(BodyKind::Chunked),
            (false, length) => Ok(BodyKind::Length(length.unwrap_or(0))),
        }
    }

    /// Digits only; repeated fields must be equal. Numbers beyond u64 saturate and so exceed any cap.
    fn content_length(&self) -> Result<Option<u64>, Reject> {
        let mut found: Option<&[u8]> = None;
        for value in self.all("content-length") {
            if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
                return Err(Reject::new(400, "Content-Length is not a number"));
            }
            if found.is_some_and(|first| first != value) {
                return Err(Reject::new(400, "contradicting Content-Length headers"));
            }
            found = Some(value);
        }
        let digit = |n: u64, d: &u8| n.saturating_mul(10).saturating_add(u64::from(d - b'0'));
        Ok(found.map(|value| value.iter().fold(0, digit)))
    }

    /// Does the client wait for `100 Continue`? Any other expectation is a 417.
    pub(super) fn expects_continue(&self) -> Result<bool, Reject> {
        match self.header("expect") {
            None => Ok(false),
            Some(value) if value.eq_ignore_ascii_case(b"100-continue") => Ok(self.http11),
            Some(_) => Err(Reject::new(417, "unknown expectation")),
        }
    }
}

/// Bytes of a request target before its path. In absolute form a proxy would use the authority; this is
/// one host, so only the path counts.
fn path_offset(method: &str, target: &str) -> Result<usize, Reject> {
    if !target.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Reject::new(400, "the request target is not ASCII"));
    }
    let authority = target
        .strip_prefix("http://")
        .or_else(|| target.strip_prefix("https://"));
    match authority {
        Some(rest) => match rest.find('/') {
            Some(at) => Ok(target.len() - rest.len() + at),
            None => Err(Reject::new(400, "absolute request target without a path")),
        },
        None if target.starts_with('/') || (target == "*" && method == "OPTIONS") => Ok(0),
        None => Err(Reject::new(400, "the request target must be a path")),
    }
}
