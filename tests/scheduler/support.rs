//! What every test of the executor needs: an executor that moves when the test says so.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tinyloop::clock::ManualClock;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{GenerationRequest, RequestId};
use tinyloop::runtime::fake::FakeRuntime;
use tinyloop::runtime::{ReplicaFactory, Runtime};
use tinyloop::scheduler::{
    Executor, ExecutorContext, Metrics, RequestInfo, SubmitError, SubmitOptions, Ticket,
    TokenStream,
};

/// Makes replicas anew, or fails to, as the test says.
pub(crate) struct Factory {
    /// Slots of each replica.
    slots: Vec<u32>,
    /// Why it makes none now.
    pub(crate) refuses: Mutex<Option<String>>,
    /// The latest runtime of each replica, those that the bench began with included.
    pub(crate) latest: Mutex<Vec<Arc<FakeRuntime>>>,
    /// All runtimes that there ever were.
    pub(crate) all: Mutex<Vec<Arc<FakeRuntime>>>,
    pub(crate) n_asked: AtomicU32,
}

impl Factory {
    fn make(&self, replica: usize) -> Result<Arc<dyn Runtime>, String> {
        self.n_asked.fetch_add(1, Ordering::Relaxed);
        if let Some(why) = self.refuses.lock().clone() {
            return Err(why);
        }
        let runtime = Arc::new(FakeRuntime::stepped(self.slots[replica]));
        self.latest.lock()[replica] = Arc::clone(&runtime);
        self.all.lock().push(Arc::clone(&runtime));
        Ok(runtime)
    }

    pub(crate) fn runtime(&self, replica: usize) -> Arc<FakeRuntime> {
        Arc::clone(&self.latest.lock()[replica])
    }

    pub(crate) fn n_asked(&self) -> u32 {
        self.n_asked.load(Ordering::Relaxed)
    }
}

/// An executor that moves when the test says so.
pub(crate) struct Bench {
    pub(crate) executor: Executor,
    pub(crate) runtimes: Vec<Arc<FakeRuntime>>,
    pub(crate) clock: ManualClock,
    pub(crate) metrics: Arc<Metrics>,
}

impl Bench {
    pub(crate) fn with(runtimes: Vec<FakeRuntime>, config: ExecutorConfig) -> Self {
        Self::new(runtimes, config, None)
    }

    /// Stepped replicas that are made anew when they die.
    pub(crate) fn rebuilding(slots: &[u32], config: ExecutorConfig) -> (Self, Arc<Factory>) {
        let factory = Arc::new(Factory {
            slots: slots.to_vec(),
            refuses: Mutex::new(None),
            latest: Mutex::new(Vec::new()),
            all: Mutex::new(Vec::new()),
            n_asked: AtomicU32::new(0),
        });
        let its_factory = Arc::clone(&factory);
        let make: ReplicaFactory = Arc::new(move |replica| its_factory.make(replica));
        let runtimes = slots.iter().map(|&slots| FakeRuntime::stepped(slots));
        let bench = Self::new(runtimes.collect(), config, Some(make));
        *factory.latest.lock() = bench.runtimes.clone();
        *factory.all.lock() = bench.runtimes.clone();
        (bench, factory)
    }

    /// Does all that the driver and the threads that make replicas would do now.
    pub(crate) fn settle(&self) {
        self.executor.drive();
        self.executor.wait_for_rebuilds();
        self.executor.drive();
    }

    fn new(
        runtimes: Vec<FakeRuntime>,
        config: ExecutorConfig,
        factory: Option<ReplicaFactory>,
    ) -> Self {
        let runtimes: Vec<_> = runtimes.into_iter().map(Arc::new).collect();
        let clock = ManualClock::new();
        let metrics = Arc::new(Metrics::new());
        let context = ExecutorContext {
            model: "m".to_owned(),
            clock: Arc::new(clock.clone()),
            metrics: Arc::clone(&metrics),
            factory,
        };
        let dynamic = runtimes.iter().map(|r| Arc::clone(r) as Arc<dyn Runtime>);
        let executor = Executor::with_context(dynamic.collect(), config, context);
        executor.start_without_thread();
        Self {
            executor,
            runtimes,
            clock,
            metrics,
        }
    }

    /// One stepped replica with this many slots.
    pub(crate) fn stepped(slots: u32, config: ExecutorConfig) -> Self {
        Self::with(vec![FakeRuntime::stepped(slots)], config)
    }

    pub(crate) fn runtime(&self) -> &FakeRuntime {
        &self.runtimes[0]
    }

    pub(crate) fn submit(&self, priority: i32) -> Ticket {
        self.try_submit(SubmitOptions {
            priority,
            ..SubmitOptions::default()
        })
        .expect("there is room")
    }

    pub(crate) fn try_submit(&self, options: SubmitOptions) -> Result<Ticket, SubmitError> {
        self.executor.submit(request(2), options)
    }

    pub(crate) fn stream(&self, request: GenerationRequest) -> TokenStream {
        self.executor
            .submit_stream(request, SubmitOptions::default())
            .expect("there is room")
    }

    pub(crate) fn info(&self, id: RequestId) -> RequestInfo {
        let live = self.executor.list();
        let found = live.into_iter().find(|info| info.id == id);
        found.expect("the request is live")
    }

    /// Value of a metric of the bench's model that has no other label.
    #[track_caller]
    pub(crate) fn count(&self, name: &str) -> f64 {
        self.metric(&format!("tinyloop_{name}{{model=\"m\"}}"))
    }

    /// Runs one request whose first token takes `first_ms` and whose end comes at `total_ms`.
    pub(crate) fn serve_one(&self, first_ms: u64, total_ms: u64) {
        let ticket = self.submit(0);
        self.executor.drive();
        self.advance(first_ms);
        self.step(ticket.id());
        self.advance(total_ms - first_ms);
        self.finish(ticket.id());
        ticket.wait().expect("it ended well");
    }

    pub(crate) fn advance(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    pub(crate) fn step(&self, id: RequestId) {
        assert!(self.runtime().step(id), "the job runs");
        self.executor.drive();
    }

    pub(crate) fn finish(&self, id: RequestId) {
        self.runtime().finish(id);
        self.executor.drive();
    }

    /// (queue depth, in flight).
    pub(crate) fn counts(&self) -> (usize, u32) {
        let snapshot = self.executor.snapshot();
        (snapshot.queue_depth, snapshot.in_flight)
    }

    pub(crate) fn state(&self, id: RequestId) -> &'static str {
        let live = self.executor.list();
        let found = live.iter().find(|info| info.id == id);
        found.map_or("gone", |info| info.state.name())
    }

    /// Value of a metric line, by its text before the value.
    #[track_caller]
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let text = self.executor.metrics_text("");
        let line = text.lines().find(|line| {
            line.strip_prefix(series)
                .is_some_and(|rest| rest.starts_with(' '))
        });
        let line = line.unwrap_or_else(|| panic!("no series {series} in\n{text}"));
        let value = line.rsplit(' ').next().expect("a line has a value");
        value.parse().expect("a value is a number")
    }
}

/// A request of three prompt tokens.
pub(crate) fn request(max_tokens: u32) -> GenerationRequest {
    GenerationRequest::new([7, 8, 9], max_tokens)
}

/// Jobs in the order in which a single slot runs them.
pub(crate) fn run_order(bench: &Bench) -> Vec<RequestId> {
    bench.executor.drive();
    while let Some(id) = bench.runtime().running().first().copied() {
        bench.finish(id);
    }
    bench.runtime().submitted()
}
