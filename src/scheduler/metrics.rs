//! The metric families of the scheduler, prefix `tinyloop_`, in one registry per process.
//!
//! Counters and histograms are bumped where things happen (atomics, no lock); gauges are filled in
//! from snapshots when somebody scrapes. Labels are bounded: model names come from the
//! configuration, outcomes, reasons and phases from enums. `admission_rejected_total` counts
//! every refusal, also of requests that nobody read (`refused_unread`); `requests_total` counts
//! accepted requests by how they ended. What is not here: metrics of the HTTP side, which registers
//! its own through [`Metrics::registry`].

use super::admission::Loops;
use super::counted::{COUNTED_ELSEWHERE, CountedElsewhere};
use super::health::{Health, Setback};
use super::lifecycle::{Lifecycle, Stamps};
use super::record::{Ending, Record, SubmitOptions};
use super::row_histogram::RowHistogram;
use super::snapshot::Snapshot;
use crate::config::TargetInflight;
use crate::request::{RequestError, Usage};
use crate::runtime::{RowCounts, RuntimeStatus};
use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry,
    TextEncoder,
};
use std::collections::HashMap;
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
    requeued: IntCounterVec,
    restarts: IntCounterVec,
    /// [`COUNTED_ELSEWHERE`], added to at scrape.
    counted: [IntCounterVec; COUNTED_ELSEWHERE.len()],
    batch_rows: RowHistogram,
    gauges: Gauges,
}

/// Filled in at scrape.
struct Gauges {
    queue_depth: GaugeVec,
    in_flight: GaugeVec,
    running: GaugeVec,
    waiting: GaugeVec,
    kv_usage: GaugeVec,
    kv_blocks: GaugeVec,
    configured_target: GaugeVec,
    effective_target: GaugeVec,
    replica_target: GaugeVec,
    replicas: GaugeVec,
    ema_dispatch: GaugeVec,
    prefix_pool_entries: GaugeVec,
    prefix_pool_tokens: GaugeVec,
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
        #[rustfmt::skip]
        let gauges = Self {
            queue_depth: gauge("tinyloop_queue_depth", "Requests waiting for a slot.", model),
            in_flight: gauge("tinyloop_in_flight", "Requests that hold a slot of a replica.", &["model", "replica"]),
            running: gauge("tinyloop_num_requests_running", "Requests the runtimes make progress on.", model),
            waiting: gauge("tinyloop_num_requests_waiting", "Requests waiting in the queue, inside a runtime, or for a slot they lost.", model),
            kv_usage: gauge("tinyloop_kv_cache_usage_ratio", "Part of the KV pages that running requests hold.", model),
            kv_blocks: gauge("tinyloop_kv_blocks", "Blocks of KV by state: used by requests, cached for reuse, free.", &["model", "state"]),
            configured_target: gauge("tinyloop_configured_target_inflight", "Jobs a replica should hold, as configured; 0 means what it can hold, or what is found by trying.", model),
            effective_target: gauge("tinyloop_effective_target_inflight", "Jobs all replicas should hold, after clamping to what they can.", model),
            replica_target: gauge("tinyloop_replica_target_inflight", "Jobs a replica should hold now, after clamping to what it can.", &["model", "replica"]),
            replicas: gauge("tinyloop_replicas", "Replicas by state: live, lost, restarting.", &["model", "state"]),
            ema_dispatch: gauge("tinyloop_ema_dispatch_seconds", "Moving average of the time from dispatch to completion; 0 before the first.", model),
            prefix_pool_entries: gauge("tinyloop_prefix_pool_entries", "Registered prefixes.", model),
            prefix_pool_tokens: gauge("tinyloop_prefix_pool_cached_tokens", "Tokens of the registered prefixes whose KV is kept.", model),
            up: gauge("tinyloop_up", "1 while the model takes requests and a replica is alive.", model),
        };
        gauges
    }

    /// What is told of a loaded model only.
    fn of_loaded(&self) -> [&GaugeVec; 13] {
        let Self {
            queue_depth,
            in_flight,
            running,
            waiting,
            kv_usage,
            kv_blocks,
            configured_target,
            effective_target,
            replica_target,
            replicas,
            ema_dispatch,
            prefix_pool_entries,
            prefix_pool_tokens,
            up: _, // 0 says it all
        } = self;
        [
            queue_depth,
            in_flight,
            running,
            waiting,
            kv_usage,
            kv_blocks,
            configured_target,
            effective_target,
            replica_target,
            replicas,
            ema_dispatch,
            prefix_pool_entries,
            prefix_pool_tokens,
        ]
    }
}

/// Takes out all series of a model.
fn remove_series(family: &GaugeVec, model: &str) {
    for metric in family.collect().iter().flat_map(MetricFamily::get_metric) {
        let labels = metric.get_label().iter();
        let labels: HashMap<&str, &str> = labels.map(|pair| (pair.name(), pair.value())).collect();
        if labels.get("model") == Some(&model) {
            let _ = family.remove(&labels); // gone already, then
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
            rejected: counter("tinyloop_admission_rejected_total", "Requests refused before queueing; model is empty where the request was not read.", &["model", "reason"]),
            cancelled: counter("tinyloop_cancelled_total", "Cancelled requests by where they were.", &["model", "phase"]),
            slo_met: counter("tinyloop_slo_met_total", "Requests that ended well and within their latency objectives.", model),
            slo_missed: counter("tinyloop_slo_missed_total", "Requests with a latency objective that came too late, failed, or waited in the queue beyond their deadline.", model),
            prefix_tokens_reused: counter("tinyloop_prefix_tokens_reused_total", "Prompt tokens whose KV came from the prefix cache.", model),
            loops_downgraded: counter("tinyloop_loops_downgraded_total", "Requests that were granted fewer loops than asked to meet their latency objective.", model),
            requeued: counter("tinyloop_requeued_total", "Requests that went back to the queue before their first token, by cause: their replica was lost, or its upstream was full.", &["model", "cause"]),
            restarts: counter("tinyloop_replica_restarts_total", "Replicas that were lost and made anew.", model),
            counted: COUNTED_ELSEWHERE.map(|(name, help)| counter(name, help, model)),
            batch_rows: register(&registry, RowHistogram::new("tinyloop_batch_rows", "Rows of a quantum.")),
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

    /// Counts a refusal that was made before anybody knew which model was meant: `model` is empty.
    pub fn refused_unread(&self, reason: &str) {
        self.rejected.with_label_values(&["", reason]).inc();
    }

    /// A model is not there any more: its gauges would keep their last values, so that they go, and
    /// `tinyloop_up` is 0. Counters and histograms stay, for rates. Nobody may refresh it meanwhile.
    pub fn unloaded(&self, model: &str) {
        for family in self.gauges.of_loaded() {
            remove_series(family, model);
        }
        self.down(model);
    }

    /// A configured model is not there, and perhaps never was.
    pub fn down(&self, model: &str) {
        self.gauges.up.with_label_values(&[model]).set(0.0);
    }

    /// A model is not configured any more: no gauge speaks of it.
    pub fn removed(&self, model: &str) {
        self.unloaded(model);
        remove_series(&self.gauges.up, model);
    }

    /// The children of one model, with every label value there, so that rates begin at 0.
    pub(crate) fn model(&self, model: &str) -> ModelMetrics {
        let label = [model];
        let outcome = |outcome| self.requests.with_label_values(&[model, outcome]);
        let cancelled = |phase| self.cancelled.with_label_values(&[model, phase]);
        self.batch_rows.add(model, &RowCounts::default());
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
            requeued_lost: self.requeued.with_label_values(&[model, "replica_lost"]),
            requeued_overloaded: self.requeued.with_label_values(&[model, "overloaded"]),
            restarts: self.restarts.with_label_values(&label),
            done: outcome("done"),
            cancelled: outcome("cancelled"),
            failed: outcome("error"),
            cancelled_queued: cancelled("queued"),
            cancelled_running: cancelled("running"),
            rejected: self.rejected.clone(),
            scraped: Mutex::default(),
        }
    }

    /// Fills in the gauges of one model, and adds what others counted since the last time.
    pub(crate) fn refresh(&self, snapshot: &Snapshot, of_model: &ModelMetrics) {
        self.set_gauges(snapshot);
        let more = {
            let mut scraped = of_model.scraped.lock();
            let counted = CountedElsewhere::of(snapshot);
            let more = counted.since(*scraped);
            *scraped = scraped.max(counted);
            more
        };
        let model = snapshot.model.as_str();
        for (family, more) in self.counted.iter().zip(more.counts) {
            family.with_label_values(&[model]).inc_by(more);
        }
        self.batch_rows.add(model, &more.rows);
    }

    fn set_gauges(&self, snapshot: &Snapshot) {
        let model = snapshot.model.as_str();
        let set = |family: &GaugeVec, value: f64| family.with_label_values(&[model]).set(value);
        let gauges = &self.gauges;
        let sum = |count: fn(&RuntimeStatus) -> u64| -> u64 {
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
            let target = gauges.replica_target.with_label_values(&labels);
            // A lost replica gets none until it is back.
            let now = match replica.health.is_live() {
                true => replica.target,
                false => 0,
            };
            target.set(f64::from(now));
        }
        for state in Health::NAMES {
            let in_state = snapshot.replicas.iter();
            let n_replicas = in_state.filter(|r| r.health.name() == state).count();
            let gauge = gauges.replicas.with_label_values(&[model, state]);
            gauge.set(n_replicas as f64);
        }
        set(
            &gauges.running,
            sum(|status| u64::from(status.running)) as f64,
        );
        let preempted = snapshot.n_preempted as u64;
        let waiting = queue_depth + preempted + sum(|status| u64::from(status.waiting));
        set(&gauges.waiting, waiting as f64);
        let total = sum(|status| u64::from(status.kv_pages_total));
        let used = sum(|status| u64::from(status.kv_pages_used));
        let cached = sum(|status| u64::from(status.kv_pages_cached));
        set(&gauges.kv_usage, used as f64 / total.max(1) as f64);
        let free = total.saturating_sub(used + cached);
        for (state, pages) in [("used", used), ("cached", cached), ("free", free)] {
            gauges
                .kv_blocks
                .with_label_values(&[model, state])
                .set(pages as f64);
        }
        let configured = match snapshot.configured_target_inflight {
            Some(TargetInflight::Jobs(n_jobs)) => n_jobs,
            Some(TargetInflight::Auto) | None => 0,
        };
        set(&gauges.configured_target, f64::from(configured));
        set(
            &gauges.effective_target,
            f64::from(snapshot.effective_target_inflight),
        );
        set(
            &gauges.ema_dispatch,
            snapshot.ema_dispatch_ms.unwrap_or(0.0) / 1e3,
        );
        let pool = &snapshot.prefix_pool;
        set(&gauges.prefix_pool_entries, pool.entries as f64);
        set(&gauges.prefix_pool_tokens, pool.total_cached_tokens as f64);
        let alive = snapshot.replicas.iter().any(|replica| replica.status.alive);
        set(&gauges.up, f64::from(u8::from(snapshot.accepting && alive)));
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
    requeued_lost: IntCounter,
    requeued_overloaded: IntCounter,
    restarts: IntCounter,
    done: IntCounter,
    cancelled: IntCounter,
    failed: IntCounter,
    cancelled_queued: IntCounter,
    cancelled_running: IntCounter,
    rejected: IntCounterVec,
    /// What had been counted elsewhere at the last scrape. Guards plain numbers; two scrapes at
    /// once add each step once.
    scraped: Mutex<CountedElsewhere>,
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

    pub(crate) fn requeued(&self, setback: Setback, n_requests: usize) {
        let counter = match setback {
            Setback::Lost => &self.requeued_lost,
            Setback::Overloaded => &self.requeued_overloaded,
        };
        counter.inc_by(n_requests as u64);
    }

    pub(crate) fn restarted(&self) {
        self.restarts.inc();
    }

    pub(crate) fn dispatched(&self, stamps: &Stamps) {
        observe(&self.queue_wait, stamps.queue_wait());
    }

    pub(crate) fn first_token(&self, stamps: &Stamps) {
        observe(&self.first_token, stamps.time_to_first_token());
    }

    pub(crate) fn token_gap(&self, gap: Duration) {
        self.token_gap.observe(gap.as_secs_f64());
    }

    /// A request reached a final state; called once per request.
    pub(crate) fn settled(&self, record: &Record, state: &Lifecycle, ending: &Ending) {
        let stamps = state.stamps();
        let was_dispatched = stamps.dispatched.is_some();
        observe(&self.request, stamps.total());
        observe(&self.dispatch, stamps.service_time());
        match state {
            Lifecycle::Done(_) => self.done.inc(),
            Lifecycle::Error(_) => self.failed.inc(),
            _ if was_dispatched => {
                self.cancelled.inc();
                self.cancelled_running.inc();
            }
            _ => {
                self.cancelled.inc();
                self.cancelled_queued.inc();
            }
        }
        if matches!(ending, Ending::Cancelled(RequestError::QueueTimeout { .. })) {
            self.rejected("queue_timeout");
        }
        match objectives_met(&record.options, stamps, ending) {
            Some(true) => self.slo_met.inc(),
            Some(false) => self.slo_missed.inc(),
            None => {}
        }
        let told = match ending {
            Ending::Done { usage, .. } => *usage,
            Ending::Cancelled(_) | Ending::Failed(_) => Usage::default(),
        };
        let n_prompt = u64::from(record.request.counted_prompt_tokens(&told));
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

/// Whether a request that ended was served as it wished; None when it named no objective, or
/// somebody else ended it. A request that generates nothing has no first token to be late.
fn objectives_met(options: &SubmitOptions, stamps: &Stamps, ending: &Ending) -> Option<bool> {
    let within = |slo_ms: Option<u64>, took: Option<Duration>| match (slo_ms, took) {
        (Some(slo_ms), Some(took)) => took <= Duration::from_millis(slo_ms),
        _ => true,
    };
    if options.slo_ms.is_none() && options.slo_ttft_ms.is_none() {
        return None;
    }
    match ending {
        Ending::Done { .. } => Some(
            within(options.slo_ms, stamps.queue_wait())
                && within(options.slo_ttft_ms, stamps.time_to_first_token()),
        ),
        Ending::Failed(_) | Ending::Cancelled(RequestError::QueueTimeout { .. }) => Some(false),
        Ending::Cancelled(_) => None,
    }
}
