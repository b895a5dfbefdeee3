//! What a model file means: architecture table, spec, plan, weights, forward.
//!
//! Runs on the engine thread (forward) and on a loader thread (load). A model is immutable once
//! loaded. What is not here: KV allocation and sampling (`engine`), arithmetic (`backend`).
//!
//! ```text
//! ModelFile ─► spec (through architectures, rope) ─► plan ─► weights (names table, checks) ─► Model
//! Model + Pass ─► forward::run_pass ─► logits
//! ```

pub mod architectures;
pub mod forward;
mod huggingface;
pub mod loop_spec;
pub mod plan;
pub mod rope;
pub mod spec;
#[doc(hidden)]
pub mod testing;
pub mod weights;

pub use plan::{Plan, Segment, Stage};
pub use spec::ModelSpec;

use crate::backend::{Backend, BackendError, StateGeometry};
use crate::format::{FormatError, ModelFile};

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
    /// A known architecture with a feature we do not compute; the text names the key or tensor.
    #[error("{0}")]
    Unsupported(String),
}

/// A loaded model: what it is, how its segments run, and the ids of its weights in a backend.
#[derive(Clone, Debug)]
pub struct Model {
    /// Sizes and switches.
    pub spec: ModelSpec,
    /// Segments and virtual layers.
    pub plan: Plan,
    /// Ids in the backend that loaded it.
    pub weights: weights::ModelWeights,
}

/// Opens a GGUF file, or a directory in Hugging Face layout.
pub fn open(path: &std::path::Path) -> Result<ModelFile, ModelError> {
    if path.is_dir() {
        huggingface::open(path)
    } else {
        Ok(ModelFile::open_gguf(path)?)
    }
}

/// Progress of a load: bytes done of total.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl Model {
    /// Reads spec and weights; each tensor is handed to the backend once.
    pub fn load(
        file: &ModelFile,
        backend: &mut dyn Backend,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        let spec = ModelSpec::from_gguf(file)?;
        let plan = spec.loops.plan(spec.n_layers);
        let weights = weights::ModelWeights::load(&spec, &plan, file, backend, progress)?;
        Ok(Self {
            spec,
            plan,
            weights,
        })
    }

    /// The state a backend must allocate for this model. `max_context` is in tokens.
    #[must_use]
    pub fn geometry(
        &self,
        max_rows: usize,
        n_slots: usize,
        n_pages: usize,
        max_context: usize,
    ) -> StateGeometry {
        StateGeometry {
            max_rows,
            n_slots,
            d_model: self.spec.d_model as usize,
            n_heads: self.spec.n_heads as usize,
            n_kv_heads: self.spec.n_kv_heads as usize,
            head_dim: self.spec.head_dim as usize,
            d_ff: self.spec.d_ff as usize,
            vocab_size: self.spec.vocab_size as usize,
            layers_per_page: self.plan.layers_per_page(),
            n_pages,
            max_context,
            keeps_input: self.weights.loops.inject.is_some(),
        }
    }
}
