//! `/v1/native/tokenize` and `/detokenize` over the byte vocabulary.

use super::{TestServer, wait_for};
use crate::fake::Alphabet;
use crate::native::GENERATE;
use serde_json::json;
use std::sync::Arc;

#[test]
fn tokenize_and_detokenize_need_no_slot() {
    // The only slot is taken and the queue is full: the scheduler would refuse anything.
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(Arc::clone(&runtime), |config| {
        config.executor.max_queue_depth = 0;
    });
    let mut busy = server.client();
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    busy.send("POST", GENERATE, &[], &body);
    wait_for("the job", || runtime.n_active() == 1);
    let mut client = server.client();
    assert_eq!(client.post(GENERATE, &json!({"prompt": "a"})).status, 503);
    for (path, body, expected) in [
        (
            "tokenize",
            json!({"text": "hé"}),
            json!({"model": "test/model", "count": 3, "context_length": 256,
                "tokens": [104, 195, 169]}),
        ),
        (
            "tokenize",
            json!({"text": "\u{e9}<|eos|>", "with_pieces": true, "model": "alias"}),
            json!({"model": "test/model", "count": 3, "context_length": 256,
                "tokens": [195, 169, 257], "pieces": [
                {"token": 195, "text": "\u{fffd}", "bytes": [195], "special": false},
                {"token": 169, "text": "\u{fffd}", "bytes": [169], "special": false},
                {"token": 257, "text": "<|eos|>", "bytes": b"<|eos|>", "special": true},
            ]}),
        ),
        (
            "tokenize",
            json!({"text": "<|eos|>", "parse_special": false}),
            json!({"model": "test/model", "count": 7, "context_length": 256,
                "tokens": b"<|eos|>"}),
        ),
        (
            "tokenize",
            json!({"text": ""}),
            json!({"model": "test/model", "count": 0, "context_length": 256, "tokens": []}),
        ),
        (
            "tokenize",
            json!({"messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": false}),
            json!({"model": "test/model", "count": 7, "context_length": 256,
                "tokens": b"user:a;"}),
        ),
        (
            "detokenize",
            json!({"tokens": [104, 195, 169, 257]}),
            json!({"model": "test/model", "text": "hé<|eos|>", "lossy": false}),
        ),
        (
            "detokenize",
            json!({"tokens": [195, 257, 104], "skip_special": true}),
            json!({"model": "test/model", "text": "\u{fffd}h", "lossy": true,
                "bytes": [195, 104]}),
        ),
        (
            "detokenize",
            json!({"tokens": []}),
            json!({"model": "test/model", "text": "", "lossy": false}),
        ),
    ] {
        let answer = client.post(&format!("/v1/native/{path}"), &body);
        assert_eq!((answer.status, answer.json()), (200, expected), "{body}");
    }
    for (path, body, param) in [
        ("tokenize", json!({}), "text"),
        ("tokenize", json!({"text": "a", "messages": []}), "text"),
        ("tokenize", json!({"text": 1}), "text"),
        (
            "tokenize",
            json!({"text": "a", "add_special": 1}),
            "add_special",
        ),
        ("tokenize", json!({"prompt": "a"}), "prompt"),
        (
            "tokenize",
            json!({"messages": [{"role": "user", "content": "a"}], "add_special": true}),
            "add_special",
        ),
        ("detokenize", json!({}), "tokens"),
        ("detokenize", json!({"tokens": [260]}), "tokens"),
        ("detokenize", json!({"tokens": ["a"]}), "tokens"),
        ("detokenize", json!({"tokens": "a"}), "tokens"),
        (
            "detokenize",
            json!({"tokens": [1], "with_pieces": true}),
            "with_pieces",
        ),
    ] {
        let answer = client.post(&format!("/v1/native/{path}"), &body);
        let error = answer.json()["error"].clone();
        assert_eq!(
            (answer.status, error["param"].as_str()),
            (400, Some(param)),
            "{body}: {error}"
        );
    }
    runtime.run_out();
    assert_eq!(busy.read_answer().status, 200);
}
