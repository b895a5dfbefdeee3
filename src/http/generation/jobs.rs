//! The jobs of one answer: submitted together, waited for together, cancelled together.
//!
//! Owned by the HTTP worker that answers. Dropping them cancels whatever still runs, so that
//! every way out of a handler frees the slots. What is not here: text and stop strings, which
//! `scheduler::TokenStream` makes.

use super::growing::{Finished, Update};
use crate::chat::Part;
use crate::http::errors::ApiError;
use crate::pool::LoadedModel;
use crate::request::{GenerationRequest, RequestError, TokenLogprob, UpstreamPart, Usage};
use crate::scheduler::{CancelHandle, Loops, StreamEvent, SubmitOptions, TokenStream};
use std::time::{Duration, Instant};

/// What waiting brought.
#[derive(Debug)]
pub enum Wait {
    /// Job `.0` reports.
    Update(usize, Update),
    /// Nothing came within the time.
    Silent,
    /// A job was cancelled, and with it the answer: by a hang-up or over the API.
    Cancelled,
    /// A job failed, and so does the answer.
    Failed(ApiError),
}

/// See the module.
pub struct Jobs {
    streams: Vec<TokenStream>,
    /// Jobs that have not ended, in ascending order; the others have nothing more to say.
    running: Vec<usize>,
    queue_time: Option<Duration>,
    n_tokens: u64,
    /// Another server makes the tokens: each piece of text counts as one.
    is_forwarded: bool,
}

impl Jobs {
    /// Submits all jobs or none. More jobs than the queue of an idle model takes can never be
    /// served, so that is the request's fault, not an overload.
    pub fn submit(
        model: &LoadedModel,
        jobs: Vec<GenerationRequest>,
        options: SubmitOptions,
    ) -> Result<Self, ApiError> {
        let longest = jobs.iter().map(GenerationRequest::prompt_tokens).max();
        let most = model.executor.burst_max(longest.unwrap_or(0) as usize);
        if jobs.len() > most {
            let text = format!(
                "{} choices (prompts times n) in one request, at most {most} are served",
                jobs.len()
            );
            return Err(ApiError {
                is_hopeless: true,
                ..ApiError::invalid("n", text)
            });
        }
        let is_forwarded = jobs.iter().any(|job| job.upstream.is_some());
        let streams = model.executor.submit_many(jobs, options)?;
        Ok(Self {
            is_forwarded,
            running: (0..streams.len()).collect(),
            streams,
            queue_time: None,
            n_tokens: 0,
        })
    }

    /// One handle per job.
    #[must_use]
    pub fn cancel_handles(&self) -> Vec<CancelHandle> {
        self.streams
            .iter()
            .map(TokenStream::cancel_handle)
            .collect()
    }

    /// Cancels all jobs; never blocks, may run on any thread.
    pub fn cancel_hook(&self) -> impl FnOnce() + Send + 'static {
        let handles = self.cancel_handles();
        move || handles.iter().for_each(|handle| handle.cancel())
    }

    /// Log-probabilities of prompt tokens 1.. of a job that has reported something.
    #[must_use]
    pub fn prompt_logprobs(&self, job_idx: usize) -> Vec<TokenLogprob> {
        self.streams[job_idx]
            .prompt_logprobs()
            .map(<[_]>::to_vec)
            .unwrap_or_default()
    }

    /// Depth of the first job; the others may have been granted less. None for ordinary models.
    #[must_use]
    pub fn loops(&self) -> Option<Loops> {
        self.streams.first().and_then(TokenStream::loops)
    }

    /// Time in the queue of the first job that ended.
    #[must_use]
    pub fn queue_time(&self) -> Option<Duration> {
        self.queue_time
    }

    /// Tokens received so far, over all jobs.
    #[must_use]
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// What a job that runs has used so far. What the cache held of its prompt is told at its end.
    #[must_use]
    pub fn used(&self, job_idx: usize) -> Usage {
        self.streams[job_idx].used()
    }

    /// The next thing that any job reports. None = wait as long as it takes.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Wait {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if let [only] = self.running[..] {
            let stream = &mut self.streams[only];
            let event = match timeout {
                None => stream.recv(),
                Some(timeout) => stream.recv_timeout(timeout),
            };
            return self.report(only, event);
        }
        while let Some(job_idx) = TokenStream::wait_any(&self.streams, &self.running, deadline) {
            // What was ready may have been for the stream itself; then others get their turn.
            match self.streams[job_idx].recv_timeout(Duration::ZERO) {
                StreamEvent::TimedOut => {}
                event => return self.report(job_idx, event),
            }
        }
        Wait::Silent
    }

    /// The error, and of a lost replica whether it had begun: who gets a whole answer or none cannot see
    /// what another try would compute, and pay, again.
    fn told_how_far(&self, error: &RequestError) -> ApiError {
        match error {
            RequestError::ReplicaLost(_) => ApiError::replica_lost(self.n_tokens),
            error => error.clone().into(),
        }
    }

    fn report(&mut self, job_idx: usize, event: StreamEvent) -> Wait {
        match event {
            StreamEvent::TimedOut => Wait::Silent,
            StreamEvent::Failed(RequestError::Cancelled) => Wait::Cancelled,
            StreamEvent::Failed(error) => Wait::Failed(self.told_how_far(&error)),
            StreamEvent::Chunk(chunk) => {
                self.n_tokens += u64::from(chunk.token_id.is_some() || self.is_forwarded);
                if let Some(part) = chunk.part {
                    return Wait::Update(job_idx, Update::Part(told(part)));
                }
                let update = Update::Text {
                    text: chunk.text,
                    logprobs: chunk.logprobs,
                    text_logprobs: chunk.text_logprobs,
                };
                Wait::Update(job_idx, update)
            }
            StreamEvent::Finished(outcome) => {
                self.running.retain(|running| *running != job_idx);
                self.queue_time = self.queue_time.or(outcome.stamps.queue_wait());
                let finished = Finished {
                    reason: outcome.finish_reason,
                    stop_idx: outcome.stop_idx,
                    usage: outcome.usage,
                    stamps: outcome.stamps,
                };
                Wait::Update(job_idx, Update::Finished(Box::new(finished)))
            }
        }
    }
}

/// Another server's words for a part of an answer as ours.
fn told(part: UpstreamPart) -> Part {
    match part {
        UpstreamPart::Reasoning(text) => Part::Reasoning(text),
        UpstreamPart::CallBegin { index, name } => Part::CallBegin { index, name },
        UpstreamPart::CallArguments { index, fragment } => Part::CallArguments { index, fragment },
    }
}
