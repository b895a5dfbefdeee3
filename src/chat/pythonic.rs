//! A call written as Python, `name(x=1, y=["a", None])`, as JSON.
//!
//! Pure. Reads literals only (strings, numbers, True, False, None, lists, tuples, dicts, keyword
//! arguments): nothing is evaluated. What is not here: where such calls stand (`item`).

use super::json::{Reader, Stop};
use serde_json::{Map, Number, Value};

/// Deepest nesting of literals.
const DEPTH_MAX: u32 = 64;

/// The name and the arguments of a call at the reader's place, and past it.
pub(super) fn call(reader: &mut Reader<'_>) -> Result<(String, Value), Stop> {
    let name = identifier(reader)?;
    reader.space();
    reader.literal("(")?;
    let mut arguments = Map::new();
    loop {
        reader.space();
        if reader.peek()? == b')' {
            reader.literal(")")?;
            return Ok((name, Value::Object(arguments)));
        }
        let key = identifier(reader)?;
        reader.space();
        reader.literal("=")?;
        reader.space();
        arguments.insert(key, literal(reader, 0)?);
        reader.space();
        match reader.peek()? {
            b',' => reader.literal(",")?,
            b')' => {}
            _ => return Err(Stop::Bad),
        }
    }
}

fn identifier(reader: &mut Reader<'_>) -> Result<String, Stop> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let name = reader.run(is_part)?;
    match name.is_empty() {
        true => Err(Stop::Bad),
        false => Ok(name.to_owned()),
    }
}

fn literal(reader: &mut Reader<'_>, depth: u32) -> Result<Value, Stop> {
    if depth > DEPTH_MAX {
        return Err(Stop::Bad);
    }
    match reader.peek()? {
        quote @ (b'"' | b'\'') => string(reader, char::from(quote)).map(Value::from),
        b'[' => items(reader, "[", b']', depth).map(Value::from),
        b'(' => items(reader, "(", b')', depth).map(Value::from),
        b'{' => dict(reader, depth).map(Value::from),
        _ => word(reader),
    }
}

/// True, False, None (and JSON's words), or a number.
fn word(reader: &mut Reader<'_>) -> Result<Value, Stop> {
    let word = reader.run(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.' | '_'))?;
    match word {
        "True" | "true" => Ok(Value::Bool(true)),
        "False" | "false" => Ok(Value::Bool(false)),
        "None" | "null" => Ok(Value::Null),
        _ => number(word).map(Value::from).ok_or(Stop::Bad),
    }
}

fn number(word: &str) -> Option<Number> {
    let plain = word.replace('_', "");
    let plain = plain.strip_prefix('+').unwrap_or(&plain);
    if let Ok(integer) = plain.parse::<i64>() {
        return Some(integer.into());
    }
    let is_number = plain.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.');
    let float = plain.parse::<f64>().ok().filter(|_| is_number)?;
    Number::from_f64(float)
}

fn items(reader: &mut Reader<'_>, open: &str, close: u8, depth: u32) -> Result<Vec<Value>, Stop> {
    reader.literal(open)?;
    let mut found = Vec::new();
    loop {
        reader.space();
        if reader.peek()? == close {
            reader.literal(if close == b']' { "]" } else { ")" })?;
            return Ok(found);
        }
        found.push(literal(reader, depth + 1)?);
        reader.space();
        match reader.peek()? {
            b',' => reader.literal(",")?,
            next if next == close => {}
            _ => return Err(Stop::Bad),
        }
    }
}

fn dict(reader: &mut Reader<'_>, depth: u32) -> Result<Map<String, Value>, Stop> {
    reader.literal("{")?;
    let mut found = Map::new();
    loop {
        reader.space();
        match reader.peek()? {
            b'}' => {
                reader.literal("}")?;
                return Ok(found);
            }
            quote @ (b'"' | b'\'') => {
                let key = string(reader, char::from(quote))?;
                reader.space();
                reader.literal(":")?;
                reader.space();
                found.insert(key, literal(reader, depth + 1)?);
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

/// A string in single or double quotes with Python's usual escapes.
fn string(reader: &mut Reader<'_>, quote: char) -> Result<String, Stop> {
    let raw = reader.quoted(quote)?;
    let mut text = String::with_capacity(raw.len());
    let mut characters = raw.chars();
    while let Some(character) = characters.next() {
        match (character, character == '\\') {
            (_, true) => text.push(escaped(&mut characters)),
            (plain, false) => text.push(plain),
        }
    }
    Ok(text)
}

/// The character that stands behind a backslash.
fn escaped(characters: &mut std::str::Chars<'_>) -> char {
    let n_digits = match characters.next() {
        Some('n') => return '\n',
        Some('t') => return '\t',
        Some('r') => return '\r',
        Some('x') => 2,
        Some('u') => 4,
        Some('U') => 8,
        Some(other) => return other,
        None => return '\\',
    };
    let digits: String = characters.by_ref().take(n_digits).collect();
    let code = u32::from_str_radix(&digits, 16).ok();
    code.and_then(char::from_u32)
        .unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn calls_become_json() {
        #[rustfmt::skip]
        let table = [
            ("f()", json!({})),
            ("f(a=1, b=-2.5,)", json!({"a": 1, "b": -2.5})),
            (r#"f(s="a\"b\n\u00e9", t='it\'s)')"#, json!({"s": "a\"b\né", "t": "it's)"})),
            ("f(l=[1, [True, None]], t=(), d={'k': \"v\", \"n\": {}})",
             json!({"l": [1, [true, null]], "t": [], "d": {"k": "v", "n": {}}})),
        ];
        for (text, expected) in table {
            let followed = format!("{text}, g()");
            let mut reader = Reader::new(&followed);
            assert_eq!(call(&mut reader), Ok(("f".to_owned(), expected)), "{text}");
            assert_eq!(reader.rest(), ", g()");
            for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
                assert_eq!(
                    call(&mut Reader::new(&text[..cut])),
                    Err(Stop::More),
                    "{text} {cut}"
                );
            }
        }
        for bad in [
            "f(1)",
            "f(a=x)",
            "f(a=1 b=2)",
            "(a=1)",
            "f(a=1;",
            "f(a=nan)",
            "f[0]",
        ] {
            assert_eq!(call(&mut Reader::new(bad)), Err(Stop::Bad), "{bad}");
        }
        let deep = format!("f(a={}", "[".repeat(100));
        assert_eq!(call(&mut Reader::new(&deep)), Err(Stop::Bad));
    }
}
