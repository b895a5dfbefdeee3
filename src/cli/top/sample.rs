//! What `tinyloop top` asks of the server for one frame.

use crate::cli::admin_client::AdminClient;
use crate::error::Error;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Tokens sent so far: every token but the first of an answer ends a gap, so both counts together
/// are exact while answers are still under way.
const TOKEN_COUNTS: [&str; 2] = [
    "tinyloop_time_to_first_token_seconds_count",
    "tinyloop_inter_token_latency_seconds_count",
];
const KV_USAGE: &str = "tinyloop_kv_cache_usage_ratio";
/// Blocks by state; all zero where nobody counts them.
const KV_BLOCKS: &str = "tinyloop_kv_blocks";
const DONE: &str = "tinyloop_requests_total";
const REJECTED: &str = "tinyloop_admission_rejected_total";

/// The server at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Since the program began.
    pub(super) at: Duration,
    /// `data` of `GET /v1/admin/models`.
    pub(super) models: Value,
    /// `GET /v1/admin/devices`.
    pub(super) devices: Value,
    /// Of every model, from its metrics.
    pub(super) counts: BTreeMap<String, Counts>,
}

/// What the metrics say of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    /// Tokens sent.
    pub(super) tokens: f64,
    /// Requests that ended, however.
    pub(super) ended: f64,
    /// Requests refused.
    pub(super) refused: f64,
    /// Part of the KV pages in use, 0 to 1; None where nobody counts them.
    pub(super) kv_usage: Option<f64>,
    /// Blocks of KV in any state.
    pub(super) kv_blocks: f64,
}

impl Sample {
    pub(super) fn take(client: &AdminClient, started: Instant) -> Result<Self, Error> {
        let mut list = client.get("/v1/admin/models")?;
        let counts = counts(&client.text("/metrics")?);
        let at = started.elapsed();
        Ok(Self {
            at,
            models: list["data"].take(),
            devices: client.get("/v1/admin/devices")?,
            counts,
        })
    }
}

/// Reads Prometheus' text format as far as it is needed here.
pub(super) fn counts(metrics: &str) -> BTreeMap<String, Counts> {
    let mut all: BTreeMap<String, Counts> = BTreeMap::new();
    for line in metrics.lines() {
        let Some((name, rest)) = line.split_once('{') else {
            continue;
        };
        let is_wanted =
            TOKEN_COUNTS.contains(&name) || [KV_USAGE, KV_BLOCKS, DONE, REJECTED].contains(&name);
        if !is_wanted {
            continue;
        }
        let Some((model, value)) = model_and_value(rest) else {
            continue;
        };
        let counts = all.entry(model).or_default();
        match name {
            KV_USAGE => counts.kv_usage = Some(value),
            KV_BLOCKS => counts.kv_blocks += value,
            DONE => counts.ended += value,
            REJECTED => counts.refused += value,
            _ => counts.tokens += value,
        }
    }
    for counts in all.values_mut() {
        counts.kv_usage = counts.kv_usage.filter(|_| counts.kv_blocks > 0.0);
    }
    all
}

/// `model="name",more="x"} 3` to (name, 3).
fn model_and_value(rest: &str) -> Option<(String, f64)> {
    let (labels, value) = rest.rsplit_once("} ")?;
    let value = value.split(' ').next()?.parse().ok()?;
    let quoted = match labels.strip_prefix("model=\"") {
        Some(quoted) => quoted,
        None => &labels[labels.find(",model=\"")? + ",model=\"".len()..],
    };
    let mut name = String::new();
    let mut characters = quoted.chars();
    loop {
        match characters.next()? {
            '"' => return Some((name, value)),
            '\\' => name.push(match characters.next()? {
                'n' => '\n',
                other => other,
            }),
            other => name.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_become_counts() {
        let text = "# HELP tinyloop_up x\n\
            tinyloop_time_to_first_token_seconds_count{model=\"a\"} 3\n\
            tinyloop_time_to_first_token_seconds_bucket{model=\"a\",le=\"1\"} 9\n\
            tinyloop_inter_token_latency_seconds_count{model=\"a\"} 39\n\
            tinyloop_kv_cache_usage_ratio{model=\"a\"} 0.25\n\
            tinyloop_kv_blocks{model=\"a\",state=\"free\"} 3\n\
            tinyloop_kv_blocks{model=\"a\",state=\"used\"} 1\n\
            tinyloop_kv_cache_usage_ratio{model=\"b\\\"\\\\}\"} 0\n\
            tinyloop_requests_total{model=\"a\",outcome=\"done\"} 2\n\
            tinyloop_requests_total{model=\"a\",outcome=\"error\"} 1\n\
            tinyloop_admission_rejected_total{reason=\"x\",model=\"b\\\"\\\\}\"} 4 1700000\n\
            tinyloop_build_info{version=\"0\"} 1\n\
            tinyloop_kv_cache_usage_ratio{broken";
        let found = counts(text);
        let a = Counts {
            tokens: 42.0,
            ended: 3.0,
            refused: 0.0,
            kv_usage: Some(0.25),
            kv_blocks: 4.0,
        };
        let b = Counts {
            refused: 4.0,
            ..Counts::default()
        };
        let expected = [("a".to_owned(), a), ("b\"\\}".to_owned(), b)];
        assert_eq!(found, BTreeMap::from(expected));
    }
}
