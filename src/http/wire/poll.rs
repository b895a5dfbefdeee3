//! The poll thread: waits for an event, gives connections their turns, enforces deadlines, drains.
//!
//! Owns the listeners and every connection that no worker holds; nothing else changes them. It never
//! blocks on a peer, and it must not panic: `run` is wrapped so that a panic here (a bug) aborts the
//! process with a log line instead of leaving a server that accepts nothing.
//!
//! ```text
//!   Open ── asked ──► Refusing ── nothing runs ──► Closing ── all gone, or 1 s ──► end
//!                        └──────────── the drain time is up: cut ──────────────────►
//! ```
//!
//! While `Refusing` the port stays open and every request but those of the ops set hears 503: a
//! client that comes now learns why, instead of a refused connection. `Closing` takes leave of those
//! who are still connected.

use super::accept::spare_descriptor;
use super::conn::{Conn, Context, Turn};
use super::link::Verdict;
use super::net::Listener;
use super::refusal::Refusal;
use super::turn::SHUTTING_DOWN;
use crossbeam_channel::Receiver;
use mio::{Events, Poll, Token};
use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The token of the waker; connections count up from the number of listeners.
pub(super) const WAKE: Token = Token(usize::MAX);
/// Deadlines are looked at this often: 10 us for 4,096 connections, cheaper than a timer heap.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
const SWEEP_EVERY_DRAINING: Duration = Duration::from_millis(50);

/// How long the end waits for connections that have nothing more to be answered.
const CLOSING_TIME: Duration = Duration::from_secs(1);

/// How far the end has come; see the module.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drain {
    Open,
    Refusing,
    Closing { until: Instant },
}

/// The poll thread's state.
pub(super) struct Poller {
    pub(super) poll: Poll,
    pub(super) listeners: Vec<Listener>,
    pub(super) ctx: Context,
    pub(super) conns: HashMap<usize, Conn>,
    pub(super) next_id: usize,
    /// When to accept next; set by an event, a full round, or a pause after an error.
    pub(super) accept_at: Option<Instant>,
    pub(super) spare: Option<File>,
    returns: Receiver<(usize, Verdict)>,
    /// Connections with work left from their last turn, each at most once.
    again: Vec<usize>,
    sweep_at: Instant,
    drain: Drain,
}

impl Poller {
    pub(super) fn new(
        poll: Poll,
        listeners: Vec<Listener>,
        ctx: Context,
        returns: Receiver<(usize, Verdict)>,
    ) -> Self {
        let now = Instant::now();
        Poller {
            poll,
            next_id: listeners.len(),
            listeners,
            ctx,
            conns: HashMap::new(),
            accept_at: Some(now),
            spare: spare_descriptor(),
            returns,
            again: Vec::new(),
            sweep_at: now,
            drain: Drain::Open,
        }
    }

    /// Runs until drained.
    pub(super) fn run(self) {
        let (work, ops) = (self.ctx.work.clone(), self.ctx.ops.clone());
        if catch_unwind(AssertUnwindSafe(|| self.run_loop())).is_err() {
            tracing::error!(
                "the HTTP poll thread panicked; nothing can be served any more, so the process ends"
            );
            std::process::abort();
        }
        // Their connections are cut: what waits here would only find that out.
        drop((work.close(), ops.close()));
    }

    fn run_loop(mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.is_drained() {
            let timeout = self.timeout();
            if let Err(error) = self.poll.poll(&mut events, timeout) {
                if error.kind() != ErrorKind::Interrupted {
                    tracing::error!(%error, "cannot poll");
                    std::thread::sleep(SWEEP_EVERY_DRAINING); // no event will come: at least do not spin
                }
                continue;
            }
            for event in &events {
                self.on_event(event);
            }
            self.ctx.home.begin_round();
            while let Ok((id, verdict)) = self.returns.try_recv() {
                self.on_return(id, verdict);
            }
            if self.accept_at.is_some_and(|at| at <= Instant::now()) {
                self.accept();
            }
            for id in std::mem::take(&mut self.again) {
                self.turn(id);
            }
            self.sweep();
        }
        self.cut_rest();
    }

    /// Until the next thing to do without an event; a server without connections sleeps.
    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let sweep = (!self.conns.is_empty()).then_some(self.sweep_at);
        let cut = self.ctx.home.drain_until();
        let next = [sweep, self.accept_at, cut].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(Instant::now())) // mio rounds up to whole milliseconds
    }

    fn on_event(&mut self, event: &mio::event::Event) {
        match event.token() {
            WAKE => {}
            Token(listener) if listener < self.listeners.len() => {
                self.accept_at = self.accept_at.or_else(|| Some(Instant::now()));
            }
            Token(id) => {
                let Some(conn) = self.conns.get_mut(&id) else {
                    return;
                };
                if conn.note_event(event, &self.ctx.home) {
                    self.turn(id);
                }
            }
        }
    }

    fn on_return(&mut self, id: usize, verdict: Verdict) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let turn = match verdict {
            Verdict::Keep => conn.resume(&mut self.ctx),
            Verdict::Close => conn.linger(&mut self.ctx),
            Verdict::Abort => {
                conn.link.stream.abort_on_close();
                Turn::Close
            }
        };
        self.follow(id, turn);
    }

    fn turn(&mut self, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let turn = conn.turn(&mut self.ctx);
        self.follow(id, turn);
    }

    /// Does what a turn asked for.
    pub(super) fn follow(&mut self, id: usize, turn: Turn) {
        match turn {
            Turn::Wait => {}
            Turn::Close => self.remove(id),
            Turn::Again => {
                if let Some(conn) = self.conns.get_mut(&id)
                    && !conn.scheduled
                {
                    conn.scheduled = true;
                    self.again.push(id);
                }
            }
        }
    }

    pub(super) fn remove(&mut self, id: usize) {
        self.conns.remove(&id);
        self.ctx
            .home
            .stats
            .open
            .store(self.conns.len() as u64, Relaxed);
    }

    fn sweep(&mut self) {
        let now = Instant::now();
        if now < self.sweep_at {
            return;
        }
        let every = match self.drain {
            Drain::Open => SWEEP_EVERY,
            Drain::Refusing | Drain::Closing { .. } => SWEEP_EVERY_DRAINING,
        };
        self.sweep_at = now + every;
        let closing = matches!(self.drain, Drain::Closing { .. });
        let mut turns = Vec::new();
        for (id, conn) in &mut self.conns {
            let turn = if closing && conn.is_idle(now) {
                Turn::Close
            } else {
                conn.sweep(&mut self.ctx, now)
            };
            if turn != Turn::Wait {
                turns.push((*id, turn));
            }
        }
        for (id, turn) in turns {
            self.follow(id, turn);
        }
        self.ctx.budget.forget_absent();
    }

    /// Moves the drain on. True when nothing is left to wait for, or the time is up.
    fn is_drained(&mut self) -> bool {
        let Some(cut_at) = self.ctx.home.drain_until() else {
            return false;
        };
        let now = Instant::now();
        if self.drain == Drain::Open {
            self.drain = Drain::Refusing;
            self.refuse_queued();
        }
        let runs = || self.conns.values().any(Conn::is_busy);
        if self.drain == Drain::Refusing && (now >= cut_at || !runs()) {
            self.accept(); // those that the kernel has already promised a connection
            self.listeners.clear();
            let until = now + CLOSING_TIME;
            self.drain = Drain::Closing { until };
            self.sweep_at = now;
        }
        let Drain::Closing { until } = self.drain else {
            return false;
        };
        self.accept_at = None;
        // Somebody may run again: an ops page asked for on an old connection.
        let done =
            self.conns.is_empty() || (now >= until && !self.conns.values().any(Conn::is_busy));
        done || now >= cut_at
    }

    /// Requests that no worker has taken yet will not run.
    fn refuse_queued(&mut self) {
        let stats = &self.ctx.home.stats;
        for job in self.ctx.work.take_all() {
            stats.queued.fetch_sub(1, Relaxed);
            stats.count_reject(503);
            job.responder.refuse(&Refusal {
                status: 503,
                reason: SHUTTING_DOWN,
                path: Some(job.request.path()),
            });
        }
    }

    /// A flag alone would not stop a handler that ignores it: its next write fails too.
    fn cut_rest(&mut self) {
        if !self.conns.is_empty() {
            tracing::warn!(
                connections = self.conns.len(),
                "the drain time is up: cutting what still runs"
            );
        }
        for conn in self.conns.values() {
            conn.cut(&self.ctx.home);
        }
        self.ctx.home.stats.open.store(0, Relaxed);
    }
}
