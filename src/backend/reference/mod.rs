//! The scalar oracle: every operation in plain f32 loops. (stub: being written)
pub mod dequant;
