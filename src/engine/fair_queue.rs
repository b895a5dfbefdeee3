//! Whose turn it is on a device that several engines use: start-time fair queueing over measured time.
//!
//! Pure: plain numbers and times that the caller measured; no lock, no clock, no thread. `arbiter` makes
//! engine threads wait for what is decided here.
//!
//! Each model has a *share* with a weight, each of its replicas a *seat* in that share. A turn is one
//! quantum of one seat. The rule is that of Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996),
//! which needs the length of a turn only once it is over, and a quantum's length is known no sooner:
//!
//! * a turn of length `l` moves its share on by `l / weight` in virtual time: from its *start tag* to its
//!   *finish tag*;
//! * the waiting share with the smallest start tag has the next turn; equals go by who was served longest ago;
//! * virtual time is the start tag of the turn under way. A share that comes back from idleness starts at
//!   virtual time or at its own finish tag, whichever is later: being idle costs nothing and earns nothing.
//!
//! From that follows what the property tests check: over any time in which two shares wait all along, their
//! times divided by their weights differ by at most one longest turn each; nobody starves; with one share
//! alone nothing is decided at all. Seats of one share take turns among themselves in the order in which
//! they asked.
//!
//! A seat that wants to go on says so *as it ends its turn*, so that it stands among those who wait when
//! the next turn is given. Without that each turn would go to somebody else, and weights would mean nothing.

use std::collections::VecDeque;
use std::time::Duration;

/// Virtual nanoseconds of a nanosecond at weight 1: room for weights to divide.
const SCALE: u128 = 1 << 20;

/// A model's share of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareId(usize);

/// A seat, as whoever made it numbers them; unique over all shares.
pub type SeatId = usize;

#[derive(Clone, Debug)]
struct Share {
    weight: u128,
    /// Start tag of its next turn; has a meaning only while somebody waits.
    start: u128,
    /// Finish tag of its latest turn.
    finish: u128,
    /// Its seats that wait, in the order in which they asked.
    waiting: VecDeque<SeatId>,
    /// Number of its latest turn; 0 = it had none.
    last_turn: u64,
    used: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    share: usize,
    seat: SeatId,
    start: u128,
}

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub struct FairQueue {
    /// By id; None = it left.
    shares: Vec<Option<Share>>,
    turn: Option<Turn>,
    virtual_time: u128,
    n_turns: u64,
}

impl FairQueue {
    /// A new share. Weights count relative to each other; 0 counts as 1.
    pub fn join(&mut self, weight: u32) -> ShareId {
        let share = Share {
            weight: u128::from(weight.max(1)),
            start: 0,
            finish: 0,
            waiting: VecDeque::new(),
            last_turn: 0,
            used: Duration::ZERO,
        };
        let free = self.shares.iter().position(Option::is_none);
        let index = free.unwrap_or(self.shares.len());
        match free {
            Some(index) => self.shares[index] = Some(share),
            None => self.shares.push(Some(share)),
        }
        ShareId(index)
    }

    /// The share goes; none of its seats may wait or have the turn.
    pub fn leave(&mut self, share: ShareId) {
        self.shares[share.0] = None;
    }

    /// Whose turn it is.
    #[must_use]
    pub fn turn(&self) -> Option<SeatId> {
        self.turn.map(|turn| turn.seat)
    }

    /// Time that the turns of a share took so far.
    #[must_use]
    pub fn used(&self, share: ShareId) -> Duration {
        let share = self.shares.get(share.0).and_then(Option::as_ref);
        share.map_or(Duration::ZERO, |share| share.used)
    }

    /// A seat wants a turn. True when it has it at once; otherwise it waits until `end` names it.
    pub fn want(&mut self, share: ShareId, seat: SeatId) -> bool {
        self.wait(share.0, seat);
        self.turn.is_none() && self.next() == Some(seat)
    }

    /// The turn under way is over. `took` is charged to its share; with `wants_more` its seat waits for
    /// another one. Returns whose turn is next, which may be the same seat's.
    pub fn end(&mut self, took: Duration, wants_more: bool) -> Option<SeatId> {
        let turn = self.turn.take()?;
        if let Some(share) = self.shares[turn.share].as_mut() {
            let length = took.as_nanos().saturating_mul(SCALE) / share.weight;
            share.finish = turn.start.saturating_add(length);
            share.used += took;
            share.start = share.finish;
        }
        if wants_more {
            self.wait(turn.share, turn.seat);
        }
        self.next()
    }

    /// A waiting seat does not want its turn any more.
    pub fn withdraw(&mut self, share: ShareId, seat: SeatId) {
        if let Some(share) = self.shares[share.0].as_mut() {
            share.waiting.retain(|&waiting| waiting != seat);
        }
    }

    fn wait(&mut self, share: usize, seat: SeatId) {
        let is_running = self.turn.is_some_and(|turn| turn.share == share);
        let Some(share) = self.shares[share].as_mut() else {
            return;
        };
        // While a seat of the share has the turn its finish tag is not known yet; `end` sets the start.
        if share.waiting.is_empty() && !is_running {
            share.start = share.finish.max(self.virtual_time);
        }
        share.waiting.push_back(seat);
    }

    /// Gives the next turn, if anybody waits.
    fn next(&mut self) -> Option<SeatId> {
        let waiting = self
            .shares
            .iter_mut()
            .enumerate()
            .filter_map(|(index, share)| {
                let share = share.as_mut()?;
                (!share.waiting.is_empty()).then_some((index, share))
            });
        let first = waiting.min_by_key(|(_, share)| (share.start, share.last_turn));
        let Some((index, share)) = first else {
            // The end of a busy time: whoever comes next starts level with everyone.
            let shares = self.shares.iter().flatten();
            let latest = shares.map(|share| share.finish).max().unwrap_or(0);
            self.virtual_time = self.virtual_time.max(latest);
            return None;
        };
        let seat = share.waiting.pop_front()?;
        self.n_turns += 1;
        share.last_turn = self.n_turns;
        self.virtual_time = share.start;
        self.turn = Some(Turn {
            share: index,
            seat,
            start: share.start,
        });
        Some(seat)
    }
}
