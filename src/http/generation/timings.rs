//! How long an answer took, in llama-server's words, which its clients and web UI show.
//!
//! Pure arithmetic. What is not here: the native route's own timings (`native/answer`).

use super::growing::Finished;
use serde::Serialize;
use std::time::Duration;

/// Times of one choice. `cache_n` and `prompt_n` together are its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timings {
    /// Prompt tokens found in the cache.
    cache_n: u32,
    /// Prompt tokens that were computed.
    prompt_n: u32,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    /// Tokens generated.
    predicted_n: u32,
    /// From the first token to the last: one token less than were generated.
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
}

impl Timings {
    /// Of a choice that has ended. Time in the queue is in none of them.
    #[must_use]
    pub fn of(finished: &Finished) -> Self {
        let (usage, stamps) = (&finished.usage, &finished.stamps);
        let between = |from: Option<_>, to: Option<_>| match (from, to) {
            (Some(from), Some(to)) => duration_between(from, to),
            _ => Duration::ZERO,
        };
        let [dispatched, first_token, completed] =
            [stamps.dispatched, stamps.first_token, stamps.completed]
                .map(|stamp| stamp.map(|stamp| stamp.at));
        let prompt = between(dispatched, first_token.or(completed));
        let predicted = between(first_token, completed).saturating_sub(stamps.parked);
        Self {
            cache_n: usage.cached_tokens,
            ..Self::so_far(
                usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
                prompt,
                usage.completion_tokens,
                predicted,
            )
        }
    }

    /// Of a choice on its way. What came from the cache is known at its end only.
    #[must_use]
    pub fn so_far(prompt_n: u32, prompt: Duration, predicted_n: u32, predicted: Duration) -> Self {
        let (prompt_ms, predicted_ms) = (millis(prompt), millis(predicted));
        let per_token = |total_ms: f64, n: u32| match n {
            0 => 0.0,
            n => total_ms / f64::from(n),
        };
        let per_second = |total_ms: f64, n: u32| match total_ms > 0.0 {
            true => f64::from(n) * 1e3 / total_ms,
            false => 0.0,
        };
        let n_gaps = predicted_n.saturating_sub(1);
        Self {
            cache_n: 0,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: per_token(prompt_ms, prompt_n),
            prompt_per_second: per_second(prompt_ms, prompt_n),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: per_token(predicted_ms, n_gaps),
            predicted_per_second: per_second(predicted_ms, n_gaps),
        }
    }

    /// Generated tokens per second; 0 where there were not two.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        self.predicted_per_second
    }

    /// From the first token to the last.
    #[must_use]
    pub fn generation_seconds(&self) -> f64 {
        self.predicted_ms / 1e3
    }
}

fn duration_between(from: std::time::Instant, to: std::time::Instant) -> Duration {
    to.saturating_duration_since(from)
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// Measures a choice while it is on its way.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    begun: std::time::Instant,
    first: Option<std::time::Instant>,
    n_pieces: u32,
}

impl Stopwatch {
    /// Begins now.
    #[must_use]
    pub fn start() -> Self {
        Self {
            begun: std::time::Instant::now(),
            first: None,
            n_pieces: 0,
        }
    }

    /// So many more tokens came, behind a prompt of `prompt_n`.
    pub fn lap(&mut self, n_tokens: u32, prompt_n: u32) -> Timings {
        let now = std::time::Instant::now();
        let first = *self.first.get_or_insert(now);
        self.n_pieces += n_tokens;
        let prompt = first.duration_since(self.begun);
        Timings::so_far(prompt_n, prompt, self.n_pieces, now.duration_since(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{FinishReason, Usage};
    use crate::scheduler::{Stamp, Stamps};
    use std::time::{Instant, SystemTime};

    #[test]
    fn the_first_token_belongs_to_the_prompt() {
        let start = Instant::now();
        let stamp = |ms| Stamp {
            at: start + Duration::from_millis(ms),
            wall: SystemTime::now(),
        };
        let finished = Finished {
            reason: FinishReason::Length,
            stop_idx: None,
            usage: Usage {
                prompt_tokens: 10,
                cached_tokens: 6,
                completion_tokens: 5,
                ..Usage::default()
            },
            stamps: Stamps {
                dispatched: Some(stamp(100)),
                first_token: Some(stamp(140)),
                completed: Some(stamp(180)),
                ..Stamps::queued(stamp(0))
            },
        };
        let timings = Timings::of(&finished);
        assert_eq!((timings.cache_n, timings.prompt_n), (6, 4));
        assert_eq!(
            (timings.prompt_ms, timings.prompt_per_second),
            (40.0, 100.0)
        );
        assert_eq!((timings.predicted_n, timings.predicted_ms), (5, 40.0));
        assert_eq!(timings.tokens_per_second(), 100.0);
        assert_eq!(timings.predicted_per_token_ms, 10.0);
        let nothing = Timings::so_far(0, Duration::ZERO, 0, Duration::ZERO);
        let json = serde_json::to_string(&nothing).expect("plain numbers");
        assert!(!json.contains("null"), "no division by zero: {json}");
    }
}
