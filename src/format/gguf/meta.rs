//! Metadata values of a GGUF file and the typed ways to ask for one.
//!
//! Pure data. Errors name the key, what was found and what was wanted; the file's name is added by
//! the caller.

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
    /// Homogeneous arrays of the kinds that are large in practice are kept flat.
    Strings(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    U32s(Vec<u32>),
    /// Any other array.
    Array(Vec<MetaValue>),
}

impl MetaValue {
    /// The kind, as error messages name it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            MetaValue::U8(_) => "u8",
            MetaValue::I8(_) => "i8",
            MetaValue::U16(_) => "u16",
            MetaValue::I16(_) => "i16",
            MetaValue::U32(_) => "u32",
            MetaValue::I32(_) => "i32",
            MetaValue::U64(_) => "u64",
            MetaValue::I64(_) => "i64",
            MetaValue::F32(_) => "f32",
            MetaValue::F64(_) => "f64",
            MetaValue::Bool(_) => "bool",
            MetaValue::String(_) => "string",
            MetaValue::Strings(_) => "array of strings",
            MetaValue::F32s(_) => "array of f32",
            MetaValue::I32s(_) => "array of i32",
            MetaValue::U32s(_) => "array of u32",
            MetaValue::Array(_) => "array",
        }
    }

    /// The kind, and the value where it is a number or a bool: what an error says was found.
    pub(in crate::format) fn described(&self) -> String {
        let value = match self {
            MetaValue::F32(value) => value.to_string(),
            MetaValue::F64(value) => value.to_string(),
            MetaValue::Bool(value) => value.to_string(),
            MetaValue::U64(value) => value.to_string(),
            other => match other.as_integer() {
                Some(value) => value.to_string(),
                None => return format!("of kind {}", self.kind()),
            },
        };
        format!("{value} (of kind {})", self.kind())
    }

    /// The value of any integer kind, None for other kinds and for u64 beyond i64.
    #[must_use]
    pub fn as_integer(&self) -> Option<i64> {
        match *self {
            MetaValue::U8(value) => Some(value.into()),
            MetaValue::I8(value) => Some(value.into()),
            MetaValue::U16(value) => Some(value.into()),
            MetaValue::I16(value) => Some(value.into()),
            MetaValue::U32(value) => Some(value.into()),
            MetaValue::I32(value) => Some(value.into()),
            MetaValue::U64(value) => i64::try_from(value).ok(),
            MetaValue::I64(value) => Some(value),
            _ => None,
        }
    }

    /// The value of either float kind.
    #[must_use]
    pub fn as_float(&self) -> Option<f32> {
        match *self {
            MetaValue::F32(value) => Some(value),
            MetaValue::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    /// An array of any integer kind.
    #[must_use]
    pub fn as_integers(&self) -> Option<Vec<i64>> {
        match self {
            MetaValue::I32s(values) => Some(values.iter().map(|&value| value.into()).collect()),
            MetaValue::U32s(values) => Some(values.iter().map(|&value| value.into()).collect()),
            MetaValue::Array(values) => values.iter().map(MetaValue::as_integer).collect(),
            _ => None,
        }
    }
}
