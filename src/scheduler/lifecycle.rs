//! The states of one request, with a stamp for every transition, and the one function that moves
//! between them.
//!
//! ```text
//!            Dispatch              FirstToken
//!  Queued ───────────► Dispatched ─────────────► Decoding
//!    │                    │   ▲                   ▲   │
//!    │               Park │   │ Resume     Resume │   │ Park
//!    │                    ▼   │ (no token)        │   ▼
//!    │                 Preempted ─────────────────┴─ Preempted
//!    │ Cancel
//!    ▼           from Dispatched, Decoding and Preempted:
//!  Cancelled     Finish ──► Done     Cancel ──► Cancelled     Fail ──► Error
//! ```
//!
//! A request that generates nothing (`max_tokens` 0, or the end token first) goes from Dispatched
//! to Done. A deadline that passes in the queue and a shutdown are cancels; the error that the
//! waiter gets says which. Done, Cancelled and Error are final: whoever makes the transition into
//! one of them delivers the outcome, so it is delivered exactly once.
//!
//! *Requeue* leads from Dispatched, and from Preempted without a token, back to Queued: the replica died, or
//! its upstream had no room. It is the only way back, so a request that gave a token never runs twice.
//!
//! Preempted is one state, drawn twice: a request in it resumes as what it was, which its stamp of
//! the first token tells. Tokens and an end that were under way when the slot was taken still
//! arrive, so a preempted request may get its first token and may finish.
//!
//! Pure values, no thread, no lock; `record` holds one per request. What is not here: who decides.

use std::time::{Duration, Instant, SystemTime};

/// A moment on both clocks: monotonic for durations, wall for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Monotonic.
    pub at: Instant,
    /// Wall clock.
    pub wall: SystemTime,
}

/// When a request reached its states; None = it did not (yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamps {
    /// Accepted into the queue.
    pub queued: Stamp,
    /// Handed to a replica.
    pub dispatched: Option<Stamp>,
    /// First token.
    pub first_token: Option<Stamp>,
    /// Lost its slot to another request, the latest time.
    pub preempted: Option<Stamp>,
    /// Got a slot again, the latest time.
    pub resumed: Option<Stamp>,
    /// How often it lost its slot.
    pub n_preemptions: u32,
    /// How often it went back from a replica to the queue; its other stamps are then those of the latest run.
    pub n_requeues: u32,
    /// Time without a slot since the dispatch.
    pub parked: Duration,
    /// Done, cancelled or failed.
    pub completed: Option<Stamp>,
}

impl Stamps {
    /// At the beginning.
    #[must_use]
    pub fn queued(now: Stamp) -> Self {
        Self {
            queued: now,
            dispatched: None,
            first_token: None,
            preempted: None,
            resumed: None,
            n_preemptions: 0,
            n_requeues: 0,
            parked: Duration::ZERO,
            completed: None,
        }
    }

    /// Time in the queue, if it left it for a replica.
    #[must_use]
    pub fn queue_wait(&self) -> Option<Duration> {
        Some(self.dispatched?.at.duration_since(self.queued.at))
    }

    /// From submit to the first token.
    #[must_use]
    pub fn time_to_first_token(&self) -> Option<Duration> {
        Some(self.first_token?.at.duration_since(self.queued.at))
    }

    /// How long a slot was held: from dispatch to the end, without the time it was parked.
    #[must_use]
    pub fn service_time(&self) -> Option<Duration> {
        let since_dispatch = self.completed?.at.duration_since(self.dispatched?.at);
        Some(since_dispatch.saturating_sub(self.parked))
    }

    /// From submit to the end.
    #[must_use]
    pub fn total(&self) -> Option<Duration> {
        Some(self.completed?.at.duration_since(self.queued.at))
    }
}

/// Where a request is. Each state carries the stamps of the way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifecycle {
    /// Waits.
    Queued(Stamps),
    /// A replica has it; no token yet.
    Dispatched(Stamps),
    /// Tokens come.
    Decoding(Stamps),
    /// Another request has its slot; it resumes on the same replica.
    Preempted(Stamps),
    /// Ended well.
    Done(Stamps),
    /// Ended by the caller, a deadline in the queue, or a shutdown.
    Cancelled(Stamps),
    /// Ended by a fault.
    Error(Stamps),
}

/// A wish to move on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// Handed to a replica.
    Dispatch,
    /// The first token came.
    FirstToken,
    /// Its slot was taken for another request.
    Park,
    /// It has a slot again.
    Resume,
    /// Its replica could not run it; it waits again.
    Requeue,
    /// Ended well.
    Finish,
    /// Ended by the caller, a deadline in the queue, or a shutdown.
    Cancel,
    /// Ended by a fault.
    Fail,
}

impl Transition {
    /// All of them, for tables.
    pub const ALL: [Self; 8] = [
        Self::Dispatch,
        Self::FirstToken,
        Self::Park,
        Self::Resume,
        Self::Requeue,
        Self::Finish,
        Self::Cancel,
        Self::Fail,
    ];
}

/// A transition that the diagram does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request in state {from} cannot take the transition {transition:?}")]
pub struct IllegalTransition {
    /// Name of the state it was in, and is still in.
    pub from: &'static str,
    /// What was asked.
    pub transition: Transition,
}

impl Lifecycle {
    /// The beginning.
    #[must_use]
    pub fn queued(now: Stamp) -> Self {
        Self::Queued(Stamps::queued(now))
    }

    /// The one transition function: the diagram of the module doc.
    pub fn advance(self, transition: Transition, now: Stamp) -> Result<Self, IllegalTransition> {
        use Transition::{Cancel, Dispatch, Fail, Finish, FirstToken, Park, Requeue, Resume};
        let stamps = *self.stamps();
        let completed = Stamps {
            completed: Some(now),
            parked: self.parked_until(now.at),
            ..stamps
        };
        let with_first_token = Stamps {
            first_token: Some(now),
            ..stamps
        };
        match (self, transition) {
            (Self::Queued(_), Dispatch) => Ok(Self::Dispatched(Stamps {
                dispatched: Some(now),
                ..stamps
            })),
            (Self::Dispatched(_), FirstToken) => Ok(Self::Decoding(with_first_token)),
            (Self::Preempted(_), FirstToken) if stamps.first_token.is_none() => {
                Ok(Self::Preempted(with_first_token))
            }
            (Self::Dispatched(_) | Self::Decoding(_), Park) => Ok(Self::Preempted(Stamps {
                preempted: Some(now),
                n_preemptions: stamps.n_preemptions + 1,
                ..stamps
            })),
            (Self::Preempted(_), Resume) => Ok(Self::resumed(Stamps {
                resumed: Some(now),
                parked: self.parked_until(now.at),
                ..stamps
            })),
            (Self::Dispatched(_) | Self::Preempted(_), Requeue) if stamps.first_token.is_none() => {
                Ok(Self::Queued(Stamps {
                    dispatched: None,
                    preempted: None,
                    resumed: None,
                    n_requeues: stamps.n_requeues + 1,
                    parked: Duration::ZERO,
                    ..stamps
                }))
            }
            (Self::Dispatched(_) | Self::Decoding(_) | Self::Preempted(_), Finish) => {
                Ok(Self::Done(completed))
            }
            (
                Self::Queued(_) | Self::Dispatched(_) | Self::Decoding(_) | Self::Preempted(_),
                Cancel,
            ) => Ok(Self::Cancelled(completed)),
            (Self::Dispatched(_) | Self::Decoding(_) | Self::Preempted(_), Fail) => {
                Ok(Self::Error(completed))
            }
            _ => Err(IllegalTransition {
                from: self.name(),
                transition,
            }),
        }
    }

    /// What a preempted request was before.
    fn resumed(stamps: Stamps) -> Self {
        match stamps.first_token {
            Some(_) => Self::Decoding(stamps),
            None => Self::Dispatched(stamps),
        }
    }

    /// Time without a slot since the first dispatch, the present break included.
    fn parked_until(&self, now: Instant) -> Duration {
        match self {
            Self::Preempted(stamps) => {
                let since = stamps.preempted.map(|stamp| now.duration_since(stamp.at));
                stamps.parked + since.unwrap_or_default()
            }
            Self::Queued(stamps)
            | Self::Dispatched(stamps)
            | Self::Decoding(stamps)
            | Self::Done(stamps)
            | Self::Cancelled(stamps)
            | Self::Error(stamps) => stamps.parked,
        }
    }

    /// How long it has held a slot, if it ever had one.
    #[must_use]
    pub fn service_time_until(&self, now: Instant) -> Option<Duration> {
        let since_dispatch = now.duration_since(self.stamps().dispatched?.at);
        Some(since_dispatch.saturating_sub(self.parked_until(now)))
    }

    /// The stamps so far.
    #[must_use]
    pub fn stamps(&self) -> &Stamps {
        match self {
            Self::Queued(stamps)
            | Self::Dispatched(stamps)
            | Self::Decoding(stamps)
            | Self::Preempted(stamps)
            | Self::Done(stamps)
            | Self::Cancelled(stamps)
            | Self::Error(stamps) => stamps,
        }
    }

    /// Lower-case name, as in snapshots and metric labels.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Queued(_) => "queued",
            Self::Dispatched(_) => "dispatched",
            Self::Decoding(_) => "decoding",
            Self::Preempted(_) => "preempted",
            Self::Done(_) => "done",
            Self::Cancelled(_) => "cancelled",
            Self::Error(_) => "error",
        }
    }

    /// Whether nothing can follow.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Done(_) | Self::Cancelled(_) | Self::Error(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(start: Instant, ms: u64) -> Stamp {
        let offset = Duration::from_millis(ms);
        Stamp {
            at: start + offset,
            wall: SystemTime::UNIX_EPOCH + offset,
        }
    }

    /// Every state with every transition: the result, or "-" for a refusal that changes nothing.
    #[test]
    fn the_whole_table() {
        use Transition::{Dispatch, FirstToken, Park, Resume};
        let start = Instant::now();
        let queued = Lifecycle::queued(stamp(start, 0));
        let go = |from: Lifecycle, transition| {
            from.advance(transition, stamp(start, 1))
                .expect("legal by the table")
        };
        let dispatched = go(queued, Dispatch);
        let decoding = go(dispatched, FirstToken);
        let early = go(dispatched, Park);
        let late = go(decoding, Park);
        #[rustfmt::skip]
        let table: [(Lifecycle, [&str; 8]); 10] = [
            //            Dispatch      FirstToken   Park         Resume        Requeue   Finish  Cancel       Fail
            (queued,     ["dispatched", "-",         "-",         "-",          "-",      "-",    "cancelled", "-"]),
            (dispatched, ["-",          "decoding",  "preempted", "-",          "queued", "done", "cancelled", "error"]),
            (decoding,   ["-",          "-",         "preempted", "-",          "-",      "done", "cancelled", "error"]),
            (early,      ["-",          "preempted", "-",         "dispatched", "queued", "done", "cancelled", "error"]),
            (late,       ["-",          "-",         "-",         "decoding",   "-",      "done", "cancelled", "error"]),
            (go(early, FirstToken), ["-", "-",       "-",         "decoding",   "-",      "done", "cancelled", "error"]),
            (go(late, Resume), ["-",    "-",         "preempted", "-",          "-",      "done", "cancelled", "error"]),
            (go(decoding, Transition::Finish), ["-"; 8]),
            (go(decoding, Transition::Cancel), ["-"; 8]),
            (go(decoding, Transition::Fail),   ["-"; 8]),
        ];
        for (from, expected) in table {
            for (transition, expected) in Transition::ALL.into_iter().zip(expected) {
                let result = from.advance(transition, stamp(start, 9));
                let name = result.as_ref().map_or("-", Lifecycle::name);
                assert_eq!(name, expected, "{} {transition:?}", from.name());
                if let Err(error) = result {
                    assert_eq!((error.from, error.transition), (from.name(), transition));
                }
            }
        }
    }

    #[test]
    fn stamps_give_the_durations() {
        let start = Instant::now();
        let mut state = Lifecycle::queued(stamp(start, 10));
        assert_eq!(state.stamps().queue_wait(), None);
        for (transition, ms) in [
            (Transition::Dispatch, 15),
            (Transition::FirstToken, 40),
            (Transition::Finish, 100),
        ] {
            state = state.advance(transition, stamp(start, ms)).expect("legal");
        }
        let stamps = state.stamps();
        let ms = Duration::from_millis;
        assert_eq!(stamps.queue_wait(), Some(ms(5)));
        assert_eq!(stamps.time_to_first_token(), Some(ms(30)));
        assert_eq!(stamps.service_time(), Some(ms(85)));
        assert_eq!(stamps.total(), Some(ms(90)));
        assert!(state.is_final());
    }

    #[test]
    fn time_without_a_slot_is_no_service_time() {
        use Transition::{Dispatch, Finish, FirstToken, Park, Resume};
        let start = Instant::now();
        let ms = Duration::from_millis;
        let run = |steps: &[(Transition, u64)]| {
            let queued = Lifecycle::queued(stamp(start, 0));
            steps.iter().fold(queued, |state, &(transition, ms)| {
                state.advance(transition, stamp(start, ms)).expect("legal")
            })
        };
        let begin = [(Dispatch, 10), (FirstToken, 20), (Park, 30)];
        let parked = run(&begin);
        assert_eq!(parked.service_time_until(start + ms(99)), Some(ms(20)));
        let twice = [(Resume, 130), (Park, 140), (Resume, 240), (Finish, 250)];
        let done = run(&[&begin[..], &twice[..]].concat());
        let stamps = done.stamps();
        assert_eq!(stamps.service_time(), Some(ms(40)));
        assert_eq!((stamps.n_preemptions, stamps.parked), (2, ms(200)));
        assert_eq!(
            stamps.queue_wait(),
            Some(ms(10)),
            "the first dispatch counts"
        );
        let at_once = run(&[&begin[..], &[(Finish, 80)]].concat());
        assert_eq!(at_once.stamps().service_time(), Some(ms(20)));
    }
}
