//! What others may ask of the engine between two steps: jobs come, go, pause and go on; prefixes are
//! pinned.
//!
//! On the engine thread. Everything here takes effect at once; rows, slots and pages of whoever
//! leaves are free before the next quantum is planned.
//!
//! **Pins.** A prefix that is in the cache is pinned on the spot. What is missing is computed by a
//! sequence of the engine's own, which waits for its turn like any job and is pinned in the very
//! commit that completes it, so that no eviction can come between. Ending the pin ends that
//! sequence too.

use super::{Engine, State};
use crate::backend::PAGE_TOKENS;
use crate::engine::kv::BlockId;
use crate::engine::sequence::{PinWish, Sequence};
use crate::request::{
    ConsumerGone, GenerationEvent, GenerationRequest, Job, JobSink, PinError, Prefix, PrefixId,
    RequestError, RequestId,
};
use crossbeam_channel::Sender;
use std::sync::Arc;

impl Engine {
    /// Takes a job. One that can never run here fails at once, with the reason.
    pub fn submit(&mut self, mut job: Job) {
        let state = &mut self.state;
        if let Some(reason) = state.limits.refusal(&job.request, &self.model.plan) {
            let refused = GenerationEvent::Failed(RequestError::Invalid(reason));
            let _ = job.sink.emit(refused);
            return;
        }
        state.n_arrivals += 1;
        let pooling = state.limits.pooling;
        let mut sequence = Sequence::new(job, state.n_arrivals, &self.model.plan, pooling);
        if let Some(source) = &sequence.request.constraint {
            match state.masks.begin(source, sequence.may_force()) {
                Ok(constrained) => sequence.constrained = Some(constrained),
                Err(error) => {
                    let fault = format!("no thread for the grammar: {error}");
                    return sequence.fail(RequestError::Fault(fault));
                }
            }
        }
        state.waiting.push_back(sequence);
        state.publish();
    }

    /// Ends a job and frees all it holds. Unknown ids are ignored.
    pub fn cancel(&mut self, id: RequestId) {
        let state = &mut self.state;
        if let Some(index) = state.waiting.iter().position(|s| s.request.id == id)
            && let Some(mut sequence) = state.waiting.remove(index)
        {
            sequence.fail(RequestError::Cancelled);
        }
        if let Some(index) = state.running.iter().position(|s| s.request.id == id) {
            let mut sequence = state.leave(index);
            sequence.fail(RequestError::Cancelled);
        }
        if let Some(index) = state.parked.iter().position(|s| s.request.id == id) {
            state.parked.remove(index).fail(RequestError::Cancelled);
        }
        state.publish();
    }

    /// Takes a job out of the batch, or out of the wait for it, until [`Self::resume`]. It keeps its
    /// tokens and its seed, all that later tokens depend on. Unknown and parked ids are ignored.
    pub fn park(&mut self, id: RequestId) {
        let state = &mut self.state;
        if let Some(index) = state.running.iter().position(|s| s.request.id == id) {
            let sequence = state.leave(index);
            state.parked.push(sequence);
        }
        if let Some(index) = state.waiting.iter().position(|s| s.request.id == id) {
            state.parked.extend(state.waiting.remove(index));
        }
        state.publish();
    }

    /// Lets a parked job wait for its turn again. Ids that are not parked are ignored.
    pub fn resume(&mut self, id: RequestId) {
        let state = &mut self.state;
        if let Some(index) = state.parked.iter().position(|s| s.request.id == id) {
            let sequence = state.parked.swap_remove(index);
            state.wait_in_order(sequence);
        }
        state.publish();
    }

    /// Ends all jobs with `error`.
    pub fn fail_all(&mut self, error: &RequestError) {
        let state = &mut self.state;
        let others = state.waiting.drain(..).chain(state.parked.drain(..));
        for mut sequence in state.running.drain(..).chain(others) {
            state.free_slots.extend(sequence.reset());
            state.kv.release(&mut sequence.kv);
            sequence.fail(error.clone());
        }
        state.publish();
    }

    /// Keeps the whole blocks of a prefix until [`Self::unpin`]; the answer is the tokens kept. It
    /// may take many steps; when the engine ends before, the channel is closed without an answer.
    pub fn pin(&mut self, prefix: &Prefix, answer: Sender<Result<u32, PinError>>) {
        let answered = match self.try_pin(prefix) {
            Ok(Pinned::Now(n_tokens)) => Ok(n_tokens),
            Ok(Pinned::Once(request)) => return self.compute_pinned(*request, prefix.id, answer),
            Err(error) => Err(error),
        };
        self.state.publish();
        // Whoever asked may have stopped waiting; the pin holds until it is ended.
        let _ = answer.try_send(answered);
    }

    /// Ends a pin, and the computation for one. Unknown ids are ignored.
    pub fn unpin(&mut self, id: PrefixId) {
        let state = &mut self.state;
        let wishes = |s: &Sequence| s.pin.as_ref().is_some_and(|wish| wish.id == id);
        while let Some(index) = state.running.iter().position(wishes) {
            drop(state.leave(index));
        }
        state.waiting.retain(|sequence| !wishes(sequence));
        state.kv.unpin(id);
        state.publish();
    }

    fn try_pin(&mut self, prefix: &Prefix) -> Result<Pinned, PinError> {
        let State { kv, limits, .. } = &mut self.state;
        if !limits.prefix_cache {
            return Err(PinError::Unsupported);
        }
        let blocks = prefix.tokens.as_chunks::<PAGE_TOKENS>().0;
        if blocks.is_empty() {
            return Err(PinError::TooShort {
                n_tokens: prefix.tokens.len() as u32,
                block_tokens: PAGE_TOKENS as u32,
            });
        }
        if let Some(n_tokens) = kv.pinned_tokens(prefix.id) {
            return Ok(Pinned::Now(n_tokens));
        }
        let mut request = GenerationRequest::new(blocks.as_flattened(), 0);
        request.loops = prefix.loops;
        request.cache_window = prefix.cache_window;
        request.kept_tokens = request.prompt.len() as u32;
        request.isolation_key = prefix.isolation_key;
        let plan = &self.model.plan;
        if let Some(reason) = limits.refusal(&request, plan) {
            return Err(PinError::Refused(reason));
        }
        let loops = request.loops.unwrap_or(plan.default_loops);
        let found: Vec<BlockId> = kv.find(request.origin(loops), &request.prompt);
        if found.len() == blocks.len() {
            return Ok(Pinned::Now(kv.pin(prefix.id, &found)?));
        }
        let n_missing = (blocks.len() - found.len()) * plan.kv_groups(loops);
        kv.check_pin(kv.unpinned_pages(&found) + n_missing)?;
        Ok(Pinned::Once(Box::new(request)))
    }

    /// Starts the sequence that computes a prefix.
    fn compute_pinned(
        &mut self,
        request: GenerationRequest,
        id: PrefixId,
        answer: Sender<Result<u32, PinError>>,
    ) {
        let state = &mut self.state;
        let job = Job {
            request: Arc::new(request),
            sink: Box::new(NoSink),
        };
        state.n_arrivals += 1;
        let mut sequence = Sequence::new(job, state.n_arrivals, &self.model.plan, None);
        sequence.pin = Some(PinWish { id, answer });
        // Not a lookup of a client, so not one to count.
        sequence.n_cached = Some(0);
        state.waiting.push_back(sequence);
        state.publish();
    }
}

/// How a prefix comes to be pinned.
enum Pinned {
    /// It was in the cache; so many tokens are kept.
    Now(u32),
    /// Once this is computed.
    Once(Box<GenerationRequest>),
}

/// The sink of sequences that answer through their pin.
struct NoSink;

impl JobSink for NoSink {
    fn emit(&mut self, _event: GenerationEvent) -> Result<(), ConsumerGone> {
        Ok(())
    }
}

impl State {
    /// Pins what a sequence that ends has computed for somebody.
    pub(super) fn grant_pin(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        if let Some(PinWish { id, answer }) = sequence.pin.take() {
            let pinned = self.kv.pin(id, sequence.kv.published_blocks());
            self.publish(); // who hears the answer finds it in the figures
            let _ = answer.try_send(pinned); // as in `Engine::pin`
        }
    }
}
