//! The step loop: one quantum is one pass of one segment over rows of many sequences.
//!
//! ```text
//! step:  admit ─► plan (preempting as long as pages are short) ─► board
//!        ─► blocks of the segment ─► settle (exits) ─► states (embeddings) ─► logits ─► commit
//! ```
//!
//! ```text
//! sequence:  waiting ─ admit ─► running ─ finish, fail, cancel, consumer gone ─► dropped
//!            ▲  ▲                  │
//!            │  └──── preempt ─────┤   (keeps its tokens; its rows are computed again)
//!            │                     │
//!         resume ──── parked ◄─────┴─ park (also from waiting); fail and cancel reach it too
//! ```
//!
//! Owned by the engine thread (`engine::run`); tests call [`Engine::step`] by hand. Between two
//! steps any job may come or go: cancelling frees rows, slots and pages at once. Buffers of the
//! pass, the plan and the sampler are reused, and page tables move into the pass and back instead
//! of being copied.
//!
//! Waiting sequences are admitted in the order of their arrival, so preempted ones, which are
//! older than all that never ran, go first. One is admitted when the pages that are not promised to
//! running sequences hold all its tokens, so that a preempted one does not push others out again.
//! Parked ones are like preempted ones, but only a command brings them back; meanwhile they do not
//! keep the engine awake.

mod commands;
mod exits;
mod landing;
mod pooling;

use super::arbiter::Seat;
use super::batch::{self, BatchPolicy, Candidate, Decision, Quantum, Supply};
use super::kv::{KvPool, SequenceKv};
use super::limits::{EngineLimits, MAX_SCORED_ROWS};
use super::masks::MaskThreads;
use super::sampler::Sampler;
use super::sequence::{Flight, Sequence};
use super::stats::{EngineStats, Gauges, QuantumTimes};
use super::{EngineError, EngineParts};
use crate::backend::{Backend, BackendError, MemoryUse, Pass, Row, SlotId};
use crate::model::{Model, Plan, forward};
use crate::request::TokenId;
use exits::{Exits, Wanted};
use landing::Landing;
use pooling::States;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The engine. Owned by one thread; `step` may also be driven by hand.
pub struct Engine {
    backend: Box<dyn Backend>,
    model: Model,
    state: State,
    /// Its place at a device that others use too; None = it has the device to itself.
    seat: Option<Seat>,
}

/// Everything but the backend and the model, so that logits, which the backend lends, can be
/// committed to it.
struct State {
    limits: EngineLimits,
    policy: BatchPolicy,
    end_tokens: Vec<TokenId>,
    stats: Arc<EngineStats>,
    kv: KvPool,
    /// Hidden-state slots that no flight uses.
    free_slots: Vec<SlotId>,
    /// By rising arrival.
    waiting: VecDeque<Sequence>,
    /// Out of the batch until somebody resumes them, without slots and pages. In no order.
    parked: Vec<Sequence>,
    /// By rising arrival; at most `max_sequences`.
    running: Vec<Sequence>,
    sampler: Sampler,
    masks: MaskThreads,
    n_quanta: u64,
    n_arrivals: u64,
    // Buffers of the running quantum.
    candidates: Vec<Candidate>,
    quantum: Quantum,
    pass: Pass,
    exits: Exits,
    /// Rows of flights that have landed, by grant and position, and their slots.
    wanted: Vec<Wanted>,
    wanted_slots: Vec<SlotId>,
    states: States,
    times: QuantumTimes,
}

impl Engine {
    /// Works out the sizes and allocates the backend's state.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn new(parts: EngineParts) -> Result<Self, EngineError> {
        let (mut backend, model) = (parts.backend, parts.model);
        let limits = EngineLimits::new(&parts.config, &model.spec, &model.plan)?;
        let limits = limits.with_exit_rules(model.exit_rules());
        let max_rows = limits.max_rows as usize;
        backend.allocate(&model.geometry(
            max_rows,
            max_rows,
            limits.n_pages as usize,
            limits.context_length as usize,
        ))?;
        let state = State {
            limits,
            policy: BatchPolicy::default(),
            end_tokens: parts.end_tokens,
            stats: Arc::new(EngineStats::new()),
            kv: KvPool::new(limits.n_pages, limits.pinned_pages_max, limits.prefix_cache),
            free_slots: (0..limits.max_rows).rev().map(SlotId).collect(),
            waiting: VecDeque::new(),
            parked: Vec::new(),
            running: Vec::new(),
            sampler: Sampler::default(),
            masks: MaskThreads::default(),
            n_quanta: 0,
            n_arrivals: 0,
            candidates: Vec::new(),
            quantum: Quantum::empty(),
            pass: Pass::default(),
            exits: Exits::default(),
            wanted: Vec::new(),
            wanted_slots: Vec::new(),
            states: States::default(),
            times: QuantumTimes::default(),
        };
        Ok(Self {
            backend,
            model,
            state,
            seat: None,
        })
    }

    /// Takes a turn at a shared device for each quantum from now on.
    #[must_use]
    pub fn with_seat(mut self, seat: Seat) -> Self {
        self.seat = Some(seat);
        self
    }

    /// Its sizes.
    #[must_use]
    pub fn limits(&self) -> &EngineLimits {
        &self.state.limits
    }

    /// Segments and loops of its model.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.model.plan
    }

    /// Its figures, for other threads.
    #[must_use]
    pub fn stats(&self) -> Arc<EngineStats> {
        Arc::clone(&self.state.stats)
    }

    /// Which kernels run.
    #[must_use]
    pub fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// Bytes that the backend holds.
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.backend.memory()
    }

    /// Chooses who may share passes, from the next quantum on; what is under way goes on.
    pub fn set_batch_policy(&mut self, policy: BatchPolicy) {
        self.state.policy = policy;
    }

    /// Whether no sequence waits or runs. Parked ones may exist.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.state.running.is_empty() && self.state.waiting.is_empty()
    }

    /// Called when there is nothing to do, before the thread waits for commands.
    pub fn rest(&mut self) {
        if let Some(seat) = &mut self.seat {
            seat.leave();
        }
        self.state.stats.idle();
        self.state.publish();
        if let Err(fault) = self.check_integrity() {
            // Wrong books do not corrupt output by themselves; say it and go on.
            tracing::error!(fault, "the KV pool's books are wrong");
        }
    }

    /// Checks the books of pages and slots. For idle moments and tests.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn check_integrity(&self) -> Result<(), String> {
        let State {
            kv,
            running,
            waiting,
            parked,
            free_slots,
            limits,
            ..
        } = &self.state;
        let all = running.iter().chain(waiting).chain(parked);
        kv.check_integrity(all.map(|sequence| &sequence.kv))?;
        let n_held: usize = running.iter().map(|sequence| sequence.slots.len()).sum();
        let (n_slots, n_free) = (limits.max_rows as usize, free_slots.len());
        match n_held + n_free == n_slots {
            true => Ok(()),
            false => Err(format!("{n_held} slots held, {n_free} free, of {n_slots}")),
        }
    }

    /// Runs one quantum, if there is anything to run; on a shared device it waits for its turn first.
    ///
    /// # Errors
    /// When the device failed; the engine must not be used any more.
    pub fn step(&mut self) -> Result<(), BackendError> {
        if let Some(seat) = &mut self.seat {
            seat.begin();
        }
        let stepped = self.step_with_device();
        let wants_more = stepped.is_ok() && !self.is_idle();
        if let Some(seat) = &mut self.seat {
            seat.end(wants_more);
        }
        stepped
    }

    fn step_with_device(&mut self) -> Result<(), BackendError> {
        let began = self.state.stats.step_begins();
        let mut in_pass = Duration::ZERO;
        self.admit()?;
        if self.state.choose(&self.model.plan) {
            self.state.board(&self.model.plan);
            in_pass = self.run_quantum()?;
        }
        self.state.publish();
        self.state.stats.step_ends(began, in_pass);
        Ok(())
    }

    /// Runs the pass that was boarded; returns the time in the model.
    fn run_quantum(&mut self) -> Result<Duration, BackendError> {
        let Self {
            backend,
            model,
            state,
            ..
        } = self;
        let (segment, backend) = (state.quantum.segment, backend.as_mut());
        let began = Instant::now();
        forward::run_blocks(model, backend, segment, &state.pass, &state.exits.kept)?;
        state.settle(model, backend)?;
        let in_blocks = began.elapsed();
        state.pool_states(model, backend)?;
        let logits = forward::logits(model, backend, &state.wanted_slots)?;
        let in_pass = began.elapsed();
        state.times.blocks(segment, in_blocks);
        state
            .times
            .head(state.wanted_slots.len(), in_pass - in_blocks);
        state.stats.costs(&state.times);
        state.commit(logits);
        Ok(in_pass)
    }

    /// Waiting sequences become running ones, as far as places and pages allow.
    fn admit(&mut self) -> Result<(), BackendError> {
        let state = &mut self.state;
        while state.running.len() < state.limits.max_sequences as usize {
            let Some(next) = state.waiting.front() else {
                break;
            };
            let found = match next.may_reuse() && state.limits.prefix_cache {
                true => state.kv.find(next.origin(), &next.tokens),
                false => Vec::new(),
            };
            if !state.has_pages_for(next, &found) {
                break;
            }
            let Some(mut sequence) = state.waiting.pop_front() else {
                break;
            };
            state.kv.attach(&mut sequence.kv, &found);
            // At least one row must run, for its logits; it may not write to a shared block.
            if sequence.kv.capacity_tokens() == sequence.tokens.len() {
                for (from, to) in state.kv.copy_last(&mut sequence.kv) {
                    self.backend.copy_page(from, to)?;
                }
            }
            let n_held = sequence.kv.capacity_tokens();
            sequence.n_computed = n_held.min(sequence.tokens.len() - 1);
            state.count_lookup(&mut sequence);
            let place = state
                .running
                .partition_point(|s| s.arrival < sequence.arrival);
            state.running.insert(place, sequence);
        }
        Ok(())
    }
}

impl State {
    /// Whether a sequence may run without soon pushing others out: its tokens fit beside what the
    /// running ones still lack and one block more for each. An empty engine takes anyone.
    fn has_pages_for(&self, next: &Sequence, found: &[super::kv::BlockId]) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let chunk = self.limits.max_rows as usize;
        let lacks = |s: &Sequence| s.kv.missing_pages(s.tokens.len(), chunk) + s.kv.n_groups();
        let promised: usize = self.running.iter().map(lacks).sum();
        let n_tokens = next.tokens.len();
        let fresh = next.kv.missing_pages_behind(found.len(), n_tokens, chunk);
        let needed = promised + fresh + self.kv.attach_pages(&next.kv, found);
        needed <= self.kv.available_pages()
    }

    /// Counts a first lookup; a preempted sequence that returns is no hit.
    fn count_lookup(&self, sequence: &mut Sequence) {
        if sequence.n_cached.is_none() {
            sequence.n_cached = Some(sequence.n_computed as u32);
            if sequence.may_reuse() && self.limits.prefix_cache {
                self.stats.prefix_lookup(sequence.n_computed > 0);
            }
        }
    }

    /// Plans the next quantum, preempting until it can run. False when there is nothing to run.
    fn choose(&mut self, plan: &Plan) -> bool {
        loop {
            self.candidates.clear();
            let candidates = self.running.iter().map(Sequence::candidate);
            self.candidates.extend(candidates);
            let supply = Supply {
                max_rows: self.limits.max_rows,
                chunk_rows_max: self.limits.prefill_rows_beside_decode,
                max_scored_rows: MAX_SCORED_ROWS,
                n_pages: self.kv.available_pages() as u64,
                first_segment: plan.first_stage().segment,
                has_stages: plan.n_stages(plan.max_loops) > 1,
                policy: self.policy,
            };
            match batch::plan(&self.candidates, &supply, &mut self.quantum) {
                Decision::Run => return true,
                Decision::Preempt(index) => self.preempt(index),
                Decision::Idle => {
                    assert!(self.running.is_empty(), "the oldest can always run");
                    return false;
                }
            }
        }
    }

    /// Takes everything but its tokens from a running sequence and lets it wait.
    fn preempt(&mut self, index: usize) {
        let sequence = self.leave(index);
        self.wait_in_order(sequence);
        self.stats.preempted();
    }

    /// Puts a sequence that has run before among the waiting ones, by its arrival.
    fn wait_in_order(&mut self, sequence: Sequence) {
        let place = self
            .waiting
            .partition_point(|s| s.arrival < sequence.arrival);
        self.waiting.insert(place, sequence);
    }

    /// Removes a running sequence; its slots and pages are free again.
    fn leave(&mut self, index: usize) -> Sequence {
        let mut sequence = self.running.remove(index);
        self.free_slots.extend(sequence.reset());
        self.kv.release(&mut sequence.kv);
        sequence.kv = SequenceKv::new(
            sequence.origin(),
            sequence.kv.n_groups(),
            sequence.request.shares_blocks(),
        );
        sequence
    }

    /// Gives entering rows their pages and slots, and writes the pass. Page tables move into it.
    fn board(&mut self, plan: &Plan) {
        self.n_quanta += 1;
        self.pass.rows.clear();
        self.pass.sequences.clear();
        self.exits.clear();
        for (table_index, grant) in self.quantum.grants.iter().enumerate() {
            let sequence = &mut self.running[grant.candidate];
            let n_rows = grant.n_rows as usize;
            if grant.enters {
                let has_pages = self.kv.grow(&mut sequence.kv, sequence.n_computed + n_rows);
                assert!(has_pages, "the plan counted the pages");
                let first_slot = self.free_slots.len() - n_rows;
                sequence.slots.extend(self.free_slots.drain(first_slot..));
                sequence.last_served = self.n_quanta;
                sequence.enter(n_rows, plan.first_stage());
            }
            let Some(Flight { stage, .. }) = sequence.flight else {
                continue;
            };
            let exit = exits::rule_after(stage, sequence.loops, sequence.request.adaptive);
            for (offset, slot) in sequence.slots.iter().enumerate() {
                if !sequence.takes_part(offset, stage) {
                    continue;
                }
                if let Some(exit) = exit {
                    let row_idx = self.pass.rows.len() as u32;
                    self.exits.watch(row_idx, grant.candidate, offset, exit);
                }
                let position = sequence.n_computed + offset;
                self.pass.rows.push(Row {
                    slot: *slot,
                    token: sequence.tokens[position],
                    position: position as u32,
                    sequence: table_index as u32,
                    iteration: stage.iteration,
                    enters: grant.enters,
                });
            }
            let tables = std::mem::take(&mut sequence.kv.tables);
            self.pass.sequences.push(tables);
        }
        self.stats.quantum(self.pass.rows.len() as u32);
    }

    /// Takes the results of a pass: rows of landed flights are computed, tokens are chosen and sent,
    /// sequences that ended leave. `logits`: `(wanted, vocab_size)`.
    fn commit(&mut self, mut logits: &[f32]) {
        let vocab_size = self.limits.vocab_size as usize;
        let mut wanted = self.wanted.as_slice();
        let tables = self.pass.sequences.drain(..);
        for (grant, tables) in self.quantum.grants.iter().zip(tables) {
            let sequence = &mut self.running[grant.candidate];
            sequence.kv.tables = tables;
            if sequence.flight.is_some() {
                continue;
            }
            self.free_slots.extend(sequence.land());
            let (tokens, n_computed) = (&sequence.tokens, sequence.n_computed);
            self.kv.publish(&mut sequence.kv, tokens, n_computed);
            self.kv.drop_unseen(&mut sequence.kv, n_computed);
            let is_own = |row: &&Wanted| row.candidate == grant.candidate;
            let n_own = wanted.iter().take_while(is_own).count();
            let (own_rows, own_logits);
            (own_rows, wanted) = wanted.split_at(n_own);
            (own_logits, logits) = logits.split_at(n_own * vocab_size);
            let mut landing = Landing {
                sequence,
                sampler: &mut self.sampler,
                masks: &self.masks,
                end_tokens: &self.end_tokens,
                context_length: self.limits.context_length,
            };
            let positions = own_rows.iter().map(|row| row.position);
            landing.take(positions.zip(own_logits.chunks_exact(vocab_size)));
        }
        while let Some(index) = self.running.iter().position(|s| s.has_ended) {
            self.grant_pin(index);
            drop(self.leave(index));
        }
    }

    /// Shows the gauges to other threads.
    fn publish(&self) {
        self.stats.gauges(&Gauges {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            parked: self.parked.len() as u32,
            pages_used: self.kv.used_pages() as u32,
            pages_cached: self.kv.cached_pages() as u32,
            pages_pinned: self.kv.pinned_pages() as u32,
        });
    }
}
