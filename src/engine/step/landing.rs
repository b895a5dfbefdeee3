//! What happens to a sequence whose rows have come out of their last pass: its logits become scores
//! of the prompt, or its next token.
//!
//! On the engine thread, inside a step's commit. What is not here: pages, slots and who leaves.

use crate::engine::sampler::{Ask, SampleError, Sampler};
use crate::engine::sequence::{Sequence, Verdict};
use crate::request::{ConsumerGone, FinishReason, RequestError, TokenId};

/// A sequence whose rows have come out of their last pass.
pub(super) struct Landing<'a> {
    pub(super) sequence: &'a mut Sequence,
    pub(super) sampler: &'a mut Sampler,
    pub(super) end_tokens: &'a [TokenId],
    pub(super) context_length: u32,
}

/// Why a landing sequence goes no further.
enum Halt {
    /// Its consumer is gone.
    Gone,
    /// Its logits allow no choice.
    Unusable(SampleError),
}

impl From<ConsumerGone> for Halt {
    fn from(_: ConsumerGone) -> Self {
        Halt::Gone
    }
}

impl From<SampleError> for Halt {
    fn from(error: SampleError) -> Self {
        Halt::Unusable(error)
    }
}

impl Landing<'_> {
    /// Uses the logits `(position, (vocab_size))` of the rows that wanted them, in order.
    pub(super) fn take<'l>(&mut self, wanted: impl Iterator<Item = (usize, &'l [f32])>) {
        match self.try_take(wanted) {
            Ok(()) => {}
            // Nobody listens, so there is nobody to tell.
            Err(Halt::Gone) => self.sequence.has_ended = true,
            Err(Halt::Unusable(error)) => {
                self.sequence.fail(RequestError::Fault(error.to_string()))
            }
        }
    }

    fn try_take<'l>(
        &mut self,
        wanted: impl Iterator<Item = (usize, &'l [f32])>,
    ) -> Result<(), Halt> {
        for (position, logits) in wanted {
            if position + 1 < self.sequence.tokens.len() {
                let token = self.sequence.tokens[position + 1];
                let n_top = self.sequence.request.prompt_logprobs.unwrap_or(0);
                let score = self.sampler.score(logits, token, n_top)?;
                self.sequence.add_score(score);
            } else {
                self.sequence.send_scores()?;
                self.next_token(logits)?;
            }
        }
        self.sequence.send_scores()?;
        if self.sequence.is_only_prompt_and_done() {
            self.sequence.finish(FinishReason::Length);
        }
        Ok(())
    }

    fn next_token(&mut self, logits: &[f32]) -> Result<(), Halt> {
        let sequence = &mut *self.sequence;
        let choice = self.sampler.choose(
            logits,
            &Ask {
                params: &sequence.request.sampling,
                tokens: &sequence.tokens,
                n_prompt: sequence.n_prompt(),
                forbidden: sequence.forbidden(self.end_tokens),
                seed: sequence.seed,
                logprobs: sequence.request.logprobs,
            },
        )?;
        match sequence.push(choice.token, self.end_tokens, self.context_length) {
            Verdict::Continue => sequence.send_token(choice.token, choice.logprob)?,
            Verdict::Stop => sequence.finish(FinishReason::Stop),
            Verdict::Length => {
                sequence.send_token(choice.token, choice.logprob)?;
                sequence.finish(FinishReason::Length);
            }
        }
        Ok(())
    }
}
