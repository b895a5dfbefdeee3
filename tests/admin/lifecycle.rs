//! Loading and unloading by the routes, alone and under load.

use super::{PATIENCE, TestServer, assert_error, echo, fake, prompt, wait_for};
use serde_json::{Value, json};
use std::time::Duration;

#[test]
fn a_model_is_loaded_and_unloaded_and_saying_it_twice_changes_nothing() {
    let server = TestServer::start(vec![echo("a")]);
    let refused = server.data().post("/v1/completions", &prompt("a", 1));
    assert_error(&refused, 503, "model_not_loaded");
    server.load("a");
    let again = server.post("/v1/admin/models/a/load", &Value::Null);
    assert_eq!(again.status, 200);
    assert_eq!(
        (&again.json()["state"], &again.json()["is_new"]),
        (&json!("loaded"), &json!(false))
    );
    assert_eq!(
        server
            .data()
            .post("/v1/completions", &prompt("a", 1))
            .status,
        200
    );
    for _ in 0..2 {
        let answer = server.post("/v1/admin/models/a/unload?wait_s=30", &json!({}));
        assert_eq!(
            (answer.status, &answer.json()["state"]),
            (200, &json!("unloaded"))
        );
    }
    let refused = server.data().post("/v1/completions", &prompt("a", 1));
    assert_error(&refused, 503, "model_not_loaded");
    server.load("a");
}

#[test]
fn unknown_models_and_wrong_methods() {
    let server = TestServer::start(vec![echo("a")]);
    for action in ["load", "unload"] {
        let answer = server.post(&format!("/v1/admin/models/no/{action}"), &Value::Null);
        assert_error(&answer, 404, "model_not_found");
        let answer = server.admin().get(&format!("/v1/admin/models/a/{action}"));
        assert_error(&answer, 405, "method_not_allowed");
    }
    let answer = server.post("/v1/admin/models/a", &Value::Null);
    assert_error(&answer, 405, "method_not_allowed");
    assert_error(&server.admin().get("/v1/admin/nothing"), 404, "unknown_url");
}

#[test]
fn a_load_on_its_way_is_seen_and_can_be_called_off() {
    let server = TestServer::start(vec![echo("slow")]);
    let load = "/v1/admin/models/slow/load";
    let first = server.post(load, &Value::Null);
    assert_eq!((first.status, &first.json()["is_new"]), (202, &json!(true)));
    wait_for("progress", || {
        server.row("slow")["load_progress"]["loaded_bytes"] == 250
    });
    let row = server.row("slow");
    assert_eq!(
        (&row["runtime_state"], &row["is_loaded"]),
        (&json!("loading"), &json!(false))
    );
    assert_eq!(row["load_progress"]["progress"], 0.25);
    let second = server.post(load, &Value::Null);
    assert_eq!(
        (second.status, &second.json()["is_new"]),
        (202, &json!(false))
    );
    let refused = server.data().post("/v1/completions", &prompt("slow", 1));
    assert_error(&refused, 503, "model_loading");
    let off = server.post("/v1/admin/models/slow/unload?wait_s=30", &Value::Null);
    assert_eq!(
        (off.status, &off.json()["state"]),
        (200, &json!("unloaded"))
    );
    server.permits.send(()).expect("room");
    server.load("slow");
}

#[test]
fn waiting_requests_leave_threads_for_others() {
    let server = TestServer::start(vec![echo("slow")]);
    let mut waiting: Vec<_> = (0..6).map(|_| server.served()).collect();
    let mut other = server.served();
    for client in &mut waiting {
        client.send("POST", "/v1/admin/models/slow/load?wait_s=600", &[], "");
    }
    assert_eq!(other.get("/health").status, 200);
    server.wait_for_state("slow", "loading");
    server.permits.send(()).expect("room");
    let states = waiting.iter_mut().map(|client| client.read_answer().status);
    assert!(states.into_iter().all(|status| matches!(status, 200 | 202)));
    server.wait_for_state("slow", "loaded");
}

/// So many may wait; further ones are told at once that they did not.
#[test]
fn a_thirteenth_wait_is_answered_at_once_and_says_so() {
    let server = TestServer::start(vec![echo("slow")]);
    let (done, answers) = crossbeam_channel::unbounded();
    std::thread::scope(|scope| {
        for _ in 0..14 {
            let (server, done) = (&server, done.clone());
            scope.spawn(move || {
                let answer = server.post("/v1/admin/models/slow/load?wait_s=600", &Value::Null);
                done.send(answer).expect("it is read");
            });
        }
        let next = || answers.recv_timeout(PATIENCE).expect("an answer");
        for _ in 0..2 {
            let answer = next();
            let body = answer.json();
            assert_eq!((answer.status, &body["state"]), (202, &json!("loading")));
            assert_eq!(body["waited"], false, "{body}");
            assert!(
                body["waited_reason"]
                    .as_str()
                    .is_some_and(|why| why.contains("12"))
            );
        }
        server.permits.send(()).expect("room");
        for _ in 0..12 {
            let body = next().json();
            assert_eq!(
                (&body["state"], body.get("waited")),
                (&json!("loaded"), None)
            );
        }
    });
}

#[test]
fn a_failed_load_says_why_and_may_be_tried_again() {
    let server = TestServer::start(vec![echo("broken")]);
    for _ in 0..2 {
        let answer = server.post("/v1/admin/models/broken/load?wait_s=30", &Value::Null);
        let error = assert_error(&answer, 503, "model_failed");
        let message = error["message"].as_str().expect("text");
        assert!(message.contains("the test wants it to fail"), "{message}");
    }
    let row = server.row("broken");
    assert_eq!(row["runtime_state"], "failed");
    let why = row["last_error"].as_str().expect("text");
    assert!(why.contains("the test wants it to fail"), "{why}");
    let refused = server.data().post("/v1/completions", &prompt("broken", 1));
    assert_error(&refused, 503, "model_failed");
    // Unloading a failed model clears it.
    let answer = server.post("/v1/admin/models/broken/unload", &Value::Null);
    assert!(matches!(answer.status, 200 | 202), "{}", answer.json());
}

#[test]
fn overrides_hold_for_one_load() {
    let server = TestServer::start(vec![echo("a")]);
    let path = "/v1/admin/models/a/load?wait_s=30";
    let body = json!({"replicas": 3, "max_queue_depth": 7});
    let answer = server.post(path, &body);
    assert_eq!(
        (answer.status, &answer.json()["load_override"]),
        (200, &body)
    );
    let row = server.row("a");
    assert_eq!(
        (&row["replicas"], &row["loaded_replicas"]),
        (&json!(3), &json!(3))
    );
    assert_eq!(
        row["definition"]["replicas"], 1,
        "the configuration stays as it is"
    );
    // The same again is nothing new; something else cannot be had without an unload.
    assert_eq!(server.post(path, &body).status, 200);
    assert_eq!(server.post(path, &json!({})).status, 200);
    assert_error(&server.post(path, &json!({"replicas": 2})), 409, "conflict");
    assert_eq!(server.row("a")["loaded_replicas"], 3);
    server.post("/v1/admin/models/a/unload?wait_s=30", &Value::Null);
    server.load("a");
    let row = server.row("a");
    assert_eq!(
        (&row["loaded_replicas"], &row["load_override"]),
        (&json!(1), &json!({}))
    );
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let server = TestServer::start(vec![echo("big"), echo("a")]);
    server.load("a");
    let error = assert_error(
        &server.post("/v1/admin/models/big/load", &Value::Null),
        409,
        "no_room",
    );
    assert_eq!(error["needed_bytes"], 1 << 30);
    assert_eq!(error["limit_bytes"], 100 << 20);
    assert_eq!(
        (server.state("big").as_str(), server.state("a").as_str()),
        ("unloaded", "loaded")
    );
}

#[test]
fn an_unload_under_load_ends_every_request_once() {
    let server = TestServer::start(vec![fake("a", Duration::from_millis(20))]);
    server.load("a");
    let ask = |max_tokens: u32| {
        let mut client = server.data();
        let body = prompt("a", max_tokens).to_string();
        client.send("POST", "/v1/completions", &[], &body);
        client
    };
    let mut running = ask(25);
    wait_for("the job", || server.row("a")["runtime_inflight"] == 1);
    let mut queued: Vec<_> = (0..4).map(|_| ask(25)).collect();
    wait_for("the queue", || server.row("a")["queue_depth"] == 4);
    let unload = server.post("/v1/admin/models/a/unload", &json!({"drain_timeout_s": 30}));
    assert_eq!(
        (unload.status, &unload.json()["state"]),
        (202, &json!("unloading"))
    );
    // It cannot be turned around.
    let load = server.post("/v1/admin/models/a/load", &Value::Null);
    assert_error(&load, 409, "model_unloading");
    for client in &mut queued {
        let cut = client.read_answer();
        assert_error(&cut, 503, "model_unloading");
        assert_eq!(cut.header("retry-after"), None, "no request loads it again");
    }
    let refused = server.data().post("/v1/completions", &prompt("a", 1));
    assert_eq!(refused.status, 503, "{}", refused.json());
    let answer = running.read_answer();
    assert_eq!(
        answer.status,
        200,
        "what ran has ended well: {}",
        answer.json()
    );
    assert_eq!(answer.json()["usage"]["completion_tokens"], 25);
    server.wait_for_state("a", "unloaded");
    let devices = server.admin().get("/v1/admin/devices").json();
    assert_eq!(
        devices["data"][0]["ledger"]["used_bytes"], 0,
        "all bytes are back"
    );
    server.load("a");
    assert_eq!(
        server
            .data()
            .post("/v1/completions", &prompt("a", 1))
            .status,
        200
    );
}
