//! A growing answer: all choices of one request, fed by the updates of its jobs.
//!
//! Pure, owned by the HTTP worker that answers. An update becomes steps (a choice opens, shows a
//! piece, ends); a stream renders each step as a chunk, a whole answer keeps the pieces until the
//! end. So both say the same. What is not here: where updates come from (`jobs`), and the socket.

use super::answer::{AnswerMeta, UsageSum, finish_text};
use super::choice::{Choice, Family, Piece};
use super::completions::likeliest;
use crate::request::{FinishReason, TokenId, TokenLogprob, Usage};
use crate::tokenizer::Tokenizer;
use serde_json::Value;
use std::sync::Arc;

/// `finish_reason` of a choice that was cancelled over the API: what there is of it is not an error.
const CANCELLED: &str = "cancelled";

/// What a job reports.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// Text that is certain, with the log-probabilities of its tokens; either may be empty.
    Text {
        /// Text.
        text: String,
        /// When asked.
        logprobs: Vec<TokenLogprob>,
    },
    /// The job ended well.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Counts.
        usage: Usage,
    },
}

/// One choice to be made: where it stands and what its text begins with.
#[derive(Clone, Debug)]
pub struct ChoicePlan {
    /// Which prompt of the request.
    pub prompt_idx: usize,
    /// The prompt's text and tokens, when the answer begins with them.
    pub echo: Option<(String, Arc<[TokenId]>)>,
}

/// What an update means for the client.
#[derive(Debug)]
enum Step {
    Open,
    Piece(Piece),
    Finish(FinishReason),
}

struct Job {
    plan: ChoicePlan,
    choice: Choice,
    is_open: bool,
    prompt_logprobs: Vec<TokenLogprob>,
    pieces: Vec<Piece>,
    finish: Option<FinishReason>,
}

/// All choices of one answer.
pub struct GrowingAnswer {
    meta: AnswerMeta,
    tokenizer: Arc<Tokenizer>,
    jobs: Vec<Job>,
    usage: UsageSum,
    prompt_counted: Vec<bool>,
}

impl GrowingAnswer {
    /// Job `i` makes the choice with index `i`.
    #[must_use]
    pub fn new(
        meta: AnswerMeta,
        family: Family,
        tokenizer: Arc<Tokenizer>,
        plans: Vec<ChoicePlan>,
        wants_logprobs: bool,
        skip_special: bool,
    ) -> Self {
        let n_prompts = plans
            .iter()
            .map(|plan| plan.prompt_idx + 1)
            .max()
            .unwrap_or(0);
        let job = |(index, plan): (usize, ChoicePlan)| Job {
            plan,
            choice: Choice::new(index as u32, family, wants_logprobs, skip_special),
            is_open: false,
            prompt_logprobs: Vec::new(),
            pieces: Vec::new(),
            finish: None,
        };
        Self {
            meta,
            tokenizer,
            jobs: plans.into_iter().enumerate().map(job).collect(),
            usage: UsageSum::default(),
            prompt_counted: vec![false; n_prompts],
        }
    }

    /// Whether every job has finished.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.jobs.iter().all(|job| job.finish.is_some())
    }

    /// Whether the job has an echo to show that waits for its prompt's log-probabilities.
    #[must_use]
    pub fn awaits_prompt(&self, job_idx: usize) -> bool {
        self.jobs[job_idx].plan.echo.is_some()
    }

    /// Hands in the log-probabilities of prompt tokens 1.., known from the first update on.
    pub fn set_prompt_logprobs(&mut self, job_idx: usize, logprobs: Vec<TokenLogprob>) {
        self.jobs[job_idx].prompt_logprobs = logprobs;
    }

    fn steps(&mut self, job_idx: usize, update: Update) -> Vec<Step> {
        let job = &mut self.jobs[job_idx];
        let mut steps = Vec::new();
        if !job.is_open {
            job.is_open = true;
            steps.push(Step::Open);
        }
        if let Some((text, tokens)) = job.plan.echo.take() {
            let logprobs = std::mem::take(&mut job.prompt_logprobs);
            steps.extend(job.choice.echo(text, &tokens, logprobs).map(Step::Piece));
        }
        match update {
            Update::Text { text, logprobs } => {
                steps.extend(job.choice.push(text, logprobs).map(Step::Piece));
            }
            Update::Finished { reason, usage } => {
                steps.push(Step::Finish(reason));
                job.finish = Some(reason);
                let counted = &mut self.prompt_counted[job.plan.prompt_idx];
                self.usage.add(usage, !*counted);
                *counted = true;
            }
        }
        steps
    }

    /// For streams: the chunks that an update makes.
    pub fn chunks(&mut self, job_idx: usize, update: Update) -> Vec<Value> {
        let steps = self.steps(job_idx, update);
        let choice = &mut self.jobs[job_idx].choice;
        let render = |step| match step {
            Step::Open => choice.opening_chunk(&self.meta),
            Step::Piece(piece) => Some(choice.piece_chunk(&self.meta, &self.tokenizer, piece)),
            Step::Finish(reason) => Some(choice.finish_chunk(&self.meta, finish_text(reason))),
        };
        steps.into_iter().filter_map(render).collect()
    }

    /// For streams: the last chunk of every choice that was cancelled on the way.
    #[must_use]
    pub fn cancelled_chunks(&self) -> Vec<Value> {
        let unfinished = self.jobs.iter().filter(|job| job.finish.is_none());
        unfinished
            .map(|job| job.choice.finish_chunk(&self.meta, CANCELLED))
            .collect()
    }

    /// For streams: the chunk that tells the usage, when the client asked for it.
    #[must_use]
    pub fn usage_chunk(&self) -> Option<Value> {
        let asked = self.meta.usage_null;
        asked.then(|| self.meta.usage_chunk(self.usage.to_json()))
    }

    /// For whole answers: keeps what an update brings.
    pub fn keep(&mut self, job_idx: usize, update: Update) {
        for step in self.steps(job_idx, update) {
            if let Step::Piece(piece) = step {
                self.jobs[job_idx].pieces.push(piece);
            }
        }
    }

    /// The whole answer: the `n_per_prompt` likeliest choices of each prompt, all of them when
    /// there are no more.
    #[must_use]
    pub fn into_body(mut self, n_per_prompt: usize) -> Value {
        let mut chosen = Vec::new();
        for prompt_idx in 0..self.prompt_counted.len() {
            let of_prompt: Vec<usize> = (0..self.jobs.len())
                .filter(|job_idx| self.jobs[*job_idx].plan.prompt_idx == prompt_idx)
                .collect();
            if of_prompt.len() <= n_per_prompt {
                chosen.extend(of_prompt);
                continue;
            }
            let means: Vec<f64> = of_prompt
                .iter()
                .map(|job_idx| self.jobs[*job_idx].choice.mean_logprob())
                .collect();
            chosen.extend(
                likeliest(&means, n_per_prompt)
                    .into_iter()
                    .map(|best| of_prompt[best]),
            );
        }
        let mut choices = Vec::with_capacity(chosen.len());
        for (index, job_idx) in chosen.into_iter().enumerate() {
            let job = &mut self.jobs[job_idx];
            job.choice.index = index as u32;
            let pieces = std::mem::take(&mut job.pieces);
            let finish = finish_text(job.finish.unwrap_or(FinishReason::Length));
            choices.push(job.choice.whole(&self.tokenizer, pieces, finish));
        }
        self.meta.body(choices, self.usage.to_json())
    }
}
