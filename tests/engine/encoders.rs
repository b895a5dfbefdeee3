//! Embedding models from files against a plain float64 implementation, and their tokenizer against
//! one written out in Python. Fixtures: `tests/scripts/make_embedding_fixtures.py`.

use crate::support::*;
use serde_json::Value;
use std::path::PathBuf;
use tinyloop::backend::Backend;
use tinyloop::backend::cpu::{CpuBackend, Path};
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::config::{EngineConfig, Pooling};
use tinyloop::engine::{Engine, EngineParts};
use tinyloop::format::ModelFile;
use tinyloop::model::{DeclaredPooling, Model, ModelSpec};
use tinyloop::request::*;
use tinyloop::tokenizer::{EncodeOptions, Tokenizer};

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

fn recorded(name: &str) -> Value {
    let text = std::fs::read_to_string(data(name)).expect("the fixtures are committed");
    serde_json::from_str(&text).expect("JSON")
}

fn numbers(value: &Value) -> Vec<f64> {
    let items = value.as_array().expect("an array").iter();
    items.map(|item| item.as_f64().expect("a number")).collect()
}

/// `(largest difference of a coordinate, 1 - cosine)`
fn difference(found: &[f32], wanted: &[f64]) -> (f64, f64) {
    assert_eq!(found.len(), wanted.len());
    let found: Vec<f64> = found.iter().map(|value| f64::from(*value)).collect();
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let largest = found
        .iter()
        .zip(wanted)
        .map(|(found, wanted)| (found - wanted).abs())
        .fold(0.0, f64::max);
    let cosine = dot(&found, wanted) / (dot(&found, &found) * dot(wanted, wanted)).sqrt();
    (largest, 1.0 - cosine)
}

fn check(name: &str, backend: &dyn Fn() -> Box<dyn Backend>, limits: (f64, f64)) {
    let file = ModelFile::open_gguf(&data(&format!("models/{name}.gguf"))).expect("a sound file");
    let fixture = recorded(&format!("models/{name}.json"));
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
        let mut backend = backend();
        let what = format!("{name} {pooling:?} {}", backend.name());
        let model = Model::load(&file, backend.as_mut(), &mut |_, _| {}).expect("a known model");
        let mut engine = Engine::new(EngineParts {
            backend,
            model,
            end_tokens: vec![],
            config: EngineConfig {
                pooling: Some(pooling),
                ..EngineConfig::default()
            },
        })
        .expect("a small engine");
        // All texts in one batch.
        let sequences = fixture["sequences"].as_array().expect("an array");
        let outcomes: Vec<_> = sequences
            .iter()
            .map(|sequence| {
                let tokens = numbers(&sequence["tokens"]);
                let tokens: Vec<TokenId> = tokens.iter().map(|token| *token as u32).collect();
                submit(&mut engine, &GenerationRequest::embedding(tokens))
            })
            .collect();
        drain(&mut engine);
        for (sequence, outcome) in sequences.iter().zip(outcomes) {
            let outcome = outcome.lock();
            let found = outcome.embedding.as_ref().expect("an embedding");
            let (largest, angle) = difference(found, &numbers(&sequence[pooling.name()]));
            assert!(
                largest < limits.0 && angle < limits.1,
                "{what}: {largest} {angle}"
            );
        }
    }
}

#[test]
fn encoders_equal_a_plain_implementation() {
    for name in ["tiny_bert", "tiny_nomic_bert"] {
        check(name, &|| Box::new(ReferenceBackend::new()), (2e-4, 1e-8));
        for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
            let backend = || -> Box<dyn Backend> {
                let builder = CpuBackend::builder().path(path).threads(2);
                Box::new(builder.build().expect("threads"))
            };
            // f16 keys and values, and int8 inputs of the one quantized matrix.
            check(name, &backend, (0.15, 1e-3));
        }
    }
}

#[test]
fn the_file_says_what_it_is() {
    for name in ["tiny_bert", "tiny_nomic_bert"] {
        let file = ModelFile::open_gguf(&data(&format!("models/{name}.gguf"))).expect("sound");
        let spec = ModelSpec::from_gguf(&file).expect("a known model");
        assert_eq!(spec.pooling, DeclaredPooling::Is(Pooling::Mean));
        assert_eq!(spec.encoder.map(|encoder| encoder.n_token_types), Some(2));
        assert!(spec.plan().is_bidirectional);
        assert_eq!(spec.rotates(0), name == "tiny_nomic_bert");
    }
}

#[test]
fn word_pieces_equal_the_reference() {
    let file = ModelFile::open_gguf(&data("models/tiny_bert.gguf")).expect("a sound file");
    let tokenizer = Tokenizer::from_gguf(&file).expect("a WordPiece vocabulary");
    let options = EncodeOptions {
        add_special: true,
        parse_special: true,
    };
    let fixture = recorded("tokenizer_wordpiece.json");
    let cases = fixture["cases"].as_array().expect("an array");
    assert!(cases.len() > 50);
    for case in cases {
        let text = case["text"].as_str().expect("a text");
        let wanted = numbers(&case["tokens"]);
        let wanted: Vec<TokenId> = wanted.iter().map(|token| *token as u32).collect();
        assert_eq!(tokenizer.encode(text, options), wanted, "{text:?}");
    }
    let plain = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
    let tokens = tokenizer.encode("The end of the world [SEP]!", plain);
    assert!(
        tokens
            .iter()
            .all(|token| !tokenizer.is_control(*token) || *token == 1)
    );
    let tokens = tokenizer.encode("hello worlds, the end", options);
    assert_eq!(tokenizer.decode(&tokens, true), "hello worlds , the end");
}
