//! One pass of one segment, in the order of the maths.
//!
//! Runs on the engine thread. Knows neither loops (`plan`) nor tensor names (`weights`); what each
//! operation computes stands in the docs of its type in `backend`.

use super::Model;
use super::weights::{ExitGate, LoopOps, StreamNorm};
use crate::backend::{
    Backend, BackendError, ExitSignal, FillOp, NormOp, Pass, SkippedLoops, SlotId,
};
use crate::request::ExitRule;

pub use super::plan::Segment;

/// Runs one pass of `segment` and takes the logits `(n slots, vocab_size)` of `wanted` after it.
///
/// The caller sets `Row::enters` in the first segment's pass only, and wants logits of rows that
/// have run their last one ([`super::Plan::next_stage`] is None).
pub fn run_pass<'b>(
    model: &Model,
    backend: &'b mut dyn Backend,
    segment: Segment,
    pass: &Pass,
    wanted: &[SlotId],
) -> Result<&'b [f32], BackendError> {
    run_blocks(model, backend, segment, pass, &[])?;
    logits(model, backend, wanted)
}

/// The pass itself. `kept`: rows, by ascending index, whose states from before it are needed by
/// [`exit_signals`] after it.
pub fn run_blocks(
    model: &Model,
    backend: &mut dyn Backend,
    segment: Segment,
    pass: &Pass,
    kept: &[u32],
) -> Result<(), BackendError> {
    let weights = &model.weights;
    backend.begin_pass(pass)?;
    if pass.rows.iter().any(|row| row.enters) {
        backend.embed(&weights.embedding)?;
    }
    if !kept.is_empty() {
        backend.keep_state(kept)?;
    }
    enter(&weights.loops, backend, segment)?;
    for block in &weights.blocks[range(model, segment)] {
        backend.qkv(&block.qkv)?;
        backend.attend(&block.attend)?;
        backend.attention_output(&block.attention_output)?;
        normalize_stream(backend, block.attention_norm.as_ref())?;
        backend.feed_forward(&block.feed_forward)?;
        normalize_stream(backend, block.feed_forward_norm.as_ref())?;
    }
    let after = match segment {
        Segment::Prelude => weights.loops.input_norm.as_ref(),
        Segment::Core => weights.loops.norm.as_ref(),
        Segment::Coda => None,
    };
    normalize(backend, after)
}

/// The logits of some slots, whose rows have run their last pass.
pub fn logits<'b>(
    model: &Model,
    backend: &'b mut dyn Backend,
    wanted: &[SlotId],
) -> Result<&'b [f32], BackendError> {
    match wanted {
        [] => Ok(&[]),
        slots => {
            let head = model.weights.logits.as_ref();
            backend.logits(
                head.expect("requests for tokens need a model with a head"),
                slots,
            )
        }
    }
}

/// The states of some slots, whose rows have run their last pass, behind the final norm:
/// `(n slots, d_model)`.
pub fn states(
    model: &Model,
    backend: &mut dyn Backend,
    wanted: &[SlotId],
    out: &mut Vec<f32>,
) -> Result<(), BackendError> {
    let head = model.weights.logits.as_ref();
    let norm = head.and_then(|head| {
        let epsilon = head.epsilon;
        head.norm.map(|norm| NormOp { norm, epsilon })
    });
    backend.states(norm.as_ref(), wanted, out)
}

/// What the rows of a core pass show to a rule, which the model knows.
pub fn exit_signals(
    model: &Model,
    backend: &mut dyn Backend,
    rule: ExitRule,
    row_idxs: &[u32],
    out: &mut Vec<f32>,
) -> Result<(), BackendError> {
    let signal = match rule {
        ExitRule::Latent => ExitSignal::Change,
        ExitRule::Kl => {
            let head = model.weights.logits;
            ExitSignal::Divergence(head.expect("requests for it need a model with a head"))
        }
        ExitRule::Gate => {
            let gate = model.weights.exit_gate;
            let ExitGate { weight, bias } =
                gate.expect("requests for a gate need a model with one");
            ExitSignal::Gate { weight, bias }
        }
    };
    backend.exit_signals(&signal, row_idxs, out)
}

/// Lets the K/V of rows that leave the loop after a core pass stand for the loops they skip.
pub fn fill_skipped(
    model: &Model,
    backend: &mut dyn Backend,
    skipped: &[SkippedLoops],
) -> Result<(), BackendError> {
    let op = FillOp {
        kv: model.plan.kv_place(Segment::Core, 0),
        n_layers: model.plan.core.len() as u32,
    };
    backend.fill_skipped(&op, skipped)
}

/// What comes before the blocks of a segment.
fn enter(loops: &LoopOps, backend: &mut dyn Backend, segment: Segment) -> Result<(), BackendError> {
    match segment {
        Segment::Prelude => Ok(()),
        Segment::Core => {
            if let Some(start) = &loops.start {
                backend.start_loops(start)?;
            }
            loops
                .inject
                .as_ref()
                .map_or(Ok(()), |op| backend.inject(op))
        }
        Segment::Coda => normalize(backend, loops.output_norm.as_ref()),
    }
}

fn normalize(backend: &mut dyn Backend, norm: Option<&NormOp>) -> Result<(), BackendError> {
    norm.map_or(Ok(()), |op| backend.normalize(op))
}

fn normalize_stream(
    backend: &mut dyn Backend,
    norm: Option<&StreamNorm>,
) -> Result<(), BackendError> {
    match norm {
        None => Ok(()),
        Some(StreamNorm::Rms(op)) => backend.normalize(op),
        Some(StreamNorm::Layer(op)) => backend.layer_normalize(op),
    }
}

fn range(model: &Model, segment: Segment) -> std::ops::Range<usize> {
    let blocks = model.plan.blocks(segment);
    blocks.start as usize..blocks.end as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::reference::ReferenceBackend;
    use crate::backend::{PageId, Row, SequencePages, SlotId};
    use crate::model::{Plan, testing};

    /// A tiny model with room for 4 sequences of 64 tokens, `loops` groups each.
    struct Rig {
        backend: ReferenceBackend,
        model: Model,
    }

    const BLOCKS_PER_SEQUENCE: u32 = 4;

    impl Rig {
        fn new() -> Self {
            let mut backend = ReferenceBackend::new();
            let model = testing::tiny(&mut backend, 7);
            backend
                .allocate(&model.geometry(64, 64, 16, 64))
                .expect("small");
            Self { backend, model }
        }

        /// One pass over `(sequence, start, tokens)` spans; logits of every row.
        fn pass(&mut self, spans: &[(u32, u32, &[u32])]) -> Vec<f32> {
            let mut pass = Pass::default();
            for (index, (sequence, start, tokens)) in spans.iter().enumerate() {
                // Pages in falling order, so that a wrong table lookup shows.
                let first = sequence * BLOCKS_PER_SEQUENCE;
                let pages = (first..first + BLOCKS_PER_SEQUENCE).rev().map(PageId);
                let pages = SequencePages::full(vec![pages.collect()]);
                pass.sequences.push(pages);
                for (offset, token) in tokens.iter().enumerate() {
                    pass.rows.push(Row {
                        slot: SlotId(pass.rows.len() as u32),
                        token: *token,
                        position: start + offset as u32,
                        sequence: index as u32,
                        iteration: 0,
                        enters: true,
                    });
                }
            }
            let slots: Vec<SlotId> = pass.rows.iter().map(|row| row.slot).collect();
            run_pass(&self.model, &mut self.backend, Segment::Core, &pass, &slots)
                .expect("a valid pass")
                .to_vec()
        }
    }

    fn tokens(n: u32, salt: u32) -> Vec<u32> {
        (0..n).map(|i| (i * 37 + salt * 101 + 5) % 259).collect()
    }

    #[test]
    fn chunks_and_neighbours_do_not_change_a_bit() {
        let (long, other) = (tokens(40, 1), tokens(19, 2));
        let whole = Rig::new().pass(&[(0, 0, &long)]);
        assert!(whole.iter().all(|logit| logit.is_finite()));

        let mut rig = Rig::new();
        let mut chunked = rig.pass(&[(0, 0, &long[..17])]);
        let mixed = rig.pass(&[(1, 0, &other), (0, 17, &long[17..18]), (2, 0, &other)]);
        let vocab = rig.model.spec.vocab_size as usize;
        chunked.extend_from_slice(&mixed[19 * vocab..20 * vocab]);
        chunked.extend(rig.pass(&[(0, 18, &long[18..])]));
        assert_eq!(whole, chunked);
        assert_eq!(mixed[..19 * vocab], mixed[20 * vocab..]);
        assert_eq!(Rig::new().pass(&[(0, 0, &other)]), mixed[..19 * vocab]);
    }

    #[test]
    fn a_copied_page_serves_like_the_original() {
        let long = tokens(20, 3);
        let mut rig = Rig::new();
        rig.pass(&[(0, 0, &long)]);
        for page in 0..BLOCKS_PER_SEQUENCE {
            let (from, to) = (PageId(page), PageId(BLOCKS_PER_SEQUENCE + page));
            rig.backend.copy_page(from, to).expect("pages exist");
        }
        let next = tokens(1, 9);
        let original = rig.pass(&[(0, 20, &next)]);
        assert_eq!(original, rig.pass(&[(1, 20, &next)]));
        assert_ne!(original, rig.pass(&[(2, 20, &next)]));
    }

    #[test]
    fn a_window_hides_what_is_older() {
        let (long, short) = (tokens(12, 4), tokens(12, 4));
        let mut rig = Rig::new();
        for block in &mut rig.model.weights.blocks {
            block.attend.window = 1;
        }
        // With a window of one token the past does not matter at all, except for the position.
        let first = rig.pass(&[(0, 0, &long)]);
        let mut changed = short;
        changed[0] = 200;
        let second = rig.pass(&[(1, 0, &changed)]);
        let vocab = rig.model.spec.vocab_size as usize;
        assert_ne!(first[..vocab], second[..vocab]);
        assert_eq!(first[vocab..], second[vocab..]);
    }

    #[test]
    fn loops_equal_the_same_blocks_written_out() {
        let sequence = tokens(37, 6);
        for (prelude, core, coda) in [(0, 2, 0), (1, 2, 1), (2, 1, 0), (0, 1, 2)] {
            let mut backend = ReferenceBackend::new();
            let looped = testing::tiny_looped(&mut backend, 11, (prelude, core, coda), 2, 4);
            for loops in [1, 2, 4] {
                let mut unrolled_backend = ReferenceBackend::new();
                let unrolled = unrolled(&mut unrolled_backend, 11, (prelude, core, coda), loops);
                let wanted = all_logits(&unrolled, &mut unrolled_backend, &sequence, 1);
                assert_eq!(
                    all_logits(&looped, &mut backend, &sequence, loops),
                    wanted,
                    "{prelude} + {core} x {loops} + {coda}"
                );
            }
        }
    }

    fn all_logits(
        model: &Model,
        backend: &mut ReferenceBackend,
        tokens: &[u32],
        loops: u32,
    ) -> Vec<f32> {
        let mut all = Vec::new();
        testing::Runner::new(model, backend, 64, 10)
            .and_then(|mut runner| {
                runner.logits(
                    tokens,
                    loops,
                    |_| true,
                    |_, logits| all.extend_from_slice(logits),
                )
            })
            .expect("a small model fits");
        all
    }

    /// An ordinary model whose blocks are those of the looped one, in the order of their use.
    fn unrolled(
        backend: &mut ReferenceBackend,
        seed: u64,
        (prelude, core, coda): (u32, u32, u32),
        loops: u32,
    ) -> Model {
        let looped = testing::tiny_looped(backend, seed, (prelude, core, coda), loops, loops);
        let plan = Plan::ordinary(looped.plan.virtual_layers(loops));
        let mut uses: Vec<u32> = (0..prelude).collect();
        for _ in 0..loops {
            uses.extend(prelude..prelude + core);
        }
        uses.extend(prelude + core..prelude + core + coda);
        let mut weights = looped.weights.clone();
        weights.blocks = uses
            .iter()
            .enumerate()
            .map(|(layer, block)| {
                let mut block = looped.weights.blocks[*block as usize];
                let place = plan.kv_place(Segment::Core, layer as u32);
                block.qkv.kv = place;
                block.attend.kv = place;
                block
            })
            .collect();
        Model {
            spec: looped.spec,
            plan,
            weights,
        }
    }
}
