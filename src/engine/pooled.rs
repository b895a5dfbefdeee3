//! The embedding of one sequence while its rows come out of their last passes.
//!
//! Owned by the engine thread. States are added in the order of positions, in f64, each once: so
//! chunks, neighbours and a preemption in between change no bit. What is not here: normalization and
//! cuts, which are the client's wish (`http/openai/embeddings`).

use crate::config::Pooling;

/// See the module doc.
#[derive(Debug)]
pub(super) struct Pooled {
    pooling: Pooling,
    /// Positions before this are done with.
    n_done: usize,
    /// States added.
    n_added: u32,
    /// (d_model), empty before the first state.
    sums: Vec<f64>,
}

impl Pooled {
    pub(super) fn new(pooling: Pooling) -> Self {
        Self {
            pooling,
            n_done: 0,
            n_added: 0,
            sums: Vec::new(),
        }
    }

    /// Whether the state at `position` of a text of `n_tokens` counts and was not added yet.
    pub(super) fn wants(&self, position: usize, n_tokens: usize) -> bool {
        let counts = match self.pooling {
            Pooling::Mean => true,
            Pooling::Cls => position == 0,
            Pooling::Last => position + 1 == n_tokens,
        };
        counts && position >= self.n_done
    }

    /// Adds a state (d_model) that is wanted.
    pub(super) fn add(&mut self, position: usize, state: &[f32]) {
        self.sums.resize(state.len(), 0.0);
        for (sum, value) in self.sums.iter_mut().zip(state) {
            *sum += f64::from(*value);
        }
        self.n_added += 1;
        self.n_done = position + 1;
    }

    /// The vector, not normalized; None where it is no vector of numbers.
    pub(super) fn vector(&self) -> Option<Vec<f32>> {
        let n_added = f64::from(self.n_added);
        let mean = self.sums.iter().map(|sum| (sum / n_added) as f32);
        let vector: Vec<f32> = mean.collect();
        let is_sound = !vector.is_empty() && vector.iter().all(|value| value.is_finite());
        is_sound.then_some(vector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(pooling: Pooling) -> Option<Vec<f32>> {
        let mut pooled = Pooled::new(pooling);
        // The second round stands for what is computed again after a preemption.
        for _ in 0..2 {
            for (position, state) in [[1.0, 2.0], [4.0, 8.0], [7.0, 2.0]].iter().enumerate() {
                if pooled.wants(position, 3) {
                    pooled.add(position, state);
                }
            }
        }
        pooled.vector()
    }

    #[test]
    fn each_pooling_takes_its_states_once() {
        assert_eq!(pooled(Pooling::Mean), Some(vec![4.0, 4.0]));
        assert_eq!(pooled(Pooling::Cls), Some(vec![1.0, 2.0]));
        assert_eq!(pooled(Pooling::Last), Some(vec![7.0, 2.0]));
    }

    #[test]
    fn what_is_no_number_is_no_vector() {
        assert_eq!(Pooled::new(Pooling::Mean).vector(), None);
        let mut broken = Pooled::new(Pooling::Last);
        broken.add(0, &[1.0, f32::NAN]);
        assert_eq!(broken.vector(), None);
    }
}
