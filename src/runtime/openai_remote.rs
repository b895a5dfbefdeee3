//! A model of a remote OpenAI-compatible server as a runtime; one base URL is one replica.
//!
//! Opening it reads the key from its environment variable and asks the server whether it is well: the
//! same function is the probe of the circuit breaker, because the scheduler opens a dead replica anew
//! through it. A server that does not answer when its model is loaded, while another one does, begins as
//! an open circuit ([`absent`]) and joins when the probe succeeds. What is not here: the calls
//! (`upstream`).

use super::upstream::call::Server;
use super::upstream::client::{Client, Secret};
use super::upstream::pool::Upstream;
use super::upstream::{Room, UpstreamRuntime};
use crate::config::{AllowRemote, OpenaiRemoteConfig};
use std::time::Duration;

/// Longest wait for the answer to whether it is well.
const HEALTH_WAIT: Duration = Duration::from_secs(10);

/// Opens replica `index`; indices beyond the last URL begin again at the first. `name` is the public
/// model's.
///
/// # Errors
/// In words for the log: no such variable, an unreadable file of certificates, a server that is not
/// well. The key is not among them.
pub fn open(
    name: &str,
    config: &OpenaiRemoteConfig,
    index: usize,
) -> Result<UpstreamRuntime, String> {
    let remote = Remote::new(name, config, index)?;
    if !config.health_path.is_empty() {
        remote
            .server
            .client
            .fetch(&config.health_path, HEALTH_WAIT)?;
    }
    let (upstream, room, asks_consent) = remote.into_parts();
    Ok(UpstreamRuntime::remote(upstream, room, asks_consent).making(config.embeddings))
}

/// Replica `index` while its server does not answer: dead from the start.
///
/// # Errors
/// What no waiting mends: see [`open`].
pub fn absent(
    name: &str,
    config: &OpenaiRemoteConfig,
    index: usize,
    why: &str,
) -> Result<UpstreamRuntime, String> {
    let (upstream, room, asks_consent) = Remote::new(name, config, index)?.into_parts();
    Ok(UpstreamRuntime::absent(upstream, room, asks_consent, why).making(config.embeddings))
}

/// What a replica is made of before its server was asked anything.
struct Remote {
    name: String,
    server: Server,
    room: Room,
    asks_consent: bool,
}

impl Remote {
    fn new(name: &str, config: &OpenaiRemoteConfig, index: usize) -> Result<Self, String> {
        if let Some(fault) = config.fault() {
            return Err(fault);
        }
        let urls = config.urls();
        let url = urls[index % urls.len()];
        let key = config.api_key_env.as_deref().map(key_of).transpose()?;
        let client = Client::new(url, key, config.ca_file.as_deref(), &config.limits)?;
        let server = Server {
            client,
            model: config.model.clone(),
            dialect: config.dialect,
            limits: config.limits.clone(),
        };
        let room = Room {
            max_inflight: config.max_inflight,
            context_length: config.context_length.unwrap_or(u32::MAX),
        };
        Ok(Self {
            name: format!("{name}-{index}"),
            server,
            room,
            asks_consent: config.allow_remote == AllowRemote::Ask,
        })
    }

    fn into_parts(self) -> (Upstream, Room, bool) {
        let upstream = Upstream::new(&self.name, self.server, self.room.max_inflight);
        (upstream, self.room, self.asks_consent)
    }
}

fn key_of(variable: &str) -> Result<Secret, String> {
    let key = std::env::var(variable).unwrap_or_default();
    let is_sendable = key.bytes().all(|byte| byte.is_ascii_graphic());
    match (key.is_empty(), is_sendable) {
        (true, _) => Err(format!("the environment variable {variable} holds no key")),
        (false, false) => Err(format!(
            "the key in {variable} has characters that no key has"
        )),
        (false, true) => Ok(Secret::new(&key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_from_the_environment_or_not_at_all() {
        let why = key_of("TINYLOOP_NO_SUCH_VARIABLE").unwrap_err();
        assert!(why.contains("TINYLOOP_NO_SUCH_VARIABLE"), "{why}");
        let path = key_of("PATH").expect("there is a PATH without spaces");
        assert_eq!(format!("{path:?}"), "Secret");
    }
}
