//! # tinyloop: the map of the code
//!
//! An LLM inference server in one binary: plain threads, no async runtime. A scheduler stands
//! between HTTP and every model; depth (how often a looped model runs its core) is one of the
//! resources it schedules. Start here, then read the modules in the order in which they are
//! declared below: it is the order in which a request meets them, not the alphabet.
//!
//! ## The life of a request
//!
//! 1. The **poll thread** (`http/wire/poll`) accepts the connection, frames the bytes strictly
//!    and puts the *complete* request on a bounded queue.
//! 2. An **HTTP worker** (`http/openai`) parses the JSON, renders the chat template, tokenizes
//!    (`tokenizer`) and builds one [`request::GenerationRequest`].
//! 3. It submits to the model's [`scheduler::Executor`] (found in the `pool`): `admission`
//!    decides, purely, whether the request is queued or refused with a reason.
//! 4. Whoever has the executor's turn (`scheduler/driver`: that worker, or the **driver thread**)
//!    hands the job to the replica with the fewest jobs in flight, through the [`runtime::Runtime`] trait.
//! 5. The replica's **engine thread** (`engine/step`) turns it into a sequence. Each *quantum*
//!    takes commands, asks `engine/batch` which rows run, asks `model/forward` for one pass of one
//!    segment over them, samples (within what a grammar allows, where there is one), commits. Several
//!    engines on one device take turns (`engine/arbiter`).
//! 6. `model/forward` calls the operations of a [`backend::Backend`]: `reference` (the scalar
//!    oracle), `cpu` (worker threads, AVX2 or AVX-512) or `cuda` (kernels of a GPU).
//! 7. Each token goes through a channel straight back to the HTTP worker that waits; there it
//!    becomes text (`tokenizer::TextStream`), one SSE event, one chunk, one flush.
//! 8. The end (or a cancel, a hang-up, a fault) goes to the driver as well, which counts it and
//!    dispatches the next job.
//!
//! ## Layers
//!
//! A file uses only lower ranks; `tests/tidy.rs` fails otherwise.
//!
//! | rank | where | what |
//! |---|---|---|
//! | 80 | `server`, `cli` | wiring and subcommands: build the pool and HTTP, own the threads, stop them in reverse order |
//! | 70 | `http` | `wire` (connections), `openai`, `responses`, `anthropic`, `native`, `ops`, `management` with `admin`; one table from error to status |
//! | 60 | `pool` | the public models: their states, how they are loaded and unloaded, bytes per device |
//! | 50 | `scheduler` | executor, lifecycle, queue, admission (pure), driver, replica choice (pure), metrics |
//! | 40 | `runtime` | the `Runtime` trait; `native` (our engine), `openai_remote`, `llama_server`, `vllm_serve` on the shared `upstream` and `child`, `fake` (scripted, for tests) |
//! | 30 | `engine` | step loop, batch (pure), sequences, paged KV with prefix reuse, sampler, grammars' token sets, turns of several engines on one device |
//! | 20 | `model`, `tokenizer`, `chat` | architecture table, Hugging Face layout, plan (the only file that knows loops), weights, forward; text, templates and grammars; reasoning and tool calls in what a model writes |
//! | 10 | `format`, `backend` | GGUF, safetensors; the operations of a step and their kernels |
//! | 0 | `request`, `constraint`, `error`, `dtype`, `clock`, `rate`, `heap`, `config` | words that cross threads, every limit |
//!
//! ## Threads
//!
//! | name | how many | owns |
//! |---|---|---|
//! | `main` | 1 | start, signals, stop in reverse order |
//! | `loader` | 1, while the server starts | nothing: it asks the pool for the enabled models and waits |
//! | `load-MODEL` | `pool.load_threads`, while models load | nothing: it makes a model and gives it to the pool |
//! | `unload-MODEL` | 1 per model that is being unloaded | the model, until nobody else holds it |
//! | `pool-reaper` | 1, when a model has `idle_unload_s` | nothing: it looks for idle models |
//! | `http-poll` | 1 | the data plane's listeners and every connection no worker is using |
//! | `http-worker-N` | `http_workers` | one request at a time; a stream holds its worker |
//! | `http-ops-N` | 2 | `/health`, `/ready`, `/metrics`, list and cancel, so that they answer when all workers are busy |
//! | `management-poll`, `management-worker-N`, `management-ops-N` | 1, 16, 2 | the management plane (loopback): as the three above |
//! | `driver-MODEL` | 1 per model | dispatch and completion of that model's queue |
//! | `rebuild-MODEL-N` | 1 per lost replica, while it is made anew | nothing: it ends the old runtime and puts a new one in its place |
//! | `engine-MODEL` | 1 per native replica | backend, KV pool, sequences |
//! | `upstream-MODEL-N-I` | at most one per job a server is given | one call to another server at a time |
//! | `child-MODEL-N`, `guard-MODEL-N`, `log-MODEL-N` | 1 each per child process | waiting for its end and for that of its guard; reading what it prints |
//! | `grammar` | 1 per grammar that is being compiled | nothing: it has the stack for that, and an HTTP worker waits for it |
//! | `mask-N` | 2 per engine, from its first grammar on | a constraint, while they find what it allows next |
//! | `cpu-N` | `threads - 1` per CPU backend | nothing: they compute what the engine thread asks |
//!
//! ## Invariants worth knowing
//!
//! * The engine sees tokens, never text; HTTP sees `pool` handles, never an engine.
//! * A row's arithmetic depends on its own sequence only, so a batch, a chunked prompt, a prefix
//!   hit and a preemption give bit-identical tokens on the CPU.
//! * Every queue, body, wait and thread count has a limit with a field in `config`.
//! * Terminal states always reach the waiter; dropping a ticket or a stream cancels.

pub mod request;

pub mod cli;
pub mod server;

pub mod http;
pub mod pool;
pub mod scheduler;

pub mod runtime;

pub mod engine;

pub mod chat;
pub mod model;
pub mod tokenizer;

pub mod backend;
pub mod format;

pub mod clock;
pub mod config;
pub mod constraint;
pub mod dtype;
pub mod error;
pub mod heap;
pub mod rate;
