//! A request looks for its model, and waits for it where that is configured.
//!
//! Runs on the HTTP worker that holds the request. What it gets in each state is decided by
//! [`state::answer`]; here is the waiting: until the model is loaded, the load failed, the request's
//! deadline, the client's hang-up, or the end of the server, whichever comes first. Those who wait
//! are bounded per model by its `max_queue_depth`, like those who wait in its queue later. A load
//! that finds no room is tried again while the request waits: a busy model may become idle. What is
//! not here: the words for clients (`http`).

use super::entry::Entry;
use super::ledger::NoRoom;
use super::model::{LoadProgress, LoadedModel, LoadingModel};
use super::state::{self, Answer, RuntimeState, State};
use super::{LOOK_AGAIN, LoadOverride, Pool, PoolError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a request is willing to wait for its model.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    /// Its own limit; None = the model's `queue_timeout`, or else `pool.load_wait`.
    pub queue_timeout: Option<Duration>,
    /// Whether the client has left; asked now and then while waiting.
    pub is_gone: &'a dyn Fn() -> bool,
}

impl Patience<'_> {
    /// As configured, whoever asks.
    pub const USUAL: Patience<'static> = Patience {
        queue_timeout: None,
        is_gone: &|| false,
    };
}

/// Why there is no model for a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unavailable {
    /// No configured model answers to the id.
    #[error("the model '{0}' does not exist")]
    Unknown(String),
    /// It is not loaded, and no load is on its way.
    #[error(
        "the model '{model}' is not loaded{}",
        room.map_or_else(String::new, |room| format!(", and there is no room: {room}"))
    )]
    NotLoaded {
        /// The public name.
        model: String,
        /// A request may load it, but not now.
        load_on_demand: bool,
        /// Why that was not possible.
        room: Option<NoRoom>,
    },
    /// It is on its way.
    #[error("the model '{model}' is being loaded ({})", percent(progress))]
    Loading {
        /// The public name.
        model: String,
        /// How far.
        progress: LoadProgress,
        /// When it should be there, by the rate of the load so far: 1..=30.
        retry_after_s: u32,
    },
    /// It is on its way out.
    #[error("the model '{model}' is being unloaded")]
    Unloading {
        /// The public name.
        model: String,
        /// The next request may load it again.
        load_on_demand: bool,
    },
    /// Its last load failed.
    #[error("the model '{model}' could not be loaded: {why}")]
    Failed {
        /// The public name.
        model: String,
        /// What the loader said.
        why: Arc<str>,
        /// A later request tries again.
        load_on_demand: bool,
    },
    /// As many wait for it as may.
    #[error("{n_waiting} requests wait for the model '{model}' to be loaded; at most {n_max} may")]
    QueueFull {
        /// The public name.
        model: String,
        /// Those that wait.
        n_waiting: usize,
        /// The model's `max_queue_depth`.
        n_max: usize,
    },
    /// The client has left.
    #[error("the client has left")]
    ClientGone,
    /// The server is on its way down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

fn percent(progress: &LoadProgress) -> String {
    match progress.total_bytes {
        0 => progress.phase.name().to_owned(),
        total => format!(
            "{} %",
            u128::from(progress.done_bytes) * 100 / u128::from(total)
        ),
    }
}

/// Counts a request among those that wait for a model, as long as it lives.
struct Waiting<'a> {
    pool: &'a Pool,
    name: String,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.pool.shared.lock().find_mut(&self.name) {
            entry.n_waiting = entry.n_waiting.saturating_sub(1);
        }
    }
}

/// What a look at the registry says.
enum Look {
    Found(Arc<LoadedModel>),
    Wait { load: bool },
    Refused(Unavailable),
}

impl Pool {
    /// The model that answers to an id, which counts as a use of it. Waits for a model that is loaded
    /// on demand.
    ///
    /// # Errors
    /// See [`Unavailable`].
    pub fn acquire(
        &self,
        id: &str,
        patience: &Patience<'_>,
    ) -> Result<Arc<LoadedModel>, Unavailable> {
        match self.look(id, None) {
            Look::Found(model) => Ok(model),
            Look::Refused(why) => Err(self.refused(why)),
            Look::Wait { .. } => {
                let (waiting, deadline) = self.wait_in_line(id, patience)?;
                let found = self.wait_for_load(&waiting.name, deadline, patience);
                found.map_err(|why| self.refused(why))
            }
        }
    }

    /// The same without waiting and without counting as a use: for lists.
    ///
    /// # Errors
    /// See [`Unavailable`].
    pub fn look_up(&self, id: &str) -> Result<Arc<LoadedModel>, Unavailable> {
        let registry = self.shared.lock();
        let entry = registry.find(id);
        let entry = entry.ok_or_else(|| Unavailable::Unknown(id.to_owned()))?;
        let found = entry.loaded().cloned();
        found.ok_or_else(|| unavailable(entry, None))
    }

    fn refused(&self, why: Unavailable) -> Unavailable {
        self.shared.gauges.refused(&why);
        why
    }

    /// Counts the request among those that wait, if one more may.
    fn wait_in_line(
        &self,
        id: &str,
        patience: &Patience<'_>,
    ) -> Result<(Waiting<'_>, Instant), Unavailable> {
        let now = self.shared.clock.now();
        let mut registry = self.shared.lock();
        let Some(entry) = registry.find_mut(id) else {
            return Err(Unavailable::Unknown(id.to_owned()));
        };
        let executor = &entry.config.executor;
        let name = entry.config.name.clone();
        if entry.n_waiting >= executor.max_queue_depth {
            let why = Unavailable::QueueFull {
                model: name,
                n_waiting: entry.n_waiting,
                n_max: executor.max_queue_depth,
            };
            drop(registry);
            return Err(self.refused(why));
        }
        entry.n_waiting += 1;
        let timeout = patience.queue_timeout.or(executor.queue_timeout);
        let timeout = timeout.unwrap_or(self.shared.config.load_wait);
        let deadline = now
            .checked_add(timeout)
            .unwrap_or(now + Duration::from_secs(3600));
        Ok((Waiting { pool: self, name }, deadline))
    }

    fn wait_for_load(
        &self,
        name: &str,
        deadline: Instant,
        patience: &Patience<'_>,
    ) -> Result<Arc<LoadedModel>, Unavailable> {
        let mut room = None;
        loop {
            let load = match self.look(name, room) {
                Look::Found(model) => return Ok(model),
                Look::Refused(why) => return Err(why),
                Look::Wait { load } => load,
            };
            if (patience.is_gone)() {
                return Err(Unavailable::ClientGone);
            }
            if self.shared.clock.now() >= deadline {
                return Err(self.too_late(name, room));
            }
            if load {
                match self.shared.try_load(name, &LoadOverride::default()) {
                    Ok(_) => continue,
                    Err(PoolError::NoRoom { room: numbers, .. }) if numbers.is_hopeless => {
                        return Err(self.too_late(name, Some(numbers)));
                    }
                    Err(PoolError::NoRoom { room: numbers, .. }) => room = Some(numbers),
                    // Somebody else was faster; the next look tells.
                    Err(
                        PoolError::NotFound(_)
                        | PoolError::Unloading(_)
                        | PoolError::Override(_)
                        | PoolError::ShuttingDown,
                    ) => {}
                }
            }
            let mut registry = self.shared.lock();
            let is_over = |state: RuntimeState| state == RuntimeState::Loaded;
            if registry
                .find(name)
                .is_some_and(|entry| is_over(entry.state.name()))
            {
                continue; // it changed since the look
            }
            self.shared.changed.wait_for(&mut registry, LOOK_AGAIN);
        }
    }

    /// One look; a model that is found counts as used.
    fn look(&self, id: &str, room: Option<NoRoom>) -> Look {
        let now = self.shared.clock.now();
        let mut registry = self.shared.lock();
        let is_closed = registry.is_closed();
        let Some(entry) = registry.find_mut(id) else {
            return Look::Refused(Unavailable::Unknown(id.to_owned()));
        };
        let on_demand = entry.config.lifecycle.load_on_demand;
        let retry_after = self.shared.config.retry_failed;
        let may_retry = entry
            .failed_at
            .is_none_or(|failed_at| now.saturating_duration_since(failed_at) >= retry_after);
        match state::answer(entry.state.name(), on_demand, may_retry) {
            Answer::Serve => match entry.loaded().cloned() {
                Some(model) => {
                    entry.last_used = now;
                    Look::Found(model)
                }
                None => Look::Wait { load: false },
            },
            Answer::Load | Answer::Wait if is_closed => Look::Refused(Unavailable::ShuttingDown),
            Answer::Load => Look::Wait { load: true },
            Answer::Wait => Look::Wait { load: false },
            Answer::Refuse => Look::Refused(unavailable(entry, room)),
        }
    }

    /// The deadline has passed, or waiting is in vain.
    fn too_late(&self, name: &str, room: Option<NoRoom>) -> Unavailable {
        let registry = self.shared.lock();
        match registry.find(name) {
            Some(entry) => unavailable(entry, room),
            None => Unavailable::Unknown(name.to_owned()),
        }
    }
}

fn unavailable(entry: &Entry, room: Option<NoRoom>) -> Unavailable {
    let model = entry.config.name.clone();
    let load_on_demand = entry.config.lifecycle.load_on_demand;
    match &entry.state {
        // Its turn in the server's start has not come yet.
        State::Unloaded if entry.is_starting => Unavailable::Loading {
            progress: LoadingModel::new("").progress(),
            retry_after_s: LoadingModel::new("").retry_after_s(),
            model,
        },
        // Loaded in this very moment, after the deadline: as good as on its way.
        State::Unloaded | State::Loaded(_) => Unavailable::NotLoaded {
            model,
            load_on_demand,
            room,
        },
        State::Loading(load) => Unavailable::Loading {
            model,
            progress: load.progress(),
            retry_after_s: load.retry_after_s(),
        },
        State::Unloading(_) => Unavailable::Unloading {
            model,
            load_on_demand,
        },
        State::Failed(why) => Unavailable::Failed {
            model,
            why: Arc::clone(why),
            load_on_demand,
        },
    }
}
