//! tinyloop: an LLM inference server in one binary. This page is the map of the code.
//!
//! (being written)
pub mod backend;
pub mod cli;
pub mod clock;
pub mod config;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod format;
pub mod http;
pub mod model;
pub mod pool;
pub mod request;
pub mod runtime;
pub mod scheduler;
pub mod tokenizer;
