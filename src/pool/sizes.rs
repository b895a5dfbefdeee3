//! How many bytes a model holds at other sizes than those it was estimated at, and the largest sizes that an
//! empty device takes.
//!
//! Pure. The formulas are those of `estimate` and `estimate_foreign`, with what they read of a file as
//! numbers ([`SizeShape`]), so that the upper ends that are told of overrides are those that a load accepts.
//! What is not here: the ranges themselves (`overrides`).

use super::estimate_foreign::slots_context;
use super::ledger::ModelMemory;
use crate::backend::{CacheWindow, PAGE_TOKENS};
use crate::config::{EngineConfig, LlamaServerConfig};

/// Most tokens of a pool that anybody asks for.
const POOL_TOKENS_MAX: u64 = 1 << 40;
/// Most bytes that a field may ask for where the device's limit is not known.
const BYTES_MAX: u64 = 1 << 50;

/// What the buffers of a replica grow with, in bytes; zeros where it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeShape {
    /// Of a row of a pass.
    pub row_bytes: u64,
    /// Of a sequence or slot: its logits.
    pub sequence_bytes: u64,
    /// Of a token of the context: parts of attention; in a llama-server a column of its mask.
    pub context_bytes: u64,
    /// All rows of a text enter at once, as in an encoder.
    pub rows_follow_context: bool,
}

/// What a model is thought to hold before it was ever loaded, and what its files say of it: see
/// `estimate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Over all replicas.
    pub memory: ModelMemory,
    /// Of one token at the default depth; 0 when unknown.
    pub kv_bytes_per_token: u64,
    /// Longest context that the model was made for.
    pub trained_context: Option<u32>,
    /// Most tokens that its KV pool could count.
    pub kv_tokens_max: Option<u64>,
    /// What `memory.scratch_bytes` of one replica are made of.
    pub shape: SizeShape,
}

/// What is known of a model before it is loaded; the default is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Weights and scratch buffers of one replica, as it is configured.
    pub fixed_bytes: u64,
    /// All that one replica holds as it is configured, KV too; 0 = unknown.
    pub replica_bytes: u64,
    /// Of one token at the default depth; 0 = unknown.
    pub kv_bytes_per_token: u64,
    /// Longest context that the model was made for.
    pub trained_context: Option<u32>,
    /// Most tokens that its KV pool could count.
    pub kv_tokens_max: Option<u64>,
    /// What models may hold on its device; `u64::MAX` = no limit.
    pub limit_bytes: u64,
    /// What the scratch buffers grow with.
    pub shape: SizeShape,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            fixed_bytes: 0,
            replica_bytes: 0,
            kv_bytes_per_token: 0,
            trained_context: None,
            kv_tokens_max: None,
            limit_bytes: u64::MAX,
            shape: SizeShape::default(),
        }
    }
}

impl Known {
    /// From an estimate over so many replicas, what was measured of the same configuration, and the limit
    /// of its device. The larger of both counts: a load has to pass with either.
    #[must_use]
    pub fn of(
        estimate: &Estimate,
        measured: Option<ModelMemory>,
        n_replicas: u32,
        limit_bytes: u64,
    ) -> Self {
        let n_replicas = u64::from(n_replicas.max(1));
        let most = |of: fn(&ModelMemory) -> u64| {
            let measured = measured.as_ref().map_or(0, of);
            of(&estimate.memory).max(measured).div_ceil(n_replicas)
        };
        Self {
            fixed_bytes: most(|memory| memory.weight_bytes.saturating_add(memory.scratch_bytes)),
            replica_bytes: most(ModelMemory::total_bytes),
            kv_bytes_per_token: estimate.kv_bytes_per_token,
            trained_context: estimate.trained_context,
            kv_tokens_max: estimate.kv_tokens_max,
            limit_bytes,
            shape: estimate.shape,
        }
    }

    /// Replicas that an empty device could hold; at least one.
    pub(super) fn replicas_most(&self) -> u64 {
        match self.limit_bytes {
            u64::MAX => u64::MAX,
            limit => (limit / self.replica_bytes.max(self.fixed_bytes).max(1)).max(1),
        }
    }

    /// The same where the size of a replica's KV is overridden too: that is checked against the rest.
    pub(super) fn with_any_kv(&self) -> Self {
        Self {
            replica_bytes: self.fixed_bytes,
            ..*self
        }
    }

    /// Bytes of KV that each of so many replicas could have on an empty device.
    pub(super) fn kv_bytes_most(&self, n_replicas: u32) -> u64 {
        match self.limit_bytes {
            u64::MAX => BYTES_MAX,
            limit => (limit / u64::from(n_replicas.max(1))).saturating_sub(self.fixed_bytes),
        }
    }

    pub(super) fn context_most(&self) -> u64 {
        self.trained_context.map_or(u64::from(u32::MAX), u64::from)
    }

    fn fits(&self, n_replicas: u32, replica_bytes: u64) -> bool {
        let all = replica_bytes.saturating_mul(n_replicas.max(1).into());
        self.limit_bytes == u64::MAX || all <= self.limit_bytes
    }
}

/// The largest of `least..=most` that fits, where all below it do too; `least` where none does.
pub(super) fn largest(least: u64, most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (least, most.max(least));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match fits(middle) {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    low
}

/// Sizes of a native model, with the configuration that it was estimated with.
pub(super) struct NativeSizes<'a> {
    pub(super) known: &'a Known,
    pub(super) estimated: &'a EngineConfig,
    pub(super) n_replicas: u32,
}

impl NativeSizes<'_> {
    /// Tokens of a request, as `engine/limits` has it.
    fn context(&self, engine: &EngineConfig) -> u64 {
        let usual = u64::from(EngineConfig::CONTEXT_DEFAULT).min(self.known.context_most());
        match (engine.context_length, engine.cache_window) {
            (Some(context), _) => context.into(),
            (None, 0) => usual.min(engine.kv_tokens.unwrap_or(u64::MAX)).max(1),
            (None, _) => usual,
        }
    }

    /// Tokens of the KV pool, whole blocks: where nobody sets its size a quarter of a context for each
    /// sequence.
    fn kv_tokens(&self, engine: &EngineConfig) -> u64 {
        let context = self.context(engine);
        let share = u64::from(engine.max_sequences).saturating_mul(context) / 4;
        let told = engine.kv_tokens.unwrap_or_else(|| share.max(context));
        told.div_ceil(PAGE_TOKENS as u64)
            .saturating_mul(PAGE_TOKENS as u64)
    }

    /// The smallest pool: one context in its window. A context that nobody set shrinks with the pool.
    pub(super) fn kv_tokens_least(&self, engine: &EngineConfig) -> u64 {
        let context = match (engine.context_length, engine.cache_window) {
            (None, 0) => return PAGE_TOKENS as u64,
            (Some(context), _) => u64::from(context),
            (None, _) => self.context(engine),
        };
        let window = CacheWindow {
            tokens: engine.cache_window,
            n_kept: 0,
        };
        let n_blocks = window.blocks_max(context as usize, 1) as u64;
        context
            .min(n_blocks.saturating_mul(PAGE_TOKENS as u64))
            .max(1)
    }

    fn scratch_bytes(&self, engine: &EngineConfig) -> u64 {
        let shape = &self.known.shape;
        let rows = match shape.rows_follow_context {
            true => self.context(engine).max(engine.max_rows.into()),
            false => engine.max_rows.into(),
        };
        let sequences = rows.min(engine.max_sequences.into());
        let logits = shape.sequence_bytes.saturating_mul(sequences);
        let context = shape.context_bytes.saturating_mul(self.context(engine));
        let rows = shape.row_bytes.saturating_mul(rows);
        rows.saturating_add(logits).saturating_add(context)
    }

    /// Whether all replicas so fit on an empty device.
    pub(super) fn fit(&self, engine: &EngineConfig) -> bool {
        let known = self.known;
        let kv_tokens = self.kv_tokens(engine);
        if kv_tokens > known.kv_tokens_max.unwrap_or(POOL_TOKENS_MAX) {
            return false;
        }
        let rest = known
            .fixed_bytes
            .saturating_sub(self.scratch_bytes(self.estimated));
        let kv_bytes = known.kv_bytes_per_token.saturating_mul(kv_tokens);
        let all = rest.saturating_add(self.scratch_bytes(engine));
        known.fits(self.n_replicas, all.saturating_add(kv_bytes))
    }

    /// The largest pool that fits beside the rest.
    pub(super) fn kv_tokens_most(&self, engine: &EngineConfig) -> u64 {
        largest(1, POOL_TOKENS_MAX, |n_tokens| {
            self.fit(&EngineConfig {
                kv_tokens: Some(n_tokens),
                ..engine.clone()
            })
        })
    }
}

/// Sizes of a llama-server, with the configuration that it was estimated with; both are settled.
pub(super) struct LlamaSizes<'a> {
    pub(super) known: &'a Known,
    pub(super) estimated: &'a LlamaServerConfig,
    pub(super) n_replicas: u32,
}

impl LlamaSizes<'_> {
    /// Slots, and tokens of all slots together.
    fn slots(&self, child: &LlamaServerConfig) -> (u64, u64) {
        let told = child.ctx_size.filter(|n_tokens| *n_tokens > 0);
        let trained = self.known.trained_context.unwrap_or(0);
        let slots = u64::from(child.slots_usual());
        let held = slots_context(told.unwrap_or(trained).into(), slots);
        (slots, held)
    }

    fn scratch_bytes(&self, child: &LlamaServerConfig) -> u64 {
        let shape = &self.known.shape;
        let (slots, held) = self.slots(child);
        let mask = shape.context_bytes.saturating_mul(held);
        mask.saturating_add(shape.sequence_bytes.saturating_mul(slots))
    }

    /// Whether all replicas so fit on an empty device.
    pub(super) fn fit(&self, slots: u64, context_of_each: Option<u64>) -> bool {
        let known = self.known;
        let number = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let child = LlamaServerConfig {
            slots: Some(number(slots)),
            ctx_size: match context_of_each {
                Some(each) => Some(number(each.saturating_mul(slots))),
                None => self.estimated.ctx_size,
            },
            ..self.estimated.clone()
        };
        let (_, held) = self.slots(&child);
        let rest = known
            .fixed_bytes
            .saturating_sub(self.scratch_bytes(self.estimated));
        let kv_bytes = known.kv_bytes_per_token.saturating_mul(held);
        let all = rest.saturating_add(self.scratch_bytes(&child));
        known.fits(self.n_replicas, all.saturating_add(kv_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_that_fits_is_found() {
        for most in 0..20 {
            for limit in 0..20 {
                let found = largest(3, most, |n| n <= limit);
                assert_eq!(found, limit.min(most).max(3), "{most} {limit}");
            }
        }
    }
}
