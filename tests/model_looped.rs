//! Looped models in Hugging Face layout against a plain implementation: every kind at several
//! depths, in whole and in chunked prompts, on both backends. Fixtures: `make_looped_fixtures.py`.

use serde_json::Value;
use std::path::PathBuf;
use tinyloop::backend::Backend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::config::LoopsConfig;
use tinyloop::format::gguf::writer::{self, WrittenTensor};
use tinyloop::format::{MetaValue, ModelFile};
use tinyloop::model::testing::Runner;
use tinyloop::model::{self, LoadOptions, Model, ModelError};

#[path = "common/cpu_paths.rs"]
mod cpu_paths;

/// Fixture and the architecture it becomes.
const FIXTURES: &[(&str, &str)] = &[
    ("ouro", "ouro"),
    ("nanbeige", "nanbeige"),
    ("nanbeige_no_norm", "nanbeige"),
    ("huginn", "raven"),
    ("retrofit", "raven"),
    ("looped_llama", "looped-llama"),
    ("looped_llama_norm", "looped-llama"),
];

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/models/looped")
        .join(name)
}

fn load(fixture: &str, backend: &mut dyn Backend) -> Model {
    let file = model::open(&path(fixture)).expect("a sound directory");
    Model::load(&file, backend, &mut |_, _| {}).expect("a known model")
}

fn numbers(array: &Value) -> impl Iterator<Item = f64> + Clone + '_ {
    let array = array.as_array().expect("an array");
    array.iter().map(|n| n.as_f64().expect("a number"))
}

/// Largest `rms(found - wanted) / rms(wanted)` of a recorded position, and of a single logit
/// `|found - wanted| / max(1, |wanted|)`.
fn difference(fixture: &str, backend: &mut dyn Backend, chunk: usize) -> (f64, f64) {
    let model = load(fixture, backend);
    let recorded = std::fs::read(path(&format!("{fixture}.json"))).expect("committed");
    let recorded: Value = serde_json::from_slice(&recorded).expect("JSON");
    let mut runner = Runner::new(&model, backend, 48, chunk).expect("a tiny model fits");
    let (mut position_error, mut single_error) = (0.0_f64, 0.0_f64);
    for sequence in recorded["sequences"].as_array().expect("an array") {
        let tokens: Vec<u32> = numbers(&sequence["tokens"]).map(|n| n as u32).collect();
        let positions: Vec<usize> = numbers(&sequence["positions"])
            .map(|n| n as usize)
            .collect();
        for loops in numbers(&recorded["loops"]).map(|loops| loops as u32) {
            let rows = sequence["logits"][loops.to_string()].as_array();
            let mut rows = rows.expect("an array").iter();
            let wants = |position| positions.contains(&position);
            let see = |position: usize, logits: &[f32]| {
                let wanted = numbers(rows.next().expect("a row per position"));
                assert_eq!(wanted.clone().count(), logits.len(), "at {position}");
                let (mut error_squares, mut squares) = (0.0, 0.0);
                for (found, wanted) in logits.iter().zip(wanted) {
                    assert!(found.is_finite(), "{fixture}: {found} at {position}");
                    let error = (f64::from(*found) - wanted).abs();
                    single_error = single_error.max(error / wanted.abs().max(1.0));
                    error_squares += error * error;
                    squares += wanted * wanted;
                }
                position_error = position_error.max((error_squares / squares).sqrt());
            };
            runner
                .logits(&tokens, loops, wants, see)
                .expect("a valid pass");
            assert!(rows.next().is_none(), "every recorded row was compared");
        }
    }
    (position_error, single_error)
}

#[test]
fn every_looped_model_computes_what_its_reference_computes_at_every_depth() {
    for (fixture, architecture) in FIXTURES {
        for chunk in [48, 5] {
            let mut backend = ReferenceBackend::new();
            let (_, single) = difference(fixture, &mut backend, chunk);
            assert!(
                single < 1e-4,
                "{fixture} ({architecture}), chunks of {chunk}: logits differ by {single}"
            );
        }
    }
}

#[test]
fn the_cpu_backend_computes_nearly_the_same_on_every_path() {
    for path in cpu_paths::paths() {
        for (fixture, _) in FIXTURES {
            for chunk in [48, 1] {
                let mut backend = cpu_paths::cpu(path, 2);
                let (position, _) = difference(fixture, &mut backend, chunk);
                assert!(
                    position < 0.02,
                    "{fixture} on {path:?}, chunks of {chunk}: logits differ by {position}"
                );
            }
        }
    }
}

#[test]
fn depth_and_segments_come_from_the_file() {
    for (fixture, architecture) in FIXTURES {
        let model = load(fixture, &mut ReferenceBackend::new());
        assert_eq!(model.spec.architecture, *architecture, "{fixture}");
        let plan = &model.plan;
        let segments = [&plan.prelude, &plan.core, &plan.coda].map(|range| range.len());
        let wanted = match *fixture {
            "ouro" | "nanbeige" | "nanbeige_no_norm" => ([0, 2, 0], 7, 7),
            "looped_llama" => ([1, 2, 1], 4, 16),
            "looped_llama_norm" => ([1, 1, 0], 4, 16),
            _ => ([1, 2, 1], 4, 8),
        };
        assert_eq!(
            (segments, plan.default_loops, plan.max_loops),
            wanted,
            "{fixture}"
        );
        let has_gate = model.weights.exit_gate.is_some();
        assert_eq!(has_gate, *fixture == "ouro", "{fixture}");
    }
}

fn looping(layers: Option<[u32; 2]>, default: Option<u32>, max: Option<u32>) -> LoadOptions {
    let loops = LoopsConfig {
        layers,
        default,
        max,
    };
    LoadOptions {
        loops,
        ..LoadOptions::default()
    }
}

fn ordinary(options: &LoadOptions) -> Result<(Model, ReferenceBackend), ModelError> {
    let file = ModelFile::open_gguf(&path("../tiny_llama.gguf"))?;
    let mut backend = ReferenceBackend::new();
    let model = Model::load_with(&file, options, &mut backend, &mut |_, _| {})?;
    Ok((model, backend))
}

fn last_logits(options: &LoadOptions, loops: u32) -> Vec<f32> {
    let (model, mut backend) = ordinary(options).expect("a sound file");
    let mut runner = Runner::new(&model, &mut backend, 48, 16).expect("it fits");
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 300).collect();
    let mut last = Vec::new();
    let see = |_: usize, logits: &[f32]| last = logits.to_vec();
    runner
        .logits(&tokens, loops, |p| p == 39, see)
        .expect("a valid pass");
    last
}

#[test]
fn layers_of_an_ordinary_model_can_loop() {
    let plain = last_logits(&LoadOptions::default(), 1);
    for layers in [[0, 1], [1, 2], [0, 2]] {
        let options = looping(Some(layers), None, Some(3));
        let (model, _) = ordinary(&options).expect("a sound file");
        assert_eq!((model.plan.default_loops, model.plan.max_loops), (1, 3));
        assert_eq!(model.plan.core, layers[0]..layers[1]);
        // Once through is the model itself; more is something else.
        assert_eq!(last_logits(&options, 1), plain, "{layers:?}");
        assert_ne!(last_logits(&options, 2), plain, "{layers:?}");
        assert_ne!(
            last_logits(&options, 3),
            last_logits(&options, 2),
            "{layers:?}"
        );
    }
}

#[test]
fn impossible_depths_are_refused_with_the_range() {
    let cases: [(LoadOptions, &str); 7] = [
        (
            looping(Some([1, 1]), None, Some(2)),
            "[1, 1]; 0 <= first < end <= 2",
        ),
        (
            looping(Some([1, 3]), None, Some(2)),
            "[1, 3]; 0 <= first < end <= 2",
        ),
        (looping(Some([0, 1]), None, None), "needs loops.max"),
        (looping(Some([0, 1]), None, Some(0)), "loops.max is 0"),
        (
            looping(Some([0, 1]), Some(4), Some(3)),
            "loops is 4; this model runs 1 to 3 loops",
        ),
        (
            looping(None, Some(2), None),
            "loops is 2; this model runs 1 to 1 loops",
        ),
        (
            looping(None, Some(0), Some(5)),
            "loops is 0; this model runs 1 to 5 loops",
        ),
    ];
    for (options, part) in cases {
        let error = ordinary(&options).err().expect("refused").to_string();
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
    let file = model::open(&path("ouro")).expect("a sound directory");
    let options = looping(Some([0, 1]), None, Some(2));
    let mut backend = ReferenceBackend::new();
    let error = Model::load_with(&file, &options, &mut backend, &mut |_, _| {});
    let error = error.expect_err("refused").to_string();
    assert!(error.contains("loops by itself"), "{error}");
    // A looped model's depth can be lowered and raised.
    let model = Model::load_with(
        &file,
        &looping(None, Some(2), Some(9)),
        &mut backend,
        &mut |_, _| {},
    );
    let plan = model.expect("allowed").plan;
    assert_eq!((plan.default_loops, plan.max_loops), (2, 9));
}

/// A looped fixture as a GGUF file with one key changed.
fn with_key(fixture: &str, key: &str, value: MetaValue) -> Result<Model, ModelError> {
    let file = model::open(&path(fixture))?;
    let mut metadata = file.metadata().to_vec();
    metadata.retain(|(name, _)| name != key);
    metadata.push((key.to_owned(), value));
    let tensors: Vec<WrittenTensor> = file
        .tensors()
        .iter()
        .map(|info| WrittenTensor {
            name: info.name.clone(),
            dtype: info.dtype,
            dims: info.dims.clone(),
        })
        .collect();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let output = folder.join(format!("{fixture}-{key}.gguf"));
    writer::write(&output, &metadata, &tensors, |index, bytes| {
        let mut scratch = Vec::new();
        let tensor = file.read(&tensors[index].name, &mut scratch)?;
        bytes.extend_from_slice(tensor.bytes);
        Ok::<(), ModelError>(())
    })?;
    let file = ModelFile::open_gguf(&output)?;
    Model::load(&file, &mut ReferenceBackend::new(), &mut |_, _| {})
}

#[test]
fn faulty_loop_keys_are_named() {
    let text = |text: &str| MetaValue::String(text.to_owned());
    let cases = [
        (
            "huginn",
            "raven.loop.prelude",
            MetaValue::U32(3),
            "none is left to loop",
        ),
        (
            "huginn",
            "raven.num_loops",
            MetaValue::U32(0),
            "raven.num_loops is 0",
        ),
        (
            "huginn",
            "raven.num_loops",
            MetaValue::U32(9),
            "raven.loop.max is 8",
        ),
        (
            "huginn",
            "raven.loop.max",
            MetaValue::U32(u32::MAX),
            "<= 1024 must hold",
        ),
        (
            "huginn",
            "raven.loop.injection",
            text("add"),
            "none and linear",
        ),
        (
            "huginn",
            "raven.loop.state",
            text("odd"),
            "input, zero and normal",
        ),
        (
            "huginn",
            "raven.loop.state_std",
            MetaValue::F32(-1.0),
            "raven.loop.state_std is -1",
        ),
        (
            "huginn",
            "raven.loop.state_std",
            text("x"),
            "raven.loop.state_std",
        ),
        (
            "huginn",
            "raven.loop.norm",
            text("loop_norm"),
            "tensor loop_norm.weight is missing",
        ),
        (
            "huginn",
            "raven.residual_norms",
            text("both"),
            "none, inside and after",
        ),
        (
            "huginn",
            "raven.residual_norms",
            text("none"),
            "post_attention_norm.weight",
        ),
        (
            "huginn",
            "raven.embedding_scale",
            MetaValue::F32(f32::NAN),
            "must be finite",
        ),
        (
            "ouro",
            "ouro.loop.input_norm",
            text("output_norm"),
            "Prelude without blocks",
        ),
        (
            "ouro",
            "ouro.skip_loop_final_norm",
            MetaValue::U8(1),
            "ouro.skip_loop_final_norm",
        ),
    ];
    for (fixture, key, value, part) in cases {
        let error = with_key(fixture, key, value).expect_err("refused");
        let error = error.to_string();
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
    let seeded = with_key("huginn", "raven.loop.seed", MetaValue::U32(7)).expect("a sound file");
    assert!(seeded.weights.loops.start.is_some());
}
