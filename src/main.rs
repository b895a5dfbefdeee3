//! The `tinyloop` binary: parses the command line, runs it, turns an error into one line and an
//! exit code (0 clean, 2 usage or configuration, 1 anything else).

use clap::Parser;
use std::process::ExitCode;
use tinyloop::cli::{self, Cli};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli::run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tinyloop: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
