//! The definition of a model on the admin page has every key of its configuration, and no secret.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tinyloop::config::{Config, ModelConfig, ModelSource, OpenaiRemoteConfig};
use tinyloop::pool::definition::definition;

/// The tables of the five kinds of models, each with what it cannot do without.
const KINDS: [(&str, &str); 5] = [
    ("file", "file = \"x.gguf\""),
    ("fake", "fake = { max_inflight = 3 }"),
    (
        "openai_remote",
        "openai_remote = { base_url = \"http://h/v1\", model = \"m\" }",
    ),
    ("llama_server", "llama_server = { file = \"x.gguf\" }"),
    ("vllm_serve", "vllm_serve = { model = \"m\" }"),
];

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).expect("the folder can be made");
        Self(path)
    }

    fn load(&self, text: &str) -> Result<Config, String> {
        let path = self.0.join("c.toml");
        std::fs::write(&path, text).expect("the file can be written");
        Config::load(&path).map_err(|error| error.to_string())
    }

    /// The keys of a table, which the error about an unknown one lists.
    fn keys(&self, table: &str, model: &str) -> Vec<String> {
        let text = format!("[models.m]\n{model}\n[models.m{table}]\nno_such_key = 1\n");
        // An inline table cannot be opened again: the key goes into it.
        let text = match table {
            "" => format!("[models.m]\n{model}\nno_such_key = 1\n"),
            ".executor" | ".engine" => text,
            _ => format!("[models.m{table}]\nno_such_key = 1\n"),
        };
        let error = self.load(&text).expect_err("the key is unknown");
        let (_, known) = error
            .split_once("(known here: ")
            .expect("it lists the keys");
        let known = known.trim_end_matches(')');
        known.split(", ").map(str::to_owned).collect()
    }
}

#[test]
fn every_key_of_every_kind_of_model_is_in_its_definition() {
    let folder = Folder::new("definition");
    for (kind, model) in KINDS {
        let text = format!("[models.m]\n{model}\n");
        let config = folder.load(&text).expect("valid");
        let shown = definition(&config.models[0]);
        let sources: Vec<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
        let mut n_keys = 0;
        let mut check = |table: &str, at: &Value| {
            for key in folder.keys(table, model) {
                let is_other_source = sources.contains(&key.as_str()) && key != kind;
                // Engines are of files only.
                if is_other_source || (kind != "file" && table.is_empty() && key == "engine") {
                    continue;
                }
                assert!(
                    at.get(&key).is_some(),
                    "{kind}{table}: {key} is not in {at}"
                );
                n_keys += 1;
            }
        };
        check("", &shown);
        check(".executor", &shown["executor"]);
        match kind {
            "file" => {
                check(".engine", &shown["engine"]);
                check(".engine.loops", &shown["engine"]["loops"]);
            }
            "llama_server" | "vllm_serve" => {
                check(&format!(".{kind}"), &shown[kind]);
                check(&format!(".{kind}.process"), &shown[kind]["process"]);
                check(&format!(".{kind}.limits"), &shown[kind]["limits"]);
            }
            "openai_remote" => {
                check(".openai_remote", &shown[kind]);
                check(".openai_remote.limits", &shown[kind]["limits"]);
            }
            _ => check(".fake", &shown[kind]),
        }
        assert!(n_keys > 20, "{kind}: only {n_keys} keys were looked for");
    }
}

#[test]
fn values_are_those_of_the_configuration_in_their_own_kinds() {
    let folder = Folder::new("definition-values");
    let text = "[models.m]\naliases = [\"n\"]\nidle_unload_s = 1.5\n\
        [models.m.executor]\ntarget_inflight = 7\nqueue_timeout_ms = 250\n\
        [models.m.openai_remote]\nbase_url = \"http://h/v1\"\nmodel = \"there\"\n\
        allow_remote = \"always\"\ndialect = \"vllm\"\nca_file = \"ca.pem\"\n\
        limits = { connect_timeout_s = 0.5 }\n";
    let config = folder.load(text).expect("valid");
    let shown = definition(&config.models[0]);
    assert_eq!(shown["aliases"], json!(["n"]));
    assert_eq!(shown["idle_unload_s"], 1.5);
    assert_eq!(shown["executor"]["target_inflight"], 7, "a number, no text");
    assert_eq!(shown["executor"]["queue_timeout_ms"], 250);
    let remote = &shown["openai_remote"];
    assert_eq!(remote["allow_remote"], "always");
    assert_eq!(remote["dialect"], "vllm");
    assert_eq!(remote["limits"]["connect_timeout_s"], 0.5);
    let ca_file = remote["ca_file"].as_str().expect("a path");
    assert!(ca_file.ends_with("/ca.pem"), "{ca_file}");
    let auto = "[models.m]\nfile = \"x\"\nexecutor = { target_inflight = \"auto\" }\n";
    let config = folder.load(auto).expect("valid");
    let shown = definition(&config.models[0]);
    assert_eq!(shown["executor"]["target_inflight"], "auto");
}

#[test]
fn definitions_hold_no_secrets() {
    let remote: OpenaiRemoteConfig = toml::from_str(
        "base_url = \"https://user:pass@host/v1?key=abc\"\nmodel = \"m\"\napi_key_env = \"THE_KEY\"\n\
         health_path = \"/up?key=abc\"",
    )
    .expect("the shape is right");
    let config = ModelConfig::new("r", ModelSource::OpenaiRemote(remote));
    let shown = definition(&config);
    let remote = &shown["openai_remote"];
    assert_eq!(remote["base_url"], "https://host/v1");
    assert_eq!(remote["health_path"], "/up");
    assert_eq!(remote["api_key_env"], "THE_KEY");
    let child = toml::from_str(
        "file = \"m.gguf\"\n[process]\nextra_args = [\"--api-key\", \"abc\", \"--hf-token=abc\", \"-v\"]",
    )
    .expect("the shape is right");
    let config = ModelConfig::new("c", ModelSource::LlamaServer(child));
    let args = &definition(&config)["llama_server"]["process"]["extra_args"];
    assert_eq!(*args, json!(["--api-key", "***", "--hf-token=***", "-v"]));
}
