//! A server whose models are still loading: alive, not ready, and honest about it.

use super::{add_model, wait_for};
use crate::client::Client;
use crate::fake::Alphabet;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::Config;
use tinyloop::pool::Pool;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

#[test]
fn a_loading_model_is_not_unknown_and_not_ready() {
    let mut config = Config::default();
    config.server.port = 0;
    config.management.port = 0;
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let loading = pool
        .announce("slow", &["later".to_owned()])
        .expect("the name is free");
    pool.announce("slow", &[]).expect_err("the name is taken");
    pool.announce("other", &["later".to_owned()])
        .expect_err("the alias is taken");
    let server = Server::start(&config, Arc::clone(&pool)).expect("the server starts");
    let planes = [
        server.address(),
        server.management_address().expect("it listens"),
    ];
    loading.report(250, 1000);
    for plane in planes {
        let mut client = Client::connect(plane);
        assert_eq!(client.get("/health").json()["status"], "ok");
        let ready = client.get("/ready");
        assert_eq!(ready.status, 503);
        let expected = json!({"status": "loading", "models": [{
            "id": "slow", "status": "loading", "loaded_bytes": 250, "total_bytes": 1000,
            "progress": 0.25,
        }]});
        assert_eq!(ready.json(), expected);
    }
    let mut client = Client::connect(server.address());
    let body = |model: Value| json!({"model": model, "prompt": "a", "max_tokens": 1});
    for model in [json!("slow"), json!("later"), Value::Null] {
        let answer = client.post("/v1/completions", &body(model.clone()));
        assert_eq!(answer.status, 503, "{model}");
        assert_eq!(answer.json()["error"]["code"], "model_loading");
        assert!(answer.header("retry-after").is_some());
    }
    assert_eq!(
        client.post("/v1/completions", &body(json!("no"))).status,
        404
    );
    assert_eq!(client.get("/v1/models/slow").status, 503);
    assert_eq!(client.get("/v1/models").json()["data"], json!([]));

    add_model(
        &pool,
        ["slow", "later"],
        Alphabet::at_once(),
        &config.executor,
    );
    wait_for("readiness", || {
        Client::connect(planes[0]).get("/ready").status == 200
    });
    assert_eq!(
        client.post("/v1/completions", &body(json!("later"))).status,
        200
    );
    assert_eq!(
        client.post("/v1/completions", &body(Value::Null)).status,
        200
    );
    server.shutdown(Duration::ZERO);
}
