//! Whether a request may enter the queue: pure functions over plain numbers.
//!
//! No lock, clock or log inside; `queue` gathers the numbers and takes the slot under one lock,
//! so that the decision holds when the request is put in. Order: closed, can never fit, queue
//! full, latency objective.
//!
//! # Where the prediction errs
//!
//! `predicted_wait = (queue_depth + 1) * ema_dispatch_ms / effective capacity`. With two very
//! different request lengths the mean describes neither; before the first completion there is no
//! mean and nobody is refused; after a long idle time the mean is old. It can't stay poisoned: an
//! executor with nothing queued and nothing running admits whatever the mean says (the wait *is*
//! nothing then), and each such request brings a fresh sample. With weight `alpha` a single slow
//! sample of size S counts `alpha * (1 - alpha)^n * S` after n further ones: at 0.2 less than 1 %
//! of it is left after 14.

/// The request's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Most tokens to generate; 0 scores the prompt only.
    pub max_tokens: u32,
    /// Its latency objective, or the server's.
    pub slo_ms: Option<u64>,
}

/// The executor's side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Supply {
    /// Why nothing is taken any more, if so.
    pub closed: Option<Closed>,
    /// Longest prompt + completion in tokens.
    pub context_length: u32,
    /// Tokens of KV in the smallest replica's pool: a request may go to any replica.
    pub kv_capacity_tokens: u64,
    /// Requests waiting.
    pub queue_depth: usize,
    /// Those of them that would start before this one.
    pub queue_ahead: usize,
    /// Most requests that may wait.
    pub max_queue_depth: usize,
    /// Requests in replicas.
    pub in_flight: u32,
    /// Requests all replicas should hold together.
    pub capacity: u32,
    /// Moving average of the time from dispatch to completion; None before the first completion.
    pub ema_dispatch_ms: Option<f64>,
    /// Completions per second lately; None when unknown.
    pub drain_rate_per_s: Option<f64>,
}

/// Why an executor takes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// `start` has not been called.
    NotStarted,
    /// The server drains.
    ShuttingDown,
    /// The model is being unloaded.
    Unloading,
}

/// The decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// Take it.
    Admit,
    /// Refuse it, with the numbers that led there.
    Refuse(SubmitError),
}

/// Why a request was not taken. It holds nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// Nobody has called `start`.
    #[error("the executor has not been started")]
    NotStarted,
    /// The server drains.
    #[error("the server is shutting down")]
    Shutdown,
    /// The model is being unloaded.
    #[error("the model is being unloaded")]
    ModelUnloading,
    /// No tokens to start from.
    #[error("the prompt is empty; a generation needs at least one token to start from")]
    EmptyPrompt,
    /// The prompt alone leaves no room.
    #[error(
        "the prompt has {prompt_tokens} tokens, which leaves no room for an answer in the \
         model's context of {context_length} tokens"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Longest prompt + completion in tokens.
        context_length: u32,
    },
    /// The prompt fits, the longest answer does not.
    #[error(
        "{prompt_tokens} prompt tokens and up to {max_tokens} generated ones are more than the \
         model's context of {context_length} tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Most tokens to generate.
        max_tokens: u32,
        /// Longest prompt + completion in tokens.
        context_length: u32,
    },
    /// It fits the context, but not the memory for keys and values.
    #[error(
        "the request may need {needed_tokens} tokens of KV memory; the server holds \
         {capacity_tokens} in all"
    )]
    KvTooSmall {
        /// Prompt and longest answer.
        needed_tokens: u64,
        /// Tokens the smallest pool holds.
        capacity_tokens: u64,
    },
    /// As many wait as may.
    #[error("{queue_depth} requests wait already, the most allowed is {max_queue_depth}")]
    QueueFull {
        /// Requests waiting.
        queue_depth: usize,
        /// Most requests that may wait.
        max_queue_depth: usize,
        /// When a retry makes sense, from the measured drain rate: 1..=30.
        retry_after_s: u32,
    },
    /// It would wait longer than its latency objective.
    #[error(
        "the predicted wait of {predicted_wait_ms} ms exceeds the latency objective of {slo_ms} ms"
    )]
    AdmissionRejected {
        /// `slo_unattainable`.
        reason: &'static str,
        /// `(queue_ahead + 1) * ema / capacity`.
        predicted_wait_ms: u64,
        /// The objective.
        slo_ms: u64,
        /// Requests waiting.
        queue_depth: usize,
        /// Those that would start before this one.
        queue_ahead: usize,
        /// Moving average of the time from dispatch to completion.
        ema_dispatch_ms: f64,
        /// When a retry makes sense, from the measured drain rate: 1..=30.
        retry_after_s: u32,
    },
}

impl SubmitError {
    /// Short word for metric labels, logs and the rejection header.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotStarted => "not_started",
            Self::Shutdown => "shutting_down",
            Self::ModelUnloading => "model_unloading",
            Self::EmptyPrompt => "empty_prompt",
            Self::PromptTooLong { .. } | Self::TooLong { .. } => "context_length_exceeded",
            Self::KvTooSmall { .. } => "kv_too_small",
            Self::QueueFull { .. } => "queue_full",
            Self::AdmissionRejected { reason, .. } => reason,
        }
    }

    /// Seconds after which a retry makes sense; None where it never does or nobody knows.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::QueueFull { retry_after_s, .. }
            | Self::AdmissionRejected { retry_after_s, .. } => Some(*retry_after_s),
            Self::Shutdown | Self::ModelUnloading => Some(5),
            _ => None,
        }
    }
}

/// The decision, in the order of the module doc.
#[must_use]
pub fn decide(demand: Demand, supply: Supply) -> Admission {
    let checks = [closed, never_fits, queue_full, objective];
    let refusal = checks.iter().find_map(|check| check(demand, supply));
    refusal.map_or(Admission::Admit, Admission::Refuse)
}

fn closed(_demand: Demand, supply: Supply) -> Option<SubmitError> {
    Some(match supply.closed? {
        Closed::NotStarted => SubmitError::NotStarted,
        Closed::ShuttingDown => SubmitError::Shutdown,
        Closed::Unloading => SubmitError::ModelUnloading,
    })
}

fn never_fits(demand: Demand, supply: Supply) -> Option<SubmitError> {
    let Demand {
        prompt_tokens,
        max_tokens,
        ..
    } = demand;
    let context_length = supply.context_length;
    let needed_tokens = u64::from(prompt_tokens) + u64::from(max_tokens);
    if prompt_tokens == 0 {
        return Some(SubmitError::EmptyPrompt);
    }
    if u64::from(prompt_tokens) + u64::from(max_tokens.min(1)) > u64::from(context_length) {
        return Some(SubmitError::PromptTooLong {
            prompt_tokens,
            context_length,
        });
    }
    if needed_tokens > u64::from(context_length) {
        return Some(SubmitError::TooLong {
            prompt_tokens,
            max_tokens,
            context_length,
        });
    }
    (needed_tokens > supply.kv_capacity_tokens).then_some(SubmitError::KvTooSmall {
        needed_tokens,
        capacity_tokens: supply.kv_capacity_tokens,
    })
}

/// A free slot does not lift the limit: whoever is dispatched at once still passes the queue.
/// With `max_queue_depth` 0 a request is taken only while a slot is free.
fn queue_full(_demand: Demand, supply: Supply) -> Option<SubmitError> {
    let waiting_for_slot = (supply.queue_depth as u64).saturating_add(u64::from(supply.in_flight));
    let slot_is_free = waiting_for_slot < u64::from(supply.capacity);
    let full = supply.queue_depth >= supply.max_queue_depth && !slot_is_free;
    full.then(|| SubmitError::QueueFull {
        queue_depth: supply.queue_depth,
        max_queue_depth: supply.max_queue_depth,
        retry_after_s: retry_after_s(supply.queue_depth, supply.drain_rate_per_s),
    })
}

fn objective(demand: Demand, supply: Supply) -> Option<SubmitError> {
    let slo_ms = demand.slo_ms?;
    let ema_dispatch_ms = supply.ema_dispatch_ms?;
    if supply.queue_depth == 0 && supply.in_flight == 0 {
        return None; // idle: nothing to wait for, and the sample heals the mean
    }
    let predicted = predicted_wait_ms(supply.queue_ahead, ema_dispatch_ms, supply.capacity);
    (predicted > slo_ms as f64).then(|| SubmitError::AdmissionRejected {
        reason: "slo_unattainable",
        predicted_wait_ms: predicted.ceil() as u64,
        slo_ms,
        queue_depth: supply.queue_depth,
        queue_ahead: supply.queue_ahead,
        ema_dispatch_ms,
        retry_after_s: retry_after_s(supply.queue_depth, supply.drain_rate_per_s),
    })
}

/// `(ahead + 1) * ema / capacity`.
#[must_use]
pub fn predicted_wait_ms(queue_ahead: usize, ema_dispatch_ms: f64, capacity: u32) -> f64 {
    (queue_ahead as f64 + 1.0) * ema_dispatch_ms / f64::from(capacity.max(1))
}

/// The moving average after one more sample.
#[must_use]
pub fn next_ema(previous: Option<f64>, sample: f64, alpha: f64) -> f64 {
    previous.map_or(sample, |ema| ema + alpha.clamp(0.0, 1.0) * (sample - ema))
}

/// Whole seconds, 1..=30, until half of the queue should have drained; 1 when nothing is known.
#[must_use]
pub fn retry_after_s(queue_depth: usize, drain_rate_per_s: Option<f64>) -> u32 {
    let Some(rate) = drain_rate_per_s.filter(|rate| *rate > 0.0) else {
        return 1;
    };
    (queue_depth as f64 / 2.0 / rate).ceil().clamp(1.0, 30.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand {
        prompt_tokens: 10,
        max_tokens: 10,
        slo_ms: None,
    };
    const SUPPLY: Supply = Supply {
        closed: None,
        context_length: 100,
        kv_capacity_tokens: 1000,
        queue_depth: 0,
        queue_ahead: 0,
        max_queue_depth: 4,
        in_flight: 1,
        capacity: 1,
        ema_dispatch_ms: Some(100.0),
        drain_rate_per_s: None,
    };

    fn verdict(demand: Demand, supply: Supply) -> &'static str {
        match decide(demand, supply) {
            Admission::Admit => "admit",
            Admission::Refuse(error) => error.reason(),
        }
    }

    #[test]
    fn closing_comes_first() {
        for (closed, expected) in [
            (Closed::NotStarted, "not_started"),
            (Closed::ShuttingDown, "shutting_down"),
            (Closed::Unloading, "model_unloading"),
        ] {
            // Everything else is wrong as well, and does not matter.
            let supply = Supply {
                closed: Some(closed),
                queue_depth: 9,
                ..SUPPLY
            };
            let demand = Demand {
                prompt_tokens: 999,
                slo_ms: Some(0),
                ..DEMAND
            };
            assert_eq!(verdict(demand, supply), expected);
        }
    }

    #[test]
    fn what_can_never_fit() {
        #[rustfmt::skip]
        let table = [
            // prompt, max_tokens, kv, expected
            (0, 10, 1000, Some(SubmitError::EmptyPrompt)),
            (1, 99, 1000, None),
            (99, 1, 1000, None),
            (100, 0, 1000, None), // scoring needs no room for an answer
            (100, 1, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: 100, context_length: 100 })),
            (101, 0, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: 101, context_length: 100 })),
            (101, 50, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: 101, context_length: 100 })),
            (50, 51, 1000, Some(SubmitError::TooLong { prompt_tokens: 50, max_tokens: 51, context_length: 100 })),
            (50, u32::MAX, 1000, Some(SubmitError::TooLong { prompt_tokens: 50, max_tokens: u32::MAX, context_length: 100 })),
            (u32::MAX, u32::MAX, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: u32::MAX, context_length: 100 })),
            (50, 50, 99, Some(SubmitError::KvTooSmall { needed_tokens: 100, capacity_tokens: 99 })),
            (50, 50, 100, None),
            (50, 50, u64::MAX, None),
        ];
        for (prompt_tokens, max_tokens, kv_capacity_tokens, expected) in table {
            let demand = Demand {
                prompt_tokens,
                max_tokens,
                ..DEMAND
            };
            let supply = Supply {
                kv_capacity_tokens,
                ..SUPPLY
            };
            let expected = expected.map_or(Admission::Admit, Admission::Refuse);
            assert_eq!(
                decide(demand, supply),
                expected,
                "{prompt_tokens}+{max_tokens}"
            );
        }
    }

    #[test]
    fn the_queue_limit() {
        #[rustfmt::skip]
        let table = [
            // depth, max, in flight, capacity, expected
            (0, 4, 0, 1, "admit"),
            (3, 4, 1, 1, "admit"),
            (4, 4, 1, 1, "queue_full"),
            (5, 4, 1, 1, "queue_full"),
            (0, 0, 0, 1, "admit"),      // a free slot: it does not wait
            (0, 0, 1, 1, "queue_full"),
            (1, 0, 0, 1, "queue_full"), // the free slot is taken by the one that waits
            (1, 0, 0, 2, "admit"),
            (4, 4, 0, 8, "admit"),
            (usize::MAX, usize::MAX, 1, 1, "queue_full"),
        ];
        for (queue_depth, max_queue_depth, in_flight, capacity, expected) in table {
            let supply = Supply {
                queue_depth,
                max_queue_depth,
                in_flight,
                capacity,
                ..SUPPLY
            };
            assert_eq!(
                verdict(DEMAND, supply),
                expected,
                "{queue_depth}/{max_queue_depth}"
            );
        }
    }

    #[test]
    fn the_latency_objective() {
        #[rustfmt::skip]
        let table = [
            // slo, depth, ahead, in flight, capacity, ema, expected
            (None,      3, 3, 1, 1, Some(1e9),   "admit"),            // no objective
            (Some(0),   3, 3, 1, 1, None,        "admit"),            // no mean yet
            (Some(400), 3, 3, 1, 1, Some(100.0), "admit"),            // 4 * 100 = 400
            (Some(399), 3, 3, 1, 1, Some(100.0), "slo_unattainable"),
            (Some(200), 3, 3, 2, 2, Some(100.0), "admit"),            // capacity 2 halves it
            (Some(199), 3, 3, 2, 2, Some(100.0), "slo_unattainable"),
            (Some(100), 3, 0, 1, 1, Some(100.0), "admit"),            // a high priority: nobody ahead
            (Some(99),  3, 0, 1, 1, Some(100.0), "slo_unattainable"),
            (Some(1),   0, 0, 0, 1, Some(1e6),   "admit"),            // idle heals a poisoned mean
            (Some(1),   0, 0, 1, 1, Some(1e6),   "slo_unattainable"),
            (Some(0),   0, 0, 1, 1, Some(0.0),   "admit"),
            (Some(100), 0, 0, 1, 0, Some(100.0), "admit"),            // capacity 0 counts as 1
            (Some(5),   3, 3, 1, 1, Some(f64::INFINITY), "slo_unattainable"),
            (Some(5),   9, 9, 1, 1, Some(100.0), "queue_full"),       // the queue comes first
        ];
        for (slo_ms, queue_depth, queue_ahead, in_flight, capacity, ema_dispatch_ms, expected) in
            table
        {
            let supply = Supply {
                queue_depth,
                queue_ahead,
                in_flight,
                capacity,
                ema_dispatch_ms,
                ..SUPPLY
            };
            assert_eq!(
                verdict(Demand { slo_ms, ..DEMAND }, supply),
                expected,
                "{slo_ms:?} {supply:?}"
            );
        }
    }

    #[test]
    fn a_refusal_carries_its_numbers() {
        let supply = Supply {
            queue_depth: 3,
            queue_ahead: 2,
            drain_rate_per_s: Some(0.5),
            ..SUPPLY
        };
        let refusal = decide(
            Demand {
                slo_ms: Some(250),
                ..DEMAND
            },
            supply,
        );
        assert_eq!(
            refusal,
            Admission::Refuse(SubmitError::AdmissionRejected {
                reason: "slo_unattainable",
                predicted_wait_ms: 300,
                slo_ms: 250,
                queue_depth: 3,
                queue_ahead: 2,
                ema_dispatch_ms: 100.0,
                retry_after_s: 3,
            })
        );
    }

    #[test]
    fn retry_advice_follows_the_drain_rate() {
        for (depth, rate, expected) in [
            (100, None, 1),
            (100, Some(0.0), 1),
            (100, Some(10.0), 5),
            (100, Some(1.0), 30),
            (0, Some(1.0), 1),
            (3, Some(1e9), 1),
            (usize::MAX, Some(1e-300), 30),
        ] {
            assert_eq!(retry_after_s(depth, rate), expected, "{depth} {rate:?}");
        }
    }

    #[test]
    fn one_slow_request_is_forgotten() {
        let mut ema = next_ema(None, 100.0, 0.2);
        ema = next_ema(Some(ema), 60_000.0, 0.2);
        assert!(ema > 12_000.0);
        for _ in 0..22 {
            ema = next_ema(Some(ema), 100.0, 0.2);
        }
        assert!(ema < 200.0, "{ema}");
    }
}
