//! What a connection does in its turn: read, frame, hand over, refuse, linger.
//!
//! Runs on the poll thread, called by the state machine in `conn`. Nothing here waits: reads and the
//! small answers are tried once, within the turn's share.

use super::Job;
use super::config::later;
use super::conn::{Conn, Context, SCRATCH_BYTES, State, Turn, new_framer};
use super::framing::{Reject, Stage, Step};
use super::head::Framing;
use super::lane::Lane;
use super::link::Home;
use super::refusal::{self, Refusal};
use super::request::Request;
use super::response::Responder;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Read ahead at most this while a head is awaited; pipelined bytes beyond it stay in the kernel.
const HEAD_READ_BYTES: usize = 16 << 10;
/// Bytes read, and requests refused, of one connection before the others get their turn.
const TURN_BYTES: usize = 256 << 10;
const TURN_STEPS: usize = 64;
/// Input that is discarded after a closing answer.
const LINGER_BYTES: usize = 1 << 20;
/// Lingering may not hold up a shutdown.
const LINGER_WHILE_DRAINING: Duration = Duration::from_millis(300);

/// What a request hears that comes, or still waits for a worker, when the drain has begun.
pub(super) const SHUTTING_DOWN: &str = "the server is shutting down";

/// Whether the lane takes one more; requests whose client has left make room for it.
fn make_room(home: &Home, lane: &Lane<Job>) -> bool {
    let (has_room, dead) = lane.make_room(|job| job.responder.is_gone());
    home.stats.purged.fetch_add(dead.len() as u64, Relaxed);
    home.stats.queued.fetch_sub(dead.len() as u64, Relaxed);
    drop(dead); // each tries once to answer and sends its connection home
    has_room
}

impl Conn {
    pub(super) fn read_and_frame(&mut self, ctx: &mut Context) -> Turn {
        let mut bytes_left = TURN_BYTES;
        let mut steps_left = TURN_STEPS;
        loop {
            match self.framer.step() {
                Step::Request(request) => match self.dispatch(ctx, request) {
                    Turn::Again if steps_left > 0 => steps_left -= 1,
                    other => return other,
                },
                Step::Continue => {
                    if !self.say(b"HTTP/1.1 100 Continue\r\n\r\n") {
                        return Turn::Close;
                    }
                }
                Step::Reject(reject) => return self.reject(ctx, reject),
                Step::More if !self.readable => return Turn::Wait,
                Step::More if bytes_left == 0 => return Turn::Again,
                Step::More => match self.read(ctx, bytes_left) {
                    Ok(0) => return Turn::Close,
                    Ok(n) => bytes_left = bytes_left.saturating_sub(n),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.readable = false
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => return Turn::Close,
                },
            }
            if ctx.budget.is_exceeded(&self.peer) && self.framer.stage() != Stage::Idle {
                let reject = Reject::new(503, "too many request bytes are in flight");
                return self.reject(ctx, reject);
            }
        }
    }

    /// One read into the framer; `Ok(0)` is the end of the input.
    fn read(&mut self, ctx: &mut Context, bytes_left: usize) -> io::Result<usize> {
        let whole = if self.framer.stage() == Stage::Body {
            SCRATCH_BYTES
        } else {
            HEAD_READ_BYTES
        };
        let wanted = whole.min(bytes_left).min(ctx.scratch.len());
        let Some(buffer) = ctx.scratch.get_mut(..wanted) else {
            return Ok(0);
        };
        let n = self.link.stream.read(buffer)?;
        // A short read emptied the socket; what comes later is a new event.
        self.readable = n == wanted || self.peer_closed;
        self.framer.feed(buffer.get(..n).unwrap_or_default());
        self.charge.set(self.framer.held_bytes());
        Ok(n)
    }

    /// Hands the request to its lane. `Again`: it was refused and the connection may go on.
    fn dispatch(&mut self, ctx: &mut Context, mut request: Request) -> Turn {
        self.served = true;
        let home = &ctx.home;
        let keep = request.keep_alive && !home.is_closing();
        let framing = Framing {
            http11: request.http11(),
            keep,
        };
        let head_only = request.method() == "HEAD";
        let is_ops = catch_unwind(AssertUnwindSafe(|| home.handler.is_ops(request.path())));
        let is_ops = is_ops.unwrap_or(false);
        let lane = if is_ops { &ctx.ops } else { &ctx.work };
        let refused = if home.is_closing() && !is_ops {
            Some(SHUTTING_DOWN)
        } else if !make_room(home, lane) {
            Some("every worker is busy and the queue is full")
        } else {
            None
        };
        if let Some(reason) = refused {
            return self.turn_away(ctx, &request, reason, framing);
        }
        self.state = State::Busy;
        if self.peer_closed {
            self.link.hang_up(&home.stats); // a hook that is set later runs at once
        }
        // The client's wish, not ours: whether we drain is looked at again when the head is written.
        let wish = Framing {
            keep: request.keep_alive,
            ..framing
        };
        let patience = match is_ops {
            true => home.config.ops_write_timeout,
            false => home.config.write_timeout,
        };
        let link = self.link.clone();
        let responder = Responder::new(link, home.clone(), wish, head_only, patience);
        let charge = self.peer.charge(request.held_bytes());
        request.peer = self.address;
        home.stats.requests.fetch_add(1, Relaxed);
        home.stats.queued.fetch_add(1, Relaxed);
        // A lane closes only after the poll thread's last turn; were it closed, the responder says 500.
        drop(lane.push(Job {
            request,
            responder,
            charge,
        }));
        Turn::Wait
    }

    /// A complete request that gets no worker. The connection goes on unless `framing` says otherwise.
    fn turn_away(
        &mut self,
        ctx: &mut Context,
        request: &Request,
        reason: &'static str,
        framing: Framing,
    ) -> Turn {
        let home = &ctx.home;
        home.stats.count_reject(503);
        let refusal = Refusal {
            status: 503,
            reason,
            path: Some(request.path()),
        };
        let head_only = request.method() == "HEAD";
        let answer = refusal::render(home, &refusal, framing, head_only);
        self.state = State::Reading {
            stage: Stage::Idle,
            since: Instant::now(),
        };
        match (self.say(&answer), framing.keep) {
            (false, _) => Turn::Close,
            (true, true) => Turn::Again,
            (true, false) => self.linger(ctx),
        }
    }

    /// Answers what never becomes a request, and lingers.
    pub(super) fn reject(&mut self, ctx: &mut Context, reject: Reject) -> Turn {
        ctx.home.stats.count_reject(reject.status);
        let head = self.framer.current();
        let refusal = Refusal {
            status: reject.status,
            reason: reject.why,
            path: head.map(Request::path),
        };
        let framing = Framing {
            http11: head.is_none_or(Request::http11),
            keep: false,
        };
        let head_only = head.is_some_and(|request| request.method() == "HEAD");
        let answer = refusal::render(&ctx.home, &refusal, framing, head_only);
        self.say(&answer);
        self.linger(ctx)
    }

    /// A new connection that has no place here: it is told so and lingers.
    pub(super) fn refuse(&mut self, ctx: &mut Context, why: &'static str) -> Turn {
        ctx.home.stats.refused.fetch_add(1, Relaxed);
        self.reject(ctx, Reject::new(503, why))
    }

    /// The answer is out and says close: discards input until the peer closes too.
    pub(super) fn linger(&mut self, ctx: &mut Context) -> Turn {
        let home = &ctx.home;
        let wait = home.config.linger;
        let wait = if home.is_closing() {
            wait.min(LINGER_WHILE_DRAINING)
        } else {
            wait
        };
        let until = later(Instant::now(), wait);
        self.framer = new_framer(&home.config);
        self.charge.set(0);
        self.link.stream.finish_writing();
        self.readable = true;
        self.discard(ctx, until, LINGER_BYTES)
    }

    pub(super) fn discard(
        &mut self,
        ctx: &mut Context,
        until: Instant,
        mut bytes_left: usize,
    ) -> Turn {
        for _ in 0..TURN_BYTES / SCRATCH_BYTES {
            match self.link.stream.read(&mut ctx.scratch) {
                Ok(0) => return Turn::Close,
                Ok(n) if n >= bytes_left => return Turn::Close,
                Ok(n) => bytes_left -= n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    self.state = State::Lingering { until, bytes_left };
                    return Turn::Wait;
                }
                Err(_) => return Turn::Close,
            }
        }
        self.state = State::Lingering { until, bytes_left };
        Turn::Again
    }

    /// A small answer from the poll thread. The send buffer is empty (one request in flight), so a short
    /// write means a peer that does not read.
    fn say(&self, bytes: &[u8]) -> bool {
        matches!(self.link.stream.write(bytes), Ok(n) if n == bytes.len())
    }
}
