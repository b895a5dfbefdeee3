//! The exposition text: every family that the scheduler owes, and a strict reading of the format.

use crate::support::{Bench, request};
use std::collections::{BTreeMap, BTreeSet};
use tinyloop::config::ExecutorConfig;
use tinyloop::scheduler::{SubmitOptions, Ticket};

/// One sample: labels in the order written, and the value.
type Sample = (BTreeMap<String, String>, f64);

/// A family as the text shows it.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    /// By the name on the line: the family's own, or with `_bucket`, `_sum`, `_count`.
    samples: BTreeMap<String, Vec<Sample>>,
}

fn is_name(text: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.starts_with(is_first) && text.chars().all(|c| is_first(c) || c.is_ascii_digit())
}

/// `name="value",..` with its escapes.
fn labels(text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, after) = rest.split_once("=\"").expect("a label has a quoted value");
        assert!(is_name(name), "label name {name:?}");
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().expect("the quote is closed") {
                (index, '"') => break index,
                (_, '\\') => match chars.next().expect("an escape has a second half").1 {
                    'n' => value.push('\n'),
                    c @ ('"' | '\\') => value.push(c),
                    c => panic!("no such escape: {c}"),
                },
                (_, c) => value.push(c),
            }
        };
        let is_new = labels.insert(name.to_owned(), value).is_none();
        assert!(is_new, "label {name} twice in {text}");
        rest = &after[end + 1..];
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    labels
}

/// Reads a whole exposition; panics at the first thing that the format does not allow.
fn parse(text: &str) -> BTreeMap<String, Family> {
    assert!(text.ends_with('\n'), "the last line has an end");
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut helped = String::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            helped = help.split(' ').next().expect("a name").to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a name and a kind");
            assert!(is_name(name), "{line}");
            assert_eq!(name, helped, "HELP comes right before TYPE");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            let family = Family {
                kind: kind.to_owned(),
                ..Family::default()
            };
            let is_new = families.insert(name.to_owned(), family).is_none();
            assert!(is_new, "family {name} twice");
            current = name.to_owned();
        } else {
            sample(line, &current, &mut families);
        }
    }
    for (name, family) in &families {
        check_family(name, family);
    }
    families
}

fn sample(line: &str, current: &str, families: &mut BTreeMap<String, Family>) {
    let (series, value) = line.rsplit_once(' ').expect("a series and a value");
    let (name, label_text) = match series.split_once('{') {
        Some((name, rest)) => (name, rest.strip_suffix('}').expect("the brace is closed")),
        None => (series, ""),
    };
    let family = families
        .get_mut(current)
        .expect("TYPE comes before samples");
    let suffix = name
        .strip_prefix(current)
        .expect("samples follow their TYPE");
    let allowed: &[&str] = match family.kind.as_str() {
        "histogram" => &["_bucket", "_sum", "_count"],
        _ => &[""],
    };
    assert!(allowed.contains(&suffix), "{line}");
    let value = match value {
        "+Inf" => f64::INFINITY,
        value => value.parse().expect("a number"),
    };
    let samples = family.samples.entry(name.to_owned()).or_default();
    let labels = labels(label_text);
    assert!(
        samples.iter().all(|(other, _)| *other != labels),
        "{line} twice"
    );
    samples.push((labels, value));
}

fn check_family(name: &str, family: &Family) {
    match family.kind.as_str() {
        "counter" => {
            assert!(name.ends_with("_total"), "counter {name}");
            let mut values = family.samples.values().flatten().map(|(_, value)| *value);
            assert!(values.all(|value| value >= 0.0 && value.is_finite()));
        }
        "histogram" => check_histogram(name, family),
        _ => assert!(!name.ends_with("_total"), "gauge {name}"),
    }
}

/// Buckets grow, the last is +Inf and equals the count; sum and count are there.
fn check_histogram(name: &str, family: &Family) {
    let of = |suffix: &str| {
        let samples = family.samples.get(&format!("{name}{suffix}"));
        samples.unwrap_or_else(|| panic!("{name} has no {suffix}"))
    };
    let mut buckets: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    for (labels, value) in of("_bucket") {
        let mut labels = labels.clone();
        let bound = match labels.remove("le").expect("a bucket has a bound").as_str() {
            "+Inf" => f64::INFINITY,
            bound => bound.parse().expect("a bound is a number"),
        };
        buckets.entry(labels).or_default().push((bound, *value));
    }
    assert_eq!(of("_sum").len(), buckets.len());
    assert_eq!(of("_count").len(), buckets.len());
    for (labels, count) in of("_count") {
        let buckets = &buckets[labels];
        let grow = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        assert!(buckets.windows(2).all(grow), "{name} {buckets:?}");
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, *count)), "{name}");
    }
}

/// A bench in which something of every kind has happened.
/// The tickets keep alive who still waits and runs.
fn busy() -> (Bench, [Ticket; 2]) {
    let config = ExecutorConfig {
        preempt_running: true,
        max_queue_depth: 1,
        ..ExecutorConfig::default()
    };
    let bench = Bench::stepped(1, config);
    bench.serve_one(1, 3);
    let low = bench.submit(0);
    bench.executor.drive();
    let high = bench.submit(1);
    bench.executor.drive();
    let waiting = bench.submit(0);
    let full = bench.executor.submit(request(1), SubmitOptions::default());
    assert!(full.is_err());
    bench.finish(high.id());
    (bench, [low, waiting])
}

#[test]
fn every_family_is_there_in_strict_exposition_format() {
    let (bench, _live) = busy();
    let families = parse(&bench.executor.metrics_text(""));
    let by_kind = |kind: &str| -> BTreeSet<&str> {
        let of_kind = families.iter().filter(|(_, family)| family.kind == kind);
        let names = of_kind.filter_map(|(name, _)| name.strip_prefix("tinyloop_"));
        names.collect()
    };
    let (histograms, counters, gauges) =
        (by_kind("histogram"), by_kind("counter"), by_kind("gauge"));
    for name in [
        "queue_wait_seconds",
        "dispatch_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_seconds",
        "prompt_tokens",
        "completion_tokens",
        "batch_rows",
    ] {
        assert!(histograms.contains(name), "{name} is missing");
    }
    for name in [
        "requests_total",
        "admission_rejected_total",
        "cancelled_total",
        "preemptions_total",
        "prompt_tokens_total",
        "completion_tokens_total",
        "prefix_tokens_reused_total",
        "prefix_queries_total",
        "prefix_hits_total",
        "loops_downgraded_total",
        "loop_iterations_total",
        "loop_iterations_saved_total",
        "slo_met_total",
        "slo_missed_total",
    ] {
        assert!(counters.contains(name), "{name} is missing");
    }
    for name in [
        "queue_depth",
        "in_flight",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "kv_blocks",
        "ema_dispatch_seconds",
        "prefix_pool_entries",
        "prefix_pool_cached_tokens",
        "configured_target_inflight",
        "effective_target_inflight",
        "build_info",
    ] {
        assert!(gauges.contains(name), "{name} is missing");
    }
    assert!(families.contains_key("process_cpu_seconds_total"));
    // Every series of ours says which model it is about.
    let ours = families
        .iter()
        .filter(|(name, _)| name.starts_with("tinyloop_"));
    for (name, family) in ours.filter(|(name, _)| *name != "tinyloop_build_info") {
        let mut samples = family.samples.values().flatten();
        assert!(samples.all(|(labels, _)| labels["model"] == "m"), "{name}");
    }
}

#[test]
fn label_values_are_there_from_the_start_and_bounded() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let families = parse(&bench.executor.metrics_text(""));
    let values = |family: &str, label: &str| -> Vec<String> {
        let samples = families[family].samples.values().flatten();
        samples.map(|(labels, _)| labels[label].clone()).collect()
    };
    assert_eq!(
        values("tinyloop_requests_total", "outcome"),
        ["cancelled", "done", "error"]
    );
    assert_eq!(
        values("tinyloop_cancelled_total", "phase"),
        ["queued", "running"]
    );
    assert_eq!(
        values("tinyloop_kv_blocks", "state"),
        ["cached", "free", "used"]
    );
}

#[test]
fn the_callers_lines_come_first_and_numbers_are_right() {
    let (bench, _live) = busy();
    let own = "# HELP own A line of the caller.\n# TYPE own gauge\nown 1";
    let text = bench.executor.metrics_text(own);
    assert!(text.starts_with(&format!("{own}\n# HELP ")), "{text}");
    assert_eq!(parse(&text)["own"].samples["own"][0].1, 1.0);
    assert_eq!(bench.count("completion_tokens_total"), 4.0);
    assert_eq!(bench.count("preemptions_total"), 1.0);
    assert_eq!(
        bench.count("preemptions_total"),
        1.0,
        "a scrape adds nothing"
    );
    assert_eq!(bench.count("queue_depth"), 1.0);
    assert!(bench.metrics.render("").contains("tinyloop_build_info"));
}
