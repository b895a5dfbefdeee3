//! One log line per request, written when it ends, however it ends.
//!
//! Owned by the worker that answers; the line leaves when the record is dropped, so that no path
//! can forget it. What became of the jobs of a request (state, replica, times, tokens) is asked of the
//! scheduler at that moment. Probes and scrapes are logged at debug level only. Text of prompts and
//! answers never appears in the log, unless the operator asks for the beginning of each body.

use super::quota::Reservation;
use crate::scheduler::{CancelHandle, Progress};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Of the lines, for filters like `--log-level warn,tinyloop::access=info`.
const TARGET: &str = "tinyloop::access";
/// Longest name of a model that is taken over from a request.
const NAME_BYTES_MAX: usize = 128;

/// What is known about a request so far.
#[derive(Debug)]
pub struct AccessRecord {
    /// `x-request-id`.
    pub id: String,
    /// Bounded set of names, see `router::Route::label`.
    pub route: &'static str,
    /// Name of the client's key.
    pub key: Option<Arc<str>>,
    /// Model id that answers; empty when none does.
    pub model: String,
    /// The model that the request named, set when it was looked for; shown where none answers.
    pub asked: Arc<OnceLock<String>>,
    /// HTTP status that was sent, or 499.
    pub status: u16,
    /// Answered as a stream.
    pub stream: bool,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens that the answer took.
    pub completion_tokens: u64,
    /// From submit to dispatch of the first job, where none is followed.
    pub queue: Option<Duration>,
    /// From arrival at the worker to the first token.
    pub ttft: Option<Duration>,
    /// `ok`, or the code of the error.
    pub outcome: &'static str,
    /// What it says of the request's body, if the operator wants that.
    pub body: Option<String>,
    /// Tokens taken from the client's limit for it.
    pub reservation: Option<Reservation>,
    jobs: Vec<CancelHandle>,
    started: Instant,
    quiet: bool,
}

/// All jobs of a request together.
struct Jobs {
    state: &'static str,
    replica: Option<u32>,
    queue: Option<Duration>,
    completion_tokens: u64,
    cached_tokens: Option<u64>,
    loops: Option<f64>,
}

impl AccessRecord {
    /// Begins now. `quiet`: a probe or scrape.
    #[must_use]
    pub fn new(id: String, route: &'static str, quiet: bool) -> Self {
        Self {
            id,
            route,
            key: None,
            model: String::new(),
            asked: Arc::default(),
            status: 0,
            stream: false,
            prompt_tokens: 0,
            completion_tokens: 0,
            queue: None,
            ttft: None,
            outcome: "ok",
            body: None,
            reservation: None,
            jobs: Vec::new(),
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

    /// The jobs whose fate the line tells; at least one.
    pub fn follow(&mut self, jobs: Vec<CancelHandle>) {
        self.jobs = jobs;
    }

    /// The answer is complete: what was reserved for it and not used is the client's again. What failed
    /// before it gave a token costs nothing.
    pub fn settle(&mut self) {
        let Some(reservation) = self.reservation.take() else {
            return;
        };
        let n_generated = self.followed().completion_tokens;
        let used = match n_generated == 0 && self.status >= 400 {
            true => 0,
            false => self.prompt_tokens + n_generated,
        };
        reservation.settle(used, Instant::now());
    }

    /// The model that answers, else the one that was asked for.
    fn named_model(&self) -> Option<&str> {
        let answers = Some(self.model.as_str()).filter(|name| !name.is_empty());
        answers.or(self.asked.get().map(String::as_str))
    }

    fn followed(&self) -> Jobs {
        let all: Vec<Progress> = self.jobs.iter().map(CancelHandle::progress).collect();
        let Some(first) = all.first() else {
            return Jobs {
                state: match self.status {
                    0..400 => "answered",
                    _ => "refused",
                },
                replica: None,
                queue: self.queue,
                completion_tokens: self.completion_tokens,
                cached_tokens: None,
                loops: None,
            };
        };
        let generated = all.iter().map(|job| u64::from(job.completion_tokens));
        let cached = all
            .iter()
            .filter_map(|job| job.cached_tokens.map(u64::from));
        Jobs {
            // Dropping the answer's jobs cancels them; the driver may not have seen it yet.
            state: match first.state.is_final() {
                true => first.state.name(),
                false => "cancelled",
            },
            replica: first.replica,
            queue: first.state.stamps().queue_wait(),
            completion_tokens: self.taken(generated.sum()),
            cached_tokens: cached.reduce(|sum, one| sum + one),
            loops: first.mean_loops,
        }
    }
}

impl AccessRecord {
    /// A runtime may have made more than the answer took, up to a stop string; an end token is made, and
    /// not taken.
    fn taken(&self, n_generated: u64) -> u64 {
        match self.completion_tokens {
            0 => n_generated,
            taken => n_generated.min(taken + self.jobs.len() as u64),
        }
    }
}

/// The line of a request that the wire refused by itself: no worker saw it, and little is known of it.
pub fn refused_unread(id: &str, path: Option<&str>, status: u16, reason: &'static str) {
    let path = path.map(bounded);
    tracing::info!(
        target: TARGET,
        id,
        path,
        state = "refused",
        status,
        reason,
        "request refused unread"
    );
}

/// A request that never got so far has no number.
fn known(n_tokens: u64) -> Option<u64> {
    Some(n_tokens).filter(|n_tokens| *n_tokens > 0)
}

/// A name from a client as the log shows it: at most 128 bytes of it.
#[must_use]
pub fn bounded(name: &str) -> String {
    let end = name.floor_char_boundary(NAME_BYTES_MAX);
    name[..end].to_owned()
}

fn milliseconds(duration: Option<Duration>) -> Option<f64> {
    duration.map(|duration| (duration.as_secs_f64() * 1e4).round() / 10.0)
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        self.settle();
        let is_shown = match self.quiet {
            true => tracing::enabled!(target: TARGET, tracing::Level::DEBUG),
            false => tracing::enabled!(target: TARGET, tracing::Level::INFO),
        };
        if !is_shown {
            return; // asking the scheduler about each job takes its locks
        }
        let jobs = self.followed();
        let total_ms = milliseconds(Some(self.started.elapsed()));
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: TARGET,
                    id = %self.id,
                    route = self.route,
                    key = self.key.as_deref(),
                    model = self.named_model().map(tracing::field::display),
                    replica = jobs.replica,
                    state = jobs.state,
                    status = self.status,
                    stream = self.stream,
                    prompt_tokens = known(self.prompt_tokens),
                    completion_tokens = known(jobs.completion_tokens),
                    cached_tokens = jobs.cached_tokens,
                    loops = jobs.loops,
                    queue_ms = milliseconds(jobs.queue),
                    ttft_ms = milliseconds(self.ttft),
                    total_ms,
                    reason = self.outcome,
                    body = self.body.as_deref(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The line of a 404 said `model=`.
    #[test]
    fn the_model_asked_for_is_named_where_none_answers() {
        let mut record = AccessRecord::new("r".to_owned(), "chat", true);
        assert_eq!(record.named_model(), None);
        let name = "\u{e4}".repeat(100);
        record.asked.set(bounded(&name)).expect("set once");
        assert_eq!(record.named_model().map(str::len), Some(NAME_BYTES_MAX));
        record.model = "answers".to_owned();
        assert_eq!(record.named_model(), Some("answers"));
        assert_eq!(known(0), None);
        assert_eq!(known(3), Some(3));
    }
}
