//! The operations for rows that leave a loop early: signals and filled K/V on every path, against
//! the scalar oracle, against copied pages, and alone against in a batch.

use crate::cpu_paths::{cpu, paths};
use crate::support::*;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;

const LOOPS: u32 = 3;
const SHAPE: Shape = Shape {
    loops: LOOPS,
    ..SMOL
};

/// Pages of a sequence's iteration, in falling order.
fn pages(iteration: usize) -> Vec<PageId> {
    let first = iteration * PAGES_PER_GROUP;
    let pages = (first..first + PAGES_PER_GROUP).rev();
    pages.map(|page| PageId(page as u32)).collect()
}

/// Rows of one sequence at one iteration; each rests in the slot of its position.
fn pass(positions: impl IntoIterator<Item = usize>, iteration: u32, enters: bool) -> Pass {
    let row = |position: usize| Row {
        iteration,
        enters,
        ..row(position, (position * 29 % SHAPE.vocab_size) as u32)
    };
    Pass {
        rows: positions.into_iter().map(row).collect(),
        sequences: vec![SequencePages::full(
            (0..LOOPS as usize).map(pages).collect(),
        )],
    }
}

fn fill_op<B: Backend>(rig: &Rig<B>) -> FillOp {
    FillOp {
        kv: rig.blocks[0].qkv.kv,
        n_layers: N_LAYERS,
    }
}

/// What a row at position 40 sees of the 40 before it, which all ran the first iteration and of
/// which those that `leaves` picks then left: its logits in the other iterations.
fn seen_behind<B: Backend>(rig: &mut Rig<B>, leaves: impl Fn(usize) -> bool) -> Vec<f32> {
    rig.pass(&pass(0..40, 0, true));
    let left = (0..40).filter(|position| leaves(*position));
    let skipped: Vec<SkippedLoops> = left
        .map(|position| SkippedLoops {
            row_idx: position as u32,
            n_loops: LOOPS,
        })
        .collect();
    let op = fill_op(rig);
    rig.backend.fill_skipped(&op, &skipped).expect("valid rows");
    let mut seen = Vec::new();
    for iteration in 1..LOOPS {
        let inside = (0..40).filter(|position| !leaves(*position));
        rig.pass(&pass(inside, iteration, false));
        seen.extend(rig.pass(&pass([40], iteration, true)));
    }
    seen
}

#[test]
fn filled_places_equal_copied_pages_to_the_bit() {
    for path in paths() {
        let filled = seen_behind(&mut Rig::new(cpu(path, 2), SHAPE), |_| true);
        let mut rig = Rig::new(cpu(path, 2), SHAPE);
        rig.pass(&pass(0..40, 0, true));
        let mut copied = Vec::new();
        for iteration in 1..LOOPS {
            for (from, to) in pages(0).into_iter().zip(pages(iteration as usize)) {
                rig.backend.copy_page(from, to).expect("pages exist");
            }
            copied.extend(rig.pass(&pass([40], iteration, true)));
        }
        assert_eq!(filled, copied, "{path:?}");
    }
}

#[test]
fn rows_that_leave_beside_rows_that_stay_are_filled_like_the_oracle_does() {
    for leaves in [|position| position % 3 == 0, |position| position >= 17] {
        let wanted = seen_behind(&mut Rig::new(ReferenceBackend::new(), SHAPE), leaves);
        let all_stay = seen_behind(&mut Rig::new(ReferenceBackend::new(), SHAPE), |_| false);
        assert!(errors(&all_stay, &wanted).0 > 0.05, "leaving shows");
        for path in paths() {
            let found = seen_behind(&mut Rig::new(cpu(path, 2), SHAPE), leaves);
            let (mean, _) = errors(&found, &wanted);
            assert!(mean < 0.03, "{path:?}: {mean}");
        }
    }
}

/// Signals of some rows between the first and the second iteration.
fn signals<B: Backend>(
    rig: &mut Rig<B>,
    positions: std::ops::Range<usize>,
    signal: fn(&Rig<B>, VectorId) -> ExitSignal,
) -> Vec<f32> {
    let weight = load_vector(&mut rig.backend, SHAPE.d_model, 0.0, 99);
    let signal = signal(rig, weight);
    rig.pass(&pass(0..positions.end, 0, true));
    let second = pass(0..positions.end, 1, false);
    let rows: Vec<u32> = positions.map(|position| position as u32).collect();
    rig.backend.begin_pass(&second).expect("a valid pass");
    rig.backend.keep_state(&rows).expect("room");
    rig.pass(&second);
    let mut out = vec![7.0; 3];
    rig.backend
        .exit_signals(&signal, &rows, &mut out)
        .expect("valid rows");
    assert_eq!(out.len(), rows.len());
    out
}

fn check_signals(
    of_cpu: fn(&Rig<tinyloop::backend::cpu::CpuBackend>, VectorId) -> ExitSignal,
    of_reference: fn(&Rig<ReferenceBackend>, VectorId) -> ExitSignal,
) {
    let mut oracle = Rig::new(ReferenceBackend::new(), SHAPE);
    let wanted = signals(&mut oracle, 5..75, of_reference);
    for path in paths() {
        let found = signals(&mut Rig::new(cpu(path, 2), SHAPE), 5..75, of_cpu);
        let (mean, _) = errors(&found, &wanted);
        assert!(mean < 0.05, "{path:?}: {mean}");
        for position in [5, 36, 37, 74] {
            let mut rig = Rig::new(cpu(path, 1), SHAPE);
            let alone = signals(&mut rig, position..position + 1, of_cpu);
            assert_eq!(alone, [found[position - 5]], "{path:?} at {position}");
        }
    }
}

#[test]
fn signals_are_those_of_the_oracle_alone_and_in_a_batch() {
    check_signals(|_, _| ExitSignal::Change, |_, _| ExitSignal::Change);
    check_signals(
        |_, weight| ExitSignal::Gate { weight, bias: 0.25 },
        |_, weight| ExitSignal::Gate { weight, bias: 0.25 },
    );
    check_signals(
        |rig, _| ExitSignal::Divergence(rig.logits),
        |rig, _| ExitSignal::Divergence(rig.logits),
    );
}
