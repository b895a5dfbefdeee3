//! What the threads of a region see: the pass, the weights, and the state's disjoint parts.
//!
//! Built by the engine thread for one operation. `Step` is `Sync`; it holds no thread pool, so a
//! task cannot start a region. Here are also the two pieces that all projections share: preparing
//! inputs (norm, quantization) and computing one tile of a product.

use std::ops::Range;

use super::buffer::SharedMut;
use super::kernels::Kernels;
use super::kernels::matmul::MatmulArgs;
use super::kernels::vector::ActivationBlock;
use super::layout::BLOCK;
use super::ops::add;
use super::panels::Matrix;
use super::state::{Inputs, LOCAL_ROWS, PassTables, ROW_TILE, Scratch, Sizes, State};
use super::threads::Threads;
use crate::backend::{LayerNormOp, Linear, SlotId, StateGeometry, VectorId};

/// The view of one operation.
pub(super) struct Step<'a> {
    pub(super) kernels: &'static Kernels,
    pub(super) matrices: &'a [Matrix],
    pub(super) vectors: &'a [Vec<f32>],
    pub(super) geometry: StateGeometry,
    pub(super) sizes: Sizes,
    pub(super) pass: &'a PassTables,
    pub(super) angles: &'a [super::buffer::Buffer<f32>],
    pub(super) hidden: SharedMut<'a, f32>,
    pub(super) loop_input: SharedMut<'a, f32>,
    pub(super) kept: SharedMut<'a, f32>,
    pub(super) kv: SharedMut<'a, u16>,
    pub(super) queries: SharedMut<'a, f32>,
    pub(super) attention: SharedMut<'a, f32>,
    pub(super) partials: SharedMut<'a, f32>,
    pub(super) branch: SharedMut<'a, f32>,
    pub(super) logits: SharedMut<'a, f32>,
    pub(super) inputs: InputsMut<'a>,
    pub(super) gated: InputsMut<'a>,
    scratch: SharedMut<'a, Scratch>,
    region: u64,
}

/// `Inputs` that threads fill together.
#[derive(Clone, Copy)]
pub(super) struct InputsMut<'a> {
    pub(super) floats: SharedMut<'a, f32>,
    pub(super) blocks: SharedMut<'a, ActivationBlock>,
    remainders: SharedMut<'a, ActivationBlock>,
}

impl<'a> InputsMut<'a> {
    fn new(inputs: &'a mut Inputs) -> Self {
        InputsMut {
            floats: inputs.floats.shared(),
            blocks: inputs.blocks.shared(),
            remainders: inputs.remainders.shared(),
        }
    }

    /// Reads them, `n_in` wide.
    ///
    /// # Safety
    /// Nobody writes the first `n_rows` rows while the result lives.
    pub(super) unsafe fn view(
        &self,
        n_rows: usize,
        n_in: usize,
        precision: Precision,
    ) -> InputsView<'a> {
        let n_blocks = n_rows * (n_in / BLOCK);
        let n_remainders = if precision == Precision::Double {
            n_blocks
        } else {
            0
        };
        // SAFETY: passed on to the caller.
        unsafe {
            InputsView {
                floats: self.floats.read(0..n_rows * n_in),
                blocks: self.blocks.read(0..n_blocks),
                remainders: self.remainders.read(0..n_remainders),
            }
        }
    }
}

/// Prepared activations `(rows, n_in)`; which of the two is filled depends on the consumers.
#[derive(Clone, Copy)]
pub(super) struct InputsView<'a> {
    pub(super) floats: &'a [f32],
    pub(super) blocks: &'a [ActivationBlock],
    /// Empty, or as long as `blocks`.
    pub(super) remainders: &'a [ActivationBlock],
}

/// How finely the inputs of quantized weights are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// One int8 block.
    Single,
    /// A second int8 block for what the first left over: twice the arithmetic of the product.
    Double,
}

/// Writes one row of inputs: `(row index, floats out)`.
pub(super) type Prepare<'p> = &'p (dyn Fn(usize, &mut [f32]) + Sync);

/// Where the inputs of a projection are, or how each thread makes them.
#[derive(Clone, Copy)]
pub(super) struct Source<'p> {
    n_rows: usize,
    n_in: usize,
    quantize: Option<Precision>,
    local: Option<Prepare<'p>>,
}

impl<'a> Step<'a> {
    pub(super) fn new(
        kernels: &'static Kernels,
        matrices: &'a [Matrix],
        vectors: &'a [Vec<f32>],
        state: &'a mut State,
    ) -> Self {
        state.n_regions += 1;
        Step {
            kernels,
            matrices,
            vectors,
            geometry: state.geometry,
            sizes: state.sizes,
            pass: &state.pass,
            angles: &state.angles,
            hidden: state.hidden.shared(),
            loop_input: state.loop_input.shared(),
            kept: state.kept.shared(),
            kv: state.kv.shared(),
            queries: state.queries.shared(),
            attention: state.attention.shared(),
            partials: state.partials.shared(),
            branch: state.branch.shared(),
            logits: state.logits.shared(),
            inputs: InputsMut::new(&mut state.inputs),
            gated: InputsMut::new(&mut state.gated),
            scratch: SharedMut::new(&mut state.scratch),
            region: state.n_regions,
        }
    }

    pub(super) fn matrix(&self, linear: &Linear) -> &'a Matrix {
        &self.matrices[linear.weight.0 as usize]
    }

    pub(super) fn vector(&self, id: VectorId) -> &'a [f32] {
        &self.vectors[id.0 as usize]
    }

    pub(super) fn bias(&self, linear: &Linear) -> Option<&'a [f32]> {
        linear.bias.map(|id| self.vector(id))
    }

    /// Range of a row's residual stream in `hidden`.
    pub(super) fn hidden_range(&self, row_idx: usize) -> Range<usize> {
        self.slot_range(self.pass.rows[row_idx].slot)
    }

    /// Range of a slot in `hidden` and whatever else slots hold.
    pub(super) fn slot_range(&self, slot: SlotId) -> Range<usize> {
        let start = slot.0 as usize * self.geometry.d_model;
        start..start + self.geometry.d_model
    }

    /// The scratch of a thread.
    ///
    /// # Safety
    /// Called by that thread's task, which lets go of earlier results first.
    #[expect(clippy::mut_from_ref, reason = "one thread has one index")]
    pub(super) unsafe fn scratch(&self, thread_idx: usize) -> &mut Scratch {
        // SAFETY: passed on to the caller.
        unsafe { self.scratch.one(thread_idx) }
    }

    /// `out = hidden of the row`.
    pub(super) fn copy_hidden(&self, row_idx: usize, out: &mut [f32]) {
        // SAFETY: while inputs are prepared nobody writes the residual stream.
        out.copy_from_slice(unsafe { self.hidden.read(self.hidden_range(row_idx)) });
    }

    /// `out = hidden of the row`, normed where there is a norm.
    pub(super) fn input_of(
        &self,
        row_idx: usize,
        norm: Option<VectorId>,
        epsilon: f32,
        out: &mut [f32],
    ) {
        match norm {
            Some(norm) => self.norm_hidden(row_idx, norm, epsilon, out),
            None => self.copy_hidden(row_idx, out),
        }
    }

    /// `out = rmsnorm(hidden of the row)`.
    pub(super) fn norm_hidden(
        &self,
        row_idx: usize,
        norm: VectorId,
        epsilon: f32,
        out: &mut [f32],
    ) {
        // SAFETY: while inputs are prepared nobody writes the residual stream.
        let hidden = unsafe { self.hidden.read(self.hidden_range(row_idx)) };
        self.norm(hidden, norm, epsilon, out);
    }

    /// `out = rmsnorm(x)`.
    pub(super) fn norm(&self, x: &[f32], norm: VectorId, epsilon: f32, out: &mut [f32]) {
        let weight = self.vector(norm);
        assert!(
            x.len() == weight.len() && x.len() == out.len(),
            "norm of another width"
        );
        // SAFETY: equal lengths (asserted); the table matches the machine.
        unsafe {
            (self.kernels.normalize)(
                x.as_ptr(),
                weight.as_ptr(),
                x.len(),
                epsilon,
                out.as_mut_ptr(),
            );
        }
    }

    /// `out = layer_norm(x)`.
    pub(super) fn layer_norm(&self, x: &[f32], op: &LayerNormOp, out: &mut [f32]) {
        let weight = self.vector(op.weight);
        assert!(
            x.len() == weight.len() && x.len() == out.len(),
            "norm of another width"
        );
        // SAFETY: equal lengths (asserted); the table matches the machine.
        unsafe {
            (self.kernels.layer_normalize)(
                x.as_ptr(),
                weight.as_ptr(),
                x.len(),
                op.epsilon,
                out.as_mut_ptr(),
            );
        }
        if let Some(bias) = op.bias {
            add(out, self.vector(bias));
        }
    }

    /// Quantizes `x` into `out`, and into `remainders` what that leaves over (unless empty).
    pub(super) fn quantize(
        &self,
        x: &[f32],
        out: &mut [ActivationBlock],
        remainders: &mut [ActivationBlock],
    ) {
        let n_blocks = out.len();
        assert!(x.len() == n_blocks * BLOCK, "a whole number of blocks");
        assert!(
            remainders.is_empty() || remainders.len() == n_blocks,
            "as many remainders"
        );
        let (x, out) = (x.as_ptr(), out.as_mut_ptr());
        // SAFETY: lengths match (asserted); the table matches the machine.
        unsafe {
            if remainders.is_empty() {
                (self.kernels.quantize)(x, n_blocks, out);
            } else {
                (self.kernels.quantize_twice)(x, n_blocks, out, remainders.as_mut_ptr());
            }
        }
    }

    /// Makes the inputs of a projection: for many rows in a region of their own, for few rows
    /// later, by each thread for itself (cheaper than a barrier).
    pub(super) fn prepare<'p>(
        &self,
        threads: &Threads,
        n_rows: usize,
        matrices: &[&Matrix],
        precision: Precision,
        prepare: Prepare<'p>,
    ) -> Source<'p> {
        let n_in = matrices[0].n_in;
        assert!(
            matrices.iter().all(|matrix| matrix.n_in == n_in),
            "inputs of one width"
        );
        assert!(n_in <= self.sizes.input_width, "input wider than the model");
        let is_quantized = matrices.iter().any(|matrix| matrix.is_quantized());
        let quantize = is_quantized.then_some(precision);
        if n_rows <= LOCAL_ROWS {
            return Source {
                n_rows,
                n_in,
                quantize,
                local: Some(prepare),
            };
        }
        let n_blocks = n_in / BLOCK;
        threads.run(n_rows, &|_, rows| {
            for row in rows {
                let range = row * n_blocks..(row + 1) * n_blocks;
                let remainders = match quantize {
                    Some(Precision::Double) => range.clone(),
                    Some(Precision::Single) | None => 0..0,
                };
                // SAFETY: each row belongs to one unit.
                let (floats, blocks, remainders) = unsafe {
                    (
                        self.inputs.floats.slice(row * n_in..(row + 1) * n_in),
                        self.inputs.blocks.slice(range),
                        self.inputs.remainders.slice(remainders),
                    )
                };
                prepare(row, floats);
                if quantize.is_some() {
                    self.quantize(floats, blocks, remainders);
                }
            }
        });
        Source {
            n_rows,
            n_in,
            quantize,
            local: None,
        }
    }

    /// The inputs, for a task of thread `thread_idx`.
    ///
    /// # Safety
    /// Called by that thread; it does not touch `Scratch::local` while the result lives.
    pub(super) unsafe fn inputs(&self, source: &Source<'_>, thread_idx: usize) -> InputsView<'_> {
        let Source {
            n_rows,
            n_in,
            quantize,
            local,
        } = *source;
        let precision = quantize.unwrap_or(Precision::Single);
        let Some(prepare) = local else {
            // SAFETY: filled in an earlier region.
            return unsafe { self.inputs.view(n_rows, n_in, precision) };
        };
        // SAFETY: this thread's own scratch.
        let scratch = unsafe { self.scratch.one(thread_idx) };
        let floats = &mut scratch.local.floats[..n_rows * n_in];
        let n_blocks = n_rows * (n_in / BLOCK);
        let blocks = &mut scratch.local.blocks[..n_blocks];
        let n_remainders = if precision == Precision::Double {
            n_blocks
        } else {
            0
        };
        let remainders = &mut scratch.local.remainders[..n_remainders];
        if scratch.local_region != self.region {
            scratch.local_region = self.region;
            for (row, floats) in floats.chunks_exact_mut(n_in).enumerate() {
                prepare(row, floats);
            }
            if quantize.is_some() {
                self.quantize(floats, blocks, remainders);
            }
        }
        InputsView {
            floats,
            blocks,
            remainders,
        }
    }

    /// See [`product`].
    pub(super) fn product(
        &self,
        matrix: &Matrix,
        panels: Range<usize>,
        inputs: &InputsView<'_>,
        rows: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        product(self.kernels, matrix, panels, inputs, rows, out, stride);
    }
}

/// `out[row][..] = panels · inputs[row]` for the rows of a tile; `out` is `(rows, stride)`.
pub(super) fn product(
    kernels: &Kernels,
    matrix: &Matrix,
    panels: Range<usize>,
    inputs: &InputsView<'_>,
    rows: Range<usize>,
    out: &mut [f32],
    stride: usize,
) {
    let (n_in, n_rows) = (matrix.n_in, rows.len());
    let n_blocks = n_in / BLOCK;
    assert!(panels.end <= matrix.n_panels() && panels.len() * matrix.lanes <= stride);
    assert!(n_rows * stride <= out.len(), "tile too small");
    let blocks = rows.start * n_blocks..rows.end * n_blocks;
    let remainders = if matrix.is_quantized() && !inputs.remainders.is_empty() {
        inputs.remainders[blocks.clone()].as_ptr()
    } else {
        std::ptr::null()
    };
    let args = MatmulArgs {
        panels: matrix.bytes[panels.start * matrix.panel_bytes..].as_ptr(),
        panel_bytes: matrix.panel_bytes,
        n_panels: panels.len(),
        n_in,
        blocks: if matrix.is_quantized() {
            inputs.blocks[blocks].as_ptr()
        } else {
            std::ptr::null()
        },
        remainders,
        floats: inputs.floats[rows.start * n_in..rows.end * n_in].as_ptr(),
        n_rows,
        out: out.as_mut_ptr(),
        out_stride: stride,
    };
    // SAFETY: panels, inputs and out were checked against their lengths above; the table
    // matches the machine and the layout (`Matrix::lanes` is the table's).
    unsafe { (kernels.matmul[matrix.layout as usize])(&args) }
}

/// Units of a product: row tiles times parts of the outputs, parts running fastest.
#[derive(Clone, Copy)]
pub(super) struct Units {
    n_rows: usize,
    n_parts: usize,
}

impl Units {
    pub(super) fn new(n_rows: usize, n_parts: usize) -> Self {
        Units { n_rows, n_parts }
    }

    pub(super) fn n_units(&self) -> usize {
        self.n_rows.div_ceil(ROW_TILE) * self.n_parts
    }

    /// Rows and part of a unit.
    pub(super) fn unit(&self, unit: usize) -> (Range<usize>, usize) {
        let start = unit / self.n_parts * ROW_TILE;
        (
            start..(start + ROW_TILE).min(self.n_rows),
            unit % self.n_parts,
        )
    }
}
