//! What several of these files do with bodies and answers.

use crate::TestServer;
use crate::client::Answer;
use serde_json::Value;

/// Names of an object's fields, in order.
#[track_caller]
pub(crate) fn keys(value: &Value) -> Vec<&str> {
    let map = value.as_object().unwrap_or_else(|| panic!("{value}"));
    let mut keys: Vec<&str> = map.keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// The answer to a request that must go well.
#[track_caller]
pub(crate) fn post(server: &TestServer, path: &str, body: &Value) -> Value {
    let answer = server.client().post(path, body);
    assert_eq!(answer.status, 200, "{}", answer.json());
    answer.json()
}

/// The body with further fields.
pub(crate) fn with(mut body: Value, extra: &Value) -> Value {
    let map = body.as_object_mut().expect("an object");
    map.extend(extra.as_object().expect("an object").clone());
    body
}

/// Events with names: each name stands before data of that type.
#[track_caller]
pub(crate) fn named_events(answer: &Answer) -> Vec<Value> {
    named_events_of(&answer.body)
}

/// The same from the bytes of a stream.
#[track_caller]
pub(crate) fn named_events_of(bytes: &[u8]) -> Vec<Value> {
    let text = str::from_utf8(bytes).expect("events are UTF-8");
    let blocks = text.split("\n\n").filter(|block| !block.is_empty());
    let events = blocks.map(|block| {
        let (name, data) = block.split_once('\n').expect("a name and data");
        let data = data.strip_prefix("data: ").expect("data");
        let event: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        event
    });
    events.collect()
}
