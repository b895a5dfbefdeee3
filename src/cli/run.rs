//! `tinyloop run`: one prompt, the answer streamed to standard output.
//!
//! Runs on the main thread, through the same executor and engine as the server. What is not
//! here: a chat loop.

use super::load::load_one;
use super::model_args::ModelArgs;
use super::output::{Output, read_text};
use crate::config::{BUILTIN_MODEL, EngineConfig, ModelConfig, ModelSource};
use crate::error::Error;
use crate::pool::LoadedModel;
use crate::request::{FinishReason, GenerationRequest, SamplingParams, TokenId};
use crate::scheduler::{Outcome, StreamEvent, SubmitOptions};
use crate::tokenizer::chat_template::TemplateInput;
use crate::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `tinyloop run`.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// The prompt; read from standard input when absent or "-".
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<String>,
    /// Give the prompt to the model as it is, without its chat template.
    #[arg(long)]
    pub raw: bool,
    /// System message.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Most tokens to generate [default: up to the end of the context].
    #[arg(short = 'n', long, value_name = "TOKENS")]
    pub max_tokens: Option<u32>,
    /// 0 = always the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = in_range(0.0, 2.0))]
    pub temperature: f32,
    /// Keep the K likeliest tokens; 0 = all.
    #[arg(long, value_name = "K", default_value_t = 40)]
    pub top_k: u32,
    /// Keep the likeliest tokens that together have this probability.
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = in_range(0.0, 1.0))]
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the top probability.
    #[arg(long, value_name = "P", default_value_t = 0.05, value_parser = in_range(0.0, 1.0))]
    pub min_p: f32,
    /// Penalty on tokens of the last 64; 1 = off.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = in_range(0.01, 10.0))]
    pub repeat_penalty: f32,
    /// Same seed, same answer.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Text that ends the answer; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the model's end-of-turn token.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Context length in tokens [default: the model's own, at most 8192].
    #[arg(short, long, value_name = "TOKENS")]
    pub ctx_size: Option<u32>,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Tell token counts and speed on standard error.
    #[arg(short, long)]
    pub verbose: bool,
    /// Depth and weights.
    #[command(flatten)]
    pub model_args: ModelArgs,
}

fn in_range(low: f32, high: f32) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync {
    move |text| match text.parse::<f32>() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        Ok(number) => Err(format!("{number} is not between {low} and {high}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Prints the answer.
pub fn run(args: &RunArgs) -> Result<(), Error> {
    let text = read_text(args.prompt.as_deref())?;
    let mut engine = EngineConfig {
        context_length: args.ctx_size,
        threads: args.threads,
        max_sequences: 1,
        ..EngineConfig::default()
    };
    args.model_args.apply(&mut engine);
    let (pool, model) = load_one(&ModelConfig {
        engine,
        ..ModelConfig::new(
            super::serve::name_of(&args.model),
            ModelSource::File(args.model.clone()),
        )
    })?;
    let prompt = prompt_tokens(args, &model, text)?;
    let request = request(args, &model, prompt)?;
    let outcome = stream(&model, request)?;
    if args.verbose {
        report(&outcome);
    }
    pool.shutdown(Duration::ZERO);
    Ok(())
}

fn prompt_tokens(args: &RunArgs, model: &LoadedModel, text: String) -> Result<Vec<TokenId>, Error> {
    let options = EncodeOptions {
        add_special: true,
        parse_special: true,
    };
    let tokenizer = model.tokenizer.as_ref();
    let tokenizer = tokenizer.ok_or_else(|| Error::Other("the model has no vocabulary".into()))?;
    let tokens = if args.raw {
        tokenizer.encode(&text, options)
    } else {
        templated(args, model, tokenizer, &text)?
    };
    if tokens.is_empty() {
        return Err(Error::Usage("the prompt is empty".to_owned()));
    }
    Ok(tokens)
}

fn templated(
    args: &RunArgs,
    model: &LoadedModel,
    tokenizer: &Tokenizer,
    text: &str,
) -> Result<Vec<TokenId>, Error> {
    let template = model.chat_template.as_ref().map_err(|why| {
        Error::Other(format!(
            "no usable chat template ({why}); give --raw to do without"
        ))
    })?;
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": text}));
    let input = TemplateInput {
        messages,
        add_generation_prompt: true,
        ..TemplateInput::default()
    };
    tokenizer
        .encode_chat(template, &input)
        .map_err(|error| Error::other("the chat template", error))
}

fn request(
    args: &RunArgs,
    model: &LoadedModel,
    prompt: Vec<TokenId>,
) -> Result<GenerationRequest, Error> {
    let context = model.context_length;
    let room = context.saturating_sub(prompt.len() as u32);
    if room == 0 {
        return Err(Error::Usage(format!(
            "the prompt has {} tokens and fills the context of {context}; see --ctx-size",
            prompt.len()
        )));
    }
    let mut request = GenerationRequest::new(prompt, args.max_tokens.unwrap_or(room).min(room));
    request.sampling = SamplingParams {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repeat_penalty,
        seed: args.seed,
        ..SamplingParams::default()
    };
    request.stop.strings.clone_from(&args.stop);
    request.stop.ignore_eos = args.ignore_eos;
    Ok(request)
}

fn stream(model: &LoadedModel, request: GenerationRequest) -> Result<Outcome, Error> {
    let mut stream = model
        .executor
        .submit_stream(request, SubmitOptions::default())
        .map_err(|error| Error::Other(error.to_string()))?;
    let mut output = Output::new();
    loop {
        match stream.recv() {
            StreamEvent::Chunk(chunk) => output.piece(&chunk.text)?,
            StreamEvent::TimedOut => {}
            StreamEvent::Failed(error) => return Err(Error::Other(error.to_string())),
            StreamEvent::Finished(outcome) => {
                output.line("")?;
                output.finish()?;
                return Ok(outcome);
            }
        }
    }
}

fn report(outcome: &Outcome) {
    let usage = outcome.usage;
    let ttft = outcome.stamps.time_to_first_token().unwrap_or_default();
    let total = outcome.stamps.total().unwrap_or_default();
    let generating = total.saturating_sub(ttft).as_secs_f64();
    let rate = |tokens: u32, seconds: f64| match seconds > 0.0 {
        true => f64::from(tokens) / seconds,
        false => 0.0,
    };
    let ended = match outcome.finish_reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    };
    eprintln!(
        "prompt: {} tokens, {:.1} tokens/s; answer: {} tokens, {:.1} tokens/s; ended by {ended}",
        usage.prompt_tokens,
        rate(usage.prompt_tokens, ttft.as_secs_f64()),
        usage.completion_tokens,
        rate(usage.completion_tokens.saturating_sub(1), generating),
    );
}
