//! One quantum after another. (body: being written)

use super::limits::EngineLimits;
use super::stats::EngineStats;
use super::{EngineError, EngineParts};
use crate::backend::{BackendError, MemoryUse};
use crate::request::{Job, RequestError, RequestId};
use std::sync::Arc;

/// The engine. Owned by one thread; `step` may also be driven by hand.
pub struct Engine {
    limits: EngineLimits,
    stats: Arc<EngineStats>,
    parts: EngineParts,
}

impl Engine {
    /// Allocates the backend's state.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn new(parts: EngineParts) -> Result<Self, EngineError> {
        let limits = EngineLimits::new(&parts.config, &parts.model.spec, &parts.model.plan)?;
        Ok(Self {
            limits,
            stats: Arc::new(EngineStats::new()),
            parts,
        })
    }
    /// Sizes.
    #[must_use]
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }
    /// Figures.
    #[must_use]
    pub fn stats(&self) -> Arc<EngineStats> {
        Arc::clone(&self.stats)
    }
    /// Kernels.
    #[must_use]
    pub fn backend_name(&self) -> String {
        self.parts.backend.name()
    }
    /// Bytes held.
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.parts.backend.memory()
    }
    /// Whether no sequence waits or runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        true
    }
    /// Called before waiting for commands.
    pub fn rest(&mut self) {
        self.stats.idle();
    }
    /// Takes a job.
    pub fn submit(&mut self, _job: Job) {
        unimplemented!("being written")
    }
    /// Ends a job.
    pub fn cancel(&mut self, _id: RequestId) {}
    /// Fails everything.
    pub fn fail_all(&mut self, _error: &RequestError) {}
    /// One quantum.
    ///
    /// # Errors
    /// When the device failed.
    pub fn step(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}
