//! In which dialect an error is worded.
//!
//! Pure. The status and the headers come from the one table in `errors`; here is only how the body looks.
//! The route decides, so that a refused key or an overload speaks the dialect that the client reads.

use super::errors::{ApiError, ErrorCode};
use super::router::known_path;
use serde_json::{Value, json};

/// Whose error bodies are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorStyle {
    /// `{"error": {"message", "type", "param", "code"}}`
    #[default]
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
    /// `{"error": {"code": 400, "message", "type"}}`
    LlamaServer,
    /// `{"error": {"type", "message", "code", "param"}}`, with LM Studio's words for the type.
    LmStudio,
}

/// Anthropic's status for "too much load now"; its clients come again.
const OVERLOADED: u16 = 529;

impl ErrorStyle {
    /// Of a path whose method or rest may be wrong, or that was refused before it was looked up.
    #[must_use]
    pub fn of_path(target: &str) -> Self {
        let path = target.split('?').next().unwrap_or_default();
        if let Some(route) = known_path(path) {
            return route.error_style();
        }
        match path {
            _ if path.starts_with("/v1/messages/") => Self::Anthropic,
            _ if path.starts_with("/api/v1/") => Self::LmStudio,
            _ => Self::OpenAi,
        }
    }

    /// The status of a refusal for load, where the operator has not chosen 429.
    #[must_use]
    pub fn overload_status(self, configured: u16) -> u16 {
        match (self, configured) {
            (Self::Anthropic, 503) => OVERLOADED,
            (_, configured) => configured,
        }
    }

    /// The header beside `x-request-id` in which clients look for it.
    #[must_use]
    pub fn request_id_header(self) -> Option<&'static str> {
        match self {
            Self::OpenAi | Self::LlamaServer | Self::LmStudio => None,
            Self::Anthropic => Some("request-id"),
        }
    }

    /// The body of an error.
    #[must_use]
    pub fn body(self, error: &ApiError) -> Value {
        match self {
            Self::OpenAi => error.body(),
            Self::Anthropic => {
                let mut body = error.body();
                let mut inner = body["error"].take();
                inner["type"] = Value::from(anthropic_type(error.status()));
                json!({"type": "error", "error": inner})
            }
            Self::LlamaServer => json!({"error": llama_server_error(error)}),
            Self::LmStudio => {
                let mut body = error.body();
                body["error"]["type"] = Value::from(lm_studio_type(error));
                body
            }
        }
    }

    /// The body of an error of the request `id`.
    #[must_use]
    pub fn body_of(self, error: &ApiError, id: &str) -> Value {
        let mut body = self.body(error);
        if self == Self::Anthropic {
            body["request_id"] = Value::from(id);
        }
        body
    }
}

/// The status stands in the body too, as a number.
fn llama_server_error(error: &ApiError) -> Value {
    let status = error.status();
    let kind = match (error.code, status) {
        (ErrorCode::ContextLengthExceeded, _) => "exceed_context_size_error",
        (_, 401) => "authentication_error",
        (_, 403) => "permission_error",
        (_, 404) => "not_found_error",
        (_, 501) => "not_supported_error",
        (_, 429) => "rate_limit_error",
        (_, 503) => "unavailable_error",
        (_, 400..=499) => "invalid_request_error",
        _ => "server_error",
    };
    let mut body = json!({"code": status, "message": error.message, "type": kind});
    for (name, number) in &error.numbers {
        match *name {
            "prompt_tokens" => body["n_prompt_tokens"] = Value::from(*number as u64),
            "context_length" => body["n_ctx"] = Value::from(*number as u64),
            _ => {}
        }
    }
    body
}

/// LM Studio names few kinds; the words for the others are those of its neighbours.
fn lm_studio_type(error: &ApiError) -> &'static str {
    match (error.code, error.status()) {
        (ErrorCode::ModelNotFound, _) => "model_not_found",
        (ErrorCode::NotImplemented | ErrorCode::UnsupportedParameter, _) => "not_implemented",
        (_, 401) => "authentication_error",
        (_, 403) => "permission_error",
        (_, 429) => "rate_limit_error",
        (_, 503) => "unavailable_error",
        (_, 400..=499) => "invalid_request",
        (ErrorCode::InternalError, _) => "internal_error",
        _ => "unknown",
    }
}

/// Anthropic's word for a status.
fn anthropic_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        409 => "conflict_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | OVERLOADED => "overloaded_error",
        504 => "timeout_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_error_in_both_dialects() {
        let error = ApiError::invalid("max_tokens", "too many");
        assert_eq!(ErrorStyle::OpenAi.body(&error), error.body());
        let body = ErrorStyle::Anthropic.body(&error);
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(body["error"]["message"], "too many");
        let body = ErrorStyle::Anthropic.body(&ApiError::new(ErrorCode::QueueFull, "full"));
        assert_eq!(body["error"]["type"], "overloaded_error");
        let body = ErrorStyle::Anthropic.body_of(&error, "req_1");
        assert_eq!(body["request_id"], "req_1");
        assert_eq!(ErrorStyle::OpenAi.body_of(&error, "req_1"), error.body());
        assert_eq!(ErrorStyle::Anthropic.overload_status(503), 529);
        assert_eq!(ErrorStyle::Anthropic.overload_status(429), 429);
        assert_eq!(ErrorStyle::OpenAi.overload_status(503), 503);
        for path in [
            "/v1/messages",
            "/v1/messages?beta=true",
            "/v1/messages/count_tokens",
        ] {
            assert_eq!(ErrorStyle::of_path(path), ErrorStyle::Anthropic);
        }
        for path in ["/v1/messagesx", "/v1/responses", ""] {
            assert_eq!(ErrorStyle::of_path(path), ErrorStyle::OpenAi);
        }
    }

    #[test]
    fn a_wrong_method_is_refused_in_the_dialect_of_its_path() {
        for (path, style) in [
            ("/completion", ErrorStyle::LlamaServer),
            ("/tokenize", ErrorStyle::LlamaServer),
            ("/props", ErrorStyle::LlamaServer),
            ("/api/v1/chat", ErrorStyle::LmStudio),
            ("/api/v1/nothing", ErrorStyle::LmStudio),
            ("/api/v0/models", ErrorStyle::OpenAi),
            ("/v1/messages/", ErrorStyle::Anthropic),
        ] {
            assert_eq!(ErrorStyle::of_path(path), style, "{path}");
        }
    }

    #[test]
    fn limits_and_load_have_types_in_every_dialect() {
        let kind = |style: ErrorStyle, status| {
            let error = ApiError::new(ErrorCode::from_status(status), "x");
            assert_eq!(error.status(), status);
            style.body(&error)["error"]["type"].clone()
        };
        let limited = ApiError::new(ErrorCode::RateLimitExceeded, "x");
        for style in [ErrorStyle::LlamaServer, ErrorStyle::LmStudio] {
            assert_eq!(kind(style, 401), "authentication_error");
            assert_eq!(kind(style, 503), "unavailable_error");
            assert_eq!(style.body(&limited)["error"]["type"], "rate_limit_error");
        }
    }

    #[test]
    fn local_servers_have_words_of_their_own() {
        let error = ApiError {
            numbers: vec![("prompt_tokens", 90.0), ("context_length", 64.0)],
            ..ApiError::new(ErrorCode::ContextLengthExceeded, "too long")
        };
        assert_eq!(
            ErrorStyle::LlamaServer.body(&error),
            json!({"error": {"code": 400, "message": "too long",
                "type": "exceed_context_size_error", "n_prompt_tokens": 90, "n_ctx": 64}})
        );
        let error = ApiError::unsupported("integrations", "none");
        let body = ErrorStyle::LmStudio.body(&error);
        assert_eq!(body["error"]["type"], "not_implemented");
        assert_eq!(body["error"]["param"], "integrations");
    }
}
