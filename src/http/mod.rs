//! Both HTTP planes. (being written)
pub mod errors;
pub mod openai;
pub mod wire;
