//! Memory: eviction, refusals with both numbers, and loads that start only when the bytes are there.

use crate::support::{Bench, limits, model, submit, wait_for};
use std::time::Duration;
use tinyloop::pool::ledger::{MemorySource, NoRoom};
use tinyloop::pool::{LoadPhase, PoolError, RuntimeState};
use tinyloop::runtime::fake::Pace;

#[track_caller]
fn refused(bench: &Bench, name: &str) -> NoRoom {
    match bench.load(name) {
        Err(PoolError::NoRoom { model, room }) => {
            assert_eq!(model, name);
            room
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_idle_model_makes_room_once_it_has_been_there_for_long_enough() {
    let bench = Bench::new(&[("a", 60), ("b", 60)]);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    let room = refused(&bench, "b");
    assert_eq!(
        (room.needed_bytes, room.free_bytes, room.limit_bytes),
        (60, 40, 100)
    );
    assert!(!room.is_hopeless, "time will help");
    assert_eq!(bench.state("b"), RuntimeState::Unloaded);
    bench.pass_residency();
    let ticket = bench.load("b").expect("a may go now");
    assert_eq!(ticket.evicted, ["a"]);
    assert_eq!(bench.settled("b"), RuntimeState::Loaded);
    assert_eq!(bench.state("a"), RuntimeState::Unloaded);
    assert_eq!(bench.live(), 60);
    assert_eq!(
        bench.loader.peak.load(std::sync::atomic::Ordering::SeqCst),
        60
    );
    let text = bench.pool.metrics_text("");
    for line in [
        "tinyloop_evictions_total{model=\"a\"} 1\n",
        "tinyloop_model_state{model=\"a\",state=\"unloaded\"} 1\n",
        "tinyloop_model_state{model=\"b\",state=\"loaded\"} 1\n",
        "tinyloop_model_loads_total{model=\"b\",outcome=\"loaded\"} 1\n",
        "tinyloop_memory_bytes{device=\"cpu\",kind=\"weights\"} 60\n",
        "tinyloop_memory_limit_bytes{device=\"cpu\"} 100\n",
        "tinyloop_cache_bytes{model=\"b\"} 0\n",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[test]
fn busy_and_pinned_models_stay() {
    let bench = Bench::with(
        &[("a", 60), ("b", 60), ("p", 20), ("huge", 90)],
        limits(),
        Pace::Stepped,
    );
    let mut pinned = model("p");
    pinned.lifecycle.pinned = true;
    for config in [model("a"), model("b"), model("huge"), pinned] {
        bench.add(config);
    }
    bench.loaded("a");
    bench.loaded("p");
    bench.pass_residency();
    let runtime = bench.loader.take_runtime("a");
    let ticket = submit(&bench.pool.get("a").expect("loaded"));
    assert!(!refused(&bench, "b").is_hopeless, "a is busy");
    let room = refused(&bench, "huge");
    assert!(room.is_hopeless, "p never goes: {room}");
    assert_eq!(bench.state("a"), RuntimeState::Loaded);
    runtime.finish(ticket.id());
    drop(runtime);
    ticket.wait().expect("it ran to its end");
    assert_eq!(bench.load("b").expect("a is idle again").evicted, ["a"]);
    assert_eq!(bench.settled("b"), RuntimeState::Loaded);
    assert_eq!(bench.state("p"), RuntimeState::Loaded);
}

#[test]
fn a_model_that_somebody_holds_is_busy() {
    let bench = Bench::new(&[("a", 60), ("b", 60)]);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    bench.pass_residency();
    // A request between finding its model and queueing.
    let held = bench.pool.get("a").expect("loaded");
    refused(&bench, "b");
    drop(held);
    bench.load("b").expect("nobody holds it any more");
    assert_eq!(bench.settled("b"), RuntimeState::Loaded);
}

#[test]
fn case_12_a_load_starts_only_when_the_evicted_bytes_are_back() {
    let bench = Bench::with(&[("a", 60), ("b", 60)], limits(), Pace::Stepped);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    bench.pass_residency();
    // The model is idle, but its runtime cannot go away yet.
    let runtime = bench.loader.take_runtime("a");
    bench.load("b").expect("a makes room");
    wait_for("the unload", || bench.state("a") == RuntimeState::Unloading);
    let report = bench.pool.report("b").expect("configured");
    let progress = report.load_progress.expect("it is loading");
    assert_eq!(
        (report.runtime_state, progress.phase),
        (RuntimeState::Loading, LoadPhase::Waiting)
    );
    assert_eq!(bench.loader.started(), ["a"], "it has not begun");
    assert_eq!(bench.live(), 60);
    drop(runtime);
    assert_eq!(bench.settled("b"), RuntimeState::Loaded);
    assert_eq!(bench.state("a"), RuntimeState::Unloaded);
}

/// A pinned model stays through calls, idleness and the wants of others, until somebody says that it shall go.
#[test]
fn case_12_a_pin_is_obeyed_after_every_call() {
    let bench = Bench::new(&[("pinned", 60), ("other", 60)]);
    let mut pinned = model("pinned");
    pinned.lifecycle.pinned = true;
    pinned.lifecycle.idle_unload = Some(Duration::from_secs(1));
    bench.add(pinned);
    bench.add(model("other"));
    bench.loaded("pinned");
    for _ in 0..3 {
        let ticket = submit(&bench.pool.get("pinned").expect("loaded"));
        ticket.wait().expect("it answers");
        bench.pass_residency();
        bench.pool.reap();
        assert!(
            refused(&bench, "other").is_hopeless,
            "it never goes by itself"
        );
        assert_eq!(bench.state("pinned"), RuntimeState::Loaded);
    }
    assert_eq!(bench.loader.started(), ["pinned"], "it was loaded once");
    bench.pool.unload("pinned", None).expect("it is there");
    assert_eq!(bench.settled("pinned"), RuntimeState::Unloaded);
    assert_eq!(bench.live(), 0);
    bench.loaded("other");
}

/// An answer that never ends does not hold an unload up, nor does a client that never reads; what it held is
/// back when the model says that it is gone, and not before. Until then nobody can load it or take it out of
/// the configuration.
#[test]
fn case_12_an_unload_never_sticks_and_gives_all_bytes_back() {
    let bench = Bench::with(&[("a", 60), ("b", 60)], limits(), Pace::Stepped);
    bench.add(model("a"));
    bench.add(model("b"));
    bench.loaded("a");
    let held = bench.loader.take_runtime("a");
    let endless = submit(&bench.pool.get("a").expect("loaded"));
    wait_for("the job", || held.running() == [endless.id()]);
    // Taken out of the configuration while it is loaded: it stays, and is named.
    let report = bench.pool.reload(vec![model("b")]).expect("no id is taken");
    assert_eq!(
        (report.removed.len(), report.left_alone),
        (0, vec!["a".to_owned()])
    );
    assert_eq!(bench.state("a"), RuntimeState::Loaded);
    bench
        .pool
        .unload("a", Some(Duration::ZERO))
        .expect("it is there");
    assert!(endless.wait().is_err(), "it is cut and told");
    // Its runtime cannot go away yet: the state says so, and so do the bytes.
    assert_eq!(bench.state("a"), RuntimeState::Unloading);
    assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (60, 60));
    assert!(matches!(bench.load("a"), Err(PoolError::Unloading(_))));
    let report = bench.pool.reload(vec![model("b")]).expect("no id is taken");
    assert!(report.removed.is_empty(), "{report:?}");
    drop(held);
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (0, 0));
    let report = bench.pool.reload(vec![model("b")]).expect("no id is taken");
    assert_eq!(report.removed, ["a"]);
    bench.loaded("b");
}

#[test]
fn the_least_recently_used_goes_first() {
    let bench = Bench::new(&[("a", 30), ("b", 30), ("c", 30), ("d", 30)]);
    for name in ["a", "b", "c", "d"] {
        bench.add(model(name));
    }
    for name in ["a", "b", "c"] {
        bench.loaded(name);
        bench.clock.advance(Duration::from_secs(1));
    }
    bench.pass_residency();
    let usual = tinyloop::pool::Patience::USUAL;
    drop(bench.pool.acquire("a", &usual).expect("loaded"));
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(bench.load("d").expect("room is made").evicted, ["b"]);
    assert_eq!(bench.settled("d"), RuntimeState::Loaded);
}

#[test]
fn what_was_measured_counts_and_is_named() {
    let bench = Bench::new(&[("a", 60)]);
    bench.add(model("a"));
    let memory = || bench.pool.report("a").expect("configured").memory;
    assert_eq!(
        (memory().total_bytes(), memory().source),
        (60, MemorySource::ArtifactSize)
    );
    bench.loaded("a");
    assert_eq!(memory().source, MemorySource::MeasuredLoadDelta);
    let device = bench.pool.devices().remove(0);
    assert_eq!(
        (device.device.to_string().as_str(), device.limit_bytes),
        ("cpu", 100)
    );
    assert_eq!((device.used_bytes, device.models.len()), (60, 1));
    bench.pool.unload("a", None).expect("it is there");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    // The next load is planned with what the last one held.
    assert_eq!(memory().source, MemorySource::MeasuredLoadDelta);
    assert_eq!(bench.pool.devices()[0].used_bytes, 0);
}

#[test]
fn models_without_memory_of_their_own_always_fit() {
    let bench = Bench::new(&[("a", 100), ("remote", 0)]);
    bench.add(model("a"));
    bench.add(model("remote"));
    bench.loaded("a");
    bench.loaded("remote");
    assert_eq!(bench.pool.list().len(), 2);
}

#[test]
fn idle_models_are_unloaded_and_busy_or_pinned_ones_are_not() {
    let bench = Bench::with(&[("a", 1), ("b", 1), ("c", 1)], limits(), Pace::Stepped);
    for name in ["a", "b", "c"] {
        let mut config = model(name);
        config.lifecycle.idle_unload = Some(Duration::from_secs(60));
        config.lifecycle.pinned = name == "c";
        bench.add(config);
        bench.loaded(name);
    }
    let runtime = bench.loader.take_runtime("b");
    drop(bench.loader.take_runtime("a"));
    let ticket = submit(&bench.pool.get("b").expect("loaded"));
    bench.clock.advance(Duration::from_secs(59));
    bench.pool.reap();
    assert_eq!(bench.state("a"), RuntimeState::Loaded, "a second is left");
    bench.clock.advance(Duration::from_secs(1));
    bench.pool.reap();
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    let states = ["b", "c"].map(|name| bench.state(name));
    assert_eq!(states, [RuntimeState::Loaded; 2]);
    runtime.finish(ticket.id());
    drop(runtime);
    ticket.wait().expect("it ran to its end");
    // Its idleness begins when it was last seen with work.
    bench.clock.advance(Duration::from_secs(59));
    bench.pool.reap();
    assert_eq!(bench.state("b"), RuntimeState::Loaded);
    bench.clock.advance(Duration::from_secs(1));
    bench.pool.reap();
    assert_eq!(bench.settled("b"), RuntimeState::Unloaded);
}
