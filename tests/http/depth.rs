//! Depth per request: asked in the body or the model's name, told in the header, and real.

use super::TestServer;
use super::real_engine::{serve_tiny, start_with};
use crate::shared::with;
use serde_json::{Value, json};
use tinyloop::config::{EngineConfig, ExecutorConfig, LoopsConfig};

/// The tiny model with a core that runs 2 loops by default, 4 at most.
pub(crate) fn looped() -> TestServer {
    start_with(LoopsConfig {
        layers: Some([0, 1]),
        default: Some(2),
        max: Some(4),
    })
}

fn body(extra: &Value) -> String {
    with(
        json!({
            "model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0,
            "ignore_eos": true,
        }),
        extra,
    )
    .to_string()
}

/// The text and the depth that the header tells.
#[track_caller]
fn ask(server: &TestServer, extra: &Value) -> (String, String) {
    let mut client = server.client();
    client.send("POST", "/v1/completions", &[], &body(extra));
    let answer = client.read_answer();
    assert_eq!(answer.status, 200, "{extra}: {}", answer.json());
    let loops = answer.header("x-tinyloop-loops").expect("the depth");
    let text = answer.json()["choices"][0]["text"]
        .as_str()
        .map(str::to_owned);
    (text.expect("a text"), loops.to_owned())
}

#[test]
fn a_request_chooses_its_depth_in_the_body_or_the_model_name() {
    let server = looped();
    let texts: Vec<String> = (1..=4)
        .map(|loops| {
            let (text, told) = ask(&server, &json!({"loops": loops}));
            assert_eq!(told, loops.to_string());
            let named = ask(&server, &json!({"model": format!("tiny@{loops}")}));
            assert_eq!(named, (text.clone(), told));
            text
        })
        .collect();
    assert!(texts.windows(2).any(|pair| pair[0] != pair[1]), "{texts:?}");
    assert_eq!(ask(&server, &json!({})), (texts[1].clone(), "2".to_owned()));

    // All depths at once share passes and say what each said alone.
    std::thread::scope(|scope| {
        let (server, texts) = (&server, &texts);
        for round in 0..3 {
            for loops in 1..=4 {
                scope.spawn(move || {
                    let found = ask(server, &json!({"loops": loops, "cache_prompt": false}));
                    assert_eq!(found.0, texts[loops - 1], "{loops} loops, round {round}");
                });
            }
        }
    });
}

#[test]
fn a_depth_out_of_range_is_a_400_that_says_the_range() {
    let server = looped();
    for (extra, param) in [
        (json!({"loops": 5}), "loops"),
        (json!({"loops": 0}), "loops"),
        (json!({"model": "tiny@5"}), "model"),
        (json!({"model": "tiny@3", "loops": 2}), "loops"),
        (json!({"loops": 1, "min_loops": 2}), "min_loops"),
    ] {
        let mut client = server.client();
        client.send("POST", "/v1/completions", &[], &body(&extra));
        let answer = client.read_answer();
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (400, Some(param))
        );
    }
    let mut client = server.client();
    client.send("POST", "/v1/completions", &[], &body(&json!({"loops": 9})));
    let message = client.read_answer().json()["error"]["message"].to_string();
    assert!(message.contains("1 to 4"), "{message}");
    client.send(
        "POST",
        "/v1/completions",
        &[],
        &body(&json!({"model": "other@2"})),
    );
    assert_eq!(client.read_answer().status, 404);
}

#[test]
fn depth_counts_in_the_room_that_a_request_needs() {
    let engine = EngineConfig {
        context_length: Some(128),
        max_sequences: 1,
        kv_tokens: Some(128), // at the default depth
        max_rows: 16,
        loops: LoopsConfig {
            layers: Some([0, 1]),
            default: Some(2),
            max: Some(4),
        },
        ..EngineConfig::default()
    };
    let server = serve_tiny(ExecutorConfig::default(), engine, |_| {});
    let answer = |loops: u32, max_tokens: u32| {
        let body = body(&json!({"loops": loops, "max_tokens": max_tokens}));
        let mut client = server.client();
        client.send("POST", "/v1/completions", &[], &body);
        client.read_answer()
    };
    assert_eq!(answer(2, 100).status, 200);
    assert_eq!(answer(4, 40).status, 200);
    let refused = answer(4, 100);
    assert_eq!(refused.status, 400, "{}", refused.json());
    assert_eq!(refused.header("x-should-retry"), Some("false"));
    assert_eq!(refused.header("x-tinyloop-rejected"), Some("kv_too_small"));
    assert_eq!(refused.json()["error"]["capacity_tokens"], 128);
}
