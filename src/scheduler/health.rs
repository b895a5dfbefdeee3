//! Whether a replica works, and what becomes of its jobs when it does not: pure decisions.
//!
//! ```text
//!             Lose                     Begin
//!   Live ──────────────► Lost ────────────────► Restarting
//!    ▲                    ▲                        │   │
//!    │                    └────────── Fail ────────┘   │
//!    └─────────────────────── Restore ─────────────────┘
//! ```
//!
//! *Lose*: its runtime says that it is dead, or panicked in a call. *Begin*: the time of the next attempt has
//! come, and a thread makes a new runtime (`rebuild`). *Fail*: that did not work. *Restore*: the new runtime
//! is in its place. Nobody ever gives up; the waits between attempts grow to a limit. Without a factory a lost
//! replica stays `Lost`, with no next attempt.
//!
//! The first attempt comes at once: most deaths are a crash that a restart mends, and a remote server is
//! asked by its health check before it is used. Failures are forgotten only once a replica has lived for
//! [`STABLE_AFTER`], so that one which dies again and again right after its start is restarted more slowly
//! each time.
//!
//! No lock, clock or log. What is not here: the books of jobs and slots (`queue`), the threads (`rebuild`).

use std::time::{Duration, Instant};

/// A replica that has lived so long is sound: its next death is its first.
pub const STABLE_AFTER: Duration = Duration::from_secs(60);

/// Times that a job may lose its replica and run again: what kills two replicas may be the job.
pub const LOSSES_MAX: u32 = 1;

/// Times that a job may come back because an upstream was full. With pauses between them that is about as
/// long as a client waits.
pub const OVERLOADS_MAX: u32 = 8;

/// When a lost replica is restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Whether it can be made anew at all.
    pub has_factory: bool,
    /// Wait after the first attempt that failed; doubles with each further one.
    pub backoff: Duration,
    /// Longest wait.
    pub backoff_max: Duration,
}

impl RestartPolicy {
    /// Wait before the next attempt, after so many failures in a row.
    #[must_use]
    pub fn wait(&self, n_failures: u32) -> Duration {
        match n_failures.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => {
                let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
                self.backoff.saturating_mul(factor).min(self.backoff_max)
            }
        }
    }

    fn retry_at(&self, n_failures: u32, now: Instant) -> Option<Instant> {
        let retry_at = now.checked_add(self.wait(n_failures));
        retry_at.filter(|_| self.has_factory)
    }
}

/// The state of a replica: the diagram of the module doc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It takes jobs.
    Live {
        /// Since when.
        since: Instant,
        /// Restarts and failed attempts before it, as far as they count.
        n_failures: u32,
    },
    /// It is gone.
    Lost {
        /// Deaths and failed attempts in a row.
        n_failures: u32,
        /// When it is next tried to make it anew; None = never.
        retry_at: Option<Instant>,
    },
    /// A thread makes it anew.
    Restarting {
        /// As in `Lost`.
        n_failures: u32,
    },
}

/// What happens to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It died.
    Lose,
    /// It is being made anew.
    Begin,
    /// It could not be made.
    Fail,
    /// It is back.
    Restore,
}

impl Change {
    /// All of them, for tables.
    pub const ALL: [Self; 4] = [Self::Lose, Self::Begin, Self::Fail, Self::Restore];
}

/// A change that the diagram does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a replica that is {from} cannot take the change {change:?}")]
pub struct IllegalChange {
    /// Name of the state it was in, and is still in.
    pub from: &'static str,
    /// What was asked.
    pub change: Change,
}

impl Health {
    /// All names, for metric labels.
    pub const NAMES: [&str; 3] = ["live", "lost", "restarting"];

    /// A replica that was just loaded.
    #[must_use]
    pub fn live(now: Instant) -> Self {
        Self::Live {
            since: now,
            n_failures: 0,
        }
    }

    /// The one transition function.
    ///
    /// # Errors
    /// When the diagram has no such arrow; then nothing changes.
    pub fn advance(
        self,
        change: Change,
        policy: &RestartPolicy,
        now: Instant,
    ) -> Result<Self, IllegalChange> {
        let lost = |n_failures| Self::Lost {
            n_failures,
            retry_at: policy.retry_at(n_failures, now),
        };
        match (self, change) {
            (Self::Live { since, n_failures }, Change::Lose) => {
                let is_stable = now.saturating_duration_since(since) >= STABLE_AFTER;
                Ok(lost(if is_stable { 0 } else { n_failures }))
            }
            (
                Self::Lost {
                    n_failures,
                    retry_at: Some(_),
                },
                Change::Begin,
            ) => Ok(Self::Restarting { n_failures }),
            (Self::Restarting { n_failures }, Change::Fail) => Ok(lost(n_failures + 1)),
            (Self::Restarting { n_failures }, Change::Restore) => Ok(Self::Live {
                since: now,
                n_failures: n_failures + 1,
            }),
            _ => Err(IllegalChange {
                from: self.name(),
                change,
            }),
        }
    }

    /// Lower-case name, as in snapshots and metric labels.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Live { .. } => "live",
            Self::Lost { .. } => "lost",
            Self::Restarting { .. } => "restarting",
        }
    }

    /// Whether it takes jobs.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Live { .. })
    }

    /// Whether it will be back without anybody's help, or is there.
    #[must_use]
    pub fn can_come_back(&self) -> bool {
        match self {
            Self::Live { .. } | Self::Restarting { .. } => true,
            Self::Lost { retry_at, .. } => retry_at.is_some(),
        }
    }

    /// When the next attempt to restart it begins, if it waits for one.
    #[must_use]
    pub fn retry_at(&self) -> Option<Instant> {
        match self {
            Self::Lost { retry_at, .. } => *retry_at,
            Self::Live { .. } | Self::Restarting { .. } => None,
        }
    }
}

/// Why a job comes back from its replica without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setback {
    /// The replica died.
    Lost,
    /// The upstream is full.
    Overloaded,
}

/// What a job's fate depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobBack {
    /// Why it is back.
    pub setback: Setback,
    /// Its client has got a token.
    pub has_sent: bool,
    /// It was cancelled, or ended otherwise for its client.
    pub is_final: bool,
    /// The executor takes no more work.
    pub is_closed: bool,
    /// A replica lives, or will again.
    pub has_place: bool,
    /// Earlier deaths of its replicas.
    pub n_lost: u32,
    /// Earlier refusals of full upstreams.
    pub n_overloaded: u32,
}

/// What becomes of a job that is back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// To its old place in the queue.
    Requeue,
    /// It ends with an error.
    End,
}

/// The decision:
///
/// 1. it ended for its client, or nothing may wait any more: it ends;
/// 2. a token was sent: it ends, because a second run would send others after it;
/// 3. it came back too often already: it ends;
/// 4. nobody could run it: it ends, rather than wait without hope;
/// 5. otherwise it runs again.
#[must_use]
pub fn fate(job: JobBack) -> Fate {
    let too_often = match job.setback {
        Setback::Lost => job.n_lost >= LOSSES_MAX,
        Setback::Overloaded => job.n_overloaded >= OVERLOADS_MAX,
    };
    match job.is_final || job.is_closed || job.has_sent || too_often || !job.has_place {
        true => Fate::End,
        false => Fate::Requeue,
    }
}

/// Shortest pause of a replica whose upstream is full and does not say when to come again.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause, whatever the upstream says: it may have room sooner.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Whether a job that a full upstream gave back is better told so than kept: the upstream wants a
/// longer wait than any pause here.
#[must_use]
pub fn is_long_wait(retry_after_ms: Option<u64>) -> bool {
    retry_after_ms.is_some_and(|ms| Duration::from_millis(ms) > PAUSE_MAX)
}

/// How long a replica gets no new jobs after its upstream said so many times in a row that it is full.
#[must_use]
pub fn pause(n_in_a_row: u32, retry_after_ms: Option<u64>) -> Duration {
    let factor = 1_u32 << n_in_a_row.saturating_sub(1).min(7);
    let own = PAUSE_MIN.saturating_mul(factor);
    retry_after_ms
        .map_or(own, Duration::from_millis)
        .clamp(PAUSE_MIN, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RestartPolicy = RestartPolicy {
        has_factory: true,
        backoff: Duration::from_millis(500),
        backoff_max: Duration::from_secs(30),
    };

    /// Every state with every change: the result, or "-" for a refusal.
    #[test]
    fn the_whole_table() {
        let now = Instant::now();
        let live = Health::live(now);
        let lost = live.advance(Change::Lose, &POLICY, now).expect("legal");
        let restarting = lost.advance(Change::Begin, &POLICY, now).expect("legal");
        let no_factory = RestartPolicy {
            has_factory: false,
            ..POLICY
        };
        let gone = live.advance(Change::Lose, &no_factory, now).expect("legal");
        #[rustfmt::skip]
        let table = [
            //            Lose    Begin         Fail    Restore
            (live,       ["lost", "-",          "-",    "-"]),
            (lost,       ["-",    "restarting", "-",    "-"]),
            (restarting, ["-",    "-",          "lost", "live"]),
            (gone,       ["-",    "-",          "-",    "-"]),
        ];
        for (from, expected) in table {
            for (change, expected) in Change::ALL.into_iter().zip(expected) {
                let result = from.advance(change, &POLICY, now);
                let name = result.as_ref().map_or("-", Health::name);
                assert_eq!(name, expected, "{} {change:?}", from.name());
                if let Err(error) = result {
                    assert_eq!((error.from, error.change), (from.name(), change));
                }
            }
        }
        assert!(!gone.can_come_back() && lost.can_come_back() && restarting.can_come_back());
    }

    #[test]
    fn attempts_come_at_once_then_ever_later_up_to_a_limit() {
        let start = Instant::now();
        let mut now = start;
        let mut waits = Vec::new();
        let mut health = Health::live(start).advance(Change::Lose, &POLICY, now);
        for _ in 0..9 {
            let lost = health.expect("legal");
            let retry_at = lost.retry_at().expect("there is a factory");
            waits.push((retry_at - now).as_millis());
            now = retry_at;
            let restarting = lost.advance(Change::Begin, &POLICY, now).expect("legal");
            health = restarting.advance(Change::Fail, &POLICY, now);
        }
        let expected = [0, 500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000];
        assert_eq!(waits, expected);
        assert_eq!(POLICY.wait(u32::MAX), POLICY.backoff_max);
    }

    #[test]
    fn failures_are_forgotten_by_a_replica_that_lives_and_not_by_one_that_dies_again() {
        let now = Instant::now();
        let restarting = Health::Restarting { n_failures: 3 };
        let live = restarting.advance(Change::Restore, &POLICY, now);
        let live = live.expect("legal");
        let dies_after = |lived| {
            let later = now + lived;
            let lost = live.advance(Change::Lose, &POLICY, later).expect("legal");
            lost.retry_at().expect("there is a factory") - later
        };
        assert_eq!(dies_after(Duration::from_secs(1)), POLICY.wait(4));
        assert_eq!(dies_after(STABLE_AFTER), Duration::ZERO);
    }

    #[test]
    fn long_waits_are_told() {
        for (retry_after_ms, expected) in [
            (None, false),
            (Some(0), false),
            (Some(10_000), false),
            (Some(10_001), true),
            (Some(u64::MAX), true),
        ] {
            assert_eq!(is_long_wait(retry_after_ms), expected, "{retry_after_ms:?}");
        }
    }

    #[test]
    fn jobs_run_again_only_when_nobody_can_notice() {
        let fresh = JobBack {
            setback: Setback::Lost,
            has_sent: false,
            is_final: false,
            is_closed: false,
            has_place: true,
            n_lost: 0,
            n_overloaded: OVERLOADS_MAX,
        };
        #[rustfmt::skip]
        let table = [
            (fresh, Fate::Requeue),
            (JobBack { has_sent: true, ..fresh }, Fate::End),
            (JobBack { is_final: true, ..fresh }, Fate::End),
            (JobBack { is_closed: true, ..fresh }, Fate::End),
            (JobBack { has_place: false, ..fresh }, Fate::End),
            (JobBack { n_lost: 1, ..fresh }, Fate::End),
            (JobBack { setback: Setback::Overloaded, ..fresh }, Fate::End),
            (JobBack { setback: Setback::Overloaded, n_overloaded: OVERLOADS_MAX - 1, n_lost: 1, ..fresh }, Fate::Requeue),
        ];
        for (job, expected) in table {
            assert_eq!(fate(job), expected, "{job:?}");
        }
    }

    #[test]
    fn pauses_grow_and_obey_the_upstream_within_limits() {
        let ms = |n, told| pause(n, told).as_millis();
        assert_eq!([1, 2, 3, 99].map(|n| ms(n, None)), [100, 200, 400, 10_000]);
        assert_eq!(ms(9, Some(700)), 700);
        assert_eq!((ms(1, Some(0)), ms(1, Some(u64::MAX))), (100, 10_000));
    }
}
