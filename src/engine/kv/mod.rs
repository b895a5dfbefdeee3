//! The paged KV pool: which sequence owns which page, and which full blocks may be reused.
//!
//! Owned by the engine thread; pure bookkeeping, the backend holds the bytes.
//!
//! **Blocks.** A *block* is `PAGE_TOKENS` positions of one sequence: one page per KV group of the
//! request's depth, allocated together on demand. A sequence holds a list of blocks; a block that
//! is full and *published* may be held by many.
//!
//! ```text
//! free pages ─ grow ─► private ─ publish ─► shared (held by n ≥ 1) ─ release ─► cached (n = 0)
//!      ▲                  │ release             ▲                                 │     │
//!      ├──────────────────┘                     └───────────── attach ────────────┘     │
//!      └──────────────────────────── evict, least recently used first ──────────────────┘
//!
//! pinned: shared or idle, never cached, so never evicted; the last unpin of an idle block makes it cached
//! ```
//!
//! **Prefix reuse.** Published blocks form a trie: a block is found by its parent block and its
//! tokens, the first one by what the whole chain depends on ([`Origin`]: loops, cache window, early
//! exit, isolation key). Tokens are compared, not hashes of them, so a collision cannot give wrong
//! output. A block is released before its parent, so children are evicted first; one whose parent
//! is gone can no longer be found and leaves the same way. A sequence that computes what another
//! has published meanwhile gives up its own copy: equal chains have bit-equal K/V.
//!
//! **Copy-on-write.** Only full blocks are shared and sequences only append, so the one shared
//! block that may be written is the last one of a prompt that is cached whole, whose last row must
//! run again for its logits: [`KvPool::copy_last`] makes that block private.
//!
//! **Windows.** With a sliding window a sequence gives back every block that no row to come sees,
//! as soon as its rows are computed ([`KvPool::drop_unseen`]): it holds its kept beginning, the
//! window and a chunk, however long it gets. What was published stays as cache like the blocks of
//! a sequence that ended. Kept is a registered prefix, in whole blocks; the request names its
//! length (`GenerationRequest::kept_tokens`), so that it is fixed before anything is computed, and
//! it is a part of [`Origin`] like the window itself: blocks computed with another window or
//! another kept beginning are never found. Of a chain that is found only what the window shows is
//! held.
//!
//! Invariant ([`KvPool::check_integrity`]): every page is free, cached, used or idle under a pin,
//! exactly once.
//!
//! What is not here: who may have pages (`batch`), which prefixes are worth a pin (`scheduler`).

mod integrity;
mod pins;
#[cfg(test)]
mod tests;

use crate::backend::{CacheWindow, PAGE_TOKENS, PageId, SequencePages};
use crate::request::{ExitRule, PrefixId, TokenId};
use std::collections::{BTreeMap, HashMap};

/// What all K/V of a chain depends on beside its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Core iterations; they decide the number of groups as well.
    pub loops: u32,
    /// What its rows see of each other.
    pub window: CacheWindow,
    /// Rule of early exit and bits of its threshold.
    pub exit: Option<(ExitRule, u32)>,
    /// Requests share only within one key.
    pub isolation_key: u64,
}

/// Index of a block in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockId(u32);

/// What stands before a block in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Parent {
    /// Nothing: the block holds positions `0..PAGE_TOKENS`.
    Origin(Origin),
    /// The published block with this serial number; serials are never used again.
    Block(u64),
}

/// Where a published block is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    tokens: [TokenId; PAGE_TOKENS],
}

#[derive(Debug, Default)]
struct Block {
    /// One per group; empty when the entry is vacant.
    pages: Vec<PageId>,
    /// Sequences that hold it.
    n_holders: u32,
    /// Pins that keep it; they come in whole chains, so a pinned block's parent is pinned too.
    n_pins: u32,
    /// Set once it is published: its key and its serial number.
    published: Option<(Key, u64)>,
    /// Its place in `KvPool::cached` while nobody holds or pins it.
    released_at: u64,
}

/// The KV of one sequence. Only the pool changes it.
#[derive(Debug)]
pub struct SequenceKv {
    /// Page tables by group; handed to a pass and back, hence public to the step.
    pub(super) tables: SequencePages,
    /// Those it holds, one per entry of each table.
    blocks: Vec<BlockId>,
    /// Pages per block.
    n_groups: usize,
    window: CacheWindow,
    /// As in the tables, which are away while a pass runs.
    n_dropped: usize,
    /// Blocks of its chain, from the first one on, that are published, dropped ones included.
    n_published: usize,
    /// Parent of the next block to publish.
    parent: Parent,
    /// Whether its full blocks may be found by others.
    publishes: bool,
}

impl SequenceKv {
    /// No blocks yet.
    #[must_use]
    pub fn new(origin: Origin, n_groups: usize, publishes: bool) -> Self {
        Self {
            tables: SequencePages {
                groups: vec![Vec::new(); n_groups],
                window: origin.window,
                n_dropped: 0,
            },
            blocks: Vec::new(),
            n_groups,
            window: origin.window,
            n_dropped: 0,
            n_published: 0,
            parent: Parent::Origin(origin),
            publishes,
        }
    }

    /// Pages per block.
    #[must_use]
    pub fn n_groups(&self) -> usize {
        self.n_groups
    }

    /// Positions from its beginning to the end of its blocks, dropped ones included.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        (self.blocks.len() + self.n_dropped) * PAGE_TOKENS
    }

    /// Its leading blocks that others can find. For sequences that drop none.
    #[must_use]
    pub fn published_blocks(&self) -> &[BlockId] {
        debug_assert_eq!(
            self.n_dropped, 0,
            "a chain is pinned from its first block on"
        );
        &self.blocks[..self.n_published]
    }

    /// Pages that it still takes on its way to `n_tokens` beyond those that it holds, when at most
    /// `chunk` rows of it enter together.
    #[must_use]
    pub fn missing_pages(&self, n_tokens: usize, chunk: usize) -> usize {
        let n_chain = self.blocks.len() + self.n_dropped;
        self.missing(n_chain, self.blocks.len(), n_tokens, chunk)
    }

    /// The same for an empty sequence, once it has a chain of `n_found` blocks before it.
    #[must_use]
    pub fn missing_pages_behind(&self, n_found: usize, n_tokens: usize, chunk: usize) -> usize {
        let n_held = n_found - self.unseen_of_chain(n_found);
        self.missing(n_found, n_held, n_tokens, chunk)
    }

    fn missing(&self, n_chain: usize, n_held: usize, n_tokens: usize, chunk: usize) -> usize {
        let to_the_end = n_tokens.div_ceil(PAGE_TOKENS).saturating_sub(n_chain);
        let at_once = self
            .window
            .blocks_max(n_tokens, chunk)
            .saturating_sub(n_held);
        to_the_end.min(at_once) * self.n_groups
    }

    /// Blocks of a chain of `n_found`, behind the kept ones, that no row after it sees, nor one in
    /// its last block, which may have to be computed again.
    fn unseen_of_chain(&self, n_found: usize) -> usize {
        let first_row = n_found.saturating_sub(1) * PAGE_TOKENS;
        self.window.unseen_blocks(first_row)
    }

    /// The part of a chain that it would hold.
    fn seen_of_chain<'a>(
        &self,
        found: &'a [BlockId],
    ) -> impl Iterator<Item = &'a BlockId> + use<'a> {
        let kept = self.window.kept_blocks();
        let unseen = kept..kept + self.unseen_of_chain(found.len());
        let seen = (0..)
            .zip(found)
            .filter(move |(index, _)| !unseen.contains(index));
        seen.map(|(_, id)| id)
    }

    fn drop_blocks(&mut self, n_blocks: usize) {
        let gone = self.window.kept_blocks()..self.window.kept_blocks() + n_blocks;
        self.blocks.drain(gone.clone());
        for table in &mut self.tables.groups {
            table.drain(gone.clone());
        }
        self.set_dropped(self.n_dropped + n_blocks);
    }

    fn set_dropped(&mut self, n_blocks: usize) {
        self.n_dropped = n_blocks;
        self.tables.n_dropped = n_blocks;
    }
}

/// The pool of one engine.
#[derive(Debug)]
pub struct KvPool {
    n_pages: usize,
    keeps_blocks: bool,
    free: Vec<PageId>,
    blocks: Vec<Block>,
    /// Entries of `blocks` without pages.
    vacant: Vec<BlockId>,
    index: HashMap<Key, BlockId>,
    /// Published blocks that nobody holds or pins, least recently released first.
    cached: BTreeMap<u64, BlockId>,
    n_cached_pages: usize,
    /// Chains that stay, each from its first block on.
    pins: HashMap<PrefixId, Vec<BlockId>>,
    /// Most pages that may be pinned.
    pinned_pages_max: usize,
    n_pinned_pages: usize,
    /// Those of them that no sequence holds.
    n_idle_pinned_pages: usize,
    /// Next serial number, and next release time.
    n_events: u64,
}

impl KvPool {
    /// All pages free. Without `keeps_blocks` nothing is ever published, hence nothing pinned.
    #[must_use]
    pub fn new(n_pages: u32, pinned_pages_max: u32, keeps_blocks: bool) -> Self {
        Self {
            n_pages: n_pages as usize,
            keeps_blocks,
            // The lowest page is taken first, so that a lightly used pool stays dense in memory.
            free: (0..n_pages).rev().map(PageId).collect(),
            blocks: Vec::new(),
            vacant: Vec::new(),
            index: HashMap::new(),
            cached: BTreeMap::new(),
            n_cached_pages: 0,
            pins: HashMap::new(),
            pinned_pages_max: pinned_pages_max as usize,
            n_pinned_pages: 0,
            n_idle_pinned_pages: 0,
            n_events: 0,
        }
    }

    /// Pages that `grow` can still hand out: the free ones and those kept for reuse only.
    #[must_use]
    pub fn available_pages(&self) -> usize {
        self.free.len() + self.n_cached_pages
    }

    /// Pages kept for reuse only.
    #[must_use]
    pub fn cached_pages(&self) -> usize {
        self.n_cached_pages
    }

    /// Pages held by sequences.
    #[must_use]
    pub fn used_pages(&self) -> usize {
        self.n_pages - self.available_pages() - self.n_idle_pinned_pages
    }

    /// The longest published chain that begins `tokens`, in whole blocks.
    #[must_use]
    pub fn find(&self, origin: Origin, tokens: &[TokenId]) -> Vec<BlockId> {
        let mut parent = Parent::Origin(origin);
        let mut found = Vec::new();
        for tokens in tokens.as_chunks::<PAGE_TOKENS>().0 {
            let key = Key {
                parent,
                tokens: *tokens,
            };
            let Some(id) = self.index.get(&key) else {
                break;
            };
            found.push(*id);
            parent = self.as_parent(*id);
        }
        found
    }

    /// How many of the available pages `attach` would take.
    #[must_use]
    pub fn attach_pages(&self, kv: &SequenceKv, found: &[BlockId]) -> usize {
        let unheld = kv.seen_of_chain(found).map(|id| self.block(*id));
        unheld
            .filter(|block| block.n_holders == 0 && block.n_pins == 0)
            .map(|block| block.pages.len())
            .sum()
    }

    /// Puts blocks that `find` gave just now in front of an empty sequence, as far as its window
    /// shows them.
    pub fn attach(&mut self, kv: &mut SequenceKv, found: &[BlockId]) {
        debug_assert!(kv.blocks.is_empty(), "prefixes come first");
        for id in kv.seen_of_chain(found) {
            self.hold(*id);
            kv.blocks.push(*id);
            for (table, page) in kv.tables.groups.iter_mut().zip(&self.block(*id).pages) {
                table.push(*page);
            }
        }
        if let Some(last) = found.last() {
            kv.parent = self.as_parent(*last);
        }
        kv.n_published = found.len();
        kv.set_dropped(found.len() - kv.blocks.len());
        // What lies between was used as well: without it the chain could not be found again.
        let kept = kv.window.kept_blocks().min(found.len());
        for id in found[kept..kept + kv.n_dropped].iter().rev() {
            self.hold(*id);
            self.let_go(*id);
        }
    }

    /// Gives back the blocks that no row from position `n_computed` on sees. The deepest goes first,
    /// as in `release`.
    pub fn drop_unseen(&mut self, kv: &mut SequenceKv, n_computed: usize) {
        let n_unseen = kv.window.unseen_blocks(n_computed);
        let n_gone = n_unseen.saturating_sub(kv.n_dropped);
        let first = kv.window.kept_blocks();
        for index in (first..first + n_gone).rev() {
            self.let_go(kv.blocks[index]);
        }
        if n_gone > 0 {
            kv.drop_blocks(n_gone);
        }
    }

    /// Makes the last block of a sequence, a published one, private, so that it may be written.
    /// Returns the pages to copy, `(from, to)`. Without pages for it the block is given up instead:
    /// the sequence gets shorter by a block and there is nothing to copy.
    pub fn copy_last(&mut self, kv: &mut SequenceKv) -> Vec<(PageId, PageId)> {
        let Some(shared) = kv.blocks.pop() else {
            return Vec::new();
        };
        debug_assert_eq!(kv.n_published, kv.blocks.len() + kv.n_dropped + 1);
        kv.n_published -= 1;
        if let Some((key, _)) = self.block(shared).published {
            kv.parent = key.parent;
        }
        for table in &mut kv.tables.groups {
            table.pop();
        }
        let from = self.block(shared).pages.clone();
        // Still held while the copy is allocated, so that the original is not evicted for it.
        let is_copied = self.add_block(kv);
        self.let_go(shared);
        if !is_copied {
            return Vec::new();
        }
        let to = kv.tables.groups.iter().filter_map(|table| table.last());
        from.into_iter().zip(to.copied()).collect()
    }

    /// Allocates blocks until the sequence can hold `n_tokens`, evicting cached blocks as needed.
    /// False when pages ran out; what was allocated by then stays.
    pub fn grow(&mut self, kv: &mut SequenceKv, n_tokens: usize) -> bool {
        while kv.capacity_tokens() < n_tokens {
            if !self.add_block(kv) {
                return false;
            }
        }
        true
    }

    /// Publishes the blocks that became full: `tokens[..n_computed]` have their K/V in the pages.
    pub fn publish(&mut self, kv: &mut SequenceKv, tokens: &[TokenId], n_computed: usize) {
        if !self.keeps_blocks || !kv.publishes {
            return;
        }
        let full = tokens[..n_computed].as_chunks::<PAGE_TOKENS>().0;
        while let Some(tokens) = full.get(kv.n_published) {
            let key = Key {
                parent: kv.parent,
                tokens: *tokens,
            };
            let own = kv.blocks[kv.window.entry(kv.n_published, kv.n_dropped)];
            let canonical = match self.index.get(&key) {
                Some(other) => {
                    let other = *other;
                    self.replace(kv, own, other);
                    other
                }
                None => {
                    let serial = self.next_event();
                    self.block_mut(own).published = Some((key, serial));
                    self.index.insert(key, own);
                    own
                }
            };
            kv.parent = self.as_parent(canonical);
            kv.n_published += 1;
        }
    }

    /// Gives all blocks back. The deepest goes first, so that it is also evicted first.
    pub fn release(&mut self, kv: &mut SequenceKv) {
        while let Some(id) = kv.blocks.pop() {
            self.let_go(id);
        }
        for table in &mut kv.tables.groups {
            table.clear();
        }
        kv.set_dropped(0);
    }

    /// Uses `other` in place of the sequence's next block to publish, which has the same contents.
    fn replace(&mut self, kv: &mut SequenceKv, own: BlockId, other: BlockId) {
        self.hold(other);
        self.let_go(own);
        let entry = kv.window.entry(kv.n_published, kv.n_dropped);
        kv.blocks[entry] = other;
        let pages = &self.block(other).pages;
        for (table, page) in kv.tables.groups.iter_mut().zip(pages) {
            table[entry] = *page;
        }
    }

    fn add_block(&mut self, kv: &mut SequenceKv) -> bool {
        if self.available_pages() < kv.n_groups {
            return false;
        }
        while self.free.len() < kv.n_groups {
            self.evict_one();
        }
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.blocks.push(Block::default());
            BlockId(self.blocks.len() as u32 - 1)
        });
        let pages = self.free.split_off(self.free.len() - kv.n_groups);
        let block = self.block_mut(id);
        block.pages.extend(pages.into_iter().rev());
        block.n_holders = 1;
        for (table, page) in kv.tables.groups.iter_mut().zip(&self.block(id).pages) {
            table.push(*page);
        }
        kv.blocks.push(id);
        true
    }

    fn evict_one(&mut self) {
        if let Some((_, id)) = self.cached.pop_first() {
            self.n_cached_pages -= self.block(id).pages.len();
            self.vacate(id);
        }
    }

    fn hold(&mut self, id: BlockId) {
        if self.block(id).n_holders == 0 {
            self.leave_idle(id);
        }
        self.block_mut(id).n_holders += 1;
    }

    fn let_go(&mut self, id: BlockId) {
        self.block_mut(id).n_holders -= 1;
        if self.block(id).n_holders == 0 {
            self.become_idle(id);
        }
    }

    /// A block without holders is about to get one, or a pin, and comes off the list it is on.
    fn leave_idle(&mut self, id: BlockId) {
        let block = &self.blocks[id.0 as usize];
        if block.n_pins > 0 {
            self.n_idle_pinned_pages -= block.pages.len();
        } else {
            self.cached.remove(&block.released_at);
            self.n_cached_pages -= block.pages.len();
        }
    }

    /// A block has lost its last holder, or an idle one a pin.
    fn become_idle(&mut self, id: BlockId) {
        let now = self.next_event();
        let block = &mut self.blocks[id.0 as usize];
        if block.n_pins > 0 {
            self.n_idle_pinned_pages += block.pages.len();
        } else if block.published.is_some() {
            block.released_at = now;
            self.n_cached_pages += block.pages.len();
            self.cached.insert(now, id);
        } else {
            self.vacate(id);
        }
    }

    /// Frees the pages of a block that nobody holds.
    fn vacate(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        self.free.extend(block.pages.drain(..).rev());
        if let Some((key, _)) = block.published.take() {
            self.index.remove(&key);
        }
        self.vacant.push(id);
    }

    /// The parent that a block is to the blocks after it.
    fn as_parent(&self, id: BlockId) -> Parent {
        let (_, serial) = self
            .block(id)
            .published
            .expect("only published blocks are in the index or in front of a sequence");
        Parent::Block(serial)
    }

    fn next_event(&mut self) -> u64 {
        self.n_events += 1;
        self.n_events
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.0 as usize]
    }
}
