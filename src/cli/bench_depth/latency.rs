//! What a long prompt does to others: to a short request that comes while it loops, and to
//! generations that run beside it.
//!
//! On the bench's own thread, over the same driver as everything here.

use super::drive::Driver;
use super::workload::Item;
use crate::error::Error;
use crate::request::GenerationEvent;
use serde::Serialize;

/// Moments of the long prompt at which a short request comes.
const N_MOMENTS: usize = 24;
/// Request numbers: the long one, short ones, generations from 2 on.
const LONG: usize = 0;
const SHORT: usize = 1;

/// First token of a short request, alone and while a long deep prompt runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Interleave {
    pub(super) long_tokens: usize,
    pub(super) long_loops: u32,
    pub(super) short_tokens: usize,
    pub(super) short_loops: u32,
    /// Quanta from its submission to its first token.
    pub(super) idle_quanta: u32,
    pub(super) busy_quanta_median: u32,
    pub(super) busy_quanta_max: u32,
    pub(super) idle_ms: f64,
    pub(super) busy_ms_median: f64,
    pub(super) busy_ms_max: f64,
}

/// Lets a short request come at many moments of a long one.
pub(super) fn interleave(
    driver: &mut Driver,
    long: &Item,
    short: &Item,
) -> Result<Interleave, Error> {
    first_token(driver, short)?; // warms caches
    let mut idle = Vec::new();
    for _ in 0..5 {
        idle.push(first_token(driver, short)?);
    }
    let mut n_quanta = 0;
    driver.submit(LONG, long);
    while !driver.engine.is_idle() {
        driver.step()?;
        n_quanta += 1;
    }
    let between = (n_quanta / (N_MOMENTS + 1)).max(1);
    let mut busy = Vec::new();
    driver.submit(LONG, long);
    'all: loop {
        for _ in 0..between {
            driver.step()?;
            if driver.engine.is_idle() {
                break 'all;
            }
        }
        busy.push(first_token(driver, short)?);
        if driver.engine.is_idle() {
            busy.pop(); // the long one ended meanwhile
            break;
        }
    }
    let quanta = |runs: &[(u32, f64)]| sorted(runs.iter().map(|run| run.0).collect());
    let times = |runs: &[(u32, f64)]| {
        let mut times: Vec<f64> = runs.iter().map(|run| run.1 * 1e3).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let (busy_quanta, busy_ms) = (quanta(&busy), times(&busy));
    let (Some(quanta_max), Some(ms_max)) = (busy_quanta.last(), busy_ms.last()) else {
        return Err(Error::Usage(
            "the long prompt is too short to come in between".to_owned(),
        ));
    };
    Ok(Interleave {
        long_tokens: long.prompt.len(),
        long_loops: long.loops,
        short_tokens: short.prompt.len(),
        short_loops: short.loops,
        idle_quanta: quanta(&idle)[idle.len() / 2],
        busy_quanta_median: busy_quanta[busy.len() / 2],
        busy_quanta_max: *quanta_max,
        idle_ms: times(&idle)[idle.len() / 2],
        busy_ms_median: busy_ms[busy.len() / 2],
        busy_ms_max: *ms_max,
    })
}

fn sorted(mut values: Vec<u32>) -> Vec<u32> {
    values.sort_unstable();
    values
}

/// Quanta and seconds from the submission of a request to its first token, which is its last.
fn first_token(driver: &mut Driver, item: &Item) -> Result<(u32, f64), Error> {
    let began = driver.now;
    driver.submit(SHORT, item);
    for n_quanta in 1.. {
        let events = driver.step()?;
        let is_first = |(number, event): &(usize, GenerationEvent)| {
            *number == SHORT && matches!(event, GenerationEvent::Token { .. })
        };
        if events.iter().any(is_first) {
            return Ok((n_quanta, driver.now - began));
        }
    }
    unreachable!("the loop ends with a token or an error")
}

/// What a bound on prompt rows beside generations gives and costs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PromptRows {
    pub(super) rows_max: u32,
    /// Tokens per second of a prompt alone in the engine, in passes of at most so many rows.
    pub(super) alone_per_second: f64,
    /// The same beside generations.
    pub(super) beside_per_second: f64,
    pub(super) n_generations: usize,
    /// Between tokens of a generation: without the prompt, beside it, and at worst.
    pub(super) gap_ms: f64,
    pub(super) gap_beside_ms: f64,
    pub(super) gap_beside_max_ms: f64,
}

/// Runs a prompt alone and beside generations.
pub(super) fn prompt_rows(
    driver: &mut Driver,
    prompt: &Item,
    generations: &[Item],
    rows_max: u32,
) -> Result<PromptRows, Error> {
    let rate = |seconds: f64| prompt.prompt.len() as f64 / seconds;
    let (_, alone) = first_token(driver, prompt)?;
    for (number, item) in generations.iter().enumerate() {
        driver.submit(SHORT + 1 + number, item);
    }
    let gaps = token_gaps(driver, 30, None)?;
    let (began, mut done) = (driver.now, driver.now);
    driver.submit(LONG, prompt);
    let gaps_beside = token_gaps(driver, usize::MAX, Some(&mut done))?;
    driver
        .engine
        .fail_all(&crate::request::RequestError::Cancelled);
    driver.step()?; // takes the failures out of the log
    let middle = |gaps: &[f64]| gaps.get(gaps.len() / 2).map_or(f64::NAN, |gap| gap * 1e3);
    Ok(PromptRows {
        rows_max,
        alone_per_second: rate(alone),
        beside_per_second: rate(done - began),
        n_generations: generations.len(),
        gap_ms: middle(&gaps),
        gap_beside_ms: middle(&gaps_beside),
        gap_beside_max_ms: gaps_beside.last().map_or(f64::NAN, |gap| gap * 1e3),
    })
}

/// Seconds between tokens of the first generation, sorted: `n` of them, or until the long prompt
/// has its token, whose time goes to `done`.
fn token_gaps(driver: &mut Driver, n: usize, done: Option<&mut f64>) -> Result<Vec<f64>, Error> {
    let (mut gaps, mut last) = (Vec::new(), None);
    'all: while gaps.len() < n {
        for (number, event) in driver.step()? {
            let is_token = matches!(event, GenerationEvent::Token { .. });
            if number == SHORT + 1 && is_token {
                gaps.extend(last.map(|last| driver.now - last));
                last = Some(driver.now);
            }
            if number == LONG && is_token {
                break 'all;
            }
        }
        if driver.engine.is_idle() {
            break;
        }
    }
    if let Some(done) = done {
        *done = driver.now;
    }
    gaps.sort_by(f64::total_cmp);
    Ok(gaps)
}
