//! Tests of the batcher: a table of situations, then random worlds played to their end.

use super::*;
use proptest::prelude::*;

fn candidate(n_missing: u32) -> Candidate {
    Candidate {
        n_missing,
        flight: None,
        n_room: 0,
        n_groups: 1,
        loops: 1,
        is_scored: false,
        is_whole: false,
        last_served: 0,
    }
}

fn flying(n_rows: u32, segment: Segment) -> Candidate {
    Candidate {
        flight: Some(Flight { segment, n_rows }),
        ..candidate(100)
    }
}

const SUPPLY: Supply = Supply {
    max_rows: 32,
    chunk_rows_max: 32,
    max_scored_rows: 8,
    n_pages: 1000,
    first_segment: Segment::Core,
    has_stages: false,
    policy: BatchPolicy::DepthWise,
};

/// `(candidate, rows)` of the quantum, or why there is none.
fn planned(candidates: &[Candidate], supply: &Supply) -> Result<Vec<(usize, u32)>, Decision> {
    let mut quantum = Quantum::empty();
    match plan(candidates, supply, &mut quantum) {
        Decision::Run => {
            let grants = quantum.grants.iter();
            Ok(grants
                .map(|grant| (grant.candidate, grant.n_rows))
                .collect())
        }
        other => Err(other),
    }
}

#[test]
fn rows_go_to_single_rows_first_and_then_in_order_of_arrival() {
    type Case = (&'static [u32], &'static [(usize, u32)]);
    let cases: &[Case] = &[
        (&[], &[]),
        (&[1, 1, 1], &[(0, 1), (1, 1), (2, 1)]),
        (&[100], &[(0, 32)]),
        (&[5, 1], &[(0, 5), (1, 1)]),
        // The first long prompt leaves half of the rest, the next half of that.
        (&[100, 100, 1], &[(0, 16), (1, 15), (2, 1)]),
        (&[100, 100, 100], &[(0, 16), (1, 8), (2, 8)]),
        // What those behind do not need goes back to the first.
        (&[100, 4, 1], &[(0, 27), (1, 4), (2, 1)]),
        (&[4, 100], &[(0, 4), (1, 28)]),
    ];
    for (missing, expected) in cases {
        let candidates: Vec<Candidate> = missing.iter().map(|n| candidate(*n)).collect();
        let grants = planned(&candidates, &SUPPLY).unwrap_or_default();
        assert_eq!(&grants, expected, "{missing:?}");
    }
    assert_eq!(planned(&[], &SUPPLY), Err(Decision::Idle));
}

#[test]
fn whole_candidates_enter_with_all_their_rows_or_not_at_all() {
    let whole = |n_missing| Candidate {
        is_whole: true,
        ..candidate(n_missing)
    };
    let grants = |missing: &[u32], supply: &Supply| {
        let candidates: Vec<Candidate> = missing.iter().map(|n| whole(*n)).collect();
        planned(&candidates, supply).unwrap_or_default()
    };
    assert_eq!(grants(&[32], &SUPPLY), [(0, 32)]);
    assert_eq!(grants(&[20, 13, 12, 1], &SUPPLY), [(0, 20), (2, 12)]);
    // Where rows stay for several passes, what does not fit is not passed by.
    let staged = Supply {
        has_stages: true,
        ..SUPPLY
    };
    assert_eq!(grants(&[20, 13, 12, 1], &staged), [(0, 20)]);
    // Two pages hold 32 rows of one sequence, or 16 of two.
    let short = Supply {
        n_pages: 2,
        ..SUPPLY
    };
    assert_eq!(grants(&[10, 17, 16], &short), [(0, 10), (2, 16)]);
}

#[test]
fn when_rows_are_short_the_least_recently_served_go_first() {
    let supply = Supply {
        max_rows: 2,
        ..SUPPLY
    };
    let served = [7, 5, 6, 4];
    let candidates: Vec<Candidate> = served
        .iter()
        .map(|last_served| Candidate {
            last_served: *last_served,
            ..candidate(if *last_served == 4 { 50 } else { 1 })
        })
        .collect();
    assert_eq!(planned(&candidates, &supply), Ok(vec![(1, 1), (3, 1)]));
}

#[test]
fn pages_bound_chunks_and_the_youngest_makes_room() {
    let with_room = |n_missing, n_room| Candidate {
        n_room,
        ..candidate(n_missing)
    };
    let cases = [
        // Room in held pages needs no further ones.
        (
            vec![with_room(1, 3), with_room(1, 1)],
            0,
            Ok(vec![(0, 1), (1, 1)]),
        ),
        (vec![with_room(100, 5)], 1, Ok(vec![(0, 21)])),
        (
            vec![with_room(100, 5), candidate(100)],
            2,
            Ok(vec![(0, 16), (1, 16)]),
        ),
        // The older one is without: the youngest goes.
        (
            vec![candidate(1), with_room(1, 4), with_room(1, 4)],
            0,
            Err(Decision::Preempt(2)),
        ),
        (
            vec![candidate(9), with_room(1, 4)],
            0,
            Err(Decision::Preempt(1)),
        ),
        // The youngest itself is without: it waits.
        (vec![with_room(1, 4), candidate(1)], 0, Ok(vec![(0, 1)])),
        (vec![with_room(1, 4), candidate(50)], 0, Ok(vec![(0, 1)])),
    ];
    for (candidates, n_pages, expected) in cases {
        let supply = Supply { n_pages, ..SUPPLY };
        assert_eq!(planned(&candidates, &supply), expected, "{candidates:?}");
    }
    let deep = Candidate {
        n_groups: 3,
        ..candidate(100)
    };
    let supply = Supply {
        n_pages: 5,
        ..SUPPLY
    };
    assert_eq!(planned(&[deep], &supply), Ok(vec![(0, 16)]));
}

#[test]
fn scored_rows_are_bounded_over_all_flights() {
    let scored = |mut candidate: Candidate| {
        candidate.is_scored = true;
        candidate
    };
    let candidates = [scored(candidate(50)), scored(candidate(50)), candidate(9)];
    assert_eq!(planned(&candidates, &SUPPLY), Ok(vec![(0, 8), (2, 9)]));
    let candidates = [scored(flying(6, Segment::Core)), scored(candidate(50))];
    assert_eq!(planned(&candidates, &SUPPLY), Ok(vec![(0, 6), (1, 2)]));
}

#[test]
fn coda_goes_before_entry_and_entry_before_core() {
    let supply = Supply {
        first_segment: Segment::Prelude,
        has_stages: true,
        ..SUPPLY
    };
    let segment_of = |candidates: &[Candidate]| {
        let mut quantum = Quantum::empty();
        assert_eq!(plan(candidates, &supply, &mut quantum), Decision::Run);
        let grants = quantum.grants.iter().map(|grant| grant.candidate);
        (quantum.segment, grants.collect::<Vec<_>>())
    };
    let (core, coda) = (flying(2, Segment::Core), flying(1, Segment::Coda));
    assert_eq!(
        segment_of(&[core, coda, candidate(1), coda]),
        (Segment::Coda, vec![1, 3])
    );
    assert_eq!(
        segment_of(&[core, candidate(1)]),
        (Segment::Prelude, vec![1])
    );
    assert_eq!(segment_of(&[core, core]), (Segment::Core, vec![0, 1]));
    // Chunks leave a slot for every sequence, and half of the rest for whoever comes.
    let grants = planned(&[candidate(100), core, core, candidate(1)], &supply);
    assert_eq!(grants, Ok(vec![(0, 12), (3, 1)]));
}

#[test]
fn chunks_are_short_beside_generations() {
    let supply = Supply {
        chunk_rows_max: 10,
        ..SUPPLY
    };
    let (long, single) = (candidate(100), candidate(1));
    for (candidates, expected) in [
        (vec![long], vec![(0, 32)]),
        (vec![long, long], vec![(0, 16), (1, 16)]),
        (vec![single, long], vec![(0, 1), (1, 10)]),
        (vec![long, long, single], vec![(0, 5), (1, 5), (2, 1)]),
        (
            vec![long, candidate(3), single],
            vec![(0, 7), (1, 3), (2, 1)],
        ),
    ] {
        assert_eq!(
            planned(&candidates, &supply),
            Ok(expected),
            "{candidates:?}"
        );
    }
    let none = Supply {
        chunk_rows_max: 0,
        ..SUPPLY
    };
    assert_eq!(planned(&[single, long], &none), Ok(vec![(0, 1), (1, 1)]));
}

#[test]
fn a_short_prompt_enters_whole_while_a_long_one_loops() {
    let supply = Supply {
        chunk_rows_max: 16,
        has_stages: true,
        ..SUPPLY
    };
    assert_eq!(planned(&[candidate(100)], &supply), Ok(vec![(0, 8)]));
    let looping = flying(8, Segment::Core);
    let grants = planned(&[looping, candidate(6)], &supply);
    assert_eq!(grants, Ok(vec![(0, 8), (1, 6)]));
    // Another long one gets half of what is left, and the bound holds over all.
    let grants = planned(&[looping, candidate(6), candidate(50)], &supply);
    assert_eq!(grants, Ok(vec![(0, 8), (1, 6), (2, 1)]));
    // The end of a long prompt leaves room as well.
    assert_eq!(planned(&[candidate(12)], &supply), Ok(vec![(0, 12)]));
    assert_eq!(planned(&[candidate(13)], &supply), Ok(vec![(0, 8)]));
    let grants = planned(&[flying(12, Segment::Core), candidate(3)], &supply);
    assert_eq!(grants, Ok(vec![(0, 12), (1, 3)]));
    let grants = planned(&[looping, looping, candidate(50)], &supply);
    assert_eq!(grants, Ok(vec![(0, 8), (1, 8)]));
    // Generations always find a slot.
    let grants = planned(&[looping, looping, candidate(1)], &supply);
    assert_eq!(grants, Ok(vec![(0, 8), (1, 8), (2, 1)]));
}

#[test]
fn depths_take_turns_only_when_asked_to() {
    let turns = Supply {
        has_stages: true,
        policy: BatchPolicy::DepthTurns,
        ..SUPPLY
    };
    let of_depth = |loops, last_served| Candidate {
        loops,
        last_served,
        ..candidate(1)
    };
    // Depth 2 was served longer ago than depth 1, of which one has never been served.
    let ready = [
        of_depth(1, 7),
        of_depth(2, 6),
        of_depth(1, 0),
        of_depth(2, 5),
    ];
    assert_eq!(planned(&ready, &turns), Ok(vec![(1, 1), (3, 1)]));
    let all = Supply {
        policy: BatchPolicy::DepthWise,
        ..turns
    };
    assert_eq!(planned(&ready, &all).map(|grants| grants.len()), Ok(4));
    // Nobody joins rows that are under way.
    let mut under_way = ready;
    under_way[1] = flying(3, Segment::Core);
    assert_eq!(planned(&under_way, &turns), Ok(vec![(1, 3)]));
    // Without pages for those whose turn it is, the others go on.
    let with_room = |candidate| Candidate {
        n_room: 1,
        ..candidate
    };
    let poor = Supply {
        n_pages: 0,
        ..turns
    };
    let ready = [with_room(of_depth(1, 7)), of_depth(2, 6)];
    assert_eq!(planned(&ready, &poor), Ok(vec![(0, 1)]));
}

/// A sequence of a random world.
#[derive(Clone, Debug)]
struct Player {
    arrival: usize,
    n_total: u32,
    n_computed: u32,
    n_blocks: u32,
    n_groups: u32,
    loops: u32,
    is_scored: bool,
    /// Rows and passes still to go.
    flight: Option<(u32, u32)>,
    last_served: u64,
    /// Quantum of its latest pass.
    last_moved: u64,
}

/// Passes of a plan with or without a prelude, and a coda.
#[derive(Clone, Copy, Debug)]
struct Stages {
    has_prelude: bool,
    has_coda: bool,
}

impl Player {
    fn segment(left: u32, stages: Stages) -> Segment {
        match (left, stages.has_coda) {
            (1, true) => Segment::Coda,
            _ => Segment::Core,
        }
    }

    fn candidate(&self, stages: Stages) -> Candidate {
        let n_flying = self.flight.map_or(0, |(n_rows, _)| n_rows);
        Candidate {
            n_missing: self.n_total - self.n_computed - n_flying,
            flight: self.flight.map(|(n_rows, left)| Flight {
                segment: Self::segment(left, stages),
                n_rows,
            }),
            n_room: self.n_blocks * 16 - self.n_computed - n_flying,
            n_groups: self.n_groups,
            loops: self.loops,
            is_scored: self.is_scored,
            is_whole: false,
            last_served: self.last_served,
        }
    }

    fn n_passes(&self, stages: Stages) -> u32 {
        self.loops + u32::from(stages.has_prelude) + u32::from(stages.has_coda)
    }
}

fn player() -> impl Strategy<Value = Player> {
    (1..120_u32, 1..3_u32, 1..4_u32, any::<bool>()).prop_map(
        |(n_total, n_groups, loops, is_scored)| Player {
            arrival: 0,
            n_total,
            n_computed: 0,
            n_blocks: 0,
            n_groups,
            loops,
            is_scored,
            flight: None,
            last_served: 0,
            last_moved: 0,
        },
    )
}

/// Plays one quantum; gives the pages back that ended sequences held.
fn play(
    players: &mut Vec<Player>,
    quantum: &Quantum,
    stages: Stages,
    supply: &mut Supply,
    now: u64,
) -> Result<(), TestCaseError> {
    let mut n_rows = 0;
    for pair in quantum.grants.windows(2) {
        prop_assert!(
            pair[0].candidate < pair[1].candidate,
            "one run of rows each"
        );
    }
    for grant in &quantum.grants {
        let player = &mut players[grant.candidate];
        n_rows += grant.n_rows;
        prop_assert!(grant.n_rows > 0);
        prop_assert_eq!(grant.enters, player.flight.is_none());
        if grant.enters {
            let end = player.n_computed + grant.n_rows;
            prop_assert!(end <= player.n_total);
            let n_new = end.div_ceil(16).saturating_sub(player.n_blocks);
            let n_pages = u64::from(n_new * player.n_groups);
            prop_assert!(n_pages <= supply.n_pages, "pages that do not exist");
            supply.n_pages -= n_pages;
            player.n_blocks += n_new;
            player.flight = Some((grant.n_rows, player.n_passes(stages)));
            player.last_served = now;
        }
        let (rows, left) = player.flight.expect("it has entered");
        prop_assert_eq!(rows, grant.n_rows);
        player.last_moved = now;
        player.flight = (left > 1).then_some((rows, left - 1));
        if left == 1 {
            player.n_computed += rows;
        }
    }
    prop_assert!(n_rows > 0 && n_rows <= supply.max_rows, "{} rows", n_rows);
    let under_way = players.iter().filter_map(|player| Some(player.flight?.0));
    prop_assert!(
        under_way.sum::<u32>() <= supply.max_rows,
        "more rows than slots"
    );
    let in_chunks = players.iter().filter(|p| p.n_total - p.n_computed > 1);
    let n_in_chunks: u32 = in_chunks.filter_map(|p| Some(p.flight?.0)).sum();
    prop_assert!(
        n_in_chunks <= supply.chunk_rows_max,
        "{} rows of chunks",
        n_in_chunks
    );
    for player in players.iter().filter(|p| p.n_computed == p.n_total) {
        supply.n_pages += u64::from(player.n_blocks * player.n_groups);
    }
    players.retain(|player| player.n_computed < player.n_total);
    Ok(())
}

/// How the random worlds differ.
fn world() -> impl Strategy<Value = (Supply, Stages)> {
    let policies = prop_oneof![
        3 => Just(BatchPolicy::DepthWise),
        1 => Just(BatchPolicy::DepthTurns)
    ];
    (1..40_u32, 1..40_u32, policies, any::<(bool, bool)>()).prop_map(
        |(max_rows, chunk_rows_max, policy, (has_prelude, has_coda))| {
            let supply = Supply {
                max_rows,
                chunk_rows_max,
                max_scored_rows: 8,
                n_pages: 0,
                first_segment: match has_prelude {
                    true => Segment::Prelude,
                    false => Segment::Core,
                },
                has_stages: true,
                policy,
            };
            let stages = Stages {
                has_prelude,
                has_coda,
            };
            (supply, stages)
        },
    )
}

proptest! {
    #[test]
    fn budgets_are_kept_and_everyone_gets_to_the_end(
        mut players in prop::collection::vec(player(), 1..8),
        (mut supply, stages) in world(),
        n_spare_pages in 0..20_u64,
    ) {
        // The largest sequence fits alone; that is what the engine's limits promise.
        let needs = players.iter().map(|p| u64::from(p.n_total.div_ceil(16) * p.n_groups));
        supply.n_pages = needs.max().unwrap_or(0) + n_spare_pages;
        for (arrival, player) in players.iter_mut().enumerate() {
            player.arrival = arrival;
        }
        let mut waiting = Vec::new();
        let mut quantum = Quantum::empty();
        for now in 1..200_000 {
            let candidates: Vec<Candidate> = players.iter().map(|p| p.candidate(stages)).collect();
            match plan(&candidates, &supply, &mut quantum) {
                Decision::Idle => {
                    prop_assert!(players.is_empty(), "idle with {:?}", players);
                    return Ok(());
                }
                Decision::Preempt(index) => {
                    prop_assert!(index > 0, "the oldest is never preempted");
                    let mut player = players.remove(index);
                    supply.n_pages += u64::from(player.n_blocks * player.n_groups);
                    (player.n_blocks, player.n_computed, player.flight) = (0, 0, None);
                    waiting.push(player);
                }
                Decision::Run => {
                    let n_before = players.len();
                    play(&mut players, &quantum, stages, &mut supply, now)?;
                    // Like the engine, which takes preempted ones back when pages became free.
                    if players.len() < n_before {
                        players.append(&mut waiting);
                        players.sort_by_key(|player| player.arrival);
                    }
                }
            }
        }
        prop_assert!(false, "somebody starves: {:?}", players);
    }

    /// With pages for all: rows under way wait for at most the two passes of the other segments,
    /// generations enter with the next pass of the first segment, and prompts get their rows in the
    /// order of arrival at the latest.
    #[test]
    fn nobody_waits_long(
        mut players in prop::collection::vec(player(), 1..8),
        (mut supply, stages) in world(),
    ) {
        supply.n_pages = 10_000;
        let turns = supply.policy == BatchPolicy::DepthTurns;
        let n_passes_max = players.iter().map(|p| p.n_passes(stages)).max().unwrap_or(0);
        let n_rows_in_all: u32 = players.iter().map(|player| player.n_total).sum();
        let patience = u64::from(3 * n_passes_max * (n_rows_in_all + 1));
        let has_slots_for_all = supply.max_rows as usize > players.len();
        let mut quantum = Quantum::empty();
        for now in 1.. {
            let candidates: Vec<Candidate> = players.iter().map(|p| p.candidate(stages)).collect();
            if plan(&candidates, &supply, &mut quantum) == Decision::Idle {
                break;
            }
            let enters = quantum.segment == supply.first_segment;
            for (index, candidate) in candidates.iter().enumerate() {
                let player = &players[index];
                let is_granted = quantum.grants.iter().any(|grant| grant.candidate == index);
                let waited = now - player.last_moved.max(1);
                prop_assert!(is_granted || waited <= patience, "{} quanta: {:?}", waited, player);
                if candidate.flight.is_some() {
                    prop_assert!(is_granted || waited <= 2, "{} quanta: {:?}", waited, player);
                } else if candidate.n_missing == 1 && enters && has_slots_for_all && !turns {
                    prop_assert!(is_granted, "a generation is left out: {:?}", player);
                }
            }
            let mut depths = quantum.grants.iter().map(|grant| candidates[grant.candidate].loops);
            let first = depths.next();
            prop_assert!(!turns || depths.all(|depth| Some(depth) == first), "mixed depths");
            play(&mut players, &quantum, stages, &mut supply, now)?;
        }
    }
}
