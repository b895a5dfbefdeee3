//! States for embeddings inside a step: which rows of landed flights are wanted, and where they go.
//!
//! On the engine thread, between a pass's blocks and its logits. What is not here: what is made of
//! them (`engine/pooled`), when the vector is sent (`landing`).

use super::State;
use super::exits::Wanted;
use crate::backend::{Backend, BackendError, SlotId};
use crate::model::{Model, forward};

/// Buffers of the running pass.
#[derive(Default)]
pub(super) struct States {
    wanted: Vec<Wanted>,
    slots: Vec<SlotId>,
    /// (wanted, d_model)
    values: Vec<f32>,
}

impl States {
    pub(super) fn clear(&mut self) {
        self.wanted.clear();
        self.slots.clear();
    }

    /// Notes a row whose state counts.
    pub(super) fn want(&mut self, candidate: usize, position: usize, slot: SlotId) {
        self.wanted.push(Wanted {
            candidate,
            position,
        });
        self.slots.push(slot);
    }
}

impl State {
    /// Reads the wanted states and adds each to its sequence's embedding.
    pub(super) fn pool_states(
        &mut self,
        model: &Model,
        backend: &mut dyn Backend,
    ) -> Result<(), BackendError> {
        let States {
            wanted,
            slots,
            values,
        } = &mut self.states;
        if wanted.is_empty() {
            return Ok(());
        }
        forward::states(model, backend, slots, values)?;
        let d_model = values.len() / wanted.len();
        for (row, state) in wanted.iter().zip(values.chunks_exact(d_model)) {
            if let Some(pooled) = &mut self.running[row.candidate].pooled {
                pooled.add(row.position, state);
            }
        }
        Ok(())
    }
}
