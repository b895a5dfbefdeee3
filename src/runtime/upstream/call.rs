//! One job on its thread: asks, passes the answer on piece by piece, asks again where that may help.
//!
//! Runs on a thread `upstream-NAME-I`, which waits here for the server as long as the limits allow.
//! Exactly one end goes to the sink, also when the call is cut: by a cancel, by the runtime's end, or
//! because the server counts as gone. What is not here: the threads (`pool`), decisions (`verdict`).

use super::client::{Answer, Client, Exchange};
use super::sse::SseParser;
use super::verdict::{self, Failure};
use super::wire::{self, Chunk, ChunkError};
use crate::config::{CallLimits, Dialect};
use crate::request::{FinishReason, GenerationEvent, Job, JobSink, RequestError, Usage};
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
            let route = wire::route(&call);
            ask(server, cut, witness, (route, &body), job.sink.as_mut())
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
    (route, body): (&str, &str),
    sink: &mut dyn JobSink,
) -> Result<Progress, RequestError> {
    let mut progress = Progress::default();
    for n_retried in 0.. {
        let tried = attempt(server, cut, route, body, &mut progress, &mut |piece| {
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
    route: &str,
    body: &str,
    progress: &mut Progress,
    pass: &mut dyn FnMut(GenerationEvent) -> bool,
) -> Result<(), Failure> {
    let limits = &server.limits;
    let exchange = server.client.exchange(limits.first_token_timeout);
    let cancelled = || Failure::Broken("cut".to_owned());
    if !cut.begin(&exchange) {
        return Err(cancelled());
    }
    let mut answer = server.client.post(&exchange, route, body.as_bytes())?;
    if answer.status != 200 {
        return Err(refusal(answer));
    }
    if !answer.is_stream {
        return Err(Failure::Nonsense("not an event stream".to_owned()));
    }
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
            let piece = chunk.and_then(|chunk| take(chunk, progress));
            if progress.text_bytes > TEXT_BYTES_MAX {
                return Err(Failure::Nonsense("the answer does not end".to_owned()));
            }
            if piece.is_some_and(|piece| !pass(piece)) {
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

/// Books a chunk; what of it is passed on. Text behind the end is none.
fn take(chunk: Chunk, progress: &mut Progress) -> Option<GenerationEvent> {
    let is_late = progress.finish.is_some();
    progress.has_begun |= chunk.is_thinking || !chunk.text.is_empty();
    progress.usage = chunk.usage.or(progress.usage);
    progress.finish = progress.finish.or(chunk.finish);
    if is_late || (chunk.text.is_empty() && chunk.logprobs.is_empty()) {
        return None;
    }
    progress.has_sent = true;
    progress.n_pieces += 1;
    progress.text_bytes += chunk.text.len();
    Some(GenerationEvent::Text {
        text: chunk.text,
        logprobs: chunk.logprobs,
    })
}
