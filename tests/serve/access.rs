//! Keys on the command line, addresses that others reach, and the line that each request leaves in the log.

use super::{Serve, command, endless, failure, tiny};
use crate::client::Client;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

const SECRET: &str = "a very secret question";

/// Starts a server whose log goes to a file, asks, stops it; the log.
fn log_of(extra: &[&str], ask: impl FnOnce(&mut Client)) -> String {
    log_of_model(&tiny(), extra, ask)
}

fn log_of_model(model: &Path, extra: &[&str], ask: impl FnOnce(&mut Client)) -> String {
    let thread = format!("{:?}", std::thread::current().id());
    let name = format!("tinyloop-log-{}-{thread}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let file = File::create(&path).expect("the temporary folder takes it");
    let mut server = Serve::start_with(command(model, extra).stderr(Stdio::from(file)));
    ask(&mut server.client());
    server.signal("TERM");
    assert!(server.exit().success());
    let text = std::fs::read_to_string(&path).expect("text");
    std::fs::remove_file(&path).expect("removed");
    text
}

fn question(model: &str) -> String {
    json!({"model": model, "prompt": SECRET, "max_tokens": 3, "ignore_eos": true}).to_string()
}

fn lines(log: &str) -> Vec<Value> {
    let parsed = log
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let access = parsed.filter(|line: &Value| line["target"] == "tinyloop::access");
    access.collect()
}

#[test]
fn each_request_leaves_one_json_line_without_its_text() {
    let extra = ["--log-format", "json", "--api-key", "k", "--loops", "1"];
    let log = log_of(&extra, |client| {
        let headers = [("x-api-key", "k"), ("x-request-id", "mine")];
        for _ in 0..2 {
            client.send("POST", "/v1/completions", &headers, &question("tiny_llama"));
            assert_eq!(client.read_answer().status, 200);
        }
        client.send("POST", "/v1/completions", &headers, &question("none"));
        assert_eq!(client.read_answer().status, 404);
        assert_eq!(client.get("/v1/models").status, 401);
        assert_eq!(client.get("/health").status, 200);
    });
    assert!(!log.contains(SECRET) && !log.contains("secret"), "{log}");
    let mut lines = lines(&log);
    assert_eq!(lines.len(), 4, "probes leave none: {log}");
    // A line is written when its answer is out: the next request's may come before it.
    lines.sort_by_key(|line| line["status"].as_u64());
    let done = &lines[0];
    for (field, expected) in [
        ("id", json!("mine")),
        ("route", json!("completions")),
        ("key", json!("key-1")),
        ("model", json!("tiny_llama")),
        ("replica", json!(0)),
        ("state", json!("done")),
        ("status", json!(200)),
        ("stream", json!(false)),
        ("completion_tokens", json!(3)),
        ("cached_tokens", json!(0)),
        ("loops", json!(1.0)),
        ("reason", json!("ok")),
    ] {
        assert_eq!(done[field], expected, "{field}: {done}");
    }
    assert!(done["prompt_tokens"].as_u64() > Some(3), "{done}");
    let ms = |field: &str| {
        done[field]
            .as_f64()
            .unwrap_or_else(|| panic!("{field}: {done}"))
    };
    assert!(
        ms("queue_ms") <= ms("ttft_ms") && ms("ttft_ms") <= ms("total_ms"),
        "{done}"
    );
    assert!(done.get("body").is_none());
    let (refused, unknown) = (&lines[2], &lines[3]);
    assert_eq!(
        (&unknown["reason"], &unknown["state"], &unknown["key"]),
        (
            &json!("model_not_found"),
            &json!("refused"),
            &json!("key-1")
        )
    );
    assert_eq!(
        (&refused["status"], &refused["reason"], refused.get("key")),
        (&json!(401), &json!("invalid_api_key"), None)
    );
}

/// Who leaves in the middle: the line tells what was computed.
#[test]
fn case_15_the_log_counts_what_an_abandoned_answer_used() {
    let extra = ["--log-format", "json", "--ctx-size", "262144"];
    let log = log_of_model(&endless(), &extra, |client| {
        let body =
            json!({"prompt": SECRET, "max_tokens": 200_000, "ignore_eos": true, "stream": true});
        client.send("POST", "/v1/completions", &[], &body.to_string());
        assert_eq!(client.read_head().status, 200);
        for _ in 0..3 {
            assert!(client.read_chunk().is_some());
        }
    });
    let lines = lines(&log);
    let [line] = lines.as_slice() else {
        panic!("{log}");
    };
    assert_eq!(
        (&line["state"], &line["status"]),
        (&json!("cancelled"), &json!(499))
    );
    assert_eq!(line["reason"], "client_closed_request");
    assert!(line["prompt_tokens"].as_u64() > Some(3), "{line}");
    let n_tokens = line["completion_tokens"].as_u64().expect("a count");
    assert!((3..200_000).contains(&n_tokens), "{line}");
    assert!(
        line["ttft_ms"].as_f64() <= line["total_ms"].as_f64(),
        "{line}"
    );
}

#[test]
fn bodies_are_shown_when_asked_for_and_cut() {
    let log = log_of(&["--log-format", "json", "--log-prompts"], |client| {
        let long = json!({"prompt": "x".repeat(5000), "max_tokens": 1}).to_string();
        for body in [question(""), long] {
            client.send("POST", "/v1/completions", &[], &body);
            client.read_answer();
        }
    });
    let lines = lines(&log);
    // A line is written when its answer is out, so that the second request's may come first.
    let mut bodies: Vec<&str> = lines
        .iter()
        .map(|line| line["body"].as_str().expect("a text"))
        .collect();
    bodies.sort_unstable_by_key(|body| body.len());
    assert!(bodies[0].contains(SECRET), "{log}");
    assert!(
        bodies[1].len() < 1100 && bodies[1].ends_with(" bytes)"),
        "{log}"
    );
}

#[test]
fn what_no_worker_sees_leaves_a_line_too() {
    let log = log_of(&["--log-format", "json"], |client| {
        let head = "POST /v1/completions?secret HTTP/1.1\r\nHost: h\r\n";
        client.send_raw(&format!("{head}Content-Length: 99999999999\r\n\r\n"));
        let answer = client.read_answer();
        assert_eq!(answer.status, 413);
        assert!(answer.header("x-request-id").is_some());
    });
    let lines = lines(&log);
    let [line] = lines.as_slice() else {
        panic!("{log}");
    };
    assert_eq!(
        (&line["status"], &line["reason"], &line["state"]),
        (&json!(413), &json!("request_too_large"), &json!("refused"))
    );
    assert_eq!(line["path"], "/v1/completions");
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn text_lines_carry_the_same_fields() {
    let log = log_of(&[], |client| {
        client.send("POST", "/v1/completions", &[], &question(""));
        assert_eq!(client.read_answer().status, 200);
    });
    let line = log
        .lines()
        .find(|line| line.contains("request id="))
        .expect("a line");
    for field in [
        "model=tiny_llama",
        "replica=0",
        "state=\"done\"",
        "status=200",
        "reason=\"ok\"",
    ] {
        assert!(line.contains(field), "{field}: {line}");
    }
    assert!(!log.contains(SECRET));
}

#[test]
fn an_address_that_others_reach_needs_a_key_or_a_word() {
    let open = ["--host", "0.0.0.0"];
    let (code, out, err) = failure(&mut command(&tiny(), &open));
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.contains("[keys.NAME]") && err.contains("--insecure-no-auth"),
        "{err}"
    );
    for way_out in [
        ["--insecure-no-auth", "--no-prefix-cache"],
        ["--api-key", "k"],
    ] {
        let extra = [open, way_out].concat();
        let mut server = Serve::start(&mut command(&tiny(), &extra));
        server.signal("TERM");
        assert!(server.exit().success());
    }
    let mut by_environment = command(&tiny(), &open);
    by_environment.env("TINYLOOP_API_KEY", "one, two");
    let server = Serve::start(&mut by_environment);
    let mut client = server.client();
    for (key, status) in [("one", 200), ("two", 200), ("three", 401)] {
        client.send("GET", "/v1/models", &[("x-api-key", key)], "");
        assert_eq!(client.read_answer().status, status, "{key}");
    }
}

#[test]
fn a_new_key_is_shown_once_with_the_lines_to_configure_it() {
    let binary = env!("CARGO_BIN_EXE_tinyloop");
    let output = Command::new(binary).args(["key", "new", "alice"]).output();
    let output = output.expect("it runs");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("text");
    let secret = text
        .lines()
        .find_map(|line| line.strip_prefix("secret, shown this once: "));
    let hash = text.lines().find_map(|line| line.strip_prefix("key = "));
    let hash = hash.expect("a hash").trim_matches('"');
    assert!(
        text.contains("[keys.alice]") && text.contains(&format!("alice {hash}")),
        "{text}"
    );
    let mut server = Serve::start(&mut command(&tiny(), &["--api-key", hash]));
    let bearer = format!("Bearer {}", secret.expect("a secret"));
    let mut client = server.client();
    client.send("GET", "/v1/models", &[("authorization", &bearer)], "");
    assert_eq!(client.read_answer().status, 200);
    server.signal("TERM");
    assert!(server.exit().success());
    let bad = Command::new(binary).args(["key", "new", "a b"]).output();
    assert_eq!(bad.expect("it runs").status.code(), Some(2));
}
