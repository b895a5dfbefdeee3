//! What every answer and chunk of one request have in common: id, model, time, usage.
//!
//! Pure. Id, `created` and model are the same in every chunk of a stream.

use crate::request::{FinishReason, RequestId, Usage};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The frame around choices.
#[derive(Clone, Debug)]
pub struct AnswerMeta {
    /// `chatcmpl-..` or `cmpl-..`.
    pub id: String,
    /// `object` of a whole answer.
    pub object: &'static str,
    /// `object` of a stream chunk.
    pub chunk_object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The model id that answers.
    pub model: String,
    /// Changes when the answers of a seed may change: version and model file.
    pub fingerprint: String,
    /// Chunks carry `"usage": null`, because a usage chunk ends the stream.
    pub usage_null: bool,
}

impl AnswerMeta {
    /// Frame of a chat answer.
    #[must_use]
    pub fn chat(id: RequestId, model: &str, fingerprint: &str, usage_null: bool) -> Self {
        Self {
            id: format!("chatcmpl-{id}"),
            object: "chat.completion",
            chunk_object: "chat.completion.chunk",
            created: unix_seconds(),
            model: model.to_owned(),
            fingerprint: fingerprint.to_owned(),
            usage_null,
        }
    }

    /// Frame of a text completion.
    #[must_use]
    pub fn completion(id: RequestId, model: &str, fingerprint: &str, usage_null: bool) -> Self {
        Self {
            id: format!("cmpl-{id}"),
            object: "text_completion",
            chunk_object: "text_completion",
            ..Self::chat(id, model, fingerprint, usage_null)
        }
    }

    fn frame(&self, object: &str, choices: Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), Value::from(self.id.as_str()));
        map.insert("object".to_owned(), Value::from(object));
        map.insert("created".to_owned(), Value::from(self.created));
        map.insert("model".to_owned(), Value::from(self.model.as_str()));
        map.insert(
            "system_fingerprint".to_owned(),
            Value::from(self.fingerprint.as_str()),
        );
        map.insert("choices".to_owned(), choices);
        map
    }

    /// A whole answer.
    #[must_use]
    pub fn body(&self, choices: Vec<Value>, usage: Value) -> Value {
        let mut map = self.frame(self.object, Value::Array(choices));
        map.insert("usage".to_owned(), usage);
        Value::Object(map)
    }

    /// One chunk of a stream.
    #[must_use]
    pub fn chunk(&self, choices: Value) -> Value {
        let mut map = self.frame(self.chunk_object, choices);
        if self.usage_null {
            map.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(map)
    }

    /// The chunk that ends a stream whose client asked for usage.
    #[must_use]
    pub fn usage_chunk(&self, usage: Value) -> Value {
        let mut map = self.frame(self.chunk_object, Value::Array(Vec::new()));
        map.insert("usage".to_owned(), usage);
        Value::Object(map)
    }
}

/// Unix seconds now.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// `finish_reason` of the API.
#[must_use]
pub fn finish_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Token counts of all jobs of one request. The choices of one prompt share it, so that it counts
/// once, as OpenAI counts.
#[derive(Clone, Debug, Default)]
pub struct UsageSum {
    prompt: u64,
    cached: u64,
    completion: u64,
}

impl UsageSum {
    /// Adds one job. `first_of_prompt`: its prompt has not been counted yet.
    pub fn add(&mut self, usage: Usage, first_of_prompt: bool) {
        if first_of_prompt {
            self.prompt += u64::from(usage.prompt_tokens);
            self.cached += u64::from(usage.cached_tokens);
        }
        self.completion += u64::from(usage.completion_tokens);
    }

    /// The API's object.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_key_is_null_in_chunks_only_when_a_usage_chunk_follows() {
        let id = RequestId::generate();
        let with = AnswerMeta::chat(id, "m", "fp", true);
        let without = AnswerMeta::chat(id, "m", "fp", false);
        assert_eq!(with.chunk(json!([]))["usage"], Value::Null);
        assert!(with.chunk(json!([])).get("usage").is_some());
        assert!(without.chunk(json!([])).get("usage").is_none());
        assert_eq!(with.usage_chunk(json!(1))["choices"], json!([]));
        assert_eq!(with.id.len(), "chatcmpl-".len() + 24);
    }

    #[test]
    fn a_shared_prompt_counts_once() {
        let mut sum = UsageSum::default();
        let usage = Usage {
            prompt_tokens: 5,
            cached_tokens: 2,
            completion_tokens: 3,
            loops: 1,
        };
        sum.add(usage, true);
        sum.add(usage, false);
        assert_eq!(sum.to_json()["total_tokens"], 11);
        assert_eq!(sum.to_json()["prompt_tokens_details"]["cached_tokens"], 2);
    }
}
