//! Reading the configuration again.

use super::{TestServer, assert_error, echo, prompt};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use tinyloop::config::{Config, ModelConfig};

#[test]
fn unloaded_models_follow_the_configuration_and_loaded_ones_stay() {
    let server = TestServer::start(vec![
        echo("loaded"),
        echo("changed"),
        echo("gone"),
        echo("same"),
    ]);
    let reload = || server.post("/v1/admin/reload", &Value::Null);
    assert_error(&reload(), 409, "conflict");

    let written: Arc<Mutex<Result<Vec<ModelConfig>, String>>> =
        Arc::new(Mutex::new(Err("x.toml:3: unknown key `fiel`".to_owned())));
    let source = Arc::clone(&written);
    server.server().state().set_config_source(Box::new(move || {
        let models = source.lock().clone()?;
        Ok(Config {
            models,
            ..Config::default()
        })
    }));
    server.load("loaded");
    let error = assert_error(&reload(), 400, "invalid_value");
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|text| text.contains("x.toml:3")),
        "{error}"
    );

    let mut changed = echo("changed");
    changed.lifecycle.replicas = 2;
    let mut loaded = echo("loaded");
    loaded.lifecycle.replicas = 4;
    *written.lock() = Ok(vec![loaded, changed.clone(), echo("same"), echo("new")]);
    let answer = reload();
    let expected = json!({
        "added": ["new"], "removed": ["gone"], "changed": ["changed"], "unchanged": ["same"],
        "left_alone": ["loaded"], "keys": 0, "needs_restart": [],
    });
    assert_eq!((answer.status, answer.json()), (200, expected));
    assert_eq!(server.admin().get("/v1/admin/models/gone").status, 404);
    assert_eq!(
        (
            &server.row("changed")["replicas"],
            &server.row("loaded")["replicas"]
        ),
        (&json!(2), &json!(1))
    );
    assert_eq!(
        server
            .data()
            .post("/v1/completions", &prompt("loaded", 1))
            .status,
        200
    );
    server.load("new");

    // A new model may not take the name of one that stays.
    let mut thief = echo("thief");
    thief.aliases = vec!["loaded".to_owned()];
    *written.lock() = Ok(vec![thief, echo("new")]);
    assert_error(&reload(), 409, "conflict");
    assert_eq!(server.admin().get("/v1/admin/models/thief").status, 404);
    assert_eq!(server.state("changed"), "unloaded", "nothing was changed");
    let mut started_with = Config::default();
    started_with.pool.load_threads += 1;
    server.server().state().set_started_with(started_with);
    *written.lock() = Ok(vec![echo("new")]);
    let empty = server.post("/v1/admin/reload", &json!({}));
    assert_eq!(
        (empty.status, &empty.json()["needs_restart"]),
        (200, &json!(["pool"]))
    );
    let with_body = server.post("/v1/admin/reload", &json!({"path": "other.toml"}));
    assert_error(&with_body, 400, "bad_request");
}

/// The file that the README points at.
#[test]
fn the_demo_configuration_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo_pool.toml");
    let config = Config::load(&path).expect("it can be read");
    config.check().expect("it is sound");
    let backends = config.models.iter();
    let backends: Vec<&str> = backends.map(|model| model.source.backend()).collect();
    assert_eq!(backends, ["llama_server", "native", "openai_remote"]);
}
