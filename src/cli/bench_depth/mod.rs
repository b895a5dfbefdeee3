//! `tinyloop bench-depth`: what batching over requests of different depth gives.
//!
//! Four ways of serving the same requests at the same moments with the same slots on the same
//! engine: (a) one after the other, (b1) static batches of one depth run to their end, (b2)
//! continuous batching within each depth in turns, (c) the engine as it is. Every result is
//! compared with that of the request alone. Then matched requests, a short request beside a long
//! deep prompt, and generations beside a long prompt under several bounds on prompt rows. All in
//! process, on the bench's own thread; nothing of HTTP or the scheduler is in the figures.

mod drive;
mod latency;
mod random_model;
mod report;
pub mod slo;
mod workload;

use super::model_args::ModelArgs;
use super::output::Output;
use crate::config::EngineConfig;
use crate::engine::{Engine, EngineParts};
use crate::error::Error;
use crate::format::ModelFile;
use crate::model::{self, LoadOptions, Model, ModelSpec, requantize};
use crate::runtime::device::only_place;
use crate::runtime::native::open_backend;
use drive::{Clock, Driver, Served, Way};
use report::{Matched, Report};
use std::path::PathBuf;
use workload::{Item, Shape};

/// Parts of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Mixed depths under several loads.
    Mix,
    /// Requests of one depth and length.
    Matched,
    /// A short request beside a long deep prompt.
    Interleave,
    /// Generations beside a long prompt.
    PromptRows,
}

/// Arguments of `tinyloop bench-depth`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchDepthArgs {
    /// Model: a GGUF file, or a directory in Hugging Face layout [default: a looped model of 70 million
    /// random parameters].
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// What to measure [default: everything].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    pub only: Vec<Part>,
    /// Depths that requests draw from.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "COUNTS",
        default_value = "1,2,3,4,5,6,7,8"
    )]
    pub depths: Vec<u32>,
    /// Arrivals in per cent of the measured capacity.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "PER_CENT",
        default_value = "25,80,200"
    )]
    pub loads: Vec<f64>,
    /// Requests of a run.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 96)]
    pub requests: usize,
    /// Runs of each kind, each with requests and arrivals of its own.
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    pub seeds: u64,
    /// Requests that may run at once.
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    pub slots: u32,
    /// Mean prompt tokens; requests have from half to one and a half of them.
    #[arg(short = 'p', long, value_name = "TOKENS", default_value_t = 16)]
    pub n_prompt: u32,
    /// Mean tokens to generate, likewise.
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 24)]
    pub n_generate: u32,
    /// Tokens of the long prompts [default: 3000, or what the model's context allows].
    #[arg(long, value_name = "TOKENS")]
    pub long: Option<u32>,
    /// Depth of the long prompt beside which a short request comes.
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    pub long_loops: u32,
    /// Count time by PASS,ROW microseconds per pass and row instead of measuring it: the decisions
    /// alone, without kernels and noise.
    #[arg(long, value_name = "PASS,ROW", value_parser = model_clock)]
    pub cost_us: Option<CostUs>,
    /// Count the processor time of one kernel thread instead of the clock's: for machines that others
    /// use too.
    #[arg(long, conflicts_with = "cost_us", conflicts_with = "threads")]
    pub cpu_time: bool,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Depth and weights.
    #[command(flatten)]
    pub model_args: ModelArgs,
}

/// Microseconds per pass and per row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostUs(f64, f64);

fn model_clock(text: &str) -> Result<CostUs, String> {
    let wrong = || format!("\"{text}\" is not of the form PASS,ROW, like 1450,280");
    let (pass, row) = text.split_once(',').ok_or_else(wrong)?;
    let number = |part: &str| part.trim().parse::<f64>().map_err(|_| wrong());
    Ok(CostUs(number(pass)?, number(row)?))
}

/// Runs the bench and writes the result to stdout. Err when a result differs from that of the
/// request alone.
pub fn run(args: &BenchDepthArgs) -> Result<(), Error> {
    let bench = Bench::new(args)?;
    let mut report = Report {
        clock: match args.cost_us {
            None if args.cpu_time => "processor time of one thread".to_owned(),
            None => "measured".to_owned(),
            Some(CostUs(pass, row)) => format!("{pass} us per pass + {row} us per row"),
        },
        slots: args.slots as usize,
        n_requests: args.requests,
        seeds: args.seeds,
        depths: args.depths.clone(),
        ..Report::default()
    };
    let has = |part: Part| args.only.is_empty() || args.only.contains(&part);
    if has(Part::Mix) || has(Part::Matched) {
        let mut driver = bench.driver_for_requests(&mut report)?;
        if has(Part::Mix) {
            bench.mix(&mut driver, &mut report)?;
        }
        if has(Part::Matched) {
            bench.matched(&mut driver, &mut report)?;
        }
    }
    if has(Part::Interleave) {
        bench.interleave(&mut report)?;
    }
    if has(Part::PromptRows) {
        bench.prompt_rows(&mut report)?;
    }
    let mut out = Output::new();
    if args.json {
        let text = serde_json::to_string_pretty(&report);
        out.line(&text.map_err(|error| Error::other("bench-depth", error))?)?;
    } else {
        report::print(&mut out, &report)?;
    }
    out.finish()?;
    match report.different {
        0 => Ok(()),
        n => Err(Error::Other(format!(
            "{n} of {} results differ from those of the request alone",
            report.compared
        ))),
    }
}

/// Where weights come from.
enum Source {
    File(Box<ModelFile>),
    Random,
}

struct Bench<'a> {
    args: &'a BenchDepthArgs,
    source: Source,
    /// Of the model.
    context_length: u32,
}

/// What an engine must hold.
struct Room {
    /// Tokens of the longest sequence.
    context: u32,
    /// Tokens of all that run at once.
    kv_tokens: u64,
    /// Depth of the deepest.
    deepest: u32,
}

impl<'a> Bench<'a> {
    fn new(args: &'a BenchDepthArgs) -> Result<Self, Error> {
        let counts = [args.requests, args.seeds as usize, args.slots as usize];
        let sizes = [args.n_prompt, args.n_generate, args.long_loops];
        if counts.contains(&0) || sizes.contains(&0) || args.depths.is_empty() {
            return Err(Error::Usage("all counts start at 1".to_owned()));
        }
        if args.depths.contains(&0) || !args.loads.iter().all(|load| *load > 0.0) {
            let text = "--depths start at 1 and --loads are above 0";
            return Err(Error::Usage(text.to_owned()));
        }
        let failed = |error: &dyn std::fmt::Display| Error::other("bench-depth", error);
        let (source, context_length) = match &args.model {
            None => (Source::Random, random_model::CONTEXT_LENGTH),
            Some(path) => {
                let file = model::open(path).map_err(|error| failed(&error))?;
                let spec = ModelSpec::from_gguf(&file).map_err(|error| failed(&error))?;
                (Source::File(Box::new(file)), spec.context_length)
            }
        };
        Ok(Self {
            args,
            source,
            context_length,
        })
    }

    fn deepest(&self) -> u32 {
        self.args.depths.iter().copied().max().unwrap_or(1)
    }

    /// An engine under the clock.
    fn driver(&self, room: &Room, prompt_rows: Option<u32>) -> Result<(Driver, String), Error> {
        let failed = |error: &dyn std::fmt::Display| Error::other("bench-depth", error);
        let threads = match self.args.cpu_time {
            true => Some(1),
            false => self.args.threads,
        };
        let mut config = EngineConfig {
            context_length: Some(room.context.min(self.context_length)),
            max_sequences: self.args.slots.max(8) + 1,
            kv_tokens: Some(room.kv_tokens.max(u64::from(room.context))),
            threads,
            prefix_cache: false,
            ..EngineConfig::default()
        };
        if let Some(rows) = prompt_rows {
            config.prefill_rows_beside_decode = rows;
        }
        self.args.model_args.apply(&mut config);
        if room.deepest > 1 {
            // KV is counted at the default depth.
            config.loops.default = Some(room.deepest);
            config.loops.max = Some(room.deepest);
        }
        let kind = only_place(&config).map_err(Error::Usage)?;
        let mut backend = open_backend(kind, &config).map_err(|error| failed(&error))?;
        let model = match &self.source {
            Source::Random => random_model::load(backend.as_mut(), room.deepest)?,
            Source::File(file) => {
                let options = LoadOptions {
                    loops: config.loops,
                    quantize: config.quantize.map(requantize::dtype_of),
                };
                Model::load_with(file, &options, backend.as_mut(), &mut |_, _| {})
                    .map_err(|error| failed(&error))?
            }
        };
        let name = model.spec.name.clone();
        let engine = Engine::new(EngineParts {
            backend,
            model,
            end_tokens: Vec::new(),
            config,
        });
        let engine = engine.map_err(|error| failed(&error))?;
        let clock = match self.args.cost_us {
            None if self.args.cpu_time => Clock::Processor,
            None => Clock::Wall,
            Some(CostUs(pass_us, row_us)) => Clock::Model { pass_us, row_us },
        };
        Ok((Driver::new(engine, clock), name))
    }

    /// The engine of `mix` and `matched`.
    fn driver_for_requests(&self, report: &mut Report) -> Result<Driver, Error> {
        let context = (self.args.n_prompt + self.args.n_generate) * 3 / 2 + 2;
        let room = Room {
            context,
            kv_tokens: u64::from(context + 16) * u64::from(self.args.slots),
            deepest: self.deepest(),
        };
        let (driver, model) = self.driver(&room, None)?;
        report.model = model;
        report.backend = driver.engine.backend_name();
        Ok(driver)
    }

    fn shape(&self, driver: &Driver) -> Shape {
        Shape {
            n_requests: self.args.requests,
            depths: self.args.depths.clone(),
            n_prompt: self.args.n_prompt,
            n_generate: self.args.n_generate,
            vocab_size: driver.engine.limits().vocab_size,
        }
    }

    /// All ways under all loads.
    fn mix(&self, driver: &mut Driver, report: &mut Report) -> Result<(), Error> {
        let (shape, n_slots) = (self.shape(driver), self.args.slots as usize);
        let workloads: Vec<Vec<Item>> = (0..self.args.seeds)
            .map(|seed| workload::requests(&shape, seed))
            .collect();
        let at_once = vec![0.0; shape.n_requests];
        let n_few = n_slots.min(shape.n_requests);
        driver.serve(Way::DepthWise, &workloads[0][..n_few], &at_once, n_slots)?;
        let mut all_ways = |items: &[Item], arrivals: &[f64]| {
            let ways = Way::ALL.iter();
            ways.map(|way| driver.serve(*way, items, arrivals, n_slots))
                .collect::<Result<Vec<Vec<Served>>, Error>>()
        };
        let mut saturated = Vec::new();
        for items in &workloads {
            saturated.push(all_ways(items, &at_once)?);
        }
        // (a) is each request alone.
        let alone: Vec<&Vec<Served>> = saturated.iter().map(|ways| &ways[0]).collect();
        let capacities = saturated.iter().map(|ways| report::request_rate(&ways[3]));
        report.capacity = report::median(capacities.collect());
        let mut compare = |runs: &[Vec<Vec<Served>>]| {
            for (alone, ways) in alone.iter().zip(runs) {
                for served in &ways[1..] {
                    let pairs = alone.iter().zip(served);
                    report.compared += served.len();
                    report.different += pairs.filter(|(a, b)| a.tokens != b.tokens).count();
                }
            }
        };
        compare(&saturated);
        let mut loads = vec![report::load(None, &saturated)];
        for percent in &self.args.loads {
            let mut runs = Vec::new();
            for (seed, items) in workloads.iter().enumerate() {
                let per_second = report.capacity * percent / 100.0;
                let arrivals = workload::arrivals(items.len(), per_second, seed as u64);
                runs.push(all_ways(items, &arrivals)?);
            }
            compare(&runs);
            loads.push(report::load(Some(*percent), &runs));
        }
        report.loads = loads;
        Ok(())
    }

    /// As many requests of one depth and length as there are slots.
    fn matched(&self, driver: &mut Driver, report: &mut Report) -> Result<(), Error> {
        let (shape, n_slots) = (self.shape(driver), self.args.slots as usize);
        let mut depths = vec![self.args.depths[0], self.deepest()];
        depths.dedup();
        for loops in depths {
            let mut rates = [Vec::new(), Vec::new()];
            for seed in 0..self.args.seeds.max(3) {
                let mut items = workload::requests(&shape, seed);
                items.truncate(n_slots);
                for item in &mut items {
                    item.loops = loops;
                    item.prompt.resize(self.args.n_prompt as usize, 1);
                    item.n_generate = self.args.n_generate;
                }
                let at_once = vec![0.0; items.len()];
                for (rates, way) in rates.iter_mut().zip([Way::Serial, Way::DepthWise]) {
                    let served = driver.serve(way, &items, &at_once, n_slots)?;
                    rates.push(report::token_rate(&served));
                }
            }
            let [serial, batched] = rates;
            report.matched.push(Matched {
                loops,
                n_requests: n_slots.min(shape.n_requests),
                serial_per_second: report::median(serial),
                batched_per_second: report::median(batched),
            });
        }
        Ok(())
    }

    /// A prompt as long as was asked, as the context allows beside `n_generate` tokens.
    fn long_prompt(&self, driver: &Driver, loops: u32, n_generate: u32) -> Item {
        let shape = self.shape(driver);
        let mut item = workload::requests(&shape, 99).swap_remove(0);
        let n_tokens = self.long_tokens() as usize;
        item.prompt = item.prompt.into_iter().cycle().take(n_tokens).collect();
        Item {
            loops,
            n_generate,
            ..item
        }
    }

    fn long_tokens(&self) -> u32 {
        let most = self.context_length.saturating_sub(2).max(1);
        self.args.long.unwrap_or(3000).min(most)
    }

    fn interleave(&self, report: &mut Report) -> Result<(), Error> {
        let long_tokens = self.long_tokens();
        let room = Room {
            context: long_tokens + 2,
            kv_tokens: u64::from(long_tokens) + 256,
            deepest: self.args.long_loops,
        };
        let (mut driver, model) = self.driver(&room, None)?;
        (report.model, report.backend) = (model, driver.engine.backend_name());
        let long = self.long_prompt(&driver, self.args.long_loops, 1);
        let mut short = workload::requests(&self.shape(&driver), 98).swap_remove(0);
        (short.loops, short.n_generate) = (self.args.depths[0], 1);
        report.interleave = Some(latency::interleave(&mut driver, &long, &short)?);
        Ok(())
    }

    /// At the middle one of the depths.
    fn prompt_rows(&self, report: &mut Report) -> Result<(), Error> {
        const N_GENERATIONS: usize = 4;
        let loops = self.args.depths[self.args.depths.len() / 2];
        let context = (self.long_tokens() + 2).max(self.context_length.min(1024));
        for rows_max in [32, 64, 128, 256, 512] {
            let room = Room {
                context,
                kv_tokens: u64::from(context) * (1 + N_GENERATIONS as u64),
                deepest: loops,
            };
            let (mut driver, model) = self.driver(&room, Some(rows_max))?;
            (report.model, report.backend) = (model, driver.engine.backend_name());
            let prompt = self.long_prompt(&driver, loops, 1);
            let mut generations = workload::requests(&self.shape(&driver), 97);
            generations.truncate(N_GENERATIONS);
            for item in &mut generations {
                item.prompt.truncate(4);
                (item.loops, item.n_generate) = (loops, context - 4);
            }
            let found = latency::prompt_rows(&mut driver, &prompt, &generations, rows_max)?;
            report.prompt_rows.push(found);
        }
        Ok(())
    }
}
