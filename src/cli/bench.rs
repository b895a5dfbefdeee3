//! `tinyloop bench`: speed of prompt processing and token generation, engine included, HTTP not.
//!
//! Runs on the main thread; the engine runs on its own. Each test is repeated and the median is
//! reported with the extremes, since machines are shared and noisy. Prompts are random tokens,
//! new ones each time (or pieces of a text, where what is computed depends on what it says), and
//! prefix reuse is off, so no cache flatters. "Outside passes" is the
//! engine's own time per step, beside the model's kernels. What is not here: HTTP
//! (`make load` measures that) and peers (`make bench` sets both side by side).

use super::engine_link::{EventAt, submit};
use super::exit_args::ExitArgs;
use super::model_args::ModelArgs;
use super::output::Output;
use crate::config::{BUILTIN_MODEL, EngineConfig};
use crate::constraint::ConstraintSource;
use crate::error::Error;
use crate::model::{self, ModelSpec};
use crate::request::{GenerationEvent, GenerationRequest, SamplingParams, TokenId, random_u64};
use crate::runtime::Runtime;
use crate::runtime::device::only_place;
use crate::runtime::native::NativeRuntime;
use crate::tokenizer::{EncodeOptions, GrammarSpec, Grammars};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of `tinyloop bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// Prompt tokens per sequence in the prompt-processing test; 0 leaves the test out [default: 512,
    /// or what the model's context allows].
    #[arg(short = 'p', long, value_name = "TOKENS")]
    pub n_prompt: Option<u32>,
    /// Tokens to generate per sequence in the generation test; 0 leaves the test out.
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 128)]
    pub n_generate: u32,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Numbers of sequences that generate at once.
    #[arg(
        long,
        value_name = "COUNTS",
        value_delimiter = ',',
        default_value = "1,2,4,8,16"
    )]
    pub parallel: Vec<u32>,
    /// Repetitions of each test; the median is reported.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 3)]
    pub repetitions: u32,
    /// Tokens already in the context of each sequence before the clock starts.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub depth: u32,
    /// Take prompts from this text instead of random tokens: early exit depends on what it reads.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Let every answer follow the JSON schema or the grammar in this file: what masking costs.
    #[arg(long, value_name = "FILE")]
    pub grammar: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Depth and weights.
    #[command(flatten)]
    pub model_args: ModelArgs,
    /// Early exit.
    #[command(flatten)]
    pub exit_args: ExitArgs,
}

impl BenchArgs {
    /// The usual tests of a model.
    pub(super) fn of_model(model: PathBuf) -> Self {
        Self {
            model,
            n_prompt: None,
            n_generate: 128,
            threads: None,
            parallel: vec![1],
            repetitions: 3,
            depth: 0,
            text: None,
            grammar: None,
            json: false,
            model_args: ModelArgs::default(),
            exit_args: ExitArgs::default(),
        }
    }
}

/// Where requests come from.
struct Requests<'a> {
    runtime: &'a NativeRuntime,
    args: &'a BenchArgs,
    /// Tokens of `--text`; empty without it.
    text: Vec<TokenId>,
    /// Of `--grammar`.
    constraint: Option<Arc<dyn ConstraintSource>>,
}

/// One test: its name like llama-bench's (`pp512`, `tg128`), and tokens per second.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TestResult {
    pub(super) test: String,
    pub(super) parallel: u32,
    depth: u32,
    pub(super) tokens_per_second: f64,
    min: f64,
    max: f64,
    /// Part of the engine's step time spent outside the model's passes: planning, sampling, sending,
    /// bookkeeping. 0.01 = 1 %.
    overhead_share: f64,
    /// The same per step, in microseconds.
    overhead_us_per_step: f64,
}

/// Where the engine's time went during a test.
#[derive(Clone, Copy)]
struct StepTimes {
    steps: Duration,
    passes: Duration,
    n_steps: u64,
}

impl StepTimes {
    fn now(runtime: &NativeRuntime) -> Self {
        let status = runtime.status();
        Self {
            steps: status.time_in_steps,
            passes: status.time_in_passes,
            n_steps: status.quanta,
        }
    }

    /// `(share, microseconds per step)` outside passes since `before`.
    fn overhead_since(self, before: Self) -> (f64, f64) {
        let steps = self.steps.saturating_sub(before.steps).as_secs_f64();
        let passes = self.passes.saturating_sub(before.passes).as_secs_f64();
        let outside = (steps - passes).max(0.0);
        let n_steps = self.n_steps.saturating_sub(before.n_steps).max(1);
        (outside / steps.max(1e-9), outside * 1e6 / n_steps as f64)
    }
}

/// Tokens of a prompt that is as long as asked, or as the model allows where nobody asked.
fn n_prompt(args: &BenchArgs) -> Result<u32, Error> {
    if let Some(n_prompt) = args.n_prompt {
        return Ok(n_prompt);
    }
    let failed = |error: &dyn std::fmt::Display| Error::other("bench", error);
    let file = model::open(&args.model).map_err(|error| failed(&error))?;
    let spec = ModelSpec::from_gguf(&file).map_err(|error| failed(&error))?;
    let room = spec.context_length.saturating_sub(args.depth);
    Ok(room.saturating_sub(2).min(512))
}

/// Everything that `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    model: String,
    backend: String,
    load_seconds: f64,
    repetitions: u32,
    pub(super) results: Vec<TestResult>,
}

/// Runs the benchmark and writes the result to stdout.
pub fn run(args: &BenchArgs) -> Result<(), Error> {
    write_report(args, &measure_all(args)?)
}

/// Runs all tests that the arguments ask for.
pub(super) fn measure_all(args: &BenchArgs) -> Result<Report, Error> {
    let most = args.parallel.iter().copied().max().unwrap_or(1);
    if args.repetitions == 0 || args.parallel.contains(&0) {
        return Err(Error::Usage(
            "--repetitions and --parallel start at 1".to_owned(),
        ));
    }
    let n_prompt = n_prompt(args)?;
    let per_sequence = args
        .depth
        .checked_add(n_prompt.max(args.n_generate))
        .and_then(|n_tokens| n_tokens.checked_add(2 + 32))
        .ok_or_else(|| Error::Usage("--depth, -p and -n are too long together".to_owned()))?
        - 32;
    let mut config = EngineConfig {
        context_length: Some(per_sequence),
        max_sequences: most,
        kv_tokens: Some(u64::from(per_sequence + 32) * u64::from(most)),
        threads: args.threads,
        ..EngineConfig::default()
    };
    args.model_args.apply(&mut config);
    let start = Instant::now();
    let kind = only_place(&config).map_err(Error::Usage)?;
    let runtime = NativeRuntime::load(&args.model, &config, kind, &mut |_, _| {})
        .map_err(|error| Error::other("bench", error))?;
    let load_seconds = start.elapsed().as_secs_f64();
    let requests = Requests::new(&runtime, args)?;
    let mut results = Vec::new();
    if n_prompt > 0 {
        let name = format!("pp{n_prompt}");
        results.push(measure(&runtime, args, name, 1, || {
            prompt_rate(&requests, n_prompt)
        })?);
    }
    if args.n_generate > 0 {
        for &parallel in &args.parallel {
            let name = format!("tg{}", args.n_generate);
            results.push(measure(&runtime, args, name, parallel, || {
                generation_rate(&requests, parallel)
            })?);
        }
    }
    let report = Report {
        model: args.model.display().to_string(),
        backend: runtime.backend_name().to_owned(),
        load_seconds,
        repetitions: args.repetitions,
        results,
    };
    runtime.shutdown();
    Ok(report)
}

/// Repeats a test after one unmeasured run.
fn measure(
    runtime: &NativeRuntime,
    args: &BenchArgs,
    test: String,
    parallel: u32,
    mut rate: impl FnMut() -> Result<f64, Error>,
) -> Result<TestResult, Error> {
    rate()?;
    let before = StepTimes::now(runtime);
    let mut rates = (0..args.repetitions)
        .map(|_| rate())
        .collect::<Result<Vec<f64>, Error>>()?;
    let (overhead_share, overhead_us_per_step) = StepTimes::now(runtime).overhead_since(before);
    rates.sort_by(f64::total_cmp);
    Ok(TestResult {
        test,
        parallel,
        depth: args.depth,
        tokens_per_second: rates[rates.len() / 2],
        min: rates[0],
        max: rates[rates.len() - 1],
        overhead_share,
        overhead_us_per_step,
    })
}

impl<'a> Requests<'a> {
    fn new(runtime: &'a NativeRuntime, args: &'a BenchArgs) -> Result<Self, Error> {
        let mut text = Vec::new();
        if let (Some(path), Some(tokenizer)) = (&args.text, runtime.tokenizer()) {
            let read = std::fs::read_to_string(path)
                .map_err(|error| Error::other(&path.display().to_string(), error))?;
            let options = EncodeOptions {
                add_special: false,
                parse_special: false,
            };
            text = tokenizer.encode(&read, options);
            if text.is_empty() {
                return Err(Error::Usage(format!("{}: holds no text", path.display())));
            }
        }
        Ok(Self {
            runtime,
            args,
            text,
            constraint: constraint(runtime, args.grammar.as_deref())?,
        })
    }

    /// A request that runs to its last token and reuses nothing.
    fn next(&self, n_prompt: u32, n_generate: u32) -> GenerationRequest {
        let random =
            |salt: u32, below: usize| (random_u64(u64::from(salt)) % below as u64) as usize;
        let n_known = self
            .runtime
            .tokenizer()
            .map_or(256, |known| known.vocab_size());
        let prompt: Vec<TokenId> = match self.text.len().checked_sub(n_prompt as usize) {
            Some(n_starts) if !self.text.is_empty() => {
                let start = random(0, n_starts + 1);
                self.text[start..start + n_prompt as usize].to_vec()
            }
            _ => (0..n_prompt)
                .map(|i| random(i, n_known) as TokenId)
                .collect(),
        };
        let mut request = GenerationRequest::new(prompt, n_generate);
        request.sampling = SamplingParams::greedy();
        request.stop.ignore_eos = true;
        request.reuse_prefix = false;
        request.adaptive = self.args.exit_args.adaptive;
        request.constraint.clone_from(&self.constraint);
        request
    }
}

/// The rules in a file: a JSON schema if it is JSON, else a grammar.
fn constraint(
    runtime: &NativeRuntime,
    file: Option<&Path>,
) -> Result<Option<Arc<dyn ConstraintSource>>, Error> {
    let (Some(path), Some(tokenizer)) = (file, runtime.tokenizer()) else {
        return Ok(None);
    };
    let failed = |error: &dyn std::fmt::Display| Error::other(&path.display().to_string(), error);
    let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
    let spec = match serde_json::from_str(&text) {
        Ok(schema) => GrammarSpec::JsonSchema(schema),
        Err(_) => GrammarSpec::ContextFree(text),
    };
    let compiled = Grammars::new(tokenizer).compile(&spec);
    compiled.map(Some).map_err(|error| failed(&error))
}

/// Prompt tokens per second up to the first generated token. With `--depth` the prompt is longer
/// by that much and the time of a prompt of `depth` tokens is taken off.
fn prompt_rate(requests: &Requests<'_>, n_prompt: u32) -> Result<f64, Error> {
    let args = requests.args;
    let timed = |n_prompt: u32| -> Result<Duration, Error> {
        let start = Instant::now();
        let events = submit(requests.runtime, requests.next(n_prompt, 1));
        events.wait_to_end()?;
        Ok(start.elapsed())
    };
    let before = if args.depth > 0 {
        timed(args.depth)?
    } else {
        Duration::ZERO
    };
    let whole = timed(args.depth + n_prompt)?;
    Ok(f64::from(n_prompt) / whole.saturating_sub(before).as_secs_f64().max(1e-9))
}

/// Generated tokens per second over all sequences, from the moment when the last of them has its
/// first token to the moment when the first of them has its last: all run all the time.
fn generation_rate(requests: &Requests<'_>, parallel: u32) -> Result<f64, Error> {
    let (n_prompt, n_generate) = (requests.args.depth + 1, requests.args.n_generate);
    let jobs: Vec<_> = (0..parallel)
        .map(|_| submit(requests.runtime, requests.next(n_prompt, n_generate)))
        .collect();
    let mut token_times = Vec::with_capacity(jobs.len());
    for job in jobs {
        let is_token = |event: &EventAt| matches!(event.event, GenerationEvent::Token { .. });
        let events = job.wait_to_end()?;
        token_times.push(
            events
                .iter()
                .filter(|e| is_token(e))
                .map(|e| e.at)
                .collect::<Vec<Instant>>(),
        );
    }
    let all_started = token_times.iter().filter_map(|times| times.first()).max();
    let first_ended = token_times.iter().filter_map(|times| times.last()).min();
    let (Some(&from), Some(&to)) = (all_started, first_ended) else {
        return Err(Error::Other("bench: a sequence gave no token".to_owned()));
    };
    let counted = token_times
        .iter()
        .flatten()
        .filter(|at| **at > from && **at <= to)
        .count();
    Ok(counted as f64 / to.saturating_duration_since(from).as_secs_f64().max(1e-9))
}

fn write_report(args: &BenchArgs, report: &Report) -> Result<(), Error> {
    let mut out = Output::new();
    if args.json {
        let text =
            serde_json::to_string_pretty(report).map_err(|error| Error::other("bench", error))?;
        out.line(&text)?;
        return out.finish();
    }
    out.line(&format!(
        "{} on {}, loaded in {:.2} s",
        report.model, report.backend, report.load_seconds
    ))?;
    out.line(&format!("median of {} repetitions\n", report.repetitions))?;
    out.line(
        "| test     | parallel | depth |     tok/s |       min |       max | outside passes     |",
    )?;
    out.line(
        "| -------- | -------- | ----- | --------- | --------- | --------- | ------------------ |",
    )?;
    for r in &report.results {
        out.line(&format!(
            "| {:8} | {:8} | {:5} | {:9.1} | {:9.1} | {:9.1} | {:5.2} % {:7.1} us |",
            r.test,
            r.parallel,
            r.depth,
            r.tokens_per_second,
            r.min,
            r.max,
            r.overhead_share * 100.0,
            r.overhead_us_per_step
        ))?;
    }
    out.finish()
}
