//! `GET /openapi.json`: the routes of a plane as an OpenAPI 3.1 description.
//!
//! Built once per plane, pure. Each family of routes tells its own part in a small function (`describe` in
//! `openai`, `responses`, `anthropic`, `native`, `operations`, `admin` here, or beside the routes of a family); [`Api`] puts the parts together and
//! adds what all routes have in common: keys, the error body, the statuses of the connection layer. What
//! is not here: the routes themselves (`router`); a test holds both against each other, and every real answer
//! against its schema.

mod admin;
mod anthropic;
mod fields;
mod local;
mod native;
mod openai;
mod operations;
mod responses;
pub mod schema;

use crate::http::ops::OpsAnswer;
use schema::{integer, nullable, object, reference, string};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// What the connection layer answers by itself, on any route.
const OF_THE_WIRE: &[u16] = &[400, 405, 408, 411, 413, 417, 431, 500, 501, 503, 505];
/// What keys and their limits lead to.
const OF_KEYS: &[u16] = &[401, 429];
/// What asking for a model leads to.
pub const OF_MODELS: &[u16] = &[403, 404, 499, 502, 504];

/// A description that grows.
#[derive(Debug, Default)]
pub struct Api {
    paths: Map<String, Value>,
    schemas: Map<String, Value>,
}

/// One method of one path.
#[derive(Clone, Debug)]
pub struct Operation {
    id: &'static str,
    tag: &'static str,
    summary: &'static str,
    parameters: Vec<Value>,
    body: Option<Value>,
    body_is_needed: bool,
    /// (status, content type, schema), and the schema of an event where it is a stream.
    answers: Vec<(u16, &'static str, Value, Option<Value>)>,
    errors: Vec<u16>,
    error_schema: &'static str,
    is_open: bool,
}

impl Operation {
    /// `id`: unique within the description.
    #[must_use]
    pub fn new(tag: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self {
            id,
            tag,
            summary,
            parameters: Vec::new(),
            body: None,
            body_is_needed: true,
            answers: Vec::new(),
            errors: Vec::new(),
            error_schema: "Error",
            is_open: false,
        }
    }

    /// A JSON body of this schema.
    #[must_use]
    pub fn body(mut self, schema: &str) -> Self {
        self.body = Some(reference(schema));
        self
    }

    /// The same, which may be left out.
    #[must_use]
    pub fn optional_body(self, schema: &str) -> Self {
        let body_is_needed = false;
        Self {
            body_is_needed,
            ..self.body(schema)
        }
    }

    /// A JSON answer of this schema.
    #[must_use]
    pub fn json(mut self, status: u16, schema: &str) -> Self {
        let answer = (status, "application/json", reference(schema), None);
        self.answers.push(answer);
        self
    }

    /// A stream of events whose `data` is JSON of this schema (but for a last `[DONE]`).
    #[must_use]
    pub fn events(mut self, schema: &str) -> Self {
        // No type: tools differ in whether they look at the text or at each event.
        let text = json!({"description": "server-sent events, see x-event-schema"});
        let event = Some(reference(schema));
        self.answers.push((200, "text/event-stream", text, event));
        self
    }

    /// An answer in plain text.
    #[must_use]
    pub fn text(mut self, status: u16, content_type: &'static str) -> Self {
        self.answers
            .push((status, content_type, string("text"), None));
        self
    }

    /// A parameter of the query.
    #[must_use]
    pub fn query(mut self, name: &str, schema: Value, description: &str) -> Self {
        let parameter =
            json!({"name": name, "in": "query", "schema": schema, "description": description});
        self.parameters.push(parameter);
        self
    }

    /// Statuses of errors beside those that every route has.
    #[must_use]
    pub fn errors(mut self, statuses: &[u16]) -> Self {
        self.errors.extend(statuses);
        self
    }

    /// Another schema of errors than OpenAI's.
    #[must_use]
    pub fn error_schema(self, error_schema: &'static str) -> Self {
        Self {
            error_schema,
            ..self
        }
    }

    /// Needs no key.
    #[must_use]
    pub fn open(self) -> Self {
        let is_open = true;
        Self { is_open, ..self }
    }

    fn responses(&self) -> Value {
        let mut responses = Map::new();
        for (status, content_type, schema, event) in &self.answers {
            let response = responses
                .entry(status.to_string())
                .or_insert_with(|| json!({"description": "the answer", "content": {}}));
            let mut media = json!({"schema": schema});
            if let Some(event) = event {
                media["x-event-schema"] = event.clone();
            }
            response["content"][*content_type] = media;
        }
        let mut errors = self.errors.clone();
        errors.extend(OF_THE_WIRE);
        errors.extend(OF_KEYS.iter().filter(|_| !self.is_open));
        errors.sort_unstable();
        // What the connection layer refuses is worded before the route is known.
        let schema = match self.error_schema {
            "Error" => reference("Error"),
            dialect => schema::any_of(&[reference(dialect), reference("Error")]),
        };
        for status in errors {
            let error = || {
                json!({
                    "description": "an error, see its code",
                    "headers": {"x-request-id": {"schema": {"type": "string"}}},
                    "content": {"application/json": {"schema": schema}},
                })
            };
            responses.entry(status.to_string()).or_insert_with(error);
        }
        Value::Object(responses)
    }
}

impl Api {
    /// A schema that others name.
    pub fn schema(&mut self, name: &str, schema: Value) {
        self.schemas.insert(name.to_owned(), schema);
    }

    /// A method of a path whose changing parts stand in braces.
    pub fn operation(&mut self, method: &str, path: &str, operation: &Operation) {
        let mut parameters: Vec<Value> = parts_in_braces(path)
            .map(|name| {
                json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})
            })
            .collect();
        parameters.extend(operation.parameters.iter().cloned());
        let mut described = json!({
            "operationId": operation.id,
            "tags": [operation.tag],
            "summary": operation.summary,
            "responses": operation.responses(),
        });
        if !parameters.is_empty() {
            described["parameters"] = Value::from(parameters);
        }
        if let Some(body) = &operation.body {
            described["requestBody"] = json!({
                "required": operation.body_is_needed,
                "content": {"application/json": {"schema": body}},
            });
        }
        if operation.is_open {
            described["security"] = json!([]);
        }
        let item = self.paths.entry(path).or_insert_with(|| json!({}));
        item[method.to_ascii_lowercase()] = described;
    }

    /// The description, with what all routes have.
    #[must_use]
    fn finish(mut self, title: &str) -> Value {
        self.schema("Error", error());
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": title,
                "version": env!("CARGO_PKG_VERSION"),
                "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
            },
            "security": [{"bearer": []}, {"key": []}, {}],
            "paths": self.paths,
            "components": {
                "schemas": self.schemas,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        })
    }
}

fn parts_in_braces(path: &str) -> impl Iterator<Item = &str> {
    let parts = path.split('{').skip(1);
    parts.filter_map(|part| part.split_once('}').map(|(name, _)| name))
}

/// OpenAI's error, with what refusals add.
fn error() -> Value {
    object(
        &["error"],
        json!({"error": object(
            &["message", "type", "param", "code"],
            json!({
                "message": string("a sentence for people"),
                "type": string("the kind, in OpenAI's words"),
                "param": nullable(string("the field or header it is about")),
                "code": nullable(string("what went wrong, for programs")),
                "reason": string("why a sound request was not run"),
                "retry_after_ms": integer("where it is known"),
            }),
        )}),
    )
}

static DATA_PLANE: LazyLock<Value> = LazyLock::new(|| {
    let mut api = Api::default();
    openai::describe(&mut api);
    responses::describe(&mut api);
    anthropic::describe(&mut api);
    local::describe(&mut api);
    native::describe(&mut api);
    operations::describe_data_plane(&mut api);
    api.finish("tinyloop: inference")
});

static MANAGEMENT: LazyLock<Value> = LazyLock::new(|| {
    let mut api = Api::default();
    operations::describe_management(&mut api);
    admin::describe(&mut api);
    api.finish("tinyloop: management")
});

/// The routes of the data plane.
#[must_use]
pub fn data_plane() -> &'static Value {
    &DATA_PLANE
}

/// The routes of the management plane.
#[must_use]
pub fn management() -> &'static Value {
    &MANAGEMENT
}

/// A description as a page.
#[must_use]
pub fn page(description: &Value) -> OpsAnswer {
    OpsAnswer::json(200, description)
}
