//! What the web UI of llama-server asks, request by request, as a browser that ran it (a build of 2026-10)
//! was seen to send them: at the start, for an answer, to stop one, with all settings set.

use super::{TestServer, add_model, wait_for};
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::shared::with;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::{Config, ExecutorConfig};
use tinyloop::pool::Pool;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

const CHAT: &str = "/v1/chat/completions";

/// The body of every answer that it asks for.
fn question(extra: &Value) -> Value {
    let body = json!({
        "messages": [{"content": "What is the capital of France?", "role": "user"}],
        "return_progress": true, "sse_ping_interval": 1, "stream": true, "reasoning_format": "auto",
        "reasoning_control": true, "backend_sampling": false, "timings_per_token": true,
    });
    with(body, extra)
}

/// Every setting that its forms have, at the value that they show first.
fn settings() -> Value {
    json!({
        "temperature": 0.8, "max_tokens": -1, "dynatemp_range": 0, "dynatemp_exponent": 1,
        "top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0, "xtc_threshold": 0.1,
        "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "chat_template_kwargs": {"enable_thinking": true},
    })
}

fn ask(client: &mut Client, body: &Value) -> Answer {
    let headers = [
        ("content-type", "application/json"),
        ("x-conversation-id", "9bd58d84-3b1f-49ed-a841-9f081999d3a2"),
    ];
    client.send("POST", CHAT, &headers, &body.to_string());
    client.read_answer()
}

/// What it reads of a stream: text, the last timings, the model, whether it saw the end.
fn read(answer: &Answer) -> (String, Value, Value, bool) {
    assert_eq!(
        answer.status,
        200,
        "{}",
        String::from_utf8_lossy(&answer.body)
    );
    let (mut text, mut timings, mut model) = (String::new(), Value::Null, Value::Null);
    let mut is_over = false;
    for event in answer.events() {
        if event == "[DONE]" {
            is_over = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(&event).expect("JSON");
        let delta = chunk["choices"][0]["delta"]["content"].as_str();
        text.push_str(delta.unwrap_or_default());
        if chunk["timings"].is_object() {
            timings = chunk["timings"].clone();
        }
        model = chunk["model"].clone();
    }
    (text, timings, model, is_over)
}

#[test]
fn the_start_page_finds_what_it_reads() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    for query in ["", "?autoload=false", "?model=test%2Fmodel&autoload=false"] {
        let props = client.get(&format!("/props{query}"));
        assert_eq!(props.status, 200, "{query}");
        let props = props.json();
        assert!(props["role"].is_null(), "one model is no router: {props}");
        let defaults = &props["default_generation_settings"];
        assert!(defaults["n_ctx"].is_u64() && defaults["params"]["temperature"].is_number());
        assert!(props["total_slots"].is_u64() && props["model_path"].is_string());
        assert!(props["chat_template"].is_string() && props["build_info"].is_string());
        assert_eq!(
            props["modalities"],
            json!({"vision": false, "audio": false, "video": false})
        );
        assert!(props["ui_settings"].is_object());
    }
    let models = client.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "test/model");
    let slots = client.get("/slots?model=test%2Fmodel").json();
    assert!(slots.as_array().is_some_and(|slots| !slots.is_empty()));
    assert_eq!(slots[0]["is_processing"], false);
    // What there is not is said in a form that it reads: tools of the server, streams to come back to.
    for (method, path) in [
        ("GET", "/tools"),
        ("POST", "/tools"),
        ("POST", "/v1/streams/lookup"),
        ("GET", "/v1/stream?conv_id=x&from=0"),
        ("DELETE", "/v1/stream?conv_id=x"),
        ("POST", "/v1/chat/completions/control"),
    ] {
        client.send(method, path, &[], "{}");
        let answer = client.read_answer();
        assert_eq!(answer.status, 404, "{method} {path}");
        assert!(answer.json()["error"]["message"].is_string());
    }
}

#[test]
fn an_answer_has_text_timings_and_an_end_whatever_is_set() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    for extra in [
        json!({"max_tokens": 4, "seed": 0}),
        with(settings(), &json!({"max_tokens": 4, "seed": 0})),
        with(
            settings(),
            &json!({"max_tokens": 4, "seed": 0, "model": "test/model"}),
        ),
    ] {
        let (text, timings, model, is_over) = read(&ask(&mut client, &question(&extra)));
        assert_eq!((text.as_str(), is_over), ("abcd", true), "{extra}");
        assert_eq!(model, "test/model");
        assert_eq!(timings["predicted_n"], 4, "{timings}");
        for field in ["prompt_n", "prompt_ms", "predicted_ms", "cache_n"] {
            assert!(timings[field].is_number(), "{field}: {timings}");
        }
    }
    // Without a limit it goes to the end of the context.
    let (_, timings, _, _) = read(&ask(&mut client, &question(&settings())));
    assert!(timings["predicted_n"].as_u64() > Some(100), "{timings}");
    // "Continue", with the answer so far.
    let messages =
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]);
    let more = json!({"messages": messages, "continue_final_message": true,
        "add_generation_prompt": false, "max_tokens": 2, "seed": 0});
    assert_eq!(read(&ask(&mut client, &question(&more))).0, "ab");
    // It warms the cache for the next turn: the prompt is computed and nothing is said.
    let warm = json!({"messages": messages, "n_predict": 0, "stream": false});
    let answer = ask(&mut client, &warm);
    assert_eq!(answer.status, 200, "{}", answer.json());
    let choice = answer.json()["choices"][0].clone();
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!(""), &json!("length"))
    );
    // A title is asked for without thoughts.
    let title = json!({"chat_template_kwargs": {"enable_thinking": false}, "max_tokens": 3});
    assert!(read(&ask(&mut client, &question(&title))).3);
    // Thoughts cannot be cut after so many tokens, and that is not passed over.
    let budget = ask(
        &mut client,
        &question(&json!({"thinking_budget_tokens": 512})),
    );
    assert_eq!(budget.status, 400);
    assert_eq!(budget.json()["error"]["param"], "thinking_budget_tokens");
    // What it shows when a conversation has grown too long.
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(400)}]});
    let refused = ask(&mut client, &question(&long)).json();
    assert!(
        refused["error"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("context"))
    );
}

#[test]
fn a_warmed_prompt_is_found_again() {
    let server = crate::real_engine::start();
    let mut client = server.client();
    let text = "a conversation that is long enough to fill some blocks of the cache";
    let messages = json!([{"role": "user", "content": text}]);
    let warm = json!({"messages": messages, "n_predict": 0, "stream": false});
    let usage = ask(&mut client, &warm).json()["usage"].clone();
    assert_eq!(usage["completion_tokens"], 0, "{usage}");
    let (_, timings, _, _) = read(&ask(
        &mut client,
        &question(&json!({"messages": messages, "max_tokens": 2})),
    ));
    let n_prompt = usage["prompt_tokens"].as_u64();
    assert!(timings["cache_n"].as_u64() >= Some(16), "{timings}");
    let computed = timings["prompt_n"]
        .as_u64()
        .zip(timings["cache_n"].as_u64());
    assert_eq!(computed.map(|(new, old)| new + old), n_prompt);
}

#[test]
fn the_stop_button_frees_the_slot() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let mut client = server.client();
    client.send("POST", CHAT, &[], &question(&json!({})).to_string());
    wait_for("the job", || runtime.n_active() == 1);
    runtime.step();
    client.read_head();
    let slots = server.client().get("/slots").json();
    assert_eq!(slots[0]["is_processing"], true);
    // It asks the server to forget the stream, which there is not, and leaves.
    let mut other = server.client();
    other.send("DELETE", "/v1/stream?conv_id=x", &[], "");
    assert_eq!(other.read_answer().status, 404);
    drop(client);
    wait_for("the slot", || {
        runtime.n_active() == 0 && server.executor.snapshot().in_flight == 0
    });
    assert_eq!(runtime.n_cancelled(), 1);
}

#[test]
fn with_several_models_each_says_its_state_and_its_settings() {
    let metrics = Arc::new(Metrics::new());
    let pool = Arc::new(Pool::new(metrics));
    for names in [["one", "first"], ["two", "second"]] {
        add_model(
            &pool,
            names,
            Alphabet::at_once(),
            &ExecutorConfig::default(),
        );
    }
    let mut config = Config::default();
    config.server.port = 0;
    config.management.enabled = false;
    let server = Server::start(&config, pool).expect("the server starts");
    let mut client = Client::connect(server.address());
    let props = client.get("/props?autoload=false").json();
    assert_eq!(props["role"], "router");
    let models = client.get("/v1/models").json();
    let models = models["data"].as_array().expect("a list");
    assert_eq!(models.len(), 2);
    for model in models {
        // It shows no model at all where one of them has no state.
        assert_eq!(model["status"]["value"], "loaded", "{model}");
        let id = model["id"].as_str().expect("a name");
        let props = client
            .get(&format!("/props?model={id}&autoload=false"))
            .json();
        assert_eq!(
            (&props["model_alias"], &props["role"]),
            (&json!(id), &Value::Null)
        );
        let asked = question(&json!({"model": id, "max_tokens": 2, "seed": 0}));
        let (text, _, named, _) = read(&ask(&mut client, &asked));
        assert_eq!((text.as_str(), &named), ("ab", &json!(id)));
    }
    server.shutdown(Duration::ZERO);
}
