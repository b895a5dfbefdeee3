//! Names and loading of an encoder's tensors.
//!
//! As the parent: runs once, on the thread that loads. A block of an encoder ends each of its halves with
//! a layer norm of the sum, so that its operations take the residual stream as it is.

use super::{Block, Loader, LoopOps, ModelWeights, StreamNorm, TensorRule};
use crate::backend::{
    AttendOp, AttentionOutputOp, EmbedOp, FeedForwardOp, LayerNormOp, Linear, MatrixId, QkvOp,
    RopeId, TensorData, VectorId,
};
use crate::model::ModelError;
use crate::model::plan::Plan;
use crate::model::spec::{EncoderSpec, ModelSpec};

/// Every tensor an encoder of this spec may have.
pub(super) fn rules(spec: &ModelSpec, encoder: &EncoderSpec) -> Vec<TensorRule> {
    let [d_model, d_ff, vocab] = [spec.d_model, spec.d_ff, spec.vocab_size].map(u64::from);
    let d_heads = u64::from(spec.n_heads) * u64::from(spec.head_dim);
    let mut rules = Vec::new();
    let mut rule = |name: String, dims: &[u64], required: bool| {
        rules.push(TensorRule {
            name,
            dims: dims.to_vec(),
            required,
        });
    };
    rule("token_embd.weight".into(), &[d_model, vocab], true);
    if encoder.n_token_types > 0 {
        let n_types = u64::from(encoder.n_token_types);
        rule("token_types.weight".into(), &[d_model, n_types], true);
    }
    if encoder.kind.learns_positions {
        let n_positions = u64::from(encoder.n_positions);
        rule("position_embd.weight".into(), &[d_model, n_positions], true);
    }
    rule("token_embd_norm.weight".into(), &[d_model], true);
    rule("token_embd_norm.bias".into(), &[d_model], false);
    for block in 0..spec.n_layers {
        let mut linear = |suffix: &str, n_in: u64, n_out: u64| {
            rule(format!("blk.{block}.{suffix}.weight"), &[n_in, n_out], true);
            rule(format!("blk.{block}.{suffix}.bias"), &[n_out], false);
        };
        if encoder.kind.fuses_qkv {
            linear("attn_qkv", d_model, 3 * d_heads);
        } else {
            linear("attn_q", d_model, d_heads);
            linear("attn_k", d_model, d_heads);
            linear("attn_v", d_model, d_heads);
        }
        linear("attn_output", d_heads, d_model);
        linear("ffn_up", d_model, d_ff);
        linear("ffn_down", d_ff, d_model);
        if encoder.kind.is_gated {
            linear("ffn_gate", d_model, d_ff);
        }
        for norm in ["attn_output_norm", "layer_output_norm"] {
            rule(format!("blk.{block}.{norm}.weight"), &[d_model], true);
            rule(format!("blk.{block}.{norm}.bias"), &[d_model], false);
        }
    }
    rules
}

impl Loader<'_> {
    /// All of an encoder. The tokens of a text are of type 0.
    pub(super) fn encoder(
        &mut self,
        plan: &Plan,
        encoder: &EncoderSpec,
    ) -> Result<ModelWeights, ModelError> {
        let spec = self.spec;
        let embedding = EmbedOp {
            table: self.matrix("token_embd.weight")?,
            scale: spec.embedding_scale,
            positions: match encoder.kind.learns_positions {
                true => Some(self.matrix("position_embd.weight")?),
                false => None,
            },
            constant: match encoder.n_token_types {
                0 => None,
                _ => Some(self.first_row("token_types.weight")?),
            },
            norm: Some(self.layer_norm("token_embd_norm")?),
        };
        let rope = match encoder.kind.learns_positions {
            true => None,
            false => Some(self.rope()?),
        };
        let blocks = (0..spec.n_layers)
            .map(|block| self.encoder_block(plan, block, encoder, rope))
            .collect::<Result<_, _>>()?;
        Ok(ModelWeights {
            embedding,
            blocks,
            loops: LoopOps::default(),
            logits: None,
            exit_gate: None,
        })
    }

    fn encoder_block(
        &mut self,
        plan: &Plan,
        block: u32,
        encoder: &EncoderSpec,
        rope: Option<RopeId>,
    ) -> Result<Block, ModelError> {
        let name = |suffix: &str| format!("blk.{block}.{suffix}");
        let segment = plan.segment_of(block);
        let kv = plan.kv_place(segment, block - plan.blocks(segment).start);
        let epsilon = self.spec.epsilon;
        let [q, k, v] = match encoder.kind.fuses_qkv {
            true => self.thirds(&name("attn_qkv"))?,
            false => [
                self.linear(&name("attn_q"))?,
                self.linear(&name("attn_k"))?,
                self.linear(&name("attn_v"))?,
            ],
        };
        Ok(Block {
            qkv: QkvOp {
                norm: None,
                epsilon,
                q,
                k,
                v,
                q_norm: None,
                k_norm: None,
                rope,
                kv,
            },
            attend: AttendOp {
                kv,
                scale: self.spec.attention_scale,
                window: 0,
                is_bidirectional: true,
            },
            attention_output: AttentionOutputOp {
                output: self.linear(&name("attn_output"))?,
                post_norm: None,
                epsilon,
            },
            attention_norm: Some(StreamNorm::Layer(
                self.layer_norm(&name("attn_output_norm"))?,
            )),
            feed_forward: FeedForwardOp {
                norm: None,
                epsilon,
                gate: match encoder.kind.is_gated {
                    true => Some(self.linear(&name("ffn_gate"))?),
                    false => None,
                },
                up: self.linear(&name("ffn_up"))?,
                down: self.linear(&name("ffn_down"))?,
                post_norm: None,
            },
            feed_forward_norm: Some(StreamNorm::Layer(
                self.layer_norm(&name("layer_output_norm"))?,
            )),
        })
    }

    fn layer_norm(&mut self, stem: &str) -> Result<LayerNormOp, ModelError> {
        Ok(LayerNormOp {
            weight: self.vector(&format!("{stem}.weight"))?,
            bias: self.optional_vector(&format!("{stem}.bias"))?,
            epsilon: self.spec.epsilon,
        })
    }

    /// The first row of a small matrix, as a vector.
    fn first_row(&mut self, name: &str) -> Result<VectorId, ModelError> {
        let values = self.source.vector(name)?;
        self.advance(4 * values.len() as u64);
        let d_model = self.spec.d_model as usize;
        Ok(self.backend.load_vector(&values[..d_model])?)
    }

    /// The three projections of a tensor that holds their rows one after the other.
    fn thirds(&mut self, stem: &str) -> Result<[Linear; 3], ModelError> {
        let (weight, bias) = (format!("{stem}.weight"), format!("{stem}.bias"));
        let tensor = self.source.matrix(&weight, &mut self.scratch)?;
        let (n_rows, n_bytes) = (tensor.n_out / 3, tensor.bytes.len() / 3);
        let mut third = |idx: usize| -> Result<MatrixId, ModelError> {
            Ok(self.backend.load_matrix(&TensorData {
                n_out: n_rows,
                bytes: &tensor.bytes[idx * n_bytes..(idx + 1) * n_bytes],
                ..tensor
            })?)
        };
        let weights = [third(0)?, third(1)?, third(2)?];
        self.advance(3 * n_bytes as u64);
        let mut biases = [None; 3];
        if self.present.contains(&bias) {
            let values = self.source.vector(&bias)?;
            self.advance(4 * values.len() as u64);
            for (bias, values) in biases.iter_mut().zip(values.chunks_exact(n_rows)) {
                *bias = Some(self.backend.load_vector(values)?);
            }
        }
        Ok([0, 1, 2].map(|idx| Linear {
            weight: weights[idx],
            bias: biases[idx],
        }))
    }
}
