//! From a request body to an answer: resolves the model, makes prompts, submits the jobs, and
//! writes the answer whole or as a stream.
//!
//! Runs on the HTTP worker that took the request and holds it until the answer is out. The HTTP
//! status is held back until the first event of any job, so that a refusal or an early fault is a
//! real status; only a wait longer than the ping interval opens the stream with a comment. A
//! client that hangs up cancels all jobs of its request at once, through the wire layer's hook.

use super::answer::AnswerMeta;
use super::chat::ChatRequest;
use super::choice::Family;
use super::completions::{CompletionRequest, Prompt};
use super::depth::Depth;
use super::fields::{Fields, parse_object};
use super::forward;
use super::growing::{ChoicePlan, GrowingAnswer};
use super::jobs::{Jobs, Wait};
use super::prompt::{chat_prompt, non_empty, text_prompt};
use super::sampling::{CommonOptions, check_context};
use super::schedule::Schedule;
use crate::constraint::ConstraintSource;
use crate::http::access_log::AccessRecord;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::{Exchange, Stream, StreamEnd};
use crate::http::isolation::isolation_key;
use crate::http::sse;
use crate::http::state::ServerState;
use crate::http::wire::{Hangup, Request};
use crate::pool::{LoadedModel, Patience};
use crate::request::{GenerationRequest, RequestError, RequestId, TokenId};
use crate::scheduler::SubmitOptions;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One request for a generation, and what the server knows about it.
pub struct Call<'a> {
    /// The models and the live requests.
    pub state: &'a ServerState,
    /// How often a silent stream shows a sign of life.
    pub ping: Duration,
    /// As it came.
    pub request: &'a Request,
    /// Who asks, when keys are asked for.
    pub client: Option<Arc<str>>,
    /// Highest priority that it may ask for.
    pub max_priority: i32,
    /// Whether the client is still there while its model is waited for.
    pub hangup: Hangup,
    /// How long that took; it counts as time in the queue.
    pub waited: Cell<Duration>,
}

/// What a request has become: an answer to grow and the jobs that feed it.
pub(super) struct Work {
    pub(super) model: Arc<LoadedModel>,
    pub(super) answer: GrowingAnswer,
    /// At least one; the first has the answer's id.
    pub(super) jobs: Vec<GenerationRequest>,
    /// Identity of the answer, in headers and for the cancel route.
    pub(super) id: RequestId,
    /// Tokens of all prompts, each counted once.
    pub(super) prompt_tokens: u64,
    pub(super) options: SubmitOptions,
    /// Choices returned per prompt.
    pub(super) n_per_prompt: usize,
}

/// `POST /v1/chat/completions`
pub fn chat(call: &Call<'_>, exchange: Exchange) {
    run(prepare_chat(call), call, exchange);
}

/// `POST /v1/completions`
pub fn completions(call: &Call<'_>, exchange: Exchange) {
    run(prepare_completions(call), call, exchange);
}

impl Call<'_> {
    /// The model that the body names, and the depth that its name ends in.
    pub fn model(&self, fields: &Fields<'_>) -> Result<(Arc<LoadedModel>, Option<u32>), ApiError> {
        let started = Instant::now();
        let patience = Patience {
            queue_timeout: self.schedule(fields)?.queue_timeout,
            is_gone: &|| self.hangup.is_gone(),
        };
        let name = fields.string("model")?;
        let found = self.state.resolve_with_loops(name, &patience);
        self.waited.set(started.elapsed());
        found
    }

    /// What is left of a time in the queue after the model was waited for.
    fn rest_of(&self, queue_timeout: Duration) -> Duration {
        let rest = queue_timeout.saturating_sub(self.waited.get());
        rest.max(Duration::from_millis(1))
    }

    /// Who reuses whose blocks depends on the client and on how the model is configured.
    pub fn isolate(&self, model: &LoadedModel, common: &mut CommonOptions) {
        let mode = model.executor.prefix_isolation();
        let salt = common.cache_salt.as_deref();
        common.isolation_key = isolation_key(mode, self.client.as_deref(), salt);
    }

    /// How it wants to be scheduled, within what its key allows.
    pub fn schedule(&self, fields: &Fields<'_>) -> Result<Schedule, ApiError> {
        let asked = Schedule::parse(fields, |name| self.request.all(name).collect())?;
        Ok(Schedule {
            priority: asked.priority.min(self.max_priority),
            ..asked
        })
    }

    /// The same in the scheduler's words.
    pub fn options(
        &self,
        fields: &Fields<'_>,
        common: &CommonOptions,
    ) -> Result<SubmitOptions, ApiError> {
        let schedule = self.schedule(fields)?;
        Ok(SubmitOptions {
            priority: schedule.priority,
            slo_ms: schedule.slo_ms,
            slo_ttft_ms: schedule.slo_ttft_ms,
            queue_timeout: schedule.queue_timeout.map(|most| self.rest_of(most)),
            client: self.client.clone(),
            streaming: common.stream,
            skip_special_tokens: common.skip_special,
        })
    }
}

fn prepare_chat(call: &Call<'_>) -> Result<Work, ApiError> {
    let body = parse_object(call.request.body())?;
    let (model, loops) = call.model(&Fields::new(&body))?;
    let Some(tokenizer) = model.tokenizer.clone() else {
        return forward::chat(call, &body, model, loops);
    };
    let mut request = ChatRequest::parse(&body, Some(tokenizer.vocab_size()))?;
    call.isolate(&model, &mut request.common);
    request.common.depth = Depth::parse(&Fields::new(&body), loops, &model.meta)?;
    let options = call.options(&Fields::new(&body), &request.common)?;
    preflight(&model, request.max_tokens)?;
    let prompt = chat_prompt(&model, &tokenizer, &request.conversation)?;
    let context = model.context_length;
    let room = context.saturating_sub(prompt.len() as u32);
    // With no limit given the answer may fill the context, but it must have room for a token.
    let max_tokens = request.max_tokens.unwrap_or(room).max(1);
    check_context(prompt.len(), max_tokens, context, "messages")
        .inspect_err(|_| model.executor.count_refusal("context_length_exceeded"))?;
    let id = RequestId::generate();
    let common = &request.common;
    let constraint = constraint(&model, common)?;
    let meta = AnswerMeta::chat(id, &model, common.depth, common.include_usage);
    let jobs = (0..common.n).map(|sample| {
        let mut job = common.request(Arc::clone(&prompt), max_tokens, sample);
        job.constraint.clone_from(&constraint);
        job.logprobs = request.logprobs;
        job
    });
    let plan = ChoicePlan {
        prompt_idx: 0,
        echo: None,
    };
    Ok(Work {
        prompt_tokens: prompt.len() as u64,
        jobs: with_first_id(jobs.collect(), id),
        answer: GrowingAnswer::new(
            meta,
            Family::Chat,
            Some(tokenizer),
            vec![plan; common.n as usize],
            request.logprobs.is_some(),
            common.skip_special,
        ),
        id,
        options,
        n_per_prompt: common.n as usize,
        model,
    })
}

/// Refuses what could not be taken now before anything is rendered or tokenized. An answer that can
/// never fit is the request's own fault, also while the queue is full.
pub fn preflight(model: &LoadedModel, max_tokens: Option<u32>) -> Result<(), ApiError> {
    let Err(refusal) = model.executor.preflight() else {
        return Ok(());
    };
    check_context(
        1,
        max_tokens.unwrap_or(0),
        model.context_length,
        "max_tokens",
    )?;
    Err(refusal.into())
}

/// What all choices must look like; compiled here, on an HTTP worker, before anything is queued.
pub fn constraint(
    model: &LoadedModel,
    common: &CommonOptions,
) -> Result<Option<Arc<dyn ConstraintSource>>, ApiError> {
    let structure = common.structure.as_ref();
    structure
        .map(|structure| structure.constrain(model))
        .transpose()
}

/// The answer and its first job share an id, so that the log and cancel routes find it.
pub(super) fn with_first_id(
    mut jobs: Vec<GenerationRequest>,
    id: RequestId,
) -> Vec<GenerationRequest> {
    if let Some(first) = jobs.first_mut() {
        first.id = id;
    }
    jobs
}

fn prepare_completions(call: &Call<'_>) -> Result<Work, ApiError> {
    let body = parse_object(call.request.body())?;
    let (model, loops) = call.model(&Fields::new(&body))?;
    let Some(tokenizer) = model.tokenizer.clone() else {
        return forward::completions(call, &body, model, loops);
    };
    let mut request = CompletionRequest::parse(&body, Some(tokenizer.vocab_size()))?;
    call.isolate(&model, &mut request.common);
    request.common.depth = Depth::parse(&Fields::new(&body), loops, &model.meta)?;
    let options = call.options(&Fields::new(&body), &request.common)?;
    preflight(
        &model,
        Some(request.max_tokens).filter(|most| *most != u32::MAX),
    )?;
    let id = RequestId::generate();
    let common = &request.common;
    let constraint = constraint(&model, common)?;
    let meta = AnswerMeta::completion(id, &model, common.depth, common.include_usage);
    let (mut jobs, mut plans, mut prompt_tokens) = (Vec::new(), Vec::new(), 0);
    for (prompt_idx, prompt) in request.prompts.iter().enumerate() {
        let prompt = match prompt {
            Prompt::Tokens(tokens) => non_empty(tokens.clone(), "prompt")?,
            Prompt::Text(text) => text_prompt(&tokenizer, text, "prompt")?,
        };
        let max_tokens = completion_limit(&model, &request, prompt.len())?;
        prompt_tokens += prompt.len() as u64;
        let echo = request.echo.then(|| {
            (
                tokenizer.decode(&prompt, common.skip_special),
                Arc::clone(&prompt),
            )
        });
        for sample in 0..request.best_of {
            let mut job = completion_job(&request, Arc::clone(&prompt), max_tokens, sample);
            job.constraint.clone_from(&constraint);
            jobs.push(job);
            let echo = echo.clone();
            plans.push(ChoicePlan { prompt_idx, echo });
        }
    }
    Ok(Work {
        prompt_tokens,
        jobs: with_first_id(jobs, id),
        answer: GrowingAnswer::new(
            meta,
            Family::Completion,
            Some(tokenizer),
            plans,
            request.logprobs.is_some(),
            common.skip_special,
        ),
        id,
        options,
        n_per_prompt: common.n as usize,
        model,
    })
}

/// Tokens to generate for one prompt; "no limit" becomes what the context has left.
fn completion_limit(
    model: &LoadedModel,
    request: &CompletionRequest,
    prompt_tokens: usize,
) -> Result<u32, ApiError> {
    let context = model.context_length;
    let room = context.saturating_sub(prompt_tokens as u32);
    let max_tokens = match request.max_tokens {
        u32::MAX => room.max(1),
        count => count,
    };
    check_context(prompt_tokens, max_tokens, context, "prompt")
        .inspect_err(|_| model.executor.count_refusal("context_length_exceeded"))?;
    Ok(max_tokens)
}

fn completion_job(
    request: &CompletionRequest,
    prompt: Arc<[TokenId]>,
    max_tokens: u32,
    sample: u32,
) -> GenerationRequest {
    let common: &CommonOptions = &request.common;
    let mut job = common.request(prompt, max_tokens, sample);
    // Candidates are compared by their log-probabilities, asked or not.
    let compared = request.best_of > common.n;
    job.logprobs = request.logprobs.or(compared.then_some(0));
    job.prompt_logprobs = request.logprobs.filter(|_| request.echo);
    job
}

/// Submits and answers.
fn run(work: Result<Work, ApiError>, call: &Call<'_>, mut exchange: Exchange) {
    let work = match work {
        Ok(work) => work,
        Err(error) => return exchange.error(&error),
    };
    exchange.record.model.clone_from(&work.model.name);
    exchange.record.stream = work.options.streaming;
    exchange.record.prompt_tokens = work.prompt_tokens;
    let streaming = work.options.streaming;
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
    exchange.on_hangup(jobs.cancel_hook());
    if streaming {
        stream(work.answer, jobs, call.ping, exchange);
    } else {
        whole(work.answer, jobs, work.n_per_prompt, exchange);
    }
}

fn whole(mut answer: GrowingAnswer, mut jobs: Jobs, n_per_prompt: usize, mut exchange: Exchange) {
    while !answer.is_complete() {
        match jobs.wait(None) {
            Wait::Update(job_idx, update) => {
                exchange.record.first_token();
                hand_in_prompt(&mut answer, &jobs, job_idx);
                answer.keep(job_idx, update);
            }
            Wait::Cancelled => {
                note_usage(&mut exchange.record, &jobs);
                return cancelled(exchange);
            }
            Wait::Failed(error) => {
                note_usage(&mut exchange.record, &jobs);
                return exchange.error(&error);
            }
            Wait::Silent => {} // cannot be: no deadline was given
        }
    }
    note_usage(&mut exchange.record, &jobs);
    exchange.json(&answer.whole(n_per_prompt));
}

/// A client that left is not told, but a half-closed one may still listen.
pub fn cancelled(exchange: Exchange) {
    let error = match exchange.is_gone() {
        true => ApiError::new(ErrorCode::ClientClosedRequest, "the client left"),
        false => RequestError::Cancelled.into(),
    };
    exchange.error(&error);
}

/// The log-probabilities of an echoed prompt come from the engine, before its first update.
fn hand_in_prompt(answer: &mut GrowingAnswer, jobs: &Jobs, job_idx: usize) {
    if answer.awaits_prompt(job_idx) {
        answer.set_prompt_logprobs(job_idx, jobs.prompt_logprobs(job_idx));
    }
}

/// For the log, also when the answer was cut.
fn note_usage(record: &mut AccessRecord, jobs: &Jobs) {
    record.completion_tokens = jobs.n_tokens();
    record.queue = jobs.queue_time();
}

fn stream(mut answer: GrowingAnswer, mut jobs: Jobs, ping: Duration, mut exchange: Exchange) {
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
    let end = write_events(&mut stream, &mut answer, &mut jobs, first, ping);
    note_usage(&mut stream.record, &jobs);
    stream.end(end);
}

fn write_events(
    stream: &mut Stream,
    answer: &mut GrowingAnswer,
    jobs: &mut Jobs,
    first: Wait,
    ping: Duration,
) -> Result<(), StreamEnd> {
    let mut next = first;
    loop {
        match next {
            Wait::Update(job_idx, update) => {
                stream.record.first_token();
                hand_in_prompt(answer, jobs, job_idx);
                for chunk in answer.chunks(job_idx, update) {
                    stream.event(&chunk)?;
                }
            }
            Wait::Silent => stream.send(sse::PING)?,
            Wait::Cancelled if stream.is_gone() => return Err(StreamEnd::ClientGone),
            Wait::Cancelled => return send_cancelled(stream, answer),
            Wait::Failed(error) => return Err(StreamEnd::Failed(error)),
        }
        if answer.is_complete() {
            break;
        }
        next = jobs.wait(Some(ping));
    }
    if let Some(chunk) = answer.usage_chunk() {
        stream.event(&chunk)?;
    }
    stream.send(sse::DONE)?;
    Ok(())
}

/// Cancelled over the API while the client listens: no error, the choices end where they are.
fn send_cancelled(stream: &mut Stream, answer: &GrowingAnswer) -> Result<(), StreamEnd> {
    stream.record.outcome = ErrorCode::Cancelled.row().2;
    for chunk in answer.cancelled_chunks() {
        stream.event(&chunk)?;
    }
    stream.send(sse::DONE)?;
    Ok(())
}
