//! How many jobs a replica should hold when nobody knows: found by trying. Pure, fed with completions.
//!
//! **What is sought** is the knee of the curve of throughput over jobs in flight: below it one job more
//! raises the throughput, above it only the latency. It is where Kleinrock's *power*, throughput / latency,
//! is greatest (L. Kleinrock, "Power and Deterministic Rules of Thumb for Probabilistic Problems in Computer
//! Communications", ICC 1979). By Little's law latency = n / throughput, so power = throughput² / n, and only
//! throughput has to be measured. It counts tokens, not jobs: answers differ in length.
//!
//! **How**: by experiments with the limit, as PCC does with rates (M. Dong et al., "PCC: Re-architecting
//! Congestion Control for Consistent High Performance", NSDI 2015): measure, try a step up, keep it if the
//! power rose, else try a step down. A step that was kept doubles the next one, so that a limit of 1 grows as
//! in TCP's slow start and a knee that moves is followed; one that was not begins small again. No estimate
//! of a "latency without load" is kept, which is what drifts in gradient schemes.
//!
//! ```text
//!          kept                        kept
//!          ┌──┐                        ┌──┐
//!  Base ─► Up ─┴─ not better ─► Down ──┴─ not better ─► Hold ─ some rounds, or the throughput changed ─► Base
//! ```
//!
//! **A full upstream** (429, 503) says more than any measurement: an experiment upwards is called off, and
//! outside of one the limit shrinks to seven tenths (multiplicative decrease: D.-M. Chiu and R. Jain, 1989),
//! once per round.
//!
//! **Two measures.** Where requests are short a round is counted in completions; where they are long that
//! would take hours to climb, and what comes out of the jobs while they run is measured instead, over some
//! seconds in which the limit was full and next to none of them ended. Whichever is there first ends the round;
//! both say tokens per second. A limit that was changed has taken effect, by the first measure, when as many
//! jobs have ended as there may be of either, and by the second when exactly as many jobs run as it says, nearly
//! all of which have brought something.
//!
//! A round in completions is a whole number of times the limit in completions, so that waves of jobs that began together do
//! not tilt it, and at least some dozens, after as many as the limit that only flush out what ran
//! under the limit before. Completions while there was too little work to fill the limit say nothing about it
//! and begin the round anew, so an idle model keeps what it found. The limit is never below 1, nor above the
//! maximum, which is the smaller of the configured one and the capability.

use std::time::{Duration, Instant};

/// Fewest completions that a throughput is measured over.
const COMPLETIONS_MIN: u32 = 32;
/// Shortest time over which the tokens of running jobs are measured.
const WINDOW: Duration = Duration::from_secs(5);
/// Fewest tokens of each of them, meanwhile.
const WINDOW_TOKENS: u64 = 32;
/// A power so many times as high is better; less may be chance.
const BETTER: f64 = 1.04;
/// Rounds of rest between experiments.
const HOLD_ROUNDS: u32 = 2;
/// A change of the throughput by this factor ends the rest.
const CHANGED: f64 = 1.25;
/// What is left of the limit when the upstream is full.
const DECREASE: f64 = 0.7;

/// Which experiment is under way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Measures the limit as it is.
    Base,
    /// Tries more than `from`, whose power was `power`.
    Up { from: u32, power: f64 },
    /// Tries fewer.
    Down { from: u32, power: f64 },
    /// Rests; the throughput was this when the experiments ended.
    Hold { n_rounds: u32, throughput: f64 },
}

/// Completions under one limit.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Completions to be ignored: their jobs began under another limit.
    n_settling: u32,
    /// Completions to be measured.
    n_left: u32,
    /// When the measurement began.
    began: Option<Instant>,
    units: u64,
    /// The measurement of what comes out of running jobs.
    window: Option<Window>,
}

/// Where the second measure began.
#[derive(Clone, Copy, Debug)]
struct Window {
    began: Instant,
    /// That the replica had brought by then.
    n_tokens: u64,
    /// Of the round's completions.
    n_left: u32,
}

/// What a replica does, as it is looked at now and then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Glance {
    /// Jobs that it holds.
    pub n_jobs: u32,
    /// Those of them that have brought something.
    pub n_begun: u32,
    /// Tokens, or pieces of text, that its jobs have ever brought.
    pub n_tokens: u64,
}

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Adaptive {
    max: u32,
    limit: u32,
    /// The next experiment's.
    step: u32,
    phase: Phase,
    round: Round,
    /// Overloads since the limit was last cut for one.
    n_overloads: u32,
}

impl Adaptive {
    /// Begins with one job; `max` is at least 1.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self {
            max: max.max(1),
            limit: 1,
            step: 1,
            phase: Phase::Base,
            round: round(0, 1),
            n_overloads: 0,
        }
    }

    /// Jobs to hold now: `1..=max`.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The maximum changed, or the upstream did: what was being measured is void.
    pub fn restart(&mut self, max: u32) {
        self.max = max.max(1);
        self.go(self.limit.min(self.max), Phase::Base);
    }

    /// A job ended well. `units`: what it brought, as tokens; `inflight`: jobs held just before it ended.
    pub fn completed(&mut self, units: u64, inflight: u32, now: Instant) {
        let round = &mut self.round;
        if round.n_settling > 0 {
            round.n_settling -= 1;
            round.began = (round.n_settling == 0).then_some(now);
            return;
        }
        let is_full = inflight >= self.limit;
        match round.began {
            Some(began) if is_full => {
                round.units += units;
                round.n_left -= 1;
                let seconds = now.saturating_duration_since(began).as_secs_f64();
                if round.n_left > 0 {
                    return;
                }
                if seconds > 0.0 {
                    let throughput = round.units as f64 / seconds;
                    return self.measured(throughput);
                }
                self.round = measurement(self.limit, now);
            }
            // The first of a measurement only begins it.
            None if is_full => {
                let window = round.window;
                self.round = Round {
                    window,
                    ..measurement(self.limit, now)
                };
            }
            _ => self.round = measurement(self.limit, now),
        }
    }

    /// What the jobs that run have brought: for models whose requests take long.
    pub fn progressed(&mut self, seen: Glance, now: Instant) {
        let (limit, round) = (self.limit, &mut self.round);
        if seen.n_jobs < limit || seen.n_begun == 0 {
            round.window = None; // too little work says nothing about the limit
            return;
        }
        let has_effect = seen.n_jobs == limit && seen.n_begun >= limit - limit / 16;
        if round.n_settling > 0 {
            if !has_effect {
                return;
            }
            round.n_settling = 0;
            round.began = Some(now);
        }
        let Some(window) = round.window else {
            round.window = has_effect.then_some(Window {
                began: now,
                n_tokens: seen.n_tokens,
                n_left: round.n_left,
            });
            return;
        };
        let elapsed = now.saturating_duration_since(window.began);
        let n_tokens = seen.n_tokens.saturating_sub(window.n_tokens);
        if elapsed < WINDOW || n_tokens < WINDOW_TOKENS * u64::from(limit) {
            return;
        }
        // What jobs bring is uneven while they begin and end: next to none may, or so many that it evens
        // out.
        let n_ended = window.n_left.saturating_sub(round.n_left);
        if n_ended.saturating_mul(4) <= limit || n_ended / 4 >= limit {
            self.measured(n_tokens as f64 / elapsed.as_secs_f64());
        }
    }

    /// The upstream refused a job because it is full.
    pub fn overloaded(&mut self) {
        if let Phase::Up { from, power } = self.phase {
            self.step = small_step(from);
            let throughput = (power * f64::from(from)).sqrt();
            return self.go(
                from,
                Phase::Hold {
                    n_rounds: HOLD_ROUNDS,
                    throughput,
                },
            );
        }
        self.n_overloads += 1;
        if self.round.n_settling > 0 && self.n_overloads < self.limit {
            return; // of jobs that were under way when the limit was cut
        }
        let limit = (f64::from(self.limit) * DECREASE) as u32;
        self.n_overloads = 0;
        self.step = small_step(limit);
        self.go(limit.max(1), Phase::Base);
    }

    /// A round is over: the decision.
    fn measured(&mut self, throughput: f64) {
        let power = throughput * throughput / f64::from(self.limit);
        match self.phase {
            Phase::Base => self.try_up(power),
            Phase::Up { power: before, .. } if power > before * BETTER => {
                self.step = self.step.saturating_mul(2);
                self.try_up(power);
            }
            Phase::Up { from, power } => {
                self.step = small_step(from);
                self.try_down(from, power);
            }
            Phase::Down { power: before, .. } if power > before * BETTER => {
                self.step = self.step.saturating_mul(2);
                self.try_down(self.limit, power);
            }
            Phase::Down { from, power } => self.hold(from, (power * f64::from(from)).sqrt()),
            Phase::Hold {
                n_rounds,
                throughput: before,
            } => {
                let change = (throughput / before).max(before / throughput);
                if n_rounds <= 1 || change > CHANGED {
                    self.try_up(power);
                } else {
                    let phase = Phase::Hold {
                        n_rounds: n_rounds - 1,
                        throughput: before,
                    };
                    self.go(self.limit, phase);
                }
            }
        }
    }

    fn try_up(&mut self, power: f64) {
        let from = self.limit;
        let limit = from.saturating_add(self.step.clamp(1, from)).min(self.max);
        if limit == from {
            self.step = small_step(from);
            return self.try_down(from, power);
        }
        self.go(limit, Phase::Up { from, power });
    }

    fn try_down(&mut self, from: u32, power: f64) {
        let limit = from.saturating_sub(self.step.clamp(1, (from / 2).max(1)));
        if limit == 0 {
            return self.hold(from, (power * f64::from(from)).sqrt());
        }
        self.go(limit, Phase::Down { from, power });
    }

    fn hold(&mut self, limit: u32, throughput: f64) {
        self.step = small_step(limit);
        let n_rounds = HOLD_ROUNDS;
        self.go(
            limit,
            Phase::Hold {
                n_rounds,
                throughput,
            },
        );
    }

    /// Begins a round under a limit.
    fn go(&mut self, limit: u32, phase: Phase) {
        let n_settling = match limit == self.limit {
            true => 0,
            false => limit.max(self.limit),
        };
        self.limit = limit;
        self.phase = phase;
        self.round = round(n_settling, limit);
    }
}

fn small_step(limit: u32) -> u32 {
    (limit / 8).max(1)
}

fn n_measured(limit: u32) -> u32 {
    limit.saturating_mul(COMPLETIONS_MIN.div_ceil(limit).max(2))
}

fn round(n_settling: u32, limit: u32) -> Round {
    Round {
        n_settling,
        n_left: n_measured(limit),
        began: None,
        units: 0,
        window: None,
    }
}

fn measurement(limit: u32, now: Instant) -> Round {
    Round {
        began: Some(now),
        ..round(0, limit)
    }
}

#[cfg(test)]
#[path = "adaptive_tests.rs"]
mod tests;
