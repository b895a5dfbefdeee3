//! The one table from what went wrong to HTTP status, `type` and `code`, and the OpenAI error body.
//!
//! Pure data, no thread. A status code appears nowhere else in `http/`: routes build an
//! [`ApiError`] from an [`ErrorCode`] and a sentence for the client. Retry advice follows what the
//! official SDKs do: they retry 408, 409, 429 and every 5xx, and give up on a Retry-After above
//! 120 s, so a refusal that can never succeed is a 400. What is not here: text for the log
//! (whoever finds a fault logs it), and how the bytes are written (`wire`).

use crate::request::RequestError;
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
    InvalidValue,
    MissingRequiredParameter,
    UnsupportedParameter,
    ContextLengthExceeded,
    TemplateError,
    BadRequest,
    InvalidApiKey,
    Forbidden,
    ModelNotFound,
    UnknownUrl,
    MethodNotAllowed,
    RequestTimeout,
    RequestTooLarge,
    ExpectationFailed,
    HeaderTooLarge,
    ClientClosedRequest,
    InternalError,
    NotImplemented,
    HttpVersionNotSupported,
    QueueFull,
    SloUnattainable,
    QueueTimeout,
    ServerOverloaded,
    ModelLoading,
    ModelUnloading,
    ModelFailed,
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
            Self::InvalidValue => (400, INVALID, "invalid_value"),
            Self::MissingRequiredParameter => (400, INVALID, "missing_required_parameter"),
            Self::UnsupportedParameter => (400, INVALID, "unsupported_parameter"),
            Self::ContextLengthExceeded => (400, INVALID, "context_length_exceeded"),
            Self::TemplateError => (400, INVALID, "chat_template_error"),
            Self::BadRequest => (400, INVALID, "bad_request"),
            Self::InvalidApiKey => (401, "authentication_error", "invalid_api_key"),
            Self::Forbidden => (403, "permission_error", "forbidden"),
            Self::ModelNotFound => (404, INVALID, "model_not_found"),
            Self::UnknownUrl => (404, INVALID, "unknown_url"),
            Self::MethodNotAllowed => (405, INVALID, "method_not_allowed"),
            Self::RequestTimeout => (408, INVALID, "request_timeout"),
            Self::RequestTooLarge => (413, INVALID, "request_too_large"),
            Self::ExpectationFailed => (417, INVALID, "expectation_failed"),
            Self::HeaderTooLarge => (431, INVALID, "request_header_too_large"),
            // Nobody reads it: the number goes to the log, as nginx writes it.
            Self::ClientClosedRequest => (499, INVALID, "client_closed_request"),
            Self::InternalError => (500, "server_error", "internal_error"),
            Self::NotImplemented => (501, INVALID, "not_implemented"),
            Self::HttpVersionNotSupported => (505, INVALID, "http_version_not_supported"),
            Self::QueueFull => (503, UNAVAILABLE, "queue_full"),
            Self::SloUnattainable => (503, UNAVAILABLE, "slo_unattainable"),
            Self::QueueTimeout => (503, UNAVAILABLE, "queue_timeout"),
            Self::ServerOverloaded => (503, UNAVAILABLE, "server_is_overloaded"),
            Self::ModelLoading => (503, UNAVAILABLE, "model_loading"),
            Self::ModelUnloading => (503, UNAVAILABLE, "model_unloading"),
            Self::ModelFailed => (503, UNAVAILABLE, "model_failed"),
            Self::ShuttingDown => (503, UNAVAILABLE, "shutting_down"),
        }
    }

    /// Seconds after which a retry makes sense; None where it does not.
    #[must_use]
    pub fn retry_after_s(self) -> Option<u32> {
        match self {
            Self::QueueFull | Self::ServerOverloaded => Some(1),
            Self::SloUnattainable | Self::ModelLoading => Some(2),
            Self::ModelUnloading | Self::ShuttingDown => Some(5),
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
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Row of the table.
    pub code: ErrorCode,
    /// A sentence for the client: what was wrong, where, what would be right.
    pub message: String,
    /// The request field it is about.
    pub param: Option<String>,
    /// Value of `Allow` (405).
    pub allow: Option<&'static str>,
    /// Seconds for `Retry-After`.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// An error without a field.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            param: None,
            allow: None,
            retry_after_s: code.retry_after_s(),
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

    /// HTTP status.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.code.row().0
    }

    /// The OpenAI error body.
    #[must_use]
    pub fn body(&self) -> Value {
        let (_, kind, code) = self.code.row();
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": code,
        }})
    }

    /// Headers that go with it, beside the content type and the request id.
    #[must_use]
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = Vec::new();
        if let Some(seconds) = self.retry_after_s {
            headers.push(("retry-after", seconds.to_string()));
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

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let code = match error {
            RequestError::Cancelled => ErrorCode::ClientClosedRequest,
            RequestError::QueueTimeout => ErrorCode::QueueTimeout,
            RequestError::ShuttingDown => ErrorCode::ShuttingDown,
            RequestError::ModelUnloading => ErrorCode::ModelUnloading,
            RequestError::Fault(_) => ErrorCode::InternalError,
        };
        Self::new(code, error.to_string())
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let code = match error {
            SubmitError::NotStarted => ErrorCode::ModelLoading,
            SubmitError::Shutdown => ErrorCode::ShuttingDown,
            SubmitError::ModelUnloading => ErrorCode::ModelUnloading,
            SubmitError::EmptyPrompt | SubmitError::SloBelowIdle { .. } => ErrorCode::InvalidValue,
            SubmitError::PromptTooLong { .. }
            | SubmitError::TooLong { .. }
            | SubmitError::KvTooSmall { .. } => ErrorCode::ContextLengthExceeded,
            SubmitError::QueueFull { .. } => ErrorCode::QueueFull,
            SubmitError::AdmissionRejected { .. } => ErrorCode::SloUnattainable,
        };
        let retry_after_s = error.retry_after_s().or(code.retry_after_s());
        Self {
            retry_after_s,
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
        let full = SubmitError::QueueFull {
            queue_depth: 3,
            max_queue_depth: 3,
            queued_prompt_tokens: 30,
            max_queued_prompt_tokens: None,
            retry_after_s: 7,
        };
        let full = ApiError::from(full);
        assert_eq!(
            (full.status(), full.headers()),
            (503, vec![("retry-after", "7".to_owned())])
        );
        let gone = ApiError::from(RequestError::Cancelled);
        assert_eq!(gone.status(), 499);
    }

    #[test]
    fn every_status_of_the_wire_keeps_its_number() {
        for status in [400, 408, 413, 417, 431, 500, 503, 505] {
            assert_eq!(ErrorCode::from_status(status).row().0, status);
        }
    }
}
