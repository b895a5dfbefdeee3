//! The batcher: which rows run in the next quantum, or who must give up its pages.
//!
//! Pure: no lock, clock or log, and it changes nothing. The step loop describes every running
//! sequence as a [`Candidate`] and the free resources as [`Supply`]; [`plan`] answers.
//!
//! **No phases.** A candidate misses some rows. One that misses a single row (a generation that
//! goes on, or the end of a prompt) is served first; longer ones share what is left of the row
//! budget in the order of their arrival, each at most half of the rest while others wait behind
//! it, so that a long prompt delays neither the running generations nor a short prompt behind it.
//! When the budget does not even cover the single rows, all candidates take turns row by row, the
//! least recently served first.
//!
//! **Segments.** The rows that a sequence entered together are its *flight*; they rest in slots
//! between passes and move on together. A sequence enters its next rows when its flight has
//! landed. Slots are as many as `max_rows`, so a pass always takes every flight of its segment,
//! whatever its iteration. Which segment runs next is a simple rule: the coda if a flight waits for
//! it (its rows give tokens and free slots), else the first segment if that is not the core and
//! rows can enter it (they then join the core together), else the core. No segment starves: rows
//! enter only through free slots, and only the core feeds the coda. (A later issue refines it.)
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
    /// Its rows are prompt rows whose logits are wanted (prompt log-probabilities).
    pub is_scored: bool,
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

/// What a quantum may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supply {
    /// Most rows of a pass; there are as many slots.
    pub max_rows: u32,
    /// Most rows with wanted prompt logits that may be under way at once.
    pub max_scored_rows: u32,
    /// Pages that can be handed out.
    pub n_pages: u64,
    /// Where fresh rows enter.
    pub first_segment: Segment,
    /// Whether rows rest in slots between passes: the plan has more than one pass for some row.
    pub has_stages: bool,
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
    let mut entry = Entry::new(candidates, supply);
    if let Some(victim) = entry.fill(quantum) {
        return Decision::Preempt(victim);
    }
    let enters_core = supply.first_segment == Segment::Core;
    if enters_core || quantum.grants.is_empty() {
        board_flights(candidates, Segment::Core, quantum);
    } else {
        quantum.segment = supply.first_segment;
    }
    quantum.grants.sort_unstable_by_key(|grant| grant.candidate);
    match quantum.grants.is_empty() {
        true => Decision::Idle,
        false => Decision::Run,
    }
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
    /// Slots, which are rows as well.
    n_rows: u32,
    /// Rows that chunks of more than one row may take; see [`Entry::new`].
    n_chunk_rows: u32,
    n_scored_rows: u32,
    n_pages: u64,
}

impl<'a> Entry<'a> {
    /// Chunks whose rows rest over several passes must not hold every slot, or running generations
    /// would wait for them: one slot per sequence is out of their reach. Rows of an ordinary model
    /// leave in the same quantum, so there is nothing to keep.
    fn new(candidates: &'a [Candidate], supply: &Supply) -> Self {
        let flights = || {
            let under_way = |candidate: &Candidate| Some((candidate.flight?.n_rows, *candidate));
            candidates.iter().filter_map(under_way)
        };
        let n_held: u32 = flights().map(|(n_rows, _)| n_rows).sum();
        let in_chunks = flights().filter(|(n_rows, _)| *n_rows > 1);
        let n_in_chunks: u32 = in_chunks.map(|(n_rows, _)| n_rows).sum();
        let scored = flights().filter(|(_, candidate)| candidate.is_scored);
        let n_scored: u32 = scored.map(|(n_rows, _)| n_rows).sum();
        let kept = if supply.has_stages {
            candidates.len() as u32
        } else {
            0
        };
        let chunk_rows_max = supply.max_rows.saturating_sub(kept).max(1);
        Self {
            candidates,
            n_rows: supply.max_rows.saturating_sub(n_held),
            n_chunk_rows: chunk_rows_max.saturating_sub(n_in_chunks),
            n_scored_rows: supply.max_scored_rows.saturating_sub(n_scored),
            n_pages: supply.n_pages,
        }
    }

    /// Writes the grants; `Some(victim)` when a sequence must give up its pages first.
    fn fill(&mut self, quantum: &mut Quantum) -> Option<usize> {
        let candidates = self.candidates;
        let ready = || {
            let can_enter = |(_, candidate): &(usize, &Candidate)| {
                candidate.flight.is_none() && candidate.n_missing > 0
            };
            candidates.iter().enumerate().filter(can_enter)
        };
        let is_single = |(_, candidate): &(usize, &Candidate)| candidate.n_missing == 1;
        let n_singles = ready().filter(is_single).count() as u32;
        let n_chunks = ready().count() as u32 - n_singles;
        if self.n_rows < n_singles + u32::from(n_chunks > 0) {
            return self.take_turns(quantum);
        }
        for (index, _) in ready().filter(is_single) {
            if let Some(victim) = self.serve(index, 1, quantum) {
                return Some(victim);
            }
        }
        let mut n_behind = n_chunks;
        for (index, _) in ready().filter(|each| !is_single(each)) {
            n_behind -= 1;
            let rest = self.n_rows.min(self.n_chunk_rows);
            let share = match n_behind {
                0 => rest,
                _ => rest.div_ceil(2),
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

    /// Too few rows for everyone: one each, the least recently served first.
    fn take_turns(&mut self, quantum: &mut Quantum) -> Option<usize> {
        let candidates = self.candidates;
        let mut order: Vec<usize> = (0..candidates.len())
            .filter(|i| candidates[*i].flight.is_none() && candidates[*i].n_missing > 0)
            .collect();
        order.sort_by_key(|i| (candidates[*i].last_served, *i));
        for index in order {
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

    /// Extends the chunks in the order of arrival while rows are left.
    fn use_the_rest(&mut self, quantum: &mut Quantum) {
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
