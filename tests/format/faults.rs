//! What is said about faulty heads and tensors.

use crate::allocation::peak_bytes;
use crate::gguf_writer::{GgufWriter, TensorLine, array, string};
use crate::support::*;
use tinyloop::format::ModelFile;

fn faulty_heads() -> Vec<(&'static str, Vec<u8>, &'static [&'static str])> {
    let new = || GgufWriter::new(3);
    let with = |change: fn(&mut GgufWriter)| {
        let mut writer = new();
        change(&mut writer);
        writer.finish()
    };
    let many = u64::from(u32::MAX);
    vec![
        ("empty", vec![], &["not a GGUF file", "empty"]),
        ("three bytes", b"GGU".into(), &["not a GGUF file"]),
        (
            "zip",
            with(|w| w.magic = *b"PK\x03\x04"),
            &["not a GGUF", "PyTorch"],
        ),
        ("lfs", b"version https://git-lfs".into(), &["git lfs pull"]),
        ("old magic", with(|w| w.magic = *b"tjgg"), &["before GGUF"]),
        (
            "version 0",
            with(|w| w.version = 0),
            &["version 0", "2 and 3"],
        ),
        ("version 1", with(|w| w.version = 1), &["version 1"]),
        (
            "version 4",
            with(|w| w.version = 4),
            &["version 4", "2 and 3"],
        ),
        ("big-endian", with(|w| w.version = 3 << 24), &["big-endian"]),
        (
            "no counts",
            b"GGUF\x03\0\0\0".into(),
            &["number of tensors"],
        ),
        (
            "tensor count",
            with(|w| w.n_tensors = Some(1 << 62)),
            &["number of tensors", "room for 0"],
        ),
        (
            "key count",
            with(|w| w.n_keys = Some(u64::MAX)),
            &["metadata keys", "room for 0"],
        ),
        (
            "empty key",
            new().raw_key(b"", 0, &[1]).finish(),
            &["metadata key 0", "0 bytes"],
        ),
        (
            "key of other bytes",
            new().raw_key(b"a\xff", 0, &[1]).finish(),
            &["metadata key 0", "not UTF-8"],
        ),
        (
            "long key",
            new().raw_key(&[b'k'; 65_536], 0, &[1]).finish(),
            &["65536 bytes", "65535"],
        ),
        (
            "twice the same key",
            new().raw_key(b"k", 0, &[1]).raw_key(b"k", 0, &[2]).finish(),
            &["key k appears twice"],
        ),
        (
            "value type",
            new().raw_key(b"k", 13, &[0; 8]).finish(),
            &["key k", "13", "0 to 12"],
        ),
        (
            "element type",
            new().raw_key(b"k", 9, &array(99, 0, &[])).finish(),
            &["key k", "99"],
        ),
        (
            "bool",
            new().raw_key(b"k", 7, &[2]).finish(),
            &["key k", "byte 2"],
        ),
        (
            "string value of other bytes",
            new().raw_key(b"k", 8, &string(b"ok\xc3")).finish(),
            &["value of k", "not UTF-8", "byte 2 of 3"],
        ),
        (
            "string length",
            new()
                .raw_key(b"k", 8, &(1_u64 << 62).to_le_bytes())
                .finish(),
            &["truncated", "value of k"],
        ),
        (
            "array length",
            new().raw_key(b"k", 9, &array(4, many, &[0; 64])).finish(),
            &["length of array k", "4294967295"],
        ),
        (
            "array of strings",
            new()
                .raw_key(b"k", 9, &array(8, 1 << 60, &[0; 64]))
                .finish(),
            &["length of array k"],
        ),
        (
            "nested arrays",
            new().raw_key(b"k", 9, &nested(5)).finish(),
            &["key k", "deeper than 4"],
        ),
        (
            "alignment 0",
            new().raw_key(b"general.alignment", 4, &[0; 4]).finish(),
            &["general.alignment is 0", "power of two"],
        ),
        (
            "alignment 24",
            new()
                .raw_key(b"general.alignment", 4, &[24, 0, 0, 0])
                .finish(),
            &["general.alignment is 24"],
        ),
        (
            "alignment 2^31",
            new()
                .raw_key(b"general.alignment", 4, &[0, 0, 0, 128])
                .finish(),
            &["general.alignment is 2147483648"],
        ),
        (
            "alignment in words",
            new()
                .raw_key(b"general.alignment", 8, &string(b"32"))
                .finish(),
            &["general.alignment", "string"],
        ),
        (
            "control characters",
            new().raw_key(b"a\n\x1b[2J", 13, &[]).finish(),
            &["a\\n\\u{1b}[2J"],
        ),
    ]
}

/// The content of `depth` arrays within each other.
fn nested(depth: usize) -> Vec<u8> {
    (1..depth).fold(array(0, 0, &[]), |inner, _| array(9, 1, &inner))
}

fn faulty_tensors() -> Vec<(&'static str, Vec<u8>, &'static [&'static str])> {
    let dims = |dims: &[u64]| {
        let dims = dims.to_vec();
        one_line(TensorLine { dims, ..line() })
    };
    let of_type = |type_id| one_line(TensorLine { type_id, ..line() });
    let at = |offset| one_line(TensorLine { offset, ..line() });
    let named = |name: &[u8]| {
        let name = name.to_vec();
        one_line(TensorLine { name, ..line() })
    };
    let two = |second: TensorLine| {
        let mut bytes = GgufWriter::new(3)
            .raw_tensor(line())
            .raw_tensor(second)
            .finish();
        bytes.resize(bytes.len() + 256, 0);
        bytes
    };
    vec![
        ("no dimension", dims(&[]), &["tensor w", "0 dimensions"]),
        (
            "five dimensions",
            dims(&[1; 5]),
            &["tensor w", "5 dimensions"],
        ),
        (
            "dimension 0",
            dims(&[16, 0]),
            &["tensor w", "a dimension is 0"],
        ),
        (
            "overflow",
            dims(&[1 << 40, 1 << 40]),
            &["tensor w", "overflow"],
        ),
        (
            "overflow of bytes",
            dims(&[1 << 62, 2]),
            &["tensor w", "overflow"],
        ),
        (
            "rows of 16 in blocks of 32",
            of_type(8),
            &["tensor w", "rows of 16", "32"],
        ),
        (
            "type 23",
            of_type(23),
            &["tensor w", "23 (IQ4_XS)", "Q4_K (12)"],
        ),
        (
            "type 4 billion",
            of_type(u32::MAX),
            &["tensor w", "4294967295", "IQ4_NL (20)"],
        ),
        (
            "offset 4",
            at(4),
            &["tensor w", "offset 4", "multiple of 32"],
        ),
        (
            "offset past the end",
            at(1 << 20),
            &["tensor w", "file ends at"],
        ),
        (
            "offset 2^64 - 32",
            at(u64::MAX - 31),
            &["tensor w", "overflows"],
        ),
        (
            "a byte too long",
            dims(&[17]),
            &["tensor w", "file ends at"],
        ),
        ("empty name", named(b""), &["name of tensor 0", "0 bytes"]),
        (
            "name of other bytes",
            named(b"\xff"),
            &["name of tensor 0", "not UTF-8"],
        ),
        (
            "same name twice",
            two(TensorLine {
                offset: 64,
                ..line()
            }),
            &["tensor w appears twice"],
        ),
        (
            "overlap",
            two(TensorLine {
                name: b"v".into(),
                offset: 32,
                ..line()
            }),
            &["w and v overlap"],
        ),
        (
            "same place",
            two(TensorLine {
                name: b"v".into(),
                ..line()
            }),
            &["overlap"],
        ),
    ]
}

#[test]
fn every_fault_is_named() {
    ModelFile::from_gguf_bytes(NAME, one_line(line()))
        .expect("the line that is made faulty is sound");
    ModelFile::from_gguf_bytes(
        NAME,
        GgufWriter::new(3).raw_key(b"k", 9, &nested(4)).finish(),
    )
    .expect("four arrays within each other are allowed");
    for (fault, bytes, words) in faulty_heads().into_iter().chain(faulty_tensors()) {
        let text = error_of(bytes);
        for word in [NAME].iter().chain(words) {
            assert!(text.contains(word), "{fault}: {word:?} is not in {text:?}");
        }
        assert!(
            text.len() < 500,
            "{fault}: an error of {} bytes",
            text.len()
        );
        assert!(!text.contains('\u{1b}'), "{fault}: raw control characters");
    }
}

#[test]
fn arrays_that_would_grow_in_memory_are_limited_over_the_whole_file() {
    // Each array is allowed alone; together they are not. A bool takes 32 bytes in memory.
    let bools = array(7, 400_000, &vec![1; 400_000]);
    let mut writer = GgufWriter::new(3);
    for key in [b"a", b"b", b"c"] {
        writer = writer.raw_key(key, 9, &bools);
    }
    let text = error_of(writer.finish());
    assert!(text.contains("array c has 400000 elements"), "{text}");
    let strings = array(8, 5_000_000, &vec![0; 40_000_000]);
    let mut text = String::new();
    let bytes = GgufWriter::new(3).raw_key(b"s", 9, &strings).finish();
    let peak = peak_bytes(|| text = error_of(bytes));
    assert!(text.contains("array s has 5000000 elements"), "{text}");
    assert!(peak < 1 << 20, "{peak} bytes");
}
