//! What a model file will hold in memory, from its header and the configuration.
//!
//! Pure reading: opens the file, looks at names, shapes and types, reads no weights. Within a few
//! percent of what the backend allocates; the load replaces it by the measured number. What is not
//! here: the decision (`ledger`), models that other programs run (`estimate_foreign`).

use super::ledger::{DeviceId, MemorySource, ModelMemory};
use super::sizes::{Estimate, SizeShape};
use crate::backend::PAGE_TOKENS;
use crate::config::EngineConfig;
use crate::dtype::DType;
use crate::engine::EngineLimits;
use crate::format::ModelFile;
use crate::model::{self, ModelSpec, requantize};
use std::path::Path;

/// Of one replica on the built-in engine.
///
/// # Errors
/// Why the file or the configuration is no good; the load will say the same.
pub fn of_file(path: &Path, config: &EngineConfig) -> Result<Estimate, String> {
    let file = model::open(path).map_err(|error| error.to_string())?;
    let mut spec = ModelSpec::from_gguf(&file).map_err(|error| error.to_string())?;
    spec.loops
        .configure(&config.loops, spec.n_layers)
        .map_err(|error| error.to_string())?;
    let plan = spec.plan();
    let limits = EngineLimits::new(config, &spec, &plan).map_err(|error| error.to_string())?;
    let wanted = config.quantize.map(requantize::dtype_of);
    let shape = size_shape(&spec);
    // f16 keys and values; those of values are filled up to whole vectors.
    let head_len = u64::from(spec.head_dim) + u64::from(spec.head_dim.next_multiple_of(16));
    let page_len = (PAGE_TOKENS * plan.layers_per_page()) as u64 * head_len;
    let page_bytes = 2 * page_len * u64::from(spec.n_kv_heads);
    Ok(Estimate {
        memory: ModelMemory {
            device: DeviceId::Cpu,
            weight_bytes: weight_bytes(&file, wanted),
            kv_bytes: u64::from(limits.n_pages) * page_bytes,
            scratch_bytes: scratch_bytes(&shape, &limits) + thread_bytes(&spec),
            source: MemorySource::ArtifactSize,
        },
        kv_bytes_per_token: (page_bytes * plan.kv_groups(plan.default_loops) as u64)
            / PAGE_TOKENS as u64,
        trained_context: Some(spec.context_length),
        kv_tokens_max: Some(kv_tokens_max(plan.kv_groups(plan.default_loops))),
        shape,
    })
}

/// What can be counted in pages of so many groups.
fn kv_tokens_max(n_groups: usize) -> u64 {
    u64::from(u32::MAX) / (n_groups as u64).max(1) * PAGE_TOKENS as u64
}

/// Why this configuration of a file cannot be loaded, as far as that shows before.
#[must_use]
pub fn fault_of_file(path: &Path, config: &EngineConfig) -> Option<String> {
    of_file(path, config).err()
}

/// As stored, or as converted at load.
fn weight_bytes(file: &ModelFile, wanted: Option<DType>) -> u64 {
    let bytes = file.tensors().iter().map(|tensor| {
        let is_float = matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16);
        let target = wanted.filter(|_| is_float).and_then(|wanted| {
            requantize::target(&tensor.name, &tensor.dims, tensor.dtype, wanted)
        });
        let n_elements = tensor
            .dims
            .iter()
            .fold(1_u64, |n, dim| n.saturating_mul(*dim));
        target
            .and_then(|dtype| dtype.bytes_for(n_elements))
            .unwrap_or_else(|| tensor.n_bytes())
    });
    bytes.fold(0, u64::saturating_add)
}

/// The buffers that grow with the rows of a pass, and logits.
fn scratch_bytes(shape: &SizeShape, limits: &EngineLimits) -> u64 {
    let logit_rows = u64::from(limits.max_sequences.min(limits.max_rows));
    u64::from(limits.max_rows) * shape.row_bytes
        + logit_rows * shape.sequence_bytes
        + u64::from(limits.context_length) * shape.context_bytes
}

/// At most what the threads of the CPU work in: tiles, columns of attention, rows of their own.
fn thread_bytes(spec: &ModelSpec) -> u64 {
    let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let heads = u64::from(spec.n_heads) * u64::from(spec.head_dim);
    let widest = heads.max(spec.d_model.into());
    n_threads * ((192 << 10) + 32 * widest + 512 * u64::from(spec.head_dim))
}

fn size_shape(spec: &ModelSpec) -> SizeShape {
    let f32_bytes = 4;
    let d_model = u64::from(spec.d_model);
    let heads = u64::from(spec.n_heads) * u64::from(spec.head_dim);
    // Hidden state, branch, input and its quantized form; queries and attention; the gated network.
    let per_row = 4 * d_model + 2 * heads + 2 * u64::from(spec.d_ff);
    // What is injected at every loop, and states before a loop that may be the last.
    let looped = match spec.plan().max_loops {
        0 | 1 => 0,
        _ => 2 * d_model,
    };
    // Attention of few rows in splits of 256 positions, which await merging.
    let split = 8 * u64::from(spec.n_heads) * (u64::from(spec.head_dim) + 18);
    SizeShape {
        row_bytes: f32_bytes * (per_row + looped),
        sequence_bytes: f32_bytes * u64::from(spec.vocab_size),
        context_bytes: (f32_bytes * split).div_ceil(256),
        rows_follow_context: spec.encoder.is_some(),
    }
}
