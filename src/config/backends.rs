//! Models that other programs run: remote OpenAI-compatible servers, and child processes of ours.
//!
//! Plain data with the checks that need nothing else. Every table refuses keys it does not know.
//! A secret never stands here: a configuration names the environment variable that holds it. What is
//! not here: what is done with it (`runtime`).

use super::{flags, seconds};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// What the other server understands beyond OpenAI's contract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// Nothing: no priority is sent.
    #[default]
    Openai,
    /// llama-server: no priority; cached tokens stand in `timings`.
    LlamaServer,
    /// vLLM: `priority`, where a lower number is sooner.
    Vllm,
    /// tinyloop: `priority` as here.
    Tinyloop,
}

/// Whether a model that another program runs makes embeddings: nobody can see that from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Embeddings {
    /// It generates.
    #[default]
    No,
    /// It generates, and makes embeddings too.
    Also,
    /// It makes nothing else.
    Only,
}

/// Whether requests may leave this machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllowRemote {
    /// Each request has to say so: `allow_remote` in its body, or the header `x-allow-remote`.
    #[default]
    Ask,
    /// All may.
    Always,
}

/// Waits and repetitions of calls to another server.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CallLimits {
    /// Longest wait for a connection, TLS included; `connect_timeout_s`.
    #[serde(rename = "connect_timeout_s", deserialize_with = "seconds")]
    pub connect_timeout: Duration,
    /// Longest wait from sending a request to its first token; `first_token_timeout_s`.
    #[serde(rename = "first_token_timeout_s", deserialize_with = "seconds")]
    pub first_token_timeout: Duration,
    /// Longest silence between tokens; `idle_timeout_s`.
    #[serde(rename = "idle_timeout_s", deserialize_with = "seconds")]
    pub idle_timeout: Duration,
    /// Repetitions of a call that failed before its first token in a way that another try may mend.
    pub retries: u32,
    /// Longest wait before a repetition; a server that asks for more is not asked again;
    /// `retry_wait_max_s`.
    #[serde(rename = "retry_wait_max_s", deserialize_with = "seconds")]
    pub retry_wait_max: Duration,
    /// Calls that fail one after another, with no token in between, until the server counts as gone.
    pub failures_max: u32,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            first_token_timeout: Duration::from_secs(300),
            idle_timeout: Duration::from_secs(60),
            retries: 2,
            retry_wait_max: Duration::from_secs(5),
            failures_max: 3,
        }
    }
}

impl CallLimits {
    fn fault(&self) -> Option<String> {
        let waits = [
            ("connect_timeout_s", self.connect_timeout),
            ("first_token_timeout_s", self.first_token_timeout),
            ("idle_timeout_s", self.idle_timeout),
        ];
        let zero = waits.iter().find(|(_, wait)| wait.is_zero());
        match zero {
            Some((name, _)) => Some(format!("limits.{name} is 0; it must be above 0")),
            None if self.failures_max == 0 => {
                Some("limits.failures_max is 0; it must be at least 1".to_owned())
            }
            None => None,
        }
    }
}

/// A model of remote servers: `[models.NAME.openai_remote]`. Every URL is a replica.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenaiRemoteConfig {
    /// Where the OpenAI routes begin, like `https://host/v1`.
    #[serde(default)]
    pub base_url: Option<String>,
    /// The same for several servers with the same model.
    #[serde(default)]
    pub base_urls: Vec<String>,
    /// The model's name there.
    pub model: String,
    /// Environment variable with the key that is sent as `Authorization: Bearer`; None = no key.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// What the servers understand.
    #[serde(default)]
    pub dialect: Dialect,
    /// Whether the model makes embeddings there.
    #[serde(default)]
    pub embeddings: Embeddings,
    /// Whether requests have to allow that they leave this machine.
    #[serde(default)]
    pub allow_remote: AllowRemote,
    /// Jobs that one server is given at once.
    #[serde(default = "max_inflight_default")]
    pub max_inflight: u32,
    /// Longest prompt + completion in tokens, where it is known.
    #[serde(default)]
    pub context_length: Option<u32>,
    /// Path below the base URL that answers 200 when the server is well; empty = nothing is asked.
    #[serde(default = "health_path_default")]
    pub health_path: String,
    /// PEM file with the certificates that servers are checked against; None = the public ones.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Waits and repetitions.
    #[serde(default)]
    pub limits: CallLimits,
}

fn max_inflight_default() -> u32 {
    16
}

fn health_path_default() -> String {
    "/models".to_owned()
}

impl OpenaiRemoteConfig {
    /// All base URLs, at least one after [`Self::fault`] found nothing.
    #[must_use]
    pub fn urls(&self) -> Vec<&str> {
        let all = self.base_url.iter().chain(&self.base_urls);
        all.map(|url| url.trim_end_matches('/')).collect()
    }

    /// What is wrong with it, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let urls = self.urls();
        if urls.is_empty() {
            return Some("lacks `base_url`".to_owned());
        }
        let is_http = |url: &&str| url.starts_with("http://") || url.starts_with("https://");
        if let Some(url) = urls.iter().find(|url| !is_http(url)) {
            return Some(format!("`{url}` must begin with http:// or https://"));
        }
        if urls.iter().any(|url| url.contains('@')) {
            return Some("a URL must not hold a password; use api_key_env".to_owned());
        }
        if self.api_key_env.as_deref() == Some("") {
            return Some("api_key_env is empty".to_owned());
        }
        if self.max_inflight == 0 {
            return Some("max_inflight is 0; it must be at least 1".to_owned());
        }
        self.limits.fault()
    }
}

/// How a child process is started and stopped.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessConfig {
    /// Folder put before `LD_LIBRARY_PATH`.
    pub library_path: Option<PathBuf>,
    /// Arguments after those that follow from other keys.
    pub extra_args: Vec<String>,
    /// Longest wait until it answers; `start_timeout_s`.
    #[serde(rename = "start_timeout_s", deserialize_with = "seconds")]
    pub start_timeout: Duration,
    /// How long it may take to end after SIGTERM, before SIGKILL; `stop_timeout_s`.
    #[serde(rename = "stop_timeout_s", deserialize_with = "seconds")]
    pub stop_timeout: Duration,
}

impl Default for ProcessConfig {
    fn default() -> Self {
        Self {
            library_path: None,
            extra_args: Vec::new(),
            start_timeout: Duration::from_secs(600),
            stop_timeout: Duration::from_secs(10),
        }
    }
}

impl ProcessConfig {
    fn begin_at(&mut self, folder: &Path) {
        if let Some(path) = &mut self.library_path {
            *path = folder.join(&*path);
        }
    }
}

/// A model that a `llama-server` of ours runs: `[models.NAME.llama_server]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaServerConfig {
    /// The program; a bare name is looked up in `PATH`.
    #[serde(default = "llama_binary_default")]
    pub binary: PathBuf,
    /// The GGUF file.
    pub file: PathBuf,
    /// Jobs at once (`--parallel`); None = the program's own choice.
    #[serde(default)]
    pub slots: Option<u32>,
    /// Context of all slots together in tokens (`--ctx-size`); None = the program's own choice.
    #[serde(default)]
    pub ctx_size: Option<u32>,
    /// Whether the model makes embeddings (`--embeddings`).
    #[serde(default)]
    pub embeddings: Embeddings,
    /// Start and stop.
    #[serde(default)]
    pub process: ProcessConfig,
    /// Waits and repetitions.
    #[serde(default)]
    pub limits: CallLimits,
}

/// Slots of a `llama-server` that chooses their number itself.
const LLAMA_SLOTS: u32 = 4;

fn llama_binary_default() -> PathBuf {
    "llama-server".into()
}

/// A model that a `vllm serve` of ours runs: `[models.NAME.vllm_serve]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VllmServeConfig {
    /// The program; a bare name is looked up in `PATH`.
    #[serde(default = "vllm_binary_default")]
    pub binary: PathBuf,
    /// A folder or a name that vLLM knows.
    pub model: String,
    /// `--dtype`.
    #[serde(default)]
    pub dtype: Option<String>,
    /// `--max-model-len`, tokens.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    /// `--kv-cache-memory-bytes`.
    #[serde(default)]
    pub kv_cache_memory_bytes: Option<u64>,
    /// `--tensor-parallel-size`.
    #[serde(default)]
    pub tensor_parallel_size: Option<u32>,
    /// `--pipeline-parallel-size`.
    #[serde(default)]
    pub pipeline_parallel_size: Option<u32>,
    /// Jobs at once: `--max-num-seqs`.
    #[serde(default = "max_num_seqs_default")]
    pub max_num_seqs: u32,
    /// Whether the model makes embeddings; vLLM serves a model either for those or for text.
    #[serde(default)]
    pub embeddings: Embeddings,
    /// Start and stop.
    #[serde(default)]
    pub process: ProcessConfig,
    /// Waits and repetitions.
    #[serde(default)]
    pub limits: CallLimits,
}

fn vllm_binary_default() -> PathBuf {
    "vllm".into()
}

fn max_num_seqs_default() -> u32 {
    64
}

/// Moves the value of a flag from the arguments into its key. What is no such value stays where it is: the
/// program may understand it.
fn lift<T: FromStr>(process: &mut ProcessConfig, names: &[&str], key: &mut Option<T>) {
    let told = flags::value(&process.extra_args, names);
    if let Some(value) = told.and_then(|text| text.parse().ok()) {
        *key = Some(value);
        process.extra_args = flags::without(&process.extra_args, names);
    }
}

impl ProcessConfig {
    /// Takes a flag out, whatever its value is.
    pub fn drop_flag(&mut self, names: &[&str]) {
        self.extra_args = flags::without(&self.extra_args, names);
    }
}

/// A path with a folder in it begins at `folder`; a bare name stays one.
fn program(path: &Path, folder: &Path) -> PathBuf {
    match path.components().count() {
        0 | 1 => path.to_owned(),
        _ => folder.join(path),
    }
}

impl LlamaServerConfig {
    /// Relative paths begin at `folder`.
    pub(super) fn begin_at(&mut self, folder: &Path) {
        self.binary = program(&self.binary, folder);
        self.file = folder.join(&self.file);
        self.process.begin_at(folder);
    }

    /// The same with what `extra_args` say of keys that there are, in those keys: one place for each
    /// word, so that a load can override it.
    #[must_use]
    pub fn settled(&self) -> Self {
        let mut child = self.clone();
        lift(&mut child.process, Self::CONTEXT_FLAGS, &mut child.ctx_size);
        lift(&mut child.process, Self::SLOT_FLAGS, &mut child.slots);
        child.slots = child.slots.filter(|slots| *slots > 0);
        child
    }

    /// What `ctx_size` is in `extra_args`.
    pub const CONTEXT_FLAGS: &[&str] = &["-c", "--ctx-size"];
    /// What `slots` are there.
    pub const SLOT_FLAGS: &[&str] = &["-np", "--parallel"];

    /// What makes it serve embeddings.
    const EMBEDDING_FLAGS: &[&str] = &["--embedding", "--embeddings"];

    /// As the key says; with its own flag it makes embeddings beside text.
    #[must_use]
    pub fn embeddings(&self) -> Embeddings {
        let is_told = flags::has(&self.process.extra_args, Self::EMBEDDING_FLAGS);
        match self.embeddings {
            Embeddings::No if is_told => Embeddings::Also,
            told => told,
        }
    }

    /// The flag that it has to be given beside its arguments.
    #[must_use]
    pub fn embedding_flag(&self) -> Option<&'static str> {
        let is_told = flags::has(&self.process.extra_args, Self::EMBEDDING_FLAGS);
        (!is_told && self.embeddings != Embeddings::No).then_some("--embeddings")
    }

    /// Jobs at once, as far as it is known before it runs.
    #[must_use]
    pub fn slots_usual(&self) -> u32 {
        self.slots.unwrap_or(LLAMA_SLOTS)
    }

    /// What is wrong with it, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        if self.slots == Some(0) {
            return Some("slots is 0; it must be at least 1".to_owned());
        }
        self.limits.fault()
    }
}

impl VllmServeConfig {
    /// Relative paths begin at `folder`.
    pub(super) fn begin_at(&mut self, folder: &Path) {
        self.binary = program(&self.binary, folder);
        self.process.begin_at(folder);
    }

    /// The same with what `extra_args` say of keys that there are, in those keys.
    #[must_use]
    pub fn settled(&self) -> Self {
        let mut child = self.clone();
        let process = &mut child.process;
        let mut n_seqs = None;
        lift(process, Self::SEQS_FLAGS, &mut n_seqs);
        child.max_num_seqs = n_seqs.unwrap_or(child.max_num_seqs);
        lift(process, Self::CONTEXT_FLAGS, &mut child.max_model_len);
        lift(process, Self::KV_FLAGS, &mut child.kv_cache_memory_bytes);
        lift(process, Self::DTYPE_FLAGS, &mut child.dtype);
        let tensor = ["-tp", "--tensor-parallel-size"];
        lift(process, &tensor, &mut child.tensor_parallel_size);
        let pipeline = ["-pp", "--pipeline-parallel-size"];
        lift(process, &pipeline, &mut child.pipeline_parallel_size);
        child
    }

    /// As the key says, or a flag that makes vLLM serve embeddings.
    #[must_use]
    pub fn embeddings(&self) -> Embeddings {
        let args = &self.process.extra_args;
        let is_told = flags::value(args, &["--runner"]) == Some("pooling")
            || flags::value(args, &["--convert"]) == Some("embed")
            || matches!(flags::value(args, &["--task"]), Some("embed" | "embedding"));
        match is_told {
            true => Embeddings::Only,
            false => self.embeddings,
        }
    }

    /// What `max_num_seqs` is in `extra_args`.
    pub const SEQS_FLAGS: &[&str] = &["--max-num-seqs"];
    /// What `max_model_len` is there.
    pub const CONTEXT_FLAGS: &[&str] = &["--max-model-len"];
    /// What `kv_cache_memory_bytes` are there.
    pub const KV_FLAGS: &[&str] = &["--kv-cache-memory-bytes"];
    /// What `dtype` is there.
    pub const DTYPE_FLAGS: &[&str] = &["--dtype"];

    /// GPUs that share one replica's weights and KV.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        let tensor = self.tensor_parallel_size.unwrap_or(1);
        tensor.saturating_mul(self.pipeline_parallel_size.unwrap_or(1))
    }

    /// What is wrong with it, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        if self.model.is_empty() || self.model.starts_with('-') {
            return Some(format!("`{}` is no model", self.model));
        }
        let counts = [
            ("max_num_seqs", Some(self.max_num_seqs)),
            ("max_model_len", self.max_model_len),
            ("tensor_parallel_size", self.tensor_parallel_size),
            ("pipeline_parallel_size", self.pipeline_parallel_size),
        ];
        match counts.iter().find(|(_, count)| *count == Some(0)) {
            Some((name, _)) => Some(format!("{name} is 0; it must be at least 1")),
            None => self.limits.fault(),
        }
    }
}
