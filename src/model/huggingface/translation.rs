//! The growing translation: keys and tensors in GGUF's words, pointing into the checkpoint's files.
//!
//! Lives during one call of `open`. Tensors are not copied: rows of a fused matrix are a byte
//! range, columns and other row orders a view (`format::View`).

use crate::dtype::DType;
use crate::format::safetensors::Entry;
use crate::format::{FormatError, MetaValue, Safetensors, TensorInfo, View};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Buffers that some checkpoints store and that follow from the configuration.
const INERT: &[&str] = &["rotary_emb.inv_freq", ".masked_bias", "freqs_cis"];

/// See the module.
pub(super) struct Translation<'a> {
    directory: &'a str,
    files: &'a [Safetensors],
    /// Name to file and entry.
    places: HashMap<&'a str, (usize, usize)>,
    taken: HashSet<(usize, usize)>,
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<TensorInfo>,
    synthesized: Vec<u8>,
}

/// File and entry of a tensor, the entry, its type.
type Found<'a> = ((usize, usize), &'a Entry, DType);

/// What [`crate::format::ModelFile::assemble`] takes.
pub(super) struct Parts {
    pub(super) metadata: Vec<(String, MetaValue)>,
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) synthesized: Vec<u8>,
}

impl<'a> Translation<'a> {
    /// Nothing translated yet. Err when two files have a tensor of one name.
    pub(super) fn new(directory: &'a str, files: &'a [Safetensors]) -> Result<Self, FormatError> {
        let mut places = HashMap::new();
        for (file_idx, file) in files.iter().enumerate() {
            for (entry_idx, entry) in file.entries().iter().enumerate() {
                let before = places.insert(entry.name.as_str(), (file_idx, entry_idx));
                if let Some((other, _)) = before {
                    let reason =
                        format!("tensor {} is also in {}", entry.name, files[other].name());
                    return Err(FormatError::Invalid {
                        path: file.name().to_owned(),
                        reason,
                    });
                }
            }
        }
        Ok(Self {
            directory,
            files,
            places,
            taken: HashSet::new(),
            metadata: Vec::new(),
            tensors: Vec::new(),
            synthesized: Vec::new(),
        })
    }

    /// An error about the model as a whole.
    pub(super) fn invalid(&self, reason: String) -> FormatError {
        FormatError::Invalid {
            path: self.directory.to_owned(),
            reason,
        }
    }

    /// Last part of the directory's path: the model's name when nothing else says one.
    pub(super) fn directory_name(&self) -> &str {
        let path = std::path::Path::new(self.directory);
        path.file_name()
            .and_then(|name| name.to_str())
            .unwrap_or("model")
    }

    /// Sets a key; a later value of the same key counts.
    pub(super) fn set(&mut self, key: &str, value: MetaValue) {
        self.metadata.push((key.to_owned(), value));
    }

    /// Sets `u32` keys.
    pub(super) fn set_u32s(&mut self, architecture: &str, pairs: &[(&str, u32)]) {
        for (suffix, value) in pairs {
            self.set(&format!("{architecture}.{suffix}"), MetaValue::U32(*value));
        }
    }

    /// Whether the checkpoint has a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Shape of a tensor as the checkpoint has it; empty when there is none.
    pub(super) fn shape(&self, name: &str) -> Vec<u64> {
        let place = self.places.get(name);
        place.map_or_else(Vec::new, |&(file, entry)| {
            self.files[file].entries()[entry].shape.clone()
        })
    }

    /// Takes a tensor as it is, if there is one.
    pub(super) fn take(&mut self, name: &str, ours: &str) -> Result<(), FormatError> {
        self.take_as(name, ours, View::Stored)
    }

    /// Takes a tensor with its rows in the order of interleaved rotary pairs, if there is one.
    pub(super) fn take_permuted(
        &mut self,
        name: &str,
        ours: &str,
        n_heads: u32,
    ) -> Result<(), FormatError> {
        let n_rows = self.shape(name).first().copied().unwrap_or(0);
        self.check_heads(name, n_rows, n_heads)?;
        self.take_as(name, ours, View::PermutedRows { n_heads })
    }

    fn check_heads(&self, name: &str, n_rows: u64, n_heads: u32) -> Result<(), FormatError> {
        if n_heads > 0 && n_rows.is_multiple_of(2 * u64::from(n_heads)) {
            return Ok(());
        }
        Err(self.invalid(format!(
            "tensor {name}: {n_heads} heads of even width do not divide its {n_rows} rows"
        )))
    }

    fn take_as(&mut self, name: &str, ours: &str, view: View) -> Result<(), FormatError> {
        let Some((place, entry, dtype)) = self.find(name)? else {
            return Ok(());
        };
        let dims = dims(&entry.shape);
        let file_range = entry.file_range.clone();
        self.push(place, ours, dtype, dims, file_range, view);
        Ok(())
    }

    /// Takes some rows of a matrix that must be there.
    pub(super) fn take_rows(
        &mut self,
        name: &str,
        ours: &str,
        rows: Range<u64>,
    ) -> Result<(), FormatError> {
        self.take_heads(name, ours, rows, None)
    }

    /// The same, with the rows of this many heads in the order of interleaved rotary pairs.
    pub(super) fn take_heads(
        &mut self,
        name: &str,
        ours: &str,
        rows: Range<u64>,
        n_heads: Option<u32>,
    ) -> Result<(), FormatError> {
        let Some((place, entry, dtype)) = self.find(name)? else {
            return Err(self.invalid(format!("tensor {name} is missing")));
        };
        let n_rows = entry.shape.first().copied().unwrap_or(0);
        if rows.is_empty() || rows.end > n_rows {
            let reason = format!(
                "tensor {name} has shape {:?}; rows {} to {} are needed",
                entry.shape, rows.start, rows.end
            );
            return Err(self.invalid(reason));
        }
        let row_bytes = entry.file_range.len() / n_rows as usize;
        let start = entry.file_range.start + rows.start as usize * row_bytes;
        let end = entry.file_range.start + rows.end as usize * row_bytes;
        let mut dims = dims(&entry.shape);
        if let Some(last) = dims.last_mut() {
            *last = rows.end - rows.start;
        }
        let view = n_heads.map_or(View::Stored, |n_heads| View::PermutedRows { n_heads });
        if let View::PermutedRows { n_heads } = view {
            self.check_heads(name, rows.end - rows.start, n_heads)?;
        }
        self.push(place, ours, dtype, dims, start..end, view);
        Ok(())
    }

    /// Takes part `part` of `n_parts` equal parts of a tensor that must be there, as a vector.
    pub(super) fn take_flat(
        &mut self,
        name: &str,
        ours: &str,
        part: usize,
        n_parts: usize,
    ) -> Result<(), FormatError> {
        let Some((place, entry, dtype)) = self.find(name)? else {
            return Err(self.invalid(format!("tensor {name} is missing")));
        };
        let n_elements = entry.file_range.len() / dtype.block_bytes();
        if !n_elements.is_multiple_of(n_parts) {
            let reason =
                format!("tensor {name} has {n_elements} weights, not {n_parts} equal parts");
            return Err(self.invalid(reason));
        }
        let length = entry.file_range.len() / n_parts;
        let start = entry.file_range.start + part * length;
        let dims = vec![(n_elements / n_parts) as u64];
        self.push(
            place,
            ours,
            dtype,
            dims,
            start..start + length,
            View::Stored,
        );
        Ok(())
    }

    /// Takes the columns `[start, start + width)` of a matrix that must be there.
    pub(super) fn take_columns(
        &mut self,
        name: &str,
        ours: &str,
        start: u32,
        width: u32,
    ) -> Result<(), FormatError> {
        let Some((place, entry, dtype)) = self.find(name)? else {
            return Err(self.invalid(format!("tensor {name} is missing")));
        };
        let [n_out, stored_width] = entry.shape[..] else {
            let reason = format!(
                "tensor {name} has shape {:?}; a matrix is needed",
                entry.shape
            );
            return Err(self.invalid(reason));
        };
        if u64::from(start) + u64::from(width) > stored_width || width == 0 {
            let reason = format!(
                "tensor {name} has shape {:?}; columns {start} to {} are needed",
                entry.shape,
                u64::from(start) + u64::from(width)
            );
            return Err(self.invalid(reason));
        }
        let view = View::Columns {
            start: start as usize,
            stored_width: stored_width as usize,
        };
        let dims = vec![u64::from(width), n_out];
        let file_range = entry.file_range.clone();
        self.push(place, ours, dtype, dims, file_range, view);
        Ok(())
    }

    /// Adds an f32 vector that the checkpoint does not store.
    pub(super) fn synthesize(&mut self, ours: &str, values: &[f32]) {
        let start = self.synthesized.len();
        self.synthesized
            .extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.tensors.push(TensorInfo {
            name: ours.to_owned(),
            dtype: DType::F32,
            dims: vec![values.len() as u64],
            store: self.files.len(),
            file_range: start..self.synthesized.len(),
            view: View::Stored,
        });
    }

    /// Marks a tensor as known and of no use.
    pub(super) fn ignore(&mut self, name: &str) {
        if let Some(place) = self.places.get(name) {
            self.taken.insert(*place);
        }
    }

    fn find(&mut self, name: &str) -> Result<Option<Found<'a>>, FormatError> {
        let Some(&place) = self.places.get(name) else {
            return Ok(None);
        };
        let file = &self.files[place.0];
        let entry = &file.entries()[place.1];
        let invalid = |reason: String| FormatError::Invalid {
            path: file.name().to_owned(),
            reason,
        };
        let dtype = entry.dtype.clone().map_err(|other| {
            invalid(format!(
                "tensor {name} is of type {other}; F32, F16 and BF16 are supported"
            ))
        })?;
        if entry.shape.contains(&0) {
            let reason = format!(
                "tensor {name} has shape {:?}: a dimension is 0",
                entry.shape
            );
            return Err(invalid(reason));
        }
        Ok(Some((place, entry, dtype)))
    }

    fn push(
        &mut self,
        place: (usize, usize),
        ours: &str,
        dtype: DType,
        dims: Vec<u64>,
        file_range: Range<usize>,
        view: View,
    ) {
        self.taken.insert(place);
        self.tensors.push(TensorInfo {
            name: ours.to_owned(),
            dtype,
            dims,
            store: place.0,
            file_range,
            view,
        });
    }

    /// The translation; what nobody took is kept under its own name.
    pub(super) fn finish(mut self) -> Parts {
        for (file_idx, file) in self.files.iter().enumerate() {
            for (entry_idx, entry) in file.entries().iter().enumerate() {
                let is_inert = INERT.iter().any(|end| entry.name.ends_with(end));
                let place = (file_idx, entry_idx);
                if is_inert || self.taken.contains(&place) || entry.shape.contains(&0) {
                    continue;
                }
                if let Ok(dtype) = entry.dtype {
                    let dims = dims(&entry.shape);
                    let range = entry.file_range.clone();
                    self.push(place, &entry.name, dtype, dims, range, View::Stored);
                }
            }
        }
        Parts {
            metadata: self.metadata,
            tensors: self.tensors,
            synthesized: self.synthesized,
        }
    }
}

/// GGUF's order of dimensions; `[1, n]` is a vector in both.
fn dims(shape: &[u64]) -> Vec<u64> {
    match shape {
        [] => vec![1],
        [1, n] => vec![*n],
        shape => shape.iter().rev().copied().collect(),
    }
}
