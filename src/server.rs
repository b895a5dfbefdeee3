//! A running server: which parts it has, in which order they start and stop.
//!
//! `main` owns it. Order of the start: management plane, data plane, then the models (`cli::serve`
//! loads them), so that a port in use is told before minutes of loading, and probes see "alive, not
//! ready" meanwhile.
//!
//! The stop begins with a drain. `/ready` says 503; requests that come from now on, on old and new
//! connections, are answered 503 `shutting_down` with `Connection: close`; what waits in a queue is
//! refused the same way; what runs may finish within the drain timeout and then ends with that
//! error, as an event where a stream has begun. When nothing is left to answer the data plane
//! closes its port, the engines end, the management plane ends last. [`Signals`] tells when: the
//! first SIGINT or SIGTERM asks for the drain, the second ends the process at once with 1. What is
//! not here: what routes answer (`http`).

use crate::config::Config;
use crate::error::Error;
use crate::http::auth::Keys;
use crate::http::cors::Cors;
use crate::http::data_plane::DataPlane;
use crate::http::management::Management;
use crate::http::responses::kept::Responses;
use crate::http::responses::store::Limits;
use crate::http::state::ServerState;
use crate::http::wire::{WireConfig, WireServer};
use crate::pool::Pool;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// After the drain timeout: time for the last error events to reach their clients.
const ANSWER_GRACE: Duration = Duration::from_secs(3);

/// A running server. Dropping it stops it without a drain.
pub struct Server {
    state: Arc<ServerState>,
    wire: Arc<WireServer>,
    management: Option<Management>,
    address: SocketAddr,
}

impl Server {
    /// Binds and starts both planes. The pool's models may be loaded, or announced and still loading.
    pub fn start(config: &Config, pool: Arc<Pool>) -> Result<Self, Error> {
        let state = Arc::new(ServerState::new(pool, config.server.stall));
        let keys = Keys::of_data_plane(config, &Keys::default());
        state.set_keys(keys.map_err(|error| Error::Usage(error.to_string()))?);
        let management = start_management(config, &state)?;
        let admin_keys = Keys::one("admin", config.management.admin_key.as_deref());
        let data_plane = DataPlane {
            state: Arc::clone(&state),
            responses: Arc::new(Responses::new(kept_responses(config))),
            admin_keys: admin_keys.map_err(|error| Error::Usage(error.to_string()))?,
            cors: Cors::new(config.server.cors_origins.clone()),
            stream_ping: config.server.stream_ping,
            overload_status: config.server.overload_status,
            log_body_bytes: match config.log.prompts {
                true => config.log.prompt_bytes_max,
                false => 0,
            },
        };
        let wire = WireServer::start(wire_config(config), Arc::new(data_plane))
            .map_err(|error| Error::Other(error.to_string()))?;
        let wire = Arc::new(wire);
        state.set_wire(&wire);
        let address = wire
            .local_addrs()
            .iter()
            .find_map(|address| address.parse().ok());
        let address = address.ok_or_else(|| Error::Other("no TCP address is bound".to_owned()))?;
        Ok(Self {
            state,
            wire,
            management,
            address,
        })
    }

    /// Where the data plane listens, with the real port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the management plane listens.
    #[must_use]
    pub fn management_address(&self) -> Option<SocketAddr> {
        self.management.as_ref().map(Management::address)
    }

    /// What both planes know.
    #[must_use]
    pub fn state(&self) -> &Arc<ServerState> {
        &self.state
    }

    /// Drains and stops. Returns when all threads have ended.
    pub fn shutdown(self, drain: Duration) {
        // First: the data plane's refusals name the reason by it.
        self.state.begin_drain(drain);
        // Longer than the executors take, so that answers cut by the drain still get out; and before
        // they refuse anyone, so that each refusal closes its connection.
        let drain_wire = drain + ANSWER_GRACE;
        self.wire.begin_drain(drain_wire);
        std::thread::scope(|scope| {
            let drain_pool = || self.state.pool().shutdown(drain);
            let spawned = std::thread::Builder::new()
                .name("drain".into())
                .spawn_scoped(scope, drain_pool);
            if spawned.is_err() {
                drain_pool(); // no thread: one after the other
            }
            self.wire.shutdown(drain_wire);
        });
        if let Some(management) = &self.management {
            management.stop();
        }
    }
}

/// Raises the soft limit on open files to the hard one, which needs no rights: each connection costs
/// one. Where that fails the connection cap follows the lower limit.
pub fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft < hard {
            setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
            tracing::debug!(from = soft, to = hard, "raised the limit on open files");
        }
        Ok(())
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
}

/// Bounds of the store of responses.
fn kept_responses(config: &Config) -> Limits {
    Limits {
        responses_max: config.responses.max_kept,
        bytes_max: config.responses.max_bytes,
        ttl: config.responses.ttl,
    }
}

fn wire_config(config: &Config) -> WireConfig {
    let server = &config.server;
    WireConfig {
        listen: vec![SocketAddr::new(server.host, server.port).to_string()],
        workers: config.http_workers(),
        queue: server.http_queue_depth,
        max_connections: server.max_connections,
        max_body_bytes: server.max_body_bytes,
        ..WireConfig::default()
    }
}

fn start_management(
    config: &Config,
    state: &Arc<ServerState>,
) -> Result<Option<Management>, Error> {
    let management = &config.management;
    if !management.enabled {
        return Ok(None);
    }
    let address = SocketAddr::new(management.host, management.port);
    let started = Management::start(address, management, Arc::clone(state)).map_err(|error| {
        Error::Other(format!(
            "the management plane: {error}; choose another --management-port, or --no-management"
        ))
    })?;
    Ok(Some(started))
}

/// SIGINT and SIGTERM of this process.
pub struct Signals {
    asked: crossbeam_channel::Receiver<()>,
}

impl Signals {
    /// Catches them from now on; once per process.
    pub fn catch() -> Result<Self, Error> {
        let (ask, asked) = crossbeam_channel::bounded(1);
        ctrlc::set_handler(move || {
            if ask.try_send(()).is_err() {
                // Nobody has taken the first one, or it is being worked on: the user insists.
                std::process::exit(1);
            }
        })
        .map_err(|error| Error::other("signal handler", error))?;
        Ok(Self { asked })
    }

    /// Waits for the first signal. It stays in the channel, so that the second one ends the process.
    pub fn wait(&self) {
        let mut select = crossbeam_channel::Select::new();
        select.recv(&self.asked);
        select.ready();
    }

    /// Waits for the first signal or for a message, whichever comes first; the signal stays in its
    /// channel. None: the signal came. `Some(None)`: the sender is gone.
    pub fn wait_or<T>(&self, message: &crossbeam_channel::Receiver<T>) -> Option<Option<T>> {
        let mut select = crossbeam_channel::Select::new();
        let signal = select.recv(&self.asked);
        select.recv(message);
        let ready = select.ready();
        if ready == signal || !self.asked.is_empty() {
            return None;
        }
        Some(message.recv().ok())
    }
}
