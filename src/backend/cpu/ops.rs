//! The operations except attention: which regions each runs, and what a unit of each does.
//!
//! The engine thread calls these; units run on any thread. Every unit computes a tile of a product
//! into its thread's scratch and applies the epilogue (bias, norm, rotation, residual, gate) while
//! the tile is in the first-level cache. Units of a region write disjoint places.

use super::attention;
use super::kernels::vector::ActivationBlock;
use super::layout::BLOCK;
use super::panels::Matrix;
use super::state::TILE_WIDTH;
use super::step::{InputsView, Precision, Source, Step, Units};
use super::threads::Threads;
use crate::backend::{
    AttendOp, AttentionOutputOp, EmbedOp, FeedForwardOp, Linear, LogitsOp, PAGE_TOKENS, QkvOp,
    RopePairs, RopeTable, SlotId, VectorId,
};

/// Inputs of q, k, v and output are quantized twice: perplexity of the demo model 15.79 -> 15.73
/// (exact f32: 15.665) for a quarter more arithmetic. See `cpu/mod.rs`, "Activations".
const ATTENTION: Precision = Precision::Double;
/// Inputs of gate and up (those of down are always single).
const FEED_FORWARD: Precision = Precision::Single;
/// Inputs of the head.
const HEAD: Precision = Precision::Single;

/// See [`EmbedOp`].
pub(super) fn embed(step: &Step<'_>, threads: &Threads, op: &EmbedOp) {
    let table = &step.matrices[op.table.0 as usize];
    assert!(
        table.n_in == step.geometry.d_model,
        "embedding of another width"
    );
    threads.run(step.pass.rows.len(), &|thread_idx, rows| {
        for row_idx in rows {
            let row = &step.pass.rows[row_idx];
            if row.enters {
                // SAFETY: slots of a pass are distinct (checked when it began).
                let hidden = unsafe { step.hidden.slice(step.hidden_range(row_idx)) };
                table.read_row(row.token as usize, hidden);
                if op.scale != 1.0 {
                    hidden.iter_mut().for_each(|value| *value *= op.scale);
                }
                // SAFETY: this thread's scratch.
                let other = &mut unsafe { step.scratch(thread_idx) }.row[..hidden.len()];
                if let Some(positions) = op.positions {
                    let positions = &step.matrices[positions.0 as usize];
                    positions.read_row(row.position as usize, other);
                    add(hidden, other);
                }
                if let Some(constant) = op.constant {
                    add(hidden, step.vector(constant));
                }
                if let Some(norm) = &op.norm {
                    step.layer_norm(hidden, norm, other);
                    hidden.copy_from_slice(other);
                }
            }
        }
    });
}

/// Fills `angles` `(rows, n_pairs, [cos, sin])` for the positions of a pass.
pub(super) fn rotate_angles(
    rope: &RopeTable,
    positions: impl Iterator<Item = u32>,
    angles: &mut [f32],
) {
    let n_pairs = rope.inverse_frequencies.len();
    for (position, angles) in positions.zip(angles.chunks_exact_mut(2 * n_pairs)) {
        for (pair, frequency) in angles.chunks_exact_mut(2).zip(&rope.inverse_frequencies) {
            // In f64: at position 100,000 an angle in f32 is off by 0.004.
            let (sin, cos) = (f64::from(position) * f64::from(*frequency)).sin_cos();
            pair[0] = cos as f32 * rope.magnitude;
            pair[1] = sin as f32 * rope.magnitude;
        }
    }
}

/// Which heads a unit of the q/k/v projections makes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heads {
    Query,
    Key,
    Value,
}

/// See [`QkvOp`].
pub(super) fn qkv(step: &Step<'_>, threads: &Threads, op: &QkvOp, ropes: &[RopeTable]) {
    let n_rows = step.pass.rows.len();
    let prepare = |row: usize, out: &mut [f32]| step.input_of(row, op.norm, op.epsilon, out);
    let matrices = [&op.q, &op.k, &op.v].map(|linear| step.matrix(linear));
    let source = step.prepare(threads, n_rows, &matrices, ATTENTION, &prepare);

    let per_unit = step.sizes.heads_per_unit;
    let n_query_parts = step.geometry.n_heads.div_ceil(per_unit);
    let n_kv_parts = step.geometry.n_kv_heads.div_ceil(per_unit);
    let units = Units::new(n_rows, n_query_parts + 2 * n_kv_parts);
    let rope = op
        .rope
        .map(|id| (&ropes[id.0 as usize], &*step.angles[id.0 as usize]));
    threads.run(units.n_units(), &|thread_idx, range| {
        // SAFETY: this task runs on that thread; tiles and local inputs are different fields.
        let inputs = unsafe { step.inputs(&source, thread_idx) };
        for unit in range {
            let (rows, part) = units.unit(unit);
            let (kind, part) = if part < n_query_parts {
                (Heads::Query, part)
            } else if part < n_query_parts + n_kv_parts {
                (Heads::Key, part - n_query_parts)
            } else {
                (Heads::Value, part - n_query_parts - n_kv_parts)
            };
            Projection {
                step,
                op,
                rope,
                kind,
                part,
                thread_idx,
            }
            .run(&inputs, rows);
        }
    });
}

/// One unit of the q/k/v projections.
struct Projection<'a> {
    step: &'a Step<'a>,
    op: &'a QkvOp,
    rope: Option<(&'a RopeTable, &'a [f32])>,
    kind: Heads,
    part: usize,
    thread_idx: usize,
}

impl Projection<'_> {
    fn run(&self, inputs: &InputsView<'_>, rows: std::ops::Range<usize>) {
        let step = self.step;
        let (linear, norm, n_heads) = match self.kind {
            Heads::Query => (&self.op.q, self.op.q_norm, step.geometry.n_heads),
            Heads::Key => (&self.op.k, self.op.k_norm, step.geometry.n_kv_heads),
            Heads::Value => (&self.op.v, None, step.geometry.n_kv_heads),
        };
        let (matrix, bias) = (step.matrix(linear), step.bias(linear));
        let head_dim = step.geometry.head_dim;
        assert!(
            matrix.n_out == n_heads * head_dim,
            "projection of another width"
        );
        let first = self.part * step.sizes.heads_per_unit;
        let end = (first + step.sizes.heads_per_unit).min(n_heads);
        let panels = first * head_dim / matrix.lanes..(end * head_dim).div_ceil(matrix.lanes);

        let stride = step.sizes.tile_width;
        // SAFETY: this thread's scratch; `inputs` borrows only its `local` part.
        let scratch = unsafe { step.scratch(self.thread_idx) };
        let tile = &mut scratch.tiles[0];
        step.product(matrix, panels, inputs, rows.clone(), tile, stride);
        for (row_idx, tile) in rows.zip(tile.chunks_exact_mut(stride)) {
            for (head, values) in (first..end).zip(tile.chunks_exact_mut(head_dim)) {
                if let Some(bias) = bias {
                    add(values, &bias[head * head_dim..(head + 1) * head_dim]);
                }
                if let Some(norm) = norm {
                    step.norm(values, norm, self.op.epsilon, &mut scratch.row[..head_dim]);
                    values.copy_from_slice(&scratch.row[..head_dim]);
                }
                if self.kind != Heads::Value
                    && let Some((rope, angles)) = self.rope
                {
                    let width = 2 * rope.inverse_frequencies.len();
                    rotate(
                        values,
                        &angles[row_idx * width..(row_idx + 1) * width],
                        rope.pairs,
                    );
                }
                self.store(row_idx, head, values, &mut scratch.half);
            }
        }
    }

    fn store(&self, row_idx: usize, head: usize, values: &[f32], half: &mut [u16]) {
        let Step {
            geometry,
            sizes,
            kernels,
            pass,
            ..
        } = self.step;
        let head_dim = geometry.head_dim;
        if self.kind == Heads::Query {
            let at = row_idx * sizes.q_width + head * head_dim;
            // SAFETY: each (row, head) belongs to one unit.
            unsafe { self.step.queries.slice(at..at + head_dim) }.copy_from_slice(values);
            return;
        }
        // SAFETY: both hold `head_dim` values.
        unsafe { (kernels.to_f16)(values.as_ptr(), head_dim, half[..head_dim].as_mut_ptr()) };
        let row = &pass.rows[row_idx];
        let position = row.position as usize;
        let page = pass.page(row, self.op.kv, position / PAGE_TOKENS);
        let layer = self.op.kv.layer as usize * geometry.n_kv_heads + head;
        let start = page * sizes.page_len + layer * sizes.head_len;
        let t = position % PAGE_TOKENS;
        if self.kind == Heads::Value {
            let at = start + sizes.key_len + t * sizes.padded_dim;
            // SAFETY: each (position, head) belongs to one unit; nobody reads pages now.
            unsafe { self.step.kv.slice(at..at + head_dim) }.copy_from_slice(&half[..head_dim]);
        } else {
            for (d, &value) in half[..head_dim].iter().enumerate() {
                // SAFETY: as above.
                unsafe { self.step.kv.write(start + d * PAGE_TOKENS + t, value) };
            }
        }
    }
}

/// Rotates the pairs of a head; `angles` is `(n_pairs, [cos, sin])`.
fn rotate(head: &mut [f32], angles: &[f32], pairs: RopePairs) {
    match pairs {
        RopePairs::Interleaved => {
            for (pair, angle) in head.chunks_exact_mut(2).zip(angles.chunks_exact(2)) {
                let (x, y) = (pair[0], pair[1]);
                pair[0] = x * angle[0] - y * angle[1];
                pair[1] = x * angle[1] + y * angle[0];
            }
        }
        RopePairs::Halves => {
            let (first, second) = head[..angles.len()].split_at_mut(angles.len() / 2);
            for ((x, y), angle) in first.iter_mut().zip(second).zip(angles.chunks_exact(2)) {
                (*x, *y) = (*x * angle[0] - *y * angle[1], *x * angle[1] + *y * angle[0]);
            }
        }
    }
}

/// `x += y`.
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    assert!(x.len() == y.len(), "vectors of one length");
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// See [`AttentionOutputOp`]. `in_splits`: attention lies in splits, which this left.
pub(super) fn attention_output(
    step: &Step<'_>,
    threads: &Threads,
    op: &AttentionOutputOp,
    in_splits: Option<&AttendOp>,
) {
    let n_rows = step.pass.rows.len();
    let width = step.sizes.q_width;
    let prepare = |row: usize, out: &mut [f32]| match in_splits {
        Some(attend) => attention::merge_row(step, row, attend, out),
        // SAFETY: attention was written in an earlier region.
        None => out.copy_from_slice(unsafe { step.attention.read(row * width..(row + 1) * width) }),
    };
    let matrix = step.matrix(&op.output);
    let source = step.prepare(threads, n_rows, &[matrix], ATTENTION, &prepare);
    let branch = Branch {
        linear: &op.output,
        post_norm: op.post_norm,
        epsilon: op.epsilon,
    };
    // SAFETY: each thread asks for its own inputs.
    branch.run(step, threads, &|thread_idx| unsafe {
        step.inputs(&source, thread_idx)
    });
}

/// A projection back into the residual stream.
struct Branch<'a> {
    linear: &'a Linear,
    post_norm: Option<VectorId>,
    epsilon: f32,
}

impl Branch<'_> {
    fn run<'v>(
        &self,
        step: &Step<'_>,
        threads: &Threads,
        inputs: &(dyn Fn(usize) -> InputsView<'v> + Sync),
    ) {
        let (matrix, bias) = (step.matrix(self.linear), step.bias(self.linear));
        let (n_rows, d_model) = (step.pass.rows.len(), step.geometry.d_model);
        assert!(matrix.n_out == d_model, "branch of another width");
        let units = Units::new(n_rows, d_model.div_ceil(TILE_WIDTH));
        let stride = step.sizes.tile_width;
        threads.run(units.n_units(), &|thread_idx, range| {
            let inputs = inputs(thread_idx);
            for unit in range {
                let (rows, part) = units.unit(unit);
                let (outputs, panels) = part_of(matrix, part);
                // SAFETY: this thread's scratch; `inputs` borrows only its `local` part.
                let tile = &mut unsafe { step.scratch(thread_idx) }.tiles[0];
                step.product(matrix, panels, &inputs, rows.clone(), tile, stride);
                for (row_idx, tile) in rows.zip(tile.chunks_exact_mut(stride)) {
                    let tile = &mut tile[..outputs.len()];
                    if let Some(bias) = bias {
                        add(tile, &bias[outputs.clone()]);
                    }
                    let (target, start) = match self.post_norm {
                        None => (&step.hidden, step.hidden_range(row_idx).start),
                        Some(_) => (&step.branch, row_idx * d_model),
                    };
                    let range = start + outputs.start..start + outputs.end;
                    // SAFETY: each (row, part) belongs to one unit; slots are distinct.
                    let target = unsafe { target.slice(range) };
                    match self.post_norm {
                        None => add(target, tile),
                        Some(_) => target.copy_from_slice(tile),
                    }
                }
            }
        });
        if let Some(norm) = self.post_norm {
            self.add_normed(step, threads, norm);
        }
    }

    fn add_normed(&self, step: &Step<'_>, threads: &Threads, norm: VectorId) {
        let d_model = step.geometry.d_model;
        threads.run(step.pass.rows.len(), &|thread_idx, rows| {
            // SAFETY: this thread's scratch.
            let scratch = unsafe { step.scratch(thread_idx) };
            for row_idx in rows {
                // SAFETY: written in an earlier region; slots are distinct.
                let (branch, hidden) = unsafe {
                    (
                        step.branch.read(row_idx * d_model..(row_idx + 1) * d_model),
                        step.hidden.slice(step.hidden_range(row_idx)),
                    )
                };
                let normed = &mut scratch.row[..d_model];
                step.norm(branch, norm, self.epsilon, normed);
                add(hidden, normed);
            }
        });
    }
}

/// Outputs and panels of part `part` of a matrix cut into `TILE_WIDTH` outputs.
pub(super) fn part_of(
    matrix: &Matrix,
    part: usize,
) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
    let start = part * TILE_WIDTH;
    let end = (start + TILE_WIDTH).min(matrix.n_out);
    (start..end, start / matrix.lanes..end.div_ceil(matrix.lanes))
}

/// See [`FeedForwardOp`].
pub(super) fn feed_forward(step: &Step<'_>, threads: &Threads, op: &FeedForwardOp) {
    let n_rows = step.pass.rows.len();
    let prepare = |row: usize, out: &mut [f32]| step.input_of(row, op.norm, op.epsilon, out);
    let matrices = [op.gate.as_ref().unwrap_or(&op.up), &op.up].map(|linear| step.matrix(linear));
    let source = step.prepare(threads, n_rows, &matrices, FEED_FORWARD, &prepare);
    match &op.gate {
        Some(gate) => gate_and_up(step, threads, op, gate, &source),
        None => up_alone(step, threads, op, &source),
    }
    let d_ff = step.geometry.d_ff;
    let branch = Branch {
        linear: &op.down,
        post_norm: op.post_norm,
        epsilon: op.epsilon,
    };
    // SAFETY: written in an earlier region.
    branch.run(step, threads, &|_| unsafe {
        step.gated.view(n_rows, d_ff, Precision::Single)
    });
}

/// `gated = silu(gate) * up`, quantized in place when the down projection wants that.
fn gate_and_up(
    step: &Step<'_>,
    threads: &Threads,
    op: &FeedForwardOp,
    gate: &Linear,
    source: &Source<'_>,
) {
    let biases = [step.bias(gate), step.bias(&op.up)];
    let (gate, up) = (step.matrix(gate), step.matrix(&op.up));
    let d_ff = step.geometry.d_ff;
    assert!(
        gate.n_out == d_ff && up.n_out == d_ff,
        "feed-forward of another width"
    );
    let quantize = step.matrix(&op.down).is_quantized();
    let units = Units::new(step.pass.rows.len(), d_ff.div_ceil(TILE_WIDTH));
    let stride = step.sizes.tile_width;
    threads.run(units.n_units(), &|thread_idx, range| {
        // SAFETY: this task runs on that thread; tiles and local inputs are different fields.
        let inputs = unsafe { step.inputs(source, thread_idx) };
        for unit in range {
            let (rows, part) = units.unit(unit);
            let (outputs, panels) = part_of(gate, part);
            // SAFETY: this thread's scratch.
            let [gates, ups] = &mut unsafe { step.scratch(thread_idx) }.tiles;
            step.product(gate, panels.clone(), &inputs, rows.clone(), gates, stride);
            step.product(up, panels, &inputs, rows.clone(), ups, stride);
            let tiles = gates
                .chunks_exact_mut(stride)
                .zip(ups.chunks_exact_mut(stride));
            for (row_idx, (gates, ups)) in rows.zip(tiles) {
                for (tile, bias) in [&mut *gates, &mut *ups].into_iter().zip(biases) {
                    if let Some(bias) = bias {
                        add(&mut tile[..outputs.len()], &bias[outputs.clone()]);
                    }
                }
                let n = outputs.len().next_multiple_of(16).min(stride);
                // SAFETY: a tile row holds a multiple of 16 values, at least `n`.
                unsafe {
                    (step.kernels.gated)(gates.as_ptr(), ups.as_ptr(), n, gates.as_mut_ptr());
                }
                store_gated(step, row_idx, outputs.clone(), gates, quantize);
            }
        }
    });
}

/// `gated = gelu(up)`, quantized like the other.
fn up_alone(step: &Step<'_>, threads: &Threads, op: &FeedForwardOp, source: &Source<'_>) {
    let (up, bias) = (step.matrix(&op.up), step.bias(&op.up));
    let d_ff = step.geometry.d_ff;
    assert!(up.n_out == d_ff, "feed-forward of another width");
    let quantize = step.matrix(&op.down).is_quantized();
    let units = Units::new(step.pass.rows.len(), d_ff.div_ceil(TILE_WIDTH));
    let stride = step.sizes.tile_width;
    threads.run(units.n_units(), &|thread_idx, range| {
        // SAFETY: this task runs on that thread; tiles and local inputs are different fields.
        let inputs = unsafe { step.inputs(source, thread_idx) };
        for unit in range {
            let (rows, part) = units.unit(unit);
            let (outputs, panels) = part_of(up, part);
            // SAFETY: this thread's scratch.
            let tile = &mut unsafe { step.scratch(thread_idx) }.tiles[0];
            step.product(up, panels, &inputs, rows.clone(), tile, stride);
            for (row_idx, values) in rows.zip(tile.chunks_exact_mut(stride)) {
                if let Some(bias) = bias {
                    add(&mut values[..outputs.len()], &bias[outputs.clone()]);
                }
                let n = outputs.len().next_multiple_of(16).min(stride);
                // SAFETY: a tile row holds a multiple of 16 values, at least `n`.
                unsafe { (step.kernels.gelu)(values.as_mut_ptr(), n) };
                store_gated(step, row_idx, outputs.clone(), values, quantize);
            }
        }
    });
}

fn store_gated(
    step: &Step<'_>,
    row_idx: usize,
    outputs: std::ops::Range<usize>,
    values: &[f32],
    quantize: bool,
) {
    let d_ff = step.geometry.d_ff;
    let values = &values[..outputs.len()];
    if quantize {
        let at = row_idx * (d_ff / BLOCK) + outputs.start / BLOCK;
        let n_blocks = outputs.len() / BLOCK;
        // SAFETY: each (row, part) belongs to one unit; parts are whole blocks.
        let blocks: &mut [ActivationBlock] = unsafe { step.gated.blocks.slice(at..at + n_blocks) };
        step.quantize(values, blocks, &mut []);
    } else {
        let at = row_idx * d_ff + outputs.start;
        // SAFETY: each (row, part) belongs to one unit.
        unsafe { step.gated.floats.slice(at..at + outputs.len()) }.copy_from_slice(values);
    }
}

/// See [`LogitsOp`]; fills the first rows of `Step::logits`.
pub(super) fn logits(step: &Step<'_>, threads: &Threads, op: &LogitsOp, slots: &[SlotId]) {
    // SAFETY: nobody writes the residual stream while logits are made.
    let state = |idx: usize| unsafe { step.hidden.read(step.slot_range(slots[idx])) };
    logits_of(step, threads, op, slots.len(), &state);
}

/// The same for `n_rows` states, each (d_model).
pub(super) fn logits_of<'s>(
    step: &Step<'_>,
    threads: &Threads,
    op: &LogitsOp,
    n_rows: usize,
    state: &(dyn Fn(usize) -> &'s [f32] + Sync),
) {
    let (matrix, bias) = (step.matrix(&op.output), step.bias(&op.output));
    let vocab_size = step.geometry.vocab_size;
    assert!(matrix.n_out == vocab_size, "head of another width");
    let prepare = |idx: usize, out: &mut [f32]| match op.norm {
        Some(norm) => step.norm(state(idx), norm, op.epsilon, out),
        None => out.copy_from_slice(state(idx)),
    };
    let source = step.prepare(threads, n_rows, &[matrix], HEAD, &prepare);
    let units = Units::new(n_rows, vocab_size.div_ceil(TILE_WIDTH));
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
                let at = row * vocab_size + outputs.start;
                // SAFETY: each (row, part) belongs to one unit.
                unsafe { step.logits.slice(at..at + outputs.len()) }.copy_from_slice(tile);
            }
        }
    });
}
