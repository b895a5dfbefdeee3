//! A new configuration for a running pool: what it adds, removes, changes, and leaves alone.
//!
//! Part of the registry, under its owner's lock. What is not here: reading files (`config`).

use super::entry::Entry;
use super::registry::Registry;
use super::report::{NameTaken, ReloadReport};
use crate::config::ModelConfig;
use std::collections::BTreeSet;
use std::time::Instant;

impl Registry {
    /// Takes over a new configuration; loaded models and those on their way stay as they are.
    ///
    /// # Errors
    /// A new id belongs to a model that stays; then nothing was changed.
    pub(super) fn reload(
        &mut self,
        configs: Vec<ModelConfig>,
        now: Instant,
    ) -> Result<ReloadReport, NameTaken> {
        self.check_reload(&configs)?;
        let mut report = ReloadReport::default();
        let mut old = std::mem::take(&mut self.entries);
        let mut new: Vec<Entry> = Vec::with_capacity(configs.len());
        for config in configs {
            let name = config.name.clone();
            let known = old.iter().position(|entry| entry.config.name == name);
            let Some(known) = known else {
                report.added.push(name);
                new.push(Entry::new(config, now));
                continue;
            };
            let mut entry = old.remove(known);
            let list = if entry.config == config {
                &mut report.unchanged
            } else if entry.holds() {
                &mut report.left_alone
            } else {
                // What failed may be what was changed.
                entry = Entry::new(config, now);
                &mut report.changed
            };
            list.push(name);
            new.push(entry);
        }
        for entry in old {
            match entry.holds() {
                true => {
                    report.left_alone.push(entry.config.name.clone());
                    new.push(entry);
                }
                false => report.removed.push(entry.config.name.clone()),
            }
        }
        self.entries = new;
        Ok(report)
    }

    /// Whether a new configuration would give an id to two models.
    fn check_reload(&self, configs: &[ModelConfig]) -> Result<(), NameTaken> {
        let mut kept: Vec<&ModelConfig> = Vec::new();
        for entry in self.entries.iter().filter(|entry| entry.holds()) {
            kept.push(&entry.config);
        }
        let new = configs
            .iter()
            .filter(|config| kept.iter().all(|old| old.name != config.name));
        let mut seen = BTreeSet::new();
        for config in kept.iter().copied().chain(new) {
            for id in std::iter::once(&config.name).chain(&config.aliases) {
                if !seen.insert(id) {
                    return Err(NameTaken(id.clone()));
                }
            }
        }
        Ok(())
    }
}
