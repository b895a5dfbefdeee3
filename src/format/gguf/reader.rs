//! A cursor over the bytes of a GGUF file: every read is checked against the file's end, every
//! count against what the remaining bytes can hold, before anything is allocated.
//!
//! Layout facts: GGUF specification v2/v3 (little endian; strings are a u64 length and bytes).

use super::meta::MetaValue;

/// Deepest nesting of arrays. Files in the wild have none nested.
const ARRAY_DEPTH_MAX: u32 = 4;
/// Longest metadata key or tensor name in bytes; the specification says 65535 and 64.
const NAME_BYTES_MAX: u64 = 65_535;

/// Most values of one file's arrays that are kept as one `MetaValue` each (32 bytes for as little
/// as 1 in the file), and most strings (24 bytes and an allocation each). Vocabularies in the wild
/// stay below 300,000.
const ARRAY_VALUES_MAX: usize = 1 << 20;
const ARRAY_STRINGS_MAX: usize = 1 << 22;

/// What is wrong, without the file's name.
pub(super) type Fault = String;

/// Reads little-endian values from `bytes`, starting at `at`.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    pub(super) at: usize,
    /// What the file's arrays may still hold.
    values_left: usize,
    strings_left: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            values_left: ARRAY_VALUES_MAX,
            strings_left: ARRAY_STRINGS_MAX,
        }
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], Fault> {
        if count > self.remaining() {
            return Err(format!(
                "truncated: {what} needs {count} bytes at offset {}, {} are left",
                self.at,
                self.remaining()
            ));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let bytes = self.take(N, what)?;
        Ok(bytes.try_into().expect("take returned N bytes"))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `bytes_each` each.
    pub(super) fn count(&mut self, what: &str, bytes_each: usize) -> Result<usize, Fault> {
        let at = self.at;
        let count = self.u64(what)?;
        let most = (self.remaining() / bytes_each) as u64;
        if count > most {
            return Err(format!(
                "{what} at offset {at} is {count}, but what follows has room for {most} at most: truncated or corrupt"
            ));
        }
        Ok(count as usize)
    }

    /// A count of things that take at least `bytes_each` each, `limit` at most.
    pub(super) fn count_up_to(
        &mut self,
        what: &str,
        bytes_each: usize,
        limit: usize,
    ) -> Result<usize, Fault> {
        let at = self.at;
        let count = self.count(what, bytes_each)?;
        match count <= limit {
            true => Ok(count),
            false => Err(format!(
                "{what} at offset {at} is {count}, at most {limit} are supported"
            )),
        }
    }

    /// UTF-8 behind a u64 length. Other bytes are an error, for values too: a vocabulary piece
    /// "repaired" with replacement characters would silently change what the model reads. (Byte
    /// vocabularies are UTF-8 in files: they spell bytes as letters or as `<0x0A>`.)
    pub(super) fn string(&mut self, what: &str) -> Result<String, Fault> {
        let at = self.at;
        let length = self.u64(what)?;
        // More than an address space holds is more than is left.
        let bytes = self.take(usize::try_from(length).unwrap_or(usize::MAX), what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(format!(
                "{what} at offset {at} is not UTF-8 (byte {} of {length})",
                error.valid_up_to()
            )),
        }
    }

    /// A metadata key or tensor name.
    pub(super) fn name(&mut self, what: &str) -> Result<String, Fault> {
        let at = self.at;
        let name = self.string(what)?;
        if name.is_empty() || name.len() as u64 > NAME_BYTES_MAX {
            return Err(format!(
                "{what} at offset {at} has {} bytes, 1 to {NAME_BYTES_MAX} are allowed",
                name.len()
            ));
        }
        Ok(name)
    }

    /// A value of the kind with this id.
    pub(super) fn value(&mut self, kind: u32, key: &str) -> Result<MetaValue, Fault> {
        self.value_at_depth(kind, key, 0)
    }

    fn value_at_depth(&mut self, kind: u32, key: &str, depth: u32) -> Result<MetaValue, Fault> {
        Ok(match kind {
            0 => MetaValue::U8(u8::from_le_bytes(self.array(key)?)),
            1 => MetaValue::I8(i8::from_le_bytes(self.array(key)?)),
            2 => MetaValue::U16(u16::from_le_bytes(self.array(key)?)),
            3 => MetaValue::I16(i16::from_le_bytes(self.array(key)?)),
            4 => MetaValue::U32(self.u32(key)?),
            5 => MetaValue::I32(i32::from_le_bytes(self.array(key)?)),
            6 => MetaValue::F32(f32::from_le_bytes(self.array(key)?)),
            7 => MetaValue::Bool(self.bool(key)?),
            8 => MetaValue::String(self.string(&format!("the value of {key}"))?),
            9 => self.array_value(key, depth)?,
            10 => MetaValue::U64(self.u64(key)?),
            11 => MetaValue::I64(i64::from_le_bytes(self.array(key)?)),
            12 => MetaValue::F64(f64::from_le_bytes(self.array(key)?)),
            _ => {
                return Err(format!(
                    "key {key} has unknown value type {kind}, 0 to 12 are known"
                ));
            }
        })
    }

    fn bool(&mut self, key: &str) -> Result<bool, Fault> {
        match self.array::<1>(key)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!(
                "key {key} is a bool with byte {other}, 0 or 1 are allowed"
            )),
        }
    }

    fn array_value(&mut self, key: &str, depth: u32) -> Result<MetaValue, Fault> {
        if depth >= ARRAY_DEPTH_MAX {
            return Err(format!(
                "key {key} nests arrays deeper than {ARRAY_DEPTH_MAX}"
            ));
        }
        let kind = self.u32(&format!("the element type of {key}"))?;
        let bytes_each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => {
                return Err(format!(
                    "key {key} is an array of unknown type {kind}, 0 to 12 are known"
                ));
            }
        };
        let count = self.count(&format!("the length of array {key}"), bytes_each)?;
        match kind {
            4..=6 => {} // as large in memory as in the file
            8 => spend(&mut self.strings_left, count, ARRAY_STRINGS_MAX, key)?,
            _ => spend(&mut self.values_left, count, ARRAY_VALUES_MAX, key)?,
        }
        Ok(match kind {
            4 => MetaValue::U32s(
                (0..count)
                    .map(|_| self.u32(key))
                    .collect::<Result<_, _>>()?,
            ),
            5 => {
                let read = |_| self.array(key).map(i32::from_le_bytes);
                MetaValue::I32s((0..count).map(read).collect::<Result<_, _>>()?)
            }
            6 => {
                let read = |_| self.array(key).map(f32::from_le_bytes);
                MetaValue::F32s((0..count).map(read).collect::<Result<_, _>>()?)
            }
            8 => {
                let what = format!("an element of {key}");
                MetaValue::Strings(
                    (0..count)
                        .map(|_| self.string(&what))
                        .collect::<Result<_, _>>()?,
                )
            }
            _ => {
                let read = |_| self.value_at_depth(kind, key, depth + 1);
                MetaValue::Array((0..count).map(read).collect::<Result<_, _>>()?)
            }
        })
    }
}

/// Takes the elements of an array from what the file's arrays may still hold.
fn spend(left: &mut usize, count: usize, limit: usize, key: &str) -> Result<(), Fault> {
    *left = left.checked_sub(count).ok_or_else(|| {
        format!("array {key} has {count} elements, the arrays of a file may have {limit} of its kind in all")
    })?;
    Ok(())
}

/// A name for an error text: control characters escaped, at most 80 characters of it.
pub(in crate::format) fn shown(name: &str) -> String {
    const CHARS_SHOWN: usize = 80;
    match name.char_indices().nth(CHARS_SHOWN) {
        None => name.escape_debug().to_string(),
        Some((end, _)) => format!("{}..", name[..end].escape_debug()),
    }
}
