//! A real llama-server with the demo model, where there is one: what the ledger thinks of it, overrides,
//! embeddings. See `tests/scripts/llama_server.sh`.

use crate::support::{PATIENCE, five_tokens, forwarded, real_llama, submit};
use serde_json::json;
use std::sync::Arc;
use tinyloop::config::{ModelConfig, ModelSource, PoolConfig};
use tinyloop::pool::estimate_foreign::of_llama_server;
use tinyloop::pool::ledger::MemorySource;
use tinyloop::pool::{LoadOverride, Pool, PoolError, RuntimeState};
use tinyloop::request::{GenerationEvent, UpstreamPrompt};
use tinyloop::runtime::{Feature, Runtime, llama_server};
use tinyloop::scheduler::Metrics;

/// It never holds more than it was estimated to need, before its first request and after some, and not much
/// less.
#[test]
fn llama_server_real_holds_what_it_was_estimated_to_need() {
    for (keys, args) in [
        ("", ""),
        ("slots = 1\nctx_size = 2048\n", ""),
        ("slots = 4\nctx_size = 1000\n", ""),
        ("slots = 64\nctx_size = 8192\n", ""),
        (
            "slots = 2\nctx_size = 8192\n",
            ", \"-ctk\", \"q8_0\", \"-ctv\", \"q8_0\"",
        ),
        ("", ", \"-np\", \"2\", \"-c\", \"4096\", \"-ub\", \"64\""),
    ] {
        let Some(config) = real_llama(keys, args) else {
            return;
        };
        let runtime = llama_server::start("real", &config, 0).expect("it starts");
        let needed = of_llama_server(&config).memory.total_bytes();
        let at_start = runtime.resident_bytes().expect("it runs");
        let job = five_tokens(&"word ".repeat(150));
        submit(&runtime, job).finish().end.expect("ends well");
        let later = runtime.resident_bytes().expect("it runs");
        eprintln!("{keys:?} {args:?}: needs {needed}, holds {at_start}, then {later}");
        assert!(at_start.max(later) <= needed, "{keys:?} {args:?}: {needed}");
        assert!(needed <= at_start * 2, "{keys:?} {args:?}: {needed}");
    }
}

/// Where exactly as much is free as it was estimated to need it is loaded and stays; with a byte less, or
/// with more slots than fit, it is refused before it starts. Overrides win over flags.
#[test]
fn llama_server_real_is_loaded_up_to_the_limit() {
    let Some(child) = real_llama("", ", \"-np\", \"2\", \"-c\", \"2048\"") else {
        return;
    };
    let needed = of_llama_server(&child).memory.total_bytes();
    let with = |bytes: u64| {
        let limits = PoolConfig {
            cpu_bytes: Some(bytes),
            ..PoolConfig::default()
        };
        let pool = Pool::with_config(Arc::new(Metrics::new()), limits);
        let source = ModelSource::LlamaServer(child.clone());
        pool.add(ModelConfig::new("real", source))
            .expect("it is new");
        pool
    };
    let refused = with(needed - 1).load("real", &LoadOverride::default());
    assert!(
        matches!(refused, Err(PoolError::NoRoom { .. })),
        "{refused:?}"
    );
    let pool = with(needed);
    let most = |field: &str| {
        let ranges = pool.report("real").expect("configured").load_constraints;
        ranges.to_json()[field]["max"].as_u64().expect("a number")
    };
    assert_eq!((most("context_length"), most("slots")), (1024, 2));
    let loads = [
        json!({}),
        json!({"context_length": 512}),
        json!({"slots": 1}),
    ];
    for (of, expected) in loads.into_iter().zip([(2, 1024), (2, 512), (1, 2048)]) {
        let fields = LoadOverride(of.as_object().expect("an object").clone());
        pool.load("real", &fields).expect("there is room");
        let state = pool.wait_settled("real", PATIENCE);
        let report = pool.report("real").expect("configured");
        assert_eq!(state, Some(RuntimeState::Loaded), "{:?}", report.last_error);
        assert_eq!(report.memory.source, MemorySource::MeasuredLoadDelta);
        let context = pool.get("real").expect("loaded").context_length;
        assert_eq!(
            (report.capability_inflight, context),
            (Some(expected.0), expected.1),
            "{of}"
        );
        pool.unload("real", None).expect("it is there");
        let state = pool.wait_settled("real", PATIENCE);
        assert_eq!(state, Some(RuntimeState::Unloaded));
    }
}

#[test]
fn llama_server_real_makes_embeddings_beside_text() {
    let args = ", \"--pooling\", \"mean\"";
    let Some(config) = real_llama("embeddings = \"also\"\nslots = 2\nctx_size = 2048\n", args)
    else {
        return;
    };
    let runtime = llama_server::start("real", &config, 0).expect("it starts");
    assert!(runtime.capabilities().has(Feature::Embeddings));
    let texts = ["a ship", "a boat", "mathematics"].map(str::to_owned);
    let job = forwarded(UpstreamPrompt::Inputs(texts.to_vec()), json!({}));
    let job = submit(&runtime, job);
    let mut vectors = Vec::new();
    let usage = loop {
        match job.next() {
            GenerationEvent::Embedding(vector) => vectors.push(vector),
            GenerationEvent::Finished { usage, .. } => break usage,
            other => panic!("{other:?}"),
        }
    };
    assert!(vectors.len() == 3 && vectors.iter().all(|vector| vector.len() == 576));
    assert!(usage.prompt_tokens >= 5, "{usage:?}");
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    assert!(near(&vectors[0], &vectors[1]) > near(&vectors[0], &vectors[2]));
    let ended = submit(&runtime, five_tokens("Tell me a story.")).finish();
    assert!(ended.end.is_ok(), "{ended:?}");
}
