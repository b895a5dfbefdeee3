//! The in-process engine: a step loop over sequences. It sees tokens, never text.
//!
//! One *engine thread* per replica owns everything that changes here: the backend, the KV pool,
//! the hidden-state slots and all sequences. Others hold an [`EngineHandle`] and send one closed
//! [`Command`]; answers go through each job's sink, figures through [`stats::EngineStats`].
//!
//! ```text
//! Command ─► intake ─► admit ─► batch::plan ─► forward (blocks, exits, logits) ─► commit ─► sinks
//!            (blocks only when idle)           one segment, many rows            sampler
//! ```
//!
//! * `step`      the [`Engine`]: one quantum after another, callable without a thread (tests do).
//! * `batch`     pure: which rows run in this quantum, or who must give up pages.
//! * `sequence`  counters of one generation; there is no prefill phase and no decode phase.
//! * `kv`        the paged pool: blocks, reference counts, prefix reuse, eviction.
//! * `pooled`    the embedding of a sequence that asks for one.
//! * `sampler`   pure over one row of logits; `cuts`, `mirostat` and `dry` are what few requests ask for.
//! * `arbiter`   engines that share a device take turns at quantum boundaries (`fair_queue`: whose).
//! * `cost`      pure: what passes cost, from the times they took.
//! * `limits`    sizes, worked out once at load, and what they refuse.
//! * `stats`     what others may read while the engine runs.
//!
//! ```text
//! thread:  Running ─ step returns an error or panics ─► Faulted ─ Shutdown ─► ended
//!             └───────────────── Shutdown, or every handle dropped ──────────────▲
//! ```
//!
//! **A fault is contained.** A panic or a device error inside a step fails the jobs of this replica
//! and turns `alive` off; the thread stays to refuse what still arrives, and the process lives.
//!
//! What is not here: priorities, queue limits and admission by objectives (`scheduler`), text and
//! stop strings (consumer side), the order of the maths (`model::forward`).

pub mod arbiter;
pub mod batch;
pub mod cost;
mod cuts;
mod dry;
pub mod fair_queue;
pub mod kv;
pub mod limits;
mod logits;
mod masks;
mod mirostat;
mod pooled;
pub mod sampler;
pub mod sequence;
pub mod stats;
pub mod step;

pub use limits::EngineLimits;
pub use step::Engine;

use crate::backend::{Backend, BackendError};
use crate::config::EngineConfig;
use crate::model::Model;
use crate::request::{
    GenerationEvent, Job, PinError, Prefix, PrefixId, RequestError, RequestId, TokenId,
};
use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use stats::EngineStats;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

/// What an engine is built from. The backend has loaded the model and not yet allocated its state.
pub struct EngineParts {
    /// Holds the model's weights.
    pub backend: Box<dyn Backend>,
    /// The ids of its weights are this backend's.
    pub model: Model,
    /// Tokens that end a generation (EOS, end of turn, ..).
    pub end_tokens: Vec<TokenId>,
    /// Sizes asked for.
    pub config: EngineConfig,
}

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The configured sizes contradict each other or the model; the text has both numbers.
    #[error("{0}")]
    Config(String),
    /// The backend could not allocate its state.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The operating system refused a thread.
    #[error("the engine thread could not start: {0}")]
    Thread(std::io::Error),
}

/// Everything that others may ask of an engine thread.
#[derive(Debug)]
pub enum Command {
    /// Take a job; all answers go through its sink.
    Submit(Job),
    /// End a job within the current quantum. Unknown ids are ignored.
    Cancel(RequestId),
    /// Take a job out of the batch until `Resume`. Unknown ids are ignored.
    Park(RequestId),
    /// Let a parked job run again. Ids that are not parked are ignored.
    Resume(RequestId),
    /// Keep a prefix; the answer is the tokens kept.
    Pin(Prefix, Sender<Result<u32, PinError>>),
    /// Keep it no longer. Unknown ids are ignored.
    Unpin(PrefixId),
    /// Fail what is left with `ShuttingDown` and end the thread.
    Shutdown,
}

/// The other threads' end of an engine. Dropping it shuts the engine down and joins its thread.
pub struct EngineHandle {
    commands: Sender<Command>,
    limits: EngineLimits,
    stats: Arc<EngineStats>,
    backend_name: String,
    /// Taken by whoever shuts down first; guards nothing else.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl EngineHandle {
    /// Sizes the engine works with.
    #[must_use]
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// What it is doing; cheap.
    #[must_use]
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Which kernels run.
    #[must_use]
    pub fn backend_name(&self) -> &str {
        &self.backend_name
    }

    /// Hands a job over. Never blocks; all answers go through the job's sink.
    pub fn submit(&self, job: Job) {
        self.stats.job_sent();
        if let Err(refused) = self.commands.send(Command::Submit(job))
            && let Command::Submit(mut job) = refused.0
        {
            self.stats.job_taken();
            let gone = RequestError::ShuttingDown;
            let _ = job.sink.emit(GenerationEvent::Failed(gone));
        }
    }

    /// Asks a job to end.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has ended has no jobs left to cancel.
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// Asks a job to give up its place and its pages until [`Self::resume`].
    pub fn park(&self, id: RequestId) {
        // As for a cancel: an engine that has ended has nothing to park or resume.
        let _ = self.commands.send(Command::Park(id));
    }

    /// Lets a parked job run again.
    pub fn resume(&self, id: RequestId) {
        let _ = self.commands.send(Command::Resume(id));
    }

    /// Asks to keep a prefix. The answer is never waited for by the engine; a channel that closes
    /// without one means that the engine ended.
    pub fn pin(&self, prefix: Prefix, answer: Sender<Result<u32, PinError>>) {
        let _ = self.commands.send(Command::Pin(prefix, answer));
    }

    /// Asks to keep it no longer.
    pub fn unpin(&self, id: PrefixId) {
        let _ = self.commands.send(Command::Unpin(id));
    }

    /// Fails what is left and joins the thread. Idempotent.
    pub fn shutdown(&self) {
        let _ = self.commands.send(Command::Shutdown);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("an engine thread ended with a panic outside of its steps");
        }
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Engine {
    /// Allocates the state and starts the engine thread, named `engine-NAME`.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn spawn(parts: EngineParts, name: &str) -> Result<EngineHandle, EngineError> {
        Engine::new(parts)?.start(name)
    }

    /// The second half of [`Self::spawn`].
    ///
    /// # Errors
    /// `EngineError::Thread`.
    pub fn start(self, name: &str) -> Result<EngineHandle, EngineError> {
        let limits = *self.limits();
        let stats = self.stats();
        let backend_name = self.backend_name();
        // Unbounded in form only: an executor keeps at most `max_sequences` jobs in a replica and
        // sends at most one cancel and a bounded number of parks and resumes for each, one pin and
        // one unpin per prefix that an HTTP worker registers, plus one Shutdown. Submitters must
        // never block.
        let (commands, receiver) = unbounded();
        let thread = std::thread::Builder::new()
            .name(format!("engine-{name}"))
            .spawn(move || run(self, &receiver))
            .map_err(EngineError::Thread)?;
        Ok(EngineHandle {
            commands,
            limits,
            stats,
            backend_name,
            thread: Mutex::new(Some(thread)),
        })
    }
}

/// The engine thread.
fn run(mut engine: Engine, commands: &Receiver<Command>) {
    loop {
        let fault = match catch_unwind(AssertUnwindSafe(|| turn(&mut engine, commands))) {
            Ok(Ok(ControlFlow::Continue(()))) => continue,
            Ok(Ok(ControlFlow::Break(()))) => return end(engine, commands),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic_text(panic.as_ref()),
        };
        return refuse_all(engine, commands, fault);
    }
}

/// What is asked, then one quantum.
fn turn(
    engine: &mut Engine,
    commands: &Receiver<Command>,
) -> Result<ControlFlow<()>, BackendError> {
    if intake(engine, commands).is_break() {
        return Ok(ControlFlow::Break(()));
    }
    engine.step()?;
    Ok(ControlFlow::Continue(()))
}

/// Takes every command that is there; waits for one only when there is nothing else to do.
fn intake(engine: &mut Engine, commands: &Receiver<Command>) -> ControlFlow<()> {
    if engine.is_idle() {
        engine.rest();
        match commands.recv() {
            Ok(command) => obey(engine, command)?,
            Err(_) => return ControlFlow::Break(()),
        }
    }
    commands
        .try_iter()
        .try_for_each(|command| obey(engine, command))
}

fn obey(engine: &mut Engine, command: Command) -> ControlFlow<()> {
    match command {
        Command::Submit(job) => {
            engine.stats().job_taken();
            engine.submit(job);
        }
        Command::Cancel(id) => engine.cancel(id),
        Command::Park(id) => engine.park(id),
        Command::Resume(id) => engine.resume(id),
        Command::Pin(prefix, answer) => engine.pin(&prefix, answer),
        Command::Unpin(id) => engine.unpin(id),
        Command::Shutdown => return ControlFlow::Break(()),
    }
    ControlFlow::Continue(())
}

/// The end of a healthy engine: what it holds and what still arrived is told so.
fn end(mut engine: Engine, commands: &Receiver<Command>) {
    engine.fail_all(&RequestError::ShuttingDown);
    for command in commands.try_iter() {
        if let Command::Submit(mut job) = command {
            engine.stats().job_taken();
            let _ = job
                .sink
                .emit(GenerationEvent::Failed(RequestError::ShuttingDown));
        }
    }
}

/// The end of a replica that failed: its jobs fail, its memory is freed, later jobs are refused.
fn refuse_all(mut engine: Engine, commands: &Receiver<Command>, fault: String) {
    // Not louder: whoever runs the replica tells its loss, with this reason.
    tracing::debug!(fault, "the engine failed; its jobs are lost");
    let stats = engine.stats();
    stats.died(&fault);
    let error = RequestError::ReplicaLost(fault);
    // The state may be torn, so even failing the jobs or freeing the memory may panic again; a
    // sink that is dropped without a terminal event reports a fault by itself.
    let ended = catch_unwind(AssertUnwindSafe(|| engine.fail_all(&error)));
    let freed = catch_unwind(AssertUnwindSafe(move || drop(engine)));
    if ended.is_err() || freed.is_err() {
        tracing::error!("cleaning up after the fault panicked as well");
    }
    for command in commands {
        match command {
            Command::Submit(mut job) => {
                stats.job_taken();
                let _ = job.sink.emit(GenerationEvent::Failed(error.clone()));
            }
            // Dropping a pin closes its channel, which is its answer.
            Command::Cancel(_)
            | Command::Park(_)
            | Command::Resume(_)
            | Command::Pin(..)
            | Command::Unpin(_) => {}
            Command::Shutdown => return,
        }
    }
}

/// The message of a panic, as far as it has one.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    format!(
        "the engine panicked: {}",
        text.as_deref().unwrap_or("(no message)")
    )
}
