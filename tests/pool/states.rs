//! The state machine, as a table and through a pool.

use crate::support::{Bench, PATIENCE, model, wait_for};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::pool::state::{Answer, Effect, Event, Leaving, Refused, State, answer};
use tinyloop::pool::{LoadedModel, LoadingModel, Pool, PoolError, RuntimeState};

fn a_model() -> Arc<LoadedModel> {
    let bench = Bench::new(&[]);
    bench.add(model("m"));
    bench.loaded("m");
    bench.pool.get("m").expect("loaded")
}

fn load() -> Arc<LoadingModel> {
    Arc::new(LoadingModel::new("m"))
}

#[test]
fn every_pair_of_state_and_event_is_in_the_table() {
    use RuntimeState::{Failed, Loaded, Loading, Unloaded, Unloading};
    let loaded = a_model();
    let states = || {
        [
            State::Unloaded,
            State::Loading(load()),
            State::Loaded(Arc::clone(&loaded)),
            State::Unloading(Leaving::Load(load())),
            State::Unloading(Leaving::Model(Arc::downgrade(&loaded))),
            State::Failed("broken".into()),
        ]
    };
    let events = || {
        [
            Event::Load(load()),
            Event::LoadEnded(Ok(Arc::clone(&loaded))),
            Event::LoadEnded(Err("why".to_owned())),
            Event::Unload,
            Event::Released,
        ]
    };
    // Per state, in the order above: the state after each event, and what follows; x = impossible.
    #[rustfmt::skip]
    let table = [
        [(Loading, "begin"), (Unloaded, "x"), (Unloaded, "x"), (Unloaded, ""), (Unloaded, "x")],
        [(Loading, ""), (Loaded, ""), (Failed, ""), (Unloading, "cancel"), (Loading, "x")],
        [(Loaded, ""), (Loaded, "x"), (Loaded, "x"), (Unloading, "unload"), (Loaded, "x")],
        [(Unloading, "no"), (Unloading, "unload"), (Unloaded, ""), (Unloading, ""), (Unloading, "x")],
        [(Unloading, "no"), (Unloading, "x"), (Unloading, "x"), (Unloading, ""), (Unloaded, "")],
        [(Loading, "begin"), (Failed, "x"), (Failed, "x"), (Unloaded, ""), (Failed, "x")],
    ];
    for (row, before) in table.iter().zip(states()) {
        for ((after, follows), event) in row.iter().zip(events()) {
            let mut state = before.clone();
            let what = format!("{before:?} on {event:?}");
            let effect = state.on(event);
            let effect = match effect {
                Ok(Effect::None) => "",
                Ok(Effect::BeginLoad(_)) => "begin",
                Ok(Effect::CancelLoad(_)) => "cancel",
                Ok(Effect::BeginUnload(_)) => "unload",
                Err(Refused::Unloading) => "no",
                Err(Refused::Impossible(name, _)) => {
                    assert_eq!(name, before.name(), "{what}");
                    "x"
                }
            };
            assert_eq!((state.name(), effect), (*after, *follows), "{what}");
        }
    }
}

#[test]
fn what_a_request_gets_follows_state_and_configuration() {
    use RuntimeState::{Failed, Loaded, Loading, Unloaded, Unloading};
    #[rustfmt::skip]
    let table = [
        (Loaded, false, false, Answer::Serve), (Loaded, true, true, Answer::Serve),
        (Unloaded, false, true, Answer::Refuse), (Unloaded, true, false, Answer::Load),
        (Loading, false, true, Answer::Refuse), (Loading, true, false, Answer::Wait),
        (Unloading, false, true, Answer::Refuse), (Unloading, true, false, Answer::Wait),
        (Failed, false, true, Answer::Refuse), (Failed, true, false, Answer::Refuse),
        (Failed, true, true, Answer::Load),
    ];
    for (state, on_demand, may_retry, expected) in table {
        let got = answer(state, on_demand, may_retry);
        assert_eq!(got, expected, "{state:?} {on_demand} {may_retry}");
    }
}

#[test]
fn loads_of_a_loading_or_loaded_model_change_nothing() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(model("a"));
    let word = bench.gate("a");
    let first = bench.load("a").expect("there is room");
    assert_eq!((first.state, first.is_new), (RuntimeState::Loading, true));
    let second = bench.load("a").expect("it loads already");
    assert_eq!(
        (second.state, second.is_new),
        (RuntimeState::Loading, false)
    );
    wait_for("the loader", || bench.loader.started().len() == 1);
    wait_for("its progress", || {
        let report = bench.pool.report("a").expect("configured");
        report
            .load_progress
            .is_some_and(|now| (now.done_bytes, now.total_bytes) == (4, 8))
    });
    word.send(Ok(())).expect("the loader waits");
    assert_eq!(bench.settled("a"), RuntimeState::Loaded);
    let third = bench.load("a").expect("it is loaded");
    assert_eq!((third.state, third.is_new), (RuntimeState::Loaded, false));
    assert_eq!(bench.loader.started(), ["a"]);
    let unknown = bench.load("b").expect_err("nobody configured it");
    assert_eq!(unknown, PoolError::NotFound("b".to_owned()));
}

#[test]
fn a_load_that_fails_or_panics_leaves_its_reason_and_can_be_tried_again() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(model("a"));
    bench.fail("a", "the disk is gone");
    bench.load("a").expect("it begins");
    assert_eq!(bench.settled("a"), RuntimeState::Failed);
    let report = bench.pool.report("a").expect("configured");
    assert_eq!(report.last_error.as_deref(), Some("the disk is gone"));
    assert_eq!(bench.pool.devices()[0].used_bytes, 0);
    bench.panic("a");
    bench.load("a").expect("it begins again");
    assert_eq!(bench.settled("a"), RuntimeState::Failed);
    let why = bench.pool.report("a").and_then(|report| report.last_error);
    let why = why.expect("it failed");
    assert!(why.contains("the loader's own fault"), "{why}");
    bench.succeed("a");
    bench.loaded("a");
    let report = bench.pool.report("a").expect("configured");
    assert_eq!((report.last_error, report.is_loaded), (None, true));
}

#[test]
fn an_unload_of_a_failed_model_forgets_its_error() {
    let bench = Bench::new(&[]);
    bench.add(model("a"));
    bench.fail("a", "no");
    bench.load("a").expect("it begins");
    assert_eq!(bench.settled("a"), RuntimeState::Failed);
    assert_eq!(bench.pool.unload("a", None), Ok(RuntimeState::Unloaded));
    assert_eq!(bench.pool.unload("a", None), Ok(RuntimeState::Unloaded));
    assert_eq!(
        bench.pool.report("a").and_then(|report| report.last_error),
        None
    );
}

#[test]
fn an_unload_cancels_a_load_and_takes_down_what_it_made() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(model("a"));
    let word = bench.gate("a");
    bench.load("a").expect("there is room");
    wait_for("the loader", || bench.loader.started().len() == 1);
    assert_eq!(bench.pool.unload("a", None), Ok(RuntimeState::Unloading));
    let refused = bench.load("a").expect_err("it has to be gone first");
    assert_eq!(refused, PoolError::Unloading("a".to_owned()));
    assert_eq!(
        bench.pool.devices()[0].used_bytes,
        8,
        "its bytes still count"
    );
    word.send(Ok(())).expect("the loader waits");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (0, 0));
    assert!(bench.pool.get("a").is_none());
}

#[test]
fn a_load_that_waits_for_its_turn_is_cancelled_at_once() {
    let mut limits = crate::support::limits();
    limits.load_threads = 1;
    let bench = Bench::with(
        &[("a", 8), ("b", 8)],
        limits,
        tinyloop::runtime::fake::Pace::AtOnce,
    );
    bench.add(model("a"));
    bench.add(model("b"));
    let word = bench.gate("a");
    bench.load("a").expect("there is room");
    wait_for("the loader", || bench.loader.started() == ["a"]);
    bench.load("b").expect("there is room");
    assert_eq!(bench.state("b"), RuntimeState::Loading);
    assert_eq!(bench.pool.unload("b", None), Ok(RuntimeState::Unloaded));
    bench.load("b").expect("there is room again");
    word.send(Ok(())).expect("the loader waits");
    assert_eq!(bench.settled("a"), RuntimeState::Loaded);
    assert_eq!(bench.settled("b"), RuntimeState::Loaded);
    assert_eq!(bench.loader.started(), ["a", "b"], "one after the other");
}

#[test]
fn the_start_loads_what_is_enabled_and_goes_on_without_what_fails() {
    let bench = Bench::new(&[("good", 8), ("bad", 8), ("huge", 800), ("off", 8)]);
    for name in ["good", "bad", "huge"] {
        let mut config = model(name);
        config.lifecycle.enabled = true;
        bench.add(config);
    }
    bench.add(model("off"));
    bench.fail("bad", "broken header");
    let word = bench.gate("good");
    bench.pool.load_enabled();
    assert!(bench.pool.is_starting());
    assert!(!bench.pool.wait_started(Duration::from_millis(1)));
    word.send(Ok(())).expect("the loader waits");
    assert!(bench.pool.wait_started(PATIENCE));
    let states = ["good", "bad", "huge", "off"].map(|name| bench.state(name));
    use RuntimeState::{Failed, Loaded, Unloaded};
    assert_eq!(states, [Loaded, Failed, Failed, Unloaded]);
    let why = bench
        .pool
        .report("huge")
        .and_then(|report| report.last_error);
    let why = why.expect("it does not fit");
    assert!(why.contains("800 bytes") && why.contains("of 100"), "{why}");
}

#[test]
fn a_shutdown_cancels_loads_and_refuses_new_ones() {
    let bench = Bench::new(&[("a", 8), ("b", 8)]);
    bench.add(model("a"));
    bench.add(model("b"));
    let word = bench.gate("a");
    bench.load("a").expect("there is room");
    wait_for("the loader", || bench.loader.started().len() == 1);
    bench.pool.shutdown(Duration::ZERO);
    assert_eq!(bench.state("a"), RuntimeState::Unloading);
    assert_eq!(
        bench.load("b").expect_err("closed"),
        PoolError::ShuttingDown
    );
    word.send(Ok(())).expect("the loader waits");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert_eq!(bench.live(), 0);
}

#[test]
fn a_dropped_pool_gives_everything_back() {
    let bench = Bench::new(&[("a", 8), ("b", 8)]);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    let word = bench.gate("b");
    bench.load("b").expect("there is room");
    wait_for("the loader", || bench.loader.started().len() == 2);
    let Bench { pool, loader, .. } = bench;
    let drop_it: fn(Pool) = drop;
    drop_it(pool);
    word.send(Ok(())).expect("the loader waits");
    let live = || loader.live.load(std::sync::atomic::Ordering::SeqCst);
    wait_for("all memory", || live() == 0);
}
