//! Every limit and setting, with its default; from TOML and the command line. (stub: being written)
//!
//! Plain data. Unknown keys are errors that name the nearest known key.
use std::time::Duration;

/// Limits of one executor.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutorConfig {
    /// Most requests waiting in the queue.
    pub max_queue_depth: usize,
    /// Server-wide latency objective for requests that name none.
    pub default_slo_ms: Option<u64>,
    /// Registered prefixes.
    pub prefix_pool_capacity: usize,
    /// Weight of the newest dispatch latency in its moving average.
    pub ema_alpha: f64,
    /// Jobs a replica should hold; None = what it can hold.
    pub target_inflight: Option<u32>,
    /// A waiting job gains one priority level per this time; 0 = off.
    pub aging_interval_ms: u64,
    /// Longest wait in the queue.
    pub queue_timeout: Option<Duration>,
}

impl Default for ExecutorConfig {
    fn default() -> Self {
        Self {
            max_queue_depth: 128,
            default_slo_ms: None,
            prefix_pool_capacity: 16,
            ema_alpha: 0.2,
            target_inflight: None,
            aging_interval_ms: 5000,
            queue_timeout: None,
        }
    }
}

/// Sizes of a native engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Context length per request in tokens; None = the model's own, at most 8192 by default.
    pub context_length: Option<u32>,
    /// Sequences that may run at once.
    pub max_sequences: u32,
    /// Most rows of a quantum.
    pub max_rows: u32,
    /// KV pool in tokens; None = enough for `max_sequences` quarter-length contexts or one whole context.
    pub kv_tokens: Option<u64>,
    /// Kernel threads; None = the cores given.
    pub threads: Option<usize>,
    /// Keep full pages of finished requests for reuse.
    pub prefix_cache: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            context_length: None,
            max_sequences: 16,
            max_rows: 512,
            kv_tokens: None,
            threads: None,
            prefix_cache: true,
        }
    }
}
