//! Why a request was not taken: the error of `submit`, with the numbers that led there.
//!
//! Plain data, no thread. Made by `admission` alone; turned into a status and a body by whoever
//! speaks to the client. A refused request holds nothing.

/// What a latency objective is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// `slo_ms`: the predicted wait, the request's own turn included.
    Wait,
    /// `slo_ttft_ms`: from submit to the first token.
    FirstToken,
}

impl Objective {
    /// Name of the option, as clients write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "slo_ms",
            Self::FirstToken => "slo_ttft_ms",
        }
    }
}

/// Why a request was not taken. It holds nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// Nobody has called `start`.
    #[error("the executor has not been started")]
    NotStarted,
    /// The server drains.
    #[error("the server is shutting down")]
    Shutdown {
        /// Requests that are still being finished.
        in_flight: u32,
        /// When those should be done, from the measured drain rate: 1..=30.
        retry_after_s: u32,
    },
    /// The model is being unloaded.
    #[error("the model is being unloaded")]
    ModelUnloading {
        /// Requests that are still being finished.
        in_flight: u32,
        /// When those should be done, from the measured drain rate: 1..=30.
        retry_after_s: u32,
    },
    /// The scheduler of this model broke; `/health` says so too.
    #[error("the model's scheduler failed; the server has to be restarted")]
    Failed,
    /// Every replica is lost, and none came back in the time that a request may wait for one.
    #[error("no replica of the model is running; one is restarted as soon as that works")]
    NoReplica {
        /// When the next attempt to restart one is due: 1..=30.
        retry_after_s: u32,
    },
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
    /// Its latency objective is below what an idle server was measured to need.
    #[error(
        "the latency objective {} of {slo_ms} ms is below the {idle_ms} ms that this model needs \
         with nobody else there",
        objective.name()
    )]
    SloBelowIdle {
        /// Which objective.
        objective: Objective,
        /// Its value.
        slo_ms: u64,
        /// The best case, from the smallest of the recent samples; rounded up.
        idle_ms: u64,
    },
    /// As many wait as may, by number or by prompt tokens.
    #[error(
        "{queue_depth} requests wait already; with this one more than {max_queue_depth} requests{} \
         would wait",
        max_queued_prompt_tokens
            .map(|most| format!(" or {most} prompt tokens"))
            .unwrap_or_default()
    )]
    QueueFull {
        /// Requests waiting.
        queue_depth: usize,
        /// Most requests that may wait.
        max_queue_depth: usize,
        /// Prompt tokens of the waiting requests.
        queued_prompt_tokens: u64,
        /// Most prompt tokens that may wait; None = no such limit.
        max_queued_prompt_tokens: Option<u64>,
        /// When a retry makes sense, from the measured drain rate: 1..=30.
        retry_after_s: u32,
    },
    /// As many requests of this client wait as may.
    #[error("{queued} requests of this key wait already; at most {max_queued} may")]
    KeyQueueFull {
        /// Requests of the client that wait.
        queued: usize,
        /// Most requests of it that may wait.
        max_queued: usize,
        /// When a retry makes sense, from the measured drain rate and the client's part of it: 1..=30.
        retry_after_s: u32,
    },
    /// It would miss its latency objective.
    #[error(
        "the predicted {} exceeds the latency objective {} of {slo_ms} ms",
        predicted_ttft_ms.map_or_else(
            || format!("wait of {predicted_wait_ms} ms"),
            |ttft| format!("time to the first token of {ttft} ms"),
        ),
        objective.name()
    )]
    AdmissionRejected {
        /// `slo_unattainable`.
        reason: &'static str,
        /// Which objective.
        objective: Objective,
        /// `(queue_ahead + 1) * ema / capacity`.
        predicted_wait_ms: u64,
        /// That wait and the mean time from dispatch to the first token; only for `FirstToken`.
        predicted_ttft_ms: Option<u64>,
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
            Self::Shutdown { .. } => "shutting_down",
            Self::ModelUnloading { .. } => "model_unloading",
            Self::Failed => "model_failed",
            Self::NoReplica { .. } => "no_replica",
            Self::EmptyPrompt => "empty_prompt",
            Self::PromptTooLong { .. } | Self::TooLong { .. } => "context_length_exceeded",
            Self::KvTooSmall { .. } => "kv_too_small",
            Self::SloBelowIdle { .. } => "slo_below_idle",
            Self::QueueFull { .. } => "queue_full",
            Self::KeyQueueFull { .. } => "key_queue_full",
            Self::AdmissionRejected { reason, .. } => reason,
        }
    }

    /// Whether the same request may be taken later. False for requests that can never be served:
    /// a 400, `x-should-retry: false`.
    #[must_use]
    pub fn should_retry(&self) -> bool {
        match self {
            Self::NotStarted
            | Self::Shutdown { .. }
            | Self::ModelUnloading { .. }
            | Self::Failed
            | Self::NoReplica { .. }
            | Self::QueueFull { .. }
            | Self::KeyQueueFull { .. }
            | Self::AdmissionRejected { .. } => true,
            Self::EmptyPrompt
            | Self::PromptTooLong { .. }
            | Self::TooLong { .. }
            | Self::KvTooSmall { .. }
            | Self::SloBelowIdle { .. } => false,
        }
    }

    /// Seconds after which a retry makes sense; None where it never does or nobody knows.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Shutdown { retry_after_s, .. }
            | Self::ModelUnloading { retry_after_s, .. }
            | Self::NoReplica { retry_after_s }
            | Self::QueueFull { retry_after_s, .. }
            | Self::KeyQueueFull { retry_after_s, .. }
            | Self::AdmissionRejected { retry_after_s, .. } => Some(*retry_after_s),
            _ => None,
        }
    }

    /// The numbers that led there, by name, for error bodies and logs. Whole numbers except
    /// `ema_dispatch_ms`. Empty where there are none.
    #[must_use]
    pub fn numbers(&self) -> Vec<(&'static str, f64)> {
        match *self {
            Self::NotStarted | Self::Failed | Self::NoReplica { .. } | Self::EmptyPrompt => {
                Vec::new()
            }
            Self::Shutdown { in_flight, .. } | Self::ModelUnloading { in_flight, .. } => {
                vec![("in_flight", f64::from(in_flight))]
            }
            Self::PromptTooLong {
                prompt_tokens,
                context_length,
            } => vec![
                ("prompt_tokens", f64::from(prompt_tokens)),
                ("context_length", f64::from(context_length)),
            ],
            Self::TooLong {
                prompt_tokens,
                max_tokens,
                context_length,
            } => vec![
                ("prompt_tokens", f64::from(prompt_tokens)),
                ("max_tokens", f64::from(max_tokens)),
                ("context_length", f64::from(context_length)),
            ],
            Self::KvTooSmall {
                needed_tokens,
                capacity_tokens,
            } => vec![
                ("needed_tokens", needed_tokens as f64),
                ("capacity_tokens", capacity_tokens as f64),
            ],
            Self::SloBelowIdle {
                objective,
                slo_ms,
                idle_ms,
            } => vec![
                (objective.name(), slo_ms as f64),
                ("idle_ms", idle_ms as f64),
            ],
            Self::KeyQueueFull {
                queued, max_queued, ..
            } => vec![("queued", queued as f64), ("max_queued", max_queued as f64)],
            Self::QueueFull { .. } | Self::AdmissionRejected { .. } => self.load_numbers(),
        }
    }

    /// The numbers of the refusals that depend on load.
    fn load_numbers(&self) -> Vec<(&'static str, f64)> {
        let mut numbers = Vec::with_capacity(6);
        match *self {
            Self::QueueFull {
                queue_depth,
                max_queue_depth,
                queued_prompt_tokens,
                max_queued_prompt_tokens,
                ..
            } => {
                numbers.push(("queue_depth", queue_depth as f64));
                numbers.push(("max_queue_depth", max_queue_depth as f64));
                numbers.push(("queued_prompt_tokens", queued_prompt_tokens as f64));
                let most = max_queued_prompt_tokens.map(|most| most as f64);
                numbers.extend(most.map(|most| ("max_queued_prompt_tokens", most)));
            }
            Self::AdmissionRejected {
                objective,
                predicted_wait_ms,
                predicted_ttft_ms,
                slo_ms,
                queue_depth,
                queue_ahead,
                ema_dispatch_ms,
                ..
            } => {
                numbers.push(("predicted_wait_ms", predicted_wait_ms as f64));
                let ttft = predicted_ttft_ms.map(|ttft| ttft as f64);
                numbers.extend(ttft.map(|ttft| ("predicted_ttft_ms", ttft)));
                numbers.push((objective.name(), slo_ms as f64));
                numbers.push(("queue_depth", queue_depth as f64));
                numbers.push(("queue_ahead", queue_ahead as f64));
                numbers.push(("ema_dispatch_ms", ema_dispatch_ms));
            }
            _ => {}
        }
        numbers
    }
}
