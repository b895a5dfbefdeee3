//! What a model file means: architecture table, spec, plan, weights, forward.
//!
//! Runs on the engine thread (forward) and on a loader thread (load). A model is immutable once
//! loaded. What is not here: KV allocation and sampling (`engine`), arithmetic (`backend`).
//!
//! ```text
//! GGUF file ───────────────────────────────┐
//! Hugging Face directory ─► huggingface ───┴► ModelFile ─► spec (through architectures, rope,
//!     loop_spec) ─► plan ─► weights (names table, checks, requantize) ─► Model
//! Model + Pass ─► forward::run_pass ─► logits
//! ```

pub mod architectures;
pub mod builtin;
pub mod exit;
pub mod forward;
mod huggingface;
pub mod loop_spec;
pub mod plan;
pub mod requantize;
pub mod rope;
pub mod spec;
#[doc(hidden)]
pub mod testing;
pub mod weights;

pub use exit::ExitRules;
pub use plan::{Plan, Segment, Stage};
pub use spec::{DeclaredPooling, ModelSpec};

use crate::backend::{Backend, BackendError, StateGeometry};
use crate::config::{BUILTIN_MODEL, LoopsConfig};
use crate::dtype::DType;
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

/// Opens a GGUF file, a directory in Hugging Face layout, or the model inside the program
/// ([`BUILTIN_MODEL`]).
pub fn open(path: &std::path::Path) -> Result<ModelFile, ModelError> {
    if path == std::path::Path::new(BUILTIN_MODEL) {
        Ok(builtin::open()?)
    } else if path.is_dir() {
        huggingface::open(path)
    } else {
        Ok(ModelFile::open_gguf(path)?)
    }
}

/// What a configuration changes about a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Depth.
    pub loops: LoopsConfig,
    /// Type that float weights are converted to.
    pub quantize: Option<DType>,
}

/// Progress of a load: bytes done of total.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl Model {
    /// Reads spec and weights as the file has them; each tensor is handed to the backend once.
    pub fn load(
        file: &ModelFile,
        backend: &mut dyn Backend,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        Self::load_with(file, &LoadOptions::default(), backend, progress)
    }

    /// The same with changes.
    pub fn load_with(
        file: &ModelFile,
        options: &LoadOptions,
        backend: &mut dyn Backend,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        let mut spec = ModelSpec::from_gguf(file)?;
        spec.loops.configure(&options.loops, spec.n_layers)?;
        let plan = spec.plan();
        let source: &dyn weights::TensorSource = match options.quantize {
            None => file,
            Some(wanted) => &weights::Requantized { file, wanted },
        };
        let weights = weights::ModelWeights::load(&spec, &plan, source, backend, progress)?;
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
