//! `tinyloop load-depth`: what granting fewer loops gives a server that has more to do than it can.
//!
//! Requests arrive at random moments (Poisson) at several multiples of the measured capacity, all
//! with an objective on their first token: once with `min_loops = 1`, so that the scheduler may grant
//! fewer loops, and once without, so that it can only refuse. Same requests, same moments, one
//! executor with the built-in engine in this process. What counts is the share of all requests
//! whose first token came within the objective; a refused one has none.
//!
//! On the main thread, which sleeps until the next arrival. What is not here: the decision
//! (`scheduler::admission`), the picture (`tests/scripts/load_depth.py`).

use super::report::median;
use super::workload::{self, Item, Shape};
use crate::cli::model_args::ModelArgs;
use crate::cli::output::Output;
use crate::config::{BUILTIN_MODEL, EngineConfig, ExecutorConfig};
use crate::error::Error;
use crate::request::GenerationRequest;
use crate::runtime::device::only_place;
use crate::runtime::native::NativeRuntime;
use crate::scheduler::{Executor, SubmitError, SubmitOptions, TokenStream};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of `tinyloop load-depth`.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadDepthArgs {
    /// Model that loops: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// Loops that every request asks for.
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    pub asked: u32,
    /// Fewest loops that it accepts in the runs with downgrades.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub min_loops: u32,
    /// Arrivals in per cent of the capacity at the depth asked.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "PER_CENT",
        default_value = "50,100,150,200,300"
    )]
    pub loads: Vec<f64>,
    /// Objective on the first token, in multiples of the time that a request takes when all slots
    /// are busy.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub slo_factor: f64,
    /// Requests of a run.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 200)]
    pub requests: usize,
    /// Runs of each kind; the median counts.
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    pub seeds: u64,
    /// Requests that may run at once.
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    pub slots: u32,
    /// Mean prompt tokens.
    #[arg(short = 'p', long, value_name = "TOKENS", default_value_t = 16)]
    pub n_prompt: u32,
    /// Mean tokens to generate.
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 48)]
    pub n_generate: u32,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Depth and weights.
    #[command(flatten)]
    pub model_args: ModelArgs,
}

/// What a load brought under one kind of server; shares are of all requests, medians over seeds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Outcome {
    load_percent: f64,
    min_loops: Option<u32>,
    within_slo: f64,
    late: f64,
    refused: f64,
    /// Of the requests that were taken.
    mean_loops: f64,
    tokens_per_second: f64,
}

/// Everything that `--json` prints.
#[derive(Clone, Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    asked: u32,
    slots: u32,
    requests: usize,
    seeds: u64,
    /// Requests per second at the depth asked.
    capacity: f64,
    /// Time from dispatch to the end with all slots busy.
    service_ms: f64,
    slo_ttft_ms: u64,
    outcomes: Vec<Outcome>,
}

/// Runs all loads and writes the result to stdout.
pub fn run(args: &LoadDepthArgs) -> Result<(), Error> {
    let counts = [args.requests, args.seeds as usize, args.slots as usize];
    let is_positive = |value: &f64| *value > 0.0;
    if counts.contains(&0) || !args.loads.iter().chain([&args.slo_factor]).all(is_positive) {
        return Err(Error::Usage(
            "counts, loads and the factor are above 0".to_owned(),
        ));
    }
    if args.min_loops == 0 || args.min_loops >= args.asked {
        return Err(Error::Usage(format!(
            "--min-loops is {} and --asked is {}; 1 <= min-loops < asked must hold",
            args.min_loops, args.asked
        )));
    }
    let server = Server::start(args)?;
    let (capacity, service_ms) = server.capacity()?;
    let slo_ttft_ms = (service_ms * args.slo_factor).ceil() as u64;
    let mut outcomes = Vec::new();
    for load_percent in &args.loads {
        for min_loops in [None, Some(args.min_loops)] {
            let mut runs = Vec::new();
            for seed in 0..args.seeds {
                let per_second = capacity * load_percent / 100.0;
                let objective = (min_loops, slo_ttft_ms);
                runs.push(server.load(seed, per_second, objective)?);
            }
            outcomes.push(summary(*load_percent, min_loops, &runs));
        }
    }
    let report = Report {
        model: server.model,
        backend: server.backend,
        asked: args.asked,
        slots: args.slots,
        requests: args.requests,
        seeds: args.seeds,
        capacity,
        service_ms,
        slo_ttft_ms,
        outcomes,
    };
    server.executor.shutdown(Duration::ZERO);
    let mut out = Output::new();
    if args.json {
        let text = serde_json::to_string_pretty(&report);
        out.line(&text.map_err(|error| Error::other("load-depth", error))?)?;
    } else {
        print(&mut out, &report)?;
    }
    out.finish()
}

/// A loaded model behind its scheduler.
struct Server<'a> {
    args: &'a LoadDepthArgs,
    executor: Executor,
    shape: Shape,
    model: String,
    backend: String,
}

/// What one run brought.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    n_requests: usize,
    n_within: usize,
    n_late: usize,
    n_refused: usize,
    loops: u64,
    n_tokens: u64,
    seconds: f64,
}

impl<'a> Server<'a> {
    fn start(args: &'a LoadDepthArgs) -> Result<Self, Error> {
        let failed = |error: &dyn std::fmt::Display| Error::other("load-depth", error);
        let context = (args.n_prompt + args.n_generate) * 3 / 2 + 2;
        let mut config = EngineConfig {
            context_length: Some(context),
            max_sequences: args.slots,
            kv_tokens: Some(u64::from(context + 16) * u64::from(args.slots)),
            prefix_cache: false,
            ..EngineConfig::default()
        };
        args.model_args.apply(&mut config);
        // KV is counted at the default depth.
        config.loops.default = Some(args.asked);
        config.loops.max = Some(args.asked);
        let kind = only_place(&config).map_err(Error::Usage)?;
        let runtime = NativeRuntime::load(&args.model, &config, kind, &mut |_, _| {});
        let runtime = runtime.map_err(|error| failed(&error))?;
        let shape = Shape {
            n_requests: args.requests,
            depths: vec![args.asked],
            n_prompt: args.n_prompt,
            n_generate: args.n_generate,
            vocab_size: runtime.spec().vocab_size,
        };
        let (model, backend) = (
            runtime.spec().name.clone(),
            runtime.backend_name().to_owned(),
        );
        let executor = ExecutorConfig {
            // The objective alone shall refuse.
            max_queue_depth: args.requests + args.slots as usize * 6,
            ..ExecutorConfig::default()
        };
        let executor = Executor::new(vec![Arc::new(runtime)], executor);
        executor.start().map_err(|error| failed(&error))?;
        Ok(Self {
            args,
            executor,
            shape,
            model,
            backend,
        })
    }

    /// Requests per second and milliseconds per request with all slots busy, at the depth asked.
    fn capacity(&self) -> Result<(f64, f64), Error> {
        let n_requests = self.args.slots as usize * 6;
        let shape = Shape {
            n_requests,
            ..self.shape.clone()
        };
        let items = workload::requests(&shape, 77);
        let began = Instant::now();
        let streams: Result<Vec<_>, _> = items
            .iter()
            .map(|item| self.submit(item, None, None))
            .collect();
        let streams = streams.map_err(|error| Error::other("load-depth", error))?;
        let mut service_ms = Vec::new();
        for stream in streams {
            let outcome = stream.finish();
            let stamps = outcome
                .map_err(|error| Error::other("load-depth", error))?
                .stamps;
            if let (Some(start), Some(end)) = (stamps.dispatched, stamps.completed) {
                service_ms.push(end.at.duration_since(start.at).as_secs_f64() * 1e3);
            }
        }
        let per_second = n_requests as f64 / began.elapsed().as_secs_f64();
        Ok((per_second, median(service_ms)))
    }

    fn submit(
        &self,
        item: &Item,
        min_loops: Option<u32>,
        slo_ttft_ms: Option<u64>,
    ) -> Result<TokenStream, SubmitError> {
        let mut request = GenerationRequest::new(item.prompt.as_slice(), item.n_generate);
        request.loops = Some(item.loops);
        request.min_loops = min_loops;
        request.stop.ignore_eos = true;
        request.sampling.seed = Some(item.seed);
        let options = SubmitOptions {
            slo_ttft_ms,
            ..SubmitOptions::default()
        };
        self.executor.submit_stream(request, options)
    }

    /// One run, after others that bring what admission measures back to the depth asked.
    fn load(
        &self,
        seed: u64,
        per_second: f64,
        (min_loops, slo_ttft_ms): (Option<u32>, u64),
    ) -> Result<Run, Error> {
        self.capacity()?;
        let items = workload::requests(&self.shape, seed);
        let arrivals = workload::arrivals(items.len(), per_second, seed);
        let mut run = Run {
            n_requests: items.len(),
            ..Run::default()
        };
        let began = Instant::now();
        let mut streams = Vec::new();
        for (item, arrival) in items.iter().zip(arrivals) {
            let at = began + Duration::from_secs_f64(arrival);
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            match self.submit(item, min_loops, Some(slo_ttft_ms)) {
                Ok(stream) => streams.push(stream),
                Err(SubmitError::AdmissionRejected { .. } | SubmitError::SloBelowIdle { .. }) => {
                    run.n_refused += 1;
                }
                Err(error) => return Err(Error::other("load-depth", error)),
            }
        }
        for stream in streams {
            run.loops += u64::from(stream.loops().map_or(1, |loops| loops.granted));
            let outcome = stream.finish();
            let outcome = outcome.map_err(|error| Error::other("load-depth", error))?;
            run.n_tokens += u64::from(outcome.usage.completion_tokens);
            let stamps = outcome.stamps;
            let first_token = stamps.first_token;
            let wait = first_token.map(|first| first.at.duration_since(stamps.queued.at));
            match wait {
                Some(wait) if wait <= Duration::from_millis(slo_ttft_ms) => run.n_within += 1,
                _ => run.n_late += 1,
            }
        }
        run.seconds = began.elapsed().as_secs_f64();
        Ok(run)
    }
}

fn summary(load_percent: f64, min_loops: Option<u32>, runs: &[Run]) -> Outcome {
    let over_seeds = |value: fn(&Run) -> f64| median(runs.iter().map(value).collect());
    let share = |value: fn(&Run) -> usize| {
        let share = |run: &Run| value(run) as f64 / run.n_requests as f64;
        median(runs.iter().map(share).collect())
    };
    Outcome {
        load_percent,
        min_loops,
        within_slo: share(|run| run.n_within),
        late: share(|run| run.n_late),
        refused: share(|run| run.n_refused),
        mean_loops: over_seeds(|run| {
            run.loops as f64 / (run.n_requests - run.n_refused).max(1) as f64
        }),
        tokens_per_second: over_seeds(|run| run.n_tokens as f64 / run.seconds),
    }
}

fn print(out: &mut Output, report: &Report) -> Result<(), Error> {
    out.line(&format!(
        "{} on {}: {:.1} requests/s at L = {} with {} slots, {:.0} ms each; first token wanted within {} ms\n\
         {} requests a run, medians of {} runs\n",
        report.model,
        report.backend,
        report.capacity,
        report.asked,
        report.slots,
        report.service_ms,
        report.slo_ttft_ms,
        report.requests,
        report.seeds
    ))?;
    out.line(
        "| load | server | within the objective | late | refused | mean L granted | tok/s |\n\
         |---|---|---|---|---|---|---|",
    )?;
    for each in &report.outcomes {
        let server = match each.min_loops {
            None => "only refuses".to_owned(),
            Some(least) => format!("min_loops = {least}"),
        };
        let [within, late, refused] =
            [each.within_slo, each.late, each.refused].map(|share| share * 100.0);
        out.line(&format!(
            "| {:.0} % | {server} | {within:.0} % | {late:.0} % | {refused:.0} % | {:.1} | {:.0} |",
            each.load_percent, each.mean_loops, each.tokens_per_second
        ))?;
    }
    Ok(())
}
