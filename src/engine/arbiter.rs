//! One device, several engines: each has turns of some quanta, and whoever has no turn sleeps.
//!
//! Without it two engines on one machine fight for its cores: each has as many kernel threads as there are
//! cores, every barrier of a step then waits for a thread that the other engine has displaced, and shares
//! are whatever the operating system makes of it. With it a quantum has the device to itself, and shares
//! follow the configured weights. `fair_queue` decides; this file is the waiting.
//!
//! ```text
//! DeviceArbiter ─ share(weight), one per model ─► DeviceShare ─ seat(), one per replica ─► Seat
//!
//! engine thread:  begin() ─► quantum ─► end(wants_more) ─► begin() .. ─► idle: leave()
//!                 (waits)               (kept, or handed on)
//! ```
//!
//! A turn is handed on at the end of a quantum, but not before it has lasted a *slice*: waking another
//! engine and its kernel threads costs some hundred microseconds, which quanta of a small model do not last
//! much longer than themselves. Quanta longer than a slice are turns by themselves.
//!
//! Threads: each seat belongs to one engine thread. One mutex guards the queue, held for a few dozen
//! instructions and never across a quantum; every seat has a condition variable of its own, so that a turn
//! wakes one thread. A turn is handed on under the mutex and its new owner re-checks under it, so no wake-up
//! is lost. A seat that is dropped, by a panic too, gives its turn up.
//!
//! Cost: an engine that has the device to itself keeps its turn from quantum to quantum and pays a
//! reading of the clock for each, and one uncontended lock per slice: some 100 ns (`tinyloop bench-share` measures it).
//! A waiting engine burns nothing: its own thread sleeps here, and the kernel threads of the CPU backend,
//! which spin for some 25 us after a region (`backend/cpu/threads`), have then parked as well.
//!
//! What is not here: bytes of the device (`pool`), which rows a quantum has (`batch`).

use super::fair_queue::{FairQueue, SeatId, ShareId};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least time of a turn of an engine that wants to go on: a waiting engine waits no longer for that,
/// plus a quantum.
const SLICE: Duration = Duration::from_millis(5);

#[derive(Default)]
struct State {
    queue: FairQueue,
    /// By seat; None = free.
    wakes: Vec<Option<Arc<Condvar>>>,
}

impl State {
    /// Wakes whose turn it is.
    fn hand_on(&self, next: Option<SeatId>) {
        let wake = next.and_then(|seat| self.wakes[seat].as_ref());
        if let Some(wake) = wake {
            wake.notify_one();
        }
    }
}

/// Gives turns on one device. Handles are cheap to clone.
#[derive(Clone)]
pub struct DeviceArbiter {
    /// See the module doc.
    state: Arc<Mutex<State>>,
    slice: Duration,
}

impl Default for DeviceArbiter {
    fn default() -> Self {
        Self::new()
    }
}

impl DeviceArbiter {
    /// For a device that nobody uses yet.
    #[must_use]
    pub fn new() -> Self {
        Self::with_slice(SLICE)
    }

    /// The same with turns of at least that time; zero = every quantum is a turn.
    #[must_use]
    pub fn with_slice(slice: Duration) -> Self {
        Self {
            state: Arc::default(),
            slice,
        }
    }

    /// A share for one model. Weights count relative to those of the other shares in use; 0 counts as 1.
    #[must_use]
    pub fn share(&self, weight: u32) -> DeviceShare {
        let id = self.state.lock().queue.join(weight);
        let state = Arc::clone(&self.state);
        let slice = self.slice;
        DeviceShare {
            inner: Arc::new(ShareInner { state, id, slice }),
        }
    }
}

impl std::fmt::Debug for DeviceArbiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceArbiter").finish_non_exhaustive()
    }
}

struct ShareInner {
    state: Arc<Mutex<State>>,
    id: ShareId,
    slice: Duration,
}

impl Drop for ShareInner {
    fn drop(&mut self) {
        // Seats hold the share, so none is left.
        self.state.lock().queue.leave(self.id);
    }
}

/// A model's share of a device, divided among its replicas. Cloned handles are one share.
#[derive(Clone)]
pub struct DeviceShare {
    inner: Arc<ShareInner>,
}

impl DeviceShare {
    /// A seat for one engine.
    #[must_use]
    pub fn seat(&self) -> Seat {
        let wake = Arc::new(Condvar::new());
        let mut state = self.inner.state.lock();
        let free = state.wakes.iter().position(Option::is_none);
        let id = free.unwrap_or(state.wakes.len());
        match free {
            Some(id) => state.wakes[id] = Some(Arc::clone(&wake)),
            None => state.wakes.push(Some(Arc::clone(&wake))),
        }
        drop(state);
        Seat {
            share: self.clone(),
            id,
            wake,
            standing: Standing::Away,
        }
    }

    /// Time of the device that the model has used.
    #[must_use]
    pub fn used(&self) -> Duration {
        self.inner.state.lock().queue.used(self.inner.id)
    }
}

impl std::fmt::Debug for DeviceShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DeviceShare").field(&self.inner.id).finish()
    }
}

/// Where a seat stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It wants nothing.
    Away,
    /// It is in the queue, and may have been given the turn without having looked.
    Waiting,
    /// It has the turn, since then.
    HasTurn(Instant),
}

/// An engine's place at the device. Owned by its thread.
pub struct Seat {
    share: DeviceShare,
    id: SeatId,
    wake: Arc<Condvar>,
    standing: Standing,
}

impl Seat {
    /// Waits until it has the turn.
    pub fn begin(&mut self) {
        if !matches!(self.standing, Standing::HasTurn(_)) {
            let inner = &self.share.inner;
            let mut state = inner.state.lock();
            if self.standing == Standing::Away {
                state.queue.want(inner.id, self.id);
            }
            while state.queue.turn() != Some(self.id) {
                self.wake.wait(&mut state);
            }
            drop(state);
            self.standing = Standing::HasTurn(Instant::now());
        }
    }

    /// Ends the quantum, and with it the turn: not before it has lasted a slice, unless nothing more is
    /// wanted. With `wants_more` it competes for the next one and may keep it.
    pub fn end(&mut self, wants_more: bool) {
        let Standing::HasTurn(began) = self.standing else {
            return;
        };
        let now = Instant::now();
        if wants_more && now.duration_since(began) < self.share.inner.slice {
            return;
        }
        let mut state = self.share.inner.state.lock();
        let next = state.queue.end(now.duration_since(began), wants_more);
        self.standing = match (next, wants_more) {
            (Some(next), true) if next == self.id => Standing::HasTurn(now),
            (_, true) => Standing::Waiting,
            (_, false) => Standing::Away,
        };
        if next != Some(self.id) {
            state.hand_on(next);
        }
    }

    /// Wants nothing any more: gives up the turn, or the place in the queue. For engines that go idle.
    pub fn leave(&mut self) {
        match self.standing {
            Standing::Away => {}
            Standing::HasTurn(_) => self.end(false),
            Standing::Waiting => {
                let inner = &self.share.inner;
                let mut state = inner.state.lock();
                if state.queue.turn() == Some(self.id) {
                    let next = state.queue.end(Duration::ZERO, false);
                    state.hand_on(next);
                } else {
                    state.queue.withdraw(inner.id, self.id);
                }
                self.standing = Standing::Away;
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
        self.share.inner.state.lock().wakes[self.id] = None;
    }
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat")
            .field("id", &self.id)
            .field("standing", &self.standing)
            .finish_non_exhaustive()
    }
}
