//! GGUF v2 and v3. (stub: being written)
use super::FormatError;
use crate::backend::TensorData;
use crate::dtype::DType;
use std::path::Path;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names are the format's own")]
pub enum MetaValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    /// Homogeneous arrays of the two kinds that are large in practice are kept flat.
    Strings(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    U32s(Vec<u32>),
    /// Any other array.
    Array(Vec<MetaValue>),
}

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
    pub file_range: std::ops::Range<usize>,
}

/// An open, validated file.
pub struct Gguf {}

impl Gguf {
    /// Maps and validates a file.
    pub fn open(_path: &Path) -> Result<Self, FormatError> {
        unimplemented!()
    }
    /// The same over bytes in memory (tests, fuzzing). `name` is used in errors.
    pub fn from_bytes(_name: &str, _bytes: Vec<u8>) -> Result<Self, FormatError> {
        unimplemented!()
    }
    /// File format version, 2 or 3.
    pub fn version(&self) -> u32 {
        unimplemented!()
    }
    /// Bytes of the file.
    pub fn file_len(&self) -> u64 {
        unimplemented!()
    }
    /// All metadata in file order.
    pub fn metadata(&self) -> &[(String, MetaValue)] {
        unimplemented!()
    }
    /// One value.
    pub fn get(&self, _key: &str) -> Option<&MetaValue> {
        unimplemented!()
    }
    /// Integer of any width; Err names the key when it is missing or of another kind.
    pub fn u32(&self, _key: &str) -> Result<u32, FormatError> {
        unimplemented!()
    }
    /// Integer, None when absent, Err when of another kind.
    pub fn optional_u32(&self, _key: &str) -> Result<Option<u32>, FormatError> {
        unimplemented!()
    }
    /// Float of any width.
    pub fn f32(&self, _key: &str) -> Result<f32, FormatError> {
        unimplemented!()
    }
    /// Float, None when absent.
    pub fn optional_f32(&self, _key: &str) -> Result<Option<f32>, FormatError> {
        unimplemented!()
    }
    /// Bool, None when absent.
    pub fn optional_bool(&self, _key: &str) -> Result<Option<bool>, FormatError> {
        unimplemented!()
    }
    /// String.
    pub fn str(&self, _key: &str) -> Result<&str, FormatError> {
        unimplemented!()
    }
    /// String, None when absent.
    pub fn optional_str(&self, _key: &str) -> Result<Option<&str>, FormatError> {
        unimplemented!()
    }
    /// Array of strings, None when absent.
    pub fn optional_strings(&self, _key: &str) -> Result<Option<&[String]>, FormatError> {
        unimplemented!()
    }
    /// Array of floats, None when absent.
    pub fn optional_f32s(&self, _key: &str) -> Result<Option<&[f32]>, FormatError> {
        unimplemented!()
    }
    /// Array of integers of any width, None when absent.
    pub fn optional_ints(&self, _key: &str) -> Result<Option<Vec<i64>>, FormatError> {
        unimplemented!()
    }
    /// All tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        unimplemented!()
    }
    /// One tensor's entry.
    pub fn tensor(&self, _name: &str) -> Option<&TensorInfo> {
        unimplemented!()
    }
    /// A tensor as a matrix (1-D tensors: n_out = 1). Err names the tensor when it is missing or not 1-D/2-D.
    pub fn data(&self, _name: &str) -> Result<TensorData<'_>, FormatError> {
        unimplemented!()
    }
    /// A tensor dequantized to f32 (small ones: norms, biases, rope factors).
    pub fn vector(&self, _name: &str) -> Result<Vec<f32>, FormatError> {
        unimplemented!()
    }
    /// An error that carries this file's name.
    pub fn invalid(&self, _reason: impl Into<String>) -> FormatError {
        unimplemented!()
    }
}
