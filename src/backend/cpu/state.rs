//! The mutable state of a backend: slots, KV pages, scratch, and the tables of the running pass.
//!
//! Owned by the engine thread; workers see it through `Step` (`step.rs`) during a region. Sized
//! once in [`State::allocate`]; only the logits grow, when more rows are asked for than before, and
//! room for kept states is made when the first row may leave a loop early.

use super::buffer::Buffer;
use super::kernels::vector::ActivationBlock;
use super::layout::BLOCK;
use crate::backend::{
    AttendOp, BackendError, CacheWindow, KvPlace, MemoryUse, PAGE_TOKENS, Pass, RopeTable, Row,
    StateGeometry,
};

/// Rows that one unit of a product covers: their activations stay in the second-level cache.
pub(super) const ROW_TILE: usize = 64;
/// Outputs that one unit of a product covers, except in the projections to heads.
pub(super) const TILE_WIDTH: usize = 32;
/// Up to this many rows every thread prepares all inputs for itself instead of meeting a barrier.
pub(super) const LOCAL_ROWS: usize = 2;
/// Positions of one split of attention. Splits start at multiples of it, whatever the batch.
pub(super) const SPLIT_TOKENS: usize = 256;
/// Query heads times rows that attention handles at once.
const COLUMNS: usize = 24;
/// Up to this many rows splits may run on different threads.
pub(super) const SPLIT_ROWS_MAX: usize = 8;
/// Rows of logits allocated at first.
const LOGIT_ROWS_MIN: usize = 16;

/// Activations that go into a product.
pub(super) struct Inputs {
    /// `(rows, n)`
    pub(super) floats: Buffer<f32>,
    /// `(rows, n / 32)`
    pub(super) blocks: Buffer<ActivationBlock>,
    /// `(rows, n / 32)`: what quantization left over, or empty.
    pub(super) remainders: Buffer<ActivationBlock>,
}

impl Inputs {
    fn allocate(n_rows: usize, n: usize, twice: bool) -> Result<Self, BackendError> {
        Ok(Inputs {
            floats: Buffer::zeroed(n_rows * n, "activations")?,
            blocks: Buffer::zeroed(n_rows * (n / BLOCK), "quantized activations")?,
            remainders: Buffer::zeroed(
                if twice { n_rows * (n / BLOCK) } else { 0 },
                "quantized activations",
            )?,
        })
    }

    fn n_bytes(&self) -> u64 {
        self.floats.n_bytes() + self.blocks.n_bytes() + self.remainders.n_bytes()
    }
}

/// What one thread works in.
pub(super) struct Scratch {
    /// `(ROW_TILE, tile width)`, twice (gate and up).
    pub(super) tiles: [Buffer<f32>; 2],
    /// Inputs of up to `LOCAL_ROWS` rows, prepared by this thread for itself ..
    pub(super) local: Inputs,
    /// .. for the region with this number.
    pub(super) local_region: u64,
    /// `(max of d_model, padded head)`: a norm's result.
    pub(super) row: Buffer<f32>,
    /// `(padded head)`: a head as f16.
    pub(super) half: Buffer<u16>,
    /// `(columns, padded head)`: scaled queries.
    pub(super) queries: Buffer<f32>,
    /// `(columns, SPLIT_TOKENS)`
    pub(super) scores: Buffer<f32>,
    /// `(columns, padded head + 2)`: weighted values, largest score, sum of weights of a split.
    pub(super) split: Buffer<f32>,
    /// The same, merged over the splits so far.
    pub(super) merged: Buffer<f32>,
}

impl Scratch {
    fn allocate(geometry: &StateGeometry, sizes: &Sizes) -> Result<Self, BackendError> {
        let buffer = |len: usize| Buffer::zeroed(len, "scratch of a thread");
        let n_columns = sizes.columns_max;
        let n_input = sizes.input_width;
        Ok(Scratch {
            tiles: [
                buffer(ROW_TILE * sizes.tile_width)?,
                buffer(ROW_TILE * sizes.tile_width)?,
            ],
            local: Inputs::allocate(LOCAL_ROWS, n_input, true)?,
            local_region: 0,
            row: buffer(geometry.d_model.max(sizes.padded_dim))?,
            half: Buffer::zeroed(sizes.padded_dim, "scratch of a thread")?,
            queries: buffer(n_columns * sizes.padded_dim)?,
            scores: buffer(n_columns * SPLIT_TOKENS)?,
            split: buffer(n_columns * (sizes.padded_dim + 2))?,
            merged: buffer(n_columns * (sizes.padded_dim + 2))?,
        })
    }

    fn n_bytes(&self) -> u64 {
        let floats = [
            &self.tiles[0],
            &self.tiles[1],
            &self.row,
            &self.queries,
            &self.scores,
        ];
        floats.iter().map(|buffer| buffer.n_bytes()).sum::<u64>()
            + self.split.n_bytes()
            + self.merged.n_bytes()
            + self.half.n_bytes()
            + self.local.n_bytes()
    }
}

/// Sizes that follow from the geometry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Head width rounded up to a multiple of 16.
    pub(super) padded_dim: usize,
    /// Width of all query heads.
    pub(super) q_width: usize,
    /// Query heads per key head.
    pub(super) heads_per_kv: usize,
    /// Heads that one unit of a projection covers: a whole number of panels.
    pub(super) heads_per_unit: usize,
    /// Rows of one attention block.
    pub(super) rows_per_block: usize,
    /// `heads_per_kv * rows_per_block`
    columns_max: usize,
    /// Splits of the longest context.
    pub(super) splits_max: usize,
    /// u16 values of the keys of one (page, layer, head); the values follow.
    pub(super) key_len: usize,
    /// u16 values of one (page, layer, head).
    pub(super) head_len: usize,
    /// u16 values of a page.
    pub(super) page_len: usize,
    /// Values of a thread's tile row.
    pub(super) tile_width: usize,
    /// Widest input of a projection that may be prepared locally.
    pub(super) input_width: usize,
}

impl Sizes {
    fn of(geometry: &StateGeometry, lanes: usize) -> Self {
        let head_dim = geometry.head_dim;
        let padded_dim = head_dim.next_multiple_of(16);
        let heads_per_kv = geometry.n_heads / geometry.n_kv_heads;
        let heads_per_unit = (1..=lanes)
            .find(|n| (n * head_dim).is_multiple_of(lanes))
            .expect("`lanes` heads are a whole number of panels");
        let rows_per_block = (COLUMNS / heads_per_kv).max(1);
        let q_width = geometry.n_heads * head_dim;
        let key_len = head_dim * PAGE_TOKENS;
        let head_len = key_len + padded_dim * PAGE_TOKENS;
        Sizes {
            padded_dim,
            q_width,
            heads_per_kv,
            heads_per_unit,
            rows_per_block,
            columns_max: heads_per_kv * rows_per_block,
            splits_max: geometry.max_context.div_ceil(SPLIT_TOKENS).max(1),
            key_len,
            head_len,
            page_len: geometry.layers_per_page * geometry.n_kv_heads * head_len,
            tile_width: (heads_per_unit * head_dim)
                .next_multiple_of(lanes)
                .max(TILE_WIDTH),
            input_width: geometry.d_model.max(q_width),
        }
    }

    /// Values of one partial result of attention.
    pub(super) fn partial_len(&self) -> usize {
        self.padded_dim + 2
    }
}

/// Where the tables of a sequence are, and how they are read.
#[derive(Clone, Copy)]
struct SequenceTable {
    /// Its first group in `PassTables::groups`.
    first_group: u32,
    window: CacheWindow,
    /// As in [`crate::backend::SequencePages`].
    n_dropped: usize,
    /// Behind its last row of this pass.
    end: usize,
}

/// The running pass, with the page tables flat.
#[derive(Default)]
pub(super) struct PassTables {
    /// The rows.
    pub(super) rows: Vec<Row>,
    /// Indexes of rows at iteration 0.
    pub(super) starting: Vec<u32>,
    /// `[start, end)` row ranges of one sequence and iteration, for attention.
    pub(super) blocks: Vec<(u32, u32)>,
    /// All page tables, one after the other.
    pages: Vec<u32>,
    /// `[start, end)` in `pages` of each group.
    groups: Vec<(u32, u32)>,
    /// By `Row::sequence`.
    sequences: Vec<SequenceTable>,
    /// Number of the pass that last used each slot, to find slots used twice.
    slot_seen: Vec<u64>,
    n_passes: u64,
}

impl PassTables {
    fn for_geometry(geometry: &StateGeometry) -> Self {
        PassTables {
            rows: Vec::with_capacity(geometry.max_rows),
            starting: Vec::with_capacity(geometry.max_rows),
            blocks: Vec::with_capacity(geometry.max_rows),
            slot_seen: vec![0; geometry.n_slots],
            ..PassTables::default()
        }
    }

    /// The page that holds `block_idx` of a row's own table at `place`.
    pub(super) fn page(&self, row: &Row, place: KvPlace, block_idx: usize) -> usize {
        let sequence = &self.sequences[row.sequence as usize];
        let group = sequence.first_group as usize + place.group(row.iteration);
        let (start, end) = self.groups[group];
        let entry = sequence.window.entry(block_idx, sequence.n_dropped);
        self.pages[start as usize..end as usize][entry] as usize
    }

    /// The window of a row's sequence.
    pub(super) fn window(&self, row: &Row) -> CacheWindow {
        self.sequences[row.sequence as usize].window
    }

    /// Behind the last row of a row's sequence in this pass.
    pub(super) fn sequence_end(&self, row: &Row) -> usize {
        self.sequences[row.sequence as usize].end
    }

    fn take(
        &mut self,
        pass: &Pass,
        geometry: &StateGeometry,
        rows_per_block: usize,
    ) -> Result<(), BackendError> {
        let broken = |what: String| Err(BackendError::Device(format!("invalid pass: {what}")));
        if pass.rows.len() > geometry.max_rows {
            return broken(format!(
                "{} rows, at most {}",
                pass.rows.len(),
                geometry.max_rows
            ));
        }
        self.n_passes += 1;
        for row in &pass.rows {
            match self.slot_seen.get_mut(row.slot.0 as usize) {
                Some(seen) if *seen != self.n_passes => *seen = self.n_passes,
                _ => return broken(format!("slot out of range or used twice in {row:?}")),
            }
            let position = row.position as usize;
            let pages = match pass.sequences.get(row.sequence as usize) {
                Some(pages) if position < geometry.max_context => pages,
                _ => return broken(format!("position or sequence out of range in {row:?}")),
            };
            if !pages.holds_window_of(position) {
                return broken(format!("dropped blocks are in the window of {row:?}"));
            }
        }
        self.rows.clear();
        self.rows.extend_from_slice(&pass.rows);
        self.starting.clear();
        let rows = pass.rows.iter().enumerate();
        self.starting.extend(
            rows.filter(|(_, row)| row.iteration == 0)
                .map(|(idx, _)| idx as u32),
        );
        self.cut_blocks(rows_per_block);
        self.take_pages(pass, geometry)
    }

    /// Neighbours of one sequence and iteration in ascending order share a block.
    fn cut_blocks(&mut self, rows_per_block: usize) {
        self.blocks.clear();
        for (idx, row) in self.rows.iter().enumerate() {
            let joins = self.blocks.last().is_some_and(|&(start, _)| {
                let before = &self.rows[idx - 1];
                idx - (start as usize) < rows_per_block
                    && before.sequence == row.sequence
                    && before.iteration == row.iteration
                    && before.position < row.position
            });
            match self.blocks.last_mut() {
                Some(last) if joins => last.1 = idx as u32 + 1,
                _ => self.blocks.push((idx as u32, idx as u32 + 1)),
            }
        }
    }

    fn take_pages(&mut self, pass: &Pass, geometry: &StateGeometry) -> Result<(), BackendError> {
        self.pages.clear();
        self.groups.clear();
        self.sequences.clear();
        for sequence in &pass.sequences {
            self.sequences.push(SequenceTable {
                first_group: self.groups.len() as u32,
                window: sequence.window,
                n_dropped: sequence.n_dropped,
                end: 0,
            });
            for group in &sequence.groups {
                let start = self.pages.len() as u32;
                self.pages.extend(group.iter().map(|page| page.0));
                self.groups.push((start, self.pages.len() as u32));
            }
        }
        for row in &self.rows {
            let sequence = &mut self.sequences[row.sequence as usize];
            sequence.end = sequence.end.max(row.position as usize + 1);
        }
        match self
            .pages
            .iter()
            .find(|&&page| page as usize >= geometry.n_pages)
        {
            Some(page) => Err(BackendError::Device(format!(
                "invalid pass: page {page} of a pool of {}",
                geometry.n_pages
            ))),
            None => Ok(()),
        }
    }
}

/// Everything that passes change.
pub(super) struct State {
    pub(super) geometry: StateGeometry,
    pub(super) sizes: Sizes,
    /// `(n_slots, d_model)`
    pub(super) hidden: Buffer<f32>,
    /// `(n_slots, d_model)`, or empty: what is injected at every loop.
    pub(super) loop_input: Buffer<f32>,
    /// `(n_slots, d_model)`, or empty: states before a loop that may be the last.
    pub(super) kept: Buffer<f32>,
    /// `(n_pages, layers_per_page, n_kv_heads, [keys (head_dim, 16), values (16, padded_dim)])` f16
    pub(super) kv: Buffer<u16>,
    /// `(max_rows, q_width)`: rotated queries.
    pub(super) queries: Buffer<f32>,
    /// `(max_rows, q_width)`: what attention found.
    pub(super) attention: Buffer<f32>,
    /// `(SPLIT_ROWS_MAX, n_heads, splits_max, padded_dim + 2)`: splits that await merging.
    pub(super) partials: Buffer<f32>,
    /// Attention of this pass lies in `partials`, for this window.
    pub(super) in_splits: Option<AttendOp>,
    /// Inputs of the projections from the residual stream and from attention.
    pub(super) inputs: Inputs,
    /// Inputs of the down projection.
    pub(super) gated: Inputs,
    /// `(max_rows, d_model)`: a branch that waits for its norm.
    pub(super) branch: Buffer<f32>,
    /// `(rows, vocab_size)`
    pub(super) logits: Buffer<f32>,
    /// Per rotary table `(max_rows, n_pairs, [cos, sin])`, of the running pass.
    pub(super) angles: Vec<Buffer<f32>>,
    /// One per thread.
    pub(super) scratch: Vec<Scratch>,
    /// Number of the last region that prepares inputs locally.
    pub(super) n_regions: u64,
    pub(super) pass: PassTables,
}

impl State {
    /// Allocates everything.
    pub(super) fn allocate(
        geometry: &StateGeometry,
        lanes: usize,
        n_threads: usize,
        ropes: &[RopeTable],
    ) -> Result<Self, BackendError> {
        assert!(
            geometry.n_kv_heads > 0 && geometry.n_heads.is_multiple_of(geometry.n_kv_heads),
            "key heads divide query heads (checked by the model's spec)"
        );
        let sizes = Sizes::of(geometry, lanes);
        let rows = geometry.max_rows;
        let n_split_rows = SPLIT_ROWS_MAX.min(rows);
        let n_partials = n_split_rows * geometry.n_heads * sizes.splits_max;
        let n_logits = LOGIT_ROWS_MIN.min(rows) * geometry.vocab_size;
        Ok(State {
            geometry: *geometry,
            sizes,
            hidden: Buffer::zeroed(geometry.n_slots * geometry.d_model, "hidden-state slots")?,
            loop_input: Buffer::zeroed(
                usize::from(geometry.keeps_input) * geometry.n_slots * geometry.d_model,
                "inputs of the loop",
            )?,
            kept: Buffer::zeroed(0, "kept states")?,
            kv: Buffer::zeroed(geometry.n_pages * sizes.page_len, "the KV page pool")?,
            queries: Buffer::zeroed(rows * sizes.q_width, "queries")?,
            attention: Buffer::zeroed(rows * sizes.q_width, "attention")?,
            partials: Buffer::zeroed(n_partials * sizes.partial_len(), "attention splits")?,
            in_splits: None,
            inputs: Inputs::allocate(rows, sizes.input_width, true)?,
            gated: Inputs::allocate(rows, geometry.d_ff, false)?,
            branch: Buffer::zeroed(rows * geometry.d_model, "branches")?,
            logits: Buffer::zeroed(n_logits, "logits")?,
            angles: ropes
                .iter()
                .map(|rope| Buffer::zeroed(rows * rope.inverse_frequencies.len() * 2, "angles"))
                .collect::<Result<_, _>>()?,
            scratch: (0..n_threads)
                .map(|_| Scratch::allocate(geometry, &sizes))
                .collect::<Result<_, _>>()?,
            n_regions: 0,
            pass: PassTables::for_geometry(geometry),
        })
    }

    /// Takes the rows and tables of a pass; refuses what would break memory safety.
    pub(super) fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError> {
        self.in_splits = None;
        self.pass
            .take(pass, &self.geometry, self.sizes.rows_per_block)
    }

    /// So that the logits of `n_rows` fit.
    pub(super) fn make_room_for_logits(&mut self, n_rows: usize) -> Result<(), BackendError> {
        let n_logits = n_rows * self.geometry.vocab_size;
        if n_logits > self.logits.len() {
            self.logits = Buffer::zeroed(n_logits, "logits")?;
        }
        Ok(())
    }

    /// So that every slot can keep a state.
    pub(super) fn make_room_for_kept(&mut self) -> Result<(), BackendError> {
        if self.kept.is_empty() {
            self.kept = Buffer::zeroed(self.hidden.len(), "kept states")?;
        }
        Ok(())
    }

    /// Bytes held, without weights.
    pub(super) fn memory(&self) -> MemoryUse {
        let floats = [
            &self.hidden,
            &self.loop_input,
            &self.kept,
            &self.queries,
            &self.attention,
            &self.partials,
            &self.branch,
            &self.logits,
        ];
        MemoryUse {
            weight_bytes: 0,
            kv_bytes: self.kv.n_bytes(),
            scratch_bytes: floats.iter().map(|buffer| buffer.n_bytes()).sum::<u64>()
                + self.angles.iter().map(Buffer::n_bytes).sum::<u64>()
                + self.scratch.iter().map(Scratch::n_bytes).sum::<u64>()
                + self.inputs.n_bytes()
                + self.gated.n_bytes(),
        }
    }
}
