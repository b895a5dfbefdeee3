//! What all routes that make embeddings have in common: inputs to tokens, tokens to jobs, jobs to
//! vectors.
//!
//! Runs on the HTTP worker that took the request. Each input is a job of its own in the scheduler, so
//! that queue, priority, objectives, fairness, cancellation and drain are those of generations; for a model
//! that another server runs a job is a call there, with many inputs, retried and bounded like any other. A
//! request of many inputs goes in waves, so that it never asks for more of the queue than one answer
//! may. What is not here: the fields and looks of an answer (`openai/embeddings`).

use super::call::Call;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::openai::capabilities::refuse_missing;
use crate::http::openai::depth::Depth;
use crate::http::openai::fields::{Fields, kind_of};
use crate::http::openai::forward::consent;
use crate::http::openai::prompt::ENCODE;
use crate::http::openai::sampling::{CommonOptions, check_context, token_ids};
use crate::pool::LoadedModel;
use crate::request::{
    GenerationRequest, RequestError, RequestId, TokenId, UpstreamCall, UpstreamPrompt, Usage,
};
use crate::runtime::Feature;
use crate::scheduler::{StreamEvent, SubmitOptions, TokenStream};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Most inputs of one request.
pub const INPUTS_MAX: usize = 2048;
/// Inputs of one call to another server: each answer stays within what is read of one.
pub const FORWARDED_INPUTS_MAX: usize = 64;
/// Jobs of one request that are in the queue or run at once, at most.
const WAVE_JOBS_MAX: usize = 64;

/// A checked request for embeddings.
pub struct EmbedWork {
    /// Who makes them.
    pub model: Arc<LoadedModel>,
    /// At least one. An input is one job, or for models that another server runs up to
    /// [`FORWARDED_INPUTS_MAX`] of them are: one call there.
    pub jobs: Vec<GenerationRequest>,
    /// Scheduling.
    pub options: SubmitOptions,
    /// Identity in headers and for the cancel route.
    pub id: RequestId,
}

/// What came of it.
#[derive(Default)]
pub struct Embedded {
    /// One per input, in their order, (d_model), as pooled: see [`normalize`].
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all inputs.
    pub prompt_tokens: u64,
}

impl EmbedWork {
    /// Finds the model that a body names and reads the inputs from its field `input`: a text, texts,
    /// token ids or lists of token ids.
    ///
    /// # Errors
    /// What a client did wrong, a model that makes no embeddings, or an overload.
    pub fn prepare(
        call: &Call<'_>,
        body: &Map<String, Value>,
        input: &str,
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        let (model, loops) = call.model(&fields)?;
        if !model.executor.features().has(Feature::Embeddings) {
            let feature = Feature::Embeddings;
            return Err(ApiError::missing(feature, "model", &model.name));
        }
        let Some(tokenizer) = model.tokenizer.clone() else {
            return Self::forwarded(call, body, input, (model, loops));
        };
        let common = CommonOptions::parse(&fields, Some(tokenizer.vocab_size()))?;
        if common.stream {
            return Err(ApiError::unsupported("stream", "embeddings come at once"));
        }
        let depth = Depth::parse(&fields, loops, &model.meta)?;
        let options = call.options(&fields, &common)?;
        model.executor.preflight()?; // before anything is tokenized
        let inputs = inputs(&fields, input, &tokenizer)?;
        for (idx, tokens) in inputs.iter().enumerate() {
            let place = match inputs.len() {
                1 => input.to_owned(),
                _ => format!("{input}[{idx}]"),
            };
            check_context(tokens.len(), 0, model.context_length, &place)
                .inspect_err(|_| model.executor.count_refusal("context_length_exceeded"))?;
        }
        let mut jobs: Vec<_> = inputs
            .into_iter()
            .map(GenerationRequest::embedding)
            .collect();
        jobs.iter_mut().for_each(|job| depth.apply(job));
        Ok(Self::new(model, jobs, options))
    }

    fn new(
        model: Arc<LoadedModel>,
        mut jobs: Vec<GenerationRequest>,
        options: SubmitOptions,
    ) -> Self {
        let id = RequestId::generate();
        if let Some(first) = jobs.first_mut() {
            first.id = id;
        }
        Self {
            model,
            jobs,
            options,
            id,
        }
    }

    /// The same for a model that another server runs: texts go there as they are.
    fn forwarded(
        call: &Call<'_>,
        body: &Map<String, Value>,
        input: &str,
        (model, loops): (Arc<LoadedModel>, Option<u32>),
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        let may_leave = consent(call, &fields, &model)?;
        refuse_missing(&fields, &model, loops)?;
        let common = CommonOptions::parse(&fields, None)?;
        if common.stream {
            return Err(ApiError::unsupported("stream", "embeddings come at once"));
        }
        fields.integer("dimensions", 1..=1 << 20)?;
        let options = call.options(&fields, &common)?;
        model.executor.preflight()?;
        let texts = texts(&fields, input, &model.name)?;
        let there = ["dimensions", "user"].into_iter();
        let there = there.filter(|name| fields.get(name).is_some());
        let forwarded: Map<String, Value> = there
            .map(|name| (name.to_owned(), body[name].clone()))
            .collect();
        let job = |texts: &[String]| {
            let mut job = GenerationRequest::embedding(Vec::new());
            job.upstream = Some(Arc::new(UpstreamCall {
                prompt: UpstreamPrompt::Inputs(texts.to_vec()),
                fields: forwarded.clone(),
                priority: options.priority,
                may_leave,
            }));
            job
        };
        let jobs = texts.chunks(FORWARDED_INPUTS_MAX).map(job).collect();
        Ok(Self::new(model, jobs, options))
    }

    /// Runs all jobs. The error is to be answered through the same exchange.
    ///
    /// # Errors
    /// The first refusal or failure; what still runs is cancelled.
    pub fn run(mut self, call: &Call<'_>, exchange: &mut Exchange) -> Result<Embedded, ApiError> {
        let lengths = || self.jobs.iter().map(GenerationRequest::prompt_tokens);
        let prompt_tokens = lengths().map(u64::from).sum();
        let longest = lengths().max().unwrap_or(0);
        exchange.record.model.clone_from(&self.model.name);
        exchange.record.prompt_tokens = prompt_tokens;
        exchange.reserve(prompt_tokens, &[])?;
        exchange.add_header("x-tinyloop-request-id", self.id.to_string());
        let burst = self.model.executor.burst_max(longest as usize);
        let burst = burst.clamp(1, WAVE_JOBS_MAX);
        let mut embedded = Embedded::default();
        while !self.jobs.is_empty() {
            let rest = self.jobs.split_off(burst.min(self.jobs.len()));
            let wave = std::mem::replace(&mut self.jobs, rest);
            self.wave(wave, call, exchange, &mut embedded)?;
        }
        exchange.record.prompt_tokens = embedded.prompt_tokens;
        Ok(embedded)
    }

    /// Submits some of the jobs together and waits for all of them.
    fn wave(
        &self,
        jobs: Vec<GenerationRequest>,
        call: &Call<'_>,
        exchange: &mut Exchange,
        embedded: &mut Embedded,
    ) -> Result<(), ApiError> {
        let guessed: Vec<u32> = jobs.iter().map(GenerationRequest::prompt_tokens).collect();
        let executor = &self.model.executor;
        let mut streams = executor.submit_many(jobs, self.options.clone())?;
        let handles: Vec<_> = streams.iter().map(TokenStream::cancel_handle).collect();
        let (name, client) = (exchange.record.id.clone(), call.client.clone());
        let loops = streams.first().and_then(TokenStream::loops);
        if let Some(loops) = loops.filter(|_| embedded.vectors.is_empty()) {
            exchange.add_header("x-tinyloop-loops", loops.granted.to_string());
        }
        let live = call.state.live();
        let _listed = live.register(self.id, name, client, handles.clone());
        exchange.record.follow(handles.clone());
        exchange.on_hangup(move || handles.iter().for_each(|handle| handle.cancel()));
        for (stream, guessed) in streams.iter_mut().zip(guessed) {
            let (vectors, told) = vectors_of(stream, exchange)?;
            embedded.vectors.extend(vectors);
            // Another server counts its own tokens, if it does.
            let counted = match told.prompt_tokens {
                0 => guessed,
                told => told,
            };
            embedded.prompt_tokens += u64::from(counted);
        }
        Ok(())
    }
}

/// Waits for the vectors of a job.
fn vectors_of(
    stream: &mut TokenStream,
    exchange: &mut Exchange,
) -> Result<(Vec<Vec<f32>>, Usage), ApiError> {
    loop {
        match stream.recv() {
            StreamEvent::Chunk(_) | StreamEvent::TimedOut => {}
            StreamEvent::Failed(RequestError::Cancelled) if exchange.is_gone() => {
                let code = ErrorCode::ClientClosedRequest;
                return Err(ApiError::new(code, "the client left"));
            }
            StreamEvent::Failed(error) => return Err(error.into()),
            StreamEvent::Finished(outcome) => {
                exchange.record.first_token();
                let waited = outcome.stamps.queue_wait();
                exchange.record.queue = exchange.record.queue.or(waited);
                let vectors = stream.take_embeddings();
                if vectors.is_empty() {
                    let text = "the runtime gave no embedding".to_owned();
                    return Err(RequestError::Fault(text).into());
                }
                return Ok((vectors, outcome.usage));
            }
        }
    }
}

/// Divides a vector by its length; one of zeros stays.
pub fn normalize(vector: &mut [f32]) {
    let squares: f64 = vector.iter().map(|value| f64::from(*value).powi(2)).sum();
    if squares > 0.0 {
        let scale = 1.0 / squares.sqrt();
        for value in vector {
            *value = (f64::from(*value) * scale) as f32;
        }
    }
}

fn inputs(
    fields: &Fields<'_>,
    name: &str,
    tokenizer: &Tokenizer,
) -> Result<Vec<Arc<[TokenId]>>, ApiError> {
    let read = |value: &Value, place: &str| one_input(value, place, tokenizer);
    each_input(fields, name, &read)
}

/// Of a model whose tokenizer is elsewhere.
fn texts(fields: &Fields<'_>, name: &str, model: &str) -> Result<Vec<String>, ApiError> {
    let read = |value: &Value, place: &str| match value {
        Value::String(text) if text.is_empty() => {
            let text = format!("'{place}' is empty; a text is needed");
            Err(ApiError::invalid(place, text))
        }
        Value::String(text) => Ok(text.clone()),
        Value::Array(_) => Err(ApiError::missing(Feature::TokenIds, place, model)),
        other => {
            let text = format!("'{place}' is {}; it must be a string", kind_of(other));
            Err(ApiError::invalid(place, text))
        }
    };
    each_input(fields, name, &read)
}

/// Reads inputs in all shapes; a list of numbers is one.
fn each_input<T>(
    fields: &Fields<'_>,
    name: &str,
    read: &dyn Fn(&Value, &str) -> Result<T, ApiError>,
) -> Result<Vec<T>, ApiError> {
    const SHAPES: &str = "a string, an array of strings, of token ids, or of arrays of token ids";
    let Some(value) = fields.get(name) else {
        let text = format!("'{name}' is missing; it is {SHAPES}");
        let code = ErrorCode::MissingRequiredParameter;
        return Err(ApiError::param(code, name, text));
    };
    match value {
        Value::Array(items) if items.iter().any(Value::is_number) => Ok(vec![read(value, name)?]),
        Value::Array(items) if items.is_empty() => {
            let text = format!("'{name}' is empty; it must hold at least one text");
            Err(ApiError::invalid(name, text))
        }
        Value::Array(items) if items.len() > INPUTS_MAX => {
            let text = format!(
                "'{name}' holds {} inputs, at most {INPUTS_MAX}",
                items.len()
            );
            Err(ApiError::invalid(name, text))
        }
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(idx, item)| read(item, &format!("{name}[{idx}]")))
            .collect(),
        Value::String(_) => Ok(vec![read(value, name)?]),
        other => {
            let text = format!("'{name}' is {}; it must be {SHAPES}", kind_of(other));
            Err(ApiError::invalid(name, text))
        }
    }
}

/// A text, or token ids. Nothing is no input: what its vector should be is anybody's guess.
fn one_input(value: &Value, name: &str, tokenizer: &Tokenizer) -> Result<Arc<[TokenId]>, ApiError> {
    let tokens = match value {
        Value::String(text) if text.is_empty() => Vec::new(),
        Value::String(text) => tokenizer.encode(text, ENCODE),
        Value::Array(items) => token_ids(items, name, tokenizer.vocab_size())?,
        other => {
            let text = format!(
                "'{name}' is {}; it must be a string or an array of token ids",
                kind_of(other)
            );
            return Err(ApiError::invalid(name, text));
        }
    };
    if tokens.is_empty() {
        let text = format!("'{name}' is empty; a text or at least one token is needed");
        return Err(ApiError::invalid(name, text));
    }
    Ok(tokens.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(input: &Value) -> Result<Vec<Arc<[TokenId]>>, ApiError> {
        let body = json!({"input": input});
        let map = body.as_object().expect("an object");
        inputs(&Fields::new(map), "input", &Tokenizer::bytes())
    }

    #[test]
    fn inputs_come_in_four_shapes() {
        let two: [Arc<[TokenId]>; 2] = [[97].into(), [98, 99].into()];
        assert_eq!(read(&json!("bc")).as_deref(), Ok(&two[1..]));
        assert_eq!(read(&json!(["a", "bc"])).as_deref(), Ok(&two[..]));
        assert_eq!(read(&json!([98, 99])).as_deref(), Ok(&two[1..]));
        assert_eq!(read(&json!([[97], [98, 99]])).as_deref(), Ok(&two[..]));
    }

    #[test]
    fn bad_inputs_name_their_place() {
        let many = vec!["a"; INPUTS_MAX + 1];
        for (input, param) in [
            (json!(null), "input"),
            (json!(""), "input"),
            (json!([]), "input"),
            (json!(5), "input"),
            (json!({"a": 1}), "input"),
            (json!(["a", ""]), "input[1]"),
            (json!(["a", 5]), "input"),
            (json!([[1], []]), "input[1]"),
            (json!([[1], [260]]), "input[1]"),
            (json!(["a", null]), "input[1]"),
            (json!([260]), "input"),
            (json!(many), "input"),
        ] {
            let error = read(&input).expect_err("a bad input");
            assert_eq!(error.param.as_deref(), Some(param), "{input}");
            assert_eq!(error.status(), 400);
        }
    }

    #[test]
    fn vectors_get_length_one() {
        let mut vector = [3.0, -4.0];
        normalize(&mut vector);
        assert_eq!(vector, [0.6, -0.8]);
        let mut zeros = [0.0; 2];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 2]);
    }
}
