//! A scripted handler behind a real server, and a blocking client that reads exact responses.

use crossbeam_channel::{Receiver, Sender, unbounded};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tinyloop::http::wire::{
    Handler, Refusal, Request, Responder, WireConfig, WireServer, WireStats,
};

/// Nothing here takes this long unless it is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Routes by path; waits on `gate` where a test wants to decide when.
struct Script {
    gate: Receiver<()>,
    events: Sender<String>,
}

pub(crate) struct Harness {
    pub(crate) server: Arc<WireServer>,
    /// One message lets one waiting handler go on.
    pub(crate) gate: Sender<()>,
    /// What handlers and hooks report.
    pub(crate) events: Receiver<String>,
}

/// A configuration with limits that a test reaches quickly.
pub(crate) fn config() -> WireConfig {
    WireConfig {
        listen: vec!["127.0.0.1:0".into()],
        workers: 4,
        ops_workers: 1,
        queue: 64,
        max_connections: 2000,
        head_timeout: Duration::from_secs(10),
        body_timeout: Duration::from_secs(10),
        idle_timeout: Duration::from_secs(30),
        write_timeout: Duration::from_secs(5),
        max_body_bytes: 1 << 20,
        ..WireConfig::default()
    }
}

pub(crate) fn start(config: WireConfig) -> Harness {
    let (gate, gated) = unbounded(); // bounded by what the test sends
    let (report, events) = unbounded();
    let script = Script {
        gate: gated,
        events: report,
    };
    let server = WireServer::start(config, Arc::new(script)).expect("loopback can be bound");
    Harness {
        server: Arc::new(server),
        gate,
        events,
    }
}

impl Harness {
    pub(crate) fn address(&self) -> String {
        self.server.local_addrs()[0].clone()
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(&self.address()).expect("the server listens")
    }

    pub(crate) fn stats(&self) -> &WireStats {
        self.server.stats()
    }

    /// Waits for the next report.
    pub(crate) fn event(&self) -> String {
        self.events
            .recv_timeout(PATIENCE)
            .expect("a handler or hook reports")
    }

    pub(crate) fn expect_event(&self, wanted: &str) {
        assert_eq!(self.event(), wanted);
    }

    pub(crate) fn open_gate(&self, n: usize) {
        for _ in 0..n {
            self.gate.send(()).expect("the script lives");
        }
    }

    /// The ops route answers, soon.
    pub(crate) fn assert_healthy(&self) {
        let started = Instant::now();
        assert_eq!(self.connect().get("/health").status, 200);
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "health took {:?}",
            started.elapsed()
        );
    }
}

/// Waits until a counter has at least this value.
#[track_caller]
pub(crate) fn wait_for(counter: &AtomicU64, at_least: u64) {
    let deadline = Instant::now() + PATIENCE;
    while counter.load(Relaxed) < at_least {
        assert!(
            Instant::now() < deadline,
            "counter is {} of {at_least}",
            counter.load(Relaxed)
        );
        std::thread::yield_now();
    }
}

/// Waits until a gauge has come down to this value.
#[track_caller]
pub(crate) fn wait_down_to(gauge: &AtomicU64, at_most: u64) {
    let deadline = Instant::now() + PATIENCE;
    while gauge.load(Relaxed) > at_most {
        assert!(
            Instant::now() < deadline,
            "gauge is {} not {at_most}",
            gauge.load(Relaxed)
        );
        std::thread::yield_now();
    }
}

impl Handler for Script {
    fn handle(&self, request: Request, mut responder: Responder) {
        let report = |what: &str| drop(self.events.send(what.to_string()));
        match request.path() {
            "/hello" | "/health" => {
                drop(responder.send(200, &[("content-type", "text/plain")], b"hi"))
            }
            "/echo" => drop(responder.send(200, &[], request.body())),
            "/length" => {
                drop(responder.send(200, &[], request.body().len().to_string().as_bytes()))
            }
            "/about" => {
                let peer = if request.peer().is_some() {
                    "tcp"
                } else {
                    "unix"
                };
                let query = request.query().unwrap_or("-");
                let tag = request.header_str("x-tag").unwrap_or("-");
                let text = format!(
                    "{} {query} {tag} {} {peer}",
                    request.method(),
                    request.http11()
                );
                drop(responder.send(200, &[], text.as_bytes()));
            }
            "/close" => {
                responder.close_after();
                drop(responder.send(200, &[], b"bye"));
            }
            "/wait" => {
                let events = self.events.clone();
                responder.on_hangup(move || drop(events.send("hang-up".into())));
                report("waiting");
                let _ = self.gate.recv_timeout(PATIENCE);
                let gone = responder.is_gone();
                let sent = responder.send(200, &[], b"waited");
                report(&format!("gone {gone} sent {}", sent.is_ok()));
            }
            "/hook-panics" => {
                responder.on_hangup(|| panic!("a hook on the poll thread"));
                report("waiting");
                let _ = self.gate.recv_timeout(PATIENCE);
            }
            "/stream" => self.stream(
                request.query().and_then(|n| n.parse().ok()).unwrap_or(3),
                responder,
            ),
            "/flood" => {
                let Ok(mut events) = responder.stream(200, &[]) else {
                    return report("flood: no head");
                };
                report("flooding");
                while events.send(&[b'x'; 16 << 10]).is_ok() {}
                report("flood cut");
            }
            "/big" => report(&format!(
                "big {}",
                responder.send(200, &[], &vec![7; 8 << 20]).is_ok()
            )),
            "/panic" => panic!("a handler"),
            "/stream-panics" => {
                let mut events = responder.stream(200, &[]).expect("the client listens");
                events.send(b"first").expect("the client listens");
                panic!("a handler in the middle of its stream");
            }
            "/forget" => {}
            "/inject" => {
                let sent = responder.send(200, &[("x-id", "a\r\nx-evil: b")], b"");
                report(&format!("inject {}", sent.is_ok()));
            }
            "/nothing" => drop(responder.send(204, &[], b"")),
            _ => drop(responder.send(404, &[], b"no such path")),
        }
    }

    fn is_ops(&self, path: &str) -> bool {
        path == "/health"
    }

    fn refuse(&self, refusal: &Refusal<'_>) -> (Vec<(String, String)>, Vec<u8>) {
        let body = format!(
            "{{\"status\":{},\"path\":{:?}}}",
            refusal.status,
            refusal.path.unwrap_or("-")
        );
        (
            vec![("content-type".into(), "application/json".into())],
            body.into_bytes(),
        )
    }
}

impl Script {
    /// One event per permit.
    fn stream(&self, n_events: usize, responder: Responder) {
        let Ok(mut events) = responder.stream(200, &[("content-type", "text/event-stream")]) else {
            return;
        };
        let report = self.events.clone();
        events.on_hangup(move || drop(report.send("hang-up".into())));
        drop(self.events.send("streaming".into()));
        for i in 0..n_events {
            if self.gate.recv_timeout(PATIENCE).is_err()
                || events.send(format!("data: {i}\n\n").as_bytes()).is_err()
            {
                return;
            }
        }
        let _ = events.finish();
    }
}

/// A response as it was framed.
#[derive(Debug, PartialEq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let fields = self
            .head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(": "));
        fields
            .into_iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }
}

/// Anything that reads and writes: TCP or Unix.
pub(crate) trait Socket: Read + Write + Send {}
impl<S: Read + Write + Send> Socket for S {}

pub(crate) struct Client {
    pub(crate) socket: Box<dyn Socket>,
    tcp: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: &str) -> io::Result<Client> {
        if let Some(path) = address.strip_prefix("unix:") {
            let socket = std::os::unix::net::UnixStream::connect(path)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            return Ok(Client {
                socket: Box::new(socket),
                tcp: None,
                buffer: Vec::new(),
            });
        }
        let tcp = TcpStream::connect(address)?;
        tcp.set_read_timeout(Some(PATIENCE))?;
        tcp.set_write_timeout(Some(PATIENCE))?;
        tcp.set_nodelay(true)?;
        Ok(Client {
            socket: Box::new(tcp.try_clone()?),
            tcp: Some(tcp),
            buffer: Vec::new(),
        })
    }

    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.socket
            .write_all(bytes.as_ref())
            .expect("the server takes the request");
    }

    pub(crate) fn ask(&mut self, path: &str) {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n"));
    }

    pub(crate) fn get(&mut self, path: &str) -> Response {
        self.ask(path);
        self.response()
    }

    pub(crate) fn clone_tcp(&self) -> TcpStream {
        self.tcp
            .as_ref()
            .expect("a TCP client")
            .try_clone()
            .expect("a descriptor")
    }

    pub(crate) fn half_close(&self) {
        self.tcp
            .as_ref()
            .expect("a TCP client")
            .shutdown(Shutdown::Write)
            .expect("connected");
    }

    /// Closes with a reset instead of a FIN.
    pub(crate) fn reset(self) {
        let tcp = self.tcp.as_ref().expect("a TCP client");
        socket2::SockRef::from(tcp)
            .set_linger(Some(Duration::ZERO))
            .expect("an open socket");
    }

    /// One read into the buffer; 0 at the end, which a reset is too.
    pub(crate) fn read_some(&mut self) -> usize {
        let mut chunk = [0; 64 << 10];
        match self.socket.read(&mut chunk) {
            Ok(n) => {
                self.buffer.extend_from_slice(&chunk[..n]);
                n
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
            Err(error) => panic!("reading: {error}"),
        }
    }

    /// What has been read and not consumed.
    pub(crate) fn take_buffer(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    pub(crate) fn head(&mut self) -> String {
        loop {
            if let Some(end) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
                return String::from_utf8(head).expect("heads are ASCII");
            }
            assert!(
                self.read_some() > 0,
                "closed inside a head: {:?}",
                String::from_utf8_lossy(&self.buffer)
            );
        }
    }

    fn exactly(&mut self, n_bytes: usize) -> Vec<u8> {
        while self.buffer.len() < n_bytes {
            assert!(self.read_some() > 0, "closed inside a body");
        }
        self.buffer.drain(..n_bytes).collect()
    }

    fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.extend(self.exactly(1));
        }
        String::from_utf8(line)
            .expect("chunk sizes are ASCII")
            .trim_end()
            .to_string()
    }

    /// Reads one whole response to anything but HEAD.
    pub(crate) fn response(&mut self) -> Response {
        let head = self.head();
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|s| s.parse().ok())
            .expect("a status line");
        let mut response = Response {
            status,
            head,
            body: Vec::new(),
        };
        assert!(
            status == 100 || response.header("date").is_some_and(|date| date.len() == 29),
            "{}",
            response.head
        );
        if response.header("transfer-encoding") == Some("chunked") {
            loop {
                let size = usize::from_str_radix(&self.line(), 16).expect("a chunk size");
                response.body.extend(self.exactly(size));
                assert_eq!(self.exactly(2), b"\r\n");
                if size == 0 {
                    break;
                }
            }
        } else if let Some(length) = response.header("content-length") {
            let length = length.parse().expect("a length");
            response.body = self.exactly(length);
        }
        response
    }

    /// The server has closed, and said nothing more.
    #[track_caller]
    pub(crate) fn assert_closed(&mut self) {
        assert!(
            self.buffer.is_empty(),
            "{:?}",
            String::from_utf8_lossy(&self.buffer)
        );
        assert_eq!(
            self.read_some(),
            0,
            "{:?}",
            String::from_utf8_lossy(&self.buffer)
        );
    }
}
