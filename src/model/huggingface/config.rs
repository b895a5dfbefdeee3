//! A JSON object with typed access; errors name the file and the key.
//!
//! Pure data. `null` counts as absent: configuration classes write it for their defaults.

use crate::format::FormatError;
use serde_json::{Map, Value};
use std::path::Path;

/// Most blocks of a model or a segment.
const BLOCKS_MAX: u32 = 4096;

/// `config.json`, or an object inside it.
pub(super) struct Config {
    path: String,
    /// Put before keys in errors: `rope_scaling.`, or empty.
    prefix: String,
    values: Map<String, Value>,
}

impl Config {
    /// Of a parsed file.
    pub(super) fn new(path: &Path, value: Value) -> Result<Self, FormatError> {
        let path = path.display().to_string();
        match value {
            Value::Object(values) => Ok(Self {
                path,
                prefix: String::new(),
                values,
            }),
            _ => Err(FormatError::Invalid {
                path,
                reason: "it is not a JSON object".to_owned(),
            }),
        }
    }

    /// The file.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// An error about a key.
    pub(super) fn invalid(&self, key: &str, reason: &str) -> FormatError {
        FormatError::Invalid {
            path: self.path.clone(),
            reason: format!("{}{key} {reason}", self.prefix),
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => {
                let text: String = value.to_string().chars().take(60).collect();
                Err(self.invalid(key, &format!("is {text}; {wanted} is needed")))
            }
        }
    }

    fn required<T>(&self, key: &str, found: Option<T>) -> Result<T, FormatError> {
        found.ok_or_else(|| self.invalid(key, "is missing"))
    }

    /// An integer.
    pub(super) fn optional_u32(&self, key: &str) -> Result<Option<u32>, FormatError> {
        self.typed(key, "an integer from 0 to 4294967295", |value| {
            value.as_u64().and_then(|value| u32::try_from(value).ok())
        })
    }

    /// An integer that must be there.
    pub(super) fn u32(&self, key: &str) -> Result<u32, FormatError> {
        let found = self.optional_u32(key)?;
        self.required(key, found)
    }

    /// A number of blocks, which names are made for one by one.
    pub(super) fn n_blocks(&self, key: &str) -> Result<u32, FormatError> {
        match self.u32(key)? {
            n if n <= BLOCKS_MAX => Ok(n),
            n => Err(self.invalid(key, &format!("is {n}; at most {BLOCKS_MAX} are supported"))),
        }
    }

    /// A number.
    pub(super) fn optional_f32(&self, key: &str) -> Result<Option<f32>, FormatError> {
        self.typed(key, "a number", |value| value.as_f64().map(|v| v as f32))
    }

    /// A number that must be there.
    pub(super) fn f32(&self, key: &str) -> Result<f32, FormatError> {
        let found = self.optional_f32(key)?;
        self.required(key, found)
    }

    /// A bool.
    pub(super) fn optional_bool(&self, key: &str) -> Result<Option<bool>, FormatError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub(super) fn optional_str(&self, key: &str) -> Result<Option<&str>, FormatError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A string that must be there.
    pub(super) fn str(&self, key: &str) -> Result<&str, FormatError> {
        let found = self.optional_str(key)?;
        self.required(key, found)
    }

    /// An object.
    pub(super) fn optional_object(&self, key: &str) -> Result<Option<Self>, FormatError> {
        let values = self.typed(key, "an object", Value::as_object)?;
        Ok(values.map(|values| Self {
            path: self.path.clone(),
            prefix: format!("{}{key}.", self.prefix),
            values: values.clone(),
        }))
    }

    /// Token ids: a number or a list of numbers; empty when absent.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>, FormatError> {
        let id = |value: &Value| value.as_u64().and_then(|value| u32::try_from(value).ok());
        let ids = self.typed(key, "a token id or a list of them", |value| match value {
            Value::Array(values) => values.iter().map(id).collect(),
            value => id(value).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Fails unless the key is absent or has one of these values: others change the maths.
    pub(super) fn must_be(&self, key: &str, allowed: &[Value]) -> Result<(), FormatError> {
        match self.get(key) {
            Some(value) if !allowed.contains(value) => {
                let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
                let text: String = value.to_string().chars().take(60).collect();
                let reason = format!("is {text}; supported: {}", allowed.join(", "));
                Err(self.invalid(key, &reason))
            }
            _ => Ok(()),
        }
    }
}
