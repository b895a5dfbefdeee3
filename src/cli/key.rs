//! `tinyloop key new NAME`: a key for a client, shown once, and the lines to configure it.
//!
//! Runs on the main thread. Nothing is written anywhere: the operator pastes the hash, the client gets the
//! secret. What is not here: how keys are checked (`http::auth`).

use super::output::Output;
use crate::error::Error;
use crate::http::auth;

/// Arguments of `tinyloop key`.
#[derive(Clone, Debug, clap::Args)]
pub struct KeyArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: KeyCommand,
}

/// What can be done with keys.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum KeyCommand {
    /// Make a key: its secret on standard output, once, and what to put into the configuration.
    New {
        /// Name of the client: letters, digits, `-`, `_`.
        name: String,
    },
}

/// See the module.
pub fn run(args: &KeyArgs) -> Result<(), Error> {
    let KeyCommand::New { name } = &args.command;
    let is_sound = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if name.is_empty() || !name.bytes().all(is_sound) {
        let text = format!("'{name}' is no name for a key: use letters, digits, '-' and '_'");
        return Err(Error::Usage(text));
    }
    let secret = auth::new_key().map_err(Error::Other)?;
    let hash = auth::hashed(&secret);
    let text = format!(
        "secret, shown this once: {secret}\n\n\
         for the configuration:\n[keys.{name}]\nkey = \"{hash}\"\n\n\
         or a line of the key file:\n{name} {hash}\n"
    );
    let mut output = Output::new();
    output.piece(&text)
}
