//! The management plane: health, readiness, metrics, live requests for trusted operators, on tiny_http.
//!
//! Its two threads share one listener. It binds to loopback unless an admin key is set (`config`
//! checks that), takes no request bodies, and never touches the data plane's workers, so that it
//! answers while everything else is busy. tiny_http is good enough here and only here: what a
//! hostile client can do to it is why the data plane has its own connection layer.

use super::auth::Keys;
use super::errors::{ApiError, ErrorCode};
use super::ops::{self, OpsAnswer};
use super::requests;
use super::router::{Route, route};
use super::state::ServerState;
use crate::request::RequestId;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Threads that answer. Two, so that a slow reader of /metrics does not hide /health.
const N_THREADS: usize = 2;

/// The running plane; `stop` or dropping it ends its threads.
pub struct Management {
    server: Arc<tiny_http::Server>,
    closing: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    address: SocketAddr,
}

impl Management {
    /// Listens and answers.
    pub fn start(listener: TcpListener, keys: Keys, state: Arc<ServerState>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let server = tiny_http::Server::from_listener(listener, None)
            .map_err(|error| io::Error::other(error.to_string()))?;
        let server = Arc::new(server);
        let closing = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::with_capacity(N_THREADS);
        for index in 0..N_THREADS {
            let (server, closing) = (Arc::clone(&server), Arc::clone(&closing));
            let (keys, state) = (keys.clone(), Arc::clone(&state));
            let thread = std::thread::Builder::new()
                .name(format!("management-{index}"))
                .spawn(move || serve(&server, &closing, &keys, &state))?;
            threads.push(thread);
        }
        Ok(Self {
            server,
            closing,
            threads,
            address,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends its threads. Idempotent.
    pub fn stop(&mut self) {
        self.closing.store(true, Ordering::Release);
        for _ in &self.threads {
            self.server.unblock(); // one token ends one `recv`
        }
        for thread in self.threads.drain(..) {
            // A panic was already reported by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Drop for Management {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve(server: &tiny_http::Server, closing: &AtomicBool, keys: &Keys, state: &ServerState) {
    while !closing.load(Ordering::Acquire) {
        // An error is the token of `unblock`, or a request that broke off: the flag decides.
        if let Ok(request) = server.recv() {
            answer(request, keys, state);
        }
    }
}

fn answer(request: tiny_http::Request, keys: &Keys, state: &ServerState) {
    let method = request.method().to_string();
    let target = request.url().to_owned();
    let path = target.split('?').next().unwrap_or_default();
    let header = |name: &'static str| {
        let found = request
            .headers()
            .iter()
            .find(|header| header.field.equiv(name));
        found.map(|header| header.value.as_str().as_bytes())
    };
    let answer = keys
        .check(header("Authorization"), header("X-Api-Key"))
        .and_then(|_| route(&method, path))
        .and_then(|route| ops_answer(&route, path, state))
        .unwrap_or_else(|error| OpsAnswer::from(&error));
    let mut response = tiny_http::Response::from_data(answer.body)
        .with_status_code(answer.status)
        .with_chunked_threshold(usize::MAX);
    let id = RequestId::generate().to_string();
    let all = answer
        .headers
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .chain([
            ("content-type", answer.content_type),
            ("x-request-id", id.as_str()),
        ]);
    for (name, value) in all {
        if let Ok(header) = tiny_http::Header::from_bytes(name, value) {
            response.add_header(header);
        }
    }
    // A client that left needs no answer.
    let _ = request.respond(response);
}

fn ops_answer(route: &Route, path: &str, state: &ServerState) -> Result<OpsAnswer, ApiError> {
    match route {
        Route::Health => Ok(ops::health(state)),
        Route::Ready => Ok(ops::ready(state)),
        Route::Metrics => Ok(ops::metrics(state)),
        Route::Requests => Ok(requests::list(state, None)),
        Route::Snapshot => Ok(requests::snapshot(state, None)),
        Route::Cancel(name) => requests::cancel(state, name, None),
        _ => Err(ApiError::new(
            ErrorCode::UnknownUrl,
            format!(
                "{path} is not on the management plane; it has /health, /ready, /metrics, /v1/requests, /v1/native/snapshot"
            ),
        )),
    }
}
