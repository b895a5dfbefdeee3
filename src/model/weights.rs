//! Ids of a model's weights in its backend. (stub)

/// Ids of all weights.
pub struct ModelWeights {}
