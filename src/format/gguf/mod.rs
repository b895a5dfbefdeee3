//! GGUF v2 and v3: memory-mapped, validated against the file's length before anything is touched.
//!
//! Immutable after `open`; shared by reference. Every tensor's byte range lies inside the file,
//! holds exactly its weights and shares no byte with another's (`header.rs` has the layout).
//!
//! **The memory map.** Opening costs the head only; pages come in as tensors are used. The lengths
//! hold for the file as it was at open. When another process truncates it in place while it is
//! mapped, or its disk fails, touching a lost page ends the process with SIGBUS: the system has
//! no error return for this, short of copying the whole file. Renaming a new file over the old one
//! is safe, writing into it is not. The window is the load: the model is copied out of the map,
//! then the map is dropped with the `Gguf`.
//!
//! What is not here: what keys and tensors mean (`model`, `tokenizer`).

mod header;
mod meta;
mod reader;

use super::FormatError;
use crate::backend::TensorData;
use crate::backend::reference::dequant;
use crate::dtype::DType;
use memmap2::{Mmap, UncheckedAdvice};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use header::{Header, read_header};
pub use meta::MetaValue;
use reader::shown;

/// A tensor's place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// GGUF order: `dims[0]` is the row length (n_in), `dims[1]` the number of rows (n_out).
    pub dims: Vec<u64>,
    /// Byte range in the file, within its length (checked at open).
    pub file_range: Range<usize>,
}

impl TensorInfo {
    /// Weights in the tensor.
    #[must_use]
    pub fn n_elements(&self) -> u64 {
        self.dims.iter().product() // checked at open
    }
}

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// An open, validated file.
pub struct Gguf {
    name: String,
    bytes: Bytes,
    header: Header,
    key_index: HashMap<String, usize>,
    tensor_index: HashMap<String, usize>,
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (n_keys, n_tensors) = (self.header.metadata.len(), self.header.tensors.len());
        write!(f, "Gguf({}, {n_keys} keys, {n_tensors} tensors)", self.name)
    }
}

impl Gguf {
    /// Maps and validates a file.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let name = path.display().to_string();
        let io = |source| FormatError::Io {
            path: name.clone(),
            source,
        };
        // Asked before opening: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).map_err(io)?;
        if !metadata.is_file() {
            let reason = "it is not a regular file; a GGUF file is needed".to_owned();
            return Err(FormatError::Invalid { path: name, reason });
        }
        if metadata.len() == 0 {
            // An empty file cannot be mapped.
            return Self::from_bytes(&name, Vec::new());
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only and this process never writes to the file. Rust's aliasing
        // rules hold as long as no other process does while it is mapped, which is the contract of
        // a model file; all reads stay inside the length of the map. The module's page says what a
        // truncation by someone else does.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Self::parse(name, Bytes::Mapped(map))
    }

    /// The same over bytes in memory (tests, fuzzing). `name` is used in errors.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, FormatError> {
        Self::parse(name.to_owned(), Bytes::Owned(bytes))
    }

    fn parse(name: String, bytes: Bytes) -> Result<Self, FormatError> {
        let header = read_header(bytes.as_slice()).map_err(|reason| FormatError::Invalid {
            path: name.clone(),
            reason,
        })?;
        let by_name = |(index, name): (usize, &String)| (name.clone(), index);
        let key_index = header
            .metadata
            .iter()
            .map(|(key, _)| key)
            .enumerate()
            .map(by_name)
            .collect();
        let tensor_index = header
            .tensors
            .iter()
            .map(|info| &info.name)
            .enumerate()
            .map(by_name)
            .collect();
        Ok(Self {
            name,
            bytes,
            header,
            key_index,
            tensor_index,
        })
    }

    /// File format version, 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Bytes of the file.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.bytes.as_slice().len() as u64
    }

    /// All metadata in file order.
    #[must_use]
    pub fn metadata(&self) -> &[(String, MetaValue)] {
        &self.header.metadata
    }

    /// One value.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&MetaValue> {
        self.key_index
            .get(key)
            .map(|&index| &self.header.metadata[index].1)
    }

    /// An error that carries this file's name.
    #[must_use]
    pub fn invalid(&self, reason: impl Into<String>) -> FormatError {
        FormatError::Invalid {
            path: self.name.clone(),
            reason: reason.into(),
        }
    }

    fn required<T>(&self, key: &str, found: Option<T>) -> Result<T, FormatError> {
        found.ok_or_else(|| self.invalid(format!("key {} is missing", shown(key))))
    }

    /// A value of a wanted kind: None when absent, an error when it is of another kind.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        convert: impl Fn(&'a MetaValue) -> Option<T>,
    ) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(self.invalid(format!(
                "key {} is {}, {wanted} is needed",
                shown(key),
                value.described()
            ))),
        }
    }

    /// Integer of any width; Err names the key when it is missing or of another kind.
    pub fn u32(&self, key: &str) -> Result<u32, FormatError> {
        let found = self.optional_u32(key)?;
        self.required(key, found)
    }

    /// Integer, None when absent, Err when of another kind or outside u32.
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, FormatError> {
        let to_u32 = |value: &MetaValue| value.as_integer().and_then(|v| u32::try_from(v).ok());
        self.typed(key, "an integer from 0 to 4294967295", to_u32)
    }

    /// Float of any width.
    pub fn f32(&self, key: &str) -> Result<f32, FormatError> {
        let found = self.optional_f32(key)?;
        self.required(key, found)
    }

    /// Float, None when absent.
    pub fn optional_f32(&self, key: &str) -> Result<Option<f32>, FormatError> {
        self.typed(key, "a float", MetaValue::as_float)
    }

    /// Bool, None when absent.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>, FormatError> {
        let to_bool = |value: &MetaValue| match value {
            MetaValue::Bool(flag) => Some(*flag),
            _ => None,
        };
        self.typed(key, "a bool", to_bool)
    }

    /// String.
    pub fn str(&self, key: &str) -> Result<&str, FormatError> {
        let found = self.optional_str(key)?;
        self.required(key, found)
    }

    /// String, None when absent.
    pub fn optional_str(&self, key: &str) -> Result<Option<&str>, FormatError> {
        self.typed(key, "a string", |value| match value {
            MetaValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Array of strings, None when absent.
    pub fn optional_strings(&self, key: &str) -> Result<Option<&[String]>, FormatError> {
        self.typed(key, "an array of strings", |value| match value {
            MetaValue::Strings(texts) => Some(texts.as_slice()),
            _ => None,
        })
    }

    /// Array of floats, None when absent.
    pub fn optional_f32s(&self, key: &str) -> Result<Option<&[f32]>, FormatError> {
        self.typed(key, "an array of f32", |value| match value {
            MetaValue::F32s(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    /// Array of integers of any width, None when absent.
    pub fn optional_ints(&self, key: &str) -> Result<Option<Vec<i64>>, FormatError> {
        self.typed(key, "an array of integers", MetaValue::as_integers)
    }

    /// All tensors in file order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// One tensor's entry.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index
            .get(name)
            .map(|&index| &self.header.tensors[index])
    }

    /// A tensor as a matrix (1-D tensors: n_out = 1). Err names the tensor when it is missing or
    /// has more than two dimensions that are not 1.
    pub fn data(&self, name: &str) -> Result<TensorData<'_>, FormatError> {
        let info = self
            .tensor(name)
            .ok_or_else(|| self.invalid(format!("tensor {} is missing", shown(name))))?;
        let n_out: u64 = info.dims.iter().skip(1).product();
        if info.dims.iter().skip(2).any(|&dim| dim != 1) {
            let reason = format!(
                "tensor {} has shape {:?}, one or two dimensions are needed",
                shown(name),
                info.dims
            );
            return Err(self.invalid(reason));
        }
        Ok(TensorData {
            name: &info.name,
            dtype: info.dtype,
            n_out: n_out as usize,
            n_in: info.dims[0] as usize,
            bytes: &self.bytes.as_slice()[info.file_range.clone()],
        })
    }

    /// A tensor dequantized to f32 (small ones: norms, biases, rope factors).
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        let data = self.data(name)?;
        let mut values = vec![0.0; data.n_out * data.n_in];
        dequant::dequantize(data.dtype, data.bytes, &mut values);
        Ok(values)
    }

    /// Tells the operating system that a tensor's pages are not needed any more, so that a loader
    /// which copies weights does not hold the file resident as well. Only a hint: the tensor stays
    /// readable, its pages come back when touched. Does nothing for an unknown name or for bytes
    /// in memory.
    pub fn advise_done(&self, name: &str) {
        let (Some(info), Bytes::Mapped(map)) = (self.tensor(name), &self.bytes) else {
            return;
        };
        let range = &info.file_range;
        // SAFETY: this advice is unsafe where it can change what memory holds: on private or
        // anonymous memory. This map is shared, file-backed and read-only, so a dropped page
        // comes back from the file with the same bytes and slices into it stay valid. The range
        // lies inside the map (checked at open; the call checks it again).
        let advised = unsafe {
            map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len())
        };
        // A system that refuses the hint costs memory, nothing else.
        drop(advised);
    }
}
