//! TCP and Unix sockets behind one type: always non-blocking, registered once, edge-triggered.
//!
//! A connection's descriptor is registered for reading (which includes the peer's hang-up) and writing
//! for its whole life, so that handing it to a worker and back costs no system call, and it is never
//! deregistered: closing its only descriptor does that.

use mio::event::Source;
use mio::{Interest, Registry, Token};
use socket2::{Domain, SockAddr, SockRef, Socket, TcpKeepalive, Type};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The standard library listens with 128, and a burst beyond it costs the client a SYN retry of 1 s.
const BACKLOG: i32 = 1024;

/// A listening socket.
pub(super) enum Listener {
    Tcp(mio::net::TcpListener),
    /// With the path of its file, which goes when it is dropped.
    Unix(mio::net::UnixListener, String),
}

/// One accepted connection.
pub(super) enum Stream {
    Tcp(mio::net::TcpStream),
    Unix(mio::net::UnixStream),
}

impl Listener {
    /// Binds `127.0.0.1:8080`, `[::1]:8080` or `unix:/path`; the error names what was asked for.
    pub(super) fn bind(spec: &str) -> io::Result<Listener> {
        let bound = match spec.strip_prefix("unix:") {
            Some(path) => Self::bind_unix(path),
            None => match spec.parse() {
                Ok(address) => Self::bind_tcp(address),
                Err(_) => {
                    let wanted = "not an address; write 127.0.0.1:8080, [::1]:8080 or unix:/path";
                    Err(io::Error::new(io::ErrorKind::InvalidInput, wanted))
                }
            },
        };
        bound.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot listen on {spec}: {error}"))
        })
    }

    fn bind_tcp(address: SocketAddr) -> io::Result<Listener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?; // both families are two listeners, whatever the system's default
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(Listener::Tcp(mio::net::TcpListener::from_std(
            socket.into(),
        )))
    }

    fn bind_unix(path: &str) -> io::Result<Listener> {
        // A socket file that nobody answers on is left over from a crash.
        let probe = std::os::unix::net::UnixStream::connect(path);
        if probe.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            std::fs::remove_file(path)?;
        }
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        let listener = mio::net::UnixListener::from_std(OwnedFd::from(socket).into());
        Ok(Listener::Unix(listener, path.into()))
    }

    /// The bound address in the notation of [`Listener::bind`], with the real port.
    pub(super) fn local_address(&self) -> io::Result<String> {
        match self {
            Listener::Tcp(listener) => Ok(listener.local_addr()?.to_string()),
            Listener::Unix(_, path) => Ok(format!("unix:{path}")),
        }
    }

    pub(super) fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        match self {
            Listener::Tcp(listener) => listener
                .accept()
                .map(|(s, peer)| (Stream::Tcp(s), Some(peer))),
            Listener::Unix(listener, _) => listener.accept().map(|(s, _)| (Stream::Unix(s), None)),
        }
    }

    pub(super) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => registry.register(listener, token, Interest::READABLE),
            Listener::Unix(listener, _) => registry.register(listener, token, Interest::READABLE),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Stream {
    pub(super) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let source: &mut dyn Source = match self {
            Stream::Tcp(stream) => stream,
            Stream::Unix(stream) => stream,
        };
        source.register(registry, token, Interest::READABLE | Interest::WRITABLE)
    }

    fn socket(&self) -> SockRef<'_> {
        match self {
            Stream::Tcp(stream) => SockRef::from(stream),
            Stream::Unix(stream) => SockRef::from(stream),
        }
    }

    /// Options of a new connection. Each may fail on a socket that the peer has reset already, which the
    /// first read will say too, so errors are ignored. Keepalive finds a peer that vanished without a
    /// FIN, also while its request waits: after 30 s of silence, 3 probes 10 s apart.
    pub(super) fn tune(&self, send_buffer_bytes: usize) {
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(30))
            .with_interval(Duration::from_secs(10))
            .with_retries(3);
        if let Stream::Tcp(stream) = self {
            let _ = stream.set_nodelay(true); // one event is one segment, not one per delayed ACK
            let _ = self.socket().set_tcp_keepalive(&keepalive);
        }
        if send_buffer_bytes > 0 {
            let _ = self.socket().set_send_buffer_size(send_buffer_bytes);
        }
    }

    /// Tells the peer that nothing more will come.
    pub(super) fn finish_writing(&self) {
        let _ = self.socket().shutdown(Shutdown::Write);
    }

    /// Ends both directions: any later read or write fails at once.
    pub(super) fn cut(&self) {
        let _ = self.socket().shutdown(Shutdown::Both);
    }

    /// Makes close send a reset and free the send buffer at once, instead of leaving an orphan that the
    /// kernel keeps for a peer that does not read.
    pub(super) fn abort_on_close(&self) {
        let _ = self.socket().set_linger(Some(Duration::ZERO));
    }

    pub(super) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(buffer),
            Stream::Unix(stream) => (&mut &*stream).read(buffer),
        }
    }

    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write(bytes),
            Stream::Unix(stream) => (&mut &*stream).write(bytes),
        }
    }
}
