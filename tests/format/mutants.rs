//! No bytes at all make the reader panic, read outside the file or allocate without measure.

use crate::allocation::peak_bytes;
use crate::gguf_writer::GgufWriter;
use crate::support::*;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tinyloop::format::ModelFile;

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
