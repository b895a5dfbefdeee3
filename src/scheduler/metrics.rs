//! The metric families of the scheduler, prefix `tinyloop_`, in one registry per process.
//!
//! Counters and histograms are bumped where things happen (atomics, no lock); gauges are filled in
//! from snapshots when somebody scrapes. Labels are bounded: model names come from the
//! configuration, outcomes, reasons and phases from enums. `admission_rejected_total` counts
//! every refusal; `requests_total` counts accepted requests by how they ended. What is not here:
//! metrics of the HTTP side, which registers its own through [`Metrics::registry`].

use super::admission::Loops;
use super::lifecycle::{Lifecycle, Stamps};
use super::record::{Ending, Record};
use super::snapshot::Snapshot;
use prometheus::core::Collector;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry,
    TextEncoder,
};
use std::time::Duration;

/// Seconds; from a cache hit on a small model to a long answer on a slow machine.
const WAIT_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
];
/// Seconds between two tokens.
const GAP_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0,
];
/// Tokens.
const TOKEN_BUCKETS: &[f64] = &[
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0,
];

/// The registry and its families.
pub struct Metrics {
    registry: Registry,
    queue_wait: HistogramVec,
    dispatch: HistogramVec,
    first_token: HistogramVec,
    token_gap: HistogramVec,
    request: HistogramVec,
    prompt_tokens: HistogramVec,
    completion_tokens: HistogramVec,
    prompt_tokens_total: IntCounterVec,
    completion_tokens_total: IntCounterVec,
    requests: IntCounterVec,
    rejected: IntCounterVec,
    cancelled: IntCounterVec,
    slo_met: IntCounterVec,
    slo_missed: IntCounterVec,
    prefix_tokens_reused: IntCounterVec,
    loops_downgraded: IntCounterVec,
    /// Monotonic values that runtimes count themselves, set at scrape.
    preemptions: IntCounterVec,
    prefix_queries: IntCounterVec,
    prefix_hits: IntCounterVec,
    gauges: Gauges,
}

/// Filled in at scrape.
struct Gauges {
    queue_depth: GaugeVec,
    in_flight: GaugeVec,
    running: GaugeVec,
    waiting: GaugeVec,
    kv_usage: GaugeVec,
    kv_pages: GaugeVec,
    batch_rows: GaugeVec,
    configured_target: GaugeVec,
    effective_target: GaugeVec,
    ema_dispatch: GaugeVec,
    up: GaugeVec,
}

/// Registers a family; the names are constants of this file, so a clash is a bug a test meets.
fn register<C: Collector + Clone + 'static>(
    registry: &Registry,
    family: prometheus::Result<C>,
) -> C {
    let family = family.expect("the name and labels are valid constants");
    registry
        .register(Box::new(family.clone()))
        .expect("each name is registered once");
    family
}

impl Gauges {
    fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            register(registry, GaugeVec::new(Opts::new(name, help), labels))
        };
        let model = &["model"];
        Self {
            queue_depth: gauge(
                "tinyloop_queue_depth",
                "Requests waiting for a slot.",
                model,
            ),
            in_flight: gauge(
                "tinyloop_in_flight",
                "Requests that hold a slot of a replica.",
                &["model", "replica"],
            ),
            running: gauge(
                "tinyloop_num_requests_running",
                "Requests the runtimes make progress on.",
                model,
            ),
            waiting: gauge(
                "tinyloop_num_requests_waiting",
                "Requests waiting in the queue or inside a runtime.",
                model,
            ),
            kv_usage: gauge(
                "tinyloop_kv_cache_usage_ratio",
                "Part of the KV pages that running requests hold.",
                model,
            ),
            kv_pages: gauge(
                "tinyloop_kv_pages",
                "KV pages by state: used by requests, cached for reuse, free.",
                &["model", "state"],
            ),
            batch_rows: gauge("tinyloop_batch_rows", "Rows of the latest quantum.", model),
            configured_target: gauge(
                "tinyloop_configured_target_inflight",
                "Jobs a replica should hold, as configured; 0 means what it can hold.",
                model,
            ),
            effective_target: gauge(
                "tinyloop_effective_target_inflight",
                "Jobs all replicas should hold, after clamping to what they can.",
                model,
            ),
            ema_dispatch: gauge(
                "tinyloop_ema_dispatch_seconds",
                "Moving average of the time from dispatch to completion; 0 before the first.",
                model,
            ),
            up: gauge(
                "tinyloop_up",
                "1 while the model takes requests and a replica is alive.",
                model,
            ),
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A registry with all families, the process's own metrics and `build_info`.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        register_process(&registry);
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            register(&registry, HistogramVec::new(opts, &["model"]))
        };
        let counter = |name: &str, help: &str, labels: &[&str]| {
            register(&registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let model = &["model"];
        #[rustfmt::skip]
        let metrics = Self {
            queue_wait: histogram("tinyloop_queue_wait_seconds", "From submit to dispatch.", WAIT_BUCKETS),
            dispatch: histogram("tinyloop_dispatch_seconds", "From dispatch to the end: how long a slot was used.", WAIT_BUCKETS),
            first_token: histogram("tinyloop_time_to_first_token_seconds", "From submit to the first token.", WAIT_BUCKETS),
            token_gap: histogram("tinyloop_inter_token_latency_seconds", "Between two tokens of a request.", GAP_BUCKETS),
            request: histogram("tinyloop_request_seconds", "From submit to the end, however it ended.", WAIT_BUCKETS),
            prompt_tokens: histogram("tinyloop_prompt_tokens", "Prompt tokens of requests that ended well.", TOKEN_BUCKETS),
            completion_tokens: histogram("tinyloop_completion_tokens", "Generated tokens of requests that ended well.", TOKEN_BUCKETS),
            prompt_tokens_total: counter("tinyloop_prompt_tokens_total", "Prompt tokens of all requests that were dispatched.", model),
            completion_tokens_total: counter("tinyloop_completion_tokens_total", "Tokens generated.", model),
            requests: counter("tinyloop_requests_total", "Accepted requests by how they ended.", &["model", "outcome"]),
            rejected: counter("tinyloop_admission_rejected_total", "Requests refused before queueing.", &["model", "reason"]),
            cancelled: counter("tinyloop_cancelled_total", "Cancelled requests by where they were.", &["model", "phase"]),
            slo_met: counter("tinyloop_slo_met_total", "Requests with a latency objective that were dispatched within it.", model),
            slo_missed: counter("tinyloop_slo_missed_total", "Requests with a latency objective that waited longer.", model),
            prefix_tokens_reused: counter("tinyloop_prefix_tokens_reused_total", "Prompt tokens whose KV came from the prefix cache.", model),
            loops_downgraded: counter("tinyloop_loops_downgraded_total", "Requests that were granted fewer loops than asked to meet their latency objective.", model),
            preemptions: counter("tinyloop_preemptions_total", "Sequences preempted and recomputed later.", model),
            prefix_queries: counter("tinyloop_prefix_queries_total", "Prompt tokens looked up in the prefix cache.", model),
            prefix_hits: counter("tinyloop_prefix_hits_total", "Prompt tokens found in the prefix cache.", model),
            gauges: Gauges::new(&registry),
            registry: registry.clone(),
        };
        metrics
    }

    /// For families of other layers.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Text exposition format 0.0.4; `extra_lines` come first, as they are.
    #[must_use]
    pub fn render(&self, extra_lines: &str) -> String {
        let mut text = String::from(extra_lines);
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let families = self.registry.gather();
        if let Err(error) = TextEncoder::new().encode_utf8(&families, &mut text) {
            tracing::error!(%error, "metrics cannot be written");
        }
        text
    }

    /// The children of one model, with every label value there, so that rates begin at 0.
    pub(crate) fn model(&self, model: &str) -> ModelMetrics {
        let label = [model];
        for outcome in ["done", "cancelled", "error"] {
            self.requests.with_label_values(&[model, outcome]);
        }
        for phase in ["queued", "running"] {
            self.cancelled.with_label_values(&[model, phase]);
        }
        ModelMetrics {
            model: model.to_owned(),
            queue_wait: self.queue_wait.with_label_values(&label),
            dispatch: self.dispatch.with_label_values(&label),
            first_token: self.first_token.with_label_values(&label),
            token_gap: self.token_gap.with_label_values(&label),
            request: self.request.with_label_values(&label),
            prompt_tokens: self.prompt_tokens.with_label_values(&label),
            completion_tokens: self.completion_tokens.with_label_values(&label),
            prompt_tokens_total: self.prompt_tokens_total.with_label_values(&label),
            completion_tokens_total: self.completion_tokens_total.with_label_values(&label),
            slo_met: self.slo_met.with_label_values(&label),
            slo_missed: self.slo_missed.with_label_values(&label),
            prefix_tokens_reused: self.prefix_tokens_reused.with_label_values(&label),
            loops_downgraded: self.loops_downgraded.with_label_values(&label),
            requests: self.requests.clone(),
            rejected: self.rejected.clone(),
            cancelled: self.cancelled.clone(),
        }
    }

    /// Fills in the gauges of one model.
    pub(crate) fn refresh(&self, snapshot: &Snapshot) {
        let model = snapshot.model.as_str();
        let set = |family: &GaugeVec, value: f64| family.with_label_values(&[model]).set(value);
        let gauges = &self.gauges;
        let sum = |count: fn(&crate::runtime::RuntimeStatus) -> u64| -> u64 {
            snapshot
                .replicas
                .iter()
                .map(|replica| count(&replica.status))
                .sum()
        };
        let queue_depth = snapshot.queue_depth as u64;
        set(&gauges.queue_depth, queue_depth as f64);
        for (index, replica) in snapshot.replicas.iter().enumerate() {
            let labels = [model, &index.to_string()];
            let family = &gauges.in_flight;
            family
                .with_label_values(&labels)
                .set(f64::from(replica.inflight));
        }
        set(
            &gauges.running,
            sum(|status| u64::from(status.running)) as f64,
        );
        let waiting = queue_depth + sum(|status| u64::from(status.waiting));
        set(&gauges.waiting, waiting as f64);
        let total = sum(|status| u64::from(status.kv_pages_total));
        let used = sum(|status| u64::from(status.kv_pages_used));
        let cached = sum(|status| u64::from(status.kv_pages_cached));
        set(&gauges.kv_usage, used as f64 / total.max(1) as f64);
        let free = total.saturating_sub(used + cached);
        for (state, pages) in [("used", used), ("cached", cached), ("free", free)] {
            gauges
                .kv_pages
                .with_label_values(&[model, state])
                .set(pages as f64);
        }
        set(
            &gauges.batch_rows,
            sum(|status| u64::from(status.batch_rows)) as f64,
        );
        let configured = snapshot.configured_target_inflight.unwrap_or(0);
        set(&gauges.configured_target, f64::from(configured));
        set(
            &gauges.effective_target,
            f64::from(snapshot.effective_target_inflight),
        );
        set(
            &gauges.ema_dispatch,
            snapshot.ema_dispatch_ms.unwrap_or(0.0) / 1e3,
        );
        let alive = snapshot.replicas.iter().any(|replica| replica.status.alive);
        set(&gauges.up, f64::from(u8::from(snapshot.accepting && alive)));
        // Counted by the runtimes; two scrapes at once could add a step twice only if both read
        // before either adds, and the next scrape then adds nothing.
        for (family, value) in [
            (&self.preemptions, sum(|status| status.preemptions)),
            (&self.prefix_queries, sum(|status| status.prefix_queries)),
            (&self.prefix_hits, sum(|status| status.prefix_hits)),
        ] {
            let counter = family.with_label_values(&[model]);
            counter.inc_by(value.saturating_sub(counter.get()));
        }
    }
}

fn register_process(registry: &Registry) {
    #[cfg(target_os = "linux")]
    {
        use prometheus::process_collector::ProcessCollector;
        registry
            .register(Box::new(ProcessCollector::for_self()))
            .expect("the process's metrics are registered once");
    }
    let opts = Opts::new("tinyloop_build_info", "Version of the server; always 1.");
    let build_info = register(registry, GaugeVec::new(opts, &["version"]));
    build_info
        .with_label_values(&[env!("CARGO_PKG_VERSION")])
        .set(1.0);
}

/// One model's counters and histograms.
pub(crate) struct ModelMetrics {
    model: String,
    queue_wait: Histogram,
    dispatch: Histogram,
    first_token: Histogram,
    token_gap: Histogram,
    request: Histogram,
    prompt_tokens: Histogram,
    completion_tokens: Histogram,
    prompt_tokens_total: IntCounter,
    completion_tokens_total: IntCounter,
    slo_met: IntCounter,
    slo_missed: IntCounter,
    prefix_tokens_reused: IntCounter,
    loops_downgraded: IntCounter,
    requests: IntCounterVec,
    rejected: IntCounterVec,
    cancelled: IntCounterVec,
}

fn observe(histogram: &Histogram, duration: Option<Duration>) {
    if let Some(duration) = duration {
        histogram.observe(duration.as_secs_f64());
    }
}

impl ModelMetrics {
    pub(crate) fn rejected(&self, reason: &str) {
        self.rejected
            .with_label_values(&[self.model.as_str(), reason])
            .inc();
    }

    pub(crate) fn admitted(&self, loops: Option<Loops>) {
        if loops.is_some_and(|loops| loops.granted < loops.asked) {
            self.loops_downgraded.inc();
        }
    }

    pub(crate) fn dispatched(&self, stamps: &Stamps, slo_ms: Option<u64>) {
        observe(&self.queue_wait, stamps.queue_wait());
        if let (Some(slo_ms), Some(wait)) = (slo_ms, stamps.queue_wait()) {
            let met = wait <= Duration::from_millis(slo_ms);
            let counter = if met { &self.slo_met } else { &self.slo_missed };
            counter.inc();
        }
    }

    pub(crate) fn first_token(&self, stamps: &Stamps) {
        observe(&self.first_token, stamps.time_to_first_token());
    }

    pub(crate) fn token_gap(&self, gap: Duration) {
        self.token_gap.observe(gap.as_secs_f64());
    }

    /// A request reached a final state; called once per request.
    pub(crate) fn settled(&self, record: &Record, state: &Lifecycle, ending: &Ending) {
        let (model, stamps) = (self.model.as_str(), state.stamps());
        let was_dispatched = stamps.dispatched.is_some();
        self.requests
            .with_label_values(&[model, state.name()])
            .inc();
        observe(&self.request, stamps.total());
        observe(&self.dispatch, stamps.service_time());
        if let Lifecycle::Cancelled(_) = state {
            let phase = if was_dispatched { "running" } else { "queued" };
            self.cancelled.with_label_values(&[model, phase]).inc();
        }
        let n_prompt = record.request.prompt.len() as u64;
        if was_dispatched {
            self.prompt_tokens_total.inc_by(n_prompt);
        }
        let mut n_completion = record.n_tokens();
        if let Ending::Done { usage, .. } = ending {
            n_completion = usage.completion_tokens;
            self.prefix_tokens_reused
                .inc_by(u64::from(usage.cached_tokens));
            self.prompt_tokens.observe(n_prompt as f64);
            self.completion_tokens.observe(f64::from(n_completion));
        }
        self.completion_tokens_total.inc_by(u64::from(n_completion));
    }
}
