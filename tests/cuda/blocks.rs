//! Products and blocks of every weight type against the oracle, on both sides of the step from
//! mat-vec to tensor cores; company and graphs do not change a bit.

use crate::cuda;
use crate::support::*;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;
use tinyloop::dtype::DType;

#[test]
fn products_and_embeddings_of_every_type_match() {
    for dtype in DType::ALL {
        let widths = match dtype.block_len() {
            256 => vec![256, 768],
            32 => vec![32, 96],
            _ => vec![8, 40, 96],
        };
        for n_in in widths {
            for (n_rows, n_out) in [(1, 1), (3, 8), (8, 17), (9, 70), (37, 33)] {
                let head = (dtype, n_out, 3);
                let rows = || (DType::F32, exact_rows(n_rows, n_in));
                let mut oracle = ReferenceBackend::new();
                let wanted = embed_and_project(&mut oracle, rows(), head, n_in, n_rows);
                let found = embed_and_project(&mut cuda_once(), rows(), head, n_in, n_rows);
                let (mean, largest) = errors(&found, &wanted);
                assert!(
                    mean < 1e-2 && largest < 5e-2,
                    "{dtype}: {n_rows} rows, {n_out} x {n_in}: {mean} {largest}"
                );
            }
        }
        let table = || (dtype, tensor_bytes(dtype, 19, 256, &mut Noise(5)));
        let head = (DType::F32, 24, 4);
        let wanted = embed_and_project(&mut ReferenceBackend::new(), table(), head, 256, 19);
        let found = embed_and_project(&mut cuda_once(), table(), head, 256, 19);
        let (mean, _) = errors(&found, &wanted);
        assert!(mean < 3e-3, "embedding of {dtype}: {mean}");
    }
}

/// A device for many short backends, one after the other.
fn cuda_once() -> tinyloop::backend::cuda::CudaBackend {
    use crate::fake_cuda::FakeCuda;
    use std::sync::OnceLock;
    static DEVICE: OnceLock<usize> = OnceLock::new();
    let device = *DEVICE.get_or_init(|| FakeCuda::open().take_device());
    tinyloop::backend::cuda::CudaBackend::open(device, false).expect("the kernels load")
}

/// Two sequences whole, then one more token of each, against the oracle.
fn check(what: &str, shape: Shape, n_tokens: usize) {
    let (long, short) = (tokens(n_tokens, 1), tokens(5, 2));
    let run = |rig: RunSpans<'_>| {
        let mut logits = rig(&[(0, 0, &long), (1, 0, &short)]);
        logits.extend(rig(&[(1, 5, &short[..1]), (0, n_tokens, &short[..1])]));
        logits
    };
    let mut oracle = Rig::new(ReferenceBackend::new(), shape);
    let wanted = run(&mut |spans| oracle.run(spans));
    let mut rig = Rig::new(cuda(true), shape);
    let found = run(&mut |spans| rig.run(spans));
    let (mean, largest) = errors(&found, &wanted);
    assert!(mean < 0.04 && largest < 0.3, "{what}: {mean} {largest}");
}

#[test]
fn blocks_of_usual_models_match() {
    check("small", SMOL, 33);
    let halves = Shape {
        rope: Some(RopePairs::Halves),
        ..SMOL
    };
    check("halves", halves, 17);
    let wide = Shape {
        d_model: 256,
        n_heads: 8,
        d_ff: 512,
        dtype: DType::Q4_K,
        other_dtype: DType::Q6_K,
        ..SMOL
    };
    check("k-quants", wide, 9);
}

#[test]
fn blocks_with_biases_norms_and_loops_match() {
    let extras = Shape {
        extras: true,
        loops: 3,
        ..SMOL
    };
    check("extras", extras, 20);
    let floats = Shape {
        dtype: DType::F16,
        other_dtype: DType::BF16,
        extras: true,
        head_dim: 40,
        ..SMOL
    };
    check("floats", floats, 20);
}

#[test]
fn windows_hide_what_they_should() {
    let layer = Shape { window: 9, ..SMOL };
    check("of a layer", layer, 40);
    for drops_unseen in [false, true] {
        let sequence = Shape {
            cache_window: CacheWindow {
                tokens: 20,
                n_kept: 16,
            },
            drops_unseen,
            ..SMOL
        };
        check("of a sequence", sequence, 70);
    }
}

#[test]
fn company_does_not_change_a_bit_on_one_path() {
    let (long, short) = (tokens(40, 3), tokens(3, 4));
    let vocab = SMOL.vocab_size;
    let mut rig = Rig::new(cuda(false), SMOL);
    let whole = rig.run(&[(0, 0, &long)]);
    // Chunks of more than 8 rows, beside another sequence.
    let first = rig.run(&[(1, 0, &long[..17]), (2, 0, &short)]);
    let second = rig.run(&[(2, 0, &short), (1, 17, &long[17..])]);
    assert_eq!(whole[..17 * vocab], first[..17 * vocab]);
    assert_eq!(whole[17 * vocab..], second[3 * vocab..]);
    // One to eight rows.
    let alone = rig.run(&[(0, 40, &long[..1])]);
    let beside = rig.run(&[(2, 3, &long[..5]), (0, 40, &long[..1])]);
    assert_eq!(alone, beside[5 * vocab..]);
}

#[test]
fn graphs_give_the_same_bits() {
    let mut with = Rig::new(cuda(true), SMOL);
    let mut without = Rig::new(cuda(false), SMOL);
    let prompt = tokens(12, 5);
    assert_eq!(
        with.run(&[(0, 0, &prompt)]),
        without.run(&[(0, 0, &prompt)])
    );
    for (step, token) in tokens(6, 6).into_iter().enumerate() {
        let spans = [(0, 12 + step, &[token][..]), (1, step, &[token][..])];
        assert_eq!(with.run(&spans), without.run(&spans), "step {step}");
    }
}
