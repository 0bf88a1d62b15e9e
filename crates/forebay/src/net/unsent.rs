//! Counters of datagrams that were not sent.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Datagrams of one family that could not be sent, by the kernel's counter names.
#[derive(Debug, Default)]
pub(super) struct OfFamily {
    no_routes: AtomicU64,
    discards: AtomicU64,
}

/// Datagrams of both families that could not be sent.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    pub(super) v4: OfFamily,
    pub(super) v6: OfFamily,
}

impl Unsent {
    /// Counts a datagram without a route: `OutNoRoutes`.
    pub(super) fn count_no_route(&self, to: IpAddr) {
        self.of(to).no_routes.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a datagram that has a route but cannot be sent: `OutDiscards`.
    pub(super) fn count_discard(&self, to: IpAddr) {
        self.of(to).discards.fetch_add(1, Ordering::Relaxed);
    }

    fn of(&self, to: IpAddr) -> &OfFamily {
        if to.is_ipv4() { &self.v4 } else { &self.v6 }
    }
}

impl OfFamily {
    pub(super) fn no_routes(&self) -> u64 {
        self.no_routes.load(Ordering::Relaxed)
    }

    pub(super) fn discards(&self) -> u64 {
        self.discards.load(Ordering::Relaxed)
    }
}
