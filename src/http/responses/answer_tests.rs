//! Tests of the growing response.

use super::*;
use proptest::prelude::*;
use serde_json::json;

/// Pushes parts, then finishes; the events as JSON.
fn events_of(parts: &[(Part, usize)]) -> (Answer, Vec<Value>) {
    let mut answer = Answer::new("x".to_owned());
    let mut events = Events::default();
    push_all(&mut answer, parts, Some(&mut events));
    let values = events.read_back();
    (answer, values)
}

fn push_all(answer: &mut Answer, parts: &[(Part, usize)], mut listener: Listener<'_>) {
    for (part, n_tokens) in parts {
        let logprobs = vec![json!({"token": "t"}); *n_tokens];
        let call_id = |index| format!("call_{index}");
        answer.push(part.clone(), logprobs, call_id, listener.as_deref_mut());
    }
    answer.finish(Status::Incomplete, listener);
}

fn text(text: &str) -> (Part, usize) {
    (Part::Text(text.to_owned()), 0)
}

#[test]
fn each_item_is_added_filled_and_done() {
    let (_, events) = events_of(&[
        (Part::Reasoning("hm".to_owned()), 0),
        text("I "),
        text("look"),
        (
            Part::CallBegin {
                index: 0,
                name: "f".to_owned(),
            },
            0,
        ),
        (
            Part::CallArguments {
                index: 0,
                fragment: "{}".to_owned(),
            },
            0,
        ),
    ]);
    let types: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        types,
        [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
    );
    assert_eq!(
        events[6]["item"],
        json!({"type": "message", "id": "msg_x01", "status": "in_progress", "role": "assistant",
               "content": []})
    );
    assert_eq!(
        events[8],
        json!({"type": "response.output_text.delta", "sequence_number": 8, "item_id": "msg_x01",
               "output_index": 1, "content_index": 0, "delta": "I ", "logprobs": []})
    );
    assert_eq!(
        events[11]["part"],
        json!({"type": "output_text", "text": "I look", "annotations": [], "logprobs": []})
    );
    assert_eq!(events[12]["item"]["status"], "completed");
    assert_eq!(
        events[16]["item"],
        json!({"type": "function_call", "id": "fc_x02", "call_id": "call_0", "name": "f",
               "arguments": "{}", "status": "incomplete"})
    );
}

#[test]
fn an_answer_that_says_nothing_is_an_empty_message() {
    let (answer, events) = events_of(&[(Part::Text(String::new()), 2)]);
    assert_eq!(answer.items().len(), 1);
    let delta = events
        .iter()
        .find(|event| event["type"] == "response.output_text.delta");
    let delta = delta.expect("its tokens are told");
    assert_eq!(delta["logprobs"].as_array().expect("a list").len(), 2);
}

fn part() -> impl Strategy<Value = (Part, usize)> {
    let word = "[a-z]{0,3}";
    let part = prop_oneof![
        3 => word.prop_map(Part::Text),
        2 => word.prop_map(Part::Reasoning),
        1 => (0..3_u32).prop_map(|index| Part::CallBegin { index, name: "f".to_owned() }),
        3 => (0..3_u32, word)
            .prop_map(|(index, fragment)| Part::CallArguments { index, fragment }),
    ];
    (part, 0..3_usize)
}

/// Pieces of an item and what its last events say of it.
#[derive(Default)]
struct Seen {
    n_added: usize,
    n_done: usize,
    deltas: String,
    n_logprobs: usize,
}

proptest! {
    /// Whatever comes: numbers without a gap, each item added and done once and in order, deltas that
    /// join to what the `done` events and the items say, and the same items with nobody listening.
    #[test]
    fn events_tell_the_items(parts in prop::collection::vec(part(), 0..40)) {
        let (answer, events) = events_of(&parts);
        let mut seen: Vec<Seen> = Vec::new();
        for (number, event) in events.iter().enumerate() {
            prop_assert_eq!(&event["sequence_number"], number);
            let index = event["output_index"].as_u64().expect("every event has one") as usize;
            prop_assert_eq!(index + 1, seen.len() + usize::from(index == seen.len()));
            let kind = event["type"].as_str().expect("a type");
            if kind == "response.output_item.added" {
                seen.push(Seen::default());
                seen[index].n_added += 1;
            }
            let now = &mut seen[index];
            if kind.ends_with(".delta") {
                now.deltas.push_str(event["delta"].as_str().expect("a delta"));
                now.n_logprobs += event["logprobs"].as_array().map_or(0, Vec::len);
            } else if kind.ends_with("_text.done") {
                prop_assert_eq!(&event["text"], &now.deltas);
                let n_logprobs = event["logprobs"].as_array().map_or(0, Vec::len);
                prop_assert_eq!(n_logprobs, now.n_logprobs);
            } else if kind.ends_with("arguments.done") {
                prop_assert_eq!(&event["arguments"], &now.deltas);
            } else if kind == "response.output_item.done" {
                now.n_done += 1;
                let item = serde_json::to_value(&answer.items()[index]).expect("JSON");
                prop_assert_eq!(&event["item"], &item);
                let is_last = index + 1 == answer.items().len();
                let status = if is_last { "incomplete" } else { "completed" };
                prop_assert_eq!(&item["status"], status);
            }
        }
        prop_assert!(seen.iter().all(|seen| seen.n_added == 1 && seen.n_done == 1));
        prop_assert_eq!(seen.len(), answer.items().len());
        let mut silent = Answer::new("x".to_owned());
        push_all(&mut silent, &parts, None);
        prop_assert_eq!(
            serde_json::to_value(silent.items()).expect("JSON"),
            serde_json::to_value(answer.items()).expect("JSON")
        );
        let said: String = parts.iter().filter_map(|(part, _)| match part {
            Part::Text(text) => Some(text.as_str()),
            _ => None,
        }).collect();
        let told: String = events
            .iter()
            .filter(|event| event["type"] == "response.output_text.delta")
            .map(|event| event["delta"].as_str().expect("a delta"))
            .collect();
        prop_assert_eq!(said, told);
    }
}
