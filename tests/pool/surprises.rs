//! Loads that turn out larger than they were estimated to be.

use crate::support::{Bench, model};
use tinyloop::pool::ledger::{DeviceId, Resident, Room, Standing, after_load};
use tinyloop::pool::{PoolError, RuntimeState};

#[test]
fn a_load_that_holds_more_than_there_is_evicts_idle_models() {
    let bench = Bench::new(&[("a", 50), ("b", 40)]);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    bench.pass_residency();
    bench.surprise("b", 20);
    bench.loaded("b");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (60, 60));
    let text = bench.pool.metrics_text("");
    assert!(
        text.contains("tinyloop_evictions_total{model=\"a\"} 1\n"),
        "{text}"
    );
}

#[test]
fn a_load_that_stays_above_the_limit_fails_with_the_numbers_and_is_taken_down() {
    let bench = Bench::new(&[("a", 50), ("b", 40)]);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    bench.pass_residency();
    // Somebody is about to send it a request.
    let held = bench.pool.get("a").expect("loaded");
    bench.surprise("b", 20);
    bench.load("b").expect("the estimate fits");
    assert_eq!(bench.settled("b"), RuntimeState::Failed);
    let why = bench.pool.report("b").and_then(|report| report.last_error);
    let why = why.expect("it says why");
    for number in [
        "estimated to need 40 bytes",
        "needs 60 bytes",
        "50 of 100 are free",
    ] {
        assert!(why.contains(number), "{why} lacks {number}");
    }
    assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (50, 50));
    // The next try knows what it needs, and is refused before it begins.
    match bench.load("b") {
        Err(PoolError::NoRoom { room, .. }) => assert_eq!(room.needed_bytes, 60),
        other => panic!("{other:?}"),
    }
    drop(held);
    assert_eq!(bench.state("a"), RuntimeState::Loaded, "it was left alone");
}

#[test]
fn only_what_exceeds_its_promise_and_the_limit_makes_others_go() {
    let resident = |standing| {
        [Resident {
            name: "a".to_owned(),
            bytes: 50,
            standing,
            last_used: std::time::Instant::now(),
        }]
    };
    let idle = resident(Standing::Evictable);
    let after = |promised, measured, residents: &[Resident]| {
        after_load(DeviceId::Cpu, 100, (promised, measured), residents)
    };
    assert_eq!(after(60, 60, &idle), Room::Fits, "it was promised that");
    assert_eq!(after(40, 50, &idle), Room::Fits, "there is as much");
    assert_eq!(after(40, 51, &idle), Room::Evict(vec!["a".to_owned()]));
    assert!(matches!(after(40, 101, &idle), Room::Refused(room) if room.is_hopeless));
    for standing in [Standing::Busy, Standing::Pinned, Standing::JustLoaded] {
        let after = after(40, 51, &resident(standing));
        assert!(matches!(after, Room::Refused(room) if room.free_bytes == 50));
    }
}
