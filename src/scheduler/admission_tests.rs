//! The admission table, and the properties that no table shows.

use super::*;
use crate::scheduler::estimate::Measured;
use proptest::prelude::*;

const DEMAND: Demand = Demand {
    prompt_tokens: 10,
    max_tokens: 10,
    held_tokens: None,
    slo_ms: None,
    slo_ttft_ms: None,
    loops: None,
    min_loops: None,
};
/// One slot, taken; nobody waits; requests take 100 ms, 20 of them until the first token.
const SUPPLY: Supply = Supply {
    no_replica_retry_s: None,
    closed: None,
    context_length: 100,
    kv_capacity_tokens: 1000,
    queue_depth: 0,
    queue_ahead: 0,
    group_ahead: 0,
    max_queue_depth: 4,
    queued_prompt_tokens: 0,
    max_queued_prompt_tokens: None,
    client_queued: 0,
    client_max_queued: None,
    client_part: 1.0,
    in_flight: 1,
    capacity: 1,
    may_preempt: false,
    measured: Measured {
        ema_dispatch_ms: Some(100.0),
        ema_first_token_ms: Some(20.0),
        floor_service_ms: None,
        floor_first_token_ms: None,
        drain_rate_per_s: None,
    },
    loop_cost: None,
    headroom: 1.0,
};

fn verdict(demand: Demand, supply: Supply) -> &'static str {
    match decide(demand, supply) {
        Admission::Admit { .. } => "admit",
        Admission::Refuse(error) => error.reason(),
    }
}

#[test]
fn closing_comes_first() {
    for (closed, expected) in [
        (Closed::NotStarted, "not_started"),
        (Closed::ShuttingDown, "shutting_down"),
        (Closed::Unloading, "model_unloading"),
        (Closed::Failed, "model_failed"),
    ] {
        // Everything else is wrong as well, and does not matter.
        let supply = Supply {
            closed: Some(closed),
            queue_depth: 9,
            ..SUPPLY
        };
        let demand = Demand {
            prompt_tokens: 999,
            slo_ms: Some(0),
            ..DEMAND
        };
        assert_eq!(verdict(demand, supply), expected);
    }
}

#[test]
fn what_can_never_fit() {
    #[rustfmt::skip]
    let table = [
        // prompt, max_tokens, kv, expected
        (0, 10, 1000, Some(SubmitError::EmptyPrompt)),
        (1, 99, 1000, None),
        (99, 1, 1000, None),
        (100, 0, 1000, None), // scoring needs no room for an answer
        (100, 1, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: 100, context_length: 100 })),
        (101, 0, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: 101, context_length: 100 })),
        (101, 50, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: 101, context_length: 100 })),
        (50, 51, 1000, Some(SubmitError::TooLong { prompt_tokens: 50, max_tokens: 51, context_length: 100 })),
        (50, u32::MAX, 1000, Some(SubmitError::TooLong { prompt_tokens: 50, max_tokens: u32::MAX, context_length: 100 })),
        (u32::MAX, u32::MAX, 1000, Some(SubmitError::PromptTooLong { prompt_tokens: u32::MAX, context_length: 100 })),
        (50, 50, 99, Some(SubmitError::KvTooSmall { needed_tokens: 100, capacity_tokens: 99 })),
        (50, 50, 100, None),
        (50, 50, u64::MAX, None),
    ];
    for (prompt_tokens, max_tokens, kv_capacity_tokens, expected) in table {
        let demand = Demand {
            prompt_tokens,
            max_tokens,
            ..DEMAND
        };
        let supply = Supply {
            kv_capacity_tokens,
            ..SUPPLY
        };
        let expected = expected.map_or(Admission::Admit { loops: None }, Admission::Refuse);
        assert_eq!(
            decide(demand, supply),
            expected,
            "{prompt_tokens}+{max_tokens}"
        );
    }
    // In a window only what is held at once counts.
    for (held_tokens, fits) in [(None, false), (Some(60), true), (Some(70), false)] {
        let demand = Demand {
            prompt_tokens: 50,
            max_tokens: 50,
            held_tokens,
            ..DEMAND
        };
        let supply = Supply {
            kv_capacity_tokens: 64,
            ..SUPPLY
        };
        let is_admitted = matches!(decide(demand, supply), Admission::Admit { .. });
        assert_eq!(is_admitted, fits, "{held_tokens:?}");
    }
}

#[test]
fn objectives_below_the_time_of_an_idle_server() {
    #[rustfmt::skip]
    let table = [
        // slo, ttft, floor of service, of the first token, capacity, expected (objective, idle ms)
        (Some(1),  None,     None,        None,       1, None), // no evidence
        (Some(50), None,     Some(50.0),  None,       1, None),
        (Some(49), None,     Some(50.0),  None,       1, Some((Objective::Wait, 50))),
        (Some(0),  None,     Some(0.2),   None,       1, Some((Objective::Wait, 1))),
        (Some(12), None,     Some(50.0),  None,       4, Some((Objective::Wait, 13))), // 12.5
        (Some(13), None,     Some(50.0),  None,       4, None),
        (None,     Some(9),  Some(999.0), Some(10.0), 1, Some((Objective::FirstToken, 10))),
        (None,     Some(10), Some(999.0), Some(10.0), 4, None), // no division: one request, one slot
        (None,     Some(9),  Some(999.0), None,       1, None),
        (Some(60), Some(9),  Some(50.0),  Some(10.0), 1, Some((Objective::FirstToken, 10))),
        (Some(40), Some(9),  Some(50.0),  Some(10.0), 1, Some((Objective::Wait, 50))),
        (None,     None,     Some(1e9),   Some(1e9),  1, None), // no objective
    ];
    for (slo_ms, slo_ttft_ms, floor_service_ms, floor_first_token_ms, capacity, expected) in table {
        let demand = Demand {
            slo_ms,
            slo_ttft_ms,
            ..DEMAND
        };
        let supply = Supply {
            capacity,
            in_flight: 0, // idle, and refused all the same
            measured: Measured {
                floor_service_ms,
                floor_first_token_ms,
                ..SUPPLY.measured
            },
            ..SUPPLY
        };
        let found = match decide(demand, supply) {
            Admission::Refuse(SubmitError::SloBelowIdle {
                objective, idle_ms, ..
            }) => Some((objective, idle_ms)),
            Admission::Refuse(error) => panic!("{error}"),
            Admission::Admit { .. } => None,
        };
        assert_eq!(found, expected, "{demand:?} {supply:?}");
    }
}

#[test]
fn the_queue_limits() {
    #[rustfmt::skip]
    let table = [
        // depth, max, tokens waiting, max, in flight, capacity, expected
        (0, 4, 0, None,      0, 1, "admit"),
        (3, 4, 0, None,      1, 1, "admit"),
        (4, 4, 0, None,      1, 1, "queue_full"),
        (5, 4, 0, None,      1, 1, "queue_full"),
        (0, 0, 0, None,      0, 1, "admit"),      // a free slot: it does not wait
        (0, 0, 0, None,      1, 1, "queue_full"),
        (1, 0, 0, None,      0, 1, "queue_full"), // the free slot is taken by the one that waits
        (1, 0, 0, None,      0, 2, "admit"),
        (4, 4, 0, None,      0, 8, "admit"),
        (usize::MAX, usize::MAX, 0, None, 1, 1, "queue_full"),
        (1, 4, 90, Some(100), 1, 1, "admit"),     // 90 + 10
        (1, 4, 91, Some(100), 1, 1, "queue_full"),
        (0, 4, 0, Some(9),   1, 1, "queue_full"),
        (0, 4, 0, Some(9),   0, 1, "admit"),      // a free slot: it does not wait
        (0, 4, 0, Some(0),   1, 1, "queue_full"),
        (1, 4, u64::MAX, Some(u64::MAX), 1, 1, "admit"),
    ];
    for (queue_depth, max_queue_depth, tokens, max_tokens, in_flight, capacity, expected) in table {
        let supply = Supply {
            queue_depth,
            max_queue_depth,
            queued_prompt_tokens: tokens,
            max_queued_prompt_tokens: max_tokens,
            in_flight,
            capacity,
            ..SUPPLY
        };
        assert_eq!(verdict(DEMAND, supply), expected, "{supply:?}");
    }
}

#[test]
fn the_latency_objectives() {
    #[rustfmt::skip]
    let table = [
        // slo, ttft, depth, ahead, in flight, capacity, ema, expected
        (None,      None,      3, 3, 1, 1, Some(1e9),   "admit"),            // no objective
        (Some(0),   Some(0),   3, 3, 1, 1, None,        "admit"),            // no mean yet
        (Some(400), None,      3, 3, 1, 1, Some(100.0), "admit"),            // 4 * 100 = 400
        (Some(399), None,      3, 3, 1, 1, Some(100.0), "slo_unattainable"),
        (Some(200), None,      3, 3, 2, 2, Some(100.0), "admit"),            // capacity 2 halves it
        (Some(199), None,      3, 3, 2, 2, Some(100.0), "slo_unattainable"),
        (Some(100), None,      3, 0, 1, 1, Some(100.0), "admit"),            // a high priority: nobody ahead
        (Some(99),  None,      3, 0, 1, 1, Some(100.0), "slo_unattainable"),
        (Some(1),   Some(1),   0, 0, 0, 1, Some(1e6),   "admit"),            // idle heals a poisoned mean
        (Some(1),   None,      0, 0, 1, 1, Some(1e6),   "slo_unattainable"),
        (Some(0),   None,      0, 0, 1, 1, Some(0.0),   "admit"),
        (Some(100), None,      0, 0, 1, 0, Some(100.0), "admit"),            // capacity 0 counts as 1
        (Some(5),   None,      3, 3, 1, 1, Some(f64::INFINITY), "slo_unattainable"),
        (Some(5),   None,      9, 9, 1, 1, Some(100.0), "queue_full"),       // the queue comes first
        (None,      Some(420), 3, 3, 1, 1, Some(100.0), "admit"),            // 400 + 20
        (None,      Some(419), 3, 3, 1, 1, Some(100.0), "slo_unattainable"),
        (Some(400), Some(419), 3, 3, 1, 1, Some(100.0), "slo_unattainable"), // both must hold
        (Some(399), Some(420), 3, 3, 1, 1, Some(100.0), "slo_unattainable"),
        (Some(u64::MAX), Some(u64::MAX), 3, 3, 1, 1, Some(100.0), "admit"),
    ];
    for (slo_ms, slo_ttft_ms, queue_depth, queue_ahead, in_flight, capacity, ema, expected) in table
    {
        let supply = Supply {
            queue_depth,
            queue_ahead,
            in_flight,
            capacity,
            measured: Measured {
                ema_dispatch_ms: ema,
                ..SUPPLY.measured
            },
            ..SUPPLY
        };
        let demand = Demand {
            slo_ms,
            slo_ttft_ms,
            ..DEMAND
        };
        assert_eq!(verdict(demand, supply), expected, "{demand:?} {supply:?}");
    }
}

#[test]
fn a_group_on_an_idle_server_starts_at_once_as_far_as_there_are_slots() {
    #[rustfmt::skip]
    let table = [
        // waiting, of the own group, in flight, capacity, expected
        (0, 0, 0, 2, "admit"),
        (1, 1, 0, 2, "admit"),
        (2, 2, 0, 2, "slo_unattainable"), // no slot for the third
        (1, 0, 0, 2, "slo_unattainable"), // somebody else waits
        (1, 1, 1, 2, "slo_unattainable"), // somebody else runs
    ];
    for (queue_depth, group_ahead, in_flight, capacity, expected) in table {
        let supply = Supply {
            queue_depth,
            queue_ahead: queue_depth,
            group_ahead,
            in_flight,
            capacity,
            ..SUPPLY
        };
        let demand = Demand {
            slo_ms: Some(1),
            ..DEMAND
        };
        assert_eq!(verdict(demand, supply), expected, "{supply:?}");
    }
}

/// A quarter of the time is fixed at 4 loops: 1 + 0.75 * 4 = 4.
const COST: LoopCost = LoopCost {
    fixed_ms: 1.0,
    per_loop_ms: 0.75,
    default_loops: 4,
};

#[test]
fn fewer_loops_are_granted_when_that_meets_the_objective() {
    let granted = |asked, granted| Some(Loops { asked, granted });
    #[rustfmt::skip]
    let table = [
        // slo, ttft, ahead, loops, min, cost, expected; None = refused
        (None,      None,     0, None,    Some(1), Some(COST), Some(granted(4, 4))), // as asked
        (Some(100), None,     0, None,    Some(1), Some(COST), Some(granted(4, 4))), // 100 * 1
        (Some(99),  None,     0, None,    Some(1), Some(COST), Some(granted(4, 3))), // 100 * 3.25 / 4 = 81.25
        (Some(81),  None,     0, None,    Some(1), Some(COST), Some(granted(4, 2))), // 62.5
        (Some(62),  None,     0, None,    Some(1), Some(COST), Some(granted(4, 1))), // 43.75
        (Some(43),  None,     0, None,    Some(1), Some(COST), None),
        (Some(43),  None,     0, None,    Some(0), Some(COST), None),                // at least one
        (Some(62),  None,     0, None,    Some(2), Some(COST), None),                // not below the minimum
        (Some(63),  None,     0, None,    Some(2), Some(COST), Some(granted(4, 2))),
        (Some(99),  None,     0, None,    None,    Some(COST), None),                // it insists
        (Some(99),  None,     0, None,    Some(4), Some(COST), None),
        (Some(99),  None,     0, None,    Some(9), Some(COST), None),
        (Some(99),  None,     0, None,    Some(1), None,       None),                // an ordinary model
        (Some(199), None,     1, None,    Some(1), Some(COST), Some(granted(4, 3))), // 100 ahead, then 81.25
        (Some(99),  None,     0, Some(8), Some(1), Some(COST), Some(granted(8, 7))), // 100 * 6.25 / 7
        (Some(99),  None,     0, Some(u32::MAX), Some(1), Some(COST), Some(granted(u32::MAX, 4_252_017_622))), // 99 %
        (None,      Some(119), 0, None,   Some(1), Some(COST), Some(granted(4, 3))), // 120 * 0.8125
        (None,      Some(52), 0, None,    Some(1), Some(COST), None),                // 120 * 0.4375 = 52.5
        (Some(99),  Some(76), 0, None,    Some(1), Some(COST), Some(granted(4, 2))), // the harder one decides
        (None,      None,     0, Some(3), None,    None,       Some(granted(3, 3))),
        (None,      None,     0, None,    Some(1), None,       Some(None)),
    ];
    for (slo_ms, slo_ttft_ms, queue_ahead, loops, min_loops, loop_cost, expected) in table {
        let supply = Supply {
            queue_ahead,
            queue_depth: queue_ahead,
            loop_cost,
            ..SUPPLY
        };
        let demand = Demand {
            slo_ms,
            slo_ttft_ms,
            loops,
            min_loops,
            ..DEMAND
        };
        let found = match decide(demand, supply) {
            Admission::Admit { loops } => Some(loops),
            Admission::Refuse(error) => {
                assert_eq!(error.reason(), "slo_unattainable");
                None
            }
        };
        assert_eq!(found, expected, "{demand:?}");
    }
}

#[test]
fn the_idle_time_is_that_of_the_fewest_loops_accepted() {
    let supply = Supply {
        loop_cost: Some(COST),
        measured: Measured {
            floor_service_ms: Some(80.0), // 35 with one loop
            ..SUPPLY.measured
        },
        in_flight: 0,
        ..SUPPLY
    };
    for (slo_ms, min_loops, expected) in [
        (79, None, "slo_below_idle"),
        (79, Some(1), "admit"),
        (35, Some(1), "admit"),
        (34, Some(1), "slo_below_idle"),
    ] {
        let demand = Demand {
            slo_ms: Some(slo_ms),
            min_loops,
            ..DEMAND
        };
        assert_eq!(verdict(demand, supply), expected, "{slo_ms} {min_loops:?}");
    }
}

#[test]
fn costs_that_make_no_sense_save_nothing() {
    for (fixed_ms, per_loop_ms) in [
        (f64::NAN, 1.0),
        (1.0, f64::NAN),
        (0.0, 0.0),
        (0.0, -1.0),
        (f64::INFINITY, 1.0),
        (-5.0, 0.0),
    ] {
        let cost = LoopCost {
            fixed_ms,
            per_loop_ms,
            default_loops: 4,
        };
        let share = share(cost, 1, 4);
        assert!((0.0..=1.0).contains(&share), "{cost:?}: {share}");
    }
}

#[test]
fn a_refusal_carries_its_numbers() {
    let supply = Supply {
        queue_depth: 3,
        queue_ahead: 2,
        measured: Measured {
            drain_rate_per_s: Some(0.5),
            ..SUPPLY.measured
        },
        ..SUPPLY
    };
    let refusal = |slo_ms, slo_ttft_ms| {
        let demand = Demand {
            slo_ms,
            slo_ttft_ms,
            ..DEMAND
        };
        match decide(demand, supply) {
            Admission::Refuse(error) => error,
            Admission::Admit { .. } => panic!("{demand:?} cannot be met"),
        }
    };
    let wait = refusal(Some(250), None);
    let expected = SubmitError::AdmissionRejected {
        reason: "slo_unattainable",
        objective: Objective::Wait,
        predicted_wait_ms: 300,
        predicted_ttft_ms: None,
        slo_ms: 250,
        queue_depth: 3,
        queue_ahead: 2,
        ema_dispatch_ms: 100.0,
        retry_after_s: 3,
    };
    assert_eq!(wait, expected);
    assert_eq!(
        wait.to_string(),
        "the predicted wait of 300 ms exceeds the latency objective slo_ms of 250 ms"
    );
    assert_eq!(
        wait.numbers(),
        [
            ("predicted_wait_ms", 300.0),
            ("slo_ms", 250.0),
            ("queue_depth", 3.0),
            ("queue_ahead", 2.0),
            ("ema_dispatch_ms", 100.0),
        ]
    );
    assert!(wait.should_retry());
    let first_token = refusal(None, Some(319));
    assert_eq!(
        first_token.to_string(),
        "the predicted time to the first token of 320 ms exceeds the latency objective \
         slo_ttft_ms of 319 ms"
    );
    assert!(
        first_token
            .numbers()
            .contains(&("predicted_ttft_ms", 320.0))
    );
    assert!(first_token.numbers().contains(&("slo_ttft_ms", 319.0)));
}

#[test]
fn every_refusal_has_a_reason_and_says_whether_to_retry() {
    let full = Supply {
        queue_depth: 4,
        max_queued_prompt_tokens: Some(7),
        ..SUPPLY
    };
    let Admission::Refuse(full) = decide(DEMAND, full) else {
        panic!("four wait already");
    };
    assert_eq!(full.numbers().len(), 4);
    assert_eq!(
        full.to_string(),
        "4 requests wait already; with this one more than 4 requests or 7 prompt tokens would wait"
    );
    let never = SubmitError::SloBelowIdle {
        objective: Objective::FirstToken,
        slo_ms: 1,
        idle_ms: 2,
    };
    assert_eq!(never.numbers(), [("slo_ttft_ms", 1.0), ("idle_ms", 2.0)]);
    for (error, should_retry, retry_after_s) in [
        (SubmitError::NotStarted, true, None),
        (SubmitError::Failed, true, None),
        (SubmitError::EmptyPrompt, false, None),
        (full, true, Some(1)),
        (never, false, None),
    ] {
        let advice = (error.should_retry(), error.retry_after_s());
        assert_eq!(advice, (should_retry, retry_after_s), "{}", error.reason());
    }
}

#[test]
fn loops_are_lowered_before_the_objective_is_used_up() {
    // Predicted at 4 loops: 100 ms each; with L loops the own turn is 25 + 18.75 L.
    let cost = LoopCost {
        fixed_ms: 1.0,
        per_loop_ms: 0.75,
        default_loops: 4,
    };
    for (slo_ms, queue_ahead, min_loops, expected) in [
        (200, 0, Some(1), Ok(4)), // 100 is half of it
        (199, 0, Some(1), Ok(3)),
        (120, 0, Some(1), Ok(1)), // half is 60: 43.75
        (60, 0, Some(1), Ok(1)),  // beyond the half, but not the whole
        (43, 0, Some(1), Err("slo_unattainable")),
        (150, 1, Some(1), Ok(1)), // 143.75 at best
        (150, 1, None, Err("slo_unattainable")),
        (101, 0, None, Ok(4)), // who accepts no fewer gets what was asked
        (101, 0, Some(3), Ok(3)),
    ] {
        let demand = Demand {
            slo_ms: Some(slo_ms),
            min_loops,
            ..DEMAND
        };
        let supply = Supply {
            queue_ahead,
            loop_cost: Some(cost),
            headroom: 0.5,
            ..SUPPLY
        };
        let found = match decide(demand, supply) {
            Admission::Admit { loops } => Ok(loops.expect("it loops").granted),
            Admission::Refuse(error) => Err(error.reason()),
        };
        assert_eq!(found, expected, "{slo_ms} {queue_ahead} {min_loops:?}");
    }
}

#[test]
fn a_drain_says_how_much_still_runs_and_when_it_should_be_done() {
    for (in_flight, rate, expected_s) in [
        (4, None, 5),
        (0, Some(2.0), 1),
        (4, Some(2.0), 2),
        (9, Some(2.0), 5),
        (900, Some(2.0), 30),
    ] {
        let supply = Supply {
            closed: Some(Closed::ShuttingDown),
            in_flight,
            measured: Measured {
                drain_rate_per_s: rate,
                ..SUPPLY.measured
            },
            ..SUPPLY
        };
        let Admission::Refuse(refusal) = decide(DEMAND, supply) else {
            panic!("a closed executor takes nothing");
        };
        assert_eq!(refusal.retry_after_s(), Some(expected_s));
        assert_eq!(refusal.numbers(), [("in_flight", f64::from(in_flight))]);
    }
}

#[test]
fn who_gets_a_slot_by_preemption_needs_no_place_in_the_queue() {
    let full = Supply {
        max_queue_depth: 0,
        ..SUPPLY
    };
    assert_eq!(verdict(DEMAND, full), "queue_full");
    let may_preempt = Supply {
        may_preempt: true,
        ..full
    };
    assert_eq!(verdict(DEMAND, may_preempt), "admit");
}

proptest! {
    /// Loops are granted only where the objective then holds, and never fewer than accepted or
    /// fewer than needed.
    #[test]
    fn granted_loops_are_the_most_that_meet_the_objective(
        slo_ms in 0_u64..2000, ahead in 0_usize..4, asked in 1_u32..40, least in 0_u32..40,
        fixed_ms in 0.0_f64..10.0, per_loop_ms in 0.0_f64..10.0,
    ) {
        let cost = LoopCost { fixed_ms, per_loop_ms, default_loops: 1 };
        let supply = Supply { queue_ahead: ahead, loop_cost: Some(cost), ..SUPPLY };
        let demand = Demand { slo_ms: Some(slo_ms), loops: Some(asked), min_loops: Some(least), ..DEMAND };
        let meets = |loops| missed(demand, supply, share(cost, loops, asked), 1.0).is_none();
        let best = (least.max(1)..=asked).rev().find(|&loops| meets(loops));
        let best = best.or(meets(asked).then_some(asked)); // a minimum above what is asked is moot
        let found = match decide(demand, supply) {
            Admission::Admit { loops } => loops.map(|loops| loops.granted),
            Admission::Refuse(_) => None,
        };
        prop_assert_eq!(found, best);
    }
}
