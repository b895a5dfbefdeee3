//! Devices that run out of memory or are lost: errors with numbers, never a panic or a wrong result.

use crate::cuda;
use crate::fake_cuda::FakeCuda;
use crate::support::*;
use tinyloop::backend::cuda::{CudaBackend, devices};
use tinyloop::backend::*;
use tinyloop::dtype::DType;

#[test]
fn a_lost_device_is_an_error_from_then_on() {
    let cuda = FakeCuda::open();
    let device = cuda.take_device();
    let backend = CudaBackend::open(device, true).expect("it is there");
    let mut rig = Rig::new(backend, SMOL);
    let prompt = tokens(9, 1);
    rig.run(&[(0, 0, &prompt)]);
    cuda.lose_device(device, 3);
    let slots: Vec<SlotId> = (0..9).map(SlotId).collect();
    let mut failed = None;
    for _ in 0..4 {
        failed = rig.backend.logits(&rig.logits, &slots).err().or(failed);
    }
    let error = failed.expect("three launches are soon used up");
    assert!(matches!(error, BackendError::Device(_)), "{error:?}");
    let again = rig.backend.logits(&rig.logits, &slots).err();
    assert!(matches!(again, Some(BackendError::Device(_))), "{again:?}");
}

#[test]
fn too_little_memory_is_told_with_numbers() {
    let cuda = FakeCuda::open();
    let device = cuda.take_device();
    let mut backend = CudaBackend::open(device, false).expect("it is there");
    cuda.set_memory(device, 1 << 20);
    let (n_out, n_in) = (2048, 1024);
    let bytes = vec![0; n_out * n_in * 2];
    let tensor = TensorData {
        name: "blk.0.ffn_up.weight",
        dtype: DType::F16,
        n_out,
        n_in,
        bytes: &bytes,
    };
    let error = backend.load_matrix(&tensor).expect_err("4 MiB into 1 MiB");
    let text = error.to_string();
    assert!(matches!(error, BackendError::OutOfMemory { .. }), "{text}");
    assert!(
        text.contains("blk.0.ffn_up.weight") && text.contains("4194304"),
        "{text}"
    );
}

#[test]
fn every_emulated_device_is_listed_and_a_number_beyond_is_refused() {
    drop(cuda(false));
    let listed = devices().expect("the emulated driver starts");
    assert_eq!(listed.len(), 64);
    assert!(listed.iter().all(|device| device.total_bytes > 0));
    let error = CudaBackend::open(64, false).err().expect("there is none");
    assert!(error.to_string().contains("cuda:64"), "{error}");
}
