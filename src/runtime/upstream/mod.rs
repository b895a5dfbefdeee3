//! Runtimes that forward: a synchronous OpenAI client, shared by remote servers and child processes.
//!
//! [`UpstreamRuntime`] is the adapter to the scheduler; everything else in this folder is what it is
//! made of, from the bytes up: `sse` and `wire` (pure), `verdict` (pure), `client`, `call`, `pool`.
//! The server behind it has its own tokenizer, KV memory and batching, so nothing is parked, pinned or
//! counted here, and a prompt is text. What is not here: which server that is (`openai_remote`,
//! `llama_server`, `vllm_serve`).

pub mod call;
pub mod client;
pub mod pool;
pub mod sse;
pub mod verdict;
pub mod wire;

use super::child::Child;
use super::{Capability, Features, Runtime, RuntimeStatus};
use crate::config::Embeddings;
use crate::request::{Job, RequestId};
use crate::tokenizer::Tokenizer;
use parking_lot::Mutex;
use pool::Upstream;
use std::sync::Arc;

/// What a server can hold, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Jobs at once.
    pub max_inflight: u32,
    /// Longest prompt + completion in tokens; `u32::MAX` when unknown.
    pub context_length: u32,
}

/// One replica that forwards its jobs to another server.
pub struct UpstreamRuntime {
    upstream: Upstream,
    room: Room,
    features: Features,
    asks_consent: bool,
    /// Taken by `shutdown`, which stops it.
    child: Mutex<Option<Child>>,
}

impl UpstreamRuntime {
    /// Forwards to a server that somebody else runs.
    #[must_use]
    pub fn remote(upstream: Upstream, room: Room, asks_consent: bool) -> Self {
        Self {
            upstream,
            room,
            features: Features::upstream(),
            asks_consent,
            child: Mutex::new(None),
        }
    }

    /// Forwards to a server that does not answer yet: dead from the start, so that whoever runs it makes
    /// it anew as soon as that works.
    #[must_use]
    pub fn absent(upstream: Upstream, room: Room, asks_consent: bool, why: &str) -> Self {
        upstream.death_handle().die(why);
        Self::remote(upstream, room, asks_consent)
    }

    /// Forwards to a process of ours, and dies with it.
    #[must_use]
    pub fn of_child(upstream: Upstream, room: Room, child: Child) -> Self {
        let death = upstream.death_handle();
        child.on_exit(move |why| death.die(why));
        Self {
            child: Mutex::new(Some(child)),
            ..Self::remote(upstream, room, false)
        }
    }

    /// The same with what its model makes.
    #[must_use]
    pub fn making(self, embeddings: Embeddings) -> Self {
        Self {
            features: Features::upstream_with(embeddings),
            ..self
        }
    }

    /// Process id of the child, where there is one that runs.
    #[must_use]
    pub fn child_pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::pid)
    }
}

impl Runtime for UpstreamRuntime {
    fn capability(&self) -> Capability {
        Capability {
            max_inflight: self.room.max_inflight,
            context_length: self.room.context_length,
            kv_capacity_tokens: u64::MAX,
            can_cancel: true,
            can_park: false,
        }
    }

    fn capabilities(&self) -> Features {
        self.features
    }

    fn asks_consent(&self) -> bool {
        self.asks_consent
    }

    fn submit(&self, job: Job) {
        self.upstream.submit(job);
    }

    fn cancel(&self, id: RequestId) {
        self.upstream.cancel(id);
    }

    fn park(&self, _: RequestId) {}

    fn resume(&self, _: RequestId) {}

    fn status(&self) -> RuntimeStatus {
        let now = self.upstream.status();
        RuntimeStatus {
            alive: now.alive,
            running: now.running,
            waiting: now.waiting,
            ..RuntimeStatus::default()
        }
    }

    fn death(&self) -> Option<String> {
        self.upstream.death()
    }

    fn resident_bytes(&self) -> Option<u64> {
        self.child.lock().as_ref().and_then(Child::resident_bytes)
    }

    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        None
    }

    fn shutdown(&self) {
        self.upstream.stop();
        let child = self.child.lock().take();
        if let Some(child) = child {
            child.stop();
        }
    }
}
