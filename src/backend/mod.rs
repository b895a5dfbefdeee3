//! The operations of a model's step, as a trait that a CPU and a GPU can both implement.
//!
//! A backend is owned by one engine thread. It keeps the weights (in its own layout), the KV
//! pages, the hidden-state slots and its scratch. The engine decides *which* rows run and which
//! pages they own; `model/forward` says *in which order* the operations run; the backend does them.
//!
//! ```text
//! engine:  allocate pages, slots ─► Pass { rows, tables }
//! forward: begin_pass ─► embed ─► per block: qkv ─► attend ─► attention_output ─► feed_forward
//!                                                              ... ─► logits (of some slots)
//!          layer_normalize where blocks end with a norm; states (of some slots) for embeddings
//!          around the blocks of a core that loops: start_loops ─► inject ─► blocks ─► normalize
//!          around those, for rows that may leave the loop: keep_state ─► .. ─► exit_signals
//!                                                          ─► fill_skipped (rows that leave)
//! ```
//!
//! **Rows.** A row is one token position of one sequence at one iteration of the segment. Hidden
//! states live in *slots* `(n_slots, d_model)` so that rows may rest between passes. Operations
//! read `Row::slot`, never a dense row index, for the residual stream; everything else (q, k, v,
//! gate, ..) is scratch of the running pass.
//!
//! **KV pages.** A page holds the keys and values of `PAGE_TOKENS` consecutive positions for
//! `layers_per_page` layers. A sequence has one page table per *KV group*: group 0 is the prelude
//! and coda (absent when the model has none), then one group per iteration of the core. So a
//! sequence that runs fewer loops owns fewer pages. `KvPlace` tells an operation which group and
//! which layer within the page a block uses at a given iteration.
//!
//! **Batch invariance.** The arithmetic of a row depends on its own sequence only: never on the
//! other rows of the pass, on the chunking, or on how the pages came to be filled. Tests demand
//! bit equality.
//!
//! What is not here: tokens' meaning, sampling, page allocation, any policy.

pub mod cpu;
pub mod cuda;
mod encoder;
pub mod exit_signal;
pub mod quantize;
pub mod reference;
pub mod state_init;
mod window;

pub use encoder::LayerNormOp;
pub use window::{CacheWindow, Visible};

use crate::dtype::DType;

/// Positions per KV page.
pub const PAGE_TOKENS: usize = 16;

/// A weight matrix `(n_out, n_in)` that the backend holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixId(pub u32);

/// A vector of f32 (norm weights, biases) that the backend holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VectorId(pub u32);

/// A rotary table that the backend holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeId(pub u32);

/// A KV page of the pool, `0..StateGeometry::n_pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// A hidden-state slot, `0..StateGeometry::n_slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// A stored tensor as the container gives it: `(n_out, n_in)` row-major, quantized along `n_in`.
#[derive(Clone, Copy, Debug)]
pub struct TensorData<'a> {
    /// Name in the file, for errors.
    pub name: &'a str,
    /// Element type of `bytes`.
    pub dtype: DType,
    /// Rows of the matrix.
    pub n_out: usize,
    /// Columns; a multiple of the type's block length.
    pub n_in: usize,
    /// `n_out * n_in` weights, checked against the type by the container.
    pub bytes: &'a [u8],
}

/// Which coordinates of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `(2i, 2i+1)`: GGUF llama-type files, whose q/k rows are stored permuted.
    Interleaved,
    /// `(i, i + n/2)`: the "NeoX" order of Qwen and of Hugging Face checkpoints.
    Halves,
}

/// A rotary embedding: angle of pair `i` at position `p` is `p * inverse_frequencies[i]`.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// (n_rotated / 2); scaling already applied.
    pub inverse_frequencies: Vec<f32>,
    /// Which coordinates form a pair.
    pub pairs: RopePairs,
    /// Factor on sin and cos (YaRN attention scaling); 1 without.
    pub magnitude: f32,
}

/// Sizes of the mutable state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateGeometry {
    /// Most rows of one pass.
    pub max_rows: usize,
    /// Hidden-state slots, each (d_model) f32.
    pub n_slots: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Inner width of the feed-forward network.
    pub d_ff: usize,
    /// Vocabulary size (width of the logits).
    pub vocab_size: usize,
    /// Layers that share a page.
    pub layers_per_page: usize,
    /// Pages of the pool.
    pub n_pages: usize,
    /// Longest context in tokens.
    pub max_context: usize,
    /// Each slot also keeps what the model injects at every loop, (d_model) f32.
    pub keeps_input: bool,
}

impl StateGeometry {
    /// Bytes of one KV page with f16 keys and values.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        2 * 2 * PAGE_TOKENS * self.layers_per_page * self.n_kv_heads * self.head_dim
    }
}

/// One row of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where the hidden state lives.
    pub slot: SlotId,
    /// The token at this position (read when `enters`).
    pub token: u32,
    /// Position in the sequence, from 0.
    pub position: u32,
    /// Index into `Pass::sequences`.
    pub sequence: u32,
    /// Iteration of the segment this row is in, from 0.
    pub iteration: u32,
    /// The row starts here: its hidden state is the token's embedding.
    pub enters: bool,
}

/// The pages of one sequence: one table per KV group. Position `p` lies in block `p / PAGE_TOKENS`,
/// whose entry is [`SequencePages::entry`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequencePages {
    /// `[group][entry]`, all of one length.
    pub groups: Vec<Vec<PageId>>,
    /// What its rows see of each other.
    pub window: CacheWindow,
    /// Blocks behind the kept ones that are absent, because no row to come sees them.
    pub n_dropped: usize,
}

impl SequencePages {
    /// All blocks are there, and every row sees all before it.
    #[must_use]
    pub fn full(groups: Vec<Vec<PageId>>) -> Self {
        Self {
            groups,
            ..Self::default()
        }
    }

    /// Where the entry of a block stands in each table.
    #[must_use]
    pub fn entry(&self, block_idx: usize) -> usize {
        self.window.entry(block_idx, self.n_dropped)
    }

    /// Whether the blocks that a row at `position` sees are not among the dropped ones.
    #[must_use]
    pub fn holds_window_of(&self, position: usize) -> bool {
        self.n_dropped <= self.window.unseen_blocks(position)
    }
}

/// One pass of one segment over rows of several sequences. Rows of one sequence are adjacent and
/// in ascending order of position; a row attends to the earlier positions of its sequence that its
/// window shows (their K/V are in the pages or come from earlier rows of this pass) and to itself.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// The rows, at most `StateGeometry::max_rows`.
    pub rows: Vec<Row>,
    /// Page tables, indexed by `Row::sequence`.
    pub sequences: Vec<SequencePages>,
}

/// Where the K/V of a block live: group `first_group + iteration * groups_per_iteration`, layer
/// `layer` inside the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// KV group of iteration 0.
    pub first_group: u32,
    /// 1 in a core that loops, 0 elsewhere.
    pub groups_per_iteration: u32,
    /// Layer within the page.
    pub layer: u32,
}

impl KvPlace {
    /// The KV group of a row at this iteration.
    #[must_use]
    pub fn group(&self, iteration: u32) -> usize {
        (self.first_group + iteration * self.groups_per_iteration) as usize
    }
}

/// A matrix with an optional bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// (n_out, n_in)
    pub weight: MatrixId,
    /// (n_out)
    pub bias: Option<VectorId>,
}

/// `hidden[slot] = [norm](scale * table[token] + positions[position] + constant)` for rows that enter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbedOp {
    /// (vocab_size, d_model)
    pub table: MatrixId,
    /// 1 in most models.
    pub scale: f32,
    /// (at least max_context, d_model): learned positions.
    pub positions: Option<MatrixId>,
    /// (d_model): what every row gets, like the type of a text's tokens.
    pub constant: Option<VectorId>,
    /// Of the sum.
    pub norm: Option<LayerNormOp>,
}

/// `hidden = rmsnorm(hidden)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOp {
    /// (d_model)
    pub norm: VectorId,
    /// Epsilon of the norm.
    pub epsilon: f32,
}

/// What the state of a looped model is before its first loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StateInit {
    /// The input itself: what the prelude gave.
    Input,
    /// Zeros.
    Zero,
    /// [`state_init::value`] of the row's position, times `std`: the same in every batch, chunk,
    /// replica and on every device.
    Normal {
        /// Standard deviation.
        std: f32,
        /// Seed of the model.
        seed: u64,
    },
}

/// For rows at iteration 0: `input = W · hidden`, then `hidden = the initial state`. The product
/// does not change from loop to loop, so it is taken once and kept in the row's slot.
#[derive(Clone, Copy, Debug)]
pub struct StartLoopsOp {
    /// (d_model, d_model): the half of the model's adapter that meets the input.
    pub input: Linear,
    /// The initial state.
    pub state: StateInit,
}

/// `hidden = W · hidden + input`, before the blocks of every loop.
#[derive(Clone, Copy, Debug)]
pub struct InjectOp {
    /// (d_model, d_model): the half of the model's adapter that meets the state.
    pub state: Linear,
}

/// `q, k, v = split heads(W · rmsnorm(hidden))`, optional per-head norm, rotate, store k and v.
#[derive(Clone, Copy, Debug)]
pub struct QkvOp {
    /// (d_model) weight of the RMS norm before the projections; None: `hidden` itself goes in.
    pub norm: Option<VectorId>,
    /// Epsilon of all norms in this operation.
    pub epsilon: f32,
    /// (n_heads * head_dim, d_model)
    pub q: Linear,
    /// (n_kv_heads * head_dim, d_model)
    pub k: Linear,
    /// (n_kv_heads * head_dim, d_model)
    pub v: Linear,
    /// (head_dim) RMS norm of each query head before rotation (Qwen3).
    pub q_norm: Option<VectorId>,
    /// (head_dim) the same for keys.
    pub k_norm: Option<VectorId>,
    /// None: no rotation in this layer (SmolLM3 NoPE layers).
    pub rope: Option<RopeId>,
    /// Where k and v go.
    pub kv: KvPlace,
}

/// `attention = softmax(q·k * scale) · v` over the row's own sequence, per head.
#[derive(Clone, Copy, Debug)]
pub struct AttendOp {
    /// Where k and v are.
    pub kv: KvPlace,
    /// Usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// The layer's own window: only the last `window` positions, self included; 0 = all. A row sees
    /// what both this and its sequence's window show.
    pub window: u32,
    /// Every row sees all rows of its sequence, before and behind it: all are in this pass, and windows
    /// do not count.
    pub is_bidirectional: bool,
}

/// `hidden += [post_norm](W · attention)`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOutputOp {
    /// (d_model, n_heads * head_dim)
    pub output: Linear,
    /// (d_model) RMS norm of the branch before it is added (sandwich norms).
    pub post_norm: Option<VectorId>,
    /// Epsilon of `post_norm`.
    pub epsilon: f32,
}

/// `hidden += [post_norm](down · (silu(gate · n) * (up · n)))`, `n = rmsnorm(hidden)`; without a gate
/// `down · gelu(up · n)`.
#[derive(Clone, Copy, Debug)]
pub struct FeedForwardOp {
    /// (d_model); None: `hidden` itself goes in.
    pub norm: Option<VectorId>,
    /// Epsilon of all norms in this operation.
    pub epsilon: f32,
    /// (d_ff, d_model); None: there is none, and the activation is the exact GELU.
    pub gate: Option<Linear>,
    /// (d_ff, d_model)
    pub up: Linear,
    /// (d_model, d_ff)
    pub down: Linear,
    /// (d_model) RMS norm of the branch before it is added (sandwich norms).
    pub post_norm: Option<VectorId>,
}

/// `logits = W · rmsnorm(hidden)` for the slots that want them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsOp {
    /// (d_model); None where the last loop's norm has done it already.
    pub norm: Option<VectorId>,
    /// Epsilon of the norm.
    pub epsilon: f32,
    /// (vocab_size, d_model)
    pub output: Linear,
}

/// What tells after a loop whether a row has looped enough: one number per row, see [`exit_signal`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExitSignal {
    /// Of the model's own gate, whose weight is (d_model).
    Gate {
        /// (d_model)
        weight: VectorId,
        /// Added to the product.
        bias: f32,
    },
    /// How far the state is from the kept one.
    Change,
    /// How far the head's distribution is from that of the kept state.
    Divergence(LogitsOp),
}

/// The K/V of rows that leave the loop stand for those of the loops they skip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillOp {
    /// Of the first block of the core.
    pub kv: KvPlace,
    /// Blocks of the core.
    pub n_layers: u32,
}

/// A row that leaves the loop after the iteration that the running pass ran it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedLoops {
    /// Index into `Pass::rows`.
    pub row_idx: u32,
    /// It skips the iterations `Row::iteration + 1 .. n_loops`.
    pub n_loops: u32,
}

/// Bytes a backend holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights in the backend's layout.
    pub weight_bytes: u64,
    /// The KV page pool.
    pub kv_bytes: u64,
    /// Slots, scratch, logits.
    pub scratch_bytes: u64,
}

/// Why a backend could not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A tensor that no kernel can take.
    #[error("tensor {tensor}: {reason}")]
    Unsupported {
        /// Name in the file.
        tensor: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// An allocation that the device refused.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What for.
        what: String,
        /// How much.
        bytes: u64,
    },
    /// The device failed; the engine that owns it ends.
    #[error("device failure: {0}")]
    Device(String),
}

/// The operations. See the module doc for the order and the invariants.
///
/// Loading calls come first, then one `allocate`, then passes. Implementations may assume valid
/// ids and shapes in operations (they come from `model/`, which checked them) and should assert.
pub trait Backend: Send {
    /// Which kernels run, for logs and benches, like `cpu avx2 x2`.
    fn name(&self) -> String;

    /// Takes a weight matrix, repacking as it likes. `tensor.bytes` is not kept.
    fn load_matrix(&mut self, tensor: &TensorData<'_>) -> Result<MatrixId, BackendError>;

    /// Takes a vector.
    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError>;

    /// Takes a rotary table.
    fn load_rope(&mut self, table: &RopeTable) -> Result<RopeId, BackendError>;

    /// Allocates slots, pages and scratch. Page contents are undefined until written.
    fn allocate(&mut self, geometry: &StateGeometry) -> Result<(), BackendError>;

    /// Bytes held.
    fn memory(&self) -> MemoryUse;

    /// Starts a pass: the rows and tables of all following operations.
    fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError>;

    /// See [`EmbedOp`].
    fn embed(&mut self, op: &EmbedOp) -> Result<(), BackendError>;

    /// See [`NormOp`]; all rows of the pass.
    fn normalize(&mut self, op: &NormOp) -> Result<(), BackendError>;

    /// See [`LayerNormOp`]; all rows of the pass.
    fn layer_normalize(&mut self, op: &LayerNormOp) -> Result<(), BackendError>;

    /// See [`StartLoopsOp`]. Needs `StateGeometry::keeps_input`.
    fn start_loops(&mut self, op: &StartLoopsOp) -> Result<(), BackendError>;

    /// See [`InjectOp`]; all rows of the pass. Needs `StateGeometry::keeps_input`.
    fn inject(&mut self, op: &InjectOp) -> Result<(), BackendError>;

    /// See [`QkvOp`].
    fn qkv(&mut self, op: &QkvOp) -> Result<(), BackendError>;

    /// See [`AttendOp`].
    fn attend(&mut self, op: &AttendOp) -> Result<(), BackendError>;

    /// See [`AttentionOutputOp`].
    fn attention_output(&mut self, op: &AttentionOutputOp) -> Result<(), BackendError>;

    /// See [`FeedForwardOp`].
    fn feed_forward(&mut self, op: &FeedForwardOp) -> Result<(), BackendError>;

    /// Keeps the states of some rows of the pass, ascending indexes, as they are now: each slot has
    /// room for one kept state. The first call may allocate that room.
    fn keep_state(&mut self, row_idxs: &[u32]) -> Result<(), BackendError>;

    /// See [`ExitSignal`]: of some rows of the pass, ascending indexes, written to `out` in their
    /// order. Where a kept state is needed, the rows' states were kept in this pass.
    fn exit_signals(
        &mut self,
        signal: &ExitSignal,
        row_idxs: &[u32],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError>;

    /// See [`FillOp`]. Nobody else reads or writes the skipped places in this pass.
    fn fill_skipped(&mut self, op: &FillOp, skipped: &[SkippedLoops]) -> Result<(), BackendError>;

    /// See [`LogitsOp`]. Returns `(n slots, vocab_size)` in their order. The slots need not be among
    /// those of the running pass.
    fn logits(&mut self, op: &LogitsOp, slots: &[SlotId]) -> Result<&[f32], BackendError>;

    /// The states of some slots, normed where there is a norm, `(n slots, d_model)` in their order. The
    /// slots need not be among those of the running pass.
    fn states(
        &mut self,
        norm: Option<&NormOp>,
        slots: &[SlotId],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError>;

    /// Copies a page (copy-on-write when a sequence branches).
    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), BackendError>;
}
