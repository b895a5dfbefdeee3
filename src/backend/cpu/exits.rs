//! The operations for rows that may leave a loop early: keeping states, signals, filling the K/V of
//! the loops that are skipped. Regions and units as in `ops.rs`.
//!
//! Only rows that ask for it are touched, so the others cost nothing.

use super::buffer::SharedMut;
use super::ops::logits_of;
use super::step::Step;
use super::threads::Threads;
use crate::backend::{
    ExitSignal, FillOp, KvPlace, LogitsOp, PAGE_TOKENS, Row, SkippedLoops, StateGeometry,
    exit_signal,
};

/// Most pairs of logits (now, before) that are compared at once: it bounds the memory for them.
const PAIRS_MAX: usize = 32;

/// Pairs of logits that are made at once: both rows of a pair are inputs of one product.
pub(super) fn pairs_per_tile(geometry: &StateGeometry) -> usize {
    (geometry.max_rows / 2).clamp(1, PAIRS_MAX)
}

/// `kept = hidden` for the rows.
pub(super) fn keep_state(step: &Step<'_>, threads: &Threads, row_idxs: &[u32]) {
    threads.run(row_idxs.len(), &|_, idxs| {
        for idx in idxs {
            let range = step.hidden_range(row_idxs[idx] as usize);
            // SAFETY: each row belongs to one unit; slots are distinct.
            let (hidden, kept) =
                unsafe { (step.hidden.read(range.clone()), step.kept.slice(range)) };
            kept.copy_from_slice(hidden);
        }
    });
}

/// See [`ExitSignal`]; `out` is as long as `row_idxs`.
pub(super) fn signals(
    step: &Step<'_>,
    threads: &Threads,
    signal: &ExitSignal,
    row_idxs: &[u32],
    out: &mut [f32],
) {
    if let ExitSignal::Divergence(head) = signal {
        let per_tile = pairs_per_tile(&step.geometry);
        for (row_idxs, out) in row_idxs.chunks(per_tile).zip(out.chunks_mut(per_tile)) {
            divergences(step, threads, head, row_idxs, out);
        }
        return;
    }
    let out = SharedMut::new(out);
    threads.run(row_idxs.len(), &|_, idxs| {
        for idx in idxs {
            let range = step.hidden_range(row_idxs[idx] as usize);
            // SAFETY: nobody writes states in this region; `kept` was written in an earlier one.
            let now = unsafe { step.hidden.read(range.clone()) };
            let value = match signal {
                ExitSignal::Gate { weight, bias } => {
                    exit_signal::gate(step.vector(*weight), *bias, now)
                }
                ExitSignal::Change => {
                    // SAFETY: as above.
                    exit_signal::change(now, unsafe { step.kept.read(range) })
                }
                ExitSignal::Divergence(_) => continue,
            };
            // SAFETY: each row belongs to one unit.
            unsafe { out.write(idx, value) };
        }
    });
}

/// Divergences of at most a tile of rows: logits of each row's states, now and kept, in turn.
fn divergences(
    step: &Step<'_>,
    threads: &Threads,
    head: &LogitsOp,
    row_idxs: &[u32],
    out: &mut [f32],
) {
    let state = |idx: usize| {
        let range = step.hidden_range(row_idxs[idx / 2] as usize);
        let states = match idx % 2 {
            0 => &step.hidden,
            _ => &step.kept,
        };
        // SAFETY: nobody writes states while logits are made.
        unsafe { states.read(range) }
    };
    logits_of(step, threads, head, 2 * row_idxs.len(), &state);
    let vocab_size = step.geometry.vocab_size;
    let out = SharedMut::new(out);
    threads.run(row_idxs.len(), &|_, idxs| {
        for idx in idxs {
            let start = 2 * idx * vocab_size;
            // SAFETY: written in an earlier region; each row belongs to one unit.
            unsafe {
                let now = step.logits.read(start..start + vocab_size);
                let before = step.logits.read(start + vocab_size..start + 2 * vocab_size);
                out.write(idx, exit_signal::divergence(now, before));
            }
        }
    });
}

/// See [`FillOp`].
pub(super) fn fill_skipped(
    step: &Step<'_>,
    threads: &Threads,
    op: &FillOp,
    skipped: &[SkippedLoops],
) {
    threads.run(skipped.len(), &|_, idxs| {
        for skip in &skipped[idxs] {
            let row = step.pass.rows[skip.row_idx as usize];
            for iteration in row.iteration + 1..skip.n_loops {
                copy_position(step, op, &row, &Row { iteration, ..row });
            }
        }
    });
}

/// Copies the K/V of one position in all layers of the core from one iteration to another.
fn copy_position(step: &Step<'_>, op: &FillOp, from: &Row, to: &Row) {
    let (sizes, n_heads) = (step.sizes, step.geometry.n_kv_heads);
    let position = from.position as usize;
    let (block_idx, t) = (position / PAGE_TOKENS, position % PAGE_TOKENS);
    let page_start = |row: &Row, kv: KvPlace| step.pass.page(row, kv, block_idx) * sizes.page_len;
    let (from, to) = (page_start(from, op.kv), page_start(to, op.kv));
    let first = op.kv.layer as usize * n_heads;
    for head in first..first + op.n_layers as usize * n_heads {
        let (from, to) = (from + head * sizes.head_len, to + head * sizes.head_len);
        let head_dim = step.geometry.head_dim;
        for place in (0..head_dim).map(|d| d * PAGE_TOKENS + t) {
            // SAFETY: each position belongs to one unit, and the two pages are different ones.
            unsafe {
                let key = step.kv.read(from + place..from + place + 1)[0];
                step.kv.write(to + place, key);
            }
        }
        let values = sizes.key_len + t * sizes.padded_dim;
        // SAFETY: as above.
        unsafe {
            let source = step.kv.read(from + values..from + values + head_dim);
            step.kv
                .slice(to + values..to + values + head_dim)
                .copy_from_slice(source);
        }
    }
}
