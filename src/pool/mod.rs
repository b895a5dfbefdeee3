//! The models this server has, by the names that clients send.
//!
//! Filled at start, read by every HTTP worker; a short read lock, never held across a call into an
//! executor. What is not here: how a file becomes an executor (`loader`), and states, eviction,
//! budgets: a model that is listed is loaded.

pub mod loader;

use crate::scheduler::{Executor, Metrics};
use crate::tokenizer::{ChatTemplate, Tokenizer};
use parking_lot::RwLock;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

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

/// The registry.
pub struct Pool {
    metrics: Arc<Metrics>,
    /// Guards the list; read for each request, written when a model comes.
    models: RwLock<Vec<Arc<LoadedModel>>>,
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

    /// Adds a model; its name and aliases must be new.
    pub fn insert(&self, model: LoadedModel) -> Result<Arc<LoadedModel>, NameTaken> {
        let mut models = self.models.write();
        for id in std::iter::once(&model.name).chain(&model.aliases) {
            if models.iter().any(|other| other.answers_to(id)) {
                return Err(NameTaken(id.clone()));
            }
        }
        let model = Arc::new(model);
        models.push(Arc::clone(&model));
        Ok(model)
    }

    /// The model that answers to a name or alias.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<LoadedModel>> {
        let models = self.models.read();
        models.iter().find(|model| model.answers_to(name)).cloned()
    }

    /// All models in the order they were added.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<LoadedModel>> {
        self.models.read().clone()
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

impl LoadedModel {
    fn answers_to(&self, id: &str) -> bool {
        self.name == id || self.aliases.iter().any(|alias| alias == id)
    }
}
