//! The model inside the program: a small looped one, so that a server starts without any download.
//!
//! Immutable bytes of the program. How it was made stands in `training/README.md`. What is not here:
//! when it is served (`cli::serve`), what it computes (`model`, like any other file).

use crate::format::{FormatError, ModelFile};

/// The id that clients send for it, and its file in `assets/`.
pub const NAME: &str = "tinyloop-3m";

static FILE: &[u8] = include_bytes!("../../assets/tinyloop-3m.gguf");

/// Opens it. An error means that the committed file is broken.
pub fn open() -> Result<ModelFile, FormatError> {
    ModelFile::from_embedded_gguf(crate::config::BUILTIN_MODEL, FILE)
}
