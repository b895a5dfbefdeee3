//! The configured models and where each of them is.
//!
//! No lock, clock or thread of its own: `Pool` keeps it behind one mutex and carries out the
//! [`Action`]s that it returns after letting go of that. Invariants: a model has at most one load at
//! a time; the bytes of all models that are neither unloaded nor failed count against their device;
//! a load starts only when the bytes it was promised are there; every change of a state wakes those
//! who wait (`Pool` does that after each call). What is not here: the decisions themselves (`state`,
//! `ledger`).

use super::entry::{Action, Activity, Counts, Entry, Limits, LoadJob};
use super::ledger::{self, DeviceId, MemorySource, ModelMemory, NoRoom, Resident, Room, Standing};
use super::model::{LoadedModel, LoadingModel};
use super::overrides::{Estimate, LoadOverride};
use super::report::{LoadTicket, NameTaken, PoolError};
use super::state::{Effect, Event, Leaving, Refused, RuntimeState, State};
use crate::config::ModelConfig;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug)]
pub(super) struct Registry {
    limits: Limits,
    pub(super) entries: Vec<Entry>,
    /// Loads that wait for a thread or for bytes, oldest first; at most one per model.
    waiting: VecDeque<Arc<LoadJob>>,
    n_running: usize,
    is_closed: bool,
    counts: Counts,
}

impl Registry {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: Vec::new(),
            waiting: VecDeque::new(),
            n_running: 0,
            is_closed: false,
            counts: Counts::default(),
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Limits a device that has no limit yet.
    pub(super) fn limit_once(&mut self, device: DeviceId, limit_bytes: u64) {
        self.limits.bytes.entry(device).or_insert(limit_bytes);
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn find(&self, id: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.answers_to(id))
    }

    pub(super) fn find_mut(&mut self, id: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.answers_to(id))
    }

    /// A new model, not loaded. Its name and aliases must be free.
    pub(super) fn add(&mut self, config: ModelConfig, now: Instant) -> Result<(), NameTaken> {
        check_free(&self.entries, &config)?;
        self.entries.push(Entry::new(config, now));
        Ok(())
    }

    /// A model that was loaded elsewhere; in the place of its entry, or a new one.
    pub(super) fn insert(
        &mut self,
        model: Arc<LoadedModel>,
        config: ModelConfig,
        now: Instant,
    ) -> Result<(), NameTaken> {
        let is_free = |entry: &Entry| entry.config.name == config.name && !entry.holds();
        let place = match self.entries.iter().position(is_free) {
            Some(place) => place,
            None => {
                self.add(config, now)?;
                self.entries.len() - 1
            }
        };
        let entry = &mut self.entries[place];
        entry.memory = model.meta.memory;
        (entry.loaded_at, entry.last_used) = (now, now);
        entry.state = State::Loaded(model);
        Ok(())
    }

    /// Takes a load, or says why not. `config` has the overrides in it.
    pub(super) fn ask_load(
        &mut self,
        config: ModelConfig,
        overrides: LoadOverride,
        estimate: Estimate,
        activity: &Activity,
        now: Instant,
    ) -> Result<(LoadTicket, Vec<Action>), PoolError> {
        if self.is_closed {
            return Err(PoolError::ShuttingDown);
        }
        let name = config.name.clone();
        let entry = self.find_mut(&name);
        let entry = entry.ok_or_else(|| PoolError::NotFound(name.clone()))?;
        let load = Arc::new(LoadingModel::new(name.clone()));
        // Room is looked for only when a load would begin.
        let would_begin = matches!(entry.state, State::Unloaded | State::Failed(_));
        let memory = entry.measured_for(&config).unwrap_or(estimate.memory);
        let evicted = match would_begin {
            true => self.room_for(&name, memory, activity, now)?,
            false => Vec::new(),
        };
        let mut actions = Vec::new();
        self.evict(&evicted, &mut actions);
        let entry = self.find_mut(&name);
        let entry = entry.ok_or_else(|| PoolError::NotFound(name.clone()))?;
        let effect = entry.state.on(Event::Load(load));
        let is_new = matches!(effect, Ok(Effect::BeginLoad(_)));
        match effect {
            Ok(Effect::BeginLoad(progress)) => {
                (entry.memory, entry.overrides) = (memory, overrides);
                (entry.failed_at, entry.last_used) = (None, now);
                self.waiting.push_back(Arc::new(LoadJob {
                    config,
                    progress,
                    memory,
                }));
            }
            Ok(_) => {}
            Err(refused) => return Err(self.refusal(&name, refused)),
        }
        actions.extend(self.startable(now));
        let state = self.find(&name).map(|entry| entry.state.name());
        let ticket = LoadTicket {
            model: name,
            state: state.unwrap_or(RuntimeState::Unloaded),
            is_new,
            evicted,
        };
        Ok((ticket, actions))
    }

    fn refusal(&self, name: &str, refused: Refused) -> PoolError {
        match refused {
            Refused::Unloading => PoolError::Unloading(name.to_owned()),
            Refused::Impossible(state, event) => {
                tracing::error!(
                    model = name,
                    state = state.name(),
                    event,
                    "a fault of the pool"
                );
                PoolError::Unloading(name.to_owned())
            }
        }
    }

    /// Who has to go for a model of that size.
    fn room_for(
        &self,
        name: &str,
        memory: ModelMemory,
        activity: &Activity,
        now: Instant,
    ) -> Result<Vec<String>, PoolError> {
        let device = memory.device;
        let residents = self.residents(device, activity, now);
        let limit = self.limits.of(device);
        match ledger::make_room(device, limit, memory.total_bytes(), &residents) {
            Room::Fits => Ok(Vec::new()),
            Room::Evict(names) => Ok(names),
            Room::Refused(room) => Err(PoolError::NoRoom {
                model: name.to_owned(),
                room,
            }),
        }
    }

    fn residents(&self, device: DeviceId, activity: &Activity, now: Instant) -> Vec<Resident> {
        let holders = self.entries.iter();
        let holders = holders.filter(|entry| entry.holds() && entry.memory.device == device);
        holders
            .map(|entry| Resident {
                name: entry.config.name.clone(),
                bytes: entry.memory.total_bytes(),
                standing: self.standing(entry, activity, now),
                last_used: entry.last_used,
            })
            .collect()
    }

    fn standing(&self, entry: &Entry, activity: &Activity, now: Instant) -> Standing {
        let model = match &entry.state {
            State::Unloaded | State::Failed(_) | State::Unloading(_) => return Standing::Leaving,
            State::Loading(_) => return Standing::Loading,
            State::Loaded(model) => model,
        };
        let was_busy = activity.busy.get(&entry.config.name).copied();
        // Somebody else holds it: a request between finding its model and queueing, or its answer.
        let is_held = Arc::strong_count(model) > 1;
        if entry.config.lifecycle.pinned {
            Standing::Pinned
        } else if was_busy != Some(false)
            || is_held
            || entry.last_used > activity.taken_at
            || entry.n_waiting > 0
        {
            Standing::Busy
        } else if now.saturating_duration_since(entry.loaded_at) < self.limits.min_residency {
            Standing::JustLoaded
        } else {
            Standing::Evictable
        }
    }

    /// Takes an unload.
    pub(super) fn ask_unload(
        &mut self,
        id: &str,
        drain: Duration,
    ) -> Result<(RuntimeState, Vec<Action>), PoolError> {
        let entry = self.find_mut(id);
        let entry = entry.ok_or_else(|| PoolError::NotFound(id.to_owned()))?;
        let effect = entry.state.on(Event::Unload);
        let (state, name) = (entry.state.name(), entry.config.name.clone());
        entry.is_starting &= state != RuntimeState::Unloaded;
        let mut actions = Vec::new();
        match effect {
            Ok(Effect::BeginUnload(model)) => actions.push(Action::Unload { model, drain }),
            Ok(Effect::CancelLoad(load)) => {
                load.cancel();
                return Ok((self.drop_waiting(&name), actions));
            }
            Ok(_) => {}
            Err(refused) => return Err(self.refusal(&name, refused)),
        }
        Ok((state, actions))
    }

    /// A cancelled load that has not started ends here and now.
    fn drop_waiting(&mut self, name: &str) -> RuntimeState {
        let before = self.waiting.len();
        self.waiting.retain(|job| job.config.name != name);
        if self.waiting.len() < before {
            self.settle_load(name, Err("cancelled".to_owned()), None);
        }
        let entry = self.find(name);
        entry.map_or(RuntimeState::Unloaded, |entry| entry.state.name())
    }

    /// A load that made its model, just before it ends: whether it may keep what the model holds. Evicts
    /// idle models where that is more than was promised and more than there is.
    ///
    /// # Errors
    /// There is no room for it, with the numbers; whoever made it takes it down.
    pub(super) fn admit_measured(
        &mut self,
        job: &LoadJob,
        memory: ModelMemory,
        activity: &Activity,
        now: Instant,
    ) -> Result<(Vec<String>, Vec<Action>), NoRoom> {
        let name = job.config.name.as_str();
        if memory.source == MemorySource::Unavailable || job.progress.is_cancelled() {
            return Ok(Default::default());
        }
        if let Some(entry) = self.find_mut(name) {
            entry.memory = memory;
            // Also when it fails: the next try knows what it needs.
            entry.measured = Some((job.config.clone(), memory));
        }
        let device = memory.device;
        let mut residents = self.residents(device, activity, now);
        residents.retain(|one| one.name != name && !self.is_waiting(&one.name));
        let promised_bytes = match job.memory.device == device {
            true => job.memory.total_bytes(),
            false => 0,
        };
        let bytes = (promised_bytes, memory.total_bytes());
        let limit_bytes = self.limits.of(device);
        let evicted = match ledger::after_load(device, limit_bytes, bytes, &residents) {
            Room::Fits => Vec::new(),
            Room::Evict(names) => names,
            Room::Refused(room) => return Err(room),
        };
        let mut actions = Vec::new();
        self.evict(&evicted, &mut actions);
        Ok((evicted, actions))
    }

    fn evict(&mut self, victims: &[String], actions: &mut Vec<Action>) {
        for victim in victims {
            *self.counts.evictions.entry(victim.clone()).or_default() += 1;
            let drain = self.limits.drain;
            // It cannot fail: the victim was found under this very lock.
            if let Ok((_, more)) = self.ask_unload(victim, drain) {
                actions.extend(more);
            }
        }
    }

    /// A load that had started ended.
    pub(super) fn load_ended(
        &mut self,
        job: &LoadJob,
        result: Result<Arc<LoadedModel>, String>,
        now: Instant,
    ) -> Vec<Action> {
        self.n_running = self.n_running.saturating_sub(1);
        let name = job.config.name.as_str();
        if let Ok(model) = &result
            && let Some(entry) = self.find_mut(name)
        {
            // What nobody measured stays as it was estimated.
            if model.meta.memory.source != MemorySource::Unavailable {
                entry.memory = model.meta.memory;
                entry.measured = Some((job.config.clone(), entry.memory));
            }
            (entry.loaded_at, entry.last_used) = (now, now);
        }
        let mut actions = self.settle_load(name, result, Some(now));
        actions.extend(self.startable(now));
        actions
    }

    /// Tells the state machine of the end of a load. `at`: None where the load never started.
    fn settle_load(
        &mut self,
        name: &str,
        result: Result<Arc<LoadedModel>, String>,
        at: Option<Instant>,
    ) -> Vec<Action> {
        let drain = Duration::ZERO;
        let Some(entry) = self.find_mut(name) else {
            return Vec::new();
        };
        let is_ok = result.is_ok();
        let effect = entry.state.on(Event::LoadEnded(result));
        entry.is_starting = false;
        let outcome = match entry.state.name() {
            RuntimeState::Loaded => "loaded",
            RuntimeState::Failed => "failed",
            RuntimeState::Unloaded | RuntimeState::Loading | RuntimeState::Unloading => "cancelled",
        };
        if outcome == "failed" {
            // What only the overrides of one load broke does not keep requests from loading it anew.
            entry.failed_at = at.filter(|_| entry.overrides == LoadOverride::default());
        }
        if !is_ok {
            entry.overrides = LoadOverride::default();
        }
        let counted = self.counts.loads.entry((name.to_owned(), outcome));
        *counted.or_default() += 1;
        match effect {
            Ok(Effect::BeginUnload(model)) => vec![Action::Unload { model, drain }],
            Ok(_) => Vec::new(),
            Err(refused) => {
                self.refusal(name, refused); // for its line in the log
                Vec::new()
            }
        }
    }

    /// A load that could not even be taken at the start of the server.
    pub(super) fn fail(&mut self, name: &str, why: String, now: Instant) {
        let is_closed = self.is_closed;
        let Some(entry) = self.find_mut(name) else {
            return;
        };
        entry.is_starting = false;
        let load = Arc::new(LoadingModel::new(name));
        if !is_closed && matches!(entry.state.on(Event::Load(load)), Ok(Effect::BeginLoad(_))) {
            self.settle_load(name, Err(why), Some(now));
        }
    }

    /// An unloaded model's memory is back.
    pub(super) fn released(&mut self, name: &str, now: Instant) -> Vec<Action> {
        if let Some(entry) = self.find_mut(name) {
            let effect = entry.state.on(Event::Released);
            entry.overrides = LoadOverride::default();
            if let Err(refused) = effect {
                self.refusal(name, refused); // for its line in the log
            }
        }
        self.startable(now)
    }

    /// The waiting loads that may start now. One whose bytes can never come, because others turned
    /// out larger than they said, fails with the numbers.
    fn startable(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut index = 0;
        while index < self.waiting.len() && self.n_running < self.limits.load_threads {
            let job = Arc::clone(&self.waiting[index]);
            if self.has_bytes_for(&job) {
                self.waiting.remove(index);
                self.n_running += 1;
                actions.push(Action::Load(job));
            } else if self.nothing_will_come() {
                self.waiting.remove(index);
                let why = format!("no room: {}", self.numbers(&job));
                self.settle_load(&job.config.name, Err(why), Some(now));
            } else {
                index += 1;
            }
        }
        actions
    }

    fn is_waiting(&self, name: &str) -> bool {
        self.waiting.iter().any(|job| job.config.name == name)
    }

    /// Bytes that are really taken on a device, leaving models included, waiting loads not.
    fn held_bytes(&self, device: DeviceId) -> u64 {
        let holders = self.entries.iter().filter(|entry| {
            entry.holds() && entry.memory.device == device && !self.is_waiting(&entry.config.name)
        });
        holders.fold(0, |all, entry| {
            all.saturating_add(entry.memory.total_bytes())
        })
    }

    fn has_bytes_for(&self, job: &LoadJob) -> bool {
        let device = job.memory.device;
        ledger::may_start(
            self.limits.of(device),
            job.memory.total_bytes(),
            self.held_bytes(device),
        )
    }

    fn nothing_will_come(&self) -> bool {
        let is_leaving = |entry: &Entry| matches!(entry.state, State::Unloading(_));
        self.n_running == 0 && !self.entries.iter().any(is_leaving)
    }

    fn numbers(&self, job: &LoadJob) -> NoRoom {
        let device = job.memory.device;
        let limit_bytes = self.limits.of(device);
        NoRoom {
            device,
            needed_bytes: job.memory.total_bytes(),
            free_bytes: limit_bytes.saturating_sub(self.held_bytes(device)),
            evictable_bytes: 0,
            limit_bytes,
            is_hopeless: false,
        }
    }

    /// Loaded models that were without work for longer than they may. One that has work counts as
    /// used now.
    pub(super) fn idle_models(&mut self, activity: &Activity, now: Instant) -> Vec<String> {
        let mut idle = Vec::new();
        for index in 0..self.entries.len() {
            let standing = self.standing(&self.entries[index], activity, now);
            let entry = &mut self.entries[index];
            match standing {
                Standing::Busy => entry.last_used = now,
                Standing::Evictable | Standing::JustLoaded => {
                    let idle_for = now.saturating_duration_since(entry.last_used);
                    let most = entry.config.lifecycle.idle_unload;
                    if most.is_some_and(|most| idle_for >= most) {
                        idle.push(entry.config.name.clone());
                    }
                }
                Standing::Pinned | Standing::Loading | Standing::Leaving => {}
            }
        }
        idle
    }

    /// What is promised or held on a device.
    pub(super) fn used_bytes(&self, device: DeviceId) -> u64 {
        let holders = self.entries.iter();
        let holders = holders.filter(|entry| entry.holds() && entry.memory.device == device);
        holders.fold(0, |all, entry| {
            all.saturating_add(entry.memory.total_bytes())
        })
    }

    /// Entries whose bytes count.
    pub(super) fn holders(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.holds())
    }

    /// The loaded models.
    pub(super) fn loaded(&self) -> Vec<Arc<LoadedModel>> {
        let loaded = self.entries.iter().filter_map(Entry::loaded);
        loaded.cloned().collect()
    }

    /// The loaded models and those that drain.
    pub(super) fn with_work(&self) -> Vec<Arc<LoadedModel>> {
        let held = |entry: &Entry| match &entry.state {
            State::Loaded(model) => Some(Arc::clone(model)),
            State::Unloading(Leaving::Model(model)) => model.upgrade(),
            State::Unloading(Leaving::Load(_))
            | State::Unloaded
            | State::Loading(_)
            | State::Failed(_) => None,
        };
        self.entries.iter().filter_map(held).collect()
    }

    /// Takes no load any more and cancels those on their way.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        let loading = self.entries.iter().filter_map(|entry| match &entry.state {
            State::Loading(load) => Some(load.name.clone()),
            State::Unloaded | State::Loaded(_) | State::Unloading(_) | State::Failed(_) => None,
        });
        for name in loading.collect::<Vec<_>>() {
            // It cannot fail: the model is there, and an unload of a loading model is legal.
            let _ = self.ask_unload(&name, Duration::ZERO);
        }
    }
}

pub(super) fn check_free(entries: &[Entry], config: &ModelConfig) -> Result<(), NameTaken> {
    let ids = std::iter::once(&config.name).chain(&config.aliases);
    for id in ids {
        if entries.iter().any(|other| other.answers_to(id)) {
            return Err(NameTaken(id.clone()));
        }
    }
    Ok(())
}
