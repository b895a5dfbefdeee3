//! Typed reading of a JSON object: each getter checks kind and range and names the field.
//!
//! Pure, no thread. `null` counts as absent everywhere, as OpenAI's own API treats it. Unknown
//! fields are not looked at here; `refusals` knows the ones that must not be
//! dropped silently.

use crate::http::errors::{ApiError, ErrorCode};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::map::Entry;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::fmt;
use std::ops::RangeInclusive;

/// A JSON object whose fields are read by name.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// A bit for each field that is there, see [`mark`].
    marks: u64,
}

/// A bit that a name has, among 64, and that few others share. Requests are asked for a hundred fields
/// and have a handful: looking each up by its hash was an eighth of a request's processor time.
fn mark(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let first = bytes.first().copied().unwrap_or_default();
    let last = bytes.last().copied().unwrap_or_default();
    let mixed = bytes.len() + 5 * usize::from(first) + 11 * usize::from(last);
    1 << (mixed % 64)
}

/// The kind of a JSON value, for messages.
#[must_use]
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Parses a request body as a JSON object; the error names line and column. A key that occurs twice
/// in one object is refused: which of its values was meant would be a guess.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let repeated = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let parsed = DistinctKeys(&repeated)
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    match parsed {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(ApiError::new(
            ErrorCode::InvalidJson,
            format!("the body must be a JSON object, not {}", kind_of(&other)),
        )),
        Err(_) if body.is_empty() => Err(ApiError::new(
            ErrorCode::InvalidJson,
            "the body is empty; a JSON object is expected",
        )),
        Err(error) => {
            let param = repeated.into_inner();
            let what = match param {
                Some(_) => "the body is ambiguous",
                None => "the body is not valid JSON",
            };
            Err(ApiError {
                param,
                ..ApiError::new(ErrorCode::InvalidJson, format!("{what}: {error}"))
            })
        }
    }
}

/// Makes a `Value` like serde_json does, except that objects name each key once; the place gets the
/// key that did not.
#[derive(Clone, Copy)]
struct DistinctKeys<'a>(&'a RefCell<Option<String>>);

impl<'de> DeserializeSeed<'de> for DistinctKeys<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DistinctKeys<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(self)?;
            match map.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(value);
                }
                Entry::Occupied(place) => {
                    let key = place.key().clone();
                    let text = format!("the key {key:?} occurs twice in one object");
                    self.0.replace(Some(key));
                    return Err(A::Error::custom(text));
                }
            }
        }
        Ok(Value::Object(map))
    }
}

impl<'a> Fields<'a> {
    /// Reads from `map`.
    #[must_use]
    pub fn new(map: &'a Map<String, Value>) -> Self {
        let marks = map.keys().fold(0, |marks, name| marks | mark(name));
        Self { map, marks }
    }

    /// Refuses fields beside `known`: a route of our own has no foreign clients to be lenient to, and
    /// a misspelt field would change the answer in silence.
    pub fn refuse_unknown(&self, known: &[&str]) -> Result<(), ApiError> {
        let is_unknown =
            |(name, value): &(&String, &Value)| !value.is_null() && !known.contains(&name.as_str());
        match self.map.iter().find(is_unknown) {
            None => Ok(()),
            Some((name, _)) => {
                let shown: String = name.chars().take(100).collect();
                Err(ApiError::unsupported(shown, "this route has no such field"))
            }
        }
    }

    /// The raw value; None when absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        if self.marks & mark(name) == 0 {
            return None;
        }
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A number within `range`.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .ok_or_else(|| wrong_kind(name, value, "a number"))?;
        if !range.contains(&number) {
            return Err(out_of_range(name, number, range.start(), range.end()));
        }
        Ok(Some(number as f32))
    }

    /// An integer within `range`. A float without fraction is accepted (some clients send 16.0).
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = as_integer(value).ok_or_else(|| wrong_kind(name, value, "an integer"))?;
        if !range.contains(&number) {
            return Err(out_of_range(name, number, range.start(), range.end()));
        }
        Ok(Some(number))
    }

    /// A count: an integer `min..=u32::MAX`.
    pub fn count(&self, name: &str, min: u32) -> Result<Option<u32>, ApiError> {
        let value = self.integer(name, i64::from(min)..=i64::from(u32::MAX))?;
        Ok(value.map(|number| number as u32))
    }

    /// A boolean, `default` when absent.
    pub fn flag(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| wrong_kind(name, value, "a boolean")),
        }
    }

    /// A string.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_str()
                .map(Some)
                .ok_or_else(|| wrong_kind(name, value, "a string")),
        }
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_object()
                .map(Some)
                .ok_or_else(|| wrong_kind(name, value, "an object")),
        }
    }

    /// An array.
    pub fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_array()
                .map(|items| Some(items.as_slice()))
                .ok_or_else(|| wrong_kind(name, value, "an array")),
        }
    }
}

/// An integer, or a float that is one.
#[must_use]
pub fn as_integer(value: &Value) -> Option<i64> {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53: above it floats skip integers
    value.as_i64().or_else(|| {
        let float = value.as_f64()?;
        (float.fract() == 0.0 && float.abs() <= EXACT).then_some(float as i64)
    })
}

/// The error for a value of another kind.
#[must_use]
pub fn wrong_kind(name: &str, value: &Value, expected: &str) -> ApiError {
    ApiError::invalid(
        name,
        format!("'{name}' must be {expected}, not {}", kind_of(value)),
    )
}

fn out_of_range<T: std::fmt::Display>(name: &str, value: T, low: &T, high: &T) -> ApiError {
    ApiError::invalid(
        name,
        format!("'{name}' is {value}; it must be between {low} and {high}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().expect("the test gives an object").clone()
    }

    #[test]
    fn getters_check_kind_and_range_and_name_the_field() {
        let map = object(json!({"t": 3.0, "n": 1.5, "s": 5, "whole": 16.0, "none": null}));
        let fields = Fields::new(&map);
        let error = fields.number("t", 0.0..=2.0).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("t"));
        assert_eq!(error.message, "'t' is 3; it must be between 0 and 2");
        assert_eq!(
            fields.integer("n", 1..=4).unwrap_err().message,
            "'n' must be an integer, not a number"
        );
        assert_eq!(
            fields.string("s").unwrap_err().code,
            ErrorCode::InvalidValue
        );
        assert_eq!(fields.count("whole", 1).unwrap(), Some(16));
        assert_eq!(fields.count("none", 1).unwrap(), None);
        assert!(fields.flag("absent", true).unwrap());
    }

    #[test]
    fn a_key_that_occurs_twice_is_named_wherever_it_stands() {
        for (body, key) in [
            (&br#"{"n": 1, "n": 2}"#[..], "n"),
            (br#"{"a": [{"b": null, "c": {}, "b": null}]}"#, "b"),
        ] {
            let error = parse_object(body).unwrap_err();
            assert_eq!(
                (error.code, error.param.as_deref()),
                (ErrorCode::InvalidJson, Some(key))
            );
            assert!(error.message.contains("line 1 column"), "{}", error.message);
        }
    }

    proptest! {
        #[test]
        fn bodies_are_read_as_serde_json_reads_them(value in json_value()) {
            let text = json!({"x": value, "y": [value]}).to_string();
            let expected: Map<String, Value> = serde_json::from_str(&text).expect("it is JSON");
            prop_assert_eq!(parse_object(text.as_bytes()), Ok(expected));
            let cut = text.len() - 1;
            prop_assert!(parse_object(&text.as_bytes()[..cut]).is_err());
        }
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            let items = prop::collection::vec(inner.clone(), 0..4);
            let fields = prop::collection::hash_map(any::<String>(), inner, 0..4);
            prop_oneof![
                items.prop_map(Value::from),
                fields.prop_map(|fields| fields.into_iter().collect()),
            ]
        })
    }

    proptest! {
        /// The marks only ever spare a look.
        #[test]
        fn a_field_is_found_whatever_its_name(
            names in prop::collection::hash_set("[a-c\u{e9}]{0,3}", 0..20),
            asked in "[a-c\u{e9}]{0,3}",
        ) {
            let map: Map<_, _> = names.iter().map(|name| (name.clone(), Value::from(1))).collect();
            let fields = Fields::new(&map);
            prop_assert_eq!(fields.get(&asked).is_some(), names.contains(&asked));
            prop_assert!(names.iter().all(|name| fields.get(name).is_some()));
        }
    }

    #[test]
    fn broken_json_is_reported_with_its_position() {
        let error = parse_object(b"{\"a\": tru}").unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidJson);
        assert!(error.message.contains("line 1 column"), "{}", error.message);
        assert!(parse_object(b"").unwrap_err().message.contains("empty"));
        assert!(
            parse_object(b"[1]")
                .unwrap_err()
                .message
                .contains("not an array")
        );
    }
}
