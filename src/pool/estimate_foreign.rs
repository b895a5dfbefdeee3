//! What a model that another program of ours runs will hold in memory, from its files and its flags.
//!
//! Pure reading. The program allocates as it likes, so this is an estimate only; once it runs, what its
//! processes hold is measured (`runtime::resident`). KV is counted for the context that is configured, or
//! that the program takes by itself, in the type that its flags name.
//!
//! Of a llama-server rather too much than too little: every slot's context is rounded up as it does that
//! (`SLOT_TOKENS`), and `scratch` is the sum of what its micro-batch (`LLAMA_BATCH`) and its slots need in
//! activations, masks and logits, of its vocabulary and of the program itself. Checked against what a real
//! one holds of the demo model after some prompts, with 1 to 256 slots of 256 to 16384 tokens: 1.06 to 1.23 times
//! as much, and 1.5 times with a micro-batch of 2048. What is not in it: what traffic adds (its cache of prompts
//! in main memory, `--cache-ram`),
//! drafts and projectors of images.
//!
//! What is not here: remote servers, whose memory is nobody's business.

use super::ledger::{DeviceId, MemorySource, ModelMemory};
use super::sizes::{Estimate, SizeShape};
use crate::config::{LlamaServerConfig, VllmServeConfig, flags};
use crate::format::{FormatError, ModelFile};
use serde_json::Value;
use std::path::Path;

/// A llama-server rounds the context of each slot up to a multiple of this.
pub(super) const SLOT_TOKENS: u64 = 256;
/// Tokens of its micro-batch, unless a flag says otherwise.
const LLAMA_BATCH: u64 = 512;
/// What it holds beside any model: code, threads, buffers of its HTTP server.
const LLAMA_PROGRAM_BYTES: u64 = 32 << 20;
/// Bytes of an entry of its vocabulary, with the maps in both directions and its merges.
const VOCABULARY_ENTRY_BYTES: u64 = 256;

/// Of one `llama-server`: its file, KV for all slots, and its buffers.
#[must_use]
pub fn of_llama_server(child: &LlamaServerConfig) -> Estimate {
    let child = &child.settled();
    let file_bytes = std::fs::metadata(&child.file).map(|found| found.len());
    let shape = ModelFile::open_gguf(&child.file).and_then(|file| KvShape::of_gguf(&file));
    let shape = shape.unwrap_or_default();
    let args = &child.process.extra_args;
    let kv_bytes_per_token = shape.keys * cache_bits(args, &["-ctk", "--cache-type-k"]) / 8
        + shape.values * cache_bits(args, &["-ctv", "--cache-type-v"]) / 8;
    // 0 stands for the model's own, which is also what it takes when it is not told.
    let told = child.ctx_size.filter(|n_tokens| *n_tokens > 0);
    let context = told.or(shape.context_length).unwrap_or(0);
    let slots = u64::from(child.slots_usual());
    let held = slots_context(context.into(), slots);
    let batch = flags::value(args, &["-ub", "--ubatch-size"]).and_then(|text| text.parse().ok());
    let sizes = shape.sizes(batch.unwrap_or(LLAMA_BATCH));
    let scratch_bytes = match file_bytes {
        Ok(_) => [
            sizes.row_bytes,
            sizes.sequence_bytes.saturating_mul(slots),
            sizes.context_bytes.saturating_mul(held),
        ]
        .into_iter()
        .fold(LLAMA_PROGRAM_BYTES, u64::saturating_add),
        Err(_) => 0,
    };
    Estimate {
        memory: ModelMemory {
            weight_bytes: file_bytes.as_ref().copied().unwrap_or(0),
            kv_bytes: kv_bytes_per_token.saturating_mul(held),
            scratch_bytes,
            source: match file_bytes {
                Ok(_) => MemorySource::ArtifactSize,
                Err(_) => MemorySource::Unavailable,
            },
            ..ModelMemory::default()
        },
        kv_bytes_per_token,
        trained_context: shape.context_length,
        kv_tokens_max: None,
        shape: sizes,
    }
}

/// Tokens that all slots hold together where they were asked to hold `context`.
pub(super) fn slots_context(context: u64, slots: u64) -> u64 {
    let slots = slots.max(1);
    let each = context.div_ceil(slots).div_ceil(SLOT_TOKENS);
    each.saturating_mul(SLOT_TOKENS).saturating_mul(slots)
}

/// Of one `vllm serve`, on the first of its GPUs; on a machine without one it runs on the CPU. Weights
/// are known where the model is a folder here, KV where its size is configured.
#[must_use]
pub fn of_vllm_serve(child: &VllmServeConfig) -> Estimate {
    let child = &child.settled();
    let folder = Path::new(&child.model);
    let weight_bytes = folder_weights(folder) / u64::from(child.gpus().max(1));
    let kv_bytes = child.kv_cache_memory_bytes.unwrap_or(0);
    let shape = std::fs::read(folder.join("config.json"));
    let shape = shape.ok().and_then(|text| KvShape::of_huggingface(&text));
    let shape = shape.unwrap_or_default();
    Estimate {
        memory: ModelMemory {
            device: vllm_device(),
            weight_bytes,
            kv_bytes,
            source: match weight_bytes.saturating_add(kv_bytes) {
                0 => MemorySource::Unavailable,
                _ => MemorySource::ArtifactSize,
            },
            ..ModelMemory::default()
        },
        kv_bytes_per_token: (shape.keys + shape.values) * 2, // 16 bits each
        trained_context: shape.context_length,
        ..Estimate::default()
    }
}

fn vllm_device() -> DeviceId {
    match Path::new("/proc/driver/nvidia/version").exists() {
        true => DeviceId::Cuda(0),
        false => DeviceId::Cpu,
    }
}

fn folder_weights(folder: &Path) -> u64 {
    let Ok(files) = std::fs::read_dir(folder) else {
        return 0;
    };
    let is_weights = |path: &Path| {
        let extension = path.extension().unwrap_or_default();
        extension == "safetensors" || extension == "bin"
    };
    let files = files.flatten().filter(|file| is_weights(&file.path()));
    // Links are followed: model folders of the hub are full of them.
    let sizes = files.filter_map(|file| std::fs::metadata(file.path()).ok());
    sizes.map(|found| found.len()).fold(0, u64::saturating_add)
}

/// Numbers kept per token over all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KvShape {
    keys: u64,
    values: u64,
    context_length: Option<u32>,
    /// The rest is what buffers need; 0 where it is not known.
    d_model: u64,
    d_ff: u64,
    n_vocabulary: u64,
}

impl KvShape {
    /// What the buffers of a llama-server grow with; rows are those of its micro-batch, all together, with
    /// its vocabulary.
    fn sizes(&self, batch: u64) -> SizeShape {
        if *self == Self::default() {
            return SizeShape::default();
        }
        let f32_bytes = 4;
        // Hidden state, branch and its input; queries, keys, values, attention; the gated network.
        let per_row = (self.d_model.saturating_mul(8)).saturating_add(self.d_ff.saturating_mul(3));
        let rows_bytes = per_row.saturating_mul(f32_bytes).saturating_mul(batch);
        let vocabulary_bytes = self.n_vocabulary.saturating_mul(VOCABULARY_ENTRY_BYTES);
        SizeShape {
            row_bytes: rows_bytes.saturating_add(vocabulary_bytes),
            // Each slot has a row of logits, in the graph and where they are read.
            sequence_bytes: self.n_vocabulary.saturating_mul(2 * f32_bytes),
            // Of the mask, a row of the batch for each token of all slots, once in f32 and once in f16.
            // Where slots do not share their context it needs less: one column per token of a slot.
            context_bytes: batch.saturating_mul(6),
            rows_follow_context: false,
        }
    }

    fn of_gguf(file: &ModelFile) -> Result<Self, FormatError> {
        let architecture = file.str("general.architecture")?;
        let key = |name: &str| format!("{architecture}.{name}");
        let n_layers = u64::from(file.u32(&key("block_count"))?);
        let d_model = file.u32(&key("embedding_length"))?;
        // One number, or one per layer.
        let per_layer = |name: &str| -> Option<Vec<u64>> {
            let all = file.optional_ints(&key(name)).ok().flatten();
            let all = all.map(|all| all.iter().map(|n| u64::try_from(*n).unwrap_or(0)).collect());
            all.or_else(|| {
                let one = file.optional_u32(&key(name)).ok().flatten()?;
                Some(vec![u64::from(one); n_layers as usize])
            })
        };
        let heads = per_layer("attention.head_count").unwrap_or_default();
        let n_heads = heads.iter().copied().max().unwrap_or(1).max(1);
        let kv_heads = per_layer("attention.head_count_kv").unwrap_or(heads);
        let kv_heads = kv_heads.iter().fold(0_u64, |all, n| all.saturating_add(*n));
        let usual = u64::from(d_model) / n_heads;
        let length = |name: &str| {
            let told = file.optional_u32(&key(name)).ok().flatten();
            told.map_or(usual, u64::from)
        };
        Ok(Self {
            keys: kv_heads.saturating_mul(length("attention.key_length")),
            values: kv_heads.saturating_mul(length("attention.value_length")),
            context_length: file.optional_u32(&key("context_length"))?,
            d_model: u64::from(d_model),
            d_ff: per_layer("feed_forward_length")
                .and_then(|all| all.into_iter().max())
                .unwrap_or(0),
            n_vocabulary: n_vocabulary(file),
        })
    }

    /// From the text of a `config.json`.
    fn of_huggingface(text: &[u8]) -> Option<Self> {
        let config: Value = serde_json::from_slice(text).ok()?;
        let number = |name: &str| config[name].as_u64().filter(|n| *n <= u64::from(u32::MAX));
        let n_heads = number("num_attention_heads")?;
        let kv_heads = number("num_key_value_heads").unwrap_or(n_heads);
        let usual = number("hidden_size")? / n_heads.max(1);
        let d_head = number("head_dim").unwrap_or(usual);
        let each = number("num_hidden_layers")?.saturating_mul(kv_heads.saturating_mul(d_head));
        Some(Self {
            keys: each,
            values: each,
            context_length: number("max_position_embeddings").map(|n| n as u32),
            ..Self::default()
        })
    }
}

/// The longer side of the token embeddings.
fn n_vocabulary(file: &ModelFile) -> u64 {
    let mut tensors = file.tensors().iter();
    let embeddings = tensors.find(|tensor| tensor.name == "token_embd.weight");
    let longest = embeddings.and_then(|tensor| tensor.dims.iter().copied().max());
    longest.unwrap_or(0)
}

/// Bits of a number in llama-server's cache; whole 32nds of blocks with a scale are rounded up.
fn cache_bits(args: &[String], names: &[&str]) -> u64 {
    match flags::value(args, names).unwrap_or("f16") {
        "f32" => 32,
        "q8_0" => 9,
        "q5_0" | "q5_1" => 6,
        "q4_0" | "q4_1" | "iq4_nl" => 5,
        _ => 16, // f16, bf16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ProcessConfig;

    fn llama(extra_args: &[&str]) -> LlamaServerConfig {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
        LlamaServerConfig {
            binary: "llama-server".into(),
            file,
            slots: None,
            ctx_size: Some(1000),
            embeddings: Default::default(),
            process: ProcessConfig {
                extra_args: extra_args.iter().map(ToString::to_string).collect(),
                ..ProcessConfig::default()
            },
            limits: Default::default(),
        }
    }

    #[test]
    fn a_llama_server_holds_its_file_and_kv_of_its_context() {
        let child = llama(&[]);
        let estimate = of_llama_server(&child);
        let file_bytes = std::fs::metadata(&child.file)
            .expect("it is committed")
            .len();
        let own = super::super::estimate::of_file(&child.file, &Default::default());
        let own = own.expect("it is a model of ours too");
        assert_eq!(estimate.kv_bytes_per_token, own.kv_bytes_per_token);
        assert_eq!(estimate.trained_context, own.trained_context);
        let memory = estimate.memory;
        assert_eq!(memory.weight_bytes, file_bytes);
        // Four slots of 250 tokens, each rounded up.
        assert_eq!(memory.kv_bytes, 4 * 256 * own.kv_bytes_per_token);
        assert!(memory.scratch_bytes > LLAMA_PROGRAM_BYTES, "{memory:?}");
        assert_eq!(memory.source, MemorySource::ArtifactSize);
        let smaller = of_llama_server(&llama(&["-ctk", "q8_0", "--cache-type-v=q4_0", "-c", "10"]));
        let expected = own.kv_bytes_per_token / 2 * 9 / 16 + own.kv_bytes_per_token / 2 * 5 / 16;
        assert_eq!(smaller.memory.kv_bytes, 4 * 256 * expected);
        let whole = of_llama_server(&LlamaServerConfig {
            ctx_size: None,
            ..llama(&[])
        });
        let trained = u64::from(own.trained_context.expect("a file says it"));
        let held = slots_context(trained, 4);
        assert_eq!(whole.memory.kv_bytes, held * own.kv_bytes_per_token);
        let missing = of_llama_server(&LlamaServerConfig {
            file: "/none".into(),
            ..llama(&[])
        });
        assert_eq!(missing, Estimate::default());
    }

    #[test]
    fn many_slots_hold_more_than_their_context_says() {
        // 256 slots of 32 tokens are 256 slots of 256.
        assert_eq!(slots_context(8192, 256), 65_536);
        assert_eq!(slots_context(8192, 4), 8192);
        assert_eq!(slots_context(257, 1), 512);
        assert_eq!(slots_context(0, 4), 0);
        let few = LlamaServerConfig {
            slots: Some(4),
            ..llama(&[])
        };
        let few = of_llama_server(&few).memory;
        let many = LlamaServerConfig {
            slots: Some(256),
            ..llama(&[])
        };
        let many = of_llama_server(&many).memory;
        assert_eq!(many.kv_bytes, few.kv_bytes * 64);
        assert!(many.scratch_bytes > few.scratch_bytes);
        let by_flag = of_llama_server(&llama(&["--parallel", "256"])).memory;
        assert_eq!(by_flag, many, "the last word is the flag's");
        let smaller = of_llama_server(&llama(&["-ub", "32"])).memory;
        assert!(smaller.scratch_bytes < few.scratch_bytes);
    }

    #[test]
    fn a_vllm_serve_holds_its_folder_and_the_kv_that_is_configured() {
        let mut child: VllmServeConfig =
            toml::from_str("model = \"org/name\"\nkv_cache_memory_bytes = 4096").expect("valid");
        let memory = of_vllm_serve(&child).memory;
        assert_eq!((memory.weight_bytes, memory.kv_bytes), (0, 4096));
        assert_eq!(memory.source, MemorySource::ArtifactSize);
        child.kv_cache_memory_bytes = None;
        assert_eq!(
            of_vllm_serve(&child).memory.source,
            MemorySource::Unavailable
        );
        let config = br#"{"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
            "num_hidden_layers": 3, "max_position_embeddings": 512}"#;
        let shape = KvShape {
            keys: 3 * 2 * 8,
            values: 3 * 2 * 8,
            context_length: Some(512),
            ..KvShape::default()
        };
        assert_eq!(KvShape::of_huggingface(config), Some(shape));
        assert_eq!(KvShape::of_huggingface(b"{}"), None);
    }
}
