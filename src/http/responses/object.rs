//! The Responses API on the wire: the response object, its output items, its events.
//!
//! Plain types; the order of their fields is the order of the keys, the variants' names are the
//! `type`s. What is not here: when an event is sent (`answer`).

use crate::http::errors::ApiError;
use crate::http::generation::usage::{AskedLoops, LoopCounts, UsageSum};
use serde::Serialize;
use serde_json::{Map, Value};

/// What a response object repeats of its request.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names are the API's own")]
pub struct Echo {
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub max_tool_calls: Option<u32>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub prompt_cache_key: Option<String>,
    pub reasoning: Value,
    pub safety_identifier: Option<String>,
    pub store: bool,
    pub temperature: Value,
    pub text: Value,
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub top_logprobs: u32,
    pub top_p: Value,
    pub user: Option<String>,
    pub metadata: Map<String, Value>,
}

/// Where a response or an item stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// More will come.
    InProgress,
    /// All is said.
    Completed,
    /// Cut on the way: no tokens were left, or a call of a tool broke off.
    Incomplete,
    /// Cut by a fault.
    Failed,
    /// Cut because somebody asked for it.
    Cancelled,
}

/// The response object. What changes stands in `state`, the rest is the same in all events.
#[derive(Debug, Serialize)]
pub struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: Status,
    background: bool,
    completed_at: Option<u64>,
    error: Option<ResponseError>,
    incomplete_details: Option<IncompleteDetails>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<u32>,
    max_tool_calls: Option<u32>,
    model: &'a str,
    output: &'a [OutputItem],
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    prompt_cache_key: Option<&'a str>,
    reasoning: &'a Value,
    safety_identifier: Option<&'a str>,
    service_tier: &'static str,
    store: bool,
    temperature: &'a Value,
    text: &'a Value,
    tool_choice: &'a Value,
    tools: &'a [Value],
    top_logprobs: u32,
    top_p: &'a Value,
    truncation: &'static str,
    usage: Option<ResponseUsage>,
    user: Option<&'a str>,
    metadata: &'a Map<String, Value>,
}

/// What names a response.
#[derive(Clone, Copy, Debug)]
pub struct Name<'a> {
    /// `resp_..`
    pub id: &'a str,
    /// The model that answers.
    pub model: &'a str,
    /// Unix seconds.
    pub created_at: u64,
}

/// How far a response is.
#[derive(Debug)]
pub struct Progress<'a> {
    /// Where it stands.
    pub status: Status,
    /// Unix seconds; of a completed one.
    pub completed_at: Option<u64>,
    /// Why it failed.
    pub error: Option<ResponseError>,
    /// Said so far.
    pub output: &'a [OutputItem],
    /// That is why it is incomplete; for other reasons the API has no word.
    pub is_out_of_tokens: bool,
    /// Once all is counted.
    pub usage: Option<ResponseUsage>,
}

impl<'a> ResponseObject<'a> {
    /// Puts the parts together.
    #[must_use]
    pub fn new(name: Name<'a>, echo: &'a Echo, progress: Progress<'a>) -> Self {
        Self {
            id: name.id,
            object: "response",
            created_at: name.created_at,
            status: progress.status,
            background: false,
            completed_at: progress.completed_at,
            error: progress.error,
            incomplete_details: progress.is_out_of_tokens.then_some(IncompleteDetails {
                reason: "max_output_tokens",
            }),
            instructions: echo.instructions.as_deref(),
            max_output_tokens: echo.max_output_tokens,
            max_tool_calls: echo.max_tool_calls,
            model: name.model,
            output: progress.output,
            parallel_tool_calls: echo.parallel_tool_calls,
            previous_response_id: echo.previous_response_id.as_deref(),
            prompt_cache_key: echo.prompt_cache_key.as_deref(),
            reasoning: &echo.reasoning,
            safety_identifier: echo.safety_identifier.as_deref(),
            service_tier: "default",
            store: echo.store,
            temperature: &echo.temperature,
            text: &echo.text,
            tool_choice: &echo.tool_choice,
            tools: &echo.tools,
            top_logprobs: echo.top_logprobs,
            top_p: &echo.top_p,
            truncation: "disabled",
            usage: progress.usage,
            user: echo.user.as_deref(),
            metadata: &echo.metadata,
        }
    }
}

#[derive(Debug, Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

/// Why a response failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ResponseError {
    code: &'static str,
    message: String,
}

impl From<&ApiError> for ResponseError {
    /// The API has few codes; the closest one is told.
    fn from(error: &ApiError) -> Self {
        let code = match error.status() {
            400..=428 | 430..=499 => "invalid_prompt",
            429 | 503 => "rate_limit_exceeded",
            _ => "server_error",
        };
        Self {
            code,
            message: error.message.clone(),
        }
    }
}

/// `usage` in this API's words.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    loops: Option<LoopCounts>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct InputDetails {
    cached_tokens: u64,
    /// Writing to the cache costs nothing here, so nothing is told apart.
    cache_write_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl ResponseUsage {
    /// Of all jobs together.
    #[must_use]
    pub fn new(sum: &UsageSum, asked: Option<AskedLoops>) -> Self {
        Self {
            input_tokens: sum.prompt(),
            input_tokens_details: InputDetails {
                cached_tokens: sum.cached(),
                cache_write_tokens: 0,
            },
            output_tokens: sum.completion(),
            output_tokens_details: OutputDetails {
                reasoning_tokens: sum.reasoning(),
            },
            total_tokens: sum.prompt() + sum.completion(),
            loops: asked.map(|asked| sum.loops(asked)),
        }
    }
}

/// Something that the model made.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the API's own")]
pub enum OutputItem {
    Message {
        id: String,
        status: Status,
        role: &'static str,
        content: Vec<ContentPart>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
        status: Status,
    },
    Reasoning {
        id: String,
        /// Always empty: reasoning is told whole.
        summary: [(); 0],
        content: Vec<ContentPart>,
        status: Status,
    },
}

/// Text inside an item.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are the API's own")]
pub enum ContentPart {
    OutputText {
        text: String,
        annotations: [(); 0],
        logprobs: Vec<Value>,
    },
    ReasoningText {
        text: String,
    },
}

/// What an event carries beside its type and its number.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "the names are the API's own")]
pub enum EventBody<'a> {
    Response {
        response: Box<ResponseObject<'a>>,
    },
    Item {
        output_index: usize,
        item: &'a OutputItem,
    },
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: &'a ContentPart,
    },
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        logprobs: &'a [Value],
    },
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        logprobs: &'a [Value],
    },
    ReasoningDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
    },
    ReasoningDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
    },
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    ArgumentsDone {
        item_id: &'a str,
        output_index: usize,
        name: &'a str,
        arguments: &'a str,
    },
}

/// An event.
#[derive(Debug, Serialize)]
pub struct Event<'a> {
    /// The same as the event's name.
    pub r#type: &'static str,
    /// Counts the events of a stream from 0.
    pub sequence_number: u64,
    /// The rest.
    #[serde(flatten)]
    pub body: EventBody<'a>,
}
