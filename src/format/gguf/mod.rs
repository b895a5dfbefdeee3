//! GGUF v2 and v3: memory-mapped, validated against the file's length before anything is touched.
//!
//! ```text
//! magic "GGUF" | version u32 | n_tensors u64 | n_keys u64
//! n_keys   x ( key | kind u32 | value )
//! n_tensors x ( name | n_dims u32 | dims u64.. | type u32 | offset u64 )
//! padding to `general.alignment` | tensor data (offsets count from here)
//! ```
//!
//! Immutable after `open`; shared by reference. Every tensor's byte range lies inside the file.
//! A file that another process truncates while it is mapped would still end the process with
//! SIGBUS: the model is copied out of the map at load and the map dropped, so the window is the
//! load itself. What is not here: what keys and tensors mean (`model`, `tokenizer`).

mod meta;
mod reader;

use super::FormatError;
use crate::backend::TensorData;
use crate::backend::reference::dequant;
use crate::dtype::DType;
use memmap2::Mmap;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

pub use meta::MetaValue;
use reader::{Fault, Reader};

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_DEFAULT: u64 = 32;
/// Files use 32 or 64; a page is the most that could make sense.
const ALIGNMENT_MAX: u64 = 65_536;

/// A tensor's place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// GGUF order: dims[0] is the row length (n_in), dims[1] the number of rows (n_out).
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

/// What the header says.
struct Header {
    version: u32,
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<TensorInfo>,
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
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            let reason = "it is not a regular file; a GGUF file is needed".to_owned();
            return Err(FormatError::Invalid { path: name, reason });
        }
        if metadata.len() == 0 {
            // An empty file cannot be mapped.
            return Self::from_bytes(&name, Vec::new());
        }
        // SAFETY: the map is read-only and private to this process. Rust's aliasing rules hold as
        // long as nobody writes to the file while it is mapped, which is the contract of a model
        // file; all reads stay inside the length seen here.
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
        found.ok_or_else(|| self.invalid(format!("key {key} is missing")))
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
                "key {key} is of kind {}, {wanted} is needed",
                value.kind()
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
            .ok_or_else(|| self.invalid(format!("tensor {name} is missing")))?;
        let n_out: u64 = info.dims.iter().skip(1).product();
        if info.dims.iter().skip(2).any(|&dim| dim != 1) {
            let reason = format!(
                "tensor {name} has shape {:?}, one or two dimensions are needed",
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
}

fn read_header(bytes: &[u8]) -> Result<Header, Fault> {
    let mut reader = Reader::new(bytes);
    let version = read_version(&mut reader, bytes)?;
    // A tensor entry takes at least 8 + 1 + 4 + 8 + 4 + 8 bytes, a key at least 8 + 1 + 4 + 1.
    let n_tensors = reader.count("the number of tensors", 33)?;
    let n_keys = reader.count("the number of metadata keys", 14)?;
    let metadata = read_metadata(&mut reader, n_keys)?;
    let alignment = read_alignment(&metadata)?;
    let entries = (0..n_tensors)
        .map(|index| read_tensor_entry(&mut reader, index))
        .collect::<Result<Vec<TensorEntry>, Fault>>()?;
    let data_start = (reader.at as u64).next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(entries.len());
    let mut seen = std::collections::HashSet::new();
    for entry in entries {
        if !seen.insert(entry.name.clone()) {
            return Err(format!("tensor {} appears twice", entry.name));
        }
        tensors.push(place_tensor(
            entry,
            data_start,
            alignment,
            bytes.len() as u64,
        )?);
    }
    Ok(Header {
        version,
        metadata,
        tensors,
    })
}

fn read_version(reader: &mut Reader<'_>, bytes: &[u8]) -> Result<u32, Fault> {
    let magic = &bytes[..bytes.len().min(4)];
    if magic != MAGIC {
        return Err(format!(
            "not a GGUF file: it starts with {magic:?}, {MAGIC:?} (\"GGUF\") is needed"
        ));
    }
    reader.at = 4;
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        1 => Err("GGUF version 1 is not supported, convert the file to version 3".to_owned()),
        _ if version.swap_bytes() <= 3 => {
            Err("a big-endian GGUF file; only little-endian files are supported".to_owned())
        }
        _ => Err(format!(
            "GGUF version {version} is not supported, 2 and 3 are"
        )),
    }
}

fn read_metadata(
    reader: &mut Reader<'_>,
    n_keys: usize,
) -> Result<Vec<(String, MetaValue)>, Fault> {
    let mut metadata: Vec<(String, MetaValue)> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for index in 0..n_keys {
        let key = reader.name(&format!("metadata key {index}"))?;
        let kind = reader.u32(&format!("the type of key {key}"))?;
        let value = reader.value(kind, &key)?;
        if !seen.insert(key.clone()) {
            return Err(format!("metadata key {key} appears twice"));
        }
        metadata.push((key, value));
    }
    Ok(metadata)
}

fn read_alignment(metadata: &[(String, MetaValue)]) -> Result<u64, Fault> {
    let Some((key, value)) = metadata.iter().find(|(key, _)| key == "general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    match value
        .as_integer()
        .and_then(|value| u64::try_from(value).ok())
    {
        Some(alignment) if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX => {
            Ok(alignment)
        }
        _ => Err(format!(
            "key {key} is {value:?}, a power of two up to {ALIGNMENT_MAX} is needed"
        )),
    }
}

/// A line of the tensor table before its place is checked.
struct TensorEntry {
    name: String,
    dims: Vec<u64>,
    dtype: DType,
    offset: u64,
}

fn read_tensor_entry(reader: &mut Reader<'_>, index: usize) -> Result<TensorEntry, Fault> {
    let name = reader.name(&format!("the name of tensor {index}"))?;
    let n_dims = reader.u32(&format!("the number of dimensions of tensor {name}"))?;
    if !(1..=4).contains(&n_dims) {
        return Err(format!(
            "tensor {name} has {n_dims} dimensions, 1 to 4 are allowed"
        ));
    }
    let what = format!("a dimension of tensor {name}");
    let dims = (0..n_dims)
        .map(|_| reader.u64(&what))
        .collect::<Result<Vec<u64>, Fault>>()?;
    let type_id = reader.u32(&format!("the type of tensor {name}"))?;
    let dtype = DType::from_gguf_id(type_id).ok_or_else(|| {
        let known: Vec<String> = DType::ALL
            .iter()
            .map(|t| format!("{t} ({})", t.gguf_id()))
            .collect();
        format!(
            "tensor {name} has unsupported type {type_id}; supported: {}",
            known.join(", ")
        )
    })?;
    let offset = reader.u64(&format!("the offset of tensor {name}"))?;
    Ok(TensorEntry {
        name,
        dims,
        dtype,
        offset,
    })
}

fn place_tensor(
    entry: TensorEntry,
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<TensorInfo, Fault> {
    let TensorEntry {
        name,
        dims,
        dtype,
        offset,
    } = entry;
    if dims.contains(&0) {
        return Err(format!(
            "tensor {name} has shape {dims:?}: a dimension is 0"
        ));
    }
    let n_elements = dims
        .iter()
        .try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    let n_elements =
        n_elements.ok_or_else(|| format!("tensor {name} has shape {dims:?}: it overflows"))?;
    if !dims[0].is_multiple_of(dtype.block_len() as u64) {
        return Err(format!(
            "tensor {name} has rows of {} weights, {dtype} needs a multiple of {}",
            dims[0],
            dtype.block_len()
        ));
    }
    if !offset.is_multiple_of(alignment) {
        return Err(format!(
            "tensor {name} has offset {offset}, a multiple of {alignment} is needed"
        ));
    }
    let range = dtype.bytes_for(n_elements).and_then(|n_bytes| {
        let start = data_start.checked_add(offset)?;
        Some(start..start.checked_add(n_bytes)?)
    });
    match range {
        Some(range) if range.end <= file_len => Ok(TensorInfo {
            name,
            dtype,
            dims,
            file_range: range.start as usize..range.end as usize,
        }),
        Some(range) => Err(format!(
            "tensor {name} ends at byte {}, but the file ends at {file_len}: truncated or corrupt",
            range.end
        )),
        None => Err(format!(
            "tensor {name} has shape {dims:?} and offset {offset}: its end overflows"
        )),
    }
}
