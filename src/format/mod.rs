//! Containers of weights: GGUF and safetensors. Validated before use.
//!
//! No thread. `unsafe` only for the memory map. What is not here: what tensors mean (`model`),
//! arithmetic on them (`backend`), vocabularies (`tokenizer`).

mod bytes;
pub mod gguf;
pub mod model_file;
pub mod safetensors;

use gguf::shown;
pub use gguf::{MetaValue, TensorInfo, View};
pub use model_file::ModelFile;
pub use safetensors::Safetensors;

/// What is wrong with a file, naming the key or tensor.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// It could not be opened, sized or mapped.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The operating system's word.
        source: std::io::Error,
    },
    /// It is not a valid file of its kind.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file.
        path: String,
        /// What is wrong, where, and what would be right.
        reason: String,
    },
}
