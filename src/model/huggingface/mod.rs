//! A directory in Hugging Face layout as a [`ModelFile`]: config.json, safetensors, tokenizer files,
//! translated into GGUF's keys and tensor names.
//!
//! Runs on the thread that loads. Translated here and nowhere else: after this step nothing knows
//! where a model came from, and `quantize` can write it out as a GGUF file.
//!
//! ```text
//! config.json ─► Config ─┬─► usual  (Llama-like names; Ouro, Nanbeige) ─┐
//!                        └─► looped (Raven classes, looped-llama)       ├─► Translation ─► ModelFile
//! *.safetensors ─► Safetensors ─────────────────────────────────────────┤
//! tokenizer.json, tokenizer_config.json, generation_config.json, .. ────┘
//! ```
//!
//! Nothing is executed: models that bring code (`trust_remote_code`) work when their architecture
//! is one we know. Tensors that no rule names are kept under their own names, so that the check of
//! `weights` reports them. What is not here: what keys and tensors mean.

mod config;
mod looped;
mod rope;
mod tokenizer;
mod translation;
mod usual;

use super::{ModelError, architectures};
use crate::format::{FormatError, ModelFile, Safetensors};
use config::Config;
use std::collections::BTreeMap;
use std::path::Path;
use translation::Translation;

/// Largest JSON file that is read; tokenizers have some ten MB.
const JSON_BYTES_MAX: u64 = 256 << 20;
/// The name of the table of contents of a checkpoint in several files.
const INDEX: &str = "model.safetensors.index.json";

/// Opens a directory.
pub(super) fn open(directory: &Path) -> Result<ModelFile, ModelError> {
    let config = read_json(directory, "config.json")?;
    let Some(config) = config else {
        let reason = "there is no config.json: not a model in Hugging Face layout";
        return Err(invalid(directory, reason.to_owned()).into());
    };
    let config = Config::new(&directory.join("config.json"), config)?;
    let files = open_files(directory)?;
    let name = directory.display().to_string();
    let mut translation = Translation::new(&name, &files)?;
    translate(&config, &mut translation)?;
    tokenizer::translate(directory, &config, &mut translation)?;
    let parts = translation.finish();
    Ok(ModelFile::assemble(
        name.clone(),
        files,
        parts.synthesized,
        parts.metadata,
        parts.tensors,
    ))
}

fn translate(config: &Config, translation: &mut Translation<'_>) -> Result<(), ModelError> {
    // Our own layout says `architecture`, all others `model_type`.
    let kind = match config.optional_str("model_type")? {
        Some(kind) => kind,
        None => config.str("architecture")?,
    };
    let usual = architectures::ARCHITECTURES
        .iter()
        .find(|row| row.model_types.contains(&kind));
    match (kind, usual) {
        (_, Some(row)) => usual::translate(row, config, translation),
        ("huginn_raven", None) => looped::raven(config, translation),
        ("looped-llama", None) => looped::looped_llama(config, translation),
        _ => {
            let usual = architectures::ARCHITECTURES
                .iter()
                .flat_map(|row| row.model_types)
                .copied();
            let known: Vec<&str> = usual.chain(["huginn_raven", "looped-llama"]).collect();
            Err(ModelError::Unknown(format!(
                "{}: model_type \"{kind}\" is not supported; the known ones are {}",
                config.path(),
                known.join(", ")
            )))
        }
    }
}

/// The checkpoint's files: those of the index, or the one there is.
fn open_files(directory: &Path) -> Result<Vec<Safetensors>, FormatError> {
    if let Some(index) = read_json(directory, INDEX)? {
        return open_indexed(directory, &index);
    }
    let io = |source| FormatError::Io {
        path: directory.display().to_string(),
        source,
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            found.push(path);
        }
    }
    match found.as_slice() {
        [one] => Ok(vec![Safetensors::open(one)?]),
        [] => Err(invalid(
            directory,
            "there is no .safetensors file (PyTorch .bin checkpoints are not read: convert them)"
                .to_owned(),
        )),
        many => Err(invalid(
            directory,
            format!(
                "there are {} .safetensors files, but no {INDEX}",
                many.len()
            ),
        )),
    }
}

fn open_indexed(
    directory: &Path,
    index: &serde_json::Value,
) -> Result<Vec<Safetensors>, FormatError> {
    let path = directory.join(INDEX);
    let Some(map) = index.get("weight_map").and_then(|map| map.as_object()) else {
        return Err(invalid(
            &path,
            "it lacks the object `weight_map`".to_owned(),
        ));
    };
    let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in map {
        let name = file.as_str().filter(|name| is_plain_name(name));
        let Some(name) = name else {
            let reason = format!("tensor {tensor} is in {file}, which is no plain file name");
            return Err(invalid(&path, reason));
        };
        by_file.entry(name).or_default().push(tensor);
    }
    let mut files = Vec::with_capacity(by_file.len());
    for (name, tensors) in by_file {
        let file = Safetensors::open(&directory.join(name))?;
        let present: std::collections::HashSet<&str> = file
            .entries()
            .iter()
            .map(|entry| entry.name.as_str())
            .collect();
        if let Some(missing) = tensors.iter().find(|tensor| !present.contains(**tensor)) {
            let reason = format!("tensor {missing} is missing, though {INDEX} says it is here");
            return Err(invalid(&directory.join(name), reason));
        }
        files.push(file);
    }
    Ok(files)
}

/// A file of the directory itself: an index must not lead elsewhere.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let is_normal = matches!(parts.next(), Some(std::path::Component::Normal(_)));
    is_normal && parts.next().is_none()
}

fn invalid(path: &Path, reason: String) -> FormatError {
    FormatError::Invalid {
        path: path.display().to_string(),
        reason,
    }
}

/// The text of a file of the directory; None when there is none.
fn read_text(directory: &Path, name: &str) -> Result<Option<String>, FormatError> {
    let path = directory.join(name);
    let io = |source| FormatError::Io {
        path: path.display().to_string(),
        source,
    };
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
        Ok(metadata) if !metadata.is_file() => {
            return Err(invalid(&path, "it is not a regular file".to_owned()));
        }
        Ok(metadata) if metadata.len() > JSON_BYTES_MAX => {
            let reason = format!(
                "it has {} bytes, {JSON_BYTES_MAX} are the most",
                metadata.len()
            );
            return Err(invalid(&path, reason));
        }
        Ok(_) => {}
    }
    std::fs::read_to_string(&path).map(Some).map_err(io)
}

/// The same, parsed.
fn read_json(directory: &Path, name: &str) -> Result<Option<serde_json::Value>, FormatError> {
    let Some(text) = read_text(directory, name)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| invalid(&directory.join(name), format!("it is not JSON: {error}")))
}
