//! Errors by who must act, the exit codes they lead to, and nothing about HTTP status codes
//! (`http/errors.rs` holds that table).
//!
//! Layers have their own typed errors (`format::FormatError`, `model::ModelError`,
//! `scheduler::SubmitError`, `request::RequestError`); this file holds the one that reaches `main`.

/// What ends a subcommand.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line or the configuration is wrong: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Anything else: exit code 1.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// Exit code of the process: 2 for usage and configuration, 1 for everything else.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Other(_) => 1,
        }
    }

    /// Wraps any error as a run-time failure, with what was being done.
    pub fn other(doing: &str, error: impl std::fmt::Display) -> Self {
        Error::Other(format!("{doing}: {error}"))
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::Other(error.to_string())
    }
}
