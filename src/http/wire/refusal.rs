//! Answers that the wire gives by itself, in the words of the handler.
//!
//! Rendered on the poll thread, or on a worker whose handler panicked. The handler's code runs inside
//! `catch_unwind`, so a bug there costs the body of one refusal and nothing else.

use super::head::{self, Ending, Framing};
use super::link::Home;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Why the wire refuses a request without running the handler (or after its panic).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refusal<'a> {
    /// 400, 408, 413, 417, 431, 500, 503 or 505.
    pub status: u16,
    /// A sentence for the client, without a full stop.
    pub reason: &'static str,
    /// The path, when the head was understood; it tells which API family's error shape is wanted.
    pub path: Option<&'a str>,
}

/// The whole response. `head_only` leaves out the body, as HEAD wants it. A 503 says when to come
/// again.
pub(super) fn render(
    home: &Home,
    refusal: &Refusal<'_>,
    framing: Framing,
    head_only: bool,
) -> Vec<u8> {
    let shaped = catch_unwind(AssertUnwindSafe(|| home.handler.refuse(refusal)));
    let (fields, body) = shaped.unwrap_or_else(|_| {
        tracing::error!(
            status = refusal.status,
            "the handler panicked while shaping a refusal"
        );
        (Vec::new(), refusal.reason.as_bytes().to_vec())
    });
    let retry_after = home.retry_after_s(Instant::now()).to_string();
    let mut fields: Vec<(&str, &str)> = fields
        .iter()
        .map(|(n, v)| (n.as_str(), v.as_str()))
        .collect();
    if refusal.status == 503
        && !fields
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case("retry-after"))
    {
        fields.push(("Retry-After", retry_after.as_str()));
    }
    let length = Ending::Length(body.len());
    let rendered = head::render(refusal.status, &fields, framing, length)
        .or_else(|_| head::render(refusal.status, &[], framing, length));
    let mut out = rendered.unwrap_or_default();
    if !head_only {
        out.extend_from_slice(&body);
    }
    out
}
