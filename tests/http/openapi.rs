//! The OpenAPI description against the router, against real answers of every route, and the README's
//! list of open routes against both.

use super::TestServer;
use crate::client::{Answer, Client};
use crate::fake::Alphabet;
use crate::schema::faults;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tinyloop::http::openapi;
use tinyloop::http::router::{Route, route};

const METHODS: [&str; 4] = ["get", "post", "put", "delete"];

/// (method, path) of everything described.
fn operations(description: &Value) -> Vec<(String, String)> {
    let paths = description["paths"].as_object().expect("paths");
    let all = paths.iter().flat_map(|(path, item)| {
        let methods = METHODS.iter().filter(|method| item.get(**method).is_some());
        methods.map(move |method| (method.to_uppercase(), path.clone()))
    });
    all.collect()
}

/// A path with something in place of each part in braces.
fn filled(path: &str) -> String {
    let parts = path.split('{').map(|part| match part.split_once('}') {
        Some((_, rest)) => format!("x{rest}"),
        None => part.to_owned(),
    });
    parts.collect()
}

fn described() -> Vec<(String, String)> {
    let mut all = operations(openapi::data_plane());
    all.extend(operations(openapi::management()));
    all
}

/// What of a route is its kind, whatever its parameters are.
fn kind(route: &Route) -> String {
    let text = format!("{route:?}");
    let kind = text.split("(\"").next().unwrap_or_default();
    kind.to_owned()
}

#[test]
fn every_described_operation_is_a_route_and_every_method_of_it_is_described() {
    for plane in [openapi::data_plane(), openapi::management()] {
        let paths = plane["paths"].as_object().expect("paths");
        for (path, item) in paths {
            let described: BTreeSet<String> = METHODS
                .iter()
                .filter(|method| item.get(**method).is_some())
                .map(|method| method.to_uppercase())
                .collect();
            let method = described.first().expect("a path has a method");
            let found =
                route(method, &filled(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
            let allowed = found.allow().split(", ").map(str::to_owned);
            let allowed: BTreeSet<String> = allowed
                .filter(|method| !["HEAD", "OPTIONS"].contains(&method.as_str()))
                .collect();
            assert_eq!(described, allowed, "{path}");
        }
    }
}

/// Every path that the router knows is a text in its source; each must lead to a kind of route of which
/// some path is described.
#[test]
fn every_path_of_the_router_is_described() {
    let source = include_str!("../../src/http/router.rs");
    let source = source.split("#[cfg(test)]").next().expect("the code");
    let start = source.find("fn known_path").expect("the router's table");
    let kinds: BTreeSet<String> = described()
        .iter()
        .map(|(method, path)| kind(&route(method, &filled(path)).expect("a route")))
        .collect();
    let mut n_paths = 0;
    for literal in source[start..].split('"').skip(1).step_by(2) {
        let is_path = literal.starts_with('/') && literal != "/cancel" && !literal.contains(' ');
        if !is_path {
            continue;
        }
        let tries = [
            literal.to_owned(),
            format!("{literal}x"),
            format!("{literal}x/cancel"),
        ];
        let found = tries.iter().find_map(|path| {
            let methods = ["GET", "POST", "DELETE"].into_iter();
            methods.filter_map(|method| route(method, path).ok()).next()
        });
        let Some(found) = found else {
            continue; // the beginning of longer paths that stand in the table themselves
        };
        n_paths += 1;
        assert!(kinds.contains(&kind(&found)), "{literal} is not described");
    }
    assert!(n_paths > 15, "the table was found");
    for admin in [
        "models",
        "models/x",
        "models/x/load",
        "models/x/unload",
        "devices",
        "reload",
    ] {
        let path = format!("/v1/admin/{admin}");
        let methods = ["GET", "POST"].into_iter();
        let found = methods
            .filter_map(|method| route(method, &path).ok())
            .next();
        assert!(kinds.contains(&kind(&found.expect("a route"))), "{path}");
    }
}

#[test]
fn open_routes_are_those_that_the_readme_lists() {
    let readme = include_str!("../../README.md");
    let (_, rest) = readme
        .split_once("| open, no key |")
        .expect("the README's table");
    let row = rest.lines().next().expect("a row");
    let listed: BTreeSet<&str> = row.split('`').skip(1).step_by(2).collect();
    let mut open = BTreeSet::new();
    for (method, path) in operations(openapi::data_plane()) {
        let is_open = route(&method, &filled(&path)).expect("a route").is_open();
        let described = &openapi::data_plane()["paths"][&path][method.to_lowercase()];
        assert_eq!(
            described["security"] == json!([]),
            is_open,
            "{method} {path}"
        );
        if is_open {
            open.insert(format!("{method} {path}"));
        }
    }
    let listed: BTreeSet<String> = listed.into_iter().map(str::to_owned).collect();
    assert_eq!(listed, open);
}

/// Answers of every route are of the declared statuses and shapes.
struct Prober<'a> {
    description: &'a Value,
    client: Client,
    seen: BTreeSet<(String, String)>,
}

impl Prober<'_> {
    /// Asks `method path` where `at` is the described path; the answer has `status`.
    #[track_caller]
    fn ask(&mut self, method: &str, at: &str, path: &str, body: &Value, status: u16) -> Answer {
        let text = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let headers = [("content-type", "application/json")];
        self.client.send(method, path, &headers, &text);
        let answer = self.client.read_answer();
        assert_eq!(
            answer.status,
            status,
            "{path}: {}",
            String::from_utf8_lossy(&answer.body)
        );
        self.seen.insert((method.to_owned(), at.to_owned()));
        let responses = &self.description["paths"][at][method.to_lowercase()]["responses"];
        let response = &responses[status.to_string()];
        assert!(
            response.is_object(),
            "{method} {at}: {status} is not declared"
        );
        let kind = answer.header("content-type").expect("a content type");
        let kind = kind.split(';').next().expect("a word");
        let media = &response["content"][kind];
        assert!(media.is_object(), "{method} {at}: {kind} is not declared");
        match kind {
            "application/json" => self.check(&media["schema"], &answer.json(), at),
            "text/event-stream" => {
                for event in answer.events().iter().filter(|event| *event != "[DONE]") {
                    let event = serde_json::from_str(event).expect("JSON");
                    self.check(&media["x-event-schema"], &event, at);
                }
            }
            _ => {}
        }
        answer
    }

    #[track_caller]
    fn check(&self, schema: &Value, value: &Value, at: &str) {
        let found = faults(self.description, schema, value);
        assert!(found.is_empty(), "{at}: {found:#?}\n{value}");
    }
}

#[test]
fn every_answer_of_the_data_plane_has_the_declared_status_and_shape() {
    let server = TestServer::start(Alphabet::at_once());
    let mut client = server.client();
    let description = client.get("/openapi.json").json();
    let mut prober = Prober {
        description: &description,
        client,
        seen: BTreeSet::new(),
    };
    let nothing = Value::Null;
    for (path, status) in [
        ("/", 200),
        ("/health", 200),
        ("/healthz", 200),
        ("/livez", 200),
        ("/readyz", 200),
        ("/v1/health", 200),
        ("/ready", 200),
        ("/metrics", 200),
        ("/openapi.json", 200),
        ("/v1/models", 200),
        ("/v1/requests", 200),
        ("/v1/native/snapshot", 200),
        ("/v1/native/prefixes", 200),
    ] {
        prober.ask("GET", path, path, &nothing, status);
    }
    prober.ask("GET", "/v1/models", "/v1/models?all=true", &nothing, 200);
    prober.ask("GET", "/v1/models/{id}", "/v1/models/alias", &nothing, 200);
    prober.ask("GET", "/v1/models/{id}", "/v1/models/none", &nothing, 404);
    let cancel = "/v1/requests/{id}/cancel";
    prober.ask("POST", cancel, "/v1/requests/none/cancel", &nothing, 404);
    let prefix = "/v1/native/prefixes/{id}";
    prober.ask("DELETE", prefix, "/v1/native/prefixes/0", &nothing, 404);
    let prefixes = "/v1/native/prefixes";
    prober.ask("POST", prefixes, prefixes, &json!({"text": 1}), 400);
    prober.ask("DELETE", prefixes, prefixes, &nothing, 200);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let tokenize = "/v1/native/tokenize";
    let body = json!({"text": "hi", "with_pieces": true});
    prober.ask("POST", tokenize, tokenize, &body, 200);
    prober.ask("POST", tokenize, tokenize, &json!({"x": 1}), 400);
    let detokenize = "/v1/native/detokenize";
    prober.ask(
        "POST",
        detokenize,
        detokenize,
        &json!({"tokens": [104, 255]}),
        200,
    );
    let chat = "/v1/chat/completions";
    let completions = "/v1/completions";
    let generate = "/v1/native/generate";
    for stream in [false, true] {
        let options = stream.then(|| json!({"include_usage": true}));
        let body = json!({
            "messages": messages, "max_tokens": 3, "stream": stream, "logprobs": true, "top_logprobs": 2,
            "stream_options": options, "n": 2,
        });
        prober.ask("POST", chat, chat, &body, 200);
        let body = json!({
            "prompt": ["a", "b"], "max_tokens": 3, "stream": stream, "logprobs": 2, "echo": true,
            "stream_options": options,
        });
        prober.ask("POST", completions, completions, &body, 200);
        let body = json!({
            "prompt": "a", "max_tokens": 3, "stream": stream, "logprobs": 2, "return_tokens": true,
        });
        prober.ask("POST", generate, generate, &body, 200);
    }
    let score = json!({"prompt": "abc", "mode": "score"});
    prober.ask("POST", generate, generate, &score, 200);
    for path in [chat, completions, generate] {
        prober.ask(
            "POST",
            path,
            path,
            &json!({"model": "none", "prompt": "x", "messages": messages}),
            404,
        );
        prober.ask("POST", path, path, &json!([]), 400);
    }
    let all: BTreeSet<_> = operations(&description).into_iter().collect();
    let missing: Vec<_> = all.difference(&prober.seen).collect();
    // Routes of other families have their own tests of shapes; here each is at least described.
    let own = |path: &str| {
        let families = [
            "/v1/responses",
            "/v1/messages",
            "/api/",
            "/v1/embeddings",
            "/props",
            "/slots",
            "/tokenize",
            "/detokenize",
            "/apply-template",
            "/completion",
            "/embedding",
            "/lora-adapters",
            "/infill",
            "/v1/rerank",
        ];
        !families.iter().any(|family| path.starts_with(family))
    };
    let missing: Vec<_> = missing.into_iter().filter(|(_, path)| own(path)).collect();
    assert!(missing.is_empty(), "nobody asked {missing:?}");
}

#[test]
fn every_answer_of_the_management_plane_has_the_declared_status_and_shape() {
    let server = TestServer::start(Alphabet::at_once());
    let address = server.server().management_address().expect("it listens");
    let mut client = Client::connect(address);
    let description = client.get("/openapi.json").json();
    let mut prober = Prober {
        description: &description,
        client,
        seen: BTreeSet::new(),
    };
    let nothing = Value::Null;
    for path in [
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/v1/requests",
        "/v1/native/snapshot",
        "/v1/admin/models",
        "/v1/admin/devices",
    ] {
        prober.ask("GET", path, path, &nothing, 200);
    }
    let cancel = "/v1/requests/{id}/cancel";
    prober.ask("POST", cancel, "/v1/requests/none/cancel", &nothing, 404);
    let model = "/v1/admin/models/{name}";
    prober.ask("GET", model, "/v1/admin/models/alias", &nothing, 200);
    prober.ask("GET", model, "/v1/admin/models/none", &nothing, 404);
    let load = "/v1/admin/models/{name}/load";
    prober.ask("POST", load, "/v1/admin/models/alias/load", &json!({}), 200);
    prober.ask("POST", load, "/v1/admin/models/none/load", &json!({}), 404);
    let reload = "/v1/admin/reload";
    prober.ask("POST", reload, reload, &nothing, 409);
    let unload = "/v1/admin/models/{name}/unload";
    let path = "/v1/admin/models/alias/unload?wait_s=10";
    prober.ask("POST", unload, path, &json!({"drain_timeout_s": 0}), 200);
    let all: BTreeSet<_> = operations(&description).into_iter().collect();
    assert_eq!(all, prober.seen);
}
