//! One job on its thread: asks, passes the answer on piece by piece, asks again where that may help.
//!
//! Runs on a thread `upstream-NAME-I`, which waits here for the server as long as the limits allow.
//! Exactly one end goes to the sink, also when the call is cut: by a cancel, by the runtime's end, or
//! because the server counts as gone. What is not here: the threads (`pool`), decisions (`verdict`).

use super::client::{Answer, Client, Exchange};
use super::sse::SseParser;
use super::verdict::{self, Failure};
use super::wire::{self, CallPiece, Chunk, ChunkError};
use crate::config::{CallLimits, Dialect};
use crate::request::{
    FinishReason, GenerationEvent, Job, JobSink, RequestError, UpstreamPart, UpstreamPrompt, Usage,
};
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Most bytes of text that an answer may have: a server that never ends must not fill the memory.
const TEXT_BYTES_MAX: usize = 16 << 20;
/// How long a server may take to close its stream after the answer ended: counts come then.
const TAIL_WAIT: Duration = Duration::from_secs(2);
/// Bytes read at once.
const READ_BYTES: usize = 16 << 10;
/// What ends a stream.
const DONE: &str = "[DONE]";

/// What is asked, as it is sent.
struct Question {
    route: &'static str,
    body: String,
    /// So many vectors are the answer, at once; None = a stream.
    n_vectors: Option<usize>,
}

/// What a call needs to know of its server.
pub struct Server {
    /// How it is reached.
    pub client: Client,
    /// The model's name there.
    pub model: String,
    /// What it understands.
    pub dialect: Dialect,
    /// Waits and repetitions.
    pub limits: CallLimits,
}

/// What a call reports to its runtime while it runs.
pub trait Witness {
    /// The server gave a sign of life: it can't be gone.
    fn alive(&self);
    /// A try failed in a way that speaks for the server being gone.
    fn failed(&self, failure: &Failure);
}

/// The handle by which a running call is ended from outside.
#[derive(Default)]
pub struct Cut {
    /// Guards why it ends early, and the exchange that is under way.
    state: Mutex<CutState>,
    /// It was cut, for one who waits to try again.
    wake: Condvar,
}

#[derive(Default)]
struct CutState {
    why: Option<RequestError>,
    exchange: Option<Exchange>,
}

impl Cut {
    /// Ends the call; the first reason counts. Never blocks.
    pub fn cut(&self, why: RequestError) {
        let mut state = self.state.lock();
        state.why.get_or_insert(why);
        if let Some(exchange) = &state.exchange {
            exchange.cut();
        }
        self.wake.notify_all();
    }

    fn why(&self) -> Option<RequestError> {
        self.state.lock().why.clone()
    }

    /// Notes what is under way; false when it was cut before.
    fn begin(&self, exchange: &Exchange) -> bool {
        let mut state = self.state.lock();
        state.exchange = Some(exchange.clone());
        state.why.is_none()
    }

    /// Waits, unless it is cut.
    fn wait(&self, wait: Duration) {
        let deadline = Instant::now() + wait;
        let mut state = self.state.lock();
        while state.why.is_none() && !self.wake.wait_until(&mut state, deadline).timed_out() {}
    }
}

/// What the answer has said so far.
#[derive(Default)]
struct Progress {
    /// Something was passed on.
    has_sent: bool,
    /// The server works on it, as it showed by a token or by thinking aloud.
    has_begun: bool,
    n_pieces: u32,
    text_bytes: usize,
    finish: Option<FinishReason>,
    usage: Option<Usage>,
    /// Calls so far, as the server numbers them and by their ids.
    calls: Vec<(u32, Option<String>)>,
    /// The stream said that it is over.
    is_done: bool,
}

/// Runs a job to its end.
pub fn run(server: &Server, cut: &Cut, witness: &dyn Witness, mut job: Job) {
    let end = match job.request.upstream.clone() {
        Some(call) => {
            let isolation_key = job.request.isolation_key;
            let body = wire::body(&call, &server.model, server.dialect, isolation_key);
            let body = serde_json::Value::from(body).to_string();
            let question = Question {
                route: wire::route(&call),
                body,
                n_vectors: match &call.prompt {
                    UpstreamPrompt::Inputs(texts) => Some(texts.len()),
                    UpstreamPrompt::Messages(_) | UpstreamPrompt::Text(_) => None,
                },
            };
            ask(server, cut, witness, &question, job.sink.as_mut())
        }
        None => Err(RequestError::Fault(
            "the request carries tokens, and this model's runtime takes text".to_owned(),
        )),
    };
    let event = match end {
        Ok(progress) => GenerationEvent::Finished {
            reason: progress.finish.unwrap_or(FinishReason::Stop),
            usage: progress.usage.unwrap_or(Usage {
                prompt_tokens: job.request.prompt_tokens(),
                completion_tokens: progress.n_pieces,
                loops: 1,
                ..Usage::default()
            }),
        },
        Err(error) => GenerationEvent::Failed(error),
    };
    let _ = job.sink.emit(event); // nobody may listen any more
}

fn ask(
    server: &Server,
    cut: &Cut,
    witness: &dyn Witness,
    question: &Question,
    sink: &mut dyn JobSink,
) -> Result<Progress, RequestError> {
    let mut progress = Progress::default();
    for n_retried in 0.. {
        let tried = attempt(server, cut, question, &mut progress, &mut |piece| {
            witness.alive();
            sink.emit(piece).is_ok()
        });
        let failure = match (tried, cut.why()) {
            (_, Some(why)) => return Err(why),
            (Ok(()), None) => {
                witness.alive();
                return Ok(progress);
            }
            (Err(failure), None) => failure,
        };
        log(server, &failure);
        if verdict::counts(&failure) {
            witness.failed(&failure);
        }
        let wait = verdict::retry_wait(&failure, progress.has_sent, n_retried, &server.limits);
        if let Some(wait) = wait {
            cut.wait(wait);
        }
        match (cut.why(), wait) {
            (Some(why), _) => return Err(why),
            (None, Some(_)) => {}
            (None, None) => {
                let client = &server.client;
                let redact = |text: &str| client.redact(text);
                return Err(verdict::verdict(&failure, client.host(), redact));
            }
        }
    }
    Err(RequestError::Cancelled) // the loop above ends by itself
}

fn log(server: &Server, failure: &Failure) {
    let told = match failure {
        Failure::Status { message, .. } => message.as_deref(),
        Failure::Told(message) => Some(message.as_str()),
        _ => None,
    };
    let told = told.map(|text| verdict::shown(&server.client.redact(text)));
    let host = server.client.host();
    tracing::warn!(host, model = %server.model, %failure, ?told, "a call to an upstream failed");
}

/// One exchange. `pass` gives a piece on; false = nobody listens.
fn attempt(
    server: &Server,
    cut: &Cut,
    question: &Question,
    progress: &mut Progress,
    pass: &mut dyn FnMut(GenerationEvent) -> bool,
) -> Result<(), Failure> {
    let exchange = server.client.exchange(server.limits.first_token_timeout);
    if !cut.begin(&exchange) {
        return Err(cancelled());
    }
    let (route, body) = (question.route, question.body.as_bytes());
    let answer = server.client.post(&exchange, route, body)?;
    if answer.status != 200 {
        return Err(refusal(answer));
    }
    match question.n_vectors {
        Some(n_vectors) => vectors(answer, n_vectors, cut, progress, pass),
        None if answer.is_stream => stream(server, cut, (&exchange, answer), progress, pass),
        None => Err(Failure::Nonsense("not an event stream".to_owned())),
    }
}

fn cancelled() -> Failure {
    Failure::Broken("cut".to_owned())
}

/// Embeddings come at once.
fn vectors(
    answer: Answer,
    n_vectors: usize,
    cut: &Cut,
    progress: &mut Progress,
    pass: &mut dyn FnMut(GenerationEvent) -> bool,
) -> Result<(), Failure> {
    let body = answer.rest_up_to(TEXT_BYTES_MAX as u64)?;
    let (vectors, usage) = wire::vectors(&body, n_vectors).map_err(Failure::Nonsense)?;
    progress.has_sent = true;
    progress.usage = usage;
    progress.finish = Some(FinishReason::Stop);
    let mut vectors = vectors.into_iter().map(GenerationEvent::Embedding);
    match vectors.all(pass) {
        true => Ok(()),
        false => {
            cut.cut(RequestError::Cancelled);
            Err(cancelled())
        }
    }
}

/// Reads a stream to its end.
fn stream(
    server: &Server,
    cut: &Cut,
    (exchange, mut answer): (&Exchange, Answer),
    progress: &mut Progress,
    pass: &mut dyn FnMut(GenerationEvent) -> bool,
) -> Result<(), Failure> {
    let limits = &server.limits;
    let mut parser = SseParser::default();
    let mut buffer = vec![0_u8; READ_BYTES];
    let mut events = Vec::new();
    while !progress.is_done {
        let n_read = match answer.read(&mut buffer) {
            Ok(0) => break,
            Ok(n_read) => n_read,
            // The answer is there; only its counts may be missing.
            Err(_) if progress.finish.is_some() => break,
            Err(failure) => return Err(failure),
        };
        let parsed = parser.push(&buffer[..n_read], |event| events.push(event));
        for event in events.drain(..) {
            let chunk = read_event(&event, progress)?;
            let pieces = chunk.map(|chunk| take(chunk, progress)).unwrap_or_default();
            if progress.text_bytes > TEXT_BYTES_MAX {
                return Err(Failure::Nonsense("the answer does not end".to_owned()));
            }
            if !pieces.into_iter().all(&mut *pass) {
                cut.cut(RequestError::Cancelled);
                return Err(cancelled());
            }
            let wait = match (progress.finish, progress.has_begun) {
                (Some(_), _) => TAIL_WAIT,
                (None, true) => limits.idle_timeout,
                (None, false) => continue,
            };
            exchange.deadline.set(wait);
        }
        parsed.map_err(|error| Failure::Nonsense(error.to_string()))?;
    }
    match progress.finish {
        Some(_) => Ok(()),
        None => Err(Failure::Broken("the stream ended early".to_owned())),
    }
}

fn refusal(answer: Answer) -> Failure {
    let (status, retry_after) = (answer.status, answer.retry_after);
    let body = answer.rest().unwrap_or_default();
    Failure::Status {
        status,
        retry_after,
        message: wire::error_message(&body),
        is_too_long: wire::is_context_error(&body),
    }
}

fn read_event(event: &str, progress: &mut Progress) -> Result<Option<Chunk>, Failure> {
    if event.trim() == DONE {
        progress.is_done = true;
        return Ok(None);
    }
    match wire::chunk(event) {
        Ok(chunk) => Ok(Some(chunk)),
        Err(ChunkError::Nonsense(why)) => Err(Failure::Nonsense(why)),
        Err(ChunkError::Told(message)) => Err(Failure::Told(message)),
    }
}

/// Books a chunk; what of it is passed on. What comes behind the end is nothing.
fn take(chunk: Chunk, progress: &mut Progress) -> Vec<GenerationEvent> {
    let is_late = progress.finish.is_some();
    progress.usage = chunk.usage.or(progress.usage);
    progress.finish = progress.finish.or(chunk.finish);
    let mut pieces = Vec::new();
    if is_late {
        return pieces;
    }
    let n_bytes = chunk.text.len() + chunk.reasoning.len();
    let calls = chunk.calls.iter().map(|piece| piece.arguments.len() + 1);
    progress.text_bytes += n_bytes + calls.sum::<usize>();
    if !chunk.reasoning.is_empty() {
        let part = UpstreamPart::Reasoning(chunk.reasoning);
        pieces.push(GenerationEvent::Part(part));
    }
    if !chunk.text.is_empty() || !chunk.logprobs.is_empty() {
        pieces.push(GenerationEvent::Text {
            text: chunk.text,
            logprobs: chunk.logprobs,
        });
    }
    for piece in chunk.calls {
        let parts = call_parts(piece, &mut progress.calls);
        pieces.extend(parts.into_iter().flatten().map(GenerationEvent::Part));
    }
    if !pieces.is_empty() {
        progress.has_begun = true;
        progress.has_sent = true;
        progress.n_pieces += 1;
    }
    pieces
}

/// A piece of a call with our number of it: servers that number all their calls 0 begin a new one with
/// another id.
fn call_parts(
    piece: CallPiece,
    calls: &mut Vec<(u32, Option<String>)>,
) -> [Option<UpstreamPart>; 2] {
    let is_it = |(index, id): &(u32, Option<String>)| {
        *index == piece.index && (piece.id.is_none() || *id == piece.id)
    };
    let known = calls.iter().rposition(is_it);
    let (index, begin) = match (known, piece.name) {
        (Some(index), _) => (index as u32, None),
        (None, Some(name)) => {
            let index = calls.len() as u32;
            calls.push((piece.index, piece.id));
            (index, Some(UpstreamPart::CallBegin { index, name }))
        }
        (None, None) => return [None, None], // a piece of nothing
    };
    let fragment = piece.arguments;
    let arguments =
        (!fragment.is_empty()).then_some(UpstreamPart::CallArguments { index, fragment });
    [begin, arguments]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_numbered_by_us() {
        let piece = |index, id: Option<&str>, name: Option<&str>, arguments: &str| CallPiece {
            index,
            id: id.map(str::to_owned),
            name: name.map(str::to_owned),
            arguments: arguments.to_owned(),
        };
        // The first server counts, the second does not, the third tells no ids.
        for pieces in [
            [
                piece(0, Some("a"), Some("f"), "{"),
                piece(0, None, None, "}"),
                piece(1, Some("b"), Some("g"), "{}"),
            ],
            [
                piece(0, Some("a"), Some("f"), "{"),
                piece(0, Some("a"), Some("f"), "}"),
                piece(0, Some("b"), Some("g"), "{}"),
            ],
            [
                piece(0, None, Some("f"), "{"),
                piece(0, None, None, "}"),
                piece(1, None, Some("g"), "{}"),
            ],
        ] {
            let mut calls = Vec::new();
            let parts = pieces.map(|piece| call_parts(piece, &mut calls));
            let begin = |index, name: &str| UpstreamPart::CallBegin {
                index,
                name: name.to_owned(),
            };
            let arguments = |index, fragment: &str| UpstreamPart::CallArguments {
                index,
                fragment: fragment.to_owned(),
            };
            let found: Vec<UpstreamPart> = parts.into_iter().flatten().flatten().collect();
            let expected = [
                begin(0, "f"),
                arguments(0, "{"),
                arguments(0, "}"),
                begin(1, "g"),
                arguments(1, "{}"),
            ];
            assert_eq!(found, expected);
        }
        let nothing = call_parts(piece(0, None, None, "x"), &mut Vec::new());
        assert_eq!(nothing, [None, None]);
    }
}
