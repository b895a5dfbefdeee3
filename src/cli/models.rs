//! `tinyloop models`: what a running server has, loaded or not.

use super::admin_client::{AdminArgs, AdminClient, bytes_text, path_segment, table};
use super::output::Output;
use crate::error::Error;
use serde_json::Value;

/// Longest note in the table; `tinyloop models NAME` shows all of it.
const NOTE_CHARS_MAX: usize = 60;

/// Arguments of `tinyloop models`.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelsArgs {
    /// Show everything about this model, as JSON.
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// The server.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// Asks and prints.
pub fn run(args: &ModelsArgs) -> Result<(), Error> {
    let client = AdminClient::new(&args.admin)?;
    let mut out = Output::new();
    if let Some(name) = &args.name {
        let model = client.get(&format!("/v1/admin/models/{}", path_segment(name)))?;
        out.line(&pretty(&model))?;
    } else {
        let list = client.get("/v1/admin/models")?;
        match args.json {
            true => out.line(&pretty(&list["data"]))?,
            false => out.piece(&listing(&list["data"]))?,
        }
    }
    out.finish()
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string())
}

/// The table of `GET /v1/admin/models`.
fn listing(rows: &Value) -> String {
    let head = [
        "MODEL", "STATE", "BACKEND", "REPLICAS", "QUEUE", "RUNNING", "MEMORY", "NOTE",
    ];
    let mut cells = vec![head.map(str::to_owned).to_vec()];
    cells.extend(rows.as_array().into_iter().flatten().map(row));
    table(&cells, &[3, 4, 5, 6])
}

fn row(model: &Value) -> Vec<String> {
    let text = |field: &str| model[field].as_str().unwrap_or("-").to_owned();
    let number = |field: &str| model[field].as_u64().unwrap_or(0).to_string();
    vec![
        text("name"),
        text("runtime_state"),
        text("resolved_backend"),
        replicas_text(model),
        number("queue_depth"),
        number("runtime_inflight"),
        memory_text(model),
        note(model),
    ]
}

/// Alive of wanted.
pub(super) fn replicas_text(model: &Value) -> String {
    let number = |field: &str| model[field].as_u64().unwrap_or(0);
    format!("{}/{}", number("loaded_replicas"), number("replicas"))
}

/// What it holds, or is thought to need (with a ~).
pub(super) fn memory_text(model: &Value) -> String {
    let memory = &model["memory"];
    let text = bytes_text(memory["estimate_bytes"].as_u64().unwrap_or(0));
    match (memory["source"].as_str(), memory["is_estimate"].as_bool()) {
        (Some("unavailable") | None, _) => "-".to_owned(),
        (Some(_), Some(false)) => text,
        (Some(_), _) => format!("~{text}"),
    }
}

/// What is worth saying beside the numbers: progress, the last error, when it loads.
pub(super) fn note(model: &Value) -> String {
    let load = &model["load_progress"];
    if let Some(phase) = load["phase"].as_str() {
        let percent = load["progress"].as_f64().unwrap_or(0.0) * 100.0;
        return match load["total_bytes"].as_u64() {
            Some(0) | None => phase.to_owned(),
            Some(_) => format!("{phase}, {percent:.0} %"),
        };
    }
    if let Some(error) = model["last_error"].as_str() {
        let cut: String = error.chars().take(NOTE_CHARS_MAX).collect();
        return match cut.len() < error.len() {
            true => format!("{cut}.."),
            false => cut,
        };
    }
    let is = |field: &str| model[field].as_bool().unwrap_or(false);
    match (is("is_loaded"), is("load_on_demand"), is("pinned")) {
        (false, true, _) => "loads on demand".to_owned(),
        (true, _, true) => "pinned".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_table_says_what_matters() {
        let rows = json!([
            {"name": "a", "runtime_state": "loaded", "resolved_backend": "native", "replicas": 2,
             "loaded_replicas": 2, "queue_depth": 3, "runtime_inflight": 16, "is_loaded": true,
             "pinned": true,
             "memory": {"estimate_bytes": 3 << 20, "source": "measured load delta",
                        "is_estimate": false}},
            {"name": "b", "runtime_state": "loading", "resolved_backend": "native", "replicas": 1,
             "memory": {"estimate_bytes": 1024, "source": "artifact size"},
             "load_progress": {"phase": "reading", "progress": 0.25, "total_bytes": 8}},
            {"name": "c", "runtime_state": "failed", "resolved_backend": "fake", "replicas": 1,
             "memory": {"estimate_bytes": 0, "source": "unavailable"}, "last_error": "no\nfile"},
            {"name": "d", "runtime_state": "unloaded", "load_on_demand": true},
        ]);
        let expected = "\
MODEL  STATE     BACKEND  REPLICAS  QUEUE  RUNNING    MEMORY  NOTE
a      loaded    native        2/2      3       16   3.0 MiB  pinned
b      loading   native        0/1      0        0  ~1.0 KiB  reading, 25 %
c      failed    fake          0/1      0        0         -  no file
d      unloaded  -             0/0      0        0         -  loads on demand
";
        assert_eq!(listing(&rows), expected);
        let long = json!({"last_error": "é".repeat(100)});
        assert_eq!(note(&long).chars().count(), NOTE_CHARS_MAX + 2);
    }
}
