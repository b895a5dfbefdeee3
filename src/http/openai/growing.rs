//! A growing answer: all choices of one request, fed by the updates of its jobs.
//!
//! Pure, owned by the HTTP worker that answers. An update becomes steps (a choice opens, shows a
//! piece, ends); a stream renders each step as a chunk, a whole answer keeps the pieces until the
//! end. So both say the same. What is not here: where updates come from (`jobs`), and the socket.

use super::answer::{AnswerMeta, Chunk, UsageChunk, UsageSum, Whole, finish_text};
use super::choice::{Choice, Family, Piece};
use super::completions::likeliest;
use crate::request::{FinishReason, TextLogprob, TokenId, TokenLogprob, Usage};
use crate::tokenizer::Tokenizer;
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
        /// The same from a server that tells no token ids.
        text_logprobs: Vec<TextLogprob>,
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
    /// All pieces so far, of a whole answer.
    kept: Piece,
    finish: Option<FinishReason>,
}

/// All choices of one answer.
pub struct GrowingAnswer {
    meta: AnswerMeta,
    /// None where another server makes the text.
    tokenizer: Option<Arc<Tokenizer>>,
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
        tokenizer: Option<Arc<Tokenizer>>,
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
            kept: Piece::default(),
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

    /// In the order in which they are shown.
    fn steps(&mut self, job_idx: usize, update: Update) -> [Option<Step>; 3] {
        let job = &mut self.jobs[job_idx];
        let opening = (!job.is_open).then_some(Step::Open);
        job.is_open = true;
        let echo = job.plan.echo.take().and_then(|(text, tokens)| {
            let logprobs = std::mem::take(&mut job.prompt_logprobs);
            job.choice.echo(text, &tokens, logprobs).map(Step::Piece)
        });
        let news = match update {
            Update::Text {
                text,
                logprobs,
                text_logprobs,
            } => {
                let piece = job.choice.push(text, logprobs, text_logprobs);
                piece.map(Step::Piece)
            }
            Update::Finished { reason, usage } => {
                job.finish = Some(reason);
                let counted = &mut self.prompt_counted[job.plan.prompt_idx];
                self.usage.add(usage, !*counted);
                *counted = true;
                Some(Step::Finish(reason))
            }
        };
        [opening, echo, news]
    }

    /// For streams: the chunks that an update makes.
    pub fn chunks(&mut self, job_idx: usize, update: Update) -> impl Iterator<Item = Chunk<'_>> {
        let steps = self.steps(job_idx, update);
        let choice = &mut self.jobs[job_idx].choice;
        let (meta, tokenizer) = (&self.meta, self.tokenizer.as_deref());
        let render = move |step| match step {
            Step::Open => choice.opening(),
            Step::Piece(piece) => Some(choice.piece_body(tokenizer, piece)),
            Step::Finish(reason) => Some(choice.ending(finish_text(reason))),
        };
        let bodies = steps.into_iter().flatten().filter_map(render);
        bodies.map(|body| meta.chunk(body))
    }

    /// For streams: the last chunk of every choice that was cancelled on the way.
    pub fn cancelled_chunks(&self) -> impl Iterator<Item = Chunk<'_>> {
        let unfinished = self.jobs.iter().filter(|job| job.finish.is_none());
        unfinished.map(|job| self.meta.chunk(job.choice.ending(CANCELLED)))
    }

    /// For streams: the chunk that tells the usage, when the client asked for it.
    #[must_use]
    pub fn usage_chunk(&self) -> Option<UsageChunk<'_>> {
        let asked = self.meta.usage_null;
        asked.then(|| self.meta.usage_chunk(&self.usage))
    }

    /// For whole answers: keeps what an update brings.
    pub fn keep(&mut self, job_idx: usize, update: Update) {
        for step in self.steps(job_idx, update).into_iter().flatten() {
            if let Step::Piece(piece) = step {
                self.jobs[job_idx].kept.join(piece);
            }
        }
    }

    /// The whole answer: the `n_per_prompt` likeliest choices of each prompt, all of them when
    /// there are no more.
    #[must_use]
    pub fn whole(&self, n_per_prompt: usize) -> Whole<'_> {
        let prompts = 0..self.prompt_counted.len();
        let chosen = prompts.flat_map(|prompt_idx| self.likeliest_of(prompt_idx, n_per_prompt));
        let choices = chosen.enumerate().map(|(index, job)| {
            let finish = finish_text(job.finish.unwrap_or(FinishReason::Length));
            let choice = &job.choice;
            choice.whole(index as u32, self.tokenizer.as_deref(), &job.kept, finish)
        });
        self.meta.whole(choices.collect(), &self.usage)
    }

    fn likeliest_of(&self, prompt_idx: usize, n: usize) -> Vec<&Job> {
        let of_prompt = |job: &&Job| job.plan.prompt_idx == prompt_idx;
        let jobs: Vec<&Job> = self.jobs.iter().filter(of_prompt).collect();
        if jobs.len() <= n {
            return jobs;
        }
        let means: Vec<f64> = jobs.iter().map(|job| job.choice.mean_logprob()).collect();
        let best = likeliest(&means, n).into_iter();
        best.map(|job_idx| jobs[job_idx]).collect()
    }
}
