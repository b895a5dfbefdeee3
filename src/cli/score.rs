//! `tinyloop score`: perplexity and per-token log-probabilities of a text.
//!
//! Runs on the main thread; the engine runs on its own. The text is cut into windows of equal
//! length without overlap; in each, the second half is scored, so that every scored token has at
//! least half a window of context: positions `window/2 .. window-1` predict their successors.
//! This is the windowing that `llama-perplexity` uses, so figures compare. A tail shorter than a
//! window is left out, unless the text is shorter than one window: then all of it is one window.

use super::engine_link::submit;
use super::exit_args::ExitArgs;
use super::model_args::ModelArgs;
use super::output::Output;
use crate::config::{BUILTIN_MODEL, EngineConfig};
use crate::error::Error;
use crate::request::{GenerationEvent, GenerationRequest, TokenId, TokenLogprob, Usage};
use crate::runtime::Runtime;
use crate::runtime::device::only_place;
use crate::runtime::native::{BackendKind, NativeRuntime};
use crate::tokenizer::EncodeOptions;
use serde::Serialize;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

/// Which kernels score the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ScoreBackend {
    /// The fast kernels that `serve` uses.
    Cpu,
    /// The plain f32 reference: slow, and the yardstick.
    Reference,
}

/// Arguments of `tinyloop score`.
#[derive(Clone, Debug, clap::Args)]
pub struct ScoreArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(short, long, value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// Text to score, UTF-8.
    #[arg(value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens of a window; its second half is scored.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub window: u32,
    /// Which kernels run it.
    #[arg(long, value_enum, default_value_t = ScoreBackend::Cpu)]
    pub backend: ScoreBackend,
    /// Kernel threads [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Print one JSON object with every token instead of a summary.
    #[arg(long)]
    pub json: bool,
    /// Depth and weights.
    #[command(flatten)]
    pub model_args: ModelArgs,
    /// Early exit.
    #[command(flatten)]
    pub exit_args: ExitArgs,
}

/// One scored token.
#[derive(Clone, Debug, Serialize)]
struct ScoredToken {
    /// Place in the text's token sequence.
    position: usize,
    token: TokenId,
    text: String,
    logprob: f32,
}

/// Everything that `--json` prints.
#[derive(Clone, Debug, Serialize)]
struct Report {
    perplexity: f64,
    mean_logprob: f64,
    n_scored: usize,
    n_tokens: usize,
    window: u32,
    /// Loops of the model, and how many of them a token ran on the average.
    loops: u32,
    mean_loops: f64,
    /// All tokens of the windows over the time that the engine took for them.
    tokens_per_second: f64,
    backend: String,
    tokens: Vec<ScoredToken>,
}

/// Scores the text and writes the result to stdout.
pub fn run(args: &ScoreArgs) -> Result<(), Error> {
    if args.window < 2 {
        return Err(Error::Usage("--window needs at least 2 tokens".to_owned()));
    }
    let text = std::fs::read_to_string(&args.text)
        .map_err(|error| Error::other(&args.text.display().to_string(), error))?;
    let mut config = EngineConfig {
        context_length: Some(args.window),
        max_sequences: 1,
        kv_tokens: Some(u64::from(args.window) + 32),
        threads: args.threads,
        prefix_cache: false,
        ..EngineConfig::default()
    };
    args.model_args.apply(&mut config);
    let kind = match args.backend {
        ScoreBackend::Cpu => only_place(&config).map_err(Error::Usage)?,
        ScoreBackend::Reference => BackendKind::Reference,
    };
    let runtime = NativeRuntime::load(&args.model, &config, kind, &mut |_, _| {})
        .map_err(|error| Error::other("score", error))?;
    let report = score(&runtime, &text, args)?;
    runtime.shutdown();
    write_report(args, &report)
}

/// The windows of `n_tokens`: half-open ranges.
fn windows(n_tokens: usize, window: usize) -> impl Iterator<Item = Range<usize>> {
    let length = window.min(n_tokens);
    (0..n_tokens / length).map(move |i| i * length..(i + 1) * length)
}

fn score(runtime: &NativeRuntime, text: &str, args: &ScoreArgs) -> Result<Report, Error> {
    let tokenizer = runtime
        .tokenizer()
        .ok_or_else(|| Error::Other("score: the model has no tokenizer".to_owned()))?;
    let options = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
    let tokens = tokenizer.encode(text, options);
    if tokens.len() < 2 {
        return Err(Error::Usage(
            "score: the text needs at least 2 tokens".to_owned(),
        ));
    }
    let mut scored = Vec::new();
    let mut usage = Usage::default();
    let start = Instant::now();
    for range in windows(tokens.len(), args.window as usize) {
        let (logprobs, of_window) = prompt_logprobs(runtime, &tokens[range.clone()], args)?;
        usage = Usage {
            prompt_tokens: usage.prompt_tokens + of_window.prompt_tokens,
            loop_rows: usage.loop_rows + of_window.loop_rows,
            loop_iterations: usage.loop_iterations + of_window.loop_iterations,
            ..of_window
        };
        // logprobs[i] belongs to token i + 1 of the window.
        let first_scored = range.len() / 2;
        for (index, entry) in logprobs.iter().enumerate().skip(first_scored) {
            scored.push(ScoredToken {
                position: range.start + index + 1,
                token: entry.token,
                text: String::from_utf8_lossy(tokenizer.token_bytes(entry.token)).into_owned(),
                logprob: entry.logprob,
            });
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let sum: f64 = scored.iter().map(|token| f64::from(token.logprob)).sum();
    let mean_logprob = sum / scored.len() as f64;
    Ok(Report {
        perplexity: (-mean_logprob).exp(),
        mean_logprob,
        n_scored: scored.len(),
        n_tokens: tokens.len(),
        window: args.window,
        loops: usage.loops,
        mean_loops: usage.mean_loops(),
        tokens_per_second: f64::from(usage.prompt_tokens) / seconds.max(1e-9),
        backend: runtime.backend_name().to_owned(),
        tokens: scored,
    })
}

fn prompt_logprobs(
    runtime: &NativeRuntime,
    tokens: &[TokenId],
    args: &ScoreArgs,
) -> Result<(Vec<TokenLogprob>, Usage), Error> {
    let mut request = GenerationRequest::new(tokens, 0);
    request.prompt_logprobs = Some(0);
    request.adaptive = args.exit_args.adaptive;
    let (mut found, mut counts) = (Vec::new(), Usage::default());
    for event in submit(runtime, request).wait_to_end()? {
        match event.event {
            GenerationEvent::PromptLogprobs(logprobs) => found.extend(logprobs),
            GenerationEvent::Finished { usage, .. } => counts = usage,
            GenerationEvent::Token { .. }
            | GenerationEvent::Text { .. }
            | GenerationEvent::Embedding(_)
            | GenerationEvent::Part(_)
            | GenerationEvent::Failed(_) => {}
        }
    }
    if found.len() + 1 == tokens.len() {
        Ok((found, counts))
    } else {
        let text = format!(
            "score: {} log-probabilities for {} tokens",
            found.len(),
            tokens.len()
        );
        Err(Error::Other(text))
    }
}

fn write_report(args: &ScoreArgs, report: &Report) -> Result<(), Error> {
    let mut out = Output::new();
    if args.json {
        let text = serde_json::to_string(report).map_err(|error| Error::other("score", error))?;
        out.line(&text)?;
        return out.finish();
    }
    out.line(&format!(
        "perplexity {:.4} over {} of {} tokens",
        report.perplexity, report.n_scored, report.n_tokens
    ))?;
    out.line(&format!("mean log-probability {:.5}", report.mean_logprob))?;
    out.line(&format!(
        "{:.3} of {} loops a token, {:.0} tokens a second",
        report.mean_loops, report.loops, report.tokens_per_second
    ))?;
    out.line(&format!(
        "windows of {} tokens, second half scored, on {}",
        report.window, report.backend
    ))?;
    out.finish()
}

#[cfg(test)]
mod tests {
    use super::windows;

    #[test]
    fn windows_do_not_overlap_and_leave_the_tail_out() {
        let found = |n_tokens| {
            windows(n_tokens, 512)
                .map(|w| (w.start, w.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(found(1799), [(0, 512), (512, 1024), (1024, 1536)]);
        assert_eq!(found(512), [(0, 512)]);
        assert_eq!(found(100), [(0, 100)]);
    }
}
