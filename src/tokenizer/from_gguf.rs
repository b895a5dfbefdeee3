//! Reads `tokenizer.ggml.*` into a `Tokenizer`: which model, which rules, which tokens end a
//! generation. Runs once per load, on the loading thread.

use super::bpe::{ByteDecoder, ByteLevelBpe};
use super::pretokenizers::PreTokenizer;
use super::spm::{self, ScoreBpe};
use super::vocabulary::{TokenKind, Vocabulary};
use super::wordpiece::{self, WordPieces};
use super::{Model, SequenceRules, Tokenizer};
use crate::format::{FormatError, ModelFile};
use crate::request::TokenId;

/// Names of tokens that end a turn or a text in well-known models. Files often name only one of
/// them as EOS, or mark them as ordinary text.
const END_NAMES: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "< EOT >",
];

/// The models of vocabularies that are understood.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    ByteLevel,
    SentencePiece,
    WordPiece,
}

/// Builds a tokenizer from a file's metadata.
pub(crate) fn tokenizer(file: &ModelFile) -> Result<Tokenizer, FormatError> {
    let family = match file.str("tokenizer.ggml.model")? {
        "gpt2" => Family::ByteLevel,
        "llama" => Family::SentencePiece,
        "bert" => Family::WordPiece,
        other => {
            return Err(file.invalid(format!(
                "tokenizer.ggml.model: `{other}` is not supported; known are gpt2 (byte-level BPE), llama (SentencePiece BPE) and bert (WordPiece)"
            )));
        }
    };
    let Some(texts) = file.optional_strings("tokenizer.ggml.tokens")? else {
        return Err(file.invalid("tokenizer.ggml.tokens is missing"));
    };
    if texts.is_empty() {
        return Err(file.invalid("tokenizer.ggml.tokens is empty"));
    }
    let pre = file
        .optional_str("tokenizer.ggml.pre")?
        .unwrap_or("default");
    let mut kinds = token_kinds(file, texts.len())?;
    let rules = match family {
        Family::WordPiece => wordpiece_rules(file, texts)?,
        Family::ByteLevel | Family::SentencePiece => {
            sequence_rules(file, family, pre, texts.len())?
        }
    };
    let end_tokens = end_tokens(file, texts, rules.eos)?;
    for token in end_tokens.iter().copied().chain(rules.bos) {
        // Whatever the file says: a client's plain text must never become one of these.
        kinds[token as usize] = TokenKind::Control;
    }
    let vocabulary = vocabulary(texts, &kinds, family);
    let model = match family {
        Family::ByteLevel => byte_level(file, texts, &vocabulary, pre)?,
        Family::SentencePiece => sentence_piece(file, &vocabulary)?,
        Family::WordPiece => word_piece(file, texts, &kinds)?,
    };
    Ok(Tokenizer::from_parts(vocabulary, model, rules, end_tokens))
}

fn token_kinds(file: &ModelFile, n_tokens: usize) -> Result<Vec<TokenKind>, FormatError> {
    let key = "tokenizer.ggml.token_type";
    let Some(numbers) = file.optional_ints(key)? else {
        return Ok(vec![TokenKind::Normal; n_tokens]);
    };
    if numbers.len() != n_tokens {
        return Err(file.invalid(format!(
            "{key} has {} entries for {n_tokens} tokens",
            numbers.len()
        )));
    }
    // A number that the format does not define says nothing, so the token is ordinary text.
    let kind = |number| TokenKind::from_gguf(number).unwrap_or(TokenKind::Normal);
    Ok(numbers.into_iter().map(kind).collect())
}

/// A key that names a token; Err when the token does not exist.
fn token_id(file: &ModelFile, key: &str, n_tokens: usize) -> Result<Option<TokenId>, FormatError> {
    match file.optional_u32(key)? {
        Some(token) if token as usize >= n_tokens => Err(file.invalid(format!(
            "{key} is {token}, but there are only {n_tokens} tokens"
        ))),
        other => Ok(other),
    }
}

fn sequence_rules(
    file: &ModelFile,
    family: Family,
    pre: &str,
    n_tokens: usize,
) -> Result<SequenceRules, FormatError> {
    // What holds where the file is silent.
    let always_bos = [
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "tekken",
        "lfm2",
    ];
    let add_bos = family == Family::SentencePiece || always_bos.contains(&pre);
    let default_id = |token: TokenId| {
        (family == Family::SentencePiece && (token as usize) < n_tokens).then_some(token)
    };
    Ok(SequenceRules {
        bos: token_id(file, "tokenizer.ggml.bos_token_id", n_tokens)?.or(default_id(1)),
        eos: token_id(file, "tokenizer.ggml.eos_token_id", n_tokens)?.or(default_id(2)),
        add_bos: file
            .optional_bool("tokenizer.ggml.add_bos_token")?
            .unwrap_or(add_bos),
        add_eos: file
            .optional_bool("tokenizer.ggml.add_eos_token")?
            .unwrap_or(false),
    })
}

/// A special token of a WordPiece vocabulary: by its key, else by the name that all such files use.
fn named_token(
    file: &ModelFile,
    texts: &[String],
    keys: &[&str],
    name: &str,
) -> Result<Option<TokenId>, FormatError> {
    for key in keys {
        let key = format!("tokenizer.ggml.{key}_token_id");
        if let Some(token) = token_id(file, &key, texts.len())? {
            return Ok(Some(token));
        }
    }
    let found = texts.iter().position(|text| text == name);
    Ok(found.map(|token| token as TokenId))
}

/// A text stands between `[CLS]` and `[SEP]`. The second key of the latter is misspelt in the format.
fn wordpiece_rules(file: &ModelFile, texts: &[String]) -> Result<SequenceRules, FormatError> {
    let adds = |key: &str| file.optional_bool(&format!("tokenizer.ggml.add_{key}_token"));
    Ok(SequenceRules {
        bos: named_token(file, texts, &["cls", "bos"], "[CLS]")?,
        eos: named_token(file, texts, &["sep", "seperator", "eos"], "[SEP]")?,
        add_bos: adds("bos")?.unwrap_or(true),
        add_eos: match adds("sep")? {
            Some(adds) => adds,
            None => adds("eos")?.unwrap_or(true),
        },
    })
}

fn word_piece(
    file: &ModelFile,
    texts: &[String],
    kinds: &[TokenKind],
) -> Result<Model, FormatError> {
    let Some(unknown) = named_token(file, texts, &["unknown"], "[UNK]")? else {
        return Err(file.invalid("a bert vocabulary needs tokenizer.ggml.unknown_token_id"));
    };
    let pieces = WordPieces::new(texts, kinds, unknown).map_err(|reason| file.invalid(reason))?;
    Ok(Model::WordPiece(Box::new(pieces)))
}

/// Ascending.
fn end_tokens(
    file: &ModelFile,
    texts: &[String],
    eos: Option<TokenId>,
) -> Result<Vec<TokenId>, FormatError> {
    let mut ends: Vec<TokenId> = eos.into_iter().collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ends.extend(token_id(file, key, texts.len())?);
    }
    let key = "tokenizer.tinyloop.end_token_ids";
    for id in file.optional_ints(key)?.unwrap_or_default() {
        match TokenId::try_from(id) {
            Ok(token) if (token as usize) < texts.len() => ends.push(token),
            _ => {
                let reason = format!("{key} has {id}, but there are only {} tokens", texts.len());
                return Err(file.invalid(reason));
            }
        }
    }
    // One pass over the vocabulary; the first byte rules out nearly all.
    let named: Vec<(TokenId, &str)> = (0..)
        .zip(texts)
        .filter(|(_, text)| text.starts_with(['<', '_']) && END_NAMES.contains(&text.as_str()))
        .map(|(token, text)| (token, text.as_str()))
        .collect();
    let has = |name: &str| named.iter().any(|(_, text)| *text == name);
    // Where `<|return|>` and `<|call|>` exist, `<|end|>` only closes one message of several.
    let end_is_inner = has("<|return|>") && has("<|call|>");
    let named = named
        .iter()
        .filter(|(_, text)| !(end_is_inner && *text == "<|end|>"));
    ends.extend(named.map(|(token, _)| *token));
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

fn vocabulary(texts: &[String], kinds: &[TokenKind], family: Family) -> Vocabulary {
    let decoder = ByteDecoder::new();
    let mut vocabulary = Vocabulary::with_capacity(texts.len());
    for (text, &kind) in texts.iter().zip(kinds) {
        vocabulary.push(kind, |bytes| match (family, kind) {
            (Family::SentencePiece, _) => spm::decode(text, kind, bytes),
            (Family::WordPiece, _) => wordpiece::decode(text, bytes),
            // Special tokens are written as they are, not in the byte alphabet.
            (Family::ByteLevel, TokenKind::Normal | TokenKind::Byte) => {
                decoder.decode(text, bytes);
            }
            (Family::ByteLevel, _) => bytes.extend_from_slice(text.as_bytes()),
        });
    }
    vocabulary
}

fn byte_level(
    file: &ModelFile,
    texts: &[String],
    vocabulary: &Vocabulary,
    pre: &str,
) -> Result<Model, FormatError> {
    let Some(merges) = file.optional_strings("tokenizer.ggml.merges")? else {
        return Err(file.invalid("tokenizer.ggml.merges is missing: a gpt2 vocabulary needs them"));
    };
    // Files translated from another layout spell the rule out instead of naming it.
    let words = match file.optional_strings("tokenizer.tinyloop.patterns")? {
        None => PreTokenizer::named(pre),
        Some(patterns) => {
            let key = "tokenizer.tinyloop.ignore_merges";
            let ignore_merges = file.optional_bool(key)?.unwrap_or(false);
            PreTokenizer::of_patterns(patterns, ignore_merges)
        }
    };
    let words = words.map_err(|reason| file.invalid(reason))?;
    let bpe = ByteLevelBpe::new(texts, vocabulary, merges, words)
        .map_err(|reason| file.invalid(reason))?;
    Ok(Model::ByteLevel(Box::new(bpe)))
}

fn sentence_piece(file: &ModelFile, vocabulary: &Vocabulary) -> Result<Model, FormatError> {
    let key = "tokenizer.ggml.scores";
    let scores = match file.optional_f32s(key)? {
        Some(scores) if scores.len() == vocabulary.len() => scores.to_vec(),
        Some(scores) => {
            return Err(file.invalid(format!(
                "{key} has {} entries for {} tokens",
                scores.len(),
                vocabulary.len()
            )));
        }
        None => {
            return Err(file.invalid(format!("{key} is missing: a llama vocabulary needs them")));
        }
    };
    let n_tokens = vocabulary.len();
    let unknown = token_id(file, "tokenizer.ggml.unknown_token_id", n_tokens)?.or(Some(0));
    let space_prefix = file
        .optional_bool("tokenizer.ggml.add_space_prefix")?
        .unwrap_or(true);
    let model = ScoreBpe::new(vocabulary, scores, unknown, space_prefix);
    Ok(Model::SentencePiece(Box::new(model)))
}
