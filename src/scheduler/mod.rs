//! The request scheduler: which request runs when, on which replica, and how it ends.
//!
//! Read in this order: `executor` (the library API: one per public model), `admission` (pure: may
//! it enter; `refusal`: why not; `estimate`: from which measurements), `queue` (who is next; the one
//! lock), `driver` (the thread that dispatches and completes), `dispatch` and `replica` (pure: who
//! gets or gives up a slot, and where), `health`, `roster`, `fleet` and `recovery` (replicas that die and
//! come back), `adaptive` (pure: how many jobs a replica should hold), `sink` (what a runtime reports through), `mailbox` and
//! `ticket` (what the caller holds), `lifecycle` and `record` (the state of one request),
//! `prefix_pool` and `prefixes` (prompts that stay computed), `snapshot` and `metrics` (what is
//! shown).
//!
//! ```text
//!  caller ── submit ─► admission ─► queue ─► driver ─► replica ─► Runtime::submit(job)
//!    ▲                                         ▲                         │
//!    │            outcome                      │ ended                   ▼
//!    └─ Ticket / TokenStream ◄─────────────────┴────── tokens ─────── JobSink
//! ```
//!
//! Threads: callers submit and make text; one `driver-MODEL` thread moves requests; runtimes call
//! sinks on their own threads. Tokens never pass through the driver; ends always do.
//!
//! Invariants: a slot counts as used from dispatch until the *runtime* says that the job ended (or
//! was told to park it), so `in_flight` is honest even after a cancel; every accepted request
//! reaches exactly one final state and its waiter learns it; a request that gave a token never runs twice;
//! dropping a ticket or a stream cancels.
//! What is not here: tokens of a quantum (`engine/batch`), HTTP, loading models (`pool`).

pub mod adaptive;
pub mod admission;
mod counted;
pub(crate) mod dispatch;
pub(crate) mod driver;
pub mod estimate;
pub mod executor;
mod features;
pub(crate) mod fleet;
pub mod health;
pub mod lifecycle;
pub(crate) mod mailbox;
pub mod metrics;
pub mod prefix_pool;
pub mod prefixes;
pub(crate) mod queue;
pub(crate) mod record;
pub(crate) mod recovery;
pub mod refusal;
pub mod replica;
pub(crate) mod roster;
pub(crate) mod row_histogram;
pub(crate) mod sink;
pub mod snapshot;
pub mod ticket;

pub use admission::Loops;
pub use executor::{Executor, ExecutorContext};
pub use health::Health;
pub use lifecycle::{Lifecycle, Stamp, Stamps};
pub use metrics::Metrics;
pub use prefix_pool::{NewPrefix, PrefixInfo, PrefixPoolStats};
pub use prefixes::{PrefixError, PrefixRegistration};
pub use queue::Share;
pub use record::SubmitOptions;
pub use refusal::{Objective, SubmitError};
pub use snapshot::{ReplicaSnapshot, RequestInfo, Snapshot};
pub use ticket::{
    CancelHandle, GenerationChunk, GenerationResult, Outcome, Progress, StreamEvent, Ticket,
    TokenStream,
};
