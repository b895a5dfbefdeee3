//! `tinyloop top`: a live view of a running server in the terminal.
//!
//! Runs on the main thread: one sample of the management plane, one frame, a pause. A frame is a pure
//! function of two samples (`frame`). Nothing in the terminal has to be put back at the end, so that
//! Ctrl-C needs no care. What is not here: what the numbers mean (`scheduler/metrics`).

mod frame;
mod sample;

use super::admin_client::{AdminArgs, AdminClient};
use super::output::Output;
use crate::error::Error;
use frame::frame;
use sample::Sample;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Cursor home; what the frame does not overwrite is cleared line by line and below it.
const HOME: &str = "\x1b[H";
const CLEAR_LINE_END: &str = "\x1b[K\n";
const CLEAR_BELOW: &str = "\x1b[J";
/// Lines longer than the terminal are cut, not wrapped, while a frame is written.
const NO_WRAP: &str = "\x1b[?7l";
const WRAP: &str = "\x1b[?7h";

/// Arguments of `tinyloop top`.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// Print one frame and end; its rates are over one interval.
    #[arg(long)]
    pub once: bool,
    /// Seconds between two frames.
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1.0)]
    pub interval: f64,
    /// The server.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// Shows frames until it is stopped.
pub fn run(args: &TopArgs) -> Result<(), Error> {
    let interval = Duration::try_from_secs_f64(args.interval).ok();
    let interval = interval.filter(|interval| !interval.is_zero());
    let Some(interval) = interval else {
        let text = format!("--interval {}: it must be above 0 seconds", args.interval);
        return Err(Error::Usage(text));
    };
    let client = AdminClient::new(&args.admin)?;
    let is_live = !args.once && std::io::stdout().is_terminal();
    let mut out = Output::new();
    let started = Instant::now();
    let mut before = Sample::take(&client, started)?;
    if is_live {
        let first = frame(client.base(), None, &before);
        out.piece(&format!("{HOME}\x1b[2J{}", drawn(&first)))?;
    }
    loop {
        std::thread::sleep(interval);
        let now = Sample::take(&client, started)?;
        let text = frame(client.base(), Some(&before), &now);
        match is_live {
            true => out.piece(&drawn(&text))?,
            false => out.piece(&text)?,
        }
        if args.once {
            return out.finish();
        }
        before = now;
    }
}

/// The frame over the one before it.
fn drawn(frame: &str) -> String {
    let lines: String = frame
        .lines()
        .map(|line| format!("{line}{CLEAR_LINE_END}"))
        .collect();
    format!("{NO_WRAP}{HOME}{lines}{CLEAR_BELOW}{WRAP}")
}
