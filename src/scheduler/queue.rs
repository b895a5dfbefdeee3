//! Who waits, who runs, and what the driver has to look at: the one lock of an executor.
//!
//! The order is a static key: `queued_at - priority * aging_interval`, then the sequence number.
//! All jobs age at the same rate, so this is aging without ever reordering; interval 0 makes it
//! `-priority`, then the sequence number: strictly by priority, FIFO within one.
//!
//! # Synchronization
//!
//! One mutex guards everything in `State`. `wake` tells the driver that an event was posted or a
//! deadline came nearer; `idle` tells `shutdown` that a slot was released. Both are signalled with
//! the change made under the lock, and both waiters re-check under it, so no wake-up is lost. The
//! lock is never held across a call into a runtime, a record's delivery or a metric. Whoever takes
//! a record out of `waiting` owns its fate: it is dispatched or settled by that thread, once.
//!
//! What is not here: any decision (`admission`, `replica`) and any effect (`driver`).

use super::admission::{self, Admission, Closed, Demand, Supply};
use super::estimate::{Estimates, Measured, Sample};
use super::record::{Ending, Record};
use super::refusal::SubmitError;
use crate::clock::Clock;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Place in the queue; smaller is sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueKey {
    /// Milliseconds, see the module doc.
    rank: i64,
    /// Submit order; unique within an executor.
    pub(crate) number: u64,
}

/// The key of a request that came `queued_ms` after some fixed moment.
fn queue_key(queued_ms: u64, priority: i32, aging_interval_ms: u64, number: u64) -> QueueKey {
    let clamp = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let rank = if aging_interval_ms == 0 {
        -i64::from(priority)
    } else {
        let gained = i64::from(priority).saturating_mul(clamp(aging_interval_ms));
        clamp(queued_ms).saturating_sub(gained)
    };
    QueueKey { rank, number }
}

/// What the driver has to look at. At most three per request: its submit, a cancel, its end.
#[derive(Debug)]
pub(crate) enum Event {
    /// Something waits.
    Submitted,
    /// A runtime reported the end of a job.
    Ended { number: u64, ending: Ending },
    /// Somebody wants a running job to end.
    Cancel { number: u64, ending: Ending },
    /// The record's wait became too long; it is out of the queue.
    Expired(Arc<Record>),
    /// The thread shall end.
    Stop,
}

/// A job that a replica has.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) record: Arc<Record>,
    /// Index of its replica.
    pub(crate) replica: usize,
}

/// Counts for snapshots and metrics, taken at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Counts {
    pub(crate) queue_depth: usize,
    pub(crate) inflight: Vec<u32>,
    pub(crate) ema_dispatch_ms: Option<f64>,
    pub(crate) closed: Option<Closed>,
}

struct State {
    closed: Option<Closed>,
    waiting: BTreeMap<QueueKey, Arc<Record>>,
    /// Those of `waiting` with a deadline.
    deadlines: BTreeSet<(Instant, QueueKey)>,
    running: HashMap<u64, Running>,
    /// Jobs per replica; sums to `running.len()`.
    inflight: Vec<u32>,
    last_replica: usize,
    events: VecDeque<Event>,
    /// Prompt tokens of `waiting`.
    queued_prompt_tokens: u64,
    estimates: Estimates,
}

/// See the module doc.
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    idle: Condvar,
    next_number: AtomicU64,
    start: Instant,
    aging_interval_ms: u64,
}

impl Queue {
    pub(crate) fn new(
        n_replicas: usize,
        aging_interval_ms: u64,
        ema_alpha: f64,
        now: Instant,
    ) -> Self {
        Self {
            state: Mutex::new(State {
                closed: Some(Closed::NotStarted),
                waiting: BTreeMap::new(),
                deadlines: BTreeSet::new(),
                running: HashMap::new(),
                inflight: vec![0; n_replicas],
                last_replica: n_replicas.saturating_sub(1),
                events: VecDeque::new(),
                queued_prompt_tokens: 0,
                estimates: Estimates::new(ema_alpha),
            }),
            wake: Condvar::new(),
            idle: Condvar::new(),
            next_number: AtomicU64::new(0),
            start: now,
            aging_interval_ms,
        }
    }

    /// The place of a request that comes now.
    pub(crate) fn key(&self, priority: i32, now: Instant) -> QueueKey {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let queued_ms = now.duration_since(self.start).as_millis();
        let queued_ms = u64::try_from(queued_ms).unwrap_or(u64::MAX);
        queue_key(queued_ms, priority, self.aging_interval_ms, number)
    }

    /// Takes submits from now on, unless it was closed before. Says whether this call opened it.
    pub(crate) fn open(&self) -> bool {
        let mut state = self.state.lock();
        let opened = state.closed == Some(Closed::NotStarted);
        if opened {
            state.closed = None;
        }
        opened
    }

    /// Decides on a group and takes a slot for each, all or none, in one step. Nobody else may hold
    /// the records yet; they learn here how many loops they are granted. `supply` brings what does
    /// not change; the rest of it is filled in here.
    pub(crate) fn admit(
        &self,
        group: &mut [Arc<Record>],
        demand: impl Fn(&Record) -> Demand,
        supply: Supply,
        now: Instant,
    ) -> Result<(), SubmitError> {
        let mut state = self.state.lock();
        let mut supply = state.supply(supply, now);
        for (group_ahead, record) in group.iter_mut().enumerate() {
            let demand = demand(record);
            if demand.has_objective() {
                supply.measured = state.estimates.measured(now, state.is_idle());
                supply.queue_ahead = state.waiting.range(..record.key).count() + group_ahead;
            }
            supply.group_ahead = group_ahead;
            match admission::decide(demand, supply) {
                Admission::Admit { loops } => Record::grant(record, loops),
                Admission::Refuse(error) => return Err(error),
            }
            supply.queue_depth += 1;
            supply.queued_prompt_tokens += u64::from(demand.prompt_tokens);
        }
        for record in group.iter() {
            state.put(record);
        }
        self.wake.notify_one();
        Ok(())
    }

    /// Takes a waiting request out; the caller must settle it.
    pub(crate) fn remove(&self, key: QueueKey) -> Option<Arc<Record>> {
        self.state.lock().take(key)
    }

    /// Leaves something for the driver.
    pub(crate) fn post(&self, event: Event) {
        self.state.lock().events.push_back(event);
        self.wake.notify_one();
    }

    /// The next event; waits for it.
    pub(crate) fn next_event(&self, clock: &dyn Clock) -> Event {
        let mut state = self.state.lock();
        loop {
            if let Some(event) = state.pop_event(clock.now()) {
                return event;
            }
            match state.deadlines.first().copied() {
                Some((deadline, _)) => {
                    self.wake.wait_until(&mut state, deadline);
                }
                None => self.wake.wait(&mut state),
            }
        }
    }

    /// The next event if there is one.
    pub(crate) fn try_event(&self, clock: &dyn Clock) -> Option<Event> {
        self.state.lock().pop_event(clock.now())
    }

    /// Moves the first waiting request to the replica that `choose(inflight, last)` names.
    pub(crate) fn take_for_dispatch(
        &self,
        choose: impl FnOnce(&[u32], usize) -> Option<usize>,
    ) -> Option<Running> {
        let mut state = self.state.lock();
        let key = *state.waiting.keys().next()?;
        let replica = choose(&state.inflight, state.last_replica)?;
        let record = state.take(key)?;
        state.inflight[replica] += 1;
        state.last_replica = replica;
        let running = Running { record, replica };
        state.running.insert(key.number, running.clone());
        Some(running)
    }

    /// A running job.
    pub(crate) fn running(&self, number: u64) -> Option<Running> {
        self.state.lock().running.get(&number).cloned()
    }

    /// Frees the slot of a job whose runtime is done with it. `sample`: what it says about the time
    /// that requests take, if it says anything.
    pub(crate) fn release(
        &self,
        number: u64,
        sample: impl FnOnce(&Record) -> Option<Sample>,
        now: Instant,
    ) -> Option<Arc<Record>> {
        let mut state = self.state.lock();
        let running = state.running.remove(&number)?;
        state.inflight[running.replica] -= 1;
        let sample = sample(&running.record);
        state.estimates.released(sample, now);
        self.idle.notify_all();
        Some(running.record)
    }

    /// Refuses from now on. The first reason stays. Returns who waited; the caller must settle
    /// them.
    pub(crate) fn close(&self, reason: Closed) -> Vec<Arc<Record>> {
        let mut state = self.state.lock();
        if matches!(state.closed, None | Some(Closed::NotStarted)) {
            state.closed = Some(reason);
        }
        state.deadlines.clear();
        state.queued_prompt_tokens = 0;
        std::mem::take(&mut state.waiting).into_values().collect()
    }

    /// Waits until nothing runs; false when `timeout` came first.
    pub(crate) fn wait_idle(&self, timeout: Duration) -> bool {
        let mut state = self.state.lock();
        let running = |state: &mut State| !state.running.is_empty();
        match Instant::now().checked_add(timeout) {
            Some(deadline) => {
                self.idle.wait_while_until(&mut state, running, deadline);
            }
            None => self.idle.wait_while(&mut state, running),
        }
        state.running.is_empty()
    }

    pub(crate) fn counts(&self) -> Counts {
        let state = self.state.lock();
        Counts {
            queue_depth: state.waiting.len(),
            inflight: state.inflight.clone(),
            ema_dispatch_ms: state.estimates.ema_dispatch_ms(),
            closed: state.closed,
        }
    }

    /// Everyone who waits, first in line first, then everyone who runs, in submit order.
    pub(crate) fn records(&self) -> Vec<Arc<Record>> {
        let state = self.state.lock();
        let mut running: Vec<_> = state.running.values().map(|job| &job.record).collect();
        running.sort_by_key(|record| record.key.number);
        state.waiting.values().chain(running).cloned().collect()
    }

    /// Numbers of everyone who runs.
    pub(crate) fn running_numbers(&self) -> Vec<u64> {
        self.state.lock().running.keys().copied().collect()
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// What admission looks at, for a request without an objective.
    fn supply(&self, unchanging: Supply, now: Instant) -> Supply {
        Supply {
            closed: self.closed,
            queue_depth: self.waiting.len(),
            queued_prompt_tokens: self.queued_prompt_tokens,
            in_flight: self.running.len() as u32,
            measured: Measured {
                drain_rate_per_s: self.estimates.drain_rate_per_s(now),
                ..Measured::default()
            },
            ..unchanging
        }
    }

    fn put(&mut self, record: &Arc<Record>) {
        self.waiting.insert(record.key, Arc::clone(record));
        self.queued_prompt_tokens += record.request.prompt.len() as u64;
        if let Some(deadline) = record.deadline {
            self.deadlines.insert((deadline, record.key));
        }
        self.events.push_back(Event::Submitted);
    }

    fn take(&mut self, key: QueueKey) -> Option<Arc<Record>> {
        let record = self.waiting.remove(&key)?;
        self.queued_prompt_tokens -= record.request.prompt.len() as u64;
        if let Some(deadline) = record.deadline {
            self.deadlines.remove(&(deadline, key));
        }
        Some(record)
    }

    /// Ends before deadlines: a slot that came free in time is used for who waited in time.
    fn pop_event(&mut self, now: Instant) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        let (deadline, key) = *self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.take(key).map(Event::Expired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Without aging the order is exactly (priority desc, submit order).
        #[test]
        fn without_aging_the_order_is_priority_then_submit(
            jobs in prop::collection::vec((0_u64..1000, -100_i32..=100), 1..50)
        ) {
            let mut keys: Vec<_> = jobs.iter().zip(0..)
                .map(|(&(queued_ms, priority), number)| queue_key(queued_ms, priority, 0, number))
                .collect();
            keys.sort();
            let mut expected: Vec<u64> = (0..jobs.len() as u64).collect();
            expected.sort_by_key(|&number| -jobs[number as usize].1);
            let order: Vec<u64> = keys.iter().map(|key| key.number).collect();
            prop_assert_eq!(order, expected);
        }

        /// A job is overtaken only by those that come within `levels * interval` after it.
        #[test]
        fn aging_bounds_how_long_one_can_be_overtaken(
            queued_ms in 0_u64..1_000_000, low in -100_i32..=100, levels in 0_i32..=200,
            interval in 1_u64..100_000, later_ms in 0_u64..100_000_000,
        ) {
            let high = (low + levels).min(100);
            let waits = queue_key(queued_ms, low, interval, 0);
            let comes = queue_key(queued_ms + later_ms, high, interval, 1);
            let bound = (high - low) as u64 * interval;
            prop_assert_eq!(comes < waits, later_ms < bound);
        }
    }
}
