//! tokenizer.json and the files beside it in the words of `tokenizer.ggml.*`.
//!
//! Pure once the files are read. Byte-level BPE and SentencePiece-like BPE are understood, which
//! covers the architectures we know. What `tokenizer.ggml.pre` cannot say, since it is a name, stands
//! in two keys of our own: `tokenizer.tinyloop.patterns` and `.ignore_merges`. A directory without
//! tokenizer.json gives a model without a vocabulary.

use super::config::Config;
use super::translation::Translation;
use super::{invalid, read_json, read_text};
use crate::format::{FormatError, MetaValue};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

const FILE: &str = "tokenizer.json";
/// Most tokens; vocabularies in the wild stay below 300,000.
const TOKENS_MAX: u64 = 1 << 22;
/// The words that a byte-level pre-tokenizer cuts by itself.
const GPT2_WORDS: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Sets the keys of the vocabulary and the chat template.
pub(super) fn translate(
    directory: &Path,
    config: &Config,
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    let companions = Companions::read(directory)?;
    if let Some(template) = companions.chat_template(directory)? {
        translation.set("tokenizer.chat_template", MetaValue::String(template));
    }
    let Some(json) = read_json(directory, FILE)? else {
        return Ok(());
    };
    let fault = |reason: String| invalid(&directory.join(FILE), reason);
    let vocabulary = Vocabulary::read(&json).map_err(fault)?;
    match vocabulary.is_sentence_piece {
        true => sentence_piece(&json, &vocabulary, translation),
        false => byte_level(&json, translation).map_err(fault)?,
    }
    ends(&json, &vocabulary, config, &companions, translation)?;
    let Vocabulary {
        texts,
        kinds,
        merges,
        ..
    } = vocabulary;
    translation.set("tokenizer.ggml.tokens", MetaValue::Strings(texts));
    translation.set("tokenizer.ggml.token_type", MetaValue::I32s(kinds));
    let merges = merges
        .into_iter()
        .map(|[left, right]| format!("{left} {right}"));
    translation.set(
        "tokenizer.ggml.merges",
        MetaValue::Strings(merges.collect()),
    );
    Ok(())
}

/// The files beside tokenizer.json; empty objects where there are none.
struct Companions {
    tokenizer: Config,
    generation: Config,
    raw_template: Value,
}

impl Companions {
    fn read(directory: &Path) -> Result<Self, FormatError> {
        let read = |name: &str| -> Result<(Value, Config), FormatError> {
            let value = read_json(directory, name)?.unwrap_or_else(|| serde_json::json!({}));
            let config = Config::new(&directory.join(name), value.clone())?;
            Ok((value, config))
        };
        let (mut raw, tokenizer) = read("tokenizer_config.json")?;
        let raw_template = raw.get_mut("chat_template").map(Value::take);
        Ok(Self {
            tokenizer,
            generation: read("generation_config.json")?.1,
            raw_template: raw_template.unwrap_or_default(),
        })
    }

    /// chat_template.jinja, or the one of tokenizer_config.json (of several the default).
    fn chat_template(&self, directory: &Path) -> Result<Option<String>, FormatError> {
        if let Some(text) = read_text(directory, "chat_template.jinja")? {
            return Ok(Some(text));
        }
        Ok(match &self.raw_template {
            Value::String(text) => Some(text.clone()),
            Value::Array(named) => named
                .iter()
                .find(|entry| entry["name"] == "default")
                .and_then(|entry| entry["template"].as_str())
                .map(str::to_owned),
            _ => None,
        })
    }

    /// The text of a special token: a string, or an object with `content`.
    fn special(&self, key: &str) -> Result<Option<String>, FormatError> {
        if let Ok(Some(text)) = self.tokenizer.optional_str(key) {
            return Ok(Some(text.to_owned()));
        }
        match self.tokenizer.optional_object(key)? {
            Some(object) => Ok(object.optional_str("content")?.map(str::to_owned)),
            None => Ok(None),
        }
    }
}

/// Tokens and merges.
struct Vocabulary {
    /// (vocab_size)
    texts: Vec<String>,
    /// (vocab_size): GGUF's numbers.
    kinds: Vec<i32>,
    merges: Vec<[String; 2]>,
    is_sentence_piece: bool,
    ids: HashMap<String, u32>,
}

/// GGUF's numbers of token kinds.
mod kind {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
}

impl Vocabulary {
    fn read(json: &Value) -> Result<Self, String> {
        let model = &json["model"];
        // Files written before 2022 leave the type out.
        if !matches!(model["type"].as_str(), Some("BPE") | None) {
            return Err(format!(
                "model.type is {}; only BPE is supported",
                model["type"]
            ));
        }
        let Some(vocab) = model["vocab"].as_object() else {
            return Err("model.vocab is not an object of tokens and ids".to_owned());
        };
        let is_sentence_piece = model["byte_fallback"] == true;
        let unknown = model["unk_token"].as_str();
        let mut found: Vec<(u32, &str, i32)> = Vec::with_capacity(vocab.len());
        for (text, id) in vocab {
            let kind = match text.as_str() {
                text if Some(text) == unknown => kind::UNKNOWN,
                text if is_sentence_piece && is_byte_token(text) => kind::BYTE,
                _ => kind::NORMAL,
            };
            found.push((token_id(id, text)?, text, kind));
        }
        let empty = Vec::new();
        for token in json["added_tokens"].as_array().unwrap_or(&empty) {
            let Some(text) = token["content"].as_str() else {
                return Err("added_tokens has an entry without `content`".to_owned());
            };
            let kind = match token["special"] == true {
                true if Some(text) == unknown => kind::UNKNOWN,
                true => kind::CONTROL,
                false => kind::USER_DEFINED,
            };
            found.push((token_id(&token["id"], text)?, text, kind));
        }
        let n_tokens = found.iter().map(|(id, ..)| id + 1).max().unwrap_or(0);
        let mut texts: Vec<String> = (0..n_tokens).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![kind::UNUSED; n_tokens as usize];
        let mut ids = HashMap::with_capacity(found.len());
        for (id, text, kind) in found {
            text.clone_into(&mut texts[id as usize]);
            kinds[id as usize] = kind;
            ids.insert(text.to_owned(), id);
        }
        Ok(Self {
            texts,
            kinds,
            merges: merges(&model["merges"])?,
            is_sentence_piece,
            ids,
        })
    }
}

fn token_id(id: &Value, text: &str) -> Result<u32, String> {
    match id.as_u64() {
        Some(id) if id < TOKENS_MAX => Ok(id as u32),
        _ => Err(format!(
            "the id of token {text:?} is {id}; below {TOKENS_MAX} is needed"
        )),
    }
}

fn is_byte_token(text: &str) -> bool {
    let hex = text
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && u8::from_str_radix(hex, 16).is_ok())
}

/// `"left right"` or `["left", "right"]`.
fn merges(list: &Value) -> Result<Vec<[String; 2]>, String> {
    let Some(list) = list.as_array() else {
        return Err("model.merges is not a list".to_owned());
    };
    let pair = |merge: &Value| match merge {
        Value::String(text) => {
            let (left, right) = text.split_once(' ')?;
            Some([left.to_owned(), right.to_owned()])
        }
        Value::Array(parts) => match parts.as_slice() {
            [Value::String(left), Value::String(right)] => Some([left.clone(), right.clone()]),
            _ => None,
        },
        _ => None,
    };
    let pairs = list.iter().enumerate();
    pairs
        .map(|(index, merge)| {
            pair(merge).ok_or_else(|| format!("model.merges[{index}] is {merge}, not two tokens"))
        })
        .collect()
}

/// Keys of a SentencePiece-like vocabulary: what merges first has the highest score.
fn sentence_piece(json: &Value, vocabulary: &Vocabulary, translation: &mut Translation<'_>) {
    translation.set("tokenizer.ggml.model", MetaValue::String("llama".into()));
    let mut scores = vec![-1e9_f32; vocabulary.texts.len()];
    for (rank, [left, right]) in vocabulary.merges.iter().enumerate().rev() {
        if let Some(&id) = vocabulary.ids.get(&format!("{left}{right}")) {
            scores[id as usize] = -(rank as f32) - 1.0;
        }
    }
    translation.set("tokenizer.ggml.scores", MetaValue::F32s(scores));
    // `Prepend` of the normalizer, or `Metaspace` of the pre-tokenizer.
    let text = format!("{}{}", json["normalizer"], json["pre_tokenizer"]);
    let prepends = text.contains("\"Prepend\"")
        || text.contains("\"prepend_scheme\":\"first\"")
        || text.contains("\"prepend_scheme\":\"always\"")
        || text.contains("\"add_prefix_space\":true");
    translation.set("tokenizer.ggml.add_space_prefix", MetaValue::Bool(prepends));
}

/// Keys of a byte-level vocabulary.
fn byte_level(json: &Value, translation: &mut Translation<'_>) -> Result<(), String> {
    translation.set("tokenizer.ggml.model", MetaValue::String("gpt2".into()));
    match &json["normalizer"] {
        Value::Null => {}
        normalizer if normalizer["type"] == "NFC" => {} // A no-op on nearly all texts.
        other => return Err(format!("normalizer {} is not supported", other["type"])),
    }
    let mut patterns = Vec::new();
    pretokenizer(&json["pre_tokenizer"], &mut patterns)?;
    translation.set("tokenizer.tinyloop.patterns", MetaValue::Strings(patterns));
    let ignores = json["model"]["ignore_merges"] == true;
    translation.set("tokenizer.tinyloop.ignore_merges", MetaValue::Bool(ignores));
    Ok(())
}

/// Appends the expressions by which a pre-tokenizer cuts, in order.
fn pretokenizer(step: &Value, patterns: &mut Vec<String>) -> Result<(), String> {
    let kind = step["type"].as_str().unwrap_or_default();
    match kind {
        "Sequence" => {
            let Some(steps) = step["pretokenizers"].as_array() else {
                return Err("pre_tokenizer: a sequence without `pretokenizers`".to_owned());
            };
            steps
                .iter()
                .try_for_each(|step| pretokenizer(step, patterns))
        }
        "ByteLevel" if step["add_prefix_space"] == true => {
            Err("pre_tokenizer: ByteLevel with add_prefix_space is not supported".to_owned())
        }
        "ByteLevel" => {
            if step["use_regex"] != false {
                patterns.push(GPT2_WORDS.to_owned());
            }
            Ok(())
        }
        "Digits" => {
            let single = step["individual_digits"] == true;
            patterns.push(if single { r"\p{N}" } else { r"\p{N}+" }.to_owned());
            Ok(())
        }
        "Split" => {
            let isolated = step["behavior"] == "Isolated" && step["invert"] != true;
            let removed_rest = step["behavior"] == "Removed" && step["invert"] == true;
            match step["pattern"]["Regex"].as_str() {
                Some(pattern) if isolated || removed_rest => {
                    patterns.push(pattern.to_owned());
                    Ok(())
                }
                _ => Err(format!("pre_tokenizer: {step} is not supported")),
            }
        }
        _ => Err(format!(
            "pre_tokenizer: type {} is not supported",
            step["type"]
        )),
    }
}

/// Begin and end of sequence, and what else ends a generation.
fn ends(
    json: &Value,
    vocabulary: &Vocabulary,
    config: &Config,
    companions: &Companions,
    translation: &mut Translation<'_>,
) -> Result<(), FormatError> {
    let named = |key: &str| -> Result<Option<u32>, FormatError> {
        let text = companions.special(key)?;
        Ok(text.and_then(|text| vocabulary.ids.get(&text).copied()))
    };
    let exists = |id: &u32| (*id as usize) < vocabulary.texts.len();
    let first = |key: &str| -> Result<Option<u32>, FormatError> {
        Ok(config.token_ids(key)?.into_iter().find(exists))
    };
    let bos = named("bos_token")?.or(first("bos_token_id")?);
    let eos = named("eos_token")?.or(first("eos_token_id")?);
    for (key, id) in [("bos_token_id", bos), ("eos_token_id", eos)] {
        if let Some(id) = id {
            translation.set(&format!("tokenizer.ggml.{key}"), MetaValue::U32(id));
        }
    }
    let mut ids: Vec<u32> = companions.generation.token_ids("eos_token_id")?;
    ids.extend(config.token_ids("eos_token_id")?);
    ids.retain(exists);
    translation.set("tokenizer.tinyloop.end_token_ids", MetaValue::U32s(ids));
    let explicit = |key: &str| companions.tokenizer.optional_bool(key);
    let add_bos = explicit("add_bos_token")?.unwrap_or_else(|| {
        bos.is_some_and(|bos| adds_first(&json["post_processor"], &vocabulary.texts[bos as usize]))
    });
    let add_eos = explicit("add_eos_token")?.unwrap_or(false);
    translation.set("tokenizer.ggml.add_bos_token", MetaValue::Bool(add_bos));
    translation.set("tokenizer.ggml.add_eos_token", MetaValue::Bool(add_eos));
    Ok(())
}

/// Whether a post-processor puts `token` before a text.
fn adds_first(processor: &Value, token: &str) -> bool {
    match processor["type"].as_str() {
        Some("Sequence") => processor["processors"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| adds_first(one, token))),
        Some("TemplateProcessing") => processor["single"][0]["SpecialToken"]["id"] == token,
        _ => false,
    }
}
