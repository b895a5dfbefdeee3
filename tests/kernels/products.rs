//! Products and embeddings of every weight type.

use crate::cpu_paths::{cpu, paths};
use crate::support::*;
use tinyloop::backend::cpu::{CpuBackend, PATH_VARIABLE, Path};
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;
use tinyloop::dtype::DType;

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
