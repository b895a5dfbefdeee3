//! A pool whose loads do what the test says.

use crate::stand_in_model::stand_in_model;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tinyloop::clock::{Clock, ManualClock};
use tinyloop::config::{FakeConfig, ModelConfig, ModelSource, PoolConfig};
use tinyloop::pool::ledger::{MemorySource, ModelMemory};
use tinyloop::pool::{
    Estimate, LoadOverride, LoadTicket, LoadedModel, LoadingModel, ModelLoader, Pool, PoolError,
    PoolParts, RuntimeState, RuntimeWatch,
};
use tinyloop::request::GenerationRequest;
use tinyloop::runtime::Runtime;
use tinyloop::runtime::fake::{FakeRuntime, Pace, capability, echo};
use tinyloop::scheduler::{Metrics, SubmitOptions, Ticket};

/// How long a test waits for another thread's step.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that exist: counted where a runtime is made, given back where it is dropped.
struct Held {
    live: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// How the next loads of a model end.
#[derive(Clone)]
enum Plan {
    Ok,
    Fail(String),
    Panic,
    /// Waits for the word: Ok, or the reason of a failure.
    Gate(Receiver<Result<(), String>>),
}

/// Makes stand-ins of any size.
pub(crate) struct ScriptedLoader {
    metrics: Arc<Metrics>,
    pace: Pace,
    bytes: HashMap<String, u64>,
    plans: Mutex<HashMap<String, Plan>>,
    /// Bytes beyond the estimate that loads of a model turn out to hold.
    surprises: Mutex<HashMap<String, u64>>,
    /// Names of loads, in the order in which they started.
    started: Mutex<Vec<String>>,
    runtimes: Mutex<HashMap<String, Arc<FakeRuntime>>>,
    /// Bytes of all runtimes that exist.
    pub(crate) live: Arc<AtomicU64>,
    /// The most there ever were.
    pub(crate) peak: AtomicU64,
}

impl ScriptedLoader {
    pub(crate) fn started(&self) -> Vec<String> {
        self.started.lock().expect("no panic inside").clone()
    }

    /// The runtime of a loaded model, to step it. It has to be given back before an unload can end.
    pub(crate) fn take_runtime(&self, name: &str) -> Arc<FakeRuntime> {
        let mut runtimes = self.runtimes.lock().expect("no panic inside");
        runtimes.remove(name).expect("it was loaded")
    }

    fn bytes_of(&self, config: &ModelConfig) -> u64 {
        let one = self.bytes.get(&config.name).copied().unwrap_or(0);
        one * u64::from(config.lifecycle.replicas)
    }

    fn surprise(&self, name: &str) -> u64 {
        let surprises = self.surprises.lock().expect("no panic inside");
        surprises.get(name).copied().unwrap_or(0)
    }

    fn carry_out(&self, name: &str) -> Result<(), String> {
        let plan = {
            let plans = self.plans.lock().expect("no panic inside");
            plans.get(name).cloned().unwrap_or(Plan::Ok)
        };
        match plan {
            Plan::Ok => Ok(()),
            Plan::Fail(why) => Err(why),
            Plan::Panic => panic!("the loader's own fault"),
            Plan::Gate(word) => word.recv().unwrap_or(Ok(())),
        }
    }
}

impl ModelLoader for ScriptedLoader {
    fn estimate(&self, config: &ModelConfig) -> Estimate {
        Estimate {
            memory: ModelMemory {
                weight_bytes: self.bytes_of(config),
                source: MemorySource::ArtifactSize,
                ..ModelMemory::default()
            },
            kv_bytes_per_token: 10,
            ..Estimate::default()
        }
    }

    fn load(
        &self,
        config: &ModelConfig,
        progress: &Arc<LoadingModel>,
    ) -> Result<LoadedModel, String> {
        let name = config.name.clone();
        self.started
            .lock()
            .expect("no panic inside")
            .push(name.clone());
        let bytes = self.bytes_of(config);
        progress.report(bytes / 2, bytes);
        self.carry_out(&name)?;
        let bytes = bytes + self.surprise(&name);
        let held = Held {
            live: Arc::clone(&self.live),
            bytes,
        };
        let now = self.live.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.peak.fetch_max(now, Ordering::SeqCst);
        let script = move |request: &GenerationRequest| {
            let _ = &held; // lives as long as the runtime
            echo(request)
        };
        let runtime = FakeRuntime::new(capability(1), self.pace, None, Box::new(script));
        let runtime = Arc::new(runtime);
        let watch = RuntimeWatch::default();
        watch.add(&(Arc::clone(&runtime) as Arc<dyn Runtime>));
        if self.pace == Pace::Stepped {
            let mut runtimes = self.runtimes.lock().expect("no panic inside");
            runtimes.insert(name.clone(), Arc::clone(&runtime));
        }
        let memory = ModelMemory {
            weight_bytes: bytes,
            source: MemorySource::MeasuredLoadDelta,
            ..ModelMemory::default()
        };
        stand_in_model(config, (vec![runtime], None), &self.metrics, memory, watch)
    }
}

/// A pool, and the hands on what moves it.
pub(crate) struct Bench {
    pub(crate) pool: Pool,
    pub(crate) clock: ManualClock,
    pub(crate) loader: Arc<ScriptedLoader>,
}

/// A model, not loaded at start.
pub(crate) fn model(name: &str) -> ModelConfig {
    let mut config = ModelConfig::new(name, ModelSource::Fake(FakeConfig::default()));
    config.lifecycle.enabled = false;
    config
}

/// The same, loaded by requests.
pub(crate) fn on_demand(name: &str) -> ModelConfig {
    let mut config = model(name);
    config.lifecycle.load_on_demand = true;
    config
}

/// Room for 100 bytes, ten seconds of residency, answers at once.
pub(crate) fn limits() -> PoolConfig {
    PoolConfig {
        cpu_bytes: Some(100),
        ..PoolConfig::default()
    }
}

impl Bench {
    /// Models of these sizes, with a manual clock.
    pub(crate) fn new(sizes: &[(&str, u64)]) -> Self {
        Self::with(sizes, limits(), Pace::AtOnce)
    }

    pub(crate) fn with(sizes: &[(&str, u64)], config: PoolConfig, pace: Pace) -> Self {
        let clock = ManualClock::new();
        let (pool, loader) = pool(sizes, config, pace, Arc::new(clock.clone()));
        Self {
            pool,
            clock,
            loader,
        }
    }

    pub(crate) fn add(&self, config: ModelConfig) {
        self.pool.add(config).expect("the name is new");
    }

    /// The next loads of a model wait for the test's word.
    pub(crate) fn gate(&self, name: &str) -> Sender<Result<(), String>> {
        let (word, wait) = unbounded();
        self.plan(name, Plan::Gate(wait));
        word
    }

    pub(crate) fn fail(&self, name: &str, why: &str) {
        self.plan(name, Plan::Fail(why.to_owned()));
    }

    pub(crate) fn panic(&self, name: &str) {
        self.plan(name, Plan::Panic);
    }

    /// The next loads of a model hold so many bytes more than was estimated.
    pub(crate) fn surprise(&self, name: &str, more_bytes: u64) {
        let mut surprises = self.loader.surprises.lock().expect("no panic inside");
        surprises.insert(name.to_owned(), more_bytes);
    }

    pub(crate) fn succeed(&self, name: &str) {
        self.plan(name, Plan::Ok);
    }

    fn plan(&self, name: &str, plan: Plan) {
        let mut plans = self.loader.plans.lock().expect("no panic inside");
        plans.insert(name.to_owned(), plan);
    }

    pub(crate) fn load(&self, name: &str) -> Result<LoadTicket, PoolError> {
        self.pool.load(name, &LoadOverride::default())
    }

    /// Loads and waits.
    #[track_caller]
    pub(crate) fn loaded(&self, name: &str) {
        self.load(name).expect("there is room");
        assert_eq!(self.settled(name), RuntimeState::Loaded, "{name}");
    }

    #[track_caller]
    pub(crate) fn settled(&self, name: &str) -> RuntimeState {
        let state = self.pool.wait_settled(name, PATIENCE);
        let state = state.expect("it is configured");
        assert!(state.is_settled(), "{name} is {} for ever", state.name());
        state
    }

    pub(crate) fn state(&self, name: &str) -> RuntimeState {
        let entry = self.pool.find(name).expect("it is configured");
        entry.state.name()
    }

    pub(crate) fn live(&self) -> u64 {
        self.loader.live.load(Ordering::SeqCst)
    }

    /// Past the time in which a model may not be evicted.
    pub(crate) fn pass_residency(&self) {
        self.clock.advance(Duration::from_secs(11));
    }
}

/// A pool on any clock.
pub(crate) fn pool(
    sizes: &[(&str, u64)],
    config: PoolConfig,
    pace: Pace,
    clock: Arc<dyn Clock>,
) -> (Pool, Arc<ScriptedLoader>) {
    let metrics = Arc::new(Metrics::new());
    let sizes = sizes
        .iter()
        .map(|(name, bytes)| ((*name).to_owned(), *bytes));
    let loader = Arc::new(ScriptedLoader {
        metrics: Arc::clone(&metrics),
        pace,
        bytes: sizes.collect(),
        plans: Mutex::default(),
        surprises: Mutex::default(),
        started: Mutex::default(),
        runtimes: Mutex::default(),
        live: Arc::default(),
        peak: AtomicU64::new(0),
    });
    let pool = Pool::with_parts(PoolParts {
        metrics,
        clock,
        loader: Arc::clone(&loader) as Arc<dyn ModelLoader>,
        config,
    });
    (pool, loader)
}

/// A request of two tokens.
pub(crate) fn submit(model: &LoadedModel) -> Ticket {
    let request = GenerationRequest::new(vec![1_u32, 2], 2);
    let ticket = model.executor.submit(request, SubmitOptions::default());
    ticket.expect("there is room in the queue")
}

/// Waits until `condition` holds; fails after a while.
#[track_caller]
pub(crate) fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::yield_now();
    }
}
