//! What the driver does next with its slots: a pure choice over plain numbers.
//!
//! No lock, clock or log; `queue` gathers what is asked here and carries the answer out in the same
//! step, `driver` tells the runtime. In this order:
//!
//! 1. A slot is free: the first in line gets it. Who waits may go to any replica, who was preempted
//!    only back to its own; the earlier of the two in the order of the queue goes first.
//! 2. No slot is free for the first that waits: it takes the slot of a running request of lower
//!    priority, if there is one that may be preempted.
//! 3. Otherwise nothing.
//!
//! # Who is preempted
//!
//! Lower means both: a lower priority as submitted, so that equals never take turns, and a later
//! place in the order of the queue, so that a request that has aged past the newcomer keeps its
//! slot. Of those the last in that order goes: the lowest aged priority, within it the youngest. A
//! request that was preempted `max_preemptions` times already is left alone, so everything that
//! runs gets done. Each choice starts, resumes or uses up one preemption, so a loop over them ends.
//!
//! What is not here: which replica is best (`replica`), who waits (`queue`).

use super::queue::QueueKey;
use super::replica::{self, ReplicaLoad};

/// The first that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) key: QueueKey,
    pub(crate) priority: i32,
}

/// A request that lost its slot and waits to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parked {
    pub(crate) key: QueueKey,
    /// Where it must go on.
    pub(crate) replica: usize,
}

/// A request that holds a slot and could be parked by its runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) key: QueueKey,
    pub(crate) priority: i32,
    /// How often it lost its slot already.
    pub(crate) n_preemptions: u32,
}

/// The choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// The first that waits starts on this replica.
    Start { replica: usize },
    /// This preempted request goes on.
    Resume(Parked),
    /// This running request gives its slot up.
    Preempt(QueueKey),
}

/// See the module doc. `parked` in the order of the queue; `holders` in any order, and empty where
/// nobody may be preempted; it is looked at only when no slot is free.
pub(crate) fn next_move(
    head: Option<Head>,
    mut parked: impl Iterator<Item = Parked>,
    loads: &[ReplicaLoad],
    last_replica: usize,
    holders: impl Iterator<Item = Holder>,
    max_preemptions: u32,
) -> Option<Move> {
    let has_room = |replica: usize| loads[replica].inflight < loads[replica].target;
    let resumable = parked.find(|parked| has_room(parked.replica));
    let replica = head.and_then(|_| replica::choose(loads, last_replica));
    match (head, replica, resumable) {
        (Some(head), Some(replica), Some(parked)) if head.key < parked.key => {
            Some(Move::Start { replica })
        }
        (_, _, Some(parked)) => Some(Move::Resume(parked)),
        (Some(_), Some(replica), None) => Some(Move::Start { replica }),
        (Some(head), None, None) => victim(head, holders, max_preemptions).map(Move::Preempt),
        (None, _, None) => None,
    }
}

fn victim(
    head: Head,
    holders: impl Iterator<Item = Holder>,
    max_preemptions: u32,
) -> Option<QueueKey> {
    holders
        .filter(|holder| {
            holder.priority < head.priority
                && holder.key > head.key
                && holder.n_preemptions < max_preemptions
        })
        .map(|holder| holder.key)
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rank: i64, number: u64) -> QueueKey {
        QueueKey { rank, number }
    }

    fn load(inflight: u32, target: u32) -> ReplicaLoad {
        ReplicaLoad {
            inflight,
            target,
            is_open: true,
        }
    }

    fn parked(rank: i64, number: u64, replica: usize) -> Parked {
        Parked {
            key: key(rank, number),
            replica,
        }
    }

    #[test]
    fn free_slots_go_to_the_first_in_line() {
        let head = |rank| {
            Some(Head {
                key: key(rank, 9),
                priority: 0,
            })
        };
        let start = |replica| Some(Move::Start { replica });
        let (free, full) = (load(0, 1), load(1, 1));
        let dead = ReplicaLoad {
            is_open: false,
            ..free
        };
        type Row<'a> = (Option<Head>, &'a [Parked], &'a [ReplicaLoad], Option<Move>);
        let p = parked;
        #[rustfmt::skip]
        let table: &[Row] = &[
            (None,    &[],                         &[free],       None),
            (head(5), &[],                         &[free],       start(0)),
            (head(5), &[],                         &[full],       None),
            (head(5), &[p(4, 1, 0)],               &[free],       Some(Move::Resume(p(4, 1, 0)))),
            (head(5), &[p(6, 1, 0)],               &[free],       start(0)),
            (head(5), &[p(5, 1, 0)],               &[free],       Some(Move::Resume(p(5, 1, 0)))), // it came first
            (None,    &[p(6, 1, 0)],               &[free],       Some(Move::Resume(p(6, 1, 0)))),
            (None,    &[p(6, 1, 0)],               &[full],       None),
            (head(5), &[p(4, 1, 0)],               &[full, free], start(1)), // its own replica is full
            (head(5), &[p(4, 1, 1)],               &[full, free], Some(Move::Resume(p(4, 1, 1)))),
            (None,    &[p(3, 1, 0), p(4, 2, 1)],   &[full, free], Some(Move::Resume(p(4, 2, 1)))),
            (head(5), &[p(6, 1, 0)],               &[dead, full], Some(Move::Resume(p(6, 1, 0)))), // nobody else may
            (head(5), &[p(4, 1, 0)],               &[full, full], None),
        ];
        for (head, parked, loads, expected) in table {
            let found = next_move(
                *head,
                parked.iter().copied(),
                loads,
                0,
                std::iter::empty(),
                3,
            );
            assert_eq!(found, *expected, "{head:?} {parked:?} {loads:?}");
        }
    }

    #[test]
    fn the_youngest_of_the_lowest_gives_its_slot_up() {
        // (rank, number, priority, preemptions so far); the newcomer has rank 50, number 9, priority 2.
        type Row = (i64, u64, i32, u32);
        #[rustfmt::skip]
        let table: &[(&[Row], Option<u64>)] = &[
            (&[], None),
            (&[(100, 1, 1, 0)], Some(1)),
            (&[(100, 1, 2, 0)], None),                              // an equal
            (&[(100, 1, 3, 0)], None),                              // a higher one
            (&[(40, 1, 0, 0)], None),                               // lower, but it has aged past
            (&[(50, 1, 0, 0)], None),                               // aged just as far, and came first
            (&[(100, 1, 1, 3)], None),                              // often enough
            (&[(100, 1, 1, 2)], Some(1)),
            (&[(100, 1, 1, 0), (200, 2, 0, 0)], Some(2)),           // the lowest
            (&[(200, 1, 0, 0), (200, 2, 0, 0)], Some(2)),           // the youngest of them
            (&[(100, 1, 1, 0), (200, 2, 0, 3)], Some(1)),           // the next when that one is spared
            (&[(100, 1, 1, 0), (10, 2, 9, 0)], Some(1)),            // a high one beside it stays
            (&[(i64::MAX, 1, -100, 0), (51, 2, 1, 0)], Some(1)),
        ];
        let head = Head {
            key: key(50, 9),
            priority: 2,
        };
        for (holders, expected) in table {
            let holders = holders
                .iter()
                .map(|&(rank, number, priority, n_preemptions)| Holder {
                    key: key(rank, number),
                    priority,
                    n_preemptions,
                });
            let full = [load(4, 4)];
            let none = std::iter::empty();
            let found = next_move(Some(head), none, &full, 0, holders.clone(), 3);
            let found = match found {
                Some(Move::Preempt(key)) => Some(key.number),
                None => None,
                Some(other) => panic!("{other:?} without a free slot"),
            };
            assert_eq!(found, *expected, "{:?}", holders.collect::<Vec<_>>());
            // With a free slot nobody loses one.
            let found = next_move(Some(head), std::iter::empty(), &[load(3, 4)], 0, holders, 3);
            assert_eq!(found, Some(Move::Start { replica: 0 }));
        }
    }
}
