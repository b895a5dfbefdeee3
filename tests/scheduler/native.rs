//! The executor over the built-in engine: what the policy does to a real model's answers.

use crate::support::request;
use std::path::Path;
use std::sync::Arc;
use tinyloop::config::{EngineConfig, ExecutorConfig};
use tinyloop::request::{GenerationRequest, TokenId};
use tinyloop::runtime::Runtime;
use tinyloop::runtime::native::{BackendKind, NativeRuntime};
use tinyloop::scheduler::{Executor, SubmitOptions, TokenStream};

/// One slot on a committed model.
fn executor(model: &str, config: ExecutorConfig) -> Executor {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models");
    let engine = EngineConfig {
        context_length: Some(128),
        max_sequences: 1,
        threads: Some(1),
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
