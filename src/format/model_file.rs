//! A model on disk as the rest of the program sees it: metadata, a table of tensors, their bytes.
//!
//! One type for all containers. A GGUF file is one as it stands; a Hugging Face directory becomes
//! one when `model/huggingface` has translated its names and numbers into GGUF's. So spec, weights,
//! tokenizer, `inspect` and `quantize` know one vocabulary.
//!
//! Immutable once built; shared by reference. Every tensor's byte range lies inside its file and
//! holds exactly its weights. What is not here: what keys and tensors mean (`model`, `tokenizer`).

use super::bytes::Bytes;
use super::gguf::{MetaValue, TensorInfo, View};
use super::safetensors::Safetensors;
use super::{FormatError, gguf, shown};
use crate::backend::TensorData;
use crate::backend::reference::dequant;
use std::collections::HashMap;
use std::path::Path;

/// An open, validated model.
pub struct ModelFile {
    /// Path of the file or directory, for errors.
    name: String,
    /// Like `GGUF v3`.
    container: String,
    /// What tensors point into.
    stores: Vec<Bytes>,
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<TensorInfo>,
    key_index: HashMap<String, usize>,
    tensor_index: HashMap<String, usize>,
}

impl std::fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (n_keys, n_tensors) = (self.metadata.len(), self.tensors.len());
        write!(
            f,
            "ModelFile({}, {n_keys} keys, {n_tensors} tensors)",
            self.name
        )
    }
}

impl ModelFile {
    /// Maps and validates a GGUF file. For directories see `model::open`.
    pub fn open_gguf(path: &Path) -> Result<Self, FormatError> {
        let bytes = Bytes::open(path, "a GGUF file")?;
        Self::parse(path.display().to_string(), bytes)
    }

    /// A GGUF file in memory (tests, fuzzing). `name` is used in errors.
    pub fn from_gguf_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, FormatError> {
        Self::parse(name.to_owned(), Bytes::Owned(bytes))
    }

    /// A GGUF file that is part of the program: read in place, never copied as a whole. Nothing that
    /// reads tensors asks for an alignment of their bytes, so the place does not matter.
    pub fn from_embedded_gguf(name: &str, bytes: &'static [u8]) -> Result<Self, FormatError> {
        Self::parse(name.to_owned(), Bytes::Embedded(bytes))
    }

    fn parse(name: String, bytes: Bytes) -> Result<Self, FormatError> {
        let header =
            gguf::read_header(bytes.as_slice()).map_err(|reason| FormatError::Invalid {
                path: name.clone(),
                reason,
            })?;
        let container = format!("GGUF v{}", header.version);
        Ok(Self::index(
            name,
            container,
            vec![bytes],
            header.metadata,
            header.tensors,
        ))
    }

    /// Puts a model together from safetensors files and bytes of its own: `TensorInfo::store` is an
    /// index into `files`; `files.len()` is the index of `synthesized`. Of keys and tensors with
    /// one name the last counts.
    ///
    /// # Panics
    /// When a tensor lies outside its store: the caller's bug.
    #[must_use]
    pub fn assemble(
        name: String,
        files: Vec<Safetensors>,
        synthesized: Vec<u8>,
        metadata: Vec<(String, MetaValue)>,
        tensors: Vec<TensorInfo>,
    ) -> Self {
        let container = format!("safetensors, {} file(s)", files.len());
        let mut stores: Vec<Bytes> = files.into_iter().map(Safetensors::into_bytes).collect();
        stores.push(Bytes::Owned(synthesized));
        for info in &tensors {
            let length = stores[info.store].as_slice().len();
            assert!(info.file_range.end <= length, "{} lies outside", info.name);
        }
        Self::index(name, container, stores, metadata, tensors)
    }

    fn index(
        name: String,
        container: String,
        stores: Vec<Bytes>,
        metadata: Vec<(String, MetaValue)>,
        tensors: Vec<TensorInfo>,
    ) -> Self {
        let by_name = |(index, name): (usize, &String)| (name.clone(), index);
        let keys = metadata.iter().map(|(key, _)| key);
        let names = tensors.iter().map(|info| &info.name);
        Self {
            key_index: keys.enumerate().map(by_name).collect(),
            tensor_index: names.enumerate().map(by_name).collect(),
            name,
            container,
            stores,
            metadata,
            tensors,
        }
    }

    /// The kind of container and its version, like `GGUF v3`.
    #[must_use]
    pub fn container(&self) -> &str {
        &self.container
    }

    /// Path of the file or directory.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of all files of the model.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.stores
            .iter()
            .map(|bytes| bytes.as_slice().len() as u64)
            .sum()
    }

    /// All metadata in file order.
    #[must_use]
    pub fn metadata(&self) -> &[(String, MetaValue)] {
        &self.metadata
    }

    /// One value.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&MetaValue> {
        self.key_index
            .get(key)
            .map(|&index| &self.metadata[index].1)
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
        &self.tensors
    }

    /// One tensor's entry.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index
            .get(name)
            .map(|&index| &self.tensors[index])
    }

    /// A tensor as a matrix, as it is stored (1-D tensors: n_out = 1). Err names the tensor when it
    /// is missing, has more than two dimensions that are not 1, or is a view that [`Self::read`]
    /// must make.
    pub fn data(&self, name: &str) -> Result<TensorData<'_>, FormatError> {
        let info = self.matrix_info(name)?;
        match info.view {
            View::Stored => Ok(matrix(info, self.stored_bytes(info))),
            View::PermutedRows { .. } | View::Columns { .. } => {
                Err(self.invalid(format!("tensor {} is not stored as it is", shown(name))))
            }
        }
    }

    /// A tensor as a matrix, made in `scratch` unless the whole model is in memory: what is read from a
    /// file is copied, so that a file that others change meanwhile is an error and no fault of the
    /// process. Views that are no plain byte range are made there as well.
    pub fn read<'a>(
        &'a self,
        name: &str,
        scratch: &'a mut Vec<u8>,
    ) -> Result<TensorData<'a>, FormatError> {
        let info = self.matrix_info(name)?;
        let copied = self.stores[info.store].copy_into(&info.file_range, scratch);
        let is_copied = copied.map_err(|error| {
            let name = shown(name);
            self.invalid(format!(
                "tensor {name} cannot be read any more ({error}): the file changed while it was loaded"
            ))
        })?;
        if is_copied {
            if !matches!(info.view, View::Stored) {
                let stored = std::mem::take(scratch);
                info.view.made(info, &stored, scratch);
            }
            return Ok(matrix(info, scratch));
        }
        let stored = self.stored_bytes(info);
        Ok(match info.view.made(info, stored, scratch) {
            true => matrix(info, scratch),
            false => matrix(info, stored),
        })
    }

    fn matrix_info(&self, name: &str) -> Result<&TensorInfo, FormatError> {
        let info = self
            .tensor(name)
            .ok_or_else(|| self.invalid(format!("tensor {} is missing", shown(name))))?;
        if info.dims.iter().skip(2).any(|&dim| dim != 1) {
            let reason = format!(
                "tensor {} has shape {:?}, one or two dimensions are needed",
                shown(name),
                info.dims
            );
            return Err(self.invalid(reason));
        }
        Ok(info)
    }

    /// The bytes that a tensor points at, whatever its view.
    fn stored_bytes(&self, info: &TensorInfo) -> &[u8] {
        &self.stores[info.store].as_slice()[info.file_range.clone()]
    }

    /// A tensor dequantized to f32 (small ones: norms, biases, rope factors).
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, FormatError> {
        let mut scratch = Vec::new();
        let data = self.read(name, &mut scratch)?;
        let mut values = vec![0.0; data.n_out * data.n_in];
        dequant::dequantize(data.dtype, data.bytes, &mut values);
        Ok(values)
    }
}

/// A checked matrix over its bytes.
fn matrix<'a>(info: &'a TensorInfo, bytes: &'a [u8]) -> TensorData<'a> {
    TensorData {
        name: &info.name,
        dtype: info.dtype,
        n_out: info.dims.iter().skip(1).product::<u64>() as usize,
        n_in: info.dims[0] as usize,
        bytes,
    }
}
