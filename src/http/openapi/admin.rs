//! The routes of operators: models, devices, reload.

use super::schema::{
    array, boolean, constant, integer, list, nullable, number_in, object, reference, string,
};
use super::{Api, Operation};
use serde_json::json;

/// Without a key web pages of other origins are kept out.
const OF_THE_GUARD: &[u16] = &[403];

pub(super) fn describe(api: &mut Api) {
    schemas(api);
    let get = |id, summary, schema: &str| {
        Operation::new("admin", id, summary)
            .json(200, schema)
            .errors(OF_THE_GUARD)
    };
    let rows = get("adminModels", "Every configured model", "AdminModels");
    api.operation("GET", "/v1/admin/models", &rows);
    let row = get("adminModel", "One configured model", "AdminModel").errors(&[404]);
    api.operation("GET", "/v1/admin/models/{name}", &row);
    let devices = get(
        "adminDevices",
        "Memory of the machine and its GPUs",
        "Devices",
    );
    api.operation("GET", "/v1/admin/devices", &devices);
    let change = |id, summary, body: &str| {
        Operation::new("admin", id, summary)
            .query(
                "wait_s",
                number_in(0.0, 600.0, "wait so long for the end"),
                "0 = do not wait",
            )
            .optional_body(body)
            .json(200, "AdminState")
            .json(202, "AdminState")
            .errors(&[403, 404, 409, 415])
    };
    let load = change("loadModel", "Load a model", "LoadOverride");
    api.operation("POST", "/v1/admin/models/{name}/load", &load);
    let unload = change("unloadModel", "Unload a model", "UnloadRequest");
    api.operation("POST", "/v1/admin/models/{name}/unload", &unload);
    let reload = Operation::new("admin", "reload", "Read the configuration again")
        .json(200, "Reloaded")
        .errors(&[403, 409, 415]);
    api.operation("POST", "/v1/admin/reload", &reload);
}

fn schemas(api: &mut Api) {
    let row = object(
        &[
            "name",
            "aliases",
            "runtime_state",
            "is_loaded",
            "replicas",
            "memory",
            "definition",
        ],
        json!({
            "name": string("what requests name"), "aliases": array(string("another name")),
            "runtime_state": string("unloaded, loading, loaded, unloading or failed"),
            "is_loaded": boolean("answers"), "replicas": integer("configured"),
            "loaded_replicas": integer("there"), "queue_depth": integer("waiting"),
            "last_error": nullable(string("of the last load")), "memory": json!({"type": "object"}),
            "load_progress": nullable(json!({"type": "object"})), "definition": json!({"type": "object"}),
        }),
    );
    api.schema("AdminModel", row);
    api.schema("AdminModels", list(reference("AdminModel")));
    let state = object(
        &[
            "model",
            "state",
            "inflight_requests",
            "load_progress",
            "load_override",
        ],
        json!({
            "model": string("which"), "state": string("its state now"),
            "inflight_requests": integer("running"), "load_progress": nullable(json!({"type": "object"})),
            "load_override": json!({"type": "object"}), "is_new": boolean("this request began the load"),
            "evicted": array(string("a model that made room")),
            "waited": boolean("false: too many requests waited already"),
            "waited_reason": string("why it did not wait"),
        }),
    );
    api.schema("AdminState", state);
    devices(api);
    let override_fields =
        json!({"replicas": integer("copies"), "context_length": integer("tokens")});
    api.schema("LoadOverride", object(&[], override_fields));
    let drain = json!({"drain_timeout_s": number_in(0.0, 86_400.0, "for running requests")});
    api.schema("UnloadRequest", object(&[], drain));
    let names = || array(string("a model"));
    let reloaded = object(
        &[
            "added",
            "removed",
            "changed",
            "unchanged",
            "left_alone",
            "keys",
        ],
        json!({
            "added": names(), "removed": names(), "changed": names(), "unchanged": names(),
            "left_alone": names(), "keys": integer("keys of the data plane"),
            "needs_restart": array(string("a section of the file that changed and counts at the next start")),
        }),
    );
    api.schema("Reloaded", reloaded);
}

fn devices(api: &mut Api) {
    let device = object(
        &["device", "kind", "available", "ledger", "models"],
        json!({
            "device": string("cpu, cuda:0, .."), "kind": string("cpu or gpu"), "available": boolean("readable"),
            "total_bytes": nullable(integer("bytes")), "used_bytes": nullable(integer("bytes")),
            "ledger": nullable(object(&["limit_bytes", "used_bytes"], json!({
                "limit_bytes": integer("bytes"), "used_bytes": integer("bytes"),
            }))),
            "models": array(json!({"type": "object"})),
        }),
    );
    let devices = object(
        &["object", "data", "gpus"],
        json!({
            "object": constant("list"), "data": array(device),
            "gpus": object(&["available"], json!({"available": boolean("there are some")})),
        }),
    );
    api.schema("Devices", devices);
}
