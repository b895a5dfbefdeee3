//! A line of the tensor table: name, shape, type, and where and how the bytes lie.
//!
//! Pure data. A GGUF file stores every tensor as it is; a checkpoint in another layout may hold
//! it with other row orders or inside a wider matrix, which is what [`View`] says.

use crate::dtype::DType;
use std::ops::Range;

/// A tensor's shape and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// GGUF order: `dims[0]` is the row length (n_in), `dims[1]` the number of rows (n_out).
    pub dims: Vec<u64>,
    /// Which of the model's files; 0 in a GGUF file.
    pub store: usize,
    /// Byte range in that file, within its length (checked at open).
    pub file_range: Range<usize>,
    /// How the tensor is made of those bytes.
    pub view: View,
}

/// How a tensor is made of its bytes. Only stored types with one weight per block (F32, F16, BF16)
/// have views other than [`View::Stored`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    /// The bytes as they are.
    Stored,
    /// Rows of each head in the order of interleaved rotary pairs: row `2i` and `2i + 1` of a head
    /// are rows `i` and `i + head_dim / 2` of the stored one. Works for biases too.
    PermutedRows {
        /// Heads that the rows are divided into; twice their number divides the rows.
        n_heads: u32,
    },
    /// Columns from `start` on of a matrix whose rows have `stored_width` weights.
    Columns {
        /// First column.
        start: usize,
        /// Weights per stored row.
        stored_width: usize,
    },
}

impl TensorInfo {
    /// Weights in the tensor.
    #[must_use]
    pub fn n_elements(&self) -> u64 {
        self.dims.iter().product() // checked at open
    }

    /// Bytes of the tensor as it will be used, which a view may make fewer than are stored.
    #[must_use]
    pub fn n_bytes(&self) -> u64 {
        self.dtype.bytes_for(self.n_elements()).unwrap_or(0) // checked at open
    }
}

impl View {
    /// Makes the tensor from `stored` in `out`; false when the stored bytes are the tensor.
    pub(in crate::format) fn made(
        &self,
        info: &TensorInfo,
        stored: &[u8],
        out: &mut Vec<u8>,
    ) -> bool {
        out.clear();
        match *self {
            View::Stored => false,
            View::PermutedRows { n_heads } => {
                // A vector is a column here: one weight per row.
                let is_vector = info.dims.len() == 1;
                let n_rows = info.dims[usize::from(!is_vector)] as usize;
                let row_bytes = stored.len() / n_rows;
                let head_dim = n_rows / n_heads as usize;
                for head in stored.chunks_exact(head_dim * row_bytes) {
                    for pair in 0..head_dim / 2 {
                        for row in [pair, pair + head_dim / 2] {
                            out.extend_from_slice(&head[row * row_bytes..][..row_bytes]);
                        }
                    }
                }
                true
            }
            View::Columns {
                start,
                stored_width,
            } => {
                let size = info.dtype.block_bytes();
                let width = info.dims[0] as usize;
                for row in stored.chunks_exact(stored_width * size) {
                    out.extend_from_slice(&row[start * size..(start + width) * size]);
                }
                true
            }
        }
    }
}
