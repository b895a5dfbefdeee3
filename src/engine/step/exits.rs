//! Early exit inside a step: which rows of a pass may leave the loop after it, who does, and which
//! flights land.
//!
//! On the engine thread, between a pass's blocks and its logits.
//!
//! ```text
//! flight of 4 rows, 4 loops     core 0   core 1   core 2   core 3   coda
//!   row 0 leaves after loop 2     x        x        .        .       x     . rests in its slot
//!   row 1 never leaves            x        x        x        x       x
//!   row 2 leaves after loop 1     x        .        .        .       x
//!   row 3 leaves after loop 3     x        x        x        .       x
//! ```
//!
//! **Rows that left rest** until the last one of their flight has left: nothing of the sequence could
//! go on before, and so a flight keeps one stage, moves to the coda whole, and its logits come in the
//! order of its positions. A generation has one row per flight and never rests.
//!
//! **K/V** of the loops that a row skips are filled in at once, before any later row runs deeper.
//!
//! What is not here: what makes a row leave (`model::exit`).

use super::State;
use crate::backend::{Backend, BackendError, SkippedLoops};
use crate::model::exit::compares;
use crate::model::{Model, Segment, Stage, forward};
use crate::request::{AdaptiveExit, ExitRule};

/// Buffers of the running pass.
#[derive(Default)]
pub(super) struct Exits {
    watched: Vec<Watched>,
    /// Rows whose state from before the pass is needed after it.
    pub(super) kept: Vec<u32>,
    row_idxs: Vec<u32>,
    signals: Vec<f32>,
    skipped: Vec<SkippedLoops>,
}

/// A row that may leave after this pass.
#[derive(Clone, Copy)]
struct Watched {
    row_idx: u32,
    /// Index of its sequence.
    candidate: usize,
    /// Its place in the flight.
    offset: usize,
    exit: AdaptiveExit,
}

/// A row whose logits are wanted after this pass.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Index of its sequence.
    pub(super) candidate: usize,
    pub(super) position: usize,
}

impl Exits {
    pub(super) fn clear(&mut self) {
        self.watched.clear();
        self.kept.clear();
        self.skipped.clear();
    }

    /// Notes that a row, the last one written to the pass, may leave after it.
    pub(super) fn watch(
        &mut self,
        row_idx: u32,
        candidate: usize,
        offset: usize,
        exit: AdaptiveExit,
    ) {
        self.watched.push(Watched {
            row_idx,
            candidate,
            offset,
            exit,
        });
        if compares(exit.rule) {
            self.kept.push(row_idx);
        }
    }
}

impl State {
    /// After the blocks of a pass: rows leave the loop, flights move on or land, and the slots whose
    /// logits are wanted are known.
    pub(super) fn settle(
        &mut self,
        model: &Model,
        backend: &mut dyn Backend,
    ) -> Result<(), BackendError> {
        let n_saved = match self.exits.watched.is_empty() {
            true => 0,
            false => self.let_rows_leave(model, backend)?,
        };
        if self.quantum.segment == Segment::Core {
            self.stats.loops(self.pass.rows.len() as u64, n_saved);
        }
        self.wanted.clear();
        self.wanted_slots.clear();
        self.states.clear();
        for grant in &self.quantum.grants {
            let sequence = &mut self.running[grant.candidate];
            if !sequence.advance(&model.plan) {
                continue;
            }
            for (offset, slot) in sequence.slots.iter().enumerate() {
                let position = sequence.n_computed + offset;
                if sequence.wants_state(position) {
                    self.states.want(grant.candidate, position, *slot);
                }
                if sequence.wants_logits(position) {
                    let candidate = grant.candidate;
                    self.wanted.push(Wanted {
                        candidate,
                        position,
                    });
                    self.wanted_slots.push(*slot);
                }
            }
        }
        Ok(())
    }

    /// Asks every watched row; returns the loops that are saved.
    fn let_rows_leave(
        &mut self,
        model: &Model,
        backend: &mut dyn Backend,
    ) -> Result<u64, BackendError> {
        let mut n_saved = 0;
        let exits = &mut self.exits;
        for rule in ExitRule::ALL {
            let of_rule = || exits.watched.iter().filter(|row| row.exit.rule == rule);
            exits.row_idxs.clear();
            exits.row_idxs.extend(of_rule().map(|row| row.row_idx));
            if exits.row_idxs.is_empty() {
                continue;
            }
            forward::exit_signals(model, backend, rule, &exits.row_idxs, &mut exits.signals)?;
            for (row, signal) in of_rule().zip(&exits.signals) {
                let sequence = &mut self.running[row.candidate];
                let (n_loops, iteration) = (
                    sequence.loops,
                    self.pass.rows[row.row_idx as usize].iteration,
                );
                if sequence.leaves(row.offset, row.exit, *signal, iteration + 1) {
                    n_saved += u64::from(n_loops - iteration - 1);
                    exits.skipped.push(SkippedLoops {
                        row_idx: row.row_idx,
                        n_loops,
                    });
                }
            }
        }
        if !exits.skipped.is_empty() {
            forward::fill_skipped(model, backend, &exits.skipped)?;
        }
        Ok(n_saved)
    }
}

/// The rule by which rows may leave after a pass of `stage`; None where nobody may.
pub(super) fn rule_after(
    stage: Stage,
    loops: u32,
    adaptive: Option<AdaptiveExit>,
) -> Option<AdaptiveExit> {
    let is_open = stage.segment == Segment::Core && stage.iteration + 1 < loops;
    adaptive.filter(|exit| is_open && crate::model::exit::shows(exit.rule, stage.iteration))
}
