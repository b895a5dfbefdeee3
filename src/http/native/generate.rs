//! `POST /v1/native/generate`: continues a prompt, or tells how likely it is.
//!
//! Runs on the HTTP worker that took the request and holds it until the answer is out. As on the
//! OpenAI routes the HTTP status waits for the first event, a hang-up cancels, and one event of a
//! stream is one chunk and one flush. What is not here: which fields there are (`asked`), the shapes
//! of answers (`answer`).

use super::answer::{End, Finish, Frame, Piece, Said, Score, Timings, TokenEntry, Whole, entries};
use super::asked::{Asked, Mode};
use super::prompt;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::{Exchange, Stream, StreamEnd};
use crate::http::generation::call::Call;
use crate::http::generation::prepare::{constraint, preflight};
use crate::http::generation::run::cancelled;
use crate::http::generation::usage::{AskedLoops, UsageCounts, UsageSum};
use crate::http::openai::answer::finish_text;
use crate::http::openai::capabilities::refuse_missing;
use crate::http::openai::chat::Conversation;
use crate::http::openai::depth::Depth;
use crate::http::openai::fields::{Fields, parse_object};
use crate::http::openai::forward::Forwarding;
use crate::http::openai::logprobs::LOGPROB_MIN;
use crate::http::openai::sampling::check_context;
use crate::http::sse;
use crate::pool::LoadedModel;
use crate::request::{
    GenerationRequest, RequestError, RequestId, TokenId, TokenLogprob, UpstreamPrompt, Usage,
};
use crate::runtime::Feature;
use crate::scheduler::{GenerationChunk, Outcome, StreamEvent, SubmitOptions, TokenStream};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

/// A checked request, ready to be submitted.
struct Work {
    model: Arc<LoadedModel>,
    /// None where another server runs the model.
    tokenizer: Option<Arc<Tokenizer>>,
    asked: Asked,
    job: GenerationRequest,
    options: SubmitOptions,
}

/// See the module.
pub fn generate(call: &Call<'_>, exchange: Exchange) {
    match prepare(call) {
        Ok(work) => run(work, call, exchange),
        Err(error) => exchange.error(&error),
    }
}

fn prepare(call: &Call<'_>) -> Result<Work, ApiError> {
    let body = parse_object(call.request.body())?;
    let fields = Fields::new(&body);
    let (model, loops) = call.model(&fields)?;
    let Some(tokenizer) = model.tokenizer.clone() else {
        return prepare_forwarded(call, &body, model, loops);
    };
    refuse_missing(&fields, &model, loops)?;
    let mut asked = Asked::parse(&fields, Some(tokenizer.vocab_size()))?;
    call.isolate(&model, &mut asked.common);
    asked.common.depth = Depth::parse(&fields, loops, &model.meta)?;
    let options = call.options(&fields, &asked.common)?;
    let limit = match asked.mode {
        Mode::Generate { max_tokens } => max_tokens,
        Mode::Score { .. } => None,
    };
    preflight(&model, limit)?; // before anything is rendered or tokenized
    let (prompt, param) = prompt::read(&model, &tokenizer, &fields, "prompt", true)?;
    let max_tokens = asked.max_tokens(prompt.len(), model.context_length);
    check_context(prompt.len(), max_tokens, model.context_length, param)
        .inspect_err(|_| model.executor.count_refusal("context_length_exceeded"))?;
    if let Mode::Score { from } = asked.mode
        && from as usize >= prompt.len()
    {
        let text = format!(
            "the prompt has {} tokens; to score from token {from} on it needs at least {}",
            prompt.len(),
            u64::from(from) + 1
        );
        return Err(ApiError::invalid(param, text));
    }
    let mut job = asked.job(prompt, max_tokens);
    job.constraint = constraint(&model, &asked.common)?;
    Ok(Work {
        job,
        model,
        tokenizer: Some(tokenizer),
        asked,
        options,
    })
}

/// The same for a model that another server runs: no ids, and no scores.
fn prepare_forwarded(
    call: &Call<'_>,
    body: &Map<String, Value>,
    model: Arc<LoadedModel>,
    loops: Option<u32>,
) -> Result<Work, ApiError> {
    let fields = Fields::new(body);
    let missing = |feature, param| Err(ApiError::missing(feature, param, &model.name));
    let mut asked = Asked::parse(&fields, None)?;
    call.isolate(&model, &mut asked.common);
    let Mode::Generate { max_tokens } = asked.mode else {
        return missing(Feature::PromptLogprobs, "mode");
    };
    if asked.n_top.is_some() {
        return missing(Feature::TokenIds, "logprobs"); // entries of this route have ids
    }
    let options = call.options(&fields, &asked.common)?;
    let mut forwarding = Forwarding::new(call, body, &model, loops, &asked.common, &options)?;
    preflight(&model, None)?;
    let prompt = match prompt::exactly_one(&fields, &["prompt", "messages", "tokens"])? {
        "tokens" => return missing(Feature::TokenIds, "tokens"),
        "messages" => {
            let conversation = Conversation::parse(&fields, true)?;
            UpstreamPrompt::Messages(conversation.template.messages)
        }
        _ => UpstreamPrompt::Text(fields.string("prompt")?.unwrap_or_default().to_owned()),
    };
    if let Some(max_tokens) = max_tokens {
        forwarding.set("max_tokens", max_tokens.into());
    }
    Ok(Work {
        job: forwarding.job(&asked.common, prompt, max_tokens, None, 0),
        model,
        tokenizer: None,
        asked,
        options,
    })
}

/// Submits and answers.
fn run(work: Work, call: &Call<'_>, mut exchange: Exchange) {
    let Work {
        model,
        tokenizer,
        asked,
        job,
        options,
    } = work;
    exchange.record.model.clone_from(&model.name);
    exchange.record.stream = options.streaming;
    exchange.record.prompt_tokens = job.prompt_tokens().into();
    let reserved = exchange.reserve(job.prompt_tokens().into(), std::slice::from_ref(&job));
    if let Err(error) = reserved {
        return exchange.error(&error);
    }
    let (id, prompt) = (job.id, Arc::clone(&job.prompt));
    let submitted = model.executor.submit_many(vec![job], options);
    let mut source = match submitted.map(|mut streams| streams.pop()) {
        Ok(source) => source.expect("a job that was taken has a stream"),
        Err(error) => return exchange.error(&error.into()),
    };
    exchange.add_header("x-tinyloop-request-id", id.to_string());
    if let Some(loops) = source.loops() {
        exchange.add_header("x-tinyloop-loops", loops.granted.to_string());
    }
    let (name, client) = (exchange.record.id.clone(), call.client.clone());
    let handle = source.cancel_handle();
    let live = call.state.live();
    let _listed = live.register(id, name, client, vec![handle.clone()]);
    exchange.record.follow(vec![handle.clone()]);
    exchange.on_hangup(move || handle.cancel());
    let teller = Teller::new(
        id,
        &model,
        tokenizer.as_deref(),
        &asked,
        source.loops().map(|l| l.asked),
    );
    match asked.mode {
        Mode::Score { from } => score(&teller, &mut source, &prompt, from as usize, exchange),
        Mode::Generate { .. } if asked.common.stream => {
            stream(&teller, &mut source, call.ping, exchange);
        }
        Mode::Generate { .. } => whole(teller, &mut source, exchange),
    }
}

/// What is the same for all parts of an answer.
struct Teller<'a> {
    frame: Frame<'a>,
    tokenizer: Option<&'a Tokenizer>,
    return_tokens: bool,
    wants_logprobs: bool,
    loops: AskedLoops,
}

impl<'a> Teller<'a> {
    fn new(
        id: RequestId,
        model: &'a LoadedModel,
        tokenizer: Option<&'a Tokenizer>,
        asked: &Asked,
        loops: Option<u32>,
    ) -> Self {
        let object = match asked.mode {
            Mode::Generate { .. } => "native.generation",
            Mode::Score { .. } => "native.score",
        };
        Self {
            frame: Frame::new(id, object, model),
            tokenizer,
            return_tokens: asked.return_tokens,
            wants_logprobs: asked.n_top.is_some(),
            loops: AskedLoops {
                loops: loops.unwrap_or(1),
                may_exit_early: asked.common.depth.adaptive.is_some(),
            },
        }
    }

    fn said<'d>(&'d self, draft: &'d Draft) -> Said<'d> {
        let logprobs = || {
            let tokenizer = self.tokenizer;
            tokenizer.map_or_else(Vec::new, |tokenizer| entries(tokenizer, &draft.logprobs))
        };
        Said {
            text: &draft.text,
            tokens: self.return_tokens.then_some(draft.tokens.as_slice()),
            logprobs: self.wants_logprobs.then(logprobs),
        }
    }

    fn usage(&self, usage: Usage) -> UsageCounts {
        let mut sum = UsageSum::default();
        sum.add(usage, true);
        sum.counts(Some(self.loops))
    }

    fn finish(&self, outcome: &Outcome) -> Finish {
        Finish {
            finish_reason: finish_text(outcome.finish_reason),
            usage: Some(self.usage(outcome.usage)),
            timings: Some(Timings::new(&outcome.stamps)),
        }
    }
}

/// Text that was not sent yet, with the tokens that made it.
#[derive(Default)]
struct Draft {
    text: String,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprob>,
}

impl Draft {
    fn add(&mut self, chunk: GenerationChunk) {
        self.tokens.extend(chunk.token_id);
        self.text.push_str(&chunk.text);
        self.logprobs.extend(chunk.logprobs);
    }

    /// Whether there is something to show: tokens alone wait for their text.
    fn is_ripe(&self) -> bool {
        !self.text.is_empty() || !self.logprobs.is_empty()
    }

    fn clear(&mut self) {
        self.text.clear();
        self.tokens.clear();
        self.logprobs.clear();
    }
}

/// Reads to the end; `take` gets the chunks. None: the exchange has been told why not.
fn read_to_end(
    source: &mut TokenStream,
    mut exchange: Exchange,
    mut take: impl FnMut(GenerationChunk),
) -> Option<(Exchange, Outcome)> {
    loop {
        match source.recv() {
            StreamEvent::Chunk(chunk) => {
                exchange.record.first_token();
                exchange.record.completion_tokens += u64::from(chunk.token_id.is_some());
                take(chunk);
            }
            StreamEvent::TimedOut => {} // cannot be: no deadline was given
            StreamEvent::Failed(RequestError::Cancelled) => {
                cancelled(exchange);
                return None;
            }
            StreamEvent::Failed(error) => {
                exchange.error(&error.into());
                return None;
            }
            StreamEvent::Finished(outcome) => {
                exchange.record.queue = outcome.stamps.queue_wait();
                let n_tokens = &mut exchange.record.completion_tokens;
                if *n_tokens == 0 {
                    *n_tokens = outcome.usage.completion_tokens.into(); // text without ids
                }
                return Some((exchange, outcome));
            }
        }
    }
}

fn whole(teller: Teller<'_>, source: &mut TokenStream, exchange: Exchange) {
    let mut draft = Draft::default();
    let Some((exchange, outcome)) = read_to_end(source, exchange, |chunk| draft.add(chunk)) else {
        return;
    };
    exchange.json(&Whole {
        said: teller.said(&draft),
        finish: teller.finish(&outcome),
        frame: teller.frame.clone(),
    });
}

fn score(
    teller: &Teller<'_>,
    source: &mut TokenStream,
    prompt: &[TokenId],
    from: usize,
    exchange: Exchange,
) {
    let Some((exchange, outcome)) = read_to_end(source, exchange, |_| {}) else {
        return;
    };
    let scored = source.prompt_logprobs().unwrap_or_default();
    let (Some((first, rest)), Some(counted), Some(tokenizer)) = (
        prompt.split_first(),
        scored.get(from - 1..),
        teller.tokenizer,
    ) else {
        return exchange.error(&not_scored(prompt.len(), scored.len()));
    };
    if rest.len() != scored.len() || counted.is_empty() {
        return exchange.error(&not_scored(prompt.len(), scored.len()));
    }
    let sum: f64 = counted.iter().map(|one| f64::from(one.logprob)).sum();
    let mean_logprob = sum / counted.len() as f64;
    let perplexity = Some((-mean_logprob).exp()).filter(|value| value.is_finite());
    let first = TokenEntry::new(tokenizer, *first, None);
    let mut logprobs = Vec::with_capacity(prompt.len());
    logprobs.push(first);
    logprobs.extend(entries(tokenizer, scored));
    exchange.json(&Score {
        frame: teller.frame.clone(),
        perplexity,
        // JSON has no infinities.
        mean_logprob: mean_logprob.max(LOGPROB_MIN),
        n_scored: counted.len(),
        logprobs,
        usage: teller.usage(outcome.usage),
        timings: Timings::new(&outcome.stamps),
    });
}

/// A runtime that cannot score, or a bug of ours.
fn not_scored(n_prompt: usize, n_scored: usize) -> ApiError {
    let text = format!("the runtime scored {n_scored} of the prompt's {n_prompt} tokens");
    ApiError::new(ErrorCode::InternalError, text)
}

fn stream(teller: &Teller<'_>, source: &mut TokenStream, ping: Duration, exchange: Exchange) {
    let first = source.recv_timeout(ping);
    match first {
        StreamEvent::Failed(RequestError::Cancelled) => return cancelled(exchange),
        StreamEvent::Failed(error) => return exchange.error(&error.into()),
        _ => {}
    }
    let Some(mut stream) = exchange.stream() else {
        return; // dropping the source cancels
    };
    let end = write_events(teller, source, &mut stream, first, ping);
    stream.end(end);
}

fn write_events(
    teller: &Teller<'_>,
    source: &mut TokenStream,
    stream: &mut Stream,
    first: StreamEvent,
    ping: Duration,
) -> Result<(), StreamEnd> {
    let mut draft = Draft::default();
    let mut next = first;
    loop {
        match next {
            StreamEvent::Chunk(chunk) => {
                stream.record.first_token();
                stream.record.completion_tokens += u64::from(chunk.token_id.is_some());
                draft.add(chunk);
                if draft.is_ripe() {
                    stream.event(&Piece::new(teller.said(&draft)))?;
                    draft.clear();
                }
            }
            StreamEvent::TimedOut => stream.send(sse::PING)?,
            StreamEvent::Finished(outcome) => {
                stream.record.queue = outcome.stamps.queue_wait();
                let n_tokens = &mut stream.record.completion_tokens;
                if *n_tokens == 0 {
                    *n_tokens = outcome.usage.completion_tokens.into(); // text without ids
                }
                if teller.return_tokens && !draft.tokens.is_empty() {
                    stream.event(&Piece::new(teller.said(&draft)))?;
                }
                return Ok(stream.event(&End::new(&teller.frame, teller.finish(&outcome)))?);
            }
            StreamEvent::Failed(RequestError::Cancelled) if stream.is_gone() => {
                return Err(StreamEnd::ClientGone);
            }
            StreamEvent::Failed(RequestError::Cancelled) => {
                // Over the API, while the client listens: no error, the answer ends where it is.
                stream.record.outcome = ErrorCode::Cancelled.row().2;
                let finish = Finish {
                    finish_reason: "cancelled",
                    usage: None,
                    timings: None,
                };
                return Ok(stream.event(&End::new(&teller.frame, finish))?);
            }
            StreamEvent::Failed(error) => return Err(StreamEnd::Failed(error.into())),
        }
        next = source.recv_timeout(ping);
    }
}
