//! Server-sent events as OpenAI clients read them: `data:` lines, no event names.
//!
//! Pure. One event is written as one chunk and one flush, so that a client sees each token when
//! it is made; that is the wire layer's part. JSON text never holds a raw line break, so one
//! `data:` line is always enough.

use serde_json::Value;

/// Content type of an event stream.
pub const CONTENT_TYPE: &str = "text/event-stream; charset=utf-8";
/// Ends a stream that went well.
pub const DONE: &str = "data: [DONE]\n\n";
/// A comment: clients ignore it, proxies see life.
pub const PING: &str = ": ping\n\n";

/// Response headers of a stream. The last one keeps nginx from collecting the events.
pub const HEADERS: [(&str, &str); 3] = [
    ("content-type", CONTENT_TYPE),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
];

/// One event.
#[must_use]
pub fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_one_line_whatever_the_text_holds() {
        let text = event(&json!({"content": "a\r\nb\n\nc\u{2028}"}));
        assert_eq!(text.matches('\n').count(), 2);
        assert!(text.starts_with("data: {") && text.ends_with("}\n\n"));
    }
}
