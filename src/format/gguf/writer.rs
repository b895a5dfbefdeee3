//! Writes GGUF version 3: metadata, tensor table, tensors one by one as the caller makes them.
//!
//! The file appears under its name only when it is whole: it is written beside it and renamed, so
//! that a crash leaves no half file and the source may be the target (its map keeps the old file).
//! What is not here: which keys and types a file should have (`model/requantize`).

use super::MetaValue;
use crate::dtype::DType;
use crate::format::FormatError;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Tensors start at multiples of this.
const ALIGNMENT: u64 = 32;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// GGUF order, `dims[0]` is the row length.
    pub dims: Vec<u64>,
}

impl WrittenTensor {
    fn n_bytes(&self) -> u64 {
        let n_elements = self.dims.iter().product();
        let n_bytes = self.dtype.bytes_for(n_elements);
        n_bytes.expect("the caller chose a type whose blocks fit")
    }
}

/// Writes a file. `data` gives the bytes of tensor `i`, in ascending order.
///
/// # Errors
/// Of the file system, and whatever `data` fails with.
///
/// # Panics
/// When a tensor's bytes are not as many as its type and shape take: the caller's bug.
pub fn write<E: From<FormatError>>(
    path: &Path,
    metadata: &[(String, MetaValue)],
    tensors: &[WrittenTensor],
    mut data: impl FnMut(usize, &mut Vec<u8>) -> Result<(), E>,
) -> Result<(), E> {
    let partial = partial_path(path);
    let io = |source| FormatError::Io {
        path: partial.display().to_string(),
        source,
    };
    let mut write_all = || -> Result<(), E> {
        let mut file = BufWriter::new(File::create(&partial).map_err(io)?);
        let head = head(metadata, tensors);
        file.write_all(&head).map_err(io)?;
        let mut bytes = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            bytes.clear();
            data(index, &mut bytes)?;
            assert_eq!(bytes.len() as u64, tensor.n_bytes(), "{}", tensor.name);
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
            file.write_all(&bytes).map_err(io)?;
        }
        let file = file.into_inner().map_err(|error| io(error.into_error()))?;
        file.sync_all().map_err(io)?;
        Ok(std::fs::rename(&partial, path).map_err(io)?)
    };
    let written = write_all();
    if written.is_err() {
        // The error is what counts; a partial file that cannot be removed is litter.
        drop(std::fs::remove_file(&partial));
    }
    written
}

fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// Everything before the tensors, padded.
fn head(metadata: &[(String, MetaValue)], tensors: &[WrittenTensor]) -> Vec<u8> {
    let mut head = b"GGUF".to_vec();
    head.extend(3_u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut head, key);
        head.extend(kind(value).to_le_bytes());
        content(&mut head, value);
    }
    let mut offset = 0_u64;
    for tensor in tensors {
        string(&mut head, &tensor.name);
        head.extend((tensor.dims.len() as u32).to_le_bytes());
        for dim in &tensor.dims {
            head.extend(dim.to_le_bytes());
        }
        head.extend(tensor.dtype.gguf_id().to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += tensor.n_bytes().next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
    head
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The format's number of a kind.
fn kind(value: &MetaValue) -> u32 {
    match value {
        MetaValue::U8(_) => 0,
        MetaValue::I8(_) => 1,
        MetaValue::U16(_) => 2,
        MetaValue::I16(_) => 3,
        MetaValue::U32(_) => 4,
        MetaValue::I32(_) => 5,
        MetaValue::F32(_) => 6,
        MetaValue::Bool(_) => 7,
        MetaValue::String(_) => 8,
        MetaValue::Strings(_)
        | MetaValue::F32s(_)
        | MetaValue::I32s(_)
        | MetaValue::U32s(_)
        | MetaValue::Array(_) => 9,
        MetaValue::U64(_) => 10,
        MetaValue::I64(_) => 11,
        MetaValue::F64(_) => 12,
    }
}

fn content(out: &mut Vec<u8>, value: &MetaValue) {
    match value {
        MetaValue::U8(v) => out.push(*v),
        MetaValue::I8(v) => out.extend(v.to_le_bytes()),
        MetaValue::U16(v) => out.extend(v.to_le_bytes()),
        MetaValue::I16(v) => out.extend(v.to_le_bytes()),
        MetaValue::U32(v) => out.extend(v.to_le_bytes()),
        MetaValue::I32(v) => out.extend(v.to_le_bytes()),
        MetaValue::U64(v) => out.extend(v.to_le_bytes()),
        MetaValue::I64(v) => out.extend(v.to_le_bytes()),
        MetaValue::F32(v) => out.extend(v.to_le_bytes()),
        MetaValue::F64(v) => out.extend(v.to_le_bytes()),
        MetaValue::Bool(v) => out.push(u8::from(*v)),
        MetaValue::String(v) => string(out, v),
        MetaValue::Strings(v) => {
            array(out, 8, v.len());
            v.iter().for_each(|text| string(out, text));
        }
        MetaValue::F32s(v) => {
            array(out, 6, v.len());
            v.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        MetaValue::I32s(v) => {
            array(out, 5, v.len());
            v.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        MetaValue::U32s(v) => {
            array(out, 4, v.len());
            v.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        MetaValue::Array(v) => {
            // The reader keeps arrays of one kind only; an empty one has any.
            array(out, v.first().map_or(0, kind), v.len());
            v.iter().for_each(|value| content(out, value));
        }
    }
}

fn array(out: &mut Vec<u8>, kind: u32, length: usize) {
    out.extend(kind.to_le_bytes());
    out.extend((length as u64).to_le_bytes());
}
