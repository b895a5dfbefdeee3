//! What all kernel tests share: random tensors of every type, and a rig of two blocks over any
//! backend.

use crate::cpu_paths::{cpu, paths};
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;
use tinyloop::dtype::DType;

/// xorshift64: small, fast, good enough for weights.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

pub(crate) fn half(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}

/// Random stored weights of about unit variance divided by `n_in`.
pub(crate) fn tensor_bytes(dtype: DType, n_out: usize, n_in: usize, noise: &mut Noise) -> Vec<u8> {
    let size = 1.5 / (n_in as f32).sqrt();
    let n = n_out * n_in;
    match dtype {
        DType::F32 => noise
            .floats(n, size)
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        DType::F16 => noise
            .floats(n, size)
            .iter()
            .flat_map(|value| half(*value))
            .collect(),
        DType::BF16 => {
            let bits = |value: &f32| half::bf16::from_f32(*value).to_le_bytes();
            noise.floats(n, size).iter().flat_map(bits).collect()
        }
        _ => {
            let n_blocks = n / dtype.block_len();
            let mut bytes: Vec<u8> = (0..n_blocks * dtype.block_bytes())
                .map(|_| (noise.next() >> 32) as u8)
                .collect();
            // (places of the f16 scale, of the f16 minimum, largest magnitude of a code)
            let (scale_at, minimum_at, largest) = match dtype {
                DType::Q4_0 => (0, None, 8.0),
                DType::Q4_1 => (0, Some(2), 15.0),
                DType::Q5_0 => (0, None, 16.0),
                DType::Q5_1 => (0, Some(2), 31.0),
                DType::Q8_0 | DType::IQ4_NL => (0, None, 127.0),
                DType::Q2_K => (80, Some(82), 3.0 * 15.0),
                DType::Q3_K => (108, None, 4.0 * 32.0),
                DType::Q4_K => (0, Some(2), 15.0 * 63.0),
                DType::Q5_K => (0, Some(2), 31.0 * 63.0),
                DType::Q6_K => (208, None, 32.0 * 128.0),
                DType::F32 | DType::F16 | DType::BF16 => unreachable!("handled above"),
            };
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                let scale = size / largest * (1.0 + noise.unit() * 0.5);
                block[scale_at..scale_at + 2].copy_from_slice(&half(scale));
                if let Some(at) = minimum_at {
                    // So that weights have no mean: K-quants subtract their minimum.
                    let minimum = match dtype {
                        DType::Q4_1 => -7.5 * scale,
                        DType::Q5_1 => -15.5 * scale,
                        DType::Q2_K => 1.5 * scale,
                        DType::Q4_K => 7.5 * scale,
                        _ => 15.5 * scale,
                    };
                    block[at..at + 2].copy_from_slice(&half(minimum));
                }
            }
            bytes
        }
    }
}

pub(crate) fn load(
    backend: &mut dyn Backend,
    dtype: DType,
    n_out: usize,
    n_in: usize,
    seed: u64,
) -> MatrixId {
    let bytes = tensor_bytes(dtype, n_out, n_in, &mut Noise(seed * 7919 + 1));
    let tensor = TensorData {
        name: "random",
        dtype,
        n_out,
        n_in,
        bytes: &bytes,
    };
    backend.load_matrix(&tensor).expect("a valid tensor")
}

pub(crate) fn load_vector(backend: &mut dyn Backend, n: usize, middle: f32, seed: u64) -> VectorId {
    let values: Vec<f32> = Noise(seed * 104_729 + 1)
        .floats(n, 0.3)
        .iter()
        .map(|value| value + middle)
        .collect();
    backend.load_vector(&values).expect("room")
}

/// Root mean square of the difference over that of the wanted values; largest difference likewise.
pub(crate) fn errors(found: &[f32], wanted: &[f32]) -> (f32, f32) {
    assert_eq!(found.len(), wanted.len());
    assert!(found.iter().all(|value| value.is_finite()));
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v * v)).sum();
    let wanted_squares: f64 = square(&mut wanted.iter().copied());
    let differences = || {
        found
            .iter()
            .zip(wanted)
            .map(|(found, wanted)| found - wanted)
    };
    let difference_squares: f64 = square(&mut differences());
    let scale = (wanted_squares / wanted.len() as f64).sqrt().max(1e-9);
    let largest = differences().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let mean = (difference_squares / wanted.len() as f64).sqrt();
    ((mean / scale) as f32, largest / scale as f32)
}

pub(crate) fn row(slot: usize, token: u32) -> Row {
    Row {
        slot: SlotId(slot as u32),
        token,
        position: slot as u32,
        sequence: 0,
        iteration: 0,
        enters: true,
    }
}

pub(crate) fn tiny_geometry(d_model: usize, vocab_size: usize, rows: usize) -> StateGeometry {
    StateGeometry {
        max_rows: rows,
        n_slots: rows,
        d_model,
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: 8,
        d_ff: 32,
        vocab_size,
        layers_per_page: 1,
        n_pages: 1,
        max_context: 128,
        keeps_input: false,
    }
}

/// `embed` then `logits`; the embedding is `(n_rows, d_model)`, row r enters token r.
pub(crate) fn embed_and_project(
    backend: &mut dyn Backend,
    embedding: (DType, Vec<u8>),
    head: (DType, usize, u64),
    n_in: usize,
    n_rows: usize,
) -> Vec<f32> {
    let tensor = TensorData {
        name: "embedding",
        dtype: embedding.0,
        n_out: n_rows,
        n_in,
        bytes: &embedding.1,
    };
    let table = backend.load_matrix(&tensor).expect("a valid tensor");
    let weight = load(backend, head.0, head.1, n_in, head.2);
    let norm = backend.load_vector(&vec![1.0; n_in]).expect("room");
    backend
        .allocate(&tiny_geometry(n_in, head.1, n_rows))
        .expect("small");
    let n_tokens = head.1.min(n_rows);
    let rows = (0..n_rows)
        .map(|idx| row(idx, (idx % n_tokens) as u32))
        .collect();
    let pass = Pass {
        rows,
        sequences: vec![SequencePages::full(vec![vec![PageId(0)]])],
    };
    backend.begin_pass(&pass).expect("a valid pass");
    let op = EmbedOp {
        table,
        scale: 1.0,
        positions: None,
        constant: None,
        norm: None,
    };
    backend.embed(&op).expect("valid ids");
    let op = LogitsOp {
        norm: Some(norm),
        epsilon: 1.0,
        output: Linear { weight, bias: None },
    };
    let slots: Vec<SlotId> = pass.rows.iter().map(|row| row.slot).collect();
    backend.logits(&op, &slots).expect("valid ids").to_vec()
}

/// Rows whose int8 quantization is exact: integers, with a 127 in every block of 32.
pub(crate) fn exact_rows(n_rows: usize, n_in: usize) -> Vec<u8> {
    let mut noise = Noise(77);
    (0..n_rows * n_in)
        .flat_map(|i| {
            let integer = if i % 32 == 5 {
                127.0
            } else {
                (noise.unit() * 127.0).round()
            };
            f32::to_le_bytes(integer / 64.0)
        })
        .collect()
}

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) d_model: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) d_ff: usize,
    pub(crate) vocab_size: usize,
    pub(crate) dtype: DType,
    /// Of v and down, like files that mix types.
    pub(crate) other_dtype: DType,
    /// Of gate, up and the head; None: `dtype`.
    pub(crate) wide_dtype: Option<DType>,
    /// Of every layer.
    pub(crate) window: u32,
    /// Of every sequence.
    pub(crate) cache_window: CacheWindow,
    /// Tables lack the blocks that no row sees any more.
    pub(crate) drops_unseen: bool,
    pub(crate) rope: Option<RopePairs>,
    /// Biases, head norms and post norms.
    pub(crate) extras: bool,
    /// The core's iterations have their own KV group.
    pub(crate) loops: u32,
}

pub(crate) const SMOL: Shape = Shape {
    d_model: 96,
    n_heads: 6,
    n_kv_heads: 2,
    head_dim: 32,
    d_ff: 160,
    vocab_size: 77,
    dtype: DType::Q4_1,
    other_dtype: DType::Q8_0,
    wide_dtype: None,
    window: 0,
    cache_window: CacheWindow {
        tokens: 0,
        n_kept: 0,
    },
    drops_unseen: false,
    rope: Some(RopePairs::Interleaved),
    extras: false,
    loops: 1,
};

pub(crate) const MAX_CONTEXT: usize = 320;
pub(crate) const PAGES_PER_GROUP: usize = MAX_CONTEXT / PAGE_TOKENS;
pub(crate) const N_LAYERS: u32 = 2;
pub(crate) const MAX_ROWS: usize = 340;
pub(crate) const N_SEQUENCES: usize = 3;

pub(crate) struct Block {
    pub(crate) qkv: QkvOp,
    pub(crate) attend: AttendOp,
    pub(crate) output: AttentionOutputOp,
    pub(crate) feed_forward: FeedForwardOp,
}

pub(crate) struct Rig<B> {
    pub(crate) backend: B,
    pub(crate) shape: Shape,
    pub(crate) table: MatrixId,
    pub(crate) blocks: Vec<Block>,
    pub(crate) logits: LogitsOp,
}

impl<B: Backend> Rig<B> {
    pub(crate) fn new(mut backend: B, shape: Shape) -> Self {
        let b = &mut backend;
        let table = load(b, shape.dtype, shape.vocab_size, shape.d_model, 1);
        let rope = shape.rope.map(|pairs| {
            let n_pairs = shape.head_dim / 2 - usize::from(shape.extras);
            let frequency = |i: usize| 1.0 / 10_000_f32.powf(i as f32 / n_pairs as f32);
            let inverse_frequencies = (0..n_pairs).map(frequency).collect();
            b.load_rope(&RopeTable {
                inverse_frequencies,
                pairs,
                magnitude: 1.0,
            })
            .expect("room")
        });
        let blocks = (0..N_LAYERS)
            .map(|layer| block(b, &shape, layer, rope))
            .collect();
        let wide_dtype = shape.wide_dtype.unwrap_or(shape.dtype);
        let logits = LogitsOp {
            norm: Some(load_vector(b, shape.d_model, 1.0, 2)),
            epsilon: 1e-5,
            output: Linear {
                weight: load(b, wide_dtype, shape.vocab_size, shape.d_model, 3),
                bias: None,
            },
        };
        let geometry = StateGeometry {
            max_rows: MAX_ROWS,
            n_slots: MAX_ROWS,
            d_model: shape.d_model,
            n_heads: shape.n_heads,
            n_kv_heads: shape.n_kv_heads,
            head_dim: shape.head_dim,
            d_ff: shape.d_ff,
            vocab_size: shape.vocab_size,
            layers_per_page: N_LAYERS as usize,
            n_pages: N_SEQUENCES * shape.loops as usize * PAGES_PER_GROUP,
            max_context: MAX_CONTEXT,
            keeps_input: false,
        };
        backend.allocate(&geometry).expect("small");
        Rig {
            backend,
            shape,
            table,
            blocks,
            logits,
        }
    }

    /// One row of logits per token of the spans `(sequence, start, tokens)`, after all loops.
    pub(crate) fn run(&mut self, spans: &[(usize, usize, &[u32])]) -> Vec<f32> {
        let mut pass = Pass::default();
        for (idx, (sequence, start, tokens)) in spans.iter().enumerate() {
            let groups = (0..self.shape.loops as usize)
                .map(|iteration| {
                    let first =
                        (sequence * self.shape.loops as usize + iteration) * PAGES_PER_GROUP;
                    // Falling order, so that a wrong lookup shows.
                    (first..first + PAGES_PER_GROUP)
                        .rev()
                        .map(|page| PageId(page as u32))
                        .collect()
                })
                .collect();
            let mut pages = SequencePages::full(groups);
            pages.window = self.shape.cache_window;
            if self.shape.drops_unseen {
                let (kept, n) = (
                    pages.window.kept_blocks(),
                    pages.window.unseen_blocks(*start),
                );
                pages
                    .groups
                    .iter_mut()
                    .for_each(|table| drop(table.drain(kept..kept + n)));
                pages.n_dropped = n;
            }
            pass.sequences.push(pages);
            for (offset, token) in tokens.iter().enumerate() {
                pass.rows.push(Row {
                    position: (start + offset) as u32,
                    sequence: idx as u32,
                    ..row(pass.rows.len(), *token)
                });
            }
        }
        let mut logits = Vec::new();
        for iteration in 0..self.shape.loops {
            for row in &mut pass.rows {
                row.iteration = iteration;
                row.enters = iteration == 0;
            }
            logits = self.pass(&pass);
        }
        logits
    }

    pub(crate) fn pass(&mut self, pass: &Pass) -> Vec<f32> {
        let backend = &mut self.backend;
        backend.begin_pass(pass).expect("a valid pass");
        let embed = EmbedOp {
            table: self.table,
            scale: 1.0,
            positions: None,
            constant: None,
            norm: None,
        };
        backend.embed(&embed).expect("valid ids");
        for block in &self.blocks {
            backend.qkv(&block.qkv).expect("valid ids");
            backend.attend(&block.attend).expect("valid ids");
            backend.attention_output(&block.output).expect("valid ids");
            backend
                .feed_forward(&block.feed_forward)
                .expect("valid ids");
        }
        let slots: Vec<SlotId> = pass.rows.iter().map(|row| row.slot).collect();
        backend
            .logits(&self.logits, &slots)
            .expect("valid ids")
            .to_vec()
    }
}

pub(crate) fn block(b: &mut dyn Backend, shape: &Shape, layer: u32, rope: Option<RopeId>) -> Block {
    let seed = u64::from(layer) * 100 + 10;
    let (q_width, kv_width) = (
        shape.n_heads * shape.head_dim,
        shape.n_kv_heads * shape.head_dim,
    );
    let linear = |b: &mut dyn Backend, dtype, n_out, n_in, seed| Linear {
        weight: load(b, dtype, n_out, n_in, seed),
        bias: shape.extras.then(|| load_vector(b, n_out, 0.0, seed)),
    };
    let head_norm = |b: &mut dyn Backend, seed| {
        shape
            .extras
            .then(|| load_vector(b, shape.head_dim, 1.0, seed))
    };
    let post_norm = |b: &mut dyn Backend, seed| {
        shape
            .extras
            .then(|| load_vector(b, shape.d_model, 0.5, seed))
    };
    let wide_dtype = shape.wide_dtype.unwrap_or(shape.dtype);
    let kv = KvPlace {
        first_group: 0,
        groups_per_iteration: u32::from(shape.loops > 1),
        layer,
    };
    Block {
        qkv: QkvOp {
            norm: Some(load_vector(b, shape.d_model, 1.0, seed)),
            epsilon: 1e-5,
            q: linear(b, shape.dtype, q_width, shape.d_model, seed + 1),
            k: linear(b, shape.dtype, kv_width, shape.d_model, seed + 2),
            v: linear(b, shape.other_dtype, kv_width, shape.d_model, seed + 3),
            q_norm: head_norm(b, seed + 4),
            k_norm: head_norm(b, seed + 5),
            rope,
            kv,
        },
        attend: AttendOp {
            kv,
            // Sharper than usual, so that a wrong position shows.
            scale: 3.0 / (shape.head_dim as f32).sqrt(),
            window: shape.window,
            is_bidirectional: false,
        },
        output: AttentionOutputOp {
            output: linear(b, shape.dtype, shape.d_model, q_width, seed + 6),
            post_norm: post_norm(b, seed + 7),
            epsilon: 1e-5,
        },
        feed_forward: FeedForwardOp {
            norm: Some(load_vector(b, shape.d_model, 1.0, seed + 8)),
            epsilon: 1e-5,
            gate: Some(linear(b, wide_dtype, shape.d_ff, shape.d_model, seed + 9)),
            up: linear(b, wide_dtype, shape.d_ff, shape.d_model, seed + 10),
            down: linear(b, shape.other_dtype, shape.d_model, shape.d_ff, seed + 11),
            post_norm: post_norm(b, seed + 12),
        },
    }
}

pub(crate) fn tokens(n: usize, salt: u64) -> Vec<u32> {
    let mut noise = Noise(salt * 31 + 7);
    (0..n).map(|_| (noise.next() >> 33) as u32 % 77).collect()
}

/// Runs a pass over spans of tokens.
pub(crate) type RunSpans<'a> = &'a mut dyn FnMut(&[(usize, usize, &[u32])]) -> Vec<f32>;

/// Two sequences whole, then one more token of each, against the oracle on every path.
pub(crate) fn check_against_reference(what: &str, shape: Shape, n_tokens: usize) {
    let (long, short) = (tokens(n_tokens, 1), tokens(5, 2));
    let run = |rig: RunSpans<'_>| {
        let mut logits = rig(&[(0, 0, &long), (1, 0, &short)]);
        logits.extend(rig(&[(1, 5, &short[..1]), (0, n_tokens, &short[..1])]));
        logits
    };
    let mut reference = Rig::new(ReferenceBackend::new(), shape);
    let wanted = run(&mut |spans| reference.run(spans));
    // Around attention inputs are quantized twice, which is as good as f32.
    let wide_dtype = shape.wide_dtype.unwrap_or(shape.dtype);
    let floats = wide_dtype.block_len() == 1 && shape.other_dtype.block_len() == 1;
    // f16 keys and values cost about 1e-3, int8 activations about 1e-2 per operation.
    let (mean_limit, largest_limit) = if floats { (3e-3, 3e-2) } else { (0.04, 0.3) };
    for path in paths() {
        let mut rig = Rig::new(cpu(path, 2), shape);
        let (mean, largest) = errors(&run(&mut |spans| rig.run(spans)), &wanted);
        assert!(
            mean < mean_limit && largest < largest_limit,
            "{what} {path}: {mean} {largest}"
        );
    }
}
