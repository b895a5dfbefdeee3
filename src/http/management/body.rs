//! Request bodies on the management plane: small ones are taken, all others refused without harm.
//!
//! tiny_http has read a body of up to 1024 bytes before it hands a request over; those can be taken.
//! What it does about any other body when the request is dropped is the danger here: it waits for it
//! as long as the client likes, into a buffer of the *declared* length, where a failed allocation
//! aborts the process. So there are two ways out for a refusal:
//!
//! * up to [`LATE_BODY_BYTES_MAX`] bytes are announced: a thread of its own answers, drops the
//!   request and may wait there;
//! * more, or of unknown length, or held back until we ask for it: the answer is written, and the
//!   request is forgotten instead of dropped. Its connection stays open until the process ends, a
//!   few kilobytes each.

use crate::http::errors::{ApiError, ErrorCode};
use crate::http::ops::OpsAnswer;
use std::io::{Cursor, Read, Write};

/// Bodies up to this length tiny_http has read before it hands the request over.
const BODY_BYTES_MAX: usize = 1024;

/// Longest body for which the thread of late bodies waits.
const LATE_BODY_BYTES_MAX: usize = 64 << 10;

/// Why a body is not taken.
#[derive(Debug)]
pub(super) struct Refusal {
    code: ErrorCode,
    text: String,
    /// Whether it may be read to be thrown away.
    pub(super) can_be_read: bool,
}

impl Refusal {
    pub(super) fn error(self) -> ApiError {
        ApiError::new(self.code, self.text)
    }
}

/// The body, or why it is not taken.
pub(super) fn read(request: &mut tiny_http::Request) -> Result<Vec<u8>, Refusal> {
    let announced = Announced::of(request);
    announced.check()?;
    let mut body = Vec::with_capacity(request.body_length().unwrap_or(0));
    let limit = BODY_BYTES_MAX as u64;
    // It is in memory already.
    match request.as_reader().take(limit).read_to_end(&mut body) {
        Ok(_) => Ok(body),
        Err(error) => Err(Refusal {
            code: ErrorCode::BadRequest,
            text: error.to_string(),
            can_be_read: true,
        }),
    }
}

/// What the head says about the body.
#[derive(Clone, Copy, Debug, Default)]
struct Announced {
    /// Content-Length.
    n_bytes: usize,
    /// Content-Length is no number, or there are two: where the body ends would be a guess.
    is_unclear: bool,
    /// `Expect: 100-continue`: it comes when it is asked for.
    is_held_back: bool,
    /// Of unknown length.
    is_chunked: bool,
    /// `Connection: upgrade`: tiny_http leaves everything behind the head unread.
    is_upgrade: bool,
}

impl Announced {
    fn of(request: &tiny_http::Request) -> Self {
        let header = |name: &'static str| {
            let mut headers = request.headers().iter();
            let found = headers.find(|header| header.field.equiv(name));
            found.map(|header| header.value.as_str().to_ascii_lowercase())
        };
        let is_length = |header: &&tiny_http::Header| header.field.equiv("Content-Length");
        let lengths: Vec<&str> = request
            .headers()
            .iter()
            .filter(is_length)
            .map(|header| header.value.as_str())
            .collect();
        Self {
            n_bytes: request.body_length().unwrap_or(0),
            is_unclear: is_unclear(&lengths),
            is_held_back: header("Expect").is_some(),
            is_chunked: header("Transfer-Encoding").is_some(),
            is_upgrade: header("Connection").is_some_and(|value| value.contains("upgrade")),
        }
    }

    fn check(self) -> Result<(), Refusal> {
        let refuse = |code, text: String, can_be_read| {
            Err(Refusal {
                code,
                text,
                can_be_read,
            })
        };
        if self.is_unclear {
            let text = "'content-length' must be one whole number";
            return refuse(ErrorCode::BadRequest, text.to_owned(), false);
        }
        if self.is_chunked {
            let text = "a body must say its length here: send 'content-length', not chunks";
            return refuse(ErrorCode::LengthRequired, text.to_owned(), false);
        }
        if self.n_bytes > BODY_BYTES_MAX {
            let text = format!(
                "the body has {} bytes; the management plane takes at most {BODY_BYTES_MAX}",
                self.n_bytes
            );
            let can_be_read = self.n_bytes <= LATE_BODY_BYTES_MAX && !self.is_held_back;
            return refuse(ErrorCode::RequestTooLarge, text, can_be_read);
        }
        if self.n_bytes > 0 && self.is_held_back {
            let text = "send the body at once, without 'expect: 100-continue'";
            return refuse(ErrorCode::ExpectationFailed, text.to_owned(), false);
        }
        if self.n_bytes > 0 && self.is_upgrade {
            let text = "there is nothing to upgrade to; leave out 'connection: upgrade'";
            return refuse(ErrorCode::BadRequest, text.to_owned(), false);
        }
        Ok(())
    }
}

/// tiny_http takes a length that it cannot read for none at all, and the body for the next request.
fn is_unclear(lengths: &[&str]) -> bool {
    match lengths {
        [] => false,
        [one] => {
            let is_digits = !one.is_empty() && one.bytes().all(|b| b.is_ascii_digit());
            !is_digits || one.parse::<usize>().is_err()
        }
        _ => true,
    }
}

/// A request that gets its answer from a thread that may wait for the body behind it.
pub(super) struct Refused {
    request: tiny_http::Request,
    response: tiny_http::Response<Cursor<Vec<u8>>>,
}

impl Refused {
    pub(super) fn new(
        request: tiny_http::Request,
        response: tiny_http::Response<Cursor<Vec<u8>>>,
    ) -> Self {
        Self { request, response }
    }

    /// Answers and throws the body away, however long that takes.
    pub(super) fn finish(self) {
        // A client that left needs no answer.
        let _ = self.request.respond(self.response);
    }

    /// There is no thread left that could wait for it.
    pub(super) fn forget(self) {
        tracing::warn!(
            peer = ?self.request.remote_addr(),
            "too many unfinished bodies on the management plane; this request gets no answer"
        );
        std::mem::forget(self.request);
    }
}

/// Answers, and forgets the request with whatever body it announced.
pub(super) fn refuse_and_forget(request: tiny_http::Request, answer: &OpsAnswer) {
    tracing::warn!(
        peer = ?request.remote_addr(),
        declared_bytes = request.body_length(),
        status = answer.status,
        "a request to the management plane announces a body that is not taken"
    );
    if *request.http_version() != (1, 1) {
        return std::mem::forget(request); // older clients know no interim answers
    }
    let status = tiny_http::StatusCode(answer.status);
    let head = format!(
        "HTTP/1.1 {} {}\r\nconnection: close\r\ncontent-type: {}\r\ncontent-length: {}\r\n\r\n",
        answer.status,
        status.default_reason_phrase(),
        answer.content_type,
        answer.body.len()
    );
    // The one way to the writer of a request that leaves its body alone begins with an answer that
    // has none; an interim one is what clients of HTTP/1.1 must expect.
    let mut stream = request.upgrade("none", tiny_http::Response::empty(100));
    // A client that left needs no answer.
    let _ = stream
        .write_all(&[head.as_bytes(), &answer.body].concat())
        .and_then(|()| stream.flush());
    std::mem::forget(stream);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bodies_that_are_here_already_are_taken() {
        let of = |n_bytes, flags: &str| Announced {
            n_bytes,
            is_held_back: flags.contains('e'),
            is_chunked: flags.contains('c'),
            is_upgrade: flags.contains('u'),
            is_unclear: flags.contains('?'),
        };
        for sound in [of(0, ""), of(0, "e"), of(0, "u"), of(1024, "")] {
            assert!(sound.check().is_ok(), "{sound:?}");
        }
        for (announced, status, can_be_read) in [
            (of(1025, ""), 413, true),
            (of(64 << 10, ""), 413, true),
            (of((64 << 10) + 1, ""), 413, false),
            (of(usize::MAX, "ecu"), 411, false),
            (of(2000, "e"), 413, false),
            (of(0, "c"), 411, false),
            (of(1, "e"), 417, false),
            (of(1, "u"), 400, false),
            (of(0, "?"), 400, false),
        ] {
            let refusal = announced.check().expect_err("refused");
            let found = refusal.can_be_read;
            assert_eq!(
                (refusal.error().status(), found),
                (status, can_be_read),
                "{announced:?}"
            );
        }
    }

    #[test]
    fn lengths_are_one_whole_number() {
        for clear in [&[][..], &["0"], &["17"], &["1025"]] {
            assert!(!is_unclear(clear), "{clear:?}");
        }
        for unclear in [
            "",
            "abc",
            "-1",
            "+1",
            "5, 5",
            "0x10",
            "1 ",
            "99999999999999999999",
        ] {
            assert!(is_unclear(&[unclear]), "{unclear:?}");
        }
        assert!(is_unclear(&["5", "5"]));
    }
}
