//! The models this server has, by the names that clients send.
//!
//! Filled at start, read by every HTTP worker; a short read lock, never held across a call into an
//! executor. A model is announced before it is loaded, so that a client who names it meanwhile
//! hears "loading" and not "unknown":
//!
//! ```text
//!   announce ──► Loading ── insert ──► Loaded
//! ```
//!
//! What is not here: how a file becomes an executor (`loader`), unloading, eviction, budgets. A
//! load that fails ends the process, so there is no failed state.

pub mod loader;

use crate::model::ExitRules;
use crate::rate::finished_after_s;
use crate::scheduler::{Executor, Metrics};
use crate::tokenizer::{ChatTemplate, Tokenizer};
use parking_lot::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// What is known of a model beside its executor; for lists and admin pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelMeta {
    /// `general.architecture`; empty for models without a file.
    pub architecture: String,
    /// `general.name` of the file.
    pub title: String,
    /// Path of the file.
    pub file: String,
    /// Its length in bytes.
    pub file_bytes: u64,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Context length the model was trained with, in tokens.
    pub trained_context_length: u32,
    /// Changes when the answers of a seed may change: version and model file.
    pub fingerprint: String,
    /// Loops that requests may ask for.
    pub loops: LoopRange,
    /// Rules by which their tokens may leave the loop early.
    pub exit_rules: ExitRules,
    /// Attention windows that requests may ask for.
    pub windows: WindowRange,
}

/// Sliding attention windows of a model, in tokens: `0..=max`, 0 = full attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowRange {
    /// What a request gets that does not say.
    pub default: u32,
    /// Most that a request may ask for: the context length. 0 where there are no windows.
    pub max: u32,
}

/// Loops of a model's core: `1..=max`, `default` when a request does not say. Both 1 for ordinary
/// models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopRange {
    /// What a request gets that does not say.
    pub default: u32,
    /// Most that a request may ask for.
    pub max: u32,
}

impl Default for LoopRange {
    fn default() -> Self {
        Self { default: 1, max: 1 }
    }
}

/// A model that answers.
pub struct LoadedModel {
    /// The id that clients send.
    pub name: String,
    /// Further ids for it.
    pub aliases: Vec<String>,
    /// When it was loaded.
    pub created: SystemTime,
    /// Where its requests go; started.
    pub executor: Arc<Executor>,
    /// Text to tokens; None when its runtimes take text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Messages to text, or why that cannot be done.
    pub chat_template: Result<Arc<ChatTemplate>, String>,
    /// Longest prompt + completion in tokens, as served.
    pub context_length: u32,
    /// For lists.
    pub meta: ModelMeta,
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedModel")
            .field("name", &self.name)
            .field("context_length", &self.context_length)
            .finish_non_exhaustive()
    }
}

/// Two models answer to one id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id `{0}` is taken by another model")]
pub struct NameTaken(pub String);

/// A model that is on its way.
#[derive(Debug, Default)]
pub struct LoadingModel {
    /// The id that clients send.
    pub name: String,
    /// Further ids for it.
    pub aliases: Vec<String>,
    /// Written by the loader, read by probes: for people, so relaxed.
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// Of the first report.
    begun: OnceLock<Instant>,
}

impl LoadingModel {
    /// The loader reports bytes done of total.
    pub fn report(&self, done_bytes: u64, total_bytes: u64) {
        self.begun.get_or_init(Instant::now);
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.done_bytes.store(done_bytes, Ordering::Relaxed);
    }

    /// Bytes done of total; (0, 0) before the loader has looked at the file.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        let total = self.total_bytes.load(Ordering::Relaxed);
        (self.done_bytes.load(Ordering::Relaxed).min(total), total)
    }

    /// Whole seconds, 1..=30, until it should be there, by the rate of the load so far.
    #[must_use]
    pub fn retry_after_s(&self) -> u32 {
        let (done, total) = self.progress();
        let elapsed = self.begun.get().map(Instant::elapsed).unwrap_or_default();
        finished_after_s(done, total, elapsed)
    }
}

/// A configured model at one moment.
#[derive(Clone, Debug)]
pub enum PoolEntry {
    /// Announced; requests for it can only be told to come again.
    Loading(Arc<LoadingModel>),
    /// Takes requests.
    Loaded(Arc<LoadedModel>),
}

impl PoolEntry {
    /// The id that clients send.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Loading(model) => &model.name,
            Self::Loaded(model) => &model.name,
        }
    }

    fn answers_to(&self, id: &str) -> bool {
        let (name, aliases) = match self {
            Self::Loading(model) => (&model.name, &model.aliases),
            Self::Loaded(model) => (&model.name, &model.aliases),
        };
        name == id || aliases.iter().any(|alias| alias == id)
    }
}

/// The registry.
pub struct Pool {
    metrics: Arc<Metrics>,
    /// Guards the list; read for each request, written when a model comes.
    models: RwLock<Vec<PoolEntry>>,
}

impl Pool {
    /// An empty pool whose executors report to `metrics`.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            models: RwLock::new(Vec::new()),
        }
    }

    /// The registry of the process.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Makes a model known that is to be loaded; its name and aliases must be new.
    pub fn announce(&self, name: &str, aliases: &[String]) -> Result<Arc<LoadingModel>, NameTaken> {
        let mut models = self.models.write();
        check_free(&models, name, aliases)?;
        let model = Arc::new(LoadingModel {
            name: name.to_owned(),
            aliases: aliases.to_vec(),
            ..LoadingModel::default()
        });
        models.push(PoolEntry::Loading(Arc::clone(&model)));
        Ok(model)
    }

    /// Adds a model: in the place of its announcement, or at the end when there was none. Name and
    /// aliases must be free beside that.
    pub fn insert(&self, model: LoadedModel) -> Result<Arc<LoadedModel>, NameTaken> {
        let mut models = self.models.write();
        let announced = models.iter().position(
            |entry| matches!(entry, PoolEntry::Loading(loading) if loading.name == model.name),
        );
        let place = announced.unwrap_or(models.len());
        let taken_out = announced.map(|place| models.remove(place));
        let free = check_free(&models, &model.name, &model.aliases);
        let model = Arc::new(model);
        match (&free, taken_out) {
            (Ok(()), _) => models.insert(place, PoolEntry::Loaded(Arc::clone(&model))),
            (Err(_), Some(announced)) => models.insert(place, announced),
            (Err(_), None) => {}
        }
        free.map(|()| model)
    }

    /// The loaded model that answers to a name or alias.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<LoadedModel>> {
        match self.find(name)? {
            PoolEntry::Loaded(model) => Some(model),
            PoolEntry::Loading(_) => None,
        }
    }

    /// What answers to a name or alias.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<PoolEntry> {
        let models = self.models.read();
        models.iter().find(|entry| entry.answers_to(name)).cloned()
    }

    /// All configured models in the order they were announced.
    #[must_use]
    pub fn entries(&self) -> Vec<PoolEntry> {
        self.models.read().clone()
    }

    /// All loaded models in that order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<LoadedModel>> {
        let models = self.models.read();
        let loaded = |entry: &PoolEntry| match entry {
            PoolEntry::Loaded(model) => Some(Arc::clone(model)),
            PoolEntry::Loading(_) => None,
        };
        models.iter().filter_map(loaded).collect()
    }

    /// Prometheus exposition for all models, `extra_lines` first.
    #[must_use]
    pub fn metrics_text(&self, extra_lines: &str) -> String {
        for model in self.list() {
            model.executor.refresh_metrics();
        }
        self.metrics.render(extra_lines)
    }

    /// Shuts all executors down, at the same time, each with the whole `drain_timeout`. They stay
    /// listed and refuse with `shutting_down`. Idempotent.
    pub fn shutdown(&self, drain_timeout: Duration) {
        let models = self.list();
        std::thread::scope(|scope| {
            for model in &models {
                let spawned = std::thread::Builder::new()
                    .name(format!("drain-{}", model.name))
                    .spawn_scoped(scope, || model.executor.shutdown(drain_timeout));
                if spawned.is_err() {
                    model.executor.shutdown(drain_timeout); // no thread: one after the other
                }
            }
        });
    }
}

fn check_free(models: &[PoolEntry], name: &str, aliases: &[String]) -> Result<(), NameTaken> {
    let ids = std::iter::once(name).chain(aliases.iter().map(String::as_str));
    for id in ids {
        if models.iter().any(|other| other.answers_to(id)) {
            return Err(NameTaken(id.to_owned()));
        }
    }
    Ok(())
}
