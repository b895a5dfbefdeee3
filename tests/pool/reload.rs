//! A new configuration for a running pool.

use crate::support::{Bench, model};
use tinyloop::pool::{ReloadReport, RuntimeState};

fn names(of: &[&str]) -> Vec<String> {
    of.iter().map(ToString::to_string).collect()
}

#[test]
fn models_come_go_and_change_and_loaded_ones_are_left_alone() {
    let bench = Bench::new(&[]);
    for name in ["kept", "changed", "gone", "loaded", "loaded-gone", "failed"] {
        bench.add(model(name));
    }
    bench.loaded("loaded");
    bench.loaded("loaded-gone");
    bench.fail("failed", "no");
    bench.load("failed").expect("it begins");
    assert_eq!(bench.settled("failed"), RuntimeState::Failed);
    let with_replicas = |name: &str| {
        let mut config = model(name);
        config.lifecycle.replicas = 2;
        config
    };
    let new = vec![
        model("new"),
        model("kept"),
        with_replicas("changed"),
        with_replicas("loaded"),
        with_replicas("failed"),
    ];
    let report = bench.pool.reload(new.clone()).expect("no id is taken");
    let expected = ReloadReport {
        added: names(&["new"]),
        removed: names(&["gone"]),
        changed: names(&["changed", "failed"]),
        unchanged: names(&["kept"]),
        left_alone: names(&["loaded", "loaded-gone"]),
    };
    assert_eq!(report, expected);
    let listed: Vec<String> = bench
        .pool
        .entries()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    let order = ["new", "kept", "changed", "loaded", "failed", "loaded-gone"];
    assert_eq!(listed, order);
    let replicas = |name: &str| bench.pool.report(name).expect("configured").replicas;
    assert_eq!([replicas("changed"), replicas("loaded")], [2, 1]);
    assert_eq!(bench.state("failed"), RuntimeState::Unloaded);
    assert_eq!(bench.state("loaded"), RuntimeState::Loaded);
    // Once unloaded they follow.
    for name in ["loaded", "loaded-gone"] {
        bench.pool.unload(name, None).expect("it is there");
        assert_eq!(bench.settled(name), RuntimeState::Unloaded);
    }
    let report = bench.pool.reload(new).expect("no id is taken");
    assert_eq!(
        (report.changed, report.removed),
        (names(&["loaded"]), names(&["loaded-gone"]))
    );
    assert_eq!(replicas("loaded"), 2);
}

#[test]
fn an_id_of_a_loaded_model_cannot_be_given_away() {
    let bench = Bench::new(&[]);
    bench.add(model("old"));
    bench.loaded("old");
    let mut new = model("new");
    new.aliases = names(&["old"]);
    let taken = bench.pool.reload(vec![new.clone()]).expect_err("old stays");
    assert_eq!(taken.0, "old");
    assert_eq!(bench.pool.entries().len(), 1, "nothing was changed");
    bench.pool.unload("old", None).expect("it is there");
    assert_eq!(bench.settled("old"), RuntimeState::Unloaded);
    bench.pool.reload(vec![new]).expect("the id is free");
    assert_eq!(
        bench.pool.find("old").map(|entry| entry.name),
        Some("new".to_owned())
    );
}
