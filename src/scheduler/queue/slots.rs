//! The queue's part when slots are given and taken: who goes next, and the books of that.
//!
//! The choice is pure (`fair`: whose request, `dispatch`: what the slots do); here it is asked and carried out
//! under the one lock. What is not here: telling the runtimes (`driver`).

use super::fair::Change;
use super::{Queue, Running, State, Step};
use crate::scheduler::dispatch::{self, Head, Holder, Move, Parked};
use crate::scheduler::lifecycle::{Stamp, Transition};
use crate::scheduler::queue::QueueKey;
use crate::scheduler::record::Record;
use crate::scheduler::roster::Roster;
use std::time::Instant;

impl Queue {
    /// Decides on the next use of the slots and carries it out as far as the books go. None when
    /// there is nothing to do.
    pub(crate) fn next_step(&self, now: Stamp) -> Option<Step> {
        let mut state = self.state.lock();
        let first = state.first(now.at);
        match self.choose_for(&state, first)? {
            Move::Start { replica } => {
                let key = first?.key;
                let record = state.take(key)?;
                state.roster.occupy(replica);
                state.last_replica = replica;
                let client = &record.options.client;
                state.clients.change(client, Change::Starts, now.at);
                let running = Running {
                    attempt: record.state().stamps().n_requeues,
                    record,
                    replica,
                    parked: false,
                };
                state.running.insert(key.number, running.clone());
                // Cannot be refused: who waits is Queued, and whoever takes it out moves it on.
                let _ = running.record.advance(Transition::Dispatch, now);
                running.record.placed(replica);
                Some(Step::Start(running))
            }
            Move::Resume(Parked { key, .. }) => state.set_parked(key, false, now).map(Step::Resume),
            Move::Preempt(key) => state.set_parked(key, true, now).map(Step::Park),
        }
    }

    /// Whether a newcomer would not wait, because a running request gave it its slot.
    pub(super) fn may_preempt(&self, state: &State, record: &Record) -> bool {
        let is_off = self.max_preemptions == 0 || !state.waiting.is_empty();
        !is_off
            && matches!(
                self.choose_for(state, Some(head(record))),
                Some(Move::Preempt(_))
            )
    }

    fn choose_for(&self, state: &State, head: Option<Head>) -> Option<Move> {
        let parked = state
            .parked
            .iter()
            .map(|(&key, &replica)| Parked { key, replica });
        let parked = parked.filter(|parked| state.is_live(parked.key));
        // Nobody may be preempted: then nobody is looked at.
        let n_looked_at = if self.max_preemptions == 0 {
            0
        } else {
            usize::MAX
        };
        let holders = state.running.values().take(n_looked_at);
        let holders = holders.filter_map(|job| self.holder(job, &state.roster));
        let (loads, last) = (state.roster.loads(), state.last_replica);
        dispatch::next_move(head, parked, loads, last, holders, self.max_preemptions)
    }

    /// A job as one that might lose its slot; None when it has none, or cannot.
    fn holder(&self, job: &Running, roster: &Roster) -> Option<Holder> {
        let state = job.record.state();
        let can_lose = !job.parked && roster.can_park(job.replica) && !state.is_final();
        can_lose.then(|| Holder {
            key: job.record.key,
            priority: job.record.options.priority,
            n_preemptions: state.stamps().n_preemptions,
        })
    }
}

fn head(record: &Record) -> Head {
    Head {
        key: record.key,
        priority: record.options.priority,
    }
}

impl State {
    /// The request that gets the next slot, if none that was preempted does.
    fn first(&self, now: Instant) -> Option<Head> {
        let first = self.waiting.first_key_value();
        let by_weight = match self.clients.is_one() {
            true => first,
            false => {
                let key = self.clients.first(now)?;
                self.waiting.get_key_value(&key)
            }
        };
        by_weight.map(|(_, waiting)| head(&waiting.record))
    }

    /// Requests without a slot that would get one before this one, if it waited.
    pub(super) fn ahead_of(&self, record: &Record) -> usize {
        let (key, options) = (record.key, &record.options);
        let (client, share) = (&options.client, options.share);
        let waiting = self.clients.ahead_of(client, share, options.priority, key);
        waiting + self.parked.range(..key).count()
    }

    /// Whether a running job has not ended for its waiter yet.
    fn is_live(&self, key: QueueKey) -> bool {
        let job = self.running.get(&key.number);
        job.is_some_and(|job| !job.record.state().is_final())
    }

    /// Takes the slot of a running job, or gives it one again. None when it ended for its waiter in
    /// this very moment: then its runtime is being told so.
    fn set_parked(&mut self, key: QueueKey, parked: bool, now: Stamp) -> Option<Running> {
        let job = self.running.get_mut(&key.number)?;
        let transition = if parked {
            Transition::Park
        } else {
            Transition::Resume
        };
        job.record.advance(transition, now).ok()?;
        job.parked = parked;
        let job = job.clone();
        let change = if parked {
            Change::Parks
        } else {
            Change::Resumes
        };
        let client = &job.record.options.client;
        self.clients.change(client, change, now.at);
        if parked {
            self.parked.insert(key, job.replica);
            self.roster.vacate(job.replica);
            self.preemptions += 1;
        } else {
            self.parked.remove(&key);
            self.roster.occupy(job.replica);
        }
        Some(job)
    }
}
