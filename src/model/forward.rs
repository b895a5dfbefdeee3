//! One pass of one segment, in the order of the maths. (stub)
use super::Model;
use crate::backend::{Backend, BackendError, Pass};

/// Which segment a pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Blocks before the loop.
    Prelude,
    /// The loop's blocks, once.
    Core,
    /// Blocks after the loop.
    Coda,
}

/// Runs one pass. Returns the logits `(n rows that want them, vocab_size)`; empty when none do.
pub fn run_pass<'b>(
    _model: &Model,
    _backend: &'b mut dyn Backend,
    _segment: Segment,
    _pass: &Pass,
) -> Result<&'b [f32], BackendError> {
    unimplemented!()
}
