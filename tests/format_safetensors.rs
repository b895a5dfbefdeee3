//! safetensors files: what a sound one gives back, what is said about a faulty one, and that no
//! bytes at all make the reader panic or read outside the file.

use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tinyloop::dtype::DType;
use tinyloop::format::Safetensors;

const NAME: &str = "mutant.safetensors";

/// A file with this header and `n_data` bytes of data that count up.
fn file(header: &str, n_data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..n_data).map(|i| i as u8));
    bytes
}

fn entry(name: &str, dtype: &str, shape: &str, from: u64, to: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
}

fn sound_header() -> String {
    let entries = [
        r#""__metadata__":{"format":"pt"}"#.to_owned(),
        entry("a.weight", "F32", "[2,3]", 0, 24),
        entry("b.weight", "BF16", "[4]", 24, 32),
        entry("c", "F16", "[1,2,1]", 32, 36),
        entry("counter", "I64", "[]", 36, 44),
        entry("empty", "F32", "[0,3]", 44, 44),
    ];
    format!("{{{}}}   ", entries.join(","))
}

fn error_of(bytes: Vec<u8>) -> String {
    match Safetensors::from_bytes(NAME, bytes) {
        Ok(_) => panic!("the file is faulty"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn tensors_come_back_with_their_shapes_and_bytes() {
    let file = Safetensors::from_bytes(NAME, file(&sound_header(), 44)).expect("sound");
    let entries = file.entries();
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["a.weight", "b.weight", "c", "counter", "empty"]);
    assert_eq!(entries[0].shape, [2, 3]);
    assert_eq!(entries[0].dtype, Ok(DType::F32));
    assert_eq!(entries[1].dtype, Ok(DType::BF16));
    assert_eq!(entries[2].dtype, Ok(DType::F16));
    assert_eq!(entries[3].dtype, Err("I64".to_owned()));
    assert_eq!(file.data(&entries[1]), (24..32).collect::<Vec<u8>>());
    assert!(file.data(&entries[4]).is_empty());
    assert_eq!(file.name(), NAME);
}

#[test]
fn every_fault_is_named() {
    let one = |dtype, shape, from, to| {
        let header = format!("{{{}}}", entry("t", dtype, shape, from, to));
        file(&header, 16)
    };
    let twice = format!(
        "{{{},{}}}",
        entry("t", "F32", "[1]", 0, 4),
        entry("t", "F32", "[1]", 4, 8)
    );
    let overlap = format!(
        "{{{},{}}}",
        entry("t", "F32", "[2]", 0, 8),
        entry("u", "F32", "[2]", 4, 12)
    );
    let cases: Vec<(Vec<u8>, &[&str])> = vec![
        (vec![], &["0 bytes are too few"]),
        (vec![1, 0, 0], &["3 bytes are too few"]),
        (b"version https://git-lfs".to_vec(), &["LFS pointer"]),
        (b"GGUF\x03\0\0\0\0\0\0\0".to_vec(), &["it is a GGUF file"]),
        (file("{}", 0)[..9].to_vec(), &["ends after 1"]),
        (file("[]", 0), &["an object with an entry per tensor"]),
        (file("{", 0), &["EOF"]),
        (file(r#"{"t":{}}"#, 0), &["tensor t", "missing field"]),
        (file(r#"{"t":{"dtype":1}}"#, 0), &["tensor t", "a string"]),
        (
            one("F32", "[4]", 0, 20),
            &["tensor t", "[0, 20]", "has 16 bytes"],
        ),
        (one("F32", "[4]", 8, 4), &["tensor t", "[8, 4]"]),
        (
            one("F32", "[3]", 0, 16),
            &["tensor t", "[3] of F32", "16 bytes"],
        ),
        (one("BF16", "[16]", 0, 16), &["tensor t", "BF16"]),
        (
            one("F32", "[9223372036854775807,9]", 0, 16),
            &["tensor t", "overflows"],
        ),
        (
            one("F32", "[1,1,1,1,1,1,1,1,4]", 0, 16),
            &["tensor t has 9 dimensions"],
        ),
        (one("F32", "[-1]", 0, 16), &["tensor t", "-1"]),
        (file(&twice, 8), &["tensor t appears twice"]),
        (file(&overlap, 12), &["tensors t and u overlap"]),
    ];
    for (bytes, parts) in cases {
        let error = error_of(bytes);
        assert!(error.starts_with(NAME), "{error}");
        for part in parts {
            assert!(error.contains(part), "{error:?} does not say {part:?}");
        }
    }
    let mut absurd = file("{}", 0);
    absurd[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(error_of(absurd).contains("100000000 are the most"));
}

/// Opens the bytes and touches every tensor; whatever happens, no panic, and errors have a name.
fn survives(label: &str, bytes: Vec<u8>) {
    let run = || match Safetensors::from_bytes(NAME, bytes) {
        Ok(file) => {
            for entry in file.entries() {
                let n_bytes = file.data(entry).len() as u64;
                if let Ok(dtype) = &entry.dtype {
                    let n_elements: u64 = entry.shape.iter().product();
                    assert_eq!(dtype.bytes_for(n_elements), Some(n_bytes), "{label}");
                }
            }
        }
        Err(error) => {
            let text = error.to_string();
            let reason = text.strip_prefix(NAME).expect("the error names the file");
            assert!(reason.len() > 10, "{label}: {text:?} says nothing");
        }
    };
    assert!(
        catch_unwind(AssertUnwindSafe(run)).is_ok(),
        "{label}: panicked"
    );
}

#[test]
fn no_mutation_of_a_sound_file_does_harm() {
    let sound = file(&sound_header(), 44);
    for end in 0..sound.len() {
        survives(&format!("cut at {end}"), sound[..end].to_vec());
    }
    for at in 0..sound.len() {
        for value in [0, 1, b'"', b'{', b'}', b'9', b'-', 0x7f, 0x80, 0xff] {
            let mut bytes = sound.clone();
            bytes[at] = value;
            survives(&format!("byte {at} is {value}"), bytes);
        }
    }
}

proptest! {
    #[test]
    fn no_bytes_do_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        survives("random bytes", bytes);
    }

    #[test]
    fn no_random_header_does_harm(
        shapes in proptest::collection::vec((any::<u64>(), any::<u64>(), 0..60_u64, 0..60_u64), 1..5),
    ) {
        let entries: Vec<String> = shapes
            .iter()
            .enumerate()
            .map(|(i, (a, b, from, to))| entry(&format!("t{i}"), "F16", &format!("[{a},{b}]"), *from, *to))
            .collect();
        survives("random header", file(&format!("{{{}}}", entries.join(",")), 50));
    }
}
