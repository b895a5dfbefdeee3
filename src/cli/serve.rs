//! `tinyloop serve`: flags over the configuration file over the defaults, then the server.
//!
//! Runs on the main thread; models load on a thread of their own once the ports are bound. Every setting a user would want on the command line has a flag; the
//! rest stands in the file. What is not here: what a server is made of (`server`).

use super::load::{add_all, load_enabled};
use super::model_args::ModelArgs;
use super::output::Output;
use super::seconds::seconds;
use crate::config::{
    BUILTIN_MODEL, Config, ConfigError, LogFormat, ModelConfig, ModelSource, Pooling,
};
use crate::error::Error;
use crate::http::state::ConfigSource;
use crate::model::builtin;
use crate::pool::{Pool, PoolEntry};
use crate::scheduler::Metrics;
use crate::server::{Server, Signals, raise_descriptor_limit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Arguments of `tinyloop serve`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServeArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin"; may be given several
    /// times [default: the models of --config, or else builtin].
    #[arg(short, long = "model", value_name = "FILE")]
    pub models: Vec<PathBuf>,
    /// The id clients send for the model, one per --model [default: the file's name].
    #[arg(long = "model-name", visible_alias = "alias", value_name = "NAME")]
    pub model_names: Vec<String>,
    /// TOML file; `local.toml` beside it is merged over it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address of the inference APIs [default: 127.0.0.1].
    #[arg(long, value_name = "ADDRESS")]
    pub host: Option<IpAddr>,
    /// Port of the inference APIs; 0 picks a free one and prints it [default: 8080].
    #[arg(short, long)]
    pub port: Option<u16>,
    /// Address of the management plane [default: 127.0.0.1].
    #[arg(long, value_name = "ADDRESS")]
    pub management_host: Option<IpAddr>,
    /// Port of the management plane; 0 picks a free one [default: 8081].
    #[arg(long, value_name = "PORT")]
    pub management_port: Option<u16>,
    /// Do not open the management plane.
    #[arg(long, conflicts_with_all = ["management_port", "management_host"])]
    pub no_management: bool,
    /// Key of the management plane, or its hash; needed when its address is not loopback
    /// [environment: TINYLOOP_ADMIN_KEY].
    #[arg(long, value_name = "KEY")]
    pub admin_key: Option<String>,
    /// Key that clients must send, or its hash (`tinyloop key new`); may be given several times
    /// [environment: TINYLOOP_API_KEY, with commas between several].
    #[arg(long = "api-key", value_name = "KEY")]
    pub api_keys: Vec<String>,
    /// File with one API key, or its hash, per line.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Listen where others can reach it although no key is asked.
    #[arg(long)]
    pub insecure_no_auth: bool,
    /// Web origin that browsers may call from, or "*"; may be given several times.
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    pub cors_origins: Vec<String>,
    /// Context length per request in tokens [default: the model's own, at most 8192].
    #[arg(short = 'c', long, value_name = "TOKENS")]
    pub ctx_size: Option<u32>,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Sequences that run at once [default: 16].
    #[arg(long, visible_alias = "parallel", value_name = "COUNT")]
    pub max_sequences: Option<u32>,
    /// Most rows of one pass [default: 512].
    #[arg(long, visible_alias = "ubatch", value_name = "ROWS")]
    pub max_rows: Option<u32>,
    /// KV pool in tokens, over all sequences.
    #[arg(long, value_name = "TOKENS")]
    pub kv_tokens: Option<u64>,
    /// Do not keep the KV of finished requests for reuse.
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Attention window in tokens of requests that name none, 0 = full attention [default: 0].
    #[arg(long, value_name = "TOKENS")]
    pub cache_window: Option<u32>,
    /// How embeddings are made of the tokens' states [default: as the model says, else mean].
    #[arg(long, value_enum, value_name = "KIND")]
    pub pooling: Option<Pooling>,
    /// Depth and weights, of all models.
    #[command(flatten)]
    pub model_args: ModelArgs,
    /// Most requests waiting per model; further ones get 503 [default: 128].
    #[arg(long, value_name = "COUNT")]
    pub max_queue_depth: Option<usize>,
    /// Most prompt tokens of all requests waiting per model [default: no limit].
    #[arg(long, value_name = "TOKENS")]
    pub max_queued_prompt_tokens: Option<u64>,
    /// Latency objective in milliseconds of requests that name none [default: none].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub default_slo_ms: Option<u64>,
    /// A waiting request gains one priority level per this many milliseconds; 0 = never [default: 5000].
    #[arg(long, value_name = "MS")]
    pub aging_interval_ms: Option<u64>,
    /// A request may take the slot of a running one of lower priority.
    #[arg(long)]
    pub preempt_running: bool,
    /// Prefixes that may be registered per model [default: 16].
    #[arg(long, value_name = "COUNT")]
    pub prefix_pool_capacity: Option<usize>,
    /// Longest wait in the queue in seconds [default: no limit].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub queue_timeout: Option<Duration>,
    /// Jobs the engine holds at once: a number, or `auto` [default: what it can hold].
    #[arg(long, value_name = "COUNT")]
    pub target_inflight: Option<crate::config::TargetInflight>,
    /// Worker threads of the inference APIs; a request holds one while it waits or runs [default: as
    /// many as may wait and run, and 16 more].
    #[arg(long, value_name = "COUNT")]
    pub http_workers: Option<usize>,
    /// Open connections [default: 4096].
    #[arg(long, value_name = "COUNT")]
    pub max_connections: Option<usize>,
    /// Largest request body in bytes [default: 16777216].
    #[arg(long, value_name = "BYTES")]
    pub max_body_bytes: Option<usize>,
    /// Status of refusals for load, 503 or 429 [default: 503].
    #[arg(long, value_name = "STATUS")]
    pub overload_status: Option<u16>,
    /// Seconds that a shutdown waits for running requests [default: 30].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub drain_timeout: Option<Duration>,
    /// Shape of the log lines on stderr [default: text].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Show the beginning of each request's body in the log.
    #[arg(long)]
    pub log_prompts: bool,
    /// error, warn, info, debug, trace, or a filter per module [default: info].
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

impl clap::ValueEnum for LogFormat {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Text, Self::Json]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(match self {
            Self::Text => "text",
            Self::Json => "json",
        }))
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Error::Usage(error.0)
    }
}

impl ServeArgs {
    /// File, then flags, then checks.
    pub fn config(&self) -> Result<Config, Error> {
        let mut config = match &self.config {
            Some(path) => Config::load(path)?,
            None => Config::default(),
        };
        self.put_planes(&mut config);
        self.put_models(&mut config)?;
        config.check()?;
        Ok(config)
    }

    /// Whether flags or the file, as it is now, name a model.
    fn names_models(&self) -> Result<bool, Error> {
        match &self.config {
            Some(path) if self.models.is_empty() => Ok(!Config::load(path)?.models.is_empty()),
            _ => Ok(!self.models.is_empty()),
        }
    }

    fn put_planes(&self, config: &mut Config) {
        let server = &mut config.server;
        put(&mut server.host, self.host);
        put(&mut server.port, self.port);
        put(&mut server.http_workers, self.http_workers);
        put(&mut server.max_connections, self.max_connections);
        put(&mut server.max_body_bytes, self.max_body_bytes);
        put(&mut server.overload_status, self.overload_status);
        put(&mut server.drain_timeout, self.drain_timeout);
        server.api_keys.extend(self.api_keys.iter().cloned());
        let from_environment = std::env::var("TINYLOOP_API_KEY").unwrap_or_default();
        let keys = from_environment.split(',').map(str::trim);
        let keys = keys.filter(|key| !key.is_empty()).map(str::to_owned);
        server.api_keys.extend(keys);
        server.insecure_no_auth |= self.insecure_no_auth;
        server
            .cors_origins
            .extend(self.cors_origins.iter().cloned());
        if self.api_key_file.is_some() {
            server.api_key_file.clone_from(&self.api_key_file);
        }
        let management = &mut config.management;
        management.enabled &= !self.no_management;
        put(&mut management.host, self.management_host);
        put(&mut management.port, self.management_port);
        if self.admin_key.is_some() {
            management.admin_key.clone_from(&self.admin_key);
        } else if management.admin_key.is_none() {
            let from_environment = std::env::var("TINYLOOP_ADMIN_KEY").ok();
            management.admin_key = from_environment.filter(|key| !key.is_empty());
        }
        put(&mut config.log.format, self.log_format);
        put(&mut config.log.level, self.log_level.clone());
        config.log.prompts |= self.log_prompts;
    }

    fn put_models(&self, config: &mut Config) -> Result<(), Error> {
        let mut files = self.models.clone();
        if files.is_empty() && config.models.is_empty() {
            files.push(BUILTIN_MODEL.into());
        }
        if self.model_names.len() > files.len() {
            return Err(Error::Usage("more --model-name than --model".into()));
        }
        for (index, file) in files.into_iter().enumerate() {
            let name = self.model_names.get(index).cloned();
            let name = name.unwrap_or_else(|| name_of(&file));
            config.models.push(ModelConfig {
                executor: config.executor.clone(),
                engine: config.engine.clone(),
                ..ModelConfig::new(name, ModelSource::File(file))
            });
        }
        for model in &mut config.models {
            let engine = &mut model.engine;
            engine.context_length = self.ctx_size.or(engine.context_length);
            engine.threads = self.threads.or(engine.threads);
            engine.pooling = self.pooling.or(engine.pooling);
            engine.kv_tokens = self.kv_tokens.or(engine.kv_tokens);
            engine.prefix_cache &= !self.no_prefix_cache;
            self.model_args.apply(engine);
            put(&mut engine.cache_window, self.cache_window);
            put(&mut engine.max_sequences, self.max_sequences);
            put(&mut engine.max_rows, self.max_rows);
            let executor = &mut model.executor;
            put(&mut executor.max_queue_depth, self.max_queue_depth);
            put(&mut executor.aging_interval_ms, self.aging_interval_ms);
            put(
                &mut executor.prefix_pool_capacity,
                self.prefix_pool_capacity,
            );
            executor.preempt_running |= self.preempt_running;
            executor.default_slo_ms = self.default_slo_ms.or(executor.default_slo_ms);
            executor.max_queued_prompt_tokens = self
                .max_queued_prompt_tokens
                .or(executor.max_queued_prompt_tokens);
            executor.queue_timeout = self.queue_timeout.or(executor.queue_timeout);
            executor.target_inflight = self.target_inflight.or(executor.target_inflight);
        }
        Ok(())
    }
}

/// Serves until a signal asks for the end, then drains.
pub fn run(args: &ServeArgs) -> Result<(), Error> {
    let config = args.config()?;
    super::logging::install(&config.log)?;
    let signals = Signals::catch()?;
    raise_descriptor_limit();
    let metrics = Arc::new(Metrics::new());
    let pool = Arc::new(Pool::with_config(metrics, config.pool.clone()));
    add_all(&pool, &config.models)?;
    pool.announce_enabled();
    let server = Server::start(&config, Arc::clone(&pool))?;
    let again = config_again(args.clone(), config.server.host)?;
    server.state().set_config_source(again);
    server.state().set_started_with(config.clone());
    tracing::info!(address = %server.address(), "listening; the models are loading");
    announce(&server);
    match load_until_signal(Arc::clone(&pool), &signals) {
        Ok(true) => {
            invite(&server, &config, &pool);
            signals.wait();
        }
        Ok(false) => {} // asked to stop while loading
        Err(error) => {
            server.shutdown(Duration::ZERO);
            return Err(error);
        }
    }
    tracing::info!(
        drain_timeout_s = config.server.drain_timeout.as_secs_f64(),
        "stopping: running requests finish, new ones are refused; a second signal ends at once"
    );
    server.shutdown(config.server.drain_timeout);
    Ok(())
}

/// Loads on a thread of its own, so that a signal need not wait for a long load: then the answer is
/// false, and the thread ends with the process.
fn load_until_signal(pool: Arc<Pool>, signals: &Signals) -> Result<bool, Error> {
    let (report, done) = crossbeam_channel::bounded(1);
    let loader = std::thread::Builder::new()
        .name("loader".into())
        .spawn(move || {
            // Nobody waits any more when a signal came first.
            let _ = report.send(load_enabled(&pool));
        })?;
    match signals.wait_or(&done) {
        None => Ok(false),
        Some(Some(loaded)) => loaded.map(|()| true),
        Some(None) => match loader.join() {
            Ok(()) => Err(Error::Other("the loader ended without a word".to_owned())),
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}

/// Reads the configuration again, for a reload. A file that named models and names none any more is
/// more likely half written, or lost, than meant: it is a fault, not the end of all models. So is one
/// that would be refused where the server listens until its next start, whatever the file says by then.
fn config_again(args: ServeArgs, listens_on: IpAddr) -> Result<ConfigSource, Error> {
    let named_models = args.names_models()?;
    Ok(Box::new(move || {
        let read = || -> Result<Config, Error> {
            if named_models && !args.names_models()? {
                let path = args.config.as_deref().unwrap_or(Path::new(""));
                let path = path.display();
                return Err(Error::Usage(format!(
                    "{path} names no models any more; the running ones stay"
                )));
            }
            let config = args.config()?;
            let mut until_restart = config.clone();
            until_restart.server.host = listens_on;
            until_restart.check()?;
            Ok(config)
        };
        read().map_err(|error| error.to_string())
    }))
}

/// The addresses on standard output, as soon as they are bound.
fn announce(server: &Server) {
    let address = reachable(server.address());
    let mut text = format!("tinyloop listens on http://{address}\n");
    if let Some(management) = server.management_address() {
        text.push_str(&format!("management on http://{management}\n"));
    }
    // A closed standard output does not end a server.
    let _ = Output::new().piece(&text);
}

/// What is served, once that is known, and a line that works when pasted.
fn invite(server: &Server, config: &Config, pool: &Pool) {
    let address = reachable(server.address());
    let mut text = String::new();
    // Those that answer come first: the line to paste names the first.
    let mut entries = pool.entries();
    entries.sort_by_key(|entry| match entry.loaded() {
        Some(_) => 0,
        None if entry.load_on_demand => 1,
        None => 2,
    });
    let shown: Vec<String> = entries
        .iter()
        .map(|entry| match entry.loaded() {
            Some(_) => entry.name.clone(),
            None => format!("{} ({})", entry.name, entry.state.name().name()),
        })
        .collect();
    let can_chat = |entry: &&PoolEntry| match entry.loaded() {
        Some(model) => !model.meta.makes_only_embeddings(),
        None => true, // not known yet
    };
    let chats = entries.iter().find(can_chat).or(entries.first());
    let chats = chats.map(|entry| entry.name.as_str());
    text.push_str(&format!("models: {}\n\n", shown.join(", ")));
    let key = match config.has_keys() {
        false => "",
        true => " -H 'authorization: Bearer YOUR_KEY'",
    };
    let body = serde_json::json!({
        "model": chats, "stream": true,
        "messages": [{"role": "user", "content": "Tell me a short story."}],
    });
    text.push_str(&format!(
        "curl -N http://{address}/v1/chat/completions{key} -H 'content-type: application/json' \
         -d '{}'\n",
        body.to_string().replace('\'', "'\\''")
    ));
    // A closed standard output does not end a server.
    let _ = Output::new().piece(&text);
}

/// An address that a client on this machine can use.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, address.port()).into(),
        _ => address,
    }
}

fn put<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// The file's name without `.gguf`: what a user would type.
#[must_use]
pub fn name_of(file: &Path) -> String {
    if file == Path::new(BUILTIN_MODEL) {
        return builtin::NAME.to_owned();
    }
    let name = file
        .file_name()
        .unwrap_or(file.as_os_str())
        .to_string_lossy();
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn config(line: &str) -> Result<Config, Error> {
        let words = std::iter::once("serve").chain(line.split_whitespace());
        Line::try_parse_from(words)
            .map_err(|error| Error::Usage(error.to_string()))?
            .args
            .config()
    }

    #[test]
    fn flags_reach_every_model() {
        let config = config(
            "--model a/x.gguf --model b.gguf --model-name first --port 0 --ctx-size 64 --ubatch 8 \
             --parallel 2 --max-queue-depth 3 --queue-timeout 1.5 --no-prefix-cache --api-key k",
        )
        .expect("valid");
        assert_eq!(config.server.port, 0);
        assert_eq!(config.server.api_keys, ["k"]);
        let names: Vec<&str> = config
            .models
            .iter()
            .map(|model| model.name.as_str())
            .collect();
        assert_eq!(names, ["first", "b"]);
        for model in &config.models {
            assert_eq!(model.engine.context_length, Some(64));
            assert_eq!((model.engine.max_rows, model.engine.max_sequences), (8, 2));
            assert!(!model.engine.prefix_cache);
            assert_eq!(model.executor.max_queue_depth, 3);
            assert_eq!(
                model.executor.queue_timeout,
                Some(Duration::from_millis(1500))
            );
        }
    }

    #[test]
    fn without_a_model_the_one_inside_the_program_is_served() {
        let config = config("--loops 2").expect("valid");
        let model = &config.models[0];
        assert_eq!(model.name, builtin::NAME);
        assert_eq!(model.source, ModelSource::File(BUILTIN_MODEL.into()));
        assert_eq!(model.engine.loops.default, Some(2));
        assert_eq!(config.models.len(), 1);
    }

    #[test]
    fn usage_errors_are_usage_errors() {
        for line in [
            "--model a --model a",
            "--model a --drain-timeout -1",
            "--model a --overload-status 500",
            "--model-name x --model-name y",
            "--config /none",
        ] {
            let error = config(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}: {error}");
        }
    }
}
