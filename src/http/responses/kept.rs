//! The store of responses as all HTTP workers share it: one lock, one clock.
//!
//! The lock protects the whole store; it is held for look-ups and moves, never while JSON is written
//! or read or an answer is sent. What is not here: what is kept and pushed out (`store`).

use super::store::{Kept, Limits, Owner, Store, Turn};
use crate::clock::{Clock, SystemClock};
use parking_lot::Mutex;
use serde_json::Value;
use std::sync::Arc;

/// See the module.
pub struct Responses {
    store: Mutex<Store>,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Responses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Responses").finish_non_exhaustive()
    }
}

impl Responses {
    /// An empty store on the system's clock.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self::with_clock(limits, Arc::new(SystemClock))
    }

    /// The same on another clock.
    #[must_use]
    pub fn with_clock(limits: Limits, clock: Arc<dyn Clock>) -> Self {
        Self {
            store: Mutex::new(Store::new(limits)),
            clock,
        }
    }

    /// Items as they are kept for `owner`.
    #[must_use]
    pub fn turn(&self, items: &[Value], owner: Owner<'_>) -> Arc<Turn> {
        let ledger = self.store.lock().ledger(owner);
        Turn::new(items, &ledger)
    }

    /// Keeps a response, if there is room for one as large.
    pub fn keep(&self, kept: Kept) {
        let now = self.clock.now();
        let id = kept.id.clone();
        if !self.store.lock().keep(kept, now) {
            tracing::debug!(id, "the response is too large to be kept");
        }
    }

    /// The response object as JSON text.
    #[must_use]
    pub fn json(&self, id: &str, owner: Owner<'_>) -> Option<Arc<[u8]>> {
        self.store.lock().json(id, owner, self.clock.now())
    }

    /// See [`Store::seen`].
    #[must_use]
    pub fn seen(&self, id: &str, owner: Owner<'_>) -> Option<Vec<Arc<Turn>>> {
        self.store.lock().seen(id, owner, self.clock.now())
    }

    /// See [`Store::history`].
    #[must_use]
    pub fn history(&self, id: &str, owner: Owner<'_>) -> Option<Vec<Arc<Turn>>> {
        self.store.lock().history(id, owner, self.clock.now())
    }

    /// An item of any response of this owner.
    #[must_use]
    pub fn item(&self, id: &str, owner: Owner<'_>) -> Option<Value> {
        let json = self.store.lock().item(id, owner, self.clock.now())?;
        serde_json::from_str(&json).ok()
    }

    /// See [`Store::delete`].
    pub fn delete(&self, id: &str, owner: Owner<'_>) -> bool {
        self.store.lock().delete(id, owner, self.clock.now())
    }
}
