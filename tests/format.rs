//! GGUF files: what a sound one gives back, what is said about a faulty one, and that no bytes at
//! all make the reader panic, read outside the file or allocate without measure.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;

use gguf_writer::{GgufWriter, TensorLine, array, string};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use tinyloop::dtype::DType;
use tinyloop::format::{MetaValue, ModelFile};

/// Counts what the running thread holds, to find the most it held.
struct Counting;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    let live = LIVE_BYTES.get() + change;
    LIVE_BYTES.set(live);
    PEAK_BYTES.set(PEAK_BYTES.get().max(live));
}

// SAFETY: every call is handed to the system's allocator unchanged; the counters are plain
// thread-local cells that neither allocate nor have a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `run` held above what was held before.
fn peak_bytes(run: impl FnOnce()) -> isize {
    let before = LIVE_BYTES.get();
    PEAK_BYTES.set(before);
    run();
    PEAK_BYTES.get() - before
}

const NAME: &str = "mutant.gguf";

fn error_of(bytes: Vec<u8>) -> String {
    ModelFile::from_gguf_bytes(NAME, bytes)
        .expect_err("the file is faulty")
        .to_string()
}

/// One value of every kind, in all the forms that arrays have.
fn every_kind() -> Vec<(&'static str, MetaValue)> {
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

fn writer_of_every_kind(version: u32) -> GgufWriter {
    every_kind()
        .iter()
        .fold(GgufWriter::new(version), |writer, (key, value)| {
            writer.key(key, value)
        })
}

/// A file with all kinds of metadata and tensors of several types and ranks. The last tensor ends
/// with the file.
fn sound_file() -> GgufWriter {
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

#[track_caller]
fn says<T: std::fmt::Debug>(result: Result<T, tinyloop::format::FormatError>, words: &[&str]) {
    let text = result.expect_err("an error is due").to_string();
    for word in [NAME].iter().chain(words) {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
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

/// A file of one tensor with this line and 64 bytes of data.
fn one_line(line: TensorLine) -> Vec<u8> {
    let mut bytes = GgufWriter::new(3).raw_tensor(line).finish();
    bytes.resize(bytes.len() + 64, 0);
    bytes
}

/// A sound line, to be made faulty in one field: "w", 16 f32, the first bytes of the data.
fn line() -> TensorLine {
    TensorLine {
        name: b"w".into(),
        dims: vec![16],
        type_id: 0,
        offset: 0,
    }
}

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

/// Opens the bytes and reads all that a sound file offers; true when it was sound. The reader may
/// hold a few times what the file has, never more.
fn survives(label: &str, bytes: Vec<u8>) -> bool {
    let most = bytes.len() as isize * 16 + 65_536;
    let mut sound = false;
    let run = || match ModelFile::from_gguf_bytes(NAME, bytes) {
        Ok(file) => {
            sound = true;
            for info in file.tensors() {
                assert!(info.file_range.end as u64 <= file.file_len());
                for error in [file.data(&info.name).err(), file.vector(&info.name).err()] {
                    let named = error.is_none_or(|e| e.to_string().starts_with(NAME));
                    assert!(named, "{label}: tensor {}", info.name);
                }
            }
        }
        Err(error) => {
            let text = error.to_string();
            let reason = text.strip_prefix(NAME).expect("the error names the file");
            assert!(reason.len() > 10, "{label}: {text:?} says nothing");
        }
    };
    let mut outcome = Ok(());
    let peak = peak_bytes(|| outcome = catch_unwind(AssertUnwindSafe(run)));
    assert!(outcome.is_ok(), "{label}: panicked");
    assert!(
        peak <= most,
        "{label}: held {peak} bytes, {most} are plenty"
    );
    sound
}

fn overwritten(file: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = file.to_vec();
    let end = file.len().min(at + with.len());
    bytes[at..end].copy_from_slice(&with[..end - at]);
    bytes
}

/// Deterministic mutations of a sound file, each with a label that finds it again.
fn mutants(file: &[u8], head_len: usize) -> Vec<(String, Vec<u8>)> {
    let mut mutants = Vec::new();
    for at in 0..head_len {
        let mut flipped = file.to_vec();
        flipped[at] ^= 1 << (at % 8);
        mutants.push((format!("bit {} of byte {at} flipped", at % 8), flipped));
        for length in [0, 1 << 31, 1 << 62, u64::MAX] {
            let bytes = overwritten(file, at, &u64::to_le_bytes(length));
            mutants.push((format!("length {length} at {at}"), bytes));
        }
        for id in [0_u32, 6, 8, 9, 12, 13, 30] {
            let bytes = overwritten(file, at, &id.to_le_bytes());
            mutants.push((format!("type {id} at {at}"), bytes));
        }
    }
    for at in (0..head_len).step_by(5) {
        for n_bytes in [1, 8, 24, 100] {
            let end = file.len().min(at + n_bytes);
            let doubled = [&file[..end], &file[at..]].concat();
            mutants.push((format!("{n_bytes} bytes at {at} doubled"), doubled));
            let removed = [&file[..at], &file[end..]].concat();
            mutants.push((format!("{n_bytes} bytes at {at} removed"), removed));
        }
    }
    mutants
}

#[test]
fn no_mutation_of_a_sound_file_does_harm() {
    let writer = sound_file();
    let (file, head_len) = (writer.finish(), writer.head().len());
    assert!(survives("the sound file", file.clone()));
    let mutants = mutants(&file, head_len);
    let n_mutants = mutants.len();
    let n_refused = mutants
        .into_iter()
        .filter(|(label, bytes)| !survives(label, bytes.clone()))
        .count();
    assert!(n_mutants > 5_000, "{n_mutants} mutants");
    assert!(n_refused > 1_000, "{n_refused} of {n_mutants} refused");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let file = sound_file().finish();
    for end in 0..file.len() {
        let sound = survives(&format!("cut at {end}"), file[..end].to_vec());
        assert!(!sound, "cut at {end} of {}", file.len());
    }
}

proptest! {
    #[test]
    fn random_bytes_do_no_harm(
        start in 0_usize..32,
        bytes in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        // A sound beginning takes the random rest past the first checks.
        let mut writer = GgufWriter::new(3);
        (writer.n_tensors, writer.n_keys) = (Some(1), Some(2));
        let head = writer.head();
        let bytes = [&head[..start.min(head.len())], &bytes].concat();
        survives("random bytes", bytes);
    }

    #[test]
    fn random_edits_do_no_harm(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut file = sound_file().finish();
        for (place, byte) in edits {
            let at = place.index(file.len());
            file[at] = byte;
        }
        survives("random edits", file);
    }
}

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

/// Bytes of mapped files that are resident in this process.
fn resident_file_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("RssFile:")).unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes * 1024
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
fn a_tensor_that_is_done_leaves_memory_and_stays_readable() {
    const NAME: &str = "token_embd.weight";
    const N_BYTES: u64 = 30_081_024;
    let file = ModelFile::open_gguf(&demo_model()).unwrap();
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    let bytes = file.data(NAME).unwrap().bytes;
    let before = sum(bytes);
    let resident = resident_file_bytes();
    assert!(resident >= N_BYTES, "{resident} bytes while in use");
    file.advise_done(NAME);
    file.advise_done("no such tensor");
    // Other tests touch far less of files meanwhile.
    let released = resident.saturating_sub(resident_file_bytes());
    assert!(released > N_BYTES * 3 / 4, "{released} bytes released");
    assert_eq!(sum(bytes), before);
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
