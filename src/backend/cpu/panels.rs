//! Weight matrices in panels: repacking at load, and single rows read back out.
//!
//! Owned by the engine thread; workers fill disjoint panels while loading and only read later.
//! Invariants: `n_panels * lanes >= n_out`, rows beyond `n_out` are zero weights; the bytes are
//! all that is kept of a tensor (a tied embedding is read back from the head's panels).

use half::{bf16, f16};

use super::blocks;
use super::buffer::Buffer;
use super::layout::{BLOCK, Layout, Quantized};
use super::threads::Threads;
use crate::backend::{BackendError, TensorData};
use crate::dtype::DType;

/// A weight matrix in panels of `lanes` outputs.
pub(super) struct Matrix {
    /// Outputs.
    pub(super) n_out: usize,
    /// Inputs.
    pub(super) n_in: usize,
    /// Where the bytes lie.
    pub(super) layout: Layout,
    /// Outputs per panel.
    pub(super) lanes: usize,
    /// Bytes from panel to panel.
    pub(super) panel_bytes: usize,
    /// `(n_panels, panel_bytes)`
    pub(super) bytes: Buffer<u8>,
}

impl Matrix {
    /// Repacks a tensor, in parallel.
    pub(super) fn pack(
        tensor: &TensorData<'_>,
        lanes: usize,
        threads: &Threads,
    ) -> Result<Self, BackendError> {
        check(tensor)?;
        let layout = Layout::of(tensor.dtype);
        let panel_bytes = layout.panel_bytes(lanes, tensor.n_in);
        let n_panels = tensor.n_out.div_ceil(lanes);
        let mut bytes = Buffer::zeroed(n_panels * panel_bytes, tensor.name)?;
        bytes.advise_huge_pages();
        let shared = bytes.shared();
        threads.run(n_panels, &|_, panels| {
            for panel_idx in panels {
                let at = panel_idx * panel_bytes;
                // SAFETY: each panel belongs to one unit.
                let panel = unsafe { shared.slice(at..at + panel_bytes) };
                for lane in 0..lanes.min(tensor.n_out - panel_idx * lanes) {
                    let row = Row::of(tensor, panel_idx * lanes + lane);
                    match layout.quantized() {
                        Some(quantized) => row.pack_codes(&quantized, lanes, lane, panel),
                        None => row.pack_floats(lanes, lane, panel),
                    }
                }
            }
        });
        let (n_out, n_in) = (tensor.n_out, tensor.n_in);
        Ok(Matrix {
            n_out,
            n_in,
            layout,
            lanes,
            panel_bytes,
            bytes,
        })
    }

    /// Panels, the last one perhaps padded.
    pub(super) fn n_panels(&self) -> usize {
        self.n_out.div_ceil(self.lanes)
    }

    /// Takes quantized activations (else f32).
    pub(super) fn is_quantized(&self) -> bool {
        self.layout.quantized().is_some()
    }

    /// Writes row `row_idx` as f32 into `out` `(n_in)`.
    pub(super) fn read_row(&self, row_idx: usize, out: &mut [f32]) {
        assert!(
            row_idx < self.n_out && out.len() == self.n_in,
            "row outside the matrix"
        );
        let lane = row_idx % self.lanes;
        let at = row_idx / self.lanes * self.panel_bytes;
        let panel = &self.bytes[at..at + self.panel_bytes];
        let lanes = self.lanes;
        match self.layout.quantized() {
            Some(quantized) => {
                let block_bytes = quantized.block_bytes(lanes);
                let blocks = panel
                    .chunks_exact(block_bytes)
                    .zip(out.chunks_exact_mut(BLOCK));
                for (block, out) in blocks {
                    read_codes(&quantized, lanes, lane, block, out);
                }
            }
            None => {
                for (input, out) in out.iter_mut().enumerate() {
                    *out = self.layout.read_float(panel, input * lanes + lane);
                }
            }
        }
    }
}

impl Layout {
    fn read_float(self, panel: &[u8], idx: usize) -> f32 {
        let two = || [panel[2 * idx], panel[2 * idx + 1]];
        match self {
            Layout::F16 => f16::from_le_bytes(two()).to_f32(),
            Layout::BF16 => bf16::from_le_bytes(two()).to_f32(),
            _ => read_f32(panel, 4 * idx),
        }
    }
}

fn read_f32(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn check(tensor: &TensorData<'_>) -> Result<(), BackendError> {
    let refuse = |reason: String| {
        Err(BackendError::Unsupported {
            tensor: tensor.name.to_string(),
            reason,
        })
    };
    if tensor.n_in == 0 || tensor.n_out == 0 {
        return refuse(format!("is empty: {} x {}", tensor.n_out, tensor.n_in));
    }
    if !tensor.n_in.is_multiple_of(tensor.dtype.block_len()) {
        return refuse(format!(
            "has rows of {} weights; {} needs a multiple of {}",
            tensor.n_in,
            tensor.dtype,
            tensor.dtype.block_len()
        ));
    }
    let n_elements = tensor.n_out as u64 * tensor.n_in as u64;
    let n_bytes = tensor.dtype.bytes_for(n_elements);
    if n_bytes != Some(tensor.bytes.len() as u64) {
        return refuse(format!(
            "has {} bytes; {} x {} {} weights take {}",
            tensor.bytes.len(),
            tensor.n_out,
            tensor.n_in,
            tensor.dtype,
            n_bytes.unwrap_or(0)
        ));
    }
    Ok(())
}

/// One stored row.
struct Row<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

impl<'a> Row<'a> {
    fn of(tensor: &TensorData<'a>, row_idx: usize) -> Self {
        let row_bytes = tensor.n_in / tensor.dtype.block_len() * tensor.dtype.block_bytes();
        let at = row_idx * row_bytes;
        Row {
            dtype: tensor.dtype,
            bytes: &tensor.bytes[at..at + row_bytes],
        }
    }

    fn pack_codes(&self, quantized: &Quantized, lanes: usize, lane: usize, panel: &mut [u8]) {
        let n_parts = self.dtype.block_len() / BLOCK;
        let blocks = panel.chunks_exact_mut(quantized.block_bytes(lanes));
        let mut stored = self.bytes.chunks_exact(self.dtype.block_bytes());
        let mut current: &[u8] = &[];
        for (block_idx, block) in blocks.enumerate() {
            if block_idx % n_parts == 0 {
                current = stored
                    .next()
                    .expect("as many stored blocks as panel blocks (checked)");
            }
            let taken = blocks::take_apart(self.dtype, current, block_idx % n_parts);
            write_codes(quantized, lanes, lane, &taken, block);
        }
    }

    fn pack_floats(&self, lanes: usize, lane: usize, panel: &mut [u8]) {
        let size = self.dtype.block_bytes();
        for (input, weight) in self.bytes.chunks_exact(size).enumerate() {
            let at = (input * lanes + lane) * size;
            panel[at..at + size].copy_from_slice(weight);
        }
    }
}

fn write_codes(
    quantized: &Quantized,
    lanes: usize,
    lane: usize,
    taken: &blocks::Codes,
    block: &mut [u8],
) {
    for (input, &code) in taken.codes.iter().enumerate() {
        let (byte, shift) = quantized.code_at(lanes, lane, input);
        block[byte] |= (code as u8) << shift;
    }
    let mut write = |at: usize, value: f32| {
        if quantized.wide {
            block[at..at + 4].copy_from_slice(&value.to_le_bytes());
        } else {
            block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
        }
    };
    for group in 0..quantized.n_groups() {
        write(quantized.scale_at(lanes, lane, group), taken.scales[group]);
        if quantized.has_minimum {
            write(
                quantized.minimum_at(lanes, lane, group),
                taken.minima[group],
            );
        }
    }
}

fn read_codes(quantized: &Quantized, lanes: usize, lane: usize, block: &[u8], out: &mut [f32]) {
    let read = |at: usize| {
        if quantized.wide {
            read_f32(block, at)
        } else {
            f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
        }
    };
    for (group, out) in out.chunks_exact_mut(quantized.group).enumerate() {
        let scale = read(quantized.scale_at(lanes, lane, group));
        let minimum = if quantized.has_minimum {
            read(quantized.minimum_at(lanes, lane, group))
        } else {
            0.0
        };
        for (i, out) in out.iter_mut().enumerate() {
            let (byte, shift) = quantized.code_at(lanes, lane, group * quantized.group + i);
            let code = if quantized.bits == 8 {
                i32::from(block[byte] as i8)
            } else {
                i32::from(block[byte] >> shift & 15)
            };
            *out = scale * (code - quantized.offset) as f32 + minimum;
        }
    }
}
