//! Both HTTP planes. (stub: being written)
pub mod wire;
