//! What of a new configuration a running server cannot take over.
//!
//! Pure. Keys and models are taken over by a reload, and `[executor]` and `[engine]` are defaults of the
//! models; everything else is settled at start. What is not here: the reload itself (`http::admin`).

use super::{Config, ServerConfig};

impl Config {
    /// The sections of the file in which `new` differs from this one and that count at the next start.
    #[must_use]
    pub fn needs_restart(&self, new: &Self) -> Vec<&'static str> {
        let without_keys = |server: &ServerConfig| ServerConfig {
            api_keys: Vec::new(),
            api_key_file: None,
            ..server.clone()
        };
        let sections = [
            (
                "server",
                without_keys(&self.server) != without_keys(&new.server),
            ),
            ("management", self.management != new.management),
            ("log", self.log != new.log),
            ("pool", self.pool != new.pool),
            ("responses", self.responses != new.responses),
        ];
        let changed = sections.into_iter().filter(|(_, differs)| *differs);
        changed.map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_reload_cannot_take_over_is_named() {
        let old = Config::default();
        let mut new = Config::default();
        new.server.api_keys = vec!["key".to_owned()];
        assert!(old.needs_restart(&new).is_empty(), "keys are taken over");
        new.server.max_connections += 1;
        new.pool.cpu_bytes = Some(1);
        new.log.prompts = true;
        assert_eq!(old.needs_restart(&new), ["server", "log", "pool"]);
    }
}
