//! What all engine tests share: a collecting sink, small engines, prompts of related families.

use parking_lot::Mutex;
use std::sync::Arc;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::config::EngineConfig;
use tinyloop::engine::{Engine, EngineParts};
use tinyloop::model::testing;
use tinyloop::request::*;

pub(crate) const END: TokenId = 258;
pub(crate) const VOCAB: u32 = 259;

/// What one job reported.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) prompt_logprobs: Option<Vec<TokenLogprob>>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) embedding: Option<Vec<f32>>,
    /// Without counts of loops.
    pub(crate) finish: Option<(FinishReason, Usage)>,
    pub(crate) loops: LoopCounts,
    pub(crate) failure: Option<RequestError>,
}

/// Tokens computed and the loops that they ran. Cached tokens are not computed, so outcomes are
/// compared without it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoopCounts {
    pub(crate) rows: u64,
    pub(crate) iterations: u64,
}

impl PartialEq for LoopCounts {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Outcome {
    /// Everything but how many tokens came from the cache.
    pub(crate) fn without_cache_count(mut self) -> Self {
        if let Some((_, usage)) = &mut self.finish {
            usage.cached_tokens = 0;
        }
        self
    }

    pub(crate) fn cached_tokens(&self) -> u32 {
        self.finish.expect("it finished").1.cached_tokens
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.finish.is_some() || self.failure.is_some()
    }
}

/// Collects events; plays a consumer that leaves after `patience` tokens.
struct Collector {
    outcome: Arc<Mutex<Outcome>>,
    patience: usize,
}

impl JobSink for Collector {
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone> {
        let mut outcome = self.outcome.lock();
        assert!(!outcome.has_ended(), "an event after the end: {event:?}");
        match event {
            GenerationEvent::PromptLogprobs(logprobs) => {
                assert!(outcome.tokens.is_empty(), "prompt scores come first");
                outcome.prompt_logprobs = Some(logprobs);
            }
            GenerationEvent::Token { token, logprob, .. } => {
                if outcome.tokens.len() == self.patience {
                    return Err(ConsumerGone);
                }
                outcome.tokens.push(token);
                outcome.logprobs.extend(logprob);
            }
            GenerationEvent::Embedding(vector) => outcome.embedding = Some(vector),
            GenerationEvent::Text { text, .. } => panic!("the engine knows no text: {text}"),
            GenerationEvent::Part(part) => panic!("the engine knows no parts: {part:?}"),
            GenerationEvent::Finished { reason, mut usage } => {
                outcome.loops = LoopCounts {
                    rows: std::mem::take(&mut usage.loop_rows),
                    iterations: std::mem::take(&mut usage.loop_iterations),
                };
                outcome.finish = Some((reason, usage));
            }
            GenerationEvent::Failed(error) => outcome.failure = Some(error),
        }
        Ok(())
    }
}

pub(crate) fn job(request: &GenerationRequest, patience: usize) -> (Job, Arc<Mutex<Outcome>>) {
    let outcome = Arc::new(Mutex::new(Outcome::default()));
    let sink = Collector {
        outcome: Arc::clone(&outcome),
        patience,
    };
    let job = Job {
        request: Arc::new(request.clone()),
        sink: Box::new(sink),
    };
    (job, outcome)
}

pub(crate) fn submit(engine: &mut Engine, request: &GenerationRequest) -> Arc<Mutex<Outcome>> {
    let (job, outcome) = job(request, usize::MAX);
    engine.submit(job);
    outcome
}

#[track_caller]
pub(crate) fn step(engine: &mut Engine) {
    engine.step().expect("the reference backend does not fail");
    engine.check_integrity().expect("the books are right");
}

/// Steps until nothing is left; every page must be back.
#[track_caller]
pub(crate) fn drain(engine: &mut Engine) {
    let mut n_steps = 0;
    while !engine.is_idle() {
        step(engine);
        n_steps += 1;
        assert!(n_steps < 20_000, "the engine makes no progress");
    }
    assert_eq!(engine.stats().snapshot().pages_used, 0);
}

pub(crate) fn run(engine: &mut Engine, request: &GenerationRequest) -> Outcome {
    let outcome = submit(engine, request);
    drain(engine);
    outcome.lock().clone()
}

/// Which model a test runs.
pub(crate) type Shape = Option<(u32, u32, u32)>;

pub(crate) fn parts(shape: Shape, config: EngineConfig) -> EngineParts {
    let mut backend = ReferenceBackend::new();
    let model = match shape {
        None => testing::tiny(&mut backend, 7),
        Some(blocks) => testing::tiny_looped(&mut backend, 7, blocks, 2, 4),
    };
    EngineParts {
        backend: Box::new(backend),
        model,
        end_tokens: vec![END],
        config,
    }
}

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        context_length: Some(160),
        max_sequences: 4,
        max_rows: 32,
        kv_tokens: Some(1600),
        threads: None,
        prefix_cache: true,
        ..EngineConfig::default()
    }
}

pub(crate) fn engine_of(shape: Shape, config: EngineConfig) -> Engine {
    Engine::new(parts(shape, config)).expect("the sizes are valid")
}

/// What the request gives in an engine of its own, in one chunk, without any cache.
pub(crate) fn alone(shape: Shape, request: &GenerationRequest) -> Outcome {
    let config = EngineConfig {
        max_rows: 160,
        max_sequences: 1,
        kv_tokens: Some(480),
        prefix_cache: false,
        ..config()
    };
    run(&mut engine_of(shape, config), request)
}

/// Prompts of one family share their first 40 tokens.
pub(crate) fn prompt(family: u32, n: usize) -> Vec<TokenId> {
    let token = |i: u32| (i * 37 + 11 + if i < 40 { 0 } else { family * 71 }) % 256;
    (0..n as u32).map(token).collect()
}

pub(crate) fn greedy(prompt: Vec<TokenId>, max_tokens: u32) -> GenerationRequest {
    let mut request = GenerationRequest::new(prompt, max_tokens);
    request.sampling = SamplingParams::greedy();
    request.logprobs = Some(2);
    request
}

pub(crate) fn seeded(prompt: Vec<TokenId>, max_tokens: u32, seed: u64) -> GenerationRequest {
    let mut request = greedy(prompt, max_tokens);
    request.sampling = SamplingParams {
        temperature: 1.5,
        top_p: 0.95,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        seed: Some(seed),
        ..SamplingParams::default()
    };
    request
}
