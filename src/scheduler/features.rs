//! What requests may ask of an executor: what all of its replicas can.
//!
//! Asks the runtimes, holds nothing. What is not here: who refuses what is missing (`http`).

use super::executor::Executor;
use crate::runtime::Features;

impl Executor {
    /// What requests may ask of it: what all of its runtimes can.
    #[must_use]
    pub fn features(&self) -> Features {
        let all = self.core.fleet.runtimes();
        all.map(|runtime| runtime.capabilities())
            .reduce(Features::and)
            .unwrap_or(Features::of(&[]))
    }

    /// Whether requests leave this machine, so that each must have said that it may.
    #[must_use]
    pub fn asks_consent(&self) -> bool {
        let mut all = self.core.fleet.runtimes();
        all.any(|runtime| runtime.asks_consent())
    }
}
