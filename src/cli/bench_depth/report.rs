//! What the bench found: figures, ratios, and how they stand to what was wanted.
//!
//! Pure over what was served, then text. Latencies of all seeds are pooled before percentiles are
//! taken; rates are medians over seeds, and so are ratios, which compare runs of one seed.

use super::drive::{Served, Way};
use super::latency::{Interleave, PromptRows};
use crate::cli::output::Output;
use crate::error::Error;
use serde::Serialize;

/// One way of batching under one load.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    pub(super) way: Way,
    pub(super) tokens_per_second: f64,
    pub(super) requests_per_second: f64,
    pub(super) mean_ms: f64,
    pub(super) p50_ms: f64,
    pub(super) p95_ms: f64,
    /// Of the requests of least depth.
    pub(super) p95_shallow_ms: f64,
    /// Throughput over that of (a) and of (b1).
    pub(super) speedup: [f64; 2],
    /// Mean latency over that of (a) and of (b1).
    pub(super) mean_ratio: [f64; 2],
}

/// All ways under one load.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Load {
    /// Per cent of capacity; None = everything arrives at once.
    pub(super) percent: Option<f64>,
    pub(super) ways: Vec<Figures>,
}

/// Requests of one depth and length, all at once, against one after the other.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Matched {
    pub(super) loops: u32,
    pub(super) n_requests: usize,
    pub(super) serial_per_second: f64,
    pub(super) batched_per_second: f64,
}

/// Everything that `--json` prints.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) backend: String,
    pub(super) clock: String,
    pub(super) slots: usize,
    pub(super) n_requests: usize,
    pub(super) seeds: u64,
    pub(super) depths: Vec<u32>,
    /// Requests per second of (c) when everything arrives at once.
    pub(super) capacity: f64,
    pub(super) loads: Vec<Load>,
    pub(super) matched: Vec<Matched>,
    pub(super) interleave: Option<Interleave>,
    pub(super) prompt_rows: Vec<PromptRows>,
    /// Runs of requests whose tokens were compared with the same request alone, and those that differed.
    pub(super) compared: usize,
    pub(super) different: usize,
}

/// Sums up the runs of one load: `runs[seed][way]`, ways in the order of [`Way::ALL`].
pub(super) fn load(percent: Option<f64>, runs: &[Vec<Vec<Served>>]) -> Load {
    let ways = Way::ALL.iter().enumerate();
    let ways = ways.map(|(index, way)| figures(*way, index, runs));
    Load {
        percent,
        ways: ways.collect(),
    }
}

fn figures(way: Way, index: usize, runs: &[Vec<Vec<Served>>]) -> Figures {
    let over_seeds = |value: &dyn Fn(&[Vec<Served>]) -> f64| {
        median(runs.iter().map(|seed| value(seed)).collect())
    };
    let (serial, fixed) = (0, 1);
    let speedup =
        |base: usize| over_seeds(&|seed| token_rate(&seed[index]) / token_rate(&seed[base]));
    let mean_ratio = |base: usize| over_seeds(&|seed| mean_ms(&seed[index]) / mean_ms(&seed[base]));
    let pooled = || runs.iter().flat_map(|seed| &seed[index]);
    let least = pooled().map(|served| served.loops).min();
    let latencies = sorted_ms(pooled());
    let shallow = sorted_ms(pooled().filter(|served| Some(served.loops) == least));
    Figures {
        way,
        tokens_per_second: over_seeds(&|seed| token_rate(&seed[index])),
        requests_per_second: over_seeds(&|seed| request_rate(&seed[index])),
        mean_ms: latencies.iter().sum::<f64>() / latencies.len().max(1) as f64,
        p50_ms: percentile(&latencies, 0.5),
        p95_ms: percentile(&latencies, 0.95),
        p95_shallow_ms: percentile(&shallow, 0.95),
        speedup: [speedup(serial), speedup(fixed)],
        mean_ratio: [mean_ratio(serial), mean_ratio(fixed)],
    }
}

fn makespan(served: &[Served]) -> f64 {
    served.iter().map(|each| each.end).fold(1e-9, f64::max)
}

/// Generated tokens per second.
pub(super) fn token_rate(served: &[Served]) -> f64 {
    let n_tokens: usize = served.iter().map(|each| each.tokens.len()).sum();
    n_tokens as f64 / makespan(served)
}

/// Requests per second.
pub(super) fn request_rate(served: &[Served]) -> f64 {
    served.len() as f64 / makespan(served)
}

fn mean_ms(served: &[Served]) -> f64 {
    let sum: f64 = served.iter().map(|each| each.end - each.arrival).sum();
    sum * 1e3 / served.len().max(1) as f64
}

fn sorted_ms<'a>(served: impl Iterator<Item = &'a Served>) -> Vec<f64> {
    let mut all: Vec<f64> = served.map(|each| (each.end - each.arrival) * 1e3).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// Nearest rank.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}

/// The upper of the two in the middle where they are even.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What was wanted of a figure, and what came.
#[derive(Clone, Debug, PartialEq)]
struct Target {
    what: String,
    wanted: String,
    found: f64,
    is_met: bool,
}

fn targets(report: &Report) -> Vec<Target> {
    let mut targets = Vec::new();
    let mut at_least = |what: String, found: f64, least: f64| {
        targets.push(Target {
            what,
            wanted: format!(">= {least:.1}"),
            found,
            is_met: found >= least,
        });
    };
    for each in &report.matched {
        let what = format!(
            "{} matched requests, L = {}: throughput over serial",
            each.n_requests, each.loops
        );
        at_least(what, each.batched_per_second / each.serial_per_second, 2.0);
    }
    let find = |percent: Option<f64>| report.loads.iter().find(|load| load.percent == percent);
    if let Some(load) = find(None) {
        let rate = |index: usize| load.ways[index].tokens_per_second;
        let what = "saturation: throughput of (c) over (b2)".to_owned();
        at_least(what, rate(3) / rate(2), 1.7);
        let what = "saturation: throughput of (c) over (b1)".to_owned();
        at_least(what, load.ways[3].speedup[1], 1.0);
    }
    let Some(load) = find(Some(80.0)) else {
        return targets;
    };
    let (fixed, ours) = (&load.ways[1], &load.ways[3]);
    for (what, found, most, words) in [
        ("mean latency", ours.mean_ratio[1], 0.5, "<= 1/2"),
        (
            "p95 of the shallowest",
            ours.p95_shallow_ms / fixed.p95_shallow_ms,
            1.0 / 3.0,
            "<= 1/3",
        ),
    ] {
        targets.push(Target {
            what: format!("80 % load: {what} of (c) over (b1)"),
            wanted: words.to_owned(),
            found,
            is_met: found <= most,
        });
    }
    targets
}

/// The report as tables.
pub(super) fn print(out: &mut Output, report: &Report) -> Result<(), Error> {
    out.line(&format!(
        "{} on {}; time: {}",
        report.model, report.backend, report.clock
    ))?;
    if !report.loads.is_empty() {
        print_loads(out, report)?;
    }
    for each in &report.matched {
        out.line(&format!(
            "{} requests of L = {}: {:.1} tok/s serial, {:.1} together",
            each.n_requests, each.loops, each.serial_per_second, each.batched_per_second
        ))?;
    }
    if let Some(found) = &report.interleave {
        out.line(&format!(
            "\nA short request (L = {}, {} tokens) while a prompt of {} tokens runs at L = {}: first token after\n  \
             {} quanta (at most {}), {} on the idle engine; {:.1} ms (at most {:.1}), {:.1} ms on the idle engine",
            found.short_loops,
            found.short_tokens,
            found.long_tokens,
            found.long_loops,
            found.busy_quanta_median,
            found.busy_quanta_max,
            found.idle_quanta,
            found.busy_ms_median,
            found.busy_ms_max,
            found.idle_ms
        ))?;
    }
    if !report.prompt_rows.is_empty() {
        print_prompt_rows(out, report)?;
    }
    if report.compared > 0 {
        out.line(&format!(
            "\n{} results compared with the same request alone: {} differ",
            report.compared, report.different
        ))?;
    }
    let targets = targets(report);
    if !targets.is_empty() {
        out.line("\n| wanted | | found | |\n|---|---|---|---|")?;
    }
    for target in targets {
        let verdict = if target.is_met { "met" } else { "not met" };
        out.line(&format!(
            "| {} | {} | {:.2} | {verdict} |",
            target.what, target.wanted, target.found
        ))?;
    }
    Ok(())
}

fn print_loads(out: &mut Output, report: &Report) -> Result<(), Error> {
    out.line(&format!(
        "{} requests of L in {:?}, {} seeds, {} slots; capacity: {:.2} requests/s, that of (c) at saturation\n",
        report.n_requests, report.depths, report.seeds, report.slots, report.capacity
    ))?;
    out.line(
        "| load | way | tok/s | requests/s | mean ms | p50 | p95 | p95 of least L | tok/s over (a), (b1) | mean over (a), (b1) |\n\
         |---|---|---|---|---|---|---|---|---|---|",
    )?;
    for load in &report.loads {
        let name = match load.percent {
            Some(percent) => format!("{percent:.0} %"),
            None => "all at once".to_owned(),
        };
        for each in &load.ways {
            out.line(&format!(
                "| {name} | {} | {:.0} | {:.2} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2}, {:.2} | {:.2}, {:.2} |",
                each.way.name(),
                each.tokens_per_second,
                each.requests_per_second,
                each.mean_ms,
                each.p50_ms,
                each.p95_ms,
                each.p95_shallow_ms,
                each.speedup[0],
                each.speedup[1],
                each.mean_ratio[0],
                each.mean_ratio[1]
            ))?;
        }
    }
    out.line("")
}

fn print_prompt_rows(out: &mut Output, report: &Report) -> Result<(), Error> {
    out.line(
        "\n| prompt rows at once | prompt alone, tok/s | beside generations, tok/s | ms between their tokens: without, median, worst |\n\
         |---|---|---|---|",
    )?;
    for each in &report.prompt_rows {
        out.line(&format!(
            "| {} | {:.0} | {:.0} beside {} | {:.1}, {:.1}, {:.1} |",
            each.rows_max,
            each.alone_per_second,
            each.beside_per_second,
            each.n_generations,
            each.gap_ms,
            each.gap_beside_ms,
            each.gap_beside_max_ms
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(loops: u32, arrival: f64, end: f64) -> Served {
        Served {
            loops,
            arrival,
            end,
            tokens: vec![1; 10],
            ..Served::default()
        }
    }

    #[test]
    fn figures_are_medians_of_rates_and_pooled_percentiles() {
        // Per seed: (a) ends at 4 s, (b1) at 2 s, (b2) at 2 s, (c) at 1 s.
        let way = |end: f64| vec![served(1, 0.0, end / 2.0), served(4, 0.0, end)];
        let seed = || [4.0, 2.0, 2.0, 1.0].map(way).to_vec();
        let load = load(Some(80.0), &[seed(), seed(), seed()]);
        let ours = &load.ways[3];
        assert_eq!(ours.tokens_per_second, 20.0);
        assert_eq!(ours.requests_per_second, 2.0);
        assert_eq!(
            (ours.mean_ms, ours.p95_ms, ours.p95_shallow_ms),
            (750.0, 1000.0, 500.0)
        );
        assert_eq!(ours.speedup, [4.0, 2.0]);
        assert_eq!(ours.mean_ratio, [0.25, 0.5]);
        let report = Report {
            loads: vec![load],
            ..Report::default()
        };
        let met: Vec<bool> = targets(&report)
            .iter()
            .map(|target| target.is_met)
            .collect();
        assert_eq!(
            met,
            [true, false],
            "half of the mean; half of p95 is not a third"
        );
    }

    #[test]
    fn percentiles_take_the_nearest_rank() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.95), 19.0);
        assert_eq!(percentile(&values[..1], 0.95), 1.0);
        assert!(percentile(&[], 0.5).is_nan());
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }
}
