//! `tinyloop bench-http`: load on a running OpenAI-compatible server, every event checked.
//!
//! One thread per client, each with a connection of its own, so that what is measured is the
//! server and not an event loop here. A stream must open with its first chunk, name its finish
//! reason once, report usage that agrees with what came, and close with `[DONE]`; with `--echo`
//! (a `fake` model, which repeats its prompt) every byte of the text is compared too, so that a
//! lost, doubled or reordered event cannot hide. What is not here: starting a server (`make load`).

use super::output::Output;
use crate::error::Error;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A server that says nothing for so long is broken.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// Longest line that is read; nothing that is checked here is longer.
const LINE_MAX: u64 = 1 << 20;

/// Arguments of `tinyloop bench-http`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchHttpArgs {
    /// Address of the server.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    pub address: String,
    /// Model to ask for [default: the server's own].
    #[arg(short, long, value_name = "NAME")]
    pub model: Option<String>,
    /// Streams that are open at once.
    #[arg(short, long, value_name = "COUNT", default_value_t = 16)]
    pub clients: u64,
    /// Streams in all.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 64)]
    pub requests: u64,
    /// Tokens per stream.
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 64)]
    pub tokens: u32,
    /// Key to send.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// The server repeats the prompt (a fake model): compare every byte.
    #[arg(long)]
    pub echo: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// What one stream brought.
struct Stream {
    first_event: Duration,
    /// Between events with text.
    gaps: Vec<Duration>,
    n_events: u64,
}

/// Milliseconds: the mean and some percentiles.
#[derive(Clone, Copy, Debug, Serialize)]
struct Percentiles {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

/// Everything that `--json` prints.
#[derive(Clone, Debug, Serialize)]
struct Report {
    clients: u64,
    streams: usize,
    faults: Vec<String>,
    tokens: u64,
    seconds: f64,
    tokens_per_second: f64,
    first_event_ms: Percentiles,
    between_events_ms: Percentiles,
}

/// Runs the load and writes the result to stdout. Err when any stream was at fault.
pub fn run(args: &BenchHttpArgs) -> Result<(), Error> {
    if args.clients == 0 || args.requests == 0 || args.tokens == 0 {
        return Err(Error::Usage(
            "--clients, --requests and --tokens start at 1".to_owned(),
        ));
    }
    let started = Instant::now();
    let results = all_streams(args)?;
    let report = report(args, results, started.elapsed());
    let mut out = Output::new();
    match args.json {
        true => out.line(&json!(report).to_string())?,
        false => print(&mut out, &report)?,
    }
    out.finish()?;
    match report.faults.first() {
        None => Ok(()),
        Some(first) => Err(Error::Other(format!(
            "{} of {} streams were at fault; the first: {first}",
            report.faults.len(),
            args.requests
        ))),
    }
}

/// The clients, each asking again until all streams are given out.
fn all_streams(args: &BenchHttpArgs) -> Result<Vec<Result<Stream, String>>, Error> {
    let next = AtomicU64::new(0);
    let client = || {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= args.requests {
                return results;
            }
            let result = one_stream(args, index);
            results.push(result.map_err(|fault| format!("stream {index}: {fault}")));
        }
    };
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in 0..args.clients.min(args.requests) {
            let thread = std::thread::Builder::new()
                .name(format!("client-{number}"))
                .stack_size(256 << 10)
                .spawn_scoped(scope, client)
                .map_err(|error| Error::other("a client thread", error))?;
            threads.push(thread);
        }
        let joined = threads.into_iter().map(|thread| thread.join());
        Ok(joined.flat_map(Result::unwrap_or_default).collect())
    })
}

/// The prompt of a stream: different for each, so that mixed-up answers are seen.
fn prompt(index: u64) -> String {
    format!("Stream {index} counts from {}: ", index * 7919 % 100_003)
}

fn one_stream(args: &BenchHttpArgs, index: u64) -> Result<Stream, String> {
    let prompt = prompt(index);
    let mut body = json!({
        "prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    });
    if let Some(model) = &args.model {
        body["model"] = json!(model);
    }
    let started = Instant::now();
    let mut events = Events::open(args, &body.to_string())?;
    let (mut times, mut text, mut finish, mut usage) = (Vec::new(), String::new(), None, None);
    while let Some(event) = events.next()? {
        let event: Value = serde_json::from_str(&event).map_err(|e| format!("{event:?}: {e}"))?;
        if let Some(error) = event.get("error") {
            return Err(error.to_string());
        }
        if let Some(counts) = event.get("usage").filter(|usage| !usage.is_null()) {
            usage = counts["completion_tokens"].as_u64();
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            times.push(Instant::now());
            text.push_str(choice["text"].as_str().unwrap_or_default());
            if let Some(reason) = choice["finish_reason"].as_str()
                && let Some(first) = finish.replace(reason.to_owned())
            {
                return Err(format!("two finish reasons, {first} and {reason}"));
            }
        }
    }
    let tokens = u64::from(args.tokens);
    if finish.as_deref() != Some("length") || usage != Some(tokens) {
        return Err(format!(
            "finish reason {finish:?}, {usage:?} of {tokens} tokens"
        ));
    }
    if args.echo {
        let expected: String = prompt.chars().cycle().take(args.tokens as usize).collect();
        if text != expected {
            return Err(format!("the text is {text:?} instead of {expected:?}"));
        }
    }
    let first = times.first().ok_or("no event with a choice")?;
    Ok(Stream {
        first_event: first.duration_since(started),
        gaps: times.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        n_events: tokens,
    })
}

/// The events of one streamed answer.
struct Events {
    lines: BufReader<Chunked<BufReader<TcpStream>>>,
    done: bool,
}

impl Events {
    fn open(args: &BenchHttpArgs, body: &str) -> Result<Self, String> {
        let address = &args.address;
        let mut connection = TcpStream::connect(address).map_err(|e| format!("{address}: {e}"))?;
        let auth = match &args.api_key {
            Some(key) => format!("Authorization: Bearer {key}\r\n"),
            None => String::new(),
        };
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{auth}\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        connection
            .set_read_timeout(Some(SILENCE_MAX))
            .and_then(|()| connection.set_nodelay(true))
            .and_then(|()| connection.write_all(request.as_bytes()))
            .map_err(|error| error.to_string())?;
        let mut reader = BufReader::new(connection);
        let status = line(&mut reader)?;
        let mut is_chunked = false;
        loop {
            let header = line(&mut reader)?.to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            is_chunked |= header.replace(' ', "") == "transfer-encoding:chunked";
        }
        if !status.starts_with("HTTP/1.1 200") || !is_chunked {
            let mut text = String::new();
            let _ = reader.take(400).read_to_string(&mut text); // what there is, for the message
            return Err(format!("{status}: {text}"));
        }
        Ok(Self {
            lines: BufReader::new(Chunked {
                inner: reader,
                left: Some(0),
            }),
            done: false,
        })
    }

    /// The data of the next event; None after `[DONE]` and the end of the body.
    fn next(&mut self) -> Result<Option<String>, String> {
        let mut text = String::new();
        loop {
            text.clear();
            let read = (&mut self.lines).take(LINE_MAX).read_line(&mut text);
            let n_read = read.map_err(|error| error.to_string())?;
            match text.trim_end().strip_prefix("data: ") {
                _ if n_read == 0 && self.done => return Ok(None),
                _ if n_read == 0 => return Err("the body ended without [DONE]".to_owned()),
                Some(_) if self.done => return Err("an event after [DONE]".to_owned()),
                Some("[DONE]") => self.done = true,
                Some(data) => return Ok(Some(data.to_owned())),
                None => {} // a blank line or a comment
            }
        }
    }
}

fn line(reader: &mut impl BufRead) -> Result<String, String> {
    let mut text = String::new();
    let n_read = reader.take(LINE_MAX).read_line(&mut text);
    match n_read.map_err(|error| error.to_string())? {
        0 => Err("the server closed the connection".to_owned()),
        _ => Ok(text.trim_end().to_owned()),
    }
}

/// A chunked body as plain bytes (RFC 9112, 7.1; trailers are not expected).
struct Chunked<R> {
    inner: R,
    /// Bytes left of this chunk; None after the last one.
    left: Option<u64>,
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let Some(mut left) = self.left else {
            return Ok(0);
        };
        let invalid = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        if left == 0 {
            let size = line(&mut self.inner).map_err(invalid)?;
            left = u64::from_str_radix(&size, 16)
                .map_err(|_| invalid(format!("{size:?} is no chunk size")))?;
            if left == 0 {
                self.left = None;
                line(&mut self.inner).map_err(invalid)?;
                return Ok(0);
            }
        }
        let n_read = (&mut self.inner).take(left).read(buffer)?;
        if n_read == 0 && !buffer.is_empty() {
            return Err(invalid("the body was cut within a chunk".to_owned()));
        }
        left -= n_read as u64;
        if left == 0 {
            line(&mut self.inner).map_err(invalid)?; // the CRLF behind the data
        }
        self.left = Some(left);
        Ok(n_read)
    }
}

fn report(args: &BenchHttpArgs, results: Vec<Result<Stream, String>>, elapsed: Duration) -> Report {
    let mut faults = Vec::new();
    let (mut firsts, mut gaps, mut tokens, mut streams) = (Vec::new(), Vec::new(), 0, 0);
    for result in results {
        match result {
            Ok(stream) => {
                firsts.push(stream.first_event);
                gaps.extend(stream.gaps);
                tokens += stream.n_events;
                streams += 1;
            }
            Err(fault) => faults.push(fault),
        }
    }
    let seconds = elapsed.as_secs_f64();
    Report {
        clients: args.clients,
        streams,
        faults,
        tokens,
        seconds,
        tokens_per_second: tokens as f64 / seconds,
        first_event_ms: percentiles(firsts),
        between_events_ms: percentiles(gaps),
    }
}

fn percentiles(mut values: Vec<Duration>) -> Percentiles {
    values.sort_unstable();
    let at = |share: f64| {
        let index = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
        values.get(index).map_or(0.0, |v| v.as_secs_f64() * 1e3)
    };
    let sum: Duration = values.iter().sum();
    Percentiles {
        mean: sum.as_secs_f64() * 1e3 / values.len().max(1) as f64,
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        max: at(1.0),
    }
}

fn print(out: &mut Output, report: &Report) -> Result<(), Error> {
    out.line(&format!(
        "{} streams of {} clients, {} at fault: {} tokens in {:.2} s, {:.0} tokens/s",
        report.streams,
        report.clients,
        report.faults.len(),
        report.tokens,
        report.seconds,
        report.tokens_per_second
    ))?;
    for (name, values) in [
        ("first event", report.first_event_ms),
        ("between events", report.between_events_ms),
    ] {
        let Percentiles {
            p50, p90, p99, max, ..
        } = values;
        out.line(&format!(
            "{name:15} p50 {p50:8.2} ms   p90 {p90:8.2} ms   p99 {p99:8.2} ms   max {max:8.2} ms"
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unchunked(text: &str) -> Result<String, String> {
        let mut body = String::new();
        let mut chunked = Chunked {
            inner: text.as_bytes(),
            left: Some(0),
        };
        match chunked.read_to_string(&mut body) {
            Ok(_) => Ok(body),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn chunks_are_joined_and_a_cut_body_is_an_error() {
        assert_eq!(
            unchunked("3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n"),
            Ok("abc0123456789".into())
        );
        for cut in ["3\r\nab", "3\r\nabc\r\n", "zz\r\n", ""] {
            assert!(unchunked(cut).is_err(), "{cut:?}");
        }
    }

    #[test]
    fn percentiles_of_few_and_of_none() {
        let values = (1..=100).map(Duration::from_millis).collect();
        let found = percentiles(values);
        assert_eq!((found.mean, found.p50, found.p99), (50.5, 51.0, 100.0));
        assert_eq!(percentiles(Vec::new()).max, 0.0);
    }
}
