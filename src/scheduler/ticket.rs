//! What a caller holds of its request: a ticket to wait on, or a stream of chunks.
//!
//! Owned by the caller's thread, where text is made: tokens become text here, stop strings are
//! matched here, and a match ends the answer here while the job is taken back from the runtime.
//! Invariants: after the last chunk comes exactly one end; dropping a ticket or a stream before it
//! cancels. What is not here: the queue, the slot (`driver`).

use super::admission::Loops;
use super::executor::Core;
use super::lifecycle::{Lifecycle, Stamps};
use super::mailbox::Receiver;
use super::queue::Event;
use super::record::{Delivery, Ending, Record};
use crate::request::{
    FinishReason, GenerationEvent, RequestError, RequestId, TextLogprob, TokenId, TokenLogprob,
    UpstreamPart, Usage,
};
use crate::tokenizer::{TextStep, TextStream};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a generation ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Token counts. After a matched stop string they are those of the token that completed it.
    pub usage: Usage,
    /// Which stop string of the request ended it; None when a token did.
    pub stop_idx: Option<usize>,
    /// When it reached its states.
    pub stamps: Stamps,
}

/// A piece of an answer. Usually one token; `text` is empty while a character or a possible stop
/// string is incomplete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationChunk {
    /// The token; None for text without ids and for text that was held back until the end.
    pub token_id: Option<TokenId>,
    /// Text that is certain now.
    pub text: String,
    /// Log-probabilities of the tokens whose text this is, if they were asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// The same from a runtime that sends text without ids.
    pub text_logprobs: Vec<TextLogprob>,
    /// Instead of text: what such a runtime has told apart from it.
    pub part: Option<UpstreamPart>,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationResult {
    /// The request.
    pub id: RequestId,
    /// Generated tokens; a final end-of-generation token is not among them.
    pub tokens: Vec<TokenId>,
    /// Their text, up to a stop string.
    pub text: String,
    /// One per token, if asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// Of prompt tokens 1.., if asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// Reason, counts, stamps.
    pub outcome: Outcome,
}

/// What a stream has next.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    /// A piece.
    Chunk(GenerationChunk),
    /// Nothing came within the timeout; ask again.
    TimedOut,
    /// It ended well; nothing follows.
    Finished(Outcome),
    /// It ended badly, after the last chunk; nothing follows.
    Failed(RequestError),
}

/// How far a request has come, for logs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Where it is.
    pub state: Lifecycle,
    /// Index of the replica that ran it last; None when none did.
    pub replica: Option<u32>,
    /// Tokens generated, or pieces of text where another server makes them.
    pub completion_tokens: u32,
    /// Prompt tokens that came from the prefix cache; known when it is done.
    pub cached_tokens: Option<u32>,
    /// Loops that it ran with, on the average over its tokens; known when it is done.
    pub mean_loops: Option<f64>,
}

/// Ends a request from anywhere. Cheap to clone, never blocks, does nothing after the end.
#[derive(Clone)]
pub struct CancelHandle {
    core: Arc<Core>,
    record: Arc<Record>,
}

impl CancelHandle {
    pub(crate) fn new(core: Arc<Core>, record: Arc<Record>) -> Self {
        Self { core, record }
    }

    /// The request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.record.request.id
    }

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let record = &self.record;
        let usage = record.usage();
        Progress {
            state: record.state(),
            replica: record.replica(),
            completion_tokens: usage.map_or(record.n_tokens(), |usage| usage.completion_tokens),
            cached_tokens: usage.map(|usage| usage.cached_tokens),
            mean_loops: usage.map(|usage| usage.mean_loops()),
        }
    }

    /// Cancels. A waiting request is gone when this returns; a running one ends for its waiter
    /// when the driver sees it, and frees its slot when the runtime has let it go.
    pub fn cancel(&self) {
        self.end(RequestError::Cancelled);
    }

    pub(crate) fn end(&self, error: RequestError) {
        let ending = Ending::Cancelled(error);
        if self.core.queue.remove(self.record.key).is_some() {
            self.core.settle(&self.record, &ending);
        } else if !self.record.state().is_final() {
            self.take_back(ending);
        }
    }

    /// Asks the driver to take a job back from its runtime.
    fn take_back(&self, ending: Ending) {
        let number = self.record.key.number;
        self.core.queue.post(Event::Cancel { number, ending });
    }
}

impl fmt::Debug for CancelHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CancelHandle").field(&self.id()).finish()
    }
}

/// An answer as it is made. Iterates over chunks; after the last one [`TokenStream::outcome`]
/// says how it ended. Dropping it before that cancels.
pub struct TokenStream {
    handle: CancelHandle,
    receiver: Receiver,
    text: TextMaker,
    prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// In the order of the inputs.
    embeddings: Vec<Vec<f32>>,
    n_tokens: u32,
    /// Counts as of the last token; zeros for runtimes that send text.
    usage: Usage,
    /// Events that one delivery brought beyond the first.
    ready: VecDeque<StreamEvent>,
    ended: Option<Result<Outcome, RequestError>>,
}

impl TokenStream {
    pub(crate) fn new(handle: CancelHandle, receiver: Receiver, text: TextStream) -> Self {
        Self {
            handle,
            receiver,
            text: TextMaker {
                stream: text,
                held: Vec::new(),
                held_text: Vec::new(),
            },
            prompt_logprobs: None,
            embeddings: Vec::new(),
            n_tokens: 0,
            usage: Usage::default(),
            ready: VecDeque::new(),
            ended: None,
        }
    }

    /// The request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.handle.id()
    }

    /// Loops asked and granted; None when neither the request nor the model speaks of loops.
    #[must_use]
    pub fn loops(&self) -> Option<Loops> {
        self.handle.record.loops
    }

    /// What it has used so far; all of it when it has ended.
    #[must_use]
    pub fn used(&self) -> Usage {
        let record = &self.handle.record;
        let so_far = || Usage {
            prompt_tokens: record.request.prompt_tokens(),
            completion_tokens: record.n_tokens(),
            loops: record.loops.map_or(1, |loops| loops.granted),
            ..Usage::default()
        };
        record.usage().unwrap_or_else(so_far)
    }

    /// Ends the request from anywhere.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        self.handle.clone()
    }

    /// Ends the request; the stream still delivers what is on its way, then the cancellation.
    pub fn cancel(&self) {
        self.handle.cancel();
    }

    /// Log-probabilities of prompt tokens 1.., if asked for; known from the first chunk (or the
    /// end) on.
    #[must_use]
    pub fn prompt_logprobs(&self) -> Option<&[TokenLogprob]> {
        self.prompt_logprobs.as_deref()
    }

    /// The embeddings, if asked for, in the order of the inputs; known at the end. The second call finds
    /// none.
    pub fn take_embeddings(&mut self) -> Vec<Vec<f32>> {
        std::mem::take(&mut self.embeddings)
    }

    /// How it ended; None while it runs.
    #[must_use]
    pub fn outcome(&self) -> Option<&Result<Outcome, RequestError>> {
        self.ended.as_ref().filter(|_| self.ready.is_empty())
    }

    /// The next event; waits for it.
    pub fn recv(&mut self) -> StreamEvent {
        self.recv_until(None)
    }

    /// The next event, or `TimedOut`. After the end it returns the end again.
    pub fn recv_timeout(&mut self, timeout: Duration) -> StreamEvent {
        self.recv_until(Instant::now().checked_add(timeout))
    }

    /// Reads to the end, dropping chunks.
    pub fn finish(mut self) -> Result<Outcome, RequestError> {
        loop {
            match self.recv() {
                StreamEvent::Chunk(_) | StreamEvent::TimedOut => {}
                StreamEvent::Finished(outcome) => return Ok(outcome),
                StreamEvent::Failed(error) => return Err(error),
            }
        }
    }

    /// Waits until one of the streams named by `candidates` has something to say, and returns its
    /// index; None when `deadline` passes first, nobody is named, or they were not submitted
    /// together. `recv_timeout` with a zero timeout then tells what it is, or `TimedOut` when it
    /// was nothing for the caller.
    #[must_use]
    pub fn wait_any(
        streams: &[TokenStream],
        candidates: &[usize],
        deadline: Option<Instant>,
    ) -> Option<usize> {
        let has_event = |index: &&usize| {
            let stream = &streams[**index];
            !stream.ready.is_empty() || stream.ended.is_some()
        };
        if let Some(&index) = candidates.iter().find(has_event) {
            return Some(index);
        }
        let receivers = candidates.iter().map(|&index| &streams[index].receiver);
        let first = receivers.clone().next()?;
        if !receivers.clone().all(|receiver| receiver.is_beside(first)) {
            return None;
        }
        Receiver::wait_any(receivers, deadline).map(|chosen| candidates[chosen])
    }

    fn recv_until(&mut self, deadline: Option<Instant>) -> StreamEvent {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return event;
            }
            match &self.ended {
                Some(Ok(outcome)) => return StreamEvent::Finished(*outcome),
                Some(Err(error)) => return StreamEvent::Failed(error.clone()),
                None => {}
            }
            match self.receiver.recv(deadline) {
                Some(delivery) => self.take(delivery),
                None => return StreamEvent::TimedOut,
            }
        }
    }

    fn take(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Event(GenerationEvent::PromptLogprobs(entries)) => {
                self.prompt_logprobs = Some(entries);
            }
            Delivery::Event(GenerationEvent::Embedding(vector)) => {
                self.embeddings.push(vector);
            }
            Delivery::Event(GenerationEvent::Token {
                token,
                logprob,
                usage,
            }) => {
                self.n_tokens += 1;
                self.usage = usage;
                let (chunk, stop_idx) = self.text.push(token, logprob);
                self.ready.push_back(StreamEvent::Chunk(chunk));
                if let Some(stop_idx) = stop_idx {
                    self.stop_by_text(stop_idx);
                }
            }
            Delivery::Event(GenerationEvent::Text { text, logprobs }) => {
                self.n_tokens += 1; // a guess, until the runtime tells its count at the end
                let (chunk, stop_idx) = self.text.push_text(&text, logprobs);
                self.ready.push_back(StreamEvent::Chunk(chunk));
                if let Some(stop_idx) = stop_idx {
                    self.stop_by_text(stop_idx);
                }
            }
            Delivery::Event(GenerationEvent::Part(part)) => {
                self.n_tokens += 1; // as above
                self.ready.push_back(StreamEvent::Chunk(GenerationChunk {
                    part: Some(part),
                    ..GenerationChunk::default()
                }));
            }
            // Sinks keep ends out of the mailbox: these come as `End`.
            Delivery::Event(GenerationEvent::Finished { .. } | GenerationEvent::Failed(_)) => {}
            Delivery::End(end) => {
                if let Some(chunk) = self.text.finish() {
                    self.ready.push_back(StreamEvent::Chunk(chunk));
                }
                self.ended = Some(end);
            }
        }
    }

    /// The answer is complete, whatever the runtime makes further: done, not cancelled.
    fn stop_by_text(&mut self, stop_idx: usize) {
        let record = &self.handle.record;
        let usage = Usage {
            prompt_tokens: record.request.prompt_tokens(),
            completion_tokens: self.n_tokens,
            loops: record.loops.map_or(1, |loops| loops.granted),
            ..self.usage
        };
        let reason = FinishReason::Stop;
        let ending = Ending::Done { reason, usage };
        self.handle.core.settle(record, &ending);
        // Settled before: the runtime's own end (its last token completed the stop string) or a
        // cancel came first. Either way its outcome is in the mailbox, behind tokens we skip.
        let end = loop {
            match self.receiver.recv(None) {
                Some(Delivery::End(end)) => break end,
                Some(Delivery::Event(_)) | None => {}
            }
        };
        self.handle.take_back(ending);
        self.ended = Some(end.map(|outcome| Outcome {
            finish_reason: reason,
            usage: Usage {
                completion_tokens: usage.completion_tokens,
                ..outcome.usage
            },
            stop_idx: Some(stop_idx),
            ..outcome
        }));
    }
}

impl Iterator for TokenStream {
    type Item = Result<GenerationChunk, RequestError>;

    /// Chunks, then at most one error, then None. A cancel ends it without an error: whoever
    /// cancelled knows; [`TokenStream::outcome`] still says so.
    fn next(&mut self) -> Option<Self::Item> {
        let failed_before = self.ready.is_empty() && self.ended.is_some();
        match self.recv() {
            StreamEvent::Chunk(chunk) => Some(Ok(chunk)),
            StreamEvent::Failed(RequestError::Cancelled) => None,
            StreamEvent::Failed(error) if !failed_before => Some(Err(error)),
            _ => None,
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.handle.cancel();
        }
    }
}

impl fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenStream")
            .field("id", &self.id())
            .field("n_tokens", &self.n_tokens)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

/// A claim on a whole answer. Dropping it before `wait` returned cancels.
#[derive(Debug)]
pub struct Ticket {
    stream: TokenStream,
}

impl Ticket {
    pub(crate) fn new(stream: TokenStream) -> Self {
        Self { stream }
    }

    /// The request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.stream.id()
    }

    /// Ends the request; `wait` then returns `Cancelled`, unless it was done already.
    pub fn cancel(&self) {
        self.stream.cancel();
    }

    /// Ends the request from anywhere.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        self.stream.cancel_handle()
    }

    /// Waits for the whole answer.
    pub fn wait(mut self) -> Result<GenerationResult, RequestError> {
        let (mut tokens, mut text, mut logprobs) = (Vec::new(), String::new(), Vec::new());
        loop {
            match self.stream.recv() {
                StreamEvent::Chunk(chunk) => {
                    tokens.extend(chunk.token_id);
                    text.push_str(&chunk.text);
                    logprobs.extend(chunk.logprobs);
                }
                StreamEvent::TimedOut => {}
                StreamEvent::Failed(error) => return Err(error),
                StreamEvent::Finished(outcome) => {
                    return Ok(GenerationResult {
                        id: self.id(),
                        tokens,
                        text,
                        logprobs,
                        prompt_logprobs: self.stream.prompt_logprobs.take(),
                        outcome,
                    });
                }
            }
        }
    }
}

/// Tokens to chunks: text through the detokenizer, log-probabilities held with their text.
struct TextMaker {
    stream: TextStream,
    held: Vec<TokenLogprob>,
    held_text: Vec<TextLogprob>,
}

impl TextMaker {
    /// The chunk of a token, and the stop string that is complete.
    fn push(
        &mut self,
        token: TokenId,
        logprob: Option<TokenLogprob>,
    ) -> (GenerationChunk, Option<usize>) {
        self.held.extend(logprob);
        let step = self.stream.push(token);
        self.chunk(Some(token), step)
    }

    fn push_text(
        &mut self,
        text: &str,
        logprobs: Vec<TextLogprob>,
    ) -> (GenerationChunk, Option<usize>) {
        self.held_text.extend(logprobs);
        let step = self.stream.push_text(text);
        self.chunk(None, step)
    }

    fn chunk(
        &mut self,
        token_id: Option<TokenId>,
        step: TextStep,
    ) -> (GenerationChunk, Option<usize>) {
        let mut chunk = GenerationChunk {
            token_id,
            text: step.text,
            ..GenerationChunk::default()
        };
        // A stop string takes its text away, but its tokens were generated.
        if !chunk.text.is_empty() || step.stop_idx.is_some() {
            chunk.logprobs = std::mem::take(&mut self.held);
            chunk.text_logprobs = std::mem::take(&mut self.held_text);
        }
        (chunk, step.stop_idx)
    }

    /// What is still held at the end.
    fn finish(&mut self) -> Option<GenerationChunk> {
        let text = self.stream.finish();
        let logprobs = std::mem::take(&mut self.held);
        let text_logprobs = std::mem::take(&mut self.held_text);
        let is_empty = text.is_empty() && logprobs.is_empty() && text_logprobs.is_empty();
        (!is_empty).then_some(GenerationChunk {
            text,
            logprobs,
            text_logprobs,
            ..GenerationChunk::default()
        })
    }
}
