//! The executor's calls about registered prefixes: compute once, pin in every replica, list, remove.
//!
//! Runs on the caller's thread (an HTTP worker), which waits. The prefix is first computed by an
//! ordinary job that gives no token, so that it obeys admission, priority and cancelling like any
//! request; then every living replica is asked to pin it. The one that ran the job has it at hand,
//! another computes it inside its pin. No lock is held while waiting: the list notes what is under
//! way (`prefix_pool`), and whoever comes second finds the same pins.
//!
//! A replica that is made anew is asked to pin all that are kept before it is used (`recovery`).
//!
//! **Room.** The list has a capacity, and each replica bounds the pages that pins may take. When the
//! list is full the shortest entry goes, but only once the new prefix is pinned; where there is no
//! room for both, the short one makes room first and comes back if even that was not enough. Below
//! its capacity nothing is evicted for room: the registration is refused with both numbers.

use super::executor::{Core, Executor};
use super::prefix_pool::{NewPrefix, PrefixInfo, PrefixPoolStats};
use super::record::SubmitOptions;
use super::refusal::SubmitError;
use super::ticket::{CancelHandle, Ticket};
use crate::config::PrefixIsolation;
use crate::request::{GenerationRequest, PinError, Prefix, PrefixId, RequestError};
use crate::runtime::PREFIX_BLOCK_TOKENS;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for replicas to pin a prefix that one of them has computed already.
const PIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a prefix was not registered. Nothing is kept of it then.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PrefixError {
    /// The configuration leaves no place for any.
    #[error("registered prefixes are off: prefix_pool_capacity is 0")]
    Off,
    /// Its job was not taken.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// Its job did not end well.
    #[error(transparent)]
    Job(#[from] RequestError),
    /// A replica does not keep it.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Somebody removed it before it was there.
    #[error("the prefix was removed while it was being registered")]
    Removed,
    /// A replica ended, or took too long.
    #[error("a replica did not pin the prefix within {} s", PIN_TIMEOUT.as_secs())]
    NoAnswer,
}

impl Executor {
    /// Computes the K/V of these tokens and keeps them, so that later requests which begin with
    /// them, with the same loops, window and isolation key, skip that work. Waits until it is done.
    /// Only whole blocks are kept: `cached_tokens` of the answer is what really is.
    ///
    /// # Errors
    /// See [`PrefixError`].
    pub fn register_prefix(
        &self,
        prefix: NewPrefix,
        options: SubmitOptions,
    ) -> Result<PrefixInfo, PrefixError> {
        self.begin_prefix(prefix, options)?.finish()
    }

    /// The first half of `register_prefix`, for callers that may want to cancel.
    ///
    /// # Errors
    /// See [`PrefixError`].
    pub fn begin_prefix(
        &self,
        mut prefix: NewPrefix,
        options: SubmitOptions,
    ) -> Result<PrefixRegistration, PrefixError> {
        let core = &self.core;
        if core.prefix_pool.capacity() == 0 {
            return Err(PrefixError::Off);
        }
        let n_tokens = prefix.tokens.len();
        let n_kept = n_tokens / PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS;
        if n_kept == 0 {
            return Err(PrefixError::Pin(PinError::TooShort {
                n_tokens: n_tokens as u32,
                block_tokens: PREFIX_BLOCK_TOKENS as u32,
            }));
        }
        if n_kept < n_tokens {
            prefix.tokens = prefix.tokens[..n_kept].into();
        }
        let stage = match core.prefix_pool.kept(&prefix) {
            Some(info) => Stage::Kept(info),
            None => {
                let mut request = GenerationRequest::new(Arc::clone(&prefix.tokens), 0);
                request.loops = prefix.loops;
                request.cache_window = prefix.cache_window;
                request.kept_tokens = n_kept as u32;
                request.isolation_key = prefix.isolation_key;
                Stage::Computing(Box::new(self.submit(request, options)?))
            }
        };
        Ok(PrefixRegistration {
            core: Arc::clone(core),
            prefix,
            stage,
        })
    }

    /// Who shares computed prompts with whom, as configured.
    #[must_use]
    pub fn prefix_isolation(&self) -> PrefixIsolation {
        self.core.config.prefix_isolation
    }

    /// Counts over the registered prefixes of one owner, or of everyone.
    #[must_use]
    pub fn prefix_pool_stats(&self, owner: Option<&str>) -> PrefixPoolStats {
        self.core.prefix_pool.stats(owner)
    }

    /// The registered prefixes of one owner, or of everyone, oldest first.
    #[must_use]
    pub fn prefixes(&self, owner: Option<&str>) -> Vec<PrefixInfo> {
        self.core.prefix_pool.infos(owner)
    }

    /// Keeps a prefix no longer, if it belongs to the owner (None = whoever it belongs to). False when
    /// there is none such. Its K/V may still be found by chance, as long as nothing else needs the
    /// pages.
    pub fn remove_prefix(&self, id: PrefixId, owner: Option<&str>) -> bool {
        let _change = self.core.prefix_pool.change();
        let removed = self.core.prefix_pool.remove(Some(id), owner);
        removed.iter().for_each(|id| self.core.unpin(*id));
        !removed.is_empty()
    }

    /// The same for all prefixes of an owner, or of everyone. Returns how many they were.
    pub fn remove_prefixes(&self, owner: Option<&str>) -> usize {
        let _change = self.core.prefix_pool.change();
        let removed = self.core.prefix_pool.remove(None, owner);
        removed.iter().for_each(|id| self.core.unpin(*id));
        removed.len()
    }
}

enum Stage {
    /// Nothing to do.
    Kept(PrefixInfo),
    Computing(Box<Ticket>),
}

/// A prefix under way. Dropping it cancels its job.
pub struct PrefixRegistration {
    core: Arc<Core>,
    /// Whole blocks.
    prefix: NewPrefix,
    stage: Stage,
}

impl PrefixRegistration {
    /// Cancels the computation, from any thread; None when there is none.
    #[must_use]
    pub fn cancel_handle(&self) -> Option<CancelHandle> {
        match &self.stage {
            Stage::Kept(_) => None,
            Stage::Computing(ticket) => Some(ticket.cancel_handle()),
        }
    }

    /// Waits for the computation, then for the pins.
    ///
    /// # Errors
    /// See [`PrefixError`].
    pub fn finish(self) -> Result<PrefixInfo, PrefixError> {
        let ticket = match self.stage {
            Stage::Kept(info) => return Ok(info),
            Stage::Computing(ticket) => ticket,
        };
        let loops = ticket.wait()?.outcome.usage.loops;
        let core = &self.core;
        let _change = core.prefix_pool.change();
        let prefix = core.prefix_pool.begin(&self.prefix, loops);
        match core.pin_making_room(&prefix) {
            Ok(cached_tokens) => match core.prefix_pool.keep(prefix.id, cached_tokens) {
                Some((info, evicted)) => {
                    evicted.into_iter().for_each(|id| core.unpin(id));
                    Ok(info)
                }
                None => {
                    core.unpin(prefix.id);
                    Err(PrefixError::Removed)
                }
            },
            Err(error) => {
                if core.prefix_pool.give_up(prefix.id) {
                    core.unpin(prefix.id);
                }
                Err(error)
            }
        }
    }
}

impl Core {
    /// Pins in every living replica; when there is no room and the list is full, without the entry
    /// that has to go anyway.
    fn pin_making_room(&self, prefix: &Prefix) -> Result<u32, PrefixError> {
        let refused = match self.pin(prefix) {
            Err(PrefixError::Pin(error @ PinError::NoRoom { .. })) => PrefixError::Pin(error),
            answer => return answer,
        };
        let Some(leaving) = self.prefix_pool.in_the_way_of(prefix.id) else {
            return Err(refused);
        };
        self.unpin(leaving.id);
        let answer = self.pin(prefix);
        if answer.is_err() {
            self.unpin(prefix.id);
            // Its blocks were cached a moment ago, so it comes back unless the pool is under great
            // pressure; then it is computed again inside the replica.
            if self.pin(&leaving).is_err() {
                self.unpin(leaving.id);
                self.prefix_pool.remove(Some(leaving.id), None);
            }
        }
        answer
    }

    /// The tokens that every living replica keeps.
    fn pin(&self, prefix: &Prefix) -> Result<u32, PrefixError> {
        let deadline = Instant::now() + PIN_TIMEOUT;
        let mut n_kept = None;
        for answer in self.ask_pins(prefix) {
            let n_tokens = answer
                .recv_deadline(deadline)
                .map_err(|error| match error {
                    RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected => {
                        PrefixError::NoAnswer
                    }
                })??;
            n_kept = Some(n_kept.map_or(n_tokens, |n_kept: u32| n_kept.min(n_tokens)));
        }
        n_kept.ok_or(PrefixError::NoAnswer)
    }

    /// One channel per living replica.
    fn ask_pins(&self, prefix: &Prefix) -> Vec<Receiver<Result<u32, PinError>>> {
        let alive = self.fleet.runtimes();
        let alive = alive.filter(|runtime| runtime.status().alive);
        alive
            .map(|runtime| {
                let (answer, receiver) = bounded(1);
                runtime.pin_prefix(prefix.clone(), answer);
                receiver
            })
            .collect()
    }

    fn unpin(&self, id: PrefixId) {
        for runtime in self.fleet.runtimes() {
            runtime.unpin_prefix(id);
        }
    }
}
