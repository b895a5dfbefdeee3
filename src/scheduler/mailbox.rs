//! The way from a job's sink and the driver to the thread that waits for the answer.
//!
//! One mailbox serves all jobs that were submitted together, one box each, so that their consumer
//! can wait for whichever speaks first. Senders never wait. A channel of the usual kind was
//! measured and is not used: it yields the processor several times before it sleeps, which costs
//! the kernel threads of a busy two-core machine more than the wake-up it may save, and it
//! allocates 31 places for an answer of three words.
//!
//! Unbounded by type, bounded by logic: a job sends at most `max_tokens` tokens, one list of
//! prompt log-probabilities and one end, all of which the answer needs anyway. A bounded queue
//! would make the engine wait for a slow reader.

use super::record::Delivery;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

struct Shared {
    /// Guards all boxes; held for a push or a pop.
    boxes: Mutex<Vec<LetterBox>>,
    /// Something came into any of them.
    came: Condvar,
}

#[derive(Default)]
struct LetterBox {
    letters: VecDeque<Delivery>,
    /// Its receiver was dropped.
    abandoned: bool,
}

/// Where a job's deliveries go in.
pub(crate) struct Sender {
    shared: Arc<Shared>,
    index: usize,
}

/// Where they come out. Dropping it makes `send` say so.
pub(crate) struct Receiver {
    shared: Arc<Shared>,
    index: usize,
}

/// One way each for `n` jobs that are submitted together.
pub(crate) fn mailbox(n: usize) -> impl Iterator<Item = (Sender, Receiver)> {
    let shared = Arc::new(Shared {
        boxes: Mutex::new((0..n).map(|_| LetterBox::default()).collect()),
        came: Condvar::new(),
    });
    (0..n).map(move |index| {
        let sender = Sender {
            shared: Arc::clone(&shared),
            index,
        };
        let receiver = Receiver {
            shared: Arc::clone(&shared),
            index,
        };
        (sender, receiver)
    })
}

/// The way for one job.
pub(crate) fn single() -> (Sender, Receiver) {
    mailbox(1).next().expect("one way was asked for")
}

impl Sender {
    /// Never waits. False when nobody will read it.
    pub(crate) fn send(&self, delivery: Delivery) -> bool {
        let mut boxes = self.shared.boxes.lock();
        let own = &mut boxes[self.index];
        if own.abandoned {
            return false;
        }
        own.letters.push_back(delivery);
        // Under the lock, so that one thread is woken and finds the letter there.
        self.shared.came.notify_all();
        true
    }
}

impl Receiver {
    /// The next letter; waits for it until `deadline`, None = as long as it takes.
    pub(crate) fn recv(&self, deadline: Option<Instant>) -> Option<Delivery> {
        let mut boxes = self.shared.boxes.lock();
        loop {
            if let Some(letter) = boxes[self.index].letters.pop_front() {
                return Some(letter);
            }
            match deadline {
                None => self.shared.came.wait(&mut boxes),
                Some(deadline) => {
                    let waited = self.shared.came.wait_until(&mut boxes, deadline);
                    if waited.timed_out() && boxes[self.index].letters.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// Whether both belong to jobs that were submitted together.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Waits until one of `candidates`, all submitted together, has a letter; says which. None when
    /// `deadline` passed or there are none.
    pub(crate) fn wait_any<'a>(
        candidates: impl Iterator<Item = &'a Self> + Clone,
        deadline: Option<Instant>,
    ) -> Option<usize> {
        let first = candidates.clone().next()?;
        let mut boxes = first.shared.boxes.lock();
        loop {
            let has_letter = |own: &Self| !boxes[own.index].letters.is_empty();
            if let Some(found) = candidates.clone().position(has_letter) {
                return Some(found);
            }
            match deadline {
                None => first.shared.came.wait(&mut boxes),
                Some(deadline) if Instant::now() >= deadline => return None,
                Some(deadline) => {
                    first.shared.came.wait_until(&mut boxes, deadline);
                }
            }
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut boxes = self.shared.boxes.lock();
        let own = &mut boxes[self.index];
        own.abandoned = true;
        let unread = std::mem::take(&mut own.letters);
        drop(boxes);
        drop(unread); // outside the lock: it may be long
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::GenerationEvent;
    use std::time::Duration;

    fn text(text: &str) -> Delivery {
        Delivery::Event(GenerationEvent::Text {
            text: text.to_owned(),
            logprobs: Vec::new(),
        })
    }

    fn said(delivery: Option<Delivery>) -> Option<String> {
        match delivery {
            Some(Delivery::Event(GenerationEvent::Text { text, .. })) => Some(text),
            _ => None,
        }
    }

    #[test]
    fn letters_come_in_order_and_only_to_their_box() {
        let ways: Vec<_> = mailbox(2).collect();
        let past = Some(Instant::now());
        for word in ["a", "b"] {
            assert!(ways[1].0.send(text(word)));
        }
        assert!(ways[0].1.recv(past).is_none());
        assert_eq!(said(ways[1].1.recv(None)), Some("a".to_owned()));
        assert_eq!(said(ways[1].1.recv(past)), Some("b".to_owned()));
        assert!(ways[1].1.recv(past).is_none());
    }

    #[test]
    fn an_abandoned_box_says_so_and_the_others_go_on() {
        let mut ways: Vec<_> = mailbox(2).collect();
        let (sender, receiver) = ways.remove(0);
        assert!(sender.send(text("unread")));
        drop(receiver);
        assert!(!sender.send(text("late")));
        assert!(ways[0].0.send(text("read")));
        assert_eq!(said(ways[0].1.recv(None)), Some("read".to_owned()));
    }

    #[test]
    fn whoever_speaks_first_is_found() {
        let ways: Vec<_> = mailbox(3).collect();
        let receivers = || ways.iter().map(|(_, receiver)| receiver);
        assert_eq!(Receiver::wait_any(receivers(), Some(Instant::now())), None);
        assert_eq!(Receiver::wait_any(std::iter::empty(), None), None);
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("speaker".to_owned())
                .spawn_scoped(scope, || ways[2].0.send(text("now")))
                .expect("a thread");
            assert_eq!(Receiver::wait_any(receivers(), None), Some(2));
        });
        let soon = Instant::now() + Duration::from_millis(1);
        assert!(ways[0].1.recv(Some(soon)).is_none());
    }
}
