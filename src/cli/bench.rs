//! `tinyloop bench`: speed of prompt processing and token generation. (body: being written)
//!
//! Runs on the main thread. What is not here: HTTP (`make load` measures that).

use crate::error::Error;
use std::path::PathBuf;

/// Arguments of `tinyloop bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Model file (GGUF).
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,
    /// Prompt tokens per sequence in the prompt-processing test; 0 leaves the test out.
    #[arg(short = 'p', long, value_name = "TOKENS", default_value_t = 512)]
    pub n_prompt: u32,
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
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Runs the benchmark and writes the result to stdout.
pub fn run(_args: &BenchArgs) -> Result<(), Error> {
    Err(Error::Other("not built yet".to_owned()))
}
