//! `tinyloop inspect`: what a model file holds and how much memory it needs.
//!
//! Runs on the main thread; maps the file or the directory's files, reads no weights.

use super::output::Output;
use crate::config::BUILTIN_MODEL;
use crate::error::Error;
use crate::format::{MetaValue, ModelFile};
use crate::model::{self, ModelSpec};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Array elements and characters shown of a metadata value.
const ELEMENTS_SHOWN: usize = 8;
const CHARS_SHOWN: usize = 100;

/// Arguments of `tinyloop inspect`.
#[derive(Clone, Debug, clap::Args)]
pub struct InspectArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(value_name = "FILE", default_value = BUILTIN_MODEL)]
    pub model: PathBuf,
    /// Context length to compute the memory for [default: the model's own].
    #[arg(short, long, value_name = "TOKENS")]
    pub ctx_size: Option<u32>,
    /// List every tensor.
    #[arg(short, long)]
    pub tensors: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Prints it.
pub fn run(args: &InspectArgs) -> Result<(), Error> {
    let file = model::open(&args.model).map_err(|error| Error::Other(error.to_string()))?;
    let mut output = Output::new();
    if args.json {
        output.line(&as_json(&file, args).to_string())?;
    } else {
        for line in as_lines(&file, args) {
            output.line(&line)?;
        }
    }
    output.finish()
}

/// Tensors and bytes per element type, in the order of the types' names.
fn types(file: &ModelFile) -> BTreeMap<String, (usize, u64)> {
    let mut types = BTreeMap::new();
    for tensor in file.tensors() {
        let entry: &mut (usize, u64) = types.entry(format!("{:?}", tensor.dtype)).or_default();
        entry.0 += 1;
        entry.1 += tensor.n_bytes();
    }
    types
}

fn n_parameters(file: &ModelFile) -> u64 {
    file.tensors()
        .iter()
        .map(|tensor| tensor.dims.iter().product::<u64>())
        .sum()
}

fn as_lines(file: &ModelFile, args: &InspectArgs) -> Vec<String> {
    let mut lines = vec![format!(
        "{}, {}, {} tensors, {:.1} M parameters",
        file.container(),
        megabytes(file.file_len()),
        file.tensors().len(),
        n_parameters(file) as f64 / 1e6
    )];
    lines.push(String::new());
    for (key, value) in file.metadata() {
        lines.push(format!("{key:<44} {}", shown(value)));
    }
    lines.push(String::new());
    for (name, (count, bytes)) in types(file) {
        lines.push(format!(
            "{name:<8} {count:>5} tensors {:>12}",
            megabytes(bytes)
        ));
    }
    if args.tensors {
        lines.push(String::new());
        for tensor in file.tensors() {
            let dtype = format!("{:?}", tensor.dtype);
            let bytes = megabytes(tensor.n_bytes());
            lines.push(format!(
                "{:<40} {dtype:<6} {:>20} {bytes:>12}",
                tensor.name,
                dims(&tensor.dims)
            ));
        }
    }
    lines.push(String::new());
    lines.extend(memory_lines(file, args));
    lines
}

/// Memory, or why the model cannot be served.
fn memory_lines(file: &ModelFile, args: &InspectArgs) -> Vec<String> {
    let spec = match ModelSpec::from_gguf(file) {
        Ok(spec) => spec,
        Err(error) => return vec![format!("cannot be served: {error}")],
    };
    let context = args.ctx_size.unwrap_or(spec.context_length);
    let needed = spec.memory_needed(context);
    let mut lines = loop_lines(&spec);
    lines.extend([
        format!("memory for one sequence of {context} tokens:"),
        format!("  weights {:>12}", megabytes(needed.weight_bytes)),
        format!(
            "  KV      {:>12}  ({} bytes per token)",
            megabytes(needed.kv_bytes),
            spec.kv_bytes_per_token()
        ),
        format!("  sum     {:>12}", megabytes(needed.total_bytes)),
    ]);
    lines
}

/// Segments and depth of a looped model; nothing for an ordinary one.
fn loop_lines(spec: &ModelSpec) -> Vec<String> {
    let plan = spec.plan();
    if plan.max_loops == 1 {
        return Vec::new();
    }
    let [prelude, core, coda] = [&plan.prelude, &plan.core, &plan.coda].map(|blocks| blocks.len());
    vec![
        format!(
            "{prelude} + {core} x L + {coda} blocks, L = 1 to {}, {} by default",
            plan.max_loops, plan.default_loops
        ),
        String::new(),
    ]
}

fn as_json(file: &ModelFile, args: &InspectArgs) -> Value {
    let metadata: Map<String, Value> = file
        .metadata()
        .iter()
        .map(|(key, value)| (key.clone(), meta_json(value)))
        .collect();
    let tensors: Vec<Value> = file
        .tensors()
        .iter()
        .map(|tensor| {
            json!({"name": tensor.name, "type": format!("{:?}", tensor.dtype), "dims": tensor.dims,
                "offset": tensor.file_range.start, "bytes": tensor.n_bytes()})
        })
        .collect();
    let memory = ModelSpec::from_gguf(file).map(|spec| {
        let context = args.ctx_size.unwrap_or(spec.context_length);
        let needed = spec.memory_needed(context);
        json!({"context": context, "weight_bytes": needed.weight_bytes,
            "kv_bytes": needed.kv_bytes, "total_bytes": needed.total_bytes,
            "kv_bytes_per_token": spec.kv_bytes_per_token(),
            "loops": {"default": spec.loops.default_loops, "max": spec.loops.max_loops}})
    });
    let (memory, fault) = match memory {
        Ok(memory) => (memory, Value::Null),
        Err(error) => (Value::Null, Value::from(error.to_string())),
    };
    json!({
        "container": file.container(), "file_bytes": file.file_len(),
        "parameters": n_parameters(file), "metadata": metadata, "tensors": tensors,
        "memory": memory, "cannot_be_served": fault,
    })
}

fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

fn dims(dims: &[u64]) -> String {
    dims.iter()
        .map(u64::to_string)
        .collect::<Vec<_>>()
        .join(" x ")
}

/// The JSON of a value; long arrays (vocabularies) are cut to their length.
fn meta_json(value: &MetaValue) -> Value {
    fn few<T: Clone + Into<Value>>(items: &[T]) -> Value {
        match items.len() <= ELEMENTS_SHOWN {
            true => items.iter().cloned().map(Into::into).collect(),
            false => json!({"length": items.len()}),
        }
    }
    match value {
        MetaValue::U8(number) => json!(number),
        MetaValue::I8(number) => json!(number),
        MetaValue::U16(number) => json!(number),
        MetaValue::I16(number) => json!(number),
        MetaValue::U32(number) => json!(number),
        MetaValue::I32(number) => json!(number),
        MetaValue::U64(number) => json!(number),
        MetaValue::I64(number) => json!(number),
        MetaValue::F32(number) => json!(number),
        MetaValue::F64(number) => json!(number),
        MetaValue::Bool(flag) => json!(flag),
        MetaValue::String(text) => json!(text),
        MetaValue::Strings(items) => few(items),
        MetaValue::F32s(items) => few(items),
        MetaValue::I32s(items) => few(items),
        MetaValue::U32s(items) => few(items),
        MetaValue::Array(items) => few(&items.iter().map(meta_json).collect::<Vec<_>>()),
    }
}

/// One line of a value.
fn shown(value: &MetaValue) -> String {
    let text = match meta_json(value) {
        // One line stays one line, quotes stay readable.
        Value::String(text) => text.replace('\n', "\\n").replace('\r', "\\r"),
        Value::Object(map) => format!("[{} elements]", map["length"]),
        other => other.to_string(),
    };
    match text.char_indices().nth(CHARS_SHOWN) {
        Some((cut, _)) => format!("{}.. ({} characters)", &text[..cut], text.chars().count()),
        None => text,
    }
}
