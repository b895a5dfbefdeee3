//! Limits of one executor: `[executor]` and `[models.NAME.executor]`.
//!
//! Plain data. What is not here: what the executor does with them (`scheduler`).

use super::PrefixIsolation;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Limits of one executor.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExecutorConfig {
    /// Most requests waiting in the queue.
    pub max_queue_depth: usize,
    /// Most prompt tokens of all requests waiting in the queue; None = no such limit.
    pub max_queued_prompt_tokens: Option<u64>,
    /// Server-wide latency objective for requests that name none.
    pub default_slo_ms: Option<u64>,
    /// Who shares computed prompts, registered or found by chance.
    pub prefix_isolation: PrefixIsolation,
    /// Registered prefixes.
    pub prefix_pool_capacity: usize,
    /// Weight of the newest dispatch latency in its moving average.
    pub ema_alpha: f64,
    /// Jobs a replica should hold: a number, or `"auto"` = found by trying; None = what it can hold. In a
    /// file the default of child and remote runtimes is 1.
    pub target_inflight: Option<TargetInflight>,
    /// Most jobs that `"auto"` may find for a replica; None = what it can hold.
    pub target_inflight_max: Option<u32>,
    /// A waiting job gains one priority level per this time; 0 = off.
    pub aging_interval_ms: u64,
    /// Longest wait in the queue; in the file `queue_timeout_ms`.
    #[serde(
        rename = "queue_timeout_ms",
        deserialize_with = "optional_milliseconds"
    )]
    pub queue_timeout: Option<Duration>,
    /// Whether a request may take the slot of a running one of lower priority.
    pub preempt_running: bool,
    /// How often one request may lose its slot to others.
    pub max_preemptions: u32,
    /// Wait before the second attempt to restart a lost replica (the first comes at once); it doubles
    /// with each further one. `restart_backoff_ms`.
    #[serde(rename = "restart_backoff_ms", deserialize_with = "milliseconds")]
    pub restart_backoff: Duration,
    /// Longest wait between two such attempts. `restart_backoff_max_ms`.
    #[serde(rename = "restart_backoff_max_ms", deserialize_with = "milliseconds")]
    pub restart_backoff_max: Duration,
    /// How long requests wait for a replica while all of them are being restarted; later ones are
    /// refused until one is back. `replica_wait_ms`.
    #[serde(rename = "replica_wait_ms", deserialize_with = "milliseconds")]
    pub replica_wait: Duration,
}

impl ExecutorConfig {
    /// Most jobs that a replica is to hold, as far as this says.
    #[must_use]
    pub fn target_max(&self) -> Option<u32> {
        match self.target_inflight {
            Some(TargetInflight::Jobs(n_jobs)) => Some(n_jobs),
            Some(TargetInflight::Auto) => self.target_inflight_max,
            None => None,
        }
    }
}

impl Default for ExecutorConfig {
    fn default() -> Self {
        Self {
            max_queue_depth: 128,
            max_queued_prompt_tokens: None,
            default_slo_ms: None,
            prefix_isolation: PrefixIsolation::Key,
            prefix_pool_capacity: 16,
            ema_alpha: 0.2,
            target_inflight: None,
            target_inflight_max: None,
            aging_interval_ms: 5000,
            queue_timeout: None,
            preempt_running: false,
            max_preemptions: 3,
            restart_backoff: Duration::from_millis(500),
            restart_backoff_max: Duration::from_secs(30),
            replica_wait: Duration::from_secs(30),
        }
    }
}

/// How many jobs a replica should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetInflight {
    /// So many.
    Jobs(u32),
    /// As many as raise the throughput more than the latency, found by trying.
    Auto,
}

impl fmt::Display for TargetInflight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Jobs(n_jobs) => write!(f, "{n_jobs}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for TargetInflight {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            number => number
                .parse()
                .map(Self::Jobs)
                .map_err(|_| format!("`{number}` is neither a number of jobs nor `auto`")),
        }
    }
}

impl<'de> Deserialize<'de> for TargetInflight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JobsOrAuto;
        impl Visitor<'_> for JobsOrAuto {
            type Value = TargetInflight;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of jobs or \"auto\"")
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<TargetInflight, E> {
                let n_jobs = u32::try_from(number);
                n_jobs
                    .map(TargetInflight::Jobs)
                    .map_err(|_| E::custom(format!("{number} is no number of jobs")))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<TargetInflight, E> {
                let n_jobs = u32::try_from(number);
                n_jobs
                    .map(TargetInflight::Jobs)
                    .map_err(|_| E::custom(format!("{number} is no number of jobs")))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<TargetInflight, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(JobsOrAuto)
    }
}

fn milliseconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_millis)
}

fn optional_milliseconds<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    milliseconds(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_numbers_or_auto() {
        let read = |text: &str| toml::from_str::<ExecutorConfig>(text).map_err(|e| e.to_string());
        let target = |text: &str| read(text).expect("valid").target_inflight;
        assert_eq!(target(""), None);
        assert_eq!(target("target_inflight = 7"), Some(TargetInflight::Jobs(7)));
        assert_eq!(
            target("target_inflight = \"auto\""),
            Some(TargetInflight::Auto)
        );
        for bad in ["\"many\"", "-1", "1.5", "true"] {
            assert!(read(&format!("target_inflight = {bad}")).is_err(), "{bad}");
        }
        assert_eq!("12".parse(), Ok(TargetInflight::Jobs(12)));
        assert_eq!(TargetInflight::Auto.to_string(), "auto");
    }

    #[test]
    fn the_most_a_replica_is_to_hold() {
        let max = |target, max| {
            let config = ExecutorConfig {
                target_inflight: target,
                target_inflight_max: max,
                ..ExecutorConfig::default()
            };
            config.target_max()
        };
        assert_eq!(max(None, Some(3)), None);
        assert_eq!(max(Some(TargetInflight::Jobs(9)), Some(3)), Some(9));
        assert_eq!(max(Some(TargetInflight::Auto), Some(3)), Some(3));
        assert_eq!(max(Some(TargetInflight::Auto), None), None);
    }
}
