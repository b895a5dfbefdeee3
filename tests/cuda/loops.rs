//! The operations of rows that may leave a loop: signals and filled K/V against the oracle.

use crate::cuda;
use crate::support::*;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;

const LOOPS: u32 = 3;
const SHAPE: Shape = Shape {
    loops: LOOPS,
    ..SMOL
};

fn pages(iteration: usize) -> Vec<PageId> {
    let first = iteration * PAGES_PER_GROUP;
    let pages = (first..first + PAGES_PER_GROUP).rev();
    pages.map(|page| PageId(page as u32)).collect()
}

fn pass(positions: impl IntoIterator<Item = usize>, iteration: u32) -> Pass {
    let row = |position: usize| Row {
        iteration,
        enters: iteration == 0,
        ..row(position, (position * 29 % SHAPE.vocab_size) as u32)
    };
    Pass {
        rows: positions.into_iter().map(row).collect(),
        sequences: vec![SequencePages::full(
            (0..LOOPS as usize).map(pages).collect(),
        )],
    }
}

/// Of some rows between the first and the second iteration.
fn signals<B: Backend>(rig: &mut Rig<B>, signal: &ExitSignal) -> Vec<f32> {
    let rows: Vec<u32> = (2..19).step_by(3).collect();
    rig.pass(&pass(0..20, 0));
    let second = pass(0..20, 1);
    rig.backend.begin_pass(&second).expect("a valid pass");
    rig.backend.keep_state(&rows).expect("room");
    rig.pass(&second);
    let mut out = vec![7.0; 3];
    let asked = rig.backend.exit_signals(signal, &rows, &mut out);
    asked.expect("valid rows");
    assert_eq!(out.len(), rows.len());
    out
}

#[test]
fn signals_are_those_of_the_oracle() {
    let mut oracle = Rig::new(ReferenceBackend::new(), SHAPE);
    let mut rig = Rig::new(cuda(true), SHAPE);
    let weight = load_vector(&mut oracle.backend, SHAPE.d_model, 0.0, 99);
    assert_eq!(
        load_vector(&mut rig.backend, SHAPE.d_model, 0.0, 99),
        weight
    );
    let all = [
        ExitSignal::Change,
        ExitSignal::Gate { weight, bias: 0.25 },
        ExitSignal::Divergence(oracle.logits),
    ];
    for signal in &all {
        let wanted = signals(&mut oracle, signal);
        let (mean, _) = errors(&signals(&mut rig, signal), &wanted);
        assert!(mean < 0.05, "{signal:?}: {mean}");
    }
}

/// What a row at position 20 sees in later iterations of those before it, which left.
fn seen_behind<B: Backend>(rig: &mut Rig<B>, fill: impl Fn(&mut Rig<B>)) -> Vec<f32> {
    rig.pass(&pass(0..20, 0));
    fill(rig);
    let mut last = pass([20], 1);
    last.rows[0].enters = true;
    let mut seen = rig.pass(&last);
    last.rows[0].iteration = 2;
    seen.extend(rig.pass(&last));
    seen
}

#[test]
fn filled_places_equal_copied_pages_and_the_oracle() {
    fn filled<B: Backend>(rig: &mut Rig<B>) -> Vec<f32> {
        seen_behind(rig, |rig| {
            let op = FillOp {
                kv: rig.blocks[0].qkv.kv,
                n_layers: N_LAYERS,
            };
            let n_loops = LOOPS;
            let skipped: Vec<SkippedLoops> = (0..20)
                .map(|row_idx| SkippedLoops { row_idx, n_loops })
                .collect();
            rig.backend.fill_skipped(&op, &skipped).expect("valid rows");
        })
    }
    let found = filled(&mut Rig::new(cuda(true), SHAPE));
    let copied = seen_behind(&mut Rig::new(cuda(true), SHAPE), |rig| {
        for iteration in 1..LOOPS as usize {
            for (from, to) in pages(0).into_iter().zip(pages(iteration)) {
                rig.backend.copy_page(from, to).expect("pages exist");
            }
        }
    });
    assert_eq!(found, copied);
    let wanted = filled(&mut Rig::new(ReferenceBackend::new(), SHAPE));
    let (mean, _) = errors(&found, &wanted);
    assert!(mean < 0.04, "{mean}");
}

#[test]
fn states_are_read_with_and_without_a_norm() {
    let mut oracle = Rig::new(ReferenceBackend::new(), SMOL);
    let mut rig = Rig::new(cuda(false), SMOL);
    let prompt = tokens(11, 8);
    oracle.run(&[(0, 0, &prompt)]);
    rig.run(&[(0, 0, &prompt)]);
    let norm = NormOp {
        norm: rig.logits.norm.expect("the rig has one"),
        epsilon: 1e-5,
    };
    let slots = [SlotId(9), SlotId(0), SlotId(4)];
    for norm in [None, Some(&norm)] {
        let (mut wanted, mut found) = (Vec::new(), vec![1.0]);
        oracle
            .backend
            .states(norm, &slots, &mut wanted)
            .expect("valid");
        rig.backend.states(norm, &slots, &mut found).expect("valid");
        let (mean, _) = errors(&found, &wanted);
        assert!(mean < 0.04, "{mean}");
    }
}
