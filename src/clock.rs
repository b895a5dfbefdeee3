//! Time as the scheduler sees it: a trait, the real clock, and a manual one for tests.
//!
//! Decisions never read a clock themselves; they take the `Instant` or `Duration` they need.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of monotonic and wall-clock time.
pub trait Clock: Send + Sync {
    /// Monotonic time, for durations and deadlines.
    fn now(&self) -> Instant;
    /// Wall-clock time, for stamps that people read.
    fn wall(&self) -> SystemTime;
}

/// The operating system's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock that moves only when told to; cloned handles share one time.
#[derive(Clone, Debug)]
pub struct ManualClock {
    start: Instant,
    elapsed: Arc<Mutex<Duration>>, // guards the single shared offset; never held across a call
}

impl ManualClock {
    /// A clock that stands still.
    #[must_use]
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            elapsed: Arc::default(),
        }
    }

    /// Moves time forward.
    pub fn advance(&self, by: Duration) {
        *self.elapsed.lock() += by;
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + *self.elapsed.lock()
    }
    fn wall(&self) -> SystemTime {
        UNIX_EPOCH + *self.elapsed.lock()
    }
}
