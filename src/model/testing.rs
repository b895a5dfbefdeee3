//! Tiny random models for tests of every layer above the backends.
//!
//! Not `cfg(test)`, because integration tests and benches use it; not part of the library's
//! interface. The same seed gives the same weights on every machine and backend. Nothing here
//! reads a file.

use super::loop_spec::LoopSpec;
use super::plan::Plan;
use super::rope::{RopeScaling, RopeSpec};
use super::spec::{DeclaredPooling, EncoderSpec, ModelSpec};
use super::weights::{ModelWeights, TensorSource, tensor_rules};
use super::{Model, architectures, forward};
use crate::backend::{
    Backend, BackendError, PAGE_TOKENS, PageId, Pass, RopePairs, Row, SequencePages, SlotId,
    TensorData,
};
use crate::dtype::DType;
use crate::format::FormatError;
use std::collections::BTreeMap;

/// Sizes of a tiny model. All widths are multiples of 32, so that they could be quantized.
#[derive(Clone, Debug)]
pub struct TinyShape {
    /// Segments; their blocks together are the layers.
    pub plan: Plan,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Longest context in tokens.
    pub context_length: u32,
}

impl Default for TinyShape {
    fn default() -> Self {
        Self {
            plan: Plan::ordinary(3),
            vocab_size: 259,
            context_length: 512,
        }
    }
}

/// A random llama-like F32 model: 3 layers of width 64, 4 heads of 16 over 2 KV heads, vocabulary
/// 259 (bytes and three special tokens), context 512.
///
/// # Panics
/// When the backend refuses the weights.
pub fn tiny(backend: &mut dyn Backend, seed: u64) -> Model {
    build(backend, seed, &TinyShape::default())
}

/// The same with segments of the given block counts and a core that runs `default_loops` times
/// unless asked otherwise, at most `max_loops` times.
///
/// # Panics
/// When the backend refuses the weights, or the plan is impossible (see [`Plan::looped`]).
pub fn tiny_looped(
    backend: &mut dyn Backend,
    seed: u64,
    (prelude, core, coda): (u32, u32, u32),
    default_loops: u32,
    max_loops: u32,
) -> Model {
    let plan = Plan::looped(prelude, core, coda, default_loops, max_loops);
    let shape = TinyShape {
        plan,
        ..TinyShape::default()
    };
    build(backend, seed, &shape)
}

/// A tiny random encoder (BERT without biases): widths as [`tiny`], 2 layers, context 512.
///
/// # Panics
/// When the backend refuses the weights.
pub fn tiny_encoder(backend: &mut dyn Backend, seed: u64) -> Model {
    let bert = architectures::find("bert").expect("the table has a bert row");
    let shape = TinyShape {
        plan: Plan {
            is_bidirectional: true,
            ..Plan::ordinary(2)
        },
        ..TinyShape::default()
    };
    let spec = ModelSpec {
        architecture: bert.name.to_owned(),
        n_kv_heads: 4,
        nope_interval: bert.nope_interval,
        encoder: bert.encoder.map(|kind| EncoderSpec {
            kind,
            n_positions: shape.context_length,
            n_token_types: 2,
        }),
        ..tiny_spec(&shape)
    };
    let source = RandomTensors::new(&spec, seed);
    let weights = ModelWeights::load(&spec, &shape.plan, &source, backend, &mut |_, _| {})
        .expect("random tensors have the right names, shapes and types");
    Model {
        spec,
        plan: shape.plan,
        weights,
    }
}

/// A tiny model of any shape.
///
/// # Panics
/// When the backend refuses the weights.
pub fn build(backend: &mut dyn Backend, seed: u64, shape: &TinyShape) -> Model {
    let spec = tiny_spec(shape);
    let source = RandomTensors::new(&spec, seed);
    let weights = ModelWeights::load(&spec, &shape.plan, &source, backend, &mut |_, _| {})
        .expect("random tensors have the right names, shapes and types");
    Model {
        spec,
        plan: shape.plan.clone(),
        weights,
    }
}

/// The spec of a tiny model.
#[must_use]
pub fn tiny_spec(shape: &TinyShape) -> ModelSpec {
    let row = architectures::find("llama").expect("the table has a llama row");
    let plan = &shape.plan;
    ModelSpec {
        architecture: row.name.to_owned(),
        name: "tiny".to_owned(),
        context_length: shape.context_length,
        d_model: 64,
        d_ff: 96,
        n_layers: (plan.prelude.len() + plan.core.len() + plan.coda.len()) as u32,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        vocab_size: shape.vocab_size,
        epsilon: 1e-5,
        window: 0,
        attention_scale: 0.25,
        rope: RopeSpec {
            base: 10_000.0,
            n_rotated: 16,
            pairs: RopePairs::Interleaved,
            scaling: RopeScaling::None,
        },
        nope_interval: row.nope_interval,
        needs_qkv_bias: row.needs_qkv_bias,
        has_qk_norm: row.has_qk_norm,
        tied_embeddings: true,
        feed_forward_norm: row.feed_forward_norm,
        residual_norms: row.residual_norms,
        embedding_scale: 1.0,
        loops: LoopSpec::default(),
        encoder: None,
        pooling: DeclaredPooling::None,
        weight_bytes: 0,
    }
}

/// Random f32 tensors for the required rules of a spec.
pub struct RandomTensors {
    tensors: BTreeMap<String, RandomTensor>,
}

#[derive(Clone)]
struct RandomTensor {
    /// In the file's order.
    dims: Vec<u64>,
    /// Little-endian f32.
    bytes: Vec<u8>,
}

impl RandomTensors {
    /// Matrices are uniform with variance `2 / n_in`, which keeps the residual stream lively but
    /// bounded; vectors lie within 0.5..1.5. A tensor depends on the seed and its name only.
    #[must_use]
    pub fn new(spec: &ModelSpec, seed: u64) -> Self {
        let tensors = tensor_rules(spec)
            .into_iter()
            .filter(|rule| rule.required)
            .map(|rule| {
                let n_values: u64 = rule.dims.iter().product();
                let is_matrix = rule.dims.len() == 2;
                let amplitude = match rule.name.as_str() {
                    "token_embd.weight" => 0.5,
                    _ => (6.0 / rule.dims[0] as f32).sqrt(),
                };
                let mut random = SplitMix::new(seed, &rule.name);
                let bytes = (0..n_values)
                    .map(|_| random.within_one())
                    .map(|value| {
                        if is_matrix {
                            value * amplitude
                        } else {
                            1.0 + value / 2.0
                        }
                    })
                    .flat_map(f32::to_le_bytes)
                    .collect();
                let dims = rule.dims;
                (rule.name, RandomTensor { dims, bytes })
            })
            .collect();
        Self { tensors }
    }

    /// Makes `to` hold what `from` holds; both names must exist.
    ///
    /// # Panics
    /// When `from` does not exist.
    pub fn copy(&mut self, from: &str, to: &str) {
        let tensor = self.tensors[from].clone();
        self.tensors.insert(to.to_owned(), tensor);
    }

    fn find(&self, name: &str) -> Result<(&str, &RandomTensor), FormatError> {
        self.tensors
            .get_key_value(name)
            .map(|(name, tensor)| (name.as_str(), tensor))
            .ok_or_else(|| self.invalid(format!("tensor {name} is missing")))
    }
}

impl TensorSource for RandomTensors {
    fn shapes(&self) -> Vec<(String, Vec<u64>)> {
        self.tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.dims.clone()))
            .collect()
    }

    fn matrix<'a>(
        &'a self,
        name: &str,
        _scratch: &'a mut Vec<u8>,
    ) -> Result<TensorData<'a>, FormatError> {
        let (name, RandomTensor { dims, bytes }) = self.find(name)?;
        Ok(TensorData {
            name,
            dtype: DType::F32,
            n_out: dims.get(1).map_or(1, |n| *n as usize),
            n_in: dims[0] as usize,
            bytes,
        })
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        let (_, tensor) = self.find(name)?;
        Ok(tensor
            .bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect())
    }

    fn invalid(&self, reason: String) -> FormatError {
        FormatError::Invalid {
            path: "random tensors".to_owned(),
            reason,
        }
    }
}

/// Runs one sequence after another through a model, without an engine: the yardstick for it.
pub struct Runner<'a> {
    model: &'a Model,
    backend: &'a mut dyn Backend,
    max_tokens: usize,
    chunk: usize,
}

impl<'a> Runner<'a> {
    /// Allocates the backend's state for sequences of at most `max_tokens`, computed in chunks of
    /// `chunk` tokens, with as many loops as the plan allows.
    pub fn new(
        model: &'a Model,
        backend: &'a mut dyn Backend,
        max_tokens: usize,
        chunk: usize,
    ) -> Result<Self, BackendError> {
        let n_pages = max_tokens.div_ceil(PAGE_TOKENS) * model.plan.kv_groups(model.plan.max_loops);
        backend.allocate(&model.geometry(chunk, chunk, n_pages, max_tokens))?;
        Ok(Self {
            model,
            backend,
            max_tokens,
            chunk,
        })
    }

    /// Computes a sequence with `loops` core iterations and shows `(position, logits)` of every
    /// position that `wants` picks to `see`, in order.
    ///
    /// # Panics
    /// When the sequence is longer than `max_tokens`.
    pub fn logits(
        &mut self,
        tokens: &[u32],
        loops: u32,
        wants: impl Fn(usize) -> bool,
        mut see: impl FnMut(usize, &[f32]),
    ) -> Result<(), BackendError> {
        assert!(tokens.len() <= self.max_tokens, "the sequence is too long");
        let plan = &self.model.plan;
        let vocab_size = self.model.spec.vocab_size as usize;
        for start in (0..tokens.len()).step_by(self.chunk) {
            let mut pass = self.chunk_pass(tokens, start, loops);
            let mut stage = Some(plan.first_stage());
            while let Some(now) = stage {
                stage = plan.next_stage(now, loops);
                for row in &mut pass.rows {
                    row.iteration = now.iteration;
                    row.enters = now == plan.first_stage();
                }
                let is_wanted = |row: &&Row| stage.is_none() && wants(row.position as usize);
                let wanted = || pass.rows.iter().filter(is_wanted);
                let slots: Vec<SlotId> = wanted().map(|row| row.slot).collect();
                let (segment, backend) = (now.segment, &mut *self.backend);
                let logits = forward::run_pass(self.model, backend, segment, &pass, &slots)?;
                for (row, logits) in wanted().zip(logits.chunks_exact(vocab_size)) {
                    see(row.position as usize, logits);
                }
            }
        }
        Ok(())
    }

    /// The rows of one chunk. Pages are handed out in falling order, so that a backend which takes
    /// a block index for a page index is found out.
    fn chunk_pass(&self, tokens: &[u32], start: usize, loops: u32) -> Pass {
        let end = tokens.len().min(start + self.chunk);
        let blocks_per_group = self.max_tokens.div_ceil(PAGE_TOKENS) as u32;
        let groups = (0..self.model.plan.kv_groups(loops) as u32)
            .map(|group| {
                let first = group * blocks_per_group;
                let pages = (first..first + blocks_per_group).rev();
                pages.map(PageId).collect()
            })
            .collect();
        let row = |position: usize| Row {
            slot: SlotId((position - start) as u32),
            token: tokens[position],
            position: position as u32,
            sequence: 0,
            iteration: 0,
            enters: false,
        };
        Pass {
            rows: (start..end).map(row).collect(),
            sequences: vec![SequencePages::full(groups)],
        }
    }
}

/// The SplitMix64 generator, started from a seed and a name.
struct SplitMix(u64);

impl SplitMix {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, so that tensors do not share their numbers.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(seed ^ hash)
    }

    /// Uniform in -1..1.
    fn within_one(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}
