//! `POST /api/v0/chat/completions` and `/api/v0/completions`: OpenAI's answers with figures in them.
//!
//! The body is OpenAI's. `stats`, `model_info` and `runtime` stand in the whole answer, and in the
//! last chunk of a stream, which tells the usage too. Pure but for sending.

use super::check_ttl;
use super::models::{v0_info, v0_runtime};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::events::Events;
use crate::http::generation::growing::{Ending, Finish, Step};
use crate::http::generation::prepare;
use crate::http::generation::run::run;
use crate::http::generation::shape::{AnswerInfo, Shape};
use crate::http::generation::timings::Timings;
use crate::http::generation::usage::UsageSum;
use crate::http::openai::answer::Family;
use crate::http::openai::fields::{Fields, parse_object};
use crate::http::openai::shape::OpenAiShape;
use crate::http::sse;
use crate::pool::LoadedModel;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// See the module.
pub fn answer(family: Family, call: &Call<'_>, exchange: Exchange) {
    let prepared = parse_object(call.request.body()).and_then(|mut body| {
        check_ttl(&Fields::new(&body))?;
        match family {
            Family::Chat => prepare::chat(call, &body),
            Family::Completion => {
                // LM Studio goes on to the end unless told otherwise.
                body.entry("max_tokens").or_insert_with(|| json!(-1));
                prepare::completions(call, &body)
            }
        }
    });
    let work = prepared.map(|it| it.shaped(|info| V0Shape::new(family, info)));
    run(work, call, exchange);
}

/// See the module.
#[derive(Debug)]
pub struct V0Shape {
    model: Arc<LoadedModel>,
    answer: OpenAiShape,
    /// Of the choice that ended first.
    ending: Option<Ending>,
}

/// An answer of OpenAI's with figures.
#[derive(Serialize)]
struct WithFigures<A> {
    #[serde(flatten)]
    answer: A,
    stats: Value,
    model_info: Value,
    runtime: Value,
}

impl V0Shape {
    fn new(family: Family, info: AnswerInfo) -> Self {
        Self {
            model: Arc::clone(&info.model),
            answer: OpenAiShape::new(family, info),
            ending: None,
        }
    }

    fn note(&mut self, step: &Step) {
        if let Step::Finish(ending) = step {
            self.ending.get_or_insert(**ending);
        }
    }

    fn with_figures<A>(&self, answer: A) -> WithFigures<A> {
        WithFigures {
            answer,
            stats: stats(self.ending.as_ref(), self.model.context_length),
            model_info: v0_info(&self.model),
            runtime: v0_runtime(&self.model),
        }
    }
}

/// Why and how fast it ended.
fn stats(ending: Option<&Ending>, context_length: u32) -> Value {
    let counted = ending.and_then(|ending| ending.counted);
    let reason = match ending.map_or(Finish::Cancelled, |ending| ending.finish) {
        Finish::Stop => "eosFound",
        Finish::StopString(_) => "stopStringFound",
        Finish::ToolCalls => "toolCalls",
        Finish::Cancelled => "userStopped",
        Finish::Length => {
            let usage = counted.map(|counted| counted.usage).unwrap_or_default();
            match usage.prompt_tokens + usage.completion_tokens >= context_length {
                true => "contextLengthReached",
                false => "maxPredictedTokensReached",
            }
        }
    };
    let Some(counted) = counted else {
        return json!({"stop_reason": reason});
    };
    let timings = Timings::of(&counted);
    let first_token = counted.stamps.time_to_first_token();
    json!({
        "tokens_per_second": timings.tokens_per_second(),
        "time_to_first_token": first_token.map_or(0.0, |time| time.as_secs_f64()),
        "generation_time": timings.generation_seconds(),
        "stop_reason": reason,
    })
}

impl Shape for V0Shape {
    fn step(&mut self, choice_idx: usize, step: Step, events: &mut Events) {
        self.note(&step);
        self.answer.step(choice_idx, step, events);
    }

    fn end(&mut self, usage: &UsageSum, events: &mut Events) {
        events.data(&self.with_figures(self.answer.usage_chunk(usage)));
        events.raw(sse::DONE);
    }

    fn keep(&mut self, choice_idx: usize, step: Step) {
        self.note(&step);
        self.answer.keep(choice_idx, step);
    }

    fn whole(self, usage: &UsageSum, exchange: Exchange) {
        exchange.json(&self.with_figures(self.answer.answer(usage)));
    }
}
