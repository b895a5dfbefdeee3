//! `POST /v1/embeddings`: fields and answer.
//!
//! Vectors have length 1. Official clients ask for base64 unless told otherwise, so both encodings are
//! part of the contract. A cut (`dimensions`) takes the first coordinates and gives them length 1 again;
//! that makes sense for models that were trained for embeddings, so the states of others are not cut.
//! What is not here: jobs and inputs (`generation/embed`).

use super::fields::{Fields, parse_object};
use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::embed::{EmbedWork, Embedded, normalize};
use crate::pool::LoadedModel;
use serde::Serialize;

/// How vectors are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Arrays of numbers.
    Float,
    /// Little-endian f32, in base64.
    Base64,
}

/// `POST /v1/embeddings`
pub fn embeddings(call: &Call<'_>, mut exchange: Exchange) {
    let mut answer = || {
        let body = parse_object(call.request.body())?;
        let fields = Fields::new(&body);
        refuse_unsupported(&fields)?;
        let encoding = encoding(&fields)?;
        let work = EmbedWork::prepare(call, &body, "input")?;
        let n_dimensions = dimensions(&fields, &work.model)?;
        let name = work.model.name.clone();
        let embedded = work.run(call, &mut exchange)?;
        Ok((name, embedded, n_dimensions, encoding))
    };
    match answer() {
        Ok((name, embedded, n_dimensions, encoding)) => {
            exchange.json(&EmbeddingList::new(name, embedded, n_dimensions, encoding));
        }
        Err(error) => exchange.error(&error),
    }
}

/// Fields of other servers that would change the vectors.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    for name in [
        "truncate_prompt_tokens",
        "truncate",
        "normalize",
        "embd_normalize",
    ] {
        if fields.get(name).is_some() {
            let why = "inputs are never cut, and vectors have length 1";
            return Err(ApiError::unsupported(name, why));
        }
    }
    for name in ["pooling", "task", "input_type"] {
        if fields.get(name).is_some() {
            let why = "the model file says how vectors are made; write a task's words into 'input'";
            return Err(ApiError::unsupported(name, why));
        }
    }
    Ok(())
}

/// Of `encoding_format`.
///
/// # Errors
/// Anything but `float` and `base64`.
pub fn encoding(fields: &Fields<'_>) -> Result<Encoding, ApiError> {
    match fields.string("encoding_format")? {
        None | Some("float") => Ok(Encoding::Float),
        Some("base64") => Ok(Encoding::Base64),
        Some(_) => Err(ApiError::invalid(
            "encoding_format",
            "'encoding_format' must be 'float' or 'base64'",
        )),
    }
}

/// Of `dimensions`; None = all.
fn dimensions(fields: &Fields<'_>, model: &LoadedModel) -> Result<Option<usize>, ApiError> {
    let Some(embedding) = model.meta.embedding else {
        return Ok(None);
    };
    let most = embedding.n_dimensions;
    let asked = fields.integer("dimensions", 1..=i64::from(most))?;
    match asked {
        Some(n) if n < i64::from(most) && !embedding.is_purpose => Err(ApiError::unsupported(
            "dimensions",
            "this model was not trained for embeddings, so that a part of a vector means nothing",
        )),
        asked => Ok(asked.map(|n| n as usize)),
    }
}

/// The answer.
#[derive(Debug, Serialize)]
pub struct EmbeddingList {
    object: &'static str,
    data: Vec<Item>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Debug, Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Serialize)]
struct EmbeddingUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

impl EmbeddingList {
    /// Cuts, normalizes and encodes.
    #[must_use]
    pub fn new(
        model: String,
        embedded: Embedded,
        n_dimensions: Option<usize>,
        encoding: Encoding,
    ) -> Self {
        let item = |(index, mut vector): (usize, Vec<f32>)| {
            vector.truncate(n_dimensions.unwrap_or(usize::MAX));
            normalize(&mut vector);
            Item {
                object: "embedding",
                index,
                embedding: match encoding {
                    Encoding::Float => Vector::Float(vector),
                    Encoding::Base64 => Vector::Base64(base64(&vector)),
                },
            }
        };
        Self {
            object: "list",
            data: embedded.vectors.into_iter().enumerate().map(item).collect(),
            model,
            usage: EmbeddingUsage {
                prompt_tokens: embedded.prompt_tokens,
                total_tokens: embedded.prompt_tokens,
            },
        }
    }
}

/// Little-endian f32 in base64, with padding (RFC 4648, section 4).
#[must_use]
pub fn base64(vector: &[f32]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |idx: usize| u32::from(group.get(idx).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            match place <= group.len() {
                true => text.push(char::from(
                    ALPHABET[(bits >> (18 - 6 * place)) as usize & 63],
                )),
                false => text.push('='),
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn base64_has_all_three_paddings() {
        // 4, 8 and 12 bytes leave 1, 2 and 0 bytes over a multiple of 3.
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64(&[1.0, -2.5, 0.1]), "AACAPwAAIMDNzMw9");
        assert_eq!(base64(&[]), "");
    }

    #[test]
    fn the_answer_has_openais_shape() {
        let embedded = || Embedded {
            vectors: vec![vec![3.0, 4.0, 12.0], vec![0.0, 2.0, 0.0]],
            prompt_tokens: 7,
        };
        let list = EmbeddingList::new("m".into(), embedded(), Some(2), Encoding::Float);
        let text = serde_json::to_string(&list).expect("JSON");
        let wanted = json!({
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]},
                {"object": "embedding", "index": 1, "embedding": [0.0, 1.0]},
            ],
            "model": "m",
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        });
        assert_eq!(text, wanted.to_string());
        let list = EmbeddingList::new("m".into(), embedded(), None, Encoding::Base64);
        let list = serde_json::to_value(&list).expect("JSON");
        assert_eq!(list["data"][1]["embedding"], base64(&[0.0, 1.0, 0.0]));
    }
}
