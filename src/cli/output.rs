//! Standard input and output of the subcommands.
//!
//! A closed standard output ends the program well: whoever reads the first line and leaves is
//! served. Results only; progress and errors go to standard error.

use crate::error::Error;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Read, Write};
use std::process::ExitCode;

/// Buffered standard output.
pub struct Output {
    out: BufWriter<io::StdoutLock<'static>>,
}

impl Default for Output {
    fn default() -> Self {
        Self::new()
    }
}

impl Output {
    /// Locks standard output.
    #[must_use]
    pub fn new() -> Self {
        Self {
            out: BufWriter::new(io::stdout().lock()),
        }
    }

    /// Writes a line.
    pub fn line(&mut self, text: &str) -> Result<(), Error> {
        checked(writeln!(self.out, "{text}"))
    }

    /// Writes a piece and shows it at once.
    pub fn piece(&mut self, text: &str) -> Result<(), Error> {
        checked(
            self.out
                .write_all(text.as_bytes())
                .and_then(|()| self.out.flush()),
        )
    }

    /// Writes what is buffered.
    pub fn finish(mut self) -> Result<(), Error> {
        checked(self.out.flush())
    }
}

/// Text of the error that means "standard output is closed"; `exit` reads it as success.
const CLOSED: &str = "standard output was closed";

fn checked(result: io::Result<()>) -> Result<(), Error> {
    result.map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Error::Other(CLOSED.to_owned()),
        _ => Error::other("writing to standard output", error),
    })
}

/// The text given as an argument, or standard input when it is absent or "-".
pub fn read_text(argument: Option<&str>) -> Result<String, Error> {
    if let Some(text) = argument.filter(|text| *text != "-") {
        return Ok(text.to_owned());
    }
    if argument.is_none() && io::stdin().is_terminal() {
        return Err(Error::Usage(
            "no text: give it as an argument, or pipe it into standard input".to_owned(),
        ));
    }
    let mut bytes = Vec::new();
    io::stdin()
        .read_to_end(&mut bytes)
        .map_err(|error| Error::other("standard input", error))?;
    String::from_utf8(bytes)
        .map_err(|error| Error::Other(format!("standard input is not UTF-8: {error}")))
}

/// One line on standard error and the exit code.
#[must_use]
pub fn exit(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::Other(text)) if text == CLOSED => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tinyloop: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
