//! Every limit of the connection layer, with its default. Plain data, no behaviour except
//! the pure rules that turn settings into deadlines and into a connection cap.
//!
//! Owner: built once at start, then shared read-only by the poll thread and the workers.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use std::time::{Duration, Instant};

/// Descriptors kept free for everything that is no client connection: listeners, model files, logs,
/// connections to upstream servers.
const RESERVED_DESCRIPTORS: usize = 64;

/// Limits and listeners of a [`super::WireServer`].
#[derive(Clone, Debug, PartialEq)]
pub struct WireConfig {
    /// What thread names begin with: `http-poll`, `http-worker-0`, `http-ops-0`.
    pub thread_prefix: &'static str,
    /// Where to listen: `127.0.0.1:8080`, `[::1]:8080` or `unix:/path/of/socket`.
    pub listen: Vec<String>,
    /// Threads that run ordinary requests. A stream holds one for its whole life.
    pub workers: usize,
    /// Threads that run only what [`super::Handler::is_ops`] claims.
    pub ops_workers: usize,
    /// Complete requests that may wait for a worker; each of the two worker sets has a queue of this length.
    pub queue: usize,
    /// Most open connections; lowered at start when the process may not have that many descriptors.
    pub max_connections: usize,
    /// Most open connections of one peer address (IPv6: one /64). `None` is right behind a reverse
    /// proxy, where all clients share an address.
    pub max_connections_per_peer: Option<usize>,
    /// From the first byte of a head (or the connect) to its last.
    pub head_timeout: Duration,
    /// Allowance for a body on top of the time that its bytes take at `min_bytes_per_second`.
    pub body_timeout: Duration,
    /// How long a connection may rest between two requests.
    pub idle_timeout: Duration,
    /// Allowance for one event or one answer on top of the time its bytes take at `min_bytes_per_second`.
    pub write_timeout: Duration,
    /// The same for what [`super::Handler::is_ops`] claims. Those answers fit the send buffer of anyone
    /// who reads; there are few workers for them, and a reader that has stopped must not hold one.
    pub ops_write_timeout: Duration,
    /// How long input is discarded after a closing answer, so that the answer is not lost to a reset.
    pub linger: Duration,
    /// Slowest acceptable transfer in either direction; 0 = deadlines do not move with the bytes.
    pub min_bytes_per_second: u64,
    /// Largest request body after decoding.
    pub max_body_bytes: usize,
    /// Largest request head, with its request line.
    pub max_head_bytes: usize,
    /// Bytes of unfinished, queued and running requests, all connections together.
    pub memory_budget_bytes: usize,
    /// The same for one peer address, so that one client can't take it all.
    pub memory_budget_per_peer_bytes: usize,
    /// `SO_SNDBUF` of each connection; 0 leaves the kernel's autotuning, which lets a reader that
    /// stopped swallow up to 4 MB before anybody notices.
    pub send_buffer_bytes: usize,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            thread_prefix: "http",
            listen: vec!["127.0.0.1:8080".into()],
            workers: 64,
            ops_workers: 2,
            queue: 256,
            max_connections: 4096,
            max_connections_per_peer: None,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(10),
            ops_write_timeout: Duration::from_millis(100),
            linger: Duration::from_secs(2),
            min_bytes_per_second: 64 << 10,
            max_body_bytes: 16 << 20,
            max_head_bytes: 32 << 10,
            memory_budget_bytes: 256 << 20,
            memory_budget_per_peer_bytes: 128 << 20,
            send_buffer_bytes: 128 << 10,
        }
    }
}

impl WireConfig {
    /// When a transfer that began at `started` and has moved `bytes` so far is too slow. Each byte buys
    /// time, so a slow line finishes, and a stalled one is cut after `allowance`.
    #[must_use]
    pub fn rate_deadline(&self, started: Instant, allowance: Duration, bytes: usize) -> Instant {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let earned_ms = bytes
            .saturating_mul(1000)
            .checked_div(self.min_bytes_per_second)
            .unwrap_or(0);
        later(
            started,
            allowance.saturating_add(Duration::from_millis(earned_ms)),
        )
    }

    /// The connection cap for a process that may open `descriptors` files; at least 1. The rest of
    /// the process is left its share, which is never more than half.
    #[must_use]
    pub fn connection_cap(&self, descriptors: Option<usize>) -> usize {
        let threads = self.workers + self.ops_workers;
        let room = descriptors.map_or(usize::MAX, |n| {
            n - (threads + RESERVED_DESCRIPTORS).min(n / 2)
        });
        self.max_connections.min(room).max(1)
    }
}

/// `at + wait`, or a year on when the sum can't be represented (`Duration::MAX` as "never").
pub(super) fn later(at: Instant, wait: Duration) -> Instant {
    at.checked_add(wait)
        .unwrap_or(at + Duration::from_secs(365 * 24 * 3600))
}

/// The soft limit on open files; `None` when there is none. `server` has raised it to the hard one
/// where it may.
pub(super) fn descriptor_limit() -> Option<usize> {
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    (soft != RLIM_INFINITY).then(|| usize::try_from(soft).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_buy_time_at_the_minimum_rate() {
        let config = WireConfig {
            min_bytes_per_second: 1000,
            ..WireConfig::default()
        };
        let (start, allowance) = (Instant::now(), Duration::from_secs(5));
        assert_eq!(config.rate_deadline(start, allowance, 0), start + allowance);
        assert_eq!(
            config.rate_deadline(start, allowance, 2500),
            start + Duration::from_millis(7500)
        );
        let fixed = WireConfig {
            min_bytes_per_second: 0,
            ..config
        };
        assert_eq!(
            fixed.rate_deadline(start, allowance, 2500),
            start + allowance
        );
    }

    #[test]
    fn connection_cap_leaves_descriptors_for_the_rest() {
        let config = WireConfig {
            workers: 10,
            ops_workers: 2,
            max_connections: 500,
            ..WireConfig::default()
        };
        assert_eq!(config.connection_cap(None), 500);
        assert_eq!(config.connection_cap(Some(1024)), 500);
        assert_eq!(config.connection_cap(Some(256)), 256 - 12 - 64);
        assert_eq!(config.connection_cap(Some(64)), 32);
        assert_eq!(config.connection_cap(Some(1)), 1);
    }
}
