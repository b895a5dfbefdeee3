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

/// `make gpu-check`, on the emulated driver and with small sizes: the script works to its end and
/// finds no fault; without a device it says so.
#[test]
fn the_script_for_machines_with_a_gpu_runs() {
    let folder = build(Flavour::Plain);
    let run = |n_devices: &str| {
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/gpu_check.sh"))
            .arg(folder.join("libcuda.so"))
            .env("GPU_CHECK_SIZE", "tiny")
            .env(
                "GPU_CHECK_OUT",
                folder.join(format!("gpu-check-{n_devices}")),
            )
            .env("FAKE_CUDA_DEVICES", n_devices)
            .output()
            .expect("the script can be run")
    };
    let (found, none) = (run("1"), run("0"));
    let text = String::from_utf8_lossy(&found.stdout);
    assert!(found.status.success(), "{text}");
    for wanted in [
        "ok       kernels-gemm",
        "| device copy ",
        "| gemm_q4_small ",
        "NOT RUN: torch",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    let text = String::from_utf8_lossy(&none.stdout);
    assert!(!none.status.success());
    assert!(text.contains("no usable CUDA device"), "{text}");
}
