//! Unloading: what waits is told so, what runs may finish, and nothing is left.

use crate::support::{Bench, limits, model, submit, wait_for};
use std::time::Duration;
use tinyloop::pool::{LoadOverride, Patience, RuntimeState, Unavailable};
use tinyloop::request::RequestError;
use tinyloop::runtime::fake::Pace;
use tinyloop::scheduler::{SubmitError, SubmitOptions};

#[test]
fn queued_work_is_cancelled_and_running_work_finishes() {
    let bench = Bench::with(&[("a", 60)], limits(), Pace::Stepped);
    bench.add(model("a"));
    bench.loaded("a");
    let runtime = bench.loader.take_runtime("a");
    let model = bench.pool.get("a").expect("loaded");
    let running = submit(&model);
    let queued = [submit(&model), submit(&model)];
    wait_for("the first to run", || runtime.running() == [running.id()]);
    let began = bench.pool.unload("a", Some(Duration::from_secs(600)));
    assert_eq!(began, Ok(RuntimeState::Unloading));
    for ticket in queued {
        assert_eq!(ticket.wait().err(), Some(RequestError::ModelUnloading));
    }
    let request = tinyloop::request::GenerationRequest::new(vec![1_u32], 1);
    let late = model.executor.submit(request, SubmitOptions::default());
    assert!(matches!(
        late.err(),
        Some(SubmitError::ModelUnloading { .. })
    ));
    let refused = bench
        .pool
        .acquire("a", &Patience::USUAL)
        .expect_err("it goes");
    assert!(
        matches!(refused, Unavailable::Unloading { .. }),
        "{refused:?}"
    );
    let report = bench.pool.report("a").expect("configured");
    assert_eq!(
        (report.runtime_inflight, report.accepting_new_requests),
        (1, false)
    );
    assert_eq!(
        bench.pool.with_work().len(),
        1,
        "it is still listed with its work"
    );
    assert!(bench.pool.list().is_empty());
    runtime.finish(running.id());
    let answer = running.wait().expect("it ran to its end");
    assert_eq!(answer.tokens.len(), 2);
    drop(runtime);
    // Somebody still holds the model: its bytes are not back.
    assert_eq!(
        bench.pool.wait_settled("a", Duration::from_millis(50)),
        Some(RuntimeState::Unloading)
    );
    assert_eq!(bench.pool.devices()[0].used_bytes, 60);
    drop(model);
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert_eq!((bench.live(), bench.pool.devices()[0].used_bytes), (0, 0));
    assert_eq!(
        bench.pool.unload("a", None),
        Ok(RuntimeState::Unloaded),
        "idempotent"
    );
    bench.loaded("a");
}

#[test]
fn what_does_not_finish_in_time_is_cut() {
    let bench = Bench::with(&[("a", 60)], limits(), Pace::Stepped);
    bench.add(model("a"));
    bench.loaded("a");
    drop(bench.loader.take_runtime("a"));
    let running = submit(&bench.pool.get("a").expect("loaded"));
    bench
        .pool
        .unload("a", Some(Duration::ZERO))
        .expect("it is there");
    let end = running.wait().err();
    assert!(
        matches!(
            end,
            Some(RequestError::ModelUnloading | RequestError::ShuttingDown)
        ),
        "{end:?}"
    );
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert_eq!(bench.live(), 0);
    let text = bench.pool.metrics_text("");
    assert!(text.contains("tinyloop_up{model=\"a\"} 0\n"), "{text}");
}

#[test]
fn aliases_mean_the_same_model() {
    let bench = Bench::new(&[("a", 60)]);
    let mut config = model("a");
    config.aliases = vec!["other".to_owned()];
    bench.add(config);
    let ticket = bench.load("other").expect("there is room");
    assert_eq!(ticket.model, "a");
    assert_eq!(bench.settled("other"), RuntimeState::Loaded);
    bench.pool.unload("other", None).expect("it is there");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    assert!(bench.pool.unload("none", None).is_err());
}

/// What a model did last is no news of one that is gone: its gauges go, its counters stay.
#[test]
fn no_gauge_of_an_unloaded_replica_or_removed_model_keeps_its_last_value() {
    let bench = Bench::new(&[("a", 20)]);
    bench.add(model("a"));
    let up = |value: u8| format!("tinyloop_up{{model=\"a\"}} {value}\n");
    assert!(
        bench.pool.metrics_text("").contains(&up(0)),
        "never loaded is not up"
    );
    let three = serde_json::json!({"replicas": 3});
    let three = LoadOverride(three.as_object().expect("an object").clone());
    bench.pool.load("a", &three).expect("3 * 20 fit into 100");
    assert_eq!(bench.settled("a"), RuntimeState::Loaded);
    submit(&bench.pool.get("a").expect("loaded"))
        .wait()
        .expect("it answers");
    let text = bench.pool.metrics_text("");
    let gauges = [
        "queue_depth",
        "in_flight",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "kv_blocks",
        "configured_target_inflight",
        "effective_target_inflight",
        "replica_target_inflight",
        "replicas",
        "ema_dispatch_seconds",
        "prefix_pool_entries",
        "prefix_pool_cached_tokens",
    ];
    let shown = |text: &str, gauge: &str| {
        let series = format!("tinyloop_{gauge}{{model=\"a\"");
        text.lines()
            .filter(|line| line.starts_with(&series))
            .count()
    };
    for gauge in gauges {
        assert!(shown(&text, gauge) > 0, "{gauge}: {text}");
    }
    assert!(text.contains(&up(1)), "{text}");
    bench.pool.unload("a", None).expect("it is there");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    let text = bench.pool.metrics_text("");
    for gauge in gauges {
        assert_eq!(shown(&text, gauge), 0, "{gauge}: {text}");
    }
    assert!(text.contains(&up(0)), "{text}");
    let counted = "tinyloop_requests_total{model=\"a\",outcome=\"done\"} 1\n";
    assert!(text.contains(counted), "counters stay: {text}");
    // Loaded anew it has one replica, and nothing of the others.
    bench.loaded("a");
    let text = bench.pool.metrics_text("");
    assert_eq!(shown(&text, "in_flight"), 1, "{text}");
    bench.pool.unload("a", None).expect("it is there");
    assert_eq!(bench.settled("a"), RuntimeState::Unloaded);
    bench.pool.reload(Vec::new()).expect("nothing takes a name");
    let text = bench.pool.metrics_text("");
    assert!(!text.contains("tinyloop_up{model=\"a\"}"), "{text}");
    assert!(text.contains(counted), "counters stay: {text}");
}
