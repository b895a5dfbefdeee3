//! The replicas as the queue sees them: slots, targets, health. Plain data behind the queue's lock.
//!
//! A replica is *open* while it may get a job: it is live and its upstream has not just said that it is
//! full. When every replica is lost and none can be made anew, all count as open again: a dead runtime
//! answers each job with its fault at once, so that waiters get an error instead of a wait without end.
//!
//! While all are lost and at least one can come back the executor is *dark*. Requests then wait up to
//! `replica_wait`, counted from the moment of darkness; later ones are refused until a replica is back.
//!
//! What is not here: the runtimes (`fleet`), which jobs they have (`queue`), the rules (`health`, `adaptive`,
//! `replica`).

use super::adaptive::{Adaptive, Glance};
use super::health::{Change, Health, RestartPolicy, pause};
use super::replica::{ReplicaLoad, effective_target};
use crate::config::{ExecutorConfig, TargetInflight};
use crate::runtime::Capability;
use std::time::{Duration, Instant};

struct Entry {
    capability: Capability,
    health: Health,
    /// With a target that is found by trying.
    adaptive: Option<Adaptive>,
    /// Gets no new job until then.
    paused_until: Option<Instant>,
    /// Times in a row that its upstream was full.
    n_overloads: u32,
    /// Tokens of jobs that are not there any more.
    n_tokens_ended: u64,
}

/// What is shown of a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReplicaCounts {
    pub(crate) inflight: u32,
    pub(crate) target: u32,
    pub(crate) max_inflight: u32,
    pub(crate) health: Health,
    pub(crate) is_open: bool,
}

/// What admission is told of all replicas together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Together {
    /// Requests that they should hold now.
    pub(crate) capacity: u32,
    /// The smallest of them: a request may go to any.
    pub(crate) context_length: u32,
    pub(crate) kv_capacity_tokens: u64,
    /// No replica lives, and the time to wait for one is over: seconds until the next attempt.
    pub(crate) no_replica_retry_s: Option<u32>,
}

/// See the module doc.
pub(crate) struct Roster {
    entries: Vec<Entry>,
    /// Of the same index; `is_open` is worked out by `update`.
    loads: Vec<ReplicaLoad>,
    policy: RestartPolicy,
    /// Most jobs per replica, as configured.
    target_max: Option<u32>,
    replica_wait: Duration,
    dark_since: Option<Instant>,
}

impl Roster {
    pub(crate) fn new(
        capabilities: &[Capability],
        config: &ExecutorConfig,
        has_factory: bool,
        now: Instant,
    ) -> Self {
        let target_max = config.target_max();
        let is_auto = config.target_inflight == Some(TargetInflight::Auto);
        let entry = |capability: &Capability| Entry {
            capability: *capability,
            health: Health::live(now),
            adaptive: is_auto
                .then(|| Adaptive::new(effective_target(target_max, capability.max_inflight))),
            paused_until: None,
            n_overloads: 0,
            n_tokens_ended: 0,
        };
        let closed = ReplicaLoad {
            inflight: 0,
            target: 1,
            is_open: false,
        };
        let mut roster = Self {
            entries: capabilities.iter().map(entry).collect(),
            loads: vec![closed; capabilities.len()],
            policy: RestartPolicy {
                has_factory,
                backoff: config.restart_backoff,
                backoff_max: config.restart_backoff_max,
            },
            target_max,
            replica_wait: config.replica_wait,
            dark_since: None,
        };
        roster.update(now);
        roster
    }

    pub(crate) fn loads(&self) -> &[ReplicaLoad] {
        &self.loads
    }

    /// Whether a running job of this replica can give its slot up to another, and be cancelled without it.
    pub(crate) fn can_park(&self, replica: usize) -> bool {
        let capability = &self.entries[replica].capability;
        // A parked job that cannot be cancelled would have to run to its end first.
        capability.can_park && capability.can_cancel && self.loads[replica].is_open
    }

    pub(crate) fn occupy(&mut self, replica: usize) {
        self.loads[replica].inflight += 1;
    }

    pub(crate) fn vacate(&mut self, replica: usize) {
        self.loads[replica].inflight -= 1;
    }

    /// Its runtime is gone. False when that was known.
    pub(crate) fn lose(&mut self, replica: usize, now: Instant) -> bool {
        let is_news = self.change(replica, Change::Lose, now);
        if is_news {
            self.entries[replica].paused_until = None;
            self.update(now);
        }
        is_news
    }

    /// Replicas whose next attempt is due; they count as restarting from now on.
    pub(crate) fn begin_due(&mut self, now: Instant) -> Vec<usize> {
        let is_due = |entry: &Entry| entry.health.retry_at().is_some_and(|at| at <= now);
        let due = (0..self.entries.len()).filter(|&index| is_due(&self.entries[index]));
        let due: Vec<usize> = due.collect();
        due.into_iter()
            .filter(|&replica| self.change(replica, Change::Begin, now))
            .collect()
    }

    /// The end of an attempt: what the new runtime can hold, or None when there is none.
    pub(crate) fn rebuilt(&mut self, replica: usize, capability: Option<Capability>, now: Instant) {
        match capability {
            None => {
                self.change(replica, Change::Fail, now);
            }
            Some(capability) => {
                self.change(replica, Change::Restore, now);
                let entry = &mut self.entries[replica];
                entry.capability = capability;
                entry.n_overloads = 0;
                let most = effective_target(self.target_max, capability.max_inflight);
                if let Some(adaptive) = &mut entry.adaptive {
                    adaptive.restart(most);
                }
            }
        }
        self.update(now);
    }

    fn change(&mut self, replica: usize, change: Change, now: Instant) -> bool {
        let health = &mut self.entries[replica].health;
        let changed = health.advance(change, &self.policy, now);
        if let Ok(changed) = changed {
            *health = changed;
        }
        changed.is_ok()
    }

    /// A job ended well, before its slot is freed; `units` as in `adaptive`.
    pub(crate) fn completed(&mut self, replica: usize, units: u64, now: Instant) {
        let inflight = self.loads[replica].inflight;
        let entry = &mut self.entries[replica];
        entry.n_overloads = 0;
        if let Some(adaptive) = &mut entry.adaptive {
            adaptive.completed(units, inflight, now);
            self.loads[replica].target = adaptive.limit();
        }
    }

    /// Whether anybody asks for [`Self::progressed`].
    pub(crate) fn is_adaptive(&self) -> bool {
        self.entries.iter().any(|entry| entry.adaptive.is_some())
    }

    /// A job left its replica, or its place there, after so many tokens.
    pub(crate) fn left(&mut self, replica: usize, n_tokens: u32) {
        let brought = &mut self.entries[replica].n_tokens_ended;
        *brought = brought.saturating_add(n_tokens.into());
    }

    /// What the jobs that a replica holds do now; tokens of those that left are added here.
    pub(crate) fn progressed(&mut self, replica: usize, running: Glance, now: Instant) {
        let entry = &mut self.entries[replica];
        if let Some(adaptive) = &mut entry.adaptive {
            let n_tokens = running.n_tokens.saturating_add(entry.n_tokens_ended);
            adaptive.progressed(
                Glance {
                    n_tokens,
                    ..running
                },
                now,
            );
            self.loads[replica].target = adaptive.limit();
        }
    }

    /// The upstream of this replica refused a job because it is full.
    pub(crate) fn overloaded(&mut self, replica: usize, retry_after_ms: Option<u64>, now: Instant) {
        let entry = &mut self.entries[replica];
        entry.n_overloads = entry.n_overloads.saturating_add(1);
        let until = now.checked_add(pause(entry.n_overloads, retry_after_ms));
        entry.paused_until = entry.paused_until.max(until);
        if let Some(adaptive) = &mut entry.adaptive {
            adaptive.overloaded();
        }
        self.update(now);
    }

    /// Works out what follows from the state and the time: who is open, targets, darkness.
    pub(crate) fn update(&mut self, now: Instant) {
        let is_hopeless = !self.has_place();
        for (entry, load) in self.entries.iter_mut().zip(&mut self.loads) {
            entry.paused_until = entry.paused_until.filter(|until| *until > now);
            let is_fit = entry.health.is_live() && entry.paused_until.is_none();
            load.is_open = is_fit || is_hopeless;
            let most = effective_target(self.target_max, entry.capability.max_inflight);
            load.target = entry.adaptive.as_ref().map_or(most, Adaptive::limit);
        }
        let is_dark = !is_hopeless && !self.entries.iter().any(|entry| entry.health.is_live());
        self.dark_since = is_dark.then(|| self.dark_since.unwrap_or(now));
    }

    /// Whether a replica lives, or will again.
    pub(crate) fn has_place(&self) -> bool {
        self.entries.iter().any(|e| e.health.can_come_back())
    }

    /// Whether nobody who waits can hope for a replica in time.
    pub(crate) fn is_dark_too_long(&self, now: Instant) -> bool {
        self.darkness_ends().is_some_and(|ends| ends <= now)
    }

    fn darkness_ends(&self) -> Option<Instant> {
        self.dark_since?.checked_add(self.replica_wait)
    }

    /// When `begin_due` or `update` has something to do next; with somebody waiting also when it has
    /// been dark for too long.
    pub(crate) fn next_due(&self, somebody_waits: bool) -> Option<Instant> {
        let attempts = self.entries.iter().filter_map(|e| e.health.retry_at());
        let pauses = self.entries.iter().filter_map(|entry| entry.paused_until);
        let darkness = self.darkness_ends().filter(|_| somebody_waits);
        attempts.chain(pauses).chain(darkness).min()
    }

    /// Time until the next attempt to restart a replica; zero while one is under way.
    pub(crate) fn next_attempt(&self, now: Instant) -> Duration {
        let attempts = self.entries.iter().filter_map(|entry| match entry.health {
            Health::Restarting { .. } => Some(now),
            Health::Lost { retry_at, .. } => retry_at,
            Health::Live { .. } => None,
        });
        let first = attempts.min();
        first.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
    }

    pub(crate) fn together(&self, now: Instant) -> Together {
        let capabilities = || self.entries.iter().map(|entry| entry.capability);
        let contexts = capabilities().map(|capability| capability.context_length);
        let kv = capabilities().map(|capability| capability.kv_capacity_tokens);
        let retry_s = || self.next_attempt(now).as_secs_f64().ceil().clamp(1.0, 30.0) as u32;
        Together {
            capacity: self.capacity(),
            context_length: contexts.min().unwrap_or(0),
            kv_capacity_tokens: kv.min().unwrap_or(0),
            no_replica_retry_s: self.is_dark_too_long(now).then(retry_s),
        }
    }

    /// Requests that the replicas which work should hold now.
    pub(crate) fn capacity(&self) -> u32 {
        let is_hopeless = !self.has_place();
        let both = self.entries.iter().zip(&self.loads);
        let working = both.filter(|(entry, _)| entry.health.is_live() || is_hopeless);
        working.map(|(_, load)| load.target).sum()
    }

    /// Requests that all replicas could hold if all went well.
    pub(crate) fn capacity_most(&self) -> u32 {
        let most = |entry: &Entry| effective_target(self.target_max, entry.capability.max_inflight);
        self.entries.iter().map(most).sum()
    }

    pub(crate) fn counts(&self) -> Vec<ReplicaCounts> {
        let both = self.entries.iter().zip(&self.loads);
        both.map(|(entry, load)| ReplicaCounts {
            inflight: load.inflight,
            target: load.target,
            max_inflight: entry.capability.max_inflight,
            health: entry.health,
            is_open: load.is_open,
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::fake::capability;

    fn roster(has_factory: bool, config: &ExecutorConfig, now: Instant) -> Roster {
        Roster::new(&[capability(4), capability(2)], config, has_factory, now)
    }

    fn open(roster: &Roster) -> Vec<bool> {
        roster.loads().iter().map(|load| load.is_open).collect()
    }

    #[test]
    fn lost_replicas_are_shut_until_they_are_back_with_what_they_hold_then() {
        let now = Instant::now();
        let mut roster = roster(true, &ExecutorConfig::default(), now);
        assert_eq!(roster.together(now).capacity, 6);
        assert!(roster.lose(0, now) && !roster.lose(0, now));
        assert_eq!(
            (open(&roster), roster.together(now).capacity),
            (vec![false, true], 2)
        );
        assert_eq!(roster.next_due(true), Some(now));
        assert_eq!(roster.begin_due(now), [0]);
        assert_eq!(
            (roster.begin_due(now), roster.next_due(true)),
            (vec![], None)
        );
        roster.rebuilt(0, None, now);
        let retry_at = now + Duration::from_millis(500);
        assert_eq!(roster.next_due(false), Some(retry_at));
        assert_eq!(roster.begin_due(retry_at), [0]);
        roster.rebuilt(0, Some(capability(9)), retry_at);
        assert_eq!(
            (open(&roster), roster.together(now).capacity),
            (vec![true, true], 11)
        );
        assert_eq!(roster.capacity_most(), 11);
    }

    #[test]
    fn in_the_dark_requests_wait_for_a_while_and_are_then_refused() {
        let now = Instant::now();
        let config = ExecutorConfig {
            replica_wait: Duration::from_secs(3),
            ..ExecutorConfig::default()
        };
        let mut roster = roster(true, &config, now);
        roster.lose(0, now);
        assert_eq!(roster.darkness_ends(), None);
        roster.lose(1, now);
        assert_eq!(open(&roster), [false, false]);
        roster.begin_due(now);
        let ends = now + Duration::from_secs(3);
        assert_eq!(
            (roster.next_due(true), roster.next_due(false)),
            (Some(ends), None)
        );
        assert_eq!(roster.together(now).no_replica_retry_s, None);
        assert_eq!(roster.together(ends).no_replica_retry_s, Some(1));
        roster.rebuilt(1, Some(capability(2)), ends);
        assert_eq!(roster.together(ends).no_replica_retry_s, None);
    }

    #[test]
    fn without_a_factory_dead_replicas_answer_once_nobody_else_can() {
        let now = Instant::now();
        let mut roster = roster(false, &ExecutorConfig::default(), now);
        roster.lose(1, now);
        assert_eq!(open(&roster), [true, false]);
        roster.lose(0, now);
        assert_eq!(
            (open(&roster), roster.together(now).capacity),
            (vec![true, true], 6)
        );
        assert_eq!((roster.has_place(), roster.next_due(true)), (false, None));
    }

    #[test]
    fn a_full_upstream_is_left_alone_for_a_while() {
        let now = Instant::now();
        let config = ExecutorConfig {
            target_inflight: Some(TargetInflight::Auto),
            target_inflight_max: Some(3),
            ..ExecutorConfig::default()
        };
        let mut roster = roster(false, &config, now);
        assert_eq!(
            (roster.together(now).capacity, roster.capacity_most()),
            (2, 5)
        );
        roster.overloaded(0, Some(700), now);
        let later = now + Duration::from_millis(700);
        assert_eq!(
            (open(&roster), roster.next_due(true)),
            (vec![false, true], Some(later))
        );
        roster.update(later);
        assert_eq!(
            (open(&roster), roster.next_due(true)),
            (vec![true, true], None)
        );
    }
}
