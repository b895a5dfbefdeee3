//! The management plane: health, readiness, metrics, live requests, models and devices for trusted
//! operators, on tiny_http.
//!
//! Its few threads share one listener. It binds to loopback unless an admin key is set (`config`
//! checks that), takes only small request bodies (`management/body`), and never touches the data
//! plane's workers, so that it answers while everything else is busy. Without a key web pages are
//! kept out (`admin::guard`). tiny_http is good enough here and only here: what a hostile client can
//! do to it is why the data plane has its own connection layer. A client that does not read costs a
//! thread at most `WRITE_MAX`; one that sends slowly, or opens many connections, costs tiny_http's
//! own threads, which have no limit.

mod body;

use super::access::Access;
use super::admin::guard::Guard;
use super::admin::{Admin, AdminCall};
use super::auth::Keys;
use super::errors::{ApiError, ErrorCode};
use super::openapi;
use super::ops::{self, OpsAnswer};
use super::requests;
use super::router::{Route, route};
use super::state::ServerState;
use crate::config::ManagementConfig;
use crate::request::RequestId;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads that answer: a slow reader of /metrics and a slow `nvidia-smi` must not hide /health.
const N_THREADS: usize = 4;

/// Refused requests whose bodies are still to be thrown away; beyond that they are let go.
const LATE_BODIES_MAX: usize = 16;

/// How long a client may take to make room for an answer before its connection counts as broken.
const WRITE_MAX: Duration = Duration::from_secs(5);

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

/// What its threads share.
struct Plane {
    keys: Keys,
    guard: Guard,
    state: Arc<ServerState>,
    admin: Admin,
    /// Requests that were refused and whose bodies must be read before they can be dropped.
    late_bodies: Sender<body::Refused>,
}

impl Management {
    /// Listens and answers.
    pub fn start(
        listener: TcpListener,
        config: &ManagementConfig,
        state: Arc<ServerState>,
    ) -> io::Result<Self> {
        limit_writes(&listener)?;
        let address = listener.local_addr()?;
        let server = tiny_http::Server::from_listener(listener, None)
            .map_err(|error| io::Error::other(error.to_string()))?;
        let server = Arc::new(server);
        let closing = Arc::new(AtomicBool::new(false));
        let (late_bodies, refused) = bounded(LATE_BODIES_MAX);
        // Nobody waits for this one at the end: a client may keep it for ever.
        std::thread::Builder::new()
            .name("management-late".into())
            .spawn(move || refused.iter().for_each(body::Refused::finish))?;
        let keys = Keys::one("admin", config.admin_key.as_deref())
            .map_err(|error| io::Error::other(error.to_string()))?;
        let plane = Arc::new(Plane {
            guard: Guard::new(keys.are_asked(), &config.allowed_hosts),
            keys,
            state,
            admin: Admin::default(),
            late_bodies,
        });
        let (alive_sender, alive) = bounded(1);
        let mut threads = Vec::with_capacity(N_THREADS);
        for index in 0..N_THREADS {
            let (server, closing) = (Arc::clone(&server), Arc::clone(&closing));
            let (plane, alive) = (Arc::clone(&plane), alive_sender.clone());
            let thread = std::thread::Builder::new()
                .name(format!("management-{index}"))
                .spawn(move || {
                    serve(&server, &closing, &plane);
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

/// Connections inherit these from the listener, which is the only way to reach their sockets here. A
/// limit on reads would be inherited by `accept` too, whose first error ends tiny_http.
fn limit_writes(listener: &TcpListener) -> io::Result<()> {
    let socket = socket2::SockRef::from(listener);
    socket.set_write_timeout(Some(WRITE_MAX))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(WRITE_MAX))?;
    Ok(())
}

fn serve(server: &tiny_http::Server, closing: &AtomicBool, plane: &Plane) {
    while !closing.load(Ordering::Acquire) {
        // An error is the token of `unblock`, or a request that broke off: the flag decides.
        if let Ok(request) = server.recv() {
            // A panic costs one request, which tiny_http then answers with 500.
            let _ = catch_unwind(AssertUnwindSafe(|| plane.take(request)));
        }
    }
}

impl Plane {
    /// Answers, unless there is a body that must not be waited for.
    fn take(&self, mut request: tiny_http::Request) {
        let refusal = match body::read(&mut request) {
            Ok(body) => return self.answer(request, &body),
            Err(refusal) => refusal,
        };
        let can_be_read = refusal.can_be_read;
        let answer = OpsAnswer::from(&refusal.error());
        if !can_be_read {
            return body::refuse_and_forget(request, &answer);
        }
        let refused = body::Refused::new(request, response(answer));
        if let Err(error) = self.late_bodies.try_send(refused) {
            error.into_inner().forget();
        }
    }

    fn answer(&self, request: tiny_http::Request, body: &[u8]) {
        let answer = self
            .answer_to(&request, body)
            .unwrap_or_else(|error| OpsAnswer::from(&error));
        // A client that left needs no answer.
        let _ = request.respond(response(answer));
    }

    fn answer_to(&self, request: &tiny_http::Request, body: &[u8]) -> Result<OpsAnswer, ApiError> {
        let method = request.method().to_string();
        let (path, query) = request.url().split_once('?').unwrap_or((request.url(), ""));
        let header = |name: &'static str| {
            let mut headers = request.headers().iter();
            let found = headers.find(|header| header.field.equiv(name));
            found.map(|header| header.value.as_str())
        };
        let key_headers = [header("Authorization"), header("X-Api-Key")];
        let [authorization, x_api_key] = key_headers.map(|value| value.map(str::as_bytes));
        self.keys.check(authorization, x_api_key)?;
        let route = route(&method, path)?;
        self.guard.check(&route, header("Host"), header("Origin"))?;
        if method == "OPTIONS" {
            return Ok(ops::options(&route));
        }
        match &route {
            Route::Health => Ok(ops::health(&self.state)),
            Route::Ready => Ok(ops::ready(&self.state)),
            Route::Metrics => Ok(ops::metrics(&self.state)),
            Route::OpenApi => Ok(openapi::page(openapi::management())),
            Route::Requests => Ok(requests::list(&self.state, None)),
            Route::Snapshot => Ok(requests::snapshot(&self.state, None, &Access::default())),
            Route::Cancel(name) => requests::cancel(&self.state, name, None),
            Route::Admin(route) => self.admin.answer(&AdminCall {
                state: &self.state,
                route,
                query,
                content_type: header("Content-Type"),
                body,
            }),
            _ => Err(ApiError::new(
                ErrorCode::UnknownUrl,
                format!(
                    "{path} is not on the management plane; it has /health, /ready, /metrics, \
                     /v1/requests, /v1/requests/{{id}}/cancel, /v1/native/snapshot, \
                     /v1/admin/models, /v1/admin/models/{{name}}/load and /unload, \
                     /v1/admin/devices, /v1/admin/gpu-memory, /v1/admin/reload"
                ),
            )),
        }
    }
}

/// As tiny_http writes it, with a request id.
fn response(answer: OpsAnswer) -> tiny_http::Response<io::Cursor<Vec<u8>>> {
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
    response
}
