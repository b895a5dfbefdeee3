//! The registered prefixes of one executor: which are kept, which one goes when there are too many.
//!
//! A prefix is an ordered list of tokens that many prompts will begin with. Registering it computes
//! its K/V once, as an ordinary scheduled job, and pins them in every replica (`prefixes` does that);
//! this file is the list. It is content-addressed: the id is a hash over what is kept and all that
//! the K/V depend on, so that the same prefix registers once. Ids hold as long as the executor: the
//! hash is keyed afresh each time, so that nobody can make two prefixes meet on purpose.
//!
//! ```text
//! absent ─ begin ─► Pinning ─ finish(kept) ─► Kept ─ evicted, removed ─► absent
//!    ▲                 └─ finish(error), removed ──────────────────────────▲
//! ```
//!
//! Shared by HTTP workers and the driver; one short lock. Decisions are pure functions over plain
//! numbers. What is not here: pages and their limit (`engine/kv/pins`), automatic reuse, which needs
//! no registration.

use crate::request::{GenerationRequest, Prefix, PrefixId, TokenId, Usage};
use parking_lot::{Mutex, MutexGuard};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// What is asked to be kept.
#[derive(Clone, Debug)]
pub struct NewPrefix {
    /// Special ones included. Only whole blocks of them can be kept.
    pub tokens: Arc<[TokenId]>,
    /// As in the requests that shall find it; None = the model's default.
    pub loops: Option<u32>,
    /// As in the requests that shall find it.
    pub cache_window: u32,
    /// As in the requests that shall find it.
    pub isolation_key: u64,
    /// Who may list and remove it; None = nobody in particular.
    pub owner: Option<Arc<str>>,
}

/// One registered prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixInfo {
    /// Its content address.
    pub id: PrefixId,
    /// Tokens whose K/V are kept in every replica.
    pub cached_tokens: u32,
    /// Loops that they were computed with.
    pub loops: u32,
    /// Attention window of the requests that find it; 0 = full attention.
    pub cache_window: u32,
    /// Requests that ended well and took their first `cached_tokens` from the cache.
    pub hits: u64,
}

/// All of them, or those of one owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixPoolStats {
    /// Prefixes kept.
    pub entries: usize,
    /// Their tokens together.
    pub total_cached_tokens: u64,
    /// Hits of all prefixes since start, removed ones included; of one owner: of those kept.
    pub hits: u64,
}

/// Which entry goes when there are more than `capacity`: the shortest, among equals the one
/// registered first. `lengths` in the order of registration; the newest one is spared, because
/// somebody has just asked for it.
#[must_use]
pub fn to_evict(lengths: &[u32], capacity: usize) -> Option<usize> {
    let (_newest, older) = lengths.split_last()?;
    if lengths.len() <= capacity {
        return None;
    }
    (0..older.len()).min_by_key(|index| older[*index])
}

/// Whether a request took a prefix from the cache. One whose prompt is cached whole still computes
/// its last token.
#[must_use]
pub fn is_hit(prefix_tokens: u32, prompt_tokens: u32, cached_tokens: u32) -> bool {
    prefix_tokens > 0 && cached_tokens >= prefix_tokens.min(prompt_tokens.saturating_sub(1))
}

/// How far an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pinning,
    /// With so many tokens.
    Kept(u32),
}

struct Entry {
    /// What is kept: whole blocks, loops resolved.
    prefix: Prefix,
    loops: u32,
    owner: Option<Arc<str>>,
    state: State,
    hits: u64,
}

impl Entry {
    fn info(&self) -> Option<PrefixInfo> {
        match self.state {
            State::Pinning => None,
            State::Kept(cached_tokens) => Some(PrefixInfo {
                id: self.prefix.id,
                cached_tokens,
                loops: self.loops,
                cache_window: self.prefix.cache_window,
                hits: self.hits,
            }),
        }
    }

    /// None asks for everyone.
    fn is_of(&self, owner: Option<&str>) -> bool {
        owner.is_none_or(|owner| self.owner.as_deref() == Some(owner))
    }

    fn begins(&self, request: &GenerationRequest, loops: u32) -> bool {
        let prefix = &self.prefix;
        let origin = (self.loops, prefix.cache_window, prefix.isolation_key);
        origin == (loops, request.cache_window, request.isolation_key)
            && request.adaptive.is_none() // such a request has K/V of its own
            && request.prompt.starts_with(&prefix.tokens)
    }
}

#[derive(Default)]
struct List {
    /// In the order of registration.
    entries: Vec<Entry>,
    n_hits: u64,
}

impl List {
    fn find(&mut self, id: PrefixId) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.prefix.id == id)
    }

    /// Index of the kept entry that must go, were `id` kept as well. Each owner has the capacity for
    /// itself, so that nobody can push out what another has registered.
    fn surplus(&self, id: PrefixId, capacity: usize) -> Option<usize> {
        let newest = self.entries.iter().find(|entry| entry.prefix.id == id)?;
        let is_kept = |entry: &Entry| {
            let is_other = entry.prefix.id != id && entry.owner == newest.owner;
            is_other && entry.state != State::Pinning
        };
        let (indices, mut lengths): (Vec<usize>, Vec<u32>) = self
            .entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| is_kept(entry))
            .map(|(index, entry)| (index, entry.prefix.tokens.len() as u32))
            .unzip();
        lengths.push(u32::MAX); // `id` itself, the newest
        Some(indices[to_evict(&lengths, capacity)?])
    }
}

/// See the module doc.
pub(crate) struct PrefixPool {
    capacity: usize,
    hashers: [RandomState; 2],
    /// Guards the list; held for no call outside this file.
    list: Mutex<List>,
    /// Held over a change of the list *and* of the pins that belong to it, so that the two agree:
    /// without it a pin could come back for an entry that was removed meanwhile, and stay for ever.
    changes: Mutex<()>,
}

impl PrefixPool {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            hashers: [RandomState::new(), RandomState::new()],
            list: Mutex::new(List::default()),
            changes: Mutex::new(()),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// To be held while entries and their pins change together; never by a thread that runs an engine.
    pub(crate) fn change(&self) -> MutexGuard<'_, ()> {
        self.changes.lock()
    }

    /// The entry for this content, if it is kept; nothing needs to be computed then.
    pub(crate) fn kept(&self, new: &NewPrefix) -> Option<PrefixInfo> {
        let list = self.list.lock();
        let is_it = |entry: &&Entry| {
            let prefix = &entry.prefix;
            (prefix.loops == new.loops || new.loops == Some(entry.loops))
                && prefix.cache_window == new.cache_window
                && prefix.isolation_key == new.isolation_key
                && prefix.tokens == new.tokens
        };
        list.entries.iter().find(is_it)?.info()
    }

    /// Notes that a prefix, computed with so many loops, is about to be pinned, and names it. One that
    /// is there already stays as it is.
    pub(crate) fn begin(&self, new: &NewPrefix, loops: u32) -> Prefix {
        let content = (&new.tokens, loops, new.cache_window, new.isolation_key);
        let [high, low] = self
            .hashers
            .each_ref()
            .map(|hasher| u128::from(hasher.hash_one(content)));
        let prefix = Prefix {
            id: PrefixId(high << 64 | low),
            tokens: Arc::clone(&new.tokens),
            loops: new.loops,
            cache_window: new.cache_window,
            isolation_key: new.isolation_key,
        };
        let mut list = self.list.lock();
        if list.find(prefix.id).is_none() {
            list.entries.push(Entry {
                prefix: prefix.clone(),
                loops,
                owner: new.owner.clone(),
                state: State::Pinning,
                hits: 0,
            });
        }
        prefix
    }

    /// The prefix that would have to go for this one, if it were kept.
    pub(crate) fn in_the_way_of(&self, id: PrefixId) -> Option<Prefix> {
        let list = self.list.lock();
        let index = list.surplus(id, self.capacity)?;
        Some(list.entries[index].prefix.clone())
    }

    /// A prefix is pinned with so many tokens. None when it was removed meanwhile. Those that have to
    /// go for it are gone from the list; the caller ends their pins.
    pub(crate) fn keep(
        &self,
        id: PrefixId,
        cached_tokens: u32,
    ) -> Option<(PrefixInfo, Vec<PrefixId>)> {
        let mut list = self.list.lock();
        let entry = list.find(id)?;
        entry.state = State::Kept(cached_tokens);
        let info = entry.info()?;
        let mut evicted = Vec::new();
        while let Some(index) = list.surplus(id, self.capacity) {
            evicted.push(list.entries.remove(index).prefix.id);
        }
        Some((info, evicted))
    }

    /// A prefix could not be pinned. True when it leaves the list, and its pins must end; false when
    /// somebody else's registration of it went well.
    pub(crate) fn give_up(&self, id: PrefixId) -> bool {
        let mut list = self.list.lock();
        let n_before = list.entries.len();
        let is_it = |entry: &Entry| entry.prefix.id == id && entry.state == State::Pinning;
        list.entries.retain(|entry| !is_it(entry));
        list.entries.len() < n_before
    }

    /// Takes out one entry, or all, of this owner (None = of everyone).
    pub(crate) fn remove(&self, id: Option<PrefixId>, owner: Option<&str>) -> Vec<PrefixId> {
        let mut list = self.list.lock();
        let goes = |entry: &Entry| entry.is_of(owner) && id.is_none_or(|id| entry.prefix.id == id);
        let gone = list.entries.extract_if(.., |entry| goes(entry));
        gone.map(|entry| entry.prefix.id).collect()
    }

    /// What a replica has to pin that has nothing yet; to be asked while `change` is held.
    pub(crate) fn kept_prefixes(&self) -> Vec<Prefix> {
        let list = self.list.lock();
        let kept = list.entries.iter().filter(|e| e.state != State::Pinning);
        kept.map(|entry| entry.prefix.clone()).collect()
    }

    pub(crate) fn infos(&self, owner: Option<&str>) -> Vec<PrefixInfo> {
        let list = self.list.lock();
        let of_owner = list.entries.iter().filter(|entry| entry.is_of(owner));
        of_owner.filter_map(Entry::info).collect()
    }

    /// None asks for everyone.
    pub(crate) fn stats(&self, owner: Option<&str>) -> PrefixPoolStats {
        let list = self.list.lock();
        let of_owner = || list.entries.iter().filter(|entry| entry.is_of(owner));
        let kept = || of_owner().filter_map(Entry::info);
        PrefixPoolStats {
            entries: kept().count(),
            total_cached_tokens: kept().map(|info| u64::from(info.cached_tokens)).sum(),
            hits: match owner {
                None => list.n_hits,
                Some(_) => kept().map(|info| info.hits).sum(),
            },
        }
    }

    /// Tokens of the longest kept prefix that begins a request, which runs with so many loops and
    /// the prefix's own window.
    pub(crate) fn kept_tokens(&self, request: &GenerationRequest, loops: u32) -> u32 {
        let list = self.list.lock();
        let begins = list
            .entries
            .iter()
            .filter(|entry| entry.begins(request, loops));
        let kept = begins.filter_map(|entry| Some(entry.info()?.cached_tokens));
        kept.max().unwrap_or(0)
    }

    /// A request ended well: the longest prefix that it took from the cache counts a hit.
    pub(crate) fn count_hit(&self, request: &GenerationRequest, usage: Usage) {
        // A prompt without an answer is a registration's own job.
        if usage.cached_tokens == 0 || request.max_tokens == 0 {
            return;
        }
        let list = &mut *self.list.lock();
        let hit = list
            .entries
            .iter_mut()
            .filter(|entry| {
                let cached = entry.info().map_or(0, |info| info.cached_tokens);
                is_hit(cached, usage.prompt_tokens, usage.cached_tokens)
                    && entry.begins(request, usage.loops)
            })
            .max_by_key(|entry| entry.prefix.tokens.len());
        if let Some(entry) = hit {
            entry.hits += 1;
            list.n_hits += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn new(tokens: Vec<TokenId>) -> NewPrefix {
        NewPrefix {
            tokens: tokens.into(),
            loops: None,
            cache_window: 0,
            isolation_key: 0,
            owner: None,
        }
    }

    fn add(pool: &PrefixPool, new: &NewPrefix) -> (PrefixId, Vec<PrefixId>) {
        let id = pool.begin(new, 1).id;
        let (info, evicted) = pool.keep(id, new.tokens.len() as u32).expect("it is there");
        assert_eq!(info.id, id);
        (id, evicted)
    }

    #[test]
    fn the_shortest_goes_the_oldest_among_equals_never_the_newest() {
        for (lengths, capacity, expected) in [
            (&[][..], 0, None),
            (&[5], 1, None),
            (&[5], 0, None),
            (&[5, 3, 9], 3, None),
            (&[5, 3, 9], 2, Some(1)),
            (&[5, 3, 3, 9], 2, Some(1)),
            (&[5, 7, 1], 2, Some(0)),
        ] {
            assert_eq!(
                to_evict(lengths, capacity),
                expected,
                "{lengths:?} {capacity}"
            );
        }
    }

    #[test]
    fn a_hit_takes_the_whole_prefix_but_for_a_last_token() {
        for (prefix, prompt, cached, expected) in [
            (32, 40, 32, true),
            (32, 40, 48, true),
            (32, 40, 16, false),
            (32, 32, 31, true),
            (32, 32, 16, false),
            (0, 5, 3, false),
        ] {
            assert_eq!(
                is_hit(prefix, prompt, cached),
                expected,
                "{prefix} {prompt} {cached}"
            );
        }
    }

    #[test]
    fn the_same_content_is_one_entry_and_anything_else_another() {
        let pool = PrefixPool::new(16);
        let tokens: Vec<TokenId> = (0..32).collect();
        let first = new(tokens.clone());
        let (id, _) = add(&pool, &first);
        assert_eq!(add(&pool, &first).0, id);
        assert_eq!(pool.kept(&first).map(|info| info.id), Some(id));
        let named = NewPrefix {
            loops: Some(1),
            ..first.clone()
        };
        assert_eq!(
            pool.kept(&named).map(|info| info.id),
            Some(id),
            "1 loop is the default"
        );
        let others = [
            NewPrefix {
                loops: Some(2),
                ..first.clone()
            },
            NewPrefix {
                cache_window: 8,
                ..first.clone()
            },
            NewPrefix {
                isolation_key: 1,
                ..first.clone()
            },
            new(tokens[..16].to_vec()),
        ];
        for other in &others {
            assert_eq!(pool.kept(other), None);
            let id_of_other = pool.begin(other, other.loops.unwrap_or(1)).id;
            assert_ne!(id_of_other, id);
            assert!(pool.give_up(id_of_other));
        }
        assert_eq!(pool.stats(None).entries, 1);
        assert!(!pool.give_up(id), "it is kept");
    }

    #[test]
    fn hits_go_to_the_longest_prefix_that_was_really_reused() {
        let pool = PrefixPool::new(16);
        let tokens: Vec<TokenId> = (0..64).collect();
        let short = add(&pool, &new(tokens[..16].to_vec())).0;
        let long = add(&pool, &new(tokens[..48].to_vec())).0;
        let usage = |cached_tokens| Usage {
            prompt_tokens: 64,
            cached_tokens,
            completion_tokens: 1,
            loops: 1,
            ..Usage::default()
        };
        let mut request = GenerationRequest::new(tokens, 1);
        for cached in [48, 16, 15, 0] {
            pool.count_hit(&request, usage(cached));
        }
        pool.count_hit(
            &request,
            Usage {
                loops: 2,
                ..usage(48)
            },
        );
        request.isolation_key = 3;
        pool.count_hit(&request, usage(48));
        let hits = pool
            .infos(None)
            .into_iter()
            .map(|info| (info.id, info.hits));
        assert_eq!(hits.collect::<Vec<_>>(), [(short, 1), (long, 1)]);
        assert_eq!(pool.stats(None).hits, 2);
    }

    #[test]
    fn nobody_pushes_out_what_another_owner_registered() {
        let pool = PrefixPool::new(2);
        let of = |owner: &str, tokens| NewPrefix {
            owner: Some(owner.into()),
            ..new(tokens)
        };
        let short = add(&pool, &of("me", vec![1; 16])).0;
        for token in 2..6 {
            add(&pool, &of("they", vec![token; 48]));
        }
        assert_eq!(pool.stats(Some("they")).entries, 2);
        assert_eq!(pool.infos(Some("me"))[0].id, short);
        add(&pool, &of("me", vec![8; 32]));
        let evicted = add(&pool, &of("me", vec![9; 32])).1;
        assert_eq!(evicted, [short], "one's own goes");
    }

    #[test]
    fn owners_see_and_remove_their_own() {
        let pool = PrefixPool::new(16);
        let of = |owner: &str, key| NewPrefix {
            owner: Some(owner.into()),
            isolation_key: key,
            ..new(vec![1; 16])
        };
        let nobodys = add(&pool, &new(vec![1; 16])).0;
        let mine = add(&pool, &of("me", 1)).0;
        let theirs = add(&pool, &of("they", 2)).0;
        assert_eq!(pool.infos(Some("me")).len(), 1);
        assert_eq!(pool.stats(Some("me")).entries, 1);
        assert_eq!(pool.infos(None).len(), 3);
        assert_eq!(pool.remove(Some(theirs), Some("me")), []);
        assert_eq!(pool.remove(None, Some("they")), [theirs]);
        let begun = pool.begin(&new(vec![2; 16]), 1).id;
        assert_eq!(
            pool.stats(None).entries,
            2,
            "what is not pinned yet does not count"
        );
        assert_eq!(pool.remove(None, None), [nobodys, mine, begun]);
        assert_eq!(pool.keep(begun, 16), None, "removed meanwhile");
    }

    proptest! {
        #[test]
        fn the_pool_never_holds_more_than_its_capacity_and_keeps_the_longest(
            capacity in 1..5_usize,
            lengths in prop::collection::vec(1..50_usize, 1..20),
        ) {
            let pool = PrefixPool::new(capacity);
            let mut model: Vec<usize> = Vec::new();
            for (index, n_blocks) in lengths.into_iter().enumerate() {
                let tokens = vec![index as TokenId; n_blocks];
                let way = pool.begin(&new(tokens.clone()), 1);
                let in_the_way = pool.in_the_way_of(way.id);
                let (_, evicted) = add(&pool, &new(tokens));
                prop_assert_eq!(in_the_way.map(|prefix| prefix.id).into_iter().collect::<Vec<_>>(), evicted);
                if model.len() == capacity {
                    let shortest = model.iter().min().copied();
                    let place = model.iter().position(|n| Some(*n) == shortest);
                    place.map(|place| model.remove(place));
                }
                model.push(n_blocks);
                let kept = pool.infos(None).into_iter().map(|info| info.cached_tokens as usize);
                prop_assert_eq!(kept.collect::<Vec<_>>(), model.clone());
                prop_assert_eq!(pool.stats(None).total_cached_tokens, model.iter().sum::<usize>() as u64);
            }
        }
    }
}
