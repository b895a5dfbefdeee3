//! The CPU backend: quantized weights in panels, int8 activations, paged attention, own threads.
//!
//! Owned by one engine thread, which is also thread 0 of its pool; the workers only run regions
//! that it opens. Nothing allocates in a step. What is not here: policy, page allocation, GPU.
//!
//! # Reading order
//! [`Path`] and `path.rs` (which instruction set), `threads.rs` (regions and chunks), `layout.rs` and
//! `panels.rs` (weights), `kernels/` over `lanes/` (arithmetic), `step.rs` (what a region sees),
//! `ops.rs`, `attention.rs`, `loops.rs` and `exits.rs` (operations), `state.rs` (buffers, page tables).
//!
//! # Weights: panels
//! A panel is `LANES` outputs (8, or 16 with AVX-512) and all inputs, in blocks of 32 inputs. Weights keep
//! the bits of the file: a Q4_1 file takes as many bytes here as there.
//!
//! ```text
//! 4-bit block, 8 lanes (o = output, i = input; one cell is a byte, low | high nibble)
//!
//!   32 bytes = one AVX2 register           x 4 registers (inputs 0-7, 8-15, 16-23, 24-31)
//!   o0i0|o0i4 o0i1|o0i5 o0i2|o0i6 o0i3|o0i7   o1i0|o1i4 .. o1i3|o1i7   ...   o7i0|o7i4 ..
//!   then 8 scales (f16 or f32), one per output, per group of 32 (or 16) inputs
//!   then 8 minima, where the type has them
//!
//! 8-bit block: registers hold 4 inputs of 8 outputs, o0i0 o0i1 o0i2 o0i3 o1i0 .., then the same tail
//! float panel: o0i0 o1i0 .. o7i0 | o0i1 o1i1 .. o7i1 | ..      (F32, F16, BF16 as in the file)
//! ```
//!
//! So four activations, broadcast as one 32-bit word, meet four inputs of every output at once, and
//! the i32 lanes of the sum *are* the outputs: no horizontal addition anywhere. How sums stay exact
//! stands in `lanes/mod.rs`; which stored type uses which layout in `layout.rs`. A tied embedding is read
//! back out of the head's panels, so there is one copy.
//!
//! # Activations
//! int8 per 32 inputs with an f32 scale and the block's sums, one cache line per block, made once
//! per projection input. Float weights take the f32 row instead. Attention is f32 over f16 pages.
//! Around attention (q, k, v, output) what rounding left over is quantized again and multiplied too,
//! while the panel is in the first-level cache. Perplexity of the demo model (exact f32: 15.665), with
//! a noise of about 0.03 from rounding alone: nothing twice 15.794, attention twice 15.73 (ours),
//! attention and gate, up 15.67, everything 15.665.
//!
//! # Regions (barriers) of a layer
//! ```text
//!   rows <= 2      rows > 2
//!   -              norm, quantize                  each thread prepares few rows for itself
//!   q k v          q k v                           unit: a head; bias, norm, rotation, page write
//!   attend         attend                          unit: (rows, key head[, split of 256 positions])
//!   -              copy or merge, quantize
//!   output         output                          unit: 32 outputs; residual added in the tile
//!   -              norm, quantize
//!   gate, up       gate, up                        unit: 32 of each; SwiGLU and quantization in the tile
//!   down           down                            unit: 32 outputs; residual added in the tile
//!   5              8                               one more where the model has post norms
//! ```
//!
//! # Batch invariance
//! Per (row, output) the order of arithmetic is fixed: integer sums within a block, blocks in
//! order, attention splits at multiples of 256 positions merged in order. Units may run anywhere. One row
//! or 512, one thread or many, chunked or whole: the same bits on one path (`tests/kernels.rs`).
//! Different paths differ in the last bits (fused multiply-add, lane counts of norms).
//!
//! # AVX-512
//! Executed on an emulated processor only (`tests/scripts/avx512_emulated.sh`), so results are checked and
//! speed was never measured. Layouts and algorithms also run as `scalar16` everywhere, and a self-check at
//! start falls back (with a warning) when a path disagrees with the scalar one.
//!
//! # Tried without gain
//! * Panels outside, rows inside (instead of the reverse) within a tile of 64 rows: the same within
//!   2 %; the products are bound by instructions, not by the second-level cache.
//! * AVX2, 4-bit: six activation columns at once instead of four. A bare loop gains 5 % (88 against
//!   83 G multiply-adds/s and thread, where `roofline` says 126), the engine nothing that shows.
//! * AVX2, 4-bit: two panels per broadcast activation. One instruction in six is saved and as many
//!   are added for spilled registers; with two columns left the unpacking weighs more than that.
//!
//! What one row reaches in that loop (63 from cache, 39 from memory) is why batching gains so little
//! on AVX2: eight rows can at best be twice as fast as one. `tinyloop roofline` shows both limits.

mod attention;
mod blocks;
mod buffer;
mod exits;
mod kernels;
mod lanes;
mod layout;
mod loops;
mod ops;
mod panels;
mod path;
pub mod roofline;
mod state;
mod step;
mod threads;

pub use path::{PATH_VARIABLE, Path};

use self::kernels::Kernels;
use self::panels::Matrix;
use self::state::State;
use self::step::Step;
use self::threads::Threads;
use super::{
    AttendOp, AttentionOutputOp, Backend, BackendError, EmbedOp, ExitSignal, FeedForwardOp, FillOp,
    InjectOp, LayerNormOp, LogitsOp, MatrixId, MemoryUse, NormOp, PageId, Pass, QkvOp, RopeId,
    RopeTable, SkippedLoops, SlotId, StartLoopsOp, StateGeometry, TensorData, VectorId,
};

/// How to build a [`CpuBackend`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackendBuilder {
    threads: Option<usize>,
    path: Option<Path>,
}

impl CpuBackendBuilder {
    /// Threads that compute, the caller included; by default as many as the machine gives us.
    #[must_use]
    pub fn threads(mut self, n_threads: usize) -> Self {
        self.threads = Some(n_threads);
        self
    }

    /// Forces an instruction set (before the environment's `TINYLOOP_CPU`).
    #[must_use]
    pub fn path(mut self, path: Path) -> Self {
        self.path = Some(path);
        self
    }

    /// Chooses the kernels and starts the worker threads.
    ///
    /// # Errors
    /// When the machine lacks a forced instruction set or refuses a thread.
    pub fn build(self) -> Result<CpuBackend, BackendError> {
        let forced = match self.path {
            Some(path) => Some(path),
            None => Path::forced()?,
        };
        let (path, kernels) = path::choose(forced)?;
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Threads::start(self.threads.unwrap_or_else(available).max(1))?;
        Ok(CpuBackend {
            threads,
            path,
            kernels,
            matrices: Vec::new(),
            vectors: Vec::new(),
            ropes: Vec::new(),
            state: None,
        })
    }
}

/// The backend. See the module doc.
pub struct CpuBackend {
    threads: Threads,
    path: Path,
    kernels: &'static Kernels,
    matrices: Vec<Matrix>,
    vectors: Vec<Vec<f32>>,
    ropes: Vec<RopeTable>,
    /// Set by `allocate`.
    state: Option<State>,
}

impl CpuBackend {
    /// A backend on `threads` threads (all that the machine gives us when None), on the best
    /// instruction set or the one that `TINYLOOP_CPU` names.
    ///
    /// # Errors
    /// See [`CpuBackendBuilder::build`].
    pub fn new(threads: Option<usize>) -> Result<Self, BackendError> {
        CpuBackendBuilder {
            threads,
            path: None,
        }
        .build()
    }

    /// Starts from defaults.
    #[must_use]
    pub fn builder() -> CpuBackendBuilder {
        CpuBackendBuilder::default()
    }

    /// The view for one operation, and the threads.
    fn step(&mut self) -> Result<(Step<'_>, &Threads), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        Ok((
            Step::new(self.kernels, &self.matrices, &self.vectors, state),
            &self.threads,
        ))
    }
}

fn not_allocated() -> BackendError {
    BackendError::Device("an operation before `allocate`".to_owned())
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        format!("cpu {} x{}", self.path, self.threads.n_threads())
    }

    fn load_matrix(&mut self, tensor: &TensorData<'_>) -> Result<MatrixId, BackendError> {
        self.matrices
            .push(Matrix::pack(tensor, self.kernels.lanes, &self.threads)?);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.vectors.push(values.to_vec());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn load_rope(&mut self, table: &RopeTable) -> Result<RopeId, BackendError> {
        self.ropes.push(table.clone());
        Ok(RopeId(self.ropes.len() as u32 - 1))
    }

    fn allocate(&mut self, geometry: &StateGeometry) -> Result<(), BackendError> {
        // The old state goes first, so that both never exist at once.
        self.state = None;
        let n_threads = self.threads.n_threads();
        self.state = Some(State::allocate(
            geometry,
            self.kernels.lanes,
            n_threads,
            &self.ropes,
        )?);
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let matrices = self.matrices.iter().map(|matrix| matrix.bytes.n_bytes());
        let vectors = self.vectors.iter().map(|vector| vector.len() as u64 * 4);
        MemoryUse {
            weight_bytes: matrices.chain(vectors).sum(),
            ..self.state.as_ref().map(State::memory).unwrap_or_default()
        }
    }

    fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        state.begin_pass(pass)?;
        for (rope, angles) in self.ropes.iter().zip(&mut state.angles) {
            let positions = state.pass.rows.iter().map(|row| row.position);
            ops::rotate_angles(rope, positions, angles);
        }
        Ok(())
    }

    fn embed(&mut self, op: &EmbedOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        ops::embed(&step, threads, op);
        Ok(())
    }

    fn normalize(&mut self, op: &NormOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        loops::normalize(&step, threads, op);
        Ok(())
    }

    fn layer_normalize(&mut self, op: &LayerNormOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        loops::layer_normalize(&step, threads, op);
        Ok(())
    }

    fn start_loops(&mut self, op: &StartLoopsOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        loops::start_loops(&step, threads, op);
        Ok(())
    }

    fn inject(&mut self, op: &InjectOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        loops::inject(&step, threads, op);
        Ok(())
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        let step = Step::new(self.kernels, &self.matrices, &self.vectors, state);
        ops::qkv(&step, &self.threads, op, &self.ropes);
        Ok(())
    }

    fn attend(&mut self, op: &AttendOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        let in_splits = attention::attend(&step, threads, op);
        if let Some(state) = &mut self.state {
            state.in_splits = in_splits.then_some(*op);
        }
        Ok(())
    }

    fn attention_output(&mut self, op: &AttentionOutputOp) -> Result<(), BackendError> {
        let in_splits = self.state.as_ref().and_then(|state| state.in_splits);
        let (step, threads) = self.step()?;
        ops::attention_output(&step, threads, op, in_splits.as_ref());
        Ok(())
    }

    fn feed_forward(&mut self, op: &FeedForwardOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        ops::feed_forward(&step, threads, op);
        Ok(())
    }

    fn keep_state(&mut self, row_idxs: &[u32]) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        state.make_room_for_kept()?;
        let (step, threads) = self.step()?;
        exits::keep_state(&step, threads, row_idxs);
        Ok(())
    }

    fn exit_signals(
        &mut self,
        signal: &ExitSignal,
        row_idxs: &[u32],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        out.clear();
        out.resize(row_idxs.len(), 0.0);
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        if let ExitSignal::Divergence(_) = signal {
            state.make_room_for_logits(2 * exits::pairs_per_tile(&state.geometry))?;
        }
        let (step, threads) = self.step()?;
        exits::signals(&step, threads, signal, row_idxs, out);
        Ok(())
    }

    fn fill_skipped(&mut self, op: &FillOp, skipped: &[SkippedLoops]) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        exits::fill_skipped(&step, threads, op, skipped);
        Ok(())
    }

    fn logits(&mut self, op: &LogitsOp, slots: &[SlotId]) -> Result<&[f32], BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        state.make_room_for_logits(slots.len())?;
        let (step, threads) = self.step()?;
        ops::logits(&step, threads, op, slots);
        let state = self.state.as_ref().ok_or_else(not_allocated)?;
        Ok(&state.logits[..slots.len() * state.geometry.vocab_size])
    }

    fn states(
        &mut self,
        norm: Option<&NormOp>,
        slots: &[SlotId],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        out.clear();
        out.resize(slots.len() * step.geometry.d_model, 0.0);
        loops::states(&step, threads, norm, slots, out);
        Ok(())
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        let n_pages = state.geometry.n_pages;
        if from.0.max(to.0) as usize >= n_pages {
            return Err(BackendError::Device(format!(
                "cannot copy page {} to {}: the pool has {n_pages}",
                from.0, to.0
            )));
        }
        let len = state.sizes.page_len;
        let start = from.0 as usize * len;
        state
            .kv
            .copy_within(start..start + len, to.0 as usize * len);
        Ok(())
    }
}
