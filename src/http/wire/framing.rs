//! HTTP/1.x request framing as a pure state machine: bytes in, steps out. No socket, no clock, no log.
//!
//! `feed` takes whatever arrived, `step` says what it means. The sequence of steps depends only on the
//! bytes, never on how they were cut. One request at a time: the caller stops calling `step` while a
//! request is being answered, and the bytes behind it stay in the buffer.
//!
//! ```text
//!            no body                          length 0 left
//!   Head ───────────────► (request) ◄───────────────── Fixed ◄── Head
//!     │ chunked                ▲
//!     ▼                        │ empty line
//!   ChunkSize ── size 0 ──► Trailer
//!     │  ▲ CRLF
//!     ▼  │
//!   ChunkData ─► ChunkEnd          any ── malformed ──► Dead (nothing more is understood)
//! ```
//!
//! The body buffer grows with bytes that arrived, never with lengths that were promised.

use super::request::{BodyKind, Request};
use std::ops::Range;

/// Empty lines allowed before a request line (RFC 9112 section 2.2).
const MAX_BLANK_LINES: u8 = 2;
/// Reserved up front for a body; more only as bytes really arrive.
const BODY_START_BYTES: usize = 64 << 10;

/// Sizes that a request may not exceed.
#[derive(Clone, Copy, Debug)]
pub(super) struct FramingLimits {
    pub(super) head_bytes: usize,
    pub(super) body_bytes: usize,
    /// One chunk-size line with its extensions.
    pub(super) chunk_line_bytes: usize,
    pub(super) trailer_bytes: usize,
}

/// What the bytes so far amount to.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing complete: feed more.
    More,
    /// The client waits for `100 Continue` before it sends the body.
    Continue,
    /// One complete request.
    Request(Request),
    /// Answer with this status and close: where the next request begins is unknown.
    Reject(Reject),
}

/// Why a request was refused before any handler saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reject {
    pub(super) status: u16,
    pub(super) why: &'static str,
}

impl Reject {
    pub(super) fn new(status: u16, why: &'static str) -> Self {
        Reject { status, why }
    }
}

/// Where in a request the connection stands; its deadline depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stage {
    Idle,
    Head,
    Body,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Head,
    /// Body bytes still to come.
    Fixed(usize),
    ChunkSize,
    /// Bytes of this chunk still to come.
    ChunkData(usize),
    ChunkEnd,
    /// Trailer bytes seen.
    Trailer(usize),
    Dead,
}

/// The state machine of one connection.
pub(super) struct Framer {
    limits: FramingLimits,
    phase: Phase,
    buffer: Vec<u8>,
    /// Start of what is not consumed yet.
    position: usize,
    /// Bytes behind `position` that were already searched for the end of the head.
    scanned: usize,
    blank_lines: u8,
    /// The head whose body is being read.
    request: Option<Request>,
    body: Vec<u8>,
}

/// `Ok(None)`: a transition happened, go on.
type Advance = Result<Option<Step>, Reject>;

impl Framer {
    pub(super) fn new(limits: FramingLimits) -> Self {
        let (buffer, body, phase) = (Vec::new(), Vec::new(), Phase::Head);
        Framer {
            limits,
            phase,
            buffer,
            position: 0,
            scanned: 0,
            blank_lines: 0,
            request: None,
            body,
        }
    }

    pub(super) fn stage(&self) -> Stage {
        match self.phase {
            Phase::Head if self.rest().is_empty() && self.blank_lines == 0 => Stage::Idle,
            Phase::Head => Stage::Head,
            Phase::Fixed(_)
            | Phase::ChunkSize
            | Phase::ChunkData(_)
            | Phase::ChunkEnd
            | Phase::Trailer(_)
            | Phase::Dead => Stage::Body,
        }
    }

    /// Heap bytes held, for the memory budget.
    pub(super) fn held_bytes(&self) -> usize {
        let head = self.request.as_ref().map_or(0, Request::held_bytes);
        self.buffer.capacity() + self.body.capacity() + head
    }

    /// Decoded body bytes of the request being read.
    pub(super) fn body_bytes(&self) -> usize {
        self.body.len()
    }

    /// The head of the request being read, once it is complete.
    pub(super) fn current(&self) -> Option<&Request> {
        self.request.as_ref()
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8]) {
        if self.rest().is_empty() {
            self.buffer.clear();
            self.position = 0;
            // A large body skips the line buffer.
            if let Phase::Fixed(left) = self.phase {
                let (body, behind) = bytes.split_at(left.min(bytes.len()));
                self.body.extend_from_slice(body);
                self.phase = Phase::Fixed(left - body.len());
                bytes = behind;
            }
        } else if self.position > self.buffer.len() / 2 {
            self.buffer.drain(..self.position);
            self.position = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    pub(super) fn step(&mut self) -> Step {
        loop {
            match self.advance() {
                Ok(Some(step)) => return step,
                Ok(None) => {}
                Err(reject) => {
                    self.phase = Phase::Dead;
                    self.buffer = Vec::new();
                    self.position = 0;
                    self.body = Vec::new();
                    return Step::Reject(reject);
                }
            }
        }
    }

    /// One transition of the diagram above.
    fn advance(&mut self) -> Advance {
        match self.phase {
            Phase::Dead => Ok(Some(Step::More)),
            Phase::Head => self.head(),
            Phase::Fixed(0) => Ok(Some(self.complete())),
            Phase::Fixed(left) => Ok(self.take(left, Phase::Fixed)),
            Phase::ChunkSize => self.chunk_size(),
            Phase::ChunkData(0) => self.go(Phase::ChunkEnd),
            Phase::ChunkData(left) => Ok(self.take(left, Phase::ChunkData)),
            Phase::ChunkEnd => match self.rest() {
                [b'\r', b'\n', ..] => {
                    self.position += 2;
                    self.go(Phase::ChunkSize)
                }
                [] | [b'\r'] => Ok(Some(Step::More)),
                _ => Err(Reject::new(400, "a chunk is longer than its size")),
            },
            Phase::Trailer(used) => self.trailer(used),
        }
    }

    fn go(&mut self, phase: Phase) -> Advance {
        self.phase = phase;
        Ok(None)
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.position..).unwrap_or_default()
    }

    /// Moves up to `left` buffered bytes into the body.
    fn take(&mut self, left: usize, phase: fn(usize) -> Phase) -> Option<Step> {
        let rest = self.buffer.get(self.position..).unwrap_or_default();
        let bytes = &rest[..left.min(rest.len())];
        if bytes.is_empty() {
            return Some(Step::More);
        }
        self.body.extend_from_slice(bytes);
        self.position += bytes.len();
        self.phase = phase(left - bytes.len());
        None
    }

    fn complete(&mut self) -> Step {
        self.phase = Phase::Head;
        if self.rest().is_empty() {
            self.buffer = Vec::new(); // an idle connection holds no buffer
            self.position = 0;
        }
        let body = std::mem::take(&mut self.body);
        match self.request.take() {
            Some(mut request) => {
                request.body = body;
                Step::Request(request)
            }
            // Every body phase is entered with a request; were it not so, closing is the safe answer.
            None => Step::Reject(Reject::new(400, "a body without a head")),
        }
    }

    fn head(&mut self) -> Advance {
        if self.scanned == 0 && self.rest().starts_with(b"\r\n") {
            if self.blank_lines == MAX_BLANK_LINES {
                return Err(Reject::new(400, "too many empty lines before the request"));
            }
            self.blank_lines += 1;
            self.position += 2;
            return Ok(None);
        }
        if self.rest() == b"\r" {
            return Ok(Some(Step::More)); // the next byte tells an empty line from garbage
        }
        let Some(head_bytes) = self.find_head_end()? else {
            return Ok(Some(Step::More));
        };
        let head = self.rest()[..head_bytes].to_vec();
        self.position += head_bytes;
        self.scanned = 0;
        self.blank_lines = 0;
        // Kept before its body is judged, so that a refusal can name the path.
        let request = self.request.insert(Request::parse(head)?);
        let kind = request.body_kind()?;
        let expects_continue = request.expects_continue()?;
        self.phase = match kind {
            BodyKind::Chunked => Phase::ChunkSize,
            BodyKind::Length(length) => match usize::try_from(length) {
                Ok(length) if length <= self.limits.body_bytes => Phase::Fixed(length),
                Ok(_) | Err(_) => return Err(Reject::new(413, "the request body is too large")),
            },
        };
        if let Phase::Fixed(length) = self.phase {
            self.body.reserve_exact(length.min(BODY_START_BYTES));
        }
        Ok((expects_continue && self.phase != Phase::Fixed(0)).then_some(Step::Continue))
    }

    /// Finds the empty line, looking at each byte once. A bare line feed is refused: two parsers in a
    /// chain that differ on it is how requests are smuggled.
    fn find_head_end(&mut self) -> Result<Option<usize>, Reject> {
        let rest = self.buffer.get(self.position..).unwrap_or_default();
        let window = &rest[..rest.len().min(self.limits.head_bytes)];
        // TLS or other garbage: say so now instead of at the deadline.
        if window.first().is_some_and(|b| !b.is_ascii_alphabetic()) {
            return Err(Reject::new(
                400,
                "this is not HTTP (TLS is not spoken here)",
            ));
        }
        for (at, byte) in window.iter().enumerate().skip(self.scanned) {
            if *byte == b'\n' {
                let before = &window[..at];
                if before.last() != Some(&b'\r') {
                    return Err(Reject::new(400, "line feed without carriage return"));
                }
                if before.ends_with(b"\n\r") {
                    return Ok(Some(at + 1));
                }
            }
        }
        self.scanned = window.len();
        if window.len() == self.limits.head_bytes {
            return Err(Reject::new(431, "the request head is too large"));
        }
        Ok(None)
    }

    fn chunk_size(&mut self) -> Advance {
        let Some(line) = self.line(self.limits.chunk_line_bytes, 400)? else {
            return Ok(Some(Step::More));
        };
        let line = self.buffer.get(line).unwrap_or_default();
        let n_digits = line.iter().take_while(|b| b.is_ascii_hexdigit()).count();
        if n_digits == 0 || n_digits > 16 {
            return Err(Reject::new(400, "a chunk size is not a number"));
        }
        let (digits, extension) = line.split_at(n_digits);
        if !matches!(extension.trim_ascii_start().first(), None | Some(b';')) {
            return Err(Reject::new(400, "junk after a chunk size"));
        }
        let digit = |b: &u8| u64::from(char::from(*b).to_digit(16).unwrap_or(0));
        let size = digits.iter().fold(0u64, |n, b| (n << 4) | digit(b));
        let room = self.limits.body_bytes.saturating_sub(self.body.len());
        match usize::try_from(size) {
            Ok(0) => self.go(Phase::Trailer(0)),
            Ok(size) if size <= room => self.go(Phase::ChunkData(size)),
            Ok(_) | Err(_) => Err(Reject::new(413, "the request body is too large")),
        }
    }

    /// Trailer fields are checked for length and thrown away.
    fn trailer(&mut self, used: usize) -> Advance {
        let max = self.limits.trailer_bytes;
        let Some(line) = self.line(max.saturating_sub(used), 431)? else {
            return Ok(Some(Step::More));
        };
        let n_bytes = line.len() + 2;
        match self.buffer.get(line).unwrap_or_default() {
            [] => Ok(Some(self.complete())),
            field if field.contains(&b':') => self.go(Phase::Trailer((used + n_bytes).min(max))),
            _ => Err(Reject::new(400, "a trailer is not a header field")),
        }
    }

    /// Consumes one CRLF line, at most `max` bytes long; the range is without its end.
    fn line(&mut self, max: usize, status: u16) -> Result<Option<Range<usize>>, Reject> {
        let mut before = b' ';
        for (at, &byte) in self.rest().iter().enumerate() {
            if byte == b'\n' {
                if before != b'\r' {
                    return Err(Reject::new(400, "line feed without carriage return"));
                }
                let start = self.position;
                self.position += at + 1;
                return Ok(Some(start..start + at - 1));
            }
            if at > max {
                return Err(Reject::new(status, "a line is too long"));
            }
            if before == b'\r' || (byte.is_ascii_control() && byte != b'\t' && byte != b'\r') {
                return Err(Reject::new(400, "control character in a line"));
            }
            before = byte;
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "framing_tests.rs"]
mod tests;
