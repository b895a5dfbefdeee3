//! What a model file means: architecture table, spec, plan, weights, forward. (stub: being written)
//!
//! Runs on the engine thread (forward) and on a loader thread (load). No KV allocation, no sampling.
pub mod forward;
pub mod plan;
pub mod spec;
pub mod weights;

pub use plan::Plan;
pub use spec::ModelSpec;

use crate::backend::{Backend, BackendError};
use crate::format::{FormatError, Gguf};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is broken or lacks something.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The backend refuses a tensor.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// An architecture we do not know; the text lists the known ones.
    #[error("{0}")]
    Unknown(String),
}

/// A loaded model: what it is, how its segments run, and the ids of its weights in a backend.
pub struct Model {
    /// Sizes and switches.
    pub spec: ModelSpec,
    /// Segments and virtual layers.
    pub plan: Plan,
    /// Ids in the backend that loaded it.
    pub weights: weights::ModelWeights,
}

/// Progress of a load: bytes done of total.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl Model {
    /// Reads spec and weights; each tensor is handed to the backend once.
    pub fn load(
        _file: &Gguf,
        _backend: &mut dyn Backend,
        _progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        unimplemented!()
    }
}
