//! The CUDA kernels that have a launch interface of their own (`gemm`, `attend_prefill`, `select`)
//! against plain loops, in every order and checked build of the emulated driver. The cases and the
//! loops are in `tests/fake_cuda/kernels_test.cpp`, which also runs on a real driver.

#[path = "common/fake_cuda.rs"]
mod fake_cuda;

use fake_cuda::{Flavour, build};
use std::path::Path;
use std::process::Command;

fn check(topic: &str, flavour: Flavour, order: &str) {
    let folder = build(flavour);
    let output = Command::new(folder.join("kernels_test"))
        .arg(folder.join("libcuda.so"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/kernels.ptx"))
        .arg(topic)
        .env("FAKE_CUDA_ORDER", order)
        .output()
        .expect("the kernels' test can be run");
    let text = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{topic}, {flavour:?}, {order}:\n{text}{complaints}"
    );
    assert!(text.lines().count() >= 8 && text.lines().all(|line| line.starts_with("ok ")));
}

fn check_all(topic: &str) {
    check(topic, Flavour::Plain, "forward");
    check(topic, Flavour::Plain, "reverse");
    check(topic, Flavour::Undefined, "forward");
    check(topic, Flavour::Race, "forward");
}

#[test]
fn products_of_every_type_are_those_of_plain_loops() {
    check_all("gemm");
}

#[test]
fn attention_over_pages_is_that_of_plain_loops() {
    check_all("attend");
}

#[test]
fn selections_are_those_of_a_stable_sort() {
    check_all("select");
}
