//! What a load may change, and for how long.

use crate::support::{Bench, model};
use serde_json::{Value, json};
use tinyloop::config::{ModelConfig, ModelSource, TargetInflight};
use tinyloop::pool::overrides::{Known, SizeShape, apply, constraints};
use tinyloop::pool::{LoadOverride, PoolError, RuntimeState};

fn overrides(of: &Value) -> LoadOverride {
    LoadOverride(of.as_object().expect("an object").clone())
}

/// Ten bytes of KV a token, 2048 tokens at most, room for 5000 tokens beside the weights.
const KNOWN: Known = Known {
    fixed_bytes: 10_000,
    replica_bytes: 0,
    kv_bytes_per_token: 10,
    trained_context: Some(2048),
    kv_tokens_max: None,
    limit_bytes: 60_000,
    shape: SizeShape {
        row_bytes: 0,
        sequence_bytes: 0,
        context_bytes: 0,
        rows_follow_context: false,
    },
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
        (json!({"replicas": 9}), "replicas", "'replicas' is 9; it must be a whole number from 1 to 6"),
        (json!({"replicas": 0}), "replicas", "from 1 to 6"),
        (json!({"replicas": 1.5}), "replicas", "a whole number"),
        (json!({"replicas": "2"}), "replicas", "\"2\""),
        (json!({"replicas": null}), "replicas", "null"),
        (json!({"target_inflight": "many"}), "target_inflight", "or \"auto\""),
        (json!({"dtype": "f16"}), "dtype", "cannot be overridden at load; this model takes replicas,"),
        (json!({"kv_tokens": 50, "kv_bytes": 500}), "kv_tokens", "give one of them"),
        (json!({"kv_bytes": 1}), "kv_bytes", "'kv_bytes' is 1; it must be a whole number from 160 to 49929"),
        (json!({"kv_tokens": 5001}), "kv_tokens", "from 16 to 4992"),
        (json!({"kv_tokens": 5000, "replicas": 2}), "kv_tokens", "from 16 to 2000"),
        (json!({"context_length": 4096}), "context_length", "from 1 to 1248"),
        (json!({"context_length": 1000, "kv_tokens": 999}), "kv_tokens", "from 1000 to 4992"),
        (json!({"context_length": 0}), "context_length", "from 1 to 1248"),
        (json!({"context_length": 2049, "max_sequences": 4}), "context_length", "from 1 to 2048"),
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
        json!({"type": "integer", "min": 1, "max": 6})
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
    assert_eq!(range(&llama, &KNOWN, "context_length"), integer(256, 2048));
}

/// A context is one request's for every source: llama-server is told that of all its slots.
#[test]
fn the_context_of_a_llama_server_is_that_of_one_request() {
    let llama = |text: &str| {
        let child = toml::from_str(text).expect("valid");
        ModelConfig::new("l", ModelSource::LlamaServer(child))
    };
    let loaded = |config: &ModelConfig, of: Value| {
        let config = apply(config, &overrides(&of), &KNOWN).expect("in range");
        match config.source {
            ModelSource::LlamaServer(child) => (child.slots, child.ctx_size),
            other => panic!("{other:?}"),
        }
    };
    let two = llama("file = \"x.gguf\"\nslots = 2\nctx_size = 512");
    let context = json!({"context_length": 1024});
    assert_eq!(loaded(&two, context.clone()), (Some(2), Some(2048)));
    let both = json!({"context_length": 256, "slots": 8});
    assert_eq!(loaded(&two, both), (Some(8), Some(2048)));
    // Its own four slots are named, so that none takes the context of the others.
    let unset = llama("file = \"x.gguf\"");
    assert_eq!(loaded(&unset, context), (Some(4), Some(4096)));
    // 5000 tokens fit: 19 slots of 256, and 2 slots of 2304 if the model could.
    let ranges = constraints(&two, &KNOWN).to_json();
    assert_eq!(ranges["slots"]["max"], 19);
    let many = overrides(&json!({"slots": 19, "context_length": 512}));
    let error = apply(&two, &many, &KNOWN).expect_err("they do not fit");
    assert!(error.to_string().contains("from 256 to 256"), "{error}");
}

/// What is offered can be loaded, as far as the device's limit tells.
#[test]
fn upper_ends_are_within_the_limit_of_the_device() {
    let most = |config: &ModelConfig, known: &Known, field: &str| {
        constraints(config, known).to_json()[field]["max"].clone()
    };
    // A quarter of 2048 tokens for each sequence, out of 5000.
    assert_eq!(most(&native(), &KNOWN, "max_sequences"), 9);
    let both = json!({"max_sequences": 50, "context_length": 256});
    let both = apply(&native(), &overrides(&both), &KNOWN).expect("a shorter context leaves room");
    assert_eq!(both.engine.max_sequences, 50);
    let pool = json!({"max_sequences": 50, "kv_tokens": 4000});
    apply(&native(), &overrides(&pool), &KNOWN).expect("the pool has its own size");
    // Replicas as they are configured, or as small as they can be made.
    let known = Known {
        replica_bytes: 25_000,
        ..KNOWN
    };
    assert_eq!(most(&native(), &known, "replicas"), 2);
    let small = json!({"replicas": 5, "kv_tokens": 100});
    apply(&native(), &overrides(&small), &known).expect("five of 11000 bytes fit");
    let large = json!({"replicas": 3});
    assert!(apply(&native(), &overrides(&large), &known).is_err());
    let huge = Known {
        replica_bytes: 70_000,
        ..KNOWN
    };
    assert_eq!(
        most(&native(), &huge, "replicas"),
        1,
        "never below the least"
    );
    assert_eq!(most(&native(), &Known::default(), "replicas"), 8);
    assert_eq!(most(&native(), &Known::default(), "max_sequences"), 4096);
}

/// A flag in `extra_args` that says the same as a field gives way to an override of it.
#[test]
fn flags_that_say_the_same_give_way_to_an_override() {
    let known = Known::default();
    let llama = "file = \"x.gguf\"\n[process]\nextra_args = [\"-c\", \"8192\", \"--jinja\", \
                 \"--parallel\", \"8\", \"-np\", \"6\"]";
    let llama = ModelSource::LlamaServer(toml::from_str(llama).expect("valid"));
    let llama = ModelConfig::new("l", llama);
    let told = |of: Value| {
        let config = apply(&llama, &overrides(&of), &known).expect("in range");
        match config.source {
            ModelSource::LlamaServer(child) => {
                assert_eq!(child.process.extra_args, ["--jinja"], "{of}");
                (child.slots, child.ctx_size)
            }
            other => panic!("{other:?}"),
        }
    };
    // The slots of the flags count for the context of each.
    let context = json!({"context_length": 1024});
    assert_eq!(told(context), (Some(6), Some(6144)));
    assert_eq!(told(json!({"slots": 2})), (Some(2), Some(8192)));
    let both = json!({"slots": 2, "context_length": 512});
    assert_eq!(told(both), (Some(2), Some(1024)));
    let vllm = "model = \"m\"\n[process]\nextra_args = [\"--max_num_seqs=4\", \"--dtype\", \"half\", \
                \"--max-model-len\", \"1k\", \"--enforce-eager\"]";
    let vllm = ModelSource::VllmServe(toml::from_str(vllm).expect("valid"));
    let vllm = ModelConfig::new("v", vllm);
    let of = overrides(&json!({"max_num_seqs": 9, "context_length": 100}));
    let config = apply(&vllm, &of, &known).expect("in range");
    let ModelSource::VllmServe(child) = config.source else {
        panic!("it is one still");
    };
    assert_eq!((child.max_num_seqs, child.max_model_len), (9, Some(100)));
    assert_eq!(child.dtype.as_deref(), Some("half"));
    assert_eq!(child.process.extra_args, ["--enforce-eager"]);
}
