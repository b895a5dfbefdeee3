//! A runtime that says the alphabet over the byte vocabulary, at once or when the test says so.
//!
//! Token `i` of an answer is the letter `a + i % 26` (sampled choices start at a letter that their
//! seed picks). Log-probabilities are made up but exact: the chosen token has -0.5, alternatives
//! follow at -1.5, -2.5 and so on; the letter `d` is impossible (-inf).

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tinyloop::request::{
    FinishReason, GenerationEvent, GenerationRequest, Job, RequestError, RequestId, TokenId,
    TokenLogprob, Usage,
};
use tinyloop::runtime::{Capability, Runtime, RuntimeStatus};
use tinyloop::tokenizer::Tokenizer;

struct Active {
    job: Job,
    n_sent: u32,
}

/// See the module.
pub(crate) struct Alphabet {
    stepped: bool,
    max_inflight: u32,
    tokenizer: Arc<Tokenizer>,
    active: Mutex<Vec<Active>>,
    cancelled: Mutex<Vec<RequestId>>,
    /// Fails every job with this text.
    fault: Option<&'static str>,
    /// What it says about the step that it is in.
    step_age: Mutex<Option<Duration>>,
}

fn logprob(request: &GenerationRequest, token: TokenId, n_top: u32) -> TokenLogprob {
    let top = (0..n_top)
        .map(|rank| (token + rank, -0.5 - rank as f32))
        .collect();
    let _ = request;
    let logprob = if token == u32::from(b'd') {
        f32::NEG_INFINITY
    } else {
        -0.5
    };
    TokenLogprob {
        token,
        logprob,
        top,
    }
}

impl Active {
    fn token(&self) -> TokenId {
        let start = self.job.request.sampling.seed.unwrap_or(0) % 26;
        u32::from(b'a') + ((start + u64::from(self.n_sent)) % 26) as u32
    }

    fn begin(&mut self) {
        let request = Arc::clone(&self.job.request);
        if let Some(n_top) = request.prompt_logprobs {
            let entries = request.prompt[1..]
                .iter()
                .map(|token| logprob(&request, *token, n_top));
            let _ = self
                .job
                .sink
                .emit(GenerationEvent::PromptLogprobs(entries.collect()));
        }
    }

    /// One more token, or the end. False when it is over.
    fn step(&mut self) -> bool {
        let request = Arc::clone(&self.job.request);
        let usage = Usage {
            prompt_tokens: request.prompt.len() as u32,
            cached_tokens: 0,
            completion_tokens: self.n_sent,
            loops: 1,
            ..Usage::default()
        };
        if self.n_sent == request.max_tokens {
            let reason = FinishReason::Length;
            let _ = self
                .job
                .sink
                .emit(GenerationEvent::Finished { reason, usage });
            return false;
        }
        let token = self.token();
        self.n_sent += 1;
        let logprob = request
            .logprobs
            .map(|n_top| logprob(&request, token, n_top));
        self.job
            .sink
            .emit(GenerationEvent::Token {
                token,
                logprob,
                usage,
            })
            .is_ok()
    }
}

impl Alphabet {
    fn new(stepped: bool, max_inflight: u32, fault: Option<&'static str>) -> Arc<Self> {
        Arc::new(Self {
            stepped,
            max_inflight,
            tokenizer: Arc::new(Tokenizer::bytes()),
            active: Mutex::default(),
            cancelled: Mutex::default(),
            fault,
            step_age: Mutex::default(),
        })
    }

    /// Answers at once.
    pub(crate) fn at_once() -> Arc<Self> {
        Self::new(false, 16, None)
    }

    /// Holds at most `max_inflight` jobs and moves when told to.
    pub(crate) fn stepped(max_inflight: u32) -> Arc<Self> {
        Self::new(true, max_inflight, None)
    }

    /// Fails every job.
    pub(crate) fn broken() -> Arc<Self> {
        Self::new(false, 16, Some("the test wants it"))
    }

    /// One token for every job it holds.
    pub(crate) fn step(&self) {
        self.active.lock().retain_mut(Active::step);
    }

    /// Steps until nothing is held.
    pub(crate) fn run_out(&self) {
        while self.n_active() > 0 {
            self.step();
        }
    }

    /// Jobs it holds.
    pub(crate) fn n_active(&self) -> usize {
        self.active.lock().len()
    }

    /// Jobs that were cancelled.
    pub(crate) fn n_cancelled(&self) -> usize {
        self.cancelled.lock().len()
    }

    /// What its status says about the step that it is in.
    pub(crate) fn set_step_age(&self, age: Option<Duration>) {
        *self.step_age.lock() = age;
    }

    /// Fails what it holds.
    pub(crate) fn fail_all(&self) {
        self.fail_all_with(&RequestError::Fault("it broke".to_owned()));
    }

    /// The same with this error.
    pub(crate) fn fail_all_with(&self, error: &RequestError) {
        for mut active in self.active.lock().drain(..) {
            let failed = GenerationEvent::Failed(error.clone());
            let _ = active.job.sink.emit(failed);
        }
    }
}

impl Runtime for Alphabet {
    fn capability(&self) -> Capability {
        Capability {
            max_inflight: self.max_inflight,
            context_length: 256,
            kv_capacity_tokens: 1 << 20,
            can_cancel: true,
            can_park: false,
        }
    }

    fn submit(&self, mut job: Job) {
        if let Some(text) = self.fault {
            let error = RequestError::Fault(text.to_owned());
            let _ = job.sink.emit(GenerationEvent::Failed(error));
            return;
        }
        let mut active = Active { job, n_sent: 0 };
        active.begin();
        if self.stepped {
            self.active.lock().push(active);
        } else {
            while active.step() {}
        }
    }

    fn cancel(&self, id: RequestId) {
        let mut active = self.active.lock();
        if let Some(index) = active.iter().position(|active| active.job.request.id == id) {
            let mut gone = active.remove(index);
            drop(active);
            self.cancelled.lock().push(id);
            let failed = GenerationEvent::Failed(RequestError::Cancelled);
            let _ = gone.job.sink.emit(failed);
        }
    }

    fn park(&self, _id: RequestId) {}

    fn resume(&self, _id: RequestId) {}

    fn status(&self) -> RuntimeStatus {
        RuntimeStatus {
            alive: true,
            running: self.n_active() as u32,
            step_age: *self.step_age.lock(),
            ..RuntimeStatus::default()
        }
    }

    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        Some(Arc::clone(&self.tokenizer))
    }

    fn shutdown(&self) {
        self.active.lock().clear();
    }
}
