//! The executor over the built-in engine: what the policy does to a real model's answers.

use crate::support::request;
use std::path::Path;
use std::sync::Arc;
use tinyloop::config::{EngineConfig, ExecutorConfig, LoopsConfig};
use tinyloop::request::{AdaptiveExit, ExitRule, GenerationRequest, TokenId};
use tinyloop::runtime::Runtime;
use tinyloop::runtime::native::{BackendKind, NativeRuntime};
use tinyloop::scheduler::{Executor, SubmitOptions, TokenStream};

/// One slot on a committed model.
fn executor(model: &str, config: ExecutorConfig) -> Executor {
    executor_with(model, LoopsConfig::default(), config)
}

fn executor_with(model: &str, loops: LoopsConfig, config: ExecutorConfig) -> Executor {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models");
    let engine = EngineConfig {
        context_length: Some(128),
        max_sequences: 1,
        threads: Some(1),
        loops,
        ..EngineConfig::default()
    };
    let kind = BackendKind::Reference;
    let runtime = NativeRuntime::load(&folder.join(model), &engine, kind, &mut |_, _| {});
    let runtime: Arc<dyn Runtime> = Arc::new(runtime.expect("the committed model loads"));
    let executor = Executor::new(vec![runtime], config);
    executor.start().expect("a thread");
    executor
}

fn sampled(max_tokens: u32) -> GenerationRequest {
    let mut asked = request(max_tokens);
    asked.sampling.seed = Some(11);
    asked.sampling.presence_penalty = 0.5;
    asked.stop.ignore_eos = true;
    asked
}

fn stream(executor: &Executor, request: GenerationRequest, priority: i32) -> TokenStream {
    let options = SubmitOptions {
        priority,
        ..SubmitOptions::default()
    };
    executor.submit_stream(request, options).expect("room")
}

fn tokens(stream: TokenStream) -> Vec<TokenId> {
    let chunks = stream.map(|chunk| chunk.expect("no error"));
    chunks.filter_map(|chunk| chunk.token_id).collect()
}

/// The slot is given up and taken back in the middle of an answer, and no token is another.
#[test]
fn a_preempted_answer_has_the_tokens_of_an_undisturbed_one() {
    let config = ExecutorConfig {
        preempt_running: true,
        ..ExecutorConfig::default()
    };
    let executor = executor("tiny_llama.gguf", config);
    let undisturbed = tokens(stream(&executor, sampled(100), 0));
    assert_eq!(undisturbed.len(), 100);
    // A low one may get done before the driver sees the high one; then the next round tries again.
    for _ in 0..50 {
        let mut low = stream(&executor, sampled(100), 0);
        let first = low.next().expect("a chunk").expect("no error").token_id;
        let high = stream(&executor, sampled(3), 1);
        assert_eq!(tokens(high), undisturbed[..3]);
        let rest = tokens(low);
        assert_eq!(
            (first, &rest[..]),
            (Some(undisturbed[0]), &undisturbed[1..])
        );
        if executor.snapshot().preemptions > 2 {
            return;
        }
    }
    panic!("nobody was preempted");
}

/// The value of a family with one series.
fn count(executor: &Executor, family: &str) -> u64 {
    let text = executor.metrics_text("");
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{family}{{")));
    let value = line.and_then(|line| line.rsplit_once(' '));
    value
        .expect("the family is there")
        .1
        .parse()
        .expect("a count")
}

#[test]
fn loops_run_and_loops_saved_are_counted() {
    let loops = LoopsConfig {
        layers: Some([0, 1]),
        default: Some(3),
        max: Some(3),
    };
    let executor = executor_with("tiny_llama.gguf", loops, ExecutorConfig::default());
    let mut asked = sampled(8);
    let n_rows = asked.prompt.len() as u64 + 7;
    let run = |asked: &GenerationRequest| {
        let ticket = executor.submit(asked.clone(), SubmitOptions::default());
        let usage = ticket
            .expect("room")
            .wait()
            .expect("an answer")
            .outcome
            .usage;
        assert_eq!((usage.loops, usage.loop_rows), (3, n_rows));
        usage.loop_iterations
    };
    asked.reuse_prefix = false;
    assert_eq!(run(&asked), 3 * n_rows);
    assert_eq!(
        count(&executor, "tinyloop_loop_iterations_total"),
        3 * n_rows
    );
    assert_eq!(count(&executor, "tinyloop_loop_iterations_saved_total"), 0);
    // The second loop is the first that can be compared with one before it; it is then enough.
    asked.adaptive = Some(AdaptiveExit {
        rule: ExitRule::Latent,
        threshold: f32::MAX,
    });
    assert_eq!(run(&asked), 2 * n_rows);
    assert_eq!(
        count(&executor, "tinyloop_loop_iterations_total"),
        5 * n_rows
    );
    assert_eq!(
        count(&executor, "tinyloop_loop_iterations_saved_total"),
        n_rows
    );
}
