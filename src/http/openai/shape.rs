//! OpenAI's chat completions and text completions as shapes, and their routes.
//!
//! Pure but for sending the whole answer. A stream shows each step as a chunk, a whole answer keeps them
//! until the end, so both say the same. What is not here: the fields of a choice (`choice`).

use super::answer::{Family, Frame, UsageChunk, Whole};
use super::choice::Choice;
use super::completions::likeliest;
use super::fields::{Fields, parse_object};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::events::Events;
use crate::http::generation::growing::{Finished, Step};
use crate::http::generation::prepare;
use crate::http::generation::run::run;
use crate::http::generation::shape::{AnswerInfo, Shape};
use crate::http::generation::timings::{Stopwatch, Timings};
use crate::http::generation::usage::UsageSum;
use crate::http::sse;

/// `POST /v1/chat/completions`
pub fn chat(call: &Call<'_>, exchange: Exchange) {
    let prepared = parse_object(call.request.body()).and_then(|body| {
        let is_timed = Fields::new(&body).flag("timings_per_token", false)?;
        Ok((prepare::chat(call, &body)?, is_timed))
    });
    let work = prepared.map(|(it, is_timed)| {
        it.shaped(|info| OpenAiShape {
            times: is_timed.then(|| vec![Stopwatch::start(); info.prompt_of_choice.len()]),
            ..OpenAiShape::new(Family::Chat, info)
        })
    });
    run(work, call, exchange);
}

/// `POST /v1/completions`
pub fn completions(call: &Call<'_>, exchange: Exchange) {
    let body = parse_object(call.request.body());
    let prepared = body.and_then(|body| prepare::completions(call, &body));
    let work = prepared.map(|it| it.shaped(|info| OpenAiShape::new(Family::Completion, info)));
    run(work, call, exchange);
}

/// See the module.
#[derive(Debug)]
pub struct OpenAiShape {
    frame: Frame,
    choices: Vec<Choice>,
    /// One per choice, where the client wants to see llama-server's times.
    times: Option<Vec<Stopwatch>>,
    /// Of the choice that ended first.
    ended: Option<Finished>,
}

impl OpenAiShape {
    /// Nothing has been said.
    #[must_use]
    pub fn new(family: Family, info: AnswerInfo) -> Self {
        let n_choices = info.prompt_of_choice.len();
        let choices = (0..n_choices).map(|index| Choice::new(index, info.skip_special));
        Self {
            choices: choices.collect(),
            frame: Frame::new(family, info),
            times: None,
            ended: None,
        }
    }

    /// The times that a step shows.
    fn time(&mut self, choice_idx: usize, step: &Step) -> Option<Timings> {
        let times = self.times.as_mut()?;
        match step {
            Step::Open => None,
            Step::Piece(_) => {
                let prompt_n = self.frame.info().prompt_tokens as u32;
                Some(times[choice_idx].lap(1, prompt_n))
            }
            Step::Finish(ending) => {
                let finished = ending.counted?;
                self.ended.get_or_insert(finished);
                Some(Timings::of(&finished))
            }
        }
    }

    /// The `n_per_prompt` likeliest choices of each prompt, all of them when there are no more.
    fn chosen(&self) -> Vec<&Choice> {
        let info = self.frame.info();
        let n_prompts = info
            .prompt_of_choice
            .iter()
            .max()
            .map_or(0, |most| most + 1);
        let of_prompt = |prompt_idx: usize| -> Vec<&Choice> {
            let all = self.choices.iter().zip(&info.prompt_of_choice);
            let its = all.filter(|(_, prompt)| **prompt == prompt_idx);
            let choices: Vec<&Choice> = its.map(|(choice, _)| choice).collect();
            if choices.len() <= info.n_per_prompt {
                return choices;
            }
            let means: Vec<f64> = choices.iter().map(|choice| choice.mean_logprob()).collect();
            let best = likeliest(&means, info.n_per_prompt).into_iter();
            best.map(|idx| choices[idx]).collect()
        };
        (0..n_prompts).flat_map(of_prompt).collect()
    }
}

impl OpenAiShape {
    /// The whole answer of what was kept.
    #[must_use]
    pub fn answer(&self, usage: &UsageSum) -> Whole<'_> {
        let chosen = self.chosen().into_iter().zip(0..);
        let choices = chosen.map(|(choice, index)| choice.whole(&self.frame, index));
        let timings = self.ended.as_ref().map(Timings::of);
        self.frame.whole(choices.collect(), usage).timed(timings)
    }

    /// The chunk that tells the usage at the end of a stream.
    #[must_use]
    pub fn usage_chunk(&self, usage: &UsageSum) -> UsageChunk<'_> {
        self.frame.usage_chunk(usage)
    }
}

impl Shape for OpenAiShape {
    fn step(&mut self, choice_idx: usize, step: Step, events: &mut Events) {
        let timings = self.time(choice_idx, &step);
        if let Some(body) = self.choices[choice_idx].delta(&self.frame, step) {
            events.data(&self.frame.chunk(body).timed(timings));
        }
    }

    fn end(&mut self, usage: &UsageSum, events: &mut Events) {
        if self.frame.info().include_usage {
            events.data(&self.frame.usage_chunk(usage));
        }
        events.raw(sse::DONE);
    }

    fn keep(&mut self, choice_idx: usize, step: Step) {
        self.time(choice_idx, &step);
        self.choices[choice_idx].keep(step);
    }

    fn whole(self, usage: &UsageSum, exchange: Exchange) {
        exchange.json(&self.answer(usage));
    }
}
