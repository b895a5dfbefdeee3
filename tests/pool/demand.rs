//! Requests for models that are not there: refusals by state, loads on demand, bounded waits.

use crate::support::{Bench, PATIENCE, limits, model, on_demand, submit, wait_for};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tinyloop::pool::{Patience, RuntimeState, Unavailable};
use tinyloop::runtime::fake::Pace;

fn within(ms: u64) -> Patience<'static> {
    Patience {
        queue_timeout: Some(Duration::from_millis(ms)),
        ..Patience::USUAL
    }
}

#[test]
fn a_model_that_is_not_loaded_on_demand_is_refused_by_its_state() {
    let bench = Bench::new(&[]);
    bench.add(model("a"));
    let ask = || {
        bench
            .pool
            .acquire("a", &Patience::USUAL)
            .map(|model| model.name.clone())
    };
    assert!(matches!(
        ask(),
        Err(Unavailable::NotLoaded {
            load_on_demand: false,
            ..
        })
    ));
    let unknown = bench
        .pool
        .acquire("b", &Patience::USUAL)
        .expect_err("unknown");
    assert_eq!(unknown, Unavailable::Unknown("b".to_owned()));
    let word = bench.gate("a");
    bench.load("a").expect("it begins");
    assert!(matches!(ask(), Err(Unavailable::Loading { .. })));
    word.send(Err("no luck".to_owned()))
        .expect("the loader waits");
    assert_eq!(bench.settled("a"), RuntimeState::Failed);
    let failed = ask().expect_err("it failed");
    assert!(failed.to_string().contains("no luck"), "{failed}");
    bench.succeed("a");
    bench.loaded("a");
    assert_eq!(ask(), Ok("a".to_owned()));
    let text = bench.pool.metrics_text("");
    for line in [
        "tinyloop_model_refusals_total{code=\"model_not_loaded\",model=\"a\"} 1\n",
        "tinyloop_model_refusals_total{code=\"model_loading\",model=\"a\"} 1\n",
        "tinyloop_model_refusals_total{code=\"model_failed\",model=\"a\"} 1\n",
        "tinyloop_model_refusals_total{code=\"model_not_found\",model=\"\"} 1\n",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[test]
fn requests_load_a_model_once_and_wait_for_it() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(on_demand("a"));
    let word = bench.gate("a");
    std::thread::scope(|scope| {
        let ask = || {
            bench
                .pool
                .acquire("a", &Patience::USUAL)
                .map(|model| submit(&model).wait())
        };
        let askers: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        wait_for("all to wait", || {
            bench
                .pool
                .report("a")
                .is_some_and(|report| report.waiting_for_load == 4)
        });
        wait_for("the loader", || bench.loader.started().len() == 1);
        word.send(Ok(())).expect("the loader waits");
        for asker in askers {
            let answer = asker.join().expect("no panic").expect("it was loaded");
            assert_eq!(answer.expect("it ran").tokens.len(), 2);
        }
    });
    assert_eq!(bench.loader.started(), ["a"]);
    let report = bench.pool.report("a").expect("configured");
    assert_eq!((report.waiting_for_load, report.is_loaded), (0, true));
}

#[test]
fn a_request_waits_no_longer_than_its_deadline() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(on_demand("a"));
    let word = bench.gate("a");
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| bench.pool.acquire("a", &within(500)).map(drop));
        wait_for("the loader", || bench.loader.started().len() == 1);
        bench.clock.advance(Duration::from_millis(499));
        assert!(!asker.is_finished());
        bench.clock.advance(Duration::from_millis(1));
        let end = asker.join().expect("no panic");
        assert!(matches!(end, Err(Unavailable::Loading { .. })), "{end:?}");
    });
    // The load goes on without it.
    word.send(Ok(())).expect("the loader waits");
    assert_eq!(bench.settled("a"), RuntimeState::Loaded);
}

#[test]
fn waits_are_bounded_without_a_deadline_too() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(on_demand("a"));
    let word = bench.gate("a");
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| bench.pool.acquire("a", &Patience::USUAL).map(drop));
        wait_for("the loader", || bench.loader.started().len() == 1);
        bench.clock.advance(Duration::from_secs(60));
        let end = asker.join().expect("no panic");
        assert!(matches!(end, Err(Unavailable::Loading { .. })), "{end:?}");
    });
    drop(word);
}

#[test]
fn as_many_wait_as_may_queue() {
    let bench = Bench::new(&[("a", 8)]);
    let mut config = on_demand("a");
    config.executor.max_queue_depth = 1;
    bench.add(config);
    let word = bench.gate("a");
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| bench.pool.acquire("a", &Patience::USUAL).map(drop));
        wait_for("it to wait", || {
            bench
                .pool
                .report("a")
                .is_some_and(|report| report.waiting_for_load == 1)
        });
        let second = bench.pool.acquire("a", &Patience::USUAL).map(drop);
        assert!(
            matches!(second, Err(Unavailable::QueueFull { n_waiting: 1, .. })),
            "{second:?}"
        );
        word.send(Ok(())).expect("the loader waits");
        asker.join().expect("no panic").expect("it was loaded");
    });
}

#[test]
fn a_client_that_leaves_waits_no_longer() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(on_demand("a"));
    let word = bench.gate("a");
    let gone = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let patience = Patience {
                queue_timeout: None,
                is_gone: &|| gone.load(Ordering::SeqCst),
            };
            bench.pool.acquire("a", &patience).map(drop)
        });
        wait_for("the loader", || bench.loader.started().len() == 1);
        gone.store(true, Ordering::SeqCst);
        assert_eq!(
            asker.join().expect("no panic"),
            Err(Unavailable::ClientGone)
        );
    });
    drop(word);
}

#[test]
fn a_failed_load_is_not_repeated_by_every_request() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(on_demand("a"));
    bench.fail("a", "no luck");
    for _ in 0..3 {
        let end = bench.pool.acquire("a", &Patience::USUAL).map(drop);
        assert!(matches!(end, Err(Unavailable::Failed { .. })), "{end:?}");
    }
    assert_eq!(bench.loader.started().len(), 1);
    bench.succeed("a");
    bench.clock.advance(Duration::from_secs(10));
    bench
        .pool
        .acquire("a", &Patience::USUAL)
        .expect("enough time has passed");
    assert_eq!(bench.loader.started().len(), 2);
}

#[test]
fn a_request_waits_for_a_busy_model_to_make_room() {
    let bench = Bench::with(&[("a", 60), ("b", 60)], limits(), Pace::Stepped);
    bench.add(on_demand("a"));
    bench.add(on_demand("b"));
    bench.loaded("a");
    bench.pass_residency();
    let runtime = bench.loader.take_runtime("a");
    let ticket = submit(&bench.pool.get("a").expect("loaded"));
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| bench.pool.acquire("b", &Patience::USUAL).map(drop));
        wait_for("it to wait", || {
            bench
                .pool
                .report("b")
                .is_some_and(|report| report.waiting_for_load == 1)
        });
        assert_eq!(bench.state("a"), RuntimeState::Loaded);
        runtime.finish(ticket.id());
        drop(runtime);
        ticket.wait().expect("it ran to its end");
        asker.join().expect("no panic").expect("a went, b came");
    });
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
}

#[test]
fn a_model_that_can_never_fit_is_refused_at_once_with_the_numbers() {
    let bench = Bench::new(&[("huge", 101)]);
    bench.add(on_demand("huge"));
    let end = bench.pool.acquire("huge", &Patience::USUAL).map(drop);
    let Err(Unavailable::NotLoaded {
        room: Some(room), ..
    }) = end
    else {
        panic!("{end:?}");
    };
    assert_eq!(
        (room.needed_bytes, room.limit_bytes, room.is_hopeless),
        (101, 100, true)
    );
}

#[test]
fn a_request_waits_for_an_unload_and_loads_the_model_again() {
    let bench = Bench::with(&[("a", 60)], limits(), Pace::Stepped);
    bench.add(on_demand("a"));
    bench.loaded("a");
    let runtime = bench.loader.take_runtime("a");
    bench.pool.unload("a", None).expect("it is there");
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| bench.pool.acquire("a", &Patience::USUAL).map(drop));
        wait_for("it to wait", || {
            bench
                .pool
                .report("a")
                .is_some_and(|report| report.waiting_for_load == 1)
        });
        drop(runtime); // the unload can end
        asker.join().expect("no panic").expect("loaded again");
    });
    assert_eq!(bench.loader.started(), ["a", "a"]);
}

#[test]
fn the_end_of_the_server_wakes_those_who_wait() {
    let bench = Bench::new(&[("a", 8)]);
    bench.add(on_demand("a"));
    let word = bench.gate("a");
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| bench.pool.acquire("a", &Patience::USUAL).map(drop));
        wait_for("the loader", || bench.loader.started().len() == 1);
        bench.pool.shutdown(Duration::ZERO);
        assert_eq!(
            asker.join().expect("no panic"),
            Err(Unavailable::ShuttingDown)
        );
    });
    word.send(Ok(())).expect("the loader waits");
    assert_eq!(
        bench.pool.wait_settled("a", PATIENCE),
        Some(RuntimeState::Unloaded)
    );
}
