//! Jobs with a channel for a sink, runtimes under test, a `tinyloop serve` of this build.

use crossbeam_channel::{Receiver, Sender, unbounded};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tinyloop::config::{LlamaServerConfig, OpenaiRemoteConfig, VllmServeConfig};
use tinyloop::request::{
    ConsumerGone, FinishReason, GenerationEvent, GenerationRequest, Job, JobSink, RequestError,
    RequestId, UpstreamCall, UpstreamPrompt, Usage,
};
use tinyloop::runtime::Runtime;

/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

struct ChannelSink(Sender<GenerationEvent>);

impl JobSink for ChannelSink {
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone> {
        self.0.send(event).map_err(|_| ConsumerGone)
    }
}

/// A submitted job and what it reports.
pub(crate) struct Submitted {
    pub(crate) id: RequestId,
    pub(crate) events: Receiver<GenerationEvent>,
}

/// How a job ended, with everything before.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) text: String,
    pub(crate) n_pieces: usize,
    pub(crate) end: Result<(FinishReason, Usage), RequestError>,
}

impl Submitted {
    /// The next event, which must come.
    #[track_caller]
    pub(crate) fn next(&self) -> GenerationEvent {
        let event = self.events.recv_timeout(PATIENCE);
        event.expect("the job reports something in time")
    }

    /// Waits for the first piece of the answer.
    #[track_caller]
    pub(crate) fn first_piece(&self) {
        let event = self.next();
        let is_piece = matches!(
            event,
            GenerationEvent::Text { .. } | GenerationEvent::Token { .. }
        );
        assert!(is_piece, "{event:?}");
    }

    /// Reads to the end, checking the order of events and that nothing follows.
    #[track_caller]
    pub(crate) fn finish(self) -> Ended {
        let (mut text, mut n_pieces) = (String::new(), 0);
        loop {
            let end = match self.next() {
                GenerationEvent::Text { text: piece, .. } => {
                    text.push_str(&piece);
                    n_pieces += 1;
                    continue;
                }
                GenerationEvent::Token { .. } | GenerationEvent::Part(_) => {
                    n_pieces += 1;
                    continue;
                }
                GenerationEvent::PromptLogprobs(_) => {
                    assert_eq!(n_pieces, 0, "prompt log-probabilities come first");
                    continue;
                }
                GenerationEvent::Embedding(vector) => panic!("nobody asked for {vector:?}"),
                GenerationEvent::Finished { reason, usage } => Ok((reason, usage)),
                GenerationEvent::Failed(error) => Err(error),
            };
            // The sink is dropped after the end: the channel closes, and nothing is in it.
            let after = self.events.recv_timeout(PATIENCE);
            assert!(after.is_err(), "an event behind the end: {after:?}");
            return Ended {
                text,
                n_pieces,
                end,
            };
        }
    }
}

pub(crate) fn submit(runtime: &dyn Runtime, request: GenerationRequest) -> Submitted {
    let (sender, events) = unbounded(); // bounded by the answer's length
    let id = request.id;
    runtime.submit(Job {
        request: Arc::new(request),
        sink: Box::new(ChannelSink(sender)),
    });
    Submitted { id, events }
}

/// A chat of one message, with further fields of the body.
pub(crate) fn chat(text: &str, fields: Value) -> GenerationRequest {
    let message = json!({"role": "user", "content": text});
    forwarded(UpstreamPrompt::Messages(vec![message]), fields)
}

pub(crate) fn forwarded(prompt: UpstreamPrompt, fields: Value) -> GenerationRequest {
    let fields: Map<String, Value> = fields.as_object().expect("an object").clone();
    let max_tokens = fields.get("max_tokens").and_then(Value::as_u64);
    let max_tokens = max_tokens.map_or(u32::MAX, |most| most as u32);
    let mut request = GenerationRequest::new(Vec::new(), max_tokens);
    request.upstream = Some(Arc::new(UpstreamCall {
        prompt,
        fields,
        priority: 0,
        may_leave: true,
    }));
    request
}

/// A chat that makes an answer of five tokens.
pub(crate) fn five_tokens(text: &str) -> GenerationRequest {
    chat(text, json!({"max_tokens": 5, "temperature": 0}))
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::yield_now();
    }
}

pub(crate) fn stand_in() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/stand_in_server.py")
}

/// A table of the configuration as it is written.
fn table<T: serde::de::DeserializeOwned>(text: &str) -> T {
    toml::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The stand-in as vLLM; `extra` are further keys.
pub(crate) fn vllm(extra: &str) -> VllmServeConfig {
    let binary = stand_in().display().to_string();
    table(&format!(
        "binary = {binary:?}\nmodel = \"org/model\"\n{extra}\n"
    ))
}

/// The stand-in as llama-server.
pub(crate) fn llama(extra: &str) -> LlamaServerConfig {
    let binary = stand_in().display().to_string();
    table(&format!(
        "binary = {binary:?}\nfile = \"model.gguf\"\n{extra}\n"
    ))
}

/// A real llama-server with the demo model, where `TINYLOOP_LLAMA_SERVER` names one: `keys` of its table,
/// further `args` as a list's inside. See `tests/scripts/llama_server.sh`.
pub(crate) fn real_llama(keys: &str, args: &str) -> Option<LlamaServerConfig> {
    let Ok(binary) = std::env::var("TINYLOOP_LLAMA_SERVER") else {
        eprintln!("skipped: TINYLOOP_LLAMA_SERVER names no llama-server (make test-llama-server)");
        return None;
    };
    let folder = Path::new(&binary).parent().expect("it lies in a folder");
    let mut config = llama(&format!(
        "{keys}[process]\nlibrary_path = {folder:?}\nextra_args = [\"--threads\", \"1\"{args}]\n"
    ));
    let model = "target/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    config.file = Path::new(env!("CARGO_MANIFEST_DIR")).join(model);
    config.binary = binary.into();
    Some(config)
}

/// A remote server at an address.
pub(crate) fn remote(address: SocketAddr, extra: &str) -> OpenaiRemoteConfig {
    table(&format!(
        "base_url = \"http://{address}/v1\"\nmodel = \"there\"\n{extra}\n"
    ))
}

/// A running `tinyloop serve`; killed when dropped.
pub(crate) struct Serve {
    pub(crate) process: Child,
    pub(crate) address: SocketAddr,
    folder: PathBuf,
}

impl Serve {
    /// With this configuration, and variables in its environment.
    pub(crate) fn start(name: &str, config: &str, variables: &[(&str, &str)]) -> Self {
        let folder = format!("tinyloop-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).expect("the temporary folder takes it");
        let path = folder.join("tinyloop.toml");
        std::fs::write(&path, config).expect("the file can be written");
        let log = std::fs::File::create(folder.join("log")).expect("the folder takes it");
        let mut process = Command::new(env!("CARGO_BIN_EXE_tinyloop"))
            .args(["serve", "--port", "0", "--management-port", "0", "--config"])
            .arg(&path)
            .stderr(log)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        let stdout = process.stdout.as_mut().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("text");
        let address = line.trim().strip_prefix("tinyloop listens on http://");
        let address = address.and_then(|address| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}"));
        let serve = Self {
            process,
            address,
            folder,
        };
        wait_for("the models", || {
            crate::client::Client::connect(address).get("/ready").status == 200
        });
        serve
    }

    /// What it has written on standard error so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).expect("text")
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
