//! Submits the jobs of an answer and writes it, whole or as a stream, in whatever shape.
//!
//! Runs on the HTTP worker that took the request and holds it until the answer is out. The HTTP
//! status is held back until the first event of any job, so that a refusal or an early fault is a
//! real status; only a wait longer than the ping interval opens the stream with a sign of life. A
//! client that hangs up cancels all jobs of its request at once, through the wire layer's hook.

use super::call::Call;
use super::events::Events;
use super::growing::{Growing, Step, Update};
use super::jobs::{Jobs, Wait};
use super::prepare::Work;
use super::shape::Shape;
use crate::http::access_log::AccessRecord;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::{Exchange, Stream, StreamEnd};
use crate::request::RequestError;
use std::time::Duration;

/// See the module.
pub fn run<S: Shape>(work: Result<Work<S>, ApiError>, call: &Call<'_>, mut exchange: Exchange) {
    let work = match work {
        Ok(work) => work,
        Err(error) => return exchange.error(&error),
    };
    exchange.record.model.clone_from(&work.model.name);
    exchange.record.stream = work.options.streaming;
    exchange.record.prompt_tokens = work.prompt_tokens;
    let streaming = work.options.streaming;
    if let Err(error) = exchange.reserve(work.prompt_tokens, &work.jobs) {
        return exchange.error(&error);
    }
    let jobs = match Jobs::submit(&work.model, work.jobs, work.options) {
        Ok(jobs) => jobs,
        Err(error) => return exchange.error(&error),
    };
    exchange.add_header("x-tinyloop-request-id", work.id.to_string());
    if let Some(loops) = jobs.loops() {
        exchange.add_header("x-tinyloop-loops", loops.granted.to_string());
    }
    let (name, client) = (exchange.record.id.clone(), call.client.clone());
    let live = call.state.live();
    let _listed = live.register(work.id, name, client, jobs.cancel_handles());
    exchange.record.follow(jobs.cancel_handles());
    exchange.on_hangup(jobs.cancel_hook());
    let answer = Answer {
        growing: work.growing,
        shape: work.shape,
        events: Events::default(),
    };
    if streaming {
        stream(answer, jobs, call.ping, exchange);
    } else {
        whole(answer, jobs, exchange);
    }
}

/// An answer on its way, and its looks.
struct Answer<S> {
    growing: Growing,
    shape: S,
    events: Events,
}

impl<S: Shape> Answer<S> {
    /// For streams: the events that an update makes stand in `events`.
    fn show(&mut self, jobs: &Jobs, choice_idx: usize, update: Update) {
        let (shape, events) = (&mut self.shape, &mut self.events);
        let show = |step| shape.step(choice_idx, step, events);
        take_update(&mut self.growing, jobs, choice_idx, update, show);
    }

    /// For whole answers: keeps what an update brings.
    fn keep(&mut self, jobs: &Jobs, choice_idx: usize, update: Update) {
        let shape = &mut self.shape;
        let keep = |step| shape.keep(choice_idx, step);
        take_update(&mut self.growing, jobs, choice_idx, update, keep);
    }

    /// Ends what has not ended: cancelled over the API while the client listens.
    fn cancel(&mut self, jobs: &Jobs) {
        let (shape, events) = (&mut self.shape, &mut self.events);
        self.growing.cancel(
            |choice_idx| jobs.used(choice_idx),
            |choice_idx, step| shape.step(choice_idx, step, events),
        );
        shape.end(self.growing.usage(), events);
    }
}

/// The log-probabilities of an echoed prompt come from the engine, before its first update.
fn take_update(
    growing: &mut Growing,
    jobs: &Jobs,
    choice_idx: usize,
    update: Update,
    take: impl FnMut(Step),
) {
    if growing.awaits_prompt(choice_idx) {
        growing.set_prompt_logprobs(choice_idx, jobs.prompt_logprobs(choice_idx));
    }
    growing.update(choice_idx, update, take);
}

fn whole<S: Shape>(mut answer: Answer<S>, mut jobs: Jobs, mut exchange: Exchange) {
    while !answer.growing.is_complete() {
        match jobs.wait(None) {
            Wait::Update(choice_idx, update) => {
                exchange.record.first_token();
                answer.keep(&jobs, choice_idx, update);
            }
            Wait::Cancelled => {
                note_usage(&mut exchange.record, &jobs, &answer.growing);
                return cancelled(exchange);
            }
            Wait::Failed(error) => {
                note_usage(&mut exchange.record, &jobs, &answer.growing);
                return exchange.error(&error);
            }
            Wait::Silent => {} // cannot be: no deadline was given
        }
    }
    note_usage(&mut exchange.record, &jobs, &answer.growing);
    answer.shape.whole(answer.growing.usage(), exchange);
}

/// A client that left is not told, but a half-closed one may still listen.
pub fn cancelled(exchange: Exchange) {
    let error = match exchange.is_gone() {
        true => ApiError::new(ErrorCode::ClientClosedRequest, "the client left"),
        false => RequestError::Cancelled.into(),
    };
    exchange.error(&error);
}

/// For the log and the client's quota, also when the answer was cut. What was guessed of the prompts
/// gives way to what their runtime has counted.
fn note_usage(record: &mut AccessRecord, jobs: &Jobs, growing: &Growing) {
    if let Some(n_tokens) = growing.counted_prompt_tokens() {
        record.prompt_tokens = n_tokens;
    }
    record.completion_tokens = jobs.n_tokens();
    record.queue = jobs.queue_time();
}

fn stream<S: Shape>(mut answer: Answer<S>, mut jobs: Jobs, ping: Duration, mut exchange: Exchange) {
    let first = jobs.wait(Some(ping));
    match &first {
        Wait::Failed(error) => return exchange.error(error),
        Wait::Cancelled => return cancelled(exchange),
        Wait::Update(..) | Wait::Silent => {}
    }
    if matches!(first, Wait::Update(..)) {
        exchange.record.first_token();
    }
    // Dropping the jobs on any way out cancels what still runs.
    let Some(mut stream) = exchange.stream() else {
        return;
    };
    answer.shape.begin(&mut answer.events);
    let end = write_events(&mut stream, &mut answer, &mut jobs, first, ping);
    note_usage(&mut stream.record, &jobs, &answer.growing);
    stream.end(end);
}

fn write_events<S: Shape>(
    stream: &mut Stream,
    answer: &mut Answer<S>,
    jobs: &mut Jobs,
    first: Wait,
    ping: Duration,
) -> Result<(), StreamEnd> {
    let mut next = first;
    loop {
        let is_over = match next {
            Wait::Update(choice_idx, update) => {
                stream.record.first_token();
                answer.show(jobs, choice_idx, update);
                answer.growing.is_complete()
            }
            Wait::Silent => {
                answer.shape.ping(&mut answer.events);
                false
            }
            Wait::Cancelled if stream.is_gone() => return Err(StreamEnd::ClientGone),
            Wait::Cancelled => {
                stream.record.outcome = ErrorCode::Cancelled.row().2;
                answer.cancel(jobs);
                return Ok(stream.send_all(&mut answer.events)?);
            }
            Wait::Failed(error) => {
                let error = stream.worded(&error);
                answer.shape.failed(&error, &mut answer.events);
                // The connection stays usable: the error is the end that clients look for.
                return Ok(stream.send_all(&mut answer.events)?);
            }
        };
        if is_over {
            answer.shape.end(answer.growing.usage(), &mut answer.events);
        }
        stream.send_all(&mut answer.events)?;
        if is_over {
            return Ok(());
        }
        next = jobs.wait(Some(ping));
    }
}
