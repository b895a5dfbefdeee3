//! `tinyloop tokenize`: text to token ids, to see what a model sees.
//!
//! Runs on the main thread; reads the vocabulary only, not the weights.

use super::output::{Output, read_text};
use crate::config::BUILTIN_MODEL;
use crate::error::Error;
use crate::model;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `tinyloop tokenize`.
#[derive(Clone, Debug, clap::Args)]
pub struct TokenizeArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// The text; read from standard input when absent or "-".
    #[arg(value_name = "TEXT")]
    pub text: Option<String>,
    /// Recognise special tokens written out in the text, like <|im_end|>.
    #[arg(long)]
    pub parse_special: bool,
    /// Leave out the BOS and EOS that the model's rules ask for.
    #[arg(long)]
    pub no_special: bool,
    /// Print one JSON object instead of one line per token.
    #[arg(long)]
    pub json: bool,
}

/// Prints the tokens.
pub fn run(args: &TokenizeArgs) -> Result<(), Error> {
    let text = read_text(args.text.as_deref())?;
    let file = model::open(&args.model).map_err(|error| Error::Other(error.to_string()))?;
    let tokenizer = Tokenizer::from_gguf(&file).map_err(|error| Error::Other(error.to_string()))?;
    let options = EncodeOptions {
        add_special: !args.no_special,
        parse_special: args.parse_special,
    };
    let tokens = tokenizer.encode(&text, options);
    let piece = |token| String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned();
    let mut output = Output::new();
    if args.json {
        let pieces: Vec<String> = tokens.iter().map(|token| piece(*token)).collect();
        let object = json!({"count": tokens.len(), "tokens": tokens, "pieces": pieces});
        output.line(&object.to_string())?;
    } else {
        for token in &tokens {
            output.line(&format!("{token:>7}  {:?}", piece(*token)))?;
        }
    }
    output.finish()
}
