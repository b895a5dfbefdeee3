//! The real binary: ports before loading, signals, the drain, exit codes, few descriptors.
//!
//! Each test runs `tinyloop serve` on a free port with the committed tiny model. Nothing sleeps; what
//! must happen is waited for with a deadline.

#[path = "http/client.rs"]
#[expect(dead_code, reason = "the HTTP tests use more of it")]
mod client;

#[path = "serve/access.rs"]
mod access;

use client::Client;
use serde_json::json;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf")
}

/// The tiny model with a context so long that an answer which fills it takes minutes.
fn endless() -> PathBuf {
    let mut bytes = std::fs::read(tiny()).expect("the committed model");
    let key = b"llama.context_length";
    let found = bytes.windows(key.len()).position(|window| window == key);
    // The key is followed by its kind (u32) and the value.
    let value = found.expect("the key is there") + key.len() + 4;
    bytes[value..value + 4].copy_from_slice(&(1_u32 << 18).to_le_bytes());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("endless.gguf");
    // Written aside first: tests run at the same time and share the file.
    let aside = path.with_extension(format!("{:?}", std::thread::current().id()));
    std::fs::write(&aside, bytes).expect("the folder is there");
    std::fs::rename(&aside, &path).expect("the same folder");
    path
}

/// A running `tinyloop serve`; killed when dropped.
struct Serve {
    child: Child,
    address: SocketAddr,
}

fn command(model: &Path, extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tinyloop"));
    command
        .args([
            "serve",
            "--threads",
            "1",
            "--port",
            "0",
            "--management-port",
            "0",
        ])
        .arg("--model")
        .arg(model)
        .args(extra)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

impl Serve {
    fn start(command: &mut Command) -> Self {
        Self::start_with(command.stderr(Stdio::null()))
    }

    /// Whatever becomes of its standard error.
    fn start_with(command: &mut Command) -> Self {
        let mut child = command.spawn().expect("the binary starts");
        let stdout = child.stdout.as_mut().expect("piped");
        let mut lines = BufReader::new(stdout).lines();
        let line = lines.next().expect("a line").expect("text");
        // The address comes first; the models stand there when they are loaded.
        let is_loaded = lines.any(|line| line.expect("text").starts_with("models: "));
        assert!(is_loaded, "the models were not loaded");
        let address = line.trim().strip_prefix("tinyloop listens on http://");
        let address = address.and_then(|address| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}"));
        Self { child, address }
    }

    fn client(&self) -> Client {
        Client::connect(self.address)
    }

    /// A stream that has shown its first event.
    fn stream(&self, max_tokens: u32) -> Client {
        let body =
            json!({"prompt": "a", "max_tokens": max_tokens, "ignore_eos": true, "stream": true});
        let mut client = self.client();
        client.send("POST", "/v1/completions", &[], &body.to_string());
        assert_eq!(client.read_head().status, 200);
        assert!(client.read_chunk().is_some());
        client
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("sh")
            .args(["-c", &format!("kill -{name} {}", self.child.id())])
            .status();
        assert!(sent.expect("a shell").success());
    }

    #[track_caller]
    fn exit(&mut self) -> ExitStatus {
        exit(&mut self.child)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn exit(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status;
        }
        assert!(Instant::now() < deadline, "the process does not end");
        std::thread::yield_now();
    }
}

/// Runs a start that must fail; returns exit code, standard output and standard error.
fn failure(command: &mut Command) -> (Option<i32>, String, String) {
    let mut child = command.spawn().expect("the binary starts");
    let status = exit(&mut child);
    let (mut out, mut err) = (String::new(), String::new());
    child
        .stdout
        .expect("piped")
        .read_to_string(&mut out)
        .expect("text");
    child
        .stderr
        .expect("piped")
        .read_to_string(&mut err)
        .expect("text");
    (status.code(), out, err)
}

#[test]
fn a_port_in_use_is_told_before_anything_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let port = taken.local_addr().expect("bound").port().to_string();
    // The model does not exist: had the load come first, its error would be the one.
    for flag in ["--port", "--management-port"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tinyloop"));
        let other = if flag == "--port" {
            "--management-port"
        } else {
            "--port"
        };
        command
            .args([
                "serve",
                "--model",
                "/does/not/exist.gguf",
                flag,
                &port,
                other,
                "0",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (code, out, err) = failure(&mut command);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
        assert!(err.contains(&port) && !err.contains("exist.gguf"), "{err}");
    }
}

#[test]
fn a_failed_load_ends_the_process_without_an_invitation() {
    let (code, out, err) = failure(&mut command(Path::new("/does/not/exist.gguf"), &[]));
    assert_eq!(code, Some(1));
    // The addresses were bound before; no model is promised.
    assert!(
        out.starts_with("tinyloop listens on") && !out.contains("models: "),
        "{out}"
    );
    assert!(err.contains("exist.gguf"), "{err}");
}

#[test]
fn while_models_load_the_server_answers_and_a_signal_ends_it() {
    // Hundreds of models take seconds to load, far longer than the few answers here.
    let names: Vec<String> = (0..400).map(|index| format!("m{index}")).collect();
    let mut command = command(&tiny(), &["--model-name", "first"]);
    for name in &names {
        command
            .arg("--model")
            .arg(tiny())
            .args(["--model-name", name]);
    }
    let mut child = command.spawn().expect("the binary starts");
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let address: SocketAddr = loop {
        let line = lines
            .next()
            .expect("it says where it listens")
            .expect("text");
        if let Some(start) = line.find("127.0.0.1:") {
            let address =
                line[start..].split(|c: char| c != ':' && c != '.' && !c.is_ascii_digit());
            break address
                .into_iter()
                .next()
                .and_then(|text| text.parse().ok())
                .expect("an address");
        }
    };
    let mut client = Client::connect(address);
    assert_eq!(client.get("/health").status, 200);
    let ready = client.get("/ready");
    assert_eq!(
        (ready.status, ready.json()["status"].as_str()),
        (503, Some("loading"))
    );
    let body = |model: &str| json!({"model": model, "prompt": "a", "max_tokens": 1});
    let answer = client.post("/v1/completions", &body("m399"));
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (503, Some("model_loading"))
    );
    assert_eq!(client.post("/v1/completions", &body("other")).status, 404);

    let drainer = std::thread::spawn(move || lines.for_each(drop)); // or the log would block it
    let mut server = Serve { child, address };
    server.signal("TERM");
    assert_eq!(server.exit().code(), Some(0));
    let mut out = String::new();
    let stdout = server.child.stdout.as_mut().expect("piped");
    stdout.read_to_string(&mut out).expect("text");
    assert!(
        !out.contains("models: "),
        "it never said that it was ready: {out}"
    );
    drainer.join().expect("the log ended");
}

#[test]
fn a_signal_to_an_idle_server_ends_it_well() {
    for signal in ["TERM", "INT"] {
        let mut server = Serve::start(&mut command(&tiny(), &[]));
        assert_eq!(server.client().get("/ready").status, 200);
        server.signal(signal);
        assert_eq!(server.exit().code(), Some(0), "{signal}");
    }
}

#[test]
fn case_25_what_runs_at_the_signal_is_finished() {
    let mut server = Serve::start(&mut command(&tiny(), &[]));
    let mut stream = server.stream(900);
    server.signal("TERM");
    let mut last = Vec::new();
    while let Some(chunk) = stream.read_chunk() {
        last = chunk;
    }
    assert_eq!(last, b"data: [DONE]\n\n");
    assert_eq!(server.exit().code(), Some(0));
}

/// Waits until the drain has begun.
fn wait_for_drain(server: &Serve) {
    let deadline = Instant::now() + PATIENCE;
    while server.client().get("/ready").status != 503 {
        assert!(Instant::now() < deadline, "the drain does not begin");
    }
}

#[test]
fn case_25_what_outlives_the_drain_ends_with_an_error_event() {
    let model = endless();
    let extra = ["--ctx-size", "262144", "--drain-timeout", "2"];
    let mut server = Serve::start(&mut command(&model, &extra));
    let mut stream = server.stream(200_000);
    server.signal("TERM");
    wait_for_drain(&server);
    let body = json!({"prompt": "a", "max_tokens": 1});
    let refused = server.client().post("/v1/completions", &body);
    assert_eq!(
        (refused.status, refused.header("connection")),
        (503, Some("close"))
    );
    assert_eq!(refused.json()["error"]["code"], "shutting_down");
    let mut last = Vec::new();
    while let Some(chunk) = stream.read_chunk() {
        last = chunk; // the loop ends with the last chunk of the body: it was not cut
    }
    let last = String::from_utf8_lossy(&last);
    assert!(
        last.starts_with("data: {\"error\":") && last.contains("shutting_down"),
        "{last}"
    );
    assert_eq!(server.exit().code(), Some(0));
}

#[test]
fn case_25_a_second_signal_ends_the_process_at_once() {
    let model = endless();
    let extra = ["--ctx-size", "262144", "--drain-timeout", "600"];
    let mut server = Serve::start(&mut command(&model, &extra));
    let _stream = server.stream(200_000);
    server.signal("TERM");
    wait_for_drain(&server);
    server.signal("INT");
    assert_eq!(server.exit().code(), Some(1));
}

#[test]
fn with_few_descriptors_the_idle_make_room_and_service_resumes() {
    let binary = env!("CARGO_BIN_EXE_tinyloop");
    let script = "ulimit -n 110; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            script,
            binary,
            "serve",
            "--threads",
            "1",
            "--port",
            "0",
        ])
        .args(["--http-workers", "4", "--no-management", "--model"])
        .arg(tiny())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let server = Serve::start(&mut command);
    // Far more than it may hold: the longest idle are closed for the newest.
    let mut clients = Vec::new();
    for _ in 0..200 {
        let mut client = server.client();
        assert_eq!(client.get("/health").status, 200);
        clients.push(client);
    }
    drop(clients);
    // Half heads cannot be evicted: who comes then is told, and served when they have gone.
    let mut stuck: Vec<Client> = Vec::new();
    for _ in 0..200 {
        let mut client = server.client();
        client.send_raw("GET /health HTTP/1.1\r\nHo");
        stuck.push(client);
    }
    let full = server.client().read_answer();
    assert_eq!((full.status, full.header("retry-after")), (503, Some("1")));
    drop(stuck);
    let deadline = Instant::now() + PATIENCE;
    let body = json!({"prompt": "a", "max_tokens": 1});
    while server.client().post("/v1/completions", &body).status != 200 {
        assert!(Instant::now() < deadline, "it does not serve again");
    }
}

#[test]
fn without_a_model_the_one_inside_the_program_answers() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tinyloop"));
    command
        .args(["serve", "--port", "0", "--no-management"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let server = Serve::start(&mut command);
    let models = server.client().get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "tinyloop-3m");

    let body =
        json!({"prompt": "In the beginning", "max_tokens": 12, "temperature": 0, "loops": 2});
    let answer = server.client().post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.json());
    let text = answer.json()["choices"][0]["text"].clone();
    assert!(text.as_str().expect("a text").len() > 12, "{text}");

    let message = json!({"role": "user", "content": "Tell me a story."});
    let body = json!({"model": "tinyloop-3m@12", "messages": [message], "max_tokens": 12});
    let answer = server.client().post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.json());
    let text = answer.json()["choices"][0]["message"]["content"].clone();
    assert!(text.as_str().expect("a text").len() > 12, "{text}");

    let body = json!({"prompt": "In", "max_tokens": 1, "loops": 13});
    assert_eq!(server.client().post("/v1/completions", &body).status, 400);
}
