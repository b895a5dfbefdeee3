//! What the poll thread and one worker share about a connection, and the worker's way back.
//!
//! A [`Link`] is one connection's socket with three small signals: the peer has left (flag and hook),
//! the socket became writable (Condvar). The poll thread raises them, the worker waits for them; neither
//! holds a lock while it calls out. [`Home`] is the way back: a message per answered request.

use super::config::WireConfig;
use super::net::Stream;
use super::stats::WireStats;
use super::{Handler, config};
use crate::rate::{DrainRate, drained_after_s, retry_after_s};
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

type Hook = Box<dyn FnOnce() + Send>;

/// One connection, shared by the poll thread and at most one worker.
pub(super) struct Link {
    pub(super) id: usize,
    pub(super) stream: Stream,
    /// The peer has closed its side or reset the connection. Never taken back.
    gone: AtomicBool,
    /// To run once when that happens.
    on_hangup: Mutex<Option<Hook>>,
    /// Set by the poll thread, taken by the waiting worker.
    writable: Mutex<bool>,
    became_writable: Condvar,
}

impl Link {
    pub(super) fn new(id: usize, stream: Stream) -> Self {
        Link {
            id,
            stream,
            gone: AtomicBool::new(false),
            on_hangup: Mutex::new(None),
            writable: Mutex::new(false),
            became_writable: Condvar::new(),
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Sets what runs at hang-up; runs it now when that has happened already.
    pub(super) fn set_hook(&self, hook: Hook) {
        let mut slot = self.on_hangup.lock();
        if self.is_gone() {
            drop(slot);
            return hook();
        }
        *slot = Some(hook);
    }

    /// Nothing is left to cancel: a peer that leaves after its answer is no hang-up.
    pub(super) fn clear_hook(&self) {
        let hook = self.on_hangup.lock().take();
        drop(hook); // outside the lock: it may own anything
    }

    /// Poll thread: the peer has left. A panic of the hook is counted, not spread.
    pub(super) fn hang_up(&self, stats: &WireStats) {
        let mut slot = self.on_hangup.lock();
        self.gone.store(true, Ordering::Release);
        let hook = slot.take();
        drop(slot);
        let Some(hook) = hook else { return };
        stats.hangups.fetch_add(1, Ordering::Relaxed);
        if catch_unwind(AssertUnwindSafe(hook)).is_err() {
            stats.panics.fetch_add(1, Ordering::Relaxed);
            tracing::error!("a hang-up hook panicked");
        }
    }

    /// Poll thread: the socket takes bytes again (or never will: the next write says so).
    pub(super) fn wake_writer(&self) {
        *self.writable.lock() = true;
        self.became_writable.notify_one();
    }

    /// Worker: writes all of `data`. The deadline moves only with bytes that the kernel took, so a peer
    /// that reads one byte now and then cannot hold the worker.
    pub(super) fn write_all(
        &self,
        data: &[u8],
        config: &WireConfig,
        patience: Duration,
    ) -> io::Result<()> {
        let started = Instant::now();
        let mut left = data;
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => left = left.get(n..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let sent = data.len() - left.len();
                    self.wait_writable(config.rate_deadline(started, patience, sent))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn wait_writable(&self, deadline: Instant) -> io::Result<()> {
        let mut writable = self.writable.lock();
        while !*writable {
            if self
                .became_writable
                .wait_until(&mut writable, deadline)
                .timed_out()
                && !*writable
            {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        *writable = false;
        Ok(())
    }
}

/// How a connection comes back from a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Ready for the next request.
    Keep,
    /// Answered; close after the peer has read it.
    Close,
    /// Unusable: reset it.
    Abort,
}

/// What every thread of the server shares.
pub(super) struct Home {
    pub(super) config: WireConfig,
    pub(super) handler: Arc<dyn Handler>,
    pub(super) stats: Arc<WireStats>,
    /// Unbounded by type; bounded by fact to one message per open connection.
    pub(super) returns: Sender<(usize, Verdict)>,
    waker: mio::Waker,
    /// A wake-up is on its way: one eventfd write per poll round, not per answer.
    pending: AtomicBool,
    /// No new work: answers say `Connection: close`.
    closing: AtomicBool,
    /// When what still runs is cut; set with `closing`.
    drain_until: Mutex<Option<Instant>>,
    /// How fast the workers get done; the ops set doesn't count.
    drain_rate: Mutex<DrainRate>,
}

impl Home {
    pub(super) fn new(
        config: WireConfig,
        handler: Arc<dyn Handler>,
        returns: Sender<(usize, Verdict)>,
        waker: mio::Waker,
    ) -> Self {
        Home {
            config,
            handler,
            stats: Arc::default(),
            returns,
            waker,
            pending: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            drain_until: Mutex::new(None),
            drain_rate: Mutex::default(),
        }
    }

    pub(super) fn send_home(&self, id: usize, verdict: Verdict) {
        // Without a receiver the poll thread is gone, and with it the connection.
        let _ = self.returns.send((id, verdict));
        self.wake();
    }

    fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel)
            && let Err(error) = self.waker.wake()
        {
            tracing::error!(%error, "cannot wake the poll thread");
        }
    }

    /// Poll thread, before it looks for messages. A swap, not a store: a store could be delayed past the
    /// reads that follow, and a wake-up would be lost.
    pub(super) fn begin_round(&self) {
        self.pending.swap(false, Ordering::AcqRel);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Stops intake. A second call can only bring the deadline forward.
    pub(super) fn close(&self, grace: Duration) {
        let until = config::later(Instant::now(), grace);
        let mut slot = self.drain_until.lock();
        *slot = Some(slot.map_or(until, |earlier| earlier.min(until)));
        drop(slot);
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    /// A worker is done with a request.
    pub(super) fn worked(&self, now: Instant) {
        self.drain_rate.lock().ended(now);
    }

    /// Seconds after which a client that is refused now should come again, by the rate at which the
    /// workers got done lately: half of what is here will be gone then, or all of it in a drain, which
    /// ends at its deadline anyway.
    pub(super) fn retry_after_s(&self, now: Instant) -> u32 {
        let rate = self.drain_rate.lock().per_s(now);
        let count = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed) as usize;
        let n_here = count(&self.stats.queued) + count(&self.stats.busy_workers);
        let drain_left = self
            .drain_until()
            .map(|cut_at| cut_at.saturating_duration_since(now));
        advice_s(n_here, rate, drain_left)
    }

    pub(super) fn drain_until(&self) -> Option<Instant> {
        if self.is_closing() {
            *self.drain_until.lock()
        } else {
            None
        }
    }
}

/// See [`Home::retry_after_s`]. `drain_left`: until what still runs is cut; None = there is no drain.
fn advice_s(n_here: usize, rate_per_s: Option<f64>, drain_left: Option<Duration>) -> u32 {
    let Some(left) = drain_left else {
        return retry_after_s(n_here, rate_per_s);
    };
    let left_s = left.as_secs_f64().ceil().max(1.0) as u32;
    drained_after_s(n_here, rate_per_s).min(left_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_clients_are_told_how_long_what_is_here_takes() {
        let left = |ms| Some(Duration::from_millis(ms));
        for (n_here, rate_per_s, drain_left, expected_s) in [
            (0, None, None, 1),
            (300, None, None, 1), // nothing ended yet, so nothing is known
            (300, Some(30.0), None, 5),
            (300, Some(3000.0), None, 1),
            (300, Some(0.5), None, 30),
            (4, None, left(60_000), 5),
            (4, Some(0.5), left(60_000), 8),
            (4, Some(0.5), left(2500), 3), // cut by then, whatever the rate
            (4, Some(0.5), left(0), 1),
        ] {
            let advice = advice_s(n_here, rate_per_s, drain_left);
            assert_eq!(advice, expected_s, "{n_here} {rate_per_s:?} {drain_left:?}");
        }
    }
}
