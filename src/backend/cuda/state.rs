//! Buffers that a model's passes use, and the tables of the running pass.
//!
//! Everything that changes from pass to pass lies in device buffers at fixed addresses (header, rows,
//! pages), so that a captured graph can be replayed. A page table that outgrows its buffer gets a new
//! one, and graphs that name the old one must go. What is not here: weights, kernels.

use super::launch::Ptr;
use super::memory::{Buffer, bytes_of};
use crate::backend::{BackendError, Pass, StateGeometry};
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// `PassHeader` of `kernels/common.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct PassHeader {
    pub(super) n_rows: i32,
    pub(super) n_wanted: i32,
    reserved: [i32; 2],
}

/// `RowInfo` of `kernels/common.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct RowInfo {
    slot: i32,
    token: i32,
    position: i32,
    iteration: i32,
    enters: i32,
    table_base: i32,
    table_len: i32,
    window_tokens: i32,
    n_kept: i32,
    n_dropped: i32,
    first_row: i32,
    n_seq_rows: i32,
    reserved: [i32; 4],
}

/// Ints in a row of the pass's table: the stride of its slots.
pub(super) const ROW_INTS: i32 = 16;

/// The mutable state of a model on a device.
pub(super) struct State {
    pub(super) geometry: StateGeometry,
    /// (n_slots, d_model) f32: the residual stream.
    pub(super) hidden: Buffer,
    /// The same shape, or none: what is injected at every loop.
    pub(super) input: Buffer,
    /// The same shape, or none: states before a loop that may be the last.
    pub(super) kept: Buffer,
    /// f16, see `KvLayout` in `kernels/common.cuh`.
    pub(super) pool: Buffer,
    pub(super) header: Buffer,
    pub(super) rows: Buffer,
    pub(super) pages: Buffer,
    /// Slots, or pairs of (row, loops), of the running list operation; (2 * n_slots) or more i32.
    pub(super) list: Buffer,
    /// (max_rows, widest input) f16.
    pub(super) x16: Buffer,
    /// The same as int8.
    pub(super) x8: Buffer,
    /// (max_rows, widest input / 32) pairs of f32.
    pub(super) x8_sums: Buffer,
    /// (max_rows, n_heads * head_dim) f32.
    pub(super) queries: Buffer,
    /// (max_rows, n_kv_heads * head_dim) f32.
    pub(super) keys: Buffer,
    /// The same shape.
    pub(super) values: Buffer,
    /// (max_rows, n_heads * head_dim) f32: what attention found.
    pub(super) attention: Buffer,
    /// (max_rows, d_ff) f32.
    pub(super) gate: Buffer,
    /// The same shape.
    pub(super) up: Buffer,
    /// (max_rows, d_model) f32.
    pub(super) branch: Buffer,
    /// (rows that want them, vocab_size) f32; grows.
    pub(super) logits: Buffer,
    /// The same of the kept states; grows.
    pub(super) kept_logits: Buffer,
    /// Rows of the running pass.
    pub(super) pass: Pass,
}

impl State {
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        geometry: &StateGeometry,
    ) -> Result<Self, BackendError> {
        let g = geometry;
        let new = |what: &str, n_bytes: usize| Buffer::new(stream, what, n_bytes);
        let (rows, slots) = (g.max_rows, g.n_slots * g.d_model * 4);
        let q_width = g.n_heads * g.head_dim;
        let kv_width = g.n_kv_heads * g.head_dim;
        let widest = g.d_model.max(q_width).max(g.d_ff).next_multiple_of(32);
        Ok(Self {
            geometry: *geometry,
            pool: new("the KV pages", g.n_pages * g.page_bytes())?,
            hidden: new("hidden-state slots", slots)?,
            input: new("inputs of the loop", slots * usize::from(g.keeps_input))?,
            kept: Buffer::none(),
            header: new("the pass", size_of::<PassHeader>())?,
            rows: new("the rows", rows * size_of::<RowInfo>())?,
            pages: new("the page tables", 4 * g.n_pages.max(1024))?,
            list: new("the lists", 8 * g.n_slots.max(rows))?,
            x16: new("activations", 2 * rows * widest)?,
            x8: new("activations", rows * widest)?,
            x8_sums: new("activations", rows * widest / 4)?,
            queries: new("queries", 4 * rows * q_width)?,
            keys: new("keys", 4 * rows * kv_width)?,
            values: new("values", 4 * rows * kv_width)?,
            attention: new("attention", 4 * rows * q_width)?,
            gate: new("feed-forward", 4 * rows * g.d_ff)?,
            up: new("feed-forward", 4 * rows * g.d_ff)?,
            branch: new("branches", 4 * rows * g.d_model)?,
            logits: Buffer::none(),
            kept_logits: Buffer::none(),
            pass: Pass::default(),
        })
    }

    /// Takes the tables of a pass to the device. True where the page tables got a new address.
    pub(super) fn begin(
        &mut self,
        stream: &Arc<CudaStream>,
        pass: &Pass,
    ) -> Result<bool, BackendError> {
        assert!(pass.rows.len() <= self.geometry.max_rows, "too many rows");
        let (rows, pages) = tables(pass);
        let is_moved = 4 * pages.len() > self.pages.n_bytes;
        if is_moved {
            let n_bytes = 4 * pages.len().next_power_of_two();
            self.pages = Buffer::new(stream, "the page tables", n_bytes)?;
        }
        self.pages.write(stream, bytes_of(&pages))?;
        self.rows.write(stream, bytes_of(&rows))?;
        self.pass.clone_from(pass);
        self.want(stream, 0)?;
        Ok(is_moved)
    }

    /// Says how many entries the list has.
    fn want(&mut self, stream: &Arc<CudaStream>, n_wanted: usize) -> Result<(), BackendError> {
        let header = PassHeader {
            n_rows: self.pass.rows.len() as i32,
            n_wanted: n_wanted as i32,
            reserved: [0; 2],
        };
        self.header.write(stream, bytes_of(&[header]))
    }

    /// Takes a list to the device: `n_wanted` entries of one or two numbers.
    pub(super) fn set_list(
        &mut self,
        stream: &Arc<CudaStream>,
        numbers: &[i32],
        n_wanted: usize,
    ) -> Result<(), BackendError> {
        self.want(stream, n_wanted)?;
        self.list.write(stream, bytes_of(numbers))
    }

    /// Bytes of everything but the pages.
    pub(super) fn scratch_bytes(&self) -> u64 {
        let buffers = [
            &self.hidden,
            &self.input,
            &self.kept,
            &self.header,
            &self.rows,
            &self.pages,
            &self.list,
            &self.x16,
            &self.x8,
            &self.x8_sums,
            &self.queries,
            &self.keys,
            &self.values,
            &self.attention,
            &self.gate,
            &self.up,
            &self.branch,
            &self.logits,
            &self.kept_logits,
        ];
        buffers.iter().map(|buffer| buffer.n_bytes as u64).sum()
    }

    /// Address of a slot's kept state, for kernels that need one: null where there is none.
    pub(super) fn kept_ptr(&self) -> Ptr {
        self.kept.ptr
    }
}

/// The rows and the flat page tables of a pass.
fn tables(pass: &Pass) -> (Vec<RowInfo>, Vec<i32>) {
    let mut pages = Vec::new();
    let bases: Vec<(i32, i32)> = pass
        .sequences
        .iter()
        .map(|sequence| {
            let base = pages.len() as i32;
            let groups = sequence.groups.iter().flatten();
            pages.extend(groups.map(|page| page.0 as i32));
            (base, sequence.groups.first().map_or(0, Vec::len) as i32)
        })
        .collect();
    let mut rows: Vec<RowInfo> = Vec::with_capacity(pass.rows.len());
    for chain in pass
        .rows
        .chunk_by(|row, next| row.sequence == next.sequence)
    {
        let first_row = rows.len() as i32;
        for row in chain {
            let sequence = &pass.sequences[row.sequence as usize];
            let (table_base, table_len) = bases[row.sequence as usize];
            rows.push(RowInfo {
                slot: row.slot.0 as i32,
                token: row.token as i32,
                position: row.position as i32,
                iteration: row.iteration as i32,
                enters: i32::from(row.enters),
                table_base,
                table_len,
                window_tokens: sequence.window.tokens as i32,
                n_kept: sequence.window.n_kept as i32,
                n_dropped: sequence.n_dropped as i32,
                first_row,
                n_seq_rows: chain.len() as i32,
                reserved: [0; 4],
            });
        }
    }
    (rows, pages)
}
