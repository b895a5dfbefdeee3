//! What operators ask for and change, `/v1/admin/..` on the management plane: `models` (what there
//! is), `lifecycle` (load, unload), `devices` (memory), `reload` (the configuration), `guard` (who may
//! not call).
//!
//! Runs on the management plane's threads. Loading and unloading are started here; a client may wait
//! for the end (`wait_s`), but never on all threads. What is not here: HTTP itself (`management`),
//! the state machines (`pool`).

mod devices;
pub mod guard;
mod lifecycle;
mod models;
mod reload;

pub(super) use lifecycle::load_error;

use super::errors::ApiError;
use super::ops::OpsAnswer;
use super::router::AdminRoute;
use super::state::ServerState;
use crate::pool::devices::GpuWatch;
use std::sync::atomic::AtomicUsize;

/// What these routes keep from one request to the next.
#[derive(Debug, Default)]
pub struct Admin {
    gpus: GpuWatch,
    /// Requests that wait for a load or an unload.
    n_waiting: AtomicUsize,
}

/// A request for one of these routes.
#[derive(Clone, Copy, Debug)]
pub struct AdminCall<'a> {
    /// The models.
    pub state: &'a ServerState,
    /// What is asked.
    pub route: &'a AdminRoute,
    /// What stands behind `?`.
    pub query: &'a str,
    /// Of the body.
    pub content_type: Option<&'a str>,
    /// The whole body; may be empty.
    pub body: &'a [u8],
}

impl Admin {
    /// Answers a request.
    pub fn answer(&self, call: &AdminCall<'_>) -> Result<OpsAnswer, ApiError> {
        if !call.body.is_empty() {
            guard::check_content_type(call.content_type)?;
        }
        match call.route {
            AdminRoute::Models => Ok(models::list(call.state)),
            AdminRoute::Model(name) => models::one(call.state, name),
            AdminRoute::Load(name) => lifecycle::load(self, call, name),
            AdminRoute::Unload(name) => lifecycle::unload(self, call, name),
            AdminRoute::Devices => Ok(devices::answer(call.state, &self.gpus)),
            AdminRoute::Reload => reload::answer(call),
        }
    }
}
