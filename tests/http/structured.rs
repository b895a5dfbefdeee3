//! Answers of a given form over HTTP, from the real engine: random weights, so nothing but the
//! grammar makes them sound.

use crate::TestServer;
use crate::client::Client;
use crate::real_engine::serve_tiny;
use crate::shared::with;
use serde_json::{Value, json};
use tinyloop::config::{EngineConfig, ExecutorConfig};

fn start() -> TestServer {
    serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {})
}

fn chat(extra: Value) -> Value {
    with(
        json!({
            "max_tokens": 200, "temperature": 0.8, "seed": 5,
            "messages": [{"role": "user", "content": "tell me"}],
        }),
        &extra,
    )
}

fn content(client: &mut Client, body: &Value) -> (String, String) {
    let answer = client.post("/v1/chat/completions", body);
    assert_eq!(
        answer.status,
        200,
        "{}",
        String::from_utf8_lossy(&answer.body)
    );
    let choice = answer.json()["choices"][0].clone();
    let text = choice["message"]["content"]
        .as_str()
        .expect("text")
        .to_owned();
    let reason = choice["finish_reason"]
        .as_str()
        .expect("a reason")
        .to_owned();
    (text, reason)
}

#[test]
fn every_family_gets_what_it_asked_for() {
    let server = start();
    let mut client = server.client();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok", "kind"],
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b", "c"]}}});
    for form in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"json_schema": schema}),
        json!({"guided_json": schema}),
        json!({"structured_outputs": {"json": schema}}),
    ] {
        let (text, reason) = content(&mut client, &chat(form.clone()));
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{form}: {text}: {e}"));
        assert!(
            value["ok"].is_boolean() && value.as_object().map(|o| o.len()) == Some(2),
            "{text}"
        );
        assert!(
            ["a", "b", "c"].iter().any(|kind| value["kind"] == *kind),
            "{text}"
        );
        assert_eq!(reason, "stop");
    }
    let (text, _) = content(&mut client, &chat(json!({"regex": "[0-9]{3}-[0-9]{4}"})));
    let (left, right) = text.split_once('-').expect("a dash");
    assert_eq!((left.len(), right.len()), (3, 4), "{text}");
    let (text, _) = content(&mut client, &chat(json!({"choice": ["north", "south"]})));
    assert!(text == "north" || text == "south", "{text}");
    for grammar in [
        "root ::= \"<\" [ab]{3} \">\"",
        "start: \"<\" /[ab]{3}/ \">\"",
    ] {
        let (text, _) = content(&mut client, &chat(json!({"grammar": grammar})));
        assert!(
            text.starts_with('<') && text.ends_with('>') && text.len() == 5,
            "{text}"
        );
    }
}

#[test]
fn a_stream_a_completion_and_several_choices_follow_the_form_too() {
    let server = start();
    let mut client = server.client();
    let form = json!({"regex": "(ab|cd){2,6}", "n": 3});
    let whole = client
        .post("/v1/chat/completions", &chat(form.clone()))
        .json();
    let mut body = chat(form);
    body["stream"] = json!(true);
    let mut texts = vec![String::new(); 3];
    for event in client.post("/v1/chat/completions", &body).events() {
        let Ok(chunk) = serde_json::from_str::<Value>(&event) else {
            continue; // [DONE]
        };
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(&whole["choices"][index]["message"]["content"], text);
        let pairs = text.as_bytes().chunks(2);
        assert!((2..=6).contains(&pairs.len()), "{text}");
        assert!(
            pairs.into_iter().all(|pair| pair == b"ab" || pair == b"cd"),
            "{text}"
        );
    }
    let body = json!({"prompt": "it is ", "choice": ["so", "not so"], "max_tokens": 50});
    let text = client.post("/v1/completions", &body).json()["choices"][0]["text"].clone();
    assert!(text == "so" || text == "not so", "{text}");
    let body =
        json!({"prompt": "it is ", "regex": "[xyz]{4}", "max_tokens": 50, "return_tokens": true});
    let answer = client.post("/v1/native/generate", &body).json();
    assert_eq!(answer["text"].as_str().map(str::len), Some(4), "{answer}");
    // Log-probabilities are those of every token, so none is forced.
    let form = json!({"choice": ["a rather long text"], "logprobs": true, "top_logprobs": 2});
    let answer = client.post("/v1/chat/completions", &chat(form)).json();
    let entries = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .expect("entries")
        .clone();
    let joined: String = entries
        .iter()
        .filter_map(|entry| entry["token"].as_str())
        .collect();
    assert_eq!(joined, "a rather long text");
}

#[test]
fn case_17_what_cannot_be_followed_is_refused_before_it_is_queued() {
    let server = start();
    let mut client = server.client();
    #[rustfmt::skip]
    let cases = [
        (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "thing"}}}}),
         "invalid_json_schema", "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}),
         "missing_required_parameter", "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "yaml"}}), "invalid_value", "response_format.type"),
        (json!({"guided_regex": "("}), "invalid_value", "guided_regex"),
        (json!({"grammar": "root ::= nothing"}), "invalid_value", "grammar"),
        (json!({"regex": "a", "grammar": "root ::= \"a\""}), "invalid_value", "regex"),
    ];
    for (form, code, param) in cases {
        let answer = client.post("/v1/chat/completions", &chat(form.clone()));
        assert_eq!(answer.status, 400, "{form}");
        let error = answer.json()["error"].clone();
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!(code), &json!(param)),
            "{error}"
        );
    }
    let score = json!({"prompt": "ab", "mode": "score", "regex": "a"});
    assert_eq!(client.post("/v1/native/generate", &score).status, 400);
    let counted = server.executor.metrics_text("");
    assert!(
        !counted.contains("tinyloop_requests_total{model=\"tiny\",outcome=\"done\"} 1"),
        "{counted}"
    );
    // And the engine lives.
    let (text, _) = content(&mut client, &chat(json!({"choice": ["fine"]})));
    assert_eq!(text, "fine");
}

#[test]
fn a_form_that_takes_too_long_is_cut_and_says_so() {
    let server = start();
    let mut body = chat(json!({"response_format": {"type": "json_object"}}));
    body["max_tokens"] = json!(1);
    let (text, reason) = content(&mut server.client(), &body);
    assert_eq!(reason, "length");
    assert!(text.starts_with('{'), "{text}");
}
