//! Server-sent events: a `data:` line, behind an `event:` line where an API names its events.
//!
//! Pure. One event is written as one chunk and one flush, so that a client sees each token when
//! it is made; that is the wire layer's part. JSON text never holds a raw line break, so one
//! `data:` line is always enough.

use serde::Serialize;

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

/// Appends one event with `data` as JSON.
///
/// # Panics
/// When `data` is not JSON: a map whose keys are no strings.
pub fn append_event(events: &mut Vec<u8>, name: Option<&str>, data: &impl Serialize) {
    if let Some(name) = name {
        events.extend_from_slice(b"event: ");
        events.extend_from_slice(name.as_bytes());
        events.push(b'\n');
    }
    events.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *events, data).expect("answers are JSON, and memory takes it all");
    events.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_one_line_whatever_the_text_holds() {
        let mut event = Vec::new();
        append_event(&mut event, None, &json!({"content": "a\r\nb\n\nc\u{2028}"}));
        let text = String::from_utf8(event).expect("JSON is UTF-8");
        assert_eq!(text.matches('\n').count(), 2);
        assert!(text.starts_with("data: {") && text.ends_with("}\n\n"));
    }
}
