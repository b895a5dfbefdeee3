//! GGUF v2 and v3: validated against the file's length before anything is touched.
//!
//! Reading is pure: bytes in, metadata and tensor table out (`header.rs` has the layout). `writer.rs`
//! is the way back. What is not here: the file itself (`bytes.rs`), typed access (`model_file.rs`).

mod header;
mod meta;
mod reader;
mod tensor_info;
pub mod writer;

pub(super) use header::read_header;
pub use meta::MetaValue;
pub(super) use reader::shown;
pub use tensor_info::{TensorInfo, View};
