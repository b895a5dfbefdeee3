//! Whose request goes next when several clients (API keys) want the slots of one executor.
//!
//! Pure: told what time it is, no lock, no log. A client's *turn* is the slot time that it has had,
//! divided by its weight; whoever has the least goes next. Slot time counts while a job holds its slot, so
//! jobs that run now count as far as they have run, and work that fails counts like any other.
//!
//! # The order
//!
//! Priorities and aging decide first, by the key of the queue, exactly as if there were one client: the
//! request with the smallest key says which priority is served. Of that priority all those that no request
//! of another priority precedes may go, each client with its own first one. Among these clients:
//!
//! 1. one with fewer jobs in slots than its `max_inflight` before one with as many (a soft limit: no
//!    slot stays idle for it);
//! 2. the smaller turn;
//! 3. at the same turn, whom a slot more would bring less above its weight;
//! 4. the smaller key.
//!
//! So a client's own requests keep their order, nobody goes before a request of higher (or aged as high)
//! priority, and a single client finds the order of the queue alone.
//!
//! # Who comes anew
//!
//! A client that had nothing here begins at the smallest turn of those that have, so that idling earns
//! nothing and what it owes from before is kept: with one job at a time it comes anew each time. When nobody is
//! here all is forgotten.

use super::QueueKey;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// A client's part of an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its part of the slots' time, next to the weights of the others that want them; at least 1.
    pub weight: u32,
    /// Jobs in slots from which on others that wait go first.
    pub max_inflight: Option<u32>,
    /// Requests that may wait.
    pub max_queued: Option<usize>,
}

impl Default for Share {
    fn default() -> Self {
        Self {
            weight: 1,
            max_inflight: None,
            max_queued: None,
        }
    }
}

impl Share {
    fn weight(self) -> f64 {
        f64::from(self.weight.max(1))
    }
}

/// None = whoever asks where no key is asked.
pub(super) type ClientName = Option<Arc<str>>;

/// What one client has and has had.
#[derive(Clone, Debug)]
struct Account {
    share: Share,
    /// Milliseconds of slot time by weight, as of `at`.
    turn_ms: f64,
    at: Instant,
    n_waiting: usize,
    n_running: u32,
    n_parked: u32,
}

impl Account {
    fn turn_at(&self, now: Instant) -> f64 {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64() * 1e3;
        self.turn_ms + elapsed * f64::from(self.n_running) / self.share.weight()
    }

    /// Brings the turn up to date, before what it depends on changes.
    fn update(&mut self, now: Instant) {
        self.turn_ms = self.turn_at(now);
        self.at = now;
    }

    fn is_here(&self) -> bool {
        self.n_waiting > 0 || self.n_running > 0 || self.n_parked > 0
    }
}

/// The clients of one executor: those that have something here, and those that owe something.
#[derive(Debug, Default)]
pub(super) struct Clients {
    accounts: BTreeMap<ClientName, Account>,
    /// The waiting requests of each client and priority. No line is empty.
    lines: BTreeMap<(ClientName, i32), BTreeSet<QueueKey>>,
}

/// What a job does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It gets a slot.
    Starts,
    /// It gives its slot back.
    Stops,
    /// It loses its slot for now.
    Parks,
    /// It gets one again.
    Resumes,
}

/// The first request of one client and priority.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    key: QueueKey,
    priority: i32,
    is_above_inflight: bool,
    turn_ms: f64,
    /// Slots by weight if it got one more.
    load: f64,
}

impl Clients {
    /// A request waits from now on.
    pub(super) fn enter(
        &mut self,
        client: &ClientName,
        share: Share,
        priority: i32,
        key: QueueKey,
        now: Instant,
    ) {
        let known = self.accounts.get(client);
        if !known.is_some_and(Account::is_here) {
            self.arrive(client, now);
        }
        let Some(account) = self.accounts.get_mut(client) else {
            return; // cannot be: whoever arrives has an account
        };
        account.update(now); // what it had so far counts by the weight of then
        account.share = share;
        account.n_waiting += 1;
        let line = (client.clone(), priority);
        self.lines.entry(line).or_default().insert(key);
    }

    /// A request does not wait any more.
    pub(super) fn leave(&mut self, client: &ClientName, priority: i32, key: QueueKey) {
        let line = (client.clone(), priority);
        if let Some(keys) = self.lines.get_mut(&line) {
            keys.remove(&key);
            if keys.is_empty() {
                self.lines.remove(&line);
            }
        }
        if let Some(account) = self.accounts.get_mut(client) {
            account.n_waiting = account.n_waiting.saturating_sub(1);
        }
    }

    /// Nobody waits any more.
    pub(super) fn leave_all(&mut self) {
        self.lines.clear();
        for account in self.accounts.values_mut() {
            account.n_waiting = 0;
        }
    }

    /// A job of the client changes what it holds.
    pub(super) fn change(&mut self, client: &ClientName, change: Change, now: Instant) {
        let Some(account) = self.accounts.get_mut(client) else {
            return; // cannot be: whoever has a job has entered with it
        };
        account.update(now);
        let (running, parked) = (&mut account.n_running, &mut account.n_parked);
        match change {
            Change::Starts => *running += 1,
            Change::Stops => *running = running.saturating_sub(1),
            Change::Parks => (*running, *parked) = (running.saturating_sub(1), *parked + 1),
            Change::Resumes => (*running, *parked) = (*running + 1, parked.saturating_sub(1)),
        }
    }

    /// A job that was parked ends.
    pub(super) fn drop_parked(&mut self, client: &ClientName) {
        if let Some(account) = self.accounts.get_mut(client) {
            account.n_parked = account.n_parked.saturating_sub(1);
        }
    }

    /// Opens the account of a client that has nothing here, and closes those that owe nothing any more.
    fn arrive(&mut self, client: &ClientName, now: Instant) {
        let here = self.accounts.values().filter(|account| account.is_here());
        let floor_ms = here
            .map(|account| account.turn_at(now))
            .min_by(f64::total_cmp);
        let owed_ms = self
            .accounts
            .get(client)
            .map_or(0.0, |account| account.turn_ms);
        match floor_ms {
            None => self.accounts.clear(),
            Some(floor) => self
                .accounts
                .retain(|_, account| account.is_here() || account.turn_ms > floor),
        }
        let account = Account {
            share: Share::default(),
            turn_ms: floor_ms.map_or(0.0, |floor| floor.max(owed_ms)),
            at: now,
            n_waiting: 0,
            n_running: 0,
            n_parked: 0,
        };
        self.accounts.insert(client.clone(), account);
    }

    /// Whether the order of the queue alone says who goes next.
    pub(super) fn is_one(&self) -> bool {
        self.accounts.len() <= 1
    }

    /// The request that goes next; None when nobody waits.
    pub(super) fn first(&self, now: Instant) -> Option<QueueKey> {
        let candidates = self.lines.iter().filter_map(|((client, priority), keys)| {
            let account = self.accounts.get(client)?;
            let share = account.share;
            Some(Candidate {
                key: *keys.first()?,
                priority: *priority,
                is_above_inflight: share
                    .max_inflight
                    .is_some_and(|most| account.n_running >= most),
                turn_ms: account.turn_at(now),
                load: (f64::from(account.n_running) + 1.0) / share.weight(),
            })
        });
        choose(candidates)
    }

    /// Requests that would go before one of this client, if it came now: its own that precede it, those of
    /// other priorities that do, and of each other client as many as its weight lets through meanwhile.
    pub(super) fn ahead_of(
        &self,
        client: &ClientName,
        share: Share,
        priority: i32,
        key: QueueKey,
    ) -> usize {
        let n_before = |keys: &BTreeSet<QueueKey>| keys.range(..key).count();
        let own = self.lines.get(&(client.clone(), priority));
        let own_turns = own.map_or(0, n_before) as f64 + 1.0;
        let ahead = self.lines.iter().map(|((other, level), keys)| {
            if other == client || *level != priority {
                return n_before(keys);
            }
            let account = self.accounts.get(other);
            let weight = account.map_or(1.0, |account| account.share.weight());
            let turns = (own_turns * weight / share.weight()).ceil();
            keys.len().min(turns as usize)
        });
        ahead.sum()
    }

    /// Requests of the client that wait.
    pub(super) fn n_waiting(&self, client: &ClientName) -> usize {
        let account = self.accounts.get(client);
        account.map_or(0, |account| account.n_waiting)
    }

    /// The client's weight next to those of all that are here, itself among them.
    pub(super) fn part(&self, client: &ClientName, share: Share) -> f64 {
        let others = self.accounts.iter().filter(|(name, _)| *name != client);
        let others = others.filter(|(_, account)| account.is_here());
        let others: f64 = others.map(|(_, account)| account.share.weight()).sum();
        share.weight() / (share.weight() + others)
    }
}

/// The choice, by the rules of the module doc.
fn choose(candidates: impl Iterator<Item = Candidate> + Clone) -> Option<QueueKey> {
    let served = candidates.clone().min_by_key(|candidate| candidate.key)?;
    let of_others = candidates
        .clone()
        .filter(|candidate| candidate.priority != served.priority);
    let limit = of_others.map(|candidate| candidate.key).min();
    candidates
        .filter(|candidate| candidate.priority == served.priority)
        .filter(|candidate| limit.is_none_or(|limit| candidate.key < limit))
        .min_by(|a, b| {
            a.is_above_inflight
                .cmp(&b.is_above_inflight)
                .then(a.turn_ms.total_cmp(&b.turn_ms))
                .then(a.load.total_cmp(&b.load))
                .then(a.key.cmp(&b.key))
        })
        .map(|candidate| candidate.key)
}

#[cfg(test)]
#[path = "fair_tests.rs"]
mod tests;
