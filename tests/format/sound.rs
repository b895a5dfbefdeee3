//! What a sound file gives back.

use crate::gguf_writer::GgufWriter;
use crate::support::*;
use tinyloop::dtype::DType;
use tinyloop::format::{MetaValue, ModelFile};

#[test]
fn all_metadata_comes_back_as_it_was_written_in_both_versions() {
    for version in [2, 3] {
        let bytes = writer_of_every_kind(version).finish();
        let file = ModelFile::from_gguf_bytes(NAME, bytes.clone()).unwrap();
        assert_eq!(file.container(), format!("GGUF v{version}"));
        assert_eq!(file.file_len(), bytes.len() as u64);
        let wanted: Vec<(String, MetaValue)> = every_kind()
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        assert_eq!(file.metadata(), wanted);
        for (key, value) in &wanted {
            assert_eq!(file.get(key), Some(value));
        }
        assert_eq!(file.get("absent"), None);
        assert!(file.tensors().is_empty());
    }
}

#[test]
fn typed_getters_convert_between_widths() {
    let file = ModelFile::from_gguf_bytes(NAME, sound_file().finish()).unwrap();
    assert_eq!(file.u32("u8").unwrap(), 255);
    assert_eq!(file.u32("u32").unwrap(), u32::MAX);
    assert_eq!(file.optional_u32("absent").unwrap(), None);
    assert_eq!(file.f32("f32").unwrap(), 1.0e-5);
    assert_eq!(file.f32("f64").unwrap(), 0.1_f32);
    assert_eq!(file.optional_bool("yes").unwrap(), Some(true));
    assert_eq!(file.str("empty string").unwrap(), "");
    let strings = file.optional_strings("strings").unwrap().unwrap();
    assert_eq!(strings, ["a", "", "ß"]);
    let floats = file.optional_f32s("f32s").unwrap().unwrap();
    assert_eq!(floats, [1.5, -0.0, f32::INFINITY]);
    for (key, wanted) in [
        ("i32s", vec![-1, 0, 1]),
        ("u32s", vec![0, i64::from(u32::MAX)]),
        ("u8s", vec![1, 2]),
        ("i64s", vec![-5, 1 << 40]),
    ] {
        assert_eq!(file.optional_ints(key).unwrap(), Some(wanted), "{key}");
    }
}

#[test]
fn typed_getters_name_the_key_and_both_kinds() {
    let file = ModelFile::from_gguf_bytes(NAME, sound_file().finish()).unwrap();
    says(file.u32("absent"), &["key absent is missing"]);
    says(file.f32("absent"), &["key absent is missing"]);
    says(file.str("absent"), &["key absent is missing"]);
    says(
        file.u32("string"),
        &["key string is", "of kind string", "an integer"],
    );
    says(file.u32("i8"), &["key i8 is -128", "0 to 4294967295"]);
    says(
        file.u32("u64"),
        &["18446744073709551615", "0 to 4294967295"],
    );
    says(file.f32("u8"), &["key u8 is 255", "a float"]);
    says(file.optional_bool("u8"), &["key u8", "a bool"]);
    says(file.optional_str("yes"), &["key yes is true", "a string"]);
    says(file.optional_strings("f32s"), &["array of f32", "strings"]);
    says(
        file.optional_f32s("i32s"),
        &["array of i32", "array of f32"],
    );
    says(file.optional_ints("f32s"), &["array of f32", "integers"]);
    says(file.optional_ints("bools"), &["key bools", "integers"]);
    assert_eq!(file.invalid("odd").to_string(), format!("{NAME}: odd"));
}

#[test]
fn tensors_come_back_with_their_shapes_and_bytes() {
    for alignment in [8, 32, 64, 4096] {
        let writer = GgufWriter::new(3).alignment(alignment);
        let bytes: Vec<u8> = (0..68).collect();
        let file = writer
            .tensor("vector", &[2], DType::F32, &bytes[..8])
            .tensor("matrix", &[32, 2], DType::Q8_0, &bytes)
            .tensor("flat", &[2, 1, 1], DType::F16, &bytes[..4])
            .tensor("cube", &[1, 2, 2], DType::F16, &bytes[..8])
            .finish();
        let file = ModelFile::from_gguf_bytes(NAME, file).unwrap();
        let matrix = file.data("matrix").unwrap();
        assert_eq!((matrix.n_out, matrix.n_in), (2, 32));
        assert_eq!((matrix.name, matrix.dtype), ("matrix", DType::Q8_0));
        assert_eq!(matrix.bytes, bytes);
        let vector = file.data("vector").unwrap();
        assert_eq!((vector.n_out, vector.n_in), (1, 2));
        let flat = file.data("flat").unwrap();
        assert_eq!((flat.n_out, flat.n_in), (1, 2));
        assert_eq!(file.tensor("cube").unwrap().n_elements(), 4);
        says(file.data("cube"), &["tensor cube", "[1, 2, 2]"]);
        says(file.data("absent"), &["tensor absent is missing"]);
        says(file.vector("absent"), &["tensor absent is missing"]);
        for info in file.tensors() {
            assert!(info.file_range.start.is_multiple_of(alignment as usize));
        }
    }
}
