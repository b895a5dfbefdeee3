//! The exact text of answers: order of keys, spelling of numbers and escapes.
//!
//! Clients should not care, but caches, recordings and eyes do; so a change of it is on purpose.

use super::TestServer;
use crate::fake::Alphabet;
use crate::shared::with;
use serde_json::{Value, json};

/// Body or event without what differs from run to run: the id and the time.
fn timeless(text: &str) -> String {
    let value: Value = serde_json::from_str(text).expect("JSON");
    let id = value["id"].as_str().expect("an id");
    let created = format!("\"created\":{}", value["created"]);
    text.replace(id, "ID").replace(&created, "\"created\":0")
}

fn whole(path: &str, body: &Value) -> String {
    let server = TestServer::start(Alphabet::at_once());
    let answer = server.client().post(path, body);
    timeless(std::str::from_utf8(&answer.body).expect("UTF-8"))
}

/// All events but the last, `[DONE]`.
fn events(path: &str, body: &Value) -> Vec<String> {
    let server = TestServer::start(Alphabet::at_once());
    let mut events = server.client().post(path, body).events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| timeless(event)).collect()
}

fn chat(extra: &Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        extra,
    )
}

#[test]
fn a_whole_chat_answer() {
    let body = chat(&json!({"logprobs": true, "top_logprobs": 1}));
    assert_eq!(
        whole("/v1/chat/completions", &body),
        concat!(
            r#"{"id":"ID","object":"chat.completion","created":0,"model":"test/model","#,
            r#""system_fingerprint":"","choices":[{"index":0,"#,
            r#""message":{"role":"assistant","content":"a","refusal":null},"#,
            r#""logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"#,
            r#""top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]}]}],"refusal":null},"#,
            r#""finish_reason":"length"}],"#,
            r#""usage":{"prompt_tokens":18,"completion_tokens":1,"total_tokens":19,"#,
            r#""prompt_tokens_details":{"cached_tokens":0},"#,
            r#""completion_tokens_details":{"reasoning_tokens":0}}}"#,
        )
    );
}

#[test]
fn a_chat_stream() {
    let frame = |choices: &str, usage: &str| {
        format!(
            "{}{choices}{usage}}}",
            concat!(
                r#"{"id":"ID","object":"chat.completion.chunk","created":0,"#,
                r#""model":"test/model","system_fingerprint":"","choices":"#,
            )
        )
    };
    let opens = r#"[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]"#;
    let says = r#"[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]"#;
    let ends = r#"[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]"#;
    let plain = chat(&json!({"stream": true}));
    assert_eq!(
        events("/v1/chat/completions", &plain),
        [opens, says, ends].map(|choices| frame(choices, ""))
    );
    let counted = chat(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let null = r#","usage":null"#;
    let usage = concat!(
        r#","usage":{"prompt_tokens":18,"completion_tokens":1,"total_tokens":19,"#,
        r#""prompt_tokens_details":{"cached_tokens":0},"#,
        r#""completion_tokens_details":{"reasoning_tokens":0}}"#,
    );
    assert_eq!(
        events("/v1/chat/completions", &counted),
        [(opens, null), (says, null), (ends, null), ("[]", usage)]
            .map(|(choices, usage)| frame(choices, usage))
    );
}

#[test]
fn completion_chunks_with_logprobs_and_escapes() {
    let body = json!({
        "prompt": "\"\n", "max_tokens": 4, "echo": true, "stream": true, "logprobs": 2,
    });
    let events = events("/v1/completions", &body);
    let frame = |choice: &str| {
        let frame = r#"{"id":"ID","object":"text_completion","created":0,"model":"test/model","#;
        format!(r#"{frame}"system_fingerprint":"","choices":[{{"index":0,{choice}}}]}}"#)
    };
    let echo = concat!(
        r#""text":"\"\n","logprobs":{"tokens":["\"","\n"],"token_logprobs":[null,-0.5],"#,
        r#""top_logprobs":[null,{"\n":-0.5,"\u000b":-1.5}],"text_offset":[0,1]},"#,
        r#""finish_reason":null"#,
    );
    let impossible = concat!(
        r#""text":"d","logprobs":{"tokens":["d"],"token_logprobs":[-9999.0],"#,
        r#""top_logprobs":[{"d":-0.5,"e":-1.5}],"text_offset":[5]},"finish_reason":null"#,
    );
    let end = r#""text":"","logprobs":null,"finish_reason":"length""#;
    assert_eq!(events.len(), 6);
    for (index, choice) in [(0, echo), (4, impossible), (5, end)] {
        assert_eq!(events[index], frame(choice));
    }
}
