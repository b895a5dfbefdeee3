//! From an operation to kernels: which ones run, in which order, over which buffers.
//!
//! Grids depend on the bucket of a pass (its rows, rounded up), never on the pass, so that the same
//! launches can be replayed as a graph. Up to [`MATVEC_ROWS`] rows products are mat-vecs, above
//! GEMMs; within one of the two a row's result does not depend on its company.

use super::launch::{
    Activations, AttendShape, Gemm, Kernels, KvLayout, Matvec, Ptr, Rope, Shape, Table,
};
use super::matrix::Kind;
use super::memory::Buffer;
use super::state::{ROW_INTS, State};
use crate::backend::{
    AttendOp, AttentionOutputOp, EmbedOp, FeedForwardOp, InjectOp, KvPlace, LayerNormOp, Linear,
    MatrixId, NormOp, QkvOp, RopePairs, StartLoopsOp, StateInit, VectorId,
};
use cudarc::driver::DriverError;

/// The most rows that products take as mat-vecs.
const MATVEC_ROWS: usize = 8;
/// The most rows that the small tile of the GEMM takes.
const SMALL_TILE_ROWS: usize = 64;

/// `ROWS_*` of `kernels/norm.cu`.
const FROM_SLOTS: i32 = 1;
const TO_SLOTS: i32 = 2;
const WANTED: i32 = 4;
/// `GEMM_*` of `kernels/gemm.cu`, and `MATVEC_*`.
const ADD_TO_SLOTS: i32 = 1;
const OF_LIST: i32 = 2;

/// A weight matrix on the device.
pub(super) struct Matrix {
    pub(super) kind: Kind,
    pub(super) n_out: usize,
    pub(super) n_in: usize,
    pub(super) quants: Buffer,
    pub(super) more: Buffer,
    pub(super) scales: Buffer,
}

/// A rotary table on the device.
pub(super) struct RopeBuffer {
    pub(super) frequencies: Buffer,
    pub(super) n_pairs: usize,
    pub(super) pairs: RopePairs,
    pub(super) magnitude: f32,
}

/// Weights and small vectors on the device.
#[derive(Default)]
pub(super) struct Weights {
    pub(super) matrices: Vec<Matrix>,
    pub(super) vectors: Vec<Buffer>,
    pub(super) ropes: Vec<RopeBuffer>,
}

impl Weights {
    fn matrix(&self, id: MatrixId) -> &Matrix {
        &self.matrices[id.0 as usize]
    }

    fn vector(&self, id: Option<VectorId>) -> Ptr {
        id.map_or(Ptr::NULL, |id| self.vectors[id.0 as usize].ptr)
    }

    fn table(&self, id: MatrixId) -> Table {
        let matrix = self.matrix(id);
        Table {
            quants: matrix.quants.ptr,
            more: matrix.more.ptr,
            scales: matrix.scales.ptr,
            kind: matrix.kind as i32,
            n_in: matrix.n_in as i32,
        }
    }
}

/// An operation of a pass, recorded until the host needs a result.
#[derive(Clone, Copy, Debug)]
pub(super) enum Recorded {
    Embed(EmbedOp),
    Normalize(NormOp),
    LayerNormalize(LayerNormOp),
    StartLoops(StartLoopsOp),
    Inject(InjectOp),
    Qkv(QkvOp),
    Attend(AttendOp),
    AttentionOutput(AttentionOutputOp),
    FeedForward(FeedForwardOp),
}

/// Which rows an operation is of, and how many at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    /// Rows of the grid.
    pub(super) n_rows: usize,
    /// The rows are the entries of the list instead of those of the pass.
    pub(super) is_list: bool,
}

/// What launches need: kernels, weights and buffers.
pub(super) struct Runner<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) weights: &'a Weights,
    pub(super) state: &'a State,
    pub(super) bucket: Bucket,
}

type Launched = Result<(), DriverError>;

impl Runner<'_> {
    pub(super) fn run(&self, op: &Recorded) -> Launched {
        match op {
            Recorded::Embed(op) => self.embed(op),
            Recorded::Normalize(op) => self.normalize(op),
            Recorded::LayerNormalize(op) => self.layer_normalize(op, false),
            Recorded::StartLoops(op) => self.start_loops(op),
            Recorded::Inject(op) => self.inject(op),
            Recorded::Qkv(op) => self.qkv(op),
            Recorded::Attend(op) => self.attend(op),
            Recorded::AttentionOutput(op) => self.attention_output(op),
            Recorded::FeedForward(op) => self.feed_forward(op),
        }
    }

    fn d_model(&self) -> usize {
        self.state.geometry.d_model
    }

    /// A block of 256 threads per row.
    fn per_row(&self) -> Shape {
        Shape::new((self.bucket.n_rows, 1), 256)
    }

    fn kv_layout(&self, kv: KvPlace) -> KvLayout {
        let g = &self.state.geometry;
        KvLayout {
            first_group: kv.first_group as i32,
            groups_per_iteration: kv.groups_per_iteration as i32,
            layer: kv.layer as i32,
            layers_per_page: g.layers_per_page as i32,
            n_kv_heads: g.n_kv_heads as i32,
            head_dim: g.head_dim as i32,
        }
    }

    /// Whether a product is a mat-vec, which floats of odd widths always are.
    fn is_matvec(&self, matrix: &Matrix) -> bool {
        self.bucket.n_rows <= MATVEC_ROWS
            || (!matrix.kind.is_quantized() && !matrix.n_in.is_multiple_of(8))
    }

    /// The forms of an input that the products with these matrices read.
    fn activations(&self, readers: &[MatrixId]) -> Activations {
        let mut x = Activations::default();
        for id in readers {
            let matrix = self.weights.matrix(*id);
            if self.is_matvec(matrix) && matrix.kind.is_quantized() {
                x.x8 = self.state.x8.ptr;
                x.x8_sums = self.state.x8_sums.ptr;
            } else {
                x.x16 = self.state.x16.ptr;
            }
        }
        x
    }

    /// `y = W x + b`, or `y[slot] += ..`; x as [`Self::activations`] made it.
    fn product(&self, linear: &Linear, y: Ptr, flags: i32) -> Launched {
        let matrix = self.weights.matrix(linear.weight);
        let bias = self.weights.vector(linear.bias);
        let flags = flags | if self.bucket.is_list { OF_LIST } else { 0 };
        if self.is_matvec(matrix) {
            self.matvec(matrix, bias, y, flags)
        } else {
            self.gemm(matrix, bias, y, flags)
        }
    }

    fn matvec(&self, matrix: &Matrix, bias: Ptr, y: Ptr, flags: i32) -> Launched {
        let (one, many): (Matvec, Matvec) = match matrix.kind {
            Kind::Q4 => (Kernels::matvec_q4_1, Kernels::matvec_q4_8),
            Kind::Q8 => (Kernels::matvec_q8_1, Kernels::matvec_q8_8),
            Kind::Q6 => (Kernels::matvec_q6_1, Kernels::matvec_q6_8),
            Kind::F16 => (Kernels::matvec_f16_1, Kernels::matvec_f16_8),
            Kind::BF16 => (Kernels::matvec_bf16_1, Kernels::matvec_bf16_8),
        };
        let n_rows = self.bucket.n_rows;
        let (kernel, columns) = if n_rows == 1 { (one, 1) } else { (many, 8) };
        let grid = (matrix.n_out.div_ceil(4), n_rows.div_ceil(columns));
        let state = self.state;
        kernel(
            self.kernels,
            Shape::new(grid, 128),
            state.header.ptr,
            state.rows.ptr,
            state.x16.ptr,
            state.x8.ptr,
            state.x8_sums.ptr,
            matrix.quants.ptr,
            matrix.more.ptr,
            matrix.scales.ptr,
            bias,
            y,
            matrix.n_in as i32,
            matrix.n_out as i32,
            flags,
        )
    }

    fn gemm(&self, matrix: &Matrix, bias: Ptr, y: Ptr, flags: i32) -> Launched {
        let (small, large): (Gemm, Gemm) = match matrix.kind {
            Kind::Q4 => (Kernels::gemm_q4_small, Kernels::gemm_q4),
            Kind::Q8 => (Kernels::gemm_q8_small, Kernels::gemm_q8),
            Kind::Q6 => (Kernels::gemm_q6_small, Kernels::gemm_q6),
            Kind::F16 => (Kernels::gemm_f16_small, Kernels::gemm_f16),
            Kind::BF16 => (Kernels::gemm_bf16_small, Kernels::gemm_bf16),
        };
        let n_rows = self.bucket.n_rows;
        let (kernel, rows, outs, n_threads) = match n_rows <= SMALL_TILE_ROWS {
            true => (small, 32, 64, 128),
            false => (large, 128, 128, 256),
        };
        let grid = (matrix.n_out.div_ceil(outs), n_rows.div_ceil(rows));
        let state = self.state;
        kernel(
            self.kernels,
            Shape::new(grid, n_threads),
            state.header.ptr,
            state.rows.ptr,
            state.x16.ptr,
            matrix.quants.ptr,
            matrix.more.ptr,
            matrix.scales.ptr,
            bias,
            y,
            matrix.n_in as i32,
            matrix.n_out as i32,
            flags,
        )
    }

    /// `[norm](states in slots)` as the input of products; of the pass or of the list.
    fn read_slots(&self, from: Ptr, norm: Ptr, epsilon: f32, readers: &[MatrixId]) -> Launched {
        let x = self.activations(readers);
        self.norm_slots(from, norm, epsilon, Ptr::NULL, x, 0)
    }

    fn norm_slots(
        &self,
        from: Ptr,
        norm: Ptr,
        epsilon: f32,
        to: Ptr,
        x: Activations,
        flags: i32,
    ) -> Launched {
        let state = self.state;
        let (slots, stride, of_list) = match self.bucket.is_list {
            true => (state.list.ptr, 1, WANTED),
            false => (state.rows.ptr, ROW_INTS, 0),
        };
        self.kernels.rms_norm_rows(
            self.per_row(),
            state.header.ptr,
            slots,
            from,
            norm,
            to,
            x,
            stride,
            self.d_model() as i32,
            epsilon,
            FROM_SLOTS | of_list | flags,
        )
    }

    fn embed(&self, op: &EmbedOp) -> Launched {
        let state = self.state;
        let positions = op.positions.map(|id| self.weights.table(id));
        self.kernels.embed_rows(
            self.per_row(),
            state.header.ptr,
            state.rows.ptr,
            self.weights.table(op.table),
            positions.unwrap_or_default(),
            self.weights.vector(op.constant),
            state.hidden.ptr,
            self.d_model() as i32,
            op.scale,
        )?;
        match &op.norm {
            Some(norm) => self.layer_normalize(norm, true),
            None => Ok(()),
        }
    }

    fn normalize(&self, op: &NormOp) -> Launched {
        let hidden = self.state.hidden.ptr;
        let norm = self.weights.vector(Some(op.norm));
        self.norm_slots(
            hidden,
            norm,
            op.epsilon,
            hidden,
            Activations::default(),
            TO_SLOTS,
        )
    }

    fn layer_normalize(&self, op: &LayerNormOp, only_entering: bool) -> Launched {
        self.kernels.layer_norm_rows(
            self.per_row(),
            self.state.header.ptr,
            self.state.rows.ptr,
            self.state.hidden.ptr,
            self.weights.vector(Some(op.weight)),
            self.weights.vector(op.bias),
            self.d_model() as i32,
            op.epsilon,
            i32::from(only_entering),
        )
    }

    fn start_loops(&self, op: &StartLoopsOp) -> Launched {
        let state = self.state;
        self.read_slots(state.hidden.ptr, Ptr::NULL, 0.0, &[op.input.weight])?;
        self.product(&op.input, state.branch.ptr, 0)?;
        let (init, deviation, seed) = match op.state {
            StateInit::Input => (0, 0.0, 0),
            StateInit::Zero => (1, 0.0, 0),
            StateInit::Normal { std, seed } => (2, std, seed),
        };
        self.kernels.start_loops_rows(
            self.per_row(),
            state.header.ptr,
            state.rows.ptr,
            state.branch.ptr,
            state.input.ptr,
            state.hidden.ptr,
            self.d_model() as i32,
            init,
            deviation,
            seed,
        )
    }

    fn inject(&self, op: &InjectOp) -> Launched {
        let state = self.state;
        self.read_slots(state.hidden.ptr, Ptr::NULL, 0.0, &[op.state.weight])?;
        self.product(&op.state, state.branch.ptr, 0)?;
        self.kernels.inject_rows(
            self.per_row(),
            state.header.ptr,
            state.rows.ptr,
            state.branch.ptr,
            state.input.ptr,
            state.hidden.ptr,
            self.d_model() as i32,
        )
    }

    fn qkv(&self, op: &QkvOp) -> Launched {
        let state = self.state;
        let readers = [op.q.weight, op.k.weight, op.v.weight];
        let norm = self.weights.vector(op.norm);
        self.read_slots(state.hidden.ptr, norm, op.epsilon, &readers)?;
        self.product(&op.q, state.queries.ptr, 0)?;
        self.product(&op.k, state.keys.ptr, 0)?;
        self.product(&op.v, state.values.ptr, 0)?;
        let rope = op.rope.map_or_else(Rope::default, |id| {
            let rope = &self.weights.ropes[id.0 as usize];
            Rope {
                inverse_frequencies: rope.frequencies.ptr,
                n_pairs: rope.n_pairs as i32,
                is_halves: i32::from(rope.pairs == RopePairs::Halves),
                magnitude: rope.magnitude,
                reserved: 0,
            }
        });
        let (n_heads, n_kv_heads) = (state.geometry.n_heads, state.geometry.n_kv_heads);
        self.kernels.qkv_finish(
            Shape::new((self.bucket.n_rows, n_heads + 2 * n_kv_heads), 128),
            state.header.ptr,
            state.rows.ptr,
            state.pages.ptr,
            state.queries.ptr,
            state.keys.ptr,
            state.values.ptr,
            state.pool.ptr,
            self.weights.vector(op.q_norm),
            self.weights.vector(op.k_norm),
            self.kv_layout(op.kv),
            rope,
            n_heads as i32,
            op.epsilon,
        )
    }

    fn attend(&self, op: &AttendOp) -> Launched {
        let (state, g) = (self.state, &self.state.geometry);
        let group = g.n_heads / g.n_kv_heads;
        let n_warps = group.min(4);
        let grid = (
            self.bucket.n_rows.div_ceil(16),
            g.n_kv_heads * group.div_ceil(n_warps),
        );
        let kernel = match g.head_dim {
            0..=64 => Kernels::attend_prefill_64,
            65..=128 => Kernels::attend_prefill_128,
            _ => Kernels::attend_prefill_256,
        };
        kernel(
            self.kernels,
            Shape {
                grid,
                block: (32, n_warps),
            },
            state.header.ptr,
            state.rows.ptr,
            state.pages.ptr,
            state.pool.ptr,
            state.queries.ptr,
            state.attention.ptr,
            AttendShape {
                kv: self.kv_layout(op.kv),
                n_heads: g.n_heads as i32,
                layer_window: op.window as i32,
                is_bidirectional: i32::from(op.is_bidirectional),
                scale: op.scale,
            },
        )
    }

    /// `hidden += [norm](W x)`.
    fn add_product(&self, linear: &Linear, norm: Option<VectorId>, epsilon: f32) -> Launched {
        let state = self.state;
        if norm.is_none() {
            return self.product(linear, state.hidden.ptr, ADD_TO_SLOTS);
        }
        self.product(linear, state.branch.ptr, 0)?;
        self.kernels.add_branch_rows(
            self.per_row(),
            state.header.ptr,
            state.rows.ptr,
            state.branch.ptr,
            self.weights.vector(norm),
            state.hidden.ptr,
            self.d_model() as i32,
            epsilon,
        )
    }

    fn attention_output(&self, op: &AttentionOutputOp) -> Launched {
        let state = self.state;
        let width = state.geometry.n_heads * state.geometry.head_dim;
        self.kernels.rms_norm_rows(
            self.per_row(),
            state.header.ptr,
            state.rows.ptr,
            state.attention.ptr,
            Ptr::NULL,
            Ptr::NULL,
            self.activations(&[op.output.weight]),
            ROW_INTS,
            width as i32,
            0.0,
            0,
        )?;
        self.add_product(&op.output, op.post_norm, op.epsilon)
    }

    fn feed_forward(&self, op: &FeedForwardOp) -> Launched {
        let state = self.state;
        let norm = self.weights.vector(op.norm);
        let mut readers = vec![op.up.weight];
        readers.extend(op.gate.map(|gate| gate.weight));
        self.read_slots(state.hidden.ptr, norm, op.epsilon, &readers)?;
        self.product(&op.up, state.up.ptr, 0)?;
        let mut gate = Ptr::NULL;
        if let Some(linear) = &op.gate {
            self.product(linear, state.gate.ptr, 0)?;
            gate = state.gate.ptr;
        }
        let width = state.geometry.d_ff;
        self.kernels.activate_rows(
            Shape::new((width.div_ceil(1024), self.bucket.n_rows), 256),
            state.header.ptr,
            gate,
            state.up.ptr,
            self.activations(&[op.down.weight]),
            width as i32,
        )?;
        self.add_product(&op.down, op.post_norm, op.epsilon)
    }

    /// The states of the list, normed where there is a norm, to `to`, `[entry][d_model]`.
    pub(super) fn states(&self, norm: Option<VectorId>, epsilon: f32, to: Ptr) -> Launched {
        let (from, norm) = (self.state.hidden.ptr, self.weights.vector(norm));
        self.norm_slots(from, norm, epsilon, to, Activations::default(), 0)
    }

    /// The logits of the list's slots in `from` (hidden or kept states) to `to`, `[entry][vocab_size]`.
    pub(super) fn logits(
        &self,
        from: Ptr,
        norm: Option<VectorId>,
        epsilon: f32,
        output: &Linear,
        to: Ptr,
    ) -> Launched {
        let norm = self.weights.vector(norm);
        self.read_slots(from, norm, epsilon, &[output.weight])?;
        self.product(output, to, 0)
    }

    pub(super) fn keep(&self) -> Launched {
        self.kernels.keep_rows(
            self.per_row(),
            self.state.header.ptr,
            self.state.list.ptr,
            self.state.hidden.ptr,
            self.state.kept_ptr(),
            self.d_model() as i32,
        )
    }

    pub(super) fn gate_signal(&self, weight: VectorId, bias: f32, to: Ptr) -> Launched {
        self.kernels.gate_rows(
            self.per_row(),
            self.state.header.ptr,
            self.state.list.ptr,
            self.state.hidden.ptr,
            self.weights.vector(Some(weight)),
            to,
            self.d_model() as i32,
            bias,
        )
    }

    pub(super) fn change_signal(&self, to: Ptr) -> Launched {
        self.kernels.change_rows(
            self.per_row(),
            self.state.header.ptr,
            self.state.list.ptr,
            self.state.hidden.ptr,
            self.state.kept_ptr(),
            to,
            self.d_model() as i32,
        )
    }

    pub(super) fn divergence_signal(&self, to: Ptr) -> Launched {
        self.kernels.divergence_rows(
            self.per_row(),
            self.state.header.ptr,
            self.state.logits.ptr,
            self.state.kept_logits.ptr,
            to,
            self.state.geometry.vocab_size as i32,
        )
    }

    pub(super) fn fill_skipped(&self, kv: KvPlace, n_layers: usize) -> Launched {
        self.kernels.fill_skipped_rows(
            Shape::new((self.bucket.n_rows, n_layers), 128),
            self.state.header.ptr,
            self.state.rows.ptr,
            self.state.pages.ptr,
            self.state.list.ptr,
            self.state.pool.ptr,
            self.kv_layout(kv),
        )
    }
}
