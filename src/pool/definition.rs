//! What the configuration says of a model, for the admin page: every key by its own name, with its
//! default where nothing was written, secrets redacted.
//!
//! Pure. Every table is taken apart field by field, with no field left out, so that a new key of the
//! configuration does not compile before it was thought of here. What is not here: what a running load
//! overrides (`overrides`).

use crate::config::{
    AllowRemote, CallLimits, Dialect, Embeddings, EngineConfig, ExecutorConfig, FakeConfig,
    LifecycleConfig, LlamaServerConfig, LoopsConfig, ModelConfig, ModelSource, OpenaiRemoteConfig,
    Pooling, PrefixIsolation, ProcessConfig, QuantizeType, TargetInflight, VllmServeConfig,
};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Stands in the place of a secret.
const HIDDEN: &str = "***";

/// The whole definition of a model.
#[must_use]
pub fn definition(config: &ModelConfig) -> Value {
    let ModelConfig {
        name: _, // the row's own
        aliases,
        source,
        executor,
        engine,
        lifecycle,
        tool_format,
    } = config;
    let mut shown = lifecycle_shown(lifecycle);
    shown["tool_format"] = json!(tool_format);
    shown["aliases"] = json!(aliases);
    shown["executor"] = executor_shown(executor);
    let (key, source) = match source {
        ModelSource::File(path) => {
            shown["engine"] = engine_shown(engine);
            ("file", path_shown(path))
        }
        ModelSource::Fake(fake) => (config.source.backend(), fake_shown(fake)),
        ModelSource::OpenaiRemote(remote) => (config.source.backend(), remote_shown(remote)),
        ModelSource::LlamaServer(child) => (config.source.backend(), llama_shown(child)),
        ModelSource::VllmServe(child) => (config.source.backend(), vllm_shown(child)),
    };
    shown[key] = source;
    shown
}

fn seconds(duration: Duration) -> Value {
    json!(duration.as_secs_f64())
}

fn milliseconds(duration: Duration) -> Value {
    json!(duration.as_millis() as u64)
}

fn path_shown(path: &Path) -> Value {
    json!(path.display().to_string())
}

/// A number of jobs, or `auto`.
pub(crate) fn target_shown(target: TargetInflight) -> Value {
    match target {
        TargetInflight::Jobs(n_jobs) => json!(n_jobs),
        TargetInflight::Auto => json!("auto"),
    }
}

fn lifecycle_shown(lifecycle: &LifecycleConfig) -> Value {
    let LifecycleConfig {
        enabled,
        replicas,
        replica_max,
        load_on_demand,
        idle_unload,
        pinned,
        device_weight,
    } = lifecycle;
    json!({
        "enabled": enabled,
        "replicas": replicas,
        "replica_max": replica_max,
        "load_on_demand": load_on_demand,
        "idle_unload_s": idle_unload.map(seconds),
        "pinned": pinned,
        "device_weight": device_weight,
    })
}

fn executor_shown(executor: &ExecutorConfig) -> Value {
    let ExecutorConfig {
        max_queue_depth,
        max_queued_prompt_tokens,
        default_slo_ms,
        prefix_isolation,
        prefix_pool_capacity,
        ema_alpha,
        target_inflight,
        target_inflight_max,
        aging_interval_ms,
        queue_timeout,
        preempt_running,
        max_preemptions,
        restart_backoff,
        restart_backoff_max,
        replica_wait,
    } = executor;
    json!({
        "max_queue_depth": max_queue_depth,
        "max_queued_prompt_tokens": max_queued_prompt_tokens,
        "default_slo_ms": default_slo_ms,
        "prefix_isolation": match prefix_isolation {
            PrefixIsolation::Key => "key",
            PrefixIsolation::Shared => "shared",
        },
        "prefix_pool_capacity": prefix_pool_capacity,
        "ema_alpha": ema_alpha,
        "target_inflight": target_inflight.map(target_shown),
        "target_inflight_max": target_inflight_max,
        "aging_interval_ms": aging_interval_ms,
        "queue_timeout_ms": queue_timeout.map(milliseconds),
        "preempt_running": preempt_running,
        "max_preemptions": max_preemptions,
        "restart_backoff_ms": milliseconds(*restart_backoff),
        "restart_backoff_max_ms": milliseconds(*restart_backoff_max),
        "replica_wait_ms": milliseconds(*replica_wait),
    })
}

fn engine_shown(engine: &EngineConfig) -> Value {
    let EngineConfig {
        context_length,
        max_sequences,
        max_rows,
        prefill_rows_beside_decode,
        kv_tokens,
        threads,
        pooling,
        prefix_cache,
        cache_window,
        loops,
        quantize,
        device,
        cuda_graphs,
    } = engine;
    let LoopsConfig {
        layers,
        default,
        max,
    } = loops;
    json!({
        "context_length": context_length,
        "max_sequences": max_sequences,
        "max_rows": max_rows,
        "prefill_rows_beside_decode": prefill_rows_beside_decode,
        "kv_tokens": kv_tokens,
        "threads": threads,
        "pooling": pooling.map(Pooling::name),
        "prefix_cache": prefix_cache,
        "cache_window": cache_window,
        "device": device.to_string(),
        "cuda_graphs": cuda_graphs,
        "loops": {"layers": layers, "default": default, "max": max},
        "quantize": quantize.map(|wanted| match wanted {
            QuantizeType::F16 => "f16",
            QuantizeType::Q8_0 => "q8_0",
            QuantizeType::Q4_0 => "q4_0",
            QuantizeType::Q4_1 => "q4_1",
            QuantizeType::Q4K => "q4_k",
        }),
    })
}

fn fake_shown(fake: &FakeConfig) -> Value {
    let FakeConfig { max_inflight, tick } = fake;
    json!({"max_inflight": max_inflight, "tick_s": seconds(*tick)})
}

fn limits_shown(limits: &CallLimits) -> Value {
    let CallLimits {
        connect_timeout,
        first_token_timeout,
        idle_timeout,
        retries,
        retry_wait_max,
        failures_max,
    } = limits;
    json!({
        "connect_timeout_s": seconds(*connect_timeout),
        "first_token_timeout_s": seconds(*first_token_timeout),
        "idle_timeout_s": seconds(*idle_timeout),
        "retries": retries,
        "retry_wait_max_s": seconds(*retry_wait_max),
        "failures_max": failures_max,
    })
}

fn process_shown(process: &ProcessConfig) -> Value {
    let ProcessConfig {
        library_path,
        extra_args,
        start_timeout,
        stop_timeout,
    } = process;
    json!({
        "library_path": library_path.as_deref().map(path_shown),
        "extra_args": redacted_args(extra_args),
        "start_timeout_s": seconds(*start_timeout),
        "stop_timeout_s": seconds(*stop_timeout),
    })
}

fn embeddings_shown(embeddings: Embeddings) -> &'static str {
    match embeddings {
        Embeddings::No => "no",
        Embeddings::Also => "also",
        Embeddings::Only => "only",
    }
}

fn remote_shown(remote: &OpenaiRemoteConfig) -> Value {
    let OpenaiRemoteConfig {
        base_url,
        base_urls,
        model,
        api_key_env,
        dialect,
        embeddings,
        allow_remote,
        max_inflight,
        context_length,
        health_path,
        ca_file,
        limits,
    } = remote;
    json!({
        // A URL may carry a key in its query or a password before its host.
        "base_url": base_url.as_deref().map(redacted_url),
        "base_urls": base_urls.iter().map(|url| redacted_url(url)).collect::<Vec<_>>(),
        "model": model,
        // The name of the variable; what it holds is never read here.
        "api_key_env": api_key_env,
        "dialect": match dialect {
            Dialect::Openai => "openai",
            Dialect::LlamaServer => "llama_server",
            Dialect::Vllm => "vllm",
            Dialect::Tinyloop => "tinyloop",
        },
        "embeddings": embeddings_shown(*embeddings),
        "allow_remote": match allow_remote {
            AllowRemote::Ask => "ask",
            AllowRemote::Always => "always",
        },
        "max_inflight": max_inflight,
        "context_length": context_length,
        "health_path": redacted_path(health_path),
        "ca_file": ca_file.as_deref().map(path_shown),
        "limits": limits_shown(limits),
    })
}

fn llama_shown(child: &LlamaServerConfig) -> Value {
    let LlamaServerConfig {
        binary,
        file,
        slots,
        ctx_size,
        embeddings,
        process,
        limits,
    } = child;
    json!({
        "binary": path_shown(binary),
        "file": path_shown(file),
        "slots": slots,
        "ctx_size": ctx_size,
        "embeddings": embeddings_shown(*embeddings),
        "process": process_shown(process),
        "limits": limits_shown(limits),
    })
}

fn vllm_shown(child: &VllmServeConfig) -> Value {
    let VllmServeConfig {
        binary,
        model,
        dtype,
        max_model_len,
        kv_cache_memory_bytes,
        tensor_parallel_size,
        pipeline_parallel_size,
        max_num_seqs,
        embeddings,
        process,
        limits,
    } = child;
    json!({
        "binary": path_shown(binary),
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "max_num_seqs": max_num_seqs,
        "embeddings": embeddings_shown(*embeddings),
        "process": process_shown(process),
        "limits": limits_shown(limits),
    })
}

/// Without what stands before the host and without the query.
fn redacted_url(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let rest = redacted_path(rest);
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

/// Without its query.
fn redacted_path(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or_default()
}

/// Values of flags that speak of keys, tokens, passwords or secrets are not shown, whether they come
/// in the same argument or in the next.
fn redacted_args(args: &[String]) -> Vec<String> {
    let is_secret = |flag: &str| {
        let flag = flag.to_ascii_lowercase();
        let words = ["key", "token", "password", "secret"];
        flag.starts_with('-') && words.iter().any(|word| flag.contains(word))
    };
    let mut shown = Vec::with_capacity(args.len());
    let mut hide_next = false;
    for arg in args {
        let (flag, value) = arg.split_once('=').unwrap_or((arg, ""));
        shown.push(match (hide_next, is_secret(flag), value) {
            (true, false, _) => HIDDEN.to_owned(),
            (_, true, "") => arg.clone(),
            (_, true, _) => format!("{flag}={HIDDEN}"),
            (false, false, _) => arg.clone(),
        });
        hide_next = is_secret(flag) && value.is_empty();
    }
    shown
}
