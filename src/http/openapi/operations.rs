//! Health, readiness, metrics, live requests: the same on both planes.

use super::schema::{
    array, boolean, constant, integer, list, nullable, number, object, one_of, reference, string,
};
use super::{Api, Operation};
use serde_json::{Value, json};

pub(super) fn describe_data_plane(api: &mut Api) {
    let root = object(
        &["server", "version", "endpoints"],
        json!({
            "server": constant("tinyloop"), "version": string("of the program"),
            "endpoints": array(string("a path")),
        }),
    );
    api.schema("Root", root);
    let root = Operation::new("operations", "root", "What this is").json(200, "Root");
    api.operation("GET", "/", &root.open());
    pages(api, true);
    for (path, id) in [
        ("/healthz", "healthz"),
        ("/livez", "livez"),
        ("/v1/health", "v1_health"),
    ] {
        let other = Operation::new("operations", id, "As /health");
        let other = other.json(200, "Health").json(503, "Health");
        api.operation("GET", path, &other.open());
    }
    let readyz = Operation::new("operations", "readyz", "As /ready");
    let readyz = readyz.json(200, "Ready").json(503, "Ready");
    api.operation("GET", "/readyz", &readyz.open());
}

pub(super) fn describe_management(api: &mut Api) {
    pages(api, false);
}

/// `probes_are_open`: on the management plane a key, where there is one, guards everything.
fn pages(api: &mut Api, probes_are_open: bool) {
    let states = ["ok", "degraded", "stalled", "failed"];
    let failed = || array(string("an enabled model whose load failed"));
    let anything = || array(json!({"type": "object"}));
    let health = object(
        &["status"],
        json!({
            "status": one_of(&states), "replicas": anything(), "models": array(string("a model")),
            "failed_models": failed(),
        }),
    );
    api.schema("Health", health);
    let states = ["ready", "draining", "loading", "no_model", "no_replica"];
    let ready = json!({
        "status": one_of(&states), "models": anything(), "failed_models": failed(),
    });
    api.schema("Ready", object(&["status"], ready));
    api.schema(
        "Description",
        json!({"type": "object", "required": ["openapi", "paths"]}),
    );
    let open = |operation: Operation| match probes_are_open {
        true => operation.open(),
        false => operation,
    };
    let health = Operation::new("operations", "health", "Whether it makes progress");
    let health = health.json(200, "Health").json(503, "Health");
    api.operation("GET", "/health", &open(health));
    let ready = Operation::new("operations", "ready", "Whether requests may come");
    let ready = ready.json(200, "Ready").json(503, "Ready");
    api.operation("GET", "/ready", &open(ready));
    let metrics = Operation::new("operations", "metrics", "Prometheus");
    let metrics = metrics.text(200, "text/plain");
    api.operation("GET", "/metrics", &metrics);
    let description = Operation::new("operations", "openapi", "This description");
    let description = description.json(200, "Description");
    api.operation("GET", "/openapi.json", &open(description));
    live(api);
}

fn live(api: &mut Api) {
    let request = object(
        &[
            "id",
            "model",
            "state",
            "priority",
            "stream",
            "queued_at",
            "age_ms",
            "prompt_tokens",
        ],
        json!({
            "id": string("24 hexadecimal characters"), "x_request_id": nullable(string("yours")),
            "model": string("who answers"), "state": string("where it is"),
            "priority": json!({"type": "integer"}), "stream": boolean("streamed"),
            "client": nullable(string("whose key")), "queued_at": number("unix seconds"),
            "age_ms": number("since then"), "prompt_tokens": integer("tokens"),
            "completion_tokens": integer("tokens so far"),
        }),
    );
    api.schema("LiveRequest", request);
    api.schema("LiveRequests", list(reference("LiveRequest")));
    let cancelled = object(
        &["id", "ids", "status"],
        json!({
            "id": string("the first"), "ids": array(string("each")), "status": constant("cancelled"),
        }),
    );
    api.schema("Cancelled", cancelled);
    api.schema("Snapshot", snapshot());
    let requests = Operation::new("operations", "listRequests", "Who waits and runs");
    api.operation("GET", "/v1/requests", &requests.json(200, "LiveRequests"));
    let cancel = Operation::new("operations", "cancelRequest", "End a request")
        .json(200, "Cancelled")
        .errors(&[404]);
    api.operation("POST", "/v1/requests/{id}/cancel", &cancel);
    let snapshot = Operation::new("operations", "snapshot", "What the scheduler knows");
    api.operation(
        "GET",
        "/v1/native/snapshot",
        &snapshot.json(200, "Snapshot"),
    );
}

fn snapshot() -> Value {
    let pool = object(
        &["entries", "total_cached_tokens"],
        json!({"entries": integer("prefixes"), "total_cached_tokens": integer("kept")}),
    );
    let model = object(
        &["model", "queue_depth", "in_flight", "replicas", "requests"],
        json!({
            "model": string("which"), "accepting": boolean("takes requests"), "queue_depth": integer("waiting"),
            "in_flight": integer("running"), "ema_dispatch_ms": nullable(number("mean")),
            "prefix_pool": pool, "replicas": array(json!({"type": "object"})),
            "requests": array(reference("LiveRequest")),
        }),
    );
    object(
        &[
            "queue_depth",
            "in_flight",
            "ema_dispatch_ms",
            "prefix_pool",
            "requests",
            "models",
        ],
        json!({
            "queue_depth": integer("waiting"), "in_flight": integer("running"),
            "ema_dispatch_ms": nullable(number("mean, of an only model")), "prefix_pool": pool,
            "requests": array(reference("LiveRequest")), "models": array(model),
        }),
    )
}
