//! The one table from what went wrong to HTTP status, `type` and `code`, and the OpenAI error body.
//!
//! Pure data, no thread. A status code appears nowhere else in `http/`: routes build an
//! [`ApiError`] from an [`ErrorCode`] and a sentence for the client. Retry advice follows what the
//! official SDKs do: they retry 408, 409, 429 and every 5xx, and give up on a Retry-After above
//! 120 s, so a refusal that can never succeed is a 400. What is not here: text for the log
//! (whoever finds a fault logs it), and how the bytes are written (`wire`).

use crate::pool::Unavailable;
use crate::request::{RequestError, UpstreamFault};
use crate::runtime::Feature;
use crate::scheduler::SubmitError;
use serde_json::{Value, json};

/// What went wrong, in the API's words. One row of the table each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the names are the codes that the table spells out"
)]
pub enum ErrorCode {
    InvalidJson,
    InvalidJsonSchema,
    InvalidValue,
    MissingRequiredParameter,
    UnsupportedParameter,
    MissingCapability,
    ContextLengthExceeded,
    TemplateError,
    BadRequest,
    InvalidApiKey,
    Forbidden,
    RemoteNotAllowed,
    ModelNotFound,
    UnknownUrl,
    MethodNotAllowed,
    RequestTimeout,
    Conflict,
    NoRoom,
    LengthRequired,
    RequestTooLarge,
    UnsupportedMediaType,
    ExpectationFailed,
    HeaderTooLarge,
    ClientClosedRequest,
    Cancelled,
    RequestNotFound,
    PrefixNotFound,
    ResponseNotFound,
    PreviousResponseNotFound,
    PrefixPoolFull,
    InternalError,
    NotImplemented,
    HttpVersionNotSupported,
    UpstreamError,
    UpstreamTimeout,
    RateLimitExceeded,
    KeyQueueFull,
    QueueFull,
    SloUnattainable,
    QueueTimeout,
    ServerOverloaded,
    ModelNotLoaded,
    ModelLoading,
    ModelUnloading,
    ModelFailed,
    ReplicaLost,
    NoReplica,
    UpstreamOverloaded,
    ShuttingDown,
}

impl ErrorCode {
    /// The table: (HTTP status, OpenAI `type`, OpenAI `code`).
    #[must_use]
    pub fn row(self) -> (u16, &'static str, &'static str) {
        const INVALID: &str = "invalid_request_error";
        const UNAVAILABLE: &str = "service_unavailable_error";
        match self {
            Self::InvalidJson => (400, INVALID, "invalid_json"),
            Self::InvalidJsonSchema => (400, INVALID, "invalid_json_schema"),
            Self::InvalidValue => (400, INVALID, "invalid_value"),
            Self::MissingRequiredParameter => (400, INVALID, "missing_required_parameter"),
            Self::UnsupportedParameter => (400, INVALID, "unsupported_parameter"),
            Self::MissingCapability => (400, INVALID, "missing_capability"),
            Self::ContextLengthExceeded => (400, INVALID, "context_length_exceeded"),
            Self::TemplateError => (400, INVALID, "chat_template_error"),
            Self::BadRequest => (400, INVALID, "bad_request"),
            Self::InvalidApiKey => (401, "authentication_error", "invalid_api_key"),
            Self::Forbidden => (403, "permission_error", "forbidden"),
            Self::RemoteNotAllowed => (403, "permission_error", "remote_not_allowed"),
            Self::ModelNotFound => (404, INVALID, "model_not_found"),
            Self::UnknownUrl => (404, INVALID, "unknown_url"),
            Self::MethodNotAllowed => (405, INVALID, "method_not_allowed"),
            Self::RequestTimeout => (408, INVALID, "request_timeout"),
            Self::Conflict => (409, "conflict_error", "conflict"),
            // Waiting may help, so SDKs may try again; what can never fit says x-should-retry: false.
            Self::NoRoom => (409, "conflict_error", "no_room"),
            Self::LengthRequired => (411, INVALID, "length_required"),
            Self::RequestTooLarge => (413, INVALID, "request_too_large"),
            Self::UnsupportedMediaType => (415, INVALID, "unsupported_media_type"),
            Self::ExpectationFailed => (417, INVALID, "expectation_failed"),
            Self::HeaderTooLarge => (431, INVALID, "request_header_too_large"),
            // Nobody reads it: the number goes to the log, as nginx writes it.
            Self::ClientClosedRequest => (499, INVALID, "client_closed_request"),
            // The client asked for it; no SDK repeats a 499.
            Self::Cancelled => (499, "request_cancelled", "cancelled"),
            Self::RequestNotFound => (404, INVALID, "request_not_found"),
            Self::PrefixNotFound => (404, INVALID, "prefix_not_found"),
            Self::ResponseNotFound => (404, INVALID, "response_not_found"),
            // Not a 404: the route exists, what its body names does not.
            Self::PreviousResponseNotFound => (400, INVALID, "previous_response_not_found"),
            // Not a 503: waiting does not help, removing does.
            Self::PrefixPoolFull => (400, INVALID, "prefix_pool_full"),
            // This caller sends too much, whatever the others do.
            Self::RateLimitExceeded => (429, "rate_limit_error", "rate_limit_exceeded"),
            Self::KeyQueueFull => (429, "rate_limit_error", "slow_down"),
            Self::InternalError => (500, "server_error", "internal_error"),
            Self::NotImplemented => (501, INVALID, "not_implemented"),
            Self::HttpVersionNotSupported => (505, INVALID, "http_version_not_supported"),
            Self::UpstreamError => (502, "server_error", "upstream_error"),
            Self::UpstreamTimeout => (504, "server_error", "upstream_timeout"),
            Self::QueueFull => (503, UNAVAILABLE, "queue_full"),
            Self::SloUnattainable => (503, UNAVAILABLE, "slo_unattainable"),
            Self::QueueTimeout => (503, UNAVAILABLE, "queue_timeout"),
            Self::ServerOverloaded => (503, UNAVAILABLE, "overloaded"),
            Self::ModelNotLoaded => (503, UNAVAILABLE, "model_not_loaded"),
            Self::ModelLoading => (503, UNAVAILABLE, "model_loading"),
            Self::ModelUnloading => (503, UNAVAILABLE, "model_unloading"),
            Self::ModelFailed => (503, UNAVAILABLE, "model_failed"),
            // A retry finds another replica, or the same one restarted.
            Self::ReplicaLost => (503, UNAVAILABLE, "replica_lost"),
            Self::NoReplica => (503, UNAVAILABLE, "no_replica"),
            Self::UpstreamOverloaded => (503, UNAVAILABLE, "upstream_overloaded"),
            Self::ShuttingDown => (503, UNAVAILABLE, "shutting_down"),
        }
    }

    /// Whether the same request may succeed once what is here has drained. How long that takes is
    /// measured, by the executor or by the connection layer; see [`ApiError::retry_after_s`].
    #[must_use]
    pub fn passes(self) -> bool {
        matches!(
            self,
            Self::QueueFull
                | Self::SloUnattainable
                | Self::ServerOverloaded
                | Self::UpstreamOverloaded
                | Self::ReplicaLost
                | Self::NoReplica
                | Self::ModelLoading
                | Self::ModelUnloading
                | Self::ShuttingDown
        )
    }

    /// Refusals for load, whose status the operator chooses (`server.overload_status`).
    fn is_for_load(self) -> bool {
        matches!(
            self,
            Self::QueueFull | Self::SloUnattainable | Self::QueueTimeout | Self::UpstreamOverloaded
        )
    }

    /// The word of `x-tinyloop-rejected`: the request was sound (or too large) and was not run.
    fn rejection(self) -> Option<&'static str> {
        match self {
            Self::RateLimitExceeded
            | Self::KeyQueueFull
            | Self::QueueFull
            | Self::SloUnattainable
            | Self::QueueTimeout
            | Self::ServerOverloaded
            | Self::ModelNotLoaded
            | Self::ModelLoading
            | Self::ModelUnloading
            | Self::ModelFailed
            | Self::NoReplica
            | Self::UpstreamOverloaded
            | Self::ShuttingDown
            | Self::ContextLengthExceeded => Some(self.row().2),
            _ => None,
        }
    }

    /// The row for a status that the wire layer or a method check decided on.
    #[must_use]
    pub fn from_status(status: u16) -> Self {
        match status {
            401 => Self::InvalidApiKey,
            403 => Self::Forbidden,
            404 => Self::UnknownUrl,
            405 => Self::MethodNotAllowed,
            408 => Self::RequestTimeout,
            411 => Self::LengthRequired,
            413 => Self::RequestTooLarge,
            417 => Self::ExpectationFailed,
            431 => Self::HeaderTooLarge,
            501 => Self::NotImplemented,
            503 => Self::ServerOverloaded,
            505 => Self::HttpVersionNotSupported,
            500..=599 => Self::InternalError,
            _ => Self::BadRequest,
        }
    }
}

/// An error on its way to the client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Row of the table.
    pub code: ErrorCode,
    /// A sentence for the client: what was wrong, where, what would be right.
    pub message: String,
    /// The request field or header it is about.
    pub param: Option<String>,
    /// Value of `Allow` (405).
    pub allow: Option<&'static str>,
    /// Seconds for `Retry-After`. None where nobody knows better than the connection layer, whose rate
    /// is put in on the way out when the code [`ErrorCode::passes`].
    pub retry_after_s: Option<u32>,
    /// Why it was not run: `x-tinyloop-rejected` and `reason` in the body.
    pub rejected: Option<&'static str>,
    /// The same request can never be served: `x-should-retry: false`.
    pub is_hopeless: bool,
    /// The numbers that led there, by name; they stand inside the error object.
    pub numbers: Vec<(&'static str, f64)>,
    /// Instead of the table's status; see [`ApiError::for_load`].
    pub status_override: Option<u16>,
}

impl ApiError {
    /// An error without a field.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            param: None,
            allow: None,
            retry_after_s: None,
            rejected: code.rejection(),
            is_hopeless: matches!(
                code,
                ErrorCode::ContextLengthExceeded | ErrorCode::NotImplemented
            ),
            numbers: Vec::new(),
            status_override: None,
        }
    }

    /// With the status that the operator wants for refusals for load (503 or 429); others stay.
    #[must_use]
    pub fn for_load(&self, overload_status: u16) -> Self {
        Self {
            status_override: match self.code.is_for_load() {
                true => Some(overload_status),
                false => self.status_override,
            },
            ..self.clone()
        }
    }

    /// An error about one request field.
    pub fn param(code: ErrorCode, param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(code, message)
        }
    }

    /// `invalid_value` about one field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::param(ErrorCode::InvalidValue, param, message)
    }

    /// A parameter whose silent dropping would change the answer.
    pub fn unsupported(param: impl Into<String>, why: &str) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not supported: {why}");
        Self::param(ErrorCode::UnsupportedParameter, param, message)
    }

    /// A request that needs what its model lacks. `param`: the field that asks for it.
    pub fn missing(feature: Feature, param: impl Into<String>, model: &str) -> Self {
        let name = feature.name();
        let message =
            format!("the model '{model}' lacks the capability '{name}', which this request needs");
        Self {
            is_hopeless: true,
            ..Self::param(ErrorCode::MissingCapability, param, message)
        }
    }

    /// A replica was lost after so many tokens of the answer, over all choices.
    pub fn replica_lost(n_tokens: u64) -> Self {
        let message = match n_tokens {
            0 => "the replica that ran the request was lost before the first token of the answer"
                .to_owned(),
            n => format!(
                "the replica that ran the request was lost after {n} tokens of the answer, which are \
                 lost with it"
            ),
        };
        Self {
            numbers: vec![("completion_tokens", n_tokens as f64)],
            ..Self::new(ErrorCode::ReplicaLost, message)
        }
    }

    /// HTTP status.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.status_override.unwrap_or(self.code.row().0)
    }

    /// The OpenAI error body; refusals carry their reason and numbers beside OpenAI's fields.
    #[must_use]
    pub fn body(&self) -> Value {
        let (_, kind, code) = self.code.row();
        let kind = match self.status() {
            429 => "rate_limit_error",
            _ => kind,
        };
        let mut error = json!({
            "message": self.message, "type": kind, "param": self.param, "code": code,
        });
        if let Some(reason) = self.rejected {
            error["reason"] = Value::from(reason);
        }
        for (name, number) in &self.numbers {
            error[*name] = number_value(*number);
        }
        json!({"error": error})
    }

    /// Headers that go with it, beside the content type and the request id.
    #[must_use]
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = Vec::new();
        if let Some(seconds) = self.retry_after_s {
            headers.push(("retry-after", seconds.to_string()));
        }
        if let Some(reason) = self.rejected {
            headers.push(("x-tinyloop-rejected", reason.to_owned()));
        }
        if self.is_hopeless {
            headers.push(("x-should-retry", "false".to_owned()));
        }
        if let Some(allow) = self.allow {
            headers.push(("allow", allow.to_owned()));
        }
        if self.code == ErrorCode::InvalidApiKey {
            headers.push(("www-authenticate", "Bearer".to_owned()));
        }
        headers
    }
}

/// Whole numbers as integers: clients compare them.
fn number_value(number: f64) -> Value {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53
    if number.fract() == 0.0 && number.abs() <= EXACT {
        Value::from(number as i64)
    } else {
        Value::from((number * 1e3).round() / 1e3)
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let code = match error {
            RequestError::Cancelled => ErrorCode::Cancelled,
            RequestError::QueueTimeout { .. } => ErrorCode::QueueTimeout,
            RequestError::ShuttingDown => ErrorCode::ShuttingDown,
            RequestError::ModelUnloading => ErrorCode::ModelUnloading,
            RequestError::Invalid(_) => ErrorCode::InvalidValue,
            RequestError::ContextTooLong(_) => ErrorCode::ContextLengthExceeded,
            RequestError::Upstream { fault, .. } => match fault {
                UpstreamFault::Error => ErrorCode::UpstreamError,
                UpstreamFault::Timeout => ErrorCode::UpstreamTimeout,
            },
            RequestError::Fault(_) => ErrorCode::InternalError,
            RequestError::ReplicaLost(_) => ErrorCode::ReplicaLost,
            RequestError::Overloaded { .. } => ErrorCode::UpstreamOverloaded,
            RequestError::NoReplica { .. } => ErrorCode::NoReplica,
        };
        let numbers = match error {
            RequestError::QueueTimeout {
                waited_ms,
                queue_timeout_ms,
            } => vec![
                ("waited_ms", waited_ms as f64),
                ("queue_timeout_ms", queue_timeout_ms as f64),
            ],
            _ => Vec::new(),
        };
        let retry_after_s = match error {
            RequestError::Overloaded {
                retry_after_ms: Some(ms),
            }
            | RequestError::NoReplica { retry_after_ms: ms } => {
                Some(ms.div_ceil(1000).clamp(1, 30) as u32)
            }
            _ => None,
        };
        let message = match error {
            // Why is for the operator, who finds it in the log and in the replica's row.
            RequestError::ReplicaLost(_) => "the replica that ran the request was lost".to_owned(),
            error => error.to_string(),
        };
        Self {
            numbers,
            retry_after_s,
            is_hopeless: matches!(
                code,
                ErrorCode::InvalidValue | ErrorCode::ContextLengthExceeded
            ),
            ..Self::new(code, message)
        }
    }
}

/// When a model that has to be loaded first is asked for again.
const RETRY_LOAD_S: u32 = 5;

/// All that clients hear of a load that failed.
pub const LOAD_FAILED: &str = "could not be loaded; the server's log says why";

impl From<Unavailable> for ApiError {
    /// Retry-After only where waiting helps: a model that is on its way, or that the next request
    /// loads. Where only an operator can help the SDKs are told not to try again.
    fn from(why: Unavailable) -> Self {
        let (code, helps) = match &why {
            Unavailable::Unknown(_) => (ErrorCode::ModelNotFound, false),
            Unavailable::NotLoaded {
                load_on_demand,
                room,
                ..
            } => {
                let is_hopeless = room.is_some_and(|room| room.is_hopeless);
                (ErrorCode::ModelNotLoaded, *load_on_demand && !is_hopeless)
            }
            Unavailable::Loading { .. } => (ErrorCode::ModelLoading, true),
            Unavailable::Unloading { load_on_demand, .. } => {
                (ErrorCode::ModelUnloading, *load_on_demand)
            }
            Unavailable::Failed { load_on_demand, .. } => (ErrorCode::ModelFailed, *load_on_demand),
            Unavailable::QueueFull { .. } => (ErrorCode::QueueFull, true),
            Unavailable::ClientGone => (ErrorCode::ClientClosedRequest, false),
            Unavailable::ShuttingDown => (ErrorCode::ShuttingDown, true),
        };
        let numbers = match &why {
            Unavailable::NotLoaded {
                room: Some(room), ..
            } => vec![
                ("needed_bytes", room.needed_bytes as f64),
                ("free_bytes", room.free_bytes as f64),
                ("limit_bytes", room.limit_bytes as f64),
            ],
            _ => Vec::new(),
        };
        let message = match &why {
            // The loader's words name files and tensors; the operator finds them in the log and in
            // the model's `last_error`.
            Unavailable::Failed { model, .. } => format!("the model '{model}' {LOAD_FAILED}"),
            why => why.to_string(),
        };
        let retry_after_s = match &why {
            Unavailable::Loading { retry_after_s, .. } => Some(*retry_after_s),
            // Another load begins at once, and ends when nobody knows yet.
            _ => helps.then_some(RETRY_LOAD_S),
        };
        Self {
            retry_after_s,
            is_hopeless: !helps && code.row().0 == 503,
            numbers,
            ..Self::param(code, "model", message)
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let code = match error {
            SubmitError::NotStarted => ErrorCode::ModelLoading,
            SubmitError::Shutdown { .. } => ErrorCode::ShuttingDown,
            SubmitError::ModelUnloading { .. } => ErrorCode::ModelUnloading,
            SubmitError::Failed => ErrorCode::ModelFailed,
            SubmitError::NoReplica { .. } => ErrorCode::NoReplica,
            SubmitError::EmptyPrompt | SubmitError::SloBelowIdle { .. } => ErrorCode::InvalidValue,
            SubmitError::PromptTooLong { .. }
            | SubmitError::TooLong { .. }
            | SubmitError::KvTooSmall { .. } => ErrorCode::ContextLengthExceeded,
            SubmitError::QueueFull { .. } => ErrorCode::QueueFull,
            SubmitError::KeyQueueFull { .. } => ErrorCode::KeyQueueFull,
            SubmitError::AdmissionRejected { .. } => ErrorCode::SloUnattainable,
        };
        Self {
            retry_after_s: error.retry_after_s(),
            rejected: Some(error.reason()),
            is_hopeless: !error.should_retry(),
            numbers: error.numbers(),
            ..Self::new(code, error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_openais_shape_and_headers_follow_the_code() {
        let error = ApiError::invalid("n", "'n' is 0");
        assert_eq!(
            error.body(),
            json!({"error": {
                "message": "'n' is 0", "type": "invalid_request_error", "param": "n",
                "code": "invalid_value",
            }})
        );
        assert!(error.headers().is_empty());
        let gone = ApiError::from(RequestError::Cancelled);
        assert_eq!(gone.status(), 499);
        let bad = ApiError::from(RequestError::Invalid("no".to_owned()));
        assert_eq!((bad.status(), bad.message.as_str()), (400, "no"));
        assert_eq!(bad.headers(), [("x-should-retry", "false".to_owned())]);
        let long = ApiError::from(RequestError::ContextTooLong("9 of 8".to_owned()));
        assert_eq!(
            (long.status(), long.code),
            (400, ErrorCode::ContextLengthExceeded)
        );
    }

    #[test]
    fn refusals_carry_reason_numbers_and_retry_advice() {
        let full = ApiError::from(SubmitError::QueueFull {
            queue_depth: 3,
            max_queue_depth: 3,
            queued_prompt_tokens: 0,
            max_queued_prompt_tokens: None,
            retry_after_s: 7,
        });
        let headers = [
            ("retry-after", "7".to_owned()),
            ("x-tinyloop-rejected", "queue_full".to_owned()),
        ];
        assert_eq!((full.status(), full.headers()), (503, headers.to_vec()));
        let error = full.body()["error"].clone();
        assert_eq!(error["reason"], "queue_full");
        assert_eq!(error["queue_depth"], 3);
        let as_429 = full.for_load(429);
        assert_eq!(as_429.status(), 429);
        assert_eq!(as_429.body()["error"]["type"], "rate_limit_error");
        assert_eq!(as_429.headers(), full.headers());

        let never = ApiError::from(SubmitError::KvTooSmall {
            needed_tokens: 9,
            capacity_tokens: 8,
        });
        let headers = [
            ("x-tinyloop-rejected", "kv_too_small".to_owned()),
            ("x-should-retry", "false".to_owned()),
        ];
        assert_eq!((never.status(), never.headers()), (400, headers.to_vec()));
        assert_eq!(never.for_load(429).status(), 400);
        // A status that somebody else has chosen stays.
        let chosen = ApiError {
            status_override: Some(418),
            ..never.clone()
        };
        assert_eq!(chosen.for_load(429).status(), 418);

        let timeout = RequestError::QueueTimeout {
            waited_ms: 12,
            queue_timeout_ms: 10,
        };
        let late = ApiError::from(timeout).for_load(429);
        let error = late.body()["error"].clone();
        assert_eq!(
            (&error["waited_ms"], &error["queue_timeout_ms"]),
            (&json!(12), &json!(10))
        );
        let headers = [("x-tinyloop-rejected", "queue_timeout".to_owned())];
        assert_eq!((late.status(), late.headers()), (429, headers.to_vec()));
        // A drain is no overload of the client's making.
        let drain = ApiError::from(RequestError::ShuttingDown).for_load(429);
        assert_eq!(drain.status(), 503);
    }

    #[test]
    fn every_status_of_the_wire_keeps_its_number() {
        for status in [400, 408, 413, 417, 431, 500, 503, 505] {
            assert_eq!(ErrorCode::from_status(status).row().0, status);
        }
    }
}
