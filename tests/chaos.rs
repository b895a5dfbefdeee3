//! Everything at once, on real threads: clients that stream, cancel and leave, an operator that loads
//! and unloads, replicas that die, models that do not all fit.
//!
//! What must hold whatever happens: every request ends exactly once, with its tokens or a named
//! error; memory and threads return to their base. `TINYLOOP_CHAOS_S` says how long it goes on
//! (default 15 seconds; `.ci/run` asks for a minute), `TINYLOOP_CHAOS_SEED` repeats the same choices.

#[path = "common/stand_in_model.rs"]
mod stand_in_model;

use crossbeam_channel::{Receiver, bounded};
use prometheus::proto::MetricFamily;
use stand_in_model::stand_in_model;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};
use tinyloop::clock::SystemClock;
use tinyloop::config::{FakeConfig, ModelConfig, ModelSource, PoolConfig};
use tinyloop::pool::ledger::{MemorySource, ModelMemory};
use tinyloop::pool::{
    Estimate, LoadOverride, LoadedModel, LoadingModel, ModelLoader, Patience, Pool, PoolParts,
    RuntimeState, RuntimeWatch, SourceLoader, Unavailable,
};
use tinyloop::request::{GenerationRequest, RequestError};
use tinyloop::runtime::fake::{FakeRuntime, Pace, capability, echo};
use tinyloop::runtime::native::BackendKind;
use tinyloop::runtime::{ReplicaFactory, Runtime};
use tinyloop::scheduler::{Metrics, StreamEvent, SubmitOptions, TokenStream};

const PATIENCE: Duration = Duration::from_secs(60);
/// Each replica of a stand-in really holds so much.
const REPLICA_BYTES: u64 = 8 << 20;
const NAMES: [&str; 4] = ["native", "x", "y", "z"];
/// What the allocator may keep for itself.
const SLACK_BYTES: u64 = 64 << 20;

/// xorshift64*: good enough to be chaotic.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }

    fn name(&mut self) -> &'static str {
        NAMES[self.below(NAMES.len() as u64) as usize]
    }
}

/// The native model by the usual loader; the others are stand-ins that hold memory and can die.
struct Loader {
    native: SourceLoader,
    metrics: Arc<Metrics>,
    killable: Arc<Mutex<Vec<Weak<FakeRuntime>>>>,
    live_bytes: Arc<AtomicU64>,
    n_loads: AtomicU64,
}

/// Memory that a stand-in really holds.
struct Held {
    bytes: Vec<u8>,
    live_bytes: Arc<AtomicU64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.live_bytes
            .fetch_sub(self.bytes.len() as u64, Ordering::SeqCst);
    }
}

impl Loader {
    fn factory(&self, watch: &RuntimeWatch) -> ReplicaFactory {
        let killable = Arc::clone(&self.killable);
        let (live_bytes, watch) = (Arc::clone(&self.live_bytes), watch.clone());
        Arc::new(move |_| {
            let held = Held {
                bytes: vec![1; REPLICA_BYTES as usize],
                live_bytes: Arc::clone(&live_bytes),
            };
            live_bytes.fetch_add(REPLICA_BYTES, Ordering::SeqCst);
            let script = move |request: &GenerationRequest| {
                assert!(held.bytes.iter().step_by(1 << 16).all(|byte| *byte == 1));
                echo(request)
            };
            let pace = Pace::Threaded(Duration::from_micros(300));
            let runtime = Arc::new(FakeRuntime::new(
                capability(2),
                pace,
                None,
                Box::new(script),
            ));
            let mut killable = killable.lock().expect("no panic inside");
            killable.retain(|runtime| runtime.strong_count() > 0);
            killable.push(Arc::downgrade(&runtime));
            let runtime: Arc<dyn Runtime> = runtime;
            watch.add(&runtime);
            Ok(runtime)
        })
    }

    fn memory(config: &ModelConfig) -> ModelMemory {
        ModelMemory {
            weight_bytes: REPLICA_BYTES * u64::from(config.lifecycle.replicas),
            source: MemorySource::MeasuredLoadDelta,
            ..ModelMemory::default()
        }
    }
}

impl ModelLoader for Loader {
    fn estimate(&self, config: &ModelConfig) -> Estimate {
        match &config.source {
            ModelSource::Fake(_) => Estimate {
                memory: Self::memory(config),
                ..Estimate::default()
            },
            _ => self.native.estimate(config),
        }
    }

    fn load(
        &self,
        config: &ModelConfig,
        progress: &Arc<LoadingModel>,
    ) -> Result<LoadedModel, String> {
        self.n_loads.fetch_add(1, Ordering::SeqCst);
        if !matches!(config.source, ModelSource::Fake(_)) {
            return self.native.load(config, progress);
        }
        let watch = RuntimeWatch::default();
        let factory = self.factory(&watch);
        let runtimes: Result<Vec<_>, String> = (0..config.lifecycle.replicas as usize)
            .map(|index| factory(index))
            .collect();
        let parts = (runtimes?, Some(factory));
        stand_in_model(config, parts, &self.metrics, Self::memory(config), watch)
    }
}

struct World {
    pool: Pool,
    loader: Arc<Loader>,
    /// Requests that were accepted, and how they ended.
    n_accepted: AtomicU64,
    n_done: AtomicU64,
    n_failed: AtomicU64,
    n_refused: AtomicU64,
}

fn configs() -> Vec<ModelConfig> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    let mut native = ModelConfig::new("native", ModelSource::File(file));
    native.engine.threads = Some(1);
    native.engine.max_sequences = 2;
    let stand_in = |name| ModelConfig::new(name, ModelSource::Fake(FakeConfig::default()));
    let mut all = vec![native, stand_in("x"), stand_in("y"), stand_in("z")];
    for config in &mut all {
        config.lifecycle.replicas = 2;
        config.lifecycle.load_on_demand = true;
        config.executor.max_queue_depth = 8;
    }
    all
}

fn world() -> World {
    let metrics = Arc::new(Metrics::new());
    let loader = Arc::new(Loader {
        native: SourceLoader::new(BackendKind::Cpu, Arc::clone(&metrics)),
        metrics: Arc::clone(&metrics),
        killable: Arc::default(),
        live_bytes: Arc::default(),
        n_loads: AtomicU64::new(0),
    });
    let configs = configs();
    let native_bytes = loader.estimate(&configs[0]).memory.total_bytes();
    let pool = Pool::with_parts(PoolParts {
        metrics,
        clock: Arc::new(SystemClock),
        loader: Arc::clone(&loader) as Arc<dyn ModelLoader>,
        config: PoolConfig {
            // Two stand-ins fit, or one beside the native model.
            cpu_bytes: Some(
                native_bytes * 5 / 4
                    + 2 * REPLICA_BYTES * 5 / 4
                    + native_bytes.max(2 * REPLICA_BYTES) / 2,
            ),
            min_residency: Duration::from_millis(50),
            ..PoolConfig::default()
        },
    });
    for config in configs {
        pool.add(config).expect("the names differ");
    }
    World {
        pool,
        loader,
        n_accepted: AtomicU64::new(0),
        n_done: AtomicU64::new(0),
        n_failed: AtomicU64::new(0),
        n_refused: AtomicU64::new(0),
    }
}

impl World {
    fn unload_all(&self, drain: Duration) {
        for name in NAMES {
            self.pool
                .unload(name, Some(drain))
                .expect("it is configured");
        }
        for name in NAMES {
            let state = self.pool.wait_settled(name, PATIENCE);
            let left = matches!(state, Some(RuntimeState::Unloaded | RuntimeState::Failed));
            assert!(left, "{name} is {state:?}");
        }
        let live = self.loader.live_bytes.load(Ordering::SeqCst);
        assert_eq!((live, self.pool.devices()[0].used_bytes), (0, 0));
    }

    /// One request of a client, in any of the ways that clients behave.
    fn request(&self, dice: &mut Dice) {
        let patience = Patience {
            queue_timeout: Some(Duration::from_millis(20 + dice.below(1000))),
            ..Patience::USUAL
        };
        let model = match self.pool.acquire(dice.name(), &patience) {
            Ok(model) => model,
            Err(Unavailable::Unknown(name)) => panic!("{name} is configured"),
            Err(_) => {
                self.n_refused.fetch_add(1, Ordering::SeqCst);
                return;
            }
        };
        let mut request = GenerationRequest::new(vec![3_u32, 4, 5], 1 + dice.below(40) as u32);
        request.stop.ignore_eos = true;
        let Ok(stream) = model
            .executor
            .submit_stream(request, SubmitOptions::default())
        else {
            self.n_refused.fetch_add(1, Ordering::SeqCst);
            return;
        };
        drop(model);
        self.n_accepted.fetch_add(1, Ordering::SeqCst);
        self.read(stream, dice);
    }

    fn read(&self, mut stream: TokenStream, dice: &mut Dice) {
        let cancel_after = (dice.below(4) == 0).then(|| dice.below(10));
        let leaves = dice.below(8) == 0;
        let mut n_chunks = 0;
        loop {
            match stream.recv_timeout(PATIENCE) {
                StreamEvent::Chunk(_) => n_chunks += 1,
                StreamEvent::TimedOut => panic!("a request hangs"),
                StreamEvent::Finished(_) => {
                    self.n_done.fetch_add(1, Ordering::SeqCst);
                    break;
                }
                StreamEvent::Failed(error) => {
                    assert!(!matches!(error, RequestError::Invalid(_)), "{error}");
                    self.n_failed.fetch_add(1, Ordering::SeqCst);
                    break;
                }
            }
            if cancel_after == Some(n_chunks) {
                if leaves {
                    self.n_failed.fetch_add(1, Ordering::SeqCst);
                    return; // dropping the stream cancels
                }
                stream.cancel();
            }
        }
        assert!(stream.outcome().is_some(), "what has ended has an outcome");
    }

    fn operate(&self, dice: &mut Dice) {
        let name = dice.name();
        match dice.below(3) {
            0 => drop(self.pool.load(name, &LoadOverride::default())),
            1 => drop(
                self.pool
                    .unload(name, Some(Duration::from_millis(dice.below(50)))),
            ),
            _ => {
                let killable = self.loader.killable.lock().expect("no panic inside");
                let alive: Vec<_> = killable.iter().filter_map(Weak::upgrade).collect();
                drop(killable);
                if !alive.is_empty() {
                    alive[dice.below(alive.len() as u64) as usize].die();
                }
            }
        }
        drop(self.pool.reports());
        drop(self.pool.metrics_text(""));
    }

    /// Ends of accepted requests as the scheduler counted them.
    fn n_counted(&self) -> u64 {
        let families = self.loader.metrics.registry().gather();
        let of = |family: &&MetricFamily| family.name() == "tinyloop_requests_total";
        let family = families.iter().find(of).expect("it is registered");
        let counts = family
            .get_metric()
            .iter()
            .map(|one| one.get_counter().get_value());
        counts.sum::<f64>() as u64
    }
}

/// (resident bytes, threads) of this process.
fn resident() -> (u64, usize) {
    let text = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    (kilobytes.expect("a number") << 10, tasks.count())
}

/// Names of the threads, when there are no more than `n_base`, or when there still are after 20 s: what a
/// scope or a join waits for is the end of a thread's work, and the system may list it a little longer.
fn threads_left(n_base: usize) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
        let names = tasks.flatten().filter_map(|task| {
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            Some(name.trim().to_owned())
        });
        let names: Vec<String> = names.collect();
        if names.len() <= n_base || Instant::now() > deadline {
            return names;
        }
        std::thread::yield_now();
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Does something again and again until the world ends.
fn repeat(end: &Receiver<()>, pause_us: u64, seed: u64, mut step: impl FnMut(&mut Dice)) {
    let mut dice = Dice(seed | 1);
    loop {
        step(&mut dice);
        let pause = Duration::from_micros(dice.below(pause_us + 1));
        if end.recv_timeout(pause) != Err(crossbeam_channel::RecvTimeoutError::Timeout) {
            return;
        }
    }
}

#[test]
fn every_request_ends_once_and_memory_returns_to_its_base() {
    tinyloop::heap::configure(); // as the binary does: freed blocks go back to the system
    let seconds = number("TINYLOOP_CHAOS_S").unwrap_or(15);
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let by_clock = clock.map_or(1, |now| now.as_nanos() as u64);
    let seed = number("TINYLOOP_CHAOS_SEED").unwrap_or(by_clock);
    eprintln!("TINYLOOP_CHAOS_SEED={seed}");
    let world = world();
    // What the allocator keeps after one of everything is the base.
    for name in NAMES {
        world
            .pool
            .acquire(name, &Patience::USUAL)
            .map(drop)
            .expect("each fits alone");
        world.unload_all(Duration::ZERO);
    }
    let (base_bytes, base_threads) = resident();
    let (world_ends, end) = bounded::<()>(0);
    let until = Instant::now() + Duration::from_secs(seconds);
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (world, end) = (&world, end.clone());
            scope.spawn(move || {
                repeat(&end, 500, seed ^ (client << 32), |dice| world.request(dice));
            });
        }
        let (world, end) = (&world, end.clone());
        scope.spawn(move || repeat(&end, 40_000, !seed, |dice| world.operate(dice)));
        let never = crossbeam_channel::never::<()>();
        let _ = never.recv_deadline(until);
        drop(world_ends);
    });
    world.unload_all(Duration::from_secs(5));
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let (accepted, done, failed) = (
        count(&world.n_accepted),
        count(&world.n_done),
        count(&world.n_failed),
    );
    let (n_loads, refused) = (count(&world.loader.n_loads), count(&world.n_refused));
    let left = threads_left(base_threads);
    let (bytes, threads) = resident();
    eprintln!(
        "{accepted} requests: {done} answered, {failed} ended otherwise; {refused} refused; \
         {n_loads} loads; resident {base_bytes} -> {bytes} bytes, threads {base_threads} -> {threads}"
    );
    assert_eq!(done + failed, accepted);
    assert_eq!(world.n_counted(), accepted, "each ended exactly once");
    assert!(done > 0 && failed > 0 && n_loads > 8, "nothing happened");
    assert!(
        left.len() <= base_threads,
        "a thread was left behind: {left:?}"
    );
    assert!(bytes <= base_bytes + SLACK_BYTES, "memory was left behind");
}
