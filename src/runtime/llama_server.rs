//! A `llama-server` process of ours as a runtime.
//!
//! Starting it waits for `/health` and takes the number of slots and their context from `/props`. What
//! is not here: the process (`child`), the calls (`upstream`).

use super::child::{Child, ChildSpec, free_port};
use super::upstream::call::Server;
use super::upstream::client::Client;
use super::upstream::pool::Upstream;
use super::upstream::{Room, UpstreamRuntime};
use crate::config::{Dialect, LlamaServerConfig};
use serde::Deserialize;
use std::time::Duration;

/// Longest wait for the answer to a question about the server itself.
const ASK_WAIT: Duration = Duration::from_secs(5);

/// Of `/props`.
#[derive(Debug, Deserialize)]
struct Props {
    total_slots: u32,
    #[serde(default)]
    default_generation_settings: Settings,
}

#[derive(Debug, Default, Deserialize)]
struct Settings {
    /// Tokens of one slot.
    n_ctx: Option<u32>,
}

/// Starts one and waits until it answers. `name` is the public model's, `index` the replica's.
///
/// # Errors
/// In words for the log, with the end of the process's own; nothing is left running.
pub fn start(
    name: &str,
    config: &LlamaServerConfig,
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
    config: &LlamaServerConfig,
    index: usize,
    give_up: &dyn Fn() -> bool,
) -> Result<UpstreamRuntime, String> {
    let port = free_port()?;
    let name = format!("{name}-{index}");
    let spec = ChildSpec {
        name: name.clone(),
        program: config.binary.clone(),
        arguments: arguments(config, port),
        library_path: config.process.library_path.clone(),
        stop_timeout: config.process.stop_timeout,
    };
    let client = |path: &str| {
        let url = format!("http://127.0.0.1:{port}{path}");
        Client::new(&url, None, None, &config.limits)
    };
    let root = client("")?;
    let child = Child::start(&spec)?;
    let is_well = || give_up() || root.fetch("/health", ASK_WAIT).is_ok();
    child.wait_ready(config.process.start_timeout, is_well)?;
    if give_up() {
        return Err("its start was given up".to_owned());
    }
    let props = root.fetch("/props", ASK_WAIT)?;
    let props: Props = serde_json::from_slice(&props)
        .map_err(|error| format!("llama-server's /props cannot be read: {error}"))?;
    let server = Server {
        client: client("/v1")?,
        model: name.clone(), // it has only one and does not look
        dialect: Dialect::LlamaServer,
        limits: config.limits.clone(),
    };
    let max_inflight = props.total_slots.max(1);
    let room = Room {
        max_inflight,
        context_length: props.default_generation_settings.n_ctx.unwrap_or(u32::MAX),
    };
    let upstream = Upstream::new(&name, server, max_inflight);
    Ok(UpstreamRuntime::of_child(upstream, room, child).making(config.embeddings()))
}

fn arguments(config: &LlamaServerConfig, port: u16) -> Vec<String> {
    let mut all = vec![
        "-m".to_owned(),
        config.file.display().to_string(),
        "--host".to_owned(),
        "127.0.0.1".to_owned(),
        "--port".to_owned(),
        port.to_string(),
    ];
    let counts = [
        ("--parallel", config.slots),
        ("--ctx-size", config.ctx_size),
    ];
    for (flag, count) in counts {
        if let Some(count) = count {
            all.extend([flag.to_owned(), count.to_string()]);
        }
    }
    all.extend(config.embedding_flag().map(str::to_owned));
    all.extend(config.process.extra_args.iter().cloned());
    all
}
