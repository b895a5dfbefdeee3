//! Faults of the backend, and the engine's thread around its steps.

use crate::support::*;
use std::sync::Arc;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::backend::*;
use tinyloop::engine::{Engine, EngineHandle, EngineParts};
use tinyloop::model::testing;
use tinyloop::request::*;

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
    fn embed(&mut self, op: &EmbedOp) -> Result<(), BackendError> {
        self.inner.embed(op)
    }

    fn normalize(&mut self, op: &NormOp) -> Result<(), BackendError> {
        self.inner.normalize(op)
    }

    fn layer_normalize(&mut self, op: &LayerNormOp) -> Result<(), BackendError> {
        self.inner.layer_normalize(op)
    }

    fn start_loops(&mut self, op: &StartLoopsOp) -> Result<(), BackendError> {
        self.inner.start_loops(op)
    }

    fn inject(&mut self, op: &InjectOp) -> Result<(), BackendError> {
        self.inner.inject(op)
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
    fn keep_state(&mut self, row_idxs: &[u32]) -> Result<(), BackendError> {
        self.inner.keep_state(row_idxs)
    }
    fn exit_signals(
        &mut self,
        signal: &ExitSignal,
        row_idxs: &[u32],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        self.inner.exit_signals(signal, row_idxs, out)
    }
    fn fill_skipped(&mut self, op: &FillOp, skipped: &[SkippedLoops]) -> Result<(), BackendError> {
        self.inner.fill_skipped(op, skipped)
    }
    fn logits(&mut self, op: &LogitsOp, slots: &[SlotId]) -> Result<&[f32], BackendError> {
        self.logits = self.inner.logits(op, slots)?.to_vec();
        if matches!(self.fault, Fault::NotANumber(at) if at == self.n_passes) {
            self.logits[3] = f32::NAN;
        }
        Ok(&self.logits)
    }
    fn states(
        &mut self,
        norm: Option<&NormOp>,
        slots: &[SlotId],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        self.inner.states(norm, slots, out)
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
fn wait_for(engine: &EngineHandle, request: &GenerationRequest) -> GenerationEvent {
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
        let GenerationEvent::Failed(RequestError::ReplicaLost(text)) = event else {
            panic!("{event:?}");
        };
        assert!(text.contains("planned"), "{text}");
        // Later jobs are refused at once.
        let event = wait_for(&engine, &greedy(prompt(1, 10), 50));
        assert!(matches!(
            event,
            GenerationEvent::Failed(RequestError::ReplicaLost(_))
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

/// Panics when it is told of a failure, as only a bug of ours could.
struct PanickingSink;

impl JobSink for PanickingSink {
    fn emit(&mut self, _event: GenerationEvent) -> Result<(), ConsumerGone> {
        panic!("planned")
    }
}

#[test]
fn a_panic_between_two_steps_is_a_fault_of_the_replica_like_one_inside() {
    let engine = Engine::spawn(parts(None, config()), "test").expect("it starts");
    engine.submit(Job {
        request: Arc::new(greedy(Vec::new(), 1)), // refused at once, through the sink
        sink: Box::new(PanickingSink),
    });
    let event = wait_for(&engine, &greedy(prompt(1, 10), 5));
    let GenerationEvent::Failed(RequestError::ReplicaLost(text)) = event else {
        panic!("{event:?}");
    };
    assert!(text.contains("planned"), "{text}");
    assert!(!engine.stats().snapshot().alive);
}
