//! Directories in Hugging Face layout: logits and tokens as the transformers library has them, what
//! is said about directories that do not fit, and the way through `quantize` to a GGUF file.
//! Fixtures: `make_hf_fixtures.py`, `make_looped_fixtures.py`.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tinyloop::backend::Backend;
use tinyloop::backend::cpu::CpuBackend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::cli::quantize::{self, QuantizeArgs};
use tinyloop::config::QuantizeType;
use tinyloop::dtype::DType;
use tinyloop::format::ModelFile;
use tinyloop::model::testing::Runner;
use tinyloop::model::{self, LoadOptions, Model, ModelError, requantize};
use tinyloop::tokenizer::chat_template::TemplateInput;
use tinyloop::tokenizer::{ChatTemplate, EncodeOptions, Tokenizer};

fn data(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/data/models").join(name)
}

fn recorded(fixture: &str) -> Value {
    let text = std::fs::read(data(&format!("{fixture}.json"))).expect("committed");
    serde_json::from_slice(&text).expect("JSON")
}

fn numbers(array: &Value) -> Vec<f64> {
    let array = array.as_array().expect("an array").iter();
    array.map(|n| n.as_f64().expect("a number")).collect()
}

/// Largest `rms(found - wanted) / rms(wanted)` over the recorded positions of a fixture; those of a
/// looped model at this depth.
fn difference(
    file: &ModelFile,
    fixture: &str,
    loops: u32,
    options: &LoadOptions,
    backend: &mut dyn Backend,
) -> f64 {
    let model = Model::load_with(file, options, backend, &mut |_, _| {}).expect("a known model");
    let mut runner = Runner::new(&model, backend, 96, 32).expect("a tiny model fits");
    let mut largest = 0.0_f64;
    for sequence in recorded(fixture)["sequences"].as_array().expect("an array") {
        let tokens: Vec<u32> = numbers(&sequence["tokens"])
            .iter()
            .map(|n| *n as u32)
            .collect();
        let positions = numbers(&sequence["positions"]);
        let mut rows = sequence["logits"].as_array();
        if rows.is_none() {
            rows = sequence["logits"][loops.to_string()].as_array();
        }
        let mut rows = rows.expect("an array").iter();
        let wants = |position: usize| positions.contains(&(position as f64));
        let see = |_: usize, logits: &[f32]| {
            let wanted = numbers(rows.next().expect("a row per position"));
            let pairs = wanted.iter().zip(logits);
            let error: f64 = pairs.map(|(w, f)| (w - f64::from(*f)).powi(2)).sum();
            let size: f64 = wanted.iter().map(|w| w * w).sum();
            largest = largest.max((error / size).sqrt());
        };
        runner
            .logits(&tokens, loops, wants, see)
            .expect("a valid pass");
        assert!(rows.next().is_none(), "every recorded row was compared");
    }
    largest
}

fn open(fixture: &str) -> ModelFile {
    model::open(&data(fixture)).expect("a sound directory")
}

#[test]
fn checkpoints_compute_what_transformers_computes() {
    let plain = LoadOptions::default();
    for fixture in ["hf/llama", "hf/qwen2", "hf/qwen3"] {
        let file = open(fixture);
        let found = difference(&file, fixture, 1, &plain, &mut ReferenceBackend::new());
        assert!(found < 1e-5, "{fixture}: logits differ by {found}");
        let mut cpu = CpuBackend::new(Some(2)).expect("threads");
        let found = difference(&file, fixture, 1, &plain, &mut cpu);
        assert!(
            found < 0.02,
            "{fixture} on the CPU: logits differ by {found}"
        );
    }
}

#[test]
fn texts_become_the_tokens_that_transformers_makes() {
    for fixture in ["hf/llama", "hf/qwen3"] {
        let file = open(fixture);
        let tokenizer = Tokenizer::from_gguf(&file).expect("a vocabulary");
        let options = EncodeOptions {
            add_special: true,
            parse_special: true,
        };
        let texts = recorded(fixture)["texts"].clone();
        for case in texts.as_array().expect("an array") {
            let text = case["text"].as_str().expect("a text");
            let wanted: Vec<u32> = numbers(&case["tokens"]).iter().map(|n| *n as u32).collect();
            assert_eq!(
                tokenizer.encode(text, options),
                wanted,
                "{fixture}: {text:?}"
            );
        }
    }
}

#[test]
fn ends_and_templates_come_from_the_files_beside_the_vocabulary() {
    let file = open("hf/llama");
    let tokenizer = Tokenizer::from_gguf(&file).expect("a vocabulary");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(0), Some(2)));
    assert_eq!(
        tokenizer.end_tokens(),
        [0, 1, 2],
        "by name and by eos_token_id"
    );
    let source = file.str("tokenizer.chat_template").expect("a template");
    let template = ChatTemplate::compile(source, "<|endoftext|>", "<|im_end|>").expect("valid");
    let chat = recorded("hf/llama")["chat"].clone();
    let input = TemplateInput {
        messages: chat["messages"].as_array().expect("messages").clone(),
        add_generation_prompt: true,
        ..TemplateInput::default()
    };
    let text = template.render(&input).expect("it renders");
    assert_eq!(Some(text.as_str()), chat["text"].as_str());
}

/// A copy of a fixture that a test may spoil.
fn copy_of(fixture: &str, name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("huggingface-{name}"));
    drop(std::fs::remove_dir_all(&folder));
    std::fs::create_dir_all(&folder).expect("a writable target directory");
    for entry in std::fs::read_dir(data(fixture)).expect("committed") {
        let path = entry.expect("readable").path();
        let to = folder.join(path.file_name().expect("a file"));
        std::fs::copy(&path, to).expect("room");
    }
    folder
}

/// Replaces a key of a JSON file of the folder.
fn set(folder: &Path, file: &str, key: &str, value: Value) {
    let path = folder.join(file);
    let text = std::fs::read(&path).expect("present");
    let mut json: Value = serde_json::from_slice(&text).expect("JSON");
    json[key] = value;
    std::fs::write(&path, json.to_string()).expect("room");
}

#[track_caller]
fn refused(folder: &Path, parts: &[&str]) {
    let load = || -> Result<Model, ModelError> {
        let file = model::open(folder)?;
        Model::load(&file, &mut ReferenceBackend::new(), &mut |_, _| {})
    };
    let error = match load() {
        Ok(_) => panic!("accepted, instead of an error with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn faulty_configurations_name_file_and_key() {
    let cases: [(&str, &str, Value, &[&str]); 14] = [
        (
            "hf/qwen2",
            "hidden_size",
            json!("64"),
            &["config.json", "hidden_size is \"64\"", "integer"],
        ),
        (
            "hf/qwen2",
            "hidden_size",
            Value::Null,
            &["config.json: hidden_size is missing"],
        ),
        (
            "hf/qwen2",
            "hidden_size",
            json!(48),
            &["token_embd.weight", "[48, 97]", "[32, 97]"],
        ),
        (
            "hf/qwen2",
            "hidden_act",
            json!("gelu"),
            &["hidden_act is \"gelu\"", "silu"],
        ),
        (
            "hf/qwen2",
            "model_type",
            json!("mystery"),
            &["mystery", "llama", "huginn_raven"],
        ),
        (
            "hf/qwen2",
            "num_hidden_layers",
            json!(3),
            &["blk.2.attn_norm.weight"],
        ),
        (
            "hf/qwen2",
            "num_hidden_layers",
            json!(1),
            &["model.layers.1."],
        ),
        (
            "hf/qwen2",
            "num_attention_heads",
            json!(0),
            &["attention.head_count is 0"],
        ),
        (
            "hf/llama",
            "num_attention_heads",
            json!(5),
            &["q_proj.weight", "5 heads"],
        ),
        (
            "hf/llama",
            "rope_parameters",
            json!({"rope_type": "llama3"}),
            &["rope_parameters.factor is missing"],
        ),
        (
            "hf/llama",
            "rope_parameters",
            json!({"rope_type": "odd"}),
            &["rope type \"odd\"", "yarn"],
        ),
        (
            "looped/huginn",
            "injection_type",
            json!("add"),
            &["injection_type is \"add\"", "linear"],
        ),
        (
            "hf/qwen2",
            "num_hidden_layers",
            json!(4_000_000_000_u32),
            &["num_hidden_layers is 4000000000", "4096"],
        ),
        (
            "looped/huginn",
            "n_layers_in_recurrent_block",
            json!(0),
            &["none is left to loop"],
        ),
    ];
    for (index, (fixture, key, value, parts)) in cases.into_iter().enumerate() {
        let folder = copy_of(fixture, &format!("config-{index}"));
        set(&folder, "config.json", key, value);
        refused(&folder, parts);
    }
}

#[test]
fn faulty_directories_say_what_is_missing() {
    let folder = copy_of("hf/qwen2", "no-config");
    std::fs::remove_file(folder.join("config.json")).expect("present");
    refused(&folder, &["no-config", "no config.json"]);
    let folder = copy_of("hf/qwen2", "not-json");
    std::fs::write(folder.join("config.json"), "{").expect("room");
    refused(&folder, &["config.json", "not JSON"]);
    let folder = copy_of("hf/qwen2", "no-weights");
    std::fs::remove_file(folder.join("model.safetensors")).expect("present");
    refused(&folder, &["no-weights", "no .safetensors file"]);
    let folder = copy_of("hf/llama", "no-index");
    std::fs::remove_file(folder.join("model.safetensors.index.json")).expect("present");
    refused(&folder, &["no-index", "2 .safetensors files"]);
    let folder = copy_of("hf/llama", "no-shard");
    std::fs::remove_file(folder.join("model-00002-of-00002.safetensors")).expect("present");
    refused(&folder, &["model-00002-of-00002.safetensors"]);
    let folder = copy_of("hf/llama", "leads-elsewhere");
    let map = json!({"a": "../model.safetensors"});
    set(&folder, "model.safetensors.index.json", "weight_map", map);
    refused(&folder, &["tensor a", "no plain file name"]);
    let folder = copy_of("hf/llama", "not-there");
    let map = json!({"a": "model-00001-of-00002.safetensors"});
    set(&folder, "model.safetensors.index.json", "weight_map", map);
    refused(
        &folder,
        &["model-00001-of-00002.safetensors", "tensor a is missing"],
    );
    let folder = copy_of("hf/qwen2", "cut");
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).expect("present");
    std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("room");
    refused(&folder, &["model.safetensors", "truncated"]);
}

#[test]
fn no_mutation_of_the_small_files_does_harm() {
    for (fixture, file) in [
        ("hf/llama", "config.json"),
        ("hf/llama", "tokenizer_config.json"),
        ("hf/llama", "model.safetensors.index.json"),
        ("looped/huginn", "config.json"),
        ("looped/looped_llama", "config.json"),
    ] {
        let folder = copy_of(fixture, "mutant");
        let sound = std::fs::read(folder.join(file)).expect("present");
        for at in (0..sound.len()).step_by(7) {
            for value in [b'0', b'9', b'"', b'{', b'x', 0xff] {
                let mut bytes = sound.clone();
                bytes[at] = value;
                std::fs::write(folder.join(file), bytes).expect("room");
                // Sound, or an error; no panic, and no allocation by a size that a file claims.
                if let Ok(file) = model::open(&folder) {
                    drop(Tokenizer::from_gguf(&file));
                    drop(tinyloop::model::ModelSpec::from_gguf(&file));
                }
            }
        }
    }
}

#[test]
fn no_mutation_of_a_checkpoint_does_harm() {
    for (fixture, file) in [
        ("looped/huginn", "model.safetensors"),
        ("looped/retrofit", "model.safetensors"),
        ("hf/llama", "model-00001-of-00002.safetensors"),
    ] {
        let folder = copy_of(fixture, "mutant-checkpoint");
        let sound = std::fs::read(folder.join(file)).expect("present");
        let header_len = u64::from_le_bytes(sound[..8].try_into().expect("8 bytes")) as usize;
        let mut n_loaded = 0;
        for at in (0..8 + header_len).step_by(13) {
            for value in [b'0', b'1', b'4', b'"', b'x'] {
                let mut bytes = sound.clone();
                bytes[at] = value;
                std::fs::write(folder.join(file), bytes).expect("room");
                let Ok(file) = model::open(&folder) else {
                    continue;
                };
                let mut backend = ReferenceBackend::new();
                n_loaded += usize::from(Model::load(&file, &mut backend, &mut |_, _| {}).is_ok());
            }
        }
        // Some mutations change nothing that matters: the loader was really reached.
        assert!(n_loaded > 0, "{fixture}");
    }
}

/// The bounds are wide: random weights average nothing out, and every loop adds to the error. That
/// the types themselves are right is tested beside the quantizers, on single blocks.
#[test]
fn weights_can_be_quantized_while_they_are_loaded() {
    for (fixture, loops) in [
        ("hf/llama", 1),
        ("looped/huginn", 1),
        ("looped/looped_llama", 1),
    ] {
        let file = open(fixture);
        for (dtype, most) in [(DType::Q8_0, 0.15), (DType::Q4_1, 1.0), (DType::Q4_K, 1.0)] {
            let options = LoadOptions {
                quantize: Some(dtype),
                ..LoadOptions::default()
            };
            let mut backend = ReferenceBackend::new();
            let found = difference(&file, fixture, loops, &options, &mut backend);
            assert!(
                found < most,
                "{fixture} as {dtype}: logits differ by {found}"
            );
            assert!(found > 1e-4, "{fixture} as {dtype}: nothing was quantized");
        }
    }
}

fn quantized(from: &Path, name: &str, to: QuantizeType) -> ModelFile {
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("quantized-{name}.gguf"));
    let args = QuantizeArgs {
        input: from.to_owned(),
        output: output.clone(),
        to,
        threads: Some(2),
    };
    quantize::run(&args).expect("it can be written");
    model::open(&output).expect("what was written is sound")
}

#[test]
fn a_quantized_file_computes_what_quantizing_at_load_computes() {
    for (fixture, loops) in [
        ("hf/llama", 1),
        ("hf/qwen3", 1),
        ("looped/ouro", 7),
        ("looped/nanbeige_no_norm", 2),
        ("looped/huginn", 1),
        ("looped/retrofit", 4),
        ("looped/looped_llama_norm", 2),
    ] {
        for (to, most) in [
            (QuantizeType::F16, 0.004),
            (QuantizeType::Q8_0, 0.15),
            (QuantizeType::Q4_0, 1.0),
        ] {
            let name = format!("{}-{to:?}", fixture.replace('/', "-"));
            let file = quantized(&data(fixture), &name, to);
            let plain = LoadOptions::default();
            let found = difference(&file, fixture, loops, &plain, &mut ReferenceBackend::new());
            assert!(found < most, "{name}: logits differ by {found}");
            let at_load = LoadOptions {
                quantize: Some(requantize::dtype_of(to)),
                ..plain
            };
            let mut backend = ReferenceBackend::new();
            let wanted = difference(&open(fixture), fixture, loops, &at_load, &mut backend);
            // Norms are f32 in the file and BF16 in the checkpoint: the same values.
            assert!(
                (found - wanted).abs() < 1e-9,
                "{name}: {found} and {wanted}"
            );
        }
    }
}

#[test]
fn a_quantized_file_keeps_metadata_and_vocabulary() {
    let source = open("hf/llama");
    let file = quantized(&data("hf/llama"), "metadata", QuantizeType::Q8_0);
    for (key, value) in source.metadata() {
        assert_eq!(file.get(key), Some(value), "{key}");
    }
    assert_eq!(file.str("tokenizer.ggml.pre").expect("named"), "smaug-bpe");
    assert_eq!(file.u32("general.file_type").expect("set"), 7);
    let [before, after] = [&source, &file].map(|file| Tokenizer::from_gguf(file).expect("sound"));
    let options = EncodeOptions {
        add_special: true,
        parse_special: true,
    };
    let text = "Once upon a time, 1234 naïve 🙂 <|im_end|>";
    assert_eq!(before.encode(text, options), after.encode(text, options));
    assert_eq!(before.end_tokens(), after.end_tokens());
    // A GGUF file goes in as well, over itself, and comes out with other types.
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("quantized-metadata.gguf");
    let again = quantized(&path, "metadata", QuantizeType::Q4_1);
    assert_eq!(again.metadata().len(), file.metadata().len());
    let dtype = |name: &str| again.tensor(name).expect("present").dtype;
    assert_eq!(dtype("blk.0.ffn_up.weight"), DType::Q4_1);
    assert_eq!(dtype("token_embd.weight"), DType::Q8_0);
    assert_eq!(dtype("blk.0.attn_norm.weight"), DType::F32);
}
