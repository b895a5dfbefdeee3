//! The library API of the scheduler: one executor per public model.
//!
//! Handles are shared by all callers; the queue's lock is inside (`queue`), the driver thread is
//! owned here and joined by `shutdown`. Invariants: `start` must precede `submit`; after
//! `shutdown` returned nothing runs and every waiter has its end. What is not here: any decision
//! (`admission`, `replica`) and the loop (`driver`).

use super::admission::{self, Admission, Closed, Demand, Supply};
use super::driver::{self, Turn};
use super::estimate::Measured;
use super::fleet::Fleet;
use super::lifecycle::Stamp;
use super::mailbox::{Receiver, Sender, mailbox, single};
use super::metrics::{Metrics, ModelMetrics};
use super::prefix_pool::PrefixPool;
use super::queue::{Counts, Event, Queue};
use super::record::{Ending, PRIORITY_MAX, Record, SubmitOptions};
use super::refusal::SubmitError;
use super::roster::{ReplicaCounts, Roster};
use super::snapshot::{ReplicaSnapshot, RequestInfo, Snapshot, info};
use super::ticket::{CancelHandle, Ticket, TokenStream};
use crate::clock::{Clock, SystemClock};
use crate::config::ExecutorConfig;
use crate::request::{GenerationRequest, RequestError, RequestId};
use crate::runtime::{Capability, LoopCost, ReplicaFactory, Runtime, RuntimeStatus, held_tokens};
use crate::tokenizer::{TextStream, Tokenizer};
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long `shutdown` waits for runtimes to let go of jobs it cancelled, before it ends them.
const CANCEL_GRACE: Duration = Duration::from_secs(2);

/// Part of a latency objective that a prediction may use up before a request that accepts fewer loops
/// gets fewer: room for what a mean cannot know.
const DOWNGRADE_HEADROOM: f64 = 0.5;

/// What an executor shares with the rest of the process.
#[derive(Clone)]
pub struct ExecutorContext {
    /// Public name: thread names, logs, the metric label.
    pub model: String,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Where counts go.
    pub metrics: Arc<Metrics>,
    /// Makes a lost replica anew; None = a lost replica stays lost.
    pub factory: Option<ReplicaFactory>,
}

impl ExecutorContext {
    /// The system clock, a metrics registry shared with others, and no factory.
    #[must_use]
    pub fn new(model: impl Into<String>, metrics: Arc<Metrics>) -> Self {
        Self {
            model: model.into(),
            clock: Arc::new(SystemClock),
            metrics,
            factory: None,
        }
    }
}

/// What the executor, its driver, its sinks and its callers share.
pub(crate) struct Core {
    pub(crate) model: String,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) fleet: Fleet,
    pub(crate) queue: Queue,
    pub(crate) metrics: ModelMetrics,
    pub(crate) config: ExecutorConfig,
    pub(crate) prefix_pool: PrefixPool,
    pub(crate) turn: Turn,
    /// What admission knows without the queue.
    limits: Supply,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Core {
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp {
            at: self.clock.now(),
            wall: self.clock.wall(),
        }
    }

    /// Ends a request, unless it ended before; counts it.
    pub(crate) fn settle(&self, record: &Record, ending: &Ending) {
        // Before the waiter learns the end, so that it finds its own hit in the list.
        if let Ending::Done { usage, .. } = ending
            && !record.state().is_final()
        {
            self.prefix_pool.count_hit(&record.request, *usage);
        }
        if let Ok(state) = record.settle(ending, self.stamp()) {
            self.metrics.settled(record, &state, ending);
        }
    }

    /// What loops cost; the replicas run the same model, so the first that knows speaks for all.
    fn loop_cost(&self) -> Option<LoopCost> {
        self.fleet
            .runtimes()
            .find_map(|runtime| runtime.loop_cost())
    }

    fn demand(&self, record: &Record) -> Demand {
        let (request, options) = (&record.request, &record.options);
        let (prompt_tokens, max_tokens) = match &request.upstream {
            None => (request.prompt_tokens(), request.max_tokens),
            // The server that counts the tokens also says whether they fit.
            Some(_) => (request.prompt_tokens().min(self.limits.context_length), 0),
        };
        Demand {
            prompt_tokens,
            max_tokens,
            held_tokens: self.held_tokens(request),
            slo_ms: options.slo_ms,
            slo_ttft_ms: options.slo_ttft_ms,
            loops: request.loops,
            min_loops: request.min_loops,
        }
    }

    /// Tokens of KV memory, counted at the default depth as the pool is, that a request holds at most;
    /// None = its prompt and its longest answer.
    fn held_tokens(&self, request: &GenerationRequest) -> Option<u64> {
        let in_window = held_tokens(request);
        let (Some(loops), Some(runtime)) = (request.loops, self.fleet.runtimes().next()) else {
            return in_window;
        };
        let whole = request.prompt.len() as u64 + u64::from(request.max_tokens);
        let (asked, default) = runtime.kv_room(loops);
        let room = in_window.unwrap_or(whole).saturating_mul(asked.into());
        Some(room.div_ceil(u64::from(default.max(1))))
    }

    /// Ends everyone and takes nothing more: for faults of the scheduler itself.
    pub(crate) fn fail_all(&self, why: &str) {
        let fault = RequestError::Fault(why.to_owned());
        let ending = Ending::Cancelled(fault.clone());
        for record in self.queue.close(Closed::Failed) {
            self.settle(&record, &ending);
        }
        let ending = Ending::Failed(fault);
        for job in self.queue.all_running() {
            if self.queue.release(&job, None, self.clock.now()) {
                self.settle(&job.record, &ending);
            }
        }
    }
}

/// A loaded public model's queue, driver and replicas.
pub struct Executor {
    pub(super) core: Arc<Core>,
    metrics: Arc<Metrics>,
    /// Guards start and join; held while `shutdown` runs, so that a second caller waits for it.
    driver: Mutex<Option<JoinHandle<()>>>,
}

impl Executor {
    /// An executor of its own, with its own metrics registry.
    #[must_use]
    pub fn new(runtimes: Vec<Arc<dyn Runtime>>, config: ExecutorConfig) -> Self {
        let context = ExecutorContext::new("default", Arc::new(Metrics::new()));
        Self::with_context(runtimes, config, context)
    }

    /// An executor that is one of several.
    #[must_use]
    pub fn with_context(
        runtimes: Vec<Arc<dyn Runtime>>,
        config: ExecutorConfig,
        context: ExecutorContext,
    ) -> Self {
        let ExecutorContext {
            model,
            clock,
            metrics,
            factory,
        } = context;
        let tokenizer = runtimes.iter().find_map(|runtime| runtime.tokenizer());
        let capabilities = runtimes.iter().map(|runtime| runtime.capability());
        let capabilities: Vec<Capability> = capabilities.collect();
        let now = clock.now();
        let roster = Roster::new(&capabilities, &config, factory.is_some(), now);
        let core = Core {
            limits: limits(&roster, &config, now),
            queue: Queue::new(roster, &config, now),
            metrics: metrics.model(&model),
            model,
            clock,
            fleet: Fleet::new(runtimes, factory),
            prefix_pool: PrefixPool::new(config.prefix_pool_capacity),
            turn: Turn::new(),
            config,
            tokenizer,
        };
        Self {
            core: Arc::new(core),
            metrics,
            driver: Mutex::new(None),
        }
    }

    /// Takes submits from now on and starts the driver thread. Idempotent; after `shutdown` it
    /// does nothing. Err when the thread cannot be made; then it stays closed.
    pub fn start(&self) -> std::io::Result<()> {
        let mut driver = self.driver.lock();
        if driver.is_some() || self.core.queue.counts().closed != Some(Closed::NotStarted) {
            return Ok(());
        }
        let core = Arc::clone(&self.core);
        let thread = std::thread::Builder::new()
            .name(format!("driver-{}", self.core.model))
            .spawn(move || driver::run(&core))?;
        *driver = Some(thread);
        self.core.turn.share();
        self.core.queue.open();
        Ok(())
    }

    /// For tests, instead of `start`: takes submits, but moves requests only in `drive`.
    #[doc(hidden)]
    pub fn start_without_thread(&self) {
        self.core.queue.open();
    }

    /// For tests: waits until no replica is being made anew; `drive` then puts it to use.
    #[doc(hidden)]
    pub fn wait_for_rebuilds(&self) {
        self.core.fleet.join_rebuilders();
    }

    /// For tests: does on this thread what the driver would do now.
    #[doc(hidden)]
    pub fn drive(&self) {
        driver::run_pending(&self.core);
    }

    /// Queues a request whose answer is wanted whole.
    pub fn submit(
        &self,
        request: GenerationRequest,
        options: SubmitOptions,
    ) -> Result<Ticket, SubmitError> {
        let options = SubmitOptions {
            streaming: false,
            ..options
        };
        self.enqueue_one(request, options).map(Ticket::new)
    }

    /// Queues a request whose answer is wanted as it is made.
    pub fn submit_stream(
        &self,
        request: GenerationRequest,
        options: SubmitOptions,
    ) -> Result<TokenStream, SubmitError> {
        let options = SubmitOptions {
            streaming: true,
            ..options
        };
        self.enqueue_one(request, options)
    }

    /// Queues several requests, all or none: if one is refused, none was ever there. Each counts
    /// those before it as waiting ahead of it. `options.streaming` stays as the caller set it.
    ///
    /// # Errors
    /// The refusal of the first that cannot be taken.
    pub fn submit_many(
        &self,
        requests: Vec<GenerationRequest>,
        options: SubmitOptions,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let now = self.core.stamp();
        let ways = mailbox(requests.len());
        let (mut records, receivers): (Vec<_>, Vec<_>) = requests
            .into_iter()
            .zip(ways)
            .map(|(request, (sender, receiver))| {
                (
                    self.prepare(request, options.clone(), sender, now),
                    receiver,
                )
            })
            .unzip();
        self.admit(&mut records, now)?;
        let streams = records.into_iter().zip(receivers);
        Ok(streams
            .map(|(record, receiver)| self.stream_of(record, receiver))
            .collect())
    }

    fn enqueue_one(
        &self,
        request: GenerationRequest,
        options: SubmitOptions,
    ) -> Result<TokenStream, SubmitError> {
        let now = self.core.stamp();
        let (sender, receiver) = single();
        let mut record = self.prepare(request, options, sender, now);
        self.admit(std::slice::from_mut(&mut record), now)?;
        Ok(self.stream_of(record, receiver))
    }

    /// The record of a request that comes now.
    fn prepare(
        &self,
        mut request: GenerationRequest,
        mut options: SubmitOptions,
        sender: Sender,
        now: Stamp,
    ) -> Arc<Record> {
        let core = &self.core;
        if request.cache_window > 0 && request.kept_tokens == 0 {
            let default = core.loop_cost().map_or(1, |cost| cost.default_loops);
            let loops = request.loops.unwrap_or(default);
            request.kept_tokens = core.prefix_pool.kept_tokens(&request, loops);
        }
        options.priority = options.priority.clamp(-PRIORITY_MAX, PRIORITY_MAX);
        options.slo_ms = options.slo_ms.or(core.config.default_slo_ms);
        let timeout = options.queue_timeout.or(core.config.queue_timeout);
        let deadline = timeout.and_then(|timeout| now.at.checked_add(timeout));
        let key = core.queue.key(options.priority, now.at);
        let record = Record::new(Arc::new(request), options, key, deadline, sender, now);
        Arc::new(record)
    }

    fn admit(&self, group: &mut [Arc<Record>], now: Stamp) -> Result<(), SubmitError> {
        let core = &self.core;
        let limits = Supply {
            loop_cost: core.loop_cost(),
            ..core.limits
        };
        core.queue
            .admit(group, |record| core.demand(record), limits, now.at)
            .inspect_err(|error| {
                for _ in group.iter() {
                    core.metrics.rejected(error.reason());
                }
            })?;
        for record in group.iter() {
            core.metrics.admitted(record.loops);
        }
        driver::submitted(core);
        Ok(())
    }

    fn stream_of(&self, record: Arc<Record>, receiver: Receiver) -> TokenStream {
        let stop = &record.request.stop;
        let text = match &self.core.tokenizer {
            Some(tokenizer) => TextStream::new(
                Arc::clone(tokenizer),
                &stop.strings,
                stop.include_stop_string,
                record.options.skip_special_tokens,
            )
            .showing(Arc::clone(&record.options.shown_tokens))
            .not_before(stop.min_tokens),
            None => TextStream::for_text(&stop.strings, stop.include_stop_string),
        };
        let handle = CancelHandle::new(Arc::clone(&self.core), record);
        TokenStream::new(handle, receiver, text)
    }

    /// Refuses what no request could pass now: intake is closed, or the queue is full. Cheap, and
    /// asked before a prompt is rendered and tokenized; it takes no place, so `submit` decides again.
    ///
    /// # Errors
    /// The refusal, which is counted.
    pub fn preflight(&self) -> Result<(), SubmitError> {
        let core = &self.core;
        let smallest = Demand {
            prompt_tokens: 1,
            max_tokens: 0,
            held_tokens: None,
            slo_ms: None,
            slo_ttft_ms: None,
            loops: None,
            min_loops: None,
        };
        match core.queue.preview(smallest, core.limits, core.clock.now()) {
            Admission::Admit { .. } => Ok(()),
            Admission::Refuse(error) => {
                core.metrics.rejected(error.reason());
                Err(error)
            }
        }
    }

    /// Counts a refusal that was made before the executor was asked, like a prompt beyond the context.
    pub fn count_refusal(&self, reason: &str) {
        self.core.metrics.rejected(reason);
    }

    /// Most requests of one group that an idle executor takes, with prompts of at most
    /// `prompt_tokens` each. A larger group can never be served.
    #[must_use]
    pub fn burst_max(&self, prompt_tokens: usize) -> usize {
        admission::group_max(prompt_tokens as u64, self.core.limits)
    }

    /// Cancels a request that waits or runs. False when there is none with this id.
    pub fn cancel(&self, id: RequestId) -> bool {
        let (_, listing) = self.core.queue.listing();
        let mut records = listing.into_iter().map(|(record, _)| record);
        let found = records.find(|record| record.request.id == id);
        let Some(record) = found else { return false };
        CancelHandle::new(Arc::clone(&self.core), record).cancel();
        true
    }

    /// Everyone who waits, runs or was preempted. No prompt text.
    #[must_use]
    pub fn list(&self) -> Vec<RequestInfo> {
        self.inspect().1
    }

    /// Counts and requests, all of one moment.
    #[must_use]
    pub fn inspect(&self) -> (Snapshot, Vec<RequestInfo>) {
        let now = self.core.stamp();
        let (counts, listing) = self.core.queue.listing();
        let infos = listing
            .iter()
            .map(|(record, state)| info(record, *state, now));
        (self.snapshot_of(counts), infos.collect())
    }

    /// Counts at one moment.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot_of(self.core.queue.counts())
    }

    /// What the runtimes say is added without any lock of the scheduler.
    fn snapshot_of(&self, counts: Counts) -> Snapshot {
        let core = &self.core;
        let shown = |(replica, counts): (usize, &ReplicaCounts)| ReplicaSnapshot {
            inflight: counts.inflight,
            target: counts.target,
            max_inflight: counts.max_inflight,
            health: counts.health,
            is_open: counts.is_open,
            can_be_replaced: core.fleet.factory().is_some(),
            n_restarts: core.fleet.n_restarts(replica),
            last_error: core.fleet.last_error(replica),
            status: {
                let status = core.fleet.status(replica);
                let alive = status.alive && counts.health.is_live();
                RuntimeStatus { alive, ..status }
            },
        };
        let replicas: Vec<_> = counts.replicas.iter().enumerate().map(shown).collect();
        Snapshot {
            model: core.model.clone(),
            queue_depth: counts.queue_depth,
            in_flight: counts.replicas.iter().map(|replica| replica.inflight).sum(),
            n_preempted: counts.n_preempted,
            preemptions: counts.preemptions,
            ema_dispatch_ms: counts.ema_dispatch_ms,
            configured_target_inflight: core.config.target_inflight,
            effective_target_inflight: counts.capacity,
            accepting: counts.closed.is_none(),
            has_failed: counts.closed == Some(Closed::Failed),
            prefix_pool: core.prefix_pool.stats(None),
            replicas,
        }
    }

    /// Prometheus exposition of the registry this executor reports to, `extra_lines` first.
    #[must_use]
    pub fn metrics_text(&self, extra_lines: &str) -> String {
        self.refresh_metrics();
        self.metrics.render(extra_lines)
    }

    /// Brings this model's gauges up to date; a scrape does that for every model, then renders.
    pub fn refresh_metrics(&self) {
        self.metrics.refresh(&self.snapshot(), &self.core.metrics);
    }

    /// The vocabulary of its runtimes, if they have one.
    #[must_use]
    pub fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        self.core.tokenizer.clone()
    }

    /// Longest prompt + completion in tokens.
    #[must_use]
    pub fn context_length(&self) -> u32 {
        self.core.limits.context_length
    }

    /// Refuses new work, cancels queued work, lets running work finish up to `drain_timeout`, then
    /// cancels what is left and ends the runtimes. Idempotent; a second caller waits for the first.
    pub fn shutdown(&self, drain_timeout: Duration) {
        self.close(
            Closed::ShuttingDown,
            RequestError::ShuttingDown,
            drain_timeout,
        );
    }

    /// The same because the model goes, not the server: clients are told so.
    pub fn unload(&self, drain_timeout: Duration) {
        self.close(
            Closed::Unloading,
            RequestError::ModelUnloading,
            drain_timeout,
        );
    }

    fn close(&self, reason: Closed, error: RequestError, drain_timeout: Duration) {
        let core = &self.core;
        // Before the lock: a second, more impatient caller still refuses and empties at once.
        let ending = Ending::Cancelled(error);
        for record in core.queue.close(reason) {
            core.settle(&record, &ending);
        }
        let mut driver = self.driver.lock();
        let has_thread = driver.is_some();
        if has_thread && !core.queue.wait_idle(drain_timeout) {
            for job in core.queue.all_running() {
                let (number, ending) = (job.number(), ending.clone());
                core.queue.post(Event::Cancel { number, ending });
            }
            core.queue.wait_idle(CANCEL_GRACE);
        }
        // Whoever has the turn now may still be starting a restart; after it nobody does.
        driver::run_pending(core);
        core.fleet.join_rebuilders();
        for runtime in core.fleet.runtimes() {
            runtime.shutdown(); // fails what is left through its sinks
        }
        if let Some(thread) = driver.take() {
            core.queue.stop();
            // A panic of the driver was logged and has failed everyone already.
            let _ = thread.join();
        }
        driver::run_pending(core);
        core.fail_all("the runtime did not report an end");
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor")
            .field("model", &self.core.model)
            .field("replicas", &self.core.fleet.len())
            .finish_non_exhaustive()
    }
}

/// What admission looks at of an executor that nobody uses. The queue brings what changes.
fn limits(roster: &Roster, config: &ExecutorConfig, now: Instant) -> Supply {
    let together = roster.together(now);
    Supply {
        closed: None,
        no_replica_retry_s: None,
        context_length: together.context_length,
        kv_capacity_tokens: together.kv_capacity_tokens,
        queue_depth: 0,
        queue_ahead: 0,
        group_ahead: 0,
        max_queue_depth: config.max_queue_depth,
        queued_prompt_tokens: 0,
        max_queued_prompt_tokens: config.max_queued_prompt_tokens,
        client_queued: 0,
        client_max_queued: None,
        client_part: 1.0,
        in_flight: 0,
        capacity: roster.capacity_most(),
        may_preempt: false,
        measured: Measured::default(),
        loop_cost: None,
        headroom: DOWNGRADE_HEADROOM,
    }
}
