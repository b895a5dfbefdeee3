//! The management plane: health, readiness, metrics, live requests, models and devices for trusted
//! operators.
//!
//! The data plane's connection layer (`wire`) with a poll thread, workers and limits of its own, so that
//! it answers while everything else is busy, and so that a burst of connections, a slow sender or a silent
//! reader costs bytes here and no thread. It binds to loopback unless an admin key is set (`config` checks
//! that); without a key web pages are kept out (`admin::guard`).
//!
//! It ran on tiny_http before: there a burst of more than four connections left some of them unserved until
//! another one closed, one announced length could end the process, and every refused body kept a connection
//! for ever; none of that can be mended from outside of that crate.

use super::access::Access;
use super::admin::guard::Guard;
use super::admin::{Admin, AdminCall};
use super::auth::Keys;
use super::errors::{ApiError, ErrorCode};
use super::exchange::request_id;
use super::openapi;
use super::ops::{self, OpsAnswer};
use super::requests;
use super::router::{Route, is_ops_path, route};
use super::state::ServerState;
use super::wire::{Handler, Refusal, Request, Responder, WireConfig, WireServer};
use crate::config::ManagementConfig;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Workers beside those of health and metrics: a slow `nvidia-smi`, and those that wait for a load.
const N_WORKERS: usize = 16;
/// Complete requests that may wait for one of them.
const QUEUE: usize = 64;
/// Open connections; operators and scrapers have a few.
const CONNECTIONS_MAX: usize = 1024;
/// Longest body: a handful of overrides.
const BODY_BYTES_MAX: usize = 64 << 10;
/// Bytes of all unfinished requests together.
const MEMORY_BYTES_MAX: usize = 16 << 20;
/// How long `stop` waits for answers that are on their way.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// The running plane; `stop` or dropping it ends its threads.
pub struct Management {
    wire: WireServer,
    address: SocketAddr,
}

/// What its threads share.
struct Plane {
    keys: Keys,
    guard: Guard,
    state: Arc<ServerState>,
    admin: Admin,
}

impl Management {
    /// Listens and answers.
    ///
    /// # Errors
    /// The address cannot be bound, or there are no threads.
    pub fn start(
        address: SocketAddr,
        config: &ManagementConfig,
        state: Arc<ServerState>,
    ) -> io::Result<Self> {
        let keys = Keys::one("admin", config.admin_key.as_deref())
            .map_err(|error| io::Error::other(error.to_string()))?;
        let plane = Plane {
            guard: Guard::new(keys.are_asked(), &config.allowed_hosts),
            keys,
            state,
            admin: Admin::default(),
        };
        let limits = WireConfig {
            thread_prefix: "management",
            listen: vec![address.to_string()],
            workers: N_WORKERS,
            queue: QUEUE,
            max_connections: CONNECTIONS_MAX,
            max_body_bytes: BODY_BYTES_MAX,
            memory_budget_bytes: MEMORY_BYTES_MAX,
            memory_budget_per_peer_bytes: MEMORY_BYTES_MAX,
            ..WireConfig::default()
        };
        let wire = WireServer::start(limits, Arc::new(plane))?;
        let bound = wire.local_addrs().first().map(|text| text.parse());
        let address = bound.and_then(Result::ok).unwrap_or(address);
        Ok(Self { wire, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends its threads; answers on their way have a moment. Idempotent.
    pub fn stop(&self) {
        self.wire.shutdown(STOP_GRACE);
    }
}

impl Drop for Management {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Handler for Plane {
    fn handle(&self, request: Request, responder: Responder) {
        let answer = self.answer_to(&request);
        let answer = answer.unwrap_or_else(|error| OpsAnswer::from(&error));
        let id = request_id(request.header_str("x-request-id"));
        let own = answer.headers.iter();
        let headers: Vec<(&str, &str)> = own
            .map(|(name, value)| (*name, value.as_str()))
            .chain([("content-type", answer.content_type), ("x-request-id", &id)])
            .collect();
        // A client that left needs no answer.
        let _ = responder.send(answer.status, &headers, &answer.body);
    }

    fn is_ops(&self, path: &str) -> bool {
        is_ops_path(path)
    }

    fn refuse(&self, refusal: &Refusal<'_>) -> (Vec<(String, String)>, Vec<u8>) {
        let code = ErrorCode::from_status(refusal.status);
        let answer = OpsAnswer::from(&ApiError::new(code, refusal.reason));
        let own = answer.headers.into_iter();
        let headers = own
            .map(|(name, value)| (name.to_owned(), value))
            .chain([
                ("content-type".to_owned(), answer.content_type.to_owned()),
                ("x-request-id".to_owned(), request_id(None)),
            ])
            .collect();
        (headers, answer.body)
    }
}

impl Plane {
    fn answer_to(&self, request: &Request) -> Result<OpsAnswer, ApiError> {
        let header = |name: &str| request.header_str(name);
        self.keys.check_request(request)?;
        let route = route(request.method(), request.path())?;
        self.guard.check(&route, header("host"), header("origin"))?;
        if request.method() == "OPTIONS" {
            return Ok(ops::options(&route));
        }
        match &route {
            Route::Health => Ok(ops::health(&self.state)),
            Route::Ready => Ok(ops::ready(&self.state, ops::Audience::Operator)),
            Route::Metrics => Ok(ops::metrics(&self.state)),
            Route::OpenApi => Ok(openapi::page(openapi::management())),
            Route::Requests => Ok(requests::list(&self.state, None)),
            Route::Snapshot => Ok(requests::snapshot(&self.state, None, &Access::default())),
            Route::Cancel(name) => requests::cancel(&self.state, name, None),
            Route::Admin(route) => self.admin.answer(&AdminCall {
                state: &self.state,
                route,
                query: request.query().unwrap_or(""),
                content_type: header("content-type"),
                body: request.body(),
            }),
            _ => Err(ApiError::new(
                ErrorCode::UnknownUrl,
                format!(
                    "{} is not on the management plane; it has /health, /ready, /metrics, \
                     /v1/requests, /v1/requests/{{id}}/cancel, /v1/native/snapshot, \
                     /v1/admin/models, /v1/admin/models/{{name}}/load and /unload, \
                     /v1/admin/devices, /v1/admin/gpu-memory, /v1/admin/reload",
                    request.path()
                ),
            )),
        }
    }
}
