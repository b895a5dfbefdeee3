//! The head of a GGUF file: magic, version, metadata, tensor table, and the checks of both.
//!
//! ```text
//! magic "GGUF" | version u32 | n_tensors u64 | n_keys u64
//! n_keys    x ( key | kind u32 | value )
//! n_tensors x ( name | n_dims u32 | dims u64.. | type u32 | offset u64 )
//! padding to `general.alignment` | tensor data (offsets count from here)
//! ```
//!
//! Pure: bytes in, header or sentence out (the caller adds the file's name). Versions 2 and 3 have
//! this same layout; version 1 had 32-bit lengths. Memory is bounded whatever the file claims:
//! counts are checked against the bytes that are left, and the head has a largest size.

use super::meta::MetaValue;
use super::reader::{Fault, Reader, shown};
use super::tensor_info::{TensorInfo, View};
use crate::dtype::DType;

const MAGIC: &[u8; 4] = b"GGUF";
/// Longest head. The largest in the wild have about 20 MB.
const HEAD_BYTES_MAX: usize = 256 << 20;
const KEYS_MAX: usize = 1 << 16;
const TENSORS_MAX: usize = 1 << 18;
const ALIGNMENT_DEFAULT: u64 = 32;
/// Files use 32 or 64; a page is the most that could make sense.
const ALIGNMENT_MAX: u64 = 65_536;

/// What the header says.
pub(in crate::format) struct Header {
    pub(in crate::format) version: u32,
    pub(in crate::format) metadata: Vec<(String, MetaValue)>,
    pub(in crate::format) tensors: Vec<TensorInfo>,
}

/// Reads and checks the head of a file, given as the bytes of the whole file.
pub(in crate::format) fn read_header(bytes: &[u8]) -> Result<Header, Fault> {
    let head = &bytes[..bytes.len().min(HEAD_BYTES_MAX)];
    let mut reader = Reader::new(head);
    let version = read_version(&mut reader, head)?;
    // A tensor entry takes at least 8 + 1 + 4 + 8 + 4 + 8 bytes, a key at least 8 + 1 + 4 + 1.
    let n_tensors = reader.count_up_to("the number of tensors", 33, TENSORS_MAX)?;
    let n_keys = reader.count_up_to("the number of metadata keys", 14, KEYS_MAX)?;
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
            return Err(format!("tensor {} appears twice", shown(&entry.name)));
        }
        tensors.push(place_tensor(
            entry,
            data_start,
            alignment,
            bytes.len() as u64,
        )?);
    }
    check_overlaps(&tensors)?;
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
            "not a GGUF file: it starts with \"{}\", \"GGUF\" is needed{}",
            magic.escape_ascii(),
            looks_like(magic)
        ));
    }
    reader.at = 4;
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        1 => Err("GGUF version 1 is not supported, convert the file to version 3".to_owned()),
        _ if (1..=3).contains(&version.swap_bytes()) => {
            Err("a big-endian GGUF file; only little-endian files are supported".to_owned())
        }
        _ => Err(format!(
            "GGUF version {version} is not supported, 2 and 3 are"
        )),
    }
}

/// A guess at what a file is instead, from its first four bytes.
fn looks_like(magic: &[u8]) -> &'static str {
    match magic {
        b"" => " (it is empty)",
        b"FUGG" => " (byte-swapped: convert it to little-endian)",
        b"lmgg" | b"fmgg" | b"tjgg" | b"algg" => " (a GGML file from before GGUF: convert it)",
        b"vers" => " (a Git LFS pointer? `git lfs pull` fetches the file)",
        b"<!DO" | b"<!do" | b"<htm" => " (an HTML page: the download failed)",
        [b'P', b'K', ..] => " (a zip archive or a PyTorch checkpoint)",
        _ => "",
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
        let kind = reader.u32(&format!("the type of key {}", shown(&key)))?;
        let value = reader.value(kind, &shown(&key))?;
        if !seen.insert(key.clone()) {
            return Err(format!("metadata key {} appears twice", shown(&key)));
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
            "key {key} is {}, a power of two up to {ALIGNMENT_MAX} is needed",
            value.described()
        )),
    }
}

/// The name of a type of the format that we do not read, as a supplement to its number.
fn other_type(id: u32) -> &'static str {
    match id {
        9 => " (Q8_1)",
        15 => " (Q8_K)",
        16 => " (IQ2_XXS)",
        17 => " (IQ2_XS)",
        18 => " (IQ3_XXS)",
        19 => " (IQ1_S)",
        21 => " (IQ3_S)",
        22 => " (IQ2_S)",
        23 => " (IQ4_XS)",
        24 => " (I8)",
        25 => " (I16)",
        26 => " (I32)",
        27 => " (I64)",
        28 => " (F64)",
        29 => " (IQ1_M)",
        34 => " (TQ1_0)",
        35 => " (TQ2_0)",
        39 => " (MXFP4)",
        40 => " (NVFP4)",
        _ => "",
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
    let title = shown(&name);
    let n_dims = reader.u32(&format!("the number of dimensions of tensor {title}"))?;
    if !(1..=4).contains(&n_dims) {
        return Err(format!(
            "tensor {title} has {n_dims} dimensions, 1 to 4 are allowed"
        ));
    }
    let what = format!("a dimension of tensor {title}");
    let dims = (0..n_dims)
        .map(|_| reader.u64(&what))
        .collect::<Result<Vec<u64>, Fault>>()?;
    let type_id = reader.u32(&format!("the type of tensor {title}"))?;
    let dtype = DType::from_gguf_id(type_id).ok_or_else(|| {
        let known: Vec<String> = DType::ALL
            .iter()
            .map(|t| format!("{t} ({})", t.gguf_id()))
            .collect();
        format!(
            "tensor {title} has unsupported type {type_id}{}; supported: {}",
            other_type(type_id),
            known.join(", ")
        )
    })?;
    let offset = reader.u64(&format!("the offset of tensor {title}"))?;
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
    let title = shown(&name);
    if dims.contains(&0) {
        return Err(format!(
            "tensor {title} has shape {dims:?}: a dimension is 0"
        ));
    }
    let n_elements = dims
        .iter()
        .try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    let n_elements =
        n_elements.ok_or_else(|| format!("tensor {title} has shape {dims:?}: it overflows"))?;
    if !dims[0].is_multiple_of(dtype.block_len() as u64) {
        return Err(format!(
            "tensor {title} has rows of {} weights, {dtype} needs a multiple of {}",
            dims[0],
            dtype.block_len()
        ));
    }
    if !offset.is_multiple_of(alignment) {
        return Err(format!(
            "tensor {title} has offset {offset}, a multiple of {alignment} is needed"
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
            store: 0,
            file_range: range.start as usize..range.end as usize,
            view: View::Stored,
        }),
        Some(range) => Err(format!(
            "tensor {title} ends at byte {}, but the file ends at {file_len}: truncated or corrupt",
            range.end
        )),
        None => Err(format!(
            "tensor {title} has shape {dims:?} and offset {offset}: its end overflows"
        )),
    }
}

/// No two tensors share bytes: in a sound file they follow one another.
fn check_overlaps(tensors: &[TensorInfo]) -> Result<(), Fault> {
    let mut by_start: Vec<&TensorInfo> = tensors.iter().collect();
    by_start.sort_by_key(|info| info.file_range.start);
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
