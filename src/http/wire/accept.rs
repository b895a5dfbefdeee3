//! Accepting: the connection cap, eviction, and what to do without a free descriptor.
//!
//! Part of the poll thread. Two rules that each cost somebody an outage: `accept` says "out of
//! descriptors" even when nobody waits, so nobody is evicted before a waiting client is at hand; and the
//! listeners are edge-triggered, so whatever is left unaccepted must be remembered in `accept_at`.

use super::budget::PeerConnection;
use super::conn::{Conn, Turn};
use super::head::Framing;
use super::link::Link;
use super::net::Stream;
use super::poll::Poller;
use super::refusal::{self, Refusal};
use mio::Token;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Connections taken before the established ones get their turn.
const ACCEPTS_PER_ROUND: usize = 64;
/// Connections above the cap that are kept only until their 503 has been read.
const REFUSED_LINGER_MAX: usize = 64;
/// Pause after an accept error that nothing here can mend.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A descriptor to give up when there is no other.
pub(super) fn spare_descriptor() -> Option<File> {
    File::open("/dev/null").ok()
}

impl Poller {
    /// Takes what waits at the listeners, up to this round's share.
    pub(super) fn accept(&mut self) {
        self.accept_at = None;
        for listener in 0..self.listeners.len() {
            for n_accepted in 0.. {
                if n_accepted == ACCEPTS_PER_ROUND {
                    self.accept_at = Some(Instant::now());
                    break;
                }
                match self.accept_one(listener) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // That client is gone already: the next one.
                    Err(error)
                        if matches!(
                            error.kind(),
                            ErrorKind::ConnectionAborted | ErrorKind::Interrupted
                        ) => {}
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept connections, trying again");
                        self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                        break;
                    }
                }
            }
        }
        self.spare = self.spare.take().or_else(spare_descriptor);
    }

    fn accept_one(&mut self, listener: usize) -> io::Result<()> {
        let Some(socket) = self.listeners.get(listener) else {
            return Err(ErrorKind::WouldBlock.into());
        };
        match socket.accept() {
            Ok((stream, address)) => {
                self.admit(stream, address);
                Ok(())
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::ConnectionAborted | ErrorKind::Interrupted
                ) =>
            {
                Err(error)
            }
            Err(_) => {
                self.ctx.home.stats.accept_errors.fetch_add(1, Relaxed);
                let result = self.accept_on_spare(listener);
                self.spare = self.spare.take().or_else(spare_descriptor);
                result
            }
        }
    }

    /// Out of descriptors: the spare one finds out whether somebody waits at all. Then an idle connection
    /// makes room, or the client is told.
    fn accept_on_spare(&mut self, listener: usize) -> io::Result<()> {
        self.spare = None;
        let Some(socket) = self.listeners.get(listener) else {
            return Err(ErrorKind::WouldBlock.into());
        };
        let (stream, address) = socket.accept()?;
        if self.evict() {
            self.admit(stream, address);
            return Ok(());
        }
        let stats = &self.ctx.home.stats;
        stats.accepted.fetch_add(1, Relaxed);
        stats.refused.fetch_add(1, Relaxed);
        stats.count_reject(503);
        let refusal = Refusal {
            status: 503,
            reason: "the server is out of file descriptors",
            path: None,
        };
        let framing = Framing {
            http11: true,
            keep: false,
        };
        let answer = refusal::render(&self.ctx.home, &refusal, framing, false);
        let _ = stream.write(&answer);
        stream.finish_writing();
        // Closing over unread input would send a reset and take the answer away. What is there is read
        // once; a client that keeps pushing gets the reset.
        let _ = stream.read(&mut self.ctx.scratch);
        Ok(())
    }

    fn admit(&mut self, stream: Stream, address: Option<SocketAddr>) {
        let stats = self.ctx.home.stats.clone();
        stats.accepted.fetch_add(1, Relaxed);
        let max = self.ctx.home.config.max_connections;
        let (peer, allowed) = self.ctx.budget.connect(address);
        let is_full = self.conns.len() >= max && !self.evict();
        let refused = match (is_full, allowed) {
            (true, _) => Some("too many connections"),
            (false, false) => Some("too many connections from this address"),
            (false, true) => None,
        };
        if refused.is_some() && self.conns.len() >= max + REFUSED_LINGER_MAX {
            stats.refused.fetch_add(1, Relaxed);
            return;
        }
        if let Err(error) = self.settle(stream, address, peer, refused) {
            tracing::warn!(%error, "cannot watch a new connection");
        }
        stats.open.store(self.conns.len() as u64, Relaxed);
    }

    fn settle(
        &mut self,
        mut stream: Stream,
        address: Option<SocketAddr>,
        peer: PeerConnection,
        refused: Option<&'static str>,
    ) -> io::Result<()> {
        let id = self.next_id;
        self.next_id += 1; // never reused: a stale event finds nobody
        let config = &self.ctx.home.config;
        stream.tune(config.send_buffer_bytes);
        stream.register(self.poll.registry(), Token(id))?;
        let mut conn = Conn::new(Arc::new(Link::new(id, stream)), address, peer, config);
        let turn = match refused {
            Some(why) => conn.refuse(&mut self.ctx, why),
            None => Turn::Wait,
        };
        self.conns.insert(id, conn);
        self.follow(id, turn);
        Ok(())
    }

    /// Closes the connection that loses least: one that only lingers, else the longest idle. False when
    /// all are in use.
    fn evict(&mut self) -> bool {
        let now = Instant::now();
        let candidates = self
            .conns
            .iter()
            .filter(|(_, conn)| conn.is_lingering() || conn.is_idle(now));
        let loses_least = candidates.min_by_key(|(_, conn)| (!conn.is_lingering(), conn.age_key()));
        let Some(id) = loses_least.map(|(id, _)| *id) else {
            return false;
        };
        self.ctx.home.stats.evicted.fetch_add(1, Relaxed);
        self.remove(id);
        true
    }
}
