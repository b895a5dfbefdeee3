//! The bounded queue between the poll thread and one set of workers.
//!
//! Pushed to by the poll thread only, popped by the workers. Own code instead of a channel for one
//! reason: when it is full, requests whose client has left make room (eight clients that send and leave
//! would otherwise fill a queue of eight and the ninth, alive, would be refused).
//!
//! Of the workers that wait the one that went idle last is woken: its stack and its heap are still
//! in the cache, and those below it sleep on undisturbed. No more are woken than there are items for
//! them: while one is on its way, the item that it was woken for is often taken by a worker that has just
//! become free, and then the next item is its own.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::thread::Thread;

/// A bounded first-in-first-out queue that can be closed.
pub(super) struct Lane<T> {
    /// Protects the queue and its open flag together, so that no pop can miss the close.
    state: Mutex<State<T>>,
    capacity: usize,
}

struct State<T> {
    items: VecDeque<T>,
    open: bool,
    /// Workers that found nothing, the latest last; each parks until it is taken out of here.
    idle: Vec<Thread>,
    /// Workers that were woken and have not looked yet.
    n_waking: usize,
}

impl<T> Lane<T> {
    pub(super) fn new(capacity: usize) -> Self {
        let state = State {
            items: VecDeque::new(),
            open: true,
            idle: Vec::new(),
            n_waking: 0,
        };
        Lane {
            state: Mutex::new(state),
            capacity,
        }
    }

    /// Is there room for one more? When full, takes out what `is_dead` names and returns it for the
    /// caller to drop outside the lock. Only one thread pushes, so a yes holds until it does.
    pub(super) fn make_room(&self, is_dead: impl Fn(&T) -> bool) -> (bool, Vec<T>) {
        let mut state = self.state.lock();
        if state.items.len() < self.capacity {
            return (true, Vec::new());
        }
        let (dead, live): (Vec<T>, Vec<T>) = state.items.drain(..).partition(is_dead);
        state.items = live.into();
        (state.items.len() < self.capacity, dead)
    }

    /// Appends; the caller has asked [`Lane::make_room`]. Gives the item back when the lane is closed.
    pub(super) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.state.lock();
        if !state.open {
            return Err(item);
        }
        state.items.push_back(item);
        let needs_one = state.items.len() > state.n_waking;
        let woken = needs_one.then(|| state.idle.pop()).flatten();
        state.n_waking += usize::from(woken.is_some());
        drop(state);
        if let Some(worker) = woken {
            worker.unpark();
        }
        Ok(())
    }

    /// Waits for the next item; `None` once the lane is closed and empty.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                return Some(item);
            }
            if !state.open {
                return None;
            }
            let own = std::thread::current();
            let id = own.id();
            state.idle.push(own);
            drop(state);
            std::thread::park();
            state = self.state.lock();
            // Parking may end without a cause; then it is still in the list.
            match state.idle.iter().rposition(|worker| worker.id() == id) {
                Some(place) => {
                    state.idle.remove(place);
                }
                None => state.n_waking -= 1,
            }
        }
    }

    /// Takes out what nobody has taken yet; the lane stays open.
    pub(super) fn take_all(&self) -> Vec<T> {
        self.state.lock().items.drain(..).collect()
    }

    /// No more pushes; returns what nobody has taken yet.
    pub(super) fn close(&self) -> Vec<T> {
        let mut state = self.state.lock();
        state.open = false;
        let left = state.items.drain(..).collect();
        let woken = std::mem::take(&mut state.idle);
        state.n_waking += woken.len();
        drop(state);
        woken.iter().for_each(Thread::unpark);
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_make_room_only_when_it_is_full() {
        let lane = Lane::new(3);
        for item in [1, 2, 3] {
            assert_eq!(lane.make_room(|_| true), (true, vec![]));
            assert_eq!(lane.push(item), Ok(()));
        }
        assert_eq!(lane.make_room(|_| false), (false, vec![]));
        assert_eq!(lane.make_room(|n| n % 2 == 1), (true, vec![1, 3]));
        assert_eq!(lane.pop(), Some(2));
    }

    #[test]
    fn closing_wakes_the_waiting_and_returns_the_rest() {
        let lane = Lane::new(2);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lane.pop());
            assert_eq!(lane.push(7), Ok(()));
            assert_eq!(waiting.join().expect("the popper does not panic"), Some(7));
        });
        assert_eq!(lane.push(6), Ok(()));
        assert_eq!(lane.take_all(), vec![6]);
        assert_eq!(lane.push(8), Ok(()));
        assert_eq!(lane.close(), vec![8]);
        assert_eq!(lane.push(9), Err(9));
        assert_eq!(lane.pop(), None);
    }

    /// Poppers and a pusher at once: everything arrives, also what was pushed while a worker was on its
    /// way, and nobody is counted as waking for ever.
    #[test]
    fn no_item_waits_for_a_worker_that_was_not_woken() {
        const ITEMS: usize = 20_000;
        let lane = Lane::new(ITEMS);
        let n_taken = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while lane.pop().is_some() {
                        n_taken.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                });
            }
            for item in 0..ITEMS {
                assert_eq!(lane.push(item), Ok(()));
            }
            while !lane.state.lock().items.is_empty() {
                std::thread::yield_now();
            }
            assert!(lane.close().is_empty());
        });
        assert_eq!(n_taken.into_inner(), ITEMS);
        assert_eq!(lane.state.lock().n_waking, 0);
    }
}
