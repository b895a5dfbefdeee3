//! Captured launches of passes that come again: the recorded operations are the key.
//!
//! ```text
//! operations of a pass ─► seen never ──► launched one by one, remembered
//!                      ─► seen once ──► captured, replayed
//!                      ─► captured ───► replayed
//! ```
//!
//! Everything that differs between passes of one key lies in device buffers. What is not here: when
//! buffers move (the backend then forgets all).

use super::ops::Recorded;
use crate::backend::{KvPlace, LayerNormOp, Linear, StateInit, VectorId};
use cudarc::driver::CudaGraph;
use std::collections::HashMap;

/// Most keys that are remembered; beyond, all are forgotten.
const KEYS_MAX: usize = 128;

/// A graph that one engine thread owns.
pub(super) struct Graph(pub(super) CudaGraph);

// SAFETY: a graph is used by the thread that owns the backend alone; the driver's handles may be used
// from any one thread at a time.
unsafe impl Send for Graph {}

/// What is known of a pass.
pub(super) enum Seen {
    Never,
    Once,
    Captured,
}

/// The captured passes.
#[derive(Default)]
pub(super) struct Graphs {
    known: HashMap<Vec<u32>, Option<Graph>>,
}

impl Graphs {
    pub(super) fn forget_all(&mut self) {
        self.known.clear();
    }

    /// Looks a key up and remembers it.
    pub(super) fn see(&mut self, key: &[u32]) -> Seen {
        match self.known.get(key) {
            Some(Some(_)) => Seen::Captured,
            Some(None) => Seen::Once,
            None => {
                if self.known.len() >= KEYS_MAX {
                    self.known.clear();
                }
                self.known.insert(key.to_vec(), None);
                Seen::Never
            }
        }
    }

    pub(super) fn insert(&mut self, key: Vec<u32>, graph: CudaGraph) {
        self.known.insert(key, Some(Graph(graph)));
    }

    pub(super) fn get(&self, key: &[u32]) -> Option<&CudaGraph> {
        self.known.get(key)?.as_ref().map(|graph| &graph.0)
    }
}

/// Numbers that tell two lists of operations apart, over rows of a bucket.
pub(super) fn key(ops: &[Recorded], bucket: usize) -> Vec<u32> {
    let mut key = Key(Vec::with_capacity(16 * ops.len() + 1));
    key.word(bucket as u32);
    ops.iter().for_each(|op| key.op(op));
    key.0
}

struct Key(Vec<u32>);

impl Key {
    fn word(&mut self, word: u32) {
        self.0.push(word);
    }

    fn float(&mut self, value: f32) {
        self.word(value.to_bits());
    }

    /// An absent id is one that none has.
    fn vector(&mut self, id: Option<VectorId>) {
        self.word(id.map_or(u32::MAX, |id| id.0));
    }

    fn linear(&mut self, linear: &Linear) {
        self.word(linear.weight.0);
        self.vector(linear.bias);
    }

    fn place(&mut self, kv: KvPlace) {
        self.0
            .extend([kv.first_group, kv.groups_per_iteration, kv.layer]);
    }

    fn layer_norm(&mut self, op: &LayerNormOp) {
        self.word(op.weight.0);
        self.vector(op.bias);
        self.float(op.epsilon);
    }

    fn op(&mut self, op: &Recorded) {
        match op {
            Recorded::Embed(op) => {
                self.0.extend([0, op.table.0]);
                self.float(op.scale);
                self.word(op.positions.map_or(u32::MAX, |id| id.0));
                self.vector(op.constant);
                self.word(u32::from(op.norm.is_some()));
                op.norm.iter().for_each(|norm| self.layer_norm(norm));
            }
            Recorded::Normalize(op) => {
                self.0.extend([1, op.norm.0]);
                self.float(op.epsilon);
            }
            Recorded::LayerNormalize(op) => {
                self.word(2);
                self.layer_norm(op);
            }
            Recorded::StartLoops(op) => {
                self.word(3);
                self.linear(&op.input);
                let (kind, std, seed) = match op.state {
                    StateInit::Input => (0, 0.0, 0),
                    StateInit::Zero => (1, 0.0, 0),
                    StateInit::Normal { std, seed } => (2, std, seed),
                };
                self.0.extend([kind, seed as u32, (seed >> 32) as u32]);
                self.float(std);
            }
            Recorded::Inject(op) => {
                self.word(4);
                self.linear(&op.state);
            }
            Recorded::Qkv(op) => {
                self.word(5);
                [op.norm, op.q_norm, op.k_norm]
                    .into_iter()
                    .for_each(|id| self.vector(id));
                [op.q, op.k, op.v]
                    .iter()
                    .for_each(|linear| self.linear(linear));
                self.word(op.rope.map_or(u32::MAX, |id| id.0));
                self.float(op.epsilon);
                self.place(op.kv);
            }
            Recorded::Attend(op) => {
                self.0
                    .extend([6, op.window, u32::from(op.is_bidirectional)]);
                self.float(op.scale);
                self.place(op.kv);
            }
            Recorded::AttentionOutput(op) => {
                self.word(7);
                self.linear(&op.output);
                self.vector(op.post_norm);
                self.float(op.epsilon);
            }
            Recorded::FeedForward(op) => {
                self.0.extend([8, u32::from(op.gate.is_some())]);
                [op.norm, op.post_norm]
                    .into_iter()
                    .for_each(|id| self.vector(id));
                op.gate.iter().for_each(|gate| self.linear(gate));
                [op.up, op.down]
                    .iter()
                    .for_each(|linear| self.linear(linear));
                self.float(op.epsilon);
            }
        }
    }
}
