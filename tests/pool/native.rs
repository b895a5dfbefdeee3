//! The real loader with the committed tiny model: two replicas, estimates, memory that comes back.

use crate::support::PATIENCE;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::{ModelConfig, ModelSource, PoolConfig};
use tinyloop::pool::ledger::MemorySource;
use tinyloop::pool::{LoadOverride, LoadedModel, Pool, PoolError, RuntimeState};
use tinyloop::request::GenerationRequest;
use tinyloop::scheduler::{Metrics, SubmitOptions, Ticket};

fn tiny() -> ModelConfig {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    let mut config = ModelConfig::new("tiny", ModelSource::File(file));
    config.engine.threads = Some(1);
    config.engine.max_sequences = 2;
    config.lifecycle.replicas = 2;
    config
}

fn greedy(model: &LoadedModel) -> Ticket {
    let mut request = GenerationRequest::new(vec![1_u32, 2], 4);
    request.sampling.temperature = 0.0;
    let ticket = model.executor.submit(request, SubmitOptions::default());
    ticket.expect("there is room in the queue")
}

fn pool() -> Pool {
    let config = PoolConfig {
        cpu_bytes: Some(1 << 30),
        ..PoolConfig::default()
    };
    Pool::with_config(Arc::new(Metrics::new()), config)
}

#[test]
fn replicas_are_loaded_answer_the_same_and_are_gone_after_an_unload() {
    let pool = pool();
    pool.add(tiny()).expect("the name is new");
    let estimate = pool.report("tiny").expect("configured").memory;
    assert_eq!(estimate.source, MemorySource::ArtifactSize);
    for round in 0..2 {
        pool.load("tiny", &LoadOverride::default())
            .expect("there is room");
        assert_eq!(
            pool.wait_settled("tiny", PATIENCE),
            Some(RuntimeState::Loaded)
        );
        let report = pool.report("tiny").expect("configured");
        assert_eq!((report.loaded_replicas, report.replicas), (2, 2));
        assert!(
            report.resolved_backend.starts_with("native (cpu"),
            "{}",
            report.resolved_backend
        );
        assert_eq!(report.memory.source, MemorySource::MeasuredLoadDelta);
        assert_eq!(report.memory.kv_bytes, estimate.kv_bytes);
        let ratio = estimate.total_bytes() as f64 / report.memory.total_bytes() as f64;
        assert!((0.7..1.5).contains(&ratio), "estimate / measured = {ratio}");
        let model = pool.get("tiny").expect("loaded");
        // More than one replica holds: both work.
        let tickets: Vec<_> = (0..8).map(|_| greedy(&model)).collect();
        let answers: Vec<_> = tickets
            .into_iter()
            .map(|one| one.wait().expect("it runs"))
            .collect();
        assert!(
            answers.iter().all(|one| one.tokens == answers[0].tokens),
            "round {round}"
        );
        let watch = model.runtimes.clone();
        assert_eq!(watch.n_left(), 2);
        drop(model);
        pool.unload("tiny", Some(Duration::from_secs(1)))
            .expect("it is there");
        assert_eq!(
            pool.wait_settled("tiny", PATIENCE),
            Some(RuntimeState::Unloaded)
        );
        assert_eq!((watch.n_left(), pool.devices()[0].used_bytes), (0, 0));
    }
}

#[test]
fn a_file_that_is_not_there_fails_with_its_name() {
    let pool = pool();
    let mut config = tiny();
    config.source = ModelSource::File("/does/not/exist.gguf".into());
    pool.add(config).expect("the name is new");
    let memory = pool.report("tiny").expect("configured").memory;
    assert_eq!(memory.source, MemorySource::Unavailable);
    pool.load("tiny", &LoadOverride::default())
        .expect("it begins");
    assert_eq!(
        pool.wait_settled("tiny", PATIENCE),
        Some(RuntimeState::Failed)
    );
    let why = pool.report("tiny").and_then(|report| report.last_error);
    assert!(why.is_some_and(|why| why.contains("exist.gguf")));
}

#[test]
fn overrides_that_the_model_cannot_be_loaded_with_are_refused_before_they_are_tried() {
    let pool = pool();
    pool.add(tiny()).expect("the name is new");
    // As the page shows them.
    let shown = pool
        .report("tiny")
        .expect("configured")
        .load_constraints
        .to_json();
    let trained = shown["context_length"]["max"].as_u64().expect("a number");
    assert!((16..4096).contains(&trained), "{trained}");
    let load = |of: serde_json::Value| {
        let of = LoadOverride(of.as_object().expect("an object").clone());
        pool.load("tiny", &of)
    };
    for (of, field) in [
        (json!({"kv_bytes": 1}), "kv_bytes"),
        (json!({"kv_bytes": 1_u64 << 49}), "kv_bytes"),
        (json!({"kv_tokens": 1_u64 << 39}), "kv_tokens"),
        (json!({"context_length": trained + 1}), "context_length"),
        (json!({"context_length": u32::MAX}), "context_length"),
    ] {
        let error = load(of.clone()).expect_err("out of range");
        let text = error.to_string();
        assert!(
            text.contains(field) && text.contains("it must be a whole number from"),
            "{text}"
        );
        assert_eq!(
            pool.report("tiny").expect("configured").runtime_state,
            RuntimeState::Unloaded
        );
    }
    // Both ends of every range can really be loaded.
    for (field, end) in [
        ("kv_bytes", "min"),
        ("kv_tokens", "min"),
        ("context_length", "min"),
        ("context_length", "max"),
        ("threads", "max"),
        ("max_sequences", "min"),
    ] {
        let value = shown[field][end].as_u64().expect("a number");
        let answer = load(json!({field: value}));
        answer.unwrap_or_else(|error| panic!("{field} {end} {value}: {error}"));
        let state = pool.wait_settled("tiny", PATIENCE);
        assert_eq!(state, Some(RuntimeState::Loaded), "{field} {end} {value}");
        pool.unload("tiny", None).expect("it is there");
        assert_eq!(
            pool.wait_settled("tiny", PATIENCE),
            Some(RuntimeState::Unloaded)
        );
    }
}

/// The largest sizes that are told of a load are such that it is taken and stays, also where the device
/// is nearly full; one more is out of range, not a conflict.
#[test]
fn the_upper_ends_that_are_told_can_be_loaded_under_a_tight_limit() {
    let mut config = tiny();
    config.lifecycle.replicas = 1;
    config.engine.max_sequences = 16;
    let needed = {
        let pool = pool();
        pool.add(config.clone()).expect("the name is new");
        pool.report("tiny").expect("configured").memory
    };
    // Room for the weights, the buffers and a part of the usual pool.
    let fixed = needed.weight_bytes + needed.scratch_bytes;
    for part in [3, 5, 9] {
        let limits = PoolConfig {
            cpu_bytes: Some(fixed + needed.kv_bytes * part / 10),
            ..PoolConfig::default()
        };
        let pool = Pool::with_config(Arc::new(Metrics::new()), limits);
        pool.add(config.clone()).expect("the name is new");
        for field in ["context_length", "kv_tokens", "kv_bytes", "max_sequences"] {
            let ranges = pool.report("tiny").expect("configured").load_constraints;
            let most = ranges.to_json()[field]["max"].as_u64().expect("a number");
            let asked = |value: u64| {
                let mut fields = serde_json::Map::new();
                fields.insert(field.to_owned(), json!(value));
                pool.load("tiny", &LoadOverride(fields))
            };
            let more = asked(most + 1);
            assert!(
                matches!(more, Err(PoolError::Override(_))),
                "{field}: {more:?}"
            );
            asked(most).unwrap_or_else(|error| panic!("{part}: {field} = {most}: {error}"));
            let state = pool.wait_settled("tiny", PATIENCE);
            let why = pool.report("tiny").expect("configured").last_error;
            assert_eq!(
                state,
                Some(RuntimeState::Loaded),
                "{part}: {field} = {most}: {why:?}"
            );
            pool.unload("tiny", Some(Duration::ZERO))
                .expect("it is there");
            let state = pool.wait_settled("tiny", PATIENCE);
            assert_eq!(state, Some(RuntimeState::Unloaded), "{field}");
        }
    }
}
