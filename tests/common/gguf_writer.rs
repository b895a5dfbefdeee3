//! A small GGUF writer for tests: sound files through [`GgufWriter::key`] and
//! [`GgufWriter::tensor`], faulty ones through the `raw_` methods, which check nothing.
//!
//! A test that needs it says `#[path = "common/gguf_writer.rs"] mod gguf_writer;`.

use tinyloop::dtype::DType;
use tinyloop::format::MetaValue;

/// A line of the tensor table. `offset` counts from the start of the tensor data.
pub(crate) struct TensorLine {
    pub(crate) name: Vec<u8>,
    pub(crate) dims: Vec<u64>,
    pub(crate) type_id: u32,
    pub(crate) offset: u64,
}

pub(crate) struct GgufWriter {
    /// The eight bytes of magic and version, then the counts unless they were replaced.
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) n_tensors: Option<u64>,
    pub(crate) n_keys: Option<u64>,
    alignment: usize,
    keys_written: u64,
    metadata: Vec<u8>,
    lines: Vec<TensorLine>,
    data: Vec<u8>,
}

impl GgufWriter {
    pub(crate) fn new(version: u32) -> Self {
        Self {
            magic: *b"GGUF",
            version,
            n_tensors: None,
            n_keys: None,
            alignment: 32,
            keys_written: 0,
            metadata: Vec::new(),
            lines: Vec::new(),
            data: Vec::new(),
        }
    }

    /// Sets the alignment and writes its key.
    pub(crate) fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.key("general.alignment", &MetaValue::U32(alignment))
    }

    pub(crate) fn key(self, key: &str, value: &MetaValue) -> Self {
        let (kind, content) = encode(value);
        self.raw_key(key.as_bytes(), kind, &content)
    }

    pub(crate) fn raw_key(mut self, key: &[u8], kind: u32, content: &[u8]) -> Self {
        self.metadata.extend(string(key));
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(content);
        self.keys_written += 1;
        self
    }

    /// Adds a tensor whose bytes follow those of the tensors before it.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], dtype: DType, bytes: &[u8]) -> Self {
        let n_weights = dims.iter().product();
        assert_eq!(dtype.bytes_for(n_weights), Some(bytes.len() as u64));
        let offset = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(offset, 0);
        self.data.extend(bytes);
        self.raw_tensor(TensorLine {
            name: name.into(),
            dims: dims.to_vec(),
            type_id: dtype.gguf_id(),
            offset: offset as u64,
        })
    }

    pub(crate) fn raw_tensor(mut self, line: TensorLine) -> Self {
        self.lines.push(line);
        self
    }

    /// Bytes of magic, counts, metadata and tensor table, without the padding.
    pub(crate) fn head(&self) -> Vec<u8> {
        let mut head = self.magic.to_vec();
        head.extend(self.version.to_le_bytes());
        let n_tensors = self.n_tensors.unwrap_or(self.lines.len() as u64);
        head.extend(n_tensors.to_le_bytes());
        head.extend(self.n_keys.unwrap_or(self.keys_written).to_le_bytes());
        head.extend(&self.metadata);
        for line in &self.lines {
            head.extend(string(&line.name));
            head.extend((line.dims.len() as u32).to_le_bytes());
            for dim in &line.dims {
                head.extend(dim.to_le_bytes());
            }
            head.extend(line.type_id.to_le_bytes());
            head.extend(line.offset.to_le_bytes());
        }
        head
    }

    pub(crate) fn finish(&self) -> Vec<u8> {
        let mut file = self.head();
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(&self.data);
        file
    }
}

/// Length and bytes.
pub(crate) fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// The content of an array value: element kind, count, elements.
pub(crate) fn array(kind: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

fn flat<const N: usize>(kind: u32, elements: impl ExactSizeIterator<Item = [u8; N]>) -> Vec<u8> {
    let count = elements.len() as u64;
    array(kind, count, &elements.flatten().collect::<Vec<u8>>())
}

/// Kind number and content.
fn encode(value: &MetaValue) -> (u32, Vec<u8>) {
    match value {
        MetaValue::U8(v) => (0, v.to_le_bytes().into()),
        MetaValue::I8(v) => (1, v.to_le_bytes().into()),
        MetaValue::U16(v) => (2, v.to_le_bytes().into()),
        MetaValue::I16(v) => (3, v.to_le_bytes().into()),
        MetaValue::U32(v) => (4, v.to_le_bytes().into()),
        MetaValue::I32(v) => (5, v.to_le_bytes().into()),
        MetaValue::F32(v) => (6, v.to_le_bytes().into()),
        MetaValue::Bool(v) => (7, vec![u8::from(*v)]),
        MetaValue::String(v) => (8, string(v.as_bytes())),
        MetaValue::U64(v) => (10, v.to_le_bytes().into()),
        MetaValue::I64(v) => (11, v.to_le_bytes().into()),
        MetaValue::F64(v) => (12, v.to_le_bytes().into()),
        MetaValue::U32s(v) => (9, flat(4, v.iter().map(|v| v.to_le_bytes()))),
        MetaValue::I32s(v) => (9, flat(5, v.iter().map(|v| v.to_le_bytes()))),
        MetaValue::F32s(v) => (9, flat(6, v.iter().map(|v| v.to_le_bytes()))),
        MetaValue::Strings(v) => {
            let elements: Vec<u8> = v.iter().flat_map(|v| string(v.as_bytes())).collect();
            (9, array(8, v.len() as u64, &elements))
        }
        MetaValue::Array(v) => {
            let kind = v.first().map_or(0, |first| encode(first).0);
            let elements: Vec<u8> = v.iter().flat_map(|v| encode(v).1).collect();
            (9, array(kind, v.len() as u64, &elements))
        }
    }
}
