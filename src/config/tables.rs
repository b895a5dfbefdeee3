//! TOML tables of a configuration: parsed with the line of a fault, merged, with the nearest known key
//! named for an unknown one.
//!
//! Pure. What is not here: which keys there are (`config`).

use super::{ConfigError, File};
use toml::{Table, Value};

/// Puts `over` on top of `base`, table by table, key by key; arrays are replaced whole.
pub(super) fn merge(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(over)) => merge(inner, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// Parses one file and checks every key and kind, so that errors carry this file's lines.
pub(super) fn checked_table(name: &str, text: &str) -> Result<Table, ConfigError> {
    let describe = |error: toml::de::Error| {
        let line = error
            .span()
            .map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        let place = line.map_or(name.to_owned(), |line| format!("{name}:{line}"));
        ConfigError(format!("{place}: {}", with_nearest_key(error.message())))
    };
    toml::from_str::<File>(text).map_err(describe)?;
    text.parse::<Table>().map_err(describe)
}

pub(super) fn deserialize<T: serde::de::DeserializeOwned>(
    name: &str,
    table: Table,
) -> Result<T, ConfigError> {
    T::deserialize(table)
        .map_err(|error| ConfigError(format!("{name}: {}", with_nearest_key(error.message()))))
}

/// Serde's "unknown field `x`, expected one of `a`, `b`" with the nearest key named first.
fn with_nearest_key(message: &str) -> String {
    let message = message.trim();
    let Some(rest) = message.strip_prefix("unknown field `") else {
        return message.replace('\n', " ");
    };
    let mut quoted = rest.split('`').step_by(2);
    let unknown = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.filter(|key| !key.is_empty()).collect();
    let nearest = known.iter().min_by_key(|key| edit_distance(unknown, key));
    match nearest {
        Some(nearest) => format!(
            "unknown key `{unknown}`; did you mean `{nearest}`? (known here: {})",
            known.join(", ")
        ),
        None => format!("unknown key `{unknown}`"),
    }
}

/// Levenshtein distance in characters.
pub(super) fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a_char) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b_char) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(a_char != *b_char);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
