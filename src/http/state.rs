//! What both planes know about the server: its models, whether it drains, whether it lives.
//!
//! Shared by all workers; its changing state is the drain flag and the list of live requests. What is not here: executors
//! and engines themselves, which are reached through the `pool`'s handles.

use super::access::Access;
use super::auth::Keys;
use super::errors::{ApiError, ErrorCode};
use super::live::LiveRequests;
use super::wire::{REJECT_STATUSES, WireConfig, WireServer, WireStats};
use crate::config::Config;
use crate::pool::{LoadedModel, Patience, Pool, PoolEntry, Unavailable};
use parking_lot::RwLock;
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Whether the server is on its way down, since when, and how long what runs may take.
#[derive(Debug, Default)]
pub struct Drain {
    begun: OnceLock<(Instant, Duration)>,
}

impl Drain {
    /// Begins; the first call counts.
    pub fn begin(&self, timeout: Duration) {
        self.begun.get_or_init(|| (Instant::now(), timeout));
    }

    /// Whether it has begun.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.begun.get().is_some()
    }

    /// For refusals; empty before it has begun.
    #[must_use]
    pub fn numbers(&self) -> Vec<(&'static str, f64)> {
        let Some((begun, timeout)) = self.begun.get() else {
            return Vec::new();
        };
        vec![
            ("drain_elapsed_ms", begun.elapsed().as_millis() as f64),
            ("drain_timeout_ms", timeout.as_millis() as f64),
        ]
    }
}

/// See the module.
pub struct ServerState {
    pool: Arc<Pool>,
    stall: Duration,
    drain: Arc<Drain>,
    live: LiveRequests,
    /// Replaced whole when the configuration is read again.
    keys: RwLock<Arc<Keys>>,
    /// Weak, because the wire's handler holds this state.
    wire: OnceLock<Weak<WireServer>>,
    config_source: OnceLock<ConfigSource>,
    /// What the server was started with, where a reload can compare.
    started_with: OnceLock<Config>,
}

/// Reads the configuration again; Err says what is wrong with it.
pub type ConfigSource = Box<dyn Fn() -> Result<Config, String> + Send + Sync>;

impl std::fmt::Debug for ServerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerState").finish_non_exhaustive()
    }
}

impl ServerState {
    /// `stall`: a step longer than this means that the engine hangs.
    #[must_use]
    pub fn new(pool: Arc<Pool>, stall: Duration) -> Self {
        Self {
            pool,
            stall,
            drain: Arc::default(),
            live: LiveRequests::default(),
            keys: RwLock::default(),
            wire: OnceLock::new(),
            config_source: OnceLock::new(),
            started_with: OnceLock::new(),
        }
    }

    /// Who may use the data plane.
    #[must_use]
    pub fn keys(&self) -> Arc<Keys> {
        Arc::clone(&self.keys.read())
    }

    /// Those keys from now on; requests that were let in go on.
    pub fn set_keys(&self, keys: Keys) {
        *self.keys.write() = Arc::new(keys);
    }

    /// How to read the configuration again; the first call counts.
    pub fn set_config_source(&self, source: ConfigSource) {
        self.config_source.get_or_init(|| source);
    }

    /// The configuration that the server was started with; the first call counts.
    pub fn set_started_with(&self, config: Config) {
        self.started_with.get_or_init(|| config);
    }

    /// Sections in which `new` differs from what the server was started with and that it cannot take over;
    /// none where that is not known.
    #[must_use]
    pub fn needs_restart(&self, new: &Config) -> Vec<&'static str> {
        let started_with = self.started_with.get();
        started_with.map_or_else(Vec::new, |old| old.needs_restart(new))
    }

    /// The configuration as it is written now; None where nobody said how to read it.
    #[must_use]
    pub fn read_config(&self) -> Option<Result<Config, String>> {
        self.config_source.get().map(|read| read())
    }

    /// Makes the connection layer's counters known to /metrics; the first call counts.
    pub fn set_wire(&self, wire: &Arc<WireServer>) {
        self.wire.get_or_init(|| Arc::downgrade(wire));
    }

    /// Seconds after which a refused client should come again, by the rate at which the data plane's
    /// workers get done.
    #[must_use]
    pub fn retry_after_s(&self) -> u32 {
        let wire = self.wire.get().and_then(Weak::upgrade);
        wire.map_or(1, |wire| wire.retry_after_s())
    }

    /// For refusals by the connection layer: what it holds.
    #[must_use]
    pub fn wire_numbers(&self) -> Vec<(&'static str, f64)> {
        let Some(wire) = self.wire.get().and_then(Weak::upgrade) else {
            return Vec::new();
        };
        let stats = wire.stats();
        let count = |gauge: &std::sync::atomic::AtomicU64| gauge.load(Ordering::Relaxed) as f64;
        vec![
            ("workers_busy", count(&stats.busy_workers)),
            ("requests_queued", count(&stats.queued)),
            ("requests_queued_max", wire.config().queue as f64),
        ]
    }

    /// The models.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The generations that clients wait for.
    #[must_use]
    pub fn live(&self) -> &LiveRequests {
        &self.live
    }

    /// See `new`.
    #[must_use]
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// From now on /ready says no; what runs may take so long.
    pub fn begin_drain(&self, timeout: Duration) {
        self.drain.begin(timeout);
    }

    /// For whoever tells a client about the stop.
    #[must_use]
    pub fn drain(&self) -> &Arc<Drain> {
        &self.drain
    }

    /// Whether the server is on its way down.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.drain.is_on()
    }

    /// All loaded models.
    #[must_use]
    pub fn models(&self) -> Vec<Arc<LoadedModel>> {
        self.pool.list()
    }

    /// All loaded models, and those that finish their work before they go.
    #[must_use]
    pub fn models_with_work(&self) -> Vec<Arc<LoadedModel>> {
        self.pool.with_work()
    }

    /// The loaded models that a client may use.
    #[must_use]
    pub fn models_for(&self, access: &Access) -> Vec<Arc<LoadedModel>> {
        let mut models = self.models();
        models.retain(|model| access.allows(&model.name, &model.aliases));
        models
    }

    /// The configured models that a client may use.
    #[must_use]
    pub fn entries_for(&self, access: &Access) -> Vec<PoolEntry> {
        let mut entries = self.pool.entries();
        entries.retain(|entry| access.allows(&entry.name, &entry.aliases));
        entries
    }

    /// Refuses a model that a client may not use in the words for one that does not exist, so that nobody
    /// learns which there are.
    pub fn check_access(&self, id: &str, access: &Access) -> Result<(), ApiError> {
        match self.pool.find(id) {
            Some(entry) if !access.allows(&entry.name, &entry.aliases) => Err(unknown_model(id)),
            _ => Ok(()),
        }
    }

    /// The model that a request means; waits for one that is loaded on demand. Clients of one-model
    /// servers leave the name out.
    pub fn resolve(
        &self,
        name: Option<&str>,
        access: &Access,
        patience: &Patience<'_>,
    ) -> Result<Arc<LoadedModel>, ApiError> {
        if let Some(name) = name.filter(|name| !name.is_empty()) {
            self.check_access(name, access)?;
            let found = self.pool.acquire(name, patience);
            return found.map_err(|why| match why {
                Unavailable::Unknown(_) => unknown_model(name),
                why => why.into(),
            });
        }
        match self.entries_for(access).as_slice() {
            [only] => Ok(self.pool.acquire(&only.name, patience)?),
            _ => Err(ApiError::param(
                ErrorCode::MissingRequiredParameter,
                "model",
                "'model' is missing; GET /v1/models lists the models",
            )),
        }
    }

    /// The same for names that may end in a depth: `model@4` is `model` with 4 loops, unless a model
    /// of that whole name exists.
    pub fn resolve_with_loops(
        &self,
        name: Option<&str>,
        access: &Access,
        patience: &Patience<'_>,
    ) -> Result<(Arc<LoadedModel>, Option<u32>), ApiError> {
        let split = name.and_then(|name| name.rsplit_once('@'));
        let is_known = |name| self.pool.find(name).is_some();
        if let Some((base, loops)) = split
            && let Some(loops) = depth_suffix(loops)
            && !name.is_some_and(is_known)
            && is_known(base)
        {
            return Ok((self.resolve(Some(base), access, patience)?, Some(loops)));
        }
        Ok((self.resolve(name, access, patience)?, None))
    }

    /// Prometheus text of all executors and of the connection layer.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let wire = self.wire.get().and_then(Weak::upgrade);
        let lines = wire
            .map(|wire| wire_lines(wire.stats(), wire.config()))
            .unwrap_or_default();
        self.pool.metrics_text(&lines)
    }
}

/// Names the id as it came, a long one cut.
#[must_use]
pub fn unknown_model(id: &str) -> ApiError {
    let shown: String = id.chars().take(100).collect();
    let message = format!(
        "the model '{shown}' does not exist, or your key may not use it; GET /v1/models lists the models"
    );
    ApiError::param(ErrorCode::ModelNotFound, "model", message)
}

/// The number behind the `@` of a model name, as people write numbers: digits, no zero before them. One
/// that is too large stays too large, so that it is refused as a depth and not taken for a name.
fn depth_suffix(text: &str) -> Option<u32> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    (is_number && !text.is_empty()).then(|| text.parse().unwrap_or(u32::MAX))
}

/// The connection layer's counters, gauges and limits as exposition text. Reads atomics only.
fn wire_lines(stats: &WireStats, config: &WireConfig) -> String {
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, value: u64| {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP tinyloop_http_{name} {help}\n# TYPE tinyloop_http_{name} {kind}\n\
             tinyloop_http_{name} {value}"
        );
    };
    #[rustfmt::skip]
    let counted = [
        ("connections_accepted_total", "counter", "Connections taken from the listeners.", &stats.accepted),
        ("connections_refused_total", "counter", "Connections told 503 because none could make room.", &stats.refused),
        ("connections_evicted_total", "counter", "Connections closed to make room for a new one.", &stats.evicted),
        ("accept_errors_total", "counter", "Failed accepts, out of descriptors and the like.", &stats.accept_errors),
        ("requests_total", "counter", "Complete requests handed to a worker queue.", &stats.requests),
        ("hangups_total", "counter", "Clients that left while a handler worked for them.", &stats.hangups),
        ("requests_purged_total", "counter", "Queued requests dropped because their client had left.", &stats.purged),
        ("handler_panics_total", "counter", "Panics of handlers; each cost one request.", &stats.panics),
        ("answers_aborted_total", "counter", "Answers cut because the client did not take them in time.", &stats.aborted),
        ("connections_open", "gauge", "Open connections.", &stats.open),
        ("workers_busy", "gauge", "Workers that run a handler now, pages of the ops set included.", &stats.busy_workers),
        ("requests_queued", "gauge", "Complete requests that wait for a worker.", &stats.queued),
        ("request_bytes_held", "gauge", "Bytes of unfinished, queued and running requests.", &stats.held_bytes),
    ];
    for (name, kind, help, value) in counted {
        family(name, kind, help, value.load(Ordering::Relaxed));
    }
    #[rustfmt::skip]
    let limits = [
        ("connections_max", "Most open connections.", config.max_connections),
        ("workers", "Workers for inference; a stream holds one.", config.workers),
        ("requests_queued_max", "Most requests that may wait for a worker.", config.queue),
        ("request_bytes_held_max", "Most bytes of unfinished, queued and running requests.", config.memory_budget_bytes),
    ];
    for (name, help, value) in limits {
        family(name, "gauge", help, value as u64);
    }
    let _ = writeln!(
        text,
        "# HELP tinyloop_http_rejects_total Requests that the connection layer refused by itself.\n\
         # TYPE tinyloop_http_rejects_total counter"
    );
    for status in REJECT_STATUSES {
        let count = stats.rejected(status);
        let _ = writeln!(
            text,
            "tinyloop_http_rejects_total{{status=\"{status}\"}} {count}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_in_names_are_plain_numbers() {
        assert_eq!(depth_suffix("4"), Some(4));
        assert_eq!(depth_suffix("10"), Some(10));
        assert_eq!(depth_suffix("99999999999"), Some(u32::MAX));
        for text in ["", "0", "04", "+4", "-4", "4x", " 4", "four"] {
            assert_eq!(depth_suffix(text), None, "{text}");
        }
    }

    #[test]
    fn wire_counters_are_valid_exposition_lines() {
        let text = wire_lines(&WireStats::default(), &WireConfig::default());
        assert!(text.contains("\ntinyloop_http_requests_total 0\n"));
        assert!(text.contains("\ntinyloop_http_connections_max 4096\n"));
        assert!(text.contains("tinyloop_http_rejects_total{status=\"413\"} 0\n"));
        // Every family: help, kind, then its samples, each a name and a value.
        let mut family = "";
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words.as_slice() {
                ["#", "HELP", name, ..] => family = name,
                ["#", "TYPE", name, "counter" | "gauge"] => assert_eq!(*name, family),
                [name, value] => {
                    assert!(
                        name.starts_with(family) && value.parse::<u64>().is_ok(),
                        "{line}"
                    );
                }
                _ => panic!("{line}"),
            }
        }
    }
}
