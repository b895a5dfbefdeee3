//! What a chat template can do with tools, found out by rendering a short conversation with it; and
//! conversations rewritten such that it can.
//!
//! Pure; found out once per template. Nothing is changed where the template understands what it gets.
//! A template that knows no tools gets them as a system text that asks for calls in Hermes' form, the
//! commonest one; past calls and their results then are text as well. What is not here: what answers
//! look like (`chat`).

use super::chat_template::{ChatTemplate, TemplateInput};
use serde_json::{Map, Value, json};

/// Occurs in no template.
const PROBE: &str = "x7q9probe";

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateTraits {
    /// Tools are shown to the model.
    pub renders_tools: bool,
    /// How past calls must be given; None = they are not shown at all.
    pub calls: Option<CallStyle>,
    /// Messages of the role `tool` are shown.
    pub renders_results: bool,
    /// Messages of the role `system` are shown.
    pub renders_system: bool,
}

/// How a template wants past calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStyle {
    /// Arguments as an object, not as JSON text.
    pub object_arguments: bool,
    /// The message's content must be null beside them.
    pub null_content: bool,
    /// Ids of nine letters and digits (Mistral).
    pub short_ids: bool,
}

impl CallStyle {
    /// All styles, the usual ones first.
    fn all() -> impl Iterator<Item = Self> {
        let style = |bits: u8| Self {
            short_ids: bits & 1 != 0,
            null_content: bits & 2 != 0,
            object_arguments: bits & 4 == 0,
        };
        (0..8).map(style)
    }
}

impl ChatTemplate {
    /// What it can do with tools.
    #[must_use]
    pub fn traits(&self) -> &TemplateTraits {
        self.traits.get_or_init(|| probe(self))
    }

    /// The input as this template understands it; None when it is that already.
    pub(super) fn adapted(&self, input: &TemplateInput) -> Option<TemplateInput> {
        let is_touched =
            |message: &Value| message.get("tool_calls").is_some() || message["role"] == "tool";
        if input.tools.is_empty() && !input.messages.iter().any(is_touched) {
            return None;
        }
        let traits = self.traits();
        let mut adapted = input.clone();
        adapted.messages.clear();
        for message in &input.messages {
            adapt(message, traits, &mut adapted.messages);
        }
        if !traits.renders_tools && !input.tools.is_empty() {
            adapted.tools.clear();
            put_system(&mut adapted.messages, &told(&input.tools), traits);
        }
        Some(adapted)
    }
}

/// A tool that no template knows.
fn probe_tool() -> Value {
    json!({"type": "function", "function": {"name": PROBE, "description": "probes",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "a key"}},
                       "required": ["key"]}}})
}

/// Renders a conversation with a tool in each style until one shows all of it.
fn probe(template: &ChatTemplate) -> TemplateTraits {
    let user = json!({"role": "user", "content": "hello"});
    let shows = |messages: Vec<Value>, tools: Vec<Value>, what: &str| {
        let input = TemplateInput {
            messages,
            tools,
            add_generation_prompt: true,
            extra: Map::new(),
        };
        let rendered = template.render(&input);
        rendered.is_ok_and(|text| text.contains(what))
    };
    let with_call = |style: CallStyle, with_result: bool| {
        let arguments = json!({"key": PROBE});
        let id = if style.short_ids {
            "abcdefgh1"
        } else {
            "call_abcdefgh1"
        };
        let arguments = match style.object_arguments {
            true => arguments,
            false => Value::from(arguments.to_string()),
        };
        let call = json!({"id": id, "type": "function",
            "function": {"name": "probe", "arguments": arguments}});
        let content = if style.null_content {
            Value::Null
        } else {
            Value::from("")
        };
        let mut messages = vec![
            user.clone(),
            json!({"role": "assistant", "content": content, "tool_calls": [call]}),
        ];
        if with_result {
            messages.push(json!({"role": "tool", "tool_call_id": id, "name": "probe",
                "content": "result9q7x"}));
        }
        messages
    };
    let shows_call = |style: CallStyle, with_result: bool, is_strict: bool| {
        let rendered = template.render(&TemplateInput {
            messages: with_call(style, with_result),
            ..TemplateInput::default()
        });
        // JSON inside of a string would have backslashes before its quotes, a printed object
        // other quotes; forms without JSON are looked for last.
        rendered.is_ok_and(|text| {
            let is_json = text.contains(&format!("\"{PROBE}\"")) && !text.contains("\\\"");
            text.contains(PROBE)
                && (is_json || !is_strict)
                && (!with_result || text.contains("result9q7x"))
        })
    };
    let find = |with_result| {
        let strict = CallStyle::all().find(|style| shows_call(*style, with_result, true));
        strict.or_else(|| CallStyle::all().find(|style| shows_call(*style, with_result, false)))
    };
    let full = find(true);
    let calls = full.or_else(|| find(false));
    let system = json!({"role": "system", "content": PROBE});
    TemplateTraits {
        renders_tools: shows(vec![user.clone()], vec![probe_tool()], PROBE),
        calls,
        renders_results: full.is_some(),
        renders_system: shows(vec![system, user.clone()], Vec::new(), PROBE),
    }
}

/// Appends a message as the template understands it.
fn adapt(message: &Value, traits: &TemplateTraits, messages: &mut Vec<Value>) {
    let calls = message.get("tool_calls").and_then(Value::as_array);
    match (calls, traits.calls) {
        (Some(calls), Some(style)) => with_calls(message, calls, style, messages),
        (Some(calls), None) => {
            let written: Vec<String> = calls.iter().map(written_call).collect();
            let mut plain = message.clone();
            let content = message["content"].as_str().unwrap_or_default();
            let parts = [content, &written.join("\n")];
            let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            plain["content"] = Value::from(parts.join("\n"));
            if let Some(fields) = plain.as_object_mut() {
                fields.shift_remove("tool_calls");
            }
            messages.push(plain);
        }
        (None, style) if message["role"] == "tool" => {
            if traits.renders_results {
                let mut result = message.clone();
                if style.is_some_and(|style| style.short_ids) {
                    shorten(&mut result, "tool_call_id");
                }
                return messages.push(result);
            }
            let content = message["content"].as_str().unwrap_or_default();
            let text = format!("<tool_response>\n{content}\n</tool_response>");
            // Results of one turn share a message: many templates want the roles to alternate.
            let last = messages.last_mut().filter(|last| {
                let text = last["content"].as_str().unwrap_or_default();
                last["role"] == "user" && text.starts_with("<tool_response>")
            });
            match last {
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    last["content"] = Value::from(format!("{before}\n{text}"));
                }
                None => messages.push(json!({"role": "user", "content": text})),
            }
        }
        (None, _) => messages.push(message.clone()),
    }
}

fn with_calls(message: &Value, calls: &[Value], style: CallStyle, messages: &mut Vec<Value>) {
    let mut shown = message.clone();
    let has_content = message["content"]
        .as_str()
        .is_some_and(|text| !text.is_empty());
    if style.null_content {
        if has_content {
            messages.push(json!({"role": message["role"], "content": message["content"]}));
        }
        shown["content"] = Value::Null;
    }
    let calls = calls.iter().cloned().map(|mut call| {
        let arguments = call["function"].get("arguments").cloned();
        let arguments = arguments.unwrap_or_else(|| json!({}));
        call["function"]["arguments"] = match (style.object_arguments, arguments) {
            // What is no JSON stays as it is: the model wrote it so.
            (true, Value::String(text)) => serde_json::from_str::<Map<String, Value>>(&text)
                .map_or(Value::String(text), Value::Object),
            (false, arguments @ Value::Object(_)) => Value::from(arguments.to_string()),
            (_, arguments) => arguments,
        };
        if style.short_ids {
            shorten(&mut call, "id");
        }
        call
    });
    shown["tool_calls"] = calls.collect();
    messages.push(shown);
}

/// Nine letters and digits that depend on the id alone.
fn shorten(message: &mut Value, key: &str) {
    let id = message[key].as_str().unwrap_or_default();
    let is_short = id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_short {
        return;
    }
    // FNV-1a: nothing secret, and the same in every process, so that prefixes stay reusable.
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let digit = |place: u32| char::from(DIGITS[(hash / 36_u64.pow(place) % 36) as usize]);
    message[key] = Value::from((0..9).map(digit).collect::<String>());
}

/// A past call in Hermes' form.
fn written_call(call: &Value) -> String {
    let function = &call["function"];
    let arguments = match &function["arguments"] {
        Value::String(text) => text.clone(),
        Value::Null => "{}".to_owned(),
        other => other.to_string(),
    };
    format!(
        "<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>",
        function["name"]
    )
}

/// What a model without a form of its own is told about tools.
fn told(tools: &[Value]) -> String {
    let listed: Vec<String> = tools.iter().map(Value::to_string).collect();
    format!(
        "You can call these functions, one JSON description per line:\n{}\n\n\
         To call one, write nothing but its name and its arguments in this form:\n\
         <tool_call>\n{{\"name\": \"...\", \"arguments\": {{...}}}}\n</tool_call>\n\
         Its result follows between <tool_response> and </tool_response>. \
         Answer in plain text when no function is needed.",
        listed.join("\n")
    )
}

/// Adds a text to the system message; makes one where there is none; where the template has no such
/// role the text stands in the first message.
fn put_system(messages: &mut Vec<Value>, text: &str, traits: &TemplateTraits) {
    let first = messages.first_mut().filter(|first| {
        first["role"] == "system" || (!traits.renders_system && first["role"] == "user")
    });
    match first {
        Some(first) => {
            let content = first["content"].as_str().unwrap_or_default();
            let joined = match (first["role"] == "system", content.is_empty()) {
                (_, true) => text.to_owned(),
                (true, false) => format!("{content}\n\n{text}"),
                (false, false) => format!("{text}\n\n{content}"),
            };
            first["content"] = Value::from(joined);
        }
        None if traits.renders_system => {
            messages.insert(0, json!({"role": "system", "content": text}));
        }
        None => messages.insert(0, json!({"role": "user", "content": text})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traits(source: &str) -> TemplateTraits {
        let template = ChatTemplate::compile(source, "<s>", "</s>").expect("it compiles");
        *template.traits()
    }

    fn render(source: &str, messages: Value, tools: Value) -> String {
        let template = ChatTemplate::compile(source, "<s>", "</s>").expect("it compiles");
        let list = |value: Value| value.as_array().expect("a list").clone();
        let input = TemplateInput {
            messages: list(messages),
            tools: list(tools),
            ..TemplateInput::default()
        };
        let adapted = template.adapted(&input);
        template
            .render(adapted.as_ref().unwrap_or(&input))
            .expect("it renders")
    }

    const PLAIN: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    const OBJECTS: &str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}\
        {% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %};{% endfor %}";
    const TEXTS: &str = "{% for m in messages %}{{ m.role }}:{% if m.content is not none %}{{ m.content }}{% else %}\
        {% for c in m.tool_calls %}[{{ c.function.name + c.function.arguments }}]{% endfor %}{% endif %};{% endfor %}";
    const SHORT: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}\
        {{ raise_exception('nine') }}{% endif %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}\
        {{ m.content }}{{ m.tool_call_id }};{% endfor %}";

    fn used() -> Value {
        json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "one"},
            {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        ])
    }

    #[test]
    fn templates_show_what_they_can_do() {
        let plain = traits(PLAIN);
        assert!(!plain.renders_tools && plain.calls.is_none() && plain.renders_system);
        assert!(!plain.renders_results);
        let objects = traits(OBJECTS);
        let style = objects.calls.expect("it shows calls");
        assert!(objects.renders_tools && objects.renders_results);
        assert!(style.object_arguments && !style.null_content && !style.short_ids);
        let style = traits(TEXTS).calls.expect("it shows calls");
        assert!(!style.object_arguments && style.null_content);
        assert!(traits(SHORT).calls.expect("it shows calls").short_ids);
    }

    #[test]
    fn conversations_are_rewritten_for_the_template() {
        let shown = render(OBJECTS, used(), json!([]));
        assert_eq!(shown, "user:hi;assistant:[f {\"a\": 1}];tool:one;tool:two;");
        let shown = render(TEXTS, used(), json!([]));
        assert_eq!(shown, "user:hi;assistant:[f{\"a\": 1}];tool:one;tool:two;");
        let shown = render(SHORT, used(), json!([]));
        let id = shown.split(['[', ' ']).nth(1).expect("an id").to_owned();
        assert_eq!(id.len(), 9);
        assert!(shown.contains(&format!("one{id}")), "{shown}");
        let shown = render(PLAIN, used(), json!([]));
        assert_eq!(
            shown,
            "user:hi;assistant:<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>;\
             user:<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>;"
        );
    }

    #[test]
    fn a_template_without_tools_tells_of_them_in_the_system_text() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let hi = json!([{"role": "user", "content": "hi"}]);
        let shown = render(PLAIN, hi.clone(), tools.clone());
        assert!(shown.starts_with("system:You can call"), "{shown}");
        assert!(shown.contains("{\"type\":\"function\",\"function\":{\"name\":\"f\"}}\n"));
        let with_system = json!([{"role": "system", "content": "Be brief."}, hi[0]]);
        let shown = render(PLAIN, with_system, tools.clone());
        assert!(
            shown.starts_with("system:Be brief.\n\nYou can call"),
            "{shown}"
        );
        let no_system =
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
                .to_owned()
                + PLAIN;
        let shown = render(&no_system, hi, tools);
        assert!(shown.starts_with("user:You can call"), "{shown}");
        assert!(shown.ends_with("\n\nhi;"), "{shown}");
    }
}
