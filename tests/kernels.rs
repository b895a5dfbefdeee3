//! The CPU backend against the scalar oracle: every weight type, every operation, awkward sizes,
//! every instruction set that this machine has (and the 16-wide layouts through plain arrays);
//! and bit equality of batches, chunks and thread counts. Random weights, fixed seeds.

use tinyloop::backend::cpu::{CpuBackend, PATH_VARIABLE, Path};
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::{
    AttendOp, AttentionOutputOp, Backend, EmbedOp, FeedForwardOp, KvPlace, Linear, LogitsOp,
    MatrixId, PAGE_TOKENS, PageId, Pass, QkvOp, RopeId, RopePairs, RopeTable, Row, SequencePages,
    SlotId, StateGeometry, TensorData, VectorId,
};
use tinyloop::dtype::DType;

#[path = "common/cpu_paths.rs"]
mod cpu_paths;
use cpu_paths::{cpu, paths};

/// xorshift64: small, fast, good enough for weights.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in -1..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

fn half(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}

/// Random stored weights of about unit variance divided by `n_in`.
fn tensor_bytes(dtype: DType, n_out: usize, n_in: usize, noise: &mut Noise) -> Vec<u8> {
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

fn load(backend: &mut dyn Backend, dtype: DType, n_out: usize, n_in: usize, seed: u64) -> MatrixId {
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

fn load_vector(backend: &mut dyn Backend, n: usize, middle: f32, seed: u64) -> VectorId {
    let values: Vec<f32> = Noise(seed * 104_729 + 1)
        .floats(n, 0.3)
        .iter()
        .map(|value| value + middle)
        .collect();
    backend.load_vector(&values).expect("room")
}

/// Root mean square of the difference over that of the wanted values; largest difference likewise.
fn errors(found: &[f32], wanted: &[f32]) -> (f32, f32) {
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

fn row(slot: usize, token: u32) -> Row {
    Row {
        slot: SlotId(slot as u32),
        token,
        position: slot as u32,
        sequence: 0,
        iteration: 0,
        enters: true,
        wants_logits: true,
    }
}

fn tiny_geometry(d_model: usize, vocab_size: usize, rows: usize) -> StateGeometry {
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
fn embed_and_project(
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
        sequences: vec![SequencePages {
            groups: vec![vec![PageId(0)]],
        }],
    };
    backend.begin_pass(&pass).expect("a valid pass");
    let op = EmbedOp { table, scale: 1.0 };
    backend.embed(&op).expect("valid ids");
    let op = LogitsOp {
        norm: Some(norm),
        epsilon: 1.0,
        output: Linear { weight, bias: None },
    };
    backend.logits(&op).expect("valid ids").to_vec()
}

/// Rows whose int8 quantization is exact: integers, with a 127 in every block of 32.
fn exact_rows(n_rows: usize, n_in: usize) -> Vec<u8> {
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

#[test]
fn without_a_wish_the_fastest_path_of_this_machine_runs() {
    assert!(
        std::env::var(PATH_VARIABLE).is_err(),
        "{PATH_VARIABLE} forces a path"
    );
    let fastest = Path::ALL
        .into_iter()
        .rfind(|path| path.is_available() && *path != Path::ScalarWide)
        .expect("scalar is always there");
    let backend = CpuBackend::new(Some(1)).expect("a path");
    assert_eq!(backend.name(), format!("cpu {fastest} x1"));
    // With --nocapture: what the tests of this file stand for.
    eprintln!("chosen: {fastest}; tested: {:?}", paths());
}

#[test]
fn products_of_every_type_match_at_awkward_sizes() {
    for dtype in DType::ALL {
        let block = dtype.block_len();
        let widths = if block == 1 {
            vec![1, 33, 96]
        } else {
            vec![block, 3 * block]
        };
        for n_in in widths {
            for (n_rows, n_out) in [
                (1, 1),
                (2, 7),
                (3, 8),
                (7, 9),
                (8, 17),
                (9, 33),
                (33, 16),
                (70, 40),
            ] {
                let embedding = || (DType::F32, exact_rows(n_rows, n_in));
                let mut reference = ReferenceBackend::new();
                let head = (dtype, n_out, 3);
                let wanted = embed_and_project(&mut reference, embedding(), head, n_in, n_rows);
                for path in paths() {
                    let mut backend = cpu(path, 2);
                    let found = embed_and_project(&mut backend, embedding(), head, n_in, n_rows);
                    let (_, largest) = errors(&found, &wanted);
                    assert!(
                        largest < 2e-5,
                        "{dtype} {path}: {n_rows} rows, {n_out} x {n_in}: error {largest}"
                    );
                }
            }
        }
    }
}

#[test]
fn embeddings_of_every_type_are_read_back() {
    for dtype in DType::ALL {
        let n_in = 256;
        let table = || (dtype, tensor_bytes(dtype, 19, n_in, &mut Noise(5)));
        let head = (DType::F32, 24, 4);
        let wanted = embed_and_project(&mut ReferenceBackend::new(), table(), head, n_in, 19);
        for path in paths() {
            let found = embed_and_project(&mut cpu(path, 2), table(), head, n_in, 19);
            let (_, largest) = errors(&found, &wanted);
            assert!(largest < 2e-5, "{dtype} {path}: error {largest}");
        }
    }
}

/// A random model of two blocks.
#[derive(Clone, Copy)]
struct Shape {
    d_model: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    d_ff: usize,
    vocab_size: usize,
    dtype: DType,
    /// Of v and down, like files that mix types.
    other_dtype: DType,
    /// Of gate, up and the head; None: `dtype`.
    wide_dtype: Option<DType>,
    window: u32,
    rope: Option<RopePairs>,
    /// Biases, head norms and post norms.
    extras: bool,
    /// The core's iterations have their own KV group.
    loops: u32,
}

const SMOL: Shape = Shape {
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
    rope: Some(RopePairs::Interleaved),
    extras: false,
    loops: 1,
};

const MAX_CONTEXT: usize = 320;
const PAGES_PER_GROUP: usize = MAX_CONTEXT / PAGE_TOKENS;
const N_LAYERS: u32 = 2;
const MAX_ROWS: usize = 340;
const N_SEQUENCES: usize = 3;

struct Block {
    qkv: QkvOp,
    attend: AttendOp,
    output: AttentionOutputOp,
    feed_forward: FeedForwardOp,
}

struct Rig<B> {
    backend: B,
    shape: Shape,
    table: MatrixId,
    blocks: Vec<Block>,
    logits: LogitsOp,
}

impl<B: Backend> Rig<B> {
    fn new(mut backend: B, shape: Shape) -> Self {
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
    fn run(&mut self, spans: &[(usize, usize, &[u32])]) -> Vec<f32> {
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
            pass.sequences.push(SequencePages { groups });
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
                row.wants_logits = iteration + 1 == self.shape.loops;
            }
            logits = self.pass(&pass);
        }
        logits
    }

    fn pass(&mut self, pass: &Pass) -> Vec<f32> {
        let backend = &mut self.backend;
        backend.begin_pass(pass).expect("a valid pass");
        let embed = EmbedOp {
            table: self.table,
            scale: 1.0,
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
        backend.logits(&self.logits).expect("valid ids").to_vec()
    }
}

fn block(b: &mut dyn Backend, shape: &Shape, layer: u32, rope: Option<RopeId>) -> Block {
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
            norm: load_vector(b, shape.d_model, 1.0, seed),
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
        },
        output: AttentionOutputOp {
            output: linear(b, shape.dtype, shape.d_model, q_width, seed + 6),
            post_norm: post_norm(b, seed + 7),
            epsilon: 1e-5,
        },
        feed_forward: FeedForwardOp {
            norm: load_vector(b, shape.d_model, 1.0, seed + 8),
            epsilon: 1e-5,
            gate: linear(b, wide_dtype, shape.d_ff, shape.d_model, seed + 9),
            up: linear(b, wide_dtype, shape.d_ff, shape.d_model, seed + 10),
            down: linear(b, shape.other_dtype, shape.d_model, shape.d_ff, seed + 11),
            post_norm: post_norm(b, seed + 12),
        },
    }
}

fn tokens(n: usize, salt: u64) -> Vec<u32> {
    let mut noise = Noise(salt * 31 + 7);
    (0..n).map(|_| (noise.next() >> 33) as u32 % 77).collect()
}

/// Runs a pass over spans of tokens.
type RunSpans<'a> = &'a mut dyn FnMut(&[(usize, usize, &[u32])]) -> Vec<f32>;

/// Two sequences whole, then one more token of each, against the oracle on every path.
fn check_against_reference(what: &str, shape: Shape, n_tokens: usize) {
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

#[test]
fn contexts_around_page_and_split_borders() {
    for n_tokens in [1, 15, 16, 17, 255, 256, 300] {
        let shape = Shape {
            dtype: DType::F32,
            other_dtype: DType::F16,
            ..SMOL
        };
        check_against_reference(&format!("context {n_tokens}"), shape, n_tokens);
    }
}

#[test]
fn head_shapes_and_windows() {
    for (head_dim, n_heads, n_kv_heads, window) in [
        (64, 3, 1, 0),
        (80, 4, 1, 0),
        (128, 2, 2, 7),
        (32, 8, 2, 20),
        (12, 3, 3, 16),
        (20, 10, 2, 1),
    ] {
        for extras in [false, true] {
            let shape = Shape {
                head_dim,
                n_heads,
                n_kv_heads,
                window,
                extras,
                dtype: DType::F32,
                other_dtype: DType::BF16,
                rope: Some(if extras {
                    RopePairs::Halves
                } else {
                    RopePairs::Interleaved
                }),
                ..SMOL
            };
            check_against_reference(
                &format!("heads {head_dim} {n_heads}/{n_kv_heads}"),
                shape,
                40,
            );
        }
    }
}

#[test]
fn a_long_window_crosses_splits() {
    let shape = Shape {
        window: 270,
        dtype: DType::F32,
        other_dtype: DType::F32,
        ..SMOL
    };
    check_against_reference("window 270", shape, 300);
}

#[test]
fn attention_loses_no_precision_to_quantized_inputs() {
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q8_0] {
        let shape = Shape {
            dtype,
            other_dtype: DType::F32,
            wide_dtype: Some(DType::F32),
            ..SMOL
        };
        check_against_reference(&format!("{dtype} around attention"), shape, 17);
    }
}

#[test]
fn quantized_blocks_with_loops_and_odd_widths() {
    let base = Shape {
        extras: true,
        loops: 3,
        rope: None,
        ..SMOL
    };
    check_against_reference("mixed", base, 33);
    let pairs = [
        (DType::Q4_0, DType::Q5_0),
        (DType::Q5_1, DType::IQ4_NL),
        (DType::Q8_0, DType::F16),
    ];
    for (dtype, other_dtype) in pairs {
        check_against_reference(
            "types",
            Shape {
                dtype,
                other_dtype,
                ..SMOL
            },
            17,
        );
    }
    let wide = Shape {
        d_model: 256,
        n_heads: 8,
        d_ff: 512,
        ..SMOL
    };
    for (dtype, other_dtype) in [
        (DType::Q4_K, DType::Q6_K),
        (DType::Q2_K, DType::Q3_K),
        (DType::Q5_K, DType::Q4_K),
    ] {
        check_against_reference(
            "k-quants",
            Shape {
                dtype,
                other_dtype,
                ..wide
            },
            9,
        );
    }
}

#[test]
fn neither_batch_nor_chunks_nor_threads_change_a_bit() {
    let vocab = SMOL.vocab_size;
    let (long, other) = (tokens(300, 3), tokens(40, 4));
    for path in paths() {
        for shape in [
            SMOL,
            Shape {
                window: 100,
                extras: true,
                ..SMOL
            },
            Shape {
                dtype: DType::F16,
                other_dtype: DType::Q5_1,
                loops: 2,
                ..SMOL
            },
        ] {
            let alone = Rig::new(cpu(path, 1), shape).run(&[(0, 0, &long)]);
            assert!(alone.iter().all(|logit| logit.is_finite()));
            for n_threads in [1, 2, 3] {
                let whole = Rig::new(cpu(path, n_threads), shape).run(&[(0, 0, &long)]);
                assert!(alone == whole, "{path}: {n_threads} threads");

                let mut rig = Rig::new(cpu(path, n_threads), shape);
                let mut chunked = rig.run(&[(0, 0, &long[..7])]);
                let mixed = rig.run(&[(1, 0, &other), (0, 7, &long[7..290])]);
                chunked.extend_from_slice(&mixed[other.len() * vocab..]);
                // One or two rows at a long context: splits run on different threads.
                for position in 290..298 {
                    chunked.extend(rig.run(&[(0, position, &long[position..=position])]));
                }
                let last = rig.run(&[(0, 298, &long[298..]), (2, 0, &other[..1])]);
                chunked.extend_from_slice(&last[..2 * vocab]);
                assert!(alone == chunked, "{path}: chunked with {n_threads} threads");
                let other_alone = Rig::new(cpu(path, 1), shape).run(&[(0, 0, &other)]);
                assert!(
                    other_alone == mixed[..other.len() * vocab],
                    "{path}: in a batch"
                );
            }
        }
    }
}

#[test]
fn a_copied_page_serves_like_the_original() {
    let long = tokens(20, 5);
    for path in paths() {
        let mut rig = Rig::new(cpu(path, 2), SMOL);
        rig.run(&[(0, 0, &long)]);
        for page in 0..PAGES_PER_GROUP {
            let (from, to) = (PageId(page as u32), PageId((PAGES_PER_GROUP + page) as u32));
            rig.backend.copy_page(from, to).expect("pages exist");
        }
        let original = rig.run(&[(0, 20, &[9])]);
        assert!(original == rig.run(&[(1, 20, &[9])]), "{path}");
    }
}

#[test]
fn broken_passes_and_tensors_are_errors() {
    let mut rig = Rig::new(cpu(Path::Scalar, 1), SMOL);
    let sequences = vec![SequencePages {
        groups: vec![vec![PageId(0)]],
    }];
    let refuse = |rows: Vec<Row>, sequences: &[SequencePages], backend: &mut CpuBackend| {
        let pass = Pass {
            rows,
            sequences: sequences.to_vec(),
        };
        backend
            .begin_pass(&pass)
            .expect_err("a broken pass")
            .to_string()
    };
    let twice = refuse(vec![row(1, 0), row(1, 0)], &sequences, &mut rig.backend);
    assert!(twice.contains("used twice"), "{twice}");
    let far = refuse(vec![row(MAX_CONTEXT, 0)], &sequences, &mut rig.backend);
    assert!(far.contains("out of range"), "{far}");
    let pages = vec![SequencePages {
        groups: vec![vec![PageId(1_000_000)]],
    }];
    let page = refuse(vec![row(0, 0)], &pages, &mut rig.backend);
    assert!(page.contains("page 1000000"), "{page}");

    let bytes = [0_u8; 18];
    let tensor = |n_in, bytes| TensorData {
        name: "odd",
        dtype: DType::Q4_0,
        n_out: 1,
        n_in,
        bytes,
    };
    for (tensor, text) in [
        (tensor(33, &bytes[..]), "a multiple of 32"),
        (tensor(32, &bytes[..17]), "17 bytes"),
        (tensor(0, &bytes[..0]), "empty"),
    ] {
        let error = rig
            .backend
            .load_matrix(&tensor)
            .expect_err("a broken tensor")
            .to_string();
        assert!(error.contains("odd") && error.contains(text), "{error}");
    }
}

#[test]
fn memory_counts_weights_and_pages() {
    let rig = Rig::new(cpu(Path::Scalar, 2), SMOL);
    let memory = rig.backend.memory();
    let n_pages = (N_SEQUENCES * PAGES_PER_GROUP) as u64;
    let page_bytes = 2 * 2 * (PAGE_TOKENS * 2 * SMOL.n_kv_heads * SMOL.head_dim) as u64;
    assert_eq!(memory.kv_bytes, n_pages * page_bytes);
    assert!(memory.weight_bytes > 0 && memory.scratch_bytes > 0);
}
