//! Sizes of an engine, worked out once from configuration and model, and what they refuse.
//!
//! Pure: no thread, no allocation of state. Every refusal has both numbers in its text.
//!
//! Defaults: the context is the model's own, at most 8192 tokens and at most `kv_tokens` where that
//! is given. `kv_tokens` is `max_sequences` contexts of a quarter of the length, or one whole
//! context, whichever is more: most requests are far shorter than the longest, and what does not
//! fit waits or is preempted. KV is counted at the model's default number of loops. With a default
//! `cache_window` the pool may be smaller than a context: what counts is what a request holds at
//! once, its kept beginning and its window.

use super::EngineError;
use crate::backend::{CacheWindow, PAGE_TOKENS};
use crate::config::{EngineConfig, Pooling};
use crate::model::{DeclaredPooling, ExitRules, ModelSpec, Plan};
use crate::request::GenerationRequest;

/// Prompt rows of one pass whose logits may be asked for (prompt log-probabilities). It bounds the
/// memory for logits to this many vocabularies plus one per sequence.
pub const MAX_SCORED_ROWS: u32 = 64;

/// What the engine may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Longest prompt + completion in tokens.
    pub context_length: u32,
    /// Sequences that may run at once.
    pub max_sequences: u32,
    /// Most rows of a pass, and hidden-state slots.
    pub max_rows: u32,
    /// Most prompt rows under way at once beside generations.
    pub prefill_rows_beside_decode: u32,
    /// KV pages of the pool.
    pub n_pages: u32,
    /// Tokens that the pool holds at the default number of loops.
    pub kv_tokens: u64,
    /// Most pages that pinned prefixes may keep: half of the pool, and never so many that the
    /// longest context at the most loops would not fit beside them.
    pub pinned_pages_max: u32,
    /// Whether full blocks are kept for reuse.
    pub prefix_cache: bool,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// Rules of early exit that the model knows; none unless told by [`Self::with_exit_rules`].
    pub exit_rules: ExitRules,
    /// Whether the model makes tokens, and not only embeddings.
    pub generates: bool,
    /// How embeddings are made; None: the model makes none.
    pub pooling: Option<Pooling>,
}

impl EngineLimits {
    /// Works out the sizes.
    ///
    /// # Errors
    /// `EngineError::Config` when they contradict each other or the model.
    pub fn new(config: &EngineConfig, spec: &ModelSpec, plan: &Plan) -> Result<Self, EngineError> {
        let refuse = |text: String| Err(EngineError::Config(text));
        if config.max_sequences == 0 || config.max_rows == 0 {
            return refuse(format!(
                "max_sequences is {} and max_rows is {}; both must be at least 1",
                config.max_sequences, config.max_rows
            ));
        }
        if config.prefill_rows_beside_decode == 0 {
            return refuse(
                "prefill_rows_beside_decode is 0; it must be at least 1, or no prompt would get \
                 through beside a generation"
                    .to_owned(),
            );
        }
        let context_length = context_length(config, spec)?;
        if config.cache_window > context_length {
            return refuse(format!(
                "cache_window is {}, more than the context of {context_length} tokens; 0 is full \
                 attention",
                config.cache_window
            ));
        }
        let share = u64::from(config.max_sequences) * u64::from(context_length) / 4;
        let kv_tokens = config
            .kv_tokens
            .unwrap_or_else(|| share.max(u64::from(context_length)));
        let largest_blocks = context_blocks(config, context_length);
        if kv_tokens < u64::from(context_length).min(largest_blocks * PAGE_TOKENS as u64) {
            let window = match config.cache_window {
                0 => "lower context_length, or set cache_window".to_owned(),
                window => format!("lower context_length or cache_window, which is {window}"),
            };
            return refuse(format!(
                "kv_tokens is {kv_tokens}, which cannot hold one context of {context_length} \
                 tokens; raise kv_tokens, {window}"
            ));
        }
        let n_blocks = kv_tokens.div_ceil(PAGE_TOKENS as u64);
        let groups = plan.kv_groups(plan.default_loops) as u64;
        let n_pages = n_blocks
            .checked_mul(groups)
            .and_then(|n_pages| u32::try_from(n_pages).ok());
        let Some(n_pages) = n_pages else {
            return refuse(format!(
                "kv_tokens is {kv_tokens}, which needs more than {} KV pages",
                u32::MAX
            ));
        };
        let largest = largest_blocks.saturating_mul(plan.kv_groups(plan.max_loops) as u64);
        let beside = match u64::from(n_pages).saturating_sub(largest) {
            beside if config.cache_window == 0 => beside,
            // A request may hold a registered prefix beside its window, and another one be pinned.
            beside => beside / 2,
        };
        Ok(Self {
            pinned_pages_max: beside.min(u64::from(n_pages / 2)) as u32,
            context_length,
            max_sequences: config.max_sequences,
            max_rows: max_rows(config, spec, context_length),
            prefill_rows_beside_decode: config.prefill_rows_beside_decode,
            n_pages,
            kv_tokens: n_blocks * PAGE_TOKENS as u64,
            prefix_cache: config.prefix_cache,
            vocab_size: spec.vocab_size,
            exit_rules: ExitRules::default(),
            generates: spec.encoder.is_none(),
            pooling: pooling(config, spec),
        })
    }

    /// The same with rules of early exit, which are seen in a model's weights only.
    #[must_use]
    pub fn with_exit_rules(self, exit_rules: ExitRules) -> Self {
        Self { exit_rules, ..self }
    }

    /// Why a request can never run here; None when it can. Callers check it before queueing.
    #[must_use]
    pub fn refusal(&self, request: &GenerationRequest, plan: &Plan) -> Option<String> {
        let n_prompt = request.prompt.len() as u64;
        let context_length = u64::from(self.context_length);
        // A prompt that fills the context leaves no room for the first generated token.
        let n_needed = n_prompt + u64::from(request.max_tokens.min(1));
        if request.prompt.is_empty() {
            return Some("the prompt has no tokens; at least one is needed".to_owned());
        }
        if n_needed > context_length {
            return Some(format!(
                "the prompt has {n_prompt} tokens, which does not fit the context length of \
                 {context_length} tokens"
            ));
        }
        let vocab_size = self.vocab_size;
        if let Some(token) = request.prompt.iter().find(|token| **token >= vocab_size) {
            return Some(format!(
                "prompt token {token} is not in the vocabulary of {vocab_size} tokens"
            ));
        }
        if let Some(refusal) = self.kind_refusal(request) {
            return Some(refusal.to_owned());
        }
        let window = request.window();
        if !window.n_kept.is_multiple_of(PAGE_TOKENS as u32) || u64::from(window.n_kept) > n_prompt
        {
            return Some(format!(
                "{} tokens shall be kept beside the window; they must be whole blocks of \
                 {PAGE_TOKENS} and begin the prompt of {n_prompt}",
                window.n_kept
            ));
        }
        let exit = request.adaptive;
        exit.and_then(|exit| self.exit_rules.refusal(exit))
            .or_else(|| self.depth_refusal(request, plan))
    }

    /// The part of [`Self::refusal`] that concerns what is asked for at all.
    fn kind_refusal(&self, request: &GenerationRequest) -> Option<&'static str> {
        match request.embed {
            false if !self.generates => Some("this model makes embeddings and cannot generate"),
            true if self.pooling.is_none() => {
                Some("this model ranks texts and makes no embeddings")
            }
            true if request.max_tokens > 0 => Some("an embedding has no tokens to generate"),
            true if !self.generates && request.cache_window > 0 => {
                Some("this model reads a text at once and has no attention windows")
            }
            _ => None,
        }
    }

    /// The part of [`Self::refusal`] that concerns loops and the pages they need.
    fn depth_refusal(&self, request: &GenerationRequest, plan: &Plan) -> Option<String> {
        let loops = request.loops.unwrap_or(plan.default_loops);
        if loops == 0 || loops > plan.max_loops {
            return Some(format!(
                "loops is {loops}; this model runs 1 to {} loops",
                plan.max_loops
            ));
        }
        let wanted = request.prompt.len() as u64 + u64::from(request.max_tokens);
        let n_tokens = wanted.min(u64::from(self.context_length));
        // A chunk can be as short as a row, so no more is needed for progress.
        let n_blocks = request.window().blocks_max(n_tokens as usize, 1);
        let n_pages = n_blocks as u64 * plan.kv_groups(loops) as u64;
        let n_free = u64::from(self.n_pages - self.pinned_pages_max);
        (n_pages > n_free).then(|| {
            let what = match request.cache_window {
                0 => format!("{n_tokens} tokens"),
                window => format!("{n_tokens} tokens in a window of {window}"),
            };
            format!(
                "{what} at {loops} loops need {n_pages} KV pages; the pool has {}{}",
                self.n_pages,
                match self.pinned_pages_max {
                    0 => String::new(),
                    n_pinned => format!(", {n_pinned} of them for registered prefixes"),
                }
            )
        })
    }
}

/// All rows of a text enter an encoder together.
fn max_rows(config: &EngineConfig, spec: &ModelSpec, context_length: u32) -> u32 {
    match spec.encoder {
        Some(_) => config.max_rows.max(context_length),
        None => config.max_rows,
    }
}

/// As configured, else as the file says, else the mean; None where states are no embeddings.
fn pooling(config: &EngineConfig, spec: &ModelSpec) -> Option<Pooling> {
    let declared = match spec.pooling {
        DeclaredPooling::Ranks => return None,
        DeclaredPooling::Is(pooling) => pooling,
        DeclaredPooling::None => Pooling::Mean,
    };
    Some(config.pooling.unwrap_or(declared))
}

/// Blocks of the longest request that the pool is made for: a context in the default window.
fn context_blocks(config: &EngineConfig, context_length: u32) -> u64 {
    let window = CacheWindow {
        tokens: config.cache_window,
        n_kept: 0,
    };
    window.blocks_max(context_length as usize, 1) as u64
}

fn context_length(config: &EngineConfig, spec: &ModelSpec) -> Result<u32, EngineError> {
    let trained = spec.context_length;
    match config.context_length {
        Some(0) => Err(EngineError::Config(
            "context_length is 0; it must be at least 1".to_owned(),
        )),
        Some(asked) if asked > trained => Err(EngineError::Config(format!(
            "context_length is {asked}, but the model was trained for {trained} tokens"
        ))),
        Some(asked) => Ok(asked),
        None => {
            let held = match config.cache_window {
                0 => config.kv_tokens.unwrap_or(u64::MAX).max(1),
                _ => u64::MAX,
            };
            let most = u64::from(trained.min(EngineConfig::CONTEXT_DEFAULT));
            Ok(most.min(held) as u32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::{TinyShape, tiny_spec};

    fn limits(config: &EngineConfig, plan: &Plan) -> Result<EngineLimits, String> {
        let shape = TinyShape {
            plan: plan.clone(),
            context_length: 10_000,
            ..TinyShape::default()
        };
        EngineLimits::new(config, &tiny_spec(&shape), plan).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_follow_the_model() {
        let plan = Plan::ordinary(2);
        let default = limits(&EngineConfig::default(), &plan).expect("valid");
        assert_eq!(default.context_length, 8192);
        assert_eq!(default.kv_tokens, 16 * 8192 / 4);
        assert_eq!(default.n_pages, 16 * 8192 / 4 / 16);
        assert_eq!(default.pinned_pages_max, default.n_pages / 2);
        let config = EngineConfig {
            kv_tokens: Some(1000),
            ..EngineConfig::default()
        };
        let small = limits(&config, &plan).expect("valid");
        assert_eq!((small.context_length, small.kv_tokens), (1000, 1008));
        assert_eq!(small.pinned_pages_max, 0, "one context needs them all");
        let looped = limits(&config, &Plan::looped(1, 2, 0, 3, 4)).expect("valid");
        assert_eq!(looped.n_pages, 63 * 4);
        let config = EngineConfig {
            context_length: Some(160),
            ..config
        };
        let looped = limits(&config, &Plan::looped(1, 2, 0, 3, 9)).expect("valid");
        assert_eq!((looped.n_pages, looped.pinned_pages_max), (63 * 4, 126));
        let deep = limits(&config, &Plan::looped(1, 2, 0, 3, 20)).expect("valid");
        assert_eq!(deep.pinned_pages_max, 63 * 4 - 10 * 21);
    }

    #[test]
    fn contradictions_name_both_numbers() {
        let plan = Plan::ordinary(2);
        for (context, kv, words) in [
            (Some(500), Some(400), ["500", "400"]),
            (Some(20_000), None, ["20000", "10000"]),
            (Some(0), None, ["0", "at least 1"]),
        ] {
            let config = EngineConfig {
                context_length: context,
                kv_tokens: kv,
                ..EngineConfig::default()
            };
            let error = limits(&config, &plan).expect_err("a contradiction");
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }

    #[test]
    fn a_default_window_lets_the_context_exceed_the_pool() {
        let plan = Plan::ordinary(2);
        let config = EngineConfig {
            cache_window: 100,
            kv_tokens: Some(256),
            ..EngineConfig::default()
        };
        let found = limits(&config, &plan).expect("valid");
        let sizes = (found.context_length, found.n_pages, found.pinned_pages_max);
        assert_eq!(sizes, (8192, 16, 4));
        let mut request = GenerationRequest::new(vec![1; 4000], 4000);
        let full = found.refusal(&request, &plan).expect("too much");
        assert!(
            full.contains("need 500 KV pages; the pool has 16, 4"),
            "{full}"
        );
        request.cache_window = 100;
        assert_eq!(found.refusal(&request, &plan), None);
        // A registered prefix beside it fits as well.
        request.kept_tokens = 4 * 16;
        assert_eq!(found.refusal(&request, &plan), None);
        request.cache_window = 200;
        assert!(found.refusal(&request, &plan).is_some());
        let config = EngineConfig {
            kv_tokens: Some(100),
            ..config
        };
        let error = limits(&config, &plan).expect_err("8 blocks are needed");
        assert!(error.contains("kv_tokens is 100") && error.contains("cache_window, which is 100"));
    }

    #[test]
    fn requests_that_cannot_run_are_refused_with_a_reason() {
        let plan = Plan::looped(0, 2, 0, 1, 4);
        let config = EngineConfig {
            context_length: Some(64),
            kv_tokens: Some(96),
            ..EngineConfig::default()
        };
        let limits = limits(&config, &plan).expect("valid");
        let request =
            |n_prompt: usize, max_tokens| GenerationRequest::new(vec![1; n_prompt], max_tokens);
        let with = |change: fn(&mut GenerationRequest)| {
            let mut request = request(20, 10);
            change(&mut request);
            request
        };
        for (request, word) in [
            (request(0, 1), "no tokens"),
            (request(64, 1), "context length of 64"),
            (request(65, 0), "context length of 64"),
            (with(|r| r.prompt = vec![1, 259].into()), "token 259"),
            (
                with(|r| (r.cache_window, r.kept_tokens) = (8, 24)),
                "whole blocks of 16",
            ),
            (
                with(|r| (r.cache_window, r.kept_tokens) = (8, 32)),
                "the prompt of 20",
            ),
            (
                with(|r| (r.cache_window, r.loops) = (40, Some(4))),
                "window of 40 at 4 loops need 8 KV pages",
            ),
            (with(|r| r.loops = Some(0)), "loops is 0"),
            (with(|r| r.loops = Some(5)), "1 to 4"),
            (
                with(|r| r.loops = Some(4)),
                "need 8 KV pages; the pool has 6",
            ),
        ] {
            let refusal = limits.refusal(&request, &plan).expect(word);
            assert!(refusal.contains(word), "{refusal}");
        }
        // In a window four loops fit, although the whole would not.
        let mut deep = request(50, 1000);
        (deep.cache_window, deep.loops) = (1, Some(4));
        for request in [request(63, 1000), request(64, 0), request(1, 1), deep] {
            assert_eq!(limits.refusal(&request, &plan), None);
        }
    }
}
