//! `tinyloop bench-share`: whether two models on one device get their shares, and what sharing costs.
//!
//! The same model is loaded twice, each with an engine of its own. Measured are: a turn at the device without
//! anybody else; one model alone, without a seat and with one while the other is loaded and idle; both under
//! load with weights; both under load without any arbiter, fighting for the cores. Machines are noisy: alone
//! and beside an idle model are measured in turns, and the better of each counts. What is not here: HTTP and
//! the scheduler.

use super::engine_link::{Submitted, submit};
use super::output::Output;
use crate::config::{BUILTIN_MODEL, EngineConfig};
use crate::engine::arbiter::{DeviceArbiter, DeviceShare, Seat};
use crate::error::Error;
use crate::request::{GenerationEvent, GenerationRequest, SamplingParams, random_u64};
use crate::runtime::Runtime;
use crate::runtime::native::{BackendKind, NativeRuntime, Place};
use serde::Serialize;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Tokens of each answer.
const ANSWER_TOKENS: u32 = 32;
const PROMPT_TOKENS: usize = 8;
/// Measurements alone and beside an idle model, of each.
const ROUNDS: u32 = 3;
/// Turns whose cost is measured.
const TURNS: u32 = 200_000;

/// Arguments of `tinyloop bench-share`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchShareArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// Weights of the two models.
    #[arg(
        long,
        value_name = "WEIGHTS",
        value_delimiter = ',',
        default_value = "3,1"
    )]
    pub weights: Vec<u32>,
    /// Sequences that each model generates at once.
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    pub parallel: u32,
    /// Length of each measurement in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 4.0)]
    pub seconds: f64,
    /// Kernel threads of each model [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Print one JSON object instead of lines.
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Report {
    weights: [u32; 2],
    /// One turn, begun and ended, with the device to itself.
    turn_ns: f64,
    /// Tokens per second of one model without a seat.
    alone: f64,
    /// With a seat, beside an idle second model.
    beside_idle: f64,
    /// Tokens per second of both with seats, and the device time that each had.
    shared: [f64; 2],
    device_seconds: [f64; 2],
    /// Of the device times.
    ratio: f64,
    /// Tokens per second of both without an arbiter.
    fighting: [f64; 2],
}

/// Runs the measurements.
///
/// # Errors
/// When the model cannot be loaded, or the weights are not two.
pub fn run(args: &BenchShareArgs) -> Result<(), Error> {
    let &[first, second] = args.weights.as_slice() else {
        let text = format!("--weights names {} weights, not two", args.weights.len());
        return Err(Error::Usage(text));
    };
    let report = measure(args, [first, second])?;
    let mut output = Output::new();
    if args.json {
        let text = serde_json::to_string(&report).map_err(|e| Error::other("bench-share", e))?;
        return output.line(&text);
    }
    lines(&report).iter().try_for_each(|line| output.line(line))
}

fn lines(report: &Report) -> [String; 6] {
    let [a, b] = report.weights;
    let [tokens_a, tokens_b] = report.shared;
    let [seconds_a, seconds_b] = report.device_seconds;
    let [fight_a, fight_b] = report.fighting;
    [
        format!(
            "a turn with the device to itself   {:8.0} ns",
            report.turn_ns
        ),
        format!(
            "one model alone, no arbiter        {:8.1} tok/s",
            report.alone
        ),
        format!(
            "the same beside an idle model      {:8.1} tok/s   ratio {:.3}",
            report.beside_idle,
            report.beside_idle / report.alone
        ),
        format!(
            "both under load, weights {a}:{b}       {tokens_a:8.1} and {tokens_b:.1} tok/s, {:.1} together",
            tokens_a + tokens_b
        ),
        format!(
            "  device time                      {seconds_a:8.2} and {seconds_b:.2} s   ratio {:.3}, wanted {:.3}",
            report.ratio,
            f64::from(a) / f64::from(b.max(1))
        ),
        format!(
            "both under load without arbiter    {fight_a:8.1} and {fight_b:.1} tok/s, {:.1} together",
            fight_a + fight_b
        ),
    ]
}

fn measure(args: &BenchShareArgs, weights: [u32; 2]) -> Result<Report, Error> {
    let arbiter = DeviceArbiter::new();
    let turn_ns = cost_of_a_turn(arbiter.share(1).seat());
    let shares = weights.map(|weight| arbiter.share(weight));
    let free = [load(args, None)?, load(args, None)?];
    let seated = [
        load(args, Some(shares[0].seat()))?,
        load(args, Some(shares[1].seat()))?,
    ];
    let (mut alone, mut beside_idle) = (0.0, 0.0);
    for _ in 0..ROUNDS {
        let [rate] = rates(args, [&free[0]], || {})?;
        alone = f64::max(alone, rate);
        let [rate] = rates(args, [&seated[0]], || {})?;
        beside_idle = f64::max(beside_idle, rate);
    }
    let used = |share: &DeviceShare| share.used().as_secs_f64();
    let before = shares.each_ref().map(used);
    let mut after = before;
    let shared = rates(args, [&seated[0], &seated[1]], || {
        after = shares.each_ref().map(used);
    })?;
    let device_seconds = [after[0] - before[0], after[1] - before[1]];
    let fighting = rates(args, [&free[0], &free[1]], || {})?;
    for runtime in free.iter().chain(&seated) {
        runtime.shutdown();
    }
    Ok(Report {
        weights,
        turn_ns,
        alone,
        beside_idle,
        shared,
        device_seconds,
        ratio: device_seconds[0] / device_seconds[1],
        fighting,
    })
}

fn cost_of_a_turn(mut seat: Seat) -> f64 {
    let began = Instant::now();
    for _ in 0..TURNS {
        seat.begin();
        seat.end(true);
    }
    began.elapsed().as_secs_f64() * 1e9 / f64::from(TURNS)
}

fn load(args: &BenchShareArgs, seat: Option<Seat>) -> Result<NativeRuntime, Error> {
    let config = EngineConfig {
        max_sequences: args.parallel.max(1),
        threads: args.threads,
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let place = Place {
        kind: BackendKind::Cpu,
        seat,
    };
    NativeRuntime::load(&args.model, &config, place, &mut |_, _| {})
        .map_err(|error| Error::other("bench-share", error))
}

/// Tokens per second of each model while all of them are under load; `at_end` is called when that ends,
/// while answers are still being finished.
fn rates<const N: usize>(
    args: &BenchShareArgs,
    runtimes: [&NativeRuntime; N],
    at_end: impl FnOnce(),
) -> Result<[f64; N], Error> {
    let ends = Instant::now() + Duration::from_secs_f64(args.seconds.clamp(0.1, 600.0));
    let n_tokens = std::thread::scope(|scope| {
        let drivers = runtimes.map(|runtime| {
            std::thread::Builder::new()
                .name("load".to_owned())
                .spawn_scoped(scope, move || keep_busy(args, runtime, ends))
        });
        std::thread::sleep(ends.saturating_duration_since(Instant::now()));
        at_end();
        drivers.map(|driver| {
            let driver = driver.map_err(|error| Error::other("a thread", error))?;
            let ended = driver.join();
            ended.unwrap_or_else(|_| Err(Error::Other("a load thread failed".to_owned())))
        })
    });
    let mut found = [0.0; N];
    for (rate, n_tokens) in found.iter_mut().zip(n_tokens) {
        *rate = n_tokens? as f64 / args.seconds;
    }
    Ok(found)
}

/// Keeps a model's sequences generating until `ends`; returns the tokens that came before that.
fn keep_busy(args: &BenchShareArgs, runtime: &NativeRuntime, ends: Instant) -> Result<u64, Error> {
    let mut running: VecDeque<Submitted> = VecDeque::new();
    let mut n_tokens = 0;
    loop {
        while Instant::now() < ends && running.len() < args.parallel.max(1) as usize {
            running.push_back(submit(runtime, request(runtime.spec().vocab_size)));
        }
        let Some(oldest) = running.pop_front() else {
            return Ok(n_tokens);
        };
        let events = oldest.wait_to_end()?;
        let tokens = events.iter().filter(|event| {
            event.at < ends && matches!(event.event, GenerationEvent::Token { .. })
        });
        n_tokens += tokens.count() as u64;
    }
}

fn request(vocab_size: u32) -> GenerationRequest {
    let token = |salt: usize| (random_u64(salt as u64) % u64::from(vocab_size.max(1))) as u32;
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(token).collect();
    let mut request = GenerationRequest::new(prompt, ANSWER_TOKENS);
    request.sampling = SamplingParams::greedy();
    request.stop.ignore_eos = true;
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_stand_beside_what_was_wanted() {
        let report = Report {
            weights: [2, 1],
            turn_ns: 80.0,
            alone: 100.0,
            beside_idle: 99.0,
            shared: [66.0, 33.0],
            device_seconds: [2.0, 1.0],
            ratio: 2.0,
            fighting: [40.0, 40.0],
        };
        let lines = lines(&report);
        assert!(lines[2].ends_with("ratio 0.990"), "{lines:?}");
        assert!(lines[4].ends_with("ratio 2.000, wanted 2.000"), "{lines:?}");
        let args = BenchShareArgs {
            model: BUILTIN_MODEL.into(),
            weights: vec![1, 2, 3],
            parallel: 1,
            seconds: 1.0,
            threads: None,
            json: false,
        };
        assert!(matches!(run(&args), Err(Error::Usage(_))));
    }
}
