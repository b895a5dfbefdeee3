//! Who may reuse whose computed prompts.
//!
//! Pure but for one process-wide random key, so that nobody can choose a salt that meets another
//! client's key. Time to the first token tells whether a prompt was computed before; unless the
//! operator says that all clients trust each other, each API key therefore reuses its own blocks
//! only. What is not here: the comparison of keys, which every lookup does (`engine/kv`).

use crate::config::PrefixIsolation;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The isolation key of a request: of its client where keys are asked for and kept apart, and of the
/// `cache_salt` it may have sent. 0 without either.
#[must_use]
pub fn isolation_key(mode: PrefixIsolation, client: Option<&str>, salt: Option<&str>) -> u64 {
    match (owner(mode, client), salt) {
        (None, None) => 0,
        parts => HASHER.hash_one(parts),
    }
}

/// Whose registered prefixes a client lists and removes: its own, or all (None).
#[must_use]
pub fn owner(mode: PrefixIsolation, client: Option<&str>) -> Option<&str> {
    match mode {
        PrefixIsolation::Key => client,
        PrefixIsolation::Shared => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PrefixIsolation::{Key, Shared};

    #[test]
    fn clients_and_salts_are_kept_apart_and_sharing_is_a_choice() {
        let open = isolation_key(Key, None, None);
        let keys = [
            open,
            isolation_key(Key, Some("key-1"), None),
            isolation_key(Key, Some("key-2"), None),
            isolation_key(Key, None, Some("key-1")),
            isolation_key(Key, Some("key-1"), Some("")),
            isolation_key(Key, Some("key-1"), Some("a")),
            isolation_key(Key, Some("key-2"), Some("a")),
        ];
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{index}");
        }
        assert_eq!(
            keys[5],
            isolation_key(Key, Some("key-1"), Some("a")),
            "it repeats"
        );
        assert_eq!(isolation_key(Shared, Some("key-1"), None), open);
        assert_eq!(
            isolation_key(Shared, Some("key-1"), Some("a")),
            isolation_key(Shared, Some("key-2"), Some("a")),
        );
        assert_eq!(owner(Key, Some("key-1")), Some("key-1"));
        assert_eq!(owner(Shared, Some("key-1")), None);
    }
}
