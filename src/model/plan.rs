//! Segments and virtual layers: the only file that knows loops.
//!
//! Every model is `prelude + core x L + coda`. An ordinary transformer is a core alone with L = 1.
//! A *virtual layer* is one use of a block; its keys and values are its own. The engine walks a
//! row through its stages and never computes a KV place itself:
//!
//! ```text
//! first_stage ─► Prelude ─► Core 0 ─► Core 1 ─► .. ─► Core L-1 ─► Coda ─► (logits)
//!                 (segments without blocks are left out)
//! ```
//!
//! **KV groups.** Group 0 holds prelude and coda, when the model has either; then follows one
//! group per core iteration. A page holds one group's layers of `PAGE_TOKENS` positions, so all
//! groups share one page size, that of the larger group.
//!
//! Pure data and arithmetic: no thread, no weights, no pages.

use crate::backend::KvPlace;
use std::ops::Range;

/// Which segment a pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Segment {
    /// Blocks before the loop.
    Prelude,
    /// The loop's blocks, once.
    Core,
    /// Blocks after the loop.
    Coda,
}

/// Where a row stands: the pass it needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stage {
    /// The segment to run.
    pub segment: Segment,
    /// Iteration of the segment, from 0; always 0 outside the core.
    pub iteration: u32,
}

/// How a model's segments run and where their KV lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Blocks before the loop, `[start, end)` of the file's blocks.
    pub prelude: Range<u32>,
    /// Blocks of the loop.
    pub core: Range<u32>,
    /// Blocks after the loop.
    pub coda: Range<u32>,
    /// Loops a request gets when it asks for none; 1 for ordinary models.
    pub default_loops: u32,
    /// Most loops a request may ask for.
    pub max_loops: u32,
    /// Every row of a sequence sees all of them (encoders), so they enter and go on together.
    pub is_bidirectional: bool,
}

impl Plan {
    /// An ordinary transformer: all blocks are a core that runs once.
    #[must_use]
    pub fn ordinary(n_layers: u32) -> Self {
        Self::looped(0, n_layers, 0, 1, 1)
    }

    /// A looped transformer. The counts are blocks; the core has at least one, loops are at least 1.
    ///
    /// # Panics
    /// When the core is empty or `1 <= default_loops <= max_loops` does not hold: the caller's bug.
    #[must_use]
    pub fn looped(prelude: u32, core: u32, coda: u32, default_loops: u32, max_loops: u32) -> Self {
        assert!(core > 0, "the core of a plan needs a block");
        assert!(1 <= default_loops && default_loops <= max_loops);
        Self {
            prelude: 0..prelude,
            core: prelude..prelude + core,
            coda: prelude + core..prelude + core + coda,
            default_loops,
            max_loops,
            is_bidirectional: false,
        }
    }

    /// Blocks of a segment, `[start, end)` of the file's blocks.
    #[must_use]
    pub fn blocks(&self, segment: Segment) -> Range<u32> {
        match segment {
            Segment::Prelude => self.prelude.clone(),
            Segment::Core => self.core.clone(),
            Segment::Coda => self.coda.clone(),
        }
    }

    /// The segment of one of the file's blocks.
    #[must_use]
    pub fn segment_of(&self, block: u32) -> Segment {
        if self.prelude.contains(&block) {
            Segment::Prelude
        } else if self.core.contains(&block) {
            Segment::Core
        } else {
            Segment::Coda
        }
    }

    /// The first pass of a fresh row.
    #[must_use]
    pub fn first_stage(&self) -> Stage {
        let segment = if self.prelude.is_empty() {
            Segment::Core
        } else {
            Segment::Prelude
        };
        Stage {
            segment,
            iteration: 0,
        }
    }

    /// The pass after `stage` for a row that runs `loops` core iterations; None when the row is
    /// done, so that its logits may be taken in the pass of `stage`.
    #[must_use]
    pub fn next_stage(&self, stage: Stage, loops: u32) -> Option<Stage> {
        let core = |iteration| Stage {
            segment: Segment::Core,
            iteration,
        };
        match stage.segment {
            Segment::Prelude => Some(core(0)),
            Segment::Core if stage.iteration + 1 < loops => Some(core(stage.iteration + 1)),
            Segment::Core if !self.coda.is_empty() => Some(Stage {
                segment: Segment::Coda,
                iteration: 0,
            }),
            Segment::Core | Segment::Coda => None,
        }
    }

    /// Passes that a row with `loops` core iterations needs.
    #[must_use]
    pub fn n_stages(&self, loops: u32) -> u32 {
        u32::from(!self.prelude.is_empty()) + loops + u32::from(!self.coda.is_empty())
    }

    /// KV groups, that is page tables, of a sequence with `loops` core iterations.
    #[must_use]
    pub fn kv_groups(&self, loops: u32) -> usize {
        (self.core_group() + loops) as usize
    }

    /// The KV group that a pass of `stage` reads and writes.
    #[must_use]
    pub fn kv_group(&self, stage: Stage) -> usize {
        match stage.segment {
            Segment::Prelude | Segment::Coda => 0,
            Segment::Core => (self.core_group() + stage.iteration) as usize,
        }
    }

    /// Layers of one KV page.
    #[must_use]
    pub fn layers_per_page(&self) -> usize {
        self.core.len().max(self.prelude.len() + self.coda.len())
    }

    /// Uses of blocks by a row with `loops` core iterations.
    #[must_use]
    pub fn virtual_layers(&self, loops: u32) -> u32 {
        (self.prelude.len() + self.coda.len()) as u32 + loops * self.core.len() as u32
    }

    /// Where the K/V of a segment's block live; `block` counts within the segment, from 0.
    #[must_use]
    pub fn kv_place(&self, segment: Segment, block: u32) -> KvPlace {
        match segment {
            Segment::Prelude => KvPlace {
                first_group: 0,
                groups_per_iteration: 0,
                layer: block,
            },
            Segment::Core => KvPlace {
                first_group: self.core_group(),
                groups_per_iteration: 1,
                layer: block,
            },
            Segment::Coda => KvPlace {
                first_group: 0,
                groups_per_iteration: 0,
                layer: self.prelude.len() as u32 + block,
            },
        }
    }

    /// KV group of the core's first iteration.
    fn core_group(&self) -> u32 {
        u32::from(!self.prelude.is_empty() || !self.coda.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn stages(plan: &Plan, loops: u32) -> Vec<(Segment, u32)> {
        let mut stage = Some(plan.first_stage());
        let mut all = Vec::new();
        while let Some(now) = stage {
            all.push((now.segment, now.iteration));
            stage = plan.next_stage(now, loops);
        }
        assert_eq!(all.len() as u32, plan.n_stages(loops));
        all
    }

    #[test]
    fn an_ordinary_model_is_one_pass_of_the_core() {
        let plan = Plan::ordinary(30);
        assert_eq!(stages(&plan, 1), [(Segment::Core, 0)]);
        assert_eq!(plan.kv_groups(1), 1);
        assert_eq!(plan.layers_per_page(), 30);
        assert_eq!(plan.virtual_layers(1), 30);
    }

    #[test]
    fn a_looped_model_repeats_its_core() {
        let plan = Plan::looped(2, 3, 1, 2, 8);
        assert_eq!(
            stages(&plan, 3),
            [
                (Segment::Prelude, 0),
                (Segment::Core, 0),
                (Segment::Core, 1),
                (Segment::Core, 2),
                (Segment::Coda, 0)
            ]
        );
        assert_eq!(stages(&Plan::looped(0, 1, 0, 2, 4), 2).len(), 2);
        assert_eq!(plan.kv_groups(3), 4);
        assert_eq!(plan.virtual_layers(3), 12);
        assert_eq!(plan.segment_of(1), Segment::Prelude);
        assert_eq!(plan.segment_of(4), Segment::Core);
        assert_eq!(plan.segment_of(5), Segment::Coda);
    }

    #[test]
    fn virtual_layers_have_kv_places_of_their_own() {
        for (prelude, core, coda) in [(0, 3, 0), (2, 3, 1), (0, 2, 4), (5, 1, 0)] {
            let plan = Plan::looped(prelude, core, coda, 1, 4);
            let mut places = HashSet::new();
            for (segment, iteration) in stages(&plan, 4) {
                for block in 0..plan.blocks(segment).len() as u32 {
                    let place = plan.kv_place(segment, block);
                    let group = place.group(iteration);
                    assert_eq!(group, plan.kv_group(Stage { segment, iteration }));
                    assert!(group < plan.kv_groups(4));
                    assert!((place.layer as usize) < plan.layers_per_page());
                    assert!(places.insert((group, place.layer)), "a place is used twice");
                }
            }
            assert_eq!(places.len() as u32, plan.virtual_layers(4));
        }
    }
}
