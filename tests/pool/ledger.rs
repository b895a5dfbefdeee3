//! Who makes room: a table, and properties of every decision.

use proptest::prelude::*;
use std::time::{Duration, Instant};
use tinyloop::pool::ledger::{
    DeviceId, ModelMemory, NoRoom, Resident, Room, Standing, make_room, may_start,
};

/// Name, bytes, standing, second of the last use.
type One = (&'static str, u64, Standing, u64);

fn residents(of: &[One]) -> Vec<Resident> {
    let start = Instant::now();
    let one = |(name, bytes, standing, used_at): &One| Resident {
        name: (*name).to_owned(),
        bytes: *bytes,
        standing: *standing,
        last_used: start + Duration::from_secs(*used_at),
    };
    of.iter().map(one).collect()
}

fn evict(names: &[&str]) -> Room {
    Room::Evict(names.iter().map(ToString::to_string).collect())
}

#[test]
fn room_is_made_by_idle_models_least_recently_used_first() {
    use Standing::{Busy, Evictable, JustLoaded, Leaving, Loading, Pinned};
    let refused = |free_bytes, evictable_bytes, is_hopeless| {
        Room::Refused(NoRoom {
            device: DeviceId::Cpu,
            needed_bytes: 50,
            free_bytes,
            evictable_bytes,
            limit_bytes: 100,
            is_hopeless,
        })
    };
    #[rustfmt::skip]
    let table: Vec<(&[One], Room)> = vec![
        (&[], Room::Fits),
        (&[("a", 50, Busy, 0)], Room::Fits),
        (&[("a", 51, Busy, 0)], refused(49, 0, false)),
        (&[("a", 51, Evictable, 0)], evict(&["a"])),
        (&[("a", 40, Evictable, 2), ("b", 40, Evictable, 1)], evict(&["b"])),
        (&[("a", 40, Busy, 1), ("b", 40, Evictable, 2)], evict(&["b"])),
        (&[("a", 10, Evictable, 1), ("b", 80, Evictable, 2)], evict(&["b"])), // a would be in vain
        (&[("a", 30, Evictable, 1), ("b", 60, Evictable, 2)], evict(&["b"])),
        (&[("a", 45, Evictable, 1), ("b", 45, Evictable, 2)], evict(&["a"])),
        (&[("a", 45, Evictable, 1), ("b", 45, Evictable, 2), ("c", 10, Busy, 0)], evict(&["a", "b"])),
        (&[("a", 90, JustLoaded, 0)], refused(10, 0, false)),
        (&[("a", 90, Loading, 0)], refused(10, 0, false)),
        (&[("a", 90, Leaving, 0)], Room::Fits), // its bytes are on their way back
        (&[("a", 90, Pinned, 0)], refused(10, 0, true)),
        (&[("a", 60, Pinned, 0), ("b", 30, Evictable, 0)], refused(10, 30, true)),
    ];
    for (of, expected) in table {
        let got = make_room(DeviceId::Cpu, 100, 50, &residents(of));
        assert_eq!(got, expected, "{of:?}");
    }
    let nothing = make_room(DeviceId::Cpu, 10, 0, &residents(&[("a", 99, Busy, 0)]));
    assert_eq!(nothing, Room::Fits, "a model without memory always fits");
    let hopeless = make_room(DeviceId::Cpu, 49, 50, &[]);
    assert!(matches!(hopeless, Room::Refused(room) if room.is_hopeless));
}

#[test]
fn a_refusal_says_both_numbers() {
    let of = residents(&[("a", 51, Standing::Busy, 0)]);
    let Room::Refused(room) = make_room(DeviceId::Cuda(1), 100, 50, &of) else {
        panic!("it does not fit");
    };
    let text = room.to_string();
    assert_eq!(
        text,
        "it needs 50 bytes on cuda:1; 49 of 100 are free and idle models could give back 0"
    );
}

#[test]
fn a_load_starts_when_its_bytes_are_there() {
    assert!(may_start(100, 50, 50) && !may_start(100, 50, 51));
    assert!(may_start(100, 0, 200), "nothing needs nothing");
    let one = ModelMemory {
        weight_bytes: 3,
        kv_bytes: 4,
        scratch_bytes: 5,
        ..ModelMemory::default()
    };
    assert_eq!((one.total_bytes(), one.times(3).total_bytes()), (12, 36));
    assert_eq!(
        one.times(2).kinds(),
        [("weights", 6), ("kv", 8), ("scratch", 10)]
    );
}

fn any_standing() -> impl Strategy<Value = Standing> {
    prop_oneof![
        Just(Standing::Evictable),
        Just(Standing::Busy),
        Just(Standing::Pinned),
        Just(Standing::JustLoaded),
        Just(Standing::Loading),
        Just(Standing::Leaving),
    ]
}

proptest! {
    #[test]
    fn decisions_are_sound(
        limit in 0_u64..200,
        needed in 0_u64..200,
        of in prop::collection::vec((0_u64..80, any_standing(), 0_u64..5), 0..8),
    ) {
        let start = Instant::now();
        let residents: Vec<Resident> = of.iter().enumerate().map(|(index, one)| Resident {
            name: format!("m{index}"),
            bytes: one.0,
            standing: one.1,
            last_used: start + Duration::from_secs(one.2),
        }).collect();
        let sum = |wanted: &dyn Fn(&Resident) -> bool| -> u64 {
            residents.iter().filter(|one| wanted(one)).map(|one| one.bytes).sum()
        };
        // Models may turn out larger than they said, so that more than the limit is used.
        let used = sum(&|one| one.standing != Standing::Leaving);
        let evictable = sum(&|one| one.standing == Standing::Evictable);
        match make_room(DeviceId::Cpu, limit, needed, &residents) {
            Room::Fits => prop_assert!(needed == 0 || used + needed <= limit),
            Room::Evict(names) => {
                prop_assert!(used + needed > limit);
                let is_chosen = |one: &Resident| names.contains(&one.name);
                let chosen = residents.iter().filter(|one| is_chosen(one));
                prop_assert!(chosen.clone().all(|one| one.standing == Standing::Evictable));
                let given = sum(&is_chosen);
                prop_assert!(used - given + needed <= limit);
                for one in chosen {
                    let without = used - given + one.bytes;
                    prop_assert!(without + needed > limit, "{} goes in vain", one.name);
                }
            }
            Room::Refused(room) => {
                prop_assert!(used - evictable + needed > limit);
                let numbers = (room.needed_bytes, room.free_bytes, room.evictable_bytes);
                prop_assert_eq!(numbers, (needed, limit.saturating_sub(used), evictable));
            }
        }
    }
}
