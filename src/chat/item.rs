//! One call of a tool where it stands, in the forms that families of models write.
//!
//! Pure. The answer "more" means that what follows decides, "bad" that it is no call whatever follows.
//! What is not here: the marks around calls, and passing arguments on while they come (`parser`).

use super::family::{DEEPSEEK_CALL, DEEPSEEK_SEP, Form, MISTRAL_ARGS, MISTRAL_ID};
use super::json::{Reader, Stop};
use super::pythonic;
use serde_json::{Map, Value};

/// What a parser must know of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolShape {
    /// As the request calls it.
    pub name: String,
    /// Parameters whose values are text, whatever they look like; for forms without quotes.
    pub text_parameters: Vec<String>,
}

/// Which calls are looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) form: Form,
    /// Inside of a list: pythonic calls may stand there.
    pub(super) in_list: bool,
    /// Those that were offered. What names another is no call: a client could not answer it.
    pub(super) tools: &'a [ToolShape],
}

/// A call that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// Its arguments, a JSON value, begin at byte `at`; behind them `n_open` braces close.
    Head {
        name: String,
        at: usize,
        n_open: u32,
    },
    /// All of it, `n_bytes` long.
    Whole {
        name: String,
        arguments: String,
        n_bytes: usize,
    },
}

/// The call at the beginning of `text`, behind white space.
pub(super) fn item(text: &str, wanted: Wanted<'_>) -> Result<Item, Stop> {
    let mut reader = Reader::new(text);
    reader.space();
    let next = reader.peek()?;
    match wanted.form {
        Form::DeepSeek => deepseek(reader, wanted.tools),
        Form::Mistral if next != b'{' => mistral(reader, wanted.tools),
        Form::General | Form::Mistral => match next {
            b'{' => object(reader, wanted),
            b'<' => xml(reader, wanted.tools),
            _ if wanted.in_list => {
                let (name, arguments) = pythonic::call(&mut reader)?;
                check_name(&name, wanted.tools)?;
                Ok(Item::Whole {
                    name,
                    arguments: arguments.to_string(),
                    n_bytes: reader.at(),
                })
            }
            _ => Err(Stop::Bad),
        },
    }
}

/// Arguments as JSON text; models also write them as JSON inside of a string.
pub(super) fn arguments_text(raw: &str) -> String {
    match serde_json::from_str(raw) {
        Ok(Value::Null) => "{}".to_owned(),
        Ok(Value::String(inner)) if serde_json::from_str::<Map<String, Value>>(&inner).is_ok() => {
            inner
        }
        _ => raw.to_owned(),
    }
}

fn check_name(name: &str, tools: &[ToolShape]) -> Result<(), Stop> {
    match tools.iter().any(|tool| tool.name == name) {
        true => Ok(()),
        false => Err(Stop::Bad),
    }
}

/// `{"name": .., "arguments": ..}` with further keys, or with both inside of `"function": {..}`.
fn object(mut reader: Reader<'_>, wanted: Wanted<'_>) -> Result<Item, Stop> {
    let start = reader;
    let mut name: Option<String> = None;
    let mut n_open = 1;
    reader.literal("{")?;
    loop {
        reader.space();
        if reader.peek()? == b'}' {
            let name = name.ok_or(Stop::Bad)?;
            for _ in 0..n_open {
                reader.space();
                reader.literal("}")?;
            }
            return Ok(Item::Whole {
                name,
                arguments: "{}".to_owned(),
                n_bytes: reader.at(),
            });
        }
        let key = reader.string()?;
        reader.space();
        reader.literal(":")?;
        reader.space();
        let next = reader.peek()?;
        match key.as_str() {
            "function" if next == b'{' && n_open == 1 => {
                reader.literal("{")?;
                n_open = 2;
                continue;
            }
            "name" | "tool_name" | "function" => {
                let given = reader.string()?;
                check_name(&given, wanted.tools)?;
                name = Some(given);
            }
            "arguments" | "parameters" => match name {
                Some(name) => {
                    let at = reader.at();
                    return Ok(Item::Head { name, at, n_open });
                }
                None => return whole_object(start, wanted),
            },
            "id" | "type" | "tool_call_id" | "call_id" | "index" => {
                reader.value()?;
            }
            _ => return Err(Stop::Bad),
        }
        reader.space();
        match reader.peek()? {
            b',' => reader.literal(",")?,
            b'}' => {}
            _ => return Err(Stop::Bad),
        }
    }
}

/// An object whose arguments stand before its name.
fn whole_object(mut reader: Reader<'_>, wanted: Wanted<'_>) -> Result<Item, Stop> {
    let raw = reader.value()?;
    let value: Value = serde_json::from_str(raw).map_err(|_| Stop::Bad)?;
    let inner = value.get("function").filter(|inner| inner.is_object());
    let call = inner.unwrap_or(&value);
    let find = |names: [&str; 2]| names.into_iter().find_map(|name| call.get(name));
    let name = find(["name", "tool_name"]).and_then(Value::as_str);
    let name = name.ok_or(Stop::Bad)?.to_owned();
    check_name(&name, wanted.tools)?;
    let arguments = find(["arguments", "parameters"]).map(Value::to_string);
    Ok(Item::Whole {
        name,
        arguments: arguments_text(arguments.as_deref().unwrap_or("{}")),
        n_bytes: reader.at(),
    })
}

/// `<function=name><parameter=x>value</parameter></function>`
fn xml(mut reader: Reader<'_>, tools: &[ToolShape]) -> Result<Item, Stop> {
    reader.literal("<function=")?;
    let name = reader.until(">")?.trim().to_owned();
    check_name(&name, tools)?;
    let tool = tools.iter().find(|tool| tool.name == name);
    let is_text = |key: &str| tool.is_some_and(|t| t.text_parameters.iter().any(|p| p == key));
    let mut arguments = Map::new();
    loop {
        reader.space();
        match reader.literal("</function>") {
            Ok(()) => break,
            Err(Stop::More) => return Err(Stop::More),
            Err(Stop::Bad) => reader.literal("<parameter=")?,
        }
        let key = reader.until(">")?.trim().to_owned();
        let raw = reader.until("</parameter>")?;
        let raw = raw.strip_prefix('\n').unwrap_or(raw);
        let raw = raw.strip_suffix('\n').unwrap_or(raw);
        let parsed = serde_json::from_str(raw).ok().filter(|_| !is_text(&key));
        arguments.insert(key, parsed.unwrap_or_else(|| Value::from(raw)));
    }
    Ok(Item::Whole {
        name,
        arguments: Value::Object(arguments).to_string(),
        n_bytes: reader.at(),
    })
}

fn is_in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// `name[ARGS]{..}`, `name[CALL_ID]id[ARGS]{..}` or `name{..}`
fn mistral(mut reader: Reader<'_>, tools: &[ToolShape]) -> Result<Item, Stop> {
    let name = reader.run(is_in_name)?.to_owned();
    check_name(&name, tools)?;
    reader.space();
    if reader.peek()? != b'{' {
        match reader.literal(MISTRAL_ID) {
            Ok(()) => {
                reader.run(is_in_name)?;
                reader.literal(MISTRAL_ARGS)?;
            }
            Err(Stop::Bad) => reader.literal(MISTRAL_ARGS)?,
            Err(Stop::More) => return Err(Stop::More),
        }
        reader.space();
    }
    match reader.peek()? {
        b'{' => Ok(Item::Head {
            name,
            at: reader.at(),
            n_open: 0,
        }),
        _ => Err(Stop::Bad),
    }
}

/// The kind `function`, the name and JSON in a fence (V3, R1), or the name and JSON (V3.1).
fn deepseek(mut reader: Reader<'_>, tools: &[ToolShape]) -> Result<Item, Stop> {
    reader.literal(DEEPSEEK_CALL)?;
    let first = reader.until(DEEPSEEK_SEP)?.trim().to_owned();
    reader.space();
    let name = match reader.peek()? {
        b'{' => first,
        _ => {
            let name = reader.run(is_in_name)?.to_owned();
            reader.space();
            reader.literal("```")?;
            reader.run(|c| c.is_ascii_alphanumeric())?;
            reader.space();
            name
        }
    };
    check_name(&name, tools)?;
    match reader.peek()? {
        b'{' => Ok(Item::Head {
            name,
            at: reader.at(),
            n_open: 0,
        }),
        _ => Err(Stop::Bad),
    }
}
