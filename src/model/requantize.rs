//! Which tensor gets which type when a model is quantized, at load or into a file.
//!
//! Pure. Matrices take the wanted type; vectors (norms, biases) stay f32. A row that the type's
//! blocks do not divide takes the next finer type that fits. Embedding and output take 8 bits where
//! 4 were asked: they are read row by row or decide between tokens, and 4 bits there cost more than
//! anywhere else.

use crate::config::QuantizeType;
use crate::dtype::DType;

/// The element type that a configuration's word stands for.
#[must_use]
pub fn dtype_of(kind: QuantizeType) -> DType {
    match kind {
        QuantizeType::F16 => DType::F16,
        QuantizeType::Q8_0 => DType::Q8_0,
        QuantizeType::Q4_0 => DType::Q4_0,
        QuantizeType::Q4_1 => DType::Q4_1,
        QuantizeType::Q4K => DType::Q4_K,
    }
}

/// The type of a tensor when `wanted` is asked for; None: it stays as it is.
#[must_use]
pub fn target(name: &str, dims: &[u64], stored: DType, wanted: DType) -> Option<DType> {
    let is_matrix = dims.len() == 2 && dims[1] > 1;
    // Small tables of encoders, which are added to the embeddings as they are.
    let is_added = matches!(name, "position_embd.weight" | "token_types.weight");
    if !is_matrix || is_added || name.ends_with(".bias") {
        return None;
    }
    let four_bits = matches!(wanted, DType::Q4_0 | DType::Q4_1 | DType::Q4_K);
    let is_vocabulary = matches!(name, "token_embd.weight" | "output.weight");
    let wanted = if four_bits && is_vocabulary {
        DType::Q8_0
    } else {
        wanted
    };
    let fits = |dtype: DType| dims[0].is_multiple_of(dtype.block_len() as u64);
    let finer: &[DType] = match wanted {
        DType::Q4_K => &[DType::Q4_K, DType::Q4_1, DType::F16],
        DType::Q4_0 => &[DType::Q4_0, DType::F16],
        DType::Q4_1 => &[DType::Q4_1, DType::F16],
        DType::Q8_0 => &[DType::Q8_0, DType::F16],
        _ => &[DType::F16],
    };
    let dtype = finer.iter().copied().find(|dtype| fits(*dtype));
    dtype.filter(|dtype| *dtype != stored)
}

/// The type that a tensor takes at load, told before it is read; None: it stays as it is. A type that
/// is already as coarse as the wanted one is left alone there. `dims` as stored.
pub(super) fn at_load(name: &str, dims: &[u64], stored: DType, wanted: DType) -> Option<DType> {
    let is_float = matches!(stored, DType::F32 | DType::F16 | DType::BF16);
    let (n_in, rest) = dims.split_first().filter(|_| is_float)?;
    target(name, &[*n_in, rest.iter().product()], stored, wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_follow_name_shape_and_blocks() {
        use DType::{BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q8_0};
        let cases = [
            ("blk.0.ffn_up.weight", &[256, 64][..], F16, Q4_K, Some(Q4_K)),
            ("blk.0.ffn_up.weight", &[96, 64], F16, Q4_K, Some(Q4_1)),
            ("blk.0.ffn_up.weight", &[40, 64], BF16, Q4_K, Some(F16)),
            ("blk.0.ffn_up.weight", &[40, 64], F16, Q4_K, None),
            ("token_embd.weight", &[256, 64], F16, Q4_K, Some(Q8_0)),
            ("output.weight", &[64, 64], F16, Q4_0, Some(Q8_0)),
            ("token_embd.weight", &[64, 64], F32, F16, Some(F16)),
            ("blk.0.attn_q.weight", &[64, 64], Q4_1, Q8_0, Some(Q8_0)),
            ("blk.0.attn_q.weight", &[64, 64], Q8_0, Q8_0, None),
            ("blk.0.attn_norm.weight", &[64], BF16, Q8_0, None),
            ("blk.0.attn_q.bias", &[64], F32, Q8_0, None),
        ];
        for (name, dims, stored, wanted, expected) in cases {
            let found = target(name, dims, stored, wanted);
            assert_eq!(found, expected, "{name} {dims:?} {stored} {wanted}");
        }
    }
}
