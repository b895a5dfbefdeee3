//! One generation inside the engine: counters, not phases.
//!
//! A sequence has *tokens* (prompt, then what was generated) and *positions computed*. Whatever is
//! missing between the two is given rows; the row of the last token yields the next one. A new
//! prompt, a chunk of it, the continuation after a prefix hit and the recompute after a preemption
//! are the same thing with different counters.
//!
//! ```text
//! tokens    [ prompt ............................ | generated ........ ]
//! computed  [ cached | computed ........ ) flight ) missing            )
//! ```
//!
//! Owned by the engine thread. What is not here: who runs when (`batch`), pages (`kv`).

use super::batch;
use super::kv::{Origin, SequenceKv};
use super::masks::Constrained;
use super::mirostat;
use super::pooled::Pooled;
use crate::backend::{CacheWindow, SlotId};
use crate::config::Pooling;
use crate::model::exit::RowExit;
use crate::model::{Plan, Segment, Stage};
use crate::request::{
    AdaptiveExit, ConsumerGone, FinishReason, GenerationEvent, GenerationRequest, Job, JobSink,
    Mirostat, PinError, PrefixId, RequestError, TokenId, TokenLogprob, Usage, random_u64,
};
use crossbeam_channel::Sender;
use std::sync::Arc;

/// Rows that entered together and rest in their slots between passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flight {
    /// Rows; the first one's position is `Sequence::n_computed`.
    pub(super) n_rows: usize,
    /// The pass they need next.
    pub(super) stage: Stage,
}

/// How far a row of the flight may go, and went.
#[derive(Clone, Copy, Debug, Default)]
struct RowLoops {
    exit: RowExit,
    /// Loops after which it left.
    left_after: Option<u32>,
}

/// What a generated token means for its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Send it and go on.
    Continue,
    /// It ends the answer and is not sent.
    Stop,
    /// Send it; it is the last one that fits.
    Length,
}

/// What a sequence does for a prefix that shall be kept.
pub(super) struct PinWish {
    pub(super) id: PrefixId,
    /// Dropped unanswered when the sequence ends early.
    pub(super) answer: Sender<Result<u32, PinError>>,
}

/// One generation.
pub(super) struct Sequence {
    pub(super) request: Arc<GenerationRequest>,
    sink: Box<dyn JobSink>,
    /// Rises with the time of submission; the larger, the younger.
    pub(super) arrival: u64,
    pub(super) loops: u32,
    pub(super) seed: u64,
    /// Where mirostat cuts next, in bits; of no meaning without it. It stays over a preemption.
    pub(super) mirostat_cut: f32,
    /// Prompt, then generated tokens.
    pub(super) tokens: Vec<TokenId>,
    /// Positions whose K/V are in the pages.
    pub(super) n_computed: usize,
    pub(super) flight: Option<Flight>,
    /// Slots of the flight's rows, in order of position.
    pub(super) slots: Vec<SlotId>,
    /// One per row of the flight when they may leave the loop early; else empty.
    row_loops: Vec<RowLoops>,
    pub(super) kv: SequenceKv,
    /// Prompt tokens found in the cache when it first ran; None before.
    pub(super) n_cached: Option<u32>,
    /// Its prompt is to be pinned once it is computed, and who hears of it.
    pub(super) pin: Option<PinWish>,
    /// What its answer must look like, if anything; taken out while a token is chosen.
    pub(super) constrained: Option<Constrained>,
    /// Log-probabilities of prompt tokens 1.. so far; None when not asked or already sent.
    scored: Option<Vec<TokenLogprob>>,
    /// Of a sequence that asks for its embedding.
    pub(super) pooled: Option<Pooled>,
    /// Its rows all enter together, since each of them sees them all.
    is_whole: bool,
    /// Positions whose loops are counted: all that were ever computed. What is computed again after
    /// a preemption is not counted again, so that only time tells.
    n_counted: usize,
    /// Counts for [`Usage`].
    loop_rows: u64,
    loop_iterations: u64,
    /// Number of the quantum in which rows of it entered last.
    pub(super) last_served: u64,
    /// It has told its sink the end and leaves after this quantum.
    pub(super) has_ended: bool,
}

impl Sequence {
    /// Of a request that the limits admit. `pooling`: how embeddings are made here.
    pub(super) fn new(job: Job, arrival: u64, plan: &Plan, pooling: Option<Pooling>) -> Self {
        let request = job.request;
        let loops = request.loops.unwrap_or(plan.default_loops);
        let seed = request.sampling.seed.unwrap_or_else(|| random_u64(arrival));
        let scored = request.prompt_logprobs.map(|_| Vec::new());
        let pooled = pooling.filter(|_| request.embed).map(Pooled::new);
        Self {
            sink: job.sink,
            arrival,
            loops,
            seed,
            mirostat_cut: request.mirostat().map_or(0.0, mirostat::first_cut),
            tokens: request.prompt.to_vec(),
            n_computed: 0,
            flight: None,
            slots: Vec::new(),
            row_loops: Vec::new(),
            kv: SequenceKv::new(
                request.origin(loops),
                plan.kv_groups(loops),
                request.shares_blocks(),
            ),
            n_cached: None,
            pin: None,
            constrained: None,
            scored,
            pooled,
            is_whole: plan.is_bidirectional,
            n_counted: 0,
            loop_rows: 0,
            loop_iterations: 0,
            last_served: 0,
            has_ended: false,
            request,
        }
    }

    /// What its K/V depend on beside the tokens.
    pub(super) fn origin(&self) -> Origin {
        self.request.origin(self.loops)
    }

    /// Whether blocks of others may stand in front of it. Prompt scores need every prompt row.
    pub(super) fn may_reuse(&self) -> bool {
        self.request.shares_blocks() && self.request.prompt_logprobs.is_none()
    }

    /// Whether tokens may come that were not chosen from logits: not where each has its probability
    /// told, and not where one that is forced might be banned.
    pub(super) fn may_force(&self) -> bool {
        self.request.logprobs.is_none() && !self.request.sampling.bans_tokens()
    }

    pub(super) fn n_prompt(&self) -> usize {
        self.request.prompt.len()
    }

    pub(super) fn n_generated(&self) -> usize {
        self.tokens.len() - self.n_prompt()
    }

    /// How the batcher sees it.
    pub(super) fn candidate(&self) -> batch::Candidate {
        let n_entered = self.n_computed + self.flight.map_or(0, |flight| flight.n_rows);
        let flight = self.flight.map(|flight| batch::Flight {
            segment: flight.stage.segment,
            n_rows: flight.n_rows as u32,
        });
        batch::Candidate {
            n_missing: (self.tokens.len() - n_entered) as u32,
            flight,
            n_room: (self.kv.capacity_tokens() - n_entered) as u32,
            n_groups: self.kv.n_groups() as u32,
            loops: self.loops,
            is_scored: self.scored.is_some(),
            is_whole: self.is_whole,
            last_served: self.last_served,
        }
    }

    /// Whether the logits after the token at `position` are wanted: for the next token, or for the
    /// score of the prompt token that follows.
    pub(super) fn wants_logits(&self, position: usize) -> bool {
        let yields_token = position + 1 == self.tokens.len() && self.request.max_tokens > 0;
        let n_scored = self.scored.as_ref().map(Vec::len);
        let yields_score = position + 1 < self.n_prompt();
        yields_token || (yields_score && n_scored.is_some_and(|n_scored| position >= n_scored))
    }

    /// Whether the state of the token at `position` counts for the embedding.
    pub(super) fn wants_state(&self, position: usize) -> bool {
        let n_tokens = self.n_prompt();
        let pooled = self.pooled.as_ref();
        pooled.is_some_and(|pooled| pooled.wants(position, n_tokens))
    }

    /// Sends its next rows on their way, in the slots that it was given for them.
    pub(super) fn enter(&mut self, n_rows: usize, stage: Stage) {
        self.flight = Some(Flight { n_rows, stage });
        if self.request.adaptive.is_some() {
            self.row_loops.resize(n_rows, RowLoops::default());
        }
    }

    /// Whether a row of the flight takes part in its next pass: those that left the loop rest until
    /// all have.
    pub(super) fn takes_part(&self, offset: usize, stage: Stage) -> bool {
        let has_left = |row: &RowLoops| row.left_after.is_some();
        stage.segment != Segment::Core || !self.row_loops.get(offset).is_some_and(has_left)
    }

    /// Whether a row leaves the loop after `loops` of them, the last of which showed `signal`.
    pub(super) fn leaves(
        &mut self,
        offset: usize,
        exit: AdaptiveExit,
        signal: f32,
        loops: u32,
    ) -> bool {
        let row = &mut self.row_loops[offset];
        let is_done = row.exit.is_done(exit, signal);
        row.left_after = is_done.then_some(loops);
        is_done
    }

    /// Moves the flight on after a pass. True when it has landed: its rows are in the slots still.
    pub(super) fn advance(&mut self, plan: &Plan) -> bool {
        let Some(flight) = &mut self.flight else {
            return false;
        };
        let all_left = self.row_loops.iter().all(|row| row.left_after.is_some());
        let loops = match !self.row_loops.is_empty() && all_left {
            true => flight.stage.iteration + 1,
            false => self.loops,
        };
        match plan.next_stage(flight.stage, loops) {
            Some(stage) => flight.stage = stage,
            None => self.flight = None,
        }
        self.flight.is_none()
    }

    /// Books the rows of a landed flight as computed; returns their slots, which are free.
    pub(super) fn land(&mut self) -> std::vec::Drain<'_, SlotId> {
        for offset in 0..self.slots.len() {
            let left_after = self.row_loops.get(offset).and_then(|row| row.left_after);
            let position = self.n_computed + offset;
            if position >= self.n_counted {
                self.n_counted = position + 1;
                self.loop_rows += 1;
                self.loop_iterations += u64::from(left_after.unwrap_or(self.loops));
            }
        }
        self.n_computed += self.slots.len();
        self.row_loops.clear();
        self.slots.drain(..)
    }

    /// Forgets all that it has computed, and what was under way; returns the slots of that.
    pub(super) fn reset(&mut self) -> std::vec::Drain<'_, SlotId> {
        self.flight = None;
        self.n_computed = 0;
        self.row_loops.clear();
        self.slots.drain(..)
    }

    /// Notes the score of the next prompt token.
    pub(super) fn add_score(&mut self, score: TokenLogprob) {
        if let Some(scored) = &mut self.scored {
            scored.push(score);
        }
    }

    /// Sends the prompt's scores once they are complete.
    pub(super) fn send_scores(&mut self) -> Result<(), ConsumerGone> {
        let n_scores = self.n_prompt() - 1;
        // The last prompt row has no score of its own, but it must have run: order of events.
        match self
            .scored
            .take_if(|s| s.len() == n_scores && self.n_computed > n_scores)
        {
            Some(scored) => self.sink.emit(GenerationEvent::PromptLogprobs(scored)),
            None => Ok(()),
        }
    }

    /// Whether nothing is left to do: a request without tokens to generate whose prompt is computed.
    pub(super) fn is_only_prompt_and_done(&self) -> bool {
        self.request.max_tokens == 0 && self.n_computed == self.tokens.len()
    }

    /// Tokens that may not be chosen next: all that would end the answer too early.
    pub(super) fn forbidden<'a>(&'a self, end_tokens: &'a [TokenId]) -> [&'a [TokenId]; 2] {
        let stop = &self.request.stop;
        if self.request.constraint.is_some() {
            return [&[], &[]]; // the grammar says where the answer may end
        }
        let is_early = self.n_generated() < stop.min_tokens as usize;
        let no_end = if is_early || stop.ignore_eos {
            end_tokens
        } else {
            &[]
        };
        let no_stop: &[TokenId] = if is_early { &stop.token_ids } else { &[] };
        [no_end, no_stop]
    }

    /// Notes how surprising the chosen token was, where mirostat chose it.
    pub(super) fn note_surprise(&mut self, surprise: Option<f32>) {
        if let (Some(mirostat), Some(bits)) = (self.request.mirostat(), surprise) {
            self.mirostat_cut = mirostat::next_cut(self.mirostat_cut, mirostat, bits);
        }
    }

    /// Adds a generated token.
    pub(super) fn push(
        &mut self,
        token: TokenId,
        end_tokens: &[TokenId],
        context_length: u32,
    ) -> Verdict {
        self.tokens.push(token);
        let stop = &self.request.stop;
        let ends = end_tokens.contains(&token) && !stop.ignore_eos;
        if ends || stop.token_ids.contains(&token) {
            Verdict::Stop
        } else if self.n_generated() >= self.request.max_tokens as usize
            || self.tokens.len() >= context_length as usize
        {
            Verdict::Length
        } else {
            Verdict::Continue
        }
    }

    /// Sends a generated token.
    pub(super) fn send_token(
        &mut self,
        token: TokenId,
        logprob: Option<TokenLogprob>,
    ) -> Result<(), ConsumerGone> {
        let usage = self.usage();
        self.sink.emit(GenerationEvent::Token {
            token,
            logprob,
            usage,
        })
    }

    /// Sends the embedding and ends.
    pub(super) fn finish_embedding(&mut self) -> Result<(), ConsumerGone> {
        let vector = self.pooled.as_ref().and_then(Pooled::vector);
        match vector {
            Some(vector) => self.sink.emit(GenerationEvent::Embedding(vector))?,
            None => {
                let fault = "the model gave values that are not numbers".to_owned();
                self.fail(RequestError::Fault(fault));
                return Ok(());
            }
        }
        self.finish(FinishReason::Stop);
        Ok(())
    }

    /// Counts so far.
    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.n_prompt() as u32,
            cached_tokens: self.n_cached.unwrap_or(0),
            completion_tokens: self.n_generated() as u32,
            reasoning_tokens: 0,
            loops: self.loops,
            loop_rows: self.loop_rows,
            loop_iterations: self.loop_iterations,
        }
    }

    /// Ends well. A consumer that is gone does not matter any more.
    pub(super) fn finish(&mut self, reason: FinishReason) {
        let usage = self.usage();
        self.has_ended = true;
        let _ = self.sink.emit(GenerationEvent::Finished { reason, usage });
    }

    /// Ends badly.
    pub(super) fn fail(&mut self, error: RequestError) {
        self.has_ended = true;
        let _ = self.sink.emit(GenerationEvent::Failed(error));
    }
}

impl GenerationRequest {
    /// What its rows see of each other.
    pub(crate) fn window(&self) -> CacheWindow {
        CacheWindow {
            tokens: self.cache_window,
            n_kept: match self.cache_window {
                0 => 0,
                _ => self.kept_tokens,
            },
        }
    }

    /// Whether it uses blocks of earlier requests and leaves its own to later ones. An embedding may
    /// need the state of every token, and its K/V are freed at once.
    pub(super) fn shares_blocks(&self) -> bool {
        self.reuse_prefix && !self.embed
    }

    /// How its surprise is steered, if at all.
    fn mirostat(&self) -> Option<&Mirostat> {
        self.sampling.extra.as_ref()?.mirostat.as_ref()
    }

    /// What the K/V of a request depend on beside its tokens; `loops` is what it asked or the
    /// model's default.
    pub(super) fn origin(&self, loops: u32) -> Origin {
        Origin {
            loops,
            window: self.window(),
            exit: self
                .adaptive
                .map(|exit| (exit.rule, exit.threshold.to_bits())),
            isolation_key: self.isolation_key,
        }
    }
}
