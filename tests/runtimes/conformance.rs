//! One set of checks that every runtime passes: order of events, exactly one end, cancels before and
//! while a job runs, the end of the runtime, its capability, its death.

use crate::support::{
    PATIENCE, Serve, Submitted, chat, five_tokens, forwarded, llama, real_llama, remote, submit,
    vllm, wait_for,
};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::EngineConfig;
use tinyloop::request::{
    FinishReason, GenerationEvent, GenerationRequest, RequestError, RequestId, UpstreamPrompt,
};
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::runtime::native::{BackendKind, NativeRuntime};
use tinyloop::runtime::upstream::UpstreamRuntime;
use tinyloop::runtime::{Runtime, llama_server, openai_remote, vllm_serve};

/// A runtime under test, and how it is asked.
struct Subject {
    runtime: Arc<dyn Runtime>,
    /// Ends by itself after five tokens.
    few: fn() -> GenerationRequest,
    /// Goes on for so long that the test ends it first (or, where that is said, very long).
    endless: fn() -> GenerationRequest,
    /// Whether `endless` may end before a cancel comes: an engine that is too fast for that.
    may_outrun: bool,
    /// A request and the text that it must give: characters of several bytes, a stop string.
    texts: Vec<(GenerationRequest, String)>,
    /// Kills what is behind it.
    kill: Option<Box<dyn Fn()>>,
}

/// All checks; `make` makes the subject anew.
fn conforms(make: impl Fn() -> Subject) {
    let subject = make();
    answers(&subject);
    cancelled_while_it_runs(&subject);
    capability_is_honest(&subject);
    strangers_change_nothing(&subject);
    ends_with_the_runtime(&subject);
    let subject = make();
    dies(&subject);
}

/// An endless job that was cut.
#[track_caller]
fn is_cut(subject: &Subject, job: Submitted) {
    match job.finish().end {
        Err(RequestError::Cancelled) => {}
        Ok((FinishReason::Length, _)) if subject.may_outrun => {}
        other => panic!("{other:?}"),
    }
}

fn answers(subject: &Subject) {
    let runtime = &*subject.runtime;
    assert!(runtime.status().alive);
    let ended = submit(runtime, (subject.few)()).finish();
    let (reason, usage) = ended.end.expect("ends well");
    assert!((1..=5).contains(&ended.n_pieces), "{}", ended.n_pieces);
    assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, 5));
    assert!(usage.prompt_tokens > 0, "{usage:?}");
    for (request, text) in &subject.texts {
        let request = GenerationRequest {
            id: RequestId::generate(),
            ..request.clone()
        };
        let ended = submit(runtime, request).finish();
        assert!(ended.end.is_ok(), "{ended:?}");
        assert_eq!(ended.text, *text);
    }
    wait_for("no job to be left", || runtime.status().running == 0);
}

fn cancelled_while_it_runs(subject: &Subject) {
    let runtime = &*subject.runtime;
    let job = submit(runtime, (subject.endless)());
    job.first_piece();
    runtime.cancel(job.id);
    runtime.cancel(job.id);
    is_cut(subject, job);
    // At once, before anybody can have looked at it.
    let job = submit(runtime, (subject.endless)());
    runtime.cancel(job.id);
    is_cut(subject, job);
    // A consumer that left is a cancel as well.
    let job = submit(runtime, (subject.endless)());
    job.first_piece();
    drop(job);
    wait_for("no job to be left", || runtime.status().running == 0);
}

/// So many jobs as it claims to hold run at once, one more waits, and a waiting one can be cancelled.
fn capability_is_honest(subject: &Subject) {
    let runtime = &*subject.runtime;
    let capability = runtime.capability();
    assert!(capability.max_inflight > 0 && capability.context_length > 0);
    assert!(capability.can_cancel);
    let all: Vec<_> = (0..capability.max_inflight)
        .map(|_| submit(runtime, (subject.endless)()))
        .collect();
    for job in &all {
        job.first_piece();
    }
    let waiting: Vec<_> = (0..8)
        .map(|_| submit(runtime, (subject.endless)()))
        .collect();
    for job in waiting {
        runtime.cancel(job.id);
        is_cut(subject, job);
    }
    for job in all {
        runtime.cancel(job.id);
        is_cut(subject, job);
    }
    wait_for("no job to be left", || {
        let status = runtime.status();
        (status.running, status.waiting) == (0, 0)
    });
}

fn strangers_change_nothing(subject: &Subject) {
    let runtime = &*subject.runtime;
    let job = submit(runtime, (subject.few)());
    runtime.cancel(RequestId::generate());
    runtime.park(RequestId::generate());
    runtime.resume(RequestId::generate());
    assert!(job.finish().end.is_ok());
}

fn ends_with_the_runtime(subject: &Subject) {
    let runtime = &*subject.runtime;
    let n_jobs = runtime.capability().max_inflight.min(8) + 3;
    let jobs: Vec<_> = (0..n_jobs)
        .map(|_| submit(runtime, (subject.endless)()))
        .collect();
    jobs[0].first_piece();
    runtime.shutdown();
    for job in jobs {
        let end = job.finish().end;
        assert!(end.is_err() || subject.may_outrun, "{end:?}");
    }
    runtime.shutdown();
    let late = submit(runtime, (subject.few)());
    assert!(late.finish().end.is_err());
}

fn dies(subject: &Subject) {
    let Some(kill) = &subject.kill else { return };
    let runtime = &*subject.runtime;
    let job = submit(runtime, (subject.endless)());
    job.first_piece();
    kill();
    let end = job.finish().end;
    assert!(matches!(end, Err(RequestError::ReplicaLost(_))), "{end:?}");
    wait_for("its death", || !runtime.status().alive);
    let late = submit(runtime, (subject.few)()).finish();
    assert_eq!(late.n_pieces, 0);
    assert!(
        matches!(late.end, Err(RequestError::ReplicaLost(_))),
        "{late:?}"
    );
    runtime.shutdown();
}

fn tokens(max_tokens: u32) -> GenerationRequest {
    let mut request = GenerationRequest::new(vec![5, 6, 7], max_tokens);
    request.stop.ignore_eos = true;
    request
}

#[test]
fn native() {
    conforms(|| {
        let path = "tests/data/models/tiny_llama.gguf";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let config = EngineConfig {
            threads: Some(1),
            ..EngineConfig::default()
        };
        let runtime = NativeRuntime::load(&path, &config, BackendKind::Cpu, &mut |_, _| {});
        Subject {
            runtime: Arc::new(runtime.expect("the tiny model loads")),
            few: || tokens(5),
            endless: || tokens(100),
            may_outrun: true,
            texts: Vec::new(),
            kill: None,
        }
    });
}

#[test]
fn fake() {
    conforms(|| {
        let pace = Pace::Threaded(Duration::from_millis(1));
        let runtime = FakeRuntime::new(fake::capability(4), pace, None, Box::new(fake::echo));
        Subject {
            runtime: Arc::new(runtime),
            few: || tokens(5),
            endless: || tokens(1_000_000),
            may_outrun: false,
            texts: Vec::new(),
            kill: None,
        }
    });
}

/// Behind another tinyloop, which echoes: characters and stop strings come through both.
#[test]
fn openai_remote() {
    conforms(|| {
        let config = "[models.there.fake]\ntick_s = 0.001\nmax_inflight = 8\n";
        let serve = Serve::start("conformance", config, &[]);
        let extra = "dialect = \"tinyloop\"\nmax_inflight = 4\nlimits = { failures_max = 1 }\n";
        let runtime = openai_remote::open("far", &remote(serve.address, extra), 0);
        let pid = serve.process.id();
        let said = |prompt: &str, fields: Value, text: &str| {
            let prompt = UpstreamPrompt::Text(prompt.to_owned());
            (forwarded(prompt, fields), text.to_owned())
        };
        Subject {
            runtime: Arc::new(Kept(runtime.expect("it is well"), serve)),
            few: || five_tokens("hello"),
            endless: || chat("hello", json!({"max_tokens": 4000})),
            may_outrun: false,
            texts: vec![
                said("é漢😀", json!({"max_tokens": 9}), "é漢😀"),
                said("abcdef", json!({"max_tokens": 6, "stop": "de"}), "abc"),
            ],
            kill: Some(Box::new(move || kill(pid))),
        }
    });
}

#[test]
fn vllm_serve_stood_in() {
    conforms(|| {
        let config = vllm("max_num_seqs = 3\nmax_model_len = 4096\n");
        child(vllm_serve::start("m", &config, 0))
    });
}

#[test]
fn llama_server_stood_in() {
    conforms(|| child(llama_server::start("m", &llama("slots = 3\n"), 0)));
}

/// The real one, where there is one; see `tests/scripts/llama_server.sh`.
#[test]
fn llama_server_real() {
    let Some(config) = real_llama("slots = 2\nctx_size = 4096\n", "") else {
        return;
    };
    conforms(|| {
        let runtime = llama_server::start("real", &config, 0).expect("it starts");
        let capability = runtime.capability();
        assert_eq!(
            (capability.max_inflight, capability.context_length),
            (2, 2048)
        );
        let pid = runtime.child_pid().expect("it runs");
        Subject {
            runtime: Arc::new(runtime),
            few: || five_tokens("Tell me a story."),
            endless: || {
                let fields = json!({"max_tokens": 1800, "ignore_eos": true, "temperature": 0});
                chat("Tell me a story.", fields)
            },
            may_outrun: false,
            texts: Vec::new(),
            kill: Some(Box::new(move || kill(pid))),
        }
    });
}

/// The stand-in as a child of ours.
fn child(runtime: Result<UpstreamRuntime, String>) -> Subject {
    let runtime = runtime.expect("the stand-in starts");
    let pid = runtime.child_pid().expect("it runs");
    let said = |prompt: &str, fields: Value, text: &str| (chat(prompt, fields), text.to_owned());
    Subject {
        runtime: Arc::new(runtime),
        few: || five_tokens("tokens 9"),
        endless: || chat("tokens endless pause 0.01", json!({})),
        may_outrun: false,
        texts: vec![
            said("unicode tokens 4", json!({}), "é漢😀z"),
            said("tokens 9", json!({"stop": ["w3"]}), "w0 w1 w2 "),
            said("tokens 2", json!({}), "w0 w1 "),
        ],
        kill: Some(Box::new(move || kill(pid))),
    }
}

fn kill(pid: u32) {
    let status = Command::new("sh")
        .args(["-c", &format!("kill -KILL {pid}")])
        .status();
    assert!(status.expect("there is a shell").success());
}

/// A runtime with what must live as long as it.
struct Kept<T>(UpstreamRuntime, T);

impl<T: Send + Sync> Runtime for Kept<T> {
    fn capability(&self) -> tinyloop::runtime::Capability {
        self.0.capability()
    }

    fn submit(&self, job: tinyloop::request::Job) {
        self.0.submit(job);
    }

    fn cancel(&self, id: RequestId) {
        self.0.cancel(id);
    }

    fn park(&self, id: RequestId) {
        self.0.park(id);
    }

    fn resume(&self, id: RequestId) {
        self.0.resume(id);
    }

    fn status(&self) -> tinyloop::runtime::RuntimeStatus {
        self.0.status()
    }

    fn tokenizer(&self) -> Option<Arc<tinyloop::tokenizer::Tokenizer>> {
        self.0.tokenizer()
    }

    fn shutdown(&self) {
        self.0.shutdown();
    }
}

/// `submit` returns at once, whatever the server does: this one accepts nothing.
#[test]
fn submit_never_waits_for_a_server_that_hangs() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it has an address");
    let extra = "health_path = \"\"\nmax_inflight = 2\n";
    let runtime = openai_remote::open("far", &remote(address, extra), 0).expect("nothing is asked");
    let jobs: Vec<_> = (0..20)
        .map(|_| submit(&runtime, five_tokens("hello")))
        .collect();
    wait_for("the threads", || runtime.status().running == 2);
    assert_eq!(runtime.status().waiting, 18);
    for job in &jobs {
        assert!(job.events.is_empty());
    }
    runtime.shutdown();
    for job in jobs {
        let event = job.events.recv_timeout(PATIENCE);
        let is_end = matches!(
            event,
            Ok(GenerationEvent::Failed(RequestError::ShuttingDown))
        );
        assert!(is_end, "{event:?}");
    }
}
