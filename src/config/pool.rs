//! Limits of the pool of models: `[pool]`.
//!
//! Plain data. What is not here: what each model asks for (`models`).

use super::seconds;
use serde::Deserialize;
use std::time::Duration;

/// How much the models may hold together, and how patiently they come and go.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PoolConfig {
    /// Bytes of main memory that models may hold together; None = what was available when the server
    /// started, less a reserve.
    pub cpu_bytes: Option<u64>,
    /// Bytes of each GPU that models may hold together; None = what was free when the first model asked
    /// for GPUs, less a twentieth.
    pub cuda_bytes: Option<u64>,
    /// Loads that run at once; further ones wait.
    pub load_threads: usize,
    /// A model is not evicted for another one before it was loaded for so long; in the file
    /// `min_residency_s`.
    #[serde(rename = "min_residency_s", deserialize_with = "seconds")]
    pub min_residency: Duration,
    /// How long a request waits for a model that is loaded on demand, when neither it nor the model
    /// names a `queue_timeout`; in the file `load_wait_s`.
    #[serde(rename = "load_wait_s", deserialize_with = "seconds")]
    pub load_wait: Duration,
    /// A load that failed is not tried again by requests for so long; in the file `retry_failed_s`.
    #[serde(rename = "retry_failed_s", deserialize_with = "seconds")]
    pub retry_failed: Duration,
    /// How long an unload that does not say waits for running requests; in the file
    /// `drain_timeout_s`.
    #[serde(rename = "drain_timeout_s", deserialize_with = "seconds")]
    pub drain_timeout: Duration,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            cpu_bytes: None,
            cuda_bytes: None,
            load_threads: 2,
            min_residency: Duration::from_secs(10),
            load_wait: Duration::from_secs(60),
            retry_failed: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
        }
    }
}
