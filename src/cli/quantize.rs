//! `tinyloop quantize`: a GGUF file or a Hugging Face directory in, a GGUF file out.
//!
//! Runs on the main thread; rows are converted on all cores. All metadata are kept, the vocabulary
//! and the chat template with them, so that the file alone can be served. Weights that are already
//! quantized can be converted again; what the first rounding lost stays lost, and a note says so.
//! What is not here: which tensor gets which type (`model::requantize`), the format
//! (`format::gguf::writer`).

use super::output::Output;
use super::progress::bytes_bar;
use crate::backend::quantize::quantize_matrix;
use crate::config::QuantizeType;
use crate::dtype::DType;
use crate::error::Error;
use crate::format::gguf::writer::{self, WrittenTensor};
use crate::format::{FormatError, MetaValue, ModelFile};
use crate::model::{self, ModelSpec, requantize};
use crate::tokenizer::pre_tokenizer_name;
use std::path::PathBuf;

/// Arguments of `tinyloop quantize`.
#[derive(Clone, Debug, clap::Args)]
pub struct QuantizeArgs {
    /// Model: a GGUF file, a directory in Hugging Face layout, or "builtin".
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// File to write (GGUF).
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// Type of the matrices.
    #[arg(value_enum, value_name = "TYPE", default_value = "q8_0")]
    pub to: QuantizeType,
    /// Threads that convert [default: the cores given].
    #[arg(short, long, value_name = "COUNT")]
    pub threads: Option<usize>,
}

/// Writes the file and says what it holds.
pub fn run(args: &QuantizeArgs) -> Result<(), Error> {
    let fault = |error: &dyn std::fmt::Display| Error::Other(error.to_string());
    let file = model::open(&args.input).map_err(|error| fault(&error))?;
    // What we cannot load we would only copy: better to say so before an hour of work.
    ModelSpec::from_gguf(&file).map_err(|error| fault(&error))?;
    let wanted = requantize::dtype_of(args.to);
    let tensors = planned(&file, wanted);
    let n_again = n_converted_again(&file, &tensors);
    if n_again > 0 {
        tracing::warn!(
            tensors = n_again,
            "already quantized tensors are converted again: their first rounding stays"
        );
    }
    convert(&file, args, &metadata(&file, wanted), &tensors).map_err(|error| fault(&error))?;
    let written = std::fs::metadata(&args.output).map_or(0, |metadata| metadata.len());
    let mut output = Output::new();
    output.line(&format!(
        "{}: {} tensors, {:.2} MB (from {:.2} MB)",
        args.output.display(),
        tensors.len(),
        written as f64 / 1e6,
        file.file_len() as f64 / 1e6
    ))?;
    output.finish()
}

/// Names, shapes and types to write, in the order of the file.
fn planned(file: &ModelFile, wanted: DType) -> Vec<WrittenTensor> {
    let plan = |info: &crate::format::TensorInfo| {
        let target = requantize::target(&info.name, &info.dims, info.dtype, wanted);
        WrittenTensor {
            name: info.name.clone(),
            // Other software expects norms and biases in f32.
            dtype: match target {
                Some(dtype) => dtype,
                None if info.dims.len() == 1 => DType::F32,
                None => info.dtype,
            },
            dims: info.dims.clone(),
        }
    };
    file.tensors().iter().map(plan).collect()
}

fn n_converted_again(file: &ModelFile, tensors: &[WrittenTensor]) -> usize {
    let is_float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let pairs = file.tensors().iter().zip(tensors);
    pairs
        .filter(|(info, written)| info.dtype != written.dtype && !is_float(info.dtype))
        .count()
}

/// The file's keys, with those replaced that the new types change.
fn metadata(file: &ModelFile, wanted: DType) -> Vec<(String, MetaValue)> {
    let mut changed = vec![
        ("general.file_type", MetaValue::U32(file_type(wanted))),
        ("general.quantization_version", MetaValue::U32(2)),
    ];
    let patterns = file.optional_strings("tokenizer.tinyloop.patterns");
    let ignores = file.optional_bool("tokenizer.tinyloop.ignore_merges");
    if let (Ok(Some(patterns)), Ok(ignores)) = (patterns, ignores)
        && let Some(name) = pre_tokenizer_name(patterns, ignores.unwrap_or(false))
    {
        // Other software knows the rule by its name only.
        let name = MetaValue::String(name.to_owned());
        changed.push(("tokenizer.ggml.pre", name));
    }
    let replaced = |key: &str| {
        key == "general.alignment" || changed.iter().any(|(changed, _)| *changed == key)
    };
    let kept = file.metadata().iter().filter(|(key, _)| !replaced(key));
    let mut all: Vec<(String, MetaValue)> = kept.cloned().collect();
    let changed = changed.into_iter();
    all.extend(changed.map(|(key, value)| (key.to_owned(), value)));
    all
}

/// The number that GGUF gives to "mostly this type".
fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        DType::Q2_K => 10,
        DType::Q3_K => 12,
        DType::Q4_K => 14,
        DType::Q5_K => 16,
        DType::Q6_K => 18,
        DType::IQ4_NL => 25,
        DType::BF16 => 32,
    }
}

fn convert(
    file: &ModelFile,
    args: &QuantizeArgs,
    metadata: &[(String, MetaValue)],
    tensors: &[WrittenTensor],
) -> Result<(), FormatError> {
    let available = || std::thread::available_parallelism().map_or(1, usize::from);
    let n_threads = args.threads.unwrap_or_else(available).max(1);
    let bar = bytes_bar("quantizing");
    bar.set_length(file.tensors().iter().map(|info| info.n_bytes()).sum());
    let mut scratch = Vec::new();
    let data = |index: usize, bytes: &mut Vec<u8>| {
        let name = &tensors[index].name;
        let tensor = file.read(name, &mut scratch)?;
        if tensor.dtype == tensors[index].dtype {
            bytes.extend_from_slice(tensor.bytes);
        } else {
            *bytes = quantize_matrix(&tensor, tensors[index].dtype, n_threads);
        }
        bar.inc(tensor.bytes.len() as u64);
        Ok(())
    };
    let written = writer::write(&args.output, metadata, tensors, data);
    bar.finish_and_clear();
    written
}
