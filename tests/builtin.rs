//! The model inside the program: the engine computes what PyTorch computes of the same weights, and
//! the committed held-out text shows what the README claims of its depths.
//!
//! The text is the start of what `training/prepare.py` held out; neither tokenizer nor training saw
//! it. Logits: `training/reference.py`, from the committed file.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tinyloop::backend::Backend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::config::BUILTIN_MODEL;
use tinyloop::model::testing::Runner;
use tinyloop::model::{self, Model};

#[path = "common/cpu_paths.rs"]
mod cpu_paths;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

fn load(backend: &mut dyn Backend) -> Model {
    let file = model::open(Path::new(BUILTIN_MODEL)).expect("the committed model is sound");
    Model::load(&file, backend, &mut |_, _| {}).expect("a known model")
}

/// Largest `rms(found - wanted) / rms(wanted)` over the recorded positions and depths.
fn difference(backend: &mut dyn Backend, chunk: usize) -> f64 {
    let recorded = std::fs::read(data("builtin_logits.json")).expect("committed");
    let recorded: Value = serde_json::from_slice(&recorded).expect("JSON");
    let list = |name: &str| -> Vec<u32> {
        let numbers = recorded[name].as_array().expect("an array");
        let number = |n: &Value| n.as_u64().expect("a number") as u32;
        numbers.iter().map(number).collect()
    };
    let (tokens, loops, positions) = (list("tokens"), list("loops"), list("positions"));
    let stride = recorded["stride"].as_u64().expect("a number") as usize;
    let model = load(backend);
    let mut runner = Runner::new(&model, backend, tokens.len(), chunk).expect("it fits");
    let mut worst = 0.0_f64;
    for loops in loops {
        let rows = recorded["logits"][loops.to_string()].as_array();
        let mut rows = rows.expect("an array").iter();
        let wants = |position: usize| positions.contains(&(position as u32));
        let see = |_: usize, logits: &[f32]| {
            let wanted = rows.next().expect("a row per position");
            let wanted = wanted.as_array().expect("an array");
            let found = logits.iter().step_by(stride);
            assert_eq!(wanted.len(), found.len());
            let (mut error_squares, mut squares) = (0.0, 0.0);
            for (found, wanted) in found.zip(wanted) {
                let wanted = wanted.as_f64().expect("a number");
                error_squares += (f64::from(*found) - wanted).powi(2);
                squares += wanted * wanted;
            }
            worst = worst.max((error_squares / squares).sqrt());
        };
        let run = runner.logits(&tokens, loops, wants, see);
        run.expect("a valid pass");
        assert!(rows.next().is_none(), "every recorded row was compared");
    }
    worst
}

#[test]
fn the_engine_computes_what_pytorch_computes() {
    for chunk in [64, 9] {
        let found = difference(&mut ReferenceBackend::new(), chunk);
        assert!(found < 1e-4, "reference, chunks of {chunk}: off by {found}");
    }
    for path in cpu_paths::paths() {
        let found = difference(&mut cpu_paths::cpu(path, 2), 64);
        assert!(found < 0.02, "{path:?}: off by {found}");
    }
}

/// Perplexity of the held-out text as `tinyloop score` prints it.
fn perplexity(loops: u32) -> f64 {
    let output = Command::new(env!("CARGO_BIN_EXE_tinyloop"))
        .args(["score", "--window", "256", "--json", "--loops"])
        .arg(loops.to_string())
        .arg(data("held_out_excerpt.txt"))
        .stdin(Stdio::null())
        .output()
        .expect("the binary starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    report["perplexity"].as_f64().expect("a number")
}

#[test]
fn looping_lowers_perplexity_and_deeper_loops_keep_it() {
    let [once, four, twelve] = [1, 4, 12].map(perplexity);
    assert!(
        four < 0.9 * once,
        "four loops: {four}, one loop: {once}: less than 10 % better"
    );
    assert!(
        twelve < 1.01 * four,
        "twelve loops: {twelve}, four loops: {four}: deeper loops lose it"
    );
}
