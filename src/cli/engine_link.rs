//! A direct line from a subcommand to a runtime: submit a request, collect its events with their
//! times. For `bench` and `score`, which measure the engine and need no scheduler in between.
//!
//! The sink runs on the engine thread and only sends. What is not here: text, cancellation,
//! queueing (`scheduler` has them).

use crate::error::Error;
use crate::request::{ConsumerGone, GenerationEvent, GenerationRequest, Job, JobSink};
use crate::runtime::Runtime;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::sync::Arc;
use std::time::Instant;

/// An event and when the engine emitted it.
#[derive(Clone, Debug)]
pub(super) struct EventAt {
    pub(super) at: Instant,
    pub(super) event: GenerationEvent,
}

struct Sink(Sender<EventAt>);

impl JobSink for Sink {
    fn emit(&mut self, event: GenerationEvent) -> Result<(), ConsumerGone> {
        // Never full: the channel holds every event that the request can cause.
        self.0
            .try_send(EventAt {
                at: Instant::now(),
                event,
            })
            .map_err(|_| ConsumerGone)
    }
}

/// The events of one submitted request.
pub(super) struct Submitted(Receiver<EventAt>);

impl Submitted {
    /// All events up to and with the last; an error when the generation failed.
    pub(super) fn wait_to_end(self) -> Result<Vec<EventAt>, Error> {
        let events: Vec<EventAt> = self.0.iter().collect();
        match events.last().map(|last| &last.event) {
            Some(GenerationEvent::Finished { .. }) => Ok(events),
            Some(GenerationEvent::Failed(error)) => Err(Error::other("the engine", error)),
            _ => Err(Error::Other("the engine dropped a request".to_owned())),
        }
    }
}

/// Puts a request into a runtime. The channel has room for all of its events, so that the engine
/// thread never waits for the subcommand.
pub(super) fn submit(runtime: &dyn Runtime, request: GenerationRequest) -> Submitted {
    let n_events_max = request.max_tokens as usize + 2;
    let (sender, receiver) = bounded(n_events_max);
    runtime.submit(Job {
        request: Arc::new(request),
        sink: Box::new(Sink(sender)),
    });
    Submitted(receiver)
}
