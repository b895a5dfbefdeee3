//! Whether a request may enter the queue, and with how many loops: pure functions over plain
//! numbers.
//!
//! No lock, clock or log inside; `queue` gathers the numbers and takes the slot under one lock,
//! so that the decision holds when the request is put in. In this order:
//!
//! 1. closed: nothing is taken any more;
//! 2. can never fit: context, KV memory;
//! 3. no replica lives, for longer than a request may wait for one;
//! 4. an objective below the time of an idle server;
//! 5. queue full: by requests or by their prompt tokens, or by requests of the same client;
//! 6. latency objectives: as asked, else with fewer loops, else refused.
//!
//! # The prediction
//!
//! `predicted_wait = (queue_ahead + share) * ema_dispatch_ms / capacity`, where `share` is what the
//! request's own turn costs next to what it asked for: 1, or less when it is granted fewer loops
//! (`fixed + per_loop * loops` over the same for the loops asked). `queue_ahead` counts who would
//! start sooner, so at priority p only the queue ahead of p matters. The time to the first token
//! adds `share * ema_first_token_ms`.
//!
//! A prediction is a mean, so half of the requests that are predicted to need the whole objective
//! miss it, and lowering the loops of one request shortens its own turn only, not the waits ahead.
//! So loops are lowered before it is too late: as soon as a prediction uses up more than `headroom`
//! of an objective. Whoever accepts fewer loops then makes the queue behind it shorter. Refusals
//! still need a prediction beyond the whole objective.
//!
//! Where it errs: with two very different request lengths the mean describes neither; before the
//! first completion there is no mean and nobody is refused; after a long idle time the mean is old.
//! It can't stay poisoned: an idle executor admits whatever the mean says (the wait *is* nothing
//! then), and each such request brings a fresh sample; a mean that nobody refreshes is dropped
//! (`estimate`). The time of an idle server is the best case of the same prediction: nobody ahead,
//! and the smallest recent sample instead of the mean. It holds for idle executors too, so it asks
//! for more evidence, and that evidence expires.

use super::refusal::{Objective, SubmitError};
use crate::rate::{drained_after_s, retry_after_s};
use crate::runtime::LoopCost;

/// The request's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Most tokens to generate; 0 scores the prompt only.
    pub max_tokens: u32,
    /// With an attention window: most tokens whose KV it holds at once; None = all of them.
    pub held_tokens: Option<u64>,
    /// Its objective on the wait, or the server's.
    pub slo_ms: Option<u64>,
    /// Its objective on the time to the first token.
    pub slo_ttft_ms: Option<u64>,
    /// Loops asked; None = the model's default.
    pub loops: Option<u32>,
    /// Fewest loops it accepts; None = as many as asked.
    pub min_loops: Option<u32>,
}

impl Demand {
    /// Whether it names any latency objective.
    #[must_use]
    pub fn has_objective(&self) -> bool {
        self.slo_ms.is_some() || self.slo_ttft_ms.is_some()
    }
}

/// The executor's side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Supply {
    /// Why nothing is taken any more, if so.
    pub closed: Option<Closed>,
    /// All replicas are being restarted for longer than a request may wait: seconds until the next attempt.
    pub no_replica_retry_s: Option<u32>,
    /// Longest prompt + completion in tokens.
    pub context_length: u32,
    /// Tokens of KV in the smallest replica's pool: a request may go to any replica.
    pub kv_capacity_tokens: u64,
    /// Requests waiting.
    pub queue_depth: usize,
    /// Those that would start before this one; counted only for requests with an objective.
    pub queue_ahead: usize,
    /// Requests of the same submit that were taken just before this one and count as waiting.
    pub group_ahead: usize,
    /// Most requests that may wait.
    pub max_queue_depth: usize,
    /// Prompt tokens of the waiting requests.
    pub queued_prompt_tokens: u64,
    /// Most prompt tokens that may wait; None = no such limit.
    pub max_queued_prompt_tokens: Option<u64>,
    /// Requests of the same client that wait, those of the same submit included.
    pub client_queued: usize,
    /// Most of them that may wait; None = as many as of all clients.
    pub client_max_queued: Option<usize>,
    /// The client's part of the slots' time while the others want them too, 0..=1.
    pub client_part: f64,
    /// Requests in replicas.
    pub in_flight: u32,
    /// Requests all replicas should hold together.
    pub capacity: u32,
    /// Nobody waits, and a running request would give its slot to this one.
    pub may_preempt: bool,
    /// What was measured lately.
    pub measured: super::estimate::Measured,
    /// What loops cost; None for ordinary models.
    pub loop_cost: Option<LoopCost>,
    /// Part of an objective, 0..=1, that a prediction may use up before loops are lowered.
    pub headroom: f64,
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
    /// Its own loop panicked.
    Failed,
}

/// The decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// Take it.
    Admit {
        /// What it gets of the loops it asked for; None when neither it nor the model speaks of
        /// loops.
        loops: Option<Loops>,
    },
    /// Refuse it, with the numbers that led there.
    Refuse(SubmitError),
}

/// Loops of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loops {
    /// What the request, or the model's default, asks for.
    pub asked: u32,
    /// What it runs with.
    pub granted: u32,
}

/// The decision, in the order of the module doc.
#[must_use]
pub fn decide(demand: Demand, supply: Supply) -> Admission {
    let checks = [
        closed,
        never_fits,
        no_replica,
        below_idle,
        queue_full,
        client_queue_full,
    ];
    if let Some(refusal) = checks.iter().find_map(|check| check(demand, supply)) {
        return Admission::Refuse(refusal);
    }
    if missed(demand, supply, 1.0, supply.headroom).is_some()
        && let Some(loops) = affordable_loops(demand, supply)
    {
        return Admission::Admit { loops: Some(loops) };
    }
    if let Some(miss) = missed(demand, supply, 1.0, 1.0) {
        return Admission::Refuse(unattainable(miss, supply));
    }
    let default = supply.loop_cost.map(|cost| cost.default_loops);
    let loops = demand.loops.or(default).map(|asked| Loops {
        asked,
        granted: asked,
    });
    Admission::Admit { loops }
}

fn closed(_demand: Demand, supply: Supply) -> Option<SubmitError> {
    let in_flight = supply.in_flight;
    let retry_after_s = drained_after_s(in_flight as usize, supply.measured.drain_rate_per_s);
    Some(match supply.closed? {
        Closed::NotStarted => SubmitError::NotStarted,
        Closed::ShuttingDown => SubmitError::Shutdown {
            in_flight,
            retry_after_s,
        },
        Closed::Unloading => SubmitError::ModelUnloading {
            in_flight,
            retry_after_s,
        },
        Closed::Failed => SubmitError::Failed,
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
    let needed_tokens = demand.held_tokens.unwrap_or(needed_tokens);
    (needed_tokens > supply.kv_capacity_tokens).then_some(SubmitError::KvTooSmall {
        needed_tokens,
        capacity_tokens: supply.kv_capacity_tokens,
    })
}

fn no_replica(_demand: Demand, supply: Supply) -> Option<SubmitError> {
    let retry_after_s = supply.no_replica_retry_s?;
    Some(SubmitError::NoReplica { retry_after_s })
}

/// The best case of the prediction, with the fewest loops that the request accepts.
fn below_idle(demand: Demand, supply: Supply) -> Option<SubmitError> {
    let measured = supply.measured;
    let share = least_share(demand, supply.loop_cost);
    let idle_wait_ms = measured
        .floor_service_ms
        .map(|floor| wait_ms(0, share, floor, supply.capacity));
    let idle_first_token_ms = measured.floor_first_token_ms.map(|floor| share * floor);
    [
        (Objective::Wait, demand.slo_ms, idle_wait_ms),
        (
            Objective::FirstToken,
            demand.slo_ttft_ms,
            idle_first_token_ms,
        ),
    ]
    .into_iter()
    .find_map(|(objective, slo_ms, idle_ms)| {
        let (slo_ms, idle_ms) = (slo_ms?, idle_ms?);
        (idle_ms > slo_ms as f64).then(|| SubmitError::SloBelowIdle {
            objective,
            slo_ms,
            idle_ms: idle_ms.ceil() as u64,
        })
    })
}

/// A free slot lifts both limits, because whoever takes it does not wait: with `max_queue_depth` 0
/// a request is taken only while a slot is free, or while somebody would give way to it, and a
/// prompt above the limit on tokens waits nowhere, but runs.
fn queue_full(demand: Demand, supply: Supply) -> Option<SubmitError> {
    let tokens = supply
        .queued_prompt_tokens
        .saturating_add(u64::from(demand.prompt_tokens));
    let too_many_tokens = supply
        .max_queued_prompt_tokens
        .is_some_and(|most| tokens > most);
    let full =
        (supply.queue_depth >= supply.max_queue_depth || too_many_tokens) && !is_slot_free(supply);
    full.then(|| SubmitError::QueueFull {
        queue_depth: supply.queue_depth.saturating_sub(supply.group_ahead),
        max_queue_depth: supply.max_queue_depth,
        queued_prompt_tokens: supply.queued_prompt_tokens,
        max_queued_prompt_tokens: supply.max_queued_prompt_tokens,
        retry_after_s: retry_after_s(supply.queue_depth, supply.measured.drain_rate_per_s),
    })
}

/// One client's own limit, lifted by a free slot as well.
fn client_queue_full(_demand: Demand, supply: Supply) -> Option<SubmitError> {
    let max_queued = supply.client_max_queued?;
    let queued = supply.client_queued;
    let full = queued >= max_queued && !is_slot_free(supply);
    let rate = supply.measured.drain_rate_per_s;
    full.then(|| SubmitError::KeyQueueFull {
        queued: queued.saturating_sub(supply.group_ahead),
        max_queued,
        retry_after_s: retry_after_s(queued, rate.map(|rate| rate * supply.client_part)),
    })
}

fn is_slot_free(supply: Supply) -> bool {
    let waiting_for_slot = (supply.queue_depth as u64).saturating_add(u64::from(supply.in_flight));
    waiting_for_slot < u64::from(supply.capacity) || supply.may_preempt
}

/// Largest group that the queue's limits let through when nobody else is there: a slot each, or as
/// many as may wait.
#[must_use]
pub fn group_max(prompt_tokens: u64, supply: Supply) -> usize {
    let by_tokens = supply.max_queued_prompt_tokens.map_or(usize::MAX, |most| {
        usize::try_from(most / prompt_tokens.max(1)).unwrap_or(usize::MAX)
    });
    let may_wait = supply.max_queue_depth.min(by_tokens);
    may_wait.max(supply.capacity as usize)
}

/// An objective that would be missed.
struct Miss {
    objective: Objective,
    slo_ms: u64,
    wait_ms: f64,
    first_token_ms: Option<f64>,
}

/// The first objective of which a request would use up more than `part`, if its own turn costs
/// `share` of what it asked.
fn missed(demand: Demand, supply: Supply, share: f64, part: f64) -> Option<Miss> {
    let ema_ms = supply.measured.ema_dispatch_ms?;
    if starts_at_once(supply) {
        return None; // nothing to wait for, and the sample heals the mean
    }
    let wait_ms = wait_ms(supply.queue_ahead, share, ema_ms, supply.capacity);
    let first_token_ms = supply
        .measured
        .ema_first_token_ms
        .map(|ema_ms| wait_ms + share * ema_ms);
    let miss = |objective, slo_ms, predicted: f64, first_token_ms| {
        (predicted > part * slo_ms as f64).then_some(Miss {
            objective,
            slo_ms,
            wait_ms,
            first_token_ms,
        })
    };
    let wait = demand
        .slo_ms
        .and_then(|slo_ms| miss(Objective::Wait, slo_ms, wait_ms, None));
    wait.or_else(|| {
        let (slo_ms, predicted) = (demand.slo_ttft_ms?, first_token_ms?);
        miss(Objective::FirstToken, slo_ms, predicted, first_token_ms)
    })
}

/// Nobody is there but the request's own group, and that has a slot each.
fn starts_at_once(supply: Supply) -> bool {
    supply.in_flight == 0
        && supply.queue_depth == supply.group_ahead
        && supply.group_ahead < supply.capacity.max(1) as usize
}

fn unattainable(miss: Miss, supply: Supply) -> SubmitError {
    SubmitError::AdmissionRejected {
        reason: "slo_unattainable",
        objective: miss.objective,
        predicted_wait_ms: miss.wait_ms.ceil() as u64,
        predicted_ttft_ms: miss.first_token_ms.map(|ms| ms.ceil() as u64),
        slo_ms: miss.slo_ms,
        queue_depth: supply.queue_depth,
        queue_ahead: supply.queue_ahead,
        ema_dispatch_ms: supply.measured.ema_dispatch_ms.unwrap_or(0.0),
        retry_after_s: retry_after_s(supply.queue_depth, supply.measured.drain_rate_per_s),
    }
}

/// Most loops below those asked with which the headroom of every objective is kept; the fewest
/// where none keep it, but no objective is missed; None when the request accepts no fewer, or even
/// the fewest are too many.
fn affordable_loops(demand: Demand, supply: Supply) -> Option<Loops> {
    let cost = supply.loop_cost?;
    let (least, asked) = loop_range(demand, cost)?;
    let fits = |loops, part| missed(demand, supply, share(cost, loops, asked), part).is_none();
    let is_met = |loops| fits(loops, supply.headroom);
    if !is_met(least) {
        return fits(least, 1.0).then_some(Loops {
            asked,
            granted: least,
        });
    }
    // `best` meets the objectives and `above` misses them: the share grows with the loops.
    let (mut best, mut above) = (least, asked);
    while above - best > 1 {
        let middle = best + (above - best) / 2;
        if is_met(middle) {
            best = middle;
        } else {
            above = middle;
        }
    }
    Some(Loops {
        asked,
        granted: best,
    })
}

/// (fewest accepted, asked); None when there is nothing between them.
fn loop_range(demand: Demand, cost: LoopCost) -> Option<(u32, u32)> {
    let asked = demand.loops.unwrap_or(cost.default_loops);
    let least = demand.min_loops?.max(1);
    (least < asked).then_some((least, asked))
}

/// The cheapest that the request's own turn may become.
fn least_share(demand: Demand, cost: Option<LoopCost>) -> f64 {
    let least = cost.and_then(|cost| {
        let (least, asked) = loop_range(demand, cost)?;
        Some(share(cost, least, asked))
    });
    least.unwrap_or(1.0)
}

/// Cost of `loops` next to that of `asked`: 0..=1. A cost that makes no sense saves nothing.
fn share(cost: LoopCost, loops: u32, asked: u32) -> f64 {
    let total = |loops: u32| cost.fixed_ms.max(0.0) + cost.per_loop_ms * f64::from(loops);
    let share = total(loops) / total(asked);
    if share.is_finite() {
        share.clamp(0.0, 1.0)
    } else {
        1.0
    }
}

/// `(ahead + share) * ema / capacity`.
fn wait_ms(queue_ahead: usize, share: f64, ema_ms: f64, capacity: u32) -> f64 {
    (queue_ahead as f64 + share) * ema_ms / f64::from(capacity.max(1))
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
