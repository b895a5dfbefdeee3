//! What a server does wrong, and what becomes of it: scripted answers on real sockets.

use crate::scripted::{Script, Scripted, delta, ending, status, stream};
use crate::support::{Ended, chat, remote, submit, wait_for};
use serde_json::json;
use std::io::Write;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, OnceLock};
use tinyloop::config::{Dialect, OpenaiRemoteConfig};
use tinyloop::request::{FinishReason, RequestError, UpstreamFault};
use tinyloop::runtime::Runtime;
use tinyloop::runtime::openai_remote;
use tinyloop::runtime::upstream::call::Server;
use tinyloop::runtime::upstream::client::{Client, Secret};
use tinyloop::runtime::upstream::pool::Upstream;
use tinyloop::runtime::upstream::{Room, UpstreamRuntime};

const KEY: &str = "sk-verysecret-0123456789";

fn config(server: &Scripted, limits: &str) -> OpenaiRemoteConfig {
    let extra = format!("health_path = \"\"\nlimits = {{ {limits} }}\n");
    remote(server.address, &extra)
}

/// One job against these scripts; its end, the requests that came, whether the runtime still lives.
fn play(scripts: Vec<Script>, limits: &str) -> (Ended, Vec<String>, bool) {
    let server = Scripted::start(scripts);
    let runtime = openai_remote::open("far", &config(&server, limits), 0).expect("opens");
    let ended = submit(&runtime, chat("hello", json!({"max_tokens": 9}))).finish();
    let is_alive = runtime.status().alive;
    runtime.shutdown();
    (ended, server.finish(), is_alive)
}

fn answer() -> Script {
    Script::Bytes(stream(&format!(
        "{}{}{}",
        delta("he"),
        delta("llo"),
        ending()
    )))
}

#[track_caller]
fn is_upstream_error(ended: &Ended, fault: UpstreamFault) -> String {
    match &ended.end {
        Err(RequestError::Upstream { fault: found, text }) if *found == fault => text.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sound_answer() {
    let (ended, requests, is_alive) = play(vec![answer()], "");
    let (reason, usage) = ended.end.expect("ends well");
    assert_eq!(
        (ended.text.as_str(), ended.n_pieces, reason),
        ("hello", 2, FinishReason::Stop)
    );
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 2));
    assert!(is_alive);
    assert!(requests[0].starts_with("POST /v1/chat/completions HTTP/1.1\r\n"));
    let body = requests[0].split("\r\n\r\n").nth(1).expect("a body");
    let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
    let expected = json!({
        "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "model": "there",
        "stream": true, "stream_options": {"include_usage": true},
    });
    assert_eq!(body, expected);
    assert!(!requests[0].to_lowercase().contains("authorization"));
}

#[test]
fn what_a_second_try_mends_is_tried_again() {
    for broken in [
        Script::Closed,
        Script::Bytes(Vec::new()),
        Script::Bytes(stream("")),
        status("502 Bad Gateway", "", "<html>"),
        status("503 Service Unavailable", "retry-after: 0\r\n", "{}"),
        status("429 Too Many Requests", "retry-after: 0\r\n", "{}"),
    ] {
        let (ended, _, is_alive) = play(vec![broken.clone(), answer()], "");
        assert!(ended.end.is_ok(), "{broken:?}: {ended:?}");
        assert_eq!(ended.text, "hello", "{broken:?}");
        assert!(is_alive);
    }
}

#[test]
fn what_it_would_not_mend_is_not() {
    let overloaded = |ms| RequestError::Overloaded {
        retry_after_ms: Some(ms),
    };
    let full = status("429 Too Many Requests", "retry-after: 100\r\n", "{}");
    let (ended, _, is_alive) = play(vec![full], "");
    assert_eq!(ended.end, Err(overloaded(100_000)));
    assert!(is_alive);
    let body = "{\"error\": {\"message\": \"max_tokens is too large\"}}";
    let (ended, _, is_alive) = play(vec![status("400 Bad Request", "", body)], "");
    let expected = "the upstream refuses the request: max_tokens is too large";
    assert_eq!(ended.end, Err(RequestError::Invalid(expected.to_owned())));
    assert!(is_alive);
    for line in ["500 Internal Server Error", "404 Not Found", "302 Found"] {
        let elsewhere = "location: http://127.0.0.1:9/v1\r\n";
        let (ended, requests, is_alive) = play(vec![status(line, elsewhere, body)], "");
        let text = is_upstream_error(&ended, UpstreamFault::Error);
        assert!(
            text.contains(&line[..3]) && !text.contains("too large"),
            "{text}"
        );
        assert_eq!(requests.len(), 1);
        assert!(is_alive);
    }
}

#[test]
fn as_often_as_configured_and_then_an_end() {
    let busy = || status("503 Service Unavailable", "retry-after: 0\r\n", "{}");
    let (ended, requests, is_alive) = play(vec![busy(), busy()], "retries = 1");
    let end = RequestError::Overloaded {
        retry_after_ms: Some(0),
    };
    assert_eq!((ended.end, requests.len(), is_alive), (Err(end), 2, true));
}

#[test]
fn behind_a_token_nothing_is_repeated() {
    let cut = Script::Bytes(stream(&delta("he")));
    let (ended, requests, is_alive) = play(vec![cut], "");
    assert_eq!((ended.text.as_str(), requests.len()), ("he", 1));
    assert!(
        matches!(ended.end, Err(RequestError::ReplicaLost(_))),
        "{ended:?}"
    );
    assert!(is_alive);
    let told = format!(
        "{}data: {{\"error\": {{\"message\": \"boom\"}}}}\n\n",
        delta("he")
    );
    let (ended, ..) = play(vec![Script::Bytes(stream(&told))], "");
    let text = is_upstream_error(&ended, UpstreamFault::Error);
    assert!(!text.contains("boom"), "{text}");
}

#[test]
fn nonsense_is_an_error() {
    let json = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    for script in [
        Script::Bytes(b"no HTTP at all\r\n\r\n".to_vec()),
        Script::Bytes(json.as_bytes().to_vec()),
        Script::Bytes(stream("data: {]\n\n")),
        Script::Bytes(stream("data: \u{1F600}\n\n")),
        Script::Bytes([stream("data: "), vec![0xff, b'\n', b'\n']].concat()),
    ] {
        let (ended, ..) = play(vec![script.clone()], "retries = 0");
        assert!(
            matches!(ended.end, Err(RequestError::Upstream { .. })),
            "{script:?}: {ended:?}"
        );
    }
}

#[test]
fn counts_and_done_may_be_missing() {
    let end = "data: {\"choices\": [{\"delta\": {}, \"finish_reason\": \"length\"}]}\n\n";
    let script = Script::Bytes(stream(&format!("{}{}{end}", delta("a"), delta("b"))));
    let (ended, ..) = play(vec![script], "");
    let (reason, usage) = ended.end.expect("ends well");
    assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, 2));
    assert_eq!(usage.prompt_tokens, 2, "a guess from `user` and `hello`");
}

#[test]
fn silence_is_a_timeout_before_and_between_tokens() {
    let quick = "first_token_timeout_s = 0.2, idle_timeout_s = 0.2";
    let pings = format!("{}: ping\n\n: ping\n\n", delta(""));
    for (script, text) in [
        (Script::ThenSilence(Vec::new()), ""),
        (Script::ThenSilence(stream("")), ""),
        (Script::ThenSilence(stream(&pings)), ""),
        (Script::ThenSilence(stream(&delta("he"))), "he"),
    ] {
        let (ended, requests, is_alive) = play(vec![script.clone()], quick);
        is_upstream_error(&ended, UpstreamFault::Timeout);
        assert_eq!(
            (ended.text.as_str(), requests.len()),
            (text, 1),
            "{script:?}"
        );
        assert!(is_alive);
    }
}

/// The read that waits for a token ends, and the server sees the connection close.
#[test]
fn a_cancel_takes_effect_while_nothing_comes() {
    for script in [
        Script::ThenSilence(Vec::new()),
        Script::ThenSilence(stream(&delta("he"))),
    ] {
        let server = Scripted::start(vec![script]);
        let runtime = openai_remote::open("far", &config(&server, ""), 0).expect("opens");
        let job = submit(&runtime, chat("hello", json!({})));
        let request = server.requests.recv().expect("it asks");
        assert!(request.contains("hello"));
        runtime.cancel(job.id);
        assert_eq!(job.finish().end, Err(RequestError::Cancelled));
        server.finish(); // returns when the connection was closed
        assert!(runtime.status().alive);
    }
}

#[test]
fn who_is_not_there_is_lost_after_so_many_tries() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.local_addr().expect("it has an address")
    };
    let open = |extra: &str| openai_remote::open("far", &remote(address, extra), 0);
    let why = open("").err().expect("the health check finds nobody");
    assert!(why.contains(&address.to_string()), "{why}");
    let runtime = open("health_path = \"\"\nlimits = { retries = 1 }").expect("nothing is asked");
    let ended = submit(&runtime, chat("hello", json!({}))).finish();
    assert!(
        matches!(ended.end, Err(RequestError::ReplicaLost(_))),
        "{ended:?}"
    );
    assert!(runtime.status().alive, "two failures of three");
    let second = submit(&runtime, chat("hello", json!({})));
    assert!(matches!(
        second.finish().end,
        Err(RequestError::ReplicaLost(_))
    ));
    assert!(!runtime.status().alive);
}

/// Everything that was logged in this process.
fn log() -> &'static Arc<Mutex<Vec<u8>>> {
    static LOG: OnceLock<Arc<Mutex<Vec<u8>>>> = OnceLock::new();
    LOG.get_or_init(|| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let writer = Arc::clone(&log);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || Tee(Arc::clone(&writer)))
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("set once");
        log
    })
}

struct Tee(Arc<Mutex<Vec<u8>>>);

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no writer panics").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Servers repeat keys in their errors. Ours is sent, and then it is in no error and in no log.
#[test]
fn the_key_is_sent_and_never_told() {
    let log = log();
    let body = format!("{{\"error\": {{\"message\": \"the key {KEY} is not good\"}}}}");
    let told = format!("data: {}\n\n", body);
    let server = Scripted::start(vec![
        status("401 Unauthorized", "", &body),
        status("400 Bad Request", "", &body),
        status("500 Internal Server Error", "", &body),
        Script::Bytes(stream(&told)),
    ]);
    let config = config(&server, "retries = 0, failures_max = 9");
    let key = Some(Secret::new(KEY));
    let url = format!("http://{}/v1", server.address);
    let upstream = Server {
        client: Client::new(&url, key, None, &config.limits).expect("sound"),
        model: "there".to_owned(),
        dialect: Dialect::Openai,
        limits: config.limits.clone(),
    };
    let room = Room {
        max_inflight: 1,
        context_length: 100,
    };
    let runtime = UpstreamRuntime::remote(Upstream::new("far", upstream, 1), room, true);
    assert!(runtime.asks_consent());
    for _ in 0..4 {
        let error = submit(&runtime, chat("hello", json!({}))).finish().end;
        let text = format!("{error:?} {}", error.clone().unwrap_err());
        assert!(!text.contains("verysecret"), "{text}");
    }
    runtime.shutdown();
    for request in server.finish() {
        assert!(
            request.contains(&format!("authorization: Bearer {KEY}")),
            "{request}"
        );
    }
    wait_for("the log", || {
        let log = log.lock().expect("no writer panics");
        String::from_utf8_lossy(&log).contains("is not good")
    });
    let log = String::from_utf8_lossy(&log.lock().expect("no writer panics")).into_owned();
    assert!(!log.contains("verysecret"), "the key is in the log");
    assert!(
        log.contains("the key [key] is not good"),
        "what happened is in it"
    );
}
