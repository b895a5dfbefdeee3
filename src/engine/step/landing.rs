//! What happens to a sequence whose rows have come out of their last pass: its logits become scores
//! of the prompt, or its next token.
//!
//! On the engine thread, inside a step's commit. What is not here: pages, slots and who leaves.

use crate::constraint::TokenSet;
use crate::engine::masks::MaskThreads;
use crate::engine::sampler::{Ask, Choice, SampleError, Sampler};
use crate::engine::sequence::{Sequence, Verdict};
use crate::request::{ConsumerGone, FinishReason, RequestError, TokenId, TokenLogprob};

/// A sequence whose rows have come out of their last pass.
pub(super) struct Landing<'a> {
    pub(super) sequence: &'a mut Sequence,
    pub(super) sampler: &'a mut Sampler,
    pub(super) masks: &'a MaskThreads,
    pub(super) end_tokens: &'a [TokenId],
    pub(super) context_length: u32,
}

/// Why a landing sequence goes no further.
enum Halt {
    /// Its consumer is gone.
    Gone,
    /// Its logits allow no choice.
    Unusable(SampleError),
    /// Its constraint cannot go on.
    Unconstrained(String),
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
            Err(Halt::Unusable(error @ SampleError::NotFinite)) => {
                self.sequence.fail(RequestError::Fault(error.to_string()));
            }
            // The request's own rules contradict each other.
            Err(Halt::Unusable(error @ SampleError::NothingLeft)) => {
                self.sequence.fail(RequestError::Invalid(error.to_string()));
            }
            Err(Halt::Unconstrained(error)) => self.sequence.fail(RequestError::Invalid(format!(
                "the answer cannot follow the grammar any further: {error}"
            ))),
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
            match self.sequence.pooled {
                None => self.sequence.finish(FinishReason::Length),
                Some(_) => self.sequence.finish_embedding()?,
            }
        }
        Ok(())
    }

    fn next_token(&mut self, logits: &[f32]) -> Result<(), Halt> {
        let Some(mut constrained) = self.sequence.constrained.take() else {
            let choice = self.choose(logits, None)?;
            return self.take_token(choice.token, choice.logprob);
        };
        let next = constrained.next().map_err(Halt::Unconstrained)?;
        if next.forced.is_empty() {
            let Some(allowed) = &next.allowed else {
                self.sequence.finish(FinishReason::Stop);
                return Ok(());
            };
            let choice = self.choose(logits, Some(allowed))?;
            self.take_token(choice.token, choice.logprob)?;
            if !self.sequence.has_ended {
                constrained.accept(choice.token, self.masks);
            }
        } else {
            // These logits are not needed; those after the last forced token are.
            let is_complete = next.allowed.is_none();
            for token in std::mem::take(&mut next.forced) {
                if !self.sequence.has_ended {
                    self.take_token(token, None)?;
                }
            }
            if is_complete && !self.sequence.has_ended {
                self.sequence.finish(FinishReason::Stop);
            }
        }
        self.sequence.constrained = Some(constrained);
        Ok(())
    }

    fn choose(
        &mut self,
        logits: &[f32],
        allowed: Option<&TokenSet>,
    ) -> Result<Choice, SampleError> {
        let sequence = &*self.sequence;
        let ask = Ask {
            params: &sequence.request.sampling,
            tokens: &sequence.tokens,
            n_prompt: sequence.n_prompt(),
            forbidden: sequence.forbidden(self.end_tokens),
            allowed,
            seed: sequence.seed,
            mirostat_cut: sequence.mirostat_cut,
            logprobs: sequence.request.logprobs,
        };
        let choice = self.sampler.choose(logits, &ask)?;
        self.sequence.note_surprise(choice.surprise);
        Ok(choice)
    }

    fn take_token(&mut self, token: TokenId, logprob: Option<TokenLogprob>) -> Result<(), Halt> {
        let sequence = &mut *self.sequence;
        match sequence.push(token, self.end_tokens, self.context_length) {
            Verdict::Continue => sequence.send_token(token, logprob)?,
            Verdict::Stop => sequence.finish(FinishReason::Stop),
            Verdict::Length => {
                sequence.send_token(token, logprob)?;
                sequence.finish(FinishReason::Length);
            }
        }
        Ok(())
    }
}
