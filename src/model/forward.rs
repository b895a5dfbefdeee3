//! One pass of one segment, in the order of the maths.
//!
//! Runs on the engine thread. Knows neither loops (`plan`) nor tensor names (`weights`); what each
//! operation computes stands in the docs of its type in `backend`.

use super::Model;
use crate::backend::{Backend, BackendError, Pass};

pub use super::plan::Segment;

/// Runs one pass of `segment` over the rows of `pass`. Returns the logits
/// `(n rows that want them, vocab_size)` in row order; empty when none do.
///
/// The caller sets `Row::enters` in the first segment's pass only and `Row::wants_logits` in the
/// row's last one ([`super::Plan::next_stage`] is None).
pub fn run_pass<'b>(
    model: &Model,
    backend: &'b mut dyn Backend,
    segment: Segment,
    pass: &Pass,
) -> Result<&'b [f32], BackendError> {
    let weights = &model.weights;
    backend.begin_pass(pass)?;
    if pass.rows.iter().any(|row| row.enters) {
        backend.embed(weights.embedding)?;
    }
    for block in &weights.blocks[range(model, segment)] {
        backend.qkv(&block.qkv)?;
        backend.attend(&block.attend)?;
        backend.attention_output(&block.attention_output)?;
        backend.feed_forward(&block.feed_forward)?;
    }
    if pass.rows.iter().any(|row| row.wants_logits) {
        backend.logits(&weights.logits)
    } else {
        Ok(&[])
    }
}

fn range(model: &Model, segment: Segment) -> std::ops::Range<usize> {
    let blocks = model.plan.blocks(segment);
    blocks.start as usize..blocks.end as usize
}
