//! A small checker of JSON values against the schemas that our OpenAPI description uses.
//!
//! It knows the words that `openapi/schema.rs` writes, and fails on any other, so that no schema is
//! believed to be checked that is not.

use serde_json::Value;

/// Everything that is wrong with `value`; empty when it is of this schema.
pub(crate) fn faults(description: &Value, schema: &Value, value: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    Checker { description }.check(schema, value, "$", &mut faults);
    faults
}

struct Checker<'a> {
    description: &'a Value,
}

impl Checker<'_> {
    fn check(&self, schema: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
        let words = schema.as_object().expect("a schema is an object");
        for (word, wanted) in words {
            match word.as_str() {
                "description" | "x-event-schema" => {}
                "$ref" => self.check(self.named(wanted), value, at, faults),
                "allOf" => {
                    let all = wanted.as_array().expect("allOf is a list");
                    all.iter()
                        .for_each(|one| self.check(one, value, at, faults));
                }
                "anyOf" => self.check_any(wanted, value, at, faults),
                _ => self.check_word(schema, word, wanted, value, at, faults),
            }
        }
    }

    fn check_any(&self, wanted: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
        let mut tried = Vec::new();
        for one in wanted.as_array().expect("anyOf is a list") {
            let mut found = Vec::new();
            self.check(one, value, at, &mut found);
            if found.is_empty() {
                return;
            }
            tried.push(found.join(", "));
        }
        faults.push(format!("{at}: none of anyOf fits: {}", tried.join(" | ")));
    }

    fn check_word(
        &self,
        schema: &Value,
        word: &str,
        wanted: &Value,
        value: &Value,
        at: &str,
        faults: &mut Vec<String>,
    ) {
        let number = || value.as_f64().zip(wanted.as_f64());
        let is_right = match word {
            "type" => is_of_type(wanted.as_str().expect("one type"), value),
            "const" => wanted == value,
            "enum" => wanted.as_array().expect("a list").contains(value),
            "minimum" => number().is_none_or(|(value, least)| value >= least),
            "maximum" => number().is_none_or(|(value, most)| value <= most),
            "minItems" => value
                .as_array()
                .is_none_or(|items| items.len() as u64 >= wanted.as_u64().expect("a count")),
            "minLength" => value
                .as_str()
                .is_none_or(|text| text.len() as u64 >= wanted.as_u64().expect("a count")),
            "required" => return required(wanted, value, at, faults),
            "properties" | "items" | "additionalProperties" => {
                return self.check_inside(schema, word, wanted, value, at, faults);
            }
            other => panic!("the checker does not know '{other}'"),
        };
        if !is_right {
            let shown: String = value.to_string().chars().take(200).collect();
            faults.push(format!("{at}: {shown} is not {word} {wanted}"));
        }
    }

    fn check_inside(
        &self,
        schema: &Value,
        word: &str,
        wanted: &Value,
        value: &Value,
        at: &str,
        faults: &mut Vec<String>,
    ) {
        if word == "items" {
            for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                self.check(wanted, item, &format!("{at}[{index}]"), faults);
            }
            return;
        }
        let known = &schema["properties"];
        for (name, inner) in value.as_object().into_iter().flatten() {
            let place = format!("{at}.{name}");
            match (word, wanted) {
                ("properties", wanted) => {
                    if let Some(schema) = wanted.get(name) {
                        self.check(schema, inner, &place, faults);
                    }
                }
                (_, Value::Bool(true)) => {}
                (_, wanted) if known.get(name).is_none() => match wanted {
                    Value::Bool(false) => faults.push(format!("{place} is not in the schema")),
                    schema => self.check(schema, inner, &place, faults),
                },
                _ => {}
            }
        }
    }

    fn named(&self, reference: &Value) -> &Value {
        let pointer = reference.as_str().and_then(|text| text.strip_prefix('#'));
        let pointer = pointer.expect("references are within the description");
        let found = self.description.pointer(pointer);
        found.unwrap_or_else(|| panic!("{reference} does not exist"))
    }
}

fn required(wanted: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
    let Some(object) = value.as_object() else {
        return;
    };
    for name in wanted.as_array().expect("a list") {
        let name = name.as_str().expect("a name");
        if !object.contains_key(name) {
            faults.push(format!("{at}.{name} is missing"));
        }
    }
}

fn is_of_type(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("there is no type '{other}'"),
    }
}

#[test]
fn the_checker_finds_faults() {
    use serde_json::json;
    let description = json!({"components": {"schemas": {"A": {"type": "object", "required": ["a"],
        "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
            "b": {"type": "array", "items": {"enum": ["x"]}}}, "additionalProperties": false}}}});
    let schema = json!({"$ref": "#/components/schemas/A"});
    for (value, n_faults) in [
        (json!({"a": 1}), 0),
        (json!({"a": null, "b": ["x"]}), 0),
        (json!({"a": 0}), 1),
        (json!({"b": []}), 1),
        (json!({"a": 1, "b": ["x", "y", 3]}), 2),
        (json!({"a": 1, "c": 1}), 1),
        (json!([]), 1),
    ] {
        let found = faults(&description, &schema, &value);
        assert_eq!(found.len(), n_faults, "{value}: {found:?}");
    }
}
