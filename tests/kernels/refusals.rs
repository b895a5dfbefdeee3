//! Broken passes and tensors, and what memory is counted.

use crate::cpu_paths::cpu;
use crate::support::*;
use tinyloop::backend::cpu::{CpuBackend, Path};
use tinyloop::backend::*;
use tinyloop::dtype::DType;

#[test]
fn broken_passes_and_tensors_are_errors() {
    let mut rig = Rig::new(cpu(Path::Scalar, 1), SMOL);
    let sequences = vec![SequencePages::full(vec![vec![PageId(0)]])];
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
    let pages = vec![SequencePages::full(vec![vec![PageId(1_000_000)]])];
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
