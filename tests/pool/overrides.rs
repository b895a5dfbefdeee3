//! What a load may change, and for how long.

use crate::support::{Bench, model};
use serde_json::{Value, json};
use tinyloop::config::{ModelConfig, ModelSource, OpenaiRemoteConfig, TargetInflight};
use tinyloop::pool::overrides::{apply, constraints, definition};
use tinyloop::pool::{LoadOverride, PoolError, RuntimeState};

fn overrides(of: &Value) -> LoadOverride {
    LoadOverride(of.as_object().expect("an object").clone())
}

fn native() -> ModelConfig {
    ModelConfig::new("n", ModelSource::File("x.gguf".into()))
}

#[test]
fn listed_fields_in_their_ranges_are_taken_over() {
    let of = json!({
        "replicas": 3, "target_inflight": 7, "context_length": 512, "kv_bytes": 1000,
        "max_sequences": 2, "threads": 4, "max_queue_depth": 0,
    });
    let config = apply(&native(), &overrides(&of), 10).expect("all is in range");
    assert_eq!(config.lifecycle.replicas, 3);
    assert_eq!(
        config.executor.target_inflight,
        Some(TargetInflight::Jobs(7))
    );
    assert_eq!(config.executor.max_queue_depth, 0);
    let engine = config.engine;
    assert_eq!(
        (engine.context_length, engine.kv_tokens),
        (Some(512), Some(100))
    );
    assert_eq!((engine.max_sequences, engine.threads), (2, Some(4)));
    let auto = apply(
        &native(),
        &overrides(&json!({"target_inflight": "auto"})),
        0,
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
        (json!({"kv_tokens": 5, "kv_bytes": 5}), "kv_tokens", "give one of them"),
    ];
    for (of, field, text) in table {
        let error = apply(&native(), &overrides(&of), 10).expect_err("refused");
        assert_eq!(error.field(), field, "{of}");
        assert!(error.to_string().contains(text), "{error} lacks {text}");
    }
    let shown = constraints(&native()).to_json();
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
fn definitions_hold_no_secrets() {
    let remote: OpenaiRemoteConfig = toml::from_str(
        "base_url = \"https://user:pass@host/v1?key=abc\"\nmodel = \"m\"\napi_key_env = \"THE_KEY\"",
    )
    .expect("the shape is right");
    let config = ModelConfig::new("r", ModelSource::OpenaiRemote(remote));
    let shown = definition(&config);
    assert_eq!(
        shown["openai_remote"]["base_urls"],
        json!(["https://host/v1"])
    );
    assert_eq!(shown["openai_remote"]["api_key_env"], "THE_KEY");
    let child = toml::from_str(
        "file = \"m.gguf\"\n[process]\nextra_args = [\"--api-key\", \"abc\", \"--hf-token=abc\", \"-v\"]",
    )
    .expect("the shape is right");
    let config = ModelConfig::new("c", ModelSource::LlamaServer(child));
    let args = &definition(&config)["llama_server"]["extra_args"];
    assert_eq!(*args, json!(["--api-key", "***", "--hf-token=***", "-v"]));
}
