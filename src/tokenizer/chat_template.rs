//! Chat templates through minijinja: OpenAI messages in, prompt text out.
//!
//! Compiled once per load, immutable, shared by all HTTP workers. Templates come with model
//! files, so they are not trusted: work and memory of a rendering are bounded by fuel, nesting by
//! a recursion limit, and every failure is a `TemplateError` with a line or the template's own
//! message. Known gap: minijinja joins lists with `+` lazily and does not count what comes of it, so
//! a template that doubles a list dozens of times escapes the bound; no request can cause that,
//! only a file whose template is written for it. What is not here: roles and content parts (the HTTP side flattens them), tokens.
//!
//! Differences from Jinja2 in Python that are evened out: blocks trim their line as model makers
//! expect (`trim_blocks`, `lstrip_blocks`), Python's methods on strings, lists and dicts exist,
//! `tojson` writes what `json.dumps` writes, and the `{% generation %}` marks of training code are
//! ignored.

use super::template_functions::{self, Raised};
use super::template_traits::TemplateTraits;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Value};
use std::error::Error as _;
use std::sync::OnceLock;

/// Work of one rendering: about this many instructions or 64 times as many bytes (64 MB), which
/// takes well under a second.
const FUEL: u64 = 1_000_000;
/// Deepest nesting of macro calls; keeps the stack of an HTTP worker small.
const RECURSION_MAX: usize = 100;
/// The name under which the one template is stored.
const NAME: &str = "chat";

/// The turns most small models were trained with; for files that carry no template.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A compiled template. Shared by all threads, immutable.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    /// Found out at the first prompt that needs it.
    pub(super) traits: OnceLock<TemplateTraits>,
    takes_turns: bool,
}

/// Why a template cannot be compiled or rendered; the text says where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TemplateError(pub String);

/// What a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct TemplateInput {
    /// OpenAI messages, content already flattened to text where it was text parts.
    pub messages: Vec<serde_json::Value>,
    /// OpenAI tools; empty = none.
    pub tools: Vec<serde_json::Value>,
    /// End with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Extra variables (`chat_template_kwargs`).
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles; `bos`/`eos` are the texts of these tokens.
    pub fn compile(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| described(&error))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_MAX);
        template_functions::install(&mut environment);
        environment
            .add_template_owned(NAME, without_generation_marks(source))
            .map_err(|error| described(&error))?;
        let mut template = Self {
            environment,
            source: source.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            traits: OnceLock::new(),
            takes_turns: false,
        };
        template.takes_turns = template.renders_turns();
        Ok(template)
    }

    /// Whether it writes a conversation of more than one turn; some take one question only.
    #[must_use]
    pub fn takes_turns(&self) -> bool {
        self.takes_turns
    }

    /// Tries it: every text of three messages must be there, in their order.
    fn renders_turns(&self) -> bool {
        let said = [
            ("user", "first-1"),
            ("assistant", "second-2"),
            ("user", "third-3"),
        ];
        let message = |(role, text)| serde_json::json!({"role": role, "content": text});
        let rendered = self.render(&TemplateInput {
            messages: said.map(message).to_vec(),
            add_generation_prompt: true,
            ..TemplateInput::default()
        });
        let places = rendered.map(|text| said.map(|(_, words)| text.find(words)));
        places.is_ok_and(|places| places.is_sorted() && places[0].is_some())
    }

    /// ChatML, for files that carry no template.
    #[must_use]
    pub fn chatml(bos: &str, eos: &str) -> Self {
        Self::compile(CHATML, bos, eos).expect("a fixed template that the tests compile")
    }

    /// Renders the prompt text.
    pub fn render(&self, input: &TemplateInput) -> Result<String, TemplateError> {
        let list = |items: &[serde_json::Value]| items.iter().map(value).collect::<Value>();
        let tools = match input.tools.as_slice() {
            [] => Value::from(()), // Templates ask `tools is not none` or `if tools`.
            tools => list(tools),
        };
        let own = [
            ("messages", list(&input.messages)),
            ("tools", tools),
            ("documents", Value::from(())),
            (
                "add_generation_prompt",
                Value::from(input.add_generation_prompt),
            ),
            ("bos_token", Value::from(self.bos.as_str())),
            ("eos_token", Value::from(self.eos.as_str())),
        ];
        // Extra variables come last but cannot replace the messages.
        let own_names = ["messages", "tools", "add_generation_prompt"];
        let extra = input.extra.iter();
        let extra = extra.filter(|(name, _)| !own_names.contains(&name.as_str()));
        let variables = own
            .into_iter()
            .chain(extra.map(|(name, given)| (name.as_str(), value(given))));
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from_pairs(variables)))
            .map_err(|error| described(&error))
    }

    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }
}

/// JSON as a template value; the nesting is bounded by the JSON reader.
fn value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => items.iter().map(value).collect(),
        serde_json::Value::Object(fields) => Value::from_pairs(
            fields
                .iter()
                .map(|(name, field)| (name.as_str(), value(field))),
        ),
    }
}

/// The template's own message where it raised one, else what went wrong and in which line.
fn described(error: &Error) -> TemplateError {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TemplateError(message.clone());
        }
        source = cause.source();
    }
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    TemplateError(match error.line() {
        Some(line) => format!("chat template, line {line}: {what}"),
        None => format!("chat template: {what}"),
    })
}

/// Replaces `{% generation %}` and `{% endgeneration %}` (marks for training) by an `if true`
/// block, which keeps lines and whitespace control as they are. Comments, texts in quotes and
/// `raw` blocks stay untouched.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((start, kind)) = next_opening(rest) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = match kind {
            b'#' => rest.find("#}").map(|end| end + 2),
            b'{' => tag_length(rest, "}}"),
            _ => tag_length(rest, "%}"),
        };
        let Some(length) = length else { break };
        let (tag, behind) = rest.split_at(length);
        rest = behind;
        match tag_name(tag) {
            "generation" if kind == b'%' => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" if kind == b'%' => {
                out.push_str(&tag.replace("endgeneration", "endif"));
            }
            "raw" if kind == b'%' => {
                let (raw, behind) = rest.split_at(raw_length(rest));
                out.push_str(tag);
                out.push_str(raw);
                rest = behind;
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    out
}

/// Where the next tag, expression or comment begins, and its second character.
fn next_opening(source: &str) -> Option<(usize, u8)> {
    let bytes = source.as_bytes();
    let mut braces = source.match_indices('{');
    braces.find_map(|(start, _)| match bytes.get(start + 1) {
        Some(&kind @ (b'%' | b'{' | b'#')) => Some((start, kind)),
        _ => None,
    })
}

/// Bytes up to and with `end`, which does not count inside quotes.
fn tag_length(tag: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut is_escaped = false;
    for (index, byte) in tag.bytes().enumerate().skip(2) {
        match quote {
            Some(_) if is_escaped => is_escaped = false,
            Some(_) if byte == b'\\' => is_escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if byte == b'"' || byte == b'\'' => quote = Some(byte),
            None if tag.as_bytes()[index..].starts_with(end.as_bytes()) => {
                return Some(index + end.len());
            }
            None => {}
        }
    }
    None
}

/// What stands between `{%` and `%}`, without whitespace control.
fn tag_name(tag: &str) -> &str {
    let inside = tag.get(2..tag.len().saturating_sub(2)).unwrap_or_default();
    inside.trim_matches(['-', '+', ' ', '\t', '\r', '\n'])
}

/// Bytes before the next `{% endraw %}`; all when there is none.
fn raw_length(source: &str) -> usize {
    let mut tags = source.match_indices("{%");
    let end = tags.find(|&(start, _)| {
        let length = source[start..].find("%}").map_or(0, |end| end + 2);
        tag_name(&source[start..start + length]) == "endraw"
    });
    end.map_or(source.len(), |(start, _)| start)
}
