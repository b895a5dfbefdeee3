//! One request and its answer: the request id, the headers that go on every answer, the log line.
//!
//! Owned by the worker that answers. Every way out of a handler goes through here, so that no
//! answer lacks `x-request-id`, CORS headers or its line in the log. What is not here: what the
//! answer says.

use super::access_log::AccessRecord;
use super::error_style::ErrorStyle;
use super::errors::{ApiError, ErrorCode};
use super::generation::events::Events;
use super::ops::OpsAnswer;
use super::quota::Quota;
use super::sse;
use super::state::ServerState;
use super::wire::{EventWriter, Hangup, Responder};
use crate::request::GenerationRequest;
use serde::Serialize;
use std::io;
use std::sync::Arc;
use std::time::Instant;

const JSON: &str = "application/json";
/// Most answers and events fit into this, so that their buffer is allocated once.
const USUAL_JSON_BYTES: usize = 1 << 10;
/// Longest request id that is taken over from the client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// A request being answered.
pub struct Exchange {
    responder: Responder,
    /// For the log.
    pub record: AccessRecord,
    headers: Vec<(&'static str, String)>,
    manner: Manner,
    /// Of the client's key; its numbers stand on every answer.
    quota: Option<Arc<Quota>>,
}

/// How this server words its refusals.
#[derive(Clone, Debug)]
pub struct Manner {
    /// In which dialect.
    pub style: ErrorStyle,
    /// Status of refusals for load, 503 or 429.
    pub overload_status: u16,
    /// Whose numbers stand in every `shutting_down`, and whose rate in every `Retry-After` that the
    /// executor had no better number for.
    pub state: Arc<ServerState>,
}

impl Manner {
    /// The error as the client gets it. `model`: the one that was to answer; empty where none was found.
    #[must_use]
    pub fn apply(&self, error: &ApiError, model: &str) -> ApiError {
        let mut error = error.for_load(self.style.overload_status(self.overload_status));
        if error.code == ErrorCode::ShuttingDown {
            error.numbers.extend(self.state.drain().numbers());
        }
        if error.code == ErrorCode::ModelUnloading && !model.is_empty() && !self.comes_back(model) {
            error.retry_after_s = None;
        } else if error.retry_after_s.is_none() && error.code.passes() && !error.is_hopeless {
            error.retry_after_s = Some(self.state.retry_after_s());
        }
        error
    }

    /// Whether a request brings a model back that was unloaded; else waiting does not help.
    fn comes_back(&self, model: &str) -> bool {
        let entry = self.state.pool().find(model);
        entry.is_some_and(|entry| entry.load_on_demand)
    }
}

fn is_sane(id: &str) -> bool {
    let is_printable = id.bytes().all(|byte| byte.is_ascii_graphic());
    is_printable && !id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX
}

/// The client's id if it is sane (printable ASCII, at most 128 bytes), else a fresh one.
#[must_use]
pub fn request_id(given: Option<&str>) -> String {
    match given.filter(|id| is_sane(id)) {
        Some(id) => id.to_owned(),
        None => format!("req_{}", crate::request::RequestId::generate()),
    }
}

/// The field `request_id` of a body, with which clients of llama-server and vLLM name a request. A body that is
/// no JSON has none: its route says what is wrong with it.
///
/// # Errors
/// 400: it is not 1 to 128 printable ASCII characters without spaces.
pub fn request_id_of(body: &[u8]) -> Result<Option<String>, ApiError> {
    #[derive(serde::Deserialize)]
    struct Named {
        request_id: Option<serde_json::Value>,
    }
    // Few bodies have it: the others are not parsed twice.
    if memchr::memmem::find(body, b"\"request_id\"").is_none() {
        return Ok(None);
    }
    let named = serde_json::from_slice::<Named>(body).ok();
    match named.and_then(|named| named.request_id) {
        None => Ok(None),
        Some(serde_json::Value::String(id)) if is_sane(&id) => Ok(Some(id)),
        Some(_) => Err(ApiError::invalid(
            "request_id",
            "'request_id' must be 1 to 128 printable ASCII characters without spaces",
        )),
    }
}

impl Exchange {
    /// Another id, on the answer and in the log, before anything is sent.
    pub fn rename(&mut self, id: String) {
        let old = std::mem::replace(&mut self.record.id, id);
        let other = self.manner.style.request_id_header();
        for (name, value) in &mut self.headers {
            if *value == old && (*name == "x-request-id" || Some(*name) == other) {
                value.clone_from(&self.record.id);
            }
        }
    }

    /// `headers` go on every answer, beside the request id.
    #[must_use]
    pub fn new(
        responder: Responder,
        record: AccessRecord,
        mut headers: Vec<(&'static str, String)>,
        manner: Manner,
    ) -> Self {
        headers.push(("x-request-id", record.id.clone()));
        if let Some(name) = manner.style.request_id_header() {
            headers.push((name, record.id.clone()));
        }
        Self {
            responder,
            record,
            headers,
            manner,
            quota: None,
        }
    }

    /// The limits per minute of whoever asks.
    pub fn limit(&mut self, quota: Option<&Arc<Quota>>) {
        self.quota = quota.cloned();
    }

    /// Takes from the client's tokens per minute what these jobs may use; what they did not is given back
    /// when the answer has ended.
    ///
    /// # Errors
    /// 429: there are not so many now.
    pub fn reserve(
        &mut self,
        prompt_tokens: u64,
        jobs: &[GenerationRequest],
    ) -> Result<(), ApiError> {
        let Some(quota) = &self.quota else {
            return Ok(());
        };
        let answers = jobs.iter().map(|job| u64::from(job.max_tokens)).sum();
        let reservation = quota.reserve(prompt_tokens, answers, Instant::now())?;
        self.record.reservation = reservation;
        Ok(())
    }

    /// One more header of the answer.
    pub fn add_header(&mut self, name: &'static str, value: String) {
        self.headers.push((name, value));
    }

    /// Runs when the client hangs up before the answer is out. Must not block.
    pub fn on_hangup(&self, hook: impl FnOnce() + Send + 'static) {
        self.responder.on_hangup(hook);
    }

    /// Whether the client has left.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.responder.is_gone()
    }

    /// The same question, to be asked while something else is waited for.
    #[must_use]
    pub fn hangup(&self) -> Hangup {
        self.responder.hangup()
    }

    /// Answers with JSON.
    pub fn json(self, body: &impl Serialize) {
        self.full(200, &[("content-type", JSON)], &json_text(body));
    }

    /// Answers with an error of the table.
    pub fn error(mut self, error: &ApiError) {
        let error = self.manner.apply(error, &self.record.model);
        self.record.outcome = error.code.row().2;
        let extra = error.headers();
        let mut headers: Vec<(&str, &str)> = vec![("content-type", JSON)];
        headers.extend(extra.iter().map(|(name, value)| (*name, value.as_str())));
        let body = self.manner.style.body_of(&error, &self.record.id);
        self.full(error.status(), &headers, &json_text(&body));
    }

    /// Answers with an operations page.
    pub fn ops(self, answer: &OpsAnswer) {
        let mut headers: Vec<(&str, &str)> = vec![("content-type", answer.content_type)];
        headers.extend(
            answer
                .headers
                .iter()
                .map(|(name, value)| (*name, value.as_str())),
        );
        self.full(answer.status, &headers, &answer.body);
    }

    /// Answers without a body.
    pub fn empty(self, status: u16) {
        self.full(status, &[], b"");
    }

    fn full(self, status: u16, headers: &[(&str, &str)], body: &[u8]) {
        let Self {
            responder,
            mut record,
            headers: mut own,
            quota,
            ..
        } = self;
        record.status = status;
        // Before the numbers are read: what this answer did not use is there again.
        record.settle();
        own.extend(quota.map_or(Vec::new(), |quota| quota.headers(Instant::now())));
        let mut all = headers.to_vec();
        all.extend(own.iter().map(|(name, value)| (*name, value.as_str())));
        if responder.send(status, &all, body).is_err() {
            gone(&mut record);
        }
    }

    /// Begins an event stream with status 200; None when the client has left.
    pub fn stream(mut self) -> Option<Stream> {
        if let Some(quota) = &self.quota {
            self.headers.extend(quota.headers(Instant::now()));
        }
        let mut all = sse::HEADERS.to_vec();
        all.extend(
            self.headers
                .iter()
                .map(|(name, value)| (*name, value.as_str())),
        );
        self.record.status = 200;
        self.record.stream = true;
        match self.responder.stream(200, &all) {
            Ok(writer) => Some(Stream {
                writer,
                event: Vec::with_capacity(USUAL_JSON_BYTES),
                record: self.record,
                manner: self.manner,
            }),
            Err(_) => {
                gone(&mut self.record);
                None
            }
        }
    }
}

fn json_text(body: &impl Serialize) -> Vec<u8> {
    let mut text = Vec::with_capacity(USUAL_JSON_BYTES);
    serde_json::to_writer(&mut text, body).expect("answers are JSON, and memory takes it all");
    text
}

/// The client left before the answer was out.
fn gone(record: &mut AccessRecord) {
    let (status, _, code) = ErrorCode::ClientClosedRequest.row();
    record.status = status;
    record.outcome = code;
}

/// Why the events of a stream did not end well.
pub enum StreamEnd {
    /// There is nobody left to tell.
    ClientGone,
    /// The client is told in an event.
    Failed(ApiError),
}

impl From<io::Error> for StreamEnd {
    fn from(_: io::Error) -> Self {
        Self::ClientGone
    }
}

/// An answer that is being streamed.
pub struct Stream {
    writer: EventWriter,
    /// The event on its way; its memory serves all events.
    event: Vec<u8>,
    /// For the log.
    pub record: AccessRecord,
    manner: Manner,
}

impl Stream {
    /// One event with `data` as JSON. Errors as [`Stream::send`].
    pub fn event(&mut self, data: &impl Serialize) -> io::Result<()> {
        self.event.clear();
        sse::append_event(&mut self.event, None, data);
        let sent = self.writer.send(&self.event);
        sent.inspect_err(|_| gone(&mut self.record))
    }

    /// One event, one chunk, one flush. Err: the client is gone, stop the work.
    pub fn send(&mut self, event: &str) -> io::Result<()> {
        let sent = self.writer.send(event.as_bytes());
        sent.inspect_err(|_| gone(&mut self.record))
    }

    /// The same for events that stand ready; they are forgotten then.
    pub fn send_all(&mut self, events: &mut Events) -> io::Result<()> {
        let sent = events.iter().try_for_each(|event| self.writer.send(event));
        events.clear();
        sent.inspect_err(|_| gone(&mut self.record))
    }

    /// The error as the client gets it; the log takes it over.
    pub fn worded(&mut self, error: &ApiError) -> ApiError {
        self.record.outcome = error.code.row().2;
        self.manner.apply(error, &self.record.model)
    }

    /// Ends it, as its events have ended.
    pub fn end(mut self, end: Result<(), StreamEnd>) {
        match end {
            Ok(()) => {
                if self.writer.finish().is_err() {
                    gone(&mut self.record);
                }
            }
            Err(StreamEnd::ClientGone) => gone(&mut self.record),
            Err(StreamEnd::Failed(error)) => self.fail(&error),
        }
    }

    /// Whether the client has left.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.writer.is_gone()
    }

    /// The last event is the error.
    fn fail(mut self, error: &ApiError) {
        let error = self.worded(error);
        self.event.clear();
        sse::append_event(&mut self.event, None, &self.manner.style.body(&error));
        if self.writer.send(&self.event).is_ok() {
            // The connection stays usable: the error event is the end that clients look for.
            let _ = self.writer.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_names_its_request() {
        let of = |body: &str| request_id_of(body.as_bytes()).map_err(|error| error.param);
        assert_eq!(
            of(r#"{"request_id": "abc-1", "n": 1}"#),
            Ok(Some("abc-1".to_owned()))
        );
        for none in [
            "",
            "{",
            r#"{"request_id": null}"#,
            r#"{"a": {"request_id": "x"}}"#,
        ] {
            assert_eq!(of(none), Ok(None), "{none}");
        }
        let long = format!(r#"{{"request_id": "{}"}}"#, "x".repeat(129));
        for bad in [
            r#"{"request_id": ""}"#,
            r#"{"request_id": "a b"}"#,
            r#"{"request_id": 1}"#,
            &long,
        ] {
            assert_eq!(of(bad), Err(Some("request_id".to_owned())), "{bad}");
        }
    }

    #[test]
    fn only_sane_request_ids_are_taken_over() {
        assert_eq!(request_id(Some("abc-1")), "abc-1");
        for bad in [None, Some(""), Some("a b"), Some("a\r\nb"), Some("é")] {
            assert!(request_id(bad).starts_with("req_"), "{bad:?}");
        }
        assert!(request_id(Some(&"x".repeat(129))).starts_with("req_"));
        assert_eq!(request_id(Some(&"x".repeat(128))).len(), 128);
    }
}
