//! Which replica gets the next job: a pure choice over plain numbers.
//!
//! No lock, clock or log. What is not here: the runtimes themselves (`executor` holds them) and
//! how many jobs a replica really has (`queue` counts them).

/// What the choice needs to know of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaLoad {
    /// Jobs handed to it and not ended.
    pub inflight: u32,
    /// Jobs it should hold: `min(configured, capability)`.
    pub target: u32,
    /// Whether it takes jobs now.
    pub is_open: bool,
}

/// `min(configured, capability)`, at least 1 so that every model makes progress.
#[must_use]
pub fn effective_target(configured: Option<u32>, max_inflight: u32) -> u32 {
    configured.unwrap_or(max_inflight).min(max_inflight).max(1)
}

/// The eligible replica with the lowest `inflight / target`; ties go round-robin, beginning after
/// `last`. None when all are full or shut.
#[must_use]
pub fn choose(loads: &[ReplicaLoad], last: usize) -> Option<usize> {
    let order = (0..loads.len()).map(|step| (last + 1 + step) % loads.len());
    order
        .filter(|&index| {
            let load = loads[index];
            load.is_open && load.inflight < load.target
        })
        .reduce(|best, index| {
            // a/b < c/d without division; the earlier one in round-robin order keeps a tie.
            let (best_load, load) = (loads[best], loads[index]);
            let left = u64::from(load.inflight) * u64::from(best_load.target);
            let right = u64::from(best_load.inflight) * u64::from(load.target);
            if left < right { index } else { best }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(inflight: u32, target: u32) -> ReplicaLoad {
        ReplicaLoad {
            inflight,
            target,
            is_open: true,
        }
    }

    fn shut(inflight: u32, target: u32) -> ReplicaLoad {
        ReplicaLoad {
            is_open: false,
            ..load(inflight, target)
        }
    }

    #[test]
    fn choices() {
        #[rustfmt::skip]
        let table: &[(&[ReplicaLoad], usize, Option<usize>)] = &[
            (&[], 0, None),
            (&[load(0, 1)], 0, Some(0)),
            (&[load(1, 1)], 0, None),
            (&[load(0, 4), load(0, 4), load(0, 4)], 0, Some(1)), // ties: the one after the last
            (&[load(0, 4), load(0, 4), load(0, 4)], 1, Some(2)),
            (&[load(0, 4), load(0, 4), load(0, 4)], 2, Some(0)),
            (&[load(3, 4), load(1, 4), load(2, 4)], 1, Some(1)), // lowest wins over the turn
            (&[load(2, 8), load(1, 2)], 0, Some(0)),             // 2/8 is emptier than 1/2
            (&[load(1, 8), load(0, 1)], 1, Some(1)),
            (&[load(4, 4), load(3, 4)], 1, Some(1)),             // full ones are out
            (&[shut(0, 4), load(3, 4)], 1, Some(1)),             // so are shut ones
            (&[shut(0, 4), load(4, 4)], 1, None),
            (&[shut(0, 4), shut(1, 4)], 1, None),
        ];
        for (loads, last, expected) in table {
            assert_eq!(choose(loads, *last), *expected, "{loads:?} after {last}");
        }
    }

    #[test]
    fn targets_are_clamped_to_the_capability_and_never_zero() {
        assert_eq!(effective_target(None, 16), 16);
        assert_eq!(effective_target(Some(4), 16), 4);
        assert_eq!(effective_target(Some(99), 16), 16);
        assert_eq!(effective_target(Some(0), 16), 1);
        assert_eq!(effective_target(None, 0), 1);
    }
}
