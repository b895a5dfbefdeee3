//! The engine against itself: whatever happens around a sequence (neighbours, chunks, cache hits,
//! preemption, cancels, other depths), it must give the tokens and log-probabilities that it gives
//! alone, bit for bit. Everything runs on tiny random models and the reference backend; most tests
//! call `Engine::step` by hand, so that each quantum is under control.

use parking_lot::Mutex;
use proptest::prelude::*;
use std::sync::Arc;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;
use tinyloop::config::EngineConfig;
use tinyloop::engine::{Engine, EngineParts};
use tinyloop::model::testing;
use tinyloop::request::*;

const END: TokenId = 258;
const VOCAB: u32 = 259;

/// What one job reported.
#[derive(Clone, Debug, Default, PartialEq)]
struct Outcome {
    prompt_logprobs: Option<Vec<TokenLogprob>>,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprob>,
    finish: Option<(FinishReason, Usage)>,
    failure: Option<RequestError>,
}

impl Outcome {
    /// Everything but how many tokens came from the cache.
    fn without_cache_count(mut self) -> Self {
        if let Some((_, usage)) = &mut self.finish {
            usage.cached_tokens = 0;
        }
        self
    }

    fn cached_tokens(&self) -> u32 {
        self.finish.expect("it finished").1.cached_tokens
    }

    fn has_ended(&self) -> bool {
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
            GenerationEvent::Token { token, logprob } => {
                if outcome.tokens.len() == self.patience {
                    return Err(ConsumerGone);
                }
                outcome.tokens.push(token);
                outcome.logprobs.extend(logprob);
            }
            GenerationEvent::Text(text) => panic!("the engine knows no text: {text}"),
            GenerationEvent::Finished { reason, usage } => outcome.finish = Some((reason, usage)),
            GenerationEvent::Failed(error) => outcome.failure = Some(error),
        }
        Ok(())
    }
}

fn job(request: &GenerationRequest, patience: usize) -> (Job, Arc<Mutex<Outcome>>) {
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

fn submit(engine: &mut Engine, request: &GenerationRequest) -> Arc<Mutex<Outcome>> {
    let (job, outcome) = job(request, usize::MAX);
    engine.submit(job);
    outcome
}

#[track_caller]
fn step(engine: &mut Engine) {
    engine.step().expect("the reference backend does not fail");
    engine.check_integrity().expect("the books are right");
}

/// Steps until nothing is left; every page must be back.
#[track_caller]
fn drain(engine: &mut Engine) {
    let mut n_steps = 0;
    while !engine.is_idle() {
        step(engine);
        n_steps += 1;
        assert!(n_steps < 20_000, "the engine makes no progress");
    }
    assert_eq!(engine.stats().snapshot().pages_used, 0);
}

fn run(engine: &mut Engine, request: &GenerationRequest) -> Outcome {
    let outcome = submit(engine, request);
    drain(engine);
    outcome.lock().clone()
}

/// Which model a test runs.
type Shape = Option<(u32, u32, u32)>;

fn parts(shape: Shape, config: EngineConfig) -> EngineParts {
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

fn config() -> EngineConfig {
    EngineConfig {
        context_length: Some(160),
        max_sequences: 4,
        max_rows: 32,
        kv_tokens: Some(1600),
        threads: None,
        prefix_cache: true,
    }
}

fn engine_of(shape: Shape, config: EngineConfig) -> Engine {
    Engine::new(parts(shape, config)).expect("the sizes are valid")
}

/// What the request gives in an engine of its own, in one chunk, without any cache.
fn alone(shape: Shape, request: &GenerationRequest) -> Outcome {
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
fn prompt(family: u32, n: usize) -> Vec<TokenId> {
    let token = |i: u32| (i * 37 + 11 + if i < 40 { 0 } else { family * 71 }) % 256;
    (0..n as u32).map(token).collect()
}

fn greedy(prompt: Vec<TokenId>, max_tokens: u32) -> GenerationRequest {
    let mut request = GenerationRequest::new(prompt, max_tokens);
    request.sampling = SamplingParams::greedy();
    request.logprobs = Some(2);
    request
}

fn seeded(prompt: Vec<TokenId>, max_tokens: u32, seed: u64) -> GenerationRequest {
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

#[test]
fn greedy_tokens_are_those_of_the_model_run_by_hand() {
    for shape in [None, Some((1, 2, 1)), Some((0, 2, 0))] {
        let request = greedy(prompt(1, 50), 12);
        let outcome = alone(shape, &request);

        let EngineParts {
            mut backend, model, ..
        } = parts(shape, config());
        let mut runner = testing::Runner::new(&model, backend.as_mut(), 96, 96).expect("small");
        let mut tokens = request.prompt.to_vec();
        for _ in 0..12 {
            let last = tokens.len() - 1;
            let mut next = 0;
            let loops = model.plan.default_loops;
            runner
                .logits(
                    &tokens,
                    loops,
                    |p| p == last,
                    |_, logits| {
                        let best =
                            (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
                        next = best.expect("a vocabulary") as TokenId;
                    },
                )
                .expect("small");
            tokens.push(next);
        }
        assert_eq!(outcome.tokens, tokens[50..], "{shape:?}");
        let usage = Usage {
            prompt_tokens: 50,
            cached_tokens: 0,
            completion_tokens: 12,
            loops: model.plan.default_loops,
        };
        assert_eq!(outcome.finish, Some((FinishReason::Length, usage)));
    }
}

#[test]
fn a_prefix_hit_equals_a_miss() {
    for n_prompt in [15, 16, 17, 48, 49, 64] {
        let mut engine = engine_of(None, config());
        let request = seeded(prompt(1, n_prompt), 8, 3);
        let miss = run(&mut engine, &request);
        let hit = run(&mut engine, &request);
        assert_eq!(miss.cached_tokens(), 0);
        // A prompt of whole blocks reuses all but its last row, on a copy of the last block.
        let reused = if n_prompt % 16 == 0 {
            n_prompt - 1
        } else {
            n_prompt / 16 * 16
        };
        assert_eq!(hit.cached_tokens() as usize, reused, "{n_prompt}");
        assert_eq!(miss.clone(), hit.without_cache_count());
        assert_eq!(miss, alone(None, &request));

        // Another key sees nothing of it, and who asks for no reuse gets none.
        let mut other = request.clone();
        other.isolation_key = 1;
        assert_eq!(run(&mut engine, &other), miss);
        let mut fresh = request.clone();
        fresh.reuse_prefix = false;
        assert_eq!(run(&mut engine, &fresh), miss);
    }
}

#[test]
fn generated_tokens_are_reused_as_the_next_prompt() {
    let mut engine = engine_of(None, config());
    let first = run(&mut engine, &greedy(prompt(1, 20), 30));
    let mut turns = prompt(1, 20);
    turns.extend(&first.tokens);
    turns.push(5);
    let second = greedy(turns, 4);
    let outcome = run(&mut engine, &second);
    assert_eq!(outcome.cached_tokens(), 48);
    assert_eq!(outcome.without_cache_count(), alone(None, &second));
}

#[test]
fn preempted_sequences_go_on_as_if_nothing_had_happened() {
    let tight = EngineConfig {
        kv_tokens: Some(160),
        ..config()
    };
    for prefix_cache in [true, false] {
        let mut engine = engine_of(
            None,
            EngineConfig {
                prefix_cache,
                ..tight.clone()
            },
        );
        let requests: Vec<_> = (0..4)
            .map(|i| {
                let mut request = seeded(prompt(i, 20), 60, u64::from(i));
                request.stop.ignore_eos = true;
                request
            })
            .collect();
        let outcomes: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
        drain(&mut engine);
        assert!(engine.stats().snapshot().preemptions > 0, "too roomy");
        for (request, outcome) in requests.iter().zip(outcomes) {
            let outcome = outcome.lock().clone().without_cache_count();
            assert_eq!(outcome, alone(None, request));
        }
    }
}

#[test]
fn a_prompt_is_scored_like_its_tokens_were_generated() {
    let generated = run(&mut engine_of(None, config()), &greedy(prompt(2, 70), 20));
    let mut tokens = prompt(2, 70);
    tokens.extend(&generated.tokens);
    let mut request = greedy(tokens.clone(), 0);
    request.prompt_logprobs = Some(2);
    let mut engine = engine_of(None, config());
    for _ in 0..2 {
        let scored = run(&mut engine, &request);
        let scores = scored.prompt_logprobs.clone().expect("asked for");
        assert_eq!(scores.len(), tokens.len() - 1);
        assert!(
            scores
                .iter()
                .map(|s| s.token)
                .eq(tokens[1..].iter().copied())
        );
        assert_eq!(scores[69..], generated.logprobs);
        let (reason, usage) = scored.finish.expect("it finished");
        assert_eq!(
            (reason, usage.completion_tokens, usage.cached_tokens),
            (FinishReason::Length, 0, 0)
        );
        assert!(scored.tokens.is_empty());
    }
    request.max_tokens = 3;
    let both = run(&mut engine, &request);
    assert_eq!(
        (both.tokens.len(), both.prompt_logprobs.map(|p| p.len())),
        (3, Some(89))
    );
}

#[test]
fn a_prompt_alone_warms_the_cache() {
    let mut engine = engine_of(None, config());
    let warmed = run(&mut engine, &greedy(prompt(1, 40), 0));
    assert_eq!(warmed.finish.expect("it finished").0, FinishReason::Length);
    assert_eq!(
        run(&mut engine, &greedy(prompt(1, 40), 2)).cached_tokens(),
        32
    );
    let figures = engine.stats().snapshot();
    assert_eq!((figures.prefix_queries, figures.prefix_hits), (80, 32));
}

#[test]
fn generations_end_by_their_rules() {
    let free = alone(None, &greedy(prompt(1, 10), 12));
    let at =
        |tokens: &[TokenId], i: usize| tokens.iter().position(|t| *t == tokens[i]).expect("it");
    let fifth = at(&free.tokens, 5);
    let ask = |change: &dyn Fn(&mut GenerationRequest)| {
        let mut request = greedy(prompt(1, 10), 12);
        change(&mut request);
        alone(None, &request)
    };
    // A stop token ends the answer, counts, and is not sent.
    let stopped = ask(&|r| r.stop.token_ids = vec![free.tokens[5]]);
    assert_eq!(stopped.tokens, free.tokens[..fifth]);
    let (reason, usage) = stopped.finish.expect("it finished");
    assert_eq!(
        (reason, usage.completion_tokens as usize),
        (FinishReason::Stop, fifth + 1)
    );
    // Not before min_tokens.
    let late = ask(&|r| {
        r.stop.token_ids = vec![free.tokens[5]];
        r.stop.min_tokens = 9;
    });
    assert!(late.tokens.len() >= 9 && !late.tokens[..9].contains(&free.tokens[5]));
    // The end token likewise; with ignore_eos it never comes.
    let end = |r: &mut GenerationRequest| r.sampling.logit_bias = vec![(END, 1000.0)];
    let ended = ask(&end);
    assert_eq!(
        (ended.tokens.len(), ended.finish.expect("it finished").0),
        (0, FinishReason::Stop)
    );
    let ignored = ask(&|r| {
        end(r);
        r.stop.ignore_eos = true;
    });
    assert_eq!(ignored.tokens, free.tokens);
    // The context ends it as well.
    let full = alone(None, &greedy(prompt(1, 155), 100));
    let (reason, usage) = full.finish.expect("it finished");
    assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, 5));
}

#[test]
fn impossible_requests_fail_with_a_reason_and_disturb_nobody() {
    let mut engine = engine_of(None, config());
    let good = submit(&mut engine, &greedy(prompt(1, 20), 5));
    for request in [
        greedy(vec![], 1),
        greedy(vec![VOCAB], 1),
        greedy(prompt(1, 160), 1),
    ] {
        let outcome = submit(&mut engine, &request);
        let failure = outcome.lock().failure.clone();
        assert!(
            matches!(failure, Some(RequestError::Fault(_))),
            "{failure:?}"
        );
    }
    let mut hopeless = greedy(prompt(1, 5), 1);
    hopeless.sampling.logit_bias = (0..VOCAB).map(|t| (t, f32::NEG_INFINITY)).collect();
    let hopeless = submit(&mut engine, &hopeless);
    drain(&mut engine);
    assert!(hopeless.lock().failure.is_some());
    assert_eq!(good.lock().tokens.len(), 5);
}

#[test]
fn a_cancel_frees_everything_at_once() {
    let mut engine = engine_of(None, config());
    let request = greedy(prompt(1, 40), 100);
    let outcome = submit(&mut engine, &request);
    for _ in 0..6 {
        step(&mut engine);
    }
    engine.cancel(RequestId::generate());
    assert!(!engine.is_idle());
    engine.cancel(request.id);
    assert!(engine.is_idle());
    engine.check_integrity().expect("the books are right");
    assert_eq!(engine.stats().snapshot().pages_used, 0);
    assert_eq!(outcome.lock().failure, Some(RequestError::Cancelled));
    engine.cancel(request.id);
}

#[test]
fn a_consumer_that_is_gone_ends_its_sequence_within_the_quantum() {
    let mut engine = engine_of(None, config());
    let request = greedy(prompt(1, 10), 100);
    let (job, outcome) = job(&request, 3);
    engine.submit(job);
    // One quantum computes the prompt and gives the first token; the fourth token finds nobody.
    for _ in 0..4 {
        assert!(!engine.is_idle());
        step(&mut engine);
    }
    assert!(engine.is_idle());
    assert_eq!(engine.stats().snapshot().pages_used, 0);
    assert_eq!(outcome.lock().tokens.len(), 3);
}

#[test]
fn running_generations_get_a_token_in_every_quantum_beside_a_long_prompt() {
    let mut engine = engine_of(None, config());
    let running = submit(&mut engine, &greedy(prompt(1, 8), 100));
    step(&mut engine);
    let long = submit(&mut engine, &greedy(prompt(2, 150), 2));
    let short = submit(&mut engine, &greedy(prompt(3, 8), 2));
    for n_tokens in 2..8 {
        step(&mut engine);
        assert_eq!(running.lock().tokens.len(), n_tokens);
        assert!(engine.stats().snapshot().batch_rows <= 32);
        if n_tokens == 3 {
            assert!(
                short.lock().has_ended(),
                "the short prompt waits for the long one"
            );
        }
    }
    assert_eq!(long.lock().tokens.len(), 1);
}

#[test]
fn sequences_of_different_depth_share_passes() {
    let shape = Some((0, 2, 0));
    let mut engine = engine_of(shape, config());
    let outcomes: Vec<_> = [1, 4]
        .map(|loops| {
            let mut request = greedy(prompt(1, 8), 40);
            request.loops = Some(loops);
            let outcome = submit(&mut engine, &request);
            (request, outcome)
        })
        .into();
    for _ in 0..20 {
        step(&mut engine);
    }
    // One pass per token for the shallow one, four for the deep one: neither waits for the other.
    let counts = outcomes.iter().map(|(_, o)| o.lock().tokens.len());
    assert_eq!(counts.collect::<Vec<_>>(), [20, 5]);
    drain(&mut engine);
    for (request, outcome) in outcomes {
        assert_eq!(*outcome.lock(), alone(shape, &request));
    }
}

/// A job of a random run.
#[derive(Clone, Debug)]
struct Plan {
    request: GenerationRequest,
    /// Steps before it is submitted, and before it is cancelled.
    start: usize,
    cancel: Option<usize>,
}

fn plans(max_loops: u32) -> impl Strategy<Value = Vec<Plan>> {
    let one = (
        (0..3_u32, 1..80_usize, 0..14_u32),
        prop::option::of(0..u64::MAX),
        1..=max_loops,
        (0..30_usize, prop::option::weighted(0.25, 0..30_usize)),
        prop::option::weighted(0.2, Just(1)),
    );
    let plan = one.prop_map(
        |((family, n, max_tokens), seed, loops, (start, cancel), scores)| {
            let mut request = match seed {
                Some(seed) => seeded(prompt(family, n), max_tokens, seed),
                None => greedy(prompt(family, n), max_tokens),
            };
            request.loops = (loops > 1).then_some(loops);
            request.prompt_logprobs = scores;
            Plan {
                request,
                start,
                cancel: cancel.map(|after| start + after),
            }
        },
    );
    prop::collection::vec(plan, 1..7)
}

/// Runs the plans together, checking the books after every quantum, and compares with alone.
fn check_plans(shape: Shape, config: EngineConfig, plans: &[Plan]) -> Result<(), TestCaseError> {
    let mut engine = engine_of(shape, config);
    let mut outcomes = vec![None; plans.len()];
    let mut now = 0;
    while now <= 60 || !engine.is_idle() {
        for (plan, outcome) in plans.iter().zip(&mut outcomes) {
            if plan.start == now {
                *outcome = Some(submit(&mut engine, &plan.request));
            }
            if plan.cancel == Some(now) {
                engine.cancel(plan.request.id);
            }
        }
        step(&mut engine);
        now += 1;
        prop_assert!(now < 20_000, "the engine makes no progress");
    }
    prop_assert_eq!(engine.stats().snapshot().pages_used, 0);
    for (plan, outcome) in plans.iter().zip(outcomes) {
        let outcome = outcome.expect("all were submitted").lock().clone();
        let expected = alone(shape, &plan.request);
        if outcome.failure == Some(RequestError::Cancelled) {
            prop_assert!(plan.cancel.is_some());
            prop_assert!(expected.tokens.starts_with(&outcome.tokens));
        } else {
            prop_assert_eq!(outcome.without_cache_count(), expected);
        }
    }
    Ok(())
}

fn sizes() -> impl Strategy<Value = EngineConfig> {
    (1..6_u32, 1..50_u32, 160..700_u64, any::<bool>()).prop_map(
        |(max_sequences, max_rows, kv_tokens, prefix_cache)| EngineConfig {
            max_sequences,
            max_rows,
            kv_tokens: Some(kv_tokens),
            prefix_cache,
            ..config()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn neighbours_chunks_and_cancels_change_nothing(config in sizes(), plans in plans(1)) {
        check_plans(None, config, &plans)?;
    }

    #[test]
    fn neighbours_of_other_depths_change_nothing(
        config in sizes(),
        plans in plans(4),
        blocks in prop_oneof![Just((0, 2, 0)), Just((1, 1, 1)), Just((1, 2, 0)), Just((0, 1, 1))],
    ) {
        // Counted at the default depth of 2; 4 loops need up to twice as many pages.
        let config = EngineConfig { kv_tokens: config.kv_tokens.map(|n| n * 2), ..config };
        check_plans(Some(blocks), config, &plans)?;
    }
}

/// What goes wrong in a [`FaultyBackend`], at the pass with this number.
#[derive(Clone, Copy)]
enum Fault {
    Panic(u32),
    Device(u32),
    NotANumber(u32),
}

/// The reference backend with one fault.
struct FaultyBackend {
    inner: ReferenceBackend,
    fault: Fault,
    n_passes: u32,
    logits: Vec<f32>,
}

impl Backend for FaultyBackend {
    fn name(&self) -> String {
        "faulty".to_owned()
    }
    fn load_matrix(&mut self, tensor: &TensorData<'_>) -> Result<MatrixId, BackendError> {
        self.inner.load_matrix(tensor)
    }
    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.inner.load_vector(values)
    }
    fn load_rope(&mut self, table: &RopeTable) -> Result<RopeId, BackendError> {
        self.inner.load_rope(table)
    }
    fn allocate(&mut self, geometry: &StateGeometry) -> Result<(), BackendError> {
        self.inner.allocate(geometry)
    }
    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }
    fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError> {
        self.n_passes += 1;
        match self.fault {
            Fault::Panic(at) if at == self.n_passes => panic!("planned"),
            Fault::Device(at) if at == self.n_passes => {
                Err(BackendError::Device("planned".to_owned()))
            }
            _ => self.inner.begin_pass(pass),
        }
    }
    fn embed(&mut self, table: MatrixId) -> Result<(), BackendError> {
        self.inner.embed(table)
    }
    fn qkv(&mut self, op: &QkvOp) -> Result<(), BackendError> {
        self.inner.qkv(op)
    }
    fn attend(&mut self, op: &AttendOp) -> Result<(), BackendError> {
        self.inner.attend(op)
    }
    fn attention_output(&mut self, op: &AttentionOutputOp) -> Result<(), BackendError> {
        self.inner.attention_output(op)
    }
    fn feed_forward(&mut self, op: &FeedForwardOp) -> Result<(), BackendError> {
        self.inner.feed_forward(op)
    }
    fn logits(&mut self, op: &LogitsOp) -> Result<&[f32], BackendError> {
        self.logits = self.inner.logits(op)?.to_vec();
        if matches!(self.fault, Fault::NotANumber(at) if at == self.n_passes) {
            self.logits[3] = f32::NAN;
        }
        Ok(&self.logits)
    }
    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), BackendError> {
        self.inner.copy_page(from, to)
    }
}

fn faulty(fault: Fault) -> EngineParts {
    let mut inner = ReferenceBackend::new();
    let model = testing::tiny(&mut inner, 7);
    EngineParts {
        backend: Box::new(FaultyBackend {
            inner,
            fault,
            n_passes: 0,
            logits: Vec::new(),
        }),
        model,
        end_tokens: vec![END],
        config: config(),
    }
}

#[test]
fn logits_that_are_no_numbers_fail_one_request_only() {
    let mut engine = Engine::new(faulty(Fault::NotANumber(3))).expect("valid");
    let first = submit(&mut engine, &greedy(prompt(1, 10), 8));
    let second = submit(&mut engine, &greedy(prompt(2, 10), 8));
    drain(&mut engine);
    assert!(matches!(first.lock().failure, Some(RequestError::Fault(_))));
    assert_eq!(
        (first.lock().tokens.len(), second.lock().tokens.len()),
        (2, 8)
    );
}

/// Events of a job on an engine thread, over a channel.
struct ChannelSink(crossbeam_channel::Sender<GenerationEvent>);

impl JobSink for ChannelSink {
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone> {
        self.0.send(event).map_err(|_| ConsumerGone)
    }
}

/// Sends the job and waits for its end.
fn wait_for(
    engine: &tinyloop::engine::EngineHandle,
    request: &GenerationRequest,
) -> GenerationEvent {
    let (events, receiver) = crossbeam_channel::unbounded();
    engine.submit(Job {
        request: Arc::new(request.clone()),
        sink: Box::new(ChannelSink(events)),
    });
    receiver.iter().last().expect("a terminal event")
}

#[test]
fn a_panic_or_a_device_error_fails_its_replica_and_nothing_else() {
    for fault in [Fault::Panic(3), Fault::Device(3)] {
        let engine = Engine::spawn(faulty(fault), "test").expect("it starts");
        assert!(engine.stats().snapshot().alive);
        let event = wait_for(&engine, &greedy(prompt(1, 10), 50));
        let GenerationEvent::Failed(RequestError::Fault(text)) = event else {
            panic!("{event:?}");
        };
        assert!(text.contains("planned"), "{text}");
        // Later jobs are refused at once.
        let event = wait_for(&engine, &greedy(prompt(1, 10), 50));
        assert!(matches!(
            event,
            GenerationEvent::Failed(RequestError::Fault(_))
        ));
        let figures = engine.stats().snapshot();
        assert_eq!(
            (figures.alive, figures.running, figures.step_age),
            (false, 0, None)
        );
        engine.shutdown();
        engine.shutdown();
    }
}

#[test]
fn a_thread_serves_jobs_and_a_shutdown_fails_what_is_left() {
    let engine = Engine::spawn(parts(None, config()), "test").expect("it starts");
    let request = greedy(prompt(1, 10), 5);
    let event = wait_for(&engine, &request);
    assert!(
        matches!(event, GenerationEvent::Finished { .. }),
        "{event:?}"
    );

    let (events, receiver) = crossbeam_channel::unbounded();
    engine.submit(Job {
        request: Arc::new(greedy(prompt(1, 10), 149)),
        sink: Box::new(ChannelSink(events)),
    });
    assert!(receiver.recv().is_ok(), "it has begun");
    engine.shutdown();
    let last = receiver.iter().last().expect("a terminal event");
    let fair_ends = matches!(
        last,
        GenerationEvent::Failed(RequestError::ShuttingDown) | GenerationEvent::Finished { .. }
    );
    assert!(fair_ends, "{last:?}");
    let event = wait_for(&engine, &request);
    assert!(
        matches!(event, GenerationEvent::Failed(RequestError::ShuttingDown)),
        "{event:?}"
    );
}
