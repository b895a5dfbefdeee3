//! Drives an engine by hand, step by step, under one of four ways of batching.
//!
//! On the bench's own thread. Time is what the steps took, one after the other; while nobody is
//! there it jumps to the next arrival, so that idle time costs none. Or it is a given cost per pass
//! ([`Clock::Model`]), which takes the machine's noise and the kernels out and leaves the decisions.
//! What is not here: which rows share a pass (`engine::batch`), the figures (`report`).

use super::workload::Item;
use crate::engine::Engine;
use crate::engine::batch::BatchPolicy;
use crate::error::Error;
use crate::request::{
    ConsumerGone, GenerationEvent, GenerationRequest, Job, JobSink, SamplingParams, TokenId,
};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// A way of serving what waits with the same number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    /// (a) One request at a time.
    Serial,
    /// (b1) The first that waits and others of its depth, as many as there are slots, all to their
    /// end before the next batch.
    StaticBatches,
    /// (b2) Continuous batching within each depth, the depths taking turns token by token.
    DepthTurns,
    /// (c) The engine as it is.
    DepthWise,
}

impl Way {
    pub(super) const ALL: [Way; 4] = [
        Way::Serial,
        Way::StaticBatches,
        Way::DepthTurns,
        Way::DepthWise,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Serial => "(a) serial",
            Way::StaticBatches => "(b1) static, same L",
            Way::DepthTurns => "(b2) turns of each L",
            Way::DepthWise => "(c) depth-wise",
        }
    }

    fn policy(self) -> BatchPolicy {
        match self {
            Way::DepthTurns => BatchPolicy::DepthTurns,
            _ => BatchPolicy::DepthWise,
        }
    }

    /// Places in `waiting`, rising, of those that start now. Pure.
    fn starts(self, waiting: &[u32], n_running: usize, n_slots: usize) -> Vec<usize> {
        let first = 0..waiting.len();
        match self {
            Way::Serial if n_running > 0 => Vec::new(),
            Way::Serial => first.take(1).collect(),
            Way::StaticBatches if n_running > 0 => Vec::new(),
            Way::StaticBatches => first
                .filter(|place| waiting[*place] == waiting[0])
                .take(n_slots)
                .collect(),
            Way::DepthTurns | Way::DepthWise => first.take(n_slots - n_running).collect(),
        }
    }
}

/// What a pass costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Clock {
    /// What it took.
    Wall,
    /// The processor time that this thread took, which is all of it with one kernel thread: on a
    /// machine that others use too. Counted by the kernel in ticks of some milliseconds.
    Processor,
    /// Microseconds per pass and per row of it.
    Model { pass_us: f64, row_us: f64 },
}

/// What became of a request; times in seconds since the start of its run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Served {
    pub(super) loops: u32,
    pub(super) arrival: f64,
    pub(super) first_token: f64,
    pub(super) end: f64,
    pub(super) tokens: Vec<TokenId>,
}

type Log = Arc<Mutex<Vec<(usize, GenerationEvent)>>>;

/// Notes events under the number of their request.
struct Sink {
    number: usize,
    log: Log,
}

impl JobSink for Sink {
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone> {
        self.log.lock().push((self.number, event));
        Ok(())
    }
}

/// An engine under a clock.
pub(super) struct Driver {
    pub(super) engine: Engine,
    clock: Clock,
    /// Processor time of this thread after the latest step.
    processor_s: f64,
    log: Log,
    /// Seconds.
    pub(super) now: f64,
}

impl Driver {
    pub(super) fn new(engine: Engine, clock: Clock) -> Self {
        Self {
            engine,
            clock,
            processor_s: processor_seconds().unwrap_or(0.0),
            log: Arc::default(),
            now: 0.0,
        }
    }

    /// Hands a request to the engine; its events come out of [`Self::step`] under `number`.
    pub(super) fn submit(&mut self, number: usize, item: &Item) {
        let mut request = GenerationRequest::new(item.prompt.as_slice(), item.n_generate);
        request.loops = Some(item.loops);
        request.reuse_prefix = false;
        request.stop.ignore_eos = true;
        request.sampling = SamplingParams {
            seed: Some(item.seed),
            ..SamplingParams::default()
        };
        self.engine.submit(Job {
            request: Arc::new(request),
            sink: Box::new(Sink {
                number,
                log: Arc::clone(&self.log),
            }),
        });
    }

    /// One quantum; the events that it caused.
    pub(super) fn step(&mut self) -> Result<Vec<(usize, GenerationEvent)>, Error> {
        let began = Instant::now();
        let stepped = self.engine.step();
        stepped.map_err(|error| Error::other("bench-depth", error))?;
        self.now += match self.clock {
            Clock::Wall => began.elapsed().as_secs_f64(),
            Clock::Processor => {
                let before = std::mem::replace(&mut self.processor_s, processor_seconds()?);
                self.processor_s - before
            }
            Clock::Model { pass_us, row_us } => {
                let n_rows = self.engine.stats().snapshot().batch_rows;
                (pass_us + row_us * f64::from(n_rows)) / 1e6
            }
        };
        Ok(std::mem::take(&mut *self.log.lock()))
    }

    /// Serves all items, which come at `arrivals`, with `n_slots` slots.
    pub(super) fn serve(
        &mut self,
        way: Way,
        items: &[Item],
        arrivals: &[f64],
        n_slots: usize,
    ) -> Result<Vec<Served>, Error> {
        self.engine.set_batch_policy(way.policy());
        self.now = 0.0;
        let mut served: Vec<Served> = items
            .iter()
            .zip(arrivals)
            .map(|(item, arrival)| Served {
                loops: item.loops,
                arrival: *arrival,
                ..Served::default()
            })
            .collect();
        let mut coming: VecDeque<usize> = (0..items.len()).collect();
        let mut waiting: Vec<usize> = Vec::new();
        let mut n_running = 0;
        loop {
            if n_running == 0 && waiting.is_empty() {
                let Some(&next) = coming.front() else {
                    return Ok(served);
                };
                self.now = self.now.max(arrivals[next]);
            }
            while let Some(next) = coming.pop_front_if(|next| arrivals[*next] <= self.now) {
                waiting.push(next);
            }
            let depths: Vec<u32> = waiting.iter().map(|number| items[*number].loops).collect();
            let places = way.starts(&depths, n_running, n_slots);
            let starting: Vec<usize> = places.into_iter().map(|place| waiting[place]).collect();
            waiting.retain(|number| !starting.contains(number));
            n_running += starting.len();
            for number in starting {
                self.submit(number, &items[number]);
            }
            for (number, event) in self.step()? {
                n_running -= usize::from(note(&mut served[number], event, self.now)?);
            }
        }
    }
}

/// Seconds of processor time of this thread, by Linux's account.
fn processor_seconds() -> Result<f64, Error> {
    let path = "/proc/thread-self/schedstat";
    let text = std::fs::read_to_string(path).map_err(|error| Error::other(path, error))?;
    let nanos = text.split_whitespace().next().and_then(|n| n.parse().ok());
    let nanos: f64 = nanos.ok_or_else(|| Error::other(path, "no number in it"))?;
    Ok(nanos / 1e9)
}

/// Takes an event into the books; true when it was the last one.
fn note(served: &mut Served, event: GenerationEvent, now: f64) -> Result<bool, Error> {
    match event {
        GenerationEvent::Token { token, .. } => {
            if served.tokens.is_empty() {
                served.first_token = now;
            }
            served.tokens.push(token);
            Ok(false)
        }
        GenerationEvent::Finished { .. } => {
            served.end = now;
            Ok(true)
        }
        GenerationEvent::Failed(error) => Err(Error::other("the engine", error)),
        GenerationEvent::Text { .. }
        | GenerationEvent::Part(_)
        | GenerationEvent::PromptLogprobs(_)
        | GenerationEvent::Embedding(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_starts_is_the_only_difference_between_the_ways() {
        let waiting = [2, 1, 2, 3, 2];
        for (way, n_running, expected) in [
            (Way::Serial, 0, vec![0]),
            (Way::Serial, 1, vec![]),
            (Way::StaticBatches, 0, vec![0, 2]),
            (Way::StaticBatches, 1, vec![]),
            (Way::DepthTurns, 1, vec![0]),
            (Way::DepthWise, 0, vec![0, 1]),
            (Way::DepthWise, 2, vec![]),
        ] {
            assert_eq!(way.starts(&waiting, n_running, 2), expected, "{way:?}");
        }
        assert!(Way::StaticBatches.starts(&[], 0, 2).is_empty());
    }
}
