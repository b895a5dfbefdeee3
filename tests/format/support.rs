//! What all tests of GGUF files share: sound files to begin with, and how an error is read.

use crate::gguf_writer::{GgufWriter, TensorLine};
use tinyloop::dtype::DType;
use tinyloop::format::{MetaValue, ModelFile};

pub(crate) const NAME: &str = "mutant.gguf";

pub(crate) fn error_of(bytes: Vec<u8>) -> String {
    ModelFile::from_gguf_bytes(NAME, bytes)
        .expect_err("the file is faulty")
        .to_string()
}

/// One value of every kind, in all the forms that arrays have.
pub(crate) fn every_kind() -> Vec<(&'static str, MetaValue)> {
    use MetaValue::{Array, Bool, F32, F32s, F64, I8, I16, I32, I32s, I64, Strings, U8, U16, U32};
    let nested = Array(vec![
        MetaValue::U32s(vec![1, 2]),
        MetaValue::U32s(vec![]),
        MetaValue::U32s(vec![3]),
    ]);
    vec![
        ("u8", U8(u8::MAX)),
        ("i8", I8(i8::MIN)),
        ("u16", U16(u16::MAX)),
        ("i16", I16(i16::MIN)),
        ("u32", U32(u32::MAX)),
        ("i32", I32(i32::MIN)),
        ("u64", MetaValue::U64(u64::MAX)),
        ("i64", I64(i64::MIN)),
        ("f32", F32(1.0e-5)),
        ("f64", F64(0.1)),
        ("yes", Bool(true)),
        ("no", Bool(false)),
        ("string", MetaValue::String("Grüße \u{0} \n".into())),
        ("empty string", MetaValue::String(String::new())),
        ("strings", Strings(vec!["a".into(), "".into(), "ß".into()])),
        ("no strings", Strings(vec![])),
        ("f32s", F32s(vec![1.5, -0.0, f32::INFINITY])),
        ("i32s", I32s(vec![-1, 0, 1])),
        ("u32s", MetaValue::U32s(vec![0, u32::MAX])),
        ("u8s", Array(vec![U8(1), U8(2)])),
        ("bools", Array(vec![Bool(true), Bool(false)])),
        ("i64s", Array(vec![I64(-5), I64(1 << 40)])),
        ("nested", nested),
    ]
}

pub(crate) fn writer_of_every_kind(version: u32) -> GgufWriter {
    every_kind()
        .iter()
        .fold(GgufWriter::new(version), |writer, (key, value)| {
            writer.key(key, value)
        })
}

/// A file with all kinds of metadata and tensors of several types and ranks. The last tensor ends
/// with the file.
pub(crate) fn sound_file() -> GgufWriter {
    let f32_bytes: Vec<u8> = [1.0_f32, -2.0, 0.5]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    let blocks = |n: usize| (0..n).map(|i| (i * 7) as u8).collect::<Vec<u8>>();
    writer_of_every_kind(3)
        .tensor("norm", &[3], DType::F32, &f32_bytes)
        .tensor("matrix", &[64, 2], DType::Q8_0, &blocks(4 * 34))
        .tensor("cube", &[2, 2, 2, 1], DType::F16, &blocks(16))
        .tensor("super", &[256], DType::Q4_K, &blocks(144))
}

#[track_caller]
pub(crate) fn says<T: std::fmt::Debug>(
    result: Result<T, tinyloop::format::FormatError>,
    words: &[&str],
) {
    let text = result.expect_err("an error is due").to_string();
    for word in [NAME].iter().chain(words) {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// A file of one tensor with this line and 64 bytes of data.
pub(crate) fn one_line(line: TensorLine) -> Vec<u8> {
    let mut bytes = GgufWriter::new(3).raw_tensor(line).finish();
    bytes.resize(bytes.len() + 64, 0);
    bytes
}

/// A sound line, to be made faulty in one field: "w", 16 f32, the first bytes of the data.
pub(crate) fn line() -> TensorLine {
    TensorLine {
        name: b"w".into(),
        dims: vec![16],
        type_id: 0,
        offset: 0,
    }
}
