//! What a request needs that its model may lack: found by fields, told by the capability's name.
//!
//! Pure. Asked before the fields themselves are checked, so that who asks a model for what it can't do
//! hears that, and not what else was wrong. What is not here: which model can what (`pool::LoadedModel`,
//! `runtime::features`).

use super::fields::Fields;
use crate::http::errors::ApiError;
use crate::pool::LoadedModel;
use crate::runtime::Feature;
use serde_json::Value;

/// Parts of messages by their type, in the words of the APIs that we speak.
const IMAGE_PARTS: [&str; 3] = ["image_url", "input_image", "image"];
const AUDIO_PARTS: [&str; 2] = ["input_audio", "audio"];

/// Refuses a request that needs what its model lacks. `loops`: what the model's name asks for.
///
/// # Errors
/// `missing_capability` with the name of the first one that is missing.
pub fn refuse_missing(
    fields: &Fields<'_>,
    model: &LoadedModel,
    loops: Option<u32>,
) -> Result<(), ApiError> {
    let features = model.features();
    // Ours counts what it does anyway, whoever says so: one loop.
    let is_ours = model.tokenizer.is_some();
    let is_on = |name: &str| fields.get(name).is_some_and(|value| !is_off(value));
    let is_one = |value: &Value| is_ours && value.as_u64() == Some(1);
    let asks_loops = |value: &Value| !is_off(value) && !is_one(value);
    let wants_loops = |name: &str| fields.get(name).is_some_and(asks_loops);
    let parts = Parts::of(fields.get("messages"));
    let asked = [
        (
            "model",
            loops.is_some_and(|n| !is_ours || n > 1),
            Feature::Loops,
        ),
        ("loops", wants_loops("loops"), Feature::Loops),
        ("min_loops", wants_loops("min_loops"), Feature::Loops),
        ("adaptive", is_on("adaptive"), Feature::Loops),
        ("cache_window", is_on("cache_window"), Feature::CacheWindow),
        ("tools", is_on("tools"), Feature::Tools),
        ("functions", is_on("functions"), Feature::Tools),
        ("echo", is_on("echo"), Feature::Echo),
        ("return_tokens", is_on("return_tokens"), Feature::TokenIds),
        ("messages", parts.has_images, Feature::Vision),
        ("messages", parts.has_audio, Feature::Audio),
        ("messages", parts.n_turns > 1, Feature::MultiTurn),
    ];
    match asked
        .into_iter()
        .find(|(_, asked, feature)| *asked && !features.has(*feature))
    {
        Some((param, _, feature)) => Err(ApiError::missing(feature, param, &model.name)),
        None => Ok(()),
    }
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        other => other.as_u64() == Some(0),
    }
}

/// What messages are made of, as far as they have the right shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    has_images: bool,
    has_audio: bool,
    /// Messages of users.
    n_turns: usize,
}

impl Parts {
    fn of(messages: Option<&Value>) -> Self {
        let mut found = Self::default();
        for message in messages.and_then(Value::as_array).into_iter().flatten() {
            found.n_turns += usize::from(message["role"] == "user");
            for part in message["content"].as_array().into_iter().flatten() {
                let kind = part["type"].as_str().unwrap_or_default();
                found.has_images |= IMAGE_PARTS.contains(&kind);
                found.has_audio |= AUDIO_PARTS.contains(&kind);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn messages_are_looked_through_whatever_their_shape() {
        let of = |messages: Value| {
            let parts = Parts::of(Some(&messages));
            (parts.has_images, parts.has_audio, parts.n_turns)
        };
        assert_eq!(
            of(json!([{"role": "user", "content": "x"}])),
            (false, false, 1)
        );
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
        let audio = json!({"type": "input_audio", "input_audio": {}});
        let content = json!([{"type": "text", "text": "x"}, image, audio]);
        let two =
            json!([{"role": "user", "content": content}, {"role": "assistant"}, {"role": "user"}]);
        assert_eq!(of(two), (true, true, 2));
        for odd in [
            json!(null),
            json!("x"),
            json!([1, null, {"content": 3}, {"content": [7]}]),
        ] {
            assert_eq!(of(odd), (false, false, 0));
        }
    }
}
