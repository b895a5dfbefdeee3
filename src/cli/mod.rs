//! The command line: what can be asked, and which function answers.
//!
//! Runs on the main thread. Each subcommand is one file that holds its arguments and its `run`.
//! Standard output carries results only; progress, logs and errors go to standard error. A closed
//! standard output (`tinyloop run .. | head -1`) is a success. What is not here: what the server
//! does (`server`), what the settings mean (`config`).

pub mod bench;
mod engine_link;
pub mod score;

use crate::error::Error;
use clap::{Parser, Subcommand};

/// LLM inference server: one binary, plain threads.
#[derive(Debug, Parser)]
#[command(name = "tinyloop", version, about, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure prompt processing and token generation.
    Bench(bench::BenchArgs),
    /// Perplexity and per-token log-probabilities of a text file.
    Score(score::ScoreArgs),
}

/// Runs one subcommand.
pub fn run(cli: &Cli) -> Result<(), Error> {
    match &cli.command {
        Command::Bench(args) => bench::run(args),
        Command::Score(args) => score::run(args),
    }
}
