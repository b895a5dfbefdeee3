//! What a request says about the form of its answer: OpenAI's `response_format`, llama-server's `grammar`
//! and `json_schema`, vLLM's `structured_outputs` and its older `guided_*`, and plain `regex`, `choice`.
//!
//! Pure. At most one of them; each becomes a [`GrammarSpec`] and the name of the field it came from, so
//! that what cannot be compiled is refused by that name. What is not here: compiling
//! (`tokenizer::grammar`), which the HTTP worker does before anything is queued.

use super::fields::{Fields, kind_of};
use crate::constraint::ConstraintSource;
use crate::http::errors::{ApiError, ErrorCode};
use crate::pool::LoadedModel;
use crate::runtime::Feature;
use crate::tokenizer::{GrammarSpec, Grammars};
use serde_json::Value;
use std::sync::Arc;

/// The form that an answer shall have.
#[derive(Clone, Debug, PartialEq)]
pub struct Structure {
    spec: GrammarSpec,
    /// Where it stands in the body, for refusals.
    param: String,
}

/// How the value of a field is read.
type Reader = fn(&Value, &str) -> Result<Option<GrammarSpec>, ApiError>;

/// Fields that say something about the form.
const FIELDS: [(&str, Reader); 10] = [
    ("response_format", response_format),
    ("structured_outputs", structured_outputs),
    ("json_schema", schema),
    ("guided_json", schema),
    ("grammar", grammar),
    ("guided_grammar", grammar),
    ("regex", regex),
    ("guided_regex", regex),
    ("choice", choice),
    ("guided_choice", choice),
];

/// What `structured_outputs` may hold.
const PARTS: [(&str, Reader); 5] = [
    ("json", schema),
    ("regex", regex),
    ("choice", choice),
    ("grammar", grammar),
    ("json_object", json_object),
];

impl Structure {
    /// Reads the fields; None when the answer is free.
    pub fn parse(fields: &Fields<'_>) -> Result<Option<Self>, ApiError> {
        let mut found: Option<Self> = None;
        for (name, read) in FIELDS {
            let Some(spec) = fields
                .get(name)
                .map(|value| read(value, name))
                .transpose()?
            else {
                continue;
            };
            let Some(spec) = spec else { continue };
            // llama-server reads a schema beside `json_object` as that object's schema.
            let refines = |first: &Self| {
                first.spec == GrammarSpec::JsonObject && matches!(spec, GrammarSpec::JsonSchema(_))
            };
            if let Some(first) = found.as_ref().filter(|first| !refines(first)) {
                return Err(ApiError::invalid(
                    name,
                    format!(
                        "'{name}' and '{}' both say what the answer must look like; give one",
                        first.param
                    ),
                ));
            }
            found = Some(Self {
                spec,
                param: place_of(name, fields.get(name)),
            });
        }
        Ok(found)
    }

    /// The field it came from.
    #[must_use]
    pub fn param(&self) -> &str {
        &self.param
    }

    /// Rules over the tokens of this model.
    ///
    /// # Errors
    /// `invalid_json_schema` or `invalid_value`, with the field's name; a missing capability.
    pub fn constrain(&self, model: &LoadedModel) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        let can = model.executor.features().has(Feature::StructuredOutput);
        match model.grammars.as_ref().filter(|_| can) {
            Some(grammars) => self.compile(grammars),
            None => Err(ApiError::missing(
                Feature::StructuredOutput,
                &self.param,
                &model.name,
            )),
        }
    }

    /// The same as a value within a Lark grammar.
    ///
    /// # Errors
    /// When it is no sound grammar.
    pub fn in_lark(&self) -> Result<String, ApiError> {
        let value = self.spec.in_lark();
        value.map_err(|error| ApiError::invalid(&self.param, format!("'{}': {error}", self.param)))
    }

    /// Another grammar that holds this one; faults are told as if they were this one's.
    ///
    /// # Errors
    /// As [`Self::constrain`].
    pub fn constrain_as(
        &self,
        spec: GrammarSpec,
        model: &LoadedModel,
    ) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        let param = self.param.clone();
        Self { spec, param }.constrain(model)
    }

    fn compile(&self, grammars: &Grammars) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        grammars.compile(&self.spec).map_err(|error| {
            let (code, what) = match self.spec {
                GrammarSpec::JsonObject | GrammarSpec::JsonSchema(_) => (
                    ErrorCode::InvalidJsonSchema,
                    "the JSON schema cannot be used",
                ),
                _ => (ErrorCode::InvalidValue, "it cannot be used as a grammar"),
            };
            let message = format!("'{}': {what}: {error}", self.param);
            ApiError {
                is_hopeless: true,
                ..ApiError::param(code, &self.param, message)
            }
        })
    }
}

/// The field, or the place inside it where the grammar stands.
fn place_of(name: &str, value: Option<&Value>) -> String {
    let has = |key: &str| {
        let part = value.and_then(|value| value.get(key));
        part.is_some_and(|part| !part.is_null())
    };
    match name {
        "response_format" if has("json_schema") => format!("{name}.json_schema.schema"),
        "structured_outputs" => {
            let part = PARTS.iter().find(|(part, _)| has(part));
            part.map_or(name.to_owned(), |(part, _)| format!("{name}.{part}"))
        }
        _ => name.to_owned(),
    }
}

fn response_format(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    let kind = value.get("type").and_then(Value::as_str);
    match kind {
        Some("text") => Ok(None),
        // llama-server takes a schema here as well.
        Some("json_object") => match value.get("schema") {
            Some(given) => schema(given, "response_format.schema"),
            None => Ok(Some(GrammarSpec::JsonObject)),
        },
        Some("json_schema") => {
            let place = "response_format.json_schema.schema";
            match value
                .get("json_schema")
                .and_then(|outer| outer.get("schema"))
                .filter(|schema| !schema.is_null())
            {
                Some(given) => schema(given, place),
                None => Err(ApiError::param(
                    ErrorCode::MissingRequiredParameter,
                    place,
                    format!("'{place}' is missing"),
                )),
            }
        }
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            Err(ApiError::invalid(
                "response_format.type",
                format!(
                    "'{name}.type' is \"{shown}\"; it must be text, json_object or json_schema"
                ),
            ))
        }
        None => Err(ApiError::invalid(
            name,
            format!("'{name}' must be an object with a 'type': text, json_object or json_schema"),
        )),
    }
}

fn structured_outputs(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    let Some(map) = value.as_object() else {
        return Err(wrong(name, "an object", value));
    };
    let mut found = None;
    for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
        let place = format!("{name}.{key}");
        let part = PARTS.iter().find(|(part, _)| part == key);
        let Some((_, read)) = part else {
            return Err(ApiError::unsupported(
                place,
                "json, regex, choice, grammar and json_object are known",
            ));
        };
        if let Some(spec) = read(value, &place)?
            && found.replace(spec).is_some()
        {
            return Err(ApiError::invalid(
                name,
                format!("'{name}' holds more than one form"),
            ));
        }
    }
    Ok(found)
}

fn schema(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    let parsed: Value = match value {
        Value::Null => return Ok(None),
        Value::Object(_) => value.clone(),
        // vLLM's clients send it as text, too.
        Value::String(text) => serde_json::from_str(text).map_err(|error| {
            let message = format!("'{name}' is a text that is not JSON: {error}");
            ApiError::param(ErrorCode::InvalidJsonSchema, name, message)
        })?,
        other => return Err(wrong(name, "a JSON schema", other)),
    };
    Ok(Some(GrammarSpec::JsonSchema(parsed)))
}

fn json_object(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    match value {
        Value::Bool(wanted) => Ok(wanted.then_some(GrammarSpec::JsonObject)),
        other => Err(wrong(name, "a boolean", other)),
    }
}

fn grammar(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    Ok(text(value, name)?.map(GrammarSpec::ContextFree))
}

fn regex(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    match value {
        Value::String(text) if text.is_empty() => Err(ApiError::invalid(
            name,
            format!("'{name}' is empty; only an empty answer would match"),
        )),
        _ => Ok(text(value, name)?.map(GrammarSpec::Regex)),
    }
}

/// None when empty: llama-server's own clients send an empty grammar when they want none.
fn text(value: &Value, name: &str) -> Result<Option<String>, ApiError> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok((!text.is_empty()).then(|| text.clone())),
        other => Err(wrong(name, "a string", other)),
    }
}

fn choice(value: &Value, name: &str) -> Result<Option<GrammarSpec>, ApiError> {
    let texts: Option<Vec<String>> = value.as_array().and_then(|items| {
        let texts = items.iter().map(|item| item.as_str().map(str::to_owned));
        texts.collect()
    });
    match texts {
        Some(texts) => Ok(Some(GrammarSpec::Choice(texts))),
        None => Err(wrong(name, "an array of strings", value)),
    }
}

fn wrong(name: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid(
        name,
        format!("'{name}' must be {expected}, not {}", kind_of(value)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;
    use serde_json::json;

    fn parse(body: &Value) -> Result<Option<Structure>, ApiError> {
        Structure::parse(&Fields::new(body.as_object().expect("an object")))
    }

    #[test]
    fn every_family_is_read() {
        let object = json!({"type": "object"});
        let of = GrammarSpec::JsonSchema(object.clone());
        let choice = GrammarSpec::Choice(vec!["a".to_owned(), "b".to_owned()]);
        let context_free = GrammarSpec::ContextFree("start: \"x\"".to_owned());
        let regex = GrammarSpec::Regex("x+".to_owned());
        #[rustfmt::skip]
        let table = [
            (json!({"response_format": {"type": "json_object"}}), GrammarSpec::JsonObject, "response_format"),
            (json!({"response_format": {"type": "json_object", "schema": object}}), of.clone(), "response_format"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": object}}}),
             of.clone(), "response_format.json_schema.schema"),
            (json!({"json_schema": object}), of.clone(), "json_schema"),
            (json!({"json_schema": {}}), GrammarSpec::JsonSchema(json!({})), "json_schema"),
            (json!({"guided_json": object.to_string()}), of.clone(), "guided_json"),
            (json!({"grammar": "start: \"x\""}), context_free.clone(), "grammar"),
            (json!({"guided_grammar": "start: \"x\""}), context_free.clone(), "guided_grammar"),
            (json!({"regex": "x+"}), regex.clone(), "regex"),
            (json!({"guided_regex": "x+", "grammar": ""}), regex.clone(), "guided_regex"),
            (json!({"choice": ["a", "b"]}), choice.clone(), "choice"),
            (json!({"guided_choice": ["a", "b"]}), choice.clone(), "guided_choice"),
            (json!({"structured_outputs": {"json": object}}), of, "structured_outputs.json"),
            (json!({"structured_outputs": {"choice": ["a", "b"], "regex": null}}), choice, "structured_outputs.choice"),
            (json!({"structured_outputs": {"regex": "x+"}}), regex, "structured_outputs.regex"),
            (json!({"structured_outputs": {"grammar": "start: \"x\""}}), context_free, "structured_outputs.grammar"),
            (json!({"structured_outputs": {"json_object": true}}), GrammarSpec::JsonObject, "structured_outputs.json_object"),
        ];
        let grammars = Grammars::new(Arc::new(Tokenizer::bytes()));
        for (body, spec, param) in table {
            let found = parse(&body).expect("sound").expect("a form");
            assert_eq!(
                (&found.spec, found.param.as_str()),
                (&spec, param),
                "{body}"
            );
            assert!(found.compile(&grammars).is_ok(), "{body}");
        }
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}, "grammar": ""}),
            json!({"structured_outputs": {"json_object": false}}),
            json!({"structured_outputs": {}, "response_format": null}),
        ] {
            assert_eq!(parse(&body), Ok(None), "{body}");
        }
    }

    #[test]
    fn faults_name_the_field() {
        #[rustfmt::skip]
        let table = [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}),
             "response_format.json_schema.schema"),
            (json!({"regex": 3}), "regex"),
            (json!({"regex": ""}), "regex"),
            (json!({"choice": "a"}), "choice"),
            (json!({"choice": ["a", 1]}), "choice"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"structured_outputs": {"xml": "a"}}), "structured_outputs.xml"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs"),
            (json!({"regex": "a", "choice": ["a"]}), "choice"),
        ];
        for (body, param) in table {
            let error = parse(&body).expect_err("a fault");
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
            assert_eq!(error.status(), 400);
        }
    }

    #[test]
    fn what_cannot_be_compiled_names_its_field() {
        let grammars = Grammars::new(Arc::new(Tokenizer::bytes()));
        let body = json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "thing"}}}});
        let structure = parse(&body).expect("readable").expect("a form");
        let error = structure.compile(&grammars).expect_err("no such type");
        assert_eq!(error.code, ErrorCode::InvalidJsonSchema);
        assert_eq!(
            error.param.as_deref(),
            Some("response_format.json_schema.schema")
        );
        let body = json!({"regex": "("});
        let structure = parse(&body).expect("readable").expect("a form");
        let error = structure
            .compile(&grammars)
            .expect_err("half an expression");
        assert_eq!(
            (error.code, error.param.as_deref()),
            (ErrorCode::InvalidValue, Some("regex"))
        );
    }
}
