//! Requests for models that another server runs: they have no tokenizer here, so what the client wrote
//! is forwarded instead of tokens.
//!
//! Pure but for reading the model. Fields are checked by the same code as for our own engine; those
//! that say how to answer are then forwarded as they stand, by a list of names, so that nothing leaves
//! that nobody thought of. What such a model lacks is refused by the name of the capability; a request
//! that would leave this machine is refused unless it says that it may. What is not here: the call
//! (`runtime/upstream`), the answer (`growing`).

use super::capabilities::refuse_missing;
use super::chat::ChatRequest;
use super::completions::{CompletionRequest, Prompt};
use super::fields::Fields;
use super::sampling::CommonOptions;
use super::tools::ToolChoice;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::generation::call::Call;
use crate::http::generation::growing::ChoicePlan;
use crate::http::generation::prepare::{Prepared, preflight};
use crate::http::generation::shape::AnswerInfo;
use crate::pool::LoadedModel;
use crate::request::{GenerationRequest, UpstreamCall, UpstreamPrompt};
use crate::runtime::Feature;
use crate::scheduler::SubmitOptions;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Body fields that are forwarded under their own names. Those that we set ourselves are not among
/// them: prompt, limits, seed, stop, priority, isolation, streaming, model.
#[rustfmt::skip]
pub(in crate::http) const FORWARDED: &[&str] = &[
    "temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "repeat_penalty", "repeat_last_n",
    "logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos", "min_tokens",
    "logprobs", "top_logprobs", "skip_special_tokens", "cache_prompt",
    "response_format", "grammar", "json_schema", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort",
    "tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "reasoning_format",
    "verbosity", "user", "safety_identifier", "prompt_cache_key",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "xtc_probability", "xtc_threshold",
    "mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent",
    "min_keep", "samplers", "adaptive_target", "adaptive_decay",
];

/// Says in a body that the request may leave this machine.
pub const ALLOW_REMOTE: &str = "allow_remote";
const ALLOW_REMOTE_HEADER: &str = "x-allow-remote";

/// What is the same for all jobs of a request.
pub struct Forwarding {
    fields: Map<String, Value>,
    priority: i32,
    may_leave: bool,
    seed: Option<u64>,
}

impl Forwarding {
    /// Checks what the request asks of this model, and what it allows. `loops`: the depth that the
    /// model name ends in.
    ///
    /// # Errors
    /// A missing capability, or no consent.
    pub fn new(
        call: &Call<'_>,
        body: &Map<String, Value>,
        model: &LoadedModel,
        loops: Option<u32>,
        common: &CommonOptions,
        options: &SubmitOptions,
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        let may_leave = consent(call, &fields, model)?;
        refuse_missing(&fields, model, loops)?;
        let is_there = |name: &&&str| fields.get(name).is_some();
        let forwarded = FORWARDED.iter().filter(is_there);
        let mut forwarded: Map<String, Value> = forwarded
            .map(|name| ((*name).to_owned(), body[*name].clone()))
            .collect();
        // A stop string that shall stay in the text is matched here: not every server can do that.
        if let Some(stop) = fields
            .get("stop")
            .filter(|_| !common.stop.include_stop_string)
        {
            forwarded.insert("stop".to_owned(), stop.clone());
        }
        Ok(Self {
            fields: forwarded,
            priority: options.priority,
            may_leave,
            seed: common.sampling.seed,
        })
    }

    /// Forwards a field after all, or another value of it.
    pub fn set(&mut self, name: &str, value: Value) {
        self.fields.insert(name.to_owned(), value);
    }

    /// The request of choice `sample`. `max_tokens` None: up to the other server.
    #[must_use]
    pub fn job(
        &self,
        common: &CommonOptions,
        prompt: UpstreamPrompt,
        max_tokens: Option<u32>,
        logprobs: Option<u32>,
        sample: u32,
    ) -> GenerationRequest {
        let mut job = common.request(Vec::new(), max_tokens.unwrap_or(u32::MAX), sample);
        let mut fields = self.fields.clone();
        if let Some(seed) = self.seed {
            // The first as it was given, the others by counting: all servers take 31 bits.
            let seed = match sample {
                0 => Value::from(seed.cast_signed()),
                _ => Value::from(seed.wrapping_add(sample.into()) & 0x7fff_ffff),
            };
            fields.insert("seed".to_owned(), seed);
        }
        job.logprobs = logprobs;
        job.upstream = Some(Arc::new(UpstreamCall {
            prompt,
            fields,
            priority: self.priority,
            may_leave: self.may_leave,
        }));
        job
    }
}

/// Whether the request may leave this machine; an error where it would without saying so.
pub(in crate::http) fn consent(
    call: &Call<'_>,
    fields: &Fields<'_>,
    model: &LoadedModel,
) -> Result<bool, ApiError> {
    let in_body = fields.flag(ALLOW_REMOTE, false)?;
    let mut headers = call.request.all(ALLOW_REMOTE_HEADER);
    let in_header = headers.any(|value| matches!(value.trim_ascii(), b"true" | b"1"));
    let may_leave = in_body || in_header;
    if may_leave || !model.executor.asks_consent() {
        return Ok(may_leave);
    }
    let message = format!(
        "the model '{}' runs on another machine; a request for it must allow that it leaves this \
         one, with \"{ALLOW_REMOTE}\": true or the header {ALLOW_REMOTE_HEADER}: true",
        model.name
    );
    Err(ApiError {
        is_hopeless: true,
        ..ApiError::param(ErrorCode::RemoteNotAllowed, ALLOW_REMOTE, message)
    })
}

/// `POST /v1/chat/completions`
pub fn chat(
    call: &Call<'_>,
    body: &Map<String, Value>,
    model: &Arc<LoadedModel>,
    loops: Option<u32>,
) -> Result<Prepared, ApiError> {
    refuse_missing(&Fields::new(body), model, loops)?; // before they are found faulty
    let mut request = ChatRequest::parse(body, None)?;
    call.isolate(model, &mut request.common);
    let common = &request.common;
    let options = call.options(&Fields::new(body), common)?;
    let mut forwarding = Forwarding::new(call, body, model, loops, common, &options)?;
    preflight(model, None)?;
    if let Some(max_tokens) = request.max_tokens {
        // Under the name that the client uses for this server: some know only one of them.
        let is_new = body
            .get("max_completion_tokens")
            .is_some_and(|value| !value.is_null());
        let name = if is_new {
            "max_completion_tokens"
        } else {
            "max_tokens"
        };
        forwarding.set(name, Value::from(max_tokens));
    }
    if request.conversation.continued.is_some() {
        forwarding.set("add_generation_prompt", Value::from(false)); // some want it said
    }
    let messages = UpstreamPrompt::Messages(request.conversation.template.messages.clone());
    let job = |sample| {
        let (max_tokens, logprobs) = (request.max_tokens, request.logprobs);
        forwarding.job(common, messages.clone(), max_tokens, logprobs, sample)
    };
    let jobs: Vec<_> = (0..common.n).map(job).collect();
    let plan = ChoicePlan {
        calls_are_stop: request.conversation.tools.choice == ToolChoice::Named,
        ..ChoicePlan::default()
    };
    Ok(Prepared {
        info: AnswerInfo {
            prompt_tokens: jobs.first().map_or(0, |job| job.prompt_tokens().into()),
            wants_logprobs: request.logprobs.is_some(),
            ..AnswerInfo::new(model, common)
        },
        plans: vec![plan; jobs.len()],
        jobs,
        options,
    })
}

/// `POST /v1/completions`
pub fn completions(
    call: &Call<'_>,
    body: &Map<String, Value>,
    model: &Arc<LoadedModel>,
    loops: Option<u32>,
) -> Result<Prepared, ApiError> {
    refuse_missing(&Fields::new(body), model, loops)?; // before they are found faulty
    let mut request = CompletionRequest::parse(body, None)?;
    call.isolate(model, &mut request.common);
    let common = &request.common;
    if request.best_of > common.n {
        return Err(ApiError::missing(Feature::BestOf, "best_of", &model.name));
    }
    let options = call.options(&Fields::new(body), common)?;
    let mut forwarding = Forwarding::new(call, body, model, loops, common, &options)?;
    preflight(model, None)?;
    let max_tokens = Some(request.max_tokens).filter(|most| *most != u32::MAX);
    if let Some(max_tokens) = max_tokens {
        forwarding.set("max_tokens", Value::from(max_tokens));
    }
    if let Some(n_top) = request.logprobs {
        forwarding.set("logprobs", Value::from(n_top)); // also where `true` was sent
    }
    let (mut jobs, mut plans, mut prompt_tokens) = (Vec::new(), Vec::new(), 0);
    for (prompt_idx, prompt) in request.prompts.iter().enumerate() {
        let Prompt::Text(text) = prompt else {
            return Err(ApiError::missing(Feature::TokenIds, "prompt", &model.name));
        };
        for sample in 0..common.n {
            let prompt = UpstreamPrompt::Text(text.clone());
            jobs.push(forwarding.job(common, prompt, max_tokens, request.logprobs, sample));
            plans.push(ChoicePlan {
                prompt_idx,
                ..ChoicePlan::default()
            });
        }
        prompt_tokens += jobs.last().map_or(0, |job| job.prompt_tokens().into());
    }
    Ok(Prepared {
        info: AnswerInfo {
            prompt_tokens,
            wants_logprobs: request.logprobs.is_some(),
            prompt_of_choice: plans.iter().map(|plan| plan.prompt_idx).collect(),
            ..AnswerInfo::new(model, common)
        },
        jobs,
        plans,
        options,
    })
}
