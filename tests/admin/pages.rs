//! What the routes show, and to whom.

use super::{JSON, TestServer, assert_error, echo};
use serde_json::{Value, json};
use std::path::PathBuf;
use tinyloop::config::{ModelConfig, ModelSource, OpenaiRemoteConfig, TargetInflight};

/// The fields of the contract.
const FIELDS: [&str; 20] = [
    "name",
    "resolved_backend",
    "configured_enabled",
    "runtime_state",
    "is_loaded",
    "replicas",
    "replica_max",
    "loaded_replicas",
    "inflight_requests",
    "queue_depth",
    "runtime_inflight",
    "configured_target_inflight",
    "effective_target_inflight",
    "accepting_new_requests",
    "last_error",
    "memory",
    "load_progress",
    "load_constraints",
    "load_override",
    "definition",
];

#[test]
fn there_is_one_row_per_model_loaded_or_not() {
    let mut twice = echo("twice");
    twice.aliases = vec!["both/of them".to_owned()];
    twice.lifecycle.replicas = 2;
    twice.executor.target_inflight = Some(TargetInflight::Jobs(5));
    let server = TestServer::start(vec![twice, echo("other")]);
    server.load("twice");
    let list = server.admin().get("/v1/admin/models").json();
    let rows = list["data"].as_array().expect("a list");
    assert_eq!(rows.len(), 2);
    for row in rows {
        for field in FIELDS {
            assert!(row.get(field).is_some(), "{field} is missing in {row}");
        }
    }
    let [twice, other] = [&rows[0], &rows[1]];
    let expected = json!({
        "name": "twice", "resolved_backend": "fake", "configured_enabled": false,
        "runtime_state": "loaded", "is_loaded": true, "replicas": 2, "replica_max": 8,
        "loaded_replicas": 2, "inflight_requests": 0, "queue_depth": 0, "runtime_inflight": 0,
        // Jobs of one replica, which holds one; two replicas.
        "configured_target_inflight": 5, "capability_inflight": 1,
        "effective_target_inflight": 1, "total_target_inflight": 2, "accepting_new_requests": true, "last_error": null,
        "load_progress": null, "load_override": {},
    });
    for (field, value) in expected.as_object().expect("an object") {
        assert_eq!(&twice[field], value, "{field}");
    }
    assert_eq!(
        twice["load_constraints"]["replicas"],
        json!({"type": "integer", "min": 1, "max": 8})
    );
    let replicas = twice["replica_states"].as_array().expect("a list");
    assert_eq!(replicas.len(), 2);
    for replica in replicas {
        let shown = [
            &replica["health"],
            &replica["capability"],
            &replica["target"],
        ];
        assert_eq!(shown, [&json!("live"), &json!(1), &json!(1)]);
    }
    assert_eq!(twice["definition"]["executor"]["target_inflight"], 5);
    assert_eq!(other["capability_inflight"], Value::Null);
    assert_eq!(other["memory"]["is_estimate"], true);
    assert_eq!(other["runtime_state"], "unloaded");
    assert_eq!(other["accepting_new_requests"], false);
    // By an alias, as one segment of a path.
    assert_eq!(server.row("both%2Fof%20them")["name"], "twice");
    assert_error(
        &server.admin().get("/v1/admin/models/no"),
        404,
        "model_not_found",
    );
}

#[test]
fn secrets_are_not_shown() {
    let mut remote: OpenaiRemoteConfig = toml::from_str(
        "base_url = 'http://user:hunter2@127.0.0.1:9/v1?key=hunter2'\nmodel = 'm'\n",
    )
    .expect("valid");
    remote.api_key_env = Some("THE_VARIABLE".to_owned());
    let child = toml::from_str(
        "file = 'x.gguf'\n[process]\nextra_args = ['--api-key', 'hunter2', '--token=hunter2']\n",
    );
    let source = ModelSource::LlamaServer(child.expect("valid"));
    let models = vec![
        ModelConfig::new("remote", ModelSource::OpenaiRemote(remote)),
        ModelConfig::new("child", source),
        ModelConfig::new("native", ModelSource::File(PathBuf::from("x.gguf"))),
    ];
    let server = TestServer::with(models, |config| {
        config.management.admin_key = Some("hunter2".to_owned());
    });
    let key = ("x-api-key", "hunter2");
    let answer = server.request("GET", "/v1/admin/models", &[key], "");
    let text = String::from_utf8(answer.body.clone()).expect("text");
    assert_eq!(
        answer.json()["data"].as_array().map(Vec::len),
        Some(3),
        "{text}"
    );
    assert!(!text.contains("hunter2"), "{text}");
    assert!(
        text.contains("127.0.0.1:9"),
        "where it goes is shown: {text}"
    );
}

#[test]
fn devices_have_memory_or_a_reason() {
    let server = TestServer::start(vec![echo("a")]);
    let answer = server.admin().get("/v1/admin/devices");
    let devices = answer.json();
    let cpu = &devices["data"][0];
    assert_eq!(
        (&cpu["device"], &cpu["available"]),
        (&json!("cpu"), &json!(true))
    );
    assert!(cpu["total_bytes"].as_u64() > cpu["process_bytes"].as_u64());
    assert_eq!(cpu["ledger"]["limit_bytes"], 100 << 20);
    let gpus = &devices["gpus"];
    match gpus["available"].as_bool() {
        Some(true) => assert!(gpus["count"].as_u64() > Some(0)),
        _ => assert!(
            gpus["reason"]
                .as_str()
                .is_some_and(|reason| !reason.is_empty())
        ),
    }
    let alias = server.admin().get("/v1/admin/gpu-memory");
    assert_eq!(alias.json()["gpus"], devices["gpus"]);
}

#[test]
fn the_key_opens_all_of_it_and_nothing_else_does() {
    let server = TestServer::with(vec![echo("a")], |config| {
        config.management.admin_key = Some("secret".to_owned());
    });
    for (method, path) in [
        ("GET", "/v1/admin/models"),
        ("GET", "/v1/admin/devices"),
        ("POST", "/v1/admin/models/a/load"),
        ("POST", "/v1/admin/reload"),
    ] {
        for headers in [&[][..], &[("authorization", "Bearer wrong")]] {
            assert_error(
                &server.request(method, path, headers, ""),
                401,
                "invalid_api_key",
            );
        }
    }
    assert_eq!(server.server().state().pool().list().len(), 0);
    // With it a name is as good as an address, and no browser sends it by itself.
    let headers = [
        ("authorization", "Bearer secret"),
        ("origin", "http://dashboard.example"),
    ];
    let answer = server.request("POST", "/v1/admin/models/a/load?wait_s=30", &headers, "");
    assert_eq!(answer.status, 200, "{}", answer.json());
}

#[test]
fn web_pages_of_others_are_kept_out() {
    let server = TestServer::with(vec![echo("a")], |config| {
        config.management.allowed_hosts = vec!["box.example".to_owned()];
    });
    let load = "/v1/admin/models/a/load";
    let from = |origin| server.request("POST", load, &[JSON, ("origin", origin)], "{}");
    for origin in ["http://evil.example", "null", "http://127.0.0.1:8080"] {
        assert_error(&from(origin), 403, "forbidden");
    }
    // A form needs no permission to be sent; it cannot say that it is JSON.
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let answer = server.request("POST", load, &[("content-type", kind)], "{}");
        assert_error(&answer, 415, "unsupported_media_type");
    }
    // A permission that is asked for beforehand is not given, and nothing happens.
    let preflight = server.request("OPTIONS", load, &[], "");
    assert_eq!(
        (preflight.status, preflight.header("allow")),
        (204, Some("POST, OPTIONS"))
    );
    assert_eq!(preflight.header("access-control-allow-origin"), None);
    // The name that the page was loaded from points here.
    let rebound = |host: &str, path: &str| {
        let mut client = server.admin();
        client.send_raw(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        client.read_answer()
    };
    for path in ["/v1/admin/models", "/v1/requests", "/v1/native/snapshot"] {
        assert_error(&rebound("evil.example:8081", path), 403, "forbidden");
        assert_eq!(rebound("box.example:8081", path).status, 200, "{path}");
    }
    for path in ["/health", "/metrics"] {
        assert_eq!(rebound("evil.example", path).status, 200, "{path}");
    }
    assert_eq!(server.state("a"), "unloaded");
}

#[test]
fn the_data_plane_has_none_of_it() {
    let server = TestServer::start(vec![echo("a")]);
    for (method, path) in [
        ("GET", "/v1/admin/models"),
        ("POST", "/v1/admin/models/a/load"),
        ("POST", "/v1/admin/models/a/unload"),
        ("OPTIONS", "/v1/admin/models/a/load"),
        ("POST", "/v1/admin/reload"),
    ] {
        let mut client = server.data();
        client.send(method, path, &[JSON], "");
        let error = assert_error(&client.read_answer(), 404, "unknown_url");
        let message = error["message"].as_str().expect("text");
        assert!(message.contains("management plane"), "{message}");
    }
    assert_eq!(server.state("a"), "unloaded");
    assert_eq!(
        server.data().get("/v1/models").json()["data"],
        Value::from(Vec::<Value>::new())
    );
}
