//! Child processes: how they start, what they are asked, how they end.

use crate::client::Client;
use crate::support::{PATIENCE, chat, llama, remote, stand_in, submit, vllm, wait_for};
use serde_json::{Value, json};
use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use tinyloop::config::{ModelConfig, ModelSource};
use tinyloop::pool::{LoadOverride, Pool, RuntimeState};
use tinyloop::request::{GenerationRequest, RequestError, UpstreamCall};
use tinyloop::runtime::child::{self, Child, ChildSpec};
use tinyloop::runtime::upstream::UpstreamRuntime;
use tinyloop::runtime::{Runtime, llama_server, openai_remote, vllm_serve};
use tinyloop::scheduler::Metrics;

/// Where a child of ours listens.
fn address(runtime: &UpstreamRuntime) -> SocketAddr {
    let pid = runtime.child_pid().expect("it runs");
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("it is there");
    let mut words = line.split('\0').skip_while(|word| *word != "--port");
    let port = words.nth(1).and_then(|port| port.parse().ok());
    SocketAddr::from(([127, 0, 0, 1], port.expect("it was told a port")))
}

/// What the stand-in has seen.
fn seen(runtime: &UpstreamRuntime) -> Value {
    Client::connect(address(runtime)).get("/stand-in").json()
}

fn is_there(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|text| !text.contains(") Z "))
}

fn with_priority(request: GenerationRequest, priority: i32) -> GenerationRequest {
    let call = request.upstream.as_deref().expect("it is forwarded");
    let call = UpstreamCall {
        priority,
        ..call.clone()
    };
    GenerationRequest {
        upstream: Some(Arc::new(call)),
        ..request
    }
}

#[test]
fn vllm_tells_its_context_and_is_told_negated_priorities() {
    let config = vllm(
        "max_num_seqs = 5\nmax_model_len = 777\n[process]\nextra_args = [\"--start-delay\", \"0.3\"]\n",
    );
    let runtime = vllm_serve::start("public", &config, 0).expect("starts");
    let capability = runtime.capability();
    assert_eq!(
        (capability.max_inflight, capability.context_length),
        (5, 777)
    );
    assert!(runtime.tokenizer().is_none() && !runtime.asks_consent());
    let job = with_priority(chat("cached 2", json!({"temperature": 0.5})), 7);
    let (_, usage) = submit(&runtime, job).finish().end.expect("ends well");
    assert_eq!((usage.cached_tokens, usage.completion_tokens), (2, 5));
    let body = &seen(&runtime)["bodies"][0];
    assert_eq!(
        (&body["priority"], &body["model"]),
        (&json!(-7), &json!("public"))
    );
    assert_eq!(body["temperature"], 0.5);
    let pid = runtime.child_pid().expect("it runs");
    runtime.shutdown();
    assert!(!is_there(pid));
    assert_eq!(runtime.child_pid(), None);
}

#[test]
fn llama_server_tells_its_slots_and_its_cached_tokens() {
    let config = llama("slots = 2\n[process]\nextra_args = [\"--start-delay\", \"0.3\"]\n");
    let runtime = llama_server::start("m", &config, 0).expect("starts");
    let capability = runtime.capability();
    assert_eq!(
        (capability.max_inflight, capability.context_length),
        (2, 2048)
    );
    let job = with_priority(chat("cached 3", json!({})), 7);
    let (_, usage) = submit(&runtime, job).finish().end.expect("ends well");
    assert_eq!(usage.cached_tokens, 3);
    assert_eq!(seen(&runtime)["bodies"][0]["priority"], Value::Null);
}

#[test]
fn a_cancelled_job_is_aborted_there() {
    let runtime = vllm_serve::start("m", &vllm(""), 0).expect("starts");
    for prompt in ["tokens endless pause 0.01", "silent"] {
        let job = submit(&runtime, chat(prompt, json!({})));
        wait_for("it to run there", || seen(&runtime)["running"] == 1);
        runtime.cancel(job.id);
        assert_eq!(job.finish().end, Err(RequestError::Cancelled));
        wait_for("the abort", || seen(&runtime)["running"] == 0);
    }
    assert_eq!(seen(&runtime)["aborted"], 2);
}

#[test]
fn a_crash_loses_the_replica_for_good() {
    let runtime = vllm_serve::start("m", &vllm(""), 0).expect("starts");
    let neighbour = submit(&runtime, chat("tokens endless pause 0.01", json!({})));
    neighbour.first_piece();
    let ended = submit(&runtime, chat("crash", json!({}))).finish();
    assert_eq!(ended.text, "w0 w1 ");
    assert!(
        matches!(ended.end, Err(RequestError::ReplicaLost(_))),
        "{ended:?}"
    );
    assert!(matches!(
        neighbour.finish().end,
        Err(RequestError::ReplicaLost(_))
    ));
    wait_for("the death", || !runtime.status().alive);
    let late = submit(&runtime, chat("hello", json!({}))).finish();
    let Err(RequestError::ReplicaLost(why)) = late.end else {
        panic!("{late:?}");
    };
    assert!(!why.is_empty());
}

#[test]
fn faults_of_one_request_leave_the_others_alone() {
    let runtime = vllm_serve::start("m", &vllm("limits = { failures_max = 2 }\n"), 0);
    let runtime = runtime.expect("starts");
    let neighbour = submit(&runtime, chat("tokens endless pause 0.01", json!({})));
    for (prompt, text) in [
        ("error", "w0 w1 "),
        ("early tokens 2", "w0 w1 "),
        ("broken", "w0 w1 "),
        ("status 400", ""),
        ("status 500", ""),
        ("status 503", ""),
    ] {
        neighbour.first_piece(); // signs of life, between failures
        let ended = submit(&runtime, chat(prompt, json!({}))).finish();
        assert!(ended.end.is_err(), "{prompt}");
        assert_eq!(ended.text, text, "{prompt}");
    }
    assert!(runtime.status().alive);
    runtime.cancel(neighbour.id);
}

#[test]
fn failed_starts_say_why_and_leave_nothing() {
    let crash = vllm("[process]\nextra_args = [\"--crash-at-start\"]\n");
    let why = vllm_serve::start("m", &crash, 0).err().expect("it crashes");
    assert!(
        why.contains("exit status: 7") && why.contains("out of memory"),
        "{why}"
    );
    let slow = "[process]\nstart_timeout_s = 0.2\nextra_args = [\"--start-delay\", \"1000\"]\n";
    let why = vllm_serve::start("m", &vllm(slow), 0)
        .err()
        .expect("too slow");
    assert!(why.contains("not ready after 0.2 s"), "{why}");
    let mut missing = llama("");
    missing.binary = "/no/such/llama-server".into();
    let why = llama_server::start("m", &missing, 0)
        .err()
        .expect("there is none");
    assert!(why.contains("/no/such/llama-server"), "{why}");
}

/// Process ids whose command line has this word.
fn processes_with(word: &str) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").expect("there is a /proc");
    let pids = all.flatten().filter_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read_to_string(process.path().join("cmdline")).ok()?;
        let has_word = line.split('\0').any(|found| found == word);
        (has_word && is_there(pid)).then_some(pid)
    });
    pids.collect()
}

/// Whoever waits for a child to start is asked whether it is still wanted.
#[test]
fn a_start_that_nobody_wants_any_more_is_given_up() {
    let mark = format!("unwanted-{}", std::process::id());
    let never = format!("[process]\nextra_args = [\"--start-delay\", \"1000\", \"--{mark}\"]\n");
    let word = format!("--{mark}");
    let n_asked = Cell::new(0);
    let give_up = || {
        n_asked.set(n_asked.get() + 1);
        n_asked.get() > 3
    };
    let given_up = "its start was given up";
    let why = vllm_serve::start_until("m", &vllm(&never), 0, &give_up).err();
    assert_eq!(why.as_deref(), Some(given_up));
    assert_eq!(processes_with(&word), Vec::<u32>::new(), "it was stopped");
    n_asked.set(0);
    let why = llama_server::start_until("m", &llama(&never), 0, &give_up).err();
    assert_eq!(why.as_deref(), Some(given_up));
    assert_eq!(processes_with(&word), Vec::<u32>::new(), "it was stopped");
}

/// The same through the pool: an unload calls the load off, and the child goes at once.
#[test]
fn an_unload_calls_the_start_of_a_child_off() {
    let mark = format!("called-off-{}", std::process::id());
    let never = format!("[process]\nextra_args = [\"--start-delay\", \"1000\", \"--{mark}\"]\n");
    let word = format!("--{mark}");
    let pool = Pool::new(Arc::new(Metrics::new()));
    let source = ModelSource::VllmServe(vllm(&never));
    pool.add(ModelConfig::new("child", source))
        .expect("the name is new");
    pool.load("child", &LoadOverride::default())
        .expect("there is room");
    wait_for("the child", || !processes_with(&word).is_empty());
    pool.unload("child", None).expect("it is loading");
    let state = pool.wait_settled("child", PATIENCE);
    assert_eq!(state, Some(RuntimeState::Unloaded));
    assert_eq!(processes_with(&word), Vec::<u32>::new());
}

/// A remote server with a certificate of its own: trusted when its authority is named, else not.
#[test]
fn tls_is_checked() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls");
    let port = child::free_port().expect("there is one");
    let spec = ChildSpec {
        name: "tls".to_owned(),
        program: stand_in(),
        arguments: ["serve", "org/m", "--port", &port.to_string(), "--tls"]
            .map(str::to_owned)
            .into_iter()
            .chain([folder.join("server.pem").display().to_string()])
            .collect(),
        library_path: None,
        stop_timeout: PATIENCE,
    };
    let server = Child::start(&spec).expect("starts");
    let listens = || TcpStream::connect(("127.0.0.1", port)).is_ok();
    server.wait_ready(PATIENCE, listens).expect("is ready");
    let config = |extra: &str| {
        let mut config = remote(SocketAddr::from(([127, 0, 0, 1], port)), extra);
        config.base_url = Some(format!("https://localhost:{port}/v1"));
        config
    };
    let authority = folder.join("authority.pem");
    let trusting = config(&format!("ca_file = {authority:?}"));
    let runtime = openai_remote::open("far", &trusting, 0).expect("it is well");
    let ended = submit(&runtime, chat("tokens 2", json!({}))).finish();
    assert_eq!(ended.text, "w0 w1 ");
    let why = openai_remote::open("far", &config(""), 0).err();
    let why = why.expect("nobody vouches for it");
    assert!(why.contains("TLS"), "{why}");
    let server_only = config(&format!("ca_file = {:?}", folder.join("missing.pem")));
    let why = openai_remote::open("far", &server_only, 0).err();
    assert!(why.expect("there is no file").contains("missing.pem"));
}
