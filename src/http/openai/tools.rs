//! `tools` and what belongs to it: which functions a request offers, and whether they must be called.
//!
//! Pure. `tool_choice` takes OpenAI's forms, also the flat ones of its Responses API, and "any", which
//! others say for "required". Legacy `functions` are refused by name (`sampling`). What is not here:
//! how tools are shown to a model (`tokenizer`), how calls are read and enforced (`reading`).

use super::fields::{Fields, kind_of, wrong_kind};
use crate::chat::ToolShape;
use crate::http::errors::{ApiError, ErrorCode};
use serde_json::{Map, Value, json};

/// Most tools of one request.
const TOOLS_MAX: usize = 512;
/// Most bytes of all tools together, written as JSON.
const TOOLS_BYTES_MAX: usize = 512 << 10;
/// Longest name of a function in bytes.
const NAME_BYTES_MAX: usize = 64;

/// What a request says about tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    /// Those that may be called.
    pub items: Vec<Tool>,
    /// Those that are shown to the model, as OpenAI writes them.
    pub shown: Vec<Value>,
    /// Whether they must be called.
    pub choice: ToolChoice,
    /// More than one call in an answer.
    pub parallel: bool,
}

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// The arguments must satisfy the schema also where the model decides whether it calls.
    pub strict: bool,
    /// Where the schema stands in the body.
    pub param: String,
}

/// Whether tools must be called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// They can't be.
    #[default]
    None,
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// One call of one tool.
    Named,
}

impl Tools {
    /// Reads the fields.
    ///
    /// # Errors
    /// Each fault names its place.
    pub fn parse(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let all = tools(fields)?;
        let mut parsed = Self {
            shown: all.iter().map(|(_, shown)| shown.clone()).collect(),
            choice: ToolChoice::Auto,
            parallel: fields.flag("parallel_tool_calls", true)?,
            items: all.into_iter().map(|(tool, _)| tool).collect(),
        };
        match fields.get("tool_choice") {
            None => {}
            Some(Value::String(word)) => parsed.choice = choice(word, "tool_choice")?,
            Some(Value::Object(map)) => parsed.choose(map)?,
            Some(other) => return Err(wrong_kind("tool_choice", other, "a string or an object")),
        }
        if parsed.items.is_empty() && parsed.must_call() {
            let message = "'tool_choice' asks for a call, but there are no 'tools'";
            return Err(ApiError::invalid("tool_choice", message));
        }
        if parsed.items.is_empty() || parsed.choice == ToolChoice::None {
            return Ok(Self::default());
        }
        Ok(parsed)
    }

    /// Whether calls are looked for in the answer.
    #[must_use]
    pub fn are_offered(&self) -> bool {
        !self.items.is_empty()
    }

    /// Whether the answer is calls and nothing else.
    #[must_use]
    pub fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named)
    }

    /// What the parser of an answer must know.
    #[must_use]
    pub fn shapes(&self) -> Vec<ToolShape> {
        let shape = |tool: &Tool| {
            let properties = tool.parameters.get("properties").and_then(Value::as_object);
            let is_text = |schema: &Value| schema.get("type") == Some(&Value::from("string"));
            let texts = properties.into_iter().flatten();
            let texts = texts.filter(|(_, schema)| is_text(schema));
            ToolShape {
                name: tool.name.clone(),
                text_parameters: texts.map(|(name, _)| name.clone()).collect(),
            }
        };
        self.items.iter().map(shape).collect()
    }

    /// `tool_choice` as an object: a tool by name, or some of the tools.
    fn choose(&mut self, map: &Map<String, Value>) -> Result<(), ApiError> {
        match map.get("type").and_then(Value::as_str) {
            Some("function") => {
                let name = chosen_name(map, "tool_choice")?;
                self.keep(&[name], "tool_choice")?;
                self.choice = ToolChoice::Named;
                Ok(())
            }
            Some("allowed_tools") => {
                let (inner, place) = match map.get("allowed_tools").and_then(Value::as_object) {
                    Some(inner) => (inner, "tool_choice.allowed_tools"),
                    None => (map, "tool_choice"),
                };
                let mode = inner.get("mode").and_then(Value::as_str).unwrap_or("auto");
                self.choice = choice(mode, &format!("{place}.mode"))?;
                let place = format!("{place}.tools");
                let Some(allowed) = inner.get("tools").and_then(Value::as_array) else {
                    let message = format!("'{place}' must be an array of tools");
                    return Err(ApiError::invalid(place, message));
                };
                let names = allowed.iter().enumerate().map(|(index, tool)| {
                    let place = format!("{place}[{index}]");
                    match tool.as_object() {
                        Some(tool) => chosen_name(tool, &place),
                        None => Err(wrong_kind(&place, tool, "an object")),
                    }
                });
                let names: Vec<&str> = names.collect::<Result<_, _>>()?;
                self.keep(&names, &place)?;
                let is_kept = |shown: &Value| {
                    let name = shown["function"]["name"].as_str();
                    name.is_some_and(|name| names.contains(&name))
                };
                self.shown.retain(is_kept);
                Ok(())
            }
            Some(other) => {
                let shown: String = other.chars().take(40).collect();
                Err(ApiError::invalid(
                    "tool_choice.type",
                    format!(
                        "'tool_choice.type' is \"{shown}\"; it must be function or allowed_tools"
                    ),
                ))
            }
            None => Err(ApiError::invalid(
                "tool_choice.type",
                "'tool_choice' as an object has a 'type': function or allowed_tools",
            )),
        }
    }

    /// Only these may be called.
    fn keep(&mut self, names: &[&str], place: &str) -> Result<(), ApiError> {
        let is_known = |name: &&&str| self.items.iter().any(|tool| tool.name == **name);
        if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
            let shown: String = unknown.chars().take(NAME_BYTES_MAX).collect();
            let message = format!("'{place}' names '{shown}', which is not among the 'tools'");
            return Err(ApiError::invalid(place, message));
        }
        self.items
            .retain(|tool| names.contains(&tool.name.as_str()));
        Ok(())
    }
}

fn choice(word: &str, place: &str) -> Result<ToolChoice, ApiError> {
    match word {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" | "any" => Ok(ToolChoice::Required),
        other => {
            let shown: String = other.chars().take(40).collect();
            let message = format!(
                "'{place}' is \"{shown}\"; it must be none, auto, required or an object that names a function"
            );
            Err(ApiError::invalid(place, message))
        }
    }
}

/// `{"type": "function", "function": {"name"}}`, or the flat form.
fn chosen_name<'a>(map: &'a Map<String, Value>, place: &str) -> Result<&'a str, ApiError> {
    let inner = map
        .get("function")
        .and_then(|function| function.get("name"));
    let name = inner.or_else(|| map.get("name")).and_then(Value::as_str);
    name.ok_or_else(|| {
        let place = format!("{place}.function.name");
        let message = format!("'{place}' is missing or no string");
        ApiError::param(ErrorCode::MissingRequiredParameter, place, message)
    })
}

/// The tools, each with what is shown of it.
fn tools(fields: &Fields<'_>) -> Result<Vec<(Tool, Value)>, ApiError> {
    let Some(items) = fields.array("tools")? else {
        return Ok(Vec::new());
    };
    if items.len() > TOOLS_MAX {
        let message = format!("'tools' holds {} tools, at most {TOOLS_MAX}", items.len());
        return Err(ApiError::invalid("tools", message));
    }
    let mut n_bytes = 0;
    let mut found: Vec<(Tool, Value)> = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let (tool, shown) = tool(&format!("tools[{index}]"), item)?;
        n_bytes += shown.to_string().len();
        if n_bytes > TOOLS_BYTES_MAX {
            let message = format!("'tools' has more than {TOOLS_BYTES_MAX} bytes");
            return Err(ApiError::invalid("tools", message));
        }
        if found.iter().any(|(other, _)| other.name == tool.name) {
            let place = format!("tools[{index}].function.name");
            let message = format!("'{place}' is '{}', as that of another tool", tool.name);
            return Err(ApiError::invalid(place, message));
        }
        found.push((tool, shown));
    }
    Ok(found)
}

fn tool(place: &str, item: &Value) -> Result<(Tool, Value), ApiError> {
    let Some(map) = item.as_object() else {
        return Err(wrong_kind(place, item, "an object"));
    };
    check_kind(place, map)?;
    let place = format!("{place}.function");
    let function = match map.get("function") {
        Some(Value::Object(function)) => function,
        Some(other) => return Err(wrong_kind(&place, other, "an object")),
        None => {
            let message = format!("'{place}' is missing");
            let code = ErrorCode::MissingRequiredParameter;
            return Err(ApiError::param(code, place, message));
        }
    };
    let get = |key: &str| function.get(key).filter(|value| !value.is_null());
    let name = function_name(get("name"), &format!("{place}.name"))?;
    if let Some(other) = get("description").filter(|value| !value.is_string()) {
        return Err(wrong_kind(
            &format!("{place}.description"),
            other,
            "a string",
        ));
    }
    let strict = match get("strict") {
        None => false,
        Some(Value::Bool(strict)) => *strict,
        Some(other) => return Err(wrong_kind(&format!("{place}.strict"), other, "a boolean")),
    };
    let param = format!("{place}.parameters");
    let parameters = match get("parameters") {
        None => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(other) => {
            let message = format!("'{param}' must be a JSON schema, not {}", kind_of(other));
            return Err(ApiError::param(
                ErrorCode::InvalidJsonSchema,
                param,
                message,
            ));
        }
    };
    let mut shown = function.clone();
    shown.shift_remove("strict");
    shown.retain(|_, value| !value.is_null());
    shown
        .entry("parameters")
        .or_insert_with(|| parameters.clone());
    let shown = json!({"type": "function", "function": shown});
    let tool = Tool {
        name,
        parameters,
        strict,
        param,
    };
    Ok((tool, shown))
}

/// Only functions are built.
fn check_kind(place: &str, map: &Map<String, Value>) -> Result<(), ApiError> {
    match map.get("type").and_then(Value::as_str) {
        Some("function") => Ok(()),
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let place = format!("{place}.type");
            Err(ApiError::unsupported(
                place,
                &format!("tools of type \"{shown}\" are not built; \"function\" is"),
            ))
        }
        None => {
            let place = format!("{place}.type");
            let message = format!("'{place}' is missing; it is \"function\"");
            let code = ErrorCode::MissingRequiredParameter;
            Err(ApiError::param(code, place, message))
        }
    }
}

/// A name of letters, digits, `_` and `-`.
pub fn function_name(value: Option<&Value>, place: &str) -> Result<String, ApiError> {
    let name = match value {
        Some(Value::String(name)) => name,
        Some(other) => return Err(wrong_kind(place, other, "a string")),
        None => {
            let code = ErrorCode::MissingRequiredParameter;
            return Err(ApiError::param(
                code,
                place,
                format!("'{place}' is missing"),
            ));
        }
    };
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_part) {
        let message =
            format!("'{place}' must have 1 to {NAME_BYTES_MAX} letters, digits, '_' or '-'");
        return Err(ApiError::invalid(place, message));
    }
    Ok(name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &Value) -> Result<Tools, ApiError> {
        Tools::parse(&Fields::new(body.as_object().expect("an object")))
    }

    fn with(extra: Value) -> Value {
        let mut body = json!({"tools": [
            {"type": "function", "function": {"name": "f", "strict": true, "description": null,
             "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}},
            {"type": "function", "function": {"name": "g"}},
        ]});
        let map = body.as_object_mut().expect("an object");
        map.extend(extra.as_object().expect("an object").clone());
        body
    }

    #[test]
    fn tools_are_read_and_shown_without_what_is_ours() {
        let tools = parse(&with(json!({}))).expect("sound");
        assert_eq!((tools.choice, tools.parallel), (ToolChoice::Auto, true));
        assert!(tools.items[0].strict && !tools.items[1].strict);
        assert_eq!(tools.items[1].param, "tools[1].function.parameters");
        assert_eq!(tools.shapes()[0].text_parameters, ["s"]);
        assert!(tools.shown[0]["function"].get("strict").is_none());
        assert!(tools.shown[0]["function"].get("description").is_none());
        let parameters = json!({"type": "object", "properties": {}});
        assert_eq!(tools.shown[1]["function"]["parameters"], parameters);
    }

    #[test]
    fn choices_are_read() {
        let named = json!({"type": "function", "function": {"name": "g"}});
        let allowed = json!({"mode": "required", "tools": [named]});
        #[rustfmt::skip]
        let table = [
            (json!("auto"), ToolChoice::Auto, vec!["f", "g"], 2),
            (json!("required"), ToolChoice::Required, vec!["f", "g"], 2),
            (json!("any"), ToolChoice::Required, vec!["f", "g"], 2),
            (json!("none"), ToolChoice::None, vec![], 0),
            (named.clone(), ToolChoice::Named, vec!["g"], 2),
            (json!({"type": "function", "name": "g"}), ToolChoice::Named, vec!["g"], 2),
            (json!({"type": "allowed_tools", "allowed_tools": allowed}), ToolChoice::Required, vec!["g"], 1),
            (json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
             ToolChoice::Auto, vec!["f"], 1),
        ];
        for (choice, expected, names, n_shown) in table {
            let tools = parse(&with(json!({"tool_choice": choice}))).expect("sound");
            let found: Vec<&str> = tools.items.iter().map(|tool| tool.name.as_str()).collect();
            assert_eq!((tools.choice, found), (expected, names), "{choice}");
            assert_eq!(tools.shown.len(), n_shown, "{choice}");
        }
        for body in [
            json!({}),
            json!({"tools": []}),
            json!({"tool_choice": "auto"}),
        ] {
            assert_eq!(parse(&body), Ok(Tools::default()), "{body}");
        }
    }

    #[test]
    fn faults_name_their_place() {
        let tool = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
        let long = "x".repeat(65);
        #[rustfmt::skip]
        let table = [
            (json!({"tools": "f"}), "tools"),
            (json!({"tools": ["f"]}), "tools[0]"),
            (json!({"tools": [{"function": {"name": "f"}}]}), "tools[0].type"),
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [{"type": "function", "function": 1}]}), "tools[0].function"),
            (tool(json!({})), "tools[0].function.name"),
            (tool(json!({"name": "a b"})), "tools[0].function.name"),
            (tool(json!({"name": long})), "tools[0].function.name"),
            (tool(json!({"name": ""})), "tools[0].function.name"),
            (tool(json!({"name": "f", "description": 1})), "tools[0].function.description"),
            (tool(json!({"name": "f", "parameters": []})), "tools[0].function.parameters"),
            (tool(json!({"name": "f", "strict": "yes"})), "tools[0].function.strict"),
            (json!({"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]}),
             "tools[1].function.name"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (with(json!({"tool_choice": "maybe"})), "tool_choice"),
            (with(json!({"tool_choice": 3})), "tool_choice"),
            (with(json!({"tool_choice": {}})), "tool_choice.type"),
            (with(json!({"tool_choice": {"type": "custom"}})), "tool_choice.type"),
            (with(json!({"tool_choice": {"type": "function"}})), "tool_choice.function.name"),
            (with(json!({"tool_choice": {"type": "function", "function": {"name": "h"}}})), "tool_choice"),
            (with(json!({"tool_choice": {"type": "allowed_tools"}})), "tool_choice.tools"),
            (with(json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}})),
             "tool_choice.allowed_tools.mode"),
            (with(json!({"parallel_tool_calls": "no"})), "parallel_tool_calls"),
        ];
        for (body, param) in table {
            let error = parse(&body).expect_err(&body.to_string());
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
            assert_eq!(error.status(), 400);
        }
        let many: Vec<Value> = (0..600)
            .map(|n| json!({"type": "function", "function": {"name": format!("f{n}")}}))
            .collect();
        assert!(parse(&json!({"tools": many})).is_err());
        let large = tool(json!({"name": "f", "description": "x".repeat(TOOLS_BYTES_MAX)}));
        assert!(parse(&large).is_err());
    }
}
