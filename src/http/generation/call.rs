//! One request for a generation, and what the server knows about it.
//!
//! Owned by the HTTP worker that answers. What is not here: the body's fields beside those that
//! every route has (model, scheduling, isolation).

use crate::http::access::Access;
use crate::http::access_log::bounded;
use crate::http::errors::ApiError;
use crate::http::isolation::isolation_key;
use crate::http::openai::fields::Fields;
use crate::http::openai::sampling::CommonOptions;
use crate::http::openai::schedule::Schedule;
use crate::http::state::ServerState;
use crate::http::wire::{Hangup, Request};
use crate::pool::{LoadedModel, Patience};
use crate::scheduler::SubmitOptions;
use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// One request for a generation, and what the server knows about it.
pub struct Call<'a> {
    /// The models and the live requests.
    pub state: &'a ServerState,
    /// How often a silent stream shows a sign of life.
    pub ping: Duration,
    /// As it came.
    pub request: &'a Request,
    /// Who asks, when keys are asked for.
    pub client: Option<Arc<str>>,
    /// What it may ask for.
    pub access: Access,
    /// Whether the client is still there while its model is waited for.
    pub hangup: Hangup,
    /// How long that took; it counts as time in the queue.
    pub waited: Cell<Duration>,
    /// The model that was asked for, for the log.
    pub asked: Arc<OnceLock<String>>,
}

impl Call<'_> {
    /// The model that the body names, and the depth that its name ends in.
    pub fn model(&self, fields: &Fields<'_>) -> Result<(Arc<LoadedModel>, Option<u32>), ApiError> {
        let started = Instant::now();
        let patience = Patience {
            queue_timeout: self.schedule(fields)?.queue_timeout,
            is_gone: &|| self.hangup.is_gone(),
        };
        let name = fields.string("model")?;
        self.note_model(name);
        let found = self.state.resolve_with_loops(name, &self.access, &patience);
        self.waited.set(started.elapsed());
        found
    }

    /// For the log, whatever becomes of the request; the first name stays.
    pub fn note_model(&self, name: Option<&str>) {
        if let Some(name) = name.filter(|name| !name.is_empty()) {
            self.asked.get_or_init(|| bounded(name));
        }
    }

    /// What is left of a time in the queue after the model was waited for.
    fn rest_of(&self, queue_timeout: Duration) -> Duration {
        let rest = queue_timeout.saturating_sub(self.waited.get());
        rest.max(Duration::from_millis(1))
    }

    /// Puts in what depends on the client and on the model: who reuses whose blocks, and which tokens
    /// the texts among the sampling fields are.
    pub fn isolate(&self, model: &LoadedModel, common: &mut CommonOptions) {
        let mode = model.executor.prefix_isolation();
        let salt = common.cache_salt.as_deref();
        common.isolation_key = isolation_key(mode, self.client.as_deref(), salt);
        if let Some(tokenizer) = &model.tokenizer {
            common.resolve_texts(tokenizer);
        }
    }

    /// How it wants to be scheduled, within what its key allows.
    pub fn schedule(&self, fields: &Fields<'_>) -> Result<Schedule, ApiError> {
        let asked = Schedule::parse(fields, |name| self.request.all(name).collect())?;
        Ok(Schedule {
            priority: asked.priority.min(self.access.max_priority()),
            ..asked
        })
    }

    /// The same in the scheduler's words.
    pub fn options(
        &self,
        fields: &Fields<'_>,
        common: &CommonOptions,
    ) -> Result<SubmitOptions, ApiError> {
        let schedule = self.schedule(fields)?;
        Ok(SubmitOptions {
            priority: schedule.priority,
            slo_ms: schedule.slo_ms,
            slo_ttft_ms: schedule.slo_ttft_ms,
            queue_timeout: schedule.queue_timeout.map(|most| self.rest_of(most)),
            client: self.client.clone(),
            share: self.access.share(),
            streaming: common.stream,
            skip_special_tokens: common.skip_special,
            shown_tokens: Arc::default(),
        })
    }
}
