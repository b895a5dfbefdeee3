//! Models against their reference implementation: every architecture of the table, and what is
//! said about files that do not fit. Fixtures: `tests/scripts/make_model_fixtures.py`.

use serde_json::Value;
use std::path::PathBuf;
use tinyloop::backend::Backend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::format::ModelFile;
use tinyloop::model::architectures::ARCHITECTURES;
use tinyloop::model::testing::Runner;
use tinyloop::model::{Model, ModelError, ModelSpec};

#[path = "common/cpu_paths.rs"]
mod cpu_paths;

/// Fixture and the architecture it is of.
const FIXTURES: &[(&str, &str)] = &[
    ("tiny_llama", "llama"),
    ("llama_linear_biases", "llama"),
    ("mistral_window", "llama"),
    ("qwen2_yarn", "qwen2"),
    ("qwen3", "qwen3"),
    ("smollm3", "smollm3"),
    ("seed_oss", "seed_oss"),
    ("ernie4_5", "ernie4_5"),
];

fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/models")
        .join(file)
}

fn bytes(fixture: &str) -> Vec<u8> {
    std::fs::read(path(&format!("{fixture}.gguf"))).expect("the fixtures are committed")
}

/// How far a fixture's logits are from the recorded ones.
#[derive(Debug, Default)]
struct Difference {
    /// Largest `|found - wanted| / max(1, |wanted|)` of a single logit.
    single: f64,
    /// Largest `rms(found - wanted) / rms(wanted)` of a position.
    position: f64,
}

fn difference(fixture: &str, backend: &mut dyn Backend) -> Difference {
    let file = ModelFile::open_gguf(&path(&format!("{fixture}.gguf"))).expect("a valid file");
    let model = Model::load(&file, backend, &mut |_, _| {}).expect("a known model");
    let recorded = std::fs::read(path(&format!("{fixture}.json"))).expect("committed");
    let recorded: Value = serde_json::from_slice(&recorded).expect("JSON");
    let mut runner = Runner::new(&model, backend, 96, 32).expect("a tiny model fits");
    let mut largest = Difference::default();
    for sequence in recorded["sequences"].as_array().expect("an array") {
        let tokens: Vec<u32> = numbers(&sequence["tokens"]).map(|n| n as u32).collect();
        let positions: Vec<usize> = numbers(&sequence["positions"])
            .map(|n| n as usize)
            .collect();
        let mut rows = sequence["logits"].as_array().expect("an array").iter();
        runner
            .logits(
                &tokens,
                1,
                |position| positions.contains(&position),
                |position, logits| {
                    let wanted = numbers(rows.next().expect("a row per position"));
                    assert_eq!(wanted.clone().count(), logits.len(), "at {position}");
                    let (mut error_squares, mut squares) = (0.0, 0.0);
                    for (found, wanted) in logits.iter().zip(wanted) {
                        assert!(found.is_finite(), "{fixture}: {found} at {position}");
                        let error = (f64::from(*found) - wanted).abs();
                        largest.single = largest.single.max(error / wanted.abs().max(1.0));
                        error_squares += error * error;
                        squares += wanted * wanted;
                    }
                    largest.position = largest.position.max((error_squares / squares).sqrt());
                },
            )
            .expect("a valid pass");
        assert!(rows.next().is_none(), "every recorded row was compared");
    }
    largest
}

fn numbers(array: &Value) -> impl Iterator<Item = f64> + Clone + '_ {
    let array = array.as_array().expect("an array");
    array.iter().map(|n| n.as_f64().expect("a number"))
}

#[test]
fn every_architecture_computes_what_its_reference_computes() {
    // The looped ones have theirs in tests/model_looped.rs, encoders in tests/engine/encoders.rs.
    let elsewhere = [
        "nanbeige",
        "ouro",
        "raven",
        "looped-llama",
        "bert",
        "nomic-bert",
    ];
    for row in ARCHITECTURES
        .iter()
        .filter(|row| !elsewhere.contains(&row.name))
    {
        let has_fixture = FIXTURES.iter().any(|(_, name)| *name == row.name);
        assert!(has_fixture, "architecture {} has no fixture", row.name);
    }
    for (fixture, architecture) in FIXTURES {
        let difference = difference(fixture, &mut ReferenceBackend::new());
        assert!(
            difference.single < 1e-4,
            "{fixture} ({architecture}): logits differ, {difference:?}"
        );
    }
}

/// int8 activations and f16 keys and values: 3.1 % at most was measured, which the models' small
/// random weights do not average out. A wrong pair, window or scale differs by whole units.
#[test]
fn the_cpu_backend_computes_nearly_the_same_on_every_path() {
    for path in cpu_paths::paths() {
        for (fixture, _) in FIXTURES {
            let difference = difference(fixture, &mut cpu_paths::cpu(path, 2));
            assert!(
                difference.position < 0.05,
                "{fixture} on {path:?}: logits differ, {difference:?}"
            );
        }
    }
}

fn spec(name: &str, bytes: Vec<u8>) -> Result<ModelSpec, ModelError> {
    ModelSpec::from_gguf(&ModelFile::from_gguf_bytes(name, bytes)?)
}

fn load(name: &str, bytes: Vec<u8>) -> Result<Model, ModelError> {
    let file = ModelFile::from_gguf_bytes(name, bytes)?;
    Model::load(&file, &mut ReferenceBackend::new(), &mut |_, _| {})
}

/// Replaces the one place where `from` stands.
fn patched(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut places = bytes.windows(from.len()).enumerate();
    let place = places
        .find(|(_, window)| *window == from)
        .expect("present")
        .0;
    bytes[place..place + to.len()].copy_from_slice(to);
    bytes
}

/// Adds an integer to the metadata, and a string that keeps the tensors aligned.
fn with_integer(mut bytes: Vec<u8>, key: &str, value: u32) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let (u32_type, string_type) = (4_u32.to_le_bytes(), 8_u32.to_le_bytes());
    let mut entries = [text(key), u32_type.to_vec(), value.to_le_bytes().to_vec()].concat();
    entries.extend([text("test.padding"), string_type.to_vec()].concat());
    let padding = (32 - (entries.len() + 8) % 32) % 32;
    entries.extend(text(&"x".repeat(padding)));
    let n_entries = u64::from_le_bytes(bytes[16..24].try_into().expect("8 bytes"));
    bytes[16..24].copy_from_slice(&(n_entries + 2).to_le_bytes());
    bytes.splice(24..24, entries);
    bytes
}

/// The same tensors with another value for an integer that the file has.
fn with_changed(bytes: Vec<u8>, key: &str, from: u32, to: u32) -> Vec<u8> {
    let entry = |value: u32| [key.as_bytes(), &4_u32.to_le_bytes(), &value.to_le_bytes()].concat();
    patched(bytes, &entry(from), &entry(to))
}

#[track_caller]
fn refused<T>(result: Result<T, ModelError>, parts: &[&str]) {
    let error = match result {
        Ok(_) => panic!("accepted, instead of an error with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn the_spec_says_what_the_file_says() {
    let spec = spec("tiny", bytes("tiny_llama")).expect("a known model");
    assert_eq!(spec.architecture, "llama");
    assert_eq!(spec.name, "tiny_llama");
    assert_eq!((spec.n_layers, spec.d_model, spec.d_ff), (2, 64, 96));
    assert_eq!((spec.n_heads, spec.n_kv_heads, spec.head_dim), (4, 2, 16));
    assert_eq!((spec.vocab_size, spec.context_length), (323, 1024));
    assert!(!spec.tied_embeddings);
    assert_eq!(spec.kv_bytes_per_token(), 2 * 2 * 2 * 2 * 16);
    let needed = spec.memory_needed(1000);
    assert_eq!(needed.kv_bytes, 256_000);
    assert_eq!(needed.total_bytes, needed.kv_bytes + spec.weight_bytes);
    assert!((100_000..173_184).contains(&spec.weight_bytes));
}

#[test]
fn progress_grows_to_the_total() {
    let file = ModelFile::from_gguf_bytes("tiny", bytes("tiny_llama")).expect("a valid file");
    let mut seen = Vec::new();
    let mut note = |done, total| seen.push((done, total));
    Model::load(&file, &mut ReferenceBackend::new(), &mut note).expect("a known model");
    assert!(seen.is_sorted());
    assert!(seen.len() > 20);
    let (done, total) = *seen.last().expect("not empty");
    assert_eq!(done, total);
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let bytes = patched(bytes("ernie4_5"), b"ernie4_5", b"mystery9");
    let known = ARCHITECTURES.iter().map(|row| row.name);
    let parts: Vec<&str> = known.chain(["mystery9"]).collect();
    refused(spec("f", bytes), &parts);
}

#[test]
fn a_missing_tensor_is_named() {
    let one = patched(
        bytes("qwen3"),
        b"blk.1.ffn_up.weight",
        b"blk.1.ffn_xx.weight",
    );
    refused(
        load("file.gguf", one.clone()),
        &["file.gguf", "tensor blk.1.ffn_up.weight is missing"],
    );
    let two = patched(one, b"blk.0.attn_q_norm", b"blk.0.attn_x_norm");
    refused(
        load("f", two),
        &["blk.0.attn_q_norm.weight, blk.1.ffn_up.weight are missing"],
    );
    let bias = patched(
        bytes("qwen2_yarn"),
        b"blk.1.attn_k.bias",
        b"blk.1.attn_k.bxxx",
    );
    refused(load("f", bias), &["tensor blk.1.attn_k.bias is missing"]);
    let embedding = patched(bytes("qwen3"), b"token_embd.weight", b"token_xxxx.weight");
    refused(
        load("f", embedding),
        &["tensor token_embd.weight is missing"],
    );
}

#[test]
fn a_wrong_shape_names_both_shapes() {
    let bytes = with_changed(bytes("qwen3"), "qwen3.feed_forward_length", 96, 64);
    refused(
        load("f", bytes),
        &["tensor blk.0.ffn_gate.weight", "[64, 96]", "[64, 64]"],
    );
}

#[test]
fn a_tensor_without_a_rule_is_refused() {
    let bytes = patched(
        bytes("llama_linear_biases"),
        b"blk.1.attn_q.bias",
        b"blk.1.attn_q.gain",
    );
    refused(load("f", bytes), &["tensor blk.1.attn_q.gain", "llama"]);
}

#[test]
fn unsupported_and_impossible_metadata_is_refused() {
    let with = |key: &str, value| spec("f", with_integer(bytes("qwen3"), key, value));
    with("qwen3.something_else", 8).expect("unknown keys are no harm");
    with("qwen3.expert_count", 0).expect("no experts are no mixture");
    refused(
        with("qwen3.expert_count", 8),
        &["qwen3.expert_count is 8", "mixtures of experts"],
    );
    let changed = |key: &str, from, to| spec("f", with_changed(bytes("qwen3"), key, from, to));
    refused(
        changed("qwen3.block_count", 2, 0),
        &["qwen3.block_count is 0"],
    );
    refused(
        changed("qwen3.attention.head_count_kv", 2, 3),
        &["qwen3.attention.head_count_kv is 3", "4 query heads"],
    );
    refused(
        changed("qwen3.attention.value_length", 32, 16),
        &["qwen3.attention.value_length is 16"],
    );
    refused(
        changed("qwen3.rope.dimension_count", 32, 34),
        &["qwen3.rope.dimension_count is 34"],
    );
    let key = b"qwen2.rope.scaling.type\x08\0\0\0\x04\0\0\0\0\0\0\0";
    let scaling = patched(
        bytes("qwen2_yarn"),
        &[&key[..], b"yarn"].concat(),
        &[&key[..], b"what"].concat(),
    );
    refused(
        spec("f", scaling),
        &["qwen2.rope.scaling.type", "what", "yarn"],
    );
    let keyless = patched(
        bytes("qwen3"),
        b"qwen3.embedding_length",
        b"qwen3.embedding_strength"[..22].as_ref(),
    );
    refused(spec("f", keyless), &["qwen3.embedding_length"]);
}
