//! What chat templates call beside Jinja's own filters: JSON as Python writes it, dates,
//! `raise_exception`, some string methods. Pure but for the clock that `strftime_now` reads.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// Deepest nesting of values that are written as JSON.
const JSON_DEPTH_MAX: usize = 128;

/// A message that a template raised itself; found again in the chain of sources.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Raised(pub(crate) String);

/// Adds the functions, filters and methods.
pub(crate) fn install(env: &mut Environment<'static>) {
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", |format: &str| {
        strftime(format, unix_seconds())
    });
    env.add_filter("tojson", to_json);
    env.add_test("iterable", is_iterable);
    env.set_unknown_method_callback(method);
}

/// As in Python, where one can go through texts and what is undefined, but not through None.
fn is_iterable(value: &Value) -> bool {
    let is_text = value.as_str().is_some() || value.is_undefined();
    is_text || (!value.is_none() && value.try_iter().is_ok())
}

fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Raised(message)))
}

/// The Python methods of the contributed callback, and two that it lacks.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), [part]) = (value.as_str(), args)
        && let Some(part) = part.as_str()
    {
        match name {
            "removeprefix" => return Ok(Value::from(text.strip_prefix(part).unwrap_or(text))),
            "removesuffix" => return Ok(Value::from(text.strip_suffix(part).unwrap_or(text))),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// How Python's `json.dumps` is asked to write.
struct JsonStyle {
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
    between_items: String,
    behind_key: String,
}

/// `json.dumps` with `ensure_ascii=False` unless told otherwise: HTML is not escaped.
fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let flag = |name| {
        options
            .get::<Option<bool>>(name)
            .map(|flag| flag == Some(true))
    };
    let (between_items, behind_key) = match options.get::<Option<Vec<String>>>("separators")? {
        Some(given) => <[String; 2]>::try_from(given).map(|[items, key]| (items, key)),
        None => Ok((
            if indent.is_some() { "," } else { ", " }.into(),
            ": ".into(),
        )),
    }
    .map_err(|_| json_fault("separators must be two strings"))?;
    let style = JsonStyle {
        indent,
        ensure_ascii: flag("ensure_ascii")?,
        sort_keys: flag("sort_keys")?,
        between_items,
        behind_key,
    };
    options.assert_all_used()?;
    let mut json = String::new();
    write_json(&mut json, value, &style, 0)?;
    Ok(Value::from(json))
}

fn json_fault(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"))
}

fn write_json(
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    if depth > JSON_DEPTH_MAX {
        return Err(json_fault("the value is nested too deep"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => {
            let _ = write!(out, "{value}"); // Writing to a String cannot fail.
        }
        ValueKind::String => write_text(out, value.as_str().unwrap_or_default(), style),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?;
            write_items(out, "[]", items, style, depth, |out, item| {
                write_json(out, &item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort_by_cached_key(Value::to_string);
            }
            write_items(out, "{}", keys.into_iter(), style, depth, |out, key| {
                write_text(out, &key.to_string(), style);
                out.push_str(&style.behind_key);
                write_json(out, &value.get_item(&key)?, style, depth + 1)
            })?;
        }
        ValueKind::Undefined => return Err(json_fault("the value is undefined")),
        other => return Err(json_fault(&format!("a {other} cannot be written"))),
    }
    Ok(())
}

fn write_text(out: &mut String, text: &str, style: &JsonStyle) {
    let quoted = serde_json::Value::from(text).to_string();
    if !style.ensure_ascii {
        out.push_str(&quoted);
        return;
    }
    for character in quoted.chars() {
        if character.is_ascii() {
            out.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}"); // Writing to a String cannot fail.
        }
    }
}

fn write_items(
    out: &mut String,
    brackets: &str,
    items: impl Iterator<Item = Value>,
    style: &JsonStyle,
    depth: usize,
    mut write: impl FnMut(&mut String, Value) -> Result<(), Error>,
) -> Result<(), Error> {
    let (open, close) = brackets.split_at(1);
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
        }
    };
    out.push_str(open);
    let mut is_empty = true;
    for item in items {
        if !is_empty {
            out.push_str(&style.between_items);
        }
        is_empty = false;
        new_line(out, depth + 1);
        write(out, item)?;
    }
    if !is_empty {
        new_line(out, depth);
    }
    out.push_str(close);
    Ok(())
}

fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |elapsed| elapsed.as_secs())
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Year, month 1..=12 and day 1..=31 of a day counted from 1970-01-01 (proleptic Gregorian).
fn civil_date(days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

/// C's `strftime` in UTC with English names; unknown specifiers stay as they are.
fn strftime(format: &str, unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400;
    let second_of_day = unix_seconds % 86_400;
    let (hour, minute, second) = (
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
    );
    let (year, month, day) = civil_date(days);
    let month_name = MONTHS[month as usize - 1];
    let weekday = WEEKDAYS[(days as usize + 4) % 7];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let text = match characters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{hour12:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        out.push_str(&text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days_and_year_ends() {
        let cases = [
            (0, "Thu 01 Jan 1970 00:00:00 12 AM"),
            (951_782_400, "Tue 29 Feb 2000 00:00:00 12 AM"),
            (1_709_251_199, "Thu 29 Feb 2024 23:59:59 11 PM"),
            (1_735_689_599, "Tue 31 Dec 2024 23:59:59 11 PM"),
            (4_107_542_400, "Mon 01 Mar 2100 00:00:00 12 AM"),
        ];
        for (seconds, text) in cases {
            assert_eq!(strftime("%a %d %b %Y %T %I %p", seconds), text);
        }
        assert_eq!(
            strftime("%F %B %% %Q %", 86_400),
            "1970-01-02 January % %Q %"
        );
    }

    #[test]
    fn json_is_written_as_python_does() {
        let value = Value::from_pairs([
            ("name", Value::from("<é>\"\n")),
            (
                "list",
                Value::from(vec![Value::from(1), Value::from(true), Value::from(())]),
            ),
            ("empty", Value::from(Vec::<Value>::new())),
            ("number", Value::from(1.5)),
        ]);
        let write = |value: &Value, options: &[(&str, Value)]| {
            let options: Kwargs = options.iter().cloned().collect();
            let written = to_json(value, None, options).expect("plain values");
            written.to_string()
        };
        assert_eq!(
            write(&value, &[]),
            r#"{"name": "<é>\"\n", "list": [1, true, null], "empty": [], "number": 1.5}"#
        );
        let short = Value::from_pairs([("b", Value::from(vec![1, 2])), ("a", Value::from("é🙂"))]);
        assert_eq!(
            write(&short, &[("indent", Value::from(4))]),
            "{\n    \"b\": [\n        1,\n        2\n    ],\n    \"a\": \"é🙂\"\n}"
        );
        let compact = [
            ("sort_keys", Value::from(true)),
            ("ensure_ascii", Value::from(true)),
            ("separators", Value::from(vec![",", ":"])),
        ];
        assert_eq!(
            write(&short, &compact),
            r#"{"a":"\u00e9\ud83d\ude42","b":[1,2]}"#
        );
        let options = Kwargs::from_iter([("separators", Value::from(vec![","]))]);
        assert!(to_json(&short, None, options).is_err());
    }
}
