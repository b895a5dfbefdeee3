//! Attention over paged keys and values: how it is cut into units, and one unit's work.
//!
//! Units run on any thread. The positions of a sequence are cut into *splits* at multiples of
//! `SPLIT_TOKENS`; each split gives, per query head, its largest score, the sum of its weights and
//! the weighted sum of values, and splits are merged in ascending order, one after the other:
//!
//! ```text
//!   m = max(m1, m2)    total = total1 e^(m1-m) + total2 e^(m2-m)    sums likewise
//! ```
//!
//! That order is the only one, so whether one thread walks all splits (many rows) or each split is
//! a unit and `merge_row` folds them later (few rows, long context) gives the same bits.
//!
//! A *column* is one query head of one row. The rows of a block are neighbours of one sequence and
//! the heads of a unit share a key head, so each key and value is read once for up to 24 columns.
//! A column never reads a weight or value outside of what its row sees: pages hold undefined bytes
//! beyond what was written. Splits and pages that no row of a block sees are skipped; they may be
//! absent (`backend::CacheWindow`).

use std::ops::Range;

use super::kernels::attention::{ScoresArgs, ValuesArgs};
use super::state::{SPLIT_ROWS_MAX, SPLIT_TOKENS, Scratch};
use super::step::Step;
use super::threads::Threads;
use crate::backend::{AttendOp, PAGE_TOKENS, Row, Visible};

/// Splits that a row's visible positions touch: those of the kept beginning, then the others.
#[derive(Clone)]
struct Splits {
    kept: Range<usize>,
    recent: Range<usize>,
}

impl Splits {
    fn of(visible: &Visible) -> Self {
        let touched = |range: &Range<usize>| match range.is_empty() {
            true => 0..0,
            false => range.start / SPLIT_TOKENS..range.end.div_ceil(SPLIT_TOKENS),
        };
        let (kept, recent) = (touched(&visible.kept), touched(&visible.recent));
        let start = recent.start.max(kept.end);
        Self {
            recent: start..recent.end.max(start),
            kept,
        }
    }

    fn contains(&self, split: usize) -> bool {
        self.recent.contains(&split) || self.kept.contains(&split)
    }

    fn first(&self) -> usize {
        self.clone().next().expect("a row sees itself")
    }

    /// Behind the last one.
    fn end(&self) -> usize {
        self.recent.end
    }

    fn len(&self) -> usize {
        self.kept.len() + self.recent.len()
    }
}

impl Iterator for Splits {
    type Item = usize;

    /// Ascending: the order in which they are merged.
    fn next(&mut self) -> Option<usize> {
        self.kept.next().or_else(|| self.recent.next())
    }
}

fn visible(step: &Step<'_>, row: &Row, op: &AttendOp) -> Visible {
    match op.is_bidirectional {
        true => Visible::all(step.pass.sequence_end(row)),
        false => {
            let window = step.pass.window(row);
            window.visible(row.position as usize, op.window)
        }
    }
}

fn splits(step: &Step<'_>, row: &Row, op: &AttendOp) -> Splits {
    Splits::of(&visible(step, row, op))
}

/// `range` cut to `start..start + len`, relative to `start`.
fn within(range: &Range<usize>, start: usize, len: usize) -> Range<usize> {
    let from = range.start.max(start).min(start + len);
    from - start..range.end.min(start + len).max(from) - start
}

/// See [`AttendOp`]. Returns true when the result lies in splits that `merge_row` must fold.
pub(super) fn attend(step: &Step<'_>, threads: &Threads, op: &AttendOp) -> bool {
    let pass = step.pass;
    let (n_blocks, n_kv_heads) = (pass.blocks.len(), step.geometry.n_kv_heads);
    let n_splits = pass
        .rows
        .iter()
        .map(|row| splits(step, row, op).len())
        .max()
        .unwrap_or(0);
    let few_units = n_blocks * n_kv_heads < 4 * threads.n_threads();
    let in_splits = n_splits > 1
        && few_units
        && threads.n_threads() > 1
        && pass.rows.len() <= SPLIT_ROWS_MAX.min(step.geometry.max_rows);
    let n_parts = if in_splits { step.sizes.splits_max } else { 1 };
    threads.run(n_blocks * n_kv_heads * n_parts, &|thread_idx, units| {
        // SAFETY: this thread's scratch.
        let scratch = unsafe { step.scratch(thread_idx) };
        for unit in units {
            let (start, end) = pass.blocks[unit / n_parts / n_kv_heads];
            let block = Block {
                step,
                op,
                rows: start as usize..end as usize,
                kv_head: unit / n_parts % n_kv_heads,
            };
            if in_splits {
                block.one_split(scratch, unit % n_parts);
            } else {
                block.all_splits(scratch);
            }
        }
    });
    in_splits
}

/// Folds the splits of all heads of a row into `out` `(q_width)`.
pub(super) fn merge_row(step: &Step<'_>, row_idx: usize, op: &AttendOp, out: &mut [f32]) {
    let row = &step.pass.rows[row_idx];
    let (len, head_dim) = (step.sizes.partial_len(), step.geometry.head_dim);
    for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let mut stats = Stats::default();
        for split in splits(step, row, op) {
            let at = partial_at(step, row_idx, head, split);
            // SAFETY: written in an earlier region.
            let partial = unsafe { step.partials.read(at..at + len) };
            stats.merge(out, partial);
        }
        stats.finish(out);
    }
}

fn partial_at(step: &Step<'_>, row_idx: usize, head: usize, split: usize) -> usize {
    let column = row_idx * step.geometry.n_heads + head;
    (column * step.sizes.splits_max + split) * step.sizes.partial_len()
}

/// Largest score and sum of weights over the splits so far.
#[derive(Default)]
struct Stats {
    /// None before the first split.
    max_and_total: Option<(f32, f32)>,
}

impl Stats {
    /// Adds the next split; `partial` is `[values.., max, total]`.
    fn merge(&mut self, sums: &mut [f32], partial: &[f32]) {
        let (values, stats) = partial.split_at(partial.len() - 2);
        let (next_max, next_total) = (stats[0], stats[1]);
        self.max_and_total = Some(match self.max_and_total {
            None => {
                sums.copy_from_slice(&values[..sums.len()]);
                (next_max, next_total)
            }
            Some((max, total)) => {
                let both = max.max(next_max);
                let (old, new) = ((max - both).exp(), (next_max - both).exp());
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = *sum * old + value * new;
                }
                (both, total * old + next_total * new)
            }
        });
    }

    fn finish(self, sums: &mut [f32]) {
        let total = self.max_and_total.map_or(1.0, |(_, total)| total);
        let factor = 1.0 / total;
        for sum in sums {
            *sum *= factor;
        }
    }
}

/// The rows of one block with one key head.
struct Block<'a> {
    step: &'a Step<'a>,
    op: &'a AttendOp,
    rows: Range<usize>,
    kv_head: usize,
}

impl Block<'_> {
    fn row(&self, idx: usize) -> &Row {
        &self.step.pass.rows[self.rows.start + idx]
    }

    fn visible(&self, idx: usize) -> Visible {
        visible(self.step, self.row(idx), self.op)
    }

    fn splits(&self, idx: usize) -> Splits {
        Splits::of(&self.visible(idx))
    }

    /// Walks all splits and writes the attention of the block.
    fn all_splits(&self, scratch: &mut Scratch) {
        let step = self.step;
        let (group, len) = (step.sizes.heads_per_kv, step.sizes.partial_len());
        let (head_dim, q_width) = (step.geometry.head_dim, step.sizes.q_width);
        self.load_queries(scratch);
        let first = self.splits(0).first();
        let end = self.splits(self.rows.len() - 1).end();
        let merged = len * group * self.rows.len();
        scratch.merged[..merged].fill(0.0);
        for split in first..end {
            let wanted = |idx: &usize| self.splits(*idx).contains(split);
            if !(0..self.rows.len()).any(|idx| wanted(&idx)) {
                continue;
            }
            self.split(scratch, split);
            for idx in (0..self.rows.len()).filter(wanted) {
                let is_first = self.splits(idx).first() == split;
                for column in idx * group..(idx + 1) * group {
                    let merged = &mut scratch.merged[column * len..(column + 1) * len];
                    let (sums, kept) = merged.split_at_mut(len - 2);
                    let max_and_total = (!is_first).then_some((kept[0], kept[1]));
                    let mut stats = Stats { max_and_total };
                    stats.merge(sums, &scratch.split[column * len..(column + 1) * len]);
                    (kept[0], kept[1]) = stats.max_and_total.expect("just merged");
                }
            }
        }
        for (column, merged) in scratch.merged[..merged].chunks_exact(len).enumerate() {
            let (row_idx, head) = (self.rows.start + column / group, column % group);
            let at = row_idx * q_width + (self.kv_head * group + head) * head_dim;
            // SAFETY: each (row, head) belongs to one unit.
            let out = unsafe { step.attention.slice(at..at + head_dim) };
            out.copy_from_slice(&merged[..head_dim]);
            Stats {
                max_and_total: Some((merged[len - 2], merged[len - 1])),
            }
            .finish(out);
        }
    }

    /// Computes one split and leaves it in the partial results.
    fn one_split(&self, scratch: &mut Scratch, split: usize) {
        let step = self.step;
        let (group, len) = (step.sizes.heads_per_kv, step.sizes.partial_len());
        let wanted = |idx: &usize| self.splits(*idx).contains(split);
        if !(0..self.rows.len()).any(|idx| wanted(&idx)) {
            return;
        }
        self.load_queries(scratch);
        self.split(scratch, split);
        for idx in (0..self.rows.len()).filter(wanted) {
            for head in 0..group {
                let column = idx * group + head;
                let row_idx = self.rows.start + idx;
                let at = partial_at(step, row_idx, self.kv_head * group + head, split);
                // SAFETY: each (row, head, split) belongs to one unit.
                unsafe { step.partials.slice(at..at + len) }
                    .copy_from_slice(&scratch.split[column * len..(column + 1) * len]);
            }
        }
    }

    /// Copies the queries of the block, scaled, to `(columns, padded head)`.
    fn load_queries(&self, scratch: &mut Scratch) {
        let step = self.step;
        let (group, head_dim) = (step.sizes.heads_per_kv, step.geometry.head_dim);
        let columns = scratch.queries.chunks_exact_mut(step.sizes.padded_dim);
        for (column, query) in columns.take(group * self.rows.len()).enumerate() {
            let row_idx = self.rows.start + column / group;
            let head = self.kv_head * group + column % group;
            let at = row_idx * step.sizes.q_width + head * head_dim;
            // SAFETY: written in an earlier region.
            let stored = unsafe { step.queries.read(at..at + head_dim) };
            for (query, stored) in query.iter_mut().zip(stored) {
                *query = stored * self.op.scale;
            }
        }
    }

    /// Scores, weights and weighted sums of one split, into `scratch.split`.
    fn split(&self, scratch: &mut Scratch, split: usize) {
        let start = split * SPLIT_TOKENS;
        let n_rows = self.rows.len();
        let last = self.visible(n_rows - 1).recent.end;
        let first = self.visible(0).first().max(start);
        let pages = first / PAGE_TOKENS..last.min(start + SPLIT_TOKENS).div_ceil(PAGE_TOKENS);
        let group = self.step.sizes.heads_per_kv;
        let len = self.step.sizes.partial_len();
        for page_idx in pages.clone() {
            self.page_scores(scratch, start, page_idx);
        }
        for idx in 0..n_rows {
            let visible = self.visible(idx);
            let valid = [&visible.kept, &visible.recent].map(|r| within(r, start, SPLIT_TOKENS));
            for column in idx * group..(idx + 1) * group {
                let scores = &mut scratch.scores[column * SPLIT_TOKENS..][..SPLIT_TOKENS];
                let stats = self.weigh(scores, &valid);
                let split = &mut scratch.split[column * len..(column + 1) * len];
                split.fill(0.0);
                (split[len - 2], split[len - 1]) = stats;
            }
        }
        for page_idx in pages {
            self.page_values(scratch, start, page_idx);
        }
    }

    /// Turns valid scores (of the kept positions, then of the others) into weights; what lies
    /// between and beside them in their pages becomes 0.
    fn weigh(&self, scores: &mut [f32], [kept, recent]: &[Range<usize>; 2]) -> (f32, f32) {
        let (start, end) = match (kept.is_empty(), recent.is_empty()) {
            (true, true) => return (f32::NEG_INFINITY, 0.0),
            (true, false) => (recent.start, recent.end),
            (false, true) => (kept.start, kept.end),
            (false, false) => {
                scores[kept.end..recent.start].fill(f32::NEG_INFINITY);
                (kept.start, recent.end)
            }
        };
        let from = start / PAGE_TOKENS * PAGE_TOKENS;
        let to = end.next_multiple_of(PAGE_TOKENS);
        scores[from..start].fill(f32::NEG_INFINITY);
        scores[end..to].fill(f32::NEG_INFINITY);
        let scores = &mut scores[from..to];
        // SAFETY: a multiple of 16 values.
        unsafe { (self.step.kernels.exponentials)(scores.as_mut_ptr(), scores.len()) }
    }

    /// Start of the keys of a page in the pool.
    fn page(&self, page_idx: usize) -> usize {
        let Step {
            geometry,
            sizes,
            pass,
            ..
        } = self.step;
        let page = pass.page(self.row(0), self.op.kv, page_idx);
        let layer = self.op.kv.layer as usize * geometry.n_kv_heads + self.kv_head;
        page * sizes.page_len + layer * sizes.head_len
    }

    /// Rows that see some of a page, as a range (positions of a block ascend).
    fn touching(&self, page_idx: usize) -> Range<usize> {
        let touches = |idx: &usize| !self.visible(*idx).in_page(page_idx).is_empty();
        let n_rows = self.rows.len();
        let first = (0..n_rows).find(touches).unwrap_or(n_rows);
        let end = (first..n_rows)
            .rev()
            .find(touches)
            .map_or(first, |idx| idx + 1);
        first..end
    }

    fn page_scores(&self, scratch: &mut Scratch, start: usize, page_idx: usize) {
        let step = self.step;
        let group = step.sizes.heads_per_kv;
        let rows = self.touching(page_idx);
        if rows.is_empty() {
            return; // between the kept pages and the window, perhaps dropped
        }
        let at = self.page(page_idx);
        // SAFETY: pages were written in earlier regions.
        let keys = unsafe { step.kv.read(at..at + step.sizes.key_len) };
        let queries = &scratch.queries[rows.start * group * step.sizes.padded_dim..];
        let scores = &mut scratch.scores
            [rows.start * group * SPLIT_TOKENS + page_idx * PAGE_TOKENS - start..];
        let args = ScoresArgs {
            keys: keys.as_ptr(),
            head_dim: step.geometry.head_dim,
            queries: queries.as_ptr(),
            query_stride: step.sizes.padded_dim,
            n_columns: rows.len() * group,
            out: scores.as_mut_ptr(),
            out_stride: SPLIT_TOKENS,
        };
        // SAFETY: the page holds `head_dim * 16` keys; both scratch areas hold `columns_max`
        // columns, which a block never exceeds.
        unsafe { (step.kernels.scores)(&args) }
    }

    fn page_values(&self, scratch: &mut Scratch, start: usize, page_idx: usize) {
        let rows = self.touching(page_idx);
        let part = |idx: usize| self.visible(idx).in_page(page_idx);
        let mut first = rows.start;
        while first < rows.end {
            // Rows that want the same part of the page share it.
            let wanted = part(first);
            let mut end = first + 1;
            while end < rows.end && part(end) == wanted {
                end += 1;
            }
            self.add_values(scratch, start, page_idx, first..end, wanted);
            first = end;
        }
    }

    fn add_values(
        &self,
        scratch: &mut Scratch,
        start: usize,
        page_idx: usize,
        rows: Range<usize>,
        wanted: Range<usize>,
    ) {
        let step = self.step;
        let group = step.sizes.heads_per_kv;
        let at = self.page(page_idx) + step.sizes.key_len;
        // SAFETY: pages were written in earlier regions.
        let values = unsafe { step.kv.read(at..at + step.sizes.padded_dim * PAGE_TOKENS) };
        let column = rows.start * group;
        let weights = &scratch.scores[column * SPLIT_TOKENS + page_idx * PAGE_TOKENS - start..];
        let sums = &mut scratch.split[column * step.sizes.partial_len()..];
        let args = ValuesArgs {
            values: values.as_ptr(),
            padded_dim: step.sizes.padded_dim,
            first: wanted.start,
            end: wanted.end,
            weights: weights.as_ptr(),
            weight_stride: SPLIT_TOKENS,
            n_columns: rows.len() * group,
            sums: sums.as_mut_ptr(),
            sum_stride: step.sizes.partial_len(),
        };
        // SAFETY: the page holds `16 * padded_dim` values; both scratch areas hold `columns_max`
        // columns, which a block never exceeds.
        unsafe { (step.kernels.values)(&args) }
    }
}
