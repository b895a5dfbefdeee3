//! The configured models: what answers each, how many copies, when they are loaded.
//!
//! Plain data. What is not here: the limits of executors and engines (`config`), loading (`pool`).

use super::{
    EngineConfig, ExecutorConfig, LlamaServerConfig, OpenaiRemoteConfig, TargetInflight,
    VllmServeConfig, seconds,
};
use serde::{Deserialize, Deserializer};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Stands for the model inside the program wherever a model's path is asked for. A file of this name
/// is `./builtin`.
pub const BUILTIN_MODEL: &str = "builtin";

/// Forms in which models write calls of tools; "auto" = as the model's chat template shows.
pub const TOOL_FORMATS: [&str; 9] = [
    "auto",
    "hermes",
    "llama3",
    "pythonic",
    "mistral",
    "deepseek",
    "command",
    "tool_call_token",
    "generic",
];

/// What answers a model's requests.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// The built-in engine, from this file; [`BUILTIN_MODEL`] is the model inside the program.
    File(PathBuf),
    /// A stand-in that repeats the prompt's bytes: what HTTP and the scheduler cost by themselves.
    Fake(FakeConfig),
    /// OpenAI-compatible servers elsewhere.
    OpenaiRemote(OpenaiRemoteConfig),
    /// A `llama-server` process of ours per replica.
    LlamaServer(LlamaServerConfig),
    /// A `vllm serve` process of ours per replica.
    VllmServe(VllmServeConfig),
}

impl ModelSource {
    /// Its key in the file, and its name in lists.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        match self {
            Self::File(_) => "native",
            Self::Fake(_) => "fake",
            Self::OpenaiRemote(_) => "openai_remote",
            Self::LlamaServer(_) => "llama_server",
            Self::VllmServe(_) => "vllm_serve",
        }
    }

    fn fault(&self) -> Option<String> {
        match self {
            Self::File(_) | Self::Fake(_) => None,
            Self::OpenaiRemote(remote) => remote.fault(),
            Self::LlamaServer(child) => child.fault(),
            Self::VllmServe(child) => child.fault(),
        }
    }
}

/// A stand-in model: `[models.NAME.fake]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeConfig {
    /// Jobs it holds at once.
    pub max_inflight: u32,
    /// Seconds between the tokens of a job; 0 = the whole answer inside `submit`.
    #[serde(deserialize_with = "seconds", rename = "tick_s")]
    pub tick: Duration,
}

impl Default for FakeConfig {
    fn default() -> Self {
        Self {
            max_inflight: 64,
            tick: Duration::ZERO,
        }
    }
}

/// One model to serve.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The id that clients send.
    pub name: String,
    /// Further ids for it.
    pub aliases: Vec<String>,
    /// What answers its requests.
    pub source: ModelSource,
    /// Limits of its executor: `[executor]`, then the model's own.
    pub executor: ExecutorConfig,
    /// Sizes of its engine: `[engine]`, then the model's own.
    pub engine: EngineConfig,
    /// Copies, and when they are loaded and unloaded.
    pub lifecycle: LifecycleConfig,
    /// How it writes calls of tools: one of [`TOOL_FORMATS`] but "auto"; None = as its template shows.
    pub tool_format: Option<String>,
}

impl ModelConfig {
    /// A model that is loaded at start, once, with default limits.
    #[must_use]
    pub fn new(name: impl Into<String>, source: ModelSource) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            source,
            executor: ExecutorConfig::default(),
            engine: EngineConfig::default(),
            lifecycle: LifecycleConfig::default(),
            tool_format: None,
        }
    }

    /// Jobs that one replica can hold, as far as the configuration tells.
    #[must_use]
    pub fn slots(&self) -> u32 {
        match &self.source {
            ModelSource::File(_) => self.engine.max_sequences,
            ModelSource::Fake(fake) => fake.max_inflight,
            ModelSource::OpenaiRemote(remote) => remote.max_inflight,
            ModelSource::LlamaServer(child) => child.slots_usual(),
            ModelSource::VllmServe(child) => child.max_num_seqs,
        }
    }
}

/// How many copies of a model there are, and when they are loaded and unloaded; keys of
/// `[models.NAME]` itself.
#[derive(Clone, Debug, PartialEq)]
pub struct LifecycleConfig {
    /// Loaded when the server starts.
    pub enabled: bool,
    /// Replicas: identical loaded copies behind the name.
    pub replicas: u32,
    /// Most replicas that a load through the admin API may ask for.
    pub replica_max: u32,
    /// A request for the unloaded model loads it and waits, inside its deadline in the queue.
    pub load_on_demand: bool,
    /// Unloaded after so long without a request; None = never. `idle_unload_s`.
    pub idle_unload: Option<Duration>,
    /// Never unloaded to make room for another, nor for being idle.
    pub pinned: bool,
    /// Its share of a device that several models use at once, relative to theirs.
    pub device_weight: u32,
}

impl Default for LifecycleConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            replicas: 1,
            replica_max: 8,
            load_on_demand: false,
            idle_unload: None,
            pinned: false,
            device_weight: 1,
        }
    }
}

impl LifecycleConfig {
    /// Every one of so many places gets a replica, unless their number was given.
    fn spread(&mut self, n_places: u32, is_given: bool) {
        if !is_given {
            self.replicas = n_places;
        }
        self.replica_max = self.replica_max.max(n_places);
    }

    /// Replicas that there may be at once.
    #[must_use]
    pub fn replicas_most(&self) -> u32 {
        self.replicas.max(1)
    }
}

/// `[models.NAME]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileModel {
    file: Option<PathBuf>,
    fake: Option<FakeConfig>,
    openai_remote: Option<OpenaiRemoteConfig>,
    llama_server: Option<LlamaServerConfig>,
    vllm_serve: Option<VllmServeConfig>,
    #[serde(default)]
    aliases: Vec<String>,
    enabled: Option<bool>,
    replicas: Option<u32>,
    replica_max: Option<u32>,
    load_on_demand: Option<bool>,
    #[serde(default, deserialize_with = "optional_seconds")]
    idle_unload_s: Option<Duration>,
    pinned: Option<bool>,
    device_weight: Option<u32>,
    tool_format: Option<String>,
    /// Read only to check the keys; the values come from the merged tables.
    #[serde(default, rename = "executor")]
    _executor: ExecutorConfig,
    #[serde(default, rename = "engine")]
    _engine: EngineConfig,
}

impl FileModel {
    /// The model of that name; relative paths begin at `folder`. An error names what is wrong with
    /// the table.
    pub(super) fn into_config(
        self,
        name: String,
        folder: &Path,
        mut executor: ExecutorConfig,
        engine: EngineConfig,
    ) -> Result<ModelConfig, String> {
        let mut lifecycle = self.lifecycle();
        let is_replicas_given = self.replicas.is_some();
        let aliases = self.aliases.clone();
        let tool_format = self.tool_format.clone().filter(|format| format != "auto");
        if let Some(unknown) = tool_format.as_deref().filter(|f| !TOOL_FORMATS.contains(f)) {
            return Err(format!(
                "models.{name}.tool_format: {unknown:?} is none of {}",
                TOOL_FORMATS.join(", ")
            ));
        }
        let source = self.source(&name, folder)?;
        if let Some(fault) = source.fault() {
            return Err(format!("models.{name}.{}: {fault}", source.backend()));
        }
        if let ModelSource::OpenaiRemote(remote) = &source {
            lifecycle.spread(remote.urls().len() as u32, is_replicas_given);
        }
        // What another server really holds at once is known to its operator, not to us.
        let is_own = matches!(source, ModelSource::File(_) | ModelSource::Fake(_));
        if !is_own && executor.target_inflight.is_none() {
            executor.target_inflight = Some(TargetInflight::Jobs(1));
        }
        Ok(ModelConfig {
            name,
            aliases,
            source,
            executor,
            engine,
            lifecycle,
            tool_format,
        })
    }

    /// The one source that the table names.
    fn source(self, name: &str, folder: &Path) -> Result<ModelSource, String> {
        let file = self.file.map(|path| {
            let is_builtin = path == Path::new(BUILTIN_MODEL);
            ModelSource::File(if is_builtin { path } else { folder.join(path) })
        });
        let llama_server = self.llama_server.map(|mut child| {
            child.begin_at(folder);
            ModelSource::LlamaServer(child)
        });
        let vllm_serve = self.vllm_serve.map(|mut child| {
            child.begin_at(folder);
            ModelSource::VllmServe(child)
        });
        let remote = self.openai_remote.map(|mut remote| {
            remote.ca_file = remote.ca_file.map(|path| folder.join(path));
            ModelSource::OpenaiRemote(remote)
        });
        let fake = self.fake.map(ModelSource::Fake);
        let given = [file, fake, remote, llama_server, vllm_serve];
        let mut given = given.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some(only), None) => Ok(only),
            (Some(one), Some(other)) => Err(format!(
                "models.{name} has both `{}` and `{}`",
                key(&one),
                key(&other)
            )),
            (None, _) => Err(format!(
                "models.{name} lacks `file` (or one of openai_remote, llama_server, vllm_serve, fake)"
            )),
        }
    }

    fn lifecycle(&self) -> LifecycleConfig {
        let usual = LifecycleConfig::default();
        LifecycleConfig {
            enabled: self.enabled.unwrap_or(usual.enabled),
            replicas: self.replicas.unwrap_or(usual.replicas),
            replica_max: self.replica_max.unwrap_or(usual.replica_max),
            load_on_demand: self.load_on_demand.unwrap_or(usual.load_on_demand),
            idle_unload: self.idle_unload_s,
            pinned: self.pinned.unwrap_or(usual.pinned),
            device_weight: self.device_weight.unwrap_or(usual.device_weight),
        }
    }
}

/// The key that a source is written as.
fn key(source: &ModelSource) -> &'static str {
    match source {
        ModelSource::File(_) => "file",
        other => other.backend(),
    }
}

fn optional_seconds<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    seconds(deserializer).map(Some)
}
