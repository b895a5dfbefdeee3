//! The names table, and from it the ids of a model's weights in its backend.
//!
//! Runs once, on the thread that loads. Every tensor the spec asks for is checked before the first
//! one is copied; then each is handed to the backend once and the result is the list of operations
//! that `forward` runs. A tensor that no rule names is an error too: a model whose file holds more
//! than we compute would talk nonsense.

mod encoder;

use super::architectures::ResidualNorms;
use super::loop_spec::FINAL_NORM;
use super::plan::{Plan, Segment};
use super::spec::ModelSpec;
use super::{ModelError, Progress, requantize};
use crate::backend::quantize::quantize_matrix;
use crate::backend::{
    AttendOp, AttentionOutputOp, Backend, EmbedOp, FeedForwardOp, InjectOp, LayerNormOp, Linear,
    LogitsOp, MatrixId, NormOp, QkvOp, RopeId, StartLoopsOp, TensorData, VectorId,
};
use crate::dtype::DType;
use crate::format::{FormatError, ModelFile};

/// Ids of all weights, arranged as operations.
#[derive(Clone, Debug)]
pub struct ModelWeights {
    /// Token to residual stream.
    pub embedding: EmbedOp,
    /// The file's blocks in order.
    pub blocks: Vec<Block>,
    /// What happens around the blocks of each segment.
    pub loops: LoopOps,
    /// Final norm and output projection; None in encoders.
    pub logits: Option<LogitsOp>,
    /// Of a model that can say itself when it has looped enough (Ouro).
    pub exit_gate: Option<ExitGate>,
}

/// `sigmoid(weight · normed state + bias)`: how likely a token is done after a loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExitGate {
    /// (d_model)
    pub weight: VectorId,
    /// Added to the product.
    pub bias: f32,
}

/// What happens around the blocks; all None in an ordinary model.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopOps {
    /// At the end of the prelude.
    pub input_norm: Option<NormOp>,
    /// At the start of the core, for rows in their first loop.
    pub start: Option<StartLoopsOp>,
    /// At the start of the core.
    pub inject: Option<InjectOp>,
    /// At the end of the core.
    pub norm: Option<NormOp>,
    /// At the start of the coda.
    pub output_norm: Option<NormOp>,
}

/// One block: its four operations, and norms of the residual stream where it has them.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Norm, projections, rotation, KV write.
    pub qkv: QkvOp,
    /// Softmax over the sequence.
    pub attend: AttendOp,
    /// Output projection, added to the residual stream.
    pub attention_output: AttentionOutputOp,
    /// Of the residual stream after attention.
    pub attention_norm: Option<StreamNorm>,
    /// Norm, gated network, added to the residual stream.
    pub feed_forward: FeedForwardOp,
    /// Of the residual stream after the network.
    pub feed_forward_norm: Option<StreamNorm>,
}

/// A norm of the residual stream.
#[derive(Clone, Copy, Debug)]
pub enum StreamNorm {
    /// RMS norm.
    Rms(NormOp),
    /// Layer norm, in encoders.
    Layer(LayerNormOp),
}

/// Where tensors come from: a container, or random numbers in tests.
pub trait TensorSource {
    /// Names and shapes `(n_out, n_in)` of everything there is; vectors have `n_out` 1.
    fn shapes(&self) -> Vec<(String, Vec<u64>)>;
    /// A tensor as a matrix. What is not stored as it will be used is made in `scratch`.
    fn matrix<'a>(
        &'a self,
        name: &str,
        scratch: &'a mut Vec<u8>,
    ) -> Result<TensorData<'a>, FormatError>;
    /// A tensor as f32 values.
    fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError>;
    /// An error that carries the source's name.
    fn invalid(&self, reason: String) -> FormatError;
}

impl TensorSource for ModelFile {
    fn shapes(&self) -> Vec<(String, Vec<u64>)> {
        self.tensors()
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor.dims.clone()))
            .collect()
    }
    fn matrix<'a>(
        &'a self,
        name: &str,
        scratch: &'a mut Vec<u8>,
    ) -> Result<TensorData<'a>, FormatError> {
        self.read(name, scratch)
    }
    fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        ModelFile::vector(self, name)
    }
    fn invalid(&self, reason: String) -> FormatError {
        ModelFile::invalid(self, reason)
    }
}

/// A file whose float matrices are converted while they are read.
pub struct Requantized<'f> {
    /// The file.
    pub file: &'f ModelFile,
    /// See [`super::requantize::target`].
    pub wanted: DType,
}

impl TensorSource for Requantized<'_> {
    fn shapes(&self) -> Vec<(String, Vec<u64>)> {
        TensorSource::shapes(self.file)
    }
    fn matrix<'a>(
        &'a self,
        name: &str,
        scratch: &'a mut Vec<u8>,
    ) -> Result<TensorData<'a>, FormatError> {
        let info = self.file.tensor(name);
        let changed = info.and_then(|info| {
            let dtype = requantize::at_load(name, &info.dims, info.dtype, self.wanted)?;
            Some((info, dtype))
        });
        let Some((info, dtype)) = changed else {
            return self.file.read(name, scratch);
        };
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut floats = Vec::new();
        let stored = self.file.read(name, &mut floats)?;
        let (n_out, n_in) = (stored.n_out, stored.n_in);
        *scratch = quantize_matrix(&stored, dtype, n_threads);
        Ok(TensorData {
            name: &info.name,
            dtype,
            n_out,
            n_in,
            bytes: scratch,
        })
    }
    fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        self.file.vector(name)
    }
    fn invalid(&self, reason: String) -> FormatError {
        self.file.invalid(reason)
    }
}

/// One line of the names table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRule {
    /// Name in the file.
    pub name: String,
    /// In the file's order: `[n_in, n_out]` for a matrix, `[length]` for a vector.
    pub dims: Vec<u64>,
    /// Whether a model without it is broken.
    pub required: bool,
}

/// Every tensor a model of this spec may have.
#[must_use]
pub fn tensor_rules(spec: &ModelSpec) -> Vec<TensorRule> {
    if let Some(encoder) = &spec.encoder {
        return encoder::rules(spec, encoder);
    }
    let [d_model, d_ff, vocab, head_dim] =
        [spec.d_model, spec.d_ff, spec.vocab_size, spec.head_dim].map(u64::from);
    let d_q = u64::from(spec.n_heads) * head_dim;
    let d_kv = u64::from(spec.n_kv_heads) * head_dim;
    let mut rules = Vec::new();
    let mut rule = |name: String, dims: &[u64], required: bool| {
        rules.push(TensorRule {
            name,
            dims: dims.to_vec(),
            required,
        });
    };
    rule("token_embd.weight".into(), &[d_model, vocab], true);
    rule("output_norm.weight".into(), &[d_model], true);
    rule("output.weight".into(), &[d_model, vocab], false);
    rule("output.bias".into(), &[vocab], false);
    let n_pairs = u64::from(spec.rope.n_rotated / 2);
    rule("rope_freqs.weight".into(), &[n_pairs], false);
    for stem in spec.loops.own_norms() {
        rule(format!("{stem}.weight"), &[d_model], true);
    }
    if spec.loops.injection.is_some() {
        rule("loop_state.weight".into(), &[d_model, d_model], true);
        rule("loop_input.weight".into(), &[d_model, d_model], true);
        rule("loop_input.bias".into(), &[d_model], false);
    }
    rule("exit_gate.weight".into(), &[d_model], false);
    rule("exit_gate.bias".into(), &[1], false);
    for block in 0..spec.n_layers {
        let name = |suffix: &str| format!("blk.{block}.{suffix}");
        rule(name("attn_norm.weight"), &[d_model], true);
        rule(name("attn_q.weight"), &[d_model, d_q], true);
        rule(name("attn_k.weight"), &[d_model, d_kv], true);
        rule(name("attn_v.weight"), &[d_model, d_kv], true);
        rule(name("attn_q.bias"), &[d_q], spec.needs_qkv_bias);
        rule(name("attn_k.bias"), &[d_kv], spec.needs_qkv_bias);
        rule(name("attn_v.bias"), &[d_kv], spec.needs_qkv_bias);
        if spec.has_qk_norm {
            rule(name("attn_q_norm.weight"), &[head_dim], true);
            rule(name("attn_k_norm.weight"), &[head_dim], true);
        }
        rule(name("attn_output.weight"), &[d_q, d_model], true);
        rule(name("attn_output.bias"), &[d_model], false);
        let norm = format!("{}.weight", spec.feed_forward_norm);
        rule(name(&norm), &[d_model], true);
        if spec.residual_norms != ResidualNorms::None {
            rule(name("post_attention_norm.weight"), &[d_model], true);
            rule(name("post_ffw_norm.weight"), &[d_model], true);
        }
        rule(name("ffn_gate.weight"), &[d_model, d_ff], true);
        rule(name("ffn_up.weight"), &[d_model, d_ff], true);
        rule(name("ffn_down.weight"), &[d_ff, d_model], true);
        rule(name("ffn_gate.bias"), &[d_ff], false);
        rule(name("ffn_up.bias"), &[d_ff], false);
        rule(name("ffn_down.bias"), &[d_model], false);
    }
    rules
}

/// Checks every tensor against the rules: presence, shape, nothing left over.
fn check(spec: &ModelSpec, source: &dyn TensorSource) -> Result<(), ModelError> {
    use std::collections::HashMap;
    let mut found: HashMap<String, Vec<u64>> = source.shapes().into_iter().collect();
    let mut missing = Vec::new();
    for rule in tensor_rules(spec) {
        match found.remove(&rule.name) {
            Some(dims) if dims == rule.dims => {}
            Some(dims) => {
                let reason = format!(
                    "tensor {} has shape {dims:?}; by the metadata it should be {:?}",
                    rule.name, rule.dims
                );
                return Err(source.invalid(reason).into());
            }
            None if rule.required => missing.push(rule.name),
            None => {}
        }
    }
    if !missing.is_empty() {
        let reason = format!("{} missing", listed(&missing));
        return Err(source.invalid(reason).into());
    }
    let mut unknown: Vec<String> = found.into_keys().filter(|name| !is_inert(name)).collect();
    unknown.sort();
    if !unknown.is_empty() {
        return Err(ModelError::Unsupported(format!(
            "{} no part in architecture {}: the model computes something that is not supported",
            listed(&unknown)
                .replace(" is", " has")
                .replace(" are", " have"),
            spec.architecture
        )));
    }
    Ok(())
}

/// Tensors that old converters wrote and nothing reads.
fn is_inert(name: &str) -> bool {
    name.ends_with(".attn_rot_embd") || name.ends_with(".rotary_emb.inv_freq")
}

/// `tensor a is`, or `tensors a, b, c and 5 more are`.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 4;
    match names {
        [one] => format!("tensor {one} is"),
        few if few.len() <= SHOWN => format!("tensors {} are", few.join(", ")),
        many => {
            let shown = many[..SHOWN].join(", ");
            format!("tensors {shown} and {} more are", many.len() - SHOWN)
        }
    }
}

impl ModelWeights {
    /// Checks all tensors, then hands each to the backend once.
    pub fn load(
        spec: &ModelSpec,
        plan: &Plan,
        source: &dyn TensorSource,
        backend: &mut dyn Backend,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        check(spec, source)?;
        let mut loader = Loader {
            present: source.shapes().into_iter().map(|(name, _)| name).collect(),
            bytes_done: 0,
            scratch: Vec::new(),
            spec,
            source,
            backend,
            progress,
        };
        if let Some(encoder) = &spec.encoder {
            return loader.encoder(plan, encoder);
        }
        let table = loader.matrix("token_embd.weight")?;
        let output = if spec.tied_embeddings {
            table
        } else {
            loader.matrix("output.weight")?
        };
        let final_norm = loader.vector("output_norm.weight")?;
        let loops = loader.loops(plan, final_norm)?;
        let logits = LogitsOp {
            norm: (!spec.loops.norm_is_final()).then_some(final_norm),
            epsilon: spec.epsilon,
            output: Linear {
                weight: output,
                bias: loader.optional_vector("output.bias")?,
            },
        };
        let rope = loader.rope()?;
        let blocks = (0..spec.n_layers)
            .map(|block| loader.block(plan, block, rope))
            .collect::<Result<_, _>>()?;
        let exit_gate = loader.exit_gate()?;
        let scale = spec.embedding_scale;
        Ok(Self {
            exit_gate,
            embedding: EmbedOp {
                table,
                scale,
                positions: None,
                constant: None,
                norm: None,
            },
            blocks,
            loops,
            logits: Some(logits),
        })
    }
}

/// The state of one load.
struct Loader<'a> {
    spec: &'a ModelSpec,
    source: &'a dyn TensorSource,
    backend: &'a mut dyn Backend,
    progress: Progress<'a>,
    present: std::collections::HashSet<String>,
    bytes_done: u64,
    /// Where tensors are made that are not stored as they are used.
    scratch: Vec<u8>,
}

impl Loader<'_> {
    fn exit_gate(&mut self) -> Result<Option<ExitGate>, ModelError> {
        let (weight, bias) = ("exit_gate.weight", "exit_gate.bias");
        let Some(weight) = self.optional_vector(weight)? else {
            return Ok(None);
        };
        let bias = match self.present.contains(bias) {
            true => self.source.vector(bias)?.first().copied(),
            false => None,
        };
        Ok(Some(ExitGate {
            weight,
            bias: bias.unwrap_or(0.0),
        }))
    }

    /// `final_norm` is shared where the spec says so; a norm of a segment without blocks has no
    /// place to run and no tensor.
    fn loops(&mut self, plan: &Plan, final_norm: VectorId) -> Result<LoopOps, ModelError> {
        let spec = self.spec;
        let has_blocks = |segment| !plan.blocks(segment).is_empty();
        let mut norm = |stem: &Option<String>, segment| -> Result<Option<NormOp>, ModelError> {
            let norm = match stem.as_deref() {
                None => return Ok(None),
                Some(_) if !has_blocks(segment) => {
                    return Err(ModelError::Unsupported(format!(
                        "a norm around a {segment:?} without blocks is not supported"
                    )));
                }
                Some(FINAL_NORM) => final_norm,
                Some(stem) => self.vector(&format!("{stem}.weight"))?,
            };
            let epsilon = spec.epsilon;
            Ok(Some(NormOp { norm, epsilon }))
        };
        let mut loops = LoopOps {
            input_norm: norm(&spec.loops.input_norm, Segment::Prelude)?,
            norm: norm(&spec.loops.norm, Segment::Core)?,
            output_norm: norm(&spec.loops.output_norm, Segment::Coda)?,
            ..LoopOps::default()
        };
        if let Some(state) = spec.loops.injection {
            let input = self.linear("loop_input")?;
            loops.start = Some(StartLoopsOp { input, state });
            let state = self.linear("loop_state")?;
            loops.inject = Some(InjectOp { state });
        }
        Ok(loops)
    }

    fn block(&mut self, plan: &Plan, block: u32, rope: RopeId) -> Result<Block, ModelError> {
        let spec = self.spec;
        let name = |suffix: &str| format!("blk.{block}.{suffix}");
        let segment = plan.segment_of(block);
        let kv = plan.kv_place(segment, block - plan.blocks(segment).start);
        let epsilon = spec.epsilon;
        let (q_norm, k_norm) = (name("attn_q_norm.weight"), name("attn_k_norm.weight"));
        let mut second = |suffix: &str, wanted: ResidualNorms| match spec.residual_norms == wanted {
            true => self.vector(&name(suffix)).map(Some),
            false => Ok(None),
        };
        let (attention, network) = ("post_attention_norm.weight", "post_ffw_norm.weight");
        let attention_inside = second(attention, ResidualNorms::Inside)?;
        let network_inside = second(network, ResidualNorms::Inside)?;
        let norm_op = |norm| StreamNorm::Rms(NormOp { norm, epsilon });
        let attention_norm = second(attention, ResidualNorms::After)?.map(norm_op);
        let feed_forward_norm = second(network, ResidualNorms::After)?.map(norm_op);
        Ok(Block {
            attention_norm,
            feed_forward_norm,
            qkv: QkvOp {
                norm: Some(self.vector(&name("attn_norm.weight"))?),
                epsilon,
                q: self.linear(&name("attn_q"))?,
                k: self.linear(&name("attn_k"))?,
                v: self.linear(&name("attn_v"))?,
                q_norm: self.optional_vector(&q_norm)?,
                k_norm: self.optional_vector(&k_norm)?,
                rope: spec.rotates(block).then_some(rope),
                kv,
            },
            attend: AttendOp {
                kv,
                scale: spec.attention_scale,
                window: spec.window,
                is_bidirectional: false,
            },
            attention_output: AttentionOutputOp {
                output: self.linear(&name("attn_output"))?,
                post_norm: attention_inside,
                epsilon,
            },
            feed_forward: FeedForwardOp {
                norm: Some(self.vector(&name(&format!("{}.weight", spec.feed_forward_norm)))?),
                epsilon,
                gate: Some(self.linear(&name("ffn_gate"))?),
                up: self.linear(&name("ffn_up"))?,
                down: self.linear(&name("ffn_down"))?,
                post_norm: network_inside,
            },
        })
    }

    fn rope(&mut self) -> Result<RopeId, ModelError> {
        let name = "rope_freqs.weight";
        let factors = if self.present.contains(name) {
            let values = self.source.vector(name)?;
            self.advance(4 * values.len() as u64);
            Some(values)
        } else {
            None
        };
        if factors
            .iter()
            .flatten()
            .any(|factor| factor.is_nan() || *factor <= 0.0)
        {
            let reason = format!("tensor {name} holds a factor that is not positive");
            return Err(self.source.invalid(reason).into());
        }
        let table = self.spec.rope.table(factors.as_deref());
        Ok(self.backend.load_rope(&table)?)
    }

    fn linear(&mut self, stem: &str) -> Result<Linear, ModelError> {
        Ok(Linear {
            weight: self.matrix(&format!("{stem}.weight"))?,
            bias: self.optional_vector(&format!("{stem}.bias"))?,
        })
    }

    fn matrix(&mut self, name: &str) -> Result<MatrixId, ModelError> {
        let tensor = self.source.matrix(name, &mut self.scratch)?;
        let n_bytes = tensor.bytes.len() as u64;
        let id = self.backend.load_matrix(&tensor)?;
        self.advance(n_bytes);
        Ok(id)
    }

    fn vector(&mut self, name: &str) -> Result<VectorId, ModelError> {
        let values = self.source.vector(name)?;
        self.advance(4 * values.len() as u64);
        Ok(self.backend.load_vector(&values)?)
    }

    fn optional_vector(&mut self, name: &str) -> Result<Option<VectorId>, ModelError> {
        if self.present.contains(name) {
            self.vector(name).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Reports progress. Small vectors may be stored in another type than f32, so the sum is
    /// clamped to the total.
    fn advance(&mut self, bytes: u64) {
        let total = self.spec.weight_bytes;
        self.bytes_done = (self.bytes_done + bytes).min(total);
        (self.progress)(self.bytes_done, total);
    }
}
