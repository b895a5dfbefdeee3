//! Which runtime serves a model that another program runs: from its configuration to replicas.
//!
//! One factory per model; the pool loads with it, and the scheduler makes lost replicas anew with it. What
//! is not here: how each is made.

use super::{ReplicaFactory, Runtime, llama_server, openai_remote, vllm_serve};
use crate::config::ModelSource;
use std::sync::Arc;

/// Asked by a replica that waits for its start: true = nobody wants it any more.
pub type GiveUp = Arc<dyn Fn() -> bool + Send + Sync>;

/// Makes a replica whose server does not answer yet, for the reason given: a circuit that is open from the
/// start. None where that makes no sense: what we start ourselves is there or is not.
pub type AbsentFactory = Arc<dyn Fn(usize, &str) -> Option<Arc<dyn Runtime>> + Send + Sync>;

/// Of the model `name`; see the type.
#[must_use]
pub fn absent(name: &str, source: &ModelSource) -> Option<AbsentFactory> {
    let ModelSource::OpenaiRemote(config) = source.clone() else {
        return None;
    };
    let name = name.to_owned();
    Some(Arc::new(move |index, why| {
        let runtime = openai_remote::absent(&name, &config, index, why).ok()?;
        Some(Arc::new(runtime) as Arc<dyn Runtime>)
    }))
}

/// Makes replicas of the model `name`; None where our own process runs it.
#[must_use]
pub fn factory(name: &str, source: &ModelSource, give_up: GiveUp) -> Option<ReplicaFactory> {
    let name = name.to_owned();
    let boxed = |runtime| Arc::new(runtime) as Arc<dyn Runtime>;
    Some(match source.clone() {
        ModelSource::File(_) | ModelSource::Fake(_) => return None,
        ModelSource::OpenaiRemote(config) => {
            Arc::new(move |index| openai_remote::open(&name, &config, index).map(boxed))
        }
        ModelSource::LlamaServer(config) => Arc::new(move |index| {
            llama_server::start_until(&name, &config, index, &*give_up).map(boxed)
        }),
        ModelSource::VllmServe(config) => Arc::new(move |index| {
            vllm_serve::start_until(&name, &config, index, &*give_up).map(boxed)
        }),
    })
}
