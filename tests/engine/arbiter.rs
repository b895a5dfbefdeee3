//! Turns at a shared device: the rule against its promises, on times that the test makes up, and the
//! waiting with real threads.

use crate::support::{alone, config, engine_of, greedy, prompt, run, submit};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tinyloop::engine::arbiter::DeviceArbiter;
use tinyloop::engine::fair_queue::{FairQueue, ShareId};

/// A device with shares of one seat each, whose number is the share's.
struct Device {
    queue: FairQueue,
    shares: Vec<ShareId>,
    used_ns: Vec<u64>,
}

impl Device {
    fn new(weights: &[u32]) -> Self {
        let mut queue = FairQueue::default();
        let shares = weights.iter().map(|&weight| queue.join(weight)).collect();
        Self {
            queue,
            shares,
            used_ns: vec![0; weights.len()],
        }
    }

    fn want(&mut self, share: usize) -> bool {
        self.queue.want(self.shares[share], share)
    }

    /// Ends the turn under way; returns whose it was.
    fn end(&mut self, ns: u64, wants_more: bool) -> usize {
        let holder = self.queue.turn().expect("somebody has the turn");
        self.used_ns[holder] += ns;
        self.queue.end(Duration::from_nanos(ns), wants_more);
        holder
    }
}

proptest! {
    /// While two shares both want turns all along, their times divided by their weights differ by at most
    /// one longest turn of each: the bound of start-time fair queueing. Nobody starves.
    #[test]
    fn shares_follow_the_weights(
        weights in prop::collection::vec(1_u32..20, 2..6),
        turns in prop::collection::vec(1_u64..1_000, 50..400),
    ) {
        let mut device = Device::new(&weights);
        for share in 0..weights.len() {
            prop_assert_eq!(device.want(share), share == 0);
        }
        let longest = turns.iter().copied().max().unwrap_or(0) as f64;
        for ns in turns {
            device.end(ns, true);
            for (a, b) in (0..weights.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let [share_a, share_b] = [a, b].map(|i| device.used_ns[i] as f64 / f64::from(weights[i]));
                let bound = longest / f64::from(weights[a]) + longest / f64::from(weights[b]);
                prop_assert!((share_a - share_b).abs() <= bound + 1e-6, "{:?} {:?}", device.used_ns, weights);
            }
        }
    }

    /// The turn is never lost and never given to somebody who does not want it, whatever happens; a share
    /// that was idle does not make up for it.
    #[test]
    fn any_coming_and_going(
        weights in prop::collection::vec(1_u32..5, 1..5),
        steps in prop::collection::vec((0_usize..100, 0_u64..500, any::<bool>(), any::<bool>()), 1..300),
    ) {
        let mut device = Device::new(&weights);
        let mut wants = vec![false; weights.len()];
        for (choice, ns, wants_more, withdraws) in steps {
            let share = choice % weights.len();
            let has_turn = device.queue.turn();
            if !wants[share] {
                let was_free = has_turn.is_none();
                prop_assert_eq!(device.want(share), was_free);
                wants[share] = true;
            } else if withdraws && has_turn != Some(share) {
                device.queue.withdraw(device.shares[share], share);
                wants[share] = false;
            } else {
                let holder = device.end(ns, wants_more);
                wants[holder] = wants_more;
            }
            match device.queue.turn() {
                Some(holder) => prop_assert!(wants[holder]),
                None => prop_assert!(!wants.contains(&true), "the device idles: {:?}", wants),
            }
        }
        for (share, &ns) in device.used_ns.iter().enumerate() {
            prop_assert_eq!(device.queue.used(device.shares[share]), Duration::from_nanos(ns));
        }
    }
}

#[test]
fn idle_time_earns_no_credit_and_costs_nothing() {
    let mut device = Device::new(&[1, 1]);
    assert!(device.want(0));
    for _ in 0..1000 {
        assert_eq!(device.end(100, true), 0); // alone: it keeps the turn
    }
    assert!(!device.want(1)); // back from a long idle time
    let turns: Vec<usize> = (0..20).map(|_| device.end(100, true)).collect();
    let n_of_the_other = turns.iter().filter(|&&share| share == 1).count();
    assert!((9..=11).contains(&n_of_the_other), "{turns:?}");
    // And the one that worked meanwhile pays nothing for it: after a common pause they are equals.
    while device.queue.turn().is_some() {
        device.end(100, false);
    }
    assert!(device.want(1) && !device.want(0));
    let turns: Vec<usize> = (0..10).map(|_| device.end(100, true)).collect();
    assert_eq!(turns.iter().filter(|&&share| share == 0).count(), 5);
}

#[test]
fn seats_of_one_share_divide_it_and_numbers_are_used_again() {
    let mut queue = FairQueue::default();
    let [two, one] = [queue.join(1), queue.join(1)];
    assert!(queue.want(two, 0));
    queue.want(two, 1);
    queue.want(one, 2);
    let mut n_turns = [0; 3];
    for _ in 0..400 {
        n_turns[queue.turn().expect("somebody wants")] += 1;
        queue.end(Duration::from_micros(10), true);
    }
    assert_eq!(n_turns, [100, 100, 200]);
    for _ in 0..3 {
        queue.end(Duration::ZERO, false);
    }
    assert_eq!(queue.turn(), None);
    queue.leave(two);
    assert_eq!(queue.join(7), two, "its number is free");
    assert_eq!(queue.used(two), Duration::ZERO);
}

/// Every seat of a storm gets all its turns, and never two at once.
#[test]
fn turns_exclude_each_other_and_none_is_lost() {
    for slice in [Duration::ZERO, Duration::from_micros(50)] {
        storm(&DeviceArbiter::with_slice(slice));
    }
}

fn storm(arbiter: &DeviceArbiter) {
    let n_inside = Arc::new(AtomicU32::new(0));
    let threads: Vec<_> = (0..4_u32)
        .map(|number| {
            let share = arbiter.share(number + 1);
            let mut seat = share.seat();
            let n_inside = Arc::clone(&n_inside);
            std::thread::Builder::new()
                .name(format!("seat-{number}"))
                .spawn(move || {
                    for turn in 0..2000_u32 {
                        seat.begin();
                        assert_eq!(n_inside.fetch_add(1, Ordering::SeqCst), 0);
                        n_inside.fetch_sub(1, Ordering::SeqCst);
                        seat.end(turn % 7 != number);
                        if turn % 5 == number {
                            seat.leave();
                        }
                    }
                    share.used()
                })
                .expect("a thread")
        })
        .collect();
    for thread in threads {
        assert!(thread.join().expect("no turn was shared") > Duration::ZERO);
    }
    // A seat that is dropped with the turn gives it up.
    let share = arbiter.share(1);
    let mut leaves = share.seat();
    leaves.begin();
    drop(leaves);
    share.seat().begin();
}

/// A turn lasts a slice, whoever waits, and ends at once when nothing more is wanted.
#[test]
fn a_turn_is_kept_for_a_slice() {
    let arbiter = DeviceArbiter::with_slice(Duration::from_secs(3600));
    let mut first = arbiter.share(1).seat();
    let mut second = arbiter.share(1).seat();
    let n_turns = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&n_turns);
    first.begin();
    let waiting = std::thread::Builder::new()
        .name("second".to_owned())
        .spawn(move || {
            second.begin();
            let n_turns = seen.load(Ordering::SeqCst);
            second.end(false);
            n_turns
        })
        .expect("a thread");
    for _ in 0..1000 {
        n_turns.fetch_add(1, Ordering::SeqCst);
        first.end(true);
        first.begin();
    }
    first.end(false);
    assert_eq!(waiting.join().expect("it gets its turn"), 1000);
}

/// Two engines at one device give the tokens that each gives alone.
#[test]
fn engines_that_take_turns_answer_as_they_do_alone() {
    let arbiter = DeviceArbiter::new();
    let requests = [greedy(prompt(1, 40), 20), greedy(prompt(2, 10), 30)];
    std::thread::scope(|scope| {
        for (request, weight) in requests.iter().zip([3, 1]) {
            let share = arbiter.share(weight);
            let run_twice = move || {
                let mut engine = engine_of(None, config()).with_seat(share.seat());
                for _ in 0..2 {
                    let outcome = run(&mut engine, request).without_cache_count();
                    assert_eq!(outcome, alone(None, request));
                    engine.rest();
                }
                let used = share.used();
                assert!(used > Duration::ZERO);
                // One that is dropped in the middle of its work gives its place up.
                let _outcome = submit(&mut engine, request);
                engine.step().expect("the reference backend does not fail");
            };
            std::thread::Builder::new()
                .name(format!("engine-{weight}"))
                .spawn_scoped(scope, run_twice)
                .expect("a thread");
        }
    });
    arbiter.share(1).seat().begin();
}
