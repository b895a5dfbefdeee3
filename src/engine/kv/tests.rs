//! Tests of the KV pool: named behaviours, then random runs against the integrity check.

use super::*;
use crate::request::{ExitRule, PinError};
use proptest::prelude::*;

const ORIGIN: Origin = Origin {
    loops: 1,
    window: CacheWindow {
        tokens: 0,
        n_kept: 0,
    },
    exit: None,
    isolation_key: 0,
};

fn window(tokens: u32, n_kept: u32) -> CacheWindow {
    CacheWindow { tokens, n_kept }
}

fn tokens(n: usize) -> Vec<TokenId> {
    (0..n as u32).collect()
}

/// A sequence that has computed all of `tokens`.
fn computed(pool: &mut KvPool, tokens: &[TokenId], n_groups: usize) -> SequenceKv {
    let mut kv = SequenceKv::new(ORIGIN, n_groups, true);
    assert!(pool.grow(&mut kv, tokens.len()));
    pool.publish(&mut kv, tokens, tokens.len());
    kv
}

#[track_caller]
fn check(pool: &KvPool, live: &[&SequenceKv]) {
    pool.check_integrity(live.iter().copied()).expect("sound");
}

#[test]
fn full_blocks_are_found_again_and_partial_ones_are_not() {
    let mut pool = KvPool::new(10, 10, true);
    let mut kv = computed(&mut pool, &tokens(40), 2);
    assert_eq!((pool.used_pages(), pool.available_pages()), (6, 4));
    pool.release(&mut kv);
    assert_eq!((pool.used_pages(), pool.cached_pages()), (0, 4));
    check(&pool, &[]);

    assert_eq!(pool.find(ORIGIN, &tokens(31)).len(), 1);
    assert_eq!(pool.find(ORIGIN, &tokens(100)).len(), 2);
    let mut other = tokens(32);
    other[20] = 7;
    assert_eq!(pool.find(ORIGIN, &other).len(), 1);
    let found = pool.find(ORIGIN, &tokens(32));
    let mut again = SequenceKv::new(ORIGIN, 2, true);
    assert_eq!(pool.attach_pages(&again, &found), 4);
    pool.attach(&mut again, &found);
    assert_eq!(again.capacity_tokens(), 32);
    assert_eq!(pool.attach_pages(&again, &found), 0);
    check(&pool, &[&again]);
}

#[test]
fn another_origin_shares_nothing() {
    let mut pool = KvPool::new(10, 10, true);
    let _kv = computed(&mut pool, &tokens(32), 1);
    for origin in [
        Origin { loops: 2, ..ORIGIN },
        Origin {
            window: window(64, 0),
            ..ORIGIN
        },
        Origin {
            window: window(64, 16),
            ..ORIGIN
        },
        Origin {
            exit: Some((ExitRule::Kl, 0)),
            ..ORIGIN
        },
        Origin {
            isolation_key: 1,
            ..ORIGIN
        },
    ] {
        assert!(pool.find(origin, &tokens(32)).is_empty(), "{origin:?}");
    }
}

#[test]
fn a_private_sequence_and_a_pool_without_cache_publish_nothing() {
    let mut pool = KvPool::new(4, 4, true);
    let mut kv = SequenceKv::new(ORIGIN, 1, false);
    assert!(pool.grow(&mut kv, 32));
    pool.publish(&mut kv, &tokens(32), 32);
    assert!(pool.find(ORIGIN, &tokens(32)).is_empty());
    let mut plain = KvPool::new(4, 4, false);
    let mut kv = computed(&mut plain, &tokens(32), 1);
    plain.release(&mut kv);
    assert_eq!(plain.cached_pages(), 0);
    check(&plain, &[]);
}

#[test]
fn a_block_computed_twice_is_kept_once() {
    let mut pool = KvPool::new(8, 8, true);
    let first = computed(&mut pool, &tokens(32), 2);
    let mut second = computed(&mut pool, &tokens(32), 2);
    assert_eq!(pool.used_pages(), 4);
    assert_eq!(first.tables, second.tables);
    pool.release(&mut second);
    assert_eq!((pool.used_pages(), pool.cached_pages()), (4, 0));
    check(&pool, &[&first]);
}

#[test]
fn children_are_evicted_before_their_parents_and_the_least_recent_chain_first() {
    let mut pool = KvPool::new(4, 4, true);
    let mut old = computed(&mut pool, &tokens(32), 1);
    let recent_tokens: Vec<u32> = (100..132).collect();
    let mut recent = computed(&mut pool, &recent_tokens, 1);
    pool.release(&mut old);
    pool.release(&mut recent);
    let mut kv = SequenceKv::new(ORIGIN, 1, true);
    assert!(pool.grow(&mut kv, 16));
    assert_eq!(pool.find(ORIGIN, &tokens(32)).len(), 1);
    assert!(pool.grow(&mut kv, 32));
    assert_eq!(pool.find(ORIGIN, &tokens(32)).len(), 0);
    assert_eq!(pool.find(ORIGIN, &recent_tokens).len(), 2);
    check(&pool, &[&kv]);
}

#[test]
fn growth_ends_where_the_pages_end() {
    let mut pool = KvPool::new(5, 5, true);
    let mut kv = SequenceKv::new(ORIGIN, 2, true);
    assert!(!pool.grow(&mut kv, 48));
    assert_eq!(kv.capacity_tokens(), 32);
    assert_eq!(kv.missing_pages(48, 1), 2);
    check(&pool, &[&kv]);
}

#[test]
fn the_last_shared_block_is_copied_before_it_is_written() {
    let mut pool = KvPool::new(6, 6, true);
    let first = computed(&mut pool, &tokens(32), 2);
    let found = pool.find(ORIGIN, &tokens(32));
    let mut second = SequenceKv::new(ORIGIN, 2, true);
    pool.attach(&mut second, &found);
    let copies = pool.copy_last(&mut second);
    let from: Vec<PageId> = first.tables.groups.iter().map(|table| table[1]).collect();
    let to: Vec<PageId> = second.tables.groups.iter().map(|table| table[1]).collect();
    assert_eq!(copies, [(from[0], to[0]), (from[1], to[1])]);
    assert_ne!(from, to);
    check(&pool, &[&first, &second]);

    // Once its last row is computed it is the same block again.
    pool.publish(&mut second, &tokens(32), 32);
    assert_eq!(first.tables, second.tables);
    check(&pool, &[&first, &second]);
}

#[test]
fn without_pages_the_last_shared_block_is_given_up() {
    let mut pool = KvPool::new(4, 4, true);
    let mut first = computed(&mut pool, &tokens(32), 2);
    let found = pool.find(ORIGIN, &tokens(32));
    let mut second = SequenceKv::new(ORIGIN, 2, true);
    pool.attach(&mut second, &found);
    assert!(pool.copy_last(&mut second).is_empty());
    assert_eq!(second.capacity_tokens(), 16);
    check(&pool, &[&first, &second]);
    pool.release(&mut first);
    assert!(pool.grow(&mut second, 32));
    check(&pool, &[&second]);
}

#[test]
fn pinned_chains_outlive_the_pressure_and_cached_ones_do_not() {
    let mut pool = KvPool::new(6, 4, true);
    let mut kv = computed(&mut pool, &tokens(32), 1);
    assert_eq!(pool.pin(PrefixId(1), kv.published_blocks()), Ok(32));
    assert_eq!((pool.used_pages(), pool.pinned_pages()), (2, 2));
    pool.release(&mut kv);
    assert_eq!((pool.used_pages(), pool.cached_pages()), (0, 0));
    assert_eq!((pool.available_pages(), pool.pinned_pages()), (4, 2));
    check(&pool, &[]);

    let mut other = SequenceKv::new(ORIGIN, 1, true);
    assert!(!pool.grow(&mut other, 90));
    let found = pool.find(ORIGIN, &tokens(40));
    let mut hit = SequenceKv::new(ORIGIN, 1, true);
    assert_eq!((found.len(), pool.attach_pages(&hit, &found)), (2, 0));
    pool.attach(&mut hit, &found);
    assert_eq!(pool.used_pages(), 6);
    check(&pool, &[&other, &hit]);
    pool.unpin(PrefixId(1));
    check(&pool, &[&other, &hit]);
    pool.release(&mut hit);
    assert_eq!((pool.cached_pages(), pool.pinned_pages()), (2, 0));
    assert!(pool.grow(&mut other, 96));
    assert!(pool.find(ORIGIN, &tokens(40)).is_empty());
    check(&pool, &[&other]);
}

#[test]
fn pins_share_blocks_and_have_a_limit_with_both_numbers() {
    let mut pool = KvPool::new(20, 6, true);
    let long = computed(&mut pool, &tokens(48), 2);
    let mut other_tokens = tokens(48);
    other_tokens[40] = 7;
    let other = computed(&mut pool, &other_tokens, 2);
    assert_eq!(pool.pin(PrefixId(1), &long.published_blocks()[..2]), Ok(32));
    assert_eq!(
        pool.pin(PrefixId(1), long.published_blocks()),
        Ok(32),
        "it is there"
    );
    assert_eq!(pool.pin(PrefixId(2), long.published_blocks()), Ok(48));
    assert_eq!(pool.pinned_pages(), 6);
    let refused = PinError::NoRoom {
        needed_pages: 2,
        pinned_pages: 6,
        pages_max: 6,
    };
    assert_eq!(
        pool.pin(PrefixId(3), other.published_blocks()),
        Err(refused)
    );
    check(&pool, &[&long, &other]);
    pool.unpin(PrefixId(2));
    pool.unpin(PrefixId(9));
    assert_eq!(pool.pinned_pages(), 4);
    assert_eq!(pool.pin(PrefixId(3), other.published_blocks()), Ok(48));
    check(&pool, &[&long, &other]);
}

/// A step of a random run.
#[derive(Clone, Debug)]
enum Act {
    /// Starts a sequence: variant of its tokens, length, depth, window.
    Start(u32, usize, u32, CacheWindow),
    /// Computes more of sequence `i`.
    Compute(usize, usize),
    /// Ends sequence `i`.
    End(usize),
    /// Pins what sequence `i` has published under one of a few names.
    Pin(usize, u128),
    /// Ends a pin.
    Unpin(u128),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..3_u32, 1..90_usize, 1..3_u32, some_window())
            .prop_map(|(v, n, loops, window)| Act::Start(v, n, loops, window)),
        (0..6_usize, 1..40_usize).prop_map(|(i, n)| Act::Compute(i, n)),
        (0..6_usize).prop_map(Act::End),
        (0..6_usize, 0..4_u128).prop_map(|(i, name)| Act::Pin(i, name)),
        (0..4_u128).prop_map(Act::Unpin),
    ]
}

/// None, short or longer, with and without a kept beginning: few, so that sequences share.
fn some_window() -> impl Strategy<Value = CacheWindow> {
    prop_oneof![
        2 => Just(window(0, 0)),
        1 => Just(window(5, 0)),
        1 => Just(window(5, 32)),
        1 => Just(window(30, 16)),
    ]
}

struct Live {
    kv: SequenceKv,
    tokens: Vec<TokenId>,
    n_computed: usize,
}

/// The variants share their first 40 tokens.
fn variant_tokens(variant: u32, n: usize) -> Vec<TokenId> {
    let token = |i: usize| i as u32 + if i < 40 { 0 } else { 1000 * variant };
    (0..n).map(token).collect()
}

fn start(pool: &mut KvPool, variant: u32, n_tokens: usize, origin: Origin) -> Live {
    let loops = origin.loops;
    let tokens = variant_tokens(variant, n_tokens);
    let mut kv = SequenceKv::new(origin, loops as usize + 1, true);
    let found = pool.find(origin, &tokens);
    pool.attach(&mut kv, &found);
    if kv.capacity_tokens() == n_tokens {
        pool.copy_last(&mut kv);
    }
    let n_computed = kv.capacity_tokens().min(n_tokens - 1);
    Live {
        kv,
        tokens,
        n_computed,
    }
}

proptest! {
    #[test]
    fn every_page_has_one_owner_whatever_happens(
        n_pages in 1..40_u32,
        pinned_pages_max in 0..20_u32,
        acts in prop::collection::vec(act(), 1..60),
    ) {
        let mut pool = KvPool::new(n_pages, pinned_pages_max, true);
        let mut live: Vec<Live> = Vec::new();
        for act in acts {
            match act {
                Act::Start(variant, n_tokens, loops, window) if live.len() < 6 => {
                    let origin = Origin { loops, window, ..ORIGIN };
                    live.push(start(&mut pool, variant, n_tokens, origin));
                }
                Act::Compute(i, n_more) if i < live.len() => {
                    let Live { kv, tokens, n_computed } = &mut live[i];
                    let wanted = tokens.len().min(*n_computed + n_more);
                    pool.grow(kv, wanted);
                    *n_computed = wanted.min(kv.capacity_tokens());
                    pool.publish(kv, tokens, *n_computed);
                    pool.drop_unseen(kv, *n_computed);
                    // What the next row sees is there, and no more than the bound.
                    prop_assert!(kv.tables.holds_window_of(*n_computed));
                    let n_max = kv.window.blocks_max(tokens.len(), n_more.max(1));
                    prop_assert!(kv.blocks.len() <= n_max);
                }
                Act::End(i) if i < live.len() => {
                    let mut ended = live.swap_remove(i);
                    pool.release(&mut ended.kv);
                }
                Act::Pin(i, name) if i < live.len() && live[i].kv.n_dropped == 0 => {
                    let _ = pool.pin(PrefixId(name), live[i].kv.published_blocks());
                }
                Act::Unpin(name) => pool.unpin(PrefixId(name)),
                Act::Start(..) | Act::Compute(..) | Act::End(_) | Act::Pin(..) => {}
            }
            let sequences = live.iter().map(|live| &live.kv);
            prop_assert_eq!(pool.check_integrity(sequences), Ok(()));
        }
        for mut ended in live {
            pool.release(&mut ended.kv);
        }
        prop_assert_eq!(pool.used_pages(), 0);
    }
}

#[test]
fn a_window_gives_back_what_no_row_sees_and_keeps_its_beginning() {
    let mut pool = KvPool::new(20, 20, true);
    let origin = Origin {
        window: window(20, 16),
        ..ORIGIN
    };
    let mut kv = SequenceKv::new(origin, 2, true);
    for n_computed in 1..=96 {
        assert!(pool.grow(&mut kv, n_computed));
        pool.publish(&mut kv, &tokens(96), n_computed);
        pool.drop_unseen(&mut kv, n_computed);
        check(&pool, &[&kv]);
        assert!(pool.used_pages() <= 2 * window(20, 16).blocks_max(96, 1));
    }
    // Kept: block 0. Row 96 sees 77..=96, so blocks 4 and 5; 1 to 3 are cache.
    assert_eq!((kv.capacity_tokens(), kv.n_dropped), (96, 3));
    assert_eq!((pool.used_pages(), pool.cached_pages()), (6, 6));
    let longer = tokens(200);
    assert_eq!(kv.missing_pages(200, 1), 2, "a block at a time");
    assert_eq!(kv.missing_pages(97, 1), 2);

    // The whole chain is found, but only what the window shows is held.
    let found = pool.find(origin, &longer);
    assert_eq!(found.len(), 6);
    let mut again = SequenceKv::new(origin, 2, true);
    assert_eq!(pool.attach_pages(&again, &found), 2, "block 3 is nobody's");
    pool.attach(&mut again, &found);
    assert_eq!((again.capacity_tokens(), again.blocks.len()), (96, 4));
    check(&pool, &[&kv, &again]);
    pool.release(&mut kv);
    // Its last block may be written after all, or given up.
    assert_eq!(pool.copy_last(&mut again).len(), 2);
    pool.publish(&mut again, &tokens(96), 96);
    check(&pool, &[&again]);
    pool.release(&mut again);
    assert_eq!(pool.used_pages(), 0);
    check(&pool, &[]);
}
