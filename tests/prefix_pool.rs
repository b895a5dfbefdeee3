//! Registered prefixes through the executor: over the scripted runtime (what is listed, refused,
//! evicted), then over real replicas of a tiny model (what is really skipped, and that it changes
//! no token).

use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;
use tinyloop::config::{EngineConfig, ExecutorConfig};
use tinyloop::request::*;
use tinyloop::runtime::Runtime;
use tinyloop::runtime::fake::FakeRuntime;
use tinyloop::runtime::native::{BackendKind, NativeRuntime};
use tinyloop::scheduler::*;

fn new(tokens: Vec<TokenId>) -> NewPrefix {
    NewPrefix {
        tokens: tokens.into(),
        loops: None,
        cache_window: 0,
        isolation_key: 0,
        owner: Some("me".into()),
    }
}

fn tokens(first: TokenId, n: usize) -> Vec<TokenId> {
    (0..n as TokenId).map(|i| (first + i * 7) % 250).collect()
}

fn started(runtimes: Vec<Arc<dyn Runtime>>, config: ExecutorConfig) -> Executor {
    let executor = Executor::new(runtimes, config);
    executor.start().expect("a thread starts");
    executor
}

/// An executor over two scripted replicas that answer at once.
fn scripted(capacity: usize) -> (Executor, [Arc<FakeRuntime>; 2]) {
    let fakes = [(); 2].map(|()| Arc::new(FakeRuntime::echo(4, None)));
    let runtimes: Vec<Arc<dyn Runtime>> = fakes.iter().map(|fake| Arc::clone(fake) as _).collect();
    let config = ExecutorConfig {
        prefix_pool_capacity: capacity,
        ..ExecutorConfig::default()
    };
    (started(runtimes, config), fakes)
}

fn register(executor: &Executor, prefix: NewPrefix) -> Result<PrefixInfo, PrefixError> {
    executor.register_prefix(prefix, SubmitOptions::default())
}

#[test]
fn a_prefix_is_pinned_in_every_replica_and_once() {
    let (executor, fakes) = scripted(16);
    let info = register(&executor, new(tokens(1, 40))).expect("kept");
    assert_eq!((info.cached_tokens, info.hits, info.loops), (32, 0, 1));
    // The same whole blocks are the same content.
    assert_eq!(register(&executor, new(tokens(1, 47))), Ok(info));
    for fake in &fakes {
        assert_eq!(fake.pins(), [info.id]);
    }
    let n_jobs: usize = fakes.iter().map(|fake| fake.submitted().len()).sum();
    assert_eq!(n_jobs, 1, "one job computes it, the second call needs none");
    let stats = PrefixPoolStats {
        entries: 1,
        total_cached_tokens: 32,
        hits: 0,
    };
    assert_eq!(executor.prefix_pool_stats(None), stats);
    assert_eq!(executor.snapshot().prefix_pool, stats);
    assert!(
        !executor.remove_prefix(info.id, Some("you")),
        "somebody else's"
    );
    assert!(executor.remove_prefix(info.id, Some("me")));
    assert!(!executor.remove_prefix(info.id, None));
    assert!(fakes.iter().all(|fake| fake.pins().is_empty()));
}

#[test]
fn a_full_pool_loses_its_shortest_entry() {
    let (executor, fakes) = scripted(2);
    let ids = [48, 32, 64, 16].map(|n| {
        let prefix = new(tokens(n as TokenId, n));
        register(&executor, prefix).expect("kept").id
    });
    let kept: Vec<PrefixId> = executor.prefixes(None).iter().map(|info| info.id).collect();
    // 32 goes for 64, then 48 for 16: the newest is never the one to go.
    assert_eq!(kept, [ids[2], ids[3]]);
    for fake in &fakes {
        assert_eq!(fake.pins(), kept);
    }
    assert_eq!(executor.remove_prefixes(None), 2);
    assert!(fakes.iter().all(|fake| fake.pins().is_empty()));
}

#[test]
fn without_room_a_full_pool_makes_some_and_otherwise_refuses() {
    let (executor, fakes) = scripted(2);
    for fake in &fakes {
        fake.limit_pins(100);
    }
    let ids = [48, 32].map(|n| {
        let prefix = new(tokens(n as TokenId, n));
        register(&executor, prefix).expect("kept").id
    });
    // 48 + 32 + 48 is too much, 48 + 48 is not.
    let third = register(&executor, new(tokens(9, 48))).expect("kept").id;
    let sorted = |mut ids: Vec<PrefixId>| {
        ids.sort_unstable();
        ids
    };
    for fake in &fakes {
        assert_eq!(sorted(fake.pins()), sorted(vec![ids[0], third]));
    }
    // Not even without the shortest: nothing changes.
    let error = register(&executor, new(tokens(5, 64))).expect_err("no room");
    assert!(
        error.to_string().contains("needs 4 KV pages more"),
        "{error}"
    );
    assert_eq!(executor.prefix_pool_stats(None).entries, 2);
    for fake in &fakes {
        assert_eq!(
            sorted(fake.pins()),
            sorted(vec![ids[0], third]),
            "it came back"
        );
    }
    // Below the capacity nobody goes.
    executor.remove_prefix(third, None);
    assert!(register(&executor, new(tokens(5, 64))).is_err());
    assert_eq!(executor.prefixes(None).len(), 1);
}

#[test]
fn what_cannot_be_kept_is_refused_with_a_reason() {
    let (executor, _fakes) = scripted(16);
    let error = register(&executor, new(tokens(1, 15))).expect_err("too short");
    assert!(error.to_string().contains("15 tokens"), "{error}");
    let error = register(&executor, new(tokens(1, 5000))).expect_err("too long");
    assert!(matches!(error, PrefixError::Submit(_)), "{error}");
    assert_eq!(executor.prefix_pool_stats(None), PrefixPoolStats::default());
    let (off, _fakes) = scripted(0);
    assert_eq!(register(&off, new(tokens(1, 32))), Err(PrefixError::Off));
    executor.shutdown(std::time::Duration::ZERO);
    let refused = register(&executor, new(tokens(1, 32)));
    let Err(PrefixError::Submit(SubmitError::Shutdown { .. })) = refused else {
        panic!("{refused:?}");
    };
}

#[test]
fn a_cancelled_registration_keeps_nothing() {
    let fake = Arc::new(FakeRuntime::stepped(1));
    let executor = started(vec![Arc::clone(&fake) as _], ExecutorConfig::default());
    let begun = executor.begin_prefix(new(tokens(1, 32)), SubmitOptions::default());
    let begun = begun.expect("taken");
    begun.cancel_handle().expect("it computes").cancel();
    assert_eq!(
        begun.finish(),
        Err(PrefixError::Job(RequestError::Cancelled))
    );
    assert!(fake.pins().is_empty() && executor.prefixes(None).is_empty());
}

fn replica(prefix_cache: bool, kv_tokens: u64) -> Arc<dyn Runtime> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf");
    let config = EngineConfig {
        context_length: Some(128),
        max_sequences: 3,
        max_rows: 24,
        kv_tokens: Some(kv_tokens),
        threads: Some(1),
        prefix_cache,
        ..EngineConfig::default()
    };
    let runtime = NativeRuntime::load(&file, &config, BackendKind::Reference, &mut |_, _| {});
    Arc::new(runtime.expect("the committed model loads"))
}

fn request(tokens: &[TokenId], seed: u64) -> GenerationRequest {
    let mut request = GenerationRequest::new(tokens, 4);
    request.sampling.seed = Some(seed);
    request.sampling.presence_penalty = 0.5;
    request.stop.ignore_eos = true;
    request.logprobs = Some(1);
    request
}

type Answer = (Vec<TokenId>, Vec<TokenLogprob>, u32);

fn ask(executor: &Executor, request: GenerationRequest) -> Answer {
    let ticket = executor.submit(request, SubmitOptions::default());
    let result = ticket.expect("taken").wait().expect("it ends well");
    (
        result.tokens,
        result.logprobs,
        result.outcome.usage.cached_tokens,
    )
}

#[test]
fn every_replica_skips_a_registered_prefix() {
    let replicas = vec![replica(true, 512), replica(true, 512)];
    let executor = started(replicas.clone(), ExecutorConfig::default());
    let shared = tokens(3, 50);
    let info = register(&executor, new(shared.clone())).expect("kept");
    assert_eq!(info.cached_tokens, 48);
    for replica in &replicas {
        assert_eq!(replica.status().kv_pages_pinned, 3);
    }
    // Ties between idle replicas go round-robin, so both are asked.
    let plain = started(vec![replica(false, 512)], ExecutorConfig::default());
    for i in 0..4 {
        let mut prompt = shared.clone();
        prompt.extend([i, 9, 8]);
        let hit = ask(&executor, request(&prompt, 5));
        let miss = ask(&plain, request(&prompt, 5));
        assert_eq!((&hit.0, &hit.1, hit.2, miss.2), (&miss.0, &miss.1, 48, 0));
    }
    for i in 0..4 {
        let mut other = request(&shared, 5);
        other.isolation_key = 1;
        let (_, _, cached) = ask(&executor, other);
        assert_eq!(cached, if i < 2 { 0 } else { 48 }, "its own blocks only");
    }
    let prefixes = executor.prefixes(None);
    assert_eq!((prefixes[0].id, prefixes[0].hits), (info.id, 4));
    assert_eq!(executor.prefix_pool_stats(None).hits, 4);
    executor.remove_prefixes(None);
    // Commands are in order, so a job behind the removal finds it done.
    ask(&executor, request(&[1, 2, 3], 1));
    ask(&executor, request(&[1, 2, 3], 1));
    assert!(
        replicas
            .iter()
            .all(|replica| replica.status().kv_pages_pinned == 0)
    );
}

#[test]
fn in_a_window_a_registered_prefix_stays_visible_to_requests_of_that_window() {
    let executor = started(vec![replica(true, 512)], ExecutorConfig::default());
    let plain = started(vec![replica(false, 512)], ExecutorConfig::default());
    let shared = tokens(3, 50);
    let prompt = [shared.clone(), tokens(9, 40)].concat();
    let windowed = |cache_window, kept_tokens| {
        let mut request = request(&prompt, 5);
        (request.cache_window, request.kept_tokens) = (cache_window, kept_tokens);
        request
    };
    let (_, before, cached) = ask(&executor, windowed(20, 0));
    assert_eq!((&before, cached), (&ask(&plain, windowed(20, 0)).1, 0));

    let mut prefix = new(shared);
    prefix.cache_window = 20;
    let info = register(&executor, prefix).expect("kept");
    assert_eq!((info.cached_tokens, info.cache_window), (48, 20));
    let (_, kept, cached) = ask(&executor, windowed(20, 0));
    assert_eq!((&kept, cached), (&ask(&plain, windowed(20, 48)).1, 48));
    assert_ne!(before, kept, "it sees more");
    for other in [0, 19] {
        let (_, logprobs, cached) = ask(&executor, windowed(other, 0));
        assert_eq!((&logprobs, cached), (&ask(&plain, windowed(other, 0)).1, 0));
    }
    // A request that says what is kept is taken at its word.
    let (_, less, cached) = ask(&executor, windowed(20, 16));
    assert_eq!((&less, cached), (&ask(&plain, windowed(20, 16)).1, 0));

    assert_eq!(executor.prefixes(None)[0].hits, 1);
    executor.remove_prefixes(None);
    assert_eq!(ask(&executor, windowed(20, 0)).1, before);
}

#[test]
fn a_stop_string_does_not_hide_what_came_from_the_cache() {
    let executor = started(vec![replica(true, 512)], ExecutorConfig::default());
    let shared = tokens(3, 50);
    register(&executor, new(shared.clone())).expect("kept");
    let mut request = request(&shared, 5);
    request.max_tokens = 30;
    let submit = |request: &GenerationRequest| {
        let ticket = executor.submit(request.clone(), SubmitOptions::default());
        ticket.expect("taken").wait().expect("it ends well")
    };
    let whole = submit(&request);
    let stop = whole.text.chars().find(|c| c.is_ascii_graphic());
    request.stop.strings = vec![stop.expect("some text").to_string()];
    let stopped = submit(&request);
    assert_eq!(stopped.outcome.stop_idx, Some(0));
    assert_eq!(stopped.outcome.usage.cached_tokens, 48);
    let n_tokens = stopped.tokens.len() as u32;
    assert_eq!(stopped.outcome.usage.completion_tokens, n_tokens);
    assert!(
        stopped.outcome.usage.loop_rows >= 2,
        "the prompt's end and what was generated"
    );
    assert_eq!(executor.prefixes(None)[0].hits, 2);
}

/// One step of a random run against the executor.
#[derive(Clone, Debug)]
enum Act {
    Register(u32, usize),
    Ask(u32, usize, u64),
    Remove(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        1 => (0..4_u32, 1..90_usize).prop_map(|(family, n)| Act::Register(family, n)),
        4 => (0..4_u32, 1..110_usize, 0..9_u64).prop_map(|(f, n, seed)| Act::Ask(f, n, seed)),
        1 => (0..4_usize).prop_map(Act::Remove),
    ]
}

/// Families share their first 20 tokens.
fn family_tokens(family: u32, n: usize) -> Vec<TokenId> {
    let token = |i: u32| (i * 31 + 5 + if i < 20 { 0 } else { family * 53 }) % 250;
    (0..n as u32).map(token).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Twelve pages for contexts of eight: automatic reuse, pins and evictions all the time.
    #[test]
    fn hits_pins_and_evictions_change_no_token(acts in prop::collection::vec(act(), 1..25)) {
        let config = ExecutorConfig { prefix_pool_capacity: 2, ..ExecutorConfig::default() };
        let tight = replica(true, 192);
        let executor = started(vec![Arc::clone(&tight)], config);
        let plain = started(vec![replica(false, 192)], ExecutorConfig::default());
        for act in acts {
            match act {
                Act::Register(family, n) => {
                    let kept = register(&executor, new(family_tokens(family, n)));
                    if let Ok(info) = kept {
                        prop_assert_eq!(info.cached_tokens as usize, n / 16 * 16);
                    }
                }
                Act::Ask(family, n, seed) => {
                    let prompt = family_tokens(family, n);
                    // Three at once, so that they press on each other.
                    let asked: Vec<_> = (0..3)
                        .map(|i| {
                            let request = request(&prompt[i.min(n - 1)..], seed);
                            executor.submit(request, SubmitOptions::default()).expect("taken")
                        })
                        .collect();
                    for (i, ticket) in asked.into_iter().enumerate() {
                        let result = ticket.wait().expect("it ends well");
                        let expected = ask(&plain, request(&prompt[i.min(n - 1)..], seed));
                        prop_assert_eq!((result.tokens, result.logprobs), (expected.0, expected.1));
                    }
                }
                Act::Remove(index) => {
                    if let Some(info) = executor.prefixes(None).get(index) {
                        prop_assert!(executor.remove_prefix(info.id, None));
                    }
                }
            }
            let stats = executor.prefix_pool_stats(None);
            prop_assert!(stats.entries <= 2);
            prop_assert!(tight.status().kv_pages_pinned <= 4);
        }
    }
}
