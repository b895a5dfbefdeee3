//! A server whose models are still loading: alive, not ready, and honest about it.

use super::{add_model, wait_for};
use crate::client::Client;
use crate::fake::Alphabet;
use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::clock::SystemClock;
use tinyloop::config::{Config, FakeConfig, ModelConfig, ModelSource, PoolConfig};
use tinyloop::pool::{
    Estimate, LoadPhase, LoadedModel, LoadingModel, ModelLoader, Pool, PoolParts,
};
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

/// Reports a quarter, then waits for the test and fails.
struct Stuck(Receiver<()>);

impl ModelLoader for Stuck {
    fn estimate(&self, _: &ModelConfig) -> Estimate {
        Estimate::default()
    }

    fn load(&self, _: &ModelConfig, progress: &Arc<LoadingModel>) -> Result<LoadedModel, String> {
        progress.report(250, 1000);
        progress.enter(LoadPhase::Reading);
        let _ = self.0.recv();
        Err("the disk is gone".to_owned())
    }
}

fn stand_in(name: &str, aliases: &[&str]) -> ModelConfig {
    ModelConfig {
        aliases: aliases.iter().map(ToString::to_string).collect(),
        ..ModelConfig::new(name, ModelSource::Fake(FakeConfig::default()))
    }
}

#[test]
fn a_loading_model_is_not_unknown_and_not_ready() {
    let mut config = Config::default();
    config.server.port = 0;
    config.management.port = 0;
    let (go_on, stuck) = bounded(0);
    let pool = Arc::new(Pool::with_parts(PoolParts {
        metrics: Arc::new(Metrics::new()),
        clock: Arc::new(SystemClock),
        loader: Arc::new(Stuck(stuck)),
        config: PoolConfig::default(),
    }));
    pool.add(stand_in("slow", &["later"])).expect("it is new");
    pool.add(stand_in("slow", &[]))
        .expect_err("the name is taken");
    pool.add(stand_in("other", &["later"]))
        .expect_err("the alias is taken");
    pool.load_enabled();
    let server = Server::start(&config, Arc::clone(&pool)).expect("the server starts");
    let planes = [
        server.address(),
        server.management_address().expect("it listens"),
    ];
    wait_for("the first bytes", || {
        let report = pool.report("slow").expect("configured");
        report
            .load_progress
            .is_some_and(|now| now.done_bytes > 0 && now.phase == LoadPhase::Reading)
    });
    for plane in planes {
        let mut client = Client::connect(plane);
        assert_eq!(client.get("/health").json()["status"], "ok");
        let ready = client.get("/ready");
        assert_eq!(ready.status, 503);
        let expected = json!({"status": "loading", "models": [{
            "id": "slow", "status": "loading", "phase": "reading", "loaded_bytes": 250,
            "total_bytes": 1000, "progress": 0.25,
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
    let unknown = client.post("/v1/completions", &body(json!("no")));
    assert_eq!(unknown.status, 404);
    assert_eq!(client.get("/v1/models/slow").status, 503);
    assert_eq!(client.get("/v1/models").json()["data"], json!([]));
    let all = client.get("/v1/models?all=true").json();
    assert_eq!(all["data"][0]["status"]["value"], "loading");

    go_on.send(()).expect("the loader waits");
    wait_for("the failure", || {
        let ready = Client::connect(planes[0]).get("/ready");
        (ready.status, ready.json()["status"].as_str()) == (503, Some("no_model"))
    });
    // Nothing is served: where a server of one model would have ended, this one says that it is ill.
    for plane in planes {
        let health = Client::connect(plane).get("/health");
        let expected = json!({"status": "failed", "failed_models": ["slow"]});
        assert_eq!((health.status, health.json()), (503, expected));
    }
    let failed = client.post("/v1/completions", &body(json!("slow")));
    assert_eq!((failed.status, failed.header("retry-after")), (503, None));
    assert_eq!(failed.json()["error"]["code"], "model_failed");
    let text = failed.json()["error"]["message"].to_string();
    // Why is for the operator: it may name files.
    assert!(text.contains("could not be loaded"), "{text}");
    for path in ["/v1/models?all=true", "/ready"] {
        let shown = client.get(path).json().to_string();
        assert!(shown.contains("could not be loaded"), "{path}: {shown}");
        assert!(!shown.contains("the disk is gone"), "{path}: {shown}");
    }
    assert!(!text.contains("the disk is gone"), "{text}");

    let runtime = Alphabet::at_once();
    add_model(&pool, ["slow", "later"], runtime, &config.executor);
    assert_eq!(Client::connect(planes[0]).get("/ready").status, 200);
    assert_eq!(client.get("/health").json(), json!({"status": "ok"}));
    for model in [json!("later"), Value::Null] {
        assert_eq!(client.post("/v1/completions", &body(model)).status, 200);
    }
    server.shutdown(Duration::ZERO);
}

#[test]
fn requests_load_what_is_loaded_on_demand_and_nothing_else() {
    let mut config = Config::default();
    config.server.port = 0;
    config.management.port = 0;
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let not_enabled = |name: &str| {
        let mut config = stand_in(name, &[]);
        config.lifecycle.enabled = false;
        config
    };
    let mut lazy = not_enabled("lazy");
    lazy.lifecycle.load_on_demand = true;
    pool.add(not_enabled("off")).expect("it is new");
    let server = Server::start(&config, Arc::clone(&pool)).expect("the server starts");
    let mut client = Client::connect(server.address());
    let ready = client.get("/ready");
    assert_eq!(
        (ready.status, ready.json()["status"].as_str()),
        (503, Some("no_model"))
    );
    pool.add(lazy).expect("it is new");
    assert_eq!(
        client.get("/ready").status,
        200,
        "the next request loads it"
    );

    let body = |model: &str| json!({"model": model, "prompt": "ab", "max_tokens": 2});
    let off = client.post("/v1/completions", &body("off"));
    assert_eq!((off.status, off.header("retry-after")), (503, None));
    assert_eq!(off.header("x-should-retry"), Some("false"));
    assert_eq!(off.json()["error"]["code"], "model_not_loaded");
    assert_eq!(
        client.get("/v1/models/lazy").status,
        503,
        "looking does not load"
    );
    let lazy = client.post("/v1/completions", &body("lazy"));
    assert_eq!(
        (lazy.status, lazy.json()["choices"][0]["text"].as_str()),
        (200, Some("ab"))
    );
    let listed = client.get("/v1/models").json();
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(1));
    let all = client.get("/v1/models?all=true").json();
    let status = |index: usize| all["data"][index]["status"]["value"].clone();
    assert_eq!([status(0), status(1)], ["unloaded", "loaded"]);
    let metrics = String::from_utf8(client.get("/metrics").body).expect("text");
    assert!(metrics.contains("tinyloop_model_state{model=\"lazy\",state=\"loaded\"} 1"));
    pool.unload("lazy", None).expect("it is there");
    wait_for("the unload", || {
        let state = pool.find("lazy").map(|entry| entry.state.name());
        state == Some(tinyloop::pool::RuntimeState::Unloaded)
    });
    assert_eq!(client.post("/v1/completions", &body("lazy")).status, 200);
    server.shutdown(Duration::ZERO);
}

/// An enabled model that failed takes neither the server nor the others out, and is not hidden.
#[test]
fn a_failed_model_beside_one_that_answers_is_told_and_restarts_nothing() {
    let mut config = Config::default();
    config.server.port = 0;
    config.management.port = 0;
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let broken = ModelSource::File("no/such/model.gguf".into());
    pool.add(ModelConfig::new("broken", broken))
        .expect("it is new");
    pool.add(stand_in("sound", &[])).expect("it is new");
    pool.load_enabled();
    assert!(pool.wait_started(Duration::from_secs(60)));
    let server = Server::start(&config, Arc::clone(&pool)).expect("the server starts");
    let mut client = Client::connect(server.address());
    let health = client.get("/health");
    let expected = json!({"status": "degraded", "replicas": [], "failed_models": ["broken"]});
    assert_eq!((health.status, health.json()), (200, expected));
    let ready = client.get("/ready");
    let expected = json!({"status": "ready", "failed_models": ["broken"]});
    assert_eq!((ready.status, ready.json()), (200, expected));
    // Nobody wants it any more than what was never enabled.
    pool.reload(vec![stand_in("sound", &[])])
        .expect("no name is taken");
    assert_eq!(client.get("/health").json(), json!({"status": "ok"}));
    assert_eq!(client.get("/ready").json(), json!({"status": "ready"}));
    server.shutdown(Duration::ZERO);
}
