//! In which dialect an error is worded.
//!
//! Pure. The status and the headers come from the one table in `errors`; here is only how the body looks.
//! The route decides, so that a refused key or an overload speaks the dialect that the client reads.

use super::errors::ApiError;
use serde_json::{Value, json};

/// Whose error bodies are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorStyle {
    /// `{"error": {"message", "type", "param", "code"}}`
    #[default]
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
}

impl ErrorStyle {
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
        }
    }
}

/// Anthropic's word for a status.
fn anthropic_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::errors::ErrorCode;

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
    }
}
