//! safetensors: the head of one file, validated before any tensor is touched.
//!
//! ```text
//! header length u64 | header: JSON object | tensor data (offsets count from here)
//! { "__metadata__": {..}, NAME: { "dtype": "BF16", "shape": [n_out, n_in], "data_offsets": [from, to] }, .. }
//! ```
//!
//! Immutable after `open`. Every entry of a known type lies inside the file, holds exactly its
//! weights and shares no byte with another's. The `safetensors` crate checks the same, but its
//! errors do not say which tensor is wrong, and users need that. A type that we do not compute
//! with is kept by name: checkpoints carry integer buffers that nothing reads, so it is an error
//! only when somebody asks for it. What is not here: which files make a model, what names mean
//! (`model/huggingface`).

use super::bytes::Bytes;
use super::{FormatError, shown};
use crate::dtype::DType;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::ops::Range;
use std::path::Path;

/// Longest header; the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Most dimensions of a tensor.
const DIMS_MAX: usize = 8;

/// An open, validated file.
pub struct Safetensors {
    name: String,
    bytes: Bytes,
    entries: Vec<Entry>,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name.
    pub name: String,
    /// Element type; the file's word for it when it is none of ours.
    pub dtype: Result<DType, String>,
    /// As the file has it: `[n_out, n_in]` for a matrix.
    pub shape: Vec<u64>,
    /// Byte range in the file, within its length.
    pub file_range: Range<usize>,
}

/// What is wrong, without the file's name.
type Fault = String;

impl Safetensors {
    /// Maps and validates a file.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let bytes = Bytes::open(path, "a safetensors file")?;
        Self::parse(path.display().to_string(), bytes)
    }

    /// The same over bytes in memory (tests, fuzzing). `name` is used in errors.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, FormatError> {
        Self::parse(name.to_owned(), Bytes::Owned(bytes))
    }

    fn parse(name: String, bytes: Bytes) -> Result<Self, FormatError> {
        match read_entries(bytes.as_slice()) {
            Ok(entries) => Ok(Self {
                name,
                bytes,
                entries,
            }),
            Err(reason) => Err(FormatError::Invalid { path: name, reason }),
        }
    }

    /// All tensors, in the header's order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Path of the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The bytes of an entry of this file.
    #[must_use]
    pub fn data(&self, entry: &Entry) -> &[u8] {
        &self.bytes.as_slice()[entry.file_range.clone()]
    }

    /// The bytes, for a [`super::ModelFile`] that points into them.
    pub(super) fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

fn read_entries(bytes: &[u8]) -> Result<Vec<Entry>, Fault> {
    let (header, data_start) = split_header(bytes)?;
    let Header(lines) = serde_json::from_slice(header)
        .map_err(|error| format!("the header is not what safetensors has: {error}"))?;
    let data_len = (bytes.len() - data_start) as u64;
    let entries = lines
        .into_iter()
        .map(|(name, line)| check(name, line, data_start, data_len))
        .collect::<Result<Vec<Entry>, Fault>>()?;
    check_overlaps(&entries)?;
    Ok(entries)
}

/// The header's bytes and where the data begin.
fn split_header(bytes: &[u8]) -> Result<(&[u8], usize), Fault> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(format!(
            "{} bytes are too few for a safetensors file",
            bytes.len()
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(format!(
            "the header would have {length} bytes, {HEADER_BYTES_MAX} are the most: not a safetensors file{}",
            looks_like(bytes)
        ));
    }
    let Some(header) = rest.get(..length as usize) else {
        return Err(format!(
            "the header has {length} bytes, but the file ends after {}: truncated or not a safetensors file",
            rest.len()
        ));
    };
    Ok((header, 8 + length as usize))
}

/// A guess at what a file is instead.
fn looks_like(bytes: &[u8]) -> &'static str {
    match bytes {
        [b'v', b'e', b'r', b's', ..] => " (a Git LFS pointer? `git lfs pull` fetches the file)",
        [b'<', ..] => " (an HTML page: the download failed)",
        [b'P', b'K', ..] => " (a zip archive or a PyTorch checkpoint)",
        [b'G', b'G', b'U', b'F', ..] => " (it is a GGUF file)",
        _ => "",
    }
}

/// A line of the header.
#[derive(serde::Deserialize)]
struct Line {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's tensors in order. A name that stands twice is an error: readers disagree about
/// which of the two counts.
struct Header(Vec<(String, Line)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Lines;
        impl<'de> Visitor<'de> for Lines {
            type Value = Header;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with an entry per tensor")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Header, M::Error> {
                let mut lines: Vec<(String, Line)> = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                        continue;
                    }
                    if !seen.insert(name.clone()) {
                        let text = format!("tensor {} appears twice", shown(&name));
                        return Err(M::Error::custom(text));
                    }
                    let line = map.next_value().map_err(|error| {
                        M::Error::custom(format!("tensor {}: {error}", shown(&name)))
                    })?;
                    lines.push((name, line));
                }
                Ok(Header(lines))
            }
        }
        deserializer.deserialize_map(Lines)
    }
}

fn check(name: String, line: Line, data_start: usize, data_len: u64) -> Result<Entry, Fault> {
    let title = shown(&name);
    let [from, to] = line.data_offsets;
    if from > to || to > data_len {
        return Err(format!(
            "tensor {title} has data_offsets [{from}, {to}], the file has {data_len} bytes of data: truncated or corrupt"
        ));
    }
    let shape = &line.shape;
    if shape.len() > DIMS_MAX {
        return Err(format!(
            "tensor {title} has {} dimensions, {DIMS_MAX} are the most",
            shape.len()
        ));
    }
    let n_elements = shape
        .iter()
        .try_fold(1_u64, |product, &dim| product.checked_mul(dim))
        .ok_or_else(|| format!("tensor {title} has shape {shape:?}: it overflows"))?;
    let dtype = known_type(&line.dtype);
    if let Ok(dtype) = dtype
        && dtype.bytes_for(n_elements) != Some(to - from)
    {
        return Err(format!(
            "tensor {title} has shape {shape:?} of {}, but {} bytes of data",
            line.dtype,
            to - from
        ));
    }
    Ok(Entry {
        name,
        dtype: dtype.map_err(|()| line.dtype),
        shape: line.shape,
        file_range: data_start + from as usize..data_start + to as usize,
    })
}

fn known_type(name: &str) -> Result<DType, ()> {
    match name {
        "F32" => Ok(DType::F32),
        "F16" => Ok(DType::F16),
        "BF16" => Ok(DType::BF16),
        _ => Err(()),
    }
}

/// No two tensors share bytes.
fn check_overlaps(entries: &[Entry]) -> Result<(), Fault> {
    let mut by_start: Vec<&Entry> = entries
        .iter()
        .filter(|entry| !entry.file_range.is_empty())
        .collect();
    by_start.sort_by_key(|entry| entry.file_range.start);
    for pair in by_start.windows(2) {
        if pair[1].file_range.start < pair[0].file_range.end {
            return Err(format!(
                "tensors {} and {} overlap at byte {}",
                shown(&pair[0].name),
                shown(&pair[1].name),
                pair[1].file_range.start
            ));
        }
    }
    Ok(())
}
