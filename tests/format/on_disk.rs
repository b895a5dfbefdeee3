//! Files on a disk: the demo model, its pages in memory, and what is no regular file.

use std::path::PathBuf;
use tinyloop::dtype::DType;
use tinyloop::format::ModelFile;

fn demo_model() -> PathBuf {
    let path = std::env::var_os("TINYLOOP_DEMO_MODEL").map_or_else(
        || {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
            root.join("target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    assert!(
        path.is_file(),
        "{} is missing: run `make model` first",
        path.display()
    );
    path
}

#[test]
fn the_demo_model_has_its_known_content() {
    let file = ModelFile::open_gguf(&demo_model()).unwrap();
    assert_eq!(file.container(), "GGUF v3");
    assert_eq!(file.file_len(), 98_362_432);
    assert_eq!(file.metadata().len(), 33);
    assert_eq!(file.tensors().len(), 272);
    assert_eq!(file.str("general.architecture").unwrap(), "llama");
    assert_eq!(file.u32("llama.block_count").unwrap(), 30);
    assert_eq!(file.u32("llama.attention.head_count_kv").unwrap(), 3);
    assert_eq!(file.f32("llama.rope.freq_base").unwrap(), 100_000.0);
    let key = "llama.attention.layer_norm_rms_epsilon";
    assert_eq!(file.f32(key).unwrap(), 1.0e-5);
    let key = "tokenizer.ggml.add_bos_token";
    assert_eq!(file.optional_bool(key).unwrap(), Some(false));
    let n_strings = |key| file.optional_strings(key).unwrap().unwrap().len();
    assert_eq!(n_strings("tokenizer.ggml.tokens"), 49_152);
    assert_eq!(n_strings("tokenizer.ggml.merges"), 48_900);
    let key = "tokenizer.ggml.token_type";
    let kinds = file.optional_ints(key).unwrap().unwrap();
    assert_eq!(kinds.iter().filter(|kind| **kind == 3).count(), 17);
    let total = |dtype| {
        let of_type = file.tensors().iter().filter(|info| info.dtype == dtype);
        let bytes = of_type.clone().map(|info| info.file_range.len()).sum();
        (of_type.count(), bytes)
    };
    assert_eq!(total(DType::Q4_1), (210, 66_355_200_usize));
    assert_eq!(total(DType::F32), (61, 140_544));
    assert_eq!(total(DType::Q8_0), (1, 30_081_024));
    assert_eq!(
        file.tensors().iter().map(|i| i.file_range.start).min(),
        Some(1_785_664)
    );
    let embedding = file.data("token_embd.weight").unwrap();
    assert_eq!((embedding.n_out, embedding.n_in), (49_152, 576));
    assert_eq!(file.vector("output_norm.weight").unwrap().len(), 576);
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    for (path, word) in [
        (root.clone(), "not a regular file"),
        (PathBuf::from("/dev/null"), "not a regular file"),
        (root.join("no-such-model.gguf"), "No such file"),
        (root.join("Cargo.toml"), "not a GGUF file"),
    ] {
        let text = ModelFile::open_gguf(&path).unwrap_err().to_string();
        assert!(text.starts_with(&path.display().to_string()), "{text}");
        assert!(text.contains(word), "{text}");
    }
}

/// A file that somebody truncates in place while it is loaded must not take the process with it.
#[test]
fn a_file_that_got_shorter_is_an_error() {
    let folder = std::env::temp_dir().join(format!("tinyloop-shrinks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("model.gguf");
    let tiny = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    std::fs::copy(tiny, &path).unwrap();
    let file = ModelFile::open_gguf(&path).unwrap();
    let last = file
        .tensors()
        .iter()
        .max_by_key(|info| info.file_range.end)
        .unwrap()
        .name
        .clone();
    assert!(file.vector(&last).is_ok());
    let shorter = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    shorter.set_len(5000).unwrap();
    let error = file.vector(&last).unwrap_err().to_string();
    assert!(
        error.contains(&last) && error.contains("changed"),
        "{error}"
    );
    let mut scratch = Vec::new();
    assert!(file.read(&last, &mut scratch).is_err());
    std::fs::remove_dir_all(folder).unwrap();
}
