//! The OpenAI wire format as a client writes and reads it: the body of a call, the chunks of an
//! answer.
//!
//! Pure. Reads what OpenAI, vLLM, llama-server and tinyloop send, and takes unknown fields for none.
//! What is not here: the connection (`client`), and when a chunk is too late (`call`).

use crate::config::Dialect;
use crate::request::{FinishReason, TextLogprob, TextToken, UpstreamCall, UpstreamPrompt, Usage};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

/// Where a call goes, below the base URL.
#[must_use]
pub fn route(call: &UpstreamCall) -> &'static str {
    match call.prompt {
        UpstreamPrompt::Messages(_) => "/chat/completions",
        UpstreamPrompt::Text(_) => "/completions",
        UpstreamPrompt::Inputs(_) => "/embeddings",
    }
}

/// The body of a call. `isolation_key`: requests may share computed prompts there within one key only,
/// where the server can be told so; 0 = with anybody.
#[must_use]
pub fn body(
    call: &UpstreamCall,
    model: &str,
    dialect: Dialect,
    isolation_key: u64,
) -> Map<String, Value> {
    let mut body = call.fields.clone();
    match &call.prompt {
        UpstreamPrompt::Messages(messages) => {
            body.insert("messages".to_owned(), Value::from(messages.clone()));
        }
        UpstreamPrompt::Text(text) => {
            body.insert("prompt".to_owned(), Value::from(text.as_str()));
        }
        UpstreamPrompt::Inputs(texts) => {
            body.insert("input".to_owned(), Value::from(texts.clone()));
            body.insert("encoding_format".to_owned(), Value::from("float"));
        }
    }
    let is_stream = !matches!(call.prompt, UpstreamPrompt::Inputs(_));
    body.insert("model".to_owned(), Value::from(model));
    if is_stream {
        body.insert("stream".to_owned(), Value::from(true));
        let options = json!({"include_usage": true});
        body.insert("stream_options".to_owned(), options);
    }
    let priority = match dialect {
        Dialect::Openai | Dialect::LlamaServer => 0,
        Dialect::Vllm => call.priority.saturating_neg(), // there a lower number is sooner
        Dialect::Tinyloop => call.priority,
    };
    if priority != 0 {
        body.insert("priority".to_owned(), Value::from(priority));
    }
    if isolation_key != 0 && is_stream && matches!(dialect, Dialect::Vllm | Dialect::Tinyloop) {
        let salt = format!("{isolation_key:016x}");
        body.insert("cache_salt".to_owned(), Value::from(salt));
    }
    if dialect == Dialect::Tinyloop && call.may_leave {
        body.insert("allow_remote".to_owned(), Value::from(true));
    }
    body
}

/// What one event of the stream says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Text that comes next; may be empty.
    pub text: String,
    /// Log-probabilities of its tokens, where the call asked for them.
    pub logprobs: Vec<TextLogprob>,
    /// The answer ends.
    pub finish: Option<FinishReason>,
    /// Counts so far, or at the end.
    pub usage: Option<Usage>,
    /// What the model thinks, apart from its answer; may be empty.
    pub reasoning: String,
    /// Calls of tools that begin or go on.
    pub calls: Vec<CallPiece>,
}

/// A piece of a call as the server numbers it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallPiece {
    /// Which call; some servers say 0 for all.
    pub index: u32,
    /// Of the call; in its first piece.
    pub id: Option<String>,
    /// Of the tool; in its first piece.
    pub name: Option<String>,
    /// What comes next of its arguments.
    pub arguments: String,
}

/// An event that is no chunk.
#[derive(Clone, Debug, PartialEq)]
pub enum ChunkError {
    /// Not JSON, or not of a shape that we know.
    Nonsense(String),
    /// The server tells an error in the middle of its answer.
    Told(String),
}

/// A null is as good as a field that is not there: servers differ in which they send.
fn nullable<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Deserialize)]
struct ChunkIn {
    choices: Option<Vec<ChoiceIn>>,
    usage: Option<UsageIn>,
    timings: Option<TimingsIn>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChoiceIn {
    delta: Option<DeltaIn>,
    text: Option<String>,
    finish_reason: Option<String>,
    logprobs: Option<LogprobsIn>,
}

#[derive(Default, Deserialize)]
struct DeltaIn {
    content: Option<String>,
    reasoning_content: Option<String>,
    /// Newer servers call it so; some send both.
    reasoning: Option<String>,
    tool_calls: Option<Vec<CallIn>>,
}

#[derive(Deserialize)]
struct CallIn {
    index: Option<u32>,
    id: Option<String>,
    function: Option<FunctionIn>,
}

#[derive(Deserialize)]
struct FunctionIn {
    name: Option<String>,
    arguments: Option<String>,
}

impl From<CallIn> for CallPiece {
    fn from(call: CallIn) -> Self {
        let (name, arguments) = call
            .function
            .map_or((None, None), |f| (f.name, f.arguments));
        let said = |text: &String| !text.is_empty();
        Self {
            index: call.index.unwrap_or(0),
            id: call.id.filter(said),
            name: name.filter(said),
            arguments: arguments.unwrap_or_default(),
        }
    }
}

#[derive(Deserialize)]
struct UsageIn {
    #[serde(default, deserialize_with = "nullable")]
    prompt_tokens: u32,
    #[serde(default, deserialize_with = "nullable")]
    completion_tokens: u32,
    prompt_tokens_details: Option<DetailsIn>,
    completion_tokens_details: Option<CompletionDetailsIn>,
}

#[derive(Deserialize)]
struct CompletionDetailsIn {
    reasoning_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct DetailsIn {
    cached_tokens: Option<u32>,
}

/// llama-server's own counts, which ride on its last chunk.
#[derive(Deserialize)]
struct TimingsIn {
    cache_n: Option<u32>,
}

/// Chat has `content`, completions have parallel lists.
#[derive(Deserialize)]
struct LogprobsIn {
    content: Option<Vec<EntryIn>>,
    #[serde(default, deserialize_with = "nullable")]
    tokens: Vec<String>,
    #[serde(default, deserialize_with = "nullable")]
    token_logprobs: Vec<Option<f32>>,
    #[serde(default, deserialize_with = "nullable")]
    top_logprobs: Vec<Option<Map<String, Value>>>,
}

#[derive(Deserialize)]
struct EntryIn {
    #[serde(flatten)]
    chosen: TokenIn,
    #[serde(default, deserialize_with = "nullable")]
    top_logprobs: Vec<TokenIn>,
}

#[derive(Deserialize)]
struct TokenIn {
    token: String,
    logprob: Option<f32>,
    bytes: Option<Vec<u8>>,
}

impl From<TokenIn> for TextToken {
    fn from(token: TokenIn) -> Self {
        Self {
            text: token.token,
            bytes: token.bytes,
            logprob: token.logprob.unwrap_or(f32::NEG_INFINITY),
        }
    }
}

impl LogprobsIn {
    fn entries(self) -> Vec<TextLogprob> {
        if let Some(content) = self.content {
            let entry = |entry: EntryIn| TextLogprob {
                chosen: entry.chosen.into(),
                top: entry
                    .top_logprobs
                    .into_iter()
                    .map(TextToken::from)
                    .collect(),
            };
            return content.into_iter().map(entry).collect();
        }
        let mut tops = self.top_logprobs.into_iter();
        let chosen = self.tokens.into_iter().zip(self.token_logprobs);
        chosen
            .map(|(text, logprob)| TextLogprob {
                chosen: TextToken {
                    text,
                    bytes: None,
                    logprob: logprob.unwrap_or(f32::NEG_INFINITY),
                },
                top: tops.next().flatten().map(top_of).unwrap_or_default(),
            })
            .collect()
    }
}

/// `{text: logprob}`.
fn top_of(map: Map<String, Value>) -> Vec<TextToken> {
    let token = |(text, logprob): (String, Value)| TextToken {
        text,
        bytes: None,
        logprob: logprob
            .as_f64()
            .map_or(f32::NEG_INFINITY, |value| value as f32),
    };
    map.into_iter().map(token).collect()
}

/// Reads the data of one event, which is not `[DONE]`.
///
/// # Errors
/// See [`ChunkError`].
pub fn chunk(data: &str) -> Result<Chunk, ChunkError> {
    let read: ChunkIn =
        serde_json::from_str(data).map_err(|error| ChunkError::Nonsense(error.to_string()))?;
    if let Some(error) = read.error.filter(|error| !error.is_null()) {
        return Err(ChunkError::Told(message_of(&error)));
    }
    let mut chunk = Chunk::default();
    if let Some(choice) = read.choices.into_iter().flatten().next() {
        let delta = choice.delta.unwrap_or_default();
        let mut thoughts = delta.reasoning_content.into_iter().chain(delta.reasoning);
        chunk.reasoning = thoughts.find(|text| !text.is_empty()).unwrap_or_default();
        let calls = delta.tool_calls.into_iter().flatten();
        chunk.calls = calls.map(CallPiece::from).collect();
        chunk.text = delta.content.or(choice.text).unwrap_or_default();
        chunk.logprobs = choice.logprobs.map(LogprobsIn::entries).unwrap_or_default();
        chunk.finish = choice.finish_reason.as_deref().map(finish_of);
    }
    let cached_by_timings = read.timings.and_then(|timings| timings.cache_n);
    chunk.usage = read.usage.map(|usage| usage.counts(cached_by_timings));
    Ok(chunk)
}

impl UsageIn {
    fn counts(self, cached_by_timings: Option<u32>) -> Usage {
        let details = self.prompt_tokens_details;
        let cached = details.and_then(|details| details.cached_tokens);
        let details = self.completion_tokens_details;
        let reasoning = details.and_then(|details| details.reasoning_tokens);
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: cached.or(cached_by_timings).unwrap_or(0),
            completion_tokens: self.completion_tokens,
            reasoning_tokens: reasoning.unwrap_or(0),
            loops: 1,
            ..Usage::default()
        }
    }
}

#[derive(Deserialize)]
struct VectorsIn {
    data: Vec<VectorIn>,
    usage: Option<UsageIn>,
}

#[derive(Deserialize)]
struct VectorIn {
    index: Option<usize>,
    embedding: Vec<f32>,
}

/// Reads the answer to `n_inputs` texts: their vectors in the order of the inputs, and counts where it
/// tells them.
///
/// # Errors
/// What of it makes no sense.
pub fn vectors(body: &[u8], n_inputs: usize) -> Result<(Vec<Vec<f32>>, Option<Usage>), String> {
    let read: VectorsIn = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let n_found = read.data.len();
    if n_found != n_inputs {
        return Err(format!("{n_found} vectors for {n_inputs} inputs"));
    }
    let mut vectors = vec![Vec::new(); n_inputs];
    for (place, found) in read.data.into_iter().enumerate() {
        let index = found.index.unwrap_or(place);
        let is_number = found.embedding.iter().all(|value| value.is_finite());
        match vectors.get_mut(index) {
            Some(vector) if vector.is_empty() && is_number => *vector = found.embedding,
            _ => {
                return Err(format!(
                    "vector {index} is there twice, too far, or no numbers"
                ));
            }
        }
    }
    match vectors.iter().any(Vec::is_empty) {
        true => Err("an empty vector".to_owned()),
        false => Ok((vectors, read.usage.map(|usage| usage.counts(None)))),
    }
}

fn finish_of(reason: &str) -> FinishReason {
    match reason {
        "length" => FinishReason::Length,
        _ => FinishReason::Stop, // stop, tool_calls, and what ends an answer in other ways
    }
}

/// The `message` of an error object, or what stands in its place. Not fit for clients as it is.
fn message_of(error: &Value) -> String {
    let message = error.get("message").unwrap_or(error);
    match message.as_str() {
        Some(text) => text.to_owned(),
        None => message.to_string(),
    }
}

/// Whether an error body says that the prompt is too long for the model, in the words of OpenAI and
/// tinyloop (a code), of llama-server (a type) or of vLLM (a sentence).
#[must_use]
pub fn is_context_error(body: &[u8]) -> bool {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = value.get("error").filter(|error| error.is_object());
    let error = error.unwrap_or(&value);
    let is_named = [&error["code"], &error["type"]]
        .into_iter()
        .filter_map(Value::as_str)
        .any(|name| {
            matches!(
                name,
                "context_length_exceeded" | "exceed_context_size_error"
            )
        });
    is_named
        || error["message"]
            .as_str()
            .is_some_and(|text| text.contains("maximum context length"))
}

/// The message of a whole error body, `{"error": {"message"}}` or what servers send in its place.
#[must_use]
pub fn error_message(body: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(body).ok()?;
    let error = value.get("error").filter(|error| !error.is_null());
    let message = error.or_else(|| value.get("message").map(|_| &value))?;
    Some(message_of(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(priority: i32) -> UpstreamCall {
        let fields = json!({"temperature": 0.5, "model": "ours", "stream": false});
        UpstreamCall {
            prompt: UpstreamPrompt::Text("hi".to_owned()),
            fields: fields.as_object().expect("an object").clone(),
            priority,
            may_leave: true,
        }
    }

    #[test]
    fn bodies_say_model_stream_and_priority_of_the_dialect() {
        let sent = |priority, dialect| Value::from(body(&call(priority), "m", dialect, 0));
        let openai = sent(5, Dialect::Openai);
        let expected = json!({
            "temperature": 0.5, "model": "m", "stream": true, "prompt": "hi",
            "stream_options": {"include_usage": true},
        });
        assert_eq!(openai, expected);
        assert_eq!(sent(5, Dialect::LlamaServer)["priority"], Value::Null);
        assert_eq!(sent(5, Dialect::Vllm)["priority"], -5);
        assert_eq!(sent(i32::MIN, Dialect::Vllm)["priority"], i32::MAX);
        assert_eq!(sent(5, Dialect::Tinyloop)["priority"], 5);
        assert_eq!(sent(5, Dialect::Tinyloop)["allow_remote"], true);
        assert_eq!(sent(0, Dialect::Vllm)["priority"], Value::Null);
        for (dialect, salt) in [
            (Dialect::Vllm, json!("000000000000002a")),
            (Dialect::Tinyloop, json!("000000000000002a")),
            (Dialect::Openai, Value::Null),
        ] {
            let body = Value::from(body(&call(0), "m", dialect, 42));
            assert_eq!(body["cache_salt"], salt);
        }
        let chat = UpstreamCall {
            prompt: UpstreamPrompt::Messages(vec![json!({"role": "user", "content": "x"})]),
            ..call(0)
        };
        assert_eq!(
            (route(&chat), route(&call(0))),
            ("/chat/completions", "/completions")
        );
        assert_eq!(
            body(&chat, "m", Dialect::Openai, 0)["messages"][0]["content"],
            "x"
        );
    }

    #[test]
    fn chunks_of_all_dialects_are_read() {
        let read = |value: Value| chunk(&value.to_string()).expect("a chunk");
        let first = read(json!({"id": "x", "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}));
        assert_eq!(first, Chunk::default());
        let piece = read(
            json!({"choices": [{"delta": {"content": "é"}, "logprobs": {"content": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [
                {"token": "e", "logprob": -1.0, "bytes": null}]}]}}]}),
        );
        assert_eq!(piece.text, "é");
        let entry = &piece.logprobs[0];
        assert_eq!(entry.chosen.bytes.as_deref(), Some(&[195, 169][..]));
        assert_eq!(
            (entry.top[0].text.as_str(), entry.top[0].logprob),
            ("e", -1.0)
        );
        let thought = read(json!({"choices": [{"delta": {
            "reasoning_content": "hm", "reasoning": "hm", "content": null}}]}));
        assert!(thought.reasoning == "hm" && thought.text.is_empty());
        let call = read(json!({"choices": [{"delta": {"tool_calls": [
            {"index": 1, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"function": {"name": null, "arguments": "{}"}}]}, "finish_reason": "tool_calls"}]}));
        let first = CallPiece {
            index: 1,
            id: Some("c".to_owned()),
            name: Some("f".to_owned()),
            arguments: String::new(),
        };
        let second = CallPiece {
            arguments: "{}".to_owned(),
            ..CallPiece::default()
        };
        assert_eq!(call.calls, [first, second]);
        assert_eq!(call.finish, Some(FinishReason::Stop));
        let text = read(
            json!({"choices": [{"text": "ab", "finish_reason": "length", "logprobs": {
            "tokens": ["a", "b"], "token_logprobs": [null, -2.0],
            "top_logprobs": [null, {"b": -2.0}], "text_offset": [0, 1]}}]}),
        );
        assert_eq!(
            (text.text.as_str(), text.finish),
            ("ab", Some(FinishReason::Length))
        );
        assert_eq!(text.logprobs[0].chosen.logprob, f32::NEG_INFINITY);
        assert_eq!(text.logprobs[1].top[0].logprob, -2.0);
        let usage = read(
            json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3,
            "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}}),
        );
        let usage = usage.usage.expect("counts");
        assert_eq!(
            (
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens
            ),
            (7, 4, 3)
        );
        let llama = read(
            json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            "timings": {"cache_n": 5, "prompt_ms": 1.5}}),
        );
        assert_eq!(llama.usage.expect("counts").cached_tokens, 5);
        let null =
            read(json!({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": null}));
        assert_eq!((null.usage, null.finish), (None, Some(FinishReason::Stop)));
        let nulls = read(
            json!({"choices": null, "error": null, "timings": {"cache_n": null},
            "usage": {"prompt_tokens": null, "completion_tokens": 2, "prompt_tokens_details": null}}),
        );
        let usage = nulls.usage.expect("counts");
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (0, 2));
        let nulls = read(
            json!({"choices": [{"delta": null, "text": "x", "logprobs": {
            "content": null, "tokens": null, "token_logprobs": null, "top_logprobs": null}}]}),
        );
        assert_eq!((nulls.text.as_str(), nulls.logprobs.len()), ("x", 0));
        let nulls = read(
            json!({"choices": [{"delta": {"content": "x"}, "finish_reason": null,
            "logprobs": {"content": [{"token": "x", "logprob": null, "top_logprobs": null}]}}]}),
        );
        assert_eq!(nulls.logprobs.len(), 1);
    }

    #[test]
    fn vectors_are_put_in_order_and_counted() {
        let inputs = UpstreamPrompt::Inputs(vec!["a".to_owned(), "b".to_owned()]);
        let call = UpstreamCall {
            prompt: inputs,
            fields: Map::new(),
            ..call(3)
        };
        assert_eq!(route(&call), "/embeddings");
        let sent = Value::from(body(&call, "m", Dialect::Vllm, 42));
        let expected = json!({
            "model": "m", "input": ["a", "b"], "encoding_format": "float", "priority": -3,
        });
        assert_eq!(sent, expected);
        let read = |value: Value| vectors(value.to_string().as_bytes(), 2);
        let (found, usage) = read(json!({"object": "list", "data": [
            {"index": 1, "embedding": [0.5, -1]}, {"index": 0, "embedding": [2.0]}],
            "usage": {"prompt_tokens": 7, "total_tokens": 7}}))
        .expect("sound");
        assert_eq!(found, [vec![2.0], vec![0.5, -1.0]]);
        assert_eq!(usage.expect("counts").prompt_tokens, 7);
        let unnumbered = json!({"data": [{"embedding": [1.0]}, {"embedding": [2.0]}]});
        assert_eq!(read(unnumbered).expect("sound").0, [vec![1.0], vec![2.0]]);
        for bad in [
            json!({"data": [{"embedding": [1.0]}]}),
            json!({"data": [{"index": 1, "embedding": [1.0]}, {"index": 1, "embedding": [1.0]}]}),
            json!({"data": [{"index": 0, "embedding": [1.0]}, {"index": 2, "embedding": [1.0]}]}),
            json!({"data": [{"embedding": []}, {"embedding": [1.0]}]}),
            json!({"data": [{"embedding": "AACAPw=="}, {"embedding": [1.0]}]}),
            json!({"data": [{"embedding": [1e99]}, {"embedding": [1.0]}]}),
            json!({"error": {"message": "no"}}),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn errors_in_a_stream_and_nonsense_are_told_apart() {
        let error = json!({"error": {"message": "out of memory", "code": 500}}).to_string();
        assert_eq!(
            chunk(&error),
            Err(ChunkError::Told("out of memory".to_owned()))
        );
        for bad in ["", "null", "[1]", "{", "{\"choices\": 5}", "\u{0}"] {
            assert!(matches!(chunk(bad), Err(ChunkError::Nonsense(_))), "{bad}");
        }
        let message = |text: &str| error_message(text.as_bytes());
        assert_eq!(
            message("{\"error\": {\"message\": \"no\"}}").as_deref(),
            Some("no")
        );
        assert_eq!(message("{\"error\": \"no\"}").as_deref(), Some("no"));
        assert_eq!(
            message("{\"object\": \"error\", \"message\": \"no\"}").as_deref(),
            Some("no")
        );
        assert_eq!(message("<html>"), None);
        for long in [
            r#"{"error": {"message": "no", "code": "context_length_exceeded"}}"#,
            r#"{"error": {"code": 400, "message": "m", "type": "exceed_context_size_error"}}"#,
            r#"{"object": "error", "message": "This model's maximum context length is 9 tokens."}"#,
        ] {
            assert!(is_context_error(long.as_bytes()), "{long}");
        }
        for other in [
            "{}",
            "<html>",
            r#"{"error": "no"}"#,
            r#"{"error": {"message": "context"}}"#,
        ] {
            assert!(!is_context_error(other.as_bytes()), "{other}");
        }
    }
}
