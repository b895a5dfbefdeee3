//! One log line per request, written when it ends, however it ends.
//!
//! Owned by the worker that answers; the line leaves when the record is dropped, so that no path
//! can forget it. Probes and scrapes are logged at debug level only. Text of prompts and answers
//! never appears in the log.

use std::time::{Duration, Instant};

/// What is known about a request so far.
#[derive(Debug)]
pub struct AccessRecord {
    /// `x-request-id`.
    pub id: String,
    /// Bounded set of names, see `router::Route::label`.
    pub route: &'static str,
    /// Model id that answers; empty when none does.
    pub model: String,
    /// HTTP status that was sent, or 499.
    pub status: u16,
    /// Answered as a stream.
    pub stream: bool,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// From submit to dispatch of the first job.
    pub queue: Option<Duration>,
    /// From arrival at the worker to the first token.
    pub ttft: Option<Duration>,
    /// `ok`, or the code of the error.
    pub outcome: &'static str,
    started: Instant,
    quiet: bool,
}

impl AccessRecord {
    /// Begins now. `quiet`: a probe or scrape.
    #[must_use]
    pub fn new(id: String, route: &'static str, quiet: bool) -> Self {
        Self {
            id,
            route,
            model: String::new(),
            status: 0,
            stream: false,
            prompt_tokens: 0,
            completion_tokens: 0,
            queue: None,
            ttft: None,
            outcome: "ok",
            started: Instant::now(),
            quiet,
        }
    }

    /// When the worker took the request.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Marks the first token, once.
    pub fn first_token(&mut self) {
        if self.ttft.is_none() {
            self.ttft = Some(self.started.elapsed());
        }
    }
}

fn milliseconds(duration: Option<Duration>) -> Option<f64> {
    duration.map(|duration| (duration.as_secs_f64() * 1e4).round() / 10.0)
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let total_ms = milliseconds(Some(self.started.elapsed()));
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: "tinyloop::access",
                    id = %self.id,
                    route = self.route,
                    model = %self.model,
                    status = self.status,
                    stream = self.stream,
                    prompt_tokens = self.prompt_tokens,
                    completion_tokens = self.completion_tokens,
                    queue_ms = milliseconds(self.queue),
                    ttft_ms = milliseconds(self.ttft),
                    total_ms,
                    outcome = self.outcome,
                    "request"
                )
            };
        }
        if self.quiet {
            line!(debug);
        } else {
            line!(info);
        }
    }
}
