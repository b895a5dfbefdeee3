//! The step loop over sequences. (stub: being written)
//!
//! One engine thread owns the backend, the KV pool and all sequences; others send a `Command`.
//! It sees tokens, never text.
pub mod batch;
pub mod kv;
pub mod sampler;
pub mod sequence;
pub mod stats;
pub mod step;
