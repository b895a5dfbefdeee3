//! What encoders need beside the other operations.
//!
//! Plain data. The rest of an encoder is fields of the usual operations: learned positions and a norm
//! (`EmbedOp`), inputs without a norm (`QkvOp`, `FeedForwardOp`), attention to both sides
//! (`AttendOp`), GELU (`FeedForwardOp` without a gate).

use super::VectorId;

/// `x = (x - mean) / sqrt(variance + epsilon) * weight + bias`, over the coordinates of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormOp {
    /// (d_model)
    pub weight: VectorId,
    /// (d_model); None = zeros.
    pub bias: Option<VectorId>,
    /// Added to the variance.
    pub epsilon: f32,
}
