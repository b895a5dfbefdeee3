//! From a checked body to jobs: resolves the model, makes prompts, applies limits.
//!
//! Runs on the HTTP worker. A request is refused here before anything is rendered or tokenized where
//! that can be known. What is not here: the fields themselves (`openai`), requests for models that
//! another server runs (`openai::forward`).

use super::call::Call;
use super::growing::{ChoicePlan, Growing};
use super::shape::{AnswerInfo, Shape};
use super::usage::AskedLoops;
use crate::constraint::ConstraintSource;
use crate::http::errors::ApiError;
use crate::http::openai::capabilities::refuse_missing;
use crate::http::openai::chat::ChatRequest;
use crate::http::openai::completions::{CompletionRequest, Prompt};
use crate::http::openai::depth::Depth;
use crate::http::openai::fields::Fields;
use crate::http::openai::forward;
use crate::http::openai::prompt::{non_empty, rendered_chat, text_prompt};
use crate::http::openai::reading::Reading;
use crate::http::openai::sampling::{CommonOptions, check_context};
use crate::pool::LoadedModel;
use crate::request::{GenerationRequest, RequestId, TokenId};
use crate::runtime::Feature;
use crate::scheduler::SubmitOptions;
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a request has become, before its answer has a shape.
pub struct Prepared {
    /// What the answer can tell about its request.
    pub info: AnswerInfo,
    /// At least one; the first has the answer's id.
    pub jobs: Vec<GenerationRequest>,
    /// One per job.
    pub plans: Vec<ChoicePlan>,
    /// How it wants to be scheduled.
    pub options: SubmitOptions,
}

/// An answer to grow and the jobs that feed it.
pub struct Work<S> {
    pub(super) model: Arc<LoadedModel>,
    pub(super) growing: Growing,
    pub(super) shape: S,
    pub(super) jobs: Vec<GenerationRequest>,
    /// Identity of the answer, in headers and for the cancel route.
    pub(super) id: RequestId,
    /// Tokens of all prompts, each counted once.
    pub(super) prompt_tokens: u64,
    pub(super) options: SubmitOptions,
}

impl Prepared {
    /// The same with the shape that `make` gives it.
    pub fn shaped<S: Shape>(self, make: impl FnOnce(AnswerInfo) -> S) -> Work<S> {
        let mut jobs = self.jobs;
        if let Some(first) = jobs.first_mut() {
            first.id = self.info.id; // so that the log and the cancel route find it
        }
        Work {
            model: Arc::clone(&self.info.model),
            growing: Growing::new(self.plans),
            jobs,
            id: self.info.id,
            prompt_tokens: self.info.prompt_tokens,
            options: self.options,
            shape: make(self.info),
        }
    }
}

impl AnswerInfo {
    /// What is known before there is a prompt; one choice.
    #[must_use]
    pub fn new(model: &Arc<LoadedModel>, common: &CommonOptions) -> Self {
        let depth = common.depth;
        Self {
            id: RequestId::generate(),
            model: Arc::clone(model),
            tokenizer: model.tokenizer.clone(),
            created: unix_seconds(),
            prompt_tokens: 0,
            loops: (model.meta.loops.max > 1).then(|| AskedLoops {
                loops: depth.loops.unwrap_or(model.meta.loops.default),
                may_exit_early: depth.adaptive.is_some(),
            }),
            include_usage: common.include_usage,
            wants_logprobs: false,
            skip_special: common.skip_special,
            prompt_of_choice: vec![0; common.n as usize],
            n_per_prompt: common.n as usize,
        }
    }
}

/// Unix seconds now.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// A chat in OpenAI's words, whatever dialect it was written in.
pub fn chat(call: &Call<'_>, body: &Map<String, Value>) -> Result<Prepared, ApiError> {
    let fields = Fields::new(body);
    let (model, loops) = call.model(&fields)?;
    let Some(tokenizer) = model.tokenizer.clone() else {
        return forward::chat(call, body, &model, loops);
    };
    refuse_missing(&fields, &model, loops)?;
    let mut request = ChatRequest::parse(body, Some(tokenizer.vocab_size()))?;
    call.isolate(&model, &mut request.common);
    request.common.depth = Depth::parse(&fields, loops, &model.meta)?;
    let options = call.options(&fields, &request.common)?;
    preflight(&model, request.max_tokens)?;
    let rendered = rendered_chat(&model, &tokenizer, &request.conversation)?;
    let prompt = non_empty(tokenizer.encode_prompt(&rendered), "messages")?;
    let context = model.context_length;
    let room = context.saturating_sub(prompt.len() as u32);
    // With no limit given the answer may fill the context, but it must have room for a token.
    let max_tokens = request.max_tokens.unwrap_or(room.max(1));
    check_context(prompt.len(), max_tokens, context, "messages")
        .inspect_err(|_| model.executor.count_refusal("context_length_exceeded"))?;
    let common = &request.common;
    let reading = Reading::new(&model, &tokenizer, &request.conversation, rendered.text());
    let constraint = reading.constraint(common.structure.as_ref())?;
    let options = SubmitOptions {
        shown_tokens: reading.shown_tokens(),
        ..options
    };
    let jobs = (0..common.n).map(|sample| {
        let mut job = common.request(Arc::clone(&prompt), max_tokens, sample);
        job.constraint.clone_from(&constraint);
        job.logprobs = request.logprobs;
        job
    });
    Ok(Prepared {
        jobs: jobs.collect(),
        plans: vec![reading.plan(); common.n as usize],
        options,
        info: AnswerInfo {
            prompt_tokens: prompt.len() as u64,
            wants_logprobs: request.logprobs.is_some(),
            ..AnswerInfo::new(&model, common)
        },
    })
}

/// Refuses what could not be taken now before anything is rendered or tokenized. An answer that can
/// never fit is the request's own fault, also while the queue is full.
pub fn preflight(model: &LoadedModel, max_tokens: Option<u32>) -> Result<(), ApiError> {
    if model.meta.makes_only_embeddings() {
        return Err(ApiError::missing(
            Feature::Completions,
            "model",
            &model.name,
        ));
    }
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

/// Texts to continue, in OpenAI's words.
pub fn completions(call: &Call<'_>, body: &Map<String, Value>) -> Result<Prepared, ApiError> {
    let fields = Fields::new(body);
    let (model, loops) = call.model(&fields)?;
    let Some(tokenizer) = model.tokenizer.clone() else {
        return forward::completions(call, body, &model, loops);
    };
    refuse_missing(&fields, &model, loops)?;
    let mut request = CompletionRequest::parse(body, Some(tokenizer.vocab_size()))?;
    call.isolate(&model, &mut request.common);
    request.common.depth = Depth::parse(&fields, loops, &model.meta)?;
    let options = call.options(&fields, &request.common)?;
    let limit = Some(request.max_tokens).filter(|most| *most != u32::MAX);
    preflight(&model, limit)?;
    let common = &request.common;
    let constraint = constraint(&model, common)?;
    let (mut jobs, mut plans, mut prompt_tokens) = (Vec::new(), Vec::new(), 0);
    for (prompt_idx, prompt) in request.prompts.iter().enumerate() {
        let prompt = tokens_of(&tokenizer, prompt)?;
        let max_tokens = completion_limit(&model, &request, prompt.len())?;
        prompt_tokens += prompt.len() as u64;
        let echo = request.echo.then(|| {
            let text = tokenizer.decode(&prompt, common.skip_special);
            (text, Arc::clone(&prompt))
        });
        for sample in 0..request.best_of {
            let mut job = completion_job(&request, Arc::clone(&prompt), max_tokens, sample);
            job.constraint.clone_from(&constraint);
            jobs.push(job);
            plans.push(ChoicePlan {
                prompt_idx,
                echo: echo.clone(),
                ..ChoicePlan::default()
            });
        }
    }
    Ok(Prepared {
        info: AnswerInfo {
            prompt_tokens,
            wants_logprobs: request.logprobs.is_some(),
            prompt_of_choice: plans.iter().map(|plan| plan.prompt_idx).collect(),
            ..AnswerInfo::new(&model, common)
        },
        jobs,
        plans,
        options,
    })
}

fn tokens_of(tokenizer: &Tokenizer, prompt: &Prompt) -> Result<Arc<[TokenId]>, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => non_empty(tokens.clone(), "prompt"),
        Prompt::Text(text) => text_prompt(tokenizer, text, "prompt"),
    }
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
