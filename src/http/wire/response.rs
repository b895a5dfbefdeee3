//! What a handler answers with: [`Responder`] for one response, [`EventWriter`] for a streamed one.
//!
//! Owned by the worker that runs the handler (or whatever thread the handler gives it to). Exactly one
//! verdict goes back to the poll thread per request, when the responder is dropped:
//!
//! ```text
//!   send ok, stream finished ──► Keep (or Close: HTTP/1.0, Connection: close, draining, close_after)
//!   dropped unanswered ────────► 500, Close
//!   stream dropped unfinished ─► Close without the last chunk: the client sees a cut stream
//!   write failed or too slow ──► Abort
//! ```

use super::head::{self, Ending, Framing};
use super::link::{Home, Link, Verdict};
use super::refusal::{self, Refusal};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Head and body up to this size leave in one write; larger bodies are not worth a copy.
const ONE_WRITE_BYTES: usize = 16 << 10;

/// Tells whether a client has left, without holding its answer.
#[derive(Clone)]
pub struct Hangup(Arc<Link>);

impl Hangup {
    /// As [`Responder::is_gone`].
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }
}

/// Answers one request. Dropped without an answer (a panic, for one) it says 500.
pub struct Responder {
    link: Arc<Link>,
    home: Arc<Home>,
    /// Keep is what the client wants; whether it gets it is decided when the head is written.
    framing: Framing,
    head_only: bool,
    /// Allowance of each write, see [`super::WireConfig::write_timeout`].
    patience: Duration,
    verdict: Option<Verdict>,
    started: bool,
}

impl Responder {
    pub(super) fn new(
        link: Arc<Link>,
        home: Arc<Home>,
        framing: Framing,
        head_only: bool,
        patience: Duration,
    ) -> Self {
        Responder {
            link,
            home,
            framing,
            head_only,
            patience,
            verdict: None,
            started: false,
        }
    }

    /// Has the client closed its side or reset the connection? An answer may still be heard after a
    /// half-close, so cheap routes need not ask.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.link.is_gone()
    }

    /// The same question for as long as its answer may be wanted.
    #[must_use]
    pub fn hangup(&self) -> Hangup {
        Hangup(Arc::clone(&self.link))
    }

    /// Runs `hook` once when the client leaves before its answer is complete; at once, on this thread,
    /// when it has left already. Otherwise it runs on the poll thread and must not block. A second hook
    /// replaces the first.
    pub fn on_hangup(&self, hook: impl FnOnce() + Send + 'static) {
        self.link.set_hook(Box::new(hook));
    }

    /// Closes the connection after this answer.
    pub fn close_after(&mut self) {
        self.framing.keep = false;
    }

    /// Sends a whole response. A header that could break the framing is an error and the client gets a 500.
    ///
    /// # Errors
    /// `InvalidInput` for a bad header; else the client has left or did not read in time.
    pub fn send(mut self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        self.framing.keep &= !self.home.is_closing();
        let mut out = head::render(status, headers, self.framing, Ending::Length(body.len()))?;
        self.link.clear_hook();
        let body = if self.head_only || !head::has_body(status) {
            &[]
        } else {
            body
        };
        if body.len() <= ONE_WRITE_BYTES {
            out.extend_from_slice(body);
            self.write(&out)?;
        } else {
            self.write(&out)?;
            self.write(body)?;
        }
        self.verdict = Some(self.kept());
        Ok(())
    }

    /// Sends the head of a streamed response: chunked on HTTP/1.1, ended by closing on 1.0.
    ///
    /// # Errors
    /// As [`Responder::send`].
    pub fn stream(mut self, status: u16, headers: &[(&str, &str)]) -> io::Result<EventWriter> {
        self.framing.keep &= self.framing.http11 && !self.home.is_closing();
        let out = head::render(status, headers, self.framing, Ending::Stream)?;
        self.write(&out)?;
        Ok(EventWriter {
            to: self,
            chunk: Vec::with_capacity(512),
        })
    }

    fn kept(&self) -> Verdict {
        if self.framing.keep {
            Verdict::Keep
        } else {
            Verdict::Close
        }
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        self.started = true;
        let written = self.link.write_all(data, &self.home.config, self.patience);
        if written.is_err() {
            self.verdict = Some(Verdict::Abort);
        }
        written
    }

    /// Poll thread: the wire answers instead of the handler, which has not seen the request.
    pub(super) fn refuse(mut self, refusal: &Refusal<'_>) {
        self.link.clear_hook();
        self.answer_once(refusal);
    }

    /// A panic, a forgotten answer, a refused header, or a purge from the queue.
    fn apologize(&mut self) {
        self.answer_once(&Refusal {
            status: 500,
            reason: "the request failed inside the server",
            path: None,
        });
    }

    /// This may be the poll thread, which must not wait for itself: one try.
    fn answer_once(&mut self, refusal: &Refusal<'_>) {
        self.started = true;
        let framing = Framing {
            keep: false,
            ..self.framing
        };
        let out = refusal::render(&self.home, refusal, framing, self.head_only);
        if self.link.stream.write(&out).ok() != Some(out.len()) {
            self.verdict = Some(Verdict::Abort);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if self.verdict.is_none() && !self.started {
            self.apologize();
        }
        self.link.clear_hook();
        let verdict = self.verdict.unwrap_or(Verdict::Close);
        if verdict == Verdict::Abort {
            self.home.stats.aborted.fetch_add(1, Relaxed);
        }
        self.home.send_home(self.link.id, verdict);
    }
}

/// A streamed response: each event is one chunk, one write and, with `TCP_NODELAY`, one segment.
pub struct EventWriter {
    to: Responder,
    chunk: Vec<u8>,
}

impl EventWriter {
    /// Sends one event now. Empty events are nothing (an empty chunk would end the stream).
    ///
    /// # Errors
    /// The client has left or does not read; the stream is over.
    pub fn send(&mut self, event: &[u8]) -> io::Result<()> {
        if event.is_empty() || self.to.head_only {
            return Ok(());
        }
        if !self.to.framing.http11 {
            return self.to.write(event);
        }
        self.chunk.clear();
        write!(self.chunk, "{:x}\r\n", event.len())?;
        self.chunk.extend_from_slice(event);
        self.chunk.extend_from_slice(b"\r\n");
        self.to.write(&self.chunk)
    }

    /// As [`Responder::is_gone`].
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.to.is_gone()
    }

    /// As [`Responder::on_hangup`].
    pub fn on_hangup(&self, hook: impl FnOnce() + Send + 'static) {
        self.to.on_hangup(hook);
    }

    /// Ends the stream well. Without it (an error, a panic) the last chunk is missing and the client
    /// knows that the stream was cut.
    ///
    /// # Errors
    /// As [`EventWriter::send`].
    pub fn finish(mut self) -> io::Result<()> {
        self.to.link.clear_hook();
        if self.to.framing.http11 && !self.to.head_only {
            self.to.write(b"0\r\n\r\n")?;
        }
        self.to.verdict = Some(self.to.kept());
        Ok(())
    }
}
