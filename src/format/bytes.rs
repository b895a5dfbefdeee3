//! The bytes of a file: mapped, owned (tests, synthesized tensors), or part of the program. The only `unsafe` of `format/`.
//!
//! Immutable after opening; shared by reference.
//!
//! **The memory map.** Opening costs nothing; pages come in as they are used. The length holds for
//! the file as it was at open. When another process truncates it in place while it is mapped, or
//! its disk fails, touching a lost page ends the process with SIGBUS: the system has no error
//! return for this. So the map is for the header, which is read in the first milliseconds, and for
//! tools; weights are copied with ordinary reads ([`Bytes::copy_into`]), for which a file that got
//! shorter is an error. Renaming a new file over the old one is always safe.

use super::FormatError;
use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that do not change.
pub(super) enum Bytes {
    /// A mapped file, and the file itself for ordinary reads.
    Mapped(Mmap, File),
    /// Memory.
    Owned(Vec<u8>),
    /// A file that was compiled into the program.
    Embedded(&'static [u8]),
}

impl Bytes {
    /// Maps a regular file. `wanted` says what should stand there, for errors.
    pub(super) fn open(path: &Path, wanted: &str) -> Result<Self, FormatError> {
        let name = || path.display().to_string();
        let fault = |source| FormatError::Io {
            path: name(),
            source,
        };
        // Asked before opening: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).map_err(fault)?;
        if !metadata.is_file() {
            return Err(FormatError::Invalid {
                path: name(),
                reason: format!("it is not a regular file; {wanted} is needed"),
            });
        }
        if metadata.len() == 0 {
            // An empty file cannot be mapped.
            return Ok(Self::Owned(Vec::new()));
        }
        let file = File::open(path).map_err(fault)?;
        // SAFETY: the map is read-only and this process never writes to the file. Rust's aliasing
        // rules hold as long as no other process does while it is mapped, which is the contract of
        // a model file; all reads stay inside the length of the map. The module's page says what a
        // truncation by someone else does.
        let map = unsafe { Mmap::map(&file) }.map_err(fault)?;
        Ok(Self::Mapped(map, file))
    }

    /// All of them.
    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map, _) => map,
            Bytes::Owned(bytes) => bytes,
            Bytes::Embedded(bytes) => bytes,
        }
    }

    /// Copies a range into `out` without touching the map. False when the bytes are in memory: then
    /// `as_slice` is as good.
    ///
    /// # Errors
    /// The file got shorter since it was opened, or the disk fails.
    pub(super) fn copy_into(&self, range: &Range<usize>, out: &mut Vec<u8>) -> io::Result<bool> {
        let Bytes::Mapped(_, file) = self else {
            return Ok(false);
        };
        out.resize(range.len(), 0);
        file.read_exact_at(out, range.start as u64)?;
        Ok(true)
    }
}
