//! Bytes and connections in use, in all and per peer address.
//!
//! The poll thread owns the table. A [`Charge`] may travel to a worker with its request and gives its
//! bytes back where it is dropped, hence the atomics; the decisions are made on the poll thread alone.

use super::stats::WireStats;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What one peer address holds.
#[derive(Default)]
pub(super) struct PeerUse {
    bytes: AtomicUsize,
    connections: AtomicUsize,
}

/// One connection of a peer; counts itself.
pub(super) struct PeerConnection {
    peer: Arc<PeerUse>,
    stats: Arc<WireStats>,
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        self.peer.connections.fetch_sub(1, Relaxed);
    }
}

/// The table of peers with at least one connection or charge.
pub(super) struct Budget {
    peers: HashMap<IpAddr, Arc<PeerUse>>,
    stats: Arc<WireStats>,
    total_max: u64,
    per_peer_max: usize,
    connections_per_peer_max: Option<usize>,
}

impl Budget {
    pub(super) fn new(
        stats: Arc<WireStats>,
        total_max: usize,
        per_peer_max: usize,
        connections_per_peer_max: Option<usize>,
    ) -> Self {
        let total_max = total_max as u64;
        Budget {
            peers: HashMap::new(),
            stats,
            total_max,
            per_peer_max,
            connections_per_peer_max,
        }
    }

    /// Counts a new connection; the flag says whether its peer may have it.
    pub(super) fn connect(&mut self, address: Option<SocketAddr>) -> (PeerConnection, bool) {
        let peer = self.peers.entry(peer_key(address)).or_default().clone();
        let before = peer.connections.fetch_add(1, Relaxed);
        let allowed = self.connections_per_peer_max.is_none_or(|max| before < max);
        (
            PeerConnection {
                peer,
                stats: self.stats.clone(),
            },
            allowed,
        )
    }

    /// Does this peer, or everybody together, hold too much?
    pub(super) fn is_exceeded(&self, connection: &PeerConnection) -> bool {
        self.stats.held_bytes.load(Relaxed) > self.total_max
            || connection.peer.bytes.load(Relaxed) > self.per_peer_max
    }

    /// Forgets peers without connections and charges; called with the sweep.
    pub(super) fn forget_absent(&mut self) {
        self.peers.retain(|_, peer| Arc::strong_count(peer) > 1);
    }
}

impl PeerConnection {
    pub(super) fn charge(&self, bytes: usize) -> Charge {
        let mut charge = Charge {
            peer: self.peer.clone(),
            stats: self.stats.clone(),
            bytes: 0,
        };
        charge.set(bytes);
        charge
    }
}

/// Bytes counted against a peer and the whole until changed or dropped.
pub(super) struct Charge {
    peer: Arc<PeerUse>,
    stats: Arc<WireStats>,
    bytes: usize,
}

impl Charge {
    pub(super) fn set(&mut self, bytes: usize) {
        if bytes >= self.bytes {
            let more = bytes - self.bytes;
            self.peer.bytes.fetch_add(more, Relaxed);
            self.stats.held_bytes.fetch_add(more as u64, Relaxed);
        } else {
            let less = self.bytes - bytes;
            self.peer.bytes.fetch_sub(less, Relaxed);
            self.stats.held_bytes.fetch_sub(less as u64, Relaxed);
        }
        self.bytes = bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// One customer: an IPv4 address, an IPv6 /64, or everybody behind the Unix socket.
fn peer_key(address: Option<SocketAddr>) -> IpAddr {
    match address.map(|a| a.ip().to_canonical()) {
        Some(IpAddr::V6(v6)) => {
            let network = u128::from(v6) >> 64 << 64;
            // Loopback would become the unspecified address, which stands for the Unix socket.
            if v6.is_loopback() {
                IpAddr::V6(v6)
            } else {
                IpAddr::V6(network.into())
            }
        }
        Some(v4) => v4,
        None => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Option<SocketAddr> {
        Some(text.parse().expect("a literal address"))
    }

    #[test]
    fn one_peer_cannot_take_everything() {
        let stats = Arc::new(WireStats::default());
        let mut budget = Budget::new(stats.clone(), 100, 60, Some(2));
        let (first, allowed) = budget.connect(address("10.0.0.1:1"));
        assert!(allowed);
        let (second, allowed) = budget.connect(address("10.0.0.1:2"));
        assert!(allowed);
        let (_third, allowed) = budget.connect(address("10.0.0.1:3"));
        assert!(!allowed);
        let (other, _) = budget.connect(address("10.0.0.2:1"));

        let mut held = first.charge(40);
        assert!(!budget.is_exceeded(&second));
        held.set(61);
        assert!(budget.is_exceeded(&second) && !budget.is_exceeded(&other));
        let more = other.charge(40);
        assert!(budget.is_exceeded(&other), "the whole is exhausted");
        drop((held, more));
        assert_eq!(stats.held_bytes.load(Relaxed), 0);
        drop((first, second, _third, other));
        budget.forget_absent();
        assert!(budget.peers.is_empty());
    }

    #[test]
    fn an_ipv6_customer_is_a_64() {
        assert_eq!(
            peer_key(address("[2001:db8::1]:1")),
            peer_key(address("[2001:db8::ffff]:2"))
        );
        assert_ne!(
            peer_key(address("[2001:db8::1]:1")),
            peer_key(address("[2001:db8:0:1::1]:1"))
        );
        assert_eq!(
            peer_key(address("[::ffff:10.0.0.1]:1")),
            peer_key(address("10.0.0.1:5"))
        );
        assert_ne!(peer_key(None), peer_key(address("[::1]:1")));
    }
}
