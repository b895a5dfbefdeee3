//! Keys and what they allow, through real sockets: models, priorities, requests and tokens per minute.

use super::TestServer;
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use serde_json::{Value, json};
use tinyloop::config::{Config, KeyConfig};
use tinyloop::http::auth;

const CHAT: &str = "/v1/chat/completions";

fn key(name: &str, change: impl FnOnce(&mut KeyConfig)) -> KeyConfig {
    let mut config = KeyConfig::new(name, format!("{name}-secret"));
    change(&mut config);
    config
}

fn start(keys: Vec<KeyConfig>) -> TestServer {
    TestServer::with(Alphabet::at_once(), |config| config.keys = keys)
}

fn ask(client: &mut Client, method: &str, path: &str, key: &str, body: &Value) -> Answer {
    let bearer = format!("Bearer {key}-secret");
    let text = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    client.send(method, path, &[("authorization", &bearer)], &text);
    client.read_answer()
}

fn question(max_tokens: u32) -> Value {
    json!({
        "model": "test/model", "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "hi"}],
    })
}

#[test]
fn a_model_that_a_key_may_not_use_does_not_exist_for_it() {
    let server = start(vec![
        key("all", |_| {}),
        key("some", |key| key.models = vec!["test/*".to_owned()]),
        key("none", |key| key.models = vec!["other-*".to_owned()]),
    ]);
    let mut client = server.client();
    let mut n_listed = |key| {
        let answer = ask(&mut client, "GET", "/v1/models?all=true", key, &Value::Null);
        answer.json()["data"].as_array().map(Vec::len)
    };
    assert_eq!(n_listed("all"), Some(1));
    assert_eq!(n_listed("some"), Some(1));
    assert_eq!(n_listed("none"), Some(0));
    for (key, status) in [("all", 200), ("some", 200), ("none", 404)] {
        let one = ask(&mut client, "GET", "/v1/models/alias", key, &Value::Null);
        let answer = ask(&mut client, "POST", CHAT, key, &question(2));
        assert_eq!((one.status, answer.status), (status, status), "{key}");
        let tokenize = json!({"model": "alias", "text": "x"});
        let tokens = ask(&mut client, "POST", "/v1/native/tokenize", key, &tokenize);
        assert_eq!(tokens.status, status, "{key}");
    }
    // The same words as for one that there is not.
    let mut refusal = |model: &str| {
        let body = json!({"model": model, "prompt": "x"});
        let answer = ask(&mut client, "POST", "/v1/completions", "none", &body);
        let message = answer.json()["error"]["message"]
            .as_str()
            .map(str::to_owned);
        message.expect("a message").replace(model, "M")
    };
    assert_eq!(refusal("test/model"), refusal("missing"));
}

#[test]
fn a_hashed_key_opens_to_its_secret() {
    let secret = auth::new_key().expect("random numbers");
    let server = start(vec![KeyConfig::new("a", auth::hashed(&secret))]);
    let mut client = server.client();
    for (given, status) in [(secret.clone(), 200), (auth::hashed(&secret), 401)] {
        client.send("GET", "/v1/models", &[("x-api-key", &given)], "");
        assert_eq!(client.read_answer().status, status);
    }
}

#[test]
fn requests_per_minute_are_counted_and_told_on_every_answer() {
    let server = start(vec![
        key("limited", |key| key.limits.requests_per_minute = Some(3)),
        key("free", |_| {}),
    ]);
    let mut client = server.client();
    let remaining = |answer: &Answer| {
        assert_eq!(answer.header("x-ratelimit-limit-requests"), Some("3"));
        assert!(answer.header("x-ratelimit-reset-requests").is_some());
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), None);
        let remaining = answer.header("x-ratelimit-remaining-requests");
        remaining
            .and_then(|text| text.parse::<u32>().ok())
            .expect("a number")
    };
    let list = ask(&mut client, "GET", "/v1/models", "limited", &Value::Null);
    assert_eq!(remaining(&list), 3, "looking costs nothing");
    let whole = ask(&mut client, "POST", CHAT, "limited", &question(2));
    assert_eq!((whole.status, remaining(&whole)), (200, 2));
    let mut body = question(2);
    body["stream"] = Value::from(true);
    let stream = ask(&mut client, "POST", CHAT, "limited", &body);
    assert_eq!((stream.status, remaining(&stream)), (200, 1));
    let faulty = ask(&mut client, "POST", CHAT, "limited", &json!({}));
    assert_eq!(
        (faulty.status, remaining(&faulty)),
        (400, 0),
        "faulty ones count"
    );
    let refused = ask(&mut client, "POST", CHAT, "limited", &question(2));
    assert_eq!((refused.status, remaining(&refused)), (429, 0));
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("rate_limit_error"), &json!("rate_limit_exceeded"))
    );
    assert_eq!(
        refused.header("x-tinyloop-rejected"),
        Some("rate_limit_exceeded")
    );
    let wait = refused
        .header("retry-after")
        .and_then(|text| text.parse::<u32>().ok());
    assert!(
        (1..=20).contains(&wait.expect("a number")),
        "a third of a minute at most"
    );
    let other = ask(&mut client, "POST", CHAT, "free", &question(2));
    assert_eq!(
        (other.status, other.header("x-ratelimit-limit-requests")),
        (200, None)
    );
}

#[test]
fn tokens_per_minute_are_reserved_and_corrected() {
    let limited = |key: &mut KeyConfig| key.limits.tokens_per_minute = Some(1000);
    let server = start(vec![key("limited", limited)]);
    let mut client = server.client();
    let remaining = |answer: &Answer| {
        let text = answer.header("x-ratelimit-remaining-tokens").expect("told");
        text.parse::<i64>().expect("a number")
    };
    // What was reserved for the longest answer and not used is there again: the prompt has 18 tokens.
    let body =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "stop": "c"});
    let answer = ask(&mut client, "POST", CHAT, "limited", &body);
    let used = answer.json()["usage"]["total_tokens"]
        .as_i64()
        .expect("a count");
    assert!(
        (999 - used..=1020 - used).contains(&remaining(&answer)),
        "{used}"
    );
    let mut n_asked = 1;
    let refused = loop {
        let answer = ask(&mut client, "POST", CHAT, "limited", &question(200));
        if answer.status != 200 {
            break answer;
        }
        n_asked += 1;
        assert!(n_asked < 20);
    };
    assert_eq!(refused.status, 429);
    assert!(
        refused.json()["error"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("tokens"))
    );
    assert!(refused.header("retry-after").is_some());
    // A prompt that is more than a minute's worth: no retry helps.
    let server = start(vec![key("tiny", |key| {
        key.limits.tokens_per_minute = Some(5)
    })]);
    let mut client = server.client();
    let hopeless = ask(&mut client, "POST", CHAT, "tiny", &question(1));
    assert_eq!(
        (hopeless.status, hopeless.header("x-should-retry")),
        (429, Some("false"))
    );
    assert_eq!(hopeless.header("retry-after"), None);
}

#[test]
fn a_key_has_its_priority_and_its_place_in_the_queue() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::with(std::sync::Arc::clone(&runtime), |config| {
        config.keys = vec![key("low", |key| {
            key.limits.max_priority = -3;
            key.limits.max_queued = Some(0);
        })];
    });
    let mut first = server.client();
    let headers = [("authorization", "Bearer low-secret"), ("x-priority", "50")];
    first.send("POST", CHAT, &headers, &question(2).to_string());
    super::wait_for("the job runs", || runtime.n_active() == 1);
    let mut client = server.client();
    let listed = ask(&mut client, "GET", "/v1/requests", "low", &Value::Null).json();
    assert_eq!(listed["data"][0]["priority"], -3);
    let refused = ask(&mut client, "POST", CHAT, "low", &question(2));
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status, &error["code"]), (429, &json!("slow_down")));
    assert_eq!(
        refused.header("x-tinyloop-rejected"),
        Some("key_queue_full")
    );
    assert!(refused.header("retry-after").is_some());
    runtime.run_out();
    assert_eq!(first.read_answer().status, 200);
}

#[test]
fn a_reload_reads_the_keys_again() {
    let server = start(vec![key("old", |_| {})]);
    let state = server.server().state();
    state.set_config_source(Box::new(|| {
        Ok(Config {
            keys: vec![key("new", |_| {})],
            ..Config::default()
        })
    }));
    let mut client = server.client();
    let mut status = |key| ask(&mut client, "GET", "/v1/models", key, &Value::Null).status;
    assert_eq!((status("old"), status("new")), (200, 401));
    let address = server.server().management_address().expect("it listens");
    let mut admin = Client::connect(address);
    admin.send("POST", "/v1/admin/reload", &[], "");
    let answer = admin.read_answer();
    assert_eq!(
        (answer.status, &answer.json()["keys"]),
        (200, &json!(1)),
        "{answer:?}"
    );
    assert_eq!((status("old"), status("new")), (401, 200));
}

/// Metrics tell of all models: a key for some of them has to ask elsewhere.
#[test]
fn metrics_are_not_for_keys_that_know_some_models_only() {
    let server = start(vec![
        key("all", |_| {}),
        key("some", |key| key.models = vec!["test/*".to_owned()]),
    ]);
    let mut client = server.client();
    let metrics = ask(&mut client, "GET", "/metrics", "all", &Value::Null);
    assert_eq!(metrics.status, 200);
    let refused = ask(&mut client, "GET", "/metrics", "some", &Value::Null);
    let error = refused.json()["error"].clone();
    assert_eq!(
        (refused.status, &error["type"]),
        (403, &json!("permission_error"))
    );
    assert!(!refused.json().to_string().contains("tinyloop_"));
    assert_eq!(client.get("/metrics").status, 401);
    let management = server.server().management_address().expect("it listens");
    assert_eq!(Client::connect(management).get("/metrics").status, 200);
}

/// A proxy in front may have looked at the other one.
#[test]
fn a_key_that_is_given_twice_is_in_doubt() {
    let server = start(vec![key("a", |_| {}), key("b", |_| {})]);
    let mut client = server.client();
    for (headers, status) in [
        (
            vec![
                ("authorization", "Bearer a-secret"),
                ("authorization", "Bearer a-secret"),
            ],
            400,
        ),
        (
            vec![
                ("authorization", "Bearer a-secret"),
                ("Authorization", "Bearer b-secret"),
            ],
            400,
        ),
        (
            vec![("x-api-key", "a-secret"), ("X-Api-Key", "b-secret")],
            400,
        ),
        (
            vec![
                ("authorization", "Bearer a-secret"),
                ("x-api-key", "b-secret"),
            ],
            400,
        ),
        (
            vec![
                ("authorization", "Bearer a-secret"),
                ("x-api-key", "a-secret"),
            ],
            200,
        ),
    ] {
        client.send("POST", CHAT, &headers, &question(2).to_string());
        let answer = client.read_answer();
        assert_eq!(answer.status, status, "{headers:?}: {}", answer.json());
    }
}

/// The name of a request may stand in the header or, as clients of vLLM and llama-server do it, in the body.
#[test]
fn a_request_is_named_by_its_header_or_its_body() {
    let server = start(Vec::new());
    let mut client = server.client();
    let mut named = |header: Option<&str>, body: Value| {
        let mut full = question(2);
        full["request_id"] = body;
        let headers: Vec<(&str, &str)> =
            header.map(|id| ("x-request-id", id)).into_iter().collect();
        client.send("POST", CHAT, &headers, &full.to_string());
        let answer = client.read_answer();
        let id = answer
            .header("x-request-id")
            .expect("always told")
            .to_owned();
        (answer.status, id)
    };
    let given = |id: &str| (200, id.to_owned());
    assert_eq!(named(None, json!("from-body")), given("from-body"));
    assert_eq!(
        named(Some("from-header"), Value::Null),
        given("from-header")
    );
    assert_eq!(
        named(Some("from-header"), json!("from-body")),
        given("from-header")
    );
    // A header that is no name is not an error, for proxies add their own; a field that is none is.
    let long = "x".repeat(200);
    let (status, id) = named(Some(&long), Value::Null);
    assert!(status == 200 && id.starts_with("req_"), "{id}");
    for bad in [json!(""), json!("a b"), json!(long), json!(7), json!("ü")] {
        let (status, id) = named(None, bad.clone());
        assert!(status == 400 && id.starts_with("req_"), "{bad} {id}");
    }
    let (_, fresh) = named(None, Value::Null);
    assert_ne!(fresh, named(None, Value::Null).1);
}
