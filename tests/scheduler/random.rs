//! Any sequence of operations, against a small model that knows who was accepted, in which order
//! they should start, and how each may end.
//!
//! After each operation: listing and counts are of one moment, slots and limits hold. After each
//! turn of the driver also: no slot stays free while somebody could use it, whoever started came
//! before whoever waits (of several clients: of another priority, or of the same client), and every preempted request has a full replica. Replicas die, cannot be made anew
//! for a while, and come back. At the end: nothing lost, nothing run twice after it gave a token, every waiter
//! has one end, counters add up.

use crate::support::{Bench, Factory, request};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{RequestError, RequestId};
use tinyloop::scheduler::{
    RequestInfo, Share, Snapshot, StreamEvent, SubmitError, SubmitOptions, TokenStream,
};

const AGING_MS: i64 = 20;
const MAX_QUEUE_DEPTH: usize = 5;
/// Prompts have three tokens each: four of them may wait.
const MAX_QUEUED_TOKENS: u64 = 12;
const CAPACITY: u32 = 3;
const MAX_PREEMPTIONS: u32 = 2;

/// Whose requests there are; the length of a name is its weight.
const CLIENTS: [Option<&str>; 3] = [None, Some("b"), Some("ccc")];

/// What may happen to an executor. Numbers choose among what there is.
#[derive(Clone, Debug)]
enum Op {
    Submit {
        n: usize,
        priority: i32,
        deadline_ms: Option<u64>,
        /// Whose it is; with one client the order is that of the places alone.
        client: usize,
    },
    Step(usize),
    Finish(usize),
    Fail(usize),
    Lose(usize),
    /// The upstream has no room for this job.
    Overload(usize),
    /// A replica dies.
    Die(usize),
    /// Whether replicas can be made anew from now on.
    Mend(bool),
    Cancel(usize),
    CancelById(usize),
    Drop(usize),
    Advance(u64),
    Drive,
    Unload,
}

fn op() -> impl Strategy<Value = Op> {
    let n = prop_oneof![3 => Just(1_usize), 1 => 2_usize..=4];
    prop_oneof![
        50 => (n, -2..=2, prop::option::weighted(0.2, 1_u64..50), 0_usize..3)
            .prop_map(|(n, priority, deadline_ms, client)| {
                Op::Submit { n, priority, deadline_ms, client }
            }),
        30 => (0_usize..100).prop_map(Op::Step),
        30 => (0_usize..100).prop_map(Op::Finish),
        5 => (0_usize..100).prop_map(Op::Fail),
        5 => (0_usize..100).prop_map(Op::Lose),
        5 => (0_usize..100).prop_map(Op::Overload),
        8 => (0_usize..100).prop_map(Op::Die),
        3 => any::<bool>().prop_map(Op::Mend),
        10 => (0_usize..100).prop_map(Op::Cancel),
        5 => (0_usize..100).prop_map(Op::CancelById),
        10 => (0_usize..100).prop_map(Op::Drop),
        10 => (1_u64..30).prop_map(Op::Advance),
        50 => Just(Op::Drive),
        1 => Just(Op::Unload),
    ]
}

/// Place in the order, by the rule of the documentation: (ms, submit number).
type Place = (i64, u64);

struct Entry {
    place: Place,
    priority: i64,
    client: Option<&'static str>,
    stream: Option<TokenStream>,
}

/// What has been accepted, and what was refused.
#[derive(Default)]
struct Model {
    entries: BTreeMap<RequestId, Entry>,
    now_ms: i64,
    n_refused: u64,
    unloaded: bool,
    preempts: bool,
    /// Several clients submit.
    is_crowd: bool,
    /// Who had been handed to a runtime when the driver last stopped.
    started: BTreeSet<RequestId>,
}

fn pick<T: Copy>(items: &[T], choice: usize) -> Option<T> {
    (!items.is_empty()).then(|| items[choice % items.len()])
}

/// Every run of every job, on all runtimes that there ever were.
fn runs(factory: &Factory) -> Vec<RequestId> {
    let all = factory.all.lock();
    all.iter().flat_map(|runtime| runtime.submitted()).collect()
}

fn started(factory: &Factory) -> BTreeSet<RequestId> {
    runs(factory).into_iter().collect()
}

impl Model {
    /// Whether a group fits, from what is seen before it comes.
    fn fits(snapshot: &Snapshot, n: usize) -> bool {
        let used = snapshot.in_flight as usize + snapshot.n_preempted;
        let capacity = snapshot.effective_target_inflight as usize;
        (0..n).all(|ahead| {
            let depth = snapshot.queue_depth + ahead;
            let slot_is_free = depth + used < capacity;
            let tokens = 3 * (depth as u64 + 1);
            slot_is_free || (depth < MAX_QUEUE_DEPTH && tokens <= MAX_QUEUED_TOKENS)
        })
    }

    fn submit(&mut self, bench: &Bench, n: usize, options: SubmitOptions) {
        let priority = i64::from(options.priority);
        let owner = options.client.as_deref();
        let client = CLIENTS
            .into_iter()
            .flatten()
            .find(|name| Some(*name) == owner);
        let before = bench.executor.snapshot();
        let requests: Vec<_> = (0..n).map(|_| request(2)).collect();
        match bench.executor.submit_many(requests, options) {
            Ok(streams) => {
                assert!(!self.unloaded && Self::fits(&before, n), "{before:?} + {n}");
                for stream in streams {
                    let number = self.entries.len() as u64;
                    let place = (self.now_ms - priority * AGING_MS, number);
                    let (id, stream) = (stream.id(), Some(stream));
                    let entry = Entry {
                        place,
                        priority,
                        client,
                        stream,
                    };
                    self.entries.insert(id, entry);
                }
            }
            Err(error) if self.unloaded => assert_eq!(error.reason(), "model_unloading"),
            Err(SubmitError::NoReplica { .. }) => {
                assert!(before.replicas.iter().all(|r| !r.health.is_live()));
            }
            Err(error) => {
                assert!(matches!(error, SubmitError::QueueFull { .. }), "{error:?}");
                assert!(!Self::fits(&before, n), "{before:?} + {n}");
                assert_eq!(bench.executor.snapshot(), before, "nothing is left of it");
                self.n_refused += n as u64;
            }
        }
    }

    fn apply(&mut self, bench: &Bench, factory: &Factory, op: Op) {
        let runtimes = factory.latest.lock().clone();
        let running = |choice| {
            let jobs: Vec<_> = runtimes
                .iter()
                .flat_map(|runtime| runtime.running().into_iter().map(move |id| (runtime, id)))
                .collect();
            pick(&jobs, choice)
        };
        let held = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.stream.is_some());
        let held: Vec<RequestId> = held.map(|(id, _)| *id).collect();
        match op {
            Op::Submit {
                n,
                priority,
                deadline_ms,
                client,
            } => {
                let client = if self.is_crowd { CLIENTS[client] } else { None };
                let options = SubmitOptions {
                    priority,
                    client: client.map(Into::into),
                    share: Share {
                        weight: client.map_or(1, |name| name.len() as u32),
                        ..Share::default()
                    },
                    queue_timeout: deadline_ms.map(Duration::from_millis),
                    ..SubmitOptions::default()
                };
                self.submit(bench, n, options);
            }
            Op::Step(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    assert!(runtime.step(id));
                }
            }
            Op::Finish(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    runtime.finish(id);
                }
            }
            Op::Fail(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    runtime.fail(id, "boom");
                }
            }
            Op::Lose(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    runtime.lose(id);
                }
            }
            Op::Overload(choice) => {
                if let Some((runtime, id)) = running(choice) {
                    let retry_after_ms = None;
                    runtime.fail_with(id, RequestError::Overloaded { retry_after_ms });
                }
            }
            Op::Die(choice) => runtimes[choice % runtimes.len()].die(),
            Op::Mend(works) => {
                *factory.refuses.lock() = (!works).then(|| "the test says so".to_owned());
            }
            Op::Cancel(choice) => {
                if let Some(id) = pick(&held, choice) {
                    self.stream(id).cancel();
                }
            }
            Op::CancelById(choice) => {
                let live = bench.executor.list();
                let live: Vec<RequestId> = live.iter().map(|info| info.id).collect();
                if let Some(id) = pick(&live, choice) {
                    assert!(bench.executor.cancel(id));
                }
            }
            Op::Drop(choice) => {
                let id = pick(&held, choice);
                let entry = id.and_then(|id| self.entries.get_mut(&id));
                drop(entry.and_then(|entry| entry.stream.take()));
            }
            Op::Advance(ms) => {
                bench.advance(ms);
                self.now_ms += ms as i64;
            }
            Op::Drive => {
                bench.executor.drive();
                self.check_at_rest(bench, factory);
                bench.executor.wait_for_rebuilds(); // the next turn learns of it
            }
            Op::Unload => {
                bench.executor.unload(Duration::ZERO);
                self.unloaded = true;
            }
        }
    }

    fn stream(&self, id: RequestId) -> &TokenStream {
        self.entries[&id].stream.as_ref().expect("held")
    }

    /// What must hold between any two steps.
    fn check(&self, bench: &Bench) {
        let (snapshot, listed) = bench.executor.inspect();
        let in_state = |names: &[&str]| {
            let states = listed.iter().map(|info| info.state.name());
            states.filter(|name| names.contains(name)).count()
        };
        assert_eq!(in_state(&["queued"]), snapshot.queue_depth, "{listed:?}");
        let n_running = listed.len() - snapshot.queue_depth;
        assert_eq!(
            n_running,
            snapshot.in_flight as usize + snapshot.n_preempted
        );
        // Those that ended for their waiter stay listed until their runtime lets go of them.
        assert!(in_state(&["preempted"]) <= snapshot.n_preempted);
        assert!(in_state(&["dispatched", "decoding"]) <= snapshot.in_flight as usize);
        // Those that came back from a replica are exempt from the limit.
        let came_back = |info: &&RequestInfo| {
            info.state.name() == "queued" && info.state.stamps().n_requeues > 0
        };
        let n_new = snapshot.queue_depth - listed.iter().filter(came_back).count();
        assert!(n_new <= MAX_QUEUE_DEPTH + CAPACITY as usize);
        assert!(
            listed
                .iter()
                .all(|info| self.entries.contains_key(&info.id))
        );
        for replica in &snapshot.replicas {
            assert!(replica.inflight <= replica.target, "{snapshot:?}");
            assert!(replica.status.running <= replica.inflight, "{snapshot:?}");
        }
        for info in &listed {
            assert!(info.state.stamps().n_preemptions <= MAX_PREEMPTIONS);
        }
    }

    /// What must hold when the driver has nothing more to do.
    fn check_at_rest(&mut self, bench: &Bench, factory: &Factory) {
        let runtimes = factory.latest.lock().clone();
        let (snapshot, listed) = bench.executor.inspect();
        let place = |info: &RequestInfo| self.entries[&info.id].place;
        let waiting = || listed.iter().filter(|info| info.state.name() == "queued");
        let full = |replica: usize| {
            let replica = &snapshot.replicas[replica];
            replica.inflight == replica.target
        };
        let is_shut = |replica: usize| !snapshot.replicas[replica].is_open;
        if waiting().next().is_some() {
            assert!(
                (0..runtimes.len()).all(|replica| full(replica) || is_shut(replica)),
                "a slot is idle: {snapshot:?}"
            );
        }
        for (index, runtime) in runtimes.iter().enumerate() {
            assert!(runtime.parked().is_empty() || full(index), "{snapshot:?}");
        }
        // Who comes back from a lost replica may find that others have started since.
        let now_started = started(factory);
        let never_ran = waiting().filter(|info| info.state.stamps().n_requeues == 0);
        let waits: Vec<&Entry> = never_ran.map(|info| &self.entries[&info.id]).collect();
        for id in now_started.difference(&self.started) {
            let entry = &self.entries[id];
            // Another client's request of the same priority may have had its turn before.
            let is_turn =
                |other: &Entry| entry.priority == other.priority && entry.client != other.client;
            let overtaken = waits
                .iter()
                .any(|other| entry.place > other.place && !is_turn(other));
            assert!(!overtaken, "{id} overtook");
        }
        // Whoever waits is not above anybody who could still be preempted for it.
        let head = waiting().min_by_key(|info| place(info));
        let open = |id| {
            let at = runtimes
                .iter()
                .position(|runtime| runtime.running().contains(&id));
            at.is_some_and(|replica| !is_shut(replica))
        };
        // Several clients: the one whose turn it is may have come later than the first of them.
        if let Some(head) = head.filter(|_| self.preempts && !self.is_crowd) {
            for info in listed.iter().filter(|info| !info.state.is_final()) {
                let is_victim = ["dispatched", "decoding"].contains(&info.state.name())
                    && info.priority < head.priority
                    && place(info) > place(head)
                    && info.state.stamps().n_preemptions < MAX_PREEMPTIONS
                    && open(info.id);
                assert!(!is_victim, "{info:?} should have given way to {head:?}");
            }
        }
        self.started = now_started;
    }
}

/// Reads a stream to its end without waiting: everybody has one by now.
fn end_of(mut stream: TokenStream) -> &'static str {
    let mut tokens = Vec::new();
    loop {
        match stream.recv_timeout(Duration::ZERO) {
            StreamEvent::Chunk(chunk) => tokens.extend(chunk.token_id),
            StreamEvent::TimedOut => panic!("{} is left hanging", stream.id()),
            StreamEvent::Finished(_) => {
                assert_eq!(tokens, [7, 8]);
                return "done";
            }
            StreamEvent::Failed(
                RequestError::Fault(_)
                | RequestError::ReplicaLost(_)
                | RequestError::Overloaded { .. },
            ) => {
                assert!([7, 8].starts_with(&tokens), "{tokens:?}");
                return "error";
            }
            StreamEvent::Failed(_) => return "cancelled",
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_sequence_of_operations_keeps_the_books(
        preempt_running: bool,
        is_crowd: bool,
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let config = ExecutorConfig {
            max_queue_depth: MAX_QUEUE_DEPTH,
            max_queued_prompt_tokens: Some(MAX_QUEUED_TOKENS),
            aging_interval_ms: AGING_MS as u64,
            preempt_running,
            max_preemptions: if preempt_running { MAX_PREEMPTIONS } else { 9 },
            replica_wait: Duration::from_millis(60),
            restart_backoff: Duration::from_millis(10),
            ..ExecutorConfig::default()
        };
        let (bench, factory) = Bench::rebuilding(&[2, 1], config);
        let mut model = Model { preempts: preempt_running, is_crowd, ..Model::default() };
        for op in ops {
            model.apply(&bench, &factory, op);
            model.check(&bench);
        }
        bench.executor.shutdown(Duration::ZERO);
        prop_assert_eq!(bench.counts(), (0, 0));
        prop_assert_eq!(bench.executor.list().len(), 0);

        let n_accepted = model.entries.len() as u64;
        let mut waited: BTreeMap<&'static str, u64> = BTreeMap::new();
        for entry in model.entries.into_values() {
            let end = entry.stream.map(end_of);
            *waited.entry(end.unwrap_or("dropped")).or_default() += 1;
        }
        // A job ran again only after a setback, and a second run after a token would have shown in its text.
        let submitted = runs(&factory);
        let requeued = ["replica_lost", "overloaded"].map(|cause| {
            bench.metric(&format!("tinyloop_requeued_total{{cause=\"{cause}\",model=\"m\"}}"))
        });
        let n_again = submitted.len() - started(&factory).len();
        let n_requeued = requeued.iter().sum::<f64>() as usize;
        prop_assert!(n_again <= n_requeued, "a job ran twice");
        let outcome = |name| bench.metric(&format!("tinyloop_requests_total{{model=\"m\",outcome=\"{name}\"}}")) as u64;
        let ends = ["done", "cancelled", "error"].map(|name| (name, outcome(name)));
        prop_assert_eq!(ends.iter().map(|(_, n)| n).sum::<u64>(), n_accepted);
        // Dropped streams ended somehow too, so those we read are at most what was counted.
        for (name, counted) in ends {
            prop_assert!(waited.get(name).copied().unwrap_or(0) <= counted, "{} {:?}", name, waited);
        }
        let dispatched = bench.count("queue_wait_seconds_count") as usize;
        prop_assert_eq!(dispatched, submitted.len());
        if model.n_refused > 0 {
            let refused = bench.metric("tinyloop_admission_rejected_total{model=\"m\",reason=\"queue_full\"}");
            prop_assert_eq!(refused as u64, model.n_refused);
        }
        let preemptions = bench.count("preemptions_total");
        prop_assert!(preempt_running || preemptions == 0.0);
    }
}
