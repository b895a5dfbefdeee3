//! What a runtime reports through: stamps, counts, passes on; ends go to the driver.
//!
//! Lives on the runtime's thread, one per job, owned by it. Never blocks: tokens go into the
//! consumer's channel, the end into the driver's mail. Dropped without an end (a panic, a forgotten
//! job) it reports a fault, so no waiter is left hanging.

use super::executor::Core;
use super::queue::{Event, Running};
use super::record::{Ending, Record};
use crate::request::{ConsumerGone, GenerationEvent, JobSink, RequestError};
use std::sync::Arc;
use std::time::Instant;

/// See the module doc.
pub(crate) struct Sink {
    core: Arc<Core>,
    record: Arc<Record>,
    /// Which run of the request this is.
    attempt: u32,
    ended: bool,
    last_token: Option<Instant>,
}

impl Sink {
    pub(crate) fn new(core: Arc<Core>, job: &Running) -> Self {
        Self {
            core,
            record: Arc::clone(&job.record),
            attempt: job.attempt,
            ended: false,
            last_token: None,
        }
    }

    fn end(&mut self, ending: Ending) {
        self.ended = true;
        let number = self.record.key.number;
        let event = Event::Ended {
            number,
            attempt: self.attempt,
            ending,
        };
        // A runtime that answers inside `submit` is called by whoever handles it next.
        match self.core.turn.is_own() {
            true => self.core.queue.post_to_self(event),
            false => self.core.queue.post(event),
        }
    }

    /// Stamps the first token, measures the gaps between the others.
    fn stamp_token(&mut self) -> Result<(), ConsumerGone> {
        let now = self.core.stamp();
        match self.last_token.replace(now.at) {
            Some(last) => self.core.metrics.token_gap(now.at.duration_since(last)),
            None => {
                // Refused when the request was cancelled or went back to the queue in between: then
                // nobody listens to this run.
                let stamps = self.record.first_token(self.attempt, now);
                let stamps = stamps.map_err(|_| ConsumerGone)?;
                self.core.metrics.first_token(&stamps);
            }
        }
        Ok(())
    }
}

impl JobSink for Sink {
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone> {
        if self.ended {
            return Err(ConsumerGone);
        }
        match event {
            GenerationEvent::Finished { reason, usage } => self.end(Ending::Done { reason, usage }),
            GenerationEvent::Failed(
                error @ (RequestError::Fault(_)
                | RequestError::ReplicaLost(_)
                | RequestError::Upstream { .. }
                | RequestError::Overloaded { .. }),
            ) => self.end(Ending::Failed(error)),
            GenerationEvent::Failed(error) => self.end(Ending::Cancelled(error)),
            event => {
                if event.is_generated() {
                    self.stamp_token()?;
                }
                if !self.record.deliver(event) {
                    return Err(ConsumerGone);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if !self.ended {
            let text = "the runtime dropped the job without an answer".to_owned();
            self.end(Ending::Failed(RequestError::Fault(text)));
        }
    }
}
