//! `tinyloop score`: perplexity and per-token log-probabilities of a text. (body: being written)
//!
//! Runs on the main thread.

use crate::error::Error;
use std::path::PathBuf;

/// Which kernels score the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ScoreBackend {
    /// The fast kernels that `serve` uses.
    Cpu,
    /// The plain f32 reference: slow, and the yardstick.
    Reference,
}

/// Arguments of `tinyloop score`.
#[derive(Clone, Debug, clap::Args)]
pub struct ScoreArgs {
    /// Model file (GGUF).
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,
    /// Text to score, UTF-8.
    #[arg(value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens of a window; its second half is scored.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub window: u32,
    /// Which kernels run it.
    #[arg(long, value_enum, default_value_t = ScoreBackend::Cpu)]
    pub backend: ScoreBackend,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Print one JSON object with every token instead of a summary.
    #[arg(long)]
    pub json: bool,
}

/// Scores the text and writes the result to stdout.
pub fn run(_args: &ScoreArgs) -> Result<(), Error> {
    Err(Error::Other("not built yet".to_owned()))
}
