//! Several remote servers behind one model: those that answer serve, the others join when they can; and
//! what the pool says of the memory of children.

use crate::client::Client;
use crate::support::{PATIENCE, Serve, llama, stand_in, vllm, wait_for};
use serde_json::json;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::{ModelConfig, ModelSource, OpenaiRemoteConfig, PoolConfig};
use tinyloop::pool::ledger::MemorySource;
use tinyloop::pool::{LoadOverride, Pool, RuntimeState};
use tinyloop::runtime::child::free_port;
use tinyloop::scheduler::Metrics;

/// A server that somebody else runs: the stand-in, killed when dropped.
struct Elsewhere(Child);

impl Elsewhere {
    fn start(port: u16) -> Self {
        let child = Command::new(stand_in())
            .args(["serve", "org/m", "--port", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.expect("the stand-in starts"))
    }

    fn wait_ready(port: u16) {
        wait_for("the stand-in", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pool_of(config: ModelConfig) -> Pool {
    let limits = PoolConfig {
        cpu_bytes: Some(8 << 30),
        ..PoolConfig::default()
    };
    let pool = Pool::with_config(Arc::new(Metrics::new()), limits);
    pool.add(config).expect("the name is new");
    pool
}

#[track_caller]
fn load(pool: &Pool, name: &str) -> RuntimeState {
    let begun = pool.load(name, &LoadOverride::default());
    begun.expect("there is room");
    pool.wait_settled(name, PATIENCE).expect("configured")
}

fn remotes(ports: &[u16]) -> ModelConfig {
    let urls: Vec<String> = ports
        .iter()
        .map(|port| format!("http://127.0.0.1:{port}/v1"))
        .collect();
    let remote: OpenaiRemoteConfig = toml::from_str(&format!(
        "base_urls = {urls:?}\nmodel = \"m\"\nallow_remote = \"always\"\nlimits = {{ retries = 0 }}"
    ))
    .expect("valid");
    let mut config = ModelConfig::new("far", ModelSource::OpenaiRemote(remote));
    config.lifecycle.replicas = ports.len() as u32;
    config.executor.restart_backoff = Duration::from_millis(10);
    config.executor.restart_backoff_max = Duration::from_millis(50);
    config
}

/// At least one answers: the model is loaded, and the other one is an open circuit that closes as soon as
/// its server is there.
#[test]
fn a_remote_that_does_not_answer_yet_joins_later() {
    let ports = [0; 2].map(|_| free_port().expect("there is one"));
    let _first = Elsewhere::start(ports[0]);
    Elsewhere::wait_ready(ports[0]);
    let pool = pool_of(remotes(&ports));
    assert_eq!(load(&pool, "far"), RuntimeState::Loaded);
    let report = pool.report("far").expect("configured");
    assert_eq!((report.loaded_replicas, report.replicas), (1, 2));
    wait_for("the loss to be known", || {
        let report = pool.report("far").expect("configured");
        report
            .last_error
            .is_some_and(|why| why.contains(&ports[1].to_string()))
    });
    let _second = Elsewhere::start(ports[1]);
    wait_for("the second server to join", || {
        let report = pool.report("far").expect("configured");
        report.loaded_replicas == 2
    });
    let report = pool.report("far").expect("configured");
    assert_eq!(report.last_error, None);
    assert_eq!(report.replica_states[1].n_restarts, 1);
    // Both are servers of somebody else: nothing is known of their memory.
    assert_eq!(report.memory.source, MemorySource::Unavailable);
}

/// None answers: that is a failed load, which says why.
#[test]
fn without_any_remote_that_answers_the_load_fails() {
    let ports = [0; 2].map(|_| free_port().expect("there is one"));
    let pool = pool_of(remotes(&ports));
    assert_eq!(load(&pool, "far"), RuntimeState::Failed);
    let why = pool.report("far").and_then(|report| report.last_error);
    let why = why.expect("it failed");
    assert!(
        why.contains("replica 1 of 2") && why.contains(&ports[0].to_string()),
        "{why}"
    );
}

/// What no waiting mends fails the load, whoever else answers.
#[test]
fn a_faulty_definition_is_no_open_circuit() {
    let ports = [0; 2].map(|_| free_port().expect("there is one"));
    let _first = Elsewhere::start(ports[0]);
    Elsewhere::wait_ready(ports[0]);
    let mut config = remotes(&ports);
    let ModelSource::OpenaiRemote(remote) = &mut config.source else {
        panic!("it is one");
    };
    remote.api_key_env = Some("TINYLOOP_NO_SUCH_VARIABLE".to_owned());
    let pool = pool_of(config);
    assert_eq!(load(&pool, "far"), RuntimeState::Failed);
}

/// Before the load what the flags and files say, after it what the processes hold, and then an estimate
/// again, which says so.
#[test]
fn the_memory_of_children_is_estimated_and_then_measured() {
    let gguf = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/models/tiny_llama.gguf"
    );
    let file_bytes = std::fs::metadata(gguf).expect("it is committed").len();
    let mut child = llama("ctx_size = 4096\n");
    child.file = gguf.into();
    let vllm = vllm("kv_cache_memory_bytes = 1048576\n");
    for (source, weight_bytes) in [
        (ModelSource::LlamaServer(child), file_bytes),
        (ModelSource::VllmServe(vllm), 0),
    ] {
        let mut config = ModelConfig::new("child", source);
        config.lifecycle.replicas = 2;
        let pool = pool_of(config);
        let memory = || pool.report("child").expect("configured").memory;
        let before = memory();
        assert_eq!(before.source, MemorySource::ArtifactSize);
        assert_eq!(before.weight_bytes, 2 * weight_bytes);
        assert!(before.kv_bytes > 0, "{before:?}");
        assert_eq!(load(&pool, "child"), RuntimeState::Loaded);
        let after = memory();
        if after.device == before.device && after.source == MemorySource::ArtifactSize {
            continue; // a machine with a GPU: what vLLM holds there is not measured
        }
        assert_eq!(after.source, MemorySource::MeasuredLoadDelta);
        // Two interpreters of Python.
        assert!(after.total_bytes() > 4 << 20, "{after:?}");
        let used = pool.devices()[0].used_bytes;
        assert_eq!(
            used,
            after.total_bytes(),
            "the ledger counts what was measured"
        );
        pool.unload("child", None).expect("it is there");
        let state = pool.wait_settled("child", PATIENCE);
        assert_eq!(state, Some(RuntimeState::Unloaded));
        assert_eq!(pool.devices()[0].used_bytes, 0);
        assert_eq!(memory(), after, "the best estimate of the next load");
    }
}

/// What clients and probes see while replicas are lost: `degraded`, then `no_replica` with the time to come
/// again, then an answer as if nothing had been.
#[test]
fn lost_replicas_are_told_through_http() {
    let ports = [0; 2].map(|_| free_port().expect("there is one"));
    let first = Elsewhere::start(ports[0]);
    Elsewhere::wait_ready(ports[0]);
    let urls = ports.map(|port| format!("http://127.0.0.1:{port}/v1"));
    let config = format!(
        "[models.far]\nexecutor = {{ replica_wait_ms = 100, restart_backoff_ms = 20, \
         restart_backoff_max_ms = 50 }}\n\
         [models.far.openai_remote]\nbase_urls = {urls:?}\nmodel = \"m\"\n\
         allow_remote = \"always\"\nlimits = {{ retries = 0, failures_max = 1 }}\n"
    );
    let serve = Serve::start("circuits", &config, &[]);
    let health = || Client::connect(serve.address).get("/health");
    let chat = || {
        let body = json!({"model": "far", "max_tokens": 3,
            "messages": [{"role": "user", "content": "tokens 2"}]});
        Client::connect(serve.address).post("/v1/chat/completions", &body)
    };
    wait_for("the absent server to be told", || {
        health().json()["status"] == "degraded"
    });
    let degraded = health();
    assert_eq!(degraded.status, 200);
    assert_eq!(degraded.json()["replicas"][0]["replica"], 1);
    assert_eq!(degraded.json()["replicas"][0]["model"], "far");
    assert_eq!(chat().status, 200);
    drop(first);
    wait_for("the refusal", || {
        chat().json()["error"]["code"] == "no_replica"
    });
    let refused = chat();
    assert_eq!(refused.status, 503, "{}", refused.json());
    let retry_after = refused.header("retry-after").map(str::parse::<u32>);
    assert!(matches!(retry_after, Some(Ok(1..=30))), "{retry_after:?}");
    assert_eq!(
        health().json()["replicas"].as_array().map(Vec::len),
        Some(2)
    );
    let _again = Elsewhere::start(ports[0]);
    wait_for("an answer", || chat().status == 200);
}
