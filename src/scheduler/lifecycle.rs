//! The states of one request, with a stamp for every transition, and the one function that moves
//! between them.
//!
//! ```text
//!            Dispatch            FirstToken
//!  Queued ───────────► Dispatched ───────────► Decoding
//!    │                   │  │  │                 │ │ │
//!    │ Cancel     Finish │  │  │ Fail     Finish │ │ │ Fail
//!    │                   ▼  │  ▼                 ▼ │ ▼
//!    │                Done  │  Error          Done │ Error
//!    ▼                      ▼ Cancel               ▼ Cancel
//!  Cancelled            Cancelled              Cancelled
//! ```
//!
//! A request that generates nothing (`max_tokens` 0, or the end token first) goes from Dispatched
//! to Done. A deadline that passes in the queue and a shutdown are cancels; the error that the
//! waiter gets says which. The three states at the bottom are final: whoever makes the transition
//! into one of them delivers the outcome, so it is delivered exactly once.
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
    /// Done, cancelled or failed.
    pub completed: Option<Stamp>,
}

impl Stamps {
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

    /// From dispatch to the end: how long a slot was held.
    #[must_use]
    pub fn service_time(&self) -> Option<Duration> {
        Some(self.completed?.at.duration_since(self.dispatched?.at))
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
    /// Ended well.
    Finish,
    /// Ended by the caller, a deadline in the queue, or a shutdown.
    Cancel,
    /// Ended by a fault.
    Fail,
}

impl Transition {
    /// All of them, for tables.
    pub const ALL: [Self; 5] = [
        Self::Dispatch,
        Self::FirstToken,
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
        Self::Queued(Stamps {
            queued: now,
            dispatched: None,
            first_token: None,
            completed: None,
        })
    }

    /// The one transition function: the diagram of the module doc.
    pub fn advance(self, transition: Transition, now: Stamp) -> Result<Self, IllegalTransition> {
        use Transition::{Cancel, Dispatch, Fail, Finish, FirstToken};
        let stamps = *self.stamps();
        let completed = Stamps {
            completed: Some(now),
            ..stamps
        };
        match (self, transition) {
            (Self::Queued(_), Dispatch) => Ok(Self::Dispatched(Stamps {
                dispatched: Some(now),
                ..stamps
            })),
            (Self::Dispatched(_), FirstToken) => Ok(Self::Decoding(Stamps {
                first_token: Some(now),
                ..stamps
            })),
            (Self::Dispatched(_) | Self::Decoding(_), Finish) => Ok(Self::Done(completed)),
            (Self::Queued(_) | Self::Dispatched(_) | Self::Decoding(_), Cancel) => {
                Ok(Self::Cancelled(completed))
            }
            (Self::Dispatched(_) | Self::Decoding(_), Fail) => Ok(Self::Error(completed)),
            _ => Err(IllegalTransition {
                from: self.name(),
                transition,
            }),
        }
    }

    /// The stamps so far.
    #[must_use]
    pub fn stamps(&self) -> &Stamps {
        match self {
            Self::Queued(stamps)
            | Self::Dispatched(stamps)
            | Self::Decoding(stamps)
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
        use Transition::{Dispatch, FirstToken};
        let start = Instant::now();
        let queued = Lifecycle::queued(stamp(start, 0));
        let go = |from: Lifecycle, transition| {
            from.advance(transition, stamp(start, 1))
                .expect("legal by the table")
        };
        let dispatched = go(queued, Dispatch);
        let decoding = go(dispatched, FirstToken);
        #[rustfmt::skip]
        let table: [(Lifecycle, [&str; 5]); 6] = [
            //            Dispatch      FirstToken  Finish  Cancel       Fail
            (queued,     ["dispatched", "-",        "-",    "cancelled", "-"]),
            (dispatched, ["-",          "decoding", "done", "cancelled", "error"]),
            (decoding,   ["-",          "-",        "done", "cancelled", "error"]),
            (go(decoding, Transition::Finish), ["-"; 5]),
            (go(decoding, Transition::Cancel), ["-"; 5]),
            (go(decoding, Transition::Fail),   ["-"; 5]),
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
}
