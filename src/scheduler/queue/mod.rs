//! Who waits, who runs, and what the driver has to look at: the one lock of an executor.
//!
//! The order of one client's requests is a static key: `queued_at - priority * aging_interval`, then the sequence number.
//! All jobs age at the same rate, so this is aging without ever reordering; interval 0 makes it
//! `-priority`, then the sequence number: strictly by priority, FIFO within one. Several clients share the
//! slots of a priority by their weights (`fair`).
//!
//! # Synchronization
//!
//! One mutex guards everything in `State`. `wake` tells the driver that an event was posted or a
//! deadline came nearer; `idle` tells `shutdown` that a slot was released. Both are signalled with
//! the change made under the lock, and both waiters re-check under it, so no wake-up is lost. The
//! lock is never held across a call into a runtime, a record's delivery or a metric. Whoever takes
//! a record out of `waiting` owns its fate: it is dispatched or settled by that thread, once.
//!
//! A preempted job keeps its record in `running` and its place in the order in `parked`: it holds
//! no slot and counts in no limit of the queue. A job that comes back from a lost replica, or from an
//! upstream that is full, waits again at its old place, exempt from those limits (`losses`); each run of a
//! job is an *attempt*, and what an earlier one still reports is ignored.
//!
//! Records change to Dispatched, Preempted and back under this lock, so that a listing taken under
//! it shows places and states of one moment.
//!
//! What is not here: any decision (`admission`, `dispatch`, `replica`, `health`), the books of replicas
//! (`roster`) and any effect (`driver`, `recovery`).

mod fair;
mod key;
mod losses;
mod slots;

pub use fair::Share;
pub(crate) use key::QueueKey;
pub(crate) use losses::Back;

use super::admission::{self, Admission, Closed, Demand, Supply};
use super::estimate::{Estimates, Measured, Sample};
use super::lifecycle::Lifecycle;
use super::record::{Ending, Record};
use super::refusal::SubmitError;
use super::roster::{ReplicaCounts, Roster};
use crate::clock::Clock;
use crate::config::ExecutorConfig;
use crate::runtime::Capability;
use fair::Clients;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often the driver's thread looks whether replicas still live.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What the driver has to look at. At most three per run of a request (its submit, a cancel, its end), one
/// per attempt to restart a replica.
#[derive(Debug)]
pub(crate) enum Event {
    /// Something waits.
    Submitted,
    /// A runtime reported the end of a job.
    Ended {
        number: u64,
        /// Which run of it; see [`Running::attempt`].
        attempt: u32,
        ending: Ending,
    },
    /// Somebody wants a running job to end.
    Cancel { number: u64, ending: Ending },
    /// The record's wait became too long; it is out of the queue.
    Expired(Arc<Record>),
    /// It is time to look at the replicas.
    Tick,
    /// An attempt to make a replica anew has ended: what the new one can hold, or why there is none.
    Rebuilt {
        replica: usize,
        result: Result<Capability, String>,
    },
}

/// A job that a replica has.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) record: Arc<Record>,
    /// Index of its replica.
    pub(crate) replica: usize,
    /// How often it was requeued before this run.
    pub(crate) attempt: u32,
    /// It lost its slot for now.
    parked: bool,
}

/// A job that has no replica.
struct Waiting {
    record: Arc<Record>,
    /// When its wait becomes too long.
    deadline: Option<Instant>,
}

/// What the driver has to tell a runtime.
pub(crate) enum Step {
    /// Take this job.
    Start(Running),
    /// Go on with this job.
    Resume(Running),
    /// Put this job aside.
    Park(Running),
}

/// Counts for snapshots and metrics, taken at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Counts {
    pub(crate) queue_depth: usize,
    pub(crate) replicas: Vec<ReplicaCounts>,
    /// Requests that those which live should hold.
    pub(crate) capacity: u32,
    pub(crate) n_preempted: usize,
    pub(crate) preemptions: u64,
    pub(crate) ema_dispatch_ms: Option<f64>,
    pub(crate) closed: Option<Closed>,
}

/// Requests with their states.
pub(crate) type Listing = Vec<(Arc<Record>, Lifecycle)>;

struct State {
    closed: Option<Closed>,
    waiting: BTreeMap<QueueKey, Waiting>,
    /// Who the jobs belong to.
    clients: Clients,
    /// Prompt tokens of `waiting`.
    queued_prompt_tokens: u64,
    /// Those of `waiting` with a deadline.
    deadlines: BTreeSet<(Instant, QueueKey)>,
    running: HashMap<u64, Running>,
    /// Replicas of those of `running` that lost their slots.
    parked: BTreeMap<QueueKey, usize>,
    /// Its slots in use and `parked` sum to `running.len()`.
    roster: Roster,
    /// When to look at the replicas again.
    look_at: Instant,
    last_replica: usize,
    /// Slots taken from running jobs so far.
    preemptions: u64,
    events: VecDeque<Event>,
    estimates: Estimates,
    /// The driver's thread shall end.
    stopped: bool,
}

/// See the module doc.
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    idle: Condvar,
    next_number: AtomicU64,
    start: Instant,
    aging_interval_ms: u64,
    /// How often one request may lose its slot; 0 = never.
    max_preemptions: u32,
}

impl Queue {
    pub(crate) fn new(roster: Roster, config: &ExecutorConfig, now: Instant) -> Self {
        Self {
            state: Mutex::new(State {
                closed: Some(Closed::NotStarted),
                waiting: BTreeMap::new(),
                clients: Clients::default(),
                queued_prompt_tokens: 0,
                deadlines: BTreeSet::new(),
                running: HashMap::new(),
                parked: BTreeMap::new(),
                last_replica: roster.loads().len().saturating_sub(1),
                roster,
                look_at: now + LOOK_INTERVAL,
                preemptions: 0,
                events: VecDeque::new(),
                estimates: Estimates::new(config.ema_alpha),
                stopped: false,
            }),
            wake: Condvar::new(),
            idle: Condvar::new(),
            next_number: AtomicU64::new(0),
            start: now,
            aging_interval_ms: config.aging_interval_ms,
            max_preemptions: if config.preempt_running {
                config.max_preemptions
            } else {
                0
            },
        }
    }

    /// The place of a request that comes now.
    pub(crate) fn key(&self, priority: i32, now: Instant) -> QueueKey {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let queued_ms = now.duration_since(self.start).as_millis();
        let queued_ms = u64::try_from(queued_ms).unwrap_or(u64::MAX);
        key::queue_key(queued_ms, priority, self.aging_interval_ms, number)
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
                supply.queue_ahead = state.ahead_of(record) + group_ahead;
            }
            supply.group_ahead = group_ahead;
            let (client, share) = (&record.options.client, record.options.share);
            supply.client_max_queued = share.max_queued;
            if share.max_queued.is_some() {
                supply.client_queued = state.clients.n_waiting(client) + group_ahead;
                supply.client_part = state.clients.part(client, share);
            }
            supply.may_preempt = group_ahead == 0 && self.may_preempt(&state, record);
            match admission::decide(demand, supply) {
                Admission::Admit { loops } => Record::grant(record, loops),
                Admission::Refuse(error) => return Err(error),
            }
            supply.queue_depth += 1;
            supply.queued_prompt_tokens += u64::from(demand.prompt_tokens);
        }
        for record in group.iter() {
            let waiting = Waiting {
                record: Arc::clone(record),
                deadline: record.deadline,
            };
            state.put(waiting, now);
        }
        if group.iter().any(|record| record.deadline.is_some()) {
            self.wake.notify_one(); // the thread may have to sleep less long
        }
        Ok(())
    }

    /// What `admit` would say now to this demand. Takes no place.
    pub(crate) fn preview(&self, demand: Demand, supply: Supply, now: Instant) -> Admission {
        admission::decide(demand, self.state.lock().supply(supply, now))
    }

    /// Takes a waiting request out; the caller must settle it.
    pub(crate) fn remove(&self, key: QueueKey) -> Option<Arc<Record>> {
        self.state.lock().take(key)
    }

    /// The same by its number, for one that ran when somebody looked and waits again.
    pub(crate) fn remove_number(&self, number: u64) -> Option<Arc<Record>> {
        let mut state = self.state.lock();
        let key = *state.waiting.keys().find(|key| key.number == number)?;
        state.take(key)
    }

    /// Leaves something for the driver.
    pub(crate) fn post(&self, event: Event) {
        self.state.lock().events.push_back(event);
        self.wake();
    }

    /// The same from a thread that has the driver's turn and looks at the events again.
    pub(crate) fn post_to_self(&self, event: Event) {
        self.state.lock().events.push_back(event);
    }

    /// Makes the driver's thread look at the events.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Waits until there is an event, or false: `stop` was called.
    pub(crate) fn wait_for_event(&self, clock: &dyn Clock) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return false;
            }
            if state.has_event(clock.now()) {
                return true;
            }
            let due = state.next_due();
            self.wake.wait_until(&mut state, due);
        }
    }

    /// Ends the driver's thread.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.wake.notify_all();
    }

    /// The next event if there is one.
    pub(crate) fn try_event(&self, clock: &dyn Clock) -> Option<Event> {
        self.state.lock().pop_event(clock.now())
    }

    /// A running job, if this is its latest run.
    pub(crate) fn running(&self, number: u64, attempt: u32) -> Option<Running> {
        self.state.lock().running_attempt(number, attempt).cloned()
    }

    /// A running job, whichever run it is.
    pub(crate) fn running_now(&self, number: u64) -> Option<Running> {
        self.state.lock().running.get(&number).cloned()
    }

    /// Frees the slot of a job whose runtime is done with it. `sample`: what it says about the time
    /// that requests take, if it says anything. False when this run of it holds no slot any more.
    pub(crate) fn release(&self, job: &Running, sample: Option<Sample>, now: Instant) -> bool {
        let mut state = self.state.lock();
        let job = state.running_attempt(job.number(), job.attempt).cloned();
        let Some(job) = job else {
            return false;
        };
        if sample.is_some() && !job.parked {
            let units = 1 + u64::from(job.record.n_tokens());
            state.roster.completed(job.replica, units, now);
        }
        state.leave_slot(&job, now);
        state.estimates.released(sample, now);
        self.idle.notify_all();
        true
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
        state.clients.leave_all();
        let waiting = std::mem::take(&mut state.waiting).into_values();
        waiting.map(|waiting| waiting.record).collect()
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
        self.state.lock().counts()
    }

    /// Everyone who waits, first in line first, then everyone who runs, in submit order; with the
    /// counts of the same moment.
    pub(crate) fn listing(&self) -> (Counts, Listing) {
        let state = self.state.lock();
        let mut running: Vec<_> = state.running.values().map(|job| &job.record).collect();
        running.sort_by_key(|record| record.key.number);
        let waiting = state.waiting.values().map(|waiting| &waiting.record);
        let records = waiting.chain(running);
        let listing = records.map(|record| (Arc::clone(record), record.state()));
        let listing = listing.collect();
        (state.counts(), listing)
    }

    /// Everyone who runs.
    pub(crate) fn all_running(&self) -> Vec<Running> {
        self.state.lock().running.values().cloned().collect()
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// What admission looks at, for a request without an objective.
    fn supply(&self, unchanging: Supply, now: Instant) -> Supply {
        let together = self.roster.together(now);
        Supply {
            closed: self.closed,
            no_replica_retry_s: together.no_replica_retry_s,
            context_length: together.context_length,
            kv_capacity_tokens: together.kv_capacity_tokens,
            capacity: together.capacity,
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

    fn counts(&self) -> Counts {
        Counts {
            queue_depth: self.waiting.len(),
            capacity: self.roster.capacity(),
            replicas: self.roster.counts(),
            n_preempted: self.parked.len(),
            preemptions: self.preemptions,
            ema_dispatch_ms: self.estimates.ema_dispatch_ms(),
            closed: self.closed,
        }
    }

    fn put(&mut self, waiting: Waiting, now: Instant) {
        let record = &waiting.record;
        let options = &record.options;
        let (client, priority) = (&options.client, options.priority);
        self.clients
            .enter(client, options.share, priority, record.key, now);
        self.queued_prompt_tokens += u64::from(record.request.prompt_tokens());
        if let Some(deadline) = waiting.deadline {
            self.deadlines.insert((deadline, record.key));
        }
        self.waiting.insert(record.key, waiting);
        self.events.push_back(Event::Submitted);
    }

    fn take(&mut self, key: QueueKey) -> Option<Arc<Record>> {
        let Waiting { record, deadline } = self.waiting.remove(&key)?;
        self.queued_prompt_tokens -= u64::from(record.request.prompt_tokens());
        let options = &record.options;
        self.clients.leave(&options.client, options.priority, key);
        if let Some(deadline) = deadline {
            self.deadlines.remove(&(deadline, key));
        }
        Some(record)
    }

    /// When there is something to do by the time alone.
    fn next_due(&self) -> Instant {
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        let tick = self.next_tick();
        deadline.map_or(tick, |deadline| deadline.min(tick))
    }

    fn next_tick(&self) -> Instant {
        let due = match self.closed {
            None => self.roster.next_due(!self.waiting.is_empty()),
            Some(_) => None,
        };
        due.map_or(self.look_at, |due| due.min(self.look_at))
    }

    fn has_event(&self, now: Instant) -> bool {
        !self.events.is_empty() || self.next_due() <= now
    }

    /// Ends before deadlines: a slot that came free in time is used for who waited in time.
    fn pop_event(&mut self, now: Instant) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if self.next_tick() <= now {
            self.look_at = now + LOOK_INTERVAL;
            return Some(Event::Tick);
        }
        let (deadline, key) = *self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.take(key).map(Event::Expired)
    }
}
