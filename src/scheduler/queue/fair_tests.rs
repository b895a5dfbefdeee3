//! Who goes next among several clients: the rules one by one, and shares under load against the weights.

use super::*;
use crate::clock::{Clock, ManualClock};
use crate::scheduler::queue::key::queue_key;
use proptest::prelude::*;
use std::collections::HashMap;
use std::time::Duration;

fn name(client: &str) -> ClientName {
    Some(client.into())
}

fn weight(weight: u32) -> Share {
    Share {
        weight,
        ..Share::default()
    }
}

/// An executor with nothing but an order: jobs enter, get slots and give them back.
struct Line {
    clients: Clients,
    clock: ManualClock,
    start: Instant,
    aging_ms: u64,
    n_keys: u64,
    jobs: HashMap<u64, (ClientName, i32)>,
}

impl Line {
    fn new(aging_ms: u64) -> Self {
        let clock = ManualClock::new();
        Self {
            clients: Clients::default(),
            start: clock.now(),
            clock,
            aging_ms,
            n_keys: 0,
            jobs: HashMap::new(),
        }
    }

    fn enter(&mut self, client: &str, share: Share, priority: i32) -> QueueKey {
        let now = self.clock.now();
        let queued_ms = now.duration_since(self.start).as_millis() as u64;
        let key = queue_key(queued_ms, priority, self.aging_ms, self.n_keys);
        self.n_keys += 1;
        self.jobs.insert(key.number, (name(client), priority));
        let client = name(client);
        self.clients.enter(&client, share, priority, key, now);
        key
    }

    /// The next one gets a slot.
    fn start(&mut self) -> Option<(String, u64)> {
        let now = self.clock.now();
        let key = self.clients.first(now)?;
        let (client, priority) = self.jobs[&key.number].clone();
        self.clients.leave(&client, priority, key);
        self.clients.change(&client, Change::Starts, now);
        let client = client.as_deref().unwrap_or_default();
        Some((client.to_owned(), key.number))
    }

    fn stop(&mut self, client: &str) {
        let now = self.clock.now();
        self.clients.change(&name(client), Change::Stops, now);
    }

    fn advance(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    /// Runs jobs one after the other, each as long as `ms` says, until nobody waits; who went when.
    fn run_out(&mut self, ms: u64) -> Vec<String> {
        let mut order = Vec::new();
        while let Some((client, _)) = self.start() {
            self.advance(ms);
            self.stop(&client);
            order.push(client);
        }
        order
    }
}

#[test]
fn weights_say_who_goes_next_and_each_keeps_its_order() {
    let mut line = Line::new(0);
    for _ in 0..6 {
        line.enter("a", weight(3), 0);
    }
    for _ in 0..2 {
        line.enter("b", weight(1), 0);
    }
    assert_eq!(line.run_out(12).concat(), "abaaabaa");
    let mut line = Line::new(0);
    let keys = [0, 5, 0, 5].map(|priority| line.enter("a", weight(1), priority).number);
    let order: Vec<u64> = std::iter::from_fn(|| line.start().map(|(_, number)| number)).collect();
    assert_eq!(order, [keys[1], keys[3], keys[0], keys[2]]);
}

#[test]
fn who_comes_anew_begins_at_the_smallest_turn_and_keeps_its_debt() {
    let mut line = Line::new(0);
    for _ in 0..9 {
        line.enter("old", weight(1), 0);
    }
    for _ in 0..5 {
        let (client, _) = line.start().expect("it waits");
        line.advance(100);
        line.stop(&client);
    }
    for _ in 0..4 {
        line.enter("new", weight(1), 0);
    }
    // Having had nothing earns one turn at most, not five.
    assert_eq!(line.run_out(100).concat(), "oldnewoldnewoldnewoldnew");

    // One long job at a time: each time it comes anew, but what it had counts.
    let mut line = Line::new(0);
    for _ in 0..20 {
        line.enter("short", weight(1), 0);
    }
    line.enter("long", weight(1), 0);
    let mut order = Vec::new();
    while let Some((client, _)) = line.start() {
        line.advance(if client == "long" { 50 } else { 10 });
        line.stop(&client);
        if client == "long" {
            line.enter("long", weight(1), 0);
        }
        order.push(client);
        if order.len() == 18 {
            break;
        }
    }
    let n_long = order.iter().filter(|client| *client == "long").count();
    assert_eq!(
        n_long, 3,
        "{order:?}: 50 ms each time, against 5 times 10 ms"
    );
}

#[test]
fn a_client_above_its_inflight_limit_yields_but_no_slot_stays_idle() {
    let mut line = Line::new(0);
    let capped = Share {
        max_inflight: Some(1),
        ..weight(100)
    };
    for _ in 0..4 {
        line.enter("capped", capped, 0);
    }
    for _ in 0..2 {
        line.enter("other", weight(1), 0);
    }
    let order: Vec<String> =
        std::iter::from_fn(|| line.start().map(|(client, _)| client)).collect();
    assert_eq!(order[0], "capped");
    assert_eq!(order[1..3], ["other", "other"]);
    assert_eq!(
        order[3..],
        ["capped", "capped", "capped"],
        "nobody else waits"
    );
}

#[test]
fn nobody_goes_before_a_higher_or_aged_priority_because_of_another_clients_age() {
    let mut line = Line::new(1000);
    let old = line.enter("a", weight(1), 0);
    line.advance(2500);
    let high = line.enter("c", weight(1), 2);
    line.advance(1);
    let fresh = line.enter("b", weight(1), 0);
    // By age the low priority is served first, and `b` has had as little as `a`; but `b` did not wait.
    let order: Vec<u64> = std::iter::from_fn(|| line.start().map(|(_, number)| number)).collect();
    assert_eq!(order, [old.number, high.number, fresh.number]);
}

#[test]
fn predictions_count_whom_the_weights_let_through() {
    let mut line = Line::new(0);
    for _ in 0..100 {
        line.enter("flood", weight(2), 0);
    }
    let key = line.enter("b", weight(1), 0);
    let ahead =
        |client: &str, share, priority| line.clients.ahead_of(&name(client), share, priority, key);
    assert_eq!(ahead("b", weight(1), 0), 2);
    assert_eq!(ahead("b", weight(4), 0), 1);
    assert_eq!(ahead("flood", weight(2), 0), 100 + 1);
    assert_eq!(line.clients.n_waiting(&name("flood")), 100);
    assert_eq!(line.clients.part(&name("b"), weight(1)), 1.0 / 3.0);
}

/// Slot time by weight of two clients that always have something waiting: (first, second), in ms.
fn shares(slots: usize, weights: [u32; 2], lengths_ms: &[u64]) -> Vec<[f64; 2]> {
    let mut line = Line::new(0);
    let names = ["a", "b"];
    let mut running: Vec<(u64, usize)> = Vec::new(); // (ends at ms, whose)
    let (mut now_ms, mut served) = (0, [0.0, 0.0]);
    let mut lengths = lengths_ms.iter().cycle();
    let mut seen = Vec::new();
    for (client, weight_of) in names.iter().zip(weights) {
        for _ in 0..400 {
            line.enter(client, weight(weight_of), 0);
        }
    }
    for _ in 0..300 {
        while running.len() < slots {
            let (client, _) = line.start().expect("there is always somebody");
            let whose = usize::from(client == "b");
            running.push((now_ms + lengths.next().expect("a cycle"), whose));
        }
        running.sort_unstable();
        let (ends_ms, whose) = running.remove(0);
        let elapsed = (ends_ms - now_ms) as f64;
        served[whose] += elapsed;
        for (_, other) in &running {
            served[*other] += elapsed;
        }
        line.advance(ends_ms - now_ms);
        now_ms = ends_ms;
        line.stop(names[whose]);
        seen.push([0, 1].map(|client| served[client] / f64::from(weights[client])));
    }
    seen
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The slot time by weight of two clients never differs by more than the longest job by the smallest
    /// weight can bring, on every slot, at any moment: so each has its part, and a flood delays nobody.
    #[test]
    fn slot_time_follows_the_weights(
        slots in prop::sample::select(vec![1_usize, 4]),
        weights in prop::array::uniform2(1_u32..=8),
        lengths_ms in prop::collection::vec(1_u64..=100, 1..20),
    ) {
        let longest = *lengths_ms.iter().max().expect("not empty") as f64;
        let least = f64::from(*weights.iter().min().expect("two"));
        let bound = slots as f64 * longest / least;
        for [a, b] in shares(slots, weights, &lengths_ms) {
            prop_assert!((a - b).abs() <= bound + 1e-6, "{a} {b} {bound}");
        }
    }

    /// One client alone: the order of the queue, whatever it is told to weigh.
    #[test]
    fn alone_the_order_is_that_of_the_keys(
        jobs in prop::collection::vec((-3_i32..=3, 0_u64..50), 1..40), aging_ms in 0_u64..100,
    ) {
        let mut line = Line::new(aging_ms);
        let mut keys: Vec<QueueKey> = jobs.into_iter().map(|(priority, pause_ms)| {
            line.advance(pause_ms);
            line.enter("a", weight(5), priority)
        }).collect();
        keys.sort_unstable();
        let order: Vec<u64> = std::iter::from_fn(|| line.start().map(|(_, number)| number)).collect();
        let expected: Vec<u64> = keys.iter().map(|key| key.number).collect();
        prop_assert_eq!(order, expected);
    }

    /// Several clients: of each client and priority the order of the keys, and nobody before a request of
    /// another priority whose key is smaller.
    #[test]
    fn priorities_and_age_come_before_shares(
        jobs in prop::collection::vec((0_usize..3, -3_i32..=3, 0_u64..50), 1..40), aging_ms in 0_u64..100,
    ) {
        let mut line = Line::new(aging_ms);
        let mut waiting: Vec<(QueueKey, i32, usize)> = jobs.into_iter().map(|(client, priority, pause_ms)| {
            line.advance(pause_ms);
            (line.enter(["a", "b", "c"][client], weight(client as u32 + 1), priority), priority, client)
        }).collect();
        while let Some((_, number)) = line.start() {
            line.advance(7);
            let at = waiting.iter().position(|(key, ..)| key.number == number).expect("it waits");
            let (key, priority, client) = waiting.remove(at);
            for (other, level, whose) in &waiting {
                prop_assert!(*level == priority || key < *other);
                prop_assert!(*level != priority || *whose != client || key < *other);
            }
        }
        prop_assert!(waiting.is_empty());
    }
}
