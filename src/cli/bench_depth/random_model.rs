//! A looped model of about 70 million random parameters, made in memory: large enough that its
//! weights don't fit a cache, so that what batching saves is what it saves on real models.
//!
//! Q8_0 in the looped-llama layout, the same on every machine. It talks nonsense; only its speed and
//! whether results agree matter. What is not here: small models for tests (`model::testing`).

use crate::backend::{Backend, StateInit, TensorData};
use crate::dtype::DType;
use crate::error::Error;
use crate::format::FormatError;
use crate::model::loop_spec::LoopSpec;
use crate::model::testing::{TinyShape, tiny_spec};
use crate::model::weights::{ModelWeights, TensorSource, tensor_rules};
use crate::model::{Model, ModelSpec};
use half::f16;
use std::collections::BTreeMap;

/// Its context in tokens.
pub(super) const CONTEXT_LENGTH: u32 = 4096;
/// Weights and bytes of a Q8_0 block.
const BLOCK_WEIGHTS: usize = 32;
const BLOCK_BYTES: usize = 2 + BLOCK_WEIGHTS;

/// 2 + 6 x L + 2 blocks of width 768.
fn spec(max_loops: u32) -> ModelSpec {
    let loops = LoopSpec {
        prelude: 2,
        coda: 2,
        default_loops: max_loops, // the depth at which KV is counted
        max_loops,
        injection: Some(StateInit::Input),
        norm: Some("loop_norm".to_owned()),
        ..LoopSpec::default()
    };
    let n_layers = 10;
    let tiny = tiny_spec(&TinyShape {
        plan: loops.plan(n_layers),
        vocab_size: 8192,
        context_length: CONTEXT_LENGTH,
    });
    let mut spec = ModelSpec {
        name: "random 70M".to_owned(),
        d_model: 768,
        d_ff: 2048,
        n_layers,
        n_heads: 12,
        n_kv_heads: 4,
        head_dim: 64,
        attention_scale: 0.125,
        loops,
        ..tiny
    };
    spec.rope.n_rotated = spec.head_dim;
    spec
}

/// Makes it.
pub(super) fn load(backend: &mut dyn Backend, max_loops: u32) -> Result<Model, Error> {
    let spec = spec(max_loops);
    let plan = spec.loops.plan(spec.n_layers);
    let required = tensor_rules(&spec).into_iter().filter(|rule| rule.required);
    let source = RandomWeights {
        dims: required.map(|rule| (rule.name, rule.dims)).collect(),
    };
    let weights = ModelWeights::load(&spec, &plan, &source, backend, &mut |_, _| {})
        .map_err(|error| Error::other("the random model", error))?;
    Ok(Model {
        spec,
        plan,
        weights,
    })
}

/// Random tensors by name; matrices in Q8_0, vectors of ones.
struct RandomWeights {
    /// In the file's order.
    dims: BTreeMap<String, Vec<u64>>,
}

impl RandomWeights {
    fn find(&self, name: &str) -> Result<(&str, &[u64]), FormatError> {
        let found = self.dims.get_key_value(name);
        found
            .map(|(name, dims)| (name.as_str(), dims.as_slice()))
            .ok_or_else(|| self.invalid(format!("tensor {name} is missing")))
    }
}

impl TensorSource for RandomWeights {
    fn shapes(&self) -> Vec<(String, Vec<u64>)> {
        let all = self.dims.iter();
        all.map(|(name, dims)| (name.clone(), dims.clone()))
            .collect()
    }

    fn matrix<'a>(
        &'a self,
        name: &str,
        scratch: &'a mut Vec<u8>,
    ) -> Result<TensorData<'a>, FormatError> {
        let (name, dims) = self.find(name)?;
        let (n_in, n_out) = (dims[0] as usize, dims[1] as usize);
        // Uniform bytes have a deviation of 74; together they shall have one of 1 / sqrt(n_in).
        let scale = f16::from_f32(1.0 / (74.0 * (n_in as f32).sqrt())).to_le_bytes();
        // FNV-1a over the name, so that tensors don't share their numbers.
        let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        scratch.clear();
        scratch.reserve(n_out * n_in / BLOCK_WEIGHTS * BLOCK_BYTES);
        for _ in 0..n_out * n_in / BLOCK_WEIGHTS {
            scratch.extend(scale);
            for _ in 0..BLOCK_WEIGHTS / 8 {
                state ^= state << 13; // xorshift
                state ^= state >> 7;
                state ^= state << 17;
                // -128 has no partner and some kernels no room for it.
                let bytes = state.to_le_bytes();
                scratch.extend(bytes.map(|byte| if byte == 0x80 { 0 } else { byte }));
            }
        }
        Ok(TensorData {
            name,
            dtype: DType::Q8_0,
            n_out,
            n_in,
            bytes: scratch,
        })
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        let (_, dims) = self.find(name)?;
        Ok(vec![1.0; dims[0] as usize])
    }

    fn invalid(&self, reason: String) -> FormatError {
        FormatError::Invalid {
            path: "the random model".to_owned(),
            reason,
        }
    }
}
