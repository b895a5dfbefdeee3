//! The admin routes of the management plane through real sockets: real server, real pool, stand-in
//! models.
//!
//! Models whose name begins with `slow` load when the test lets them, `broken` ones fail, and `big`
//! ones are thought to need a gigabyte. Nothing sleeps: tests wait for a condition with a deadline.

mod bodies;
mod lifecycle;
mod pages;
mod reload;

#[path = "../http/client.rs"]
#[expect(dead_code, reason = "the HTTP tests use more of it")]
mod client;

use client::{Answer, Client};
use crossbeam_channel::{Receiver, Sender, bounded};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tinyloop::clock::SystemClock;
use tinyloop::config::{Config, FakeConfig, ModelConfig, ModelSource, PoolConfig};
use tinyloop::pool::{
    Estimate, LoadedModel, LoadingModel, ModelLoader, Pool, PoolParts, SourceLoader,
};
use tinyloop::runtime::native::BackendKind;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

const PATIENCE: Duration = Duration::from_secs(30);
const JSON: (&str, &str) = ("content-type", "application/json");

/// The usual loader, held up where the test says so.
struct GateLoader {
    inner: SourceLoader,
    /// One permit lets one slow load go on.
    permits: Receiver<()>,
}

impl ModelLoader for GateLoader {
    fn estimate(&self, config: &ModelConfig) -> Estimate {
        let mut estimate = self.inner.estimate(config);
        if config.name.starts_with("big") {
            estimate.memory.weight_bytes = 1 << 30;
        }
        estimate
    }

    fn load(
        &self,
        config: &ModelConfig,
        progress: &Arc<LoadingModel>,
    ) -> Result<LoadedModel, String> {
        if config.name.starts_with("broken") {
            return Err("the test wants it to fail".to_owned());
        }
        if config.name.starts_with("slow") {
            progress.report(250, 1000);
            while self.permits.recv_timeout(Duration::from_millis(5)).is_err() {
                if progress.is_cancelled() {
                    return Err("cancelled".to_owned());
                }
            }
        }
        self.inner.load(config, progress)
    }
}

/// A server with a management plane.
struct TestServer {
    server: Option<Server>,
    permits: Sender<()>,
}

impl TestServer {
    /// With these models, none of them loaded.
    fn start(models: Vec<ModelConfig>) -> Self {
        Self::with(models, |_| {})
    }

    fn with(models: Vec<ModelConfig>, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::default();
        config.server.port = 0;
        config.server.http_workers = 8;
        config.management.port = 0;
        config.pool.cpu_bytes = Some(100 << 20);
        change(&mut config);
        let metrics = Arc::new(Metrics::new());
        let (permits, receiver) = bounded(16);
        let loader = GateLoader {
            inner: SourceLoader::new(BackendKind::Cpu, Arc::clone(&metrics)),
            permits: receiver,
        };
        let pool = Arc::new(Pool::with_parts(PoolParts {
            metrics,
            clock: Arc::new(SystemClock),
            loader: Arc::new(loader),
            config: PoolConfig {
                min_residency: Duration::ZERO,
                ..config.pool.clone()
            },
        }));
        for model in models {
            pool.add(model).expect("the names differ");
        }
        let server = Server::start(&config, pool).expect("the server starts");
        Self {
            server: Some(server),
            permits,
        }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("it runs")
    }

    fn admin(&self) -> Client {
        let address = self.server().management_address();
        Client::connect(address.expect("it listens"))
    }

    /// A connection that is being served.
    fn served(&self) -> Client {
        let mut client = self.admin();
        assert_eq!(client.get("/health").status, 200);
        client
    }

    fn data(&self) -> Client {
        Client::connect(self.server().address())
    }

    /// POST to the management plane with a JSON body; null = none.
    fn post(&self, path: &str, body: &Value) -> Answer {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        self.request("POST", path, &[JSON], &body)
    }

    fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut client = self.admin();
        client.send(method, path, headers, body);
        client.read_answer()
    }

    fn row(&self, name: &str) -> Value {
        let answer = self.admin().get(&format!("/v1/admin/models/{name}"));
        assert_eq!(answer.status, 200, "{name}");
        answer.json()
    }

    fn state(&self, name: &str) -> String {
        let row = self.row(name);
        row["runtime_state"].as_str().expect("text").to_owned()
    }

    /// Loads and waits.
    #[track_caller]
    fn load(&self, name: &str) {
        let path = format!("/v1/admin/models/{name}/load?wait_s=30");
        let answer = self.post(&path, &Value::Null);
        assert_eq!(answer.status, 200, "{}", answer.json());
        assert_eq!(answer.json()["state"], "loaded");
    }

    #[track_caller]
    fn wait_for_state(&self, name: &str, state: &str) {
        wait_for(state, || self.state(name) == state);
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown(Duration::ZERO);
        }
    }
}

/// A model that echoes, with a tick between its tokens.
fn fake(name: &str, tick: Duration) -> ModelConfig {
    let max_inflight = 1;
    let source = ModelSource::Fake(FakeConfig { max_inflight, tick });
    let mut config = ModelConfig::new(name, source);
    config.lifecycle.enabled = false;
    config
}

fn echo(name: &str) -> ModelConfig {
    fake(name, Duration::ZERO)
}

fn prompt(model: &str, max_tokens: u32) -> Value {
    json!({"model": model, "prompt": "abc", "max_tokens": max_tokens})
}

#[track_caller]
fn assert_error(answer: &Answer, status: u16, code: &str) -> Value {
    let body = answer.json();
    assert_eq!(answer.status, status, "{body}");
    assert_eq!(body["error"]["code"], code, "{body}");
    assert!(answer.header("x-request-id").is_some());
    body["error"].clone()
}

/// Waits until `condition` holds; fails after a while.
#[track_caller]
fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::yield_now();
    }
}
