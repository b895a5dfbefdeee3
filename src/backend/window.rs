//! Which positions a row attends to when its request bounds the window, and what that leaves of a
//! page table.
//!
//! Pure arithmetic, shared by the kernels, which skip what is not visible, and by the engine, which
//! gives the pages back that nobody can see any more. One rule for both:
//!
//! ```text
//! row p sees j <= p  where  j < n_kept  or  p - j < tokens          (tokens = 0: all of them)
//!
//! positions  [ kept ........ | not visible any more ... | recent ....... p ]
//! table      [ kept blocks   |  n_dropped blocks absent | the others ..... ]
//! ```
//!
//! The window of a layer (`AttendOp::window`, part of the model) hides what is older, kept or not:
//! a request never sees more than the model was trained for. What is not here: why a beginning is
//! kept (`engine/kv`), the walk over pages (`cpu/attention`).

use super::PAGE_TOKENS;
use std::ops::Range;

/// The attention window of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheWindow {
    /// Positions that a row sees, itself included; 0 = all.
    pub tokens: u32,
    /// So many first positions stay visible beside them: a multiple of `PAGE_TOKENS`, and 0 where
    /// `tokens` is 0.
    pub n_kept: u32,
}

/// What a row sees: two ranges of positions, of which the first one may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visible {
    /// Positions of the kept beginning; ends at a multiple of `PAGE_TOKENS` unless it is empty.
    pub kept: Range<usize>,
    /// Positions up to the row itself; never empty, never before the end of `kept`.
    pub recent: Range<usize>,
}

impl CacheWindow {
    /// What the row at `position` sees in a layer with this window of its own (0 = none).
    #[inline]
    #[must_use]
    pub fn visible(self, position: usize, layer_window: u32) -> Visible {
        let end = position + 1;
        let oldest = |window: u32| match window {
            0 => 0,
            window => end.saturating_sub(window as usize),
        };
        let (layer_start, start) = (oldest(layer_window), oldest(self.tokens));
        let n_kept = self.n_kept as usize;
        if start <= n_kept {
            return Visible {
                kept: 0..0,
                recent: layer_start..end,
            };
        }
        Visible {
            kept: layer_start.min(n_kept)..n_kept,
            recent: start.max(layer_start)..end,
        }
    }

    /// Blocks of the kept beginning.
    #[must_use]
    pub fn kept_blocks(self) -> usize {
        self.n_kept as usize / PAGE_TOKENS
    }

    /// Blocks behind the kept ones that no row from `position` on sees.
    #[must_use]
    pub fn unseen_blocks(self, position: usize) -> usize {
        let seen_from = self.visible(position, 0).recent.start / PAGE_TOKENS;
        seen_from.saturating_sub(self.kept_blocks())
    }

    /// Where the entry of a block stands in a table that lacks `n_dropped` blocks behind the kept
    /// ones. The block must not be one of those.
    #[inline]
    #[must_use]
    pub fn entry(self, block_idx: usize, n_dropped: usize) -> usize {
        match block_idx < self.kept_blocks() {
            true => block_idx,
            false => block_idx - n_dropped,
        }
    }

    /// Most blocks that a sequence of `n_tokens` holds at once, when at most `chunk` rows of it
    /// enter together: all of them, or the kept ones and those that a chunk and the window before
    /// it can touch.
    #[must_use]
    pub fn blocks_max(self, n_tokens: usize, chunk: usize) -> usize {
        let all = n_tokens.div_ceil(PAGE_TOKENS);
        if self.tokens == 0 {
            return all;
        }
        // So many positions in a row touch at most this many blocks, wherever they begin.
        let n_seen = (self.tokens as usize - 1).saturating_add(chunk.max(1));
        let touched = n_seen.saturating_add(PAGE_TOKENS - 2) / PAGE_TOKENS + 1;
        all.min(self.kept_blocks().saturating_add(touched))
    }
}

impl Visible {
    /// All positions of a sequence of `n_tokens`.
    #[inline]
    #[must_use]
    pub fn all(n_tokens: usize) -> Self {
        Self {
            kept: 0..0,
            recent: 0..n_tokens,
        }
    }

    /// The first visible position.
    #[inline]
    #[must_use]
    pub fn first(&self) -> usize {
        match self.kept.is_empty() {
            true => self.recent.start,
            false => self.kept.start,
        }
    }

    /// The part of page `page_idx` that is visible, relative to its first position.
    #[inline]
    #[must_use]
    pub fn in_page(&self, page_idx: usize) -> Range<usize> {
        let start = page_idx * PAGE_TOKENS;
        let range = match start < self.kept.end {
            true => &self.kept,
            false => &self.recent,
        };
        let end = start + PAGE_TOKENS;
        let from = range.start.clamp(start, end);
        from - start..range.end.clamp(from, end) - start
    }

    /// The visible positions, ascending.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.kept.clone().chain(self.recent.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn windows() -> impl Strategy<Value = (CacheWindow, u32)> {
        let window = (0..70_u32, 0..5_u32).prop_map(|(tokens, blocks)| CacheWindow {
            tokens,
            n_kept: if tokens > 0 { blocks * 16 } else { 0 },
        });
        (window, prop_oneof![Just(0), 1..90_u32])
    }

    proptest! {
        #[test]
        fn the_ranges_are_the_rule((window, layer) in windows(), position in 0..200_usize) {
            let visible = window.visible(position, layer);
            let sees = |j: &usize| {
                let age = (position - j) as u32;
                let in_window = window.tokens == 0 || age < window.tokens;
                (in_window || *j < window.n_kept as usize) && (layer == 0 || age < layer)
            };
            let wanted: Vec<usize> = (0..=position).filter(sees).collect();
            prop_assert_eq!(visible.positions().collect::<Vec<_>>(), wanted.clone());
            let in_pages = (0..=position / PAGE_TOKENS).flat_map(|page| {
                visible.in_page(page).map(move |offset| page * PAGE_TOKENS + offset)
            });
            prop_assert_eq!(in_pages.collect::<Vec<_>>(), wanted);
        }

        /// A sequence in chunks, its unseen blocks dropped after each: what a row needs is there,
        /// and never more than the bound.
        #[test]
        fn what_is_seen_is_held_and_no_more_than_the_bound(
            (window, _) in windows(), chunk in 1..40_usize, n_tokens in 1..300_usize,
        ) {
            let kept = window.kept_blocks();
            let (mut start, mut n_dropped) = (0, 0);
            while start < n_tokens {
                let end = n_tokens.min(start + chunk);
                let n_held = end.div_ceil(PAGE_TOKENS) - n_dropped;
                prop_assert!(n_held <= window.blocks_max(n_tokens, chunk));
                let mut entries: Vec<usize> = (start..end)
                    .flat_map(|row| window.visible(row, 0).positions().collect::<Vec<_>>())
                    .map(|position| position / PAGE_TOKENS)
                    .inspect(|block| assert!(*block < kept || *block >= kept + n_dropped))
                    .map(|block| window.entry(block, n_dropped))
                    .collect();
                entries.sort_unstable();
                entries.dedup();
                prop_assert!(entries.iter().all(|entry| *entry < n_held));
                n_dropped = window.unseen_blocks(end);
                prop_assert!(kept + n_dropped <= end.div_ceil(PAGE_TOKENS) || n_dropped == 0);
                start = end;
            }
        }
    }
}
