//! `tinyloop load NAME` and `tinyloop unload NAME`: live changes of a running server.
//!
//! The server starts and answers at once; `--wait` follows it here, with a bar over the bytes. What is
//! not here: loading for a subcommand of this process (`load`).

use super::admin_client::{AdminArgs, AdminClient, path_segment};
use super::output::Output;
use super::progress::bytes_bar;
use super::seconds::seconds;
use crate::error::Error;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// How often the server is asked how far it is.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Which model of which server, and whether to wait.
#[derive(Clone, Debug, clap::Args)]
pub struct TargetArgs {
    /// The model's name or alias.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Wait until it is done.
    #[arg(short, long)]
    pub wait: bool,
    /// Longest wait in seconds [default: no limit].
    #[arg(long, value_name = "SECONDS", requires = "wait", value_parser = seconds)]
    pub timeout: Option<Duration>,
    /// The server.
    #[command(flatten)]
    pub admin: AdminArgs,
}

impl TargetArgs {
    /// Asks the server, and says where the model's page is.
    fn begin(&self, what: &str, body: &Value) -> Result<(AdminClient, String, Value), Error> {
        let client = AdminClient::new(&self.admin)?;
        let path = format!("/v1/admin/models/{}", path_segment(&self.name));
        let answer = client.post(&format!("{path}/{what}"), body)?;
        Ok((client, path, answer))
    }

    /// Follows the model until it is in no state called `through`.
    fn follow(
        &self,
        client: &AdminClient,
        path: &str,
        through: &str,
        show: impl FnMut(&Value),
    ) -> Result<Value, Error> {
        watch(client, path, through, self.timeout, show)
    }
}

/// Arguments of `tinyloop load`.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// What to load.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Replicas of this load.
    #[arg(long, value_name = "COUNT")]
    pub replicas: Option<u32>,
    /// Context length per request in tokens.
    #[arg(short = 'c', long, visible_alias = "ctx-size", value_name = "TOKENS")]
    pub context_length: Option<u32>,
    /// KV pool in bytes.
    #[arg(long, value_name = "BYTES")]
    pub kv_bytes: Option<u64>,
    /// Jobs that a replica holds at once, or "auto".
    #[arg(long, value_name = "COUNT")]
    pub target_inflight: Option<String>,
    /// Any field of the model's `load_constraints`; may be given several times.
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    pub fields: Vec<String>,
}

/// Arguments of `tinyloop unload`.
#[derive(Clone, Debug, clap::Args)]
pub struct UnloadArgs {
    /// What to unload.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Seconds that running requests may take to end [default: the server's].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub drain_timeout: Option<Duration>,
}

/// Loads.
pub fn load(args: &LoadArgs) -> Result<(), Error> {
    let target = &args.target;
    let body = Value::Object(args.overrides()?);
    let (client, path, answer) = target.begin("load", &body)?;
    let mut out = Output::new();
    for model in answer["evicted"].as_array().into_iter().flatten() {
        let model = model.as_str().unwrap_or_default();
        out.line(&format!("{model}: unloading, to make room"))?;
    }
    let mut state = state_of(&answer, "state");
    if target.wait {
        let bar = bytes_bar(&format!("loading {}", target.name));
        let watched = target.follow(&client, &path, "loading", |model| {
            let load = &model["load_progress"];
            bar.set_length(load["total_bytes"].as_u64().unwrap_or(0));
            bar.set_position(load["loaded_bytes"].as_u64().unwrap_or(0));
        });
        bar.finish_and_clear();
        let model = watched?;
        state = state_of(&model, "runtime_state");
        if let Some(why) = model["last_error"].as_str() {
            return Err(Error::Other(format!("{}: {why}", target.name)));
        }
        if state != "loaded" {
            return Err(Error::Other(format!(
                "{}: it is {state} again",
                target.name
            )));
        }
    }
    out.line(&format!("{}: {state}", target.name))?;
    out.finish()
}

/// Unloads.
pub fn unload(args: &UnloadArgs) -> Result<(), Error> {
    let target = &args.target;
    let body = match args.drain_timeout {
        Some(most) => json!({"drain_timeout_s": most.as_secs_f64()}),
        None => json!({}),
    };
    let (client, path, answer) = target.begin("unload", &body)?;
    let mut state = state_of(&answer, "state");
    if target.wait {
        let model = target.follow(&client, &path, "unloading", |_| {})?;
        state = state_of(&model, "runtime_state");
        if state != "unloaded" {
            return Err(Error::Other(format!(
                "{}: it is {state} again",
                target.name
            )));
        }
    }
    let mut out = Output::new();
    out.line(&format!("{}: {state}", target.name))?;
    out.finish()
}

fn state_of(answer: &Value, field: &str) -> String {
    answer[field].as_str().unwrap_or("unknown").to_owned()
}

impl LoadArgs {
    fn overrides(&self) -> Result<Map<String, Value>, Error> {
        let named = [
            ("replicas", self.replicas.map(Value::from)),
            ("context_length", self.context_length.map(Value::from)),
            ("kv_bytes", self.kv_bytes.map(Value::from)),
            (
                "target_inflight",
                self.target_inflight.as_deref().map(json_or_text),
            ),
        ];
        let named = named.into_iter();
        let named = named.filter_map(|(field, value)| Some((field.to_owned(), value?)));
        let mut all: Map<String, Value> = named.collect();
        for given in &self.fields {
            let Some((field, value)) = given.split_once('=') else {
                return Err(Error::Usage(format!(
                    "--set {given}: it must be FIELD=VALUE"
                )));
            };
            if all.insert(field.to_owned(), json_or_text(value)).is_some() {
                return Err(Error::Usage(format!("{field} is given twice")));
            }
        }
        Ok(all)
    }
}

/// Numbers and switches are JSON; whatever is not is text.
fn json_or_text(value: &str) -> Value {
    serde_json::from_str(value).unwrap_or_else(|_| Value::from(value))
}

/// Asks for the model until it is in another state than `state`; the last answer.
fn watch(
    client: &AdminClient,
    path: &str,
    state: &str,
    patience: Option<Duration>,
    mut show: impl FnMut(&Value),
) -> Result<Value, Error> {
    let started = Instant::now();
    loop {
        let model = client.get(path)?;
        show(&model);
        if model["runtime_state"].as_str() != Some(state) {
            return Ok(model);
        }
        if patience.is_some_and(|patience| started.elapsed() >= patience) {
            let text = format!("it is still {state}; 'tinyloop models' tells how far it is");
            return Err(Error::Other(text));
        }
        std::thread::sleep(ASK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        load: LoadArgs,
    }

    fn overrides(words: &[&str]) -> Result<Map<String, Value>, Error> {
        let line = Line::parse_from([&["load", "m"], words].concat());
        line.load.overrides()
    }

    #[test]
    fn overrides_are_json_or_text() {
        let found = overrides(&[
            "--target-inflight",
            "auto",
            "--replicas",
            "2",
            "--set",
            "threads=4",
            "--set",
            "a=x y",
            "--set",
            "b=true",
        ]);
        let expected =
            json!({"replicas": 2, "target_inflight": "auto", "threads": 4, "a": "x y", "b": true});
        assert_eq!(found.map(Value::Object).ok(), Some(expected));
        assert_eq!(overrides(&["--set", "threads"]).unwrap_err().exit_code(), 2);
        let twice = overrides(&["--replicas", "2", "--set", "replicas=3"]);
        assert!(twice.unwrap_err().to_string().contains("twice"));
    }
}
