//! Dequantization of every stored type, plain and slow. (stub: being written)
use crate::dtype::DType;

/// Dequantizes whole blocks: `bytes.len() / block_bytes * block_len == out.len()`.
pub fn dequantize(_dtype: DType, _bytes: &[u8], _out: &mut [f32]) {
    unimplemented!("format helper")
}
