//! Server-sent events that are ready to leave, in their order.
//!
//! Pure: a buffer whose memory serves all events of an answer. Each event leaves as one chunk and one
//! flush, so that a client sees it when it is made; that is `run`'s part.

use crate::http::sse;
use serde::Serialize;

/// See the module.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
    /// Where each event ends in `bytes`.
    ends: Vec<usize>,
}

impl Events {
    /// An event without a name, `data` as JSON.
    pub fn data(&mut self, data: &impl Serialize) {
        sse::append_event(&mut self.bytes, None, data);
        self.ends.push(self.bytes.len());
    }

    /// An event with a name.
    pub fn named(&mut self, name: &str, data: &impl Serialize) {
        sse::append_event(&mut self.bytes, Some(name), data);
        self.ends.push(self.bytes.len());
    }

    /// An event as it stands, with its empty line: [`sse::DONE`], [`sse::PING`].
    pub fn raw(&mut self, event: &str) {
        self.bytes.extend_from_slice(event.as_bytes());
        self.ends.push(self.bytes.len());
    }

    /// The events, one after the other.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let spans = starts.zip(self.ends.iter().copied());
        spans.map(|(start, end)| &self.bytes[start..end])
    }

    /// Forgets them all.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }
}

#[cfg(test)]
impl Events {
    /// Events with names, read back; each name stands before data of that type.
    #[track_caller]
    pub fn read_back(&self) -> Vec<serde_json::Value> {
        let events = self.iter().map(|event| {
            let text = std::str::from_utf8(event).expect("events are UTF-8");
            let (name, data) = text.split_once('\n').expect("a name and data");
            let data = data.strip_prefix("data: ").expect("data");
            let value: serde_json::Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(name.strip_prefix("event: "), value["type"].as_str());
            value
        });
        events.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_come_out_one_by_one() {
        let mut events = Events::default();
        events.data(&json!({"a": 1}));
        events.named("message_stop", &json!({}));
        events.raw(sse::DONE);
        let texts: Vec<_> = events.iter().map(String::from_utf8_lossy).collect();
        assert_eq!(
            texts,
            [
                "data: {\"a\":1}\n\n",
                "event: message_stop\ndata: {}\n\n",
                sse::DONE
            ]
        );
        events.clear();
        assert_eq!(events.iter().count(), 0);
    }
}
