//! One HTTP exchange with another server, blocking, that can be cut from another thread at any time.
//!
//! Each exchange has its own `ureq` agent, because an agent can be shut down: that shuts its socket
//! down, so that a read blocked in it (waiting for a token that takes a minute) ends at once and the
//! server sees the connection close. The price is a connection per exchange; TLS sessions are
//! resumed, for the client configuration is shared. A read also ends when the exchange's
//! [`Deadline`] passes, which its owner moves as tokens come; that is done below TLS, in the chain of
//! connectors. Cutting during the connect itself takes effect when that ends, at the latest after
//! the connect timeout.
//!
//! No redirects (prompts and keys go nowhere else), no proxies from the environment, no cookies, no
//! decompression. What is not here: what is said (`wire`), and what is done when it fails (`verdict`).

use super::verdict::Failure;
use crate::config::CallLimits;
use parking_lot::Mutex;
use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, NextTimeout, RustlsConnector, TcpConnector, Transport,
};
use ureq::{Agent, Timeout};

/// Most bytes of an answer that is not a stream.
const BODY_BYTES_MAX: u64 = 1 << 20;

/// A key that must appear in no log and no error.
#[derive(Clone)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Takes it.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// A text without it.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        match self.0.is_empty() {
            true => text.to_owned(),
            false => text.replace(&*self.0, "[key]"),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// When a read gives up. Shared between an exchange's owner and its socket.
#[derive(Clone, Debug)]
pub struct Deadline(Arc<Mutex<Instant>>);

impl Deadline {
    /// So long from now.
    #[must_use]
    pub fn after(wait: Duration) -> Self {
        let deadline = Self(Arc::new(Mutex::new(Instant::now())));
        deadline.set(wait);
        deadline
    }

    /// Moves it, to so long from now.
    pub fn set(&self, wait: Duration) {
        let now = Instant::now();
        let far = now + Duration::from_secs(365 * 86_400);
        *self.0.lock() = now.checked_add(wait).unwrap_or(far);
    }

    fn left(&self) -> Duration {
        self.0.lock().saturating_duration_since(Instant::now())
    }
}

/// A server, and how it is reached.
#[derive(Clone)]
pub struct Client {
    base_url: String,
    key: Option<Secret>,
    tls: TlsConfig,
    /// Shared, so that TLS sessions are resumed.
    connector: Arc<RustlsConnector>,
    connect_timeout: Duration,
}

/// One exchange; cut from any thread.
#[derive(Clone)]
pub struct Exchange {
    agent: Agent,
    /// Of its reads.
    pub deadline: Deadline,
}

impl Exchange {
    /// Ends whatever it is waiting for. Never blocks.
    pub fn cut(&self) {
        self.agent.clone().shutdown();
    }
}

/// An answer whose body is still to be read.
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// `Retry-After` in whole seconds, where it is one.
    pub retry_after: Option<Duration>,
    /// Whether it says that it is an event stream.
    pub is_stream: bool,
    body: Box<dyn Read>,
}

impl Answer {
    /// The next bytes; 0 at the end.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Failure> {
        self.body
            .read(buffer)
            .map_err(|error| failure(error.into()))
    }

    /// The rest, as far as it may be long.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn rest(self) -> Result<Vec<u8>, Failure> {
        self.rest_up_to(BODY_BYTES_MAX)
    }

    /// The rest, cut after so many bytes.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn rest_up_to(self, bytes_max: u64) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        let mut body = self.body.take(bytes_max);
        match body.read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(error) => Err(failure(error.into())),
        }
    }
}

impl Client {
    /// A client of the server whose OpenAI routes begin at `base_url`. `ca_file`: PEM file with the
    /// certificates to trust, instead of the public ones.
    ///
    /// # Errors
    /// The file cannot be read, or holds no certificate.
    pub fn new(
        base_url: &str,
        key: Option<Secret>,
        ca_file: Option<&Path>,
        limits: &CallLimits,
    ) -> Result<Self, String> {
        let roots = match ca_file {
            Some(path) => RootCerts::from(certificates(path)?),
            None => RootCerts::WebPki,
        };
        Ok(Self {
            base_url: base_url.trim_end_matches('/').to_owned(),
            key,
            tls: TlsConfig::builder().root_certs(roots).build(),
            connector: Arc::default(),
            connect_timeout: limits.connect_timeout,
        })
    }

    /// Host and port, for people.
    #[must_use]
    pub fn host(&self) -> &str {
        let rest = self.base_url.split_once("://").map_or("", |(_, rest)| rest);
        rest.split('/').next().unwrap_or_default()
    }

    /// A text without the key.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        match &self.key {
            Some(key) => key.redact(text),
            None => text.to_owned(),
        }
    }

    /// An exchange to come, whose reads give up after `wait`.
    #[must_use]
    pub fn exchange(&self, wait: Duration) -> Exchange {
        let deadline = Deadline::after(wait);
        let config = Agent::config_builder()
            .tls_config(self.tls.clone())
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(0)
            .proxy(None)
            .no_delay(true)
            .user_agent(concat!("tinyloop/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(self.connect_timeout))
            .timeout_connect(Some(self.connect_timeout))
            .timeout_await_100(Some(Duration::ZERO))
            .build();
        let connector =
            ().chain(TcpConnector::default())
                .chain(Timed(deadline.clone()))
                .chain(Tls(Arc::clone(&self.connector)));
        Exchange {
            agent: Agent::with_parts(config, connector, DefaultResolver::default()),
            deadline,
        }
    }

    /// `GET` below the base URL.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn get(&self, exchange: &Exchange, path: &str) -> Result<Answer, Failure> {
        let mut request = exchange.agent.get(format!("{}{path}", self.base_url));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {}", key.0));
        }
        request.call().map(answer).map_err(failure)
    }

    /// `POST` of a JSON body below the base URL.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn post(&self, exchange: &Exchange, path: &str, body: &[u8]) -> Result<Answer, Failure> {
        let mut request = exchange
            .agent
            .post(format!("{}{path}", self.base_url))
            .header("content-type", "application/json")
            .header("accept", "text/event-stream");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {}", key.0));
        }
        request.send(body).map(answer).map_err(failure)
    }

    /// A whole `GET` that answers 200 within `wait`.
    ///
    /// # Errors
    /// In words for the log, without the key.
    pub fn fetch(&self, path: &str, wait: Duration) -> Result<Vec<u8>, String> {
        let exchange = self.exchange(wait);
        let host = self.host();
        let answer = self.get(&exchange, path);
        let answer = answer.map_err(|failure| format!("{host}: {failure}"))?;
        match answer.status {
            200 => answer
                .rest()
                .map_err(|failure| format!("{host}: {failure}")),
            401 | 403 => Err(format!("{host} refuses the key ({})", answer.status)),
            status => Err(format!("{host} answers {path} with {status}")),
        }
    }
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let fault = |why: String| format!("ca_file {}: {why}", path.display());
    let pem = std::fs::read(path).map_err(|error| fault(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => found.push(certificate.to_owned()),
            Ok(_) => {}
            Err(error) => return Err(fault(error.to_string())),
        }
    }
    match found.is_empty() {
        true => Err(fault("holds no certificate".to_owned())),
        false => Ok(found),
    }
}

fn answer(response: ureq::http::Response<ureq::Body>) -> Answer {
    let header = |name: &str| {
        let value = response.headers().get(name)?;
        value.to_str().ok()
    };
    let retry_after = header("retry-after").and_then(|value| value.trim().parse().ok());
    let is_stream =
        header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    Answer {
        status: response.status().as_u16(),
        retry_after: retry_after.map(Duration::from_secs),
        is_stream,
        body: Box::new(response.into_body().into_reader()),
    }
}

/// What an error of the client means. Its words may name the host, never a header.
fn failure(error: ureq::Error) -> Failure {
    use ureq::Error as E;
    match error {
        E::Timeout(Timeout::Resolve | Timeout::Connect) => {
            Failure::Unreachable("no connection in time".to_owned())
        }
        E::Timeout(_) => Failure::Silent,
        E::HostNotFound => Failure::Unreachable("its name is not known".to_owned()),
        E::ConnectionFailed => Failure::Unreachable("no connection".to_owned()),
        E::Tls(why) => Failure::Unreachable(format!("TLS: {why}")),
        E::Rustls(why) => Failure::Unreachable(format!("TLS: {why}")),
        E::Io(error) => io_failure(&error),
        other => Failure::Nonsense(other.to_string()),
    }
}

fn io_failure(error: &io::Error) -> Failure {
    use io::ErrorKind as K;
    match error.kind() {
        K::ConnectionRefused
        | K::HostUnreachable
        | K::NetworkUnreachable
        | K::NetworkDown
        | K::AddrNotAvailable => Failure::Unreachable(error.kind().to_string()),
        K::TimedOut | K::WouldBlock => Failure::Silent,
        // So rustls tells that it does not trust the other side, or does not understand it.
        K::InvalidData => Failure::Unreachable(format!("TLS: {error}")),
        kind => Failure::Broken(kind.to_string()),
    }
}

/// Puts the deadline on a connection.
#[derive(Debug)]
struct Timed(Deadline);

impl<In: Transport> Connector<In> for Timed {
    type Out = TimedTransport<In>;

    fn connect(
        &self,
        _: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        Ok(chained.map(|inner| TimedTransport {
            inner,
            deadline: self.0.clone(),
        }))
    }
}

#[derive(Debug)]
struct TimedTransport<T> {
    inner: T,
    deadline: Deadline,
}

impl<T> TimedTransport<T> {
    fn capped(&self, mut timeout: NextTimeout) -> Result<NextTimeout, ureq::Error> {
        let left = self.deadline.left();
        if left.is_zero() {
            return Err(ureq::Error::Timeout(Timeout::PerRead));
        }
        timeout.per_read = Some(left.into());
        timeout.per_write = Some(left.into());
        Ok(timeout)
    }
}

impl<T: Transport> Transport for TimedTransport<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.inner.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        let timeout = self.capped(timeout)?;
        self.inner.transmit_output(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        let timeout = self.capped(timeout)?;
        self.inner.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.inner.is_open()
    }

    fn is_tls(&self) -> bool {
        self.inner.is_tls()
    }
}

/// TLS, with a configuration that all exchanges share.
#[derive(Debug)]
struct Tls(Arc<RustlsConnector>);

impl<In: Transport> Connector<In> for Tls {
    type Out = <RustlsConnector as Connector<In>>::Out;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        self.0.connect(details, chained)
    }
}
