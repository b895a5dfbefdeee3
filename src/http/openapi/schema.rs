//! The words that schemas are written with (JSON Schema 2020-12, as OpenAPI 3.1 uses it).
//!
//! Pure.

use serde_json::{Value, json};

/// An object with these fields; others may be there too.
#[must_use]
pub fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

/// An object with these fields and no others.
#[must_use]
pub fn closed(required: &[&str], properties: Value) -> Value {
    let mut schema = object(required, properties);
    schema["additionalProperties"] = Value::from(false);
    schema
}

/// Objects whose fields are those of both.
#[must_use]
pub fn both(one: Value, other: Value) -> Value {
    json!({"allOf": [one, other]})
}

/// Of this schema by name.
#[must_use]
pub fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// A text.
#[must_use]
pub fn string(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

/// A whole number, not negative.
#[must_use]
pub fn integer(description: &str) -> Value {
    json!({"type": "integer", "minimum": 0, "description": description})
}

/// A whole number of a range.
#[must_use]
pub fn integer_in(least: i64, most: i64, description: &str) -> Value {
    json!({"type": "integer", "minimum": least, "maximum": most, "description": description})
}

/// Any number.
#[must_use]
pub fn number(description: &str) -> Value {
    json!({"type": "number", "description": description})
}

/// A number of a range.
#[must_use]
pub fn number_in(least: f64, most: f64, description: &str) -> Value {
    json!({"type": "number", "minimum": least, "maximum": most, "description": description})
}

/// True or false.
#[must_use]
pub fn boolean(description: &str) -> Value {
    json!({"type": "boolean", "description": description})
}

/// One of these texts.
#[must_use]
pub fn one_of(values: &[&str]) -> Value {
    json!({"type": "string", "enum": values})
}

/// Exactly this text.
#[must_use]
pub fn constant(value: &str) -> Value {
    json!({"const": value})
}

/// A list.
#[must_use]
pub fn array(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

/// A list that is not empty.
#[must_use]
pub fn some_of(items: Value) -> Value {
    json!({"type": "array", "items": items, "minItems": 1})
}

/// Any of these.
#[must_use]
pub fn any_of(schemas: &[Value]) -> Value {
    json!({"anyOf": schemas})
}

/// That or null.
#[must_use]
pub fn nullable(schema: Value) -> Value {
    any_of(&[schema, json!({"type": "null"})])
}

/// OpenAI's list around objects.
#[must_use]
pub fn list(items: Value) -> Value {
    object(
        &["object", "data"],
        json!({"object": constant("list"), "data": array(items)}),
    )
}
