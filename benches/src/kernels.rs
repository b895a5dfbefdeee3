//! Speed of the CPU kernels by instruction set, weight type and number of rows, with GB/s of stored
//! weights (or of keys and values) and G operations/s (a multiplication and an addition are two).
//!
//! `make bench-kernels`; `ARGS=avx2/product/Q4_0` names what to run, `TINYLOOP_TEST_PATHS=avx2` which
//! instruction sets. The numbers are of this machine at this moment; what it could do at best says
//! `make roofline`. What is not here: whole models (`tinyloop bench`), other programs (`make bench-peer`).

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::time::Duration;
use tinyloop::backend::cpu::Path;
use tinyloop::backend::*;
use tinyloop::dtype::DType;

#[path = "../../tests/common/cpu_paths.rs"]
mod cpu_paths;
#[path = "../../tests/kernels/support.rs"]
#[expect(dead_code, reason = "the kernels' tests use more of it")]
mod support;

/// Width of the residual stream.
const D_MODEL: usize = 2048;
/// Rows of the matrix whose product is taken: at 4 bit 18 MB, more than most second-level caches.
const N_OUT: usize = 16_384;
const D_FF: usize = 5632;
const N_HEADS: usize = 32;
const N_KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const MAX_CONTEXT: usize = 4096;
const ROWS_MAX: usize = 128;

fn geometry() -> StateGeometry {
    StateGeometry {
        max_rows: ROWS_MAX,
        n_slots: ROWS_MAX,
        d_model: D_MODEL,
        n_heads: N_HEADS,
        n_kv_heads: N_KV_HEADS,
        head_dim: HEAD_DIM,
        d_ff: D_FF,
        vocab_size: N_OUT,
        layers_per_page: 1,
        n_pages: MAX_CONTEXT / PAGE_TOKENS,
        max_context: MAX_CONTEXT,
        keeps_input: false,
    }
}

/// So many rows at the end of a sequence of `n_tokens`.
fn pass(n_rows: usize, n_tokens: usize) -> Pass {
    let first = n_tokens - n_rows;
    let pages = (0..n_tokens.div_ceil(PAGE_TOKENS)).map(|page_idx| PageId(page_idx as u32));
    let row = |idx: usize| Row {
        slot: SlotId(idx as u32),
        position: (first + idx) as u32,
        ..support::row(0, 0)
    };
    Pass {
        rows: (0..n_rows).map(row).collect(),
        sequences: vec![SequencePages::full(vec![pages.collect()])],
    }
}

/// All slots hold the same row of random values.
fn enter(backend: &mut dyn Backend) {
    let table = support::load(backend, DType::F32, 1, D_MODEL, 5);
    backend.allocate(&geometry()).expect("memory");
    backend
        .begin_pass(&pass(ROWS_MAX, ROWS_MAX))
        .expect("a valid pass");
    let op = EmbedOp {
        table,
        scale: 1.0,
        positions: None,
        constant: None,
        norm: None,
    };
    backend.embed(&op).expect("valid ids");
}

/// Those of `TINYLOOP_TEST_PATHS`; else all with vector instructions, for the others take minutes each.
fn paths() -> Vec<Path> {
    let mut paths = cpu_paths::paths();
    if std::env::var_os("TINYLOOP_TEST_PATHS").is_none() {
        paths.retain(|path| !path.name().starts_with("scalar"));
    }
    paths
}

fn n_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// One matrix times some rows: the norm, the quantized activations and the product.
fn products(criterion: &mut Criterion) {
    for path in paths() {
        let mut group = criterion.benchmark_group(format!("{path}/product"));
        for dtype in [
            DType::Q4_0,
            DType::Q4_1,
            DType::Q8_0,
            DType::Q4_K,
            DType::Q6_K,
            DType::F16,
            DType::BF16,
        ] {
            let mut backend = cpu_paths::cpu(path, n_threads());
            let weight = support::load(&mut backend, dtype, N_OUT, D_MODEL, 1);
            enter(&mut backend);
            let op = LogitsOp {
                norm: None,
                epsilon: 1e-5,
                output: Linear { weight, bias: None },
            };
            let n_weights = N_OUT * D_MODEL;
            let n_bytes = n_weights / dtype.block_len() * dtype.block_bytes();
            for n_rows in [1, 8, 64] {
                let slots: Vec<SlotId> = (0..n_rows).map(SlotId).collect();
                group.throughput(Throughput::ElementsAndBytes {
                    elements: 2 * n_weights as u64 * u64::from(n_rows),
                    bytes: n_bytes as u64,
                });
                let id = BenchmarkId::new(format!("{dtype:?}"), n_rows);
                group.bench_function(id, |bench| {
                    bench.iter(|| backend.logits(&op, &slots).expect("valid ids").len());
                });
            }
        }
    }
}

/// One row, and a chunk of a prompt, over the keys and values before it.
fn attention(criterion: &mut Criterion) {
    for path in paths() {
        let mut group = criterion.benchmark_group(format!("{path}/attention"));
        let mut backend = cpu_paths::cpu(path, n_threads());
        enter(&mut backend);
        let op = AttendOp {
            kv: KvPlace {
                first_group: 0,
                groups_per_iteration: 0,
                layer: 0,
            },
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            window: 0,
            is_bidirectional: false,
        };
        for (n_rows, n_tokens) in [(1, 1024), (1, MAX_CONTEXT), (ROWS_MAX, 1024)] {
            backend
                .begin_pass(&pass(n_rows, n_tokens))
                .expect("a valid pass");
            let seen: usize = (n_tokens - n_rows..n_tokens).map(|before| before + 1).sum();
            group.throughput(Throughput::ElementsAndBytes {
                elements: (4 * seen * N_HEADS * HEAD_DIM) as u64,
                bytes: (2 * 2 * n_tokens * N_KV_HEADS * HEAD_DIM) as u64,
            });
            let id = BenchmarkId::new(format!("{n_tokens} tokens"), n_rows);
            group.bench_function(id, |bench| {
                bench.iter(|| backend.attend(&op).expect("valid ids"));
            });
        }
    }
}

/// The whole feed-forward network: norm, gate and up with SwiGLU, down, the residual.
fn feed_forward(criterion: &mut Criterion) {
    for path in paths() {
        let mut group = criterion.benchmark_group(format!("{path}/feed_forward"));
        for dtype in [DType::Q4_0, DType::Q8_0] {
            let mut backend = cpu_paths::cpu(path, n_threads());
            let norm = support::load_vector(&mut backend, D_MODEL, 1.0, 2);
            let mut linear = |n_out, n_in, seed| Linear {
                weight: support::load(&mut backend, dtype, n_out, n_in, seed),
                bias: None,
            };
            let op = FeedForwardOp {
                norm: Some(norm),
                epsilon: 1e-5,
                gate: Some(linear(D_FF, D_MODEL, 1)),
                up: linear(D_FF, D_MODEL, 2),
                down: linear(D_MODEL, D_FF, 3),
                post_norm: Some(norm), // so that the state stays bounded
            };
            enter(&mut backend);
            let n_weights = 3 * D_FF * D_MODEL;
            for n_rows in [1, 8, ROWS_MAX] {
                backend
                    .begin_pass(&pass(n_rows, n_rows))
                    .expect("a valid pass");
                group.throughput(Throughput::ElementsAndBytes {
                    elements: (2 * n_weights * n_rows) as u64,
                    bytes: (n_weights / dtype.block_len() * dtype.block_bytes()) as u64,
                });
                let id = BenchmarkId::new(format!("{dtype:?}"), n_rows);
                group.bench_function(id, |bench| {
                    bench.iter(|| backend.feed_forward(&op).expect("valid ids"));
                });
            }
        }
    }
}

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = products, attention, feed_forward
}
criterion_main!(kernels);
