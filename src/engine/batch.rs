//! The batcher: which rows run in the next quantum, or who must give up its pages.
//!
//! Pure: no lock, clock or log, and it changes nothing. The step loop describes every running
//! sequence as a [`Candidate`] and the free resources as [`Supply`]; [`plan`] answers.
//!
//! **No phases.** A candidate misses some rows. One that misses a single row (a generation that
//! goes on, or the end of a prompt) is served first; longer ones, the *chunks*, share what is left of
//! the row budget in the order of their arrival, each at most half of the rest while others wait
//! behind it, so that a long prompt delays neither the running generations nor a short prompt behind
//! it. When the budget does not even cover the single rows, all candidates take turns row by row, the
//! least recently served first.
//!
//! **How long a quantum takes** grows with its rows, and every generation waits for it. So the rows of
//! chunks that are under way at once are bounded by `chunk_rows_max` while anybody generates. Where
//! rows rest over several passes (below) the bound always holds, because a chunk stays in every pass
//! of its L loops and whoever comes meanwhile has to run beside it; and a prompt takes half of the rest
//! even when nobody waits behind it, three quarters if that is all of it, so that a short prompt which
//! comes while a long one loops enters at once and whole.
//!
//! **Segments.** The rows that a sequence entered together are its *flight*; they rest in slots
//! between passes and move on together. A sequence enters its next rows when its flight has
//! landed. Slots are as many as `max_rows`, so a pass always takes every flight of its segment,
//! whatever its iteration. Which segment runs next:
//!
//! ```text
//! a flight waits for the coda ─► coda         its rows give tokens and free slots
//! else rows can enter         ─► prelude      they join the very next core pass
//! else                        ─► core         everything that is in it, whatever its iteration
//! (without a prelude rows enter with the core pass; without a coda they land from it)
//! ```
//!
//! So whoever leaves the core in one pass shares a coda, the tokens that follow from it share a
//! prelude with everybody who came meanwhile, and nobody ever waits for a neighbour to catch up. No
//! segment starves: rows enter only through free slots, and only the core feeds the coda.
//!
//! **Pages.** The oldest sequence always gets its pages. One that gets none while younger ones run
//! makes the youngest give up all of its own (`Decision::Preempt`; the caller does it and asks
//! again); with none younger it waits. Pages are taken on entry only, so flights never need any.

use crate::backend::PAGE_TOKENS;
use crate::model::Segment;

/// A running sequence as the batcher sees it. Candidates come in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Rows that have not entered yet. At least 1 unless the sequence has a flight.
    pub n_missing: u32,
    /// Rows under way and the segment they need next. Then nothing else of it can enter.
    pub flight: Option<Flight>,
    /// Positions left in the pages that it holds.
    pub n_room: u32,
    /// Pages of one further block.
    pub n_groups: u32,
    /// Its depth.
    pub loops: u32,
    /// Its rows are prompt rows whose logits are wanted (prompt log-probabilities).
    pub is_scored: bool,
    /// All its rows enter in one quantum or none does: each sees all of them.
    pub is_whole: bool,
    /// Number of the quantum in which rows of it entered last.
    pub last_served: u64,
}

/// Rows that move through the segments together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flight {
    /// The pass they need next.
    pub segment: Segment,
    /// How many they are.
    pub n_rows: u32,
}

impl Candidate {
    /// Whether it has one row, under way or to come: a generation, as far as the batcher cares.
    fn is_single(&self) -> bool {
        self.n_missing + self.flight.map_or(0, |flight| flight.n_rows) == 1
    }

    fn can_enter(&self) -> bool {
        self.flight.is_none() && self.n_missing > 0
    }
}

/// Which sequences may share passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BatchPolicy {
    /// All of them: the point of this engine.
    #[default]
    DepthWise,
    /// Those of one depth, token by token, the depths taking turns: what a server does that batches
    /// within each depth. For comparison only (`tinyloop bench-depth`).
    DepthTurns,
}

/// What a quantum may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supply {
    /// Most rows of a pass; there are as many slots.
    pub max_rows: u32,
    /// Most rows of chunks under way at once beside generations; see the module doc. 0 counts as 1.
    pub chunk_rows_max: u32,
    /// Most rows with wanted prompt logits that may be under way at once.
    pub max_scored_rows: u32,
    /// Pages that can be handed out.
    pub n_pages: u64,
    /// Where fresh rows enter.
    pub first_segment: Segment,
    /// Whether rows rest in slots between passes: the plan has more than one pass for some row.
    pub has_stages: bool,
    /// Who may share the pass.
    pub policy: BatchPolicy,
}

/// Rows of one candidate in the quantum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Index of the candidate.
    pub candidate: usize,
    /// Its flight's rows, or rows that enter.
    pub n_rows: u32,
    /// Whether they enter now.
    pub enters: bool,
}

/// One pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantum {
    /// The segment it runs.
    pub segment: Segment,
    /// By rising candidate, each at most once.
    pub grants: Vec<Grant>,
}

impl Quantum {
    /// Nothing to run; a place for [`plan`] to write to.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            segment: Segment::Core,
            grants: Vec::new(),
        }
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// There is no candidate.
    Idle,
    /// Run the quantum that was written.
    Run,
    /// Take all pages and rows of this candidate, then plan again.
    Preempt(usize),
}

/// Decides the next quantum and writes it to `quantum`, whose buffer is reused.
pub fn plan(candidates: &[Candidate], supply: &Supply, quantum: &mut Quantum) -> Decision {
    quantum.grants.clear();
    if has_flight(candidates, Segment::Coda) {
        board_flights(candidates, Segment::Coda, quantum);
        return Decision::Run;
    }
    let turn = match supply.policy {
        BatchPolicy::DepthWise => None,
        BatchPolicy::DepthTurns => depth_in_turn(candidates),
    };
    if let Some(victim) = Entry::new(candidates, supply, turn).fill(quantum) {
        return Decision::Preempt(victim);
    }
    let enters_core = supply.first_segment == Segment::Core;
    if enters_core || quantum.grants.is_empty() {
        board_flights(candidates, Segment::Core, quantum);
    } else {
        quantum.segment = supply.first_segment;
    }
    if quantum.grants.is_empty() && turn.is_some() {
        // Those whose turn it is wait for pages, which only the others can free.
        let supply = Supply {
            policy: BatchPolicy::DepthWise,
            ..*supply
        };
        return plan(candidates, &supply, quantum);
    }
    quantum.grants.sort_unstable_by_key(|grant| grant.candidate);
    match quantum.grants.is_empty() {
        true => Decision::Idle,
        false => Decision::Run,
    }
}

/// The depth that was served longest ago; 0, which nobody has, while rows are under way: those of a
/// depth enter together and are awaited.
fn depth_in_turn(candidates: &[Candidate]) -> Option<u32> {
    if candidates
        .iter()
        .any(|candidate| candidate.flight.is_some())
    {
        return Some(0);
    }
    let served_last = |depth: u32| {
        let of_depth = candidates.iter().filter(|each| each.loops == depth);
        of_depth.map(|each| each.last_served).max()
    };
    let depths = candidates.iter().map(|candidate| candidate.loops);
    depths.min_by_key(|depth| served_last(*depth))
}

fn has_flight(candidates: &[Candidate], segment: Segment) -> bool {
    let mut flights = candidates.iter().filter_map(|candidate| candidate.flight);
    flights.any(|flight| flight.segment == segment)
}

/// Adds every flight that waits for `segment`.
fn board_flights(candidates: &[Candidate], segment: Segment, quantum: &mut Quantum) {
    quantum.segment = segment;
    for (index, candidate) in candidates.iter().enumerate() {
        if let Some(flight) = candidate.flight
            && flight.segment == segment
        {
            quantum.grants.push(Grant {
                candidate: index,
                n_rows: flight.n_rows,
                enters: false,
            });
        }
    }
}

/// Hands out entries; what is left of each resource while doing so.
struct Entry<'a> {
    candidates: &'a [Candidate],
    /// The only depth that may enter; None = any.
    depth: Option<u32>,
    /// Chunks leave room for whoever comes while they loop.
    has_stages: bool,
    /// Slots, which are rows as well.
    n_rows: u32,
    /// Rows that chunks may take; see [`Entry::new`].
    n_chunk_rows: u32,
    n_scored_rows: u32,
    n_pages: u64,
}

impl<'a> Entry<'a> {
    /// Chunks whose rows rest over several passes must not hold every slot, or running generations
    /// would wait for them: one slot per sequence is out of their reach. Rows of an ordinary model
    /// leave in the same quantum, so there is nothing to keep.
    fn new(candidates: &'a [Candidate], supply: &Supply, depth: Option<u32>) -> Self {
        let flights = || {
            let under_way = |candidate: &Candidate| Some((candidate.flight?.n_rows, *candidate));
            candidates.iter().filter_map(under_way)
        };
        let n_held: u32 = flights().map(|(n_rows, _)| n_rows).sum();
        let in_chunks = flights().filter(|(_, candidate)| !candidate.is_single());
        let n_in_chunks: u32 = in_chunks.map(|(n_rows, _)| n_rows).sum();
        let scored = flights().filter(|(_, candidate)| candidate.is_scored);
        let n_scored: u32 = scored.map(|(n_rows, _)| n_rows).sum();
        let has_stages = supply.has_stages;
        let kept = if has_stages {
            candidates.len() as u32
        } else {
            0
        };
        let mut chunk_rows_max = supply.max_rows.saturating_sub(kept);
        if has_stages || candidates.iter().any(Candidate::is_single) {
            chunk_rows_max = chunk_rows_max.min(supply.chunk_rows_max);
        }
        Self {
            candidates,
            depth,
            has_stages,
            n_rows: supply.max_rows.saturating_sub(n_held),
            n_chunk_rows: chunk_rows_max.max(1).saturating_sub(n_in_chunks),
            n_scored_rows: supply.max_scored_rows.saturating_sub(n_scored),
            n_pages: supply.n_pages,
        }
    }

    /// Those who may enter, by arrival.
    fn ready(&self) -> impl Iterator<Item = (usize, &'a Candidate)> + use<'a> {
        let depth = self.depth;
        let may_enter = move |(_, candidate): &(usize, &Candidate)| {
            candidate.can_enter() && depth.is_none_or(|depth| candidate.loops == depth)
        };
        self.candidates.iter().enumerate().filter(may_enter)
    }

    /// Writes the grants; `Some(victim)` when a sequence must give up its pages first.
    fn fill(&mut self, quantum: &mut Quantum) -> Option<usize> {
        if self.candidates.iter().any(|candidate| candidate.is_whole) {
            self.fill_whole(quantum);
            return None;
        }
        let is_single = |(_, candidate): &(usize, &Candidate)| candidate.is_single();
        let n_singles = self.ready().filter(is_single).count() as u32;
        let n_chunks = self.ready().count() as u32 - n_singles;
        if self.n_rows < n_singles + u32::from(n_chunks > 0) {
            return self.take_turns(quantum);
        }
        for (index, _) in self.ready().filter(is_single) {
            if let Some(victim) = self.serve(index, 1, quantum) {
                return Some(victim);
            }
        }
        let mut n_behind = n_chunks;
        for (index, candidate) in self.ready().filter(|each| !is_single(each)) {
            n_behind -= 1;
            let rest = self.n_rows.min(self.n_chunk_rows);
            let half = rest.div_ceil(2);
            let share = match n_behind {
                // Three quarters where that ends the prompt: what is left is for those who come.
                _ if self.has_stages && candidate.n_missing <= rest - rest / 4 => rest,
                0 if !self.has_stages => rest,
                _ => half,
            };
            if share > 0
                && let Some(victim) = self.serve(index, share, quantum)
            {
                return Some(victim);
            }
        }
        self.use_the_rest(quantum);
        None
    }

    /// Those whose rows enter together, in the order of arrival as far as rows and pages go. One that
    /// does not fit beside the others is passed by; it is the oldest soon, and the oldest always fits.
    /// Where rows stay under way for several passes nobody passes it, or it would never find room.
    fn fill_whole(&mut self, quantum: &mut Quantum) {
        for (index, candidate) in self.ready() {
            let n_rows = candidate.n_missing;
            if n_rows <= self.n_rows && n_rows <= self.rows_in_pages(candidate, 0) {
                self.take(candidate, 0, n_rows);
                quantum.grants.push(Grant {
                    candidate: index,
                    n_rows,
                    enters: true,
                });
            } else if self.has_stages {
                break;
            }
        }
    }

    /// Too few rows for everyone: one each, the least recently served first.
    fn take_turns(&mut self, quantum: &mut Quantum) -> Option<usize> {
        let mut order: Vec<(u64, usize)> = self
            .ready()
            .map(|(index, candidate)| (candidate.last_served, index))
            .collect();
        order.sort_unstable();
        for (_, index) in order {
            if self.n_rows == 0 {
                break;
            }
            if let Some(victim) = self.serve(index, 1, quantum) {
                return Some(victim);
            }
        }
        None
    }

    /// Gives a candidate at most `n_rows`; `Some(victim)` when it needs pages that a younger holds.
    fn serve(&mut self, index: usize, n_rows: u32, quantum: &mut Quantum) -> Option<usize> {
        let candidate = &self.candidates[index];
        let mut n_rows = n_rows.min(candidate.n_missing).min(self.n_rows);
        if candidate.is_scored {
            n_rows = n_rows.min(self.n_scored_rows);
        }
        if n_rows == 0 {
            return None;
        }
        let n_granted = n_rows.min(self.rows_in_pages(candidate, 0));
        if n_granted == 0 {
            let youngest = self.candidates.len() - 1;
            return (youngest > index).then_some(youngest);
        }
        self.take(candidate, 0, n_granted);
        quantum.grants.push(Grant {
            candidate: index,
            n_rows: n_granted,
            enters: true,
        });
        None
    }

    /// Extends the chunks in the order of arrival while rows are left, unless they would loop with
    /// them.
    fn use_the_rest(&mut self, quantum: &mut Quantum) {
        if self.has_stages {
            return;
        }
        for grant in &mut quantum.grants {
            let candidate = &self.candidates[grant.candidate];
            let missing = candidate.n_missing - grant.n_rows;
            let mut n_more = missing.min(self.n_rows).min(self.n_chunk_rows);
            if candidate.is_scored {
                n_more = n_more.min(self.n_scored_rows);
            }
            n_more = n_more.min(self.rows_in_pages(candidate, grant.n_rows));
            self.take(candidate, grant.n_rows, n_more);
            grant.n_rows += n_more;
        }
    }

    /// Rows that the pages allow beyond `n_before` of this quantum.
    fn rows_in_pages(&self, candidate: &Candidate, n_before: u32) -> u32 {
        let n_blocks = self.n_pages / u64::from(candidate.n_groups);
        let in_new = u32::try_from(n_blocks * PAGE_TOKENS as u64).unwrap_or(u32::MAX / 2);
        (self.room(candidate, n_before)).saturating_add(in_new)
    }

    /// Positions left in pages that the candidate holds or was just given.
    fn room(&self, candidate: &Candidate, n_before: u32) -> u32 {
        match n_before.checked_sub(candidate.n_room) {
            None => candidate.n_room - n_before,
            Some(beyond) => beyond.next_multiple_of(PAGE_TOKENS as u32) - beyond,
        }
    }

    fn take(&mut self, candidate: &Candidate, n_before: u32, n_rows: u32) {
        let beyond = n_rows.saturating_sub(self.room(candidate, n_before));
        let n_blocks = u64::from(beyond.div_ceil(PAGE_TOKENS as u32));
        self.n_pages -= n_blocks * u64::from(candidate.n_groups);
        self.n_rows -= n_rows;
        if candidate.n_missing > 1 {
            self.n_chunk_rows = self.n_chunk_rows.saturating_sub(n_rows);
        }
        if candidate.is_scored {
            self.n_scored_rows -= n_rows;
        }
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
