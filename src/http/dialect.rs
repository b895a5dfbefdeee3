//! What dialects share that are translated into an OpenAI chat body: building that body, and telling
//! a fault by the dialect's own field.
//!
//! Pure. A dialect consumes the fields that it knows, refuses those that only mean something to chat
//! completions, and leaves the rest (sampling, scheduling, depth) as it stands, so that everything
//! that chat completions check and can do holds for it, too. Each field and message that is
//! translated remembers where it came from; [`Origins::own`] turns the fault that chat completions
//! find into one about that place. What is not here: what any dialect's fields mean.

use super::errors::ApiError;
use super::generation::call::Call;
use super::openai::chat::ChatRequest;
use super::openai::fields::Fields;
use super::openai::prompt::{chat_prompt, tokenizer_of};
use crate::runtime::Feature;
use serde_json::{Map, Value};

/// A chat body that a dialect's body becomes.
#[derive(Clone, Debug)]
pub struct ChatBody {
    fields: Map<String, Value>,
    messages: Vec<Value>,
    origins: Origins,
}

/// Where the parts of a chat body came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Origins {
    /// The dialect's word for `messages`.
    messages_field: &'static str,
    /// Of each message.
    messages: Vec<String>,
    /// (chat field, own field); the longest prefix counts.
    fields: Vec<(String, String)>,
    /// What is replaced inside the paths of tools: (`.function.parameters`, `.input_schema`).
    tool_words: &'static [(&'static str, &'static str)],
}

/// A field that means something to chat completions only: its name, and what to use instead.
pub type Foreign = (&'static str, &'static str);

/// Refuses the first field of `table` that is there, whatever its value.
///
/// # Errors
/// `unsupported_parameter` with its name and what to use instead.
pub fn refuse_given(body: &Map<String, Value>, table: &[Foreign]) -> Result<(), ApiError> {
    let is_given = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
    match table.iter().find(|(name, _)| is_given(name)) {
        Some((name, why)) => Err(ApiError::unsupported(*name, why)),
        None => Ok(()),
    }
}

impl ChatBody {
    /// Begins with the fields of `body` that are not `consumed`.
    ///
    /// # Errors
    /// A field of `foreign`: its silent dropping, or its effect, would surprise.
    pub fn new(
        body: &Map<String, Value>,
        consumed: &[&str],
        foreign: &[Foreign],
        messages_field: &'static str,
        tool_words: &'static [(&'static str, &'static str)],
    ) -> Result<Self, ApiError> {
        refuse_given(body, foreign)?;
        let kept = body
            .iter()
            .filter(|(name, _)| !consumed.contains(&name.as_str()));
        Ok(Self {
            fields: kept
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            messages: Vec::new(),
            origins: Origins {
                messages_field,
                messages: Vec::new(),
                fields: Vec::new(),
                tool_words,
            },
        })
    }

    /// Sets a chat field that came from the dialect's field `origin`.
    pub fn set(&mut self, name: &str, value: impl Into<Value>, origin: &str) {
        self.fields.insert(name.to_owned(), value.into());
        self.origins.rename(name, origin);
    }

    /// The value of a chat field, to be added to.
    pub fn entry(&mut self, name: &str) -> &mut Value {
        self.fields.entry(name).or_insert(Value::Null)
    }

    /// Faults about the chat field `name` are told as about `origin`.
    pub fn rename(&mut self, name: &str, origin: &str) {
        self.origins.rename(name, origin);
    }

    /// The next message, which came from `origin`.
    pub fn message(&mut self, message: Value, origin: impl Into<String>) {
        self.messages.push(message);
        self.origins.messages.push(origin.into());
    }

    /// The message that came last.
    pub fn last_message(&mut self) -> Option<&mut Map<String, Value>> {
        self.messages.last_mut().and_then(Value::as_object_mut)
    }

    /// The body, and where its parts came from.
    #[must_use]
    pub fn finish(mut self) -> (Map<String, Value>, Origins) {
        let messages = Value::from(self.messages);
        self.fields.insert("messages".to_owned(), messages);
        (self.fields, self.origins)
    }
}

impl Origins {
    fn rename(&mut self, name: &str, origin: &str) {
        self.fields.push((name.to_owned(), origin.to_owned()));
    }

    /// The same fault in the dialect's words.
    #[must_use]
    pub fn own(&self, error: ApiError) -> ApiError {
        let Some(param) = &error.param else {
            return error;
        };
        let own = self.own_param(param);
        let message = error
            .message
            .replace(&format!("'{param}'"), &format!("'{own}'"));
        ApiError {
            message,
            param: Some(own),
            ..error
        }
    }

    fn own_param(&self, param: &str) -> String {
        if let Some(rest) = param.strip_prefix("messages") {
            return self.own_message(rest);
        }
        if param.starts_with("tools[") {
            let words = self.tool_words.iter();
            return words.fold(param.to_owned(), |param, (chat, own)| {
                param.replace(chat, own)
            });
        }
        let is_prefix = |name: &str| {
            let rest = param.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let found = self.fields.iter().filter(|(name, _)| is_prefix(name));
        match found.max_by_key(|(name, _)| name.len()) {
            Some((name, own)) => format!("{own}{}", &param[name.len()..]),
            None => param.to_owned(),
        }
    }

    /// `rest` follows `messages`: nothing, or `[2].content[0]` and the like.
    fn own_message(&self, rest: &str) -> String {
        let split = rest
            .strip_prefix('[')
            .and_then(|rest| rest.split_once(']'))
            .and_then(|(index, rest)| Some((index.parse::<usize>().ok()?, rest)));
        match split.and_then(|(index, rest)| Some((self.messages.get(index)?, rest))) {
            Some((origin, rest)) => format!("{origin}{rest}"),
            None => self.messages_field.to_owned(),
        }
    }
}

/// Tokens of the prompt that a chat body makes, without a place in the queue.
pub fn count_prompt(call: &Call<'_>, chat: &Map<String, Value>) -> Result<usize, ApiError> {
    let (model, _) = call.model(&Fields::new(chat))?;
    let tokenizer = tokenizer_of(&model, Feature::Tokenize, "model")?;
    let request = ChatRequest::parse(chat, Some(tokenizer.vocab_size()))?;
    Ok(chat_prompt(&model, &tokenizer, &request.conversation)?.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body() -> ChatBody {
        let given = json!({"model": "m", "input": "x", "top_k": 3});
        let given = given.as_object().expect("an object");
        let words = &[(".function.parameters", ".input_schema"), (".function", "")];
        ChatBody::new(
            given,
            &["input"],
            &[("messages", "use 'input'")],
            "input",
            words,
        )
        .expect("nothing foreign")
    }

    #[test]
    fn what_is_not_consumed_stays() {
        let mut chat = body();
        chat.message(json!({"role": "user", "content": "x"}), "input");
        chat.set("max_tokens", 5, "max_output_tokens");
        let (fields, _) = chat.finish();
        let expected = json!({
            "model": "m", "top_k": 3, "max_tokens": 5,
            "messages": [{"role": "user", "content": "x"}],
        });
        assert_eq!(Value::Object(fields), expected);
    }

    #[test]
    fn foreign_fields_are_refused_with_what_to_use() {
        let given = json!({"messages": []});
        let given = given.as_object().expect("an object");
        let error = ChatBody::new(given, &[], &[("messages", "use 'input'")], "input", &[]);
        let error = error.expect_err("it is foreign");
        assert_eq!(error.param.as_deref(), Some("messages"));
        assert!(error.message.ends_with("use 'input'"), "{}", error.message);
    }

    #[test]
    fn faults_are_told_by_the_dialects_own_fields() {
        let mut chat = body();
        chat.message(json!({}), "instructions");
        chat.message(json!({}), "input[4]");
        chat.rename("response_format", "text.format");
        chat.rename("response_format.json_schema.schema", "text.format.schema");
        let (_, origins) = chat.finish();
        for (param, own) in [
            ("messages", "input"),
            ("messages[0].content", "instructions.content"),
            ("messages[1].content[2].type", "input[4].content[2].type"),
            ("messages[7]", "input"),
            ("response_format.type", "text.format.type"),
            ("response_format.json_schema.schema", "text.format.schema"),
            ("response_formats", "response_formats"),
            (
                "tools[1].function.parameters.type",
                "tools[1].input_schema.type",
            ),
            ("tools[1].function.name", "tools[1].name"),
            ("top_k", "top_k"),
        ] {
            let error = ApiError::invalid(param, format!("'{param}' is bad, '{param}x' is not"));
            let error = origins.own(error);
            assert_eq!(error.param.as_deref(), Some(own));
            assert_eq!(error.message, format!("'{own}' is bad, '{param}x' is not"));
        }
        let plain = ApiError::new(crate::http::errors::ErrorCode::QueueFull, "'messages'");
        assert_eq!(origins.own(plain.clone()), plain);
    }
}
