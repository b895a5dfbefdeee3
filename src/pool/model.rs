//! A loaded model as the front uses it, and what is known of one on its way.
//!
//! Plain data behind `Arc`s, shared by all threads. What is not here: the registry (`registry`),
//! how a model is made (`loader`).

use super::ledger::ModelMemory;
use crate::chat::Family;
use crate::config::Pooling;
use crate::model::ExitRules;
use crate::rate::finished_after_s;
use crate::runtime::{Feature, Features, Runtime};
use crate::scheduler::Executor;
use crate::tokenizer::{ChatTemplate, Grammars, Tokenizer};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Instant, SystemTime};

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
    /// Length of a hidden state.
    pub hidden_size: u32,
    /// Numbers in all tensors of the file.
    pub n_parameters: u64,
    /// How most of them are stored, like `Q4_K_M`; empty = not known.
    pub quantization: String,
    /// Context length the model was trained with, in tokens.
    pub trained_context_length: u32,
    /// Changes when the answers of a seed may change: version and model file.
    pub fingerprint: String,
    /// How it writes calls of tools, where the configuration says so; None = as its template shows.
    pub tool_family: Option<Family>,
    /// Loops that requests may ask for.
    pub loops: LoopRange,
    /// Rules by which their tokens may leave the loop early.
    pub exit_rules: ExitRules,
    /// It makes nothing but embeddings, in another program.
    pub embeds_only: bool,
    /// Its embeddings; None where it makes none, or nobody knows.
    pub embedding: Option<EmbeddingMeta>,
    /// Attention windows that requests may ask for.
    pub windows: WindowRange,
    /// What runs it, like `native (cpu avx2 x2)`; empty = nobody said.
    pub backend: String,
    /// What it holds, over all replicas.
    pub memory: ModelMemory,
}

/// What is known of a model's embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingMeta {
    /// How they are made of the tokens' states.
    pub pooling: Pooling,
    /// Their length.
    pub n_dimensions: u32,
    /// The model was made for them: it is an encoder, or its file says how to pool.
    pub is_purpose: bool,
    /// It makes nothing else.
    pub is_only: bool,
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

impl ModelMeta {
    /// Whether it cannot generate.
    #[must_use]
    pub fn makes_only_embeddings(&self) -> bool {
        self.embeds_only || self.embedding.is_some_and(|embedding| embedding.is_only)
    }

    /// What it is for, as LM Studio names it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self.makes_only_embeddings() {
            true => "embeddings",
            false => "llm",
        }
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
    /// Grammars over its vocabulary; None without a tokenizer.
    pub grammars: Option<Arc<Grammars>>,
    /// Messages to text, or why that cannot be done.
    pub chat_template: Result<Arc<ChatTemplate>, String>,
    /// Longest prompt + completion in tokens, as served.
    pub context_length: u32,
    /// For lists.
    pub meta: ModelMeta,
    /// Its runtimes, so that an unload can see that they are gone.
    pub runtimes: RuntimeWatch,
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedModel")
            .field("name", &self.name)
            .field("context_length", &self.context_length)
            .finish_non_exhaustive()
    }
}

impl LoadedModel {
    /// What requests may ask of it: what all its runtimes can, less what this very model cannot: loop, or
    /// take messages, or several turns, where its own template decides about that.
    #[must_use]
    pub fn features(&self) -> Features {
        let can = self.executor.features();
        if self.tokenizer.is_none() {
            return can; // whoever has its tokenizer has its template too
        }
        let missing = [
            (self.meta.loops.max <= 1, Feature::Loops),
            (self.chat_template.is_err(), Feature::Chat),
            (!self.takes_turns(), Feature::MultiTurn),
        ];
        let missing = missing.into_iter().filter(|(is_missing, _)| *is_missing);
        missing.fold(can, |can, (_, feature)| can.without(feature))
    }

    fn takes_turns(&self) -> bool {
        let template = self.chat_template.as_ref();
        template.is_ok_and(|template| template.takes_turns())
    }

    /// Whether requests wait or run in its executor.
    #[must_use]
    pub fn has_work(&self) -> bool {
        let now = self.executor.snapshot();
        now.queue_depth > 0 || now.in_flight > 0 || now.n_preempted > 0
    }
}

/// Sees whether the runtimes of a model are gone without keeping them.
#[derive(Clone, Default)]
pub struct RuntimeWatch {
    /// Grows by one per rebuilt replica; those that ended are dropped at each addition.
    seen: Arc<Mutex<Vec<Weak<dyn Runtime>>>>,
    stopping: Arc<AtomicBool>,
}

impl RuntimeWatch {
    /// One more to watch: a replica of the load, or one built anew.
    pub fn add(&self, runtime: &Arc<dyn Runtime>) {
        let mut seen = self.seen.lock();
        seen.retain(|runtime| runtime.strong_count() > 0);
        seen.push(Arc::downgrade(runtime));
    }

    /// The model goes: replicas that are being built anew are not wanted any more.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Whether it does.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Runtimes that somebody still holds.
    #[must_use]
    pub fn n_left(&self) -> usize {
        let seen = self.seen.lock();
        let left = seen.iter().filter(|runtime| runtime.strong_count() > 0);
        left.count()
    }
}

/// What a load is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPhase {
    /// Waits for a loader thread, or for memory that others are giving back.
    Waiting,
    /// Reads weights: bytes done of total.
    Reading,
    /// Starts engines, child processes, health checks, the executor.
    Starting,
}

impl LoadPhase {
    const ALL: [Self; 3] = [Self::Waiting, Self::Reading, Self::Starting];

    /// For lists.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Reading => "reading",
            Self::Starting => "starting",
        }
    }
}

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// What it does now.
    pub phase: LoadPhase,
    /// Bytes done, over all replicas.
    pub done_bytes: u64,
    /// Of so many; 0 before the loader has looked at the file, and where there are none.
    pub total_bytes: u64,
}

/// A load on its way: written by its loader thread, read by probes, cancelled by an unload.
#[derive(Debug)]
pub struct LoadingModel {
    /// The id that clients send.
    pub name: String,
    /// For people, so all relaxed.
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    phase: AtomicU8,
    cancelled: AtomicBool,
    /// Of the first report.
    begun: OnceLock<Instant>,
}

impl LoadingModel {
    /// A load that waits for its turn.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            phase: AtomicU8::new(LoadPhase::Waiting as u8),
            cancelled: AtomicBool::new(false),
            begun: OnceLock::new(),
        }
    }

    /// The loader reports bytes done of total.
    pub fn report(&self, done_bytes: u64, total_bytes: u64) {
        self.begun.get_or_init(Instant::now);
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.done_bytes.store(done_bytes, Ordering::Relaxed);
    }

    /// The loader reports what it does now.
    pub fn enter(&self, phase: LoadPhase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> LoadProgress {
        let total_bytes = self.total_bytes.load(Ordering::Relaxed);
        let phase = usize::from(self.phase.load(Ordering::Relaxed));
        LoadProgress {
            phase: LoadPhase::ALL[phase.min(LoadPhase::ALL.len() - 1)],
            done_bytes: self.done_bytes.load(Ordering::Relaxed).min(total_bytes),
            total_bytes,
        }
    }

    /// Whole seconds, 1..=30, until it should be there, by the rate of the load so far.
    #[must_use]
    pub fn retry_after_s(&self) -> u32 {
        let now = self.progress();
        let elapsed = self.begun.get().map(Instant::elapsed).unwrap_or_default();
        finished_after_s(now.done_bytes, now.total_bytes, elapsed)
    }

    /// Asks the loader to give up at its next chance. Its result is thrown away in any case.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Whether it should give up: loaders ask between replicas and while they wait.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}
