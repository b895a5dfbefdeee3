//! One connection as the poll thread sees it: its state machine and one turn of work.
//!
//! Owned by the poll thread. While a worker has the request (`Busy`) nothing is read from the socket;
//! only the peer's hang-up and writability are passed on through the `Link`.
//!
//! ```text
//!              complete request, room in the queue
//!   Reading ────────────────────────────────────────► Busy
//!    │  ▲  └─ queue full: 503, stays (draining: closes) │
//!    │  └──────────────── Keep ─────────────────────────┤
//!    │ refused or too slow: answer                      │ Close
//!    ▼                                                  ▼
//!   Lingering ◄─────────────────────────────────── Lingering ── EOF, time or bytes used up ──► gone
//! ```
//!
//! `Lingering` has answered and shut its writing side; it discards input until the peer closes, because
//! closing over unread input sends a reset that takes the answer away from the client.

use super::budget::{Budget, Charge, PeerConnection};
use super::config::later;
use super::framing::{Framer, FramingLimits, Reject, Stage};
use super::lane::Lane;
use super::link::{Home, Link};
use super::{Job, config::WireConfig};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The read buffer that all connections share.
pub(super) const SCRATCH_BYTES: usize = 64 << 10;
/// A new connection gets this long to send something before it counts as idle.
const NEWBORN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum State {
    /// Between requests or inside one; `since` is when this stage began.
    Reading {
        stage: Stage,
        since: Instant,
    },
    Busy,
    Lingering {
        until: Instant,
        bytes_left: usize,
    },
}

/// What a turn led to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Turn {
    /// An event or a deadline comes next.
    Wait,
    /// There is more to do, after the others.
    Again,
    /// Forget the connection.
    Close,
}

/// What the poll thread lends to a connection for its turn.
pub(super) struct Context {
    pub(super) home: Arc<Home>,
    pub(super) work: Arc<Lane<Job>>,
    pub(super) ops: Arc<Lane<Job>>,
    pub(super) budget: Budget,
    pub(super) scratch: Box<[u8]>,
}

/// One connection.
pub(super) struct Conn {
    pub(super) link: Arc<Link>,
    pub(super) framer: Framer,
    pub(super) state: State,
    /// Edge-triggered: bytes may be left from the last event.
    pub(super) readable: bool,
    pub(super) peer_closed: bool,
    /// Has had a request answered.
    pub(super) served: bool,
    /// Stands in the `again` list; without it a flooding peer's events would pile up there.
    pub(super) scheduled: bool,
    pub(super) address: Option<SocketAddr>,
    pub(super) peer: PeerConnection,
    pub(super) charge: Charge,
}

impl Conn {
    pub(super) fn new(
        link: Arc<Link>,
        address: Option<SocketAddr>,
        peer: PeerConnection,
        config: &WireConfig,
    ) -> Self {
        let charge = peer.charge(0);
        Conn {
            link,
            framer: new_framer(config),
            state: State::Reading {
                stage: Stage::Idle,
                since: Instant::now(),
            },
            readable: false, // registering reports what is there
            peer_closed: false,
            served: false,
            scheduled: false,
            address,
            peer,
            charge,
        }
    }

    /// Has nothing to lose: at the connection cap and at the end of the drain it may be closed.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        match self.state {
            State::Reading {
                stage: Stage::Idle,
                since,
            } => {
                // Under pressure each newborn would otherwise be evicted by the next one.
                !self.readable && (self.served || now.duration_since(since) > NEWBORN)
            }
            State::Reading { .. } | State::Busy | State::Lingering { .. } => false,
        }
    }

    /// A request of it waits for a worker or runs.
    pub(super) fn is_busy(&self) -> bool {
        self.state == State::Busy
    }

    pub(super) fn is_lingering(&self) -> bool {
        matches!(self.state, State::Lingering { .. })
    }

    /// When its present state began or ends: the smallest is evicted first.
    pub(super) fn age_key(&self) -> Option<Instant> {
        match self.state {
            State::Reading { since, .. } => Some(since),
            State::Lingering { until, .. } => Some(until),
            State::Busy => None,
        }
    }

    /// Takes note of an event. True when a turn is due.
    pub(super) fn note_event(&mut self, event: &mio::event::Event, home: &Home) -> bool {
        let closed = event.is_read_closed() || event.is_error();
        self.readable |= event.is_readable() || closed;
        if self.state == State::Busy {
            if event.is_writable() || closed {
                self.link.wake_writer();
            }
            if closed && !self.peer_closed {
                self.link.hang_up(&home.stats);
            }
        }
        self.peer_closed |= closed;
        self.state != State::Busy && self.readable && !self.scheduled
    }

    /// A worker gives the connection back for the next request.
    pub(super) fn resume(&mut self, ctx: &mut Context) -> Turn {
        self.state = State::Reading {
            stage: Stage::Idle,
            since: Instant::now(),
        };
        self.turn(ctx)
    }

    /// Reads and frames what is there, within one turn's share.
    pub(super) fn turn(&mut self, ctx: &mut Context) -> Turn {
        self.scheduled = false;
        let turn = match self.state {
            State::Busy => Turn::Wait,
            State::Lingering { until, bytes_left } => self.discard(ctx, until, bytes_left),
            State::Reading { .. } => self.read_and_frame(ctx),
        };
        self.charge.set(self.framer.held_bytes());
        self.mind_stage();
        turn
    }

    /// Deadlines count from the first byte of a stage; no later byte moves that.
    fn mind_stage(&mut self) {
        let now_at = self.framer.stage();
        if let State::Reading { stage, since } = &mut self.state
            && *stage != now_at
        {
            (*stage, *since) = (now_at, Instant::now());
        }
    }

    /// The deadline of the present state; a worker has its own while it writes.
    fn deadline(&self, config: &WireConfig) -> Option<Instant> {
        match self.state {
            State::Busy => None,
            State::Lingering { until, .. } => Some(until),
            State::Reading {
                stage: Stage::Idle,
                since,
            } if self.served => Some(later(since, config.idle_timeout)),
            State::Reading {
                stage: Stage::Idle | Stage::Head,
                since,
            } => Some(later(since, config.head_timeout)),
            State::Reading {
                stage: Stage::Body,
                since,
            } => Some(config.rate_deadline(since, config.body_timeout, self.framer.body_bytes())),
        }
    }

    /// Enforces the deadline.
    pub(super) fn sweep(&mut self, ctx: &mut Context, now: Instant) -> Turn {
        if self.deadline(&ctx.home.config).is_none_or(|at| at > now) {
            return Turn::Wait;
        }
        match self.state {
            State::Reading {
                stage: Stage::Head, ..
            } => self.reject(ctx, Reject::new(408, "the request head came too slowly")),
            State::Reading {
                stage: Stage::Body, ..
            } => self.reject(ctx, Reject::new(408, "the request body came too slowly")),
            State::Reading {
                stage: Stage::Idle, ..
            }
            | State::Lingering { .. } => Turn::Close,
            State::Busy => Turn::Wait,
        }
    }

    /// The drain is over: whoever still works on this request learns it by hook, flag and write error.
    pub(super) fn cut(&self, home: &Home) {
        self.link.hang_up(&home.stats);
        self.link.stream.cut();
        self.link.wake_writer();
    }
}

pub(super) fn new_framer(config: &WireConfig) -> Framer {
    Framer::new(FramingLimits {
        head_bytes: config.max_head_bytes,
        body_bytes: config.max_body_bytes,
        chunk_line_bytes: 256,
        trailer_bytes: 4096,
    })
}
