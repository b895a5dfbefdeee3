//! What a load may change, and for how long.

use crate::support::{Bench, model};
use serde_json::{Value, json};
use tinyloop::config::{ModelConfig, ModelSource, TargetInflight};
use tinyloop::pool::overrides::{Known, apply, constraints};
use tinyloop::pool::{LoadOverride, PoolError, RuntimeState};

fn overrides(of: &Value) -> LoadOverride {
    LoadOverride(of.as_object().expect("an object").clone())
}

/// Ten bytes of KV a token, 2048 tokens at most, room for 5000 tokens beside the weights.
const KNOWN: Known = Known {
    fixed_bytes: 10_000,
    kv_bytes_per_token: 10,
    trained_context: Some(2048),
    kv_tokens_max: None,
    limit_bytes: 60_000,
};

fn native() -> ModelConfig {
    ModelConfig::new("n", ModelSource::File("x.gguf".into()))
}

#[test]
fn listed_fields_in_their_ranges_are_taken_over() {
    let of = json!({
        "replicas": 2, "target_inflight": 7, "context_length": 100, "kv_bytes": 1000,
        "max_sequences": 2, "threads": 1, "max_queue_depth": 0,
    });
    let config = apply(&native(), &overrides(&of), &KNOWN).expect("all is in range");
    assert_eq!(config.lifecycle.replicas, 2);
    assert_eq!(
        config.executor.target_inflight,
        Some(TargetInflight::Jobs(7))
    );
    assert_eq!(config.executor.max_queue_depth, 0);
    let engine = config.engine;
    assert_eq!(
        (engine.context_length, engine.kv_tokens),
        (Some(100), Some(100))
    );
    assert_eq!((engine.max_sequences, engine.threads), (2, Some(1)));
    let auto = apply(
        &native(),
        &overrides(&json!({"target_inflight": "auto"})),
        &KNOWN,
    );
    let auto = auto.expect("a word instead of a number");
    assert_eq!(auto.executor.target_inflight, Some(TargetInflight::Auto));
}

#[test]
fn everything_else_is_refused_by_name_and_range() {
    #[rustfmt::skip]
    let table = [
        (json!({"replicas": 9}), "replicas", "'replicas' is 9; it must be a whole number from 1 to 8"),
        (json!({"replicas": 0}), "replicas", "from 1 to 8"),
        (json!({"replicas": 1.5}), "replicas", "a whole number"),
        (json!({"replicas": "2"}), "replicas", "\"2\""),
        (json!({"replicas": null}), "replicas", "null"),
        (json!({"target_inflight": "many"}), "target_inflight", "or \"auto\""),
        (json!({"dtype": "f16"}), "dtype", "cannot be overridden at load; this model takes replicas,"),
        (json!({"kv_tokens": 50, "kv_bytes": 500}), "kv_tokens", "give one of them"),
        (json!({"kv_bytes": 1}), "kv_bytes", "'kv_bytes' is 1; it must be a whole number from 160 to 50009"),
        (json!({"kv_tokens": 5001}), "kv_tokens", "from 16 to 5000"),
        (json!({"kv_tokens": 5000, "replicas": 2}), "kv_tokens", "from 16 to 2000"),
        (json!({"context_length": 4096}), "context_length", "from 1 to 2048"),
        (json!({"context_length": 1000, "kv_tokens": 999}), "kv_tokens", "from 1000 to 5000"),
        (json!({"context_length": 0}), "context_length", "from 1 to 2048"),
        (json!({"threads": 1000}), "threads", "from 1 to"),
    ];
    for (of, field, text) in table {
        let error = apply(&native(), &overrides(&of), &KNOWN).expect_err("refused");
        assert_eq!(error.field(), field, "{of}");
        assert!(error.to_string().contains(text), "{error} lacks {text}");
    }
    let shown = constraints(&native(), &KNOWN).to_json();
    assert_eq!(
        shown["replicas"],
        json!({"type": "integer", "min": 1, "max": 8})
    );
    assert_eq!(shown["target_inflight"]["or"], "auto");
}

#[test]
fn an_override_lasts_as_long_as_the_model_stays_loaded() {
    let bench = Bench::new(&[("a", 20)]);
    bench.add(model("a"));
    let three = overrides(&json!({"replicas": 3}));
    bench.pool.load("a", &three).expect("3 * 20 fit into 100");
    assert_eq!(bench.settled("a"), RuntimeState::Loaded);
    let report = bench.pool.report("a").expect("configured");
    assert_eq!((report.replicas, report.memory.total_bytes()), (3, 60));
    assert_eq!(report.load_override, three);
    assert_eq!(
        report.definition["replicas"], 1,
        "the configuration is as before"
    );
    bench.pool.unload("a", None).expect("it is there");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    bench.loaded("a");
    let report = bench.pool.report("a").expect("configured");
    assert_eq!((report.replicas, report.memory.total_bytes()), (1, 20));
    assert_eq!(report.load_override, LoadOverride::default());
    let six = bench.pool.load("a", &overrides(&json!({"replicas": 60})));
    assert!(
        matches!(six, Err(PoolError::Override(_))),
        "checked for loaded ones too"
    );
}

#[test]
fn ranges_follow_what_is_configured_and_what_other_programs_take() {
    let range = |config: &ModelConfig, known: &Known, field: &str| {
        constraints(config, known).to_json()[field].clone()
    };
    let mut windowed = native();
    windowed.engine.cache_window = 64;
    windowed.engine.kv_tokens = Some(100);
    // A context may be longer than the pool, and must hold a window.
    let integer = |min: u64, max: u64| json!({"type": "integer", "min": min, "max": max});
    assert_eq!(
        range(&windowed, &KNOWN, "context_length"),
        integer(64, 2048)
    );
    let mut held = native();
    held.engine.kv_tokens = Some(100);
    assert_eq!(range(&held, &KNOWN, "context_length"), integer(1, 100));
    // What is overridden too does not count any more.
    let both = overrides(&json!({"context_length": 200, "kv_tokens": 300}));
    let both = apply(&held, &both, &KNOWN).expect("both are in range");
    assert_eq!(both.engine.kv_tokens, Some(300));
    let unknown = Known::default();
    assert_eq!(
        range(&native(), &unknown, "context_length"),
        integer(1, u64::from(u32::MAX))
    );
    let vllm: ModelSource = ModelSource::VllmServe(
        toml::from_str("model = \"m\"\nmax_model_len = 100\ntensor_parallel_size = 2")
            .expect("valid"),
    );
    let vllm = ModelConfig::new("v", vllm);
    assert_eq!(range(&vllm, &KNOWN, "kv_bytes"), integer(500, 50_000));
    let words = range(&vllm, &KNOWN, "dtype")["enum"].clone();
    assert!(
        words
            .as_array()
            .expect("words")
            .contains(&json!("bfloat16")),
        "{words}"
    );
    for bad in [json!("int3"), json!(""), json!(3)] {
        let error =
            apply(&vllm, &overrides(&json!({"dtype": bad})), &KNOWN).expect_err("no such type");
        assert_eq!(error.field(), "dtype");
        assert!(
            error.to_string().contains("one of \"auto\", \"half\""),
            "{error}"
        );
    }
    let llama =
        ModelSource::LlamaServer(toml::from_str("file = \"x.gguf\"\nslots = 2").expect("valid"));
    let llama = ModelConfig::new("l", llama);
    assert_eq!(range(&llama, &KNOWN, "context_length"), integer(256, 4096));
}
