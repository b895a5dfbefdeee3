//! Every limit and setting with its default, and how a TOML file becomes them.
//!
//! Plain data, no thread. A file is optional: the defaults serve one model given on the command
//! line. Beside `FILE` a `local.toml` in the same folder is merged over it per key, so that one
//! machine's ports and keys stay out of the shared file. Each file is checked on its own first;
//! an unknown key is an error with its line and the nearest known key. Flags of the command line
//! come last and win (`cli::serve`). The running server never writes configuration.

mod backends;
mod device;
mod executor;
pub mod flags;
mod keys;
mod models;
mod pool;
mod pooling;
mod responses;
mod restart;
mod tables;

pub use backends::{
    AllowRemote, CallLimits, Dialect, Embeddings, LlamaServerConfig, OpenaiRemoteConfig,
    ProcessConfig, VllmServeConfig,
};
pub use device::DeviceChoice;
pub use executor::{ExecutorConfig, TargetInflight};
pub use keys::{KeyConfig, KeyLimits};
pub use models::{
    BUILTIN_MODEL, FakeConfig, LifecycleConfig, ModelConfig, ModelSource, TOOL_FORMATS,
};
pub use pool::PoolConfig;
pub use pooling::Pooling;
pub use responses::ResponsesConfig;

use keys::{FileKey, key_config};
use models::FileModel;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tables::{checked_table, deserialize, merge};
use toml::{Table, Value};

/// Sizes of a native engine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Context length per request in tokens; None = the model's own, at most
    /// [`Self::CONTEXT_DEFAULT`].
    pub context_length: Option<u32>,
    /// Sequences that may run at once.
    pub max_sequences: u32,
    /// Most rows of a quantum.
    pub max_rows: u32,
    /// Most prompt rows under way at once while other requests generate: a quantum takes longer with
    /// every row, and each generation gets one token per quantum.
    pub prefill_rows_beside_decode: u32,
    /// KV pool in tokens; None = enough for `max_sequences` quarter-length contexts or one whole context.
    pub kv_tokens: Option<u64>,
    /// Kernel threads; None = the cores given.
    pub threads: Option<usize>,
    /// Keep full pages of finished requests for reuse.
    pub prefix_cache: bool,
    /// Sliding attention window in tokens of requests that name none; 0 = full attention. With a
    /// window `kv_tokens` may be less than a context: longer requests must then stay in windows.
    pub cache_window: u32,
    /// Depth: what a looped model loops by default and at most, or which layers of an ordinary
    /// model loop.
    pub loops: LoopsConfig,
    /// Type that float weights are converted to at load; None = kept as stored.
    pub quantize: Option<QuantizeType>,
    /// How embeddings are made of the tokens' states; None = as the file says, else the mean.
    pub pooling: Option<Pooling>,
    /// Where it runs.
    pub device: DeviceChoice,
    /// On a GPU: passes that come again are captured once and replayed.
    pub cuda_graphs: bool,
}

/// How a model loops, where it should differ from what its file says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoopsConfig {
    /// Layers `[first, end)` of an ordinary model that form its core. An experiment: nobody
    /// trained the model for it.
    pub layers: Option<[u32; 2]>,
    /// Loops of requests that ask for none.
    pub default: Option<u32>,
    /// Most loops a request may ask for.
    pub max: Option<u32>,
}

/// Types that weights can be converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the types' own")]
pub enum QuantizeType {
    F16,
    #[serde(rename = "q8_0")]
    #[value(name = "q8_0")]
    Q8_0,
    #[serde(rename = "q4_0")]
    #[value(name = "q4_0")]
    Q4_0,
    #[serde(rename = "q4_1")]
    #[value(name = "q4_1")]
    Q4_1,
    #[serde(rename = "q4_k")]
    #[value(name = "q4_k")]
    Q4K,
}

impl EngineConfig {
    /// Context length in tokens when neither the configuration nor a shorter model says otherwise.
    pub const CONTEXT_DEFAULT: u32 = 8192;
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            context_length: None,
            max_sequences: 16,
            max_rows: 512,
            prefill_rows_beside_decode: 128,
            kv_tokens: None,
            threads: None,
            prefix_cache: true,
            cache_window: 0,
            loops: LoopsConfig::default(),
            quantize: None,
            pooling: None,
            device: DeviceChoice::default(),
            cuda_graphs: true,
        }
    }
}

/// The data plane: where it listens, what it holds, who may use it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address of the inference APIs.
    pub host: IpAddr,
    /// Port; 0 picks a free one.
    pub port: u16,
    /// Worker threads of the data plane. A request holds one as long as it waits or runs; 0 = as many
    /// as may wait and run, see [`Config::http_workers`].
    pub http_workers: usize,
    /// Complete requests that may wait for a worker.
    pub http_queue_depth: usize,
    /// Connections that may be open at once.
    pub max_connections: usize,
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// How long a shutdown waits for running requests; in the file `drain_timeout_s`.
    #[serde(rename = "drain_timeout_s", deserialize_with = "seconds")]
    pub drain_timeout: Duration,
    /// A silent stream gets a comment line this often, so that proxies keep it; `stream_ping_s`.
    #[serde(rename = "stream_ping_s", deserialize_with = "seconds")]
    pub stream_ping: Duration,
    /// An engine whose step takes longer than this is reported as dead by /health; `stall_s`.
    #[serde(rename = "stall_s", deserialize_with = "seconds")]
    pub stall: Duration,
    /// Keys that may use the inference APIs, or their hashes (`sha256:HEX`); with those of the file
    /// and of `[keys]` empty = no key is asked.
    pub api_keys: Vec<String>,
    /// File with one key or hash per line, its name before it if wanted; added to `api_keys`.
    pub api_key_file: Option<PathBuf>,
    /// Listen where others can reach it although no key is asked.
    pub insecure_no_auth: bool,
    /// Web origins that browsers may call from; empty = CORS is off; "*" = any.
    pub cors_origins: Vec<String>,
    /// Status of refusals for load (full queue, latency objective, timeout in the queue): 503 or 429.
    pub overload_status: u16,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8080,
            http_workers: 0,
            http_queue_depth: 256,
            max_connections: 4096,
            max_body_bytes: 16 << 20,
            drain_timeout: Duration::from_secs(30),
            stream_ping: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            api_keys: Vec::new(),
            api_key_file: None,
            insecure_no_auth: false,
            cors_origins: Vec::new(),
            overload_status: 503,
        }
    }
}

/// The management plane.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ManagementConfig {
    /// Whether it listens at all.
    pub enabled: bool,
    /// Address; loopback unless an admin key is set.
    pub host: IpAddr,
    /// Port; 0 picks a free one.
    pub port: u16,
    /// Key that its routes ask for; needed when the address is not loopback.
    pub admin_key: Option<String>,
    /// Names beside localhost and IP addresses by which clients may call it while no key is set.
    pub allowed_hosts: Vec<String>,
}

impl Default for ManagementConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8081,
            admin_key: None,
            allowed_hosts: Vec::new(),
        }
    }
}

/// Who may reuse the K/V of whose prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixIsolation {
    /// Each API key its own: nobody can find out by timing what others ask.
    #[default]
    Key,
    /// All clients share.
    Shared,
}

/// Shape of the log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Text or JSON.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter like `tinyloop::scheduler=debug,info`.
    pub level: String,
    /// Show what clients send: the beginning of each request's body.
    pub prompts: bool,
    /// So many bytes of it.
    pub prompt_bytes_max: usize,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            format: LogFormat::Text,
            level: "info".to_owned(),
            prompts: false,
            prompt_bytes_max: 1000,
        }
    }
}

/// Largest configuration file.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// HTTP workers beyond those that requests hold: they say no, and list models.
const SPARE_WORKERS: usize = 16;
/// Most HTTP workers that are started unasked.
const HTTP_WORKERS_MAX: usize = 1024;

/// Everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Data plane.
    pub server: ServerConfig,
    /// Management plane.
    pub management: ManagementConfig,
    /// Log.
    pub log: LogConfig,
    /// All models together.
    pub pool: PoolConfig,
    /// Responses kept for clients that come back to them.
    pub responses: ResponsesConfig,
    /// Defaults of all executors.
    pub executor: ExecutorConfig,
    /// Defaults of all engines.
    pub engine: EngineConfig,
    /// Clients in the order of their names, beside `server.api_keys`.
    pub keys: Vec<KeyConfig>,
    /// Models in the order of their names.
    pub models: Vec<ModelConfig>,
}

/// What is wrong with a configuration, with file, line and key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// The file as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    server: ServerConfig,
    management: ManagementConfig,
    log: LogConfig,
    pool: PoolConfig,
    responses: ResponsesConfig,
    executor: ExecutorConfig,
    engine: EngineConfig,
    keys: BTreeMap<String, FileKey>,
    models: BTreeMap<String, FileModel>,
}

impl Config {
    /// Reads `path` and, when it exists, `local.toml` beside it.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = |path: &Path| {
            read_file(path).map_err(|error| ConfigError(format!("{}: {error}", path.display())))
        };
        let local_path = path.with_file_name("local.toml");
        let local = if local_path != path && local_path.exists() {
            Some((local_path.display().to_string(), read(&local_path)?))
        } else {
            None
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        Self::from_texts(&path.display().to_string(), &read(path)?, local, folder)
    }

    /// The same from texts; `folder` is where relative paths begin.
    fn from_texts(
        name: &str,
        text: &str,
        local: Option<(String, String)>,
        folder: &Path,
    ) -> Result<Self, ConfigError> {
        let mut table = checked_table(name, text)?;
        if let Some((name, text)) = local {
            merge(&mut table, checked_table(&name, &text)?);
        }
        let file: File = deserialize(name, table.clone())?;
        let mut config = Self {
            server: file.server,
            management: file.management,
            log: file.log,
            pool: file.pool,
            responses: file.responses,
            executor: file.executor,
            engine: file.engine,
            keys: file.keys.into_iter().map(key_config).collect(),
            models: Vec::new(),
        };
        if let Some(key_file) = config.server.api_key_file.as_mut() {
            *key_file = folder.join(&*key_file);
        }
        for (model_name, model) in file.models {
            let executor = deserialize(name, section(&table, &model_name, "executor"))?;
            let engine = deserialize(name, section(&table, &model_name, "engine"))?;
            let model = model.into_config(model_name, folder, executor, engine);
            let model = model.map_err(|fault| ConfigError(format!("{name}: {fault}")))?;
            config.models.push(model);
        }
        Ok(config)
    }

    /// HTTP workers to start. Each request that waits or runs holds one; with fewer than may wait and
    /// run, some would wait where no priority, objective or deadline is known.
    #[must_use]
    pub fn http_workers(&self) -> usize {
        if self.server.http_workers > 0 {
            return self.server.http_workers;
        }
        let may_be_there = |model: &ModelConfig| {
            let slots = model
                .slots()
                .saturating_mul(model.lifecycle.replicas_most());
            let slots = model.executor.target_max().map_or(slots, |n| n.min(slots));
            model
                .executor
                .max_queue_depth
                .saturating_add(slots as usize)
        };
        let all = self.models.iter().map(may_be_there);
        all.fold(SPARE_WORKERS, usize::saturating_add)
            .clamp(64, HTTP_WORKERS_MAX)
    }

    fn bad_ema_alpha(&self) -> Option<f64> {
        let alphas = self.models.iter().map(|model| model.executor.ema_alpha);
        alphas
            .into_iter()
            .find(|alpha| !(*alpha > 0.0 && *alpha <= 1.0))
    }

    /// Whether any key is asked for on the data plane.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        let server = &self.server;
        !server.api_keys.is_empty() || server.api_key_file.is_some() || !self.keys.is_empty()
    }

    /// Everybody who reaches the address could use the models, and nobody said that this is wanted.
    fn open_to_others(&self) -> Option<String> {
        let server = &self.server;
        let is_closed = server.host.is_loopback() || self.has_keys() || server.insecure_no_auth;
        (!is_closed).then(|| {
            format!(
                "the inference APIs would listen on {}, where others can reach them, without a key: \
                 make one with `tinyloop key new NAME` and put it into `[keys.NAME]` (or --api-key, \
                 --api-key-file, TINYLOOP_API_KEY), or say --insecure-no-auth (`server.insecure_no_auth \
                 = true`) if everybody may use them",
                server.host
            )
        })
    }

    /// Faults that no single key shows.
    pub fn check(&self) -> Result<(), ConfigError> {
        let fault = |text: String| Err(ConfigError(text));
        if let Some(alpha) = self.bad_ema_alpha() {
            return fault(format!(
                "ema_alpha is {alpha}; it must be above 0 and at most 1"
            ));
        }
        if self.pool.load_threads == 0 {
            return fault("pool.load_threads is 0; it must be at least 1".to_owned());
        }
        if !matches!(self.server.overload_status, 429 | 503) {
            return fault(format!(
                "overload_status is {}; it must be 503 or 429",
                self.server.overload_status
            ));
        }
        let management = &self.management;
        if management.enabled && !management.host.is_loopback() && management.admin_key.is_none() {
            return fault(format!(
                "the management plane would listen on {}, where others can reach it, without a \
                 key: set `management.admin_key` or a loopback `management.host`",
                management.host
            ));
        }
        for key in &self.keys {
            if let Some(what) = key.fault() {
                return fault(format!("keys.{}: {what}", key.name));
            }
        }
        if let Some(open) = self.open_to_others() {
            return fault(open);
        }
        let mut seen = std::collections::BTreeSet::new();
        for model in &self.models {
            for id in std::iter::once(&model.name).chain(&model.aliases) {
                if !seen.insert(id) {
                    return fault(format!("two models answer to the id `{id}`"));
                }
            }
            if model.lifecycle.replicas == 0
                || model.lifecycle.replicas > model.lifecycle.replica_max
            {
                return fault(format!(
                    "model `{}`: replicas is {}; it must be from 1 to replica_max, {}",
                    model.name, model.lifecycle.replicas, model.lifecycle.replica_max
                ));
            }
            if model.engine.max_sequences == 0 || model.engine.max_rows == 0 {
                return fault(format!(
                    "model `{}`: max_sequences and max_rows must be at least 1",
                    model.name
                ));
            }
        }
        Ok(())
    }
}

/// The text of a regular file: opening a pipe would wait for its writer, and reading a device might never
/// end.
fn read_file(path: &Path) -> std::io::Result<String> {
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    if found.len() > FILE_BYTES_MAX {
        let text = format!(
            "it has {} bytes; at most {FILE_BYTES_MAX} are read",
            found.len()
        );
        return Err(std::io::Error::other(text));
    }
    std::fs::read_to_string(path)
}

/// `[section]` with `[models.NAME.section]` merged over it.
fn section(table: &Table, model: &str, section: &str) -> Table {
    let sub_table =
        |value: Option<&Value>| value.and_then(Value::as_table).cloned().unwrap_or_default();
    let mut merged = sub_table(table.get(section));
    let own = table
        .get("models")
        .and_then(|models| models.get(model)?.get(section));
    merge(&mut merged, sub_table(own));
    merged
}

/// Seconds, with a fraction if wanted.
fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(deserializer)?;
    Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests;
