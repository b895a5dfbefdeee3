//! A model on an emulated GPU behind pool, executor and HTTP: the CPU's answer, its bytes on its
//! device, and what remains when the device is lost.

use crate::fake_cuda::FakeCuda;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tinyloop::config::{Config, DeviceChoice, EngineConfig, ModelConfig, ModelSource};
use tinyloop::pool::Pool;
use tinyloop::pool::ledger::DeviceId;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

const PATIENCE: Duration = Duration::from_secs(120);

fn model(name: &str, device: DeviceChoice) -> ModelConfig {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    ModelConfig {
        engine: EngineConfig {
            device,
            threads: Some(1),
            context_length: Some(128),
            max_sequences: 2,
            ..EngineConfig::default()
        },
        ..ModelConfig::new(name, ModelSource::File(file))
    }
}

/// Status and body of a greedy completion.
fn complete(server: &Server, model: &str) -> (u16, Value) {
    let url = format!("http://{}/v1/completions", server.address());
    let body = json!({"model": model, "prompt": "the ship", "max_tokens": 4, "temperature": 0,
        "ignore_eos": true});
    let agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .build()
        .new_agent();
    let answer = agent
        .post(&url)
        .header("content-type", "application/json")
        .send(body.to_string());
    let mut answer = answer.expect("the server answers");
    let text = answer.body_mut().read_to_string().expect("a text");
    let status = answer.status().as_u16();
    (status, serde_json::from_str(&text).expect("JSON"))
}

#[test]
fn a_model_on_a_gpu_answers_like_the_cpu_until_the_gpu_is_lost() {
    let cuda = FakeCuda::open();
    let number = cuda.take_device();
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let on_gpu = DeviceChoice::CudaNumber(number as u32);
    for (name, device) in [("gpu", on_gpu), ("cpu", DeviceChoice::Cpu)] {
        pool.add(model(name, device)).expect("the names are free");
    }
    pool.load_enabled();
    assert!(pool.wait_started(PATIENCE));
    let loaded = pool.get("gpu").expect("it fits");
    assert_eq!(loaded.meta.memory.device, DeviceId::Cuda(number as u32));
    let ledger = pool.devices();
    let device = DeviceId::Cuda(number as u32);
    let report = ledger.iter().find(|report| report.device == device);
    let report = report.expect("the device is in the ledger");
    assert!(report.used_bytes > 0 && report.limit_bytes < u64::MAX);

    let mut config = Config::default();
    config.server.port = 0;
    config.management.enabled = false;
    let server = Server::start(&config, Arc::clone(&pool)).expect("it starts");
    let (status, wanted) = complete(&server, "cpu");
    assert_eq!(status, 200, "{wanted}");
    let (status, found) = complete(&server, "gpu");
    assert_eq!(status, 200, "{found}");
    assert_eq!(found["choices"][0]["text"], wanted["choices"][0]["text"]);
    assert!(cuda.launches(number) > 0);

    cuda.lose_device(number, 2);
    let (status, failed) = complete(&server, "gpu");
    assert!(status >= 500, "{status} {failed}");
    let (status, still) = complete(&server, "cpu");
    assert_eq!(status, 200, "{still}");
    server.shutdown(Duration::ZERO);
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_numbers() {
    let cuda = FakeCuda::open();
    let number = cuda.take_device();
    drop(tinyloop::backend::cuda::devices()); // starts the driver
    cuda.set_memory(number, 200_000);
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let device = DeviceChoice::CudaNumber(number as u32);
    pool.add(model("gpu", device)).expect("the name is free");
    pool.load_enabled();
    let deadline = Instant::now() + PATIENCE;
    assert!(pool.wait_started(deadline - Instant::now()));
    let entry = pool.find("gpu").expect("it is known");
    let tinyloop::pool::state::State::Failed(why) = &entry.state else {
        panic!("{:?}", entry.state.name());
    };
    let why = why.to_string();
    assert!(why.contains(&format!("cuda:{number}")), "{why}");
    assert!(why.contains("bytes"), "{why}");
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_says_so() {
    FakeCuda::open();
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let device = DeviceChoice::CudaNumber(900);
    pool.add(model("gpu", device)).expect("the name is free");
    pool.load_enabled();
    assert!(pool.wait_started(PATIENCE));
    let entry = pool.find("gpu").expect("it is known");
    let tinyloop::pool::state::State::Failed(why) = &entry.state else {
        panic!("{:?}", entry.state.name());
    };
    assert!(why.to_string().contains("cuda:900"), "{why}");
}
