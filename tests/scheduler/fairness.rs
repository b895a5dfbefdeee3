//! Several clients at one executor: shares by weight, floods, priorities, limits of one client.

use crate::support::{Bench, request};
use std::collections::BTreeMap;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::RequestId;
use tinyloop::scheduler::{Share, SubmitError, SubmitOptions, Ticket};

fn options(client: &str, weight: u32) -> SubmitOptions {
    SubmitOptions {
        client: Some(client.into()),
        share: Share {
            weight,
            ..Share::default()
        },
        ..SubmitOptions::default()
    }
}

fn bench(slots: u32, aging_interval_ms: u64) -> Bench {
    let config = ExecutorConfig {
        max_queue_depth: 10_000,
        aging_interval_ms,
        ..ExecutorConfig::default()
    };
    Bench::stepped(slots, config)
}

/// Who waits for what, by the name of the client.
#[derive(Default)]
struct Crowd {
    owners: BTreeMap<RequestId, &'static str>,
    tickets: Vec<Ticket>,
}

impl Crowd {
    fn submit(&mut self, bench: &Bench, client: &'static str, weight: u32) -> RequestId {
        let ticket = bench
            .try_submit(options(client, weight))
            .expect("there is room");
        let id = ticket.id();
        self.owners.insert(id, client);
        self.tickets.push(ticket);
        id
    }
}

/// Two clients whose queues never run dry: milliseconds of slot time of each, after each end of a job.
fn served(slots: u32, weights: [u32; 2], ms_of: impl Fn(&str) -> u64) -> Vec<[u64; 2]> {
    let bench = bench(slots, 5000);
    let mut crowd = Crowd::default();
    for _ in 0..300 {
        crowd.submit(&bench, "a", weights[0]);
        crowd.submit(&bench, "b", weights[1]);
    }
    bench.executor.drive();
    let mut left: BTreeMap<RequestId, u64> = BTreeMap::new();
    let (mut totals, mut seen) = ([0, 0], Vec::new());
    for _ in 0..280 / slots {
        let running = bench.runtime().running();
        assert_eq!(running.len(), slots as usize, "no slot is idle");
        for id in &running {
            left.entry(*id).or_insert_with(|| ms_of(crowd.owners[id]));
        }
        let step = running.iter().map(|id| left[id]).min().expect("slots");
        bench.advance(step);
        for id in &running {
            *left.get_mut(id).expect("it runs") -= step;
            totals[usize::from(crowd.owners[id] == "b")] += step;
        }
        let done = running.into_iter().filter(|id| left[id] == 0);
        done.for_each(|id| bench.finish(id));
        seen.push(totals);
    }
    seen
}

/// The bound: one job per slot more than its share.
#[track_caller]
fn assert_shares(seen: &[[u64; 2]], weights: [u32; 2], slots: u32, longest_ms: u64) {
    let least = f64::from(weights[0].min(weights[1]));
    let bound = f64::from(slots) * longest_ms as f64 / least;
    for [a, b] in seen {
        let by_weight = [
            *a as f64 / f64::from(weights[0]),
            *b as f64 / f64::from(weights[1]),
        ];
        let apart = (by_weight[0] - by_weight[1]).abs();
        assert!(
            apart <= bound,
            "{by_weight:?} are more than {bound} ms apart"
        );
    }
}

#[test]
fn two_keys_with_weights_3_and_1_get_slot_time_3_to_1() {
    for slots in [1, 4] {
        let seen = served(slots, [3, 1], |_| 100);
        assert_shares(&seen, [3, 1], slots, 100);
        let [a, b] = seen[seen.len() - 1];
        let ratio = a as f64 / b as f64;
        assert!((2.9..=3.1).contains(&ratio), "{slots} slots: {ratio}");
    }
}

#[test]
fn time_counts_not_requests() {
    for slots in [1, 4] {
        let seen = served(
            slots,
            [1, 1],
            |client| if client == "a" { 400 } else { 100 },
        );
        assert_shares(&seen, [1, 1], slots, 400);
    }
}

#[test]
fn a_key_that_floods_delays_another_by_one_request_per_slot() {
    for slots in [1, 4] {
        let bench = bench(slots, 5000);
        let mut crowd = Crowd::default();
        for _ in 0..500 {
            crowd.submit(&bench, "flood", 1);
        }
        bench.executor.drive();
        for _ in 0..20 {
            bench.advance(100);
            bench.finish(bench.runtime().running()[0]);
        }
        for _ in 0..10 {
            // It comes alone, each time after the flood has had the slots for a while.
            let other = crowd.submit(&bench, "other", 1);
            bench.executor.drive();
            assert_eq!(bench.state(other), "queued");
            bench.advance(100);
            bench.finish(bench.runtime().running()[0]); // the first slot that comes free is its own
            assert!(bench.runtime().running().contains(&other));
            bench.advance(100);
            bench.finish(other);
        }
    }
}

#[test]
fn priorities_come_first_and_each_key_is_served_in_order() {
    let bench = bench(1, 0);
    let submit = |client: &str, priority| {
        let options = SubmitOptions {
            priority,
            ..options(client, 1)
        };
        bench.try_submit(options).expect("there is room")
    };
    let tickets = [
        submit("a", 0),
        submit("a", 0),
        submit("b", 0),
        submit("a", 5),
        submit("a", 5),
        submit("b", 1),
        submit("b", 0),
    ];
    bench.executor.drive();
    while let Some(id) = bench.runtime().running().first().copied() {
        bench.advance(10);
        bench.finish(id);
    }
    // `a` has had most by then, so that `b` goes first among those of priority 0, and then in turn.
    let expected = [3, 4, 5, 2, 0, 6, 1].map(|index: usize| tickets[index].id());
    assert_eq!(bench.runtime().submitted(), expected);
}

#[test]
fn aging_still_bounds_the_wait_of_a_low_priority_whatever_its_key_has_had() {
    // Its own key has had a lot, another sends priority 3 without end.
    let bench = bench(1, 1000);
    let mut crowd = Crowd::default();
    for _ in 0..20 {
        let id = crowd.submit(&bench, "low", 1);
        bench.executor.drive();
        bench.advance(500);
        bench.finish(id);
    }
    let high = || {
        let options = SubmitOptions {
            priority: 3,
            ..options("high", 1000)
        };
        bench.try_submit(options).expect("there is room")
    };
    let mut tickets = vec![high(), high()];
    bench.executor.drive();
    let low = crowd.submit(&bench, "low", 1);
    let mut waited_ms = 0;
    while bench.state(low) == "queued" {
        tickets.push(high());
        bench.advance(100);
        waited_ms += 100;
        bench.finish(bench.runtime().running()[0]);
        assert!(
            waited_ms <= 3 * 1000 + 400,
            "levels times interval, and who was in line"
        );
    }
    assert!(waited_ms >= 3 * 1000, "not before its time either");
}

#[test]
fn failed_work_is_charged() {
    let bench = bench(1, 0);
    let mut crowd = Crowd::default();
    for _ in 0..4 {
        crowd.submit(&bench, "a", 1);
        crowd.submit(&bench, "b", 1);
    }
    bench.executor.drive();
    let mut order = String::new();
    while let Some(id) = bench.runtime().running().first().copied() {
        let owner = crowd.owners[&id];
        order.push_str(owner);
        match owner {
            "a" => {
                bench.advance(300);
                bench.runtime().fail(id, "boom");
                bench.executor.drive();
            }
            _ => {
                bench.advance(100);
                bench.finish(id);
            }
        }
    }
    assert_eq!(
        order, "abbbabaa",
        "300 ms of failing against three times 100 ms"
    );
}

#[test]
fn a_soft_limit_on_jobs_in_slots_holds_only_while_others_wait() {
    let bench = bench(4, 0);
    let capped = SubmitOptions {
        share: Share {
            weight: 1,
            max_inflight: Some(1),
            max_queued: None,
        },
        ..options("capped", 1)
    };
    let mut tickets: Vec<_> = (0..6)
        .map(|_| bench.try_submit(capped.clone()).expect("there is room"))
        .collect();
    bench.executor.drive();
    assert_eq!(bench.counts(), (2, 4), "no slot stays idle for it");
    for _ in 0..4 {
        tickets.push(
            bench
                .try_submit(options("other", 1))
                .expect("there is room"),
        );
    }
    let first = bench.runtime().running();
    for id in first {
        bench.advance(1);
        bench.finish(id);
    }
    let running = bench.runtime().running();
    let others: Vec<_> = tickets[6..].iter().map(Ticket::id).collect();
    let n_others = running.iter().filter(|id| others.contains(id)).count();
    assert_eq!(
        n_others, 4,
        "it had more than its limit, and yields each of them"
    );
}

#[test]
fn a_key_has_its_own_limit_on_requests_that_wait() {
    let bench = bench(1, 0);
    let limited = SubmitOptions {
        share: Share {
            weight: 1,
            max_inflight: None,
            max_queued: Some(2),
        },
        ..options("limited", 1)
    };
    let submit = || bench.try_submit(limited.clone());
    let running = submit().expect("a slot is free");
    bench.executor.drive();
    let _waiting = [submit().expect("first"), submit().expect("second")];
    let refused = submit().expect_err("two wait already");
    assert_eq!(refused.reason(), "key_queue_full");
    assert!(refused.should_retry() && refused.retry_after_s().is_some());
    assert!(
        matches!(
            refused,
            SubmitError::KeyQueueFull {
                queued: 2,
                max_queued: 2,
                ..
            }
        ),
        "{refused:?}"
    );
    let group = vec![request(2), request(2)];
    let error = bench.executor.submit_many(group, limited.clone());
    assert_eq!(
        error.err().map(|error| error.reason()),
        Some("key_queue_full")
    );
    let _other = bench
        .try_submit(options("other", 1))
        .expect("others may wait");
    bench.finish(running.id());
    let _third = submit().expect("one has left the line");
    assert_eq!(
        bench.metric("tinyloop_admission_rejected_total{model=\"m\",reason=\"key_queue_full\"}"),
        3.0
    );
}

#[test]
fn predictions_do_not_count_a_flood_that_does_not_delay() {
    let bench = bench(1, 0);
    bench.serve_one(10, 100); // requests take 100 ms
    let mut crowd = Crowd::default();
    for _ in 0..50 {
        crowd.submit(&bench, "flood", 1);
    }
    bench.executor.drive();
    let with_objective = |client: &str| {
        bench.try_submit(SubmitOptions {
            slo_ms: Some(500),
            ..options(client, 1)
        })
    };
    let refused = with_objective("flood").expect_err("49 wait before it");
    assert_eq!(refused.reason(), "slo_unattainable");
    let ticket = with_objective("other").expect("one goes before it");
    bench.advance(100);
    bench.finish(bench.runtime().running()[0]);
    assert!(bench.runtime().running().contains(&ticket.id()));
    let wait = bench.info(ticket.id()).state.stamps().queue_wait();
    assert_eq!(wait, Some(Duration::from_millis(100)));
}
