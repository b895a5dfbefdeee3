//! The operations around blocks: norms of the residual stream, start and injection of a core that
//! loops, states for embeddings. Regions and units as in `ops.rs`.
//!
//! A row's residual stream is both input and output here. So no region writes it while threads may
//! still read it to prepare their inputs: products go to another buffer first.

use super::buffer::SharedMut;
use super::ops::{add, part_of};
use super::state::TILE_WIDTH;
use super::step::{Precision, Prepare, Step, Units};
use super::threads::Threads;
use crate::backend::{
    InjectOp, LayerNormOp, Linear, NormOp, SlotId, StartLoopsOp, StateInit, state_init,
};
use std::ops::Range;

/// The state goes through the adapter at every loop, so its rounding would add up.
const ADAPTER: Precision = Precision::Double;

/// See [`NormOp`].
pub(super) fn normalize(step: &Step<'_>, threads: &Threads, op: &NormOp) {
    let d_model = step.geometry.d_model;
    threads.run(step.pass.rows.len(), &|thread_idx, rows| {
        // SAFETY: this thread's scratch.
        let normed = &mut unsafe { step.scratch(thread_idx) }.row[..d_model];
        for row_idx in rows {
            // SAFETY: each row belongs to one unit; slots are distinct.
            let hidden = unsafe { step.hidden.slice(step.hidden_range(row_idx)) };
            step.norm(hidden, op.norm, op.epsilon, normed);
            hidden.copy_from_slice(normed);
        }
    });
}

/// See [`LayerNormOp`].
pub(super) fn layer_normalize(step: &Step<'_>, threads: &Threads, op: &LayerNormOp) {
    let d_model = step.geometry.d_model;
    threads.run(step.pass.rows.len(), &|thread_idx, rows| {
        // SAFETY: this thread's scratch.
        let normed = &mut unsafe { step.scratch(thread_idx) }.row[..d_model];
        for row_idx in rows {
            // SAFETY: each row belongs to one unit; slots are distinct.
            let hidden = unsafe { step.hidden.slice(step.hidden_range(row_idx)) };
            step.layer_norm(hidden, op, normed);
            hidden.copy_from_slice(normed);
        }
    });
}

/// The states of some slots, normed where there is a norm, `(n slots, d_model)`.
pub(super) fn states(
    step: &Step<'_>,
    threads: &Threads,
    norm: Option<&NormOp>,
    slots: &[SlotId],
    out: &mut [f32],
) {
    let d_model = step.geometry.d_model;
    let out = SharedMut::new(out);
    threads.run(slots.len(), &|_, idxs| {
        for idx in idxs {
            // SAFETY: nobody writes the residual stream now; each place belongs to one unit.
            let (state, out) = unsafe {
                (
                    step.hidden.read(step.slot_range(slots[idx])),
                    out.slice(idx * d_model..(idx + 1) * d_model),
                )
            };
            match norm {
                Some(op) => step.norm(state, op.norm, op.epsilon, out),
                None => out.copy_from_slice(state),
            }
        }
    });
}

/// See [`StartLoopsOp`].
pub(super) fn start_loops(step: &Step<'_>, threads: &Threads, op: &StartLoopsOp) {
    assert!(step.geometry.keeps_input, "allocated with a place for it");
    let starting = &step.pass.starting;
    if starting.is_empty() {
        return;
    }
    let prepare = |idx: usize, out: &mut [f32]| step.copy_hidden(starting[idx] as usize, out);
    let target = Target {
        buffer: &step.loop_input,
        place: &|idx| step.hidden_range(starting[idx] as usize),
    };
    product(step, threads, &op.input, starting.len(), &prepare, &target);
    if op.state == StateInit::Input {
        return;
    }
    threads.run(starting.len(), &|_, rows| {
        for idx in rows {
            let row_idx = starting[idx] as usize;
            let position = step.pass.rows[row_idx].position;
            // SAFETY: each row belongs to one unit; slots are distinct.
            let hidden = unsafe { step.hidden.slice(step.hidden_range(row_idx)) };
            match op.state {
                StateInit::Input => {}
                StateInit::Zero => hidden.fill(0.0),
                StateInit::Normal { std, seed } => {
                    for (coordinate, hidden) in (0..).zip(hidden) {
                        *hidden = std * state_init::value(seed, position, coordinate);
                    }
                }
            }
        }
    });
}

/// See [`InjectOp`].
pub(super) fn inject(step: &Step<'_>, threads: &Threads, op: &InjectOp) {
    assert!(step.geometry.keeps_input, "allocated with a place for it");
    let (n_rows, d_model) = (step.pass.rows.len(), step.geometry.d_model);
    let prepare = |row: usize, out: &mut [f32]| step.copy_hidden(row, out);
    let target = Target {
        buffer: &step.branch,
        place: &|row_idx| row_idx * d_model..(row_idx + 1) * d_model,
    };
    product(step, threads, &op.state, n_rows, &prepare, &target);
    threads.run(n_rows, &|_, rows| {
        for row_idx in rows {
            let range = step.hidden_range(row_idx);
            // SAFETY: branch and input were written in earlier regions; slots are distinct.
            let (branch, input, hidden) = unsafe {
                (
                    step.branch.read(row_idx * d_model..(row_idx + 1) * d_model),
                    step.loop_input.read(range.clone()),
                    step.hidden.slice(range),
                )
            };
            hidden.copy_from_slice(branch);
            add(hidden, input);
        }
    });
}

/// Where a product goes: the place of an input row's result in a buffer.
struct Target<'a> {
    buffer: &'a SharedMut<'a, f32>,
    place: &'a (dyn Fn(usize) -> Range<usize> + Sync),
}

/// `target = W · input + b` for `n_rows` prepared rows; places are distinct.
fn product(
    step: &Step<'_>,
    threads: &Threads,
    linear: &Linear,
    n_rows: usize,
    prepare: Prepare<'_>,
    target: &Target<'_>,
) {
    let (matrix, bias) = (step.matrix(linear), step.bias(linear));
    let d_model = step.geometry.d_model;
    assert!(
        matrix.n_out == d_model && matrix.n_in == d_model,
        "adapter of another width"
    );
    let source = step.prepare(threads, n_rows, &[matrix], ADAPTER, prepare);
    let units = Units::new(n_rows, d_model.div_ceil(TILE_WIDTH));
    let stride = step.sizes.tile_width;
    threads.run(units.n_units(), &|thread_idx, range| {
        // SAFETY: this task runs on that thread; tiles and local inputs are different fields.
        let inputs = unsafe { step.inputs(&source, thread_idx) };
        for unit in range {
            let (rows, part) = units.unit(unit);
            let (outputs, panels) = part_of(matrix, part);
            // SAFETY: this thread's scratch; `inputs` borrows only its `local` part.
            let tile = &mut unsafe { step.scratch(thread_idx) }.tiles[0];
            step.product(matrix, panels, &inputs, rows.clone(), tile, stride);
            for (row, tile) in rows.zip(tile.chunks_exact_mut(stride)) {
                let tile = &mut tile[..outputs.len()];
                if let Some(bias) = bias {
                    add(tile, &bias[outputs.clone()]);
                }
                let start = (target.place)(row).start;
                let range = start + outputs.start..start + outputs.end;
                // SAFETY: each (row, part) belongs to one unit; places are distinct.
                unsafe { target.buffer.slice(range) }.copy_from_slice(tile);
            }
        }
    });
}
