//! `POST /v1/chat/completions`: the request and the shapes of its answers.
//!
//! Pure functions between JSON and our words; running the jobs is `generation`. What is not here:
//! messages (`messages`), tools (`tools`), how the answer is read (`reading`).

use super::fields::Fields;
use super::logprobs::ChatLogprobs;
use super::messages::messages;
use super::refusals::refuse_for_chat;
use super::sampling::CommonOptions;
use super::structure::Structure;
use super::tools::Tools;
use crate::http::errors::{ApiError, ErrorCode};
use crate::tokenizer::chat_template::TemplateInput;
use serde::Serialize;
use serde_json::{Map, Value};

/// Most alternatives per token.
const TOP_LOGPROBS_MAX: i64 = 20;

/// A checked chat request.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// Sampling, stop rules, streaming.
    pub common: CommonOptions,
    /// What was said so far.
    pub conversation: Conversation,
    /// Most tokens to generate; None = up to the end of the context.
    pub max_tokens: Option<u32>,
    /// Log-probabilities of the answer, with so many alternatives.
    pub logprobs: Option<u32>,
}

impl ChatRequest {
    /// Reads and checks a request.
    pub fn parse(body: &Map<String, Value>, vocab_size: Option<usize>) -> Result<Self, ApiError> {
        let fields = Fields::new(body);
        if fields.flag("echo", false)? {
            let why = "a chat does not repeat its messages; /v1/completions repeats its prompt";
            return Err(ApiError::unsupported("echo", why));
        }
        refuse_for_chat(&fields)?;
        Ok(Self {
            common: CommonOptions::parse(&fields, vocab_size)?,
            conversation: Conversation::parse(&fields, true)?,
            max_tokens: max_tokens(&fields)?,
            logprobs: logprobs(&fields)?,
        })
    }
}

/// Checked messages, ready for a template.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// What the template is rendered with.
    pub template: TemplateInput,
    /// The last assistant message, when the answer shall continue it.
    pub continued: Option<String>,
    /// Functions that the answer may call.
    pub tools: Tools,
    /// Thoughts are told apart from the answer (`reasoning_format`); else they stay in its text.
    pub tells_thoughts: bool,
}

impl Conversation {
    /// Reads `messages` and what belongs to them. `for_answer`: the prompt opens the answer's turn
    /// unless the request says otherwise.
    pub fn parse(fields: &Fields<'_>, for_answer: bool) -> Result<Self, ApiError> {
        let messages = messages(fields)?;
        let tools = Tools::parse(fields)?;
        if tools.must_call() {
            refuse_form(fields)?;
        }
        let continues = fields.flag("continue_final_message", false)?;
        let continued = match continues {
            true => Some(continued_text(&messages)?),
            false => None,
        };
        let opens = for_answer && !continues;
        let add_generation_prompt = fields.flag("add_generation_prompt", opens)?;
        if continues && add_generation_prompt {
            return Err(ApiError::invalid(
                "add_generation_prompt",
                "'add_generation_prompt' and 'continue_final_message' exclude each other",
            ));
        }
        Ok(Self {
            template: TemplateInput {
                messages,
                tools: tools.shown.clone(),
                add_generation_prompt,
                extra: template_extra(fields)?,
            },
            continued,
            tools,
            tells_thoughts: tells_thoughts(fields)?,
        })
    }
}

/// A call that must come leaves no room for another form.
fn refuse_form(fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(form) = Structure::parse(fields)? else {
        return Ok(());
    };
    let param = form.param();
    let message = format!(
        "'{param}' gives the answer a form, but 'tool_choice' makes it a call of a tool; give one"
    );
    Err(ApiError::invalid(param, message))
}

/// `chat_template_kwargs`, and what else speaks to the template about thinking: `reasoning_effort`
/// under its own name, and `enable_thinking`, which "none" turns off. What stands in the kwargs wins.
fn template_extra(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut extra = fields
        .object("chat_template_kwargs")?
        .cloned()
        .unwrap_or_default();
    let effort = fields.string("reasoning_effort")?;
    let thinks = match fields.get("enable_thinking") {
        Some(_) => Some(fields.flag("enable_thinking", true)?),
        None => effort.map(|effort| effort != "none"),
    };
    let effort = effort.map(|effort| ("reasoning_effort", Value::from(effort)));
    // Templates of different makers read different names.
    let thinks = ["enable_thinking", "thinking"]
        .into_iter()
        .filter_map(|name| Some((name, Value::from(thinks?))));
    for (name, value) in effort.into_iter().chain(thinks) {
        extra.entry(name).or_insert(value);
    }
    Ok(extra)
}

/// `reasoning_format`: "none" leaves thoughts in the text, "auto" (as llama-server's "deepseek") tells
/// them apart.
fn tells_thoughts(fields: &Fields<'_>) -> Result<bool, ApiError> {
    match fields.string("reasoning_format")? {
        None | Some("auto" | "deepseek") => Ok(true),
        Some("none") => Ok(false),
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("'reasoning_format' is \"{shown}\"; it must be auto or none");
            Err(ApiError::invalid("reasoning_format", message))
        }
    }
}

/// `max_completion_tokens` wins over `max_tokens`, and both over llama-server's `n_predict`; -1 means "no limit", as LM Studio clients say.
fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    for name in ["max_completion_tokens", "max_tokens", "n_predict"] {
        match fields.integer(name, -1..=i64::from(u32::MAX))? {
            None => {}
            Some(-1) => return Ok(None),
            // The web UI of llama-server warms the cache with it: the prompt is computed, no more.
            Some(0) if name == "n_predict" => return Ok(Some(0)),
            Some(0) => {
                return Err(ApiError::invalid(
                    name,
                    format!("'{name}' must be at least 1"),
                ));
            }
            Some(count) => return Ok(Some(count as u32)),
        }
    }
    Ok(None)
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.flag("logprobs", false)?;
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "'top_logprobs' needs \"logprobs\": true",
        )),
    }
}

fn continued_text(messages: &[Value]) -> Result<String, ApiError> {
    let last = messages.last().filter(|last| last["role"] == "assistant");
    let text = last
        .and_then(|last| last["content"].as_str())
        .map(str::trim_end);
    match text {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(ApiError::invalid(
            "continue_final_message",
            "'continue_final_message' needs a last message of the assistant that is not empty",
        )),
    }
}

/// Cuts a rendered prompt right behind the message that the answer shall continue.
pub fn cut_behind(rendered: &str, continued: &str) -> Result<String, ApiError> {
    match rendered.rfind(continued) {
        Some(start) => Ok(rendered[..start + continued.len()].to_owned()),
        None => Err(ApiError::new(
            ErrorCode::TemplateError,
            "the chat template does not write the last message as it is, so that it cannot be \
             continued",
        )),
    }
}

/// One choice of a whole answer, or what a chunk adds to it.
#[derive(Debug, Serialize)]
pub struct ChatChoice<'a> {
    pub(super) index: u32,
    #[serde(flatten)]
    pub(super) said: Said<'a>,
    pub(super) logprobs: Option<ChatLogprobs<'a>>,
    pub(super) finish_reason: Option<&'static str>,
}

/// The assistant's words; the name of the variant is the key.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Said<'a> {
    /// All of them.
    Message {
        /// Always "assistant".
        role: &'static str,
        /// The text; null where tools are called and nothing is said.
        content: Option<&'a str>,
        /// Always null: there is no refusal.
        refusal: (),
        /// What it thought before.
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<&'a str>,
        /// Never an empty list.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall<'a>>,
    },
    /// The next ones.
    Delta {
        /// In the first chunk of a choice.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<&'static str>,
        /// Text.
        #[serde(skip_serializing_if = "Option::is_none")]
        content: Option<String>,
        /// What it thinks.
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<String>,
        /// A call of a tool begins or goes on.
        #[serde(skip_serializing_if = "Option::is_none")]
        tool_calls: Option<[CallDelta; 1]>,
    },
}

/// A whole call of a tool.
#[derive(Debug, Serialize)]
pub struct ToolCall<'a> {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: CalledFunction<'a>,
}

#[derive(Debug, Serialize)]
struct CalledFunction<'a> {
    name: &'a str,
    /// JSON text.
    arguments: &'a str,
}

impl<'a> ToolCall<'a> {
    /// `arguments`: JSON text.
    #[must_use]
    pub fn new(id: String, name: &'a str, arguments: &'a str) -> Self {
        Self {
            id,
            kind: "function",
            function: CalledFunction { name, arguments },
        }
    }
}

/// What a chunk adds to a call of a tool.
#[derive(Debug, Serialize)]
pub struct CallDelta {
    /// Which call of the choice; clients group by it.
    pub(super) index: u32,
    /// In the first chunk of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<String>,
    /// In the first chunk of a call.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) function: FunctionDelta,
}

/// See [`CallDelta`].
#[derive(Debug, Serialize)]
pub struct FunctionDelta {
    /// In the first chunk of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    /// The next piece of JSON text.
    pub(super) arguments: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<ChatRequest, ApiError> {
        ChatRequest::parse(
            value.as_object().expect("the test gives an object"),
            Some(100),
        )
    }

    fn user(text: &str) -> Value {
        json!([{"role": "user", "content": text}])
    }

    #[test]
    fn roles_are_mapped_and_parts_joined() {
        let request = parse(json!({"messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "name": "x"},
        ]}))
        .expect("valid");
        let messages = &request.conversation.template.messages;
        assert_eq!(messages[0]["role"], "system");
        assert_eq!(messages[1]["content"], "a\nb");
        assert_eq!(
            messages[2],
            json!({"role": "assistant", "content": "", "name": "x"})
        );
        assert!(request.conversation.template.add_generation_prompt);
        assert_eq!((request.max_tokens, request.logprobs), (None, None));
    }

    #[test]
    fn bad_messages_name_the_place() {
        let cases = [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hi"}), "messages"),
            (json!({"messages": ["hi"]}), "messages[0]"),
            (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
            (
                json!({"messages": [{"role": "bot", "content": "x"}]}),
                "messages[0].role",
            ),
            (
                json!({"messages": [{"role": "user"}]}),
                "messages[0].content",
            ),
            (
                json!({"messages": [{"role": "user", "content": 5}]}),
                "messages[0].content",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content[0]",
            ),
            (
                json!({"messages": user("x"), "top_logprobs": 2}),
                "top_logprobs",
            ),
            (
                json!({"messages": user("x"), "logprobs": true, "top_logprobs": 21}),
                "top_logprobs",
            ),
            (
                json!({"messages": user("x"), "tool_choice": "required", "regex": "x+",
                       "tools": [{"type": "function", "function": {"name": "f"}}]}),
                "regex",
            ),
            (
                json!({"messages": user("x"), "max_tokens": 0}),
                "max_tokens",
            ),
            (
                json!({"messages": user("x"), "continue_final_message": true}),
                "continue_final_message",
            ),
        ];
        for (body, param) in cases {
            let error = parse(body.clone()).expect_err(&body.to_string());
            assert_eq!(error.status(), 400, "{body}");
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn the_newer_token_limit_wins_and_minus_one_is_none() {
        let limit = |extra: Value| {
            let mut body = json!({"messages": user("x")});
            body.as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            parse(body).expect("valid").max_tokens
        };
        assert_eq!(
            limit(json!({"max_tokens": 5, "max_completion_tokens": 7})),
            Some(7)
        );
        assert_eq!(limit(json!({"max_tokens": 5})), Some(5));
        assert_eq!(limit(json!({"max_tokens": -1})), None);
        assert_eq!(limit(json!({"n_predict": 9})), Some(9));
        assert_eq!(limit(json!({"n_predict": 9, "max_tokens": 5})), Some(5));
    }

    #[test]
    fn an_echo_is_for_completions() {
        assert!(parse(json!({"messages": user("x"), "echo": false})).is_ok());
        let error = parse(json!({"messages": user("x"), "echo": true})).unwrap_err();
        assert_eq!(error.code, ErrorCode::UnsupportedParameter);
    }

    #[test]
    fn a_continued_message_ends_the_prompt() {
        let request = parse(json!({"continue_final_message": true, "messages": [
            {"role": "user", "content": "say abc"}, {"role": "assistant", "content": "ab "},
        ]}))
        .expect("valid");
        assert!(!request.conversation.template.add_generation_prompt);
        assert_eq!(request.conversation.continued.as_deref(), Some("ab"));
        assert_eq!(
            cut_behind("<u>say abc</u><a>ab</a>\n", "ab").unwrap(),
            "<u>say abc</u><a>ab"
        );
        assert!(cut_behind("<u>", "ab").is_err());
    }
}
