//! What all routes that make embeddings have in common: inputs to tokens, tokens to jobs, jobs to
//! vectors.
//!
//! Runs on the HTTP worker that took the request. Each input is a job of its own in the scheduler, so
//! that queue, priority, objectives, fairness, cancellation and drain are those of generations. A
//! request of many inputs goes in waves, so that it never asks for more of the queue than one answer
//! may. What is not here: the fields and looks of an answer (`openai/embeddings`).

use super::call::Call;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::openai::depth::Depth;
use crate::http::openai::fields::{Fields, kind_of};
use crate::http::openai::prompt::ENCODE;
use crate::http::openai::sampling::{CommonOptions, check_context, token_ids};
use crate::pool::LoadedModel;
use crate::request::{GenerationRequest, RequestError, RequestId, TokenId};
use crate::runtime::Feature;
use crate::scheduler::{StreamEvent, SubmitOptions, TokenStream};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Most inputs of one request.
pub const INPUTS_MAX: usize = 2048;
/// Inputs of one request that are in the queue or run at once, at most.
const WAVE_JOBS_MAX: usize = 64;

/// A checked request for embeddings.
pub struct EmbedWork {
    /// Who makes them.
    pub model: Arc<LoadedModel>,
    /// Tokens of the inputs, special ones included; at least one input of at least one token.
    pub inputs: Vec<Arc<[TokenId]>>,
    /// Loops of a looped model.
    pub depth: Depth,
    /// Scheduling.
    pub options: SubmitOptions,
    /// Identity in headers and for the cancel route.
    pub id: RequestId,
}

/// What came of it.
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
        let missing = || ApiError::missing(Feature::Embeddings, "model", &model.name);
        if !model.executor.features().has(Feature::Embeddings) {
            return Err(missing());
        }
        let tokenizer = model.tokenizer.clone().ok_or_else(missing)?;
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
        Ok(Self {
            model,
            inputs,
            depth,
            options,
            id: RequestId::generate(),
        })
    }

    /// Runs all jobs. The error is to be answered through the same exchange.
    ///
    /// # Errors
    /// The first refusal or failure; what still runs is cancelled.
    pub fn run(self, call: &Call<'_>, exchange: &mut Exchange) -> Result<Embedded, ApiError> {
        let prompt_tokens = self.inputs.iter().map(|tokens| tokens.len() as u64).sum();
        exchange.record.model.clone_from(&self.model.name);
        exchange.record.prompt_tokens = prompt_tokens;
        exchange.reserve(prompt_tokens, &[])?;
        exchange.add_header("x-tinyloop-request-id", self.id.to_string());
        let longest = self.inputs.iter().map(|tokens| tokens.len()).max();
        let burst = self.model.executor.burst_max(longest.unwrap_or(0));
        let mut vectors = Vec::with_capacity(self.inputs.len());
        for inputs in self.inputs.chunks(burst.clamp(1, WAVE_JOBS_MAX)) {
            self.wave(inputs, call, exchange, &mut vectors)?;
        }
        Ok(Embedded {
            vectors,
            prompt_tokens,
        })
    }

    /// Submits some of the inputs together and waits for all of them.
    fn wave(
        &self,
        inputs: &[Arc<[TokenId]>],
        call: &Call<'_>,
        exchange: &mut Exchange,
        vectors: &mut Vec<Vec<f32>>,
    ) -> Result<(), ApiError> {
        let mut jobs: Vec<GenerationRequest> = inputs
            .iter()
            .map(|tokens| GenerationRequest::embedding(Arc::clone(tokens)))
            .collect();
        jobs.iter_mut().for_each(|job| self.depth.apply(job));
        if let Some(first) = jobs.first_mut() {
            first.id = self.id;
        }
        let mut streams = self
            .model
            .executor
            .submit_many(jobs, self.options.clone())?;
        let handles: Vec<_> = streams.iter().map(TokenStream::cancel_handle).collect();
        let (name, client) = (exchange.record.id.clone(), call.client.clone());
        let loops = streams.first().and_then(TokenStream::loops);
        if let Some(loops) = loops.filter(|_| vectors.is_empty()) {
            exchange.add_header("x-tinyloop-loops", loops.granted.to_string());
        }
        let live = call.state.live();
        let _listed = live.register(self.id, name, client, handles.clone());
        exchange.record.follow(handles.clone());
        exchange.on_hangup(move || handles.iter().for_each(|handle| handle.cancel()));
        for stream in &mut streams {
            vectors.push(vector_of(stream, exchange)?);
        }
        Ok(())
    }
}

/// Waits for one vector.
fn vector_of(stream: &mut TokenStream, exchange: &mut Exchange) -> Result<Vec<f32>, ApiError> {
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
                let nothing = || {
                    let text = "the runtime gave no embedding".to_owned();
                    ApiError::from(RequestError::Fault(text))
                };
                return stream.take_embedding().ok_or_else(nothing);
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
    const SHAPES: &str = "a string, an array of strings, of token ids, or of arrays of token ids";
    let Some(value) = fields.get(name) else {
        let text = format!("'{name}' is missing; it is {SHAPES}");
        let code = ErrorCode::MissingRequiredParameter;
        return Err(ApiError::param(code, name, text));
    };
    match value {
        Value::Array(items) if items.iter().any(Value::is_number) => {
            Ok(vec![one_input(value, name, tokenizer)?])
        }
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
            .map(|(idx, item)| one_input(item, &format!("{name}[{idx}]"), tokenizer))
            .collect(),
        Value::String(_) => Ok(vec![one_input(value, name, tokenizer)?]),
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
