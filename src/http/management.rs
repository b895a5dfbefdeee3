//! The management plane: health, readiness, metrics, live requests for trusted operators, on tiny_http.
//!
//! Its two threads share one listener. It binds to loopback unless an admin key is set (`config`
//! checks that), takes no request bodies, and never touches the data plane's workers, so that it
//! answers while everything else is busy. tiny_http is good enough here and only here: what a
//! hostile client can do to it is why the data plane has its own connection layer. One of those
//! things would end the process, and is kept out here: see `let_go`.

use super::auth::Keys;
use super::errors::{ApiError, ErrorCode};
use super::ops::{self, OpsAnswer};
use super::requests;
use super::router::{Route, route};
use super::state::ServerState;
use crate::request::RequestId;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads that answer. Two, so that a slow reader of /metrics does not hide /health.
const N_THREADS: usize = 2;

/// How long `stop` waits for answers that are being written.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// The running plane; `stop` or dropping it ends its threads.
pub struct Management {
    server: Arc<tiny_http::Server>,
    closing: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// Disconnected when all threads have ended.
    alive: Receiver<Infallible>,
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
        let (alive_sender, alive) = bounded(1);
        let mut threads = Vec::with_capacity(N_THREADS);
        for index in 0..N_THREADS {
            let (server, closing) = (Arc::clone(&server), Arc::clone(&closing));
            let (keys, state) = (keys.clone(), Arc::clone(&state));
            let alive = alive_sender.clone();
            let thread = std::thread::Builder::new()
                .name(format!("management-{index}"))
                .spawn(move || {
                    serve(&server, &closing, &keys, &state);
                    drop(alive);
                })?;
            threads.push(thread);
        }
        Ok(Self {
            server,
            closing,
            threads,
            alive,
            address,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends its threads. One that a client keeps busy (it does not read) is left behind after
    /// `STOP_GRACE`. Idempotent.
    pub fn stop(&mut self) {
        self.closing.store(true, Ordering::Release);
        for _ in &self.threads {
            self.server.unblock(); // one token ends one `recv`
        }
        let threads = std::mem::take(&mut self.threads);
        match self.alive.recv_timeout(STOP_GRACE) {
            Err(RecvTimeoutError::Disconnected) => {
                for thread in threads {
                    // A panic was already reported by the thread itself.
                    let _ = thread.join();
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!("a client keeps the management plane busy; leaving it behind");
            }
            Ok(never) => match never {},
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

/// Bodies up to this length tiny_http has read before it hands the request over.
const BODY_BYTES_MAX: usize = 1024;

/// Whether dropping the request would read from the network: a body that is longer than what is read
/// already, of unknown length, or not sent yet.
fn has_unread_body(request: &tiny_http::Request) -> bool {
    let has_header = |name: &'static str| {
        let mut headers = request.headers().iter();
        headers.any(|header| header.field.equiv(name))
    };
    let length = request.body_length().unwrap_or(0);
    let is_announced = length > 0 && has_header("Expect");
    length > BODY_BYTES_MAX || is_announced || has_header("Transfer-Encoding")
}

/// tiny_http reads what is left of a body when the request is dropped: it waits for it as long as the
/// client likes, and into a buffer of the *declared* length, where a failed allocation aborts the
/// process. No route here takes a body, so such a request is forgotten instead of dropped: its
/// connection stays open and unanswered until the process ends, a few kilobytes each.
fn let_go(request: tiny_http::Request) {
    tracing::warn!(
        peer = ?request.remote_addr(),
        declared_bytes = request.body_length(),
        "a request to the management plane announces a body that no route takes; it gets no answer"
    );
    std::mem::forget(request);
}

fn answer(request: tiny_http::Request, keys: &Keys, state: &ServerState) {
    if has_unread_body(&request) {
        return let_go(request);
    }
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
