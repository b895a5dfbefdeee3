//! The scalar oracle: every operation in plain f32 loops, the yardstick of all other backends.
//!
//! Weights are dequantized to f32 at load, activations, keys and values are f32, so the only error
//! is f32 rounding. It reads like the maths and asserts what the trait promises. Owned by one
//! thread; starts none. What is not here: SIMD, `unsafe`, any trick for speed beyond loop orders
//! that a compiler vectorizes (`math::dot`).
//!
//! Batch invariance holds by construction: a row's values are computed from its own slot and its
//! own pages, each in a loop whose order does not depend on the pass.

pub mod dequant;
mod math;

use super::{
    AttendOp, AttentionOutputOp, Backend, BackendError, EmbedOp, ExitSignal, FeedForwardOp, FillOp,
    InjectOp, KvPlace, LayerNormOp, Linear, LogitsOp, MatrixId, MemoryUse, NormOp, PAGE_TOKENS,
    PageId, Pass, QkvOp, RopeId, RopeTable, Row, SkippedLoops, SlotId, StartLoopsOp, StateGeometry,
    StateInit, TensorData, VectorId, Visible, exit_signal, state_init,
};
use math::{add, gated, gelu, layer_norm, matmul, rms_norm, rotate, softmax};

/// A dequantized weight matrix.
struct Matrix {
    n_out: usize,
    n_in: usize,
    /// (n_out, n_in)
    values: Vec<f32>,
}

/// The reference backend.
#[derive(Default)]
pub struct ReferenceBackend {
    matrices: Vec<Matrix>,
    vectors: Vec<Vec<f32>>,
    ropes: Vec<RopeTable>,
    /// Set by `allocate`.
    geometry: Option<StateGeometry>,
    /// (n_slots, d_model): the residual stream.
    hidden: Vec<f32>,
    /// (n_slots, d_model), or empty: what is injected at every loop.
    input: Vec<f32>,
    /// (n_slots, d_model), or empty: states before a loop that may be the last.
    kept: Vec<f32>,
    /// (n_pages, layers_per_page, PAGE_TOKENS, n_kv_heads * head_dim)
    keys: Vec<f32>,
    /// The same shape.
    values: Vec<f32>,
    /// The running pass.
    pass: Pass,
    /// (n_rows, n_heads * head_dim): queries, rotated.
    queries: Vec<f32>,
    /// (n_rows, n_heads * head_dim): what attention found.
    attention: Vec<f32>,
    /// (n rows that want them, vocab_size)
    logits: Vec<f32>,
}

impl ReferenceBackend {
    /// A backend without weights.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn geometry(&self) -> &StateGeometry {
        self.geometry
            .as_ref()
            .expect("allocate comes before any pass")
    }

    /// Width of one position's keys (or values) of one layer.
    fn kv_width(&self) -> usize {
        self.geometry().n_kv_heads * self.geometry().head_dim
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    /// Residual stream of a row, (d_model).
    fn hidden(&self, row: &Row) -> &[f32] {
        let d_model = self.geometry().d_model;
        &self.hidden[row.slot.0 as usize * d_model..][..d_model]
    }

    fn hidden_mut(&mut self, row: &Row) -> &mut [f32] {
        let d_model = self.geometry().d_model;
        &mut self.hidden[row.slot.0 as usize * d_model..][..d_model]
    }

    /// The given rows' residual streams, normed where there is a norm, (rows, d_model).
    fn normed<'r>(
        &self,
        rows: impl Iterator<Item = &'r Row>,
        norm: Option<VectorId>,
        epsilon: f32,
    ) -> Vec<f32> {
        self.normed_states(rows.map(|row| self.hidden(row)), norm, epsilon)
    }

    /// The same of any states.
    fn normed_states<'s>(
        &self,
        states: impl Iterator<Item = &'s [f32]>,
        norm: Option<VectorId>,
        epsilon: f32,
    ) -> Vec<f32> {
        let mut out = Vec::new();
        for state in states {
            let start = out.len();
            out.extend_from_slice(state);
            if let Some(norm) = norm {
                rms_norm(&mut out[start..], self.vector(norm), epsilon);
            }
        }
        out
    }

    /// What was kept of a row's state, (d_model).
    fn kept(&self, row: &Row) -> &[f32] {
        let d_model = self.geometry().d_model;
        &self.kept[row.slot.0 as usize * d_model..][..d_model]
    }

    /// See [`ExitSignal`].
    fn exit_signal(&self, signal: &ExitSignal, row: &Row) -> f32 {
        let (now, before) = (self.hidden(row), || self.kept(row));
        match signal {
            ExitSignal::Gate { weight, bias } => {
                exit_signal::gate(self.vector(*weight), *bias, now)
            }
            ExitSignal::Change => exit_signal::change(now, before()),
            ExitSignal::Divergence(head) => {
                let logits = |state: &[f32]| {
                    let normed = self.normed_states([state].into_iter(), head.norm, head.epsilon);
                    self.linear(&head.output, &normed)
                };
                exit_signal::divergence(&logits(now), &logits(before()))
            }
        }
    }

    /// Replaces the residual streams of all rows by `values`, (rows, d_model).
    fn set_hidden(&mut self, values: &[f32]) {
        let d_model = self.geometry().d_model;
        let rows = self.pass.rows.iter().zip(values.chunks_exact(d_model));
        for (row, values) in rows {
            self.hidden[row.slot.0 as usize * d_model..][..d_model].copy_from_slice(values);
        }
    }

    /// `W x + b` for each row of `inputs` (n_rows, n_in): (n_rows, n_out).
    fn linear(&self, linear: &Linear, inputs: &[f32]) -> Vec<f32> {
        let matrix = &self.matrices[linear.weight.0 as usize];
        let mut out = matmul(&matrix.values, matrix.n_out, matrix.n_in, inputs);
        if let Some(bias) = linear.bias {
            for row in out.chunks_exact_mut(matrix.n_out) {
                add(row, self.vector(bias));
            }
        }
        out
    }

    /// Adds a branch (n_rows, d_model) to the residual streams, after its norm where it has one.
    fn add_branch(&mut self, mut branch: Vec<f32>, post_norm: Option<VectorId>, epsilon: f32) {
        let d_model = self.geometry().d_model;
        let rows = std::mem::take(&mut self.pass.rows);
        for (row, branch) in rows.iter().zip(branch.chunks_exact_mut(d_model)) {
            if let Some(norm) = post_norm {
                rms_norm(branch, self.vector(norm), epsilon);
            }
            add(self.hidden_mut(row), branch);
        }
        self.pass.rows = rows;
    }

    /// Start of a position's keys (and values) of one layer.
    fn kv_offset(&self, row: &Row, kv: KvPlace, position: usize) -> usize {
        let pages = &self.pass.sequences[row.sequence as usize];
        let table = &pages.groups[kv.group(row.iteration)];
        let page = table[pages.entry(position / PAGE_TOKENS)].0 as usize;
        let layer = page * self.geometry().layers_per_page + kv.layer as usize;
        (layer * PAGE_TOKENS + position % PAGE_TOKENS) * self.kv_width()
    }

    /// Norms (where the model has them) and rotates every head of one position.
    fn prepare_heads(&self, heads: &mut [f32], norm: Option<VectorId>, op: &QkvOp, row: &Row) {
        for head in heads.chunks_exact_mut(self.geometry().head_dim) {
            if let Some(norm) = norm {
                rms_norm(head, self.vector(norm), op.epsilon);
            }
            if let Some(rope) = op.rope {
                rotate(head, row.position, &self.ropes[rope.0 as usize]);
            }
        }
    }

    /// Attention of one query head over its sequence: (head_dim) added to `out`, which is zero.
    fn attend_head(&self, op: &AttendOp, row: &Row, head: usize, query: &[f32], out: &mut [f32]) {
        let geometry = self.geometry();
        let kv_head = head / (geometry.n_heads / geometry.n_kv_heads);
        let visible = self.visible(op, row);
        let head_dim = geometry.head_dim;
        let places: Vec<usize> = visible
            .positions()
            .map(|position| self.kv_offset(row, op.kv, position) + kv_head * head_dim)
            .collect();
        let mut weights: Vec<f32> = places
            .iter()
            .map(|place| math::dot(query, &self.keys[*place..][..head_dim]) * op.scale)
            .collect();
        softmax(&mut weights);
        for (weight, place) in weights.iter().zip(&places) {
            let value = &self.values[*place..][..head_dim];
            for (out, value) in out.iter_mut().zip(value) {
                *out += weight * value;
            }
        }
    }

    /// The positions that a row attends to.
    fn visible(&self, op: &AttendOp, row: &Row) -> Visible {
        if op.is_bidirectional {
            let own = self
                .pass
                .rows
                .iter()
                .filter(|other| other.sequence == row.sequence);
            let last = own
                .map(|other| other.position)
                .max()
                .unwrap_or(row.position);
            return Visible::all(last as usize + 1);
        }
        let window = self.pass.sequences[row.sequence as usize].window;
        window.visible(row.position as usize, op.window)
    }

    /// What the trait asks of a pass. A violation is a bug of the engine, so it panics.
    fn check_pass(&self, pass: &Pass) {
        let geometry = self.geometry();
        assert!(pass.rows.len() <= geometry.max_rows, "too many rows");
        for (row, next) in pass.rows.iter().zip(pass.rows.iter().skip(1)) {
            let same_chain = row.sequence == next.sequence && row.iteration == next.iteration;
            assert!(!same_chain || row.position < next.position, "rows disorder");
        }
        for row in &pass.rows {
            assert!((row.slot.0 as usize) < geometry.n_slots, "slot {row:?}");
            assert!(
                (row.position as usize) < geometry.max_context,
                "context {row:?}"
            );
            assert!(
                (row.token as usize) < geometry.vocab_size || !row.enters,
                "token {row:?}"
            );
            let pages = &pass.sequences[row.sequence as usize];
            assert!(pages.holds_window_of(row.position as usize), "{row:?}");
        }
        let pages = pass.sequences.iter().flat_map(|pages| &pages.groups);
        for page in pages.flatten() {
            assert!((page.0 as usize) < geometry.n_pages, "page {page:?}");
        }
    }
}

impl Backend for ReferenceBackend {
    fn name(&self) -> String {
        "reference f32".to_owned()
    }

    fn load_matrix(&mut self, tensor: &TensorData<'_>) -> Result<MatrixId, BackendError> {
        let n_values = tensor.n_out * tensor.n_in;
        let mut values = zeros(tensor.name, n_values)?;
        dequant::dequantize(tensor.dtype, tensor.bytes, &mut values);
        self.matrices.push(Matrix {
            n_out: tensor.n_out,
            n_in: tensor.n_in,
            values,
        });
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.vectors.push(values.to_vec());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn load_rope(&mut self, table: &RopeTable) -> Result<RopeId, BackendError> {
        self.ropes.push(table.clone());
        Ok(RopeId(self.ropes.len() as u32 - 1))
    }

    fn allocate(&mut self, geometry: &StateGeometry) -> Result<(), BackendError> {
        assert!(geometry.n_heads.is_multiple_of(geometry.n_kv_heads));
        let n_positions = geometry.n_pages * geometry.layers_per_page * PAGE_TOKENS;
        let n_kv = n_positions * geometry.n_kv_heads * geometry.head_dim;
        self.hidden = zeros("hidden-state slots", geometry.n_slots * geometry.d_model)?;
        let n_inputs = usize::from(geometry.keeps_input) * geometry.n_slots * geometry.d_model;
        self.input = zeros("inputs of the loop", n_inputs)?;
        self.kept = Vec::new();
        self.keys = zeros("the key pages", n_kv)?;
        self.values = zeros("the value pages", n_kv)?;
        self.geometry = Some(*geometry);
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let bytes = |n_floats: usize| (n_floats * size_of::<f32>()) as u64;
        let matrices = self.matrices.iter().map(|matrix| matrix.values.len());
        let vectors = self.vectors.iter().map(Vec::len);
        let scratch = [
            &self.hidden,
            &self.input,
            &self.kept,
            &self.queries,
            &self.attention,
            &self.logits,
        ];
        MemoryUse {
            weight_bytes: bytes(matrices.chain(vectors).sum()),
            kv_bytes: bytes(self.keys.len() + self.values.len()),
            scratch_bytes: bytes(scratch.iter().map(|buffer| buffer.len()).sum()),
        }
    }

    fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError> {
        self.check_pass(pass);
        self.pass = pass.clone();
        Ok(())
    }

    fn embed(&mut self, op: &EmbedOp) -> Result<(), BackendError> {
        let d_model = self.geometry().d_model;
        for row in self.pass.rows.iter().filter(|row| row.enters) {
            let (slot, token) = (row.slot.0 as usize, row.token as usize);
            let embedding =
                &self.matrices[op.table.0 as usize].values[token * d_model..][..d_model];
            let hidden = &mut self.hidden[slot * d_model..][..d_model];
            for (hidden, value) in hidden.iter_mut().zip(embedding) {
                *hidden = value * op.scale;
            }
            if let Some(positions) = op.positions {
                let at = row.position as usize * d_model;
                add(
                    hidden,
                    &self.matrices[positions.0 as usize].values[at..at + d_model],
                );
            }
            if let Some(constant) = op.constant {
                add(hidden, &self.vectors[constant.0 as usize]);
            }
            if let Some(norm) = op.norm {
                let weight = &self.vectors[norm.weight.0 as usize];
                let bias = norm.bias.map(|bias| &*self.vectors[bias.0 as usize]);
                layer_norm(hidden, weight, bias, norm.epsilon);
            }
        }
        Ok(())
    }

    fn normalize(&mut self, op: &NormOp) -> Result<(), BackendError> {
        let normed = self.normed(self.pass.rows.iter(), Some(op.norm), op.epsilon);
        self.set_hidden(&normed);
        Ok(())
    }

    fn layer_normalize(&mut self, op: &LayerNormOp) -> Result<(), BackendError> {
        let d_model = self.geometry().d_model;
        let mut states = self.normed(self.pass.rows.iter(), None, 0.0);
        let bias = op.bias.map(|bias| self.vector(bias));
        for state in states.chunks_exact_mut(d_model) {
            layer_norm(state, self.vector(op.weight), bias, op.epsilon);
        }
        self.set_hidden(&states);
        Ok(())
    }

    fn start_loops(&mut self, op: &StartLoopsOp) -> Result<(), BackendError> {
        let d_model = self.geometry().d_model;
        let hidden = self.normed(self.pass.rows.iter(), None, 0.0);
        let projected = self.linear(&op.input, &hidden);
        let rows = self.pass.rows.iter().zip(projected.chunks_exact(d_model));
        for (row, projected) in rows.filter(|(row, _)| row.iteration == 0) {
            let place = row.slot.0 as usize * d_model..(row.slot.0 as usize + 1) * d_model;
            self.input[place.clone()].copy_from_slice(projected);
            let hidden = &mut self.hidden[place];
            match op.state {
                StateInit::Input => {}
                StateInit::Zero => hidden.fill(0.0),
                StateInit::Normal { std, seed } => {
                    for (coordinate, hidden) in (0..).zip(hidden) {
                        *hidden = std * state_init::value(seed, row.position, coordinate);
                    }
                }
            }
        }
        Ok(())
    }

    fn inject(&mut self, op: &InjectOp) -> Result<(), BackendError> {
        let d_model = self.geometry().d_model;
        let hidden = self.normed(self.pass.rows.iter(), None, 0.0);
        let mut state = self.linear(&op.state, &hidden);
        for (row, state) in self.pass.rows.iter().zip(state.chunks_exact_mut(d_model)) {
            add(
                state,
                &self.input[row.slot.0 as usize * d_model..][..d_model],
            );
        }
        self.set_hidden(&state);
        Ok(())
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), BackendError> {
        let normed = self.normed(self.pass.rows.iter(), op.norm, op.epsilon);
        let mut queries = self.linear(&op.q, &normed);
        let mut keys = self.linear(&op.k, &normed);
        let values = self.linear(&op.v, &normed);

        let q_width = self.geometry().n_heads * self.geometry().head_dim;
        let kv_width = self.kv_width();
        for (index, row) in self.pass.rows.iter().enumerate() {
            let query = &mut queries[index * q_width..][..q_width];
            self.prepare_heads(query, op.q_norm, op, row);
            let key = &mut keys[index * kv_width..][..kv_width];
            self.prepare_heads(key, op.k_norm, op, row);
            let place = self.kv_offset(row, op.kv, row.position as usize);
            self.keys[place..][..kv_width].copy_from_slice(key);
            self.values[place..][..kv_width]
                .copy_from_slice(&values[index * kv_width..][..kv_width]);
        }
        self.queries = queries;
        Ok(())
    }

    fn attend(&mut self, op: &AttendOp) -> Result<(), BackendError> {
        let StateGeometry {
            n_heads, head_dim, ..
        } = *self.geometry();
        let mut attention = vec![0.0; self.pass.rows.len() * n_heads * head_dim];
        for (index, row) in self.pass.rows.iter().enumerate() {
            for head in 0..n_heads {
                let place = (index * n_heads + head) * head_dim;
                let query = &self.queries[place..][..head_dim];
                let out = &mut attention[place..][..head_dim];
                self.attend_head(op, row, head, query, out);
            }
        }
        self.attention = attention;
        Ok(())
    }

    fn attention_output(&mut self, op: &AttentionOutputOp) -> Result<(), BackendError> {
        let branch = self.linear(&op.output, &self.attention);
        self.add_branch(branch, op.post_norm, op.epsilon);
        Ok(())
    }

    fn feed_forward(&mut self, op: &FeedForwardOp) -> Result<(), BackendError> {
        let normed = self.normed(self.pass.rows.iter(), op.norm, op.epsilon);
        let mut up = self.linear(&op.up, &normed);
        let inner = match &op.gate {
            Some(gate) => {
                let mut gate = self.linear(gate, &normed);
                gated(&mut gate, &up);
                gate
            }
            None => {
                up.iter_mut().for_each(|value| *value = gelu(*value));
                up
            }
        };
        let branch = self.linear(&op.down, &inner);
        self.add_branch(branch, op.post_norm, op.epsilon);
        Ok(())
    }

    fn keep_state(&mut self, row_idxs: &[u32]) -> Result<(), BackendError> {
        let StateGeometry {
            n_slots, d_model, ..
        } = *self.geometry();
        if self.kept.is_empty() {
            self.kept = zeros("kept states", n_slots * d_model)?;
        }
        for row_idx in row_idxs {
            let slot = self.pass.rows[*row_idx as usize].slot.0 as usize;
            let place = slot * d_model..(slot + 1) * d_model;
            self.kept[place.clone()].copy_from_slice(&self.hidden[place]);
        }
        Ok(())
    }

    fn exit_signals(
        &mut self,
        signal: &ExitSignal,
        row_idxs: &[u32],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let rows = row_idxs.iter().map(|idx| &self.pass.rows[*idx as usize]);
        out.clear();
        out.extend(rows.map(|row| self.exit_signal(signal, row)));
        Ok(())
    }

    fn fill_skipped(&mut self, op: &FillOp, skipped: &[SkippedLoops]) -> Result<(), BackendError> {
        let width = self.kv_width();
        for skip in skipped {
            let row = self.pass.rows[skip.row_idx as usize];
            let position = row.position as usize;
            for layer in op.kv.layer..op.kv.layer + op.n_layers {
                let kv = KvPlace { layer, ..op.kv };
                let from = self.kv_offset(&row, kv, position);
                for iteration in row.iteration + 1..skip.n_loops {
                    let to = self.kv_offset(&Row { iteration, ..row }, kv, position);
                    self.keys.copy_within(from..from + width, to);
                    self.values.copy_within(from..from + width, to);
                }
            }
        }
        Ok(())
    }

    fn logits(&mut self, op: &LogitsOp, slots: &[SlotId]) -> Result<&[f32], BackendError> {
        let d_model = self.geometry().d_model;
        let state = |slot: &SlotId| &self.hidden[slot.0 as usize * d_model..][..d_model];
        let normed = self.normed_states(slots.iter().map(state), op.norm, op.epsilon);
        self.logits = self.linear(&op.output, &normed);
        Ok(&self.logits)
    }

    fn states(
        &mut self,
        norm: Option<&NormOp>,
        slots: &[SlotId],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let d_model = self.geometry().d_model;
        let state = |slot: &SlotId| &self.hidden[slot.0 as usize * d_model..][..d_model];
        let epsilon = norm.map_or(0.0, |op| op.epsilon);
        *out = self.normed_states(slots.iter().map(state), norm.map(|op| op.norm), epsilon);
        Ok(())
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), BackendError> {
        let page_len = self.geometry().layers_per_page * PAGE_TOKENS * self.kv_width();
        let (from, to) = (from.0 as usize * page_len, to.0 as usize * page_len);
        self.keys.copy_within(from..from + page_len, to);
        self.values.copy_within(from..from + page_len, to);
        Ok(())
    }
}

/// A buffer, or an error that says what it was for. Asking first keeps an absurd size from ending
/// the process; taking zeroed memory afterwards leaves untouched pages to the operating system.
fn zeros(what: &str, n_floats: usize) -> Result<Vec<f32>, BackendError> {
    let refused = |_| BackendError::OutOfMemory {
        what: what.to_owned(),
        bytes: (n_floats as u64).saturating_mul(4),
    };
    Vec::<f32>::new()
        .try_reserve_exact(n_floats)
        .map_err(refused)?;
    Ok(vec![0.0; n_floats])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn absurd_sizes_are_errors() {
        let error = zeros("test", usize::MAX / 8).expect_err("no machine has this much");
        assert!(error.to_string().contains("test needs"));
    }

    #[test]
    fn matrices_are_dequantized_at_load() {
        let mut backend = ReferenceBackend::new();
        let values = [1.5_f32, -2.0, 0.25, 8.0];
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| half::f16::from_f32(*value).to_le_bytes())
            .collect();
        let tensor = TensorData {
            name: "t",
            dtype: DType::F16,
            n_out: 2,
            n_in: 2,
            bytes: &bytes,
        };
        backend.load_matrix(&tensor).expect("F16 is known");
        assert_eq!(backend.matrices[0].values, values);
        assert_eq!(backend.memory().weight_bytes, 16);
    }
}
