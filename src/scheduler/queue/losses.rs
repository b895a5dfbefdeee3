//! The queue's part when replicas die, pause and come back: jobs change places under the one lock.
//!
//! What is decided stands in `health` (what becomes of a job) and `roster` (who is open); who calls is the
//! driver's turn (`recovery`).

use super::fair::Change;
use super::{Queue, Running, State, Waiting};
use crate::runtime::Capability;
use crate::scheduler::adaptive::Glance;
use crate::scheduler::health::{self, Fate, JobBack, Setback};
use crate::scheduler::record::Record;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What became of the jobs of a lost replica.
pub(crate) struct Loss {
    /// They wait again.
    pub(crate) n_requeued: usize,
    /// They are out of the books; the caller settles them.
    pub(crate) ended: Vec<Arc<Record>>,
}

/// What became of a job that its runtime gave back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Back {
    /// It waits again.
    Requeued,
    /// It must end; it still holds its slot.
    Ends,
    /// It holds no slot any more.
    Gone,
}

/// What is due by the time.
pub(crate) struct Due {
    /// Replicas to be made anew; they count as restarting.
    pub(crate) restarts: Vec<usize>,
    /// Out of the queue: no replica came in time. The caller settles them.
    pub(crate) waited_in_vain: Vec<Arc<Record>>,
    /// Until the next attempt to restart one.
    pub(crate) next_attempt: Duration,
}

impl Queue {
    /// Whether it takes requests.
    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().closed.is_none()
    }

    /// A replica is gone: its jobs leave their slots. None when that was known.
    pub(crate) fn lose(&self, replica: usize, now: Instant) -> Option<Loss> {
        let mut state = self.state.lock();
        if !state.roster.lose(replica, now) {
            return None;
        }
        let jobs = state.running.values().filter(|job| job.replica == replica);
        let jobs: Vec<Running> = jobs.cloned().collect();
        let mut loss = Loss {
            n_requeued: 0,
            ended: Vec::new(),
        };
        for job in jobs {
            match state.put_back(&job, Setback::Lost, now) {
                true => loss.n_requeued += 1,
                false => {
                    state.leave_slot(&job, now);
                    loss.ended.push(job.record);
                }
            }
        }
        drop(state);
        self.idle.notify_all();
        self.wake(); // the time of the next attempt is news
        Some(loss)
    }

    /// A runtime gave a job back. `retry_after_ms`: what a full upstream says.
    pub(crate) fn set_back(
        &self,
        job: &Running,
        setback: Setback,
        retry_after_ms: Option<u64>,
        now: Instant,
    ) -> Back {
        let mut state = self.state.lock();
        let Some(job) = state.running_attempt(job.number(), job.attempt).cloned() else {
            return Back::Gone;
        };
        if setback == Setback::Overloaded {
            state.roster.overloaded(job.replica, retry_after_ms, now);
        }
        let is_long_wait = health::is_long_wait(retry_after_ms);
        let requeued = !is_long_wait && state.put_back(&job, setback, now);
        drop(state);
        self.wake(); // a pause has an end that the driver's thread must know
        match requeued {
            true => {
                self.idle.notify_all();
                Back::Requeued
            }
            false => Back::Ends,
        }
    }

    /// What is due now, taken out.
    pub(crate) fn due(&self, now: Instant) -> Due {
        let mut state = self.state.lock();
        state.note_progress(now);
        state.roster.update(now);
        let restarts = match state.closed {
            None => state.roster.begin_due(now),
            Some(_) => Vec::new(),
        };
        let keys: Vec<_> = match state.roster.is_dark_too_long(now) {
            true => state.waiting.keys().copied().collect(),
            false => Vec::new(),
        };
        Due {
            restarts,
            waited_in_vain: keys.into_iter().filter_map(|key| state.take(key)).collect(),
            next_attempt: state.roster.next_attempt(now),
        }
    }

    /// An attempt to make a replica anew has ended.
    pub(crate) fn rebuilt(&self, replica: usize, capability: Option<Capability>, now: Instant) {
        self.state.lock().roster.rebuilt(replica, capability, now);
        self.wake();
    }
}

impl State {
    /// Back to its old place in the line, if it may; its wait begins anew, exempt from the queue's limits.
    fn put_back(&mut self, job: &Running, setback: Setback, now: Instant) -> bool {
        let record = &job.record;
        let lifecycle = record.state();
        let (n_lost, n_overloaded) = record.setbacks();
        let fate = health::fate(JobBack {
            setback,
            has_sent: lifecycle.stamps().first_token.is_some(),
            is_final: lifecycle.is_final(),
            is_closed: self.closed.is_some(),
            has_place: self.roster.has_place(),
            n_lost,
            n_overloaded,
        });
        // The transition decides together with its sink, which may send a first token at this moment.
        if fate == Fate::End || record.requeue(setback).is_err() {
            return false;
        }
        self.leave_slot(job, now);
        let queue_timeout = record
            .deadline
            .map(|deadline| deadline.saturating_duration_since(lifecycle.stamps().queued.at));
        let waiting = Waiting {
            record: Arc::clone(record),
            deadline: queue_timeout.and_then(|timeout| now.checked_add(timeout)),
        };
        self.put(waiting, now);
        true
    }

    /// Takes a job out of the books of its replica.
    pub(super) fn leave_slot(&mut self, job: &Running, now: Instant) {
        let Some(job) = self.running.remove(&job.number()) else {
            return;
        };
        let client = &job.record.options.client;
        self.roster.left(job.replica, job.record.n_tokens());
        if job.parked {
            self.parked.remove(&job.record.key);
            self.clients.drop_parked(client);
        } else {
            self.roster.vacate(job.replica);
            self.clients.change(client, Change::Stops, now);
        }
    }

    /// Looks at what the running jobs have brought so far, where a target is found by trying.
    fn note_progress(&mut self, now: Instant) {
        if !self.roster.is_adaptive() {
            return;
        }
        let mut seen = vec![Glance::default(); self.roster.loads().len()];
        for job in self.running.values().filter(|job| !job.parked) {
            let n_tokens = job.record.n_tokens();
            let glance = &mut seen[job.replica];
            glance.n_jobs += 1;
            glance.n_begun += u32::from(n_tokens > 0);
            glance.n_tokens += u64::from(n_tokens);
        }
        for (replica, glance) in seen.into_iter().enumerate() {
            self.roster.progressed(replica, glance, now);
        }
    }

    /// A job that runs, if this is its latest run.
    pub(super) fn running_attempt(&self, number: u64, attempt: u32) -> Option<&Running> {
        let job = self.running.get(&number)?;
        (job.attempt == attempt).then_some(job)
    }
}

impl Running {
    /// Its identity in the executor.
    pub(crate) fn number(&self) -> u64 {
        self.record.key.number
    }
}
