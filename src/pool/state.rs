//! The state machine of one model, and what a request for it gets in each state.
//!
//! Pure: no lock, clock or log. The registry owns one [`State`] per model and changes it through
//! [`State::on`] alone; what that returns beside the new state is carried out by others.
//!
//! ```text
//!                   Load                     LoadEnded(Ok)
//!   Unloaded ───────────────► Loading ─────────────────────────► Loaded
//!      ▲  ▲                   ▲  │  │                              │
//!      │  │              Load │  │  │ Unload                       │ Unload
//!      │  │                   │  │  │ (cancels the load)           │ (drains)
//!      │  │ Unload            │  │  ▼                              ▼
//!      │  └──────────────── Failed ◄┐   Unloading ◄────────────────┘
//!      │                LoadEnded(Err)    │   ▲
//!      └──────────────────────────────────┘   │ LoadEnded(Ok) of a cancelled load: its model is
//!        Released, LoadEnded(Err) of a        └ taken down again
//!        cancelled load
//! ```
//!
//! * `Load` on a loading or loaded model changes nothing; on one that is being unloaded it is
//!   refused.
//! * `Unload` on an unloaded or unloading model changes nothing; a failed one forgets its error. On
//!   a loading model it cancels: the state is `Unloading` at once, the loader gives up at its next
//!   chance, and whatever it made meanwhile is taken down before the model is `Unloaded`.
//! * The state carries what exists in it, so that nobody can use a model that is not loaded.

use super::model::{LoadedModel, LoadingModel};
use std::sync::{Arc, Weak};

/// Where a model is, by name only: for lists, metrics and tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RuntimeState {
    /// Known, not in memory.
    Unloaded,
    /// On its way in.
    Loading,
    /// Takes requests.
    Loaded,
    /// On its way out.
    Unloading,
    /// The last load failed.
    Failed,
}

impl RuntimeState {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Unloaded,
        Self::Loading,
        Self::Loaded,
        Self::Unloading,
        Self::Failed,
    ];

    /// For lists and labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Loading => "loading",
            Self::Loaded => "loaded",
            Self::Unloading => "unloading",
            Self::Failed => "failed",
        }
    }

    /// Whether it stays so until somebody asks for something else.
    #[must_use]
    pub fn is_settled(self) -> bool {
        !matches!(self, Self::Loading | Self::Unloading)
    }
}

/// What is on its way out.
#[derive(Clone, Debug)]
pub enum Leaving {
    /// A load that was cancelled and has not ended.
    Load(Arc<LoadingModel>),
    /// A model that drains. Weak: the unload waits until nobody holds it.
    Model(Weak<LoadedModel>),
}

/// Where a model is, with what exists there.
#[derive(Clone, Debug)]
pub enum State {
    /// Known, not in memory.
    Unloaded,
    /// On its way in.
    Loading(Arc<LoadingModel>),
    /// Takes requests.
    Loaded(Arc<LoadedModel>),
    /// On its way out.
    Unloading(Leaving),
    /// The last load failed, and why.
    Failed(Arc<str>),
}

/// What can happen to a model.
#[derive(Debug)]
pub enum Event {
    /// Somebody wants it loaded; this load would begin.
    Load(Arc<LoadingModel>),
    /// A load ended, well or with the reason why not.
    LoadEnded(Result<Arc<LoadedModel>, String>),
    /// Somebody wants it gone.
    Unload,
    /// Its memory is back.
    Released,
}

/// What the owner of the state has to do now.
#[derive(Debug)]
pub enum Effect {
    /// Nothing changed, or nothing follows.
    None,
    /// Start the load of the event.
    BeginLoad(Arc<LoadingModel>),
    /// Tell the loader to give up; it reports its end as always.
    CancelLoad(Arc<LoadingModel>),
    /// Drain it, take it down, and report `Released`.
    BeginUnload(Arc<LoadedModel>),
}

/// Why an event changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A load while the model is being unloaded.
    Unloading,
    /// A pair that cannot occur: a fault of the pool, for the log.
    Impossible(RuntimeState, &'static str),
}

impl State {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> RuntimeState {
        match self {
            Self::Unloaded => RuntimeState::Unloaded,
            Self::Loading(_) => RuntimeState::Loading,
            Self::Loaded(_) => RuntimeState::Loaded,
            Self::Unloading(_) => RuntimeState::Unloading,
            Self::Failed(_) => RuntimeState::Failed,
        }
    }

    /// The transition function: the diagram of the module.
    ///
    /// # Errors
    /// The state is as before.
    pub fn on(&mut self, event: Event) -> Result<Effect, Refused> {
        let (next, effect) = match (&*self, event) {
            (Self::Unloaded | Self::Failed(_), Event::Load(load)) => {
                (Self::Loading(Arc::clone(&load)), Effect::BeginLoad(load))
            }
            (Self::Loading(_) | Self::Loaded(_), Event::Load(_)) => return Ok(Effect::None),
            (Self::Unloading(_), Event::Load(_)) => return Err(Refused::Unloading),

            (Self::Loading(_), Event::LoadEnded(Ok(model))) => (Self::Loaded(model), Effect::None),
            (Self::Loading(_), Event::LoadEnded(Err(why))) => {
                (Self::Failed(why.into()), Effect::None)
            }
            (Self::Unloading(Leaving::Load(_)), Event::LoadEnded(Ok(model))) => (
                Self::Unloading(Leaving::Model(Arc::downgrade(&model))),
                Effect::BeginUnload(model),
            ),
            (Self::Unloading(Leaving::Load(_)), Event::LoadEnded(Err(_))) => {
                (Self::Unloaded, Effect::None)
            }

            (Self::Loaded(model), Event::Unload) => (
                Self::Unloading(Leaving::Model(Arc::downgrade(model))),
                Effect::BeginUnload(Arc::clone(model)),
            ),
            (Self::Loading(load), Event::Unload) => (
                Self::Unloading(Leaving::Load(Arc::clone(load))),
                Effect::CancelLoad(Arc::clone(load)),
            ),
            (Self::Failed(_), Event::Unload) => (Self::Unloaded, Effect::None),
            (Self::Unloaded | Self::Unloading(_), Event::Unload) => return Ok(Effect::None),

            (Self::Unloading(Leaving::Model(_)), Event::Released) => (Self::Unloaded, Effect::None),

            (
                Self::Unloaded
                | Self::Loaded(_)
                | Self::Failed(_)
                | Self::Unloading(Leaving::Model(_)),
                Event::LoadEnded(_),
            ) => return Err(Refused::Impossible(self.name(), "load ended")),
            (
                Self::Unloaded
                | Self::Loading(_)
                | Self::Loaded(_)
                | Self::Failed(_)
                | Self::Unloading(Leaving::Load(_)),
                Event::Released,
            ) => return Err(Refused::Impossible(self.name(), "released")),
        };
        *self = next;
        Ok(effect)
    }
}

/// What a request for a model gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The model.
    Serve,
    /// It begins the load, then waits for it.
    Load,
    /// It waits: the model is on its way in or out.
    Wait,
    /// A 503 that names the state.
    Refuse,
}

/// What a request gets: a model that is not loaded on demand is served when it is loaded and
/// refused otherwise. One that is loaded on demand is waited for; `may_retry` says whether a load
/// that failed is so long ago that another try makes sense.
#[must_use]
pub fn answer(state: RuntimeState, load_on_demand: bool, may_retry: bool) -> Answer {
    match (state, load_on_demand) {
        (RuntimeState::Loaded, _) => Answer::Serve,
        (_, false) => Answer::Refuse,
        (RuntimeState::Unloaded, true) => Answer::Load,
        (RuntimeState::Loading | RuntimeState::Unloading, true) => Answer::Wait,
        (RuntimeState::Failed, true) if may_retry => Answer::Load,
        (RuntimeState::Failed, true) => Answer::Refuse,
    }
}
