//! The connection layer of both planes: HTTP/1.1 on plain threads, for a hostile and slow network.
//!
//! ```text
//!  http-poll (one thread)                              http-worker-N, http-ops-N
//!  accepts, reads, frames, times out ── Lane (bounded) ─► handler(Request, Responder)
//!        ▲    watches hang-ups and writability               │ writes the response itself
//!        └──────────────── the connection comes home ◄───────┘
//! ```
//!
//! Reading order: `framing` (the grammar, pure) · `conn` and `turn` (a connection's states and what it does) · `poll` and `accept`
//! (the loop) · `response` (what a handler holds) · `link` (what both sides share) · `lane`, `budget`,
//! `net`, `head`, `refusal`, `config`, `stats`.
//!
//! A worker only ever sees a complete request, so slow or hostile peers cost bytes here, within limits,
//! and never a worker. What it is not: no TLS (a reverse proxy's work), no HTTP/2, no routing, no
//! request ids; those last two are the handler's.

mod accept;
mod budget;
mod config;
mod conn;
mod framing;
mod head;
mod lane;
mod link;
mod net;
mod poll;
mod refusal;
mod request;
mod response;
mod stats;
mod turn;

pub use config::WireConfig;
pub use refusal::Refusal;
pub use request::Request;
pub use response::{EventWriter, Hangup, Responder};
pub use stats::{REJECT_STATUSES, WireStats};

use budget::{Budget, Charge};
use conn::Context;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use lane::Lane;
use link::Home;
use net::Listener;
use parking_lot::Mutex;
use poll::Poller;
use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Workers whose connection was cut get this long to notice before they are left behind.
const WORKER_GRACE: Duration = Duration::from_secs(2);

/// The routes behind the connection layer.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request on a worker thread. A panic is a 500 for this request alone. What waits for
    /// something should first set [`Responder::on_hangup`] to cancel it.
    fn handle(&self, request: Request, responder: Responder);

    /// Does this path go to the small worker set that is never busy with inference? Runs on the poll
    /// thread: must not block.
    fn is_ops(&self, path: &str) -> bool;

    /// Headers and body of an answer that the wire gives by itself; framing headers, `Date` and
    /// `Retry-After` are added. May run on the poll thread: must not block.
    fn refuse(&self, refusal: &Refusal<'_>) -> (Vec<(String, String)>, Vec<u8>);
}

/// A complete request on its way to a worker.
struct Job {
    request: Request,
    responder: Responder,
    charge: Charge,
}

/// A running connection layer. Dropping it shuts it down without a drain.
pub struct WireServer {
    home: Arc<Home>,
    addresses: Vec<String>,
    /// Taken by the first shutdown; a second one waits for the first at this lock.
    threads: Mutex<Option<Threads>>,
}

struct Threads {
    poll: JoinHandle<()>,
    workers: Vec<JoinHandle<()>>,
    /// Disconnected when the last worker has ended.
    workers_alive: Receiver<Infallible>,
}

impl WireServer {
    /// Binds all listeners and starts the threads. The connection cap is lowered to what the process may open.
    ///
    /// # Errors
    /// An address that can't be bound (named in the error), or no thread or descriptor to be had.
    pub fn start(config: WireConfig, handler: Arc<dyn Handler>) -> io::Result<WireServer> {
        let config = with_connection_cap(config);
        let poll = mio::Poll::new()?;
        let mut listeners = Vec::new();
        for spec in &config.listen {
            let mut listener = Listener::bind(spec)?;
            listener.register(poll.registry(), mio::Token(listeners.len()))?;
            listeners.push(listener);
        }
        let addresses = listeners
            .iter()
            .map(Listener::local_address)
            .collect::<io::Result<Vec<_>>>()?;
        let (sender, returns) = crossbeam_channel::unbounded(); // at most one message per open connection
        let waker = mio::Waker::new(poll.registry(), poll::WAKE)?;
        let home = Arc::new(Home::new(config, handler, sender, waker));
        home.stats
            .max_connections
            .store(home.config.max_connections as u64, Relaxed);
        let context = context(&home);
        let lanes = (context.work.clone(), context.ops.clone());
        let poller = Poller::new(poll, listeners, context, returns);
        match spawn_threads(&home, poller, &lanes) {
            Ok(threads) => Ok(WireServer {
                home,
                addresses,
                threads: Mutex::new(Some(threads)),
            }),
            Err(error) => {
                drop((lanes.0.close(), lanes.1.close())); // the workers that did start end
                Err(error)
            }
        }
    }

    /// What is listened on, in the notation of [`WireConfig::listen`], with real ports.
    #[must_use]
    pub fn local_addrs(&self) -> &[String] {
        &self.addresses
    }

    /// Its limits; the connection cap is the one in force.
    #[must_use]
    pub fn config(&self) -> &WireConfig {
        &self.home.config
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> &WireStats {
        &self.home.stats
    }

    /// Whole seconds, 1..=30, after which a client that is refused now should come again, by the rate
    /// at which the workers got done lately.
    #[must_use]
    pub fn retry_after_s(&self) -> u32 {
        self.home.retry_after_s(Instant::now())
    }

    /// Begins what `shutdown` does and returns at once: from now on every answer closes.
    pub fn begin_drain(&self, drain: Duration) {
        self.home.close(drain);
    }

    /// Refuses new requests with 503 and `Connection: close` (those of the ops set are still answered),
    /// also what waits for a worker; lets running requests finish for `drain`, then cuts the rest (their
    /// hang-up hooks run and their writes fail). The port stays open until nothing runs any more.
    /// Returns when the threads have ended; a handler that does not react within 2 s of the cut is left
    /// behind with a warning. May be called again, also meanwhile from another thread to shorten the
    /// drain.
    pub fn shutdown(&self, drain: Duration) {
        self.home.close(drain);
        let mut slot = self.threads.lock();
        let Some(threads) = slot.take() else { return };
        if threads.poll.join().is_err() {
            tracing::error!("the HTTP poll thread ended by a panic");
        }
        let deadline = Instant::now() + WORKER_GRACE;
        match threads.workers_alive.recv_deadline(deadline) {
            Err(RecvTimeoutError::Disconnected) => {
                for worker in threads.workers {
                    let _ = worker.join(); // a worker's panics are caught inside
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!(
                    "a handler does not end although its connection was cut; leaving it behind"
                );
            }
            Ok(never) => match never {},
        }
    }
}

impl Drop for WireServer {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}

fn with_connection_cap(config: WireConfig) -> WireConfig {
    let descriptors = config::descriptor_limit();
    let max_connections = config.connection_cap(descriptors);
    if max_connections < config.max_connections {
        let (wanted, descriptors) = (config.max_connections, descriptors.unwrap_or(0));
        tracing::warn!(
            wanted,
            max_connections,
            descriptors,
            "connection cap lowered: raise `ulimit -n` for more"
        );
    }
    WireConfig {
        max_connections,
        ..config
    }
}

fn context(home: &Arc<Home>) -> Context {
    let config = &home.config;
    let budget = Budget::new(
        home.stats.clone(),
        config.memory_budget_bytes,
        config.memory_budget_per_peer_bytes,
        config.max_connections_per_peer,
    );
    Context {
        home: home.clone(),
        work: Arc::new(Lane::new(config.queue)),
        ops: Arc::new(Lane::new(config.queue)),
        budget,
        scratch: vec![0; conn::SCRATCH_BYTES].into_boxed_slice(),
    }
}

fn spawn_threads(
    home: &Arc<Home>,
    poller: Poller,
    lanes: &(Arc<Lane<Job>>, Arc<Lane<Job>>),
) -> io::Result<Threads> {
    let (alive, workers_alive) = crossbeam_channel::bounded(0);
    let prefix = home.config.thread_prefix;
    let mut workers = Vec::new();
    let sets = [
        ("worker", home.config.workers, &lanes.0),
        ("ops", home.config.ops_workers, &lanes.1),
    ];
    for (name, count, lane) in sets {
        for i in 0..count.max(1) {
            let (lane, home, alive) = (lane.clone(), home.clone(), alive.clone());
            let builder = std::thread::Builder::new().name(format!("{prefix}-{name}-{i}"));
            let is_ops = name == "ops";
            workers.push(builder.spawn(move || work(&lane, &home, is_ops, alive))?);
        }
    }
    let builder = std::thread::Builder::new().name(format!("{prefix}-poll"));
    let poll = builder.spawn(move || poller.run())?;
    Ok(Threads {
        poll,
        workers,
        workers_alive,
    })
}

/// A worker's life.
fn work(lane: &Lane<Job>, home: &Home, is_ops: bool, alive: Sender<Infallible>) {
    let stats = &home.stats;
    while let Some(Job {
        request,
        responder,
        charge,
    }) = lane.pop()
    {
        stats.queued.fetch_sub(1, Relaxed);
        stats.busy_workers.fetch_add(1, Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(|| home.handler.handle(request, responder)));
        drop(charge);
        stats.busy_workers.fetch_sub(1, Relaxed);
        if !is_ops {
            home.worked(Instant::now());
        }
        if outcome.is_err() {
            stats.panics.fetch_add(1, Relaxed);
            tracing::error!("a request handler panicked; its client got a 500 or a cut stream");
        }
    }
    drop(alive);
}
