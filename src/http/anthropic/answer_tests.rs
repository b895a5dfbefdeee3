//! Tests of the growing message.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Pushes parts, then finishes; the events as JSON.
fn events_of(thinking: Thinking, parts: &[Part]) -> (Answer, Vec<Value>) {
    let mut answer = Answer::new(thinking, "s".to_owned());
    let mut events = Events::default();
    push_all(&mut answer, parts, Some(&mut events));
    let values = events.read_back();
    (answer, values)
}

fn push_all(answer: &mut Answer, parts: &[Part], mut listener: Listener<'_>) {
    for part in parts {
        let call_id = |index| format!("toolu_{index}");
        answer.push(part.clone(), call_id, listener.as_deref_mut());
    }
    answer.finish(listener);
}

fn said() -> Vec<Part> {
    vec![
        Part::Reasoning("h".to_owned()),
        Part::Reasoning("m".to_owned()),
        Part::Text("I look".to_owned()),
        Part::CallBegin {
            index: 0,
            name: "f".to_owned(),
        },
        Part::CallArguments {
            index: 0,
            fragment: "{\"a\":".to_owned(),
        },
        Part::CallArguments {
            index: 0,
            fragment: "1}".to_owned(),
        },
        Part::CallBegin {
            index: 1,
            name: "g".to_owned(),
        },
    ]
}

#[test]
fn each_block_is_started_filled_and_stopped() {
    let (answer, events) = events_of(Thinking::Shown, &said());
    let delta = |index: usize, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let start = |index: usize, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
    let stop = |index: usize| json!({"type": "content_block_stop", "index": index});
    assert_eq!(
        events,
        [
            start(
                0,
                json!({"type": "thinking", "thinking": "", "signature": ""})
            ),
            delta(0, json!({"type": "thinking_delta", "thinking": "h"})),
            delta(0, json!({"type": "thinking_delta", "thinking": "m"})),
            delta(0, json!({"type": "signature_delta", "signature": "s"})),
            stop(0),
            start(1, json!({"type": "text", "text": ""})),
            delta(1, json!({"type": "text_delta", "text": "I look"})),
            stop(1),
            start(
                2,
                json!({"type": "tool_use", "id": "toolu_0", "name": "f", "input": {}})
            ),
            delta(
                2,
                json!({"type": "input_json_delta", "partial_json": "{\"a\":"})
            ),
            delta(2, json!({"type": "input_json_delta", "partial_json": "1}"})),
            stop(2),
            start(
                3,
                json!({"type": "tool_use", "id": "toolu_1", "name": "g", "input": {}})
            ),
            stop(3),
        ]
    );
    assert_eq!(
        serde_json::to_value(answer.blocks()).expect("JSON"),
        json!([
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_1", "name": "g", "input": {}},
        ])
    );
}

#[test]
fn thoughts_are_shown_as_asked() {
    let first = |thinking| {
        let (answer, _) = events_of(thinking, &said());
        serde_json::to_value(&answer.blocks()[0]).expect("JSON")
    };
    assert_eq!(
        first(Thinking::Hidden),
        json!({"type": "text", "text": "I look"})
    );
    assert_eq!(
        first(Thinking::Omitted),
        json!({"type": "thinking", "thinking": "", "signature": "s"})
    );
    let (nothing, _) = events_of(Thinking::Hidden, &[]);
    let blocks = serde_json::to_value(nothing.blocks()).expect("JSON");
    assert_eq!(blocks, json!([{"type": "text", "text": ""}]));
}

#[test]
fn a_cut_call_is_left_out_of_a_whole_message() {
    let begin = |index: u32| Part::CallBegin {
        index,
        name: "f".to_owned(),
    };
    let argue = |index: u32, fragment: &str| Part::CallArguments {
        index,
        fragment: fragment.to_owned(),
    };
    let whole = [begin(0), argue(0, "{\"a\":1}"), begin(1)];
    for (fragment, is_cut, n_shown) in [
        ("{\"b\": \"", true, 1),
        ("{\"b\": \"", false, 1),
        ("", true, 1),
        ("", false, 2),
        ("{}", true, 2),
        ("[1]", false, 1),
    ] {
        let parts = [&whole[..], &[argue(1, fragment)]].concat();
        let (answer, events) = events_of(Thinking::Shown, &parts);
        assert_eq!(answer.shown(is_cut).len(), n_shown, "{fragment} {is_cut}");
        // A stream has told of it, and its block ends.
        assert_eq!(answer.blocks().len(), 2);
        let last = events.last().expect("an event");
        assert_eq!(last, &json!({"type": "content_block_stop", "index": 1}));
    }
}

fn part() -> impl Strategy<Value = Part> {
    let word = "[a-z]{0,3}";
    prop_oneof![
        3 => word.prop_map(Part::Text),
        2 => word.prop_map(Part::Reasoning),
        1 => (0..3_u32).prop_map(|index| Part::CallBegin { index, name: "f".to_owned() }),
        3 => (0..3_u32, word)
            .prop_map(|(index, fragment)| Part::CallArguments { index, fragment }),
    ]
}

proptest! {
    /// Whatever comes: blocks start in order, one at a time, and stop once; joined deltas are what a
    /// whole message shows.
    #[test]
    fn events_tell_the_blocks(parts in prop::collection::vec(part(), 0..40)) {
        let (answer, events) = events_of(Thinking::Shown, &parts);
        let (mut n_started, mut n_stopped) = (0, 0);
        let mut joined: Vec<String> = Vec::new();
        for event in &events {
            let index = event["index"].as_u64().expect("an index") as usize;
            match event["type"].as_str().expect("a type") {
                "content_block_start" => {
                    prop_assert_eq!((index, n_stopped), (n_started, n_started));
                    n_started += 1;
                    joined.push(String::new());
                }
                "content_block_stop" => {
                    prop_assert_eq!((index, n_stopped + 1), (n_stopped, n_started));
                    n_stopped += 1;
                }
                _ => {
                    prop_assert_eq!((index + 1, n_stopped), (n_started, n_started - 1));
                    for field in ["text", "thinking", "partial_json"] {
                        joined[index].push_str(event["delta"][field].as_str().unwrap_or_default());
                    }
                }
            }
        }
        prop_assert_eq!(n_stopped, answer.blocks().len());
        for (block, joined) in answer.blocks().iter().zip(&joined) {
            let text = match block {
                Block::Text { text } => text,
                Block::Thinking { thinking, .. } => thinking,
                Block::ToolUse { input, .. } => input,
            };
            prop_assert_eq!(text, joined);
        }
        let mut silent = Answer::new(Thinking::Shown, "s".to_owned());
        push_all(&mut silent, &parts, None);
        prop_assert_eq!(
            serde_json::to_value(silent.blocks()).expect("JSON"),
            serde_json::to_value(answer.blocks()).expect("JSON")
        );
    }
}
