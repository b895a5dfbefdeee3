//! A `vllm serve MODEL` process of ours as a runtime.
//!
//! Starting it waits for `/v1/models` and takes the context length from there; how many jobs it holds
//! is what it was told (`--max-num-seqs`). It orders its own work by the priorities that it is sent.
//! What is not here: the process (`child`), the calls (`upstream`). vLLM needs a GPU, so the tests run a
//! stand-in that speaks its wire format.

use super::child::{Child, ChildSpec, free_port};
use super::upstream::call::Server;
use super::upstream::client::Client;
use super::upstream::pool::Upstream;
use super::upstream::{Room, UpstreamRuntime};
use crate::config::{Dialect, VllmServeConfig};
use serde::Deserialize;
use std::time::Duration;

/// Longest wait for the answer to a question about the server itself.
const ASK_WAIT: Duration = Duration::from_secs(5);

/// Of `/v1/models`.
#[derive(Debug, Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Debug, Deserialize)]
struct Model {
    max_model_len: Option<u32>,
}

/// Starts one and waits until it answers. `name` is the public model's, `index` the replica's.
///
/// # Errors
/// In words for the log, with the end of the process's own; nothing is left running.
pub fn start(
    name: &str,
    config: &VllmServeConfig,
    index: usize,
) -> Result<UpstreamRuntime, String> {
    start_until(name, config, index, &|| false)
}

/// The same; `give_up` is asked while it waits.
///
/// # Errors
/// See [`start`].
pub fn start_until(
    name: &str,
    config: &VllmServeConfig,
    index: usize,
    give_up: &dyn Fn() -> bool,
) -> Result<UpstreamRuntime, String> {
    let config = &config.settled();
    let port = free_port()?;
    let child_name = format!("{name}-{index}");
    let spec = ChildSpec {
        name: child_name.clone(),
        program: config.binary.clone(),
        arguments: arguments(name, config, port),
        library_path: config.process.library_path.clone(),
        stop_timeout: config.process.stop_timeout,
    };
    let url = format!("http://127.0.0.1:{port}/v1");
    let client = Client::new(&url, None, None, &config.limits)?;
    let child = Child::start(&spec)?;
    let mut models = Vec::new();
    let is_well = || match client.fetch("/models", ASK_WAIT) {
        Ok(body) => {
            models = body;
            true
        }
        Err(_) => give_up(),
    };
    child.wait_ready(config.process.start_timeout, is_well)?;
    if give_up() {
        return Err("its start was given up".to_owned());
    }
    let models: Models = serde_json::from_slice(&models)
        .map_err(|error| format!("vLLM's /v1/models cannot be read: {error}"))?;
    let server = Server {
        client,
        model: name.to_owned(), // by --served-model-name
        dialect: Dialect::Vllm,
        limits: config.limits.clone(),
    };
    let context_length = models.data.first().and_then(|model| model.max_model_len);
    let room = Room {
        max_inflight: config.max_num_seqs,
        context_length: context_length.unwrap_or(u32::MAX),
    };
    let upstream = Upstream::new(&child_name, server, config.max_num_seqs);
    Ok(UpstreamRuntime::of_child(upstream, room, child).making(config.embeddings()))
}

fn arguments(name: &str, config: &VllmServeConfig, port: u16) -> Vec<String> {
    let mut all: Vec<String> = vec!["serve".to_owned(), config.model.clone()];
    let mut add = |flag: &str, value: Option<String>| {
        if let Some(value) = value {
            all.extend([flag.to_owned(), value]);
        }
    };
    let count = |count: Option<u32>| count.map(|count| count.to_string());
    add("--host", Some("127.0.0.1".to_owned()));
    add("--port", Some(port.to_string()));
    add("--served-model-name", Some(name.to_owned()));
    add("--scheduling-policy", Some("priority".to_owned()));
    add("--max-num-seqs", Some(config.max_num_seqs.to_string()));
    add("--dtype", config.dtype.clone());
    add("--max-model-len", count(config.max_model_len));
    let kv_bytes = config.kv_cache_memory_bytes.map(|bytes| bytes.to_string());
    add("--kv-cache-memory-bytes", kv_bytes);
    add("--tensor-parallel-size", count(config.tensor_parallel_size));
    add(
        "--pipeline-parallel-size",
        count(config.pipeline_parallel_size),
    );
    all.extend(config.process.extra_args.iter().cloned());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_a_flag() {
        let config = VllmServeConfig {
            binary: "vllm".into(),
            model: "org/m".to_owned(),
            dtype: Some("bfloat16".to_owned()),
            max_model_len: Some(4096),
            kv_cache_memory_bytes: Some(1 << 33),
            tensor_parallel_size: Some(2),
            pipeline_parallel_size: Some(3),
            max_num_seqs: 8,
            embeddings: Default::default(),
            process: Default::default(),
            limits: Default::default(),
        };
        let words = arguments("public", &config, 81).join(" ");
        let expected = "serve org/m --host 127.0.0.1 --port 81 --served-model-name public \
                        --scheduling-policy priority --max-num-seqs 8 --dtype bfloat16 \
                        --max-model-len 4096 --kv-cache-memory-bytes 8589934592 \
                        --tensor-parallel-size 2 --pipeline-parallel-size 3";
        assert_eq!(words, expected);
    }
}
