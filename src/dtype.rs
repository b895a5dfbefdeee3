//! Tensor element types: names, block sizes, GGUF ids. No arithmetic (`backend/reference` has it).
//!
//! Facts from the GGUF specification (ggml `ggml_type` enum): a quantized type stores
//! `block_len` weights of one row in `block_bytes` bytes.

use std::fmt;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the field's own")]
#[expect(non_camel_case_types, reason = "the names are the field's own")]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
}

impl DType {
    /// Every type we read, in GGUF id order.
    pub const ALL: [DType; 14] = [
        DType::F32,
        DType::F16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::IQ4_NL,
        DType::BF16,
    ];

    /// The type with this id in a GGUF tensor table.
    #[must_use]
    pub fn from_gguf_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.gguf_id() == id)
    }

    /// The id in a GGUF tensor table.
    #[must_use]
    pub const fn gguf_id(self) -> u32 {
        match self {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q5_0 => 6,
            DType::Q5_1 => 7,
            DType::Q8_0 => 8,
            DType::Q2_K => 10,
            DType::Q3_K => 11,
            DType::Q4_K => 12,
            DType::Q5_K => 13,
            DType::Q6_K => 14,
            DType::IQ4_NL => 20,
            DType::BF16 => 30,
        }
    }

    /// Weights per block; row lengths must be a multiple of it.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 | DType::IQ4_NL => {
                32
            }
            DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
        }
    }

    /// Bytes per block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q4_0 | DType::IQ4_NL => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q8_0 => 34,
            DType::Q2_K => 84,
            DType::Q3_K => 110,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
        }
    }

    /// Bytes of `n_elements` weights, None when they are no whole number of blocks or overflow.
    #[must_use]
    pub fn bytes_for(self, n_elements: u64) -> Option<u64> {
        let block_len = self.block_len() as u64;
        if !n_elements.is_multiple_of(block_len) {
            return None;
        }
        (n_elements / block_len).checked_mul(self.block_bytes() as u64)
    }
}

/// The block sizes spelled out from the fields of each block: scales, then codes by their bits.
const _: () = {
    const SCALE: usize = 2; // an f16
    const CODES: usize = 32;
    const SUPER: usize = 256;
    assert!(DType::Q4_0.block_bytes() == SCALE + CODES * 4 / 8);
    assert!(DType::IQ4_NL.block_bytes() == SCALE + CODES * 4 / 8);
    assert!(DType::Q4_1.block_bytes() == 2 * SCALE + CODES * 4 / 8);
    assert!(DType::Q5_0.block_bytes() == SCALE + CODES * 5 / 8);
    assert!(DType::Q5_1.block_bytes() == 2 * SCALE + CODES * 5 / 8);
    assert!(DType::Q8_0.block_bytes() == SCALE + CODES);
    // 16 sub-blocks: a byte of scale and minimum; 6 bits of scale; 8 bits of scale.
    assert!(DType::Q2_K.block_bytes() == 2 * SCALE + 16 + SUPER * 2 / 8);
    assert!(DType::Q3_K.block_bytes() == SCALE + 16 * 6 / 8 + SUPER * 3 / 8);
    assert!(DType::Q6_K.block_bytes() == SCALE + 16 + SUPER * 6 / 8);
    // 8 sub-blocks with 6 bits of scale and 6 of minimum.
    assert!(DType::Q4_K.block_bytes() == 2 * SCALE + 8 * 12 / 8 + SUPER * 4 / 8);
    assert!(DType::Q5_K.block_bytes() == 2 * SCALE + 8 * 12 / 8 + SUPER * 5 / 8);
};

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
