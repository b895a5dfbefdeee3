//! Pinned chains: published blocks that stay although nobody holds them.
//!
//! Bookkeeping of the pool, on the engine thread. A pin names whole chains from their first block,
//! so that what it keeps can always be found; a block may be in many. At most `pinned_pages_max`
//! pages are pinned, which is chosen so that any single request still fits beside them
//! (`limits`). What is not here: which prefixes are pinned and when one goes (`scheduler`).

use super::{BlockId, KvPool};
use crate::backend::PAGE_TOKENS;
use crate::request::{PinError, PrefixId};

impl KvPool {
    /// Pages under a pin, held by sequences or not.
    #[must_use]
    pub fn pinned_pages(&self) -> usize {
        self.n_pinned_pages
    }

    /// Tokens that this pin keeps; None when there is none of this name.
    #[must_use]
    pub fn pinned_tokens(&self, id: PrefixId) -> Option<u32> {
        let blocks = self.pins.get(&id)?;
        Some((blocks.len() * PAGE_TOKENS) as u32)
    }

    /// Whether so many further pages may be pinned.
    ///
    /// # Errors
    /// `NoRoom` with the numbers.
    pub fn check_pin(&self, n_pages: usize) -> Result<(), PinError> {
        match self.n_pinned_pages + n_pages <= self.pinned_pages_max {
            true => Ok(()),
            false => Err(PinError::NoRoom {
                needed_pages: n_pages as u32,
                pinned_pages: self.n_pinned_pages as u32,
                pages_max: self.pinned_pages_max as u32,
            }),
        }
    }

    /// How many of these blocks' pages are not pinned.
    #[must_use]
    pub fn unpinned_pages(&self, blocks: &[BlockId]) -> usize {
        let unpinned = blocks.iter().map(|id| self.block(*id));
        unpinned
            .filter(|block| block.n_pins == 0)
            .map(|block| block.pages.len())
            .sum()
    }

    /// Keeps a published chain, given from its first block on, and returns the tokens kept. A
    /// second pin of the same name changes nothing.
    ///
    /// # Errors
    /// `NoRoom`; nothing is pinned then.
    pub fn pin(&mut self, id: PrefixId, blocks: &[BlockId]) -> Result<u32, PinError> {
        if let Some(n_tokens) = self.pinned_tokens(id) {
            return Ok(n_tokens);
        }
        self.check_pin(self.unpinned_pages(blocks))?;
        for block_id in blocks {
            let is_idle = self.block(*block_id).n_holders == 0;
            if is_idle {
                self.leave_idle(*block_id);
            }
            let block = self.block_mut(*block_id);
            debug_assert!(
                block.published.is_some(),
                "only what can be found is pinned"
            );
            block.n_pins += 1;
            if block.n_pins == 1 {
                self.n_pinned_pages += self.block(*block_id).pages.len();
            }
            if is_idle {
                self.become_idle(*block_id);
            }
        }
        self.pins.insert(id, blocks.to_vec());
        Ok((blocks.len() * PAGE_TOKENS) as u32)
    }

    /// Ends a pin; what nobody holds or pins any more is kept for reuse like any other block, the
    /// end of the chain the first to be evicted. Unknown names are ignored.
    pub fn unpin(&mut self, id: PrefixId) {
        let blocks = self.pins.remove(&id).unwrap_or_default();
        for block_id in blocks.into_iter().rev() {
            let is_idle = self.block(block_id).n_holders == 0;
            if is_idle {
                self.leave_idle(block_id);
            }
            let block = self.block_mut(block_id);
            block.n_pins -= 1;
            if block.n_pins == 0 {
                self.n_pinned_pages -= self.block(block_id).pages.len();
            }
            if is_idle {
                self.become_idle(block_id);
            }
        }
    }

    /// The part of `check_integrity` that concerns pins.
    pub(super) fn check_pins(&self) -> Result<(), String> {
        let mut pins = vec![0_u32; self.blocks.len()];
        for id in self.pins.values().flatten() {
            pins[id.0 as usize] += 1;
        }
        let (mut n_pinned_pages, mut n_idle_pages) = (0, 0);
        for (index, block) in self.blocks.iter().enumerate() {
            if block.n_pins != pins[index] {
                let (counted, real) = (block.n_pins, pins[index]);
                return Err(format!("block {index} counts {counted} pins, {real} exist"));
            }
            if block.n_pins > 0 {
                n_pinned_pages += block.pages.len();
                n_idle_pages += usize::from(block.n_holders == 0) * block.pages.len();
            }
        }
        let counts = (n_pinned_pages, n_idle_pages);
        let kept = (self.n_pinned_pages, self.n_idle_pinned_pages);
        match counts == kept && n_pinned_pages <= self.pinned_pages_max {
            true => Ok(()),
            false => Err(format!("pinned pages are {kept:?}, must be {counts:?}")),
        }
    }
}
