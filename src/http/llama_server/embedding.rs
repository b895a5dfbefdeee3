//! `POST /embedding`: vectors in llama-server's form, a list of `{index, embedding: [[..]]}`.
//!
//! Runs on the HTTP worker that took the request. What is not here: how vectors are made
//! (`generation/embed`), OpenAI's form of them (`openai/embeddings`).

use crate::http::errors::ApiError;
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::embed::EmbedWork;
use crate::http::openai::fields::{Fields, parse_object};
use serde_json::{Value, json};

/// See the module.
pub(super) fn embedding(call: &Call<'_>, mut exchange: Exchange) {
    let mut answer = || -> Result<Vec<Value>, ApiError> {
        let body = parse_object(call.request.body())?;
        let fields = Fields::new(&body);
        let power = power(&fields)?;
        let input = match fields.get("content") {
            None => "input",
            Some(_) => "content",
        };
        let embedded = EmbedWork::prepare(call, &body, input)?.run(call, &mut exchange)?;
        let vectors = embedded.vectors.into_iter().enumerate();
        Ok(vectors
            .map(|(index, mut vector)| {
                normalize(&mut vector, power);
                json!({"index": index, "embedding": [vector]})
            })
            .collect())
    };
    match answer() {
        Ok(list) => exchange.json(&list),
        Err(error) => exchange.error(&error),
    }
}

/// `embd_normalize`: the power of the norm that vectors get; None = they stay as they are.
fn power(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let name = "embd_normalize";
    match fields.integer(name, -1..=100)? {
        Some(-1) => Ok(None),
        Some(0) => {
            let why = "vectors of 16-bit integers are not built";
            Err(ApiError::unsupported(name, why))
        }
        power => Ok(Some(power.unwrap_or(2) as u32)),
    }
}

/// Gives a vector that is not zero the norm 1.
fn normalize(vector: &mut [f32], power: Option<u32>) {
    let Some(power) = power else {
        return;
    };
    let sum: f64 = vector
        .iter()
        .map(|value| f64::from(value.abs()).powi(power as i32))
        .sum();
    let norm = sum.powf(1.0 / f64::from(power));
    if norm > 0.0 {
        for value in vector {
            *value = (f64::from(*value) / norm) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_are_those_asked_for() {
        let of = |power| {
            let mut vector = [3.0, -4.0];
            normalize(&mut vector, power);
            vector
        };
        assert_eq!(of(None), [3.0, -4.0]);
        assert_eq!(of(Some(2)), [0.6, -0.8]);
        assert_eq!(of(Some(1)), [3.0 / 7.0, -4.0 / 7.0]);
        let mut zero = [0.0, 0.0];
        normalize(&mut zero, Some(2));
        assert_eq!(zero, [0.0, 0.0]);
    }
}
