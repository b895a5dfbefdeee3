//! The books of the KV pool, checked against the sequences that exist.
//!
//! On the engine thread, when it is idle, and in tests. Reads only. What is not here: pins
//! (`pins`), hidden-state slots (`step`).

use super::{BlockId, KvPool, SequenceKv};

impl KvPool {
    /// Checks that free + cached + idle pinned + used = all, and that every count agrees with the sequences that
    /// exist, `live`. Costs a walk over the pool: for idle moments and tests.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn check_integrity<'a>(
        &self,
        live: impl Iterator<Item = &'a SequenceKv>,
    ) -> Result<(), String> {
        let mut holders = vec![0_u32; self.blocks.len()];
        for kv in live {
            let tables = (kv.tables.window, kv.tables.n_dropped);
            if tables != (kv.window, kv.n_dropped) {
                return Err(format!("the tables say {tables:?}: {kv:?}"));
            }
            for (index, id) in kv.blocks.iter().enumerate() {
                holders[id.0 as usize] += 1;
                let pages = kv.tables.groups.iter().map(|table| table.get(index));
                if !pages.eq(self.block(*id).pages.iter().map(Some)) {
                    return Err(format!("table entry {index} is not block {id:?}"));
                }
            }
        }
        let mut seen = vec![false; self.n_pages];
        let owned = self.blocks.iter().flat_map(|block| &block.pages);
        for page in self.free.iter().chain(owned) {
            if std::mem::replace(&mut seen[page.0 as usize], true) {
                return Err(format!("{page:?} has two owners"));
            }
        }
        if let Some(lost) = seen.iter().position(|seen| !seen) {
            return Err(format!("page {lost} is lost"));
        }
        self.check_blocks(&holders)?;
        self.check_pins()
    }

    fn check_blocks(&self, holders: &[u32]) -> Result<(), String> {
        let mut n_cached_pages = 0;
        let mut n_cached = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            let id = BlockId(index as u32);
            if block.n_holders != holders[index] {
                let (counted, real) = (block.n_holders, holders[index]);
                return Err(format!("{id:?} counts {counted} holders, {real} exist"));
            }
            if let Some((key, _)) = &block.published
                && self.index.get(key) != Some(&id)
            {
                return Err(format!("{id:?} is published and cannot be found"));
            }
            if block.n_holders == 0 && block.n_pins == 0 && !block.pages.is_empty() {
                n_cached += 1;
                n_cached_pages += block.pages.len();
                if self.cached.get(&block.released_at) != Some(&id) {
                    return Err(format!("{id:?} is held by nobody and not cached"));
                }
            }
        }
        let n_published = self.blocks.iter().filter(|b| b.published.is_some()).count();
        let counts = (n_cached_pages, n_cached, n_published);
        let kept = (self.n_cached_pages, self.cached.len(), self.index.len());
        if counts != kept {
            return Err(format!("counts are {kept:?}, must be {counts:?}"));
        }
        Ok(())
    }
}
