//! Log lines on standard error, text or JSON.

use crate::config::{LogConfig, LogFormat};
use crate::error::Error;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Installs the log for the whole process. A second call is an error of ours and is ignored.
pub fn install(config: &LogConfig) -> Result<(), Error> {
    let filter = EnvFilter::try_new(&config.level).map_err(|error| {
        Error::Usage(format!(
            "log level '{}': {error}; use error, warn, info, debug, trace",
            config.level
        ))
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let installed = match config.format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // Only tests install twice; the first log stays.
    drop(installed);
    Ok(())
}
