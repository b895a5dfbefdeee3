//! Which grammars are small enough to be compiled while a request waits: bounds found by measuring.
//!
//! Pure, and before the parser sees anything, because that cannot be interrupted while it compiles. Measured
//! on one busy core of 2026 with a vocabulary of bytes: the time grows with the square of the properties of
//! one object (500: 0.15 s, 1000: 0.6 s, 2000: 2.6 s; names that are only `required` count like properties:
//! 20,000: 30 s), with the number of schemas in all (a hundred `anyOf` of 20 properties: 0.5 s, five hundred:
//! 3.6 s), and with the product of the alternatives that an `allOf` combines (50 times 50: 2.8 s, 20 cubed:
//! 6 s). A literal text of 400 KB costs 3 s at its first token. What these bounds let through takes a second
//! at most. What is not here: the parser's own bounds, and the stack that a long chain of references needs
//! (`grammar`).

use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::HashSet;

/// Most work of a schema, in the unit of [`schema_work`]: about half a second.
const WORK_MAX: u64 = 600_000;
/// What a schema costs by itself, in that unit; a property of an object with `n` of them costs `n`.
const NODE_WORK: u64 = 100;
/// Most alternatives of one schema after all its parts are combined.
const ALTERNATIVES_MAX: u64 = 500;
/// Most properties that may all come next, or be left out, at one place of an answer: the parser keeps four
/// items for each, and `grammar::ROW_ITEMS_MAX` of them in a row.
const OPTIONAL_MAX: u64 = 500;
/// Longest text that stands in a schema: a name, a constant, a pattern.
const TEXT_BYTES_MAX: usize = 32 << 10;
/// Longest grammar and longest expression, in bytes.
pub(super) const GRAMMAR_TEXT_BYTES_MAX: usize = 64 << 10;
/// See above.
pub(super) const REGEX_BYTES_MAX: usize = 32 << 10;
/// Longest texts of a choice together.
pub(super) const CHOICE_BYTES_MAX: usize = 128 << 10;
/// Most rules of a grammar.
const RULES_MAX: usize = 1000;
/// How many references are followed from one to the next before they count as one alternative.
const REFERENCES_MAX: u32 = 32;
/// Parts of one schema that are looked at behind references and alternatives.
const LOOKS_MAX: u32 = 200_000;

/// Refuses a schema that would take too long.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    schema_work(schema, 0).map(|_| ())
}

/// The work of a schema beside so much other work.
fn schema_work(schema: &Value, work: u64) -> Result<u64, String> {
    let mut found = Found {
        root: schema,
        work,
        path: Vec::new(),
        looks_left: Cell::new(LOOKS_MAX),
    };
    found.walk(schema)?;
    Ok(found.work)
}

/// Refuses a grammar in Lark's words that would take too long. Schemas that stand in it (`%json {..}`)
/// count as schemas, all of them together.
pub(super) fn check_lark(text: &str) -> Result<(), String> {
    let mut parts = text.split("%json");
    let mut lark = parts.next().unwrap_or_default().to_owned();
    let mut work = 0;
    for part in parts {
        let mut values = serde_json::Deserializer::from_str(part).into_iter::<Value>();
        let schema = values.next().and_then(Result::ok);
        let n_bytes = values.byte_offset();
        match schema {
            Some(schema) => {
                work = schema_work(&schema, work)?;
                lark.push_str(part.get(n_bytes..).unwrap_or_default());
            }
            None => lark.push_str(part), // the parser will say what is wrong
        }
    }
    check_bytes("the grammar", lark.len(), GRAMMAR_TEXT_BYTES_MAX)?;
    let n_rules = lark.lines().filter(|line| line.contains(':')).count();
    match n_rules > RULES_MAX {
        true => Err(format!(
            "the grammar has {n_rules} rules; at most {RULES_MAX} are compiled"
        )),
        false => Ok(()),
    }
}

/// Refuses what is too long.
pub(super) fn check_bytes(what: &str, n_bytes: usize, n_max: usize) -> Result<(), String> {
    match n_bytes > n_max {
        true => Err(format!(
            "{what} has {n_bytes} bytes; at most {n_max} are compiled"
        )),
        false => Ok(()),
    }
}

/// What a walk over a schema has found so far.
struct Found<'a> {
    root: &'a Value,
    work: u64,
    /// The names that lead to the part that is being walked.
    path: Vec<&'a str>,
    /// Parts that may still be looked at behind references and alternatives: a chain of schemas that name the
    /// next one twice each has exponentially many.
    looks_left: Cell<u32>,
}

impl<'a> Found<'a> {
    /// Depth is bounded by the JSON parser.
    fn walk(&mut self, value: &'a Value) -> Result<(), String> {
        match value {
            Value::String(text) => check_bytes("a text of the schema", text.len(), TEXT_BYTES_MAX),
            Value::Array(items) => items.iter().try_for_each(|item| self.walk(item)),
            Value::Object(map) => {
                self.count(map)?;
                map.iter().try_for_each(|(key, value)| {
                    check_bytes("a name of the schema", key.len(), TEXT_BYTES_MAX)?;
                    self.path.push(key);
                    self.walk(value)?;
                    self.path.pop();
                    Ok(())
                })
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
        }
    }

    fn count(&mut self, map: &'a Map<String, Value>) -> Result<(), String> {
        let alternatives = self.alternatives(map, REFERENCES_MAX);
        if alternatives > ALTERNATIVES_MAX {
            return Err(format!(
                "a schema combines its parts in {alternatives} ways; at most {ALTERNATIVES_MAX} are \
                 compiled"
            ));
        }
        let n_optional = self.n_optional(map, REFERENCES_MAX);
        let n_names = self.n_names(map, REFERENCES_MAX);
        if self.looks_left.get() == 0 {
            return Err(format!(
                "the schema's parts combine in too many ways: more than {LOOKS_MAX} are not looked at"
            ));
        }
        if n_optional > OPTIONAL_MAX {
            let place: String = self.path.iter().flat_map(|name| ["/", name]).collect();
            let place: String = place.chars().take(200).collect();
            return Err(format!(
                "'#{place}' has {n_optional} optional properties, in all its alternatives together; at \
                 most {OPTIONAL_MAX} are compiled: name them in 'required', or split the object"
            ));
        }
        let squares = n_names.saturating_mul(n_names).saturating_mul(alternatives);
        self.work = self.work.saturating_add(NODE_WORK).saturating_add(squares);
        match self.work > WORK_MAX {
            true => Err(
                "the schema is too large: it has too many properties, or too many in one \
                         object, to be compiled while a request waits"
                    .to_owned(),
            ),
            false => Ok(()),
        }
    }

    /// Properties of one object, with those that `allOf` puts into it.
    fn n_names(&self, map: &Map<String, Value>, n_more: u32) -> u64 {
        let properties = map.get("properties").and_then(Value::as_object);
        let required = map.get("required").and_then(Value::as_array);
        let is_new = |name: &&Value| {
            let name = name.as_str().unwrap_or_default();
            properties.is_none_or(|properties| !properties.contains_key(name))
        };
        let own = properties.map_or(0, Map::len);
        let own = own + required.map_or(0, |names| names.iter().filter(is_new).count());
        let parts = members(map, "allOf").filter_map(|part| self.resolved(part, n_more));
        let parts = parts.map(|(part, n_more)| self.n_names(part, n_more));
        parts.fold(own as u64, u64::saturating_add)
    }

    /// Properties that can be left out, those of all alternatives together, since all of them may come next.
    fn n_optional(&self, map: &Map<String, Value>, n_more: u32) -> u64 {
        let required = members(map, "required").filter_map(Value::as_str);
        let required: HashSet<&str> = required.collect();
        let properties = map.get("properties").and_then(Value::as_object);
        let names = properties.into_iter().flat_map(Map::keys);
        let own = names
            .filter(|name| !required.contains(name.as_str()))
            .count();
        let parts = ["allOf", "anyOf", "oneOf"].map(|key| members(map, key));
        let parts = parts.into_iter().flatten();
        let parts = parts.filter_map(|part| self.resolved(part, n_more));
        let parts = parts.map(|(part, n_more)| self.n_optional(part, n_more));
        parts.fold(own as u64, u64::saturating_add)
    }

    /// In how many ways the parts of a schema can be combined.
    fn alternatives(&self, map: &Map<String, Value>, n_more: u32) -> u64 {
        let of = |part: &Value| {
            let found = self.resolved(part, n_more);
            found.map_or(1, |(part, n_more)| self.alternatives(part, n_more))
        };
        let any = |key: &str| {
            let all = members(map, key).map(&of);
            all.fold(0_u64, u64::saturating_add).max(1)
        };
        let every = members(map, "allOf").map(&of);
        let every = every.fold(1_u64, u64::saturating_mul);
        // A reference stands for another schema only where it is a part of this one.
        let behind = map.get("$ref").filter(|_| map.len() > 1);
        let behind = behind.map_or(1, |_| of(&Value::Object(only_reference(map))));
        every
            .saturating_mul(any("anyOf"))
            .saturating_mul(any("oneOf"))
            .saturating_mul(behind)
    }

    /// A schema, or what its reference points at, and how many more may be followed.
    fn resolved<'p>(&self, part: &'p Value, n_more: u32) -> Option<(&'p Map<String, Value>, u32)>
    where
        'a: 'p,
    {
        let looks_left = self.looks_left.get().checked_sub(1)?;
        self.looks_left.set(looks_left);
        let map = part.as_object()?;
        let Some(reference) = map.get("$ref").and_then(Value::as_str) else {
            return Some((map, n_more));
        };
        let n_more = n_more.checked_sub(1)?;
        let pointer = reference.strip_prefix('#')?;
        self.resolved(self.root.pointer(pointer)?, n_more)
    }
}

fn only_reference(map: &Map<String, Value>) -> Map<String, Value> {
    let reference = map.get("$ref").cloned();
    reference
        .into_iter()
        .map(|it| ("$ref".to_owned(), it))
        .collect()
}

fn members<'m>(map: &'m Map<String, Value>, key: &str) -> impl Iterator<Item = &'m Value> {
    map.get(key).and_then(Value::as_array).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(n_properties: usize) -> Value {
        let properties = (0..n_properties).map(|i| (format!("p{i}"), json!({"type": "string"})));
        json!({"type": "object", "properties": Map::from_iter(properties)})
    }

    #[test]
    fn schemas_of_usual_sizes_are_compiled_and_those_that_cost_seconds_are_not() {
        let many = |n: usize, one: Value| Value::from(vec![one; n]);
        let names: Vec<String> = (0..5000).map(|i| format!("p{i}")).collect();
        let two_ways = |n: usize| json!({"anyOf": many(n, json!({"type": "object"}))});
        let chain: Map<String, Value> = (0..10_000)
            .map(|i| {
                (
                    format!("d{i}"),
                    json!({"$ref": format!("#/$defs/d{}", i + 1)}),
                )
            })
            .collect();
        for (is_taken, schema) in [
            (true, object(500)),
            (false, object(2000)),
            (true, json!({"anyOf": many(25, object(20))})),
            (false, json!({"anyOf": many(26, object(20))})),
            (false, object(501)),
            (false, json!({"anyOf": many(400, object(50))})),
            (
                true,
                json!({"type": "array", "items": object(300), "maxItems": 100_000}),
            ),
            (false, json!({"type": "object", "required": names})),
            (true, json!({"enum": names})),
            (true, json!({"allOf": [two_ways(20), two_ways(20)]})),
            (false, json!({"allOf": [two_ways(50), two_ways(50)]})),
            (
                false,
                json!({"$defs": {"a": two_ways(50)},
                "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}),
            ),
            (
                false,
                json!({"anyOf": many(50, json!(true)), "oneOf": many(50, json!(true))}),
            ),
            (false, json!({"allOf": many(20, object(50))})),
            (true, json!({"const": "x".repeat(30_000)})),
            (false, json!({"const": "x".repeat(40_000)})),
            (false, json!({"properties": {"x".repeat(40_000): {}}})),
            (false, json!({"$defs": chain, "$ref": "#/$defs/d0"})),
            (
                true,
                json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]}),
            ),
        ] {
            let found = check_schema(&schema);
            let text = format!("{:.80}", schema.to_string());
            assert_eq!(found.is_ok(), is_taken, "{found:?} {text}");
        }
    }

    /// 600 were accepted, and broke within the answer: "Current row has 2399 items; max is 2000".
    #[test]
    fn too_many_optional_properties_are_refused_with_their_place() {
        let error = check_schema(&json!({"properties": {"a": object(600)}}));
        let error = error.expect_err("too many");
        assert!(
            error.starts_with("'#/properties/a' has 600 optional"),
            "{error}"
        );
        let mut schema = object(600);
        schema["required"] = (0..200).map(|i| format!("p{i}")).collect();
        assert_eq!(check_schema(&schema), Ok(()));
    }

    /// Each schema names the next one twice: 2^30 ways.
    #[test]
    fn a_chain_of_doubled_references_is_refused_and_not_followed() {
        let doubled = |n: usize| json!({"anyOf": [{"$ref": format!("#/$defs/d{n}")}, {"$ref": format!("#/$defs/d{n}")}]});
        let chain = (0..30).map(|n| (format!("d{n}"), doubled(n + 1)));
        let mut defs: Map<String, Value> = chain.collect();
        defs.insert("d30".to_owned(), json!({"type": "string"}));
        let schema = json!({"$ref": "#/$defs/d0", "$defs": defs});
        let error = check_schema(&schema).expect_err("too many ways");
        assert!(error.contains("ways"), "{error}");
    }

    #[test]
    fn grammars_are_bounded_by_their_rules_and_bytes() {
        let rules = |n: usize| (0..n).map(|i| format!("r{i}: \"a\"\n")).collect::<String>();
        assert_eq!(check_lark(&rules(1000)), Ok(()));
        assert!(check_lark(&rules(1001)).unwrap_err().contains("1001 rules"));
        // Schemas inside count as such, not as text.
        let inside = |n: usize| format!("start: a b\na: %json {}\nb: \"x\"\n", object(n));
        assert_eq!(check_lark(&inside(500)), Ok(()));
        assert!(check_lark(&inside(1000)).unwrap_err().contains("optional"));
        assert!(check_lark(&format!("{0}\nc: %json {1}", inside(400), object(700))).is_err());
        let long = format!("start: \"{}\"", "x".repeat(GRAMMAR_TEXT_BYTES_MAX));
        assert!(check_lark(&long).unwrap_err().contains("bytes"));
        assert!(
            check_bytes("it", 5, 4)
                .unwrap_err()
                .starts_with("it has 5 bytes")
        );
    }
}
