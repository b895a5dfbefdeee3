//! The command line: what can be asked, and which function answers.
//!
//! Runs on the main thread. Each subcommand is one file that holds its arguments and its `run`.
//! Standard output carries results only; progress, logs and errors go to standard error. A closed
//! standard output (`tinyloop run .. | head -1`) is a success. What is not here: what the server
//! does (`server`), what the settings mean (`config`).

pub mod admin_client;
pub mod bench;
pub mod bench_depth;
pub mod bench_http;
pub mod bench_share;
pub mod devices;
mod engine_link;
pub mod exit_args;
pub mod inspect;
pub mod key;
pub mod load;
pub mod load_model;
pub mod logging;
pub mod model_args;
pub mod models;
pub mod output;
pub mod progress;
pub mod quantize;
pub mod roofline;
pub mod run;
pub mod score;
mod seconds;
pub mod serve;
pub mod tokenize;
pub mod top;

use crate::error::Error;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// LLM inference server: one binary, plain threads.
#[derive(Debug, Parser)]
#[command(
    name = "tinyloop",
    version,
    about,
    max_term_width = 100,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve models over HTTP (OpenAI-compatible).
    Serve(Box<serve::ServeArgs>),
    /// List the models of a running server.
    Models(models::ModelsArgs),
    /// Load a model of a running server.
    Load(load_model::LoadArgs),
    /// Unload a model of a running server.
    Unload(load_model::UnloadArgs),
    /// Watch a running server: models, queues, tokens per second, memory.
    Top(top::TopArgs),
    /// Answer one prompt on standard output.
    Run(Box<run::RunArgs>),
    /// Measure prompt processing and token generation.
    Bench(bench::BenchArgs),
    /// Measure what the machine can do at best, and how near a model comes.
    Roofline(roofline::RooflineArgs),
    /// Measure what batching over requests of different depth gives.
    BenchDepth(Box<bench_depth::BenchDepthArgs>),
    /// Measure what granting fewer loops gives an overloaded server.
    LoadDepth(Box<bench_depth::slo::LoadDepthArgs>),
    /// Measure how two models share one device.
    BenchShare(bench_share::BenchShareArgs),
    /// Put streaming load on a running server and check every event.
    BenchHttp(bench_http::BenchHttpArgs),
    /// Perplexity and per-token log-probabilities of a text file.
    Score(score::ScoreArgs),
    /// Convert a model into a (smaller) GGUF file.
    Quantize(quantize::QuantizeArgs),
    /// Make a key for a client of a server.
    Key(key::KeyArgs),
    /// List the devices of this machine that models can run on, and why one cannot be used.
    Devices(devices::DevicesArgs),
    /// Show how a text becomes tokens.
    Tokenize(tokenize::TokenizeArgs),
    /// Show what a model file holds and how much memory it needs.
    Inspect(inspect::InspectArgs),
}

/// Parses the command line and runs it; the exit code is 0 (clean), 2 (usage, configuration) or 1.
#[must_use]
pub fn main() -> ExitCode {
    output::exit(run(&Cli::parse()))
}

/// Runs one subcommand.
pub fn run(cli: &Cli) -> Result<(), Error> {
    match &cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Models(args) => models::run(args),
        Command::Load(args) => load_model::load(args),
        Command::Unload(args) => load_model::unload(args),
        Command::Top(args) => top::run(args),
        Command::Run(args) => run::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Roofline(args) => roofline::run(args),
        Command::BenchDepth(args) => bench_depth::run(args),
        Command::LoadDepth(args) => bench_depth::slo::run(args),
        Command::BenchShare(args) => bench_share::run(args),
        Command::BenchHttp(args) => bench_http::run(args),
        Command::Score(args) => score::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Key(args) => key::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Tokenize(args) => tokenize::run(args),
        Command::Inspect(args) => inspect::run(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn flags_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }
}
