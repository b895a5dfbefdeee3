//! `tinyloop roofline`: what this machine can do at best, what a model asks of it, and how near the
//! engine comes.
//!
//! Two floors under the time of a step follow from the machine's limits: every weight that is used
//! must be read once (bytes), and every row must be multiplied with it (products). The higher one binds.
//! What neither counts costs time as well: attention, norms, quantization of activations, the second
//! product where the engine quantizes twice (`backend/cpu`), barriers, sampling. Runs on the main
//! thread. What is not here: the probes (`backend::cpu::roofline`), the timed tests (`bench`).

use super::bench::{self, BenchArgs, TestResult};
use super::output::Output;
use crate::backend::cpu::roofline::{self, MachineLimits};
use crate::config::BUILTIN_MODEL;
use crate::dtype::DType;
use crate::error::Error;
use crate::format::ModelFile;
use crate::model::{self, ModelSpec, Segment};
use std::path::PathBuf;

/// Buffers that are read, in bytes.
const SIZES: [usize; 6] = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

/// Arguments of `tinyloop roofline`.
#[derive(Clone, Debug, clap::Args)]
pub struct RooflineArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Numbers of sequences that generate at once.
    #[arg(
        long,
        value_name = "COUNTS",
        value_delimiter = ',',
        default_value = "1,8,16"
    )]
    pub parallel: Vec<u32>,
    /// Repetitions of each test; the median is reported.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 3)]
    pub repetitions: u32,
}

/// One kind of weights in a token's way.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    dtype: DType,
    n_out: u64,
    n_in: u64,
    /// How often a token passes it: the loops for the core's weights.
    n_uses: u64,
    /// The head: in a prompt only the last token needs it.
    is_head: bool,
}

/// What a model asks of the machine.
#[derive(Clone, Debug, PartialEq)]
struct Work {
    parts: Vec<Part>,
}

/// Seconds that a step takes at least.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Floors {
    reading_s: f64,
    products_s: f64,
}

impl Floors {
    fn binding_s(self) -> f64 {
        self.reading_s.max(self.products_s)
    }
}

impl Work {
    /// From the file's tensors.
    fn of(file: &ModelFile) -> Result<Self, Error> {
        let failed = |error: &dyn std::fmt::Display| Error::other("roofline", error);
        let spec = ModelSpec::from_gguf(file).map_err(|error| failed(&error))?;
        let plan = spec.plan();
        let has_own_head = file.tensors().iter().any(|t| t.name == "output.weight");
        let mut parts = Vec::new();
        for tensor in file.tensors() {
            let [n_in, n_out] = tensor.dims[..] else {
                continue; // vectors: too small to count
            };
            let is_embedding = tensor.name == "token_embd.weight";
            if is_embedding && has_own_head {
                continue; // a token reads one row of it
            }
            let block = tensor.name.strip_prefix("blk.");
            let block = block.and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
            let is_core = block.is_some_and(|block| plan.segment_of(block) == Segment::Core)
                || tensor.name.starts_with("loop_");
            parts.push(Part {
                dtype: tensor.dtype,
                n_out,
                n_in,
                n_uses: if is_core {
                    u64::from(plan.default_loops)
                } else {
                    1
                },
                is_head: is_embedding || tensor.name == "output.weight",
            });
        }
        Ok(Self { parts })
    }

    /// Bytes of weights in memory, and how many of them a step reads.
    fn bytes(&self, limits: &MachineLimits) -> (u64, u64) {
        let bytes = |part: &Part| limits.weight_bytes(part.dtype, part.n_out, part.n_in);
        let held = self.parts.iter().map(bytes).sum();
        let read = self.parts.iter().map(|part| part.n_uses * bytes(part));
        (held, read.sum())
    }

    /// Multiply-adds per token.
    fn products(&self) -> u64 {
        let products = |part: &Part| part.n_uses * part.n_out * part.n_in;
        self.parts.iter().map(products).sum()
    }

    /// Of a step of `n_rows` rows of which `n_heads` want logits.
    fn floors(&self, limits: &MachineLimits, n_rows: u32, n_heads: u32) -> Floors {
        let (held_bytes, read_bytes) = self.bytes(limits);
        let seconds = |part: &Part| {
            let n_rows = if part.is_head { n_heads } else { n_rows };
            let n_products = part.n_uses * part.n_out * part.n_in * u64::from(n_rows);
            n_products as f64 / limits.products_per_s(part.dtype)
        };
        Floors {
            reading_s: read_bytes as f64 / limits.bytes_per_s(held_bytes),
            products_s: self.parts.iter().map(seconds).sum(),
        }
    }
}

/// Measures and prints.
pub fn run(args: &RooflineArgs) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::other("roofline", error);
    let file = model::open(&args.model).map_err(|error| failed(&error))?;
    let work = Work::of(&file)?;
    drop(file);
    let mut out = Output::new();
    let limits = roofline::measure(args.threads, &SIZES).map_err(|error| failed(&error))?;
    for line in machine_lines(&limits) {
        out.line(&line)?;
    }
    let mut bench_args = BenchArgs::of_model(args.model.clone());
    bench_args.threads = args.threads;
    bench_args.parallel.clone_from(&args.parallel);
    bench_args.repetitions = args.repetitions;
    let report = bench::measure_all(&bench_args)?;
    for line in model_lines(
        &args.model.display().to_string(),
        &work,
        &limits,
        &report.results,
    ) {
        out.line(&line)?;
    }
    out.finish()
}

fn machine_lines(limits: &MachineLimits) -> Vec<String> {
    let mut lines = vec![
        format!(
            "{} on {} threads; rates are the best seen",
            limits.path, limits.n_threads
        ),
        String::new(),
    ];
    let mut counts: Vec<usize> = limits.reads.iter().map(|read| read.n_threads).collect();
    counts.dedup();
    let heads: String = counts.iter().map(|n| format!(" {n:>3} thr. |")).collect();
    lines.push(format!("| read, GB/s | {heads}"));
    lines.push(format!(
        "| ---------- | {}",
        " -------- |".repeat(counts.len())
    ));
    for n_bytes in SIZES {
        let of = |n_threads: &usize| {
            let found = limits
                .reads
                .iter()
                .find(|read| read.n_bytes == n_bytes && read.n_threads == *n_threads);
            found.map_or(" no memory |".to_owned(), |read| {
                format!(" {:8.1} |", read.bytes_per_s / 1e9)
            })
        };
        let cells: String = counts.iter().map(of).collect();
        lines.push(format!("| {:>7} MB | {cells}", n_bytes >> 20));
    }
    lines.push(String::new());
    for (name, rate) in [
        (
            "4-bit x int8, from the first-level cache",
            limits.dot_u4_per_s,
        ),
        (
            "8-bit x int8, from the first-level cache",
            limits.dot_s8_per_s,
        ),
        ("f32, in registers", limits.multiply_add_per_s),
    ] {
        lines.push(format!("{name:<42} {:8.1} G multiply-adds/s", rate / 1e9));
    }
    lines
}

fn model_lines(
    name: &str,
    work: &Work,
    limits: &MachineLimits,
    results: &[TestResult],
) -> Vec<String> {
    let (held_bytes, read_bytes) = work.bytes(limits);
    let mut lines = vec![
        String::new(),
        format!(
            "{name}: {:.1} MB of weights, {:.1} MB read and {:.1} M multiply-adds a token",
            held_bytes as f64 / 1e6,
            read_bytes as f64 / 1e6,
            work.products() as f64 / 1e6
        ),
        String::new(),
        "| test     | parallel | tok/s seen | reading alone | products alone | of the lower |"
            .into(),
        "| -------- | -------- | ---------- | ------------- | -------------- | ------------ |"
            .into(),
    ];
    for result in results {
        let (n_rows, n_heads) = match result.test.strip_prefix("pp") {
            Some(n_prompt) => (n_prompt.parse().unwrap_or(1), 1),
            None => (result.parallel, result.parallel),
        };
        let floors = work.floors(limits, n_rows, n_heads);
        let n_rows = f64::from(n_rows);
        lines.push(format!(
            "| {:8} | {:8} | {:10.1} | {:13.1} | {:14.1} | {:10.0} % |",
            result.test,
            result.parallel,
            result.tokens_per_second,
            n_rows / floors.reading_s,
            n_rows / floors.products_s,
            100.0 * result.tokens_per_second * floors.binding_s() / n_rows
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Path;
    use crate::backend::cpu::roofline::ReadRate;

    fn limits() -> MachineLimits {
        let read = |n_bytes, bytes_per_s| ReadRate {
            n_threads: 2,
            n_bytes,
            bytes_per_s,
        };
        MachineLimits {
            path: Path::Scalar,
            n_threads: 2,
            reads: vec![read(1000, 1e6), read(100_000, 1e5)],
            dot_u4_per_s: 4e6,
            dot_s8_per_s: 2e6,
            multiply_add_per_s: 1e6,
        }
    }

    #[test]
    fn loops_repeat_the_core_and_prompts_need_one_head() {
        let part = |dtype, n_out, n_uses, is_head| Part {
            dtype,
            n_out,
            n_in: 32,
            n_uses,
            is_head,
        };
        let work = Work {
            parts: vec![
                part(DType::Q4_0, 64, 3, false), // 64 * 18 bytes
                part(DType::Q8_0, 32, 1, true),  // 32 * 34 bytes
            ],
        };
        assert_eq!(work.products(), 64 * 32 * 3 + 32 * 32);
        let (held, read) = work.bytes(&limits());
        assert_eq!((held, read), (64 * 18 + 32 * 34, 3 * 64 * 18 + 32 * 34));
        let one = work.floors(&limits(), 1, 1);
        assert_eq!(one.reading_s, read as f64 / 1e5); // 2240 bytes do not fit the small buffer
        assert_eq!(one.products_s, 6144.0 / 4e6 + 1024.0 / 2e6);
        assert_eq!(one.binding_s(), one.reading_s);
        let prompt = work.floors(&limits(), 1000, 1);
        assert_eq!(prompt.products_s, 6_144_000.0 / 4e6 + 1024.0 / 2e6);
        assert_eq!(prompt.binding_s(), prompt.products_s);
    }

    #[test]
    fn the_work_of_a_file_counts_a_tied_head_and_every_loop() {
        let file = model::open(BUILTIN_MODEL.as_ref()).expect("it is inside the program");
        let work = Work::of(&file).expect("a known model");
        let heads: Vec<&Part> = work.parts.iter().filter(|part| part.is_head).collect();
        assert_eq!(heads.len(), 1);
        assert_eq!(heads[0].n_uses, 1);
        assert!(work.parts.iter().any(|part| part.n_uses > 1));
    }
}
